r"""Exact ends of many rows on the CPU: a primal simplex method for each row, compiled.

The program of a row is $\max c \cdot a'$ subject to $U^\top a' = b$, $a' \ge 0$ with $b = U^\top a$ (see `polytope`). A
row goes from objective to objective, warm from its last vertex, which stays feasible: it raises one weight after
another as far as it goes, then lowers those that no vertex had at 0. The inverse of the basis is dense and small, d_v +
1 rows and columns; the key with the largest profit enters (Dantzig's rule); among the keys that block first, the
largest pivot leaves (Harris's ratio test).

No end is trusted because the simplex stopped: each is `polytope.proven_maximum` at its dual vector $y = c_B B^{-1}$,
and the gap is its distance from the weight at the vertex.

The functions below are plain Python that numba compiles; arrays are float64 and shapes are in `Row`.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, no_type_check

import numba
import numpy as np
import torch

from identikit.maths.polytope.rows import Bounds, Rows, unbounded
from identikit.shapes import Bool, Float, Tensor

PROFIT = 1e-11  # an entering key must promise at least this much per unit of weight
PIVOT = 1e-9  # the smallest pivot
ZERO = 1e-12  # a weight this small is 0
FRESH = 64  # steps between fresh inverses: updates lose digits
TIE = 1e-9  # a weight that exceeds another by less is as large
STEPS = 400  # a row that needs more steps per quantity, on average, is given up
_WAY = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract"}}


def _compiled(function: Any) -> Any:
    """Compile a function when it is first called, and keep the machine code on disk where that is possible."""
    try:
        return numba.njit(cache=True, **_WAY)(function)
    except RuntimeError:  # no folder can be written to
        return numba.njit(**_WAY)(function)


class Row(NamedTuple):
    """The state of one row's simplex: n keys, of which it sees `keys`, and r constraints.

    - `basis` (n, r): U; `right` (r): b; `sign` (r): of b, for the artificial columns that the method starts from
    - `inverse` (r, r), `columns` (r), `values` (r): the basis matrix inverted, its keys (artificial column k is -1 -
      k), and their weights
    - `place` (n): where a key stands in the basis, or -1; `zero` (n): keys that some vertex has at 0
    - `objective` (n): c; `y` (r): its dual vector; `profit` (n): $c_m - y \\cdot u_m$
    - `column` (r): the entering column in terms of the basis; `steps` (1): how many were made
    """

    basis: np.ndarray
    keys: np.ndarray
    right: np.ndarray
    sign: np.ndarray
    inverse: np.ndarray
    columns: np.ndarray
    values: np.ndarray
    place: np.ndarray
    zero: np.ndarray
    objective: np.ndarray
    y: np.ndarray
    profit: np.ndarray
    column: np.ndarray
    steps: np.ndarray


@_compiled
@no_type_check
def _start(basis, keys, attention):
    """Start from the artificial columns, one per constraint, which stand for b itself."""
    n, r = basis.shape
    right, sign, inverse = np.zeros(r), np.ones(r), np.zeros((r, r))
    columns, values, place = np.zeros(r, np.int64), np.zeros(r), np.zeros(n, np.int64)
    for m in range(n):
        place[m] = -1
    for k in range(r):
        for m in keys:
            right[k] += attention[m] * basis[m, k]
        sign[k] = -1.0 if right[k] < 0 else 1.0
        inverse[k, k], columns[k], values[k] = sign[k], -1 - k, abs(right[k])
    return Row(
        basis, keys, right, sign, inverse, columns, values, place, np.zeros(n, np.bool_), np.zeros(n), np.zeros(r),
        np.zeros(n), np.zeros(r), np.zeros(1, np.int64),
    )  # fmt: skip


@_compiled
@no_type_check
def _leaving(row):
    """Choose which column leaves, and how far the entering weight can go: the largest pivot among the first to block.

    An artificial column that is 0 must stay 0, so it blocks at once whatever its sign.
    """
    reach = np.inf
    for i in range(len(row.values)):
        w = row.column[i]
        if row.columns[i] < 0 and row.values[i] <= ZERO:
            if abs(w) > PIVOT:
                reach = 0.0
        elif w > PIVOT:
            reach = min(reach, (max(row.values[i], 0.0) + ZERO) / w)
    found, largest, step = -1, 0.0, 0.0
    for i in range(len(row.values)):
        w = row.column[i]
        if row.columns[i] < 0 and row.values[i] <= ZERO:
            if abs(w) > max(PIVOT, largest):
                found, largest, step = i, abs(w), 0.0
        elif w > max(PIVOT, largest):
            limit = max(row.values[i], 0.0) / w
            if limit <= reach:
                found, largest, step = i, w, limit
    return found, step


@_compiled
@no_type_check
def _enter(row, key):
    """Bring a key into the basis; return where it stands then, or -1 if nothing blocks it."""
    inverse, r = row.inverse, len(row.values)
    for i in range(r):
        total = 0.0
        for k in range(r):
            total += inverse[i, k] * row.basis[key, k]
        row.column[i] = total
    p, step = _leaving(row)
    if p < 0:
        return p
    for k in range(r):
        inverse[p, k] /= row.column[p]
    for i in range(r):
        if i != p:
            w = row.column[i]
            row.values[i] -= step * w
            for k in range(r):
                inverse[i, k] -= w * inverse[p, k]
    row.values[p] = step
    if row.columns[p] >= 0:
        row.place[row.columns[p]] = -1
        row.zero[row.columns[p]] = True
    row.columns[p], row.place[key] = key, p
    row.steps[0] += 1
    if row.steps[0] % FRESH == 0:
        _refresh(row)
    return p


@_compiled
@no_type_check
def _refresh(row):
    """Bring the inverse M of the basis B back to full precision, by a Newton step: $M + M (I - BM)$."""
    inverse, r = row.inverse, len(row.values)
    error, before = np.zeros((r, r)), np.zeros((r, r))
    for i in range(r):
        key = row.columns[i]
        for k in range(r):
            before[i, k] = inverse[i, k]
            if key < 0:
                error[-1 - key, k] -= row.sign[-1 - key] * inverse[i, k]
        if key >= 0:
            for k in range(r):
                for j in range(r):
                    error[k, j] -= row.basis[key, k] * inverse[i, j]
    for k in range(r):
        error[k, k] += 1.0
    for i in range(r):
        row.values[i] = 0.0
        for k in range(r):
            for j in range(r):
                inverse[i, j] += before[i, k] * error[k, j]
        for k in range(r):
            row.values[i] += inverse[i, k] * row.right[k]


@_compiled
@no_type_check
def _price(row):
    """Compute the dual vector y and every key's profit from the basis."""
    r = len(row.values)
    row.y[:] = 0.0
    for i in range(r):
        if row.columns[i] >= 0 and row.objective[row.columns[i]] != 0.0:
            for k in range(r):
                row.y[k] += row.objective[row.columns[i]] * row.inverse[i, k]
    for m in row.keys:
        score = 0.0
        for k in range(r):
            score += row.basis[m, k] * row.y[k]
        row.profit[m] = row.objective[m] - score


