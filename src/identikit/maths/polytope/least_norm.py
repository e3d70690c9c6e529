r"""The attention of least norm on the simplex with the same output, for many rows at once (end of section 3.4).

For a row with attention $a$ and the basis $U$ of its set $P(a)$ (`rows.Rows`), with $b = U^\top a$,

$$\min \tfrac12\|a'\|^2 \quad \text{subject to} \quad U^\top a' = b, \; a' \ge 0$$

Its dual has one unknown per column of $U$ and is smooth:

$$\max_y \; y \cdot b - \tfrac12\|\max(0, Uy)\|^2, \qquad a' = \max(0, Uy)$$

The interior-point method leads near the solution in some ten to twenty steps, however sharp the attention is. Newton's
method on the dual ends it: its Hessian matrix is $U_A^\top U_A$ over the keys $A$ with a positive weight, and once $A$
is right one step is enough; steps go to the best point of their line, which is found exactly. (Newton's method alone
takes over a hundred steps where few keys keep any weight.) A step of either costs one matrix product and one Cholesky
factor per row. Rows that share a basis are one set of `interior`, and sets of many heads go together.

Every row is certified: with $a' = \max(0, Uy)$ all conditions of optimality hold exactly but $U^\top a' = b$, and that
is measured. Rows that fail are solved one by one (`_solve_alone`). Everything else is float64 torch, on the device of
the rows.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from identikit.errors import IdentikitError
from identikit.maths.linalg import BYTES
from identikit.maths.polytope.interior import Space, State, follow
from identikit.maths.polytope.rows import Rows, decompose_values
from identikit.maths.threads import one_thread
from identikit.shapes import Bool, Float, Int, Tensor

CERTIFIED = 1e-10  # of ‖Uᵀa' − b‖∞ and of the duality gap, in coordinates that are at most 1
_TARGET = 1e-11  # of the same: a row is done when it is there and a step no longer halves it
_DAMPING = 1e-4  # of the gradient's size, added to the Hessian's diagonal
_FLOOR = 1e-15  # the least damping
_ROUNDS = ((16, 2), (40, 80))  # steps of the interior-point method and of Newton's: few rows need many of them
_NEAR = 1e-8  # where the first method ends, as the sum of its products
_RIDGE = 1e-13  # what keeps its matrices invertible
_SAME_OUTPUT = 1e-12  # of a row that is solved alone, in the coordinates Uᵀa
_PENALTY = 1e7  # M of `_solve_alone`; scipy below 1.15 squares its condition and loses the norm
_MOST_SHIFTS = 20  # rounds of `_solve_alone`, each of which shifts its target t; one or two usually do


class _Sets(NamedTuple):
    """Rows by the basis that they share: their indices, and which are real; the others pad the sets."""

    basis: Float[Tensor, "set key rank"]
    row_indices: Int[Tensor, "set row"]
    is_row: Bool[Tensor, "set row"]


@one_thread()
def least_norm(rows: Rows) -> Float[Tensor, "row key"]:
    """Find the attention of least Euclidean norm in the set of each row; a row that is not free is its own."""
    least = rows.attention.clone()
    unsolved = rows.free.nonzero()[:, 0]
    for steps in _ROUNDS:
        failed = [unsolved[:0]]
        for sets in _sets_in_memory(rows, unsolved):
            weights, certified = _solve_sets(rows, sets, *steps)
            solved = sets.is_row & certified
            least[sets.row_indices[solved]] = weights[solved]
            failed.append(sets.row_indices[sets.is_row & ~certified])
        unsolved = torch.cat(failed).sort().values
    for row in unsolved.tolist():
        least[row] = _solve_alone(rows, row)
    return least


def _sets_in_memory(rows: Rows, indices: Int[Tensor, "some"]) -> Iterator[_Sets]:
    """Yield chosen rows in parts that fit in memory, sets of about equally many rows together."""
    n, width = rows.basis.shape[1:]
    numbers_per_row = 3 * width * width + 16 * n
    longest = max(1, BYTES // (8 * numbers_per_row))
    by_size: dict[int, list[tuple[int, Tensor]]] = {}
    for group, group_rows in rows.select(indices).by_group():
        for set_rows in indices[group_rows].split(longest):
            by_size.setdefault(len(set_rows).bit_length(), []).append((group, set_rows))
    for size, sets in by_size.items():
        together = max(1, BYTES // (8 * (n * width * width + 2**size * numbers_per_row)))
        for start in range(0, len(sets), together):
            groups, set_rows = zip(*sets[start : start + together], strict=True)
            row_indices = torch.nn.utils.rnn.pad_sequence(list(set_rows), batch_first=True, padding_value=-1)
            yield _Sets(rows.basis[list(groups)], row_indices, row_indices >= 0)


def _solve_sets(
    rows: Rows, sets: _Sets, path: int, newton: int
) -> tuple[Float[Tensor, "set row key"], Bool[Tensor, "set row"]]:
    """Solve the programs of sets together, in at most `path` and `newton` steps; return weights, and if certified."""
    attention = rows.attention[sets.row_indices]
    space = Space.of(
        sets.basis, attention @ sets.basis, rows.visible[sets.row_indices].to(attention), curvature=1.0, ridge=_RIDGE
    )

    def worst_error(space: Space, state: State) -> Tensor:
        return torch.maximum(space.mean_gap(state), (state.xi @ space.wide - space.right).abs().amax(-1, keepdim=True))

    z, _ = follow(space, _begin(space, attention), sets.is_row, worst_error, steps=path, enough=_NEAR)
    y = _newton(space, -z, newton)
    weights = _weights(space, y)
    gap = (y * (weights @ space.wide - space.right)).sum(-1)
    weights = weights / weights.sum(-1, keepdim=True)
    missing = (weights @ space.wide - space.right).abs().amax(-1)
    return weights, (missing <= CERTIFIED) & (gap.abs() <= CERTIFIED)


def _begin(space: Space, attention: Float[Tensor, "set row key"]) -> State:
    """Start with positive weights and a positive slack that goes with them; the first column of $U$ is constant."""
    count = space.visible.sum(-1, keepdim=True)
    xi = attention.maximum(0.1 / count) * space.visible
    z = torch.zeros_like(space.right)
    z[..., :1] = 1 / (space.visible @ space.wide[..., :1])
    sigma = (z @ space.wide.mT + xi) * space.visible + (1 - space.visible)
    return State(xi, sigma, z, z[..., :0], torch.ones_like(count))


def _weights(space: Space, y: Float[Tensor, "set row rank"]) -> Float[Tensor, "set row key"]:
    r"""Compute $a' = \max(0, Uy)$."""
    return (y @ space.wide.mT).clamp(min=0) * space.visible


