r"""Exact ends of many rows on a GPU: the method of `simplex`, one block of threads per row.

A block keeps its row's inverse in registers and makes some steps; then it writes its state, the host brings the
inverses back to full precision with one Newton step, and the rows that are not done continue. `Row` of `simplex` says
what the state is; here a row also keeps what it is doing (`_MODES`), and on which keys.
"""

from typing import Any, NamedTuple, no_type_check

import torch
import torch.nn.functional as F
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from identikit.maths.polytope.rows import Bounds, Rows, unbounded
from identikit.shapes import Bool, Float, Tensor

LONGEST = 4096  # keys that a block of threads can hold
_ROUND = 96  # steps between Newton steps
_ROUNDS = 4000
_DRIFT = 1e-3  # an inverse that is further off than this is computed anew
_SEARCH, _RAISE, _LOWER, _ORDER, _LEAST, _GREATEST, _DONE, _FAILED = range(8)  # what a row is doing
_MODE, _KEY, _OTHER, _ORDERED = range(4)  # what `state` holds

SEARCH, RAISE, LOWER = tl.constexpr(_SEARCH), tl.constexpr(_RAISE), tl.constexpr(_LOWER)
ORDER, LEAST, GREATEST = tl.constexpr(_ORDER), tl.constexpr(_LEAST), tl.constexpr(_GREATEST)
DONE, FAILED = tl.constexpr(_DONE), tl.constexpr(_FAILED)
PROFIT, PIVOT, ZERO, TIE = tl.constexpr(1e-11), tl.constexpr(1e-9), tl.constexpr(1e-12), tl.constexpr(1e-9)


@triton.jit
@no_type_check
def _objective(where, mode, key, other, objectives, n):
    """Return c at these keys; artificial columns (below 0) cost only while a vertex is searched."""
    unit = (where == key).to(tl.float64)
    sense = (mode == RAISE).to(tl.float64) - (mode == LOWER).to(tl.float64) - (mode == ORDER).to(tl.float64)
    c = sense * unit + (mode == ORDER).to(tl.float64) * (where == other).to(tl.float64)
    sense = (mode == GREATEST).to(tl.float64) - (mode == LEAST).to(tl.float64)
    given = tl.load(objectives + tl.where(sense == 0, 0, key) * n + where, mask=(where >= 0) & (where < n), other=0.0)
    return tl.where(where < 0, -(mode == SEARCH).to(tl.float64), c + sense * given)


@triton.jit
@no_type_check
def _price(turned, inverse, right, cost, i, m, n, r, CHUNK: tl.constexpr):
    """Return $y \\cdot u_m$ for every key and $y \\cdot b$, with the dual vector $y = c_B B^{-1}$."""
    scores, level = tl.zeros_like(m).to(tl.float64), tl.full((), 0.0, tl.float64)
    for start in range(0, r, CHUNK):
        k = start + tl.arange(0, CHUNK)
        part = tl.load(inverse + k[:, None] * r + i[None, :], mask=(k[:, None] < r) & (i[None, :] < r), other=0.0)
        y = tl.sum(part * cost[None, :], axis=1)
        tile = tl.load(turned + k[:, None] * n + m[None, :], mask=(k[:, None] < r) & (m[None, :] < n), other=0.0)
        scores += tl.sum(y[:, None] * tile, axis=0)
        level += tl.sum(y * tl.load(right + k, mask=k < r, other=0.0), axis=0)
    return scores, level


@triton.jit
@no_type_check
def _column(basis, inverse, entering, i, r, CHUNK: tl.constexpr):
    """Return the entering key's column in terms of the basis."""
    column = tl.zeros_like(i).to(tl.float64)
    for start in range(0, r, CHUNK):
        k = start + tl.arange(0, CHUNK)
        part = tl.load(inverse + k[:, None] * r + i[None, :], mask=(k[:, None] < r) & (i[None, :] < r), other=0.0)
        column += tl.sum(part * tl.load(basis + entering * r + k, mask=k < r, other=0.0)[:, None], axis=0)
    return column


