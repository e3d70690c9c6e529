"""How alike two attention maps are, by value and by rank, and how much of an order is certain."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.linalg import vecdot

from identikit.shapes import Bool, Float, Int, Tensor

_LEVEL = 0.95  # of bootstrap intervals
_RESAMPLES = 2000


class PearsonSums(NamedTuple):
    """Sums that give the correlation of two maps, per row or pooled."""

    entries: Tensor
    first: Tensor
    second: Tensor
    first_square: Tensor
    second_square: Tensor
    product: Tensor
    difference_square: Tensor

    def pooled(self, axis: int | None = None) -> "PearsonSums":
        """Add up over one axis (-1: all queries of a head), or over everything."""
        return PearsonSums(*(part.sum() if axis is None else part.sum(axis) for part in self))


def pearson_sums(
    first: Float[Tensor, "head query key"], second: Float[Tensor, "head query key"], visible: Bool[Tensor, "query key"]
) -> PearsonSums:
    """Add up the visible entries of each row of two maps (or of the same rows of both), in float64."""
    x = first.double().masked_fill(~visible, 0)
    y = second.double().masked_fill(~visible, 0)
    apart = x - y
    products = (vecdot(*pair) for pair in ((x, x), (y, y), (x, y), (apart, apart)))  # a map is not written for each
    return PearsonSums(visible.sum(-1).double().expand(len(x), -1), x.sum(-1), y.sum(-1), *products)


def pearson(sums: PearsonSums) -> Float[Tensor, "*part"]:
    r"""Return Pearson's correlation of the entries that were summed.

    $$\rho = \frac{\mathrm{cov}(x, y)}{\sqrt{\mathrm{var}\,x \cdot \mathrm{var}\,y}}$$

    $x$ and $y$ are the visible entries of the two maps (Fig. 1a). It is 1 when the maps are identical,
    even if they are constant (as in a text of one token). Otherwise it is NaN when one of them is constant to rounding,
    or when there are no entries.
    """
    mean_x = sums.first / sums.entries
    mean_y = sums.second / sums.entries
    variance_x = sums.first_square - sums.first * mean_x
    variance_y = sums.second_square - sums.second * mean_y
    varies = (variance_x > 1e-13 * sums.first_square) & (variance_y > 1e-13 * sums.second_square)
    coefficient = (sums.product - sums.first * mean_y) / (variance_x * variance_y).sqrt()
    coefficient = torch.where(varies, coefficient.clamp(-1, 1), torch.nan)
    return torch.where((sums.difference_square == 0) & (sums.entries > 0), 1.0, coefficient)


# Order


Compare = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Given rows, and a first and a second source of each: the most that the second can exceed the first, and the gap; NaN
where that was not found."""

TIE = 1e-9  # what exceeds another by less is as large


class SourceOrder(NamedTuple):
    """How many of a row's strongest sources are in a certain order, and whether it was decided that no more are.

    -1: it is not even decided which source is the strongest.
    """

    sources: Int[Tensor, "*row"]
    decided: Bool[Tensor, "*row"]


