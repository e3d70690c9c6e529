r"""The least and the greatest length of a sum of vectors whose weights lie in a box.

The heads of a layer move independently of each other, so the weights $b_h$ of one edge in all heads lie anywhere in
$\prod_h [l_h, u_h]$. What the edge adds to the layer's output has the length

$$\|\textstyle\sum_h b_h x_h\|, \qquad x_h = v_h H_h,$$

a convex function of $b$. It is greatest at a corner. It is least at a point that coordinate descent finds; for any unit
vector $e$, $\|z\| \ge e \cdot z$, so $\sum_h \min(l_h\,e \cdot x_h, u_h\,e \cdot x_h)$ proves it from below.
"""

from typing import NamedTuple

import torch

from identikit.maths.linalg import BYTES
from identikit.shapes import Bool, Float, Tensor

CORNERS = 12  # weights that are free up to which all corners are tried
_SWEEPS = 200  # of coordinate descent
_SETTLED = 1e-12  # relative change of a sweep that ends it


class NormEnds(NamedTuple):
    """Proven ends of the length of each sum, at most how far they are from attained ones, and which are attained."""

    least: Float[Tensor, "sum"]
    greatest: Float[Tensor, "sum"]
    gap: Float[Tensor, "sum"]
    exact: Bool[Tensor, "sum"]


def norm_of(products: Float[Tensor, "sum vector vector"], weights: Float[Tensor, "sum vector"]) -> Float[Tensor, "sum"]:
    r"""Return $\|\sum_h b_h x_h\|$ from the inner products of the vectors."""
    return torch.einsum("sh,shk,sk->s", weights, products, weights).clamp(min=0).sqrt()


def norm_ends(
    products: Float[Tensor, "sum vector vector"],
    lower: Float[Tensor, "sum vector"],
    upper: Float[Tensor, "sum vector"],
    asked: Bool[Tensor, "sum"],
) -> NormEnds:
    """Find the ends of the lengths of sums of vectors, whose inner products are given, over boxes of weights.

    Of sums that are not asked for, ends are returned that take no search.
    """
    bound, _ = _outer(products, lower, upper)
    ends = NormEnds(torch.zeros_like(bound), bound, bound.clone(), torch.zeros_like(asked))
    searched = asked.nonzero()[:, 0]
    step = max(1, BYTES // (8 << min(CORNERS, lower.shape[1])))
    for some in searched.split(step) if len(searched) else ():
        for every, part in zip(ends, _ends(products[some], lower[some], upper[some]), strict=True):
            every[some] = part
    return ends


def _outer(products: Tensor, lower: Tensor, upper: Tensor) -> tuple[Float[Tensor, "sum"], Float[Tensor, "sum"]]:
    """Return what no sum is longer than, and the length at the middle of the box."""
    sizes = products.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
    centre = norm_of(products, (lower + upper) / 2)
    return centre + ((upper - lower) / 2 * sizes).sum(-1), centre


def _ends(products: Tensor, lower: Tensor, upper: Tensor) -> NormEnds:
    least, above = _least(products, lower, upper)
    corner = norm_of(products, lower)
    bound, centre = _outer(products, lower, upper)
    free = (upper > lower).sum(-1)
    exact = free <= CORNERS
    for count in range(1, CORNERS + 1):
        some = (free == count).nonzero()[:, 0]
        if len(some):
            corner[some] = _greatest_corner(products[some], lower[some], upper[some], count)
    greatest = torch.where(exact, corner, bound)
    gap = torch.maximum(above - least, torch.where(exact, 0.0, greatest - centre))
    return NormEnds(least, greatest, gap, exact)


def _greatest_corner(products: Tensor, lower: Tensor, upper: Tensor, count: int) -> Float[Tensor, "sum"]:
    r"""Try all corners of boxes with `count` free weights: $c^\top D c + 2 c \cdot p + s$ over $c \in \{0, 1\}^k$."""
    width = upper - lower
    place = (width > 0).to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :count]
    every = torch.arange(len(products), device=products.device)[:, None]
    free = width[every, place]
    quadratic = products[every[..., None], place[:, :, None], place[:, None]] * free[:, :, None] * free[:, None]
    linear = torch.einsum("shk,sk->sh", products, lower)[every, place] * free
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * count).reshape(-1, count).to(products)
    pairs = (corners[:, :, None] * corners[:, None]).flatten(1)
    squares = quadratic.flatten(1) @ pairs.mT + 2 * linear @ corners.mT
    return (norm_of(products, lower).square() + squares.amax(-1)).clamp(min=0).sqrt()


def _least(products: Tensor, lower: Tensor, upper: Tensor) -> tuple[Float[Tensor, "sum"], Float[Tensor, "sum"]]:
    """Return a proven bound of the least length from below, and the length that was attained."""
    weights = (lower + upper) / 2
    squares = products.diagonal(dim1=1, dim2=2)
    for _ in range(_SWEEPS):
        before = weights.clone()
        for vector in range(weights.shape[1]):
            size = squares[:, vector]
            slope = (products[:, vector] * weights).sum(-1) - size * weights[:, vector]
            best = torch.where(size > 0, -slope / size, weights[:, vector])
            weights[:, vector] = best.maximum(lower[:, vector]).minimum(upper[:, vector])
        if float((weights - before).abs().max()) <= _SETTLED:
            break
    attained = norm_of(products, weights)
    tiny = torch.finfo(attained.dtype).tiny
    along = torch.einsum("shk,sk->sh", products, weights) / attained[:, None].clamp(min=tiny)
    proven = torch.minimum(lower * along, upper * along).sum(-1)
    return torch.where(attained > 0, proven, 0.0).clamp(min=0).minimum(attained), attained
