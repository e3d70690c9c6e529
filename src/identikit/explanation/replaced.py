"""A text with some of its tokens replaced: how far that moves the output that an explanation is of."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from identikit.checks import known_name
from identikit.errors import InputError
from identikit.models.model import Model, Trace
from identikit.models.text_run import TextRun
from identikit.shapes import Bool, Float, Int, Tensor
from identikit.texts.text import EncodedText, TokenBatch

REPLACEMENTS = {"mask": "the mask", "pad": "the padding token", "draw": "other tokens of the texts, drawn at random"}
"""What can take the place of tokens, by name."""

BATCH_TOKENS = 1024
"""Of texts that run together: their logits are the largest thing in memory."""

_POOL = 10_000  # tokens of the data that are drawn from, at most


def seeded_by(*seeds: object) -> torch.Generator:
    """Return a generator of random numbers that depends on these values alone."""
    return torch.Generator().manual_seed(zlib.crc32(repr(seeds).encode()))


@dataclass(frozen=True)
class Replacement:
    """What takes the place of a token: the tokenizer's mask, its padding token, or a draw from the data's tokens.

    `ids` are drawn from, each with the same chance; the mask and the padding token are the only one of theirs.
    """

    name: str
    ids: tuple[int, ...]

    @staticmethod
    def of(model: Model, name: str | None, encoded: Sequence[EncodedText], seed: int) -> "Replacement":
        """Return a replacement by its name; None: the mask where the tokenizer has one, and else a draw."""
        if model.modality != "text":
            raise InputError(f"Tokens are replaced, and {model.name} reads {model.modality}s. Use a model of texts.")
        if any(text.images is not None for text in encoded):
            raise InputError("Tokens are replaced, and those of images cannot be. Pass texts without images.")
        mask = getattr(model.tokenizer, "mask_token_id", None)
        has_mask = mask is not None and mask < model.vocabulary
        default = "mask" if has_mask else "draw"
        name = default if name is None else known_name("replacement", name, tuple(REPLACEMENTS))
        if name == "mask" and not has_mask:
            raise InputError(f"replacement='mask': the tokenizer of {model.name} has no mask. Use 'draw' or 'pad'.")
        if name != "draw":
            return Replacement(name, (model.pad_id if mask is None or name == "pad" else int(mask),))
        pool = []
        for text in encoded:
            pool += [token for token, special in zip(text.ids, text.special, strict=True) if not special]
        if len(set(pool)) < 2:
            raise InputError("replacement='draw': the texts have no two different tokens. Use 'pad', or more texts.")
        order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed)).tolist()
        return Replacement(name, tuple(pool[index] for index in order[:_POOL]))

    def draw(self, ids: Int[Tensor, "n"], seed: int) -> Int[Tensor, "n"]:
        """Return what takes the place of each token of a text; a draw is another token than the one it replaces."""
        if len(self.ids) == 1:
            return torch.full_like(ids, self.ids[0])
        pool = torch.tensor(self.ids)
        generator = seeded_by(seed, ids.tolist())
        substitutes = []
        for token in ids.tolist():
            different = pool[pool != token]
            substitutes.append(different[torch.randint(len(different), (), generator=generator)])
        return torch.stack(substitutes)


class Predicted(NamedTuple):
    """What a model itself predicts of a text: a token or a class, by its number, and the position that explains it."""

    position: int
    choice: int

    @staticmethod
    def of(reading: TextRun) -> "Predicted":
        """Return the next token of a causal model, or a class, which encoders make of the first token."""
        model = reading.model
        logits = None if reading.trace is None else reading.trace.logits
        if logits is None or (logits.ndim == 3 and not model.causal):
            raise InputError(
                f"target='prediction': {model.name} predicts neither a next token nor a class. Leave it out."
            )
        position = len(reading.tokens) - 1 if model.causal else 0
        choices = logits if logits.ndim == 2 else logits[:, position]
        return Predicted(position, int(choices[0].argmax()))

    def probability(self, trace: Trace) -> Float[Tensor, "batch"]:
        """Return how probable the prediction is in each text of a batch."""
        assert trace.logits is not None
        choices = trace.logits if trace.logits.ndim == 2 else trace.logits[:, self.position]
        return choices.double().softmax(-1)[:, self.choice]


@dataclass(frozen=True)
class ReplacedText:
    """A text that was read, and the `substitutes` that can take the place of its tokens.

    Changes are those of its last hidden vectors, or of the probability of a `target`.
    """

    reading: TextRun
    substitutes: Int[Tensor, "n"]
    target: Predicted | None = None

    def changes(self, replaced: Bool[Tensor, "set n"]) -> Float[Tensor, "set output"]:
        """Return how far each set moves each of the last hidden vectors, relative to the vector's own length.

        Of a target it is how far its probability falls, at the one position that explains it.
        """
        model = self.reading.model
        unchanged = self.reading.trace
        assert unchanged is not None
        sets = replaced.split(max(1, BATCH_TOKENS // replaced.shape[1]))
        runs = (model.trace(self._batch_of(some_sets)) for some_sets in sets)
        if self.target is not None:
            drops = [self.target.probability(unchanged) - self.target.probability(run) for run in runs]
            changes = torch.zeros(replaced.shape, dtype=torch.float64)
            changes[:, self.target.position] = torch.cat(drops).cpu()
            return changes
        before = unchanged.hidden[-1].double()
        size = before.norm(dim=-1)
        return torch.cat([(run.hidden[-1].double() - before).norm(dim=-1) / size for run in runs]).cpu()

    def _batch_of(self, replaced: Bool[Tensor, "set n"]) -> TokenBatch:
        """Return the text once for each set, with the tokens of the set replaced."""
        batch = self.reading.batch
        count = len(replaced)
        assert batch.ids is not None
        return replace(
            batch,
            ids=torch.where(replaced, self.substitutes, batch.ids),
            keep=batch.keep.expand(count, -1),
            special=batch.special.expand(count, -1),
            segments=None if batch.segments is None else batch.segments.expand(count, -1),
            tokens=batch.tokens * count,
            words=batch.words * count,
            order=tuple(range(count)),
        )
