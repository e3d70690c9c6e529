"""Read texts through a model: batches and their texts, what each query sees, and what a replaced output changes."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from identikit.errors import InputError
from identikit.maths.visible import Visible, visible_from_mask, visible_window
from identikit.models.model import Model
from identikit.models.tap import AttentionCall, RowMask
from identikit.shapes import Tensor
from identikit.text import Text, TokenBatch, image_digests, text_alone

__all__ = ["Change", "encoded_batches", "output_change", "text_alone", "visible_keys"]


class Change(NamedTuple):
    """The largest change of a model's output, relative to its largest entry; `logits` is None if it makes none."""

    hidden: float
    logits: float | None

    def words(self) -> str:
        """Say the change as the end of a sentence: 'left … bit-identical' or 'changed … by …'."""
        found = {"the final hidden states": self.hidden, "the logits": self.logits}
        same = [what for what, size in found.items() if size == 0]
        moved = [f"{what} by {_short(size)}" for what, size in found.items() if size]
        said = [f"changed {' and '.join(moved)} (relative to the largest entry)"] if moved else []
        return " and ".join([*said, f"left {' and '.join(same)} bit-identical"] if same else said)


def _short(number: float) -> str:
    return f"{number:.1g}".replace("e-0", "e-")


def encoded_batches(
    model: Model, text: Any, *, truncate: bool, max_tokens: int | None = None
) -> Iterator[tuple[TokenBatch, list[Text]]]:
    """Yield padded batches of texts (or of images), each with the texts of its rows."""
    if model.vision:
        batch = model.images(text)
        if max_tokens is not None and batch.lengths[0] > max_tokens:
            raise InputError(
                f"Reading images: {model.name} makes {batch.lengths[0]} tokens of each, and max_tokens allows "
                f"{max_tokens}. An image cannot be cut; leave max_tokens out."
            )
        yield batch, image_digests(batch)
        return
    encoded = model.encode(text, truncate=truncate, max_tokens=max_tokens)
    for batch in model.batches(encoded):
        yield batch, [encoded[index].text for index in batch.order]


def output_change(model: Model, batch: TokenBatch, visit: Callable[[AttentionCall], Tensor | None]) -> Change:
    """Return how much a model's final hidden states and logits change when `visit` replaces head outputs."""
    before, after = model.trace(batch), model.trace(batch, visit)
    logits = None
    if before.logits is not None and after.logits is not None:
        logits = _largest_change(before.logits, after.logits)
    return Change(_largest_change(before.hidden[-1], after.hidden[-1]), logits)


def _largest_change(before: Tensor, after: Tensor) -> float:
    difference = (after.double() - before.double()).abs().max()
    return 0.0 if difference == 0 else float(difference / before.double().abs().max())


def visible_keys(call: AttentionCall) -> Visible | None:
    """Return which keys each query sees (None: all); a long mask is read in ranges of rows, never as a whole."""
    n, device = call.query.shape[2], call.query.device
    if call.mask is None:
        return None
    if not isinstance(call.mask, RowMask):
        return visible_from_mask(call.mask[0], n)
    if call.mask.plain_causal:
        return visible_window(torch.ones(n, dtype=torch.bool, device=device), after=0)
    places = torch.arange(n, device=device)
    starts, stops = [], []
    for rows in call.row_chunks():
        block = call.visible(rows)[0, 0]
        start, count = block.byte().argmax(-1), block.sum(-1)
        if not torch.equal(block, (places >= start[:, None]) & (places < (start + count)[:, None])):
            raise InputError(
                f"Reading a text of {n} tokens: its mask is too long to hold and not made of runs of keys. Shorten the "
                "text."
            )
        starts.append(start)
        stops.append(start + count)
    return Visible(n, places, torch.cat(starts), torch.cat(stops))
