"""Rows of attention, drawn at random and bounded in limited time; `estimate` generalises from them to all rows.

A row is *free* where other weights give the same output, linearly (its null dimension is above 0). Any other row is
determined and needs no bounds.
"""

import math
import random
import time
from collections.abc import Sequence

import torch

from identikit.attention.captured import RowIndex
from identikit.attention.estimate import BoundedRows, RowSample
from identikit.attention.intervals import EXACTLY, bounds_of
from identikit.attention.quantities import key_weights, membership
from identikit.attention.result import EffectiveAttention
from identikit.progress import Progress, silent
from identikit.shapes import Bool, Tensor

ALL = "all"
_GROWTH = 4  # how much larger a batch of rows may be than the last
_LARGEST_BATCH = 4096  # rows
_FIRST_ROWS = 2  # of a layer: they are bounded before others
_TIME_USED = 0.7  # share of the remaining time that the next batch may take


def bound_rows(
    attention: EffectiveAttention,
    row_indices: Sequence[RowIndex],
    groups: Sequence[Sequence[int]] = (),
    progress: Progress = silent,
    *,
    until: float = math.inf,
) -> BoundedRows:
    """Bound rows, those of a head together: every key and every group in one pass. Unfinished rows are left out.

    After `until`, on the monotonic clock, rows that need one plain program per end are given up.
    """
    captured = attention.captured()
    n = len(attention.keys)
    members = membership(groups, n)
    question = key_weights(n, objectives=members)._replace(until=until)
    rows, bounds = bounds_of(captured, row_indices, question, bounding=EXACTLY, progress=progress)
    weights = rows.attention[:, :n]
    bounded = BoundedRows(
        places=torch.tensor(row_indices, dtype=torch.long).reshape(-1, 3),
        attention=weights,
        effective=captured.effective_rows(row_indices),
        lower=bounds.lower[:, :n],
        upper=bounds.upper[:, :n],
        groups=torch.stack([weights @ members.to(weights).mT, bounds.lower[:, n:], bounds.upper[:, n:]], dim=1),
        order=bounds.order,
        seen=rows.visible[:, :n].sum(-1),
        free=rows.free,
    )
    finished = ~bounds.gap.isnan().any(-1).cpu()
    return bounded.select(finished)


def drawn_rows(text: str, shape: tuple[int, int, int], count: int | str, seed: int) -> list[RowIndex]:
    """Draw rows of a text: layer, head and query, in order; the same for the same text (its hash) and seed."""
    total = math.prod(shape)
    numbers: Sequence[int] = range(total)
    if count != ALL and int(count) < total:
        numbers = sorted(random.Random(f"{seed} {text}").sample(range(total), int(count)))
    _, heads, queries = shape
    return [(number // (heads * queries), number // queries % heads, number % queries) for number in numbers]


def sample_rows(
    attention: EffectiveAttention,
    groups: Sequence[Sequence[int]],
    *,
    seconds: float | None,
    seed: int,
    progress: Progress = silent,
) -> RowSample:
    """Bound free rows of all layers and heads until the time is up; None: until all are bounded.

    Within a layer rows are drawn at random without replacement, whatever they cost, so those of a layer are a random
    sample. The first are two of each layer, one layer after the other while there is time; the others go to layers in
    proportion to how uncertain their determined share still is.
    """
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    free = attention.null_dim.cpu() > 0
    waiting = _random_order(free, seed)
    total = int(free.sum())
    n = len(attention.keys)
    batches: list[BoundedRows] = []
    sample = RowSample(free[0].numel(), free.sum((1, 2)), _join_batches(batches, n, len(groups)))
    done = 0
    size = 1 if seconds is not None else _LARGEST_BATCH
    batch = _take_batch(waiting, sample, size)
    started = time.monotonic()
    while batch and started < deadline:
        whole_progress = _progress_after(progress, done, total)
        batches.append(bound_rows(attention, sorted(batch), groups, whole_progress, until=deadline))
        done += len(batch)
        sample = sample._replace(bounded=_join_batches(batches, n, len(groups)))
        now = time.monotonic()
        affordable = (deadline - now) * len(batch) / max(now - started, 1e-6)
        if affordable < 1:
            break
        size = int(max(1, min(_GROWTH * size, _LARGEST_BATCH, _TIME_USED * affordable)))
        batch = _take_batch(waiting, sample, size)
        started = now
    return sample


def _take_batch(waiting: list[list[RowIndex]], sample: RowSample, size: int) -> list[RowIndex]:
    """Take the next rows: the first of a layer that has none yet, or about `size` from the most uncertain layers."""
    lengths = list(map(len, waiting))
    fresh = [layer for layer, free in enumerate(sample.free.tolist()) if lengths[layer] == free > 0]
    if size >= sum(lengths):
        counts = lengths
    elif fresh:
        counts = [0] * len(waiting)
        counts[max(fresh, key=lengths.__getitem__)] = min(_FIRST_ROWS, size)
    else:
        errors = torch.tensor([_uncertainty(sample, layer) * (length > 0) for layer, length in enumerate(lengths)])
        counts = (size * errors / errors.sum().clamp(min=1e-12)).ceil().int().tolist()
    batch = []
    for rows, count in zip(waiting, counts, strict=True):
        batch += rows[:count]
        del rows[:count]
    return batch


def _uncertainty(sample: RowSample, layer: int) -> float:
    """Return the error of a layer's determined share; a few rows that agree do not make it 0."""
    shares = sample.of_layer(layer, sample.bounded.lower.sum(-1))
    count = max(1, len(shares))
    spread = float(shares.var(correction=0)) if len(shares) else 1.0
    return int(sample.free[layer]) * math.sqrt((spread + 1 / (count + 2) ** 2) / count)


def _join_batches(batches: Sequence[BoundedRows], n: int, groups: int) -> BoundedRows:
    if batches:
        return BoundedRows(*map(torch.cat, zip(*batches, strict=True)))
    weights = torch.zeros(0, n, dtype=torch.float64)
    places = torch.zeros(0, 3, dtype=torch.long)
    count = places[:, 0]
    empty_groups = weights.new_zeros(0, 3, groups)
    return BoundedRows(places, weights, weights, weights, weights, empty_groups, count, count, count.bool())


def _progress_after(progress: Progress, before: int, total: int) -> Progress:
    """Return a function that counts the rows of a batch after those `before` it."""
    return lambda what, done, _: progress(what, before + done, total)


def _random_order(free: Bool[Tensor, "layer head query"], seed: int) -> list[list[RowIndex]]:
    """Return all free rows, those of each layer in a random order."""
    generator = torch.Generator().manual_seed(seed)
    order = []
    for layer, of_layer in enumerate(free):
        rows = of_layer.nonzero()
        shuffled = rows[torch.randperm(len(rows), generator=generator)].tolist()
        order.append([(layer, head, query) for head, query in shuffled])
    return order
