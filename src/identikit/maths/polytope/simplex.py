r"""A primal simplex method for one row, compiled.

The program of a row is $\max c \cdot a'$ subject to $U^\top a' = b$, $a' \ge 0$ with $b = U^\top a$ (see `rows`). A row
goes from objective to objective, warm from its last vertex, which stays feasible: it raises one weight after another as
far as it goes, then lowers those that no vertex had at 0.

It keeps the whole tableau $B^{-1} [U^\top, I]$: a step is one pass over it, the column that enters stands in it, and
the last r numbers of an objective's row are its dual vector $-y = -c_B B^{-1}$. The key with the largest profit enters
(Dantzig's rule); among the keys that block first, the largest pivot leaves (Harris's ratio test).

It only proposes $y$, which `bounds` proves ends with, and says what it attains. Arrays are float64; `Row` has shapes.
"""

from contextlib import suppress
from typing import Any, NamedTuple

import numba
import numpy as np

PROFIT = 1e-11  # an entering key must promise at least this much per unit of weight
PIVOT = 1e-9  # the smallest pivot
ZERO = 1e-12  # a weight this small is 0
FRESH = 256  # steps between fresh tableaus: updates lose digits
DRIFT = 1e-12  # a vertex that is farther from the set is computed again with a fresh tableau
STEPS = 400  # a row that needs more steps per quantity, on average, is given up
_WAY = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract"}}


def _compiled(function: Any) -> Any:
    """Compile a function when it is first called, and keep the machine code on disk where that is possible."""
    with suppress(RuntimeError):  # no folder can be written to
        return numba.njit(cache=True, **_WAY)(function)
    return numba.njit(**_WAY)(function)


class Row(NamedTuple):
    """The state of one row's simplex: n keys that it sees, and r constraints.

    - `keys` (n): which of all keys these are; `seat`: where each of all keys stands among them, or -1
    - `constraints` (r, n): $U^\\top$ at these keys; `right` (r): b; `sign` (r): of b, for the artificial columns
    - `tableau` (r, n + r): $B^{-1} [U^\\top, I]$; `columns` (r): the keys in the basis B (artificial column k, which
      the method starts from, is -1 - k); `values` (r): their weights
    - `place` (n): where a key stands in the basis, or -1; `zero` (n): keys that some vertex has at 0
    - `objective` (n): c; `profit` (n + r): $[c, 0] - c_B B^{-1} [U^\\top, I]$, of which the last r are $-y$
    - `column` (r): the entering column; `size`, `limit` (r): how it lowers each weight in the basis, and how far it
      can go before that weight is 0; `pivot` (n + r): the row of the key that leaves
    - `steps` (1): how many were made
    """

    keys: np.ndarray
    seat: np.ndarray
    constraints: np.ndarray
    right: np.ndarray
    sign: np.ndarray
    tableau: np.ndarray
    columns: np.ndarray
    values: np.ndarray
    place: np.ndarray
    zero: np.ndarray
    objective: np.ndarray
    profit: np.ndarray
    column: np.ndarray
    size: np.ndarray
    limit: np.ndarray
    pivot: np.ndarray
    steps: np.ndarray


@_compiled
def _start(every, keys, attention):
    """Start from the artificial columns, one per constraint, which stand for b itself."""
    n = len(keys)
    r = every.shape[1]
    seat = np.full(len(every), -1, np.int64)
    constraints = np.zeros((r, n))
    right = np.zeros(r)
    for m in range(n):
        seat[keys[m]] = m
        for k in range(r):
            constraints[k, m] = every[keys[m], k]
            right[k] += attention[keys[m]] * every[keys[m], k]
    sign = np.ones(r)
    tableau = np.zeros((r, n + r))
    columns = np.zeros(r, np.int64)
    for k in range(r):
        sign[k] = -1.0 if right[k] < 0 else 1.0
        columns[k] = -1 - k
        for m in range(n):
            tableau[k, m] = sign[k] * constraints[k, m]
        tableau[k, n + k] = sign[k]
    return Row(
        keys, seat, constraints, right, sign, tableau, columns, np.abs(right), np.full(n, -1, np.int64),
        np.zeros(n, np.bool_), np.zeros(n), np.zeros(n + r), np.zeros(r), np.zeros(r),
        np.zeros(r), np.zeros(n + r), np.zeros(1, np.int64),
    )  # fmt: skip


