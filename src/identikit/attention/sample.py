"""Rows of attention that are drawn, bounded, and averaged: how certain attention is where not every row is bounded.

A row is *free* where other weights give the same output, linearly (its null dimension is above 0). Any other row is
certain as it is and needs no bounds.
"""

import math
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from safetensors.torch import load

from identikit.attention.captured import Place
from identikit.attention.intervals import EXACTLY, TOP, bounds_of, edges_wanted, membership
from identikit.attention.result import EffectiveAttention
from identikit.progress import Progress, silent
from identikit.results.files import tensor_file
from identikit.shapes import Bool, Float, Int, Tensor

ALL = "all"
_GROWTH = 4  # how much larger a batch of rows may be than the last
_LARGEST = 4096  # rows in a batch
_SMALLEST = 3


class BoundedRows(NamedTuple):
    """Rows of attention with the ends of every key and of groups of keys.

    - `places`: layer, head and query of each; `seen`: how many keys it sees; `free`: whether it is free
    - `attention`, `effective`, `lower`, `upper`: of every key; `groups`: raw, lower and upper of every group of keys
    - `order`: how many of the strongest edges have a certain order; -1: not even the strongest is decided
    """

    places: Int[Tensor, "row 3"]
    attention: Float[Tensor, "row key"]
    effective: Float[Tensor, "row key"]
    lower: Float[Tensor, "row key"]
    upper: Float[Tensor, "row key"]
    groups: Float[Tensor, "row 3 group"]
    order: Int[Tensor, "row"]
    seen: Int[Tensor, "row"]
    free: Bool[Tensor, "row"]

    @property
    def strongest(self) -> Float[Tensor, "row"]:
        """Whether the strongest edge is the strongest in every attention with the same output; NaN: not decided."""
        return torch.where(self.order < 0, torch.nan, (self.order > 0).double())

    def some(self, chosen: Tensor) -> "BoundedRows":
        """Return the chosen rows."""
        return BoundedRows(*(part[chosen] for part in self))


def bound_rows(
    attention: EffectiveAttention,
    places: Sequence[Place],
    groups: Float[Tensor, "group key"],
    progress: Progress = silent,
) -> BoundedRows:
    """Bound rows, those of a head together: every key and every group in one pass. Unfinished rows are left out."""
    captured = attention.captured()
    n = len(attention.tokens)
    wanted = edges_wanted(n, range(n), objectives=groups, top=TOP)
    rows, bounds = bounds_of(captured, places, wanted, bounding=EXACTLY, progress=progress)
    weights = rows.attention[:, :n]
    raw = weights @ groups.to(weights).mT
    found = BoundedRows(
        torch.tensor(places, dtype=torch.long).reshape(-1, 3),
        weights,
        _effective(attention, places),
        bounds.lower[:, :n],
        bounds.upper[:, :n],
        torch.stack([raw, bounds.lower[:, n:], bounds.upper[:, n:]], dim=1),
        bounds.order,
        rows.visible[:, :n].sum(-1),
        rows.free,
    )
    finished = ~bounds.gap.isnan().any(-1).cpu()
    return BoundedRows(*(part.cpu() for part in found)).some(finished)


def _effective(attention: EffectiveAttention, places: Sequence[Place]) -> Float[Tensor, "row key"]:
    """Return rows of effective attention, in float64."""
    captured = attention.captured()
    heads: dict[tuple[int, int], list[int]] = {}
    for layer, head, query in places:
        heads.setdefault((layer, head), []).append(query)
    parts = []
    for (layer, head), queries in heads.items():
        which = captured.positions([head]), captured.positions(queries)
        parts.append(captured.layers[layer].effective(*which, slice(None))[0].double())
    return torch.cat(parts)


