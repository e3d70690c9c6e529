r"""Exact ends of many rows on a GPU: the method of `cpu`, one block of threads per row.

A block keeps its row's inverse in registers and makes some steps; then it writes its state, the host brings the
inverses back to full precision with one Newton step, and the rows that are not done continue. `Row` of `cpu` says what
the state is; here a row also keeps what it is doing (`_MODES`), and on which key or objective. Where rows are few and
objectives many, several blocks share the objectives of a row.
"""

from functools import partial
from typing import Any, NamedTuple, no_type_check

import torch
import torch.nn.functional as F
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from identikit.maths.polytope.bounds import Proposals, Question, rows_at_once, strongest_keys
from identikit.maths.polytope.rows import Rows
from identikit.shapes import Float, Tensor

LONGEST = 4096  # keys that a block of threads can hold
_ROUND = 96  # steps between Newton steps
_ROUNDS = 4000
_DRIFT = 1e-3  # an inverse that is further off than this is recomputed
_BLOCKS = 4096  # of threads, that keep a GPU busy
_SHARE = 8  # objectives that a block solves at least, as each begins with a search for a vertex
_MODES = range(7)  # what a row is doing
_SEARCHING = _MODES[0]
_DONE = _MODES[-2]

SEARCH, RAISE, LOWER, LEAST, GREATEST, DONE, FAILED = map(tl.constexpr, _MODES)
PROFIT = tl.constexpr(1e-11)
PIVOT = tl.constexpr(1e-9)
ZERO = tl.constexpr(1e-12)


@triton.jit
@no_type_check
def _objective(where, mode, key, objectives, n):
    """Return c at these keys; artificial columns (below 0) cost only while a vertex is searched."""
    unit = (where == key).to(tl.float64)
    c = unit * ((mode == RAISE).to(tl.float64) - (mode == LOWER).to(tl.float64))
    sense = (mode == GREATEST).to(tl.float64) - (mode == LEAST).to(tl.float64)
    inside = (where >= 0) & (where < n) & (sense != 0)
    given = tl.load(objectives + tl.where(sense == 0, 0, key) * n + where, mask=inside, other=0.0)
    return tl.where(where < 0, -(mode == SEARCH).to(tl.float64), c + sense * given)


@triton.jit
@no_type_check
def _scores(turned, inverse, cost, i, m, n, r, CHUNK: tl.constexpr):
    """Return $y \\cdot u_m$ for every key, with the dual vector $y = c_B B^{-1}$."""
    scores = tl.zeros_like(m).to(tl.float64)
    for start in range(0, r, CHUNK):
        k = start + tl.arange(0, CHUNK)
        part = tl.load(inverse + k[:, None] * r + i[None, :], mask=(k[:, None] < r) & (i[None, :] < r), other=0.0)
        y = tl.sum(part * cost[None, :], axis=1)
        tile = tl.load(turned + k[:, None] * n + m[None, :], mask=(k[:, None] < r) & (m[None, :] < n), other=0.0)
        scores += tl.sum(y[:, None] * tile, axis=0)
    return scores


@triton.jit
@no_type_check
def _store_dual(out, inverse, cost, i, r, CHUNK: tl.constexpr):
    """Write the dual vector."""
    for start in range(0, r, CHUNK):
        k = start + tl.arange(0, CHUNK)
        part = tl.load(inverse + k[:, None] * r + i[None, :], mask=(k[:, None] < r) & (i[None, :] < r), other=0.0)
        tl.store(out + k, tl.sum(part * cost[None, :], axis=1), mask=k < r)


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
    entries = tl.zeros_like(m).to(tl.float64)
    turning = i == p
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
def _nearest(pending, values, columns, m, n):
    """Return the pending key with the largest weight at the present vertex, or -1."""
    basic = tl.load(pending + columns, mask=(columns >= 0) & (columns < n), other=0) != 0
    best, at = tl.max(tl.where(basic, values, -1.0), axis=0, return_indices=True)
    inside = tl.sum(tl.where(tl.arange(0, columns.shape[0]) == at, columns, 0), axis=0)
    most, any_key = tl.max(tl.load(pending + m, mask=m < n, other=0).to(tl.int32), axis=0, return_indices=True)
    return tl.where(most == 0, -1, tl.where(best >= 0.0, inside, any_key))


