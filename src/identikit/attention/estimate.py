"""What bounded rows say about all rows of a layer or a head: an estimate with its error, and certain limits.

A row that is not free has a known value. Of the free rows, a random sample was bounded; each other may have any value
from 0 to 1.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from safetensors.torch import load

from identikit.attention.interval_result import strongest_certain
from identikit.attention.result import EffectiveAttention
from identikit.results.files import tensor_file
from identikit.results.words import ShareEstimate, counted, estimate
from identikit.shapes import Bool, Float, Int, Tensor

_PRIOR_ROWS = 2.0  # made-up rows of value 0, and as many of value 1, that are added for the variance
_SMALL_SAMPLE = 8.0  # how much the variance is raised where few rows were bounded, or few were not


class BoundedRows(NamedTuple):
    """Rows of attention with the ends of every key and of groups of keys.

    - `places`: layer, head and query of each; `seen`: how many keys it sees; `free`: whether it is free
    - `attention`, `effective`, `lower`, `upper`: of every key; `groups`: raw, lower and upper of every group of keys
    - `order`: how many of the strongest edges have a determined order; -1: not even the strongest is decided
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
        """Whether the strongest edge is the strongest in every alternative; NaN: not decided."""
        return strongest_certain(self.order)

    def select(self, rows: Tensor) -> "BoundedRows":
        """Return the rows at these indices, on the CPU."""
        return BoundedRows(*(array.cpu()[rows] for array in self))


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
        return tensor_file({"rows": torch.tensor(self.rows), "free rows": self.free, **self.bounded._asdict()})

    @classmethod
    def from_bytes(cls, content: bytes) -> "RowSample":
        """Return what `to_bytes` wrote."""
        tensors = load(content)
        bounded = BoundedRows(*(tensors[name] for name in BoundedRows._fields))
        return cls(int(tensors["rows"]), tensors["free rows"], bounded)

    def of_layer(self, layer: int, values: Float[Tensor, "row"]) -> Float[Tensor, "known"]:
        """Return the known values of a layer's rows."""
        return values[(self.bounded.places[:, 0] == layer) & ~values.isnan()]


class Mean(NamedTuple):
    """The mean of something over all rows, its standard error, and how many free rows were bounded, of how many.

    `mean` and `stderr` are NaN where no free row was bounded. `least` and `most` hold for certain: each row that was
    not bounded counts with 0, or with 1.
    """

    mean: Float[Tensor, "*place"]
    stderr: Float[Tensor, "*place"]
    least: Float[Tensor, "*place"]
    most: Float[Tensor, "*place"]
    rows: Int[Tensor, "*place"]
    free: Int[Tensor, "*place"]

    def ends(self) -> tuple[Float[Tensor, "*place"], Float[Tensor, "*place"]]:
        """Return the ends of two standard errors to either side, no farther than what is certain."""
        margin = (2 * self.stderr).nan_to_num(torch.inf)
        mean = self.mean.nan_to_num(0.5)
        return torch.maximum(self.least, mean - margin), torch.minimum(self.most, mean + margin)

    def overall(self) -> "Mean":
        """Return the mean over the layers, each of which has as many rows as any other.

        Its `least` and `most` are the means of the layers' `ends`: not for certain, but within two standard errors.
        """
        error = self.stderr.square().sum().sqrt() / max(1, len(self.mean))
        least, most = (end.mean() for end in self.ends())
        return Mean(self.mean.mean(), error, least, most, self.rows.sum(), self.free.sum())

    def words(self, form: Callable[[float], str]) -> list[str]:
        """Write each mean with its error, or as a range, and how many free rows it rests on unless that is all."""
        shares = zip(*(array.flatten().tolist() for array in (self.mean, self.stderr, *self.ends())), strict=True)
        counts = zip(self.rows.flatten().tolist(), self.free.flatten().tolist(), strict=True)
        words = []
        for share, (rows, free) in zip(shares, counts, strict=True):
            written = estimate(form)(ShareEstimate(*share))
            words.append(written if rows == free else f"{written} ({rows:,} of {counted(free, 'free row')} bounded)")
        return words