def drawn_places(text: str, shape: tuple[int, int, int], rows: int | str, seed: int) -> list[Place]:
    """Draw rows of a text: layer, head and query, in order; the same for the same text (its hash) and seed."""
    total = math.prod(shape)
    chosen: Sequence[int] = range(total)
    if rows != ALL and int(rows) < total:
        chosen = sorted(random.Random(f"{seed} {text}").sample(range(total), int(rows)))
    _, heads, queries = shape
    return [(place // (heads * queries), place // queries % heads, place % queries) for place in chosen]


class RowSample(NamedTuple):
    """Free rows of a text that were bounded, drawn at random by layer.

    - `rows`: how many rows a layer has; `free`: how many of them are free, by layer
    - `bounded`: those that were bounded
    """

    rows: int
    free: Int[Tensor, "layer"]
    bounded: BoundedRows

    def to_bytes(self) -> bytes:
        """Return it as the content of a safetensors file."""
        named = {"rows": torch.tensor(self.rows), "free rows": self.free, **self.bounded._asdict()}
        return tensor_file(named)

    @classmethod
    def from_bytes(cls, content: bytes) -> "RowSample":
        """Return what `to_bytes` wrote."""
        tensors = load(content)
        bounded = BoundedRows(*(tensors[name] for name in BoundedRows._fields))
        return cls(int(tensors["rows"]), tensors["free rows"], bounded)

    def of_layer(self, layer: int, values: Float[Tensor, "row"]) -> Float[Tensor, "some"]:
        """Return the values of a layer's rows that are known."""
        own = values[self.bounded.places[:, 0] == layer]
        return own[~own.isnan()]


def sample_rows(
    attention: EffectiveAttention,
    groups: Sequence[Sequence[int]],
    *,
    seconds: float | None,
    seed: int,
    progress: Progress = silent,
) -> RowSample:
    """Bound free rows of all layers and heads in random order until the time is up; None: until all are bounded.

    They are drawn without replacement, layer by layer in turn. Whether a row is drawn does not depend on what it costs,
    so what is bounded in time is a random sample.
    """
    free = attention.null_dim.cpu() > 0
    order = _random_order(free, seed)
    objectives = membership(groups, len(attention.tokens))
    parts: list[BoundedRows] = []
    size = max(_SMALLEST, 2 * len(free))  # two rows of each layer at least
    if order:
        bound_rows(attention, sorted(order[:size]), objectives)  # compiling does not count
    started = time.monotonic()
    done = 0
    while batch := sorted(order[done : done + size]):
        begun = time.monotonic()
        parts.append(bound_rows(attention, batch, objectives, _continued(progress, done, len(order))))
        done += len(batch)
        now = time.monotonic()
        size = min(_GROWTH * size, _LARGEST)
        if seconds is not None:
            size = min(size, int((started + seconds - now) * len(batch) / (now - begun)))
        if size < 1:
            break
    if done < len(order):
        progress("attention intervals, rows", len(order), len(order))
    bounded = _joined(parts, len(attention.tokens), len(groups))
    return RowSample(free[0].numel(), free.sum((1, 2)), bounded)


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


def _random_order(free: Bool[Tensor, "layer head query"], seed: int) -> list[Place]:
    """Return the places of all free rows: one of each layer in turn, in a random order."""
    generator = torch.Generator().manual_seed(seed)
    turns = []
    for layer, rows in enumerate(free):
        places = rows.nonzero()
        drawn = places[torch.randperm(len(places), generator=generator)].tolist()
        ties = torch.rand(len(drawn), generator=generator, dtype=torch.float32).tolist()
        turns += [(turn, tie, layer, *place) for turn, (tie, place) in enumerate(zip(ties, drawn, strict=True))]
    return [(layer, head, query) for _, _, layer, head, query in sorted(turns)]


# What a sample says about all rows


class Mean(NamedTuple):
    """The mean of something over all rows of each layer, and its standard error; NaN where it is not known."""

    mean: Float[Tensor, "layer"]
    stderr: Float[Tensor, "layer"]

    def overall(self) -> tuple[float, float]:
        """Return the mean over the layers that have one, and its standard error."""
        known = ~self.mean.isnan()
        return float(self.mean.nanmean()), float(self.stderr[known].square().sum().sqrt() / max(1, int(known.sum())))


def mean_over_rows(sample: RowSample, values: Float[Tensor, "row"], fixed: Sequence[float] | float) -> Mean:
    r"""Estimate a mean over all rows of each layer from the free rows that were bounded; `fixed` rows have one value.

    $$\hat\mu = \frac{F \bar x + (N - F)\,c}{N}, \qquad
    \widehat{se} = \frac{F}{N}\sqrt{\Bigl(1 - \frac{m}{F}\Bigr)\frac{s^2}{m}}$$

    with $N$ rows in the layer, $F$ of them free, $m$ bounded, $\bar x$ and $s^2$ mean and variance of their `values`
    (NaN is left out) and $c$ the value of a row that is not free (argument `fixed`), or their mean in each layer.
    """
    means = []
    errors = []
    by_layer = fixed if isinstance(fixed, Sequence) else [fixed] * len(sample.free)
    for layer, (free, constant) in enumerate(zip(sample.free.tolist(), by_layer, strict=True)):
        x = sample.of_layer(layer, values)
        share = free / sample.rows
        if len(x):
            means.append(share * float(x.mean()) + (1 - share) * constant)
        else:
            means.append(math.nan if free else constant)
        if len(x) == free:
            errors.append(0.0)
        elif len(x) > 1:
            errors.append(share * float(((1 - len(x) / free) * x.var() / len(x)).sqrt()))
        else:
            errors.append(math.nan)
    return Mean(torch.tensor(means, dtype=torch.float64), torch.tensor(errors, dtype=torch.float64))


def share_of_rows(sample: RowSample, holds: Float[Tensor, "row"]) -> Mean:
    r"""Estimate in what share of each layer's rows something `holds` (1 or 0; NaN is left out); it does in all others.

    As `mean_over_rows`, with the variance $\tilde p (1 - \tilde p)$ of $\tilde p = (k + 1) / (m + 2)$ when it holds in
    k of m rows: rows that all agree do not make a share certain.
    """
    estimate = mean_over_rows(sample, holds, 1.0)
    errors = estimate.stderr.clone()
    for layer, free in enumerate(sample.free.tolist()):
        x = sample.of_layer(layer, holds)
        if len(x):
            p = (float(x.sum()) + 1) / (len(x) + 2)
            errors[layer] = free / sample.rows * math.sqrt((1 - len(x) / free) * p * (1 - p) / len(x))
    return Mean(estimate.mean, errors)
