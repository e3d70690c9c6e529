"""How much of a text's attention is certain: rows are bounded in random order, as many as the time allows.

A row is *free* where other weights give the same output, linearly (its null dimension is above 0). Any other row is
certain as it is and needs no bounds. Free rows are drawn without replacement, layer by layer in turn, with a fixed
seed. Whether a row is drawn does not depend on what it costs, so what is bounded in time is a random sample.
"""

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from safetensors.torch import load

from identikit.attention.intervals import Bounding, bounds_of, membership
from identikit.attention.result import EffectiveAttention
from identikit.maths.polytope.exact import FEW
from identikit.progress import Progress, silent
from identikit.results.files import tensor_file
from identikit.shapes import Float, Int, Tensor

SECONDS = 20.0  # how long `explain` bounds rows
EDGES_NAMED = 5  # how many edges a list names, each of another head
VISIBLE = 1e-3  # intervals narrower than this, and weights outside one by less, look the same with three digits
SEED = 0
_GROWTH, _LARGEST = 4, 4096  # how much larger a batch of rows may be than the last, and how large


class Sample(NamedTuple):
    """Free rows that were bounded.

    - `places`: layer, head and query of each; `rows`: how many rows a layer has; `free`: how many of them are free
    - `attention`, `effective`, `lower`, `upper`: of every key; `groups`: raw, lower and upper of every group of keys
    - `seen`: how many keys the row sees
    - `strongest`: whether the strongest edge is the strongest in every attention with the same output; NaN: undecided
    """

    rows: int
    free: Int[Tensor, "layer"]
    places: Int[Tensor, "row 3"]
    attention: Float[Tensor, "row key"]
    effective: Float[Tensor, "row key"]
    lower: Float[Tensor, "row key"]
    upper: Float[Tensor, "row key"]
    groups: Float[Tensor, "row 3 group"]
    strongest: Float[Tensor, "row"]
    seen: Int[Tensor, "row"]

    def to_bytes(self) -> bytes:
        """Return it as the content of a safetensors file."""
        named = self._replace(rows=torch.tensor(self.rows))._asdict()  # pyright: ignore[reportArgumentType]
        return tensor_file(named)

    @classmethod
    def from_bytes(cls, content: bytes) -> "Sample":
        """Return what `to_bytes` wrote."""
        tensors = load(content)
        return cls(**{**tensors, "rows": int(tensors["rows"])})


class Mean(NamedTuple):
    """The mean of something over all rows of each layer, and its standard error; NaN where it is not known."""

    mean: Float[Tensor, "layer"]
    stderr: Float[Tensor, "layer"]

    def overall(self) -> tuple[float, float]:
        """Return the mean over the layers that have one, and its standard error."""
        known = ~self.mean.isnan()
        return float(self.mean.nanmean()), float(self.stderr[known].square().sum().sqrt() / max(1, int(known.sum())))


def bounded_rows(
    attention: EffectiveAttention,
    groups: Sequence[Sequence[int]],
    *,
    seconds: float | int | None = SECONDS,
    progress: Progress = silent,
) -> Sample:
    """Bound free rows of all layers and heads in random order until the time is up; None: until all are bounded."""
    free = attention.null_dim.cpu() > 0
    order, total = _random_order(free), int(free.sum())
    objectives = membership(groups, len(attention.tokens))
    found = [_nothing(len(attention.tokens), len(groups))]
    done, size = 0, max(FEW + 1, 2 * len(free))  # two rows of each layer at least
    if order:
        _bounded(attention, sorted(order[:size]), objectives, silent)  # compiling does not count
    started = time.monotonic()
    while batch := sorted(order[done : done + size]):
        begun = time.monotonic()
        found.append(_bounded(attention, batch, objectives, _after(progress, done, total)))
        done += len(batch)
        now = time.monotonic()
        size = min(_GROWTH * size, _LARGEST)
        if seconds is not None:
            size = min(size, int((started + seconds - now) * len(batch) / (now - begun)))
        if size < 1:
            break
    if done < total:
        progress("attention intervals, rows", total, total)
    parts = [torch.cat(part) for part in zip(*found, strict=True)]
    return Sample(free[0].numel(), free.sum((1, 2)), *parts)


def _after(progress: Progress, before: int, total: int) -> Progress:
    """Return a progress of part of the rows as one of all of them."""
    return lambda what, done, _: progress(what, before + done, total)


def _random_order(free: Tensor) -> list[tuple[int, int, int]]:
    """Return the places of all free rows: one of each layer in turn, in a random order."""
    generator = torch.Generator().manual_seed(SEED)
    turns = []
    for layer, rows in enumerate(free):
        places = rows.nonzero()
        drawn = places[torch.randperm(len(places), generator=generator)].tolist()
        ties = torch.rand(len(drawn), generator=generator, dtype=torch.float32).tolist()
        turns += [(turn, tie, layer, *place) for turn, (tie, place) in enumerate(zip(ties, drawn, strict=True))]
    return [(layer, head, query) for _, _, layer, head, query in sorted(turns)]


def _nothing(n: int, groups: int) -> tuple[Tensor, ...]:
    none = torch.zeros(0, n, dtype=torch.float64)
    places = torch.zeros(0, 3, dtype=torch.long)
    return places, none, none, none, none, none.new_zeros(0, 3, groups), none[:, 0], places[:, 0]