@triton.jit
@no_type_check
def _turn(turned, inverse, column, p, pivot, i, m, n, r, CHUNK: tl.constexpr):
    """Update the inverse for a new basis; return the pivot row's entry for every key."""
    entries, turning = tl.zeros_like(m).to(tl.float64), i == p
    for start in range(0, r, CHUNK):
        k = start + tl.arange(0, CHUNK)
        fits = (k[:, None] < r) & (i[None, :] < r)
        line = tl.load(inverse + k * r + p, mask=k < r, other=0.0) / pivot
        part = tl.load(inverse + k[:, None] * r + i[None, :], mask=fits, other=0.0)
        part = tl.where(turning[None, :], line[:, None], part - line[:, None] * column[None, :])
        tl.store(inverse + k[:, None] * r + i[None, :], part, mask=fits)
        tile = tl.load(turned + k[:, None] * n + m[None, :], mask=(k[:, None] < r) & (m[None, :] < n), other=0.0)
        entries += tl.sum(line[:, None] * tile, axis=0)
    return entries


@triton.jit
@no_type_check
def _nearest(pending, values, columns, m, n, width):
    """Return the pending key with the largest weight at the present vertex, or -1."""
    basic = tl.load(pending + columns, mask=(columns >= 0) & (columns < n), other=0) != 0
    best, at = tl.max(tl.where(basic, values, -1.0), axis=0, return_indices=True)
    inside = tl.sum(tl.where(tl.arange(0, columns.shape[0]) == at, columns, 0), axis=0)
    most, any_key = tl.max(tl.load(pending + m, mask=m < width, other=0).to(tl.int32), axis=0, return_indices=True)
    return tl.where(most == 0, -1, tl.where(best >= 0.0, inside, any_key))


