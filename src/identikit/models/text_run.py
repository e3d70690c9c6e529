"""Run texts through a model: each text's attention, which keys its queries see, and what a replaced output changes."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from identikit.errors import InputError, ModelError
from identikit.maths.visible import Visible, visible_from_mask, visible_window
from identikit.models.load.check import TOLERANCE, prove_with_images
from identikit.models.model import Model, Split, Trace
from identikit.models.taps.tap import AttentionCall, RowMask, Visitor
from identikit.shapes import Tensor
from identikit.texts.features import Images
from identikit.texts.text import SOURCE, EncodedText, ReadText, TokenBatch, key_batch, single_text


class Change(NamedTuple):
    """The largest change of a model's last `hidden` vectors and of its `logits`, each relative to its largest entry.

    `logits` is None where the model makes none.
    """

    hidden: float
    logits: float | None

    def words(self) -> str:
        """Return the change as the end of a sentence: 'left … bit-identical' or 'changed … by …'."""
        sizes = {"the final hidden states": self.hidden, "the logits": self.logits}
        changed = [f"{name} by {size:.1g}".replace("e-0", "e-") for name, size in sizes.items() if size]
        unchanged = [name for name, size in sizes.items() if size == 0]
        clauses = []
        if changed:
            clauses.append(f"changed {' and '.join(changed)} (relative to the largest entry)")
        if unchanged:
            clauses.append(f"left {' and '.join(unchanged)} bit-identical")
        return " and ".join(clauses)

    def beyond(self, dtype: str) -> str:
        """Return how the sentence goes on where rounding in this dtype does not explain the change, or else nothing."""
        sizes = [size for size in self if size is not None]
        if max(sizes) <= TOLERANCE[getattr(torch, dtype)]:
            return ""
        return f", which is more than the rounding of {dtype} explains by itself"


def _largest_change(before: Tensor | None, after: Tensor | None) -> float | None:
    if before is None or after is None:
        return None
    before = before.double()
    difference = (after.double() - before).abs().max()
    if not torch.isfinite(difference):
        raise ModelError("Comparing two runs of a model: its logits hold NaN or infinity. Use a wider dtype.")
    return 0.0 if difference == 0 else float(difference / before.abs().max())


def visible_keys(call: AttentionCall) -> Visible | None:
    """Return which keys each query sees (None: all); a long mask is read in ranges of rows, never as a whole."""
    n = call.query.shape[2]
    device = call.query.device
    if call.mask is None:
        return None
    if not isinstance(call.mask, RowMask):
        return visible_from_mask(call.mask[0], n)
    if call.mask.plain_causal:
        return visible_window(torch.ones(n, dtype=torch.bool, device=device), after=0)
    keys = torch.arange(call.key.shape[2], device=device)
    starts = []
    stops = []
    for rows in call.row_chunks():
        block = call.visible(rows)[0, 0]
        start = block.byte().argmax(-1)
        stop = start + block.sum(-1)
        if not torch.equal(block, (keys >= start[:, None]) & (keys < stop[:, None])):
            raise InputError(
                f"Reading a text of {n} tokens: its mask is too long to hold and not made of runs of keys. Shorten the "
                "text."
            )
        starts.append(start)
        stops.append(stop)
    return Visible(len(keys), keys, torch.cat(starts), torch.cat(stops))


@dataclass(frozen=True, eq=False)
class TextRun:
    """One text and a model's run on it: its tokens, the attention of chosen layers, and the hidden vectors.

    - `batch`: the text alone, without padding; `text`: as the caller passed it
    - `calls`: the captured attention by layer; `visible`: which keys each query sees there. Both are empty before a run
    - `trace`: the run's inputs, hidden vectors and logits; None before a run, and where it was beside other texts
    - `truncate`: whether the text would have been cut, not refused, had it been too long
    """

    model: Model
    batch: TokenBatch
    text: ReadText
    calls: Mapping[int, AttentionCall]
    visible: Mapping[int, Visible | None]
    trace: Trace | None
    truncate: bool = False

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens of the text."""
        return self.batch.tokens[0]

    @property
    def keys(self) -> tuple[str, ...]:
        """The tokens that its tokens attend to: their own, or those of the source."""
        return key_batch(self.batch, self.model.decoder_attention).tokens[0]

    @property
    def about(self) -> dict[str, object]:
        """What every Result of a text keeps of it."""
        facts = text_facts(self.batch)
        features = self.batch.features
        if features is not None and isinstance(kind := self.model.family.features, Images):
            facts["images"] = [kind.about(self.model.hf.config, self.model.tokenizer, features[0])]
        keys = key_batch(self.batch, self.model.decoder_attention)
        if keys is not self.batch:
            facts[SOURCE] = text_facts(keys)
        return facts

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one; in some causal models the tokens of an image see one another."""
        if self.batch.images is None or self.model.images is None:
            return self.model.causal
        return self.model.causal and not self.model.images.kind.bidirectional

    @contextmanager
    def split(self) -> Iterator[Split]:
        """Take the model apart for this text, without running it again if all layers were captured."""
        run = None
        if self.trace is not None and len(self.calls) == len(self.model.attention_layers):
            run = (self.trace, [self.calls[layer] for layer in sorted(self.calls)])
        with self.model.split(self.batch, run) as split:
            yield split

    def changed_by(self, visit: Visitor) -> Change:
        """Run the model again with `visit` replacing head outputs, and return how much its output changed."""
        before = self.model.trace(self.batch) if self.trace is None else self.trace
        after = self.model.trace(self.batch, visit)
        hidden = _largest_change(before.hidden[-1], after.hidden[-1])
        assert hidden is not None
        return Change(hidden, _largest_change(before.logits, after.logits))


def text_facts(batch: TokenBatch) -> dict[str, Any]:
    """Return what a Result keeps of a batch of one text."""
    words = [list(span) for span in batch.words[0]]
    facts = {"tokens": list(batch.tokens[0]), "special": batch.special[0].tolist(), "words": words}
    return facts if batch.images is None else facts | {"images": list(batch.images.about)}


def join_facts(texts: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Return the facts of several texts as those of one, with all of their tokens one after another."""
    about: dict[str, list[Any]] = {"tokens": [], "special": [], "words": []}
    for facts in texts:
        start = len(about["tokens"])
        about["tokens"] += facts["tokens"]
        about["special"] += facts["special"]
        about["words"] += [[first + start, last + start] for first, last in facts["words"]]
    return about


