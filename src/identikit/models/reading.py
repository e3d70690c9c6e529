"""Reading texts through a model: batches and the texts in them, what each query sees, and what a change does."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from identikit.errors import InputError
from identikit.maths.visible import Visible, visible_from_mask, visible_window
from identikit.models.model import Model
from identikit.models.tap import AttentionCall, RowMask
from identikit.shapes import Tensor
from identikit.text import Text, TokenBatch, image_digests


class Change(NamedTuple):
    """The largest change of a model's output, of its largest entry; `logits` is None where the model makes none."""

    hidden: float
    logits: float | None


def encoded_batches(
    model: Model, text: Any, *, truncate: bool, max_tokens: int | None = None
) -> Iterator[tuple[TokenBatch, list[Text]]]:
    """Yield padded batches of texts (or of images), each with the texts of its rows."""
    if model.vision:
        batch = model.images(text)
        yield batch, image_digests(batch)
        return
    encoded = model.encode(text, truncate=truncate, max_tokens=max_tokens)
    for batch in model.batches(encoded):
        yield batch, [encoded[index].text for index in batch.order]


def text_alone(batch: TokenBatch, row: int) -> TokenBatch:
    """Return one text of a batch as a batch of its own, without its padding."""

    def part(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[row, batch.rows(row)][None]

    return TokenBatch(
        ids=part(batch.ids),
        keep=batch.keep[row, batch.rows(row)][None],
        special=batch.special[row, batch.rows(row)][None],
        segments=part(batch.segments),
        tokens=(batch.tokens[row],),
        words=(batch.words[row],),
        order=(0,),
        pixels=None if batch.pixels is None else batch.pixels[row : row + 1],
    )


def output_change(model: Model, batch: TokenBatch, visit: Callable[[AttentionCall], Tensor | None]) -> Change:
    """Return how much a model's final hidden states and logits change when `visit` replaces head outputs."""
    before, after = model.trace(batch), model.trace(batch, visit)
    logits = None
    if before.logits is not None and after.logits is not None:
        logits = _largest_change(before.logits, after.logits)
    return Change(_largest_change(before.hidden[-1], after.hidden[-1]), logits)


def _largest_change(before: Tensor, after: Tensor) -> float:
    return float((after.double() - before.double()).abs().max() / before.double().abs().max())


def visible_keys(call: AttentionCall) -> Visible | None:
    """Return who sees what; long masks are read in ranges of rows, never as a whole."""
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
            raise InputError(f"a text of {n} tokens whose mask is not made of runs of keys is too long to be read.")
        starts.append(start)
        stops.append(start + count)
    return Visible(n, places, torch.cat(starts), torch.cat(stops))