def certain_order(
    raw: Float[Tensor, "row source"],
    ends: tuple[Float[Tensor, "row source"], Float[Tensor, "row source"]],
    asked: Bool[Tensor, "row source"],
    compare: Compare | None,
    top: int,
    *,
    scale: Float[Tensor, "row"] | float = 1.0,
) -> SourceOrder:
    """Count the strongest asked sources of each row, up to `top`, that are in this order whatever else may vary.

    A source is certainly above another if the difference of the two is never above 0, but for `TIE` of a row's `scale`.
    The `ends` (least and greatest) settle many pairs. The others are left to `compare`, the likeliest first: where it
    can be above, the rest of the row need not be compared. Where nothing compares, only what the ends show is decided.
    """
    lower, upper = ends
    tie = TIE * torch.as_tensor(scale).to(raw).expand(len(raw))
    strongest = raw.masked_fill(~asked, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    count = asked.sum(-1)
    order = torch.zeros_like(count)
    decided = torch.ones_like(asked[:, 0])
    going = count > 0
    for place in range(min(top, raw.shape[1])):
        going = going & (place < count)
        key = strongest[:, place : place + 1]
        asked = asked.scatter(1, key, False)
        contested = asked & (upper > lower.gather(1, key) + tie[:, None]) & going[:, None]
        likeliest = raw.masked_fill(~contested, -torch.inf).argmax(-1, keepdim=True)
        first = torch.zeros_like(contested).scatter(1, likeliest, True) & contested
        beaten = torch.zeros_like(going)
        open_ = torch.zeros_like(going)
        for some in (first, contested & ~first):
            row, other = (some & ~beaten[:, None]).nonzero().mT
            if compare is None or not len(row):
                open_ |= some.any(-1)
                continue
            ahead, gap = (part.to(raw) for part in compare(row, key[row, 0], other))
            beaten[row[ahead - gap > tie[row]]] = True
            open_[row[~(ahead <= tie[row])]] = True
        decided &= beaten | ~open_
        going = going & ~open_
        order[going] = place + 1
    return SourceOrder(order.masked_fill(~decided & (order == 0), -1), decided)


def ordered_share(
    lower: Float[Tensor, "row source"], upper: Float[Tensor, "row source"], asked: Bool[Tensor, "row source"]
) -> Float[Tensor, "row"]:
    """Return the share of pairs of asked sources whose ends do not overlap; NaN where a row has no pair."""
    above = (lower[:, :, None] >= upper[:, None]) & asked[:, :, None] & asked[:, None]
    above = above | above.mT
    above &= ~torch.eye(lower.shape[1], dtype=torch.bool, device=lower.device)
    count = asked.sum(-1)
    return above.sum((1, 2)) / (count * (count - 1)).double()


def rank_correlation(
    first: Float[Tensor, "row source"], second: Float[Tensor, "row source"], asked: Bool[Tensor, "row source"]
) -> Float[Tensor, "row"]:
    """Return Spearman's rank correlation of the asked sources of each row; NaN where a row of ranks is constant."""
    ranks = []
    for values in (first, second):
        values = values.masked_fill(~asked, torch.inf)
        below = (values[:, :, None] > values[:, None]).sum(-1)
        rank = (below + 0.5 * (values[:, :, None] == values[:, None]).sum(-1)).double().masked_fill(~asked, 0.0)
        ranks.append((rank - rank.sum(-1, keepdim=True) / asked.sum(-1, keepdim=True)).masked_fill(~asked, 0.0))
    x, y = ranks
    return vecdot(x, y) / (vecdot(x, x) * vecdot(y, y)).sqrt()


def mean_over_texts(numbers: Float[Tensor, "text *place"]) -> tuple[Float[Tensor, "*place"], Float[Tensor, "*place"]]:
    """Return the mean over the texts that have a number (not NaN), and its standard error; NaN for fewer than two."""
    count = (~numbers.isnan()).sum(0)
    mean = numbers.nanmean(0)
    variance = (numbers - mean).square().nansum(0) / (count - 1).clamp(min=0)
    return mean, (variance / count).sqrt()


def bootstrap_ends(
    numbers: Float[Tensor, "text *place"], *, seed: int
) -> tuple[Float[Tensor, "*place"], Float[Tensor, "*place"]]:
    """Return the ends of a 95 % bootstrap interval of the mean over texts: percentiles of means of resampled texts.

    NaN counts as no number; a place with fewer than two numbers has no interval.
    """
    generator = torch.Generator().manual_seed(seed)
    count = len(numbers)
    drawn = torch.randint(count, (_RESAMPLES, count), generator=generator)
    times = torch.zeros(_RESAMPLES, count, dtype=torch.float64).scatter_add_(1, drawn, torch.ones(drawn.shape).double())
    known = ~numbers.isnan()
    flat = numbers.double().nan_to_num(0.0).reshape(count, -1)
    means = (times @ flat) / (times @ known.double().reshape(count, -1))
    tails = torch.tensor([(1 - _LEVEL) / 2, (1 + _LEVEL) / 2], dtype=torch.float64)
    low, high = means.nanquantile(tails, dim=0).reshape(2, *numbers.shape[1:])
    few = known.sum(0) < 2
    return low.masked_fill(few, torch.nan), high.masked_fill(few, torch.nan)