@triton.jit
@no_type_check
def _steps(
    basis, turned, group, visible, asked, strongest, objectives, right, inverse, values, columns, state, pending, zero,
    upper, lower, greatest, least, ahead, vertices, active, n, r, keys, quantities, top, per_row, both, shown, budget,
    BN: tl.constexpr, BR: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Make up to `budget` steps of one row, whatever it is doing."""
    row = tl.load(active + tl.program_id(0)).to(tl.int64)
    own = tl.load(group + row).to(tl.int64) * n * r
    every = keys + quantities
    basis += own
    turned += own
    inverse += row * r * r
    visible += row * n
    pending += row * n
    zero += row * n
    state += row * 2
    objectives += row * per_row * quantities * n
    strongest += row * top
    upper += row * every * r
    lower += row * every * r
    greatest += row * every
    least += row * every
    ahead += row * top * n
    vertices += row * shown * quantities * 2 * n
    i = tl.arange(0, BR)
    m = tl.arange(0, BN)
    inside = i < r
    x = tl.load(values + row * r + i, mask=inside, other=0.0)
    cols = tl.load(columns + row * r + i, mask=inside, other=n)
    enters = tl.load(visible + m, mask=m < n, other=0) != 0
    seen = enters
    for place in range(r):
        enters = enters & (m != tl.load(columns + row * r + place))
    mode = tl.load(state)
    key = tl.load(state + 1)
    cost = _objective(cols, mode, key, objectives, n)
    profit = _objective(m, mode, key, objectives, n) - _scores(turned, inverse, cost, i, m, n, r, CHUNK)
    fresh = 1
    left = budget
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
                if mode == SEARCH:
                    if waiting <= ZERO * r:
                        tl.store(zero + m, enters.to(tl.int8), mask=m < n)
                        mode = tl.where(keys > 0, RAISE, tl.where(both > 0, LEAST, GREATEST))
                    else:
                        mode = tl.full((), FAILED, tl.int32)
                    key = tl.full((), 0, tl.int32)
                elif mode == RAISE:
                    _store_dual(upper + key * r, inverse, cost, i, r, CHUNK)
                    tl.store(greatest + key, attained)
                    tl.store(pending + key, 0)
                    for place in range(top):
                        first = tl.load(strongest + place)
                        weight = tl.sum(tl.where((cols == first) & inside, x, 0.0), axis=0)
                        tl.store(ahead + place * n + key, attained - weight)
                elif mode == LOWER:
                    _store_dual(lower + key * r, inverse, cost, i, r, CHUNK)
                    tl.store(least + key, -attained)
                    tl.store(pending + key, 0)
                elif mode == LEAST:
                    _store_dual(lower + (keys + key) * r, inverse, cost, i, r, CHUNK)
                    tl.store(least + keys + key, -attained)
                    if shown > 0:
                        tl.store(vertices + key * 2 * n + cols, x, mask=inside & (cols >= 0))
                    mode = tl.full((), GREATEST, tl.int32)
                elif mode == GREATEST:
                    _store_dual(upper + (keys + key) * r, inverse, cost, i, r, CHUNK)
                    tl.store(greatest + keys + key, attained)
                    if shown > 0:
                        tl.store(vertices + (key * 2 + 1) * n + cols, x, mask=inside & (cols >= 0))
                    key += 1
                    mode = tl.where(key == quantities, DONE, tl.where(both > 0, LEAST, GREATEST))
                tl.debug_barrier()
                if mode == RAISE:
                    key = _nearest(pending, x, cols, m, n)
                    if key < 0:
                        mode = tl.full((), LOWER, tl.int32)
                        wanted = tl.load(asked + m, mask=m < n, other=0) != 0
                        empty = tl.load(zero + m, mask=m < n, other=0) != 0
                        tl.store(pending + m, (seen & ~empty & wanted).to(tl.int8), mask=m < n)
                        tl.debug_barrier()
                if mode == LOWER:
                    key = _nearest(pending, x, cols, m, n)
                    if key < 0:
                        key = tl.full((), 0, tl.int32)
                        mode = tl.where(quantities == 0, DONE, tl.where(both > 0, LEAST, GREATEST))
                if (mode == DONE) | (mode == FAILED):
                    left = 0
            cost = _objective(cols, mode, key, objectives, n)
            profit = _objective(m, mode, key, objectives, n) - _scores(turned, inverse, cost, i, m, n, r, CHUNK)
        else:
            column = _column(basis, inverse, entering, i, r, CHUNK)
            idle = (cols < 0) & ((x <= ZERO) | (mode != SEARCH))
            blocks = inside & tl.where(idle, tl.abs(column) > PIVOT, column > PIVOT)
            safe = tl.where(blocks & ~idle, column, 1.0)
            limit = tl.where(idle, 0.0, tl.maximum(x, 0.0) / safe)
            reach = tl.where(idle, 0.0, (tl.maximum(x, 0.0) + ZERO) / safe)
            reach = tl.min(tl.where(blocks, reach, float("inf")), axis=0)
            size, p = tl.max(tl.where(blocks & (limit <= reach), tl.abs(column), -1.0), axis=0, return_indices=True)
            if size <= 0:
                mode = tl.full((), FAILED, tl.int32)
                left = 0
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


class _State(NamedTuple):
    """All rows in step, on the GPU; see `cpu.Row`. What a row has stands in memory one after another."""

    basis: Float[Tensor, "group key rank"]
    turned: Float[Tensor, "group rank key"]
    group: Tensor
    visible: Tensor
    asked: Tensor
    strongest: Tensor
    objectives: Tensor
    right: Float[Tensor, "row rank"]
    inverse: Float[Tensor, "row rank rank"]  # transposed
    values: Float[Tensor, "row rank"]
    columns: Tensor
    state: Tensor
    pending: Tensor
    zero: Tensor


def propose(rows: Rows, wanted: Question, *, both: bool = True, vertices: bool = False) -> Proposals:
    """Solve what is asked of every free row; see `cpu.propose`."""
    found = Proposals.empty(rows, wanted, vertices=vertices)
    free = rows.free.nonzero()[:, 0]
    if not len(free):
        return found
    some = rows.select(free)
    asked = wanted.select(free)
    blocks = _blocks(some, asked)
    solve = _solved if blocks == 1 else partial(_solved_in_parts, blocks)
    for every, solved in zip(found, solve(some, asked, both=both, vertices=vertices), strict=True):
        every[free] = solved
    return found


def _blocks(rows: Rows, wanted: Question) -> int:
    """Return how many blocks of threads solve the objectives of one row; few rows would leave the GPU idle."""
    if wanted.keys is not None or wanted.objectives is None or wanted.top:
        return 1
    quantities, n = wanted.objectives.shape[-2:]
    count = len(rows.group)
    if count > rows_at_once(rows, 4 * quantities * n):  # each row has objectives of its own then
        return 1
    return max(1, min(_BLOCKS // count, quantities // _SHARE))


def _solved_in_parts(blocks: int, rows: Rows, wanted: Question, *, both: bool, vertices: bool) -> Proposals:
    """Solve free rows, each by several blocks of threads, which share out its objectives."""
    objectives = wanted.all_objectives(rows)
    count = len(rows.group)
    quantities = objectives.shape[1]
    each = -(-quantities // blocks)
    parts = F.pad(objectives, (0, 0, 0, blocks * each - quantities)).unflatten(1, (blocks, each))
    repeated = rows.select(torch.arange(count, device=rows.group.device).repeat_interleave(blocks))
    own = Question(objectives=parts.expand(count, -1, -1, -1).flatten(0, 1))
    found = _solved(repeated, own, both=both, vertices=vertices)

    def together(part: Tensor) -> Tensor:
        return part.unflatten(0, (count, blocks)).flatten(1, 2)[:, :quantities]

    return Proposals(
        upper=together(found.upper),
        lower=together(found.lower),
        greatest=together(found.greatest),
        least=together(found.least),
        off=found.off.unflatten(0, (count, blocks)).amax(1),
        ahead=found.ahead[::blocks],
        vertices=together(found.vertices),
        failed=found.failed.unflatten(0, (count, blocks)).any(1),
    )


def _solved(rows: Rows, wanted: Question, *, both: bool, vertices: bool) -> Proposals:
    """Solve rows that are all free, a block of threads each."""
    found = Proposals.empty(rows, wanted, vertices=vertices)
    n = rows.attention.shape[1]
    keys = 0 if wanted.keys is None else n
    if wanted.keys is not None:
        asked = rows.visible & wanted.keys.to(rows.visible.device)
        found.least[:, :n] = found.least[:, :n].masked_fill(asked, 0.0)
    work, sign = _started(rows, wanted)
    quantities = found.greatest.shape[1] - keys
    per_row = int(work.objectives.ndim == 3 and len(work.objectives) > 1)
    settings = (keys, quantities, work.strongest.shape[1], per_row, int(both), int(vertices))
    found.off[:] = _run(work, sign, found, settings)
    found.failed[:] = work.state[:, 0] != _DONE
    return found


def _started(rows: Rows, wanted: Question) -> tuple[_State, Tensor]:
    """Return the state before the first step: the artificial columns are the basis; and their signs."""
    right = rows.right
    count, rank = right.shape
    n = rows.attention.shape[1]
    sign = torch.where(right < 0, -1.0, 1.0).to(right)
    columns = torch.arange(-1, -1 - rank, -1, dtype=torch.int32, device=right.device).repeat(count, 1)
    state = torch.zeros(count, 2, dtype=torch.int32, device=right.device)
    asked = torch.ones(n, dtype=torch.bool) if wanted.keys is None else wanted.keys
    among = rows.visible & asked.to(right.device)
    strongest = strongest_keys(rows, among)[:, : min(wanted.top, n)].int().contiguous()
    objectives = wanted.all_objectives(rows)[:, 0 if wanted.keys is None else n :].contiguous()
    work = _State(
        rows.basis.contiguous(), rows.basis.mT.contiguous(), rows.group.int(), rows.visible.to(torch.int8),
        asked.to(right.device, torch.int8), strongest, objectives, right, torch.diag_embed(sign), right.abs(), columns,
        state, among.to(torch.int8), torch.zeros_like(rows.visible, dtype=torch.int8),
    )  # fmt: skip
    return work, sign


def _run(work: _State, sign: Tensor, found: Proposals, settings: tuple[int, ...]) -> Float[Tensor, "row"]:
    """Let all rows make their steps; return how far each row's vertices were from its set, by the constraints."""
    count, n = work.visible.shape
    rank = work.right.shape[1]
    block = triton.next_power_of_2(max(n, 32))
    sizes = {"BN": block, "BR": triton.next_power_of_2(max(rank, 32)), "CHUNK": max(1, min(8, 1024 // block))}
    outputs = (found.upper, found.lower, found.greatest, found.least, found.ahead, found.vertices)
    off = work.right.new_zeros(count)
    for _ in range(_ROUNDS):
        active = (work.state[:, 0] < _DONE).nonzero()[:, 0]
        if not len(active):
            break
        launch: Any = _steps[(len(active),)]  # pyright: ignore[reportIndexIssue]
        launch(*work, *outputs, active, n, rank, *settings, _ROUND, **sizes, num_warps=1)
        off[active] = torch.maximum(off[active], _refresh(work, sign, active))
    return off


def _refresh(work: _State, sign: Tensor, active: Tensor) -> Float[Tensor, "row"]:
    r"""Bring inverses back to full precision: $M \leftarrow M (2I - BM)$; return how far the vertices were off."""
    n = work.visible.shape[1]
    rank = work.right.shape[1]
    columns = work.columns[active].long()
    right = work.right[active]
    inverse = work.inverse[active].mT
    matrix = work.basis[work.group[active].long()[:, None], columns.clamp(0, n - 1)].mT.contiguous()
    place = (-1 - columns).clamp(min=0)
    unit = F.one_hot(place, rank).to(matrix) * sign[active].gather(1, place)[..., None]
    matrix = torch.where((columns < 0)[:, None], unit.mT, matrix)
    kept = work.values[active].masked_fill(columns < 0, 0.0)  # what an artificial column holds is missing
    off = (torch.einsum("bij,bj->bi", matrix, kept) - right).abs().amax(-1)
    off = off.masked_fill(work.state[active, 0] == _SEARCHING, 0.0)  # there is no vertex yet
    error = torch.eye(rank, dtype=matrix.dtype, device=matrix.device) - matrix @ inverse
    lost = error.abs().amax((1, 2)) > _DRIFT
    inverse = inverse + inverse @ error
    if bool(lost.any()):
        inverse[lost] = torch.linalg.inv_ex(matrix[lost]).inverse
    work.inverse[active] = inverse.mT
    work.values[active] = (inverse @ right[..., None])[..., 0]
    return off
