r"""A primal simplex method for one row, compiled.

The program of a row is $\max c \cdot a'$ subject to $U^\top a' = b$, $a' \ge 0$ with $b = U^\top a$ (see `rows`). A row
goes from objective to objective, warm from its last vertex, which stays feasible: it raises one weight after another as
far as it goes, then lowers those that no vertex had at 0.

It keeps a condensed tableau: $B^{-1} N$, where B are the columns in the basis and N those outside it, and below it the
profits $c_N - c_B B^{-1} N$. A step exchanges one column of each, in one pass. Columns are keys, or the artificial ones
that the method starts from, whose profits are the dual vector $-y = -c_B B^{-1}$ but for their signs. The key with the
largest profit enters (Dantzig's rule); among the keys that block first, the largest pivot leaves (Harris's ratio test).

It only proposes $y$, which `bounds` proves ends with, and says what it attains. Arrays are float64; `Row` has shapes.
Everything is a plain loop: an expression over whole arrays takes numba up to a second each to compile.
"""

from contextlib import suppress
from typing import Any

import numba
import numpy as np

from identikit.maths.polytope.simplex_state import Row

PROFIT = 1e-11  # an entering key must promise at least this much per unit of weight
PIVOT = 1e-9  # the smallest pivot
ZERO = 1e-12  # a weight this small is 0
FRESH = 256  # steps between fresh tableaus: updates lose digits
DRIFT = 1e-12  # a vertex that is farther from the set is computed again with a fresh tableau
STEPS = 400  # a row that needs more steps per quantity, on average, is abandoned
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract"}}
# Only compiled functions call these. Without what Python would call them by, a fifth less is compiled.
_INNER_OPTIONS: dict[str, Any] = _OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


@numba.njit(**_INNER_OPTIONS)
def _start(basis, visible, attention):
    """Start from the artificial columns, one per constraint, which stand for b itself."""
    r = basis.shape[1]
    n = 0
    column_of_key = np.empty(len(basis), np.int64)
    for key in range(len(basis)):
        column_of_key[key] = n if visible[key] else -1
        n += visible[key]
    keys = np.empty(n, np.int64)
    outside = np.empty(n, np.int64)
    columns = np.zeros((n + r, r))
    right = np.zeros(r)
    for key in range(len(basis)):
        m = column_of_key[key]
        if m >= 0:
            keys[m] = key
            outside[m] = m
            for k in range(r):
                columns[m, k] = basis[key, k]
                right[k] += basis[key, k] * attention[key]
    tableau = np.zeros((r + 1, n))
    inside = np.empty(r, np.int64)
    values = np.empty(r)
    for k in range(r):
        sign = -1.0 if right[k] < 0 else 1.0
        columns[n + k, k] = sign
        inside[k] = n + k
        values[k] = sign * right[k]
        for m in range(n):
            tableau[k, m] = columns[m, k] * sign
    return Row(
        keys, column_of_key, columns, right, tableau, inside, outside, values, np.zeros(n), np.zeros(n + r, np.bool_),
        np.zeros(n + r), np.zeros(r + 1), np.zeros(n), np.zeros((2, r)), np.zeros(1, np.int64),
    )  # fmt: skip


@numba.njit(**_INNER_OPTIONS)
def _choose_entering(profit, outside):
    """Return the column outside the basis with the largest profit, or -1 if none has any."""
    best = PROFIT
    entering = -1
    for q in range(len(profit)):
        if profit[q] > best and outside[q] < len(profit):
            best = profit[q]
            entering = q
    return entering


@numba.njit(**_INNER_OPTIONS)
def _choose_leaving(column, values, inside, n, room, idle):
    """Choose which column leaves the basis: the largest pivot among the first to block; -1 if none blocks.

    `room` becomes how the entering column lowers each weight of the basis, and how far it can go. An artificial column
    up to `idle` must not grow: it blocks at once. The first loop has no branches.
    """
    r = len(values)
    for i in range(r):
        w = column[i]
        stays = (inside[i] >= n) & (values[i] <= idle)
        size = abs(w) if stays else w
        weight = 0.0 if stays else max(values[i], 0.0)
        blocks = size > PIVOT
        room[0, i] = size if blocks else 0.0
        room[1, i] = weight / size if blocks else np.inf
    reach = np.inf
    for i in range(r):
        widened = room[1, i] + ZERO / room[0, i]
        reach = widened if widened < reach else reach
    leaving = -1
    largest = 0.0
    for i in range(r):
        if room[1, i] <= reach and room[0, i] > largest:
            leaving = i
            largest = room[0, i]
    return leaving