def rerun_with(text_run: TextRun, model: Model, batch: TokenBatch) -> TextRun:
    """Run a batch of the text through another model over the same weights, and capture all of its layers."""
    trace, [calls], [visible] = _capture(model, batch, model.attention_layers)
    return TextRun(model, batch, text_run.text, calls, visible, trace, text_run.truncate)


def run_texts(
    model: Model, text: object, *, layers: Collection[int], truncate: bool = False, max_tokens: int | None = None
) -> list[TextRun]:
    """Run texts (or images, or sounds) through the model, each once, and keep some layers' attention; in order."""
    encoded = _encode_and_prove(model, text, truncate=truncate, max_tokens=max_tokens)
    runs: dict[int, TextRun] = {}
    for batch in model.batches(encoded):
        trace, calls, visible = _capture(model, batch, layers)
        for row, index in enumerate(batch.order):
            text_trace = trace if len(batch) == 1 else None
            single = single_text(batch, row)
            runs[index] = TextRun(model, single, encoded[index].text, calls[row], visible[row], text_trace, truncate)
    return [runs[index] for index in range(len(encoded))]


def prepare_texts(
    model: Model, text: object, *, truncate: bool = False, max_tokens: int | None = None
) -> list[TextRun]:
    """Encode texts (or images, or sounds), each in a batch of its own, without running the model yet."""
    encoded = _encode_and_prove(model, text, truncate=truncate, max_tokens=max_tokens)
    return [TextRun(model, single.batch(), single.text, {}, {}, None, truncate) for single in encoded]


def _encode_and_prove(model: Model, text: object, *, truncate: bool, max_tokens: int | None) -> list[EncodedText]:
    """Encode texts; the first with images in it proves that the model is read correctly with them, too."""
    encoded = model.encode(text, truncate=truncate, max_tokens=max_tokens)
    with_images = next((single for single in encoded if single.images is not None), None)
    if with_images is not None and (model.proof is None or model.proof_with_images is not model.proof):
        prove_with_images(model, with_images.batch())
        model.proof_with_images = model.proof
    return encoded


def _capture(
    model: Model, batch: TokenBatch, layers: Collection[int]
) -> tuple[Trace, list[dict[int, AttentionCall]], list[dict[int, Visible | None]]]:
    """Run a batch, and return its trace, and each row's calls and visible keys by layer."""
    calls: list[dict[int, AttentionCall]] = [{} for _ in batch.order]
    visible: list[dict[int, Visible | None]] = [{} for _ in batch.order]
    masks: dict[tuple[int, int], tuple[Tensor | RowMask | None, Visible | None]] = {}  # layers may share a mask
    keys = key_batch(batch, model.decoder_attention)

    def visit(call: AttentionCall) -> None:
        if call.layer not in layers:
            return
        device = call.query.device
        for row in range(len(batch)):
            single = call.of_text(row, batch.positions(row).to(device), keys.positions(row).to(device))
            mask_key = (id(call.mask), row)
            if mask_key not in masks:
                masks[mask_key] = (call.mask, visible_keys(single))  # kept alive, so that its id stays its own
            calls[row][call.layer] = single
            visible[row][call.layer] = masks[mask_key][1]

    return model.trace(batch, visit), calls, visible
