r"""A primal simplex method for one row, compiled.

The program of a row is $\max c \cdot a'$ subject to $U^\top a' = b$, $a' \ge 0$ with $b = U^\top a$ (see `polytope`). A
row goes from objective to objective, warm from its last vertex, which stays feasible: it raises one weight after
another as far as it goes, then lowers those that no vertex had at 0. The inverse of the basis is dense and small, d_v +
1 rows and columns; the key with the largest profit enters (Dantzig's rule); among the keys that block first, the
largest pivot leaves (Harris's ratio test).

It only proposes its dual vector $y = c_B B^{-1}$, which `bounds` proves ends with, and says what the vertex attains.
The functions below are plain Python that numba compiles; arrays are float64 and shapes are in `Row`.
"""

from contextlib import suppress
from typing import Any, NamedTuple, no_type_check

import numba
import numpy as np

PROFIT = 1e-11  # an entering key must promise at least this much per unit of weight
PIVOT = 1e-9  # the smallest pivot
ZERO = 1e-12  # a weight this small is 0
FRESH = 64  # steps between fresh inverses: updates lose digits
DRIFT = 1e-10  # a vertex that is farther from the set is computed again with a fresh inverse
STEPS = 400  # a row that needs more steps per quantity, on average, is given up
_WAY = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract"}}


def _compiled(function: Any) -> Any:
    """Compile a function when it is first called, and keep the machine code on disk where that is possible."""
    with suppress(RuntimeError):  # no folder can be written to
        return numba.njit(cache=True, **_WAY)(function)
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
    right = np.zeros(r)
    sign = np.ones(r)
    inverse = np.zeros((r, r))
    columns = np.zeros(r, np.int64)
    values = np.zeros(r)
    place = np.full(n, -1, np.int64)
    for k in range(r):
        for m in keys:
            right[k] += attention[m] * basis[m, k]
        sign[k] = -1.0 if right[k] < 0 else 1.0
        inverse[k, k] = sign[k]
        columns[k] = -1 - k
        values[k] = abs(right[k])
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
    found = -1
    largest = 0.0
    step = 0.0
    for i in range(len(row.values)):
        w = row.column[i]
        if row.columns[i] < 0 and row.values[i] <= ZERO:
            if abs(w) > max(PIVOT, largest):
                found = i
                largest = abs(w)
                step = 0.0
        elif w > max(PIVOT, largest):
            limit = max(row.values[i], 0.0) / w
            if limit <= reach:
                found = i
                largest = w
                step = limit
    return found, step


@_compiled
@no_type_check
def _enter(row, key):
    """Bring a key into the basis; return where it stands then, or -1 if nothing blocks it."""
    inverse = row.inverse
    r = len(row.values)
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
    row.columns[p] = key
    row.place[key] = p
    row.steps[0] += 1
    if row.steps[0] % FRESH == 0:
        _refresh(row)
    return p


@_compiled
@no_type_check
def _refresh(row):
    """Bring the inverse M of the basis B back to full precision, by a Newton step: $M + M (I - BM)$."""
    inverse = row.inverse
    r = len(row.values)
    error = np.zeros((r, r))
    before = np.zeros((r, r))
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
        best = PROFIT
        entering = -1
        for m in row.keys:
            if row.place[m] < 0:
                score = 0.0
                for k in range(r):
                    score += row.basis[m, k] * row.y[k]
                if score > best:
                    best = score
                    entering = m
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
        best = PROFIT
        entering = -1
        for m in row.keys:
            if row.place[m] < 0 and row.profit[m] > best:
                best = row.profit[m]
                entering = m
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
def _off(row):
    """Return how far the present vertex is from the set, by its constraints."""
    off = 0.0
    for k in range(len(row.right)):
        missing = row.right[k]
        for i in range(len(row.values)):
            if row.columns[i] >= 0:
                missing -= row.values[i] * row.basis[row.columns[i], k]
        off = max(off, abs(missing))
    return off


@_compiled
@no_type_check
def _settle(row, limit, off):
    """Maximise, once more with a fresh inverse where the vertex drifted from the set; note how far it is from it."""
    if not _maximise(row, limit):
        return False
    drift = _off(row)
    if drift > DRIFT:
        _refresh(row)
        if not _maximise(row, limit):
            return False
        drift = _off(row)
    off[0] = max(off[0], drift)
    return True


@_compiled
@no_type_check
def _weight(row, key):
    """Return the weight of a key at the present vertex."""
    return row.values[row.place[key]] if row.place[key] >= 0 else 0.0


@_compiled
@no_type_check
def _attained(row):
    """Return the objective at the present vertex."""
    total = 0.0
    for i in range(len(row.values)):
        if row.columns[i] >= 0:
            total += row.objective[row.columns[i]] * row.values[i]
    return total


@_compiled
@no_type_check
def _bound_keys(row, asked, strongest, limit, upper, lower, greatest, least, ahead, off):
    """Raise each asked weight as far as it goes, the nearest first, then lower those that no vertex had at 0."""
    pending = asked.copy()
    while True:
        best = -1.0
        key = -1
        for m in row.keys:
            if pending[m] and _weight(row, m) > best:
                best = _weight(row, m)
                key = m
        if key < 0:
            break
        pending[key] = False
        row.objective[key] = 1.0
        reached = _settle(row, limit, off)
        row.objective[key] = 0.0
        if not reached:
            return False
        upper[key] = row.y
        greatest[key] = _weight(row, key)
        for place in range(len(strongest)):
            ahead[place, key] = greatest[key] - _weight(row, strongest[place])
    for key in row.keys:
        if not asked[key]:
            continue
        least[key] = 0.0
        if row.zero[key]:
            continue
        row.objective[key] = -1.0
        reached = _settle(row, limit, off)
        row.objective[key] = 0.0
        if not reached:
            return False
        lower[key] = row.y
        least[key] = _weight(row, key)
    return True


@_compiled
@no_type_check
def _bound_objective(row, objective, sense, limit, y, off, vertex):
    """Find the greatest (sense 1) or least (-1) of an objective; return it, or NaN where it was not reached."""
    for m in row.keys:
        row.objective[m] = sense * objective[m]
    if not _settle(row, limit, off):
        return np.nan
    y[:] = row.y
    if len(vertex):
        for i in range(len(row.values)):
            if row.columns[i] >= 0:
                vertex[row.columns[i]] = max(row.values[i], 0.0)
    return sense * _attained(row)


@_compiled
@no_type_check
def solve(
    basis, keys, attention, asked, objectives, strongest, both, upper, lower, greatest, least, ahead, off, shown
):  # fmt: skip
    """Solve one row's asked keys, then its objectives; returns whether all of it was reached."""
    row = _start(basis, keys, attention)
    if not _first_vertex(row):
        return False
    limit = row.steps[0] + STEPS * max(20, len(keys), 2 * len(objectives))
    first = len(asked)
    if first and not _bound_keys(row, asked, strongest, limit, upper, lower, greatest, least, ahead, off):
        return False
    for at in range(len(objectives)):
        place = first + at
        if both:
            vertex = shown[at, 0] if len(shown) else row.objective[:0]
            least[place] = _bound_objective(row, objectives[at], -1.0, limit, lower[place], off, vertex)
        vertex = shown[at, 1] if len(shown) else row.objective[:0]
        greatest[place] = _bound_objective(row, objectives[at], 1.0, limit, upper[place], off, vertex)
        if np.isnan(least[place]) or np.isnan(greatest[place]):
            return False
    return True