def _bounded(
    attention: EffectiveAttention, places: list[tuple[int, int, int]], objectives: Tensor, progress: Progress
) -> tuple[Tensor, ...]:
    """Return what a `Sample` holds of these rows, which are sorted; one that was not finished is left out."""
    source: Any = attention.source
    unlimited = Bounding("exact", seconds=math.inf)
    rows, ends = bounds_of(attention, places, bounding=unlimited, progress=progress)
    heads: dict[tuple[int, int], list[int]] = {}
    for layer, head, query in places:
        heads.setdefault((layer, head), []).append(query)
    keys = range(len(attention.tokens))
    effective = [
        source.read("effective", {"layer": [layer], "head": [head], "query": queries, "key": keys})[0, 0]
        for (layer, head), queries in heads.items()
    ]
    _, together = bounds_of(attention, places, objectives=objectives, bounding=unlimited)
    objectives = objectives.to(rows.attention)
    groups = torch.stack([rows.attention @ objectives.mT, together.lower, together.upper], dim=1)
    strongest = torch.where(ends.order < 0, torch.nan, (ends.order > 0).double())
    parts = (
        rows.attention,
        torch.cat(effective).double(),
        ends.lower,
        ends.upper,
        groups,
        strongest,
        rows.visible.sum(-1),
    )
    finished = ~(ends.gap.isnan().any(-1) | together.gap.isnan().any(-1)).cpu()
    return torch.tensor(places)[finished], *(part.cpu()[finished] for part in parts)


def share_of_rows(sample: Sample, holds: Float[Tensor, "row"]) -> Mean:
    r"""Estimate in what share of each layer's rows something `holds` (1 or 0; NaN is left out); it does in all others.

    As `mean_over_rows`, with the variance $\tilde p (1 - \tilde p)$ of $\tilde p = (k + 1) / (m + 2)$ when it holds in
    k of m rows: rows that all agree do not make a share certain.
    """
    found = mean_over_rows(sample, holds, 1.0)
    errors = []
    for layer, free in enumerate(sample.free.tolist()):
        x = holds[sample.places[:, 0] == layer]
        x = x[~x.isnan()]
        p, m = (float(x.sum()) + 1) / (len(x) + 2), len(x)
        errors.append(
            free / sample.rows * math.sqrt((1 - m / free) * p * (1 - p) / m) if m else float(found.stderr[layer])
        )
    return Mean(found.mean, torch.tensor(errors, dtype=torch.float64))


def mean_over_rows(sample: Sample, values: Float[Tensor, "row"], fixed: Sequence[float] | float) -> Mean:
    r"""Estimate a mean over all rows of each layer from the free rows that were bounded; `fixed` rows have one value.

    $$\hat\mu = \frac{F \bar x + (N - F)\,c}{N}, \qquad
    \widehat{se} = \frac{F}{N}\sqrt{\Bigl(1 - \frac{m}{F}\Bigr)\frac{s^2}{m}}$$

    with $N$ rows in the layer, $F$ of them free, $m$ bounded, $\bar x$ and $s^2$ mean and variance of their `values`
    (NaN is left out) and $c$ the value of a row that is not free (argument `fixed`), or their mean in each layer.
    """
    means, errors = [], []
    known = fixed if isinstance(fixed, Sequence) else [fixed] * len(sample.free)
    for layer, free in enumerate(sample.free.tolist()):
        x = values[sample.places[:, 0] == layer]
        x = x[~x.isnan()]
        share, m = free / sample.rows, len(x)
        own = known[layer]
        means.append(share * float(x.mean()) + (1 - share) * own if m else (torch.nan if free else own))
        if m == free:
            errors.append(0.0)
        else:
            errors.append(share * float(((1 - m / free) * x.var() / m).sqrt()) if m > 1 else torch.nan)
    return Mean(*(torch.tensor(part, dtype=torch.float64) for part in (means, errors)))


def group_bounds(sample: Sample, group: int, raw: Float[Tensor, "layer"]) -> tuple[Mean, Mean]:
    """Return the least and the greatest mean weight that each layer's rows can give to a group of keys.

    `raw` is the mean over all rows. How far below and above it the ends are is what is estimated from the rows that
    were bounded, so the ends always enclose it.
    """
    own, lower, upper = sample.groups[:, :, group].unbind(1)
    below, above = (mean_over_rows(sample, part, 0.0) for part in (own - lower, upper - own))
    return Mean((raw - below.mean).clamp(min=0), below.stderr), Mean((raw + above.mean).clamp(max=1), above.stderr)


def least_certain(sample: Sample) -> list[dict[str, Any]]:
    """Return the edges with the widest intervals, one per head."""
    return _largest(sample, sample.upper - sample.lower)


def outside(sample: Sample, pearson: Float[Tensor, "layer head"]) -> list[dict[str, Any]]:
    """Return the edges whose effective weight is farthest outside the interval, one per head.

    A head whose raw and effective attention correlate at 1.00 is left out.
    """
    beyond = torch.maximum(sample.lower - sample.effective, sample.effective - sample.upper)
    alike = ~(pearson.cpu() < 0.995)[sample.places[:, 0], sample.places[:, 1]]
    return _largest(sample, beyond.masked_fill(alike[:, None], 0.0))


def _largest(sample: Sample, sizes: Float[Tensor, "row key"]) -> list[dict[str, Any]]:
    found: dict[tuple[int, int], dict[str, Any]] = {}
    largest, keys = sizes.max(1) if sizes.numel() else (sizes.new_zeros(0), sizes.new_zeros(0))
    for row in largest.argsort(descending=True, stable=True).tolist():
        layer, head, query = sample.places[row].tolist()
        if float(largest[row]) < VISIBLE or len(found) == EDGES_NAMED:
            break
        key, arrays = int(keys[row]), ("attention", "effective", "lower", "upper")
        raw, effective, lower, upper = (float(getattr(sample, name)[row, key]) for name in arrays)
        edge = {"layer": layer, "head": head, "query": query, "key": key, "raw": raw, "effective": effective}
        found.setdefault((layer, head), edge | {"lower": lower, "upper": upper})
    return list(found.values())
