r"""Exact ends of many rows on a GPU: the method of `simplex`, one block of threads per row.

A block keeps its row's inverse in registers and makes some steps; then it writes its state, the host brings the
inverses back to full precision with one Newton step, and the rows that are not done continue. `Row` of `simplex` says
what the state is; here a row also keeps what it is doing (`_MODES`), and on which keys.
"""

from typing import NamedTuple, no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from identikit.maths.polytope import Bounds, Rows, unbounded
from identikit.shapes import Bool, Float, Tensor

LARGEST = 128  # constraints whose inverse fits a block's registers
LONGEST = 8192  # keys that a block can hold
_ROUND = 96  # steps between Newton steps
_ROUNDS = 4000
_DRIFT = 1e-3  # an inverse that is further off than this is computed anew
_SEARCH, _RAISE, _LOWER, _ORDER, _LEAST, _GREATEST, _DONE, _FAILED = range(8)  # what a row is doing
_MODE, _KEY, _OTHER, _ORDERED = range(4)  # what `state` holds

SEARCH, RAISE, LOWER = tl.constexpr(_SEARCH), tl.constexpr(_RAISE), tl.constexpr(_LOWER)
ORDER, LEAST, GREATEST = tl.constexpr(_ORDER), tl.constexpr(_LEAST), tl.constexpr(_GREATEST)
DONE, FAILED = tl.constexpr(_DONE), tl.constexpr(_FAILED)
PROFIT, PIVOT, ZERO, TIE = tl.constexpr(1e-11), tl.constexpr(1e-9), tl.constexpr(1e-12), tl.constexpr(1e-9)
CHUNK = tl.constexpr(8)