@triton.jit
@no_type_check
def _steps(
    basis, turned, group, visible, attention, right, inverse, values, columns, state, pending, zero, lower, upper, gap,
    objectives, active, n, r, width, quantities, top, budget, BN: tl.constexpr, BR: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Make up to `budget` steps of one row, whatever it is doing."""
    row = tl.load(active + tl.program_id(0)).to(tl.int64)
    own = tl.load(group + row).to(tl.int64) * n * r
    basis, turned, right, inverse = basis + own, turned + own, right + row * r, inverse + row * r * r
    visible, attention = visible + row * n, attention + row * n
    pending, zero, lower = pending + row * width, zero + row * width, lower + row * width
    upper, gap, state = upper + row * width, gap + row * width, state + row * 4
    i, m = tl.arange(0, BR), tl.arange(0, BN)
    inside = i < r
    x = tl.load(values + row * r + i, mask=inside, other=0.0)
    cols = tl.load(columns + row * r + i, mask=inside, other=n)
    enters = tl.load(visible + m, mask=m < n, other=0) != 0
    seen = enters
    for place in range(r):
        enters = enters & (m != tl.load(columns + row * r + place))
    mode, key = tl.load(state), tl.load(state + 1)
    other, ordered = tl.load(state + 2), tl.load(state + 3)
    cost = _objective(cols, mode, key, other, objectives, n)
    scores, level = _price(turned, inverse, right, cost, i, m, n, r, CHUNK)
    profit = _objective(m, mode, key, other, objectives, n) - scores
    fresh, left = 1, budget
    while left > 0:
        left -= 1
        best, entering = tl.max(tl.where(enters, profit, -1.0), axis=0, return_indices=True)
        waiting = tl.sum(tl.where((cols < 0) & inside, x, 0.0), axis=0)
        if (best <= PROFIT) | ((mode == SEARCH) & (waiting <= ZERO * r)):
            if fresh == 0:
                fresh = 1
            else:
                # The end of an objective: keep what was found, and choose what comes next.
                attained = tl.sum(cost * x, axis=0)
                proven = level + tl.max(tl.where(seen, profit, float("-inf")), axis=0)
                distance = tl.abs(proven - attained)
                if mode == SEARCH:
                    if waiting <= ZERO * r:
                        mode = tl.where(quantities > 0, LEAST, RAISE)
                        tl.store(zero + m, enters.to(tl.int8), mask=m < width)
                    else:
                        mode = tl.full((), FAILED, tl.int32)
                    key = tl.full((), 0, tl.int32)
                elif mode == RAISE:
                    tl.store(upper + key, tl.minimum(tl.maximum(proven, tl.load(attention + key)), 1.0))
                    tl.store(gap + key, distance)
                    tl.store(pending + key, 0)
                elif mode == LOWER:
                    tl.store(lower + key, tl.maximum(tl.minimum(-proven, tl.load(attention + key)), 0.0))
                    tl.store(gap + key, tl.maximum(tl.load(gap + key), distance))
                    tl.store(pending + key, 0)
                elif mode == ORDER:
                    tl.store(pending + other, 0)
                    if attained > TIE:
                        mode = tl.full((), DONE, tl.int32)
                    elif proven > TIE:
                        mode, ordered = tl.full((), DONE, tl.int32), tl.full((), -1, tl.int32)
                elif mode == LEAST:
                    tl.store(lower + key, tl.maximum(-proven, 0.0))
                    tl.store(gap + key, distance)
                    mode = tl.full((), GREATEST, tl.int32)
                elif mode == GREATEST:
                    tl.store(upper + key, tl.minimum(proven, 1.0))
                    tl.store(gap + key, tl.maximum(tl.load(gap + key), distance))
                    mode, key = tl.full((), LEAST, tl.int32), key + 1
                    if key == quantities:
                        mode = tl.full((), DONE, tl.int32)
                tl.debug_barrier()
                if mode == RAISE:
                    key = _nearest(pending, x, cols, m, n, width)
                    if key < 0:  # `gap` is NaN where a key was not asked for
                        mode = tl.full((), LOWER, tl.int32)
                        far = tl.load(gap + m, mask=m < n, other=0.0)
                        empty = tl.load(zero + m, mask=m < n, other=0) != 0
                        tl.store(pending + m, (seen & ~empty & (far == far)).to(tl.int8), mask=m < width)
                        tl.debug_barrier()
                if mode == LOWER:
                    key = _nearest(pending, x, cols, m, n, width)
                    if key < 0:
                        mode, ordered = tl.full((), DONE, tl.int32), tl.full((), -1, tl.int32)
                        if top > 0:
                            a = tl.load(attention + m, mask=m < n, other=0.0)
                            high = tl.load(upper + m, mask=m < n, other=0.0)
                            mode, ordered = tl.full((), ORDER, tl.int32), tl.full((), 0, tl.int32)
                            far = tl.load(gap + m, mask=m < n, other=0.0)
                            key = tl.argmax(tl.where(seen & (far == far), a, -1.0), axis=0)
                            above = seen & (far == far) & (m != key) & (high > tl.load(lower + key))
                            tl.store(pending + m, above.to(tl.int8), mask=m < width)
                            tl.debug_barrier()
                searching = mode == ORDER
                while searching:
                    other = _nearest(pending, x, cols, m, n, width)
                    if other < 0:  # the edge is certainly above all that follow it: go on with the next one
                        ordered += 1
                        a = tl.load(attention + m, mask=m < n, other=0.0)
                        high, value = tl.load(upper + m, mask=m < n, other=0.0), tl.load(attention + key)
                        far = tl.load(gap + m, mask=m < n, other=0.0)
                        after = seen & (far == far) & ((a < value) | ((a == value) & (m > key)))
                        if (ordered == top) | (tl.sum(after.to(tl.int32), axis=0) == 0):
                            mode = tl.full((), DONE, tl.int32)
                            searching = mode == ORDER
                        else:
                            key = tl.argmax(tl.where(after, a, -1.0), axis=0)
                            above = after & (m != key) & (high > tl.load(lower + key))
                            tl.store(pending + m, above.to(tl.int8), mask=m < width)
                            tl.debug_barrier()
                    else:
                        ahead = tl.sum(tl.where(cols == other, x, 0.0) - tl.where(cols == key, x, 0.0), axis=0)
                        if ahead > TIE:
                            mode = tl.full((), DONE, tl.int32)
                        searching = other < 0
                if (mode == DONE) | (mode == FAILED):
                    left = 0
            cost = _objective(cols, mode, key, other, objectives, n)
            scores, level = _price(turned, inverse, right, cost, i, m, n, r, CHUNK)
            profit = _objective(m, mode, key, other, objectives, n) - scores
        else:
            column = _column(basis, inverse, entering, i, r, CHUNK)
            idle = (cols < 0) & (x <= ZERO)
            blocks = inside & tl.where(idle, tl.abs(column) > PIVOT, column > PIVOT)
            safe = tl.where(blocks & ~idle, column, 1.0)
            limit = tl.where(idle, 0.0, tl.maximum(x, 0.0) / safe)
            reach = tl.where(idle, 0.0, (tl.maximum(x, 0.0) + ZERO) / safe)
            reach = tl.min(tl.where(blocks, reach, float("inf")), axis=0)
            size, p = tl.max(tl.where(blocks & (limit <= reach), tl.abs(column), -1.0), axis=0, return_indices=True)
            if size <= 0:
                mode, left = tl.full((), FAILED, tl.int32), 0
            else:
                turning = i == p
                step = tl.sum(tl.where(turning, limit, 0.0), axis=0)
                pivot = tl.sum(tl.where(turning, column, 0.0), axis=0)
                gone = tl.sum(tl.where(turning, cols, 0), axis=0)
                tl.debug_barrier()
                profit -= best * _turn(turned, inverse, column, p, pivot, i, m, n, r, CHUNK)
                profit = tl.where(m == entering, 0.0, profit)
                x = tl.where(turning, step, x - step * column)
                cols = tl.where(turning, entering, cols)
                enters = (enters & (m != entering)) | (m == gone)
                if gone >= 0:
                    tl.store(zero + gone, 1)
                tl.debug_barrier()
                fresh = 0
    tl.store(values + row * r + i, x, mask=inside)
    tl.store(columns + row * r + i, cols, mask=inside)
    tl.store(state, mode)
    tl.store(state + 1, key)
    tl.store(state + 2, other)
    tl.store(state + 3, ordered)


class _State(NamedTuple):
    """All rows in step, on the GPU; see `simplex.Row`. `keys` of a row stand in memory one after another."""

    basis: Float[Tensor, "group key rank"]
    turned: Float[Tensor, "group rank key"]
    group: Tensor
    visible: Tensor
    attention: Float[Tensor, "row key"]
    right: Float[Tensor, "row rank"]
    inverse: Float[Tensor, "row rank rank"]  # transposed
    values: Float[Tensor, "row rank"]
    columns: Tensor
    state: Tensor
    pending: Tensor
    zero: Tensor
    lower: Float[Tensor, "row key"]
    upper: Float[Tensor, "row key"]
    gap: Float[Tensor, "row key"]


def simplex_bounds(
    rows: Rows,
    objectives: Float[Tensor, "quantity key"] | None = None,
    *,
    asked: Bool[Tensor, "key"],
    top: int,
) -> tuple[Bounds, Bool[Tensor, "row"]]:
    """Bound the asked keys, or other quantities, of every row; see `Bounds`. Also returns which rows failed."""
    found = unbounded(rows, objectives)
    free = rows.free.nonzero()[:, 0]
    quantities = 0 if objectives is None else len(objectives)
    work, sign = _started(rows.some(free), asked.to(free.device), [part[free] for part in found[:3]])
    wanted = work.attention if objectives is None else objectives.contiguous()
    off = _run(work, sign, wanted, (quantities, top))
    width = quantities or len(asked)
    ends = [part[:, :width] for part in (work.lower, work.upper, work.gap + off[:, None])]
    if objectives is not None:
        own = rows.attention[free] @ objectives.mT
        ends[:2] = torch.minimum(ends[0], own), torch.maximum(ends[1], own)
    for part, end in zip(found, (*ends, work.state[:, _ORDERED].long()), strict=True):
        part[free] = end
    failed = torch.zeros_like(rows.free)
    failed[free] = work.state[:, _MODE] != _DONE
    return found, failed


def _started(rows: Rows, asked: Bool[Tensor, "key"], ends: list[Tensor]) -> tuple[_State, Tensor]:
    """Return the state before the first step: the artificial columns are the basis; and their signs."""
    right, count, rank = rows.right, len(rows.group), rows.basis.shape[2]
    sign = torch.where(right < 0, -1.0, 1.0).to(right)
    columns = torch.arange(-1, -1 - rank, -1, dtype=torch.int32, device=right.device).repeat(count, 1)
    width = max(len(asked), ends[0].shape[1])
    ends = [F.pad(end, (0, width - end.shape[1])) for end in ends]
    state = torch.zeros(count, 4, dtype=torch.int32, device=right.device)
    state[:, _ORDERED] = -1
    pending = F.pad(rows.visible & asked, (0, width - len(asked))).to(torch.int8)
    work = _State(
        rows.basis.contiguous(), rows.basis.mT.contiguous(), rows.group.int(), rows.visible.to(torch.int8),
        rows.attention, right, torch.diag_embed(sign), right.abs(), columns, state, pending, torch.zeros_like(pending),
        *ends,
    )  # fmt: skip
    return work, sign


def _run(work: _State, sign: Tensor, objectives: Tensor, wanted: tuple[int, int]) -> Float[Tensor, "row"]:
    """Let all rows make their steps; return how far each row's vertices were from its set, by the constraints."""
    count, n = work.attention.shape
    rank, width = work.right.shape[1], work.gap.shape[1]
    block = triton.next_power_of_2(max(width, 32))
    sizes = {"BN": block, "BR": triton.next_power_of_2(max(rank, 32)), "CHUNK": max(1, min(8, 1024 // block))}
    off = work.right.new_zeros(count)
    for _ in range(_ROUNDS):
        active = (work.state[:, _MODE] < _DONE).nonzero()[:, 0]
        if not len(active):
            break
        launch: Any = _steps[(len(active),)]  # pyright: ignore[reportIndexIssue]
        launch(*work, objectives, active, n, rank, width, *wanted, _ROUND, **sizes, num_warps=1)
        off[active] = torch.maximum(off[active], _refresh(work, sign, active))
    return off


def _refresh(work: _State, sign: Tensor, active: Tensor) -> Float[Tensor, "row"]:
    r"""Bring inverses back to full precision: $M \leftarrow M (2I - BM)$; return how far the vertices were off."""
    n, rank = work.attention.shape[1], work.right.shape[1]
    columns, right, inverse = work.columns[active].long(), work.right[active], work.inverse[active].mT
    matrix = work.basis[work.group[active].long()[:, None], columns.clamp(0, n - 1)].mT.contiguous()
    place = (-1 - columns).clamp(min=0)
    unit = F.one_hot(place, rank).to(matrix) * sign[active].gather(1, place)[..., None]
    matrix = torch.where((columns < 0)[:, None], unit.mT, matrix)
    off = (torch.einsum("bij,bj->bi", matrix, work.values[active]) - right).abs().amax(-1)
    error = torch.eye(rank, dtype=matrix.dtype, device=matrix.device) - matrix @ inverse
    lost = error.abs().amax((1, 2)) > _DRIFT
    inverse = inverse + inverse @ error
    if bool(lost.any()):
        inverse[lost] = torch.linalg.inv_ex(matrix[lost]).inverse
    work.inverse[active] = inverse.mT
    work.values[active] = (inverse @ right[..., None])[..., 0]
    return off