@_compiled
@no_type_check
def _first_vertex(row):
    """Drive the artificial columns to 0: this is a vertex of the row's set. Returns whether that worked."""
    r = len(row.values)
    for _ in range(20 * r):
        total = 0.0
        row.y[:] = 0.0
        for i in range(r):
            if row.columns[i] < 0 and row.values[i] > ZERO:
                total += row.values[i]
                for k in range(r):
                    row.y[k] += row.inverse[i, k]
        if total <= ZERO * r:
            _refresh(row)
            for m in row.keys:
                row.zero[m] = row.place[m] < 0
            return True
        best, entering = PROFIT, -1
        for m in row.keys:
            if row.place[m] < 0:
                score = 0.0
                for k in range(r):
                    score += row.basis[m, k] * row.y[k]
                if score > best:
                    best, entering = score, m
        if entering < 0 or _enter(row, entering) < 0:
            return False
    return False


@_compiled
@no_type_check
def _maximise(row, limit):
    """Go to a vertex with the greatest $c \\cdot a'$; returns whether it was reached within so many steps.

    Profits are carried along from step to step, and computed anew before the end is believed.
    """
    r = len(row.values)
    _price(row)
    fresh = True
    while row.steps[0] < limit:
        best, entering = PROFIT, -1
        for m in row.keys:
            if row.place[m] < 0 and row.profit[m] > best:
                best, entering = row.profit[m], m
        if entering < 0:
            if fresh:
                return True
            _price(row)
            fresh = True
            continue
        p = _enter(row, entering)
        if p < 0:
            return False
        if row.steps[0] % FRESH == 0:
            _price(row)
            fresh = True
            continue
        for m in row.keys:
            if row.place[m] < 0:
                score = 0.0
                for k in range(r):
                    score += row.basis[m, k] * row.inverse[p, k]
                row.profit[m] -= best * score
        row.profit[entering] = 0.0
        fresh = False
    return False


@_compiled
@no_type_check
def _proven(row):
    """Bound the objective over the whole set by the dual vector, in all visible keys."""
    best, level = -np.inf, 0.0
    for m in row.keys:
        score = 0.0
        for k in range(len(row.y)):
            score += row.basis[m, k] * row.y[k]
        best = max(best, row.objective[m] - score)
    for k in range(len(row.y)):
        level += row.y[k] * row.right[k]
    return level + best


@_compiled
@no_type_check
def _attained(row):
    """Return the objective at the present vertex, and how far the vertex is from the set, by its constraints."""
    found, off = 0.0, 0.0
    for k in range(len(row.right)):
        missing = row.right[k]
        for i in range(len(row.values)):
            if row.columns[i] >= 0:
                missing -= row.values[i] * row.basis[row.columns[i], k]
        off = max(off, abs(missing))
    for i in range(len(row.values)):
        if row.columns[i] >= 0:
            found += row.objective[row.columns[i]] * row.values[i]
    return found, off


