"""Rows of attention that are drawn and bounded, in limited time; `estimate.py` says what they tell of all rows.

A row is *free* where other weights give the same output, linearly (its null dimension is above 0). Any other row is
determined and needs no bounds.
"""

import math
import random
import time
from collections.abc import Sequence

import torch

from identikit.attention.captured import Place
from identikit.attention.estimate import BoundedRows, RowSample
from identikit.attention.intervals import EXACTLY, bounds_of
from identikit.attention.quantities import edges_wanted, membership
from identikit.attention.result import EffectiveAttention
from identikit.progress import Progress, silent
from identikit.shapes import Bool, Tensor

ALL = "all"
_GROWTH = 4  # how much larger a batch of rows may be than the last
_LARGEST = 4096  # rows in a batch
_FIRST = 2  # rows of a layer that are bounded first
_CAREFUL = 0.7  # of the time that is left, for the next batch


def bound_rows(
    attention: EffectiveAttention,
    places: Sequence[Place],
    groups: Sequence[Sequence[int]] = (),
    progress: Progress = silent,
    *,
    until: float = math.inf,
) -> BoundedRows:
    """Bound rows, those of a head together: every key and every group in one pass. Unfinished rows are left out.

    A row whose ends take a plain program each is given up `until` then, on the monotonic clock.
    """
    captured = attention.captured()
    n = len(attention.keys)
    members = membership(groups, n)
    wanted = edges_wanted(n, objectives=members)._replace(until=until)
    rows, bounds = bounds_of(captured, places, wanted, bounding=EXACTLY, progress=progress)
    weights = rows.attention[:, :n]
    bounded = BoundedRows(
        torch.tensor(places, dtype=torch.long).reshape(-1, 3),
        weights,
        captured.effective_rows(places),
        bounds.lower[:, :n],
        bounds.upper[:, :n],
        torch.stack([weights @ members.to(weights).mT, bounds.lower[:, n:], bounds.upper[:, n:]], dim=1),
        bounds.order,
        rows.visible[:, :n].sum(-1),
        rows.free,
    )
    finished = ~bounds.gap.isnan().any(-1).cpu()
    return BoundedRows(*(part.cpu() for part in bounded)).some(finished)


def drawn_places(text: str, shape: tuple[int, int, int], rows: int | str, seed: int) -> list[Place]:
    """Draw rows of a text: layer, head and query, in order; the same for the same text (its hash) and seed."""
    total = math.prod(shape)
    chosen: Sequence[int] = range(total)
    if rows != ALL and int(rows) < total:
        chosen = sorted(random.Random(f"{seed} {text}").sample(range(total), int(rows)))
    _, heads, queries = shape
    return [(place // (heads * queries), place // queries % heads, place % queries) for place in chosen]


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
    proportion to how open their determined share still is.
    """
    limit = math.inf if seconds is None else time.monotonic() + seconds
    free = attention.null_dim.cpu() > 0
    waiting = _random_order(free, seed)
    total = int(free.sum())
    parts: list[BoundedRows] = []
    sample = RowSample(free[0].numel(), free.sum((1, 2)), _joined(parts, len(attention.keys), len(groups)))
    done = 0
    size = 1 if seconds is not None else _LARGEST
    batch = _drawn(waiting, sample, size)
    begun = time.monotonic()
    while batch and begun < limit:
        told = _continued(progress, done, total)
        parts.append(bound_rows(attention, sorted(batch), groups, told, until=limit))
        done += len(batch)
        sample = sample._replace(bounded=_joined(parts, len(attention.keys), len(groups)))
        now = time.monotonic()
        fitting = (limit - now) * len(batch) / max(now - begun, 1e-6)
        if fitting < 1:
            break
        size = int(max(1, min(_GROWTH * size, _LARGEST, _CAREFUL * fitting)))
        batch = _drawn(waiting, sample, size)
        begun = now
    return sample


def _drawn(waiting: list[list[Place]], sample: RowSample, size: int) -> list[Place]:
    """Take the next rows: the first of a layer that has none yet, or about `size` where the mean is most open."""
    if size >= sum(map(len, waiting)):
        sizes = [len(places) for places in waiting]
    elif fresh := [layer for layer, free in enumerate(sample.free.tolist()) if len(waiting[layer]) == free > 0]:
        sizes = [0] * len(waiting)
        sizes[max(fresh, key=lambda layer: len(waiting[layer]))] = min(_FIRST, size)
    else:
        open_ = torch.tensor([_openness(sample, layer) * bool(places) for layer, places in enumerate(waiting)])
        sizes = (size * open_ / open_.sum().clamp(min=1e-12)).ceil().int().tolist()
    batch = []
    for places, count in zip(waiting, sizes, strict=True):
        batch += places[:count]
        del places[:count]
    return batch


def _openness(sample: RowSample, layer: int) -> float:
    """Return how open a layer's determined share is: the error of its mean, of which few rows that agree leave some."""
    x = sample.of_layer(layer, sample.bounded.lower.sum(-1))
    m = max(1, len(x))
    spread = float(x.var(correction=0)) if len(x) else 1.0
    return int(sample.free[layer]) * math.sqrt((spread + 1 / (m + 2) ** 2) / m)


def _joined(parts: Sequence[BoundedRows], n: int, groups: int) -> BoundedRows:
    if parts:
        return BoundedRows(*(torch.cat(part) for part in zip(*parts, strict=True)))
    none = torch.zeros(0, n, dtype=torch.float64)
    places = torch.zeros(0, 3, dtype=torch.long)
    count = places[:, 0]
    return BoundedRows(places, none, none, none, none, none.new_zeros(0, 3, groups), count, count, count.bool())


def _continued(progress: Progress, before: int, total: int) -> Progress:
    """Return a progress of part of the rows as one of all of them."""
    return lambda what, done, _: progress(what, before + done, total)


def _random_order(free: Bool[Tensor, "layer head query"], seed: int) -> list[list[Place]]:
    """Return the places of all free rows, those of each layer in a random order."""
    generator = torch.Generator().manual_seed(seed)
    order = []
    for layer, rows in enumerate(free):
        places = rows.nonzero()
        drawn = places[torch.randperm(len(places), generator=generator)].tolist()
        order.append([(layer, head, query) for head, query in drawn])
    return order