@numba.njit(**_INNER_OPTIONS)
def _exchange(tableau, values, column, pivot, p, q, step):
    """Exchange row p of the basis for column q, which gets this weight; `column` is that column before the exchange.

    Single entries are written after their rows: vectors that are read right after a part of them must wait for it.
    """
    height, n = tableau.shape
    for i in range(height - 1):
        values[i] -= step * column[i]
    values[p] = step
    share = 1.0 / column[p]
    for k in range(n):
        pivot[k] = tableau[p, k] * share
    for i in range(height):
        w = column[i]
        for k in range(n):
            tableau[i, k] -= w * pivot[k]
        tableau[i, q] = -w * share
    for k in range(n):
        tableau[p, k] = pivot[k]
    tableau[p, q] = share


@numba.njit(**_INNER_OPTIONS)
def _refresh(row):
    """Bring the tableau back to full precision, by a Newton step for the inverse M of the basis B: $M + M (I - BM)$."""
    r = len(row.values)
    n = len(row.keys)
    before = np.zeros((r, r))
    beside = np.zeros((r, n))  # N
    for q in range(n):
        k = row.outside[q] - n
        for i in range(r):
            beside[i, q] = row.columns[row.outside[q], i]
            if k >= 0:
                before[i, k] = row.tableau[i, q] * row.columns[n + k, k]
    error = np.zeros((r, r))
    for i in range(r):
        error[i, i] = 1.0
        if row.inside[i] >= n:
            for k in range(r):
                before[i, k] += row.columns[row.inside[i], k]
    for i in range(r):
        for k in range(r):
            entry = row.columns[row.inside[i], k]
            for j in range(r):
                error[k, j] -= entry * before[i, j]
    inverse = np.empty(r)  # a row of it
    for i in range(r):
        for j in range(r):
            inverse[j] = before[i, j]
        for k in range(r):
            entry = before[i, k]
            for j in range(r):
                inverse[j] += entry * error[k, j]
        row.values[i] = 0.0
        for q in range(n):
            row.tableau[i, q] = 0.0
        for k in range(r):
            entry = inverse[k]
            row.values[i] += entry * row.right[k]
            for q in range(n):
                row.tableau[i, q] += entry * beside[k, q]


@numba.njit(**_INNER_OPTIONS)
def _price(row):
    """Compute the profits of all columns outside the basis from the tableau."""
    tableau = row.tableau
    r = len(row.values)
    for q in range(len(row.outside)):
        tableau[r, q] = row.objective[row.outside[q]]
    for i in range(r):
        c = row.objective[row.inside[i]]
        if c != 0.0:
            for q in range(len(row.outside)):
                tableau[r, q] -= c * tableau[i, q]


@numba.njit(**_INNER_OPTIONS)
def _dual(row, y):
    """Write the dual vector of the objective; that of an artificial column in the basis is 0."""
    n = len(row.keys)
    for k in range(len(y)):
        y[k] = 0.0
    for q in range(n):
        k = row.outside[q] - n
        if k >= 0:
            y[k] = -row.tableau[len(y), q] * row.columns[n + k, k]


@numba.njit(**_INNER_OPTIONS)
def _maximise(row, limit, idle):
    """Go to a vertex with the greatest $c \\cdot a'$; returns whether it was reached within `limit` steps.

    Profits are carried along from step to step, and computed afresh before an end is accepted. No artificial column up
    to `idle` may grow: what rounding has left in one would otherwise widen the set. The row's arrays are taken out of
    it before the loop: numba counts who holds each, which in the loop took longer than the step.
    """
    tableau = row.tableau
    values = row.values
    inside = row.inside
    outside = row.outside
    column = row.column
    pivot = row.pivot
    room = row.room
    steps = row.steps
    can_be_zero = row.can_be_zero
    r = len(values)
    profit = tableau[r]
    _price(row)
    fresh = True
    while steps[0] < limit:
        q = _choose_entering(profit, outside)
        if q < 0:
            if fresh:
                return True
            _price(row)
            fresh = True
            continue
        for i in range(r + 1):
            column[i] = tableau[i, q]
        p = _choose_leaving(column, values, inside, len(pivot), room, idle)
        if p < 0:
            return False
        _exchange(tableau, values, column, pivot, p, q, room[1, p])
        outside[q], inside[p] = inside[p], outside[q]
        can_be_zero[outside[q]] = True
        steps[0] += 1
        fresh = steps[0] % FRESH == 0
        if fresh:
            _refresh(row)
            _price(row)
    return False


@numba.njit(**_INNER_OPTIONS)
def _first_vertex(row):
    """Drive the artificial columns to 0: this is a vertex of the row's set. Returns whether that worked."""
    n = len(row.keys)
    r = len(row.values)
    for k in range(r):
        row.objective[n + k] = -1.0
    _maximise(row, 20 * r, ZERO)
    remaining = 0.0
    for k in range(r):
        row.objective[n + k] = 0.0
        if row.inside[k] >= n:
            remaining += row.values[k]
    if remaining > ZERO * r:
        return False
    _refresh(row)
    _write_weights(row)
    for column in range(n + r):
        row.can_be_zero[column] = True
    for k in range(r):
        row.can_be_zero[row.inside[k]] = False
    return True


