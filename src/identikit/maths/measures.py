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
        return PearsonSums(*(sums.sum() if axis is None else sums.sum(axis) for sums in self))


def pearson_sums(
    first: Float[Tensor, "head query key"], second: Float[Tensor, "head query key"], visible: Bool[Tensor, "query key"]
) -> PearsonSums:
    """Add up the visible entries of each row of two maps (or of the same rows of both), in float64."""
    x = first.double().masked_fill(~visible, 0)
    y = second.double().masked_fill(~visible, 0)
    difference = x - y
    pairs = ((x, x), (y, y), (x, y), (difference, difference))
    products = (vecdot(*pair) for pair in pairs)  # a map is not written for each
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
"""Given rows, and a first and a second source of each: the most by which the second can exceed the first, and the gap;
NaN where this is unknown."""

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
    candidates: Bool[Tensor, "row source"],
    compare: Compare | None,
    top: int,
    *,
    scale: Float[Tensor, "row"] | float = 1.0,
) -> SourceOrder:
    """Count the strongest candidates of each row, up to `top`, that are in this order whatever else may vary.

    A source is certainly above another if the difference of the two is never above 0, but for `TIE` of a row's `scale`.
    The `ends` (least and greatest) settle many pairs. The others are left to `compare`, the likeliest first: where it
    can be above, the rest of the row need not be compared. Without `compare`, only what the ends show is decided.
    """
    lower, upper = ends
    tie = TIE * torch.as_tensor(scale).to(raw).expand(len(raw))
    strongest = raw.masked_fill(~candidates, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    count = candidates.sum(-1)
    order = torch.zeros_like(count)
    decided = torch.ones_like(candidates[:, 0])
    counting = count > 0
    for rank in range(min(top, raw.shape[1])):
        counting = counting & (rank < count)
        key = strongest[:, rank : rank + 1]
        candidates = candidates.scatter(1, key, False)
        contested = candidates & (upper > lower.gather(1, key) + tie[:, None]) & counting[:, None]
        likeliest = raw.masked_fill(~contested, -torch.inf).argmax(-1, keepdim=True)
        likeliest_only = torch.zeros_like(contested).scatter(1, likeliest, True) & contested
        beaten = torch.zeros_like(counting)
        undecided = torch.zeros_like(counting)
        for contestants in (likeliest_only, contested & ~likeliest_only):
            row, rivals = (contestants & ~beaten[:, None]).nonzero().mT
            if compare is None or not len(row):
                undecided |= contestants.any(-1)
                continue
            leads, gap = (numbers.to(raw) for numbers in compare(row, key[row, 0], rivals))
            beaten[row[leads - gap > tie[row]]] = True
            undecided[row[~(leads <= tie[row])]] = True
        decided &= beaten | ~undecided
        counting = counting & ~undecided
        order[counting] = rank + 1
    return SourceOrder(order.masked_fill(~decided & (order == 0), -1), decided)


def ordered_share(
    lower: Float[Tensor, "row source"], upper: Float[Tensor, "row source"], candidates: Bool[Tensor, "row source"]
) -> Float[Tensor, "row"]:
    """Return the share of pairs of candidates whose ends do not overlap; NaN where a row has no pair."""
    above = (lower[:, :, None] >= upper[:, None]) & candidates[:, :, None] & candidates[:, None]
    above = above | above.mT
    above &= ~torch.eye(lower.shape[1], dtype=torch.bool, device=lower.device)
    count = candidates.sum(-1)
    return above.sum((1, 2)) / (count * (count - 1)).double()


def rank_correlation(
    first: Float[Tensor, "row source"], second: Float[Tensor, "row source"], candidates: Bool[Tensor, "row source"]
) -> Float[Tensor, "row"]:
    """Return Spearman's rank correlation of the candidates of each row; NaN where a row of ranks is constant."""
    count = candidates.sum(-1, keepdim=True)

    def centred_ranks(values: Tensor) -> Tensor:
        values = values.masked_fill(~candidates, torch.inf)
        below = (values[:, :, None] > values[:, None]).sum(-1)
        equal = (values[:, :, None] == values[:, None]).sum(-1)
        ranks = (below + 0.5 * equal).double().masked_fill(~candidates, 0.0)
        return (ranks - ranks.sum(-1, keepdim=True) / count).masked_fill(~candidates, 0.0)

    x = centred_ranks(first)
    y = centred_ranks(second)
    return vecdot(x, y) / (vecdot(x, x) * vecdot(y, y)).sqrt()


def mean_over_texts(numbers: Float[Tensor, "text *shape"]) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Return the mean over the texts that have a number (not NaN), and its standard error; NaN for fewer than two."""
    count = (~numbers.isnan()).sum(0)
    mean = numbers.nanmean(0)
    variance = (numbers - mean).square().nansum(0) / (count - 1).clamp(min=0)
    return mean, (variance / count).sqrt()


def bootstrap_ends(
    numbers: Float[Tensor, "text *shape"], *, seed: int
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Return the ends of a 95 % bootstrap interval of the mean over texts: percentiles of means of resampled texts.

    NaN counts as no number; an entry with fewer than two numbers has no interval.
    """
    generator = torch.Generator().manual_seed(seed)
    count = len(numbers)
    drawn = torch.randint(count, (_RESAMPLES, count), generator=generator)
    times = torch.zeros(_RESAMPLES, count, dtype=torch.float64).scatter_add_(1, drawn, torch.ones(drawn.shape).double())
    is_number = ~numbers.isnan()
    flat = numbers.double().nan_to_num(0.0).reshape(count, -1)
    means = (times @ flat) / (times @ is_number.double().reshape(count, -1))
    tails = torch.tensor([(1 - _LEVEL) / 2, (1 + _LEVEL) / 2], dtype=torch.float64)
    low, high = means.nanquantile(tails, dim=0).reshape(2, *numbers.shape[1:])
    too_few = is_number.sum(0) < 2
    return low.masked_fill(too_few, torch.nan), high.masked_fill(too_few, torch.nan)
