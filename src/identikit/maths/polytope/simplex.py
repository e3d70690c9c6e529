r"""A primal simplex method for one row, compiled.

The program of a row is $\max c \cdot a'$ subject to $U^\top a' = b$, $a' \ge 0$ with $b = U^\top a$ (see `rows`). A row
goes from objective to objective, warm from its last vertex, which stays feasible: it raises one weight after another as
far as it goes, then lowers those that no vertex had at 0.

It keeps the whole tableau $B^{-1} [U^\top, I]$: a step is one pass over it, the column that enters stands in it, and
the last r numbers of an objective's row are its dual vector $-y = -c_B B^{-1}$. The key with the largest profit enters
(Dantzig's rule); among the keys that block first, the largest pivot leaves (Harris's ratio test).

It only proposes $y$, which `bounds` proves ends with, and says what the vertex attains. The functions below are plain
Python that numba compiles; arrays are float64 and shapes are in `Row`.
"""

from contextlib import suppress
from typing import Any, NamedTuple, no_type_check

import numba
import numpy as np

PROFIT = 1e-11  # an entering key must promise at least this much per unit of weight
PIVOT = 1e-9  # the smallest pivot
ZERO = 1e-12  # a weight this small is 0
FRESH = 256  # steps between fresh tableaus: updates lose digits
DRIFT = 1e-10  # a vertex that is farther from the set is computed again with a fresh tableau
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
    - `basis` (n, r): U at these keys; `right` (r): b; `sign` (r): of b, for the artificial columns
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
    basis: np.ndarray
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
@no_type_check
def _start(every, keys, attention):
    """Start from the artificial columns, one per constraint, which stand for b itself."""
    n = len(keys)
    r = every.shape[1]
    seat = np.full(len(every), -1, np.int64)
    basis = np.zeros((n, r))
    right = np.zeros(r)
    for m in range(n):
        seat[keys[m]] = m
        for k in range(r):
            basis[m, k] = every[keys[m], k]
            right[k] += attention[keys[m]] * basis[m, k]
    sign = np.ones(r)
    tableau = np.zeros((r, n + r))
    columns = np.zeros(r, np.int64)
    for k in range(r):
        sign[k] = -1.0 if right[k] < 0 else 1.0
        columns[k] = -1 - k
        for m in range(n):
            tableau[k, m] = sign[k] * basis[m, k]
        tableau[k, n + k] = sign[k]
    return Row(
        keys, seat, basis, right, sign, tableau, columns, np.abs(right), np.full(n, -1, np.int64),
        np.zeros(n, np.bool_), np.zeros(n), np.zeros(n + r), np.zeros(r), np.zeros(r),
        np.zeros(r), np.zeros(n + r), np.zeros(1, np.int64),
    )  # fmt: skip


@_compiled
@no_type_check
def _leaving(row):
    """Choose which column leaves, and how far the entering weight can go: the largest pivot among the first to block.

    An artificial column that is 0 must stay 0, so it blocks at once whatever its sign. The first loop has no branches.
    """
    r = len(row.values)
    for i in range(r):
        w = row.column[i]
        stays = (row.columns[i] < 0) & (row.values[i] <= ZERO)
        size = abs(w) if stays else w
        weight = max(row.values[i], 0.0)
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
@no_type_check
def _enter(row, key):
    """Bring a key into the basis; returns whether something blocks it, as it should."""
    tableau = row.tableau
    r, width = tableau.shape
    for i in range(r):
        row.column[i] = tableau[i, key]
    p, step = _leaving(row)
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
@no_type_check
def _refresh(row):
    """Bring the tableau back to full precision, by a Newton step for the inverse M of the basis B: $M + M (I - BM)$."""
    r = len(row.values)
    n = len(row.keys)
    inverse = row.tableau[:, n:]
    error = np.zeros((r, r))
    before = inverse.copy()
    for i in range(r):
        key = row.columns[i]
        if key < 0:
            for k in range(r):
                error[-1 - key, k] -= row.sign[-1 - key] * before[i, k]
        else:
            for k in range(r):
                for j in range(r):
                    error[k, j] -= row.basis[key, k] * before[i, j]
    for k in range(r):
        error[k, k] += 1.0
    for i in range(r):
        for k in range(r):
            for j in range(r):
                inverse[i, j] += before[i, k] * error[k, j]
        row.values[i] = 0.0
        for k in range(r):
            row.values[i] += inverse[i, k] * row.right[k]
        for m in range(n):
            total = 0.0
            for k in range(r):
                total += inverse[i, k] * row.basis[m, k]
            row.tableau[i, m] = total


@_compiled
@no_type_check
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
@no_type_check
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
@no_type_check
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
        if entering < 0 or not _enter(row, entering):
            return False
    return False


@_compiled
@no_type_check
def _maximise(row, limit):
    """Go to a vertex with the greatest $c \\cdot a'$; returns whether it was reached within so many steps.

    Profits are carried along from step to step, and computed anew before the end is believed.
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
        if not _enter(row, entering):
            return False
        fresh = row.steps[0] % FRESH == 0
        if fresh:
            _refresh(row)
            _price(row)
    return False


@_compiled
@no_type_check
def _off(row):
    """Return how far the present vertex is from the set, by its constraints."""
    missing = row.right.copy()
    for i in range(len(row.values)):
        if row.columns[i] >= 0:
            for k in range(len(missing)):
                missing[k] -= row.values[i] * row.basis[row.columns[i], k]
    return np.abs(missing).max()


@_compiled
@no_type_check
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
@no_type_check
def _weight(row, m):
    """Return the weight of a key at the present vertex."""
    return row.values[row.place[m]] if row.place[m] >= 0 else 0.0


@_compiled
@no_type_check
def _dual(row, y):
    """Write the dual vector of the present vertex."""
    n = len(row.keys)
    for k in range(len(y)):
        y[k] = -row.profit[n + k]


@_compiled
@no_type_check
def _bound_keys(row, asked, strongest, limit, upper, lower, greatest, least, ahead, off):
    """Raise each asked weight as far as it goes, the nearest first, then lower those that no vertex had at 0."""
    pending = asked[row.keys]
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
        reached = _settle(row, limit, off)
        row.objective[m] = 0.0
        if not reached:
            return False
        key = row.keys[m]
        _dual(row, upper[key])
        greatest[key] = _weight(row, m)
        for place in range(len(strongest)):
            ahead[place, key] = greatest[key] - _weight(row, row.seat[strongest[place]])
    for m in range(len(row.keys)):
        key = row.keys[m]
        if not asked[key]:
            continue
        least[key] = 0.0
        if row.zero[m]:
            continue
        row.objective[m] = -1.0
        reached = _settle(row, limit, off)
        row.objective[m] = 0.0
        if not reached:
            return False
        _dual(row, lower[key])
        least[key] = _weight(row, m)
    return True


@_compiled
@no_type_check
def _bound_objective(row, objective, sense, limit, y, off, vertex):
    """Find the greatest (sense 1) or least (-1) of an objective; return it, or NaN where it was not reached."""
    for m in range(len(row.keys)):
        row.objective[m] = sense * objective[row.keys[m]]
    if not _settle(row, limit, off):
        return np.nan
    _dual(row, y)
    attained = 0.0
    for i in range(len(row.values)):
        m = row.columns[i]
        if m >= 0:
            attained += objective[row.keys[m]] * row.values[i]
            if len(vertex):
                vertex[row.keys[m]] = max(row.values[i], 0.0)
    return attained


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