@triton.jit
@no_type_check
def _scores(turned, vector, scratch, n, r, BN: tl.constexpr, BR: tl.constexpr):
    """Return $y \\cdot u_m$ for every key: `turned` is U transposed, `vector` y, which passes through memory."""
    at, m = tl.arange(0, BR), tl.arange(0, BN)
    tl.debug_barrier()
    tl.store(scratch + at, vector, mask=at < r)
    tl.debug_barrier()
    total = tl.zeros((BN,), tl.float64)
    for start in range(0, r, CHUNK):
        k = start + tl.arange(0, CHUNK)
        part = tl.load(scratch + k, mask=k < r, other=0.0)
        tile = tl.load(turned + k[:, None] * n + m[None, :], mask=(k[:, None] < r) & (m[None, :] < n), other=0.0)
        total += tl.sum(part[:, None] * tile, axis=0)
    return total


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
def _steps(
    basis, turned, group, visible, attention, right, inverse, values, columns, state, pending, zero, lower, upper, gap,
    objectives, scratch, active, n, r, width, quantities, top, budget, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Make up to `budget` steps of one row, whatever it is doing."""
    row = tl.load(active + tl.program_id(0)).to(tl.int64)
    own = tl.load(group + row).to(tl.int64) * n * r
    basis, turned, scratch = basis + own, turned + own, scratch + row * r
    i, m = tl.arange(0, BR), tl.arange(0, BN)
    inside, here = i < r, m < n
    square = row * r * r + i[:, None] * r + i[None, :]
    fits = inside[:, None] & inside[None, :]
    M = tl.load(inverse + square, mask=fits, other=0.0)
    x = tl.load(values + row * r + i, mask=inside, other=0.0)
    cols = tl.load(columns + row * r + i, mask=inside, other=n)
    b = tl.load(right + row * r + i, mask=inside, other=0.0)
    seen = tl.load(visible + row * n + m, mask=here, other=0) != 0
    a = tl.load(attention + row * n + m, mask=here, other=0.0)
    keys, here = row * width + m, m < width
    wanted = tl.load(pending + keys, mask=here, other=0) != 0
    empty = tl.load(zero + keys, mask=here, other=0) != 0
    low, high = tl.load(lower + keys, mask=here, other=0.0), tl.load(upper + keys, mask=here, other=0.0)
    far = tl.load(gap + keys, mask=here, other=0.0)
    mode, key = tl.load(state + row * 4), tl.load(state + row * 4 + 1)
    other, ordered = tl.load(state + row * 4 + 2), tl.load(state + row * 4 + 3)
    basic = tl.sum((cols[:, None] == m[None, :]).to(tl.int32), axis=0) > 0
    cost = _objective(cols, mode, key, other, objectives, n)
    y = tl.sum(cost[:, None] * M, axis=0)
    profit = _objective(m, mode, key, other, objectives, n) - _scores(turned, y, scratch, n, r, BN, BR)
    fresh, left = 1, budget
    while left > 0:
        left -= 1
        best, entering = tl.max(tl.where(seen & ~basic, profit, -1.0), axis=0, return_indices=True)
        waiting = tl.sum(tl.where((cols < 0) & inside, x, 0.0), axis=0)
        optimal = best <= PROFIT
        if mode == SEARCH:
            optimal = optimal | (waiting <= ZERO * r)
        if optimal:
            if fresh == 0:
                fresh = 1
            else:
                # The end of an objective: keep what was found, and choose what comes next.
                attained = tl.sum(cost * x, axis=0)
                proven = tl.sum(y * b, axis=0) + tl.max(tl.where(seen, profit, float("-inf")), axis=0)
                distance = tl.abs(proven - attained)
                weights = tl.sum(tl.where(cols[:, None] == m[None, :], x[:, None], 0.0), axis=0)
                chosen = m == key
                if mode == SEARCH:
                    mode = tl.where(waiting <= ZERO * r, tl.where(quantities > 0, LEAST, RAISE), FAILED)
                    empty = seen & ~basic
                    key = tl.full((), 0, tl.int32)
                elif mode == RAISE:
                    high = tl.where(chosen, tl.minimum(tl.maximum(proven, a), 1.0), high)
                    far = tl.where(chosen, distance, far)
                    wanted = wanted & ~chosen
                elif mode == LOWER:
                    low = tl.where(chosen, tl.maximum(tl.minimum(-proven, a), 0.0), low)
                    far = tl.where(chosen, tl.maximum(far, distance), far)
                    wanted = wanted & ~chosen
                elif mode == ORDER:
                    wanted = wanted & (m != other)
                    if attained > TIE:
                        mode = tl.full((), DONE, tl.int32)
                    elif proven > TIE:
                        mode, ordered = tl.full((), DONE, tl.int32), tl.full((), -1, tl.int32)
                elif mode == LEAST:
                    low = tl.where(chosen, tl.maximum(-proven, 0.0), low)
                    far = tl.where(chosen, distance, far)
                    mode = tl.full((), GREATEST, tl.int32)
                elif mode == GREATEST:
                    high = tl.where(chosen, tl.minimum(proven, 1.0), high)
                    far = tl.where(chosen, tl.maximum(far, distance), far)
                    mode, key = tl.full((), LEAST, tl.int32), key + 1
                    if key == quantities:
                        mode = tl.full((), DONE, tl.int32)
                if mode == RAISE:
                    if tl.sum(wanted.to(tl.int32), axis=0) > 0:
                        key = tl.argmax(tl.where(wanted, weights, -1.0), axis=0)
                    else:  # `far` is NaN where a key was not asked for
                        mode = tl.full((), LOWER, tl.int32)
                        wanted = seen & ~empty & (far == far)
                        low = tl.where(seen & (far == far), 0.0, low)
                if mode == LOWER:
                    if tl.sum(wanted.to(tl.int32), axis=0) > 0:
                        key = tl.argmax(tl.where(wanted, weights, -1.0), axis=0)
                    elif top > 0:
                        mode, ordered = tl.full((), ORDER, tl.int32), tl.full((), 0, tl.int32)
                        key = tl.argmax(tl.where(seen, a, -1.0), axis=0)
                        floor = tl.max(tl.where(m == key, low, 0.0), axis=0)
                        wanted = seen & (m != key) & (high > floor)
                    else:
                        mode, ordered = tl.full((), DONE, tl.int32), tl.full((), -1, tl.int32)
                searching = mode == ORDER
                while searching:
                    place = tl.max(tl.where(m == key, weights, 0.0), axis=0)
                    ahead = tl.max(tl.where(wanted, weights, -1.0), axis=0)
                    if tl.sum(wanted.to(tl.int32), axis=0) == 0:
                        # The edge is certainly above all that follow it: go on with the next one.
                        ordered += 1
                        value = tl.max(tl.where(m == key, a, 0.0), axis=0)
                        after = seen & ((a < value) | ((a == value) & (m > key)))
                        if (ordered == top) | (tl.sum(after.to(tl.int32), axis=0) == 0):
                            mode = tl.full((), DONE, tl.int32)
                            searching = False
                        else:
                            key = tl.argmax(tl.where(after, a, -1.0), axis=0)
                            floor = tl.max(tl.where(m == key, low, 0.0), axis=0)
                            wanted = after & (m != key) & (high > floor)
                    elif ahead > place + TIE:
                        mode = tl.full((), DONE, tl.int32)
                        searching = False
                    else:
                        other = tl.argmax(tl.where(wanted, weights, -1.0), axis=0)
                        searching = False
                if (mode == DONE) | (mode == FAILED):
                    left = 0
                fresh = 1
            cost = _objective(cols, mode, key, other, objectives, n)
            y = tl.sum(cost[:, None] * M, axis=0)
            profit = _objective(m, mode, key, other, objectives, n) - _scores(turned, y, scratch, n, r, BN, BR)
        else:
            entry = tl.load(basis + entering * r + i, mask=inside, other=0.0)
            w = tl.sum(M * entry[None, :], axis=1)
            idle = (cols < 0) & (x <= ZERO)
            blocks = inside & tl.where(idle, tl.abs(w) > PIVOT, w > PIVOT)
            safe = tl.where(blocks & ~idle, w, 1.0)
            limit = tl.where(idle, 0.0, tl.maximum(x, 0.0) / safe)
            reach = tl.where(idle, 0.0, (tl.maximum(x, 0.0) + ZERO) / safe)
            reach = tl.min(tl.where(blocks, reach, float("inf")), axis=0)
            size, p = tl.max(tl.where(blocks & (limit <= reach), tl.abs(w), -1.0), axis=0, return_indices=True)
            if size <= 0:
                mode, left = tl.full((), FAILED, tl.int32), 0
            else:
                turning = i == p
                step = tl.sum(tl.where(turning, limit, 0.0), axis=0)
                pivot = tl.sum(tl.where(turning, w, 0.0), axis=0)
                line = tl.sum(tl.where(turning[:, None], M, 0.0), axis=0) / pivot
                M = tl.where(turning[:, None], line[None, :], M - w[:, None] * line[None, :])
                x = tl.where(turning, step, x - step * w)
                gone = tl.sum(tl.where(turning, cols, 0), axis=0)
                cols = tl.where(turning, entering, cols)
                basic = (basic | (m == entering)) & (m != gone)
                empty = empty | (m == gone)
                profit -= best * _scores(turned, line, scratch, n, r, BN, BR)
                profit = tl.where(m == entering, 0.0, profit)
                fresh = 0
    tl.store(inverse + square, M, mask=fits)
    tl.store(values + row * r + i, x, mask=inside)
    tl.store(columns + row * r + i, cols, mask=inside)
    tl.store(pending + keys, wanted.to(tl.int8), mask=here)
    tl.store(zero + keys, empty.to(tl.int8), mask=here)
    tl.store(lower + keys, low, mask=here)
    tl.store(upper + keys, high, mask=here)
    tl.store(gap + keys, far, mask=here)
    tl.store(state + row * 4, mode)
    tl.store(state + row * 4 + 1, key)
    tl.store(state + row * 4 + 2, other)
    tl.store(state + row * 4 + 3, ordered)


class _State(NamedTuple):
    """All rows in step, on the GPU; see `simplex.Row`. `keys` of a row stand in memory one after another."""

    basis: Float[Tensor, "group key rank"]
    turned: Float[Tensor, "group rank key"]
    group: Tensor
    visible: Tensor
    attention: Float[Tensor, "row key"]
    right: Float[Tensor, "row rank"]
    inverse: Float[Tensor, "row rank rank"]
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
    sizes = {"BN": triton.next_power_of_2(max(width, 16)), "BR": triton.next_power_of_2(max(rank, 16))}
    scratch, off = torch.empty_like(work.right), work.right.new_zeros(count)
    for _ in range(_ROUNDS):
        active = (work.state[:, _MODE] < _DONE).nonzero()[:, 0]
        if not len(active):
            break
        _steps[(len(active),)](
            *work,
            objectives,
            scratch,
            active,
            n,
            rank,
            width,
            *wanted,
            _ROUND,
            **sizes,
            num_warps=4 if rank <= 64 else 16,
        )
        off[active] = torch.maximum(off[active], _refresh(work, sign, active))
    return off


def _refresh(work: _State, sign: Tensor, active: Tensor) -> Float[Tensor, "row"]:
    r"""Bring inverses back to full precision: $M \leftarrow M (2I - BM)$; return how far the vertices were off."""
    n, rank = work.attention.shape[1], work.right.shape[1]
    columns, right, inverse = work.columns[active].long(), work.right[active], work.inverse[active]
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
    work.inverse[active] = inverse
    work.values[active] = (inverse @ right[..., None])[..., 0]
    return off