def _newton(space: Space, y: Float[Tensor, "set row rank"], steps: int) -> Float[Tensor, "set row rank"]:
    """Climb the dual from `y`; return the best point of each row."""
    best = y
    error = torch.full_like(y[..., :1], torch.inf)
    for step in range(steps + 1):
        weights = _weights(space, y)
        gradient = space.right - weights @ space.wide
        size = gradient.abs().amax(-1, keepdim=True).maximum((y * gradient).sum(-1, keepdim=True).abs())
        improving = (size > _TARGET) | (size < error / 2) & (size > 0)
        best = torch.where(size < error, y, best)
        error = error.minimum(size)
        if step == steps or not bool(improving.any()):
            break
        hessian = space.grams((weights > 0).to(y))
        hessian.diagonal(dim1=-2, dim2=-1).add_((_DAMPING * size).clamp(min=_FLOOR))
        direction = torch.cholesky_solve(gradient[..., None], torch.linalg.cholesky_ex(hessian).L)[..., 0]
        y = y + _best_step(space, y, direction) * direction
    return best


def _best_step(
    space: Space, y: Float[Tensor, "set row rank"], direction: Float[Tensor, "set row rank"]
) -> Float[Tensor, "set row 1"]:
    r"""Find the step $t \ge 0$ to the best point of the line $y + t\,d$.

    With $z = Uy$ and $w = Ud$, the derivative $d \cdot b - \sum_m \max(0, z_m + t w_m)\,w_m$ falls with t, and it is
    linear between the steps $-z_m / w_m$ where a key gains or loses its weight. Sorted, their running sums give it
    everywhere, and the step is where it reaches 0.
    """
    z = y @ space.wide.mT
    w = direction @ space.wide.mT * space.visible
    steps_to_zero = -z / w
    steps_to_zero = torch.where(steps_to_zero > 0, steps_to_zero, torch.inf)  # not NaN, where 0 is divided by 0
    active = (z > 0) | ((z == 0) & (w > 0))
    steps_to_zero, order = steps_to_zero.sort(-1)
    sign = torch.where(active, -1.0, 1.0)

    def sums(term: Tensor) -> Tensor:
        first = (term * active).sum(-1, keepdim=True)
        return torch.cat([first, first + (term * sign).gather(-1, order).cumsum(-1)], -1)

    gain = (direction * space.right).sum(-1, keepdim=True) - sums(z * w)
    slope = sums(w * w)
    end = F.pad(steps_to_zero, (0, 1), value=torch.inf)
    piece = ((gain - end * slope <= 0) | end.isinf()).byte().argmax(-1, keepdim=True)
    low = F.pad(steps_to_zero, (1, 0)).gather(-1, piece).nan_to_num(posinf=0.0)
    high = end.gather(-1, piece)
    step = (gain / slope).gather(-1, piece)
    step = torch.where(step.isfinite(), step, torch.where(high.isfinite(), high, low))
    return step.clamp(min=low, max=high)


def _solve_alone(rows: Rows, row: int) -> Float[Tensor, "key"]:
    r"""Solve one program by the method of multipliers.

    $a' = \arg\min_{a' \ge 0} \|a'\|^2 + M^2 \|U^\top a' - t\|^2$ is a non-negative least-squares problem, which an
    active-set method solves exactly; then $t \leftarrow t + (U^\top a - U^\top a')$, from $t = U^\top a$. Each round
    shrinks the gap by about $1/M^2$; one or two reach rounding. It needs no interior point of $P(a)$, which a one-hot
    row may not have.
    """
    from scipy.optimize import nnls

    keys = rows.visible[row].nonzero()[:, 0]
    n = len(keys)
    weights = rows.attention[row, keys].cpu()
    U = decompose_values(rows.basis[rows.group[row], keys][None]).basis()[0].numpy()  # independent at these keys
    right = U.T @ (weights / weights.sum()).numpy()
    system = np.concatenate([_PENALTY * U.T, np.eye(n)])
    target = right.copy()
    gap = np.zeros_like(right)
    for _ in range(_MOST_SHIFTS):
        target += gap
        least, _ = nnls(system, np.concatenate([_PENALTY * target, np.zeros(n)]), maxiter=50 * n)
        gap = right - U.T @ least
        if np.abs(gap).max() <= _SAME_OUTPUT:
            least = torch.from_numpy(least / least.sum()).to(rows.attention)
            return torch.zeros_like(rows.attention[row]).index_put((keys,), least)
    raise IdentikitError(
        f"Finding the attention of least norm over {n} keys: after {_MOST_SHIFTS} rounds its output is off by "
        f"{np.abs(gap).max():.3g}; expected at most {_SAME_OUTPUT:g}. Please report this row."
    )
