r"""The attention of least norm on the simplex with the same output, for many rows at once (end of section 3.4).

For a row with attention $a$ and the basis $U$ of its set $P(a)$ (`polytope.Rows`), with $b = U^\top a$,

$$\min \tfrac12\|a'\|^2 \quad \text{subject to} \quad U^\top a' = b, \; a' \ge 0$$

Its dual has one unknown per column of $U$ and is smooth:

$$\max_y \; y \cdot b - \tfrac12\|\max(0, Uy)\|^2, \qquad a' = \max(0, Uy)$$

An interior-point path leads near the solution in some ten to twenty steps, however sharp the attention is. Newton's
method on the dual ends it: its Hessian matrix is $U_A^\top U_A$ over the keys $A$ with a positive weight, its steps go
to the best point of their line, which is found exactly, and once $A$ is right one step is enough. (Newton's method
alone takes some ten steps for most rows, but over a hundred where few keys keep any weight.) A step of either costs one
matrix product and one Cholesky factor per row.

Every row is certified: with $a' = \max(0, Uy)$ all conditions of optimality hold exactly but $U^\top a' = b$, and that
is measured. Rows that fail go to the row-wise method, `intervals.minimum_norm`. Everything is float64 torch, on the
device of the rows.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.linalg import cholesky_ex

from identikit.errors import IdentikitError
from identikit.maths.linalg import BYTES
from identikit.maths.polytope import one_row as intervals
from identikit.maths.polytope.rows import Rows
from identikit.shapes import Bool, Float, Int, Tensor

CERTIFIED = 1e-10  # of ‖Uᵀa' − b‖∞ and of the duality gap, in coordinates that are at most 1
_TARGET = 1e-11  # of ‖Uᵀa' − b‖∞: a row is done when it is there and a step no longer halves it
_DAMPING = 1e-4  # of the gradient's size, added to the Hessian's diagonal
_FLOOR = 1e-15  # the least damping
_STEPS = 80  # of Newton's method, at most
_PATH, _NEAR, _RIDGE = 40, 1e-8, 1e-13  # the path's steps, where it ends, and what keeps its matrices invertible
_SHORT_OF_THE_WALL = 0.9995  # the share of the way to the first weight of 0 that a step of the path may go
_TOGETHER = 8  # rows from which a shared basis is worth its own loop on a processor


class _Programs(NamedTuple):
    """Rows with their $U$, which they share or each have of their own, $b$, the keys that each sees, and $a$."""

    basis: Float[Tensor, "*row key rank"]
    products: Float[Tensor, "key _"] | None
    right: Float[Tensor, "row rank"]
    visible: Bool[Tensor, "row key"]
    attention: Float[Tensor, "row key"]

    def some(self, chosen: Tensor) -> "_Programs":
        own = self.basis if self.shared else self.basis[chosen]
        return _Programs(own, self.products, self.right[chosen], self.visible[chosen], self.attention[chosen])

    @property
    def shared(self) -> bool:
        return self.basis.ndim == 2

    def scores(self, y: Float[Tensor, "row rank"]) -> Float[Tensor, "row key"]:
        """Compute $Uy$."""
        return y @ self.basis.mT if self.shared else (self.basis @ y[..., None])[..., 0]

    def coordinates(self, weights: Float[Tensor, "row key"]) -> Float[Tensor, "row rank"]:
        r"""Compute $U^\top a'$."""
        return weights @ self.basis if self.shared else (weights[:, None] @ self.basis)[:, 0]

    def grams(self, weights: Float[Tensor, "row key"]) -> Float[Tensor, "row rank rank"]:
        r"""Compute $\sum_m w_m u_m u_m^\top$ of each row; for a shared basis this is one product of matrices."""
        if self.products is None:
            return (self.basis * weights[..., None]).mT @ self.basis
        return (weights @ self.products).unflatten(-1, (-1, self.basis.shape[1]))

    def weights(self, y: Float[Tensor, "row rank"]) -> Float[Tensor, "row key"]:
        r"""Compute $a' = \max(0, Uy)$."""
        return self.scores(y).clamp(min=0).masked_fill(~self.visible, 0)

    def certified(self, y: Float[Tensor, "row rank"]) -> Bool[Tensor, "row"]:
        r"""Tell which rows are solved.

        The output is off by $r = U^\top a' - b$, with $a'$ brought to sum 1 at the end, and the duality gap is
        $\|a'\|^2 - y \cdot b = y \cdot r$.
        """
        weights = self.weights(y)
        gap = (y * (self.coordinates(weights) - self.right)).sum(-1)
        missing = self.coordinates(weights / weights.sum(-1, keepdim=True)) - self.right
        return (missing.abs().amax(-1) <= CERTIFIED) & (gap.abs() <= CERTIFIED)