def estimated(
    known_sums: Float[Tensor, "*place"], values: Sequence[Tensor], free: Int[Tensor, "*place"], rows: int
) -> Mean:
    r"""Estimate means over `rows` rows, from the sum of those that are not free and some `values` of those that are.

    $$\hat\mu = \frac{S + F \bar x}{N}, \qquad
    \widehat{se}^2 = \frac{F^2}{N^2} \Bigl(1 - \frac{m}{F}\Bigr)
    \frac{\tilde p - \tilde q^2}{m} \Bigl(1 + \frac{8}{\min(m, F - m)}\Bigr)$$

    with $N$ rows, $F$ of them free, $S$ the sum of the others (argument `known_sums`), $m$ free rows bounded, and
    $\bar x$ the mean of their values, which are 0 to 1. $\tilde p$ and $\tilde q$ are the means of $x^2$ and $x$ with
    two more rows of 0 and two of 1, so that rows which agree do not make a mean certain; the last factor is for few
    rows. The truth is within two standard errors in at least 93 % of draws: a test computes it for shares and simulates
    the rest.
    """
    estimates = []
    for known_sum, x, free_rows in zip(known_sums.flatten().tolist(), values, free.flatten().tolist(), strict=True):
        bounded = len(x)
        total = float(x.sum())
        least = (known_sum + total) / rows
        if bounded == free_rows:
            estimates.append((least, 0.0, least, least))
            continue
        mean = error = math.nan
        if bounded:
            count = bounded + 2 * _PRIOR_ROWS
            variance = (float(x.square().sum()) + _PRIOR_ROWS) / count - ((total + _PRIOR_ROWS) / count) ** 2
            small_sample = 1 + _SMALL_SAMPLE / min(bounded, free_rows - bounded)
            missing_share = 1 - bounded / free_rows
            mean = (known_sum + free_rows * total / bounded) / rows
            error = free_rows / rows * math.sqrt(missing_share * max(0.0, variance) / bounded * small_sample)
        estimates.append((mean, error, least, (known_sum + total + free_rows - bounded) / rows))
    numbers = torch.tensor(estimates, dtype=torch.float64).reshape(-1, 4).mT.unflatten(1, known_sums.shape)
    counts = torch.tensor([len(x) for x in values]).reshape(known_sums.shape)
    mean, stderr, least, most = numbers
    return Mean(mean, stderr, least, most, counts, free)


def mean_by_layer(sample: RowSample, values: Float[Tensor, "row"], fixed: Sequence[float] | float) -> Mean:
    """Estimate a mean over all rows of each layer from `values` of 0 to 1 of the rows that were bounded (NaN: unknown).

    `fixed` is the value of a row that is not free, or their mean in each layer.
    """
    constant = torch.tensor(fixed, dtype=torch.float64).expand(len(sample.free))
    by_layer = [sample.of_layer(layer, values) for layer in range(len(sample.free))]
    return estimated((sample.rows - sample.free) * constant, by_layer, sample.free, sample.rows)


def share_of_rows(sample: RowSample, holds: Float[Tensor, "row"]) -> Mean:
    """Estimate the share of each layer's rows in which something `holds` (1, 0 or NaN); in all others it does."""
    return mean_by_layer(sample, holds, 1.0)


def certain_rows(attention: EffectiveAttention, bounded: BoundedRows) -> Float[Tensor, "layer head query"]:
    """Return the determined share of each row: what a learned sink leaves if it is not free, NaN if not bounded."""
    certain = (1 - attention.sink.double().cpu()).masked_fill(attention.null_dim.cpu() > 0, torch.nan)
    certain[tuple(bounded.places.mT)] = bounded.lower.sum(-1).clamp(max=1.0)
    return certain


def mean_by_head(certain: Float[Tensor, "layer head query"], free: Bool[Tensor, "layer head query"]) -> Mean:
    """Estimate the mean over each head's rows; its free rows were drawn at random, and some are not known (NaN)."""
    bounded = free & ~certain.isnan()
    values = [row[known] for row, known in zip(certain.flatten(0, 1), bounded.flatten(0, 1), strict=True)]
    return estimated(certain.masked_fill(free, 0.0).sum(-1), values, free.sum(-1), certain.shape[-1])


def mean_by_token(certain: Float[Tensor, "layer head query"], free: Bool[Tensor, "layer head query"]) -> Mean:
    """Return the ends of the mean over each token's rows; there is no estimate, as layers are not drawn alike."""
    known_sum = certain.nan_to_num(0.0).sum((0, 1))
    missing = certain.isnan().sum((0, 1))
    rows = certain[..., 0].numel()
    free_rows = free.sum((0, 1))
    mean = (known_sum / rows).masked_fill(missing > 0, torch.nan)
    return Mean(mean, mean * 0, known_sum / rows, (known_sum + missing) / rows, free_rows - missing, free_rows)