@_compiled
@no_type_check
def _extreme(row, limit):
    """Return the proven maximum of the objective and its gap; NaN if it was not reached."""
    if not _maximise(row, limit):
        return np.nan, np.nan
    proven, (attained, off) = _proven(row), _attained(row)
    return proven, abs(proven - attained) + off


@_compiled
@no_type_check
def _bound_keys(row, attention, asked, limit, lower, upper, gap):
    """Raise each asked weight as far as it goes, the nearest first, then lower those that no vertex had at 0."""
    pending = asked.copy()
    while True:
        best, key = -1.0, -1
        for m in row.keys:
            if pending[m]:
                weight = row.values[row.place[m]] if row.place[m] >= 0 else 0.0
                if weight > best:
                    best, key = weight, m
        if key < 0:
            break
        pending[key] = False
        row.objective[key] = 1.0
        end, gap[key] = _extreme(row, limit)
        row.objective[key] = 0.0
        upper[key] = min(max(end, attention[key]), 1.0)
        if np.isnan(end):
            return False
    for key in row.keys:
        if asked[key] and not row.zero[key]:
            row.objective[key] = -1.0
            end, distance = _extreme(row, limit)
            row.objective[key] = 0.0
            lower[key], gap[key] = max(min(-end, attention[key]), 0.0), max(gap[key], distance)
            if np.isnan(end):
                return False
        elif asked[key]:
            lower[key] = 0.0
    return True


@_compiled
@no_type_check
def _certain_order(row, attention, asked, top, limit, lower, upper):
    """Count the strongest asked edges, up to `top`, whose order is the same in the whole set; -1: it is not decided."""
    after, count = asked.copy(), 0
    for m in row.keys:
        count += asked[m]
    for place in range(min(top, count)):
        key = -1
        for m in row.keys:
            if after[m] and (key < 0 or attention[m] > attention[key]):
                key = m
        after[key] = False
        for other in row.keys:
            if not after[other] or upper[other] <= lower[key]:
                continue
            row.objective[other], row.objective[key] = 1.0, -1.0
            attained, proven = _attained(row)[0], 0.0
            if attained <= TIE:
                proven = _extreme(row, limit)[0]
                attained = _attained(row)[0]
            row.objective[other], row.objective[key] = 0.0, 0.0
            if attained > TIE:
                return place
            if not proven <= TIE:
                return -1
    return min(top, count)


@_compiled
@no_type_check
def _solve(basis, keys, attention, asked, objectives, top, lower, upper, gap):
    """Bound one row's asked keys (with no objectives) or its objectives; returns `order`, or -2 where it fails."""
    row = _start(basis, keys, attention)
    if not _first_vertex(row):
        return -2
    limit = row.steps[0] + STEPS * max(20, len(keys), 2 * len(objectives))
    if len(objectives) == 0:
        if not _bound_keys(row, attention, asked, limit, lower, upper, gap):
            return -2
        return _certain_order(row, attention, asked, top, 2 * limit, lower, upper) if top else -1
    for at in range(len(objectives)):
        own = 0.0
        for m in keys:
            row.objective[m] = -objectives[at, m]
            own += objectives[at, m] * attention[m]
        least, below = _extreme(row, limit)
        for m in keys:
            row.objective[m] = objectives[at, m]
        greatest, above = _extreme(row, limit)
        if np.isnan(least) or np.isnan(greatest):
            return -2
        lower[at], upper[at] = max(min(-least, own), 0.0), min(max(greatest, own), 1.0)
        gap[at] = max(below, above)
    return -1


def simplex_bounds(
    rows: Rows,
    objectives: Float[Tensor, "quantity key"] | None = None,
    *,
    asked: Bool[Tensor, "key"],
    top: int,
) -> tuple[Bounds, Bool[Tensor, "row"]]:
    """Bound the asked keys, or other quantities, of every row, on as many threads as torch uses; see `Bounds`.

    Also returns which rows failed: these are for another solver.
    """
    device, rows = rows.attention.device, Rows(*(part.cpu() for part in rows))
    objectives = None if objectives is None else objectives.cpu()
    found = unbounded(rows, objectives)
    lower, upper, gap = (part.numpy() for part in found[:3])
    basis, group, attention = rows.basis.numpy(), rows.group.tolist(), rows.attention.numpy()
    wanted = np.zeros((0, 0)) if objectives is None else np.ascontiguousarray(objectives.numpy())
    keys, order = asked.numpy(), found.order.numpy()

    def solve(index: int) -> None:
        seen, ends = rows.visible[index].nonzero()[:, 0].numpy(), (lower[index], upper[index], gap[index])
        order[index] = _solve(basis[group[index]], seen, attention[index], keys, wanted, top, *ends)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(solve, rows.free.nonzero()[:, 0].tolist()))
    failed = found.order == -2
    found.order.clamp_(min=-1)
    return Bounds(*(part.to(device) for part in found)), failed.to(device)
