"""How alike two attention maps are: Pearson's correlation over visible entries, from sums that add up over rows."""

from typing import NamedTuple

import torch
from torch.linalg import vecdot

from identikit.shapes import Bool, Float, Tensor


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