@_compiled
def _leaving(row, idle):
    """Choose which column leaves, and how far the entering weight can go: the largest pivot among the first to block.

    An artificial column up to `idle` must not grow: it blocks at once. The first loop has no branches.
    """
    r = len(row.values)
    for i in range(r):
        w = row.column[i]
        stays = (row.columns[i] < 0) & (row.values[i] <= idle)
        size = abs(w) if stays else w
        weight = 0.0 if stays else max(row.values[i], 0.0)
        blocks = size > PIVOT
        row.size[i] = size if blocks else 0.0
        row.limit[i] = weight / size if blocks else np.inf
    reach = np.inf
    for i in range(r):
        widened = row.limit[i] + ZERO / row.size[i]
        reach = widened if widened < reach else reach
    leaving = -1
    largest = 0.0
    for i in range(r):
        if row.limit[i] <= reach and row.size[i] > largest:
            leaving = i
            largest = row.size[i]
    return leaving, row.limit[leaving]


@_compiled
def _enter(row, key, idle):
    """Bring a key into the basis; returns whether something blocks it, as it should. `idle` is as in `_leaving`."""
    tableau = row.tableau
    r, width = tableau.shape
    for i in range(r):
        row.column[i] = tableau[i, key]
    p, step = _leaving(row, idle)
    if p < 0:
        return False
    pivot = row.pivot
    for k in range(width):
        pivot[k] = tableau[p, k] / row.column[p]
    pivot[key] = 1.0
    for i in range(r):
        w = row.column[i]
        row.values[i] -= step * w
        for k in range(width):
            tableau[i, k] -= w * pivot[k]
    tableau[p] = pivot
    row.values[p] = step
    w = row.profit[key]
    for k in range(width):
        row.profit[k] -= w * pivot[k]
    if row.columns[p] >= 0:
        row.place[row.columns[p]] = -1
        row.zero[row.columns[p]] = True
    row.columns[p] = key
    row.place[key] = p
    row.steps[0] += 1
    return True


@_compiled
def _refresh(row):
    """Bring the tableau back to full precision, by a Newton step for the inverse M of the basis B: $M + M (I - BM)$."""
    r = len(row.values)
    n = len(row.keys)
    before = row.tableau[:, n:].copy()
    error = np.eye(r)
    for i in range(r):
        key = row.columns[i]
        for k in range(r):
            entry = row.constraints[k, key] if key >= 0 else row.sign[k] if k == -1 - key else 0.0
            for j in range(r):
                error[k, j] -= entry * before[i, j]
    inverse = before.copy()
    for i in range(r):
        for k in range(r):
            for j in range(r):
                inverse[i, j] += before[i, k] * error[k, j]
        row.values[i] = 0.0
        row.tableau[i, :n] = 0.0
        for k in range(r):
            row.values[i] += inverse[i, k] * row.right[k]
            for m in range(n):
                row.tableau[i, m] += inverse[i, k] * row.constraints[k, m]
    row.tableau[:, n:] = inverse


@_compiled
def _price(row):
    """Compute every key's profit and the dual vector from the tableau."""
    n = len(row.keys)
    row.profit[:n] = row.objective
    row.profit[n:] = 0.0
    for i in range(len(row.values)):
        if row.columns[i] >= 0 and row.objective[row.columns[i]] != 0.0:
            for k in range(len(row.profit)):
                row.profit[k] -= row.objective[row.columns[i]] * row.tableau[i, k]


@_compiled
def _best(row):
    """Return the key that promises most, or -1 if none promises anything."""
    best = PROFIT
    entering = -1
    for m in range(len(row.keys)):
        if row.place[m] < 0 and row.profit[m] > best:
            best = row.profit[m]
            entering = m
    return entering


@_compiled
def _first_vertex(row):
    """Drive the artificial columns to 0: this is a vertex of the row's set. Returns whether that worked."""
    r = len(row.values)
    for _ in range(20 * r):
        total = 0.0
        row.profit[:] = 0.0
        for i in range(r):
            if row.columns[i] < 0 and row.values[i] > ZERO:
                total += row.values[i]
                for k in range(len(row.profit)):
                    row.profit[k] += row.tableau[i, k]
        if total <= ZERO * r:
            _refresh(row)
            for m in range(len(row.keys)):
                row.zero[m] = row.place[m] < 0
            return True
        entering = _best(row)
        if entering < 0 or not _enter(row, entering, ZERO):
            return False
    return False


@_compiled
def _maximise(row, limit):
    """Go to a vertex with the greatest $c \\cdot a'$; returns whether it was reached within so many steps.

    Profits are carried along from step to step, and computed anew before the end is believed. No artificial column may
    grow: what rounding has left in one would otherwise widen the set.
    """
    _price(row)
    fresh = True
    while row.steps[0] < limit:
        entering = _best(row)
        if entering < 0:
            if fresh:
                return True
            _price(row)
            fresh = True
            continue
        if not _enter(row, entering, np.inf):
            return False
        fresh = row.steps[0] % FRESH == 0
        if fresh:
            _refresh(row)
            _price(row)
    return False