@numba.njit(**_INNER_OPTIONS)
def _write_weights(row):
    """Write the weights of the present vertex; return how far it is from the set, by its constraints."""
    r = len(row.values)
    for m in range(len(row.keys)):
        row.weights[m] = 0.0
    for i in range(r):
        if row.inside[i] < len(row.keys):
            row.weights[row.inside[i]] = row.values[i]
    largest = 0.0
    for k in range(r):
        missing = row.right[k]
        for i in range(r):
            if row.inside[i] < len(row.keys):
                missing -= row.columns[row.inside[i], k] * row.values[i]
        largest = max(largest, abs(missing))
    return largest


@numba.njit(**_INNER_OPTIONS)
def _settle(row, limit, distance):
    """Maximise, once more with a fresh tableau where the vertex drifted from the set; note the remaining distance."""
    if not _maximise(row, limit, np.inf):
        return False
    drift = _write_weights(row)
    if drift > DRIFT:
        _refresh(row)
        if not _maximise(row, limit, np.inf):
            return False
        drift = _write_weights(row)
    distance[0] = max(distance[0], drift)
    return True


@numba.njit(**_INNER_OPTIONS)
def _bound_keys(row, task, proposals, index, limit):
    """Raise each key's weight as far as it goes, the nearest first, then lower those that no vertex had at 0."""
    pending = np.empty(len(row.keys), np.bool_)
    for m in range(len(pending)):
        pending[m] = task.keys[row.keys[m]]
    weights = row.weights
    strongest = task.strongest[index, : task.key_count[index]]
    while True:
        best = -1.0
        m = -1
        for candidate in range(len(row.keys)):
            if pending[candidate] and weights[candidate] > best:
                best = weights[candidate]
                m = candidate
        if m < 0:
            break
        pending[m] = False
        row.objective[m] = 1.0
        solved = _settle(row, limit, proposals.distance[index:])
        row.objective[m] = 0.0
        if not solved:
            return False
        key = row.keys[m]
        _dual(row, proposals.upper[index, key])
        proposals.greatest[index, key] = weights[m]
        for rank in range(len(strongest)):
            proposals.leads[index, rank, key] = weights[m] - weights[row.column_of_key[strongest[rank]]]
    for m in range(len(row.keys)):
        key = row.keys[m]
        if task.keys[key]:
            proposals.least[index, key] = 0.0
        if row.can_be_zero[m] or not task.keys[key]:
            continue
        row.objective[m] = -1.0
        solved = _settle(row, limit, proposals.distance[index:])
        row.objective[m] = 0.0
        if not solved:
            return False
        _dual(row, proposals.lower[index, key])
        proposals.least[index, key] = weights[m]
    return True


@numba.njit(**_INNER_OPTIONS)
def _bound_objective(row, objective, sense, limit, y, distance, vertex):
    """Find the greatest (sense 1) or least (-1) of an objective; return it, or NaN where it was not solved."""
    for m in range(len(row.keys)):
        row.objective[m] = sense * objective[row.keys[m]]
    if not _settle(row, limit, distance):
        return np.nan
    _dual(row, y)
    total = 0.0
    for m in range(len(row.keys)):
        total += objective[row.keys[m]] * row.weights[m]
        if len(vertex):
            vertex[0, row.keys[m]] = max(row.weights[m], 0.0)
    return total


@numba.njit(**_INNER_OPTIONS)
def _solve_row(row, task, proposals, index):
    """Bound one row's keys, then its objectives; returns whether all of them were solved."""
    objectives = task.objectives[index if len(task.objectives) > 1 else 0]
    if not _first_vertex(row):
        return False
    limit = row.steps[0] + STEPS * max(20, len(row.keys), 2 * len(objectives))
    first = len(task.keys)
    if first and not _bound_keys(row, task, proposals, index, limit):
        return False
    for quantity in range(len(objectives)):
        for end in range(0 if task.both else 1, 2):
            dual = (proposals.upper if end else proposals.lower)[index, first + quantity]
            vertex = proposals.vertices[index, quantity : quantity + 1, end]
            sense = 2.0 * end - 1.0
            distance = proposals.distance[index:]
            attained = _bound_objective(row, objectives[quantity], sense, limit, dual, distance, vertex)
            (proposals.greatest if end else proposals.least)[index, first + quantity] = attained
            if np.isnan(attained):
                return False
    return True


@numba.njit(**_OPTIONS)
def solve_rows(task, proposals, indices):
    """Solve some rows of a task into `proposals` (`Proposals` of arrays), and mark those that were abandoned."""
    for index in indices:
        row = _start(task.basis[task.group[index]], task.visible[index], task.attention[index])
        proposals.failed[index] = not _solve_row(row, task, proposals, index)


with suppress(RuntimeError, AttributeError):  # no folder can be written to, or numba is switched off
    solve_rows.enable_caching()  # numba keeps the machine code on disk