def least_norm(rows: Rows) -> Float[Tensor, "row key"]:
    """Find the attention of least Euclidean norm in the set of each row; a row that is not free is its own."""
    found = rows.attention.clone()
    for at, programs in _divided(rows):
        found[at] = _least(programs)
    return found


def _divided(rows: Rows) -> Iterator[tuple[Int[Tensor, "row_"], _Programs]]:
    """Yield the free rows in parts that fit in memory.

    On a processor, rows that share a basis go together if they are many. Others, and on a GPU all, go each with a copy
    of theirs, so that few large steps do what many small ones would.
    """
    n, width = rows.basis.shape[1:]
    fits = max(1, BYTES // (8 * (3 * width * width + 16 * n)))
    pooled = rows.free.clone()
    if rows.attention.device.type == "cpu" and n * width * width <= BYTES:
        groups, counts = rows.group[rows.free].unique(return_counts=True)
        for group in groups[counts >= _TOGETHER].tolist():
            mine = rows.free & (rows.group == group)
            basis = rows.basis[group]
            basis = basis[:, basis.any(0)]
            products = (basis[:, :, None] * basis[:, None, :]).flatten(1)
            for at in mine.nonzero()[:, 0].split(fits):
                attention = rows.attention[at]
                yield at, _Programs(basis, products, attention @ basis, rows.visible[at], attention)
            pooled &= ~mine
    for at in pooled.nonzero()[:, 0].split(max(1, BYTES // (24 * n * width))):
        attention, basis = rows.attention[at], rows.basis[rows.group[at]]
        right = (attention[:, None] @ basis)[:, 0]
        yield at, _Programs(basis, None, right, rows.visible[at], attention)


def _least(programs: _Programs) -> Float[Tensor, "row key"]:
    """Solve programs together, and those without a certificate row by row."""
    y = _newton(programs, _interior(programs), _STEPS)
    found = programs.weights(y)
    found = found / found.sum(-1, keepdim=True)
    for row in (~programs.certified(y)).nonzero()[:, 0].tolist():
        found[row] = _one_row(programs, row)
    return found


def _solve(
    gram: Float[Tensor, "row rank rank"], damping: Float[Tensor, "row 1"], right: Float[Tensor, "row rank"]
) -> Float[Tensor, "row rank"]:
    gram.diagonal(dim1=-2, dim2=-1).add_(damping)
    return torch.cholesky_solve(right[..., None], cholesky_ex(gram).L)[..., 0]


def _newton(programs: _Programs, y: Float[Tensor, "row rank"], steps: int) -> Float[Tensor, "row rank"]:
    """Climb the dual from `y`; return the best point of each row."""
    best, error = y.clone(), torch.full_like(y[:, 0], torch.inf)
    at = torch.arange(len(y), device=y.device)
    for step in range(steps + 1):
        weights = programs.weights(y)
        gradient = programs.right - programs.coordinates(weights)
        size = gradient.abs().amax(-1).maximum((y * gradient).sum(-1).abs())
        before, better = error[at], size < error[at]
        best[at[better]], error[at[better]] = y[better], size[better]
        going = (size > _TARGET) | (size < before / 2) & (size > 0)
        if step == steps or not bool(going.any()):
            break
        if not bool(going.all()):
            at, programs, y = at[going], programs.some(going), y[going]
            weights, gradient, size = weights[going], gradient[going], size[going]
        hessian = programs.grams((weights > 0).to(y))
        direction = _solve(hessian, (_DAMPING * size).clamp(min=_FLOOR)[:, None], gradient)
        y = y + _farthest(programs, y, direction)[:, None] * direction
    return best


def _farthest(
    programs: _Programs, y: Float[Tensor, "row rank"], direction: Float[Tensor, "row rank"]
) -> Float[Tensor, "row"]:
    r"""Find the step $t \ge 0$ to the best point of the line $y + t\,d$.

    With $z = Uy$ and $w = Ud$, the derivative $d \cdot b - \sum_m \max(0, z_m + t w_m)\,w_m$ falls with t, and it is
    linear between the steps $-z_m / w_m$ where a key gains or loses its weight. Sorted, their running sums give it
    everywhere, and the step is where it reaches 0.
    """
    z, w = programs.scores(y), programs.scores(direction).masked_fill(~programs.visible, 0)
    turn = -z / w
    turn = torch.where(turn > 0, turn, torch.inf)  # not NaN, where 0 is divided by 0
    on = (z > 0) | ((z == 0) & (w > 0))
    turn, order = turn.sort(-1)
    sign = torch.where(on, -1.0, 1.0)

    def sums(term: Tensor) -> Tensor:
        first = (term * on).sum(-1, keepdim=True)
        return torch.cat([first, first + (term * sign).gather(-1, order).cumsum(-1)], -1)

    gain, slope = (direction * programs.right).sum(-1, keepdim=True) - sums(z * w), sums(w * w)
    end = torch.nn.functional.pad(turn, (0, 1), value=torch.inf)
    piece = ((gain - end * slope <= 0) | end.isinf()).byte().argmax(-1, keepdim=True)
    low = torch.nn.functional.pad(turn, (1, 0)).gather(-1, piece)
    low, high = low.nan_to_num(posinf=0.0), end.gather(-1, piece)
    step = (gain / slope).gather(-1, piece)
    step = torch.where(step.isfinite(), step, torch.where(high.isfinite(), high, low))
    return step.clamp(min=low, max=high)[:, 0]


class _Point(NamedTuple):
    """A point near the central path: $a'$, $s$ and $y$."""

    a: Float[Tensor, "row key"]
    s: Float[Tensor, "row key"]
    y: Float[Tensor, "row rank"]


def _interior(programs: _Programs) -> Float[Tensor, "row rank"]:
    r"""Follow the central path of the program to its end, near enough for `_newton`; return $y$ of each row.

    On the path, $a' - Uy - s = 0$, $U^\top a' = b$ and $a'_m s_m = \mu$. It ends where $\mu = 0$; before that, $a'$ and
    $s$ are positive. Mehrotra's method takes a step to the end, and from what it finds there a better one.
    """
    count = programs.visible.sum(-1, keepdim=True)
    a = torch.where(programs.visible, programs.attention.maximum(0.1 / count), 1.0)
    point = _Point(a, torch.where(programs.visible, 1 / count, 1.0).to(a), torch.zeros_like(programs.right))
    best, nearest = point.y.clone(), torch.full_like(point.y[:, 0], torch.inf)
    at = torch.arange(len(best), device=best.device)
    for _ in range(_PATH):
        point, distance = _step(programs, point)
        better = (distance < nearest[at]) & point.y.isfinite().all(-1)
        best[at[better]], nearest[at[better]] = point.y[better], distance[better]
        going = distance > _NEAR  # not NaN: a row that breaks down keeps its best
        if not bool(going.any()):
            break
        if not bool(going.all()):
            at, programs, point = at[going], programs.some(going), _Point(*(part[going] for part in point))
    return best


def _step(programs: _Programs, point: _Point) -> tuple[_Point, Float[Tensor, "row"]]:
    """Take one step towards the end of the path; return the point and how far from the end the step began."""
    a, s, y = point
    seen = programs.visible.to(a)
    off, missing = (a - programs.scores(y) - s) * seen, programs.coordinates(a * seen) - programs.right
    mu = (a * s * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)
    pull = seen * a / (a + s)
    gram = programs.grams(pull)
    gram.diagonal(dim1=-2, dim2=-1).add_(_RIDGE)
    factor = cholesky_ex(gram).L

    def move(wanted: Tensor) -> _Point:
        right = programs.coordinates(pull * (off - wanted / a)) - missing
        dy = torch.cholesky_solve(right[..., None], factor)[..., 0]
        da = pull * (programs.scores(dy) - off + wanted / a)
        return _Point(da, (wanted - s * da) / a * seen, dy)

    ahead = move(-a * s * seen)
    there = (a + _room(a, ahead.a) * ahead.a) * (s + _room(s, ahead.s) * ahead.s) * seen
    left = there.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True) / mu
    chosen = move((mu * left.clamp(min=0, max=1) ** 3 - a * s - ahead.a * ahead.s) * seen)
    length = _SHORT_OF_THE_WALL * torch.minimum(_room(a, chosen.a), _room(s, chosen.s))
    distance = torch.cat([mu, off.abs(), missing.abs()], dim=1).amax(-1)
    return _Point(a + length * chosen.a, s + length * chosen.s, y + length * chosen.y), distance


def _room(positive: Float[Tensor, "row key"], change: Float[Tensor, "row key"]) -> Float[Tensor, "row 1"]:
    """Return how much of a change, at most all of it, leaves numbers at or above 0."""
    return torch.where(change < 0, -positive / change, 1.0).amin(-1, keepdim=True).clamp(max=1)


def _one_row(programs: _Programs, row: int) -> Float[Tensor, "key"]:
    """Solve one program by the row-wise method."""
    keys, basis = programs.visible[row].nonzero()[:, 0], programs.basis if programs.shared else programs.basis[row]
    try:
        least = intervals.minimum_norm(programs.attention[row, keys], basis[keys])
    except ImportError as error:
        raise IdentikitError(
            f"Finding the attention of least norm over {len(keys)} keys: the batched method could not prove its "
            "answer, and the row-wise method needs scipy. Install scipy (pip install scipy)."
        ) from error
    return torch.zeros_like(programs.attention[row]).index_put((keys,), least)