@_compiled
def _off(row):
    """Return how far the present vertex is from the set, by its constraints."""
    weights = np.zeros(len(row.keys))
    for i in range(len(row.values)):
        if row.columns[i] >= 0:
            weights[row.columns[i]] = row.values[i]
    off = 0.0
    for k in range(len(row.right)):
        missing = row.right[k]
        for m in range(len(weights)):
            missing -= row.constraints[k, m] * weights[m]
        off = max(off, abs(missing))
    return off


@_compiled
def _settle(row, limit, off):
    """Maximise, once more with a fresh tableau where the vertex drifted from the set; note how far it is from it."""
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
def _weight(row, m):
    """Return the weight of a key at the present vertex."""
    return row.values[row.place[m]] if row.place[m] >= 0 else 0.0


class RowTask(NamedTuple):
    """What is asked of rows, as arrays: `Rows`, and `Wanted` with every row's strongest asked keys.

    - `known` (row): how many keys of `strongest` a row sees
    - `objectives`: of all rows, or of each; `both`: whether they are also made least
    """

    attention: np.ndarray
    visible: np.ndarray
    group: np.ndarray
    basis: np.ndarray
    asked: np.ndarray
    objectives: np.ndarray
    strongest: np.ndarray
    known: np.ndarray
    both: bool


@_compiled
def _bound_keys(row, task, found, index, limit):
    """Raise each asked weight as far as it goes, the nearest first, then lower those that no vertex had at 0."""
    pending = task.asked[row.keys]
    strongest = task.strongest[index, : task.known[index]]
    while True:
        best = -1.0
        m = -1
        for other in range(len(row.keys)):
            if pending[other] and _weight(row, other) > best:
                best = _weight(row, other)
                m = other
        if m < 0:
            break
        pending[m] = False
        row.objective[m] = 1.0
        reached = _settle(row, limit, found.off[index:])
        row.objective[m] = 0.0
        if not reached:
            return False
        key = row.keys[m]
        found.upper[index, key] = -row.profit[len(row.keys) :]
        found.greatest[index, key] = _weight(row, m)
        for place in range(len(strongest)):
            found.ahead[index, place, key] = _weight(row, m) - _weight(row, row.seat[strongest[place]])
    for m in range(len(row.keys)):
        key = row.keys[m]
        if task.asked[key]:
            found.least[index, key] = 0.0
        if row.zero[m] or not task.asked[key]:
            continue
        row.objective[m] = -1.0
        reached = _settle(row, limit, found.off[index:])
        row.objective[m] = 0.0
        if not reached:
            return False
        found.lower[index, key] = -row.profit[len(row.keys) :]
        found.least[index, key] = _weight(row, m)
    return True


@_compiled
def _bound_objective(row, objective, sense, limit, y, off, shown):
    """Find the greatest (sense 1) or least (-1) of an objective; return it, or NaN where it was not reached."""
    for m in range(len(row.keys)):
        row.objective[m] = sense * objective[row.keys[m]]
    if not _settle(row, limit, off):
        return np.nan
    y[:] = -row.profit[len(row.keys) :]
    attained = 0.0
    for i in range(len(row.values)):
        m = row.columns[i]
        if m >= 0:
            attained += objective[row.keys[m]] * row.values[i]
            if len(shown):
                shown[0, row.keys[m]] = max(row.values[i], 0.0)
    return attained


@_compiled
def _solve_row(row, task, found, index):
    """Solve one row's asked keys, then its objectives; returns whether all of it was reached."""
    objectives = task.objectives[index if len(task.objectives) > 1 else 0]
    if not _first_vertex(row):
        return False
    limit = row.steps[0] + STEPS * max(20, len(row.keys), 2 * len(objectives))
    first = len(task.asked)
    if first and not _bound_keys(row, task, found, index, limit):
        return False
    for at in range(len(objectives)):
        for end in range(0 if task.both else 1, 2):
            dual = (found.upper if end else found.lower)[index, first + at]
            vertex = found.vertices[index, at : at + 1, end]
            attained = _bound_objective(row, objectives[at], 2.0 * end - 1.0, limit, dual, found.off[index:], vertex)
            (found.greatest if end else found.least)[index, first + at] = attained
            if np.isnan(attained):
                return False
    return True


@_compiled
def solve(task, found, chosen):
    """Solve chosen rows of a task into `found` (a `Proposed` of arrays), where those that are given up are marked."""
    for index in chosen:
        keys = np.flatnonzero(task.visible[index])
        row = _start(task.basis[task.group[index]], keys, task.attention[index])
        found.failed[index] = not _solve_row(row, task, found, index)
