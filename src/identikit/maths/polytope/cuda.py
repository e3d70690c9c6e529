r"""Exact ends of many rows on a GPU: the method of `cpu`, one block of threads per row.

A block keeps its row's inverse in registers and makes some steps; then it writes its state, the host brings the
inverses back to full precision with one Newton step, and the rows that are not done continue. `simplex_state.Row` says
what the state is; here a row also keeps what it is doing (`_MODES`), and on which key or objective. Where rows are few
and objectives many, several blocks share the objectives of a row.
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
    objective = tl.load(objectives + tl.where(sense == 0, 0, key) * n + where, mask=inside, other=0.0)
    return tl.where(where < 0, -(mode == SEARCH).to(tl.float64), c + sense * objective)


@triton.jit
@no_type_check
def _scores(turned, inverse, cost, i, m, n, r, CHUNK: tl.constexpr):
    """Return $y \\cdot u_m$ for every key, with the dual vector $y = c_B B^{-1}$."""
    scores = tl.zeros_like(m).to(tl.float64)
    for start in range(0, r, CHUNK):
        k = start + tl.arange(0, CHUNK)
        block = tl.load(inverse + k[:, None] * r + i[None, :], mask=(k[:, None] < r) & (i[None, :] < r), other=0.0)
        y = tl.sum(block * cost[None, :], axis=1)
        tile = tl.load(turned + k[:, None] * n + m[None, :], mask=(k[:, None] < r) & (m[None, :] < n), other=0.0)
        scores += tl.sum(y[:, None] * tile, axis=0)
    return scores


@triton.jit
@no_type_check
def _store_dual(out, inverse, cost, i, r, CHUNK: tl.constexpr):
    """Write the dual vector."""
    for start in range(0, r, CHUNK):
        k = start + tl.arange(0, CHUNK)
        block = tl.load(inverse + k[:, None] * r + i[None, :], mask=(k[:, None] < r) & (i[None, :] < r), other=0.0)
        tl.store(out + k, tl.sum(block * cost[None, :], axis=1), mask=k < r)


@triton.jit
@no_type_check
def _column(basis, inverse, entering, i, r, CHUNK: tl.constexpr):
    """Return the entering key's column in terms of the basis."""
    column = tl.zeros_like(i).to(tl.float64)
    for start in range(0, r, CHUNK):
        k = start + tl.arange(0, CHUNK)
        block = tl.load(inverse + k[:, None] * r + i[None, :], mask=(k[:, None] < r) & (i[None, :] < r), other=0.0)
        column += tl.sum(block * tl.load(basis + entering * r + k, mask=k < r, other=0.0)[:, None], axis=0)
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
        block = tl.load(inverse + k[:, None] * r + i[None, :], mask=fits, other=0.0)
        block = tl.where(turning[None, :], line[:, None], block - line[:, None] * column[None, :])
        tl.store(inverse + k[:, None] * r + i[None, :], block, mask=fits)
        tile = tl.load(turned + k[:, None] * n + m[None, :], mask=(k[:, None] < r) & (m[None, :] < n), other=0.0)
        entries += tl.sum(line[:, None] * tile, axis=0)
    return entries


@triton.jit
@no_type_check
def _nearest(pending, values, columns, m, n):
    """Return the pending key with the largest weight at the present vertex, or -1."""
    basic = tl.load(pending + columns, mask=(columns >= 0) & (columns < n), other=0) != 0
    best, best_at = tl.max(tl.where(basic, values, -1.0), axis=0, return_indices=True)
    inside = tl.sum(tl.where(tl.arange(0, columns.shape[0]) == best_at, columns, 0), axis=0)
    any_pending, any_key = tl.max(tl.load(pending + m, mask=m < n, other=0).to(tl.int32), axis=0, return_indices=True)
    return tl.where(any_pending == 0, -1, tl.where(best >= 0.0, inside, any_key))


@triton.jit
@no_type_check
def _steps(
    basis, turned, group, visible, bounded, strongest, objectives, right, inverse, values, columns, state, pending,
    zero, upper, lower, greatest, least, leads, vertices, active, n, r, keys, quantities, top, per_row, both,
    with_vertices, budget, BN: tl.constexpr, BR: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Make up to `budget` steps of one row, in whatever mode it is."""
    row = tl.load(active + tl.program_id(0)).to(tl.int64)
    basis_start = tl.load(group + row).to(tl.int64) * n * r
    outputs_per_row = keys + quantities
    basis += basis_start
    turned += basis_start
    inverse += row * r * r
    visible += row * n
    pending += row * n
    zero += row * n
    state += row * 2
    objectives += row * per_row * quantities * n
    strongest += row * top
    upper += row * outputs_per_row * r
    lower += row * outputs_per_row * r
    greatest += row * outputs_per_row
    least += row * outputs_per_row
    leads += row * top * n
    vertices += row * with_vertices * quantities * 2 * n
    i = tl.arange(0, BR)
    m = tl.arange(0, BN)
    inside = i < r
    x = tl.load(values + row * r + i, mask=inside, other=0.0)
    cols = tl.load(columns + row * r + i, mask=inside, other=n)
    enters = tl.load(visible + m, mask=m < n, other=0) != 0
    visible_keys = enters
    for index in range(r):
        enters = enters & (m != tl.load(columns + row * r + index))
    mode = tl.load(state)
    key = tl.load(state + 1)
    cost = _objective(cols, mode, key, objectives, n)
    profit = _objective(m, mode, key, objectives, n) - _scores(turned, inverse, cost, i, m, n, r, CHUNK)
    fresh = 1
    steps_left = budget
    while steps_left > 0:
        steps_left -= 1
        best, entering = tl.max(tl.where(enters, profit, -1.0), axis=0, return_indices=True)
        waiting = tl.sum(tl.where((cols < 0) & inside, x, 0.0), axis=0)
        if (best <= PROFIT) | ((mode == SEARCH) & (waiting <= ZERO * r)):
            if fresh == 0:
                fresh = 1
            else:
                # The end of an objective: store its ends, and choose the next one.
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
                    for index in range(top):
                        first = tl.load(strongest + index)
                        weight = tl.sum(tl.where((cols == first) & inside, x, 0.0), axis=0)
                        tl.store(leads + index * n + key, attained - weight)
                elif mode == LOWER:
                    _store_dual(lower + key * r, inverse, cost, i, r, CHUNK)
                    tl.store(least + key, -attained)
                    tl.store(pending + key, 0)
                elif mode == LEAST:
                    _store_dual(lower + (keys + key) * r, inverse, cost, i, r, CHUNK)
                    tl.store(least + keys + key, -attained)
                    if with_vertices > 0:
                        tl.store(vertices + key * 2 * n + cols, x, mask=inside & (cols >= 0))
                    mode = tl.full((), GREATEST, tl.int32)
                elif mode == GREATEST:
                    _store_dual(upper + (keys + key) * r, inverse, cost, i, r, CHUNK)
                    tl.store(greatest + keys + key, attained)
                    if with_vertices > 0:
                        tl.store(vertices + (key * 2 + 1) * n + cols, x, mask=inside & (cols >= 0))
                    key += 1
                    mode = tl.where(key == quantities, DONE, tl.where(both > 0, LEAST, GREATEST))
                tl.debug_barrier()
                if mode == RAISE:
                    key = _nearest(pending, x, cols, m, n)
                    if key < 0:
                        mode = tl.full((), LOWER, tl.int32)
                        is_bounded = tl.load(bounded + m, mask=m < n, other=0) != 0
                        empty = tl.load(zero + m, mask=m < n, other=0) != 0
                        tl.store(pending + m, (visible_keys & ~empty & is_bounded).to(tl.int8), mask=m < n)
                        tl.debug_barrier()
                if mode == LOWER:
                    key = _nearest(pending, x, cols, m, n)
                    if key < 0:
                        key = tl.full((), 0, tl.int32)
                        mode = tl.where(quantities == 0, DONE, tl.where(both > 0, LEAST, GREATEST))
                if (mode == DONE) | (mode == FAILED):
                    steps_left = 0
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
                steps_left = 0
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
    """All rows in step, on the GPU, each array with one row after another; see `simplex_state.Row`."""

    basis: Float[Tensor, "group key rank"]
    turned: Float[Tensor, "group rank key"]
    group: Tensor
    visible: Tensor
    bounded: Tensor
    strongest: Tensor
    objectives: Tensor
    right: Float[Tensor, "row rank"]
    inverse: Float[Tensor, "row rank rank"]  # transposed
    values: Float[Tensor, "row rank"]
    columns: Tensor
    state: Tensor
    pending: Tensor
    zero: Tensor


def propose(rows: Rows, question: Question, *, both: bool = True, vertices: bool = False) -> Proposals:
    """Solve every free row; see `cpu.propose`."""
    proposals = Proposals.empty(rows, question, vertices=vertices)
    free = rows.free.nonzero()[:, 0]
    if not len(free):
        return proposals
    free_rows = rows.select(free)
    free_question = question.select(free)
    blocks = _blocks(free_rows, free_question)
    solve = _solve_rows if blocks == 1 else partial(_solve_in_shares, blocks)
    solved = solve(free_rows, free_question, both=both, vertices=vertices)
    for target, source in zip(proposals, solved, strict=True):
        target[free] = source
    return proposals


def _blocks(rows: Rows, question: Question) -> int:
    """Return how many blocks of threads solve the objectives of one row; few rows would leave the GPU idle."""
    if question.keys is not None or question.objectives is None or question.top:
        return 1
    quantities, n = question.objectives.shape[-2:]
    count = len(rows.group)
    if count > rows_at_once(rows, 4 * quantities * n):  # each row has objectives of its own then
        return 1
    return max(1, min(_BLOCKS // count, quantities // _SHARE))


def _solve_in_shares(blocks: int, rows: Rows, question: Question, *, both: bool, vertices: bool) -> Proposals:
    """Solve free rows, each by several blocks of threads, which share out its objectives."""
    objectives = question.all_objectives(rows)
    count = len(rows.group)
    quantities = objectives.shape[1]
    per_block = -(-quantities // blocks)
    shares = F.pad(objectives, (0, 0, 0, blocks * per_block - quantities)).unflatten(1, (blocks, per_block))
    repeated = rows.select(torch.arange(count, device=rows.group.device).repeat_interleave(blocks))
    block_question = Question(objectives=shares.expand(count, -1, -1, -1).flatten(0, 1))
    proposals = _solve_rows(repeated, block_question, both=both, vertices=vertices)

    def by_row(array: Tensor) -> Tensor:
        return array.unflatten(0, (count, blocks)).flatten(1, 2)[:, :quantities]

    return Proposals(
        upper=by_row(proposals.upper),
        lower=by_row(proposals.lower),
        greatest=by_row(proposals.greatest),
        least=by_row(proposals.least),
        distance=proposals.distance.unflatten(0, (count, blocks)).amax(1),
        leads=proposals.leads[::blocks],
        vertices=by_row(proposals.vertices),
        failed=proposals.failed.unflatten(0, (count, blocks)).any(1),
    )


def _solve_rows(rows: Rows, question: Question, *, both: bool, vertices: bool) -> Proposals:
    """Solve rows that are all free, a block of threads each."""
    proposals = Proposals.empty(rows, question, vertices=vertices)
    n = rows.attention.shape[1]
    keys = 0 if question.keys is None else n
    if question.keys is not None:
        proposals.least[:, :n] = proposals.least[:, :n].masked_fill(question.keys_of(rows), 0.0)
    work, sign = _initial_state(rows, question)
    quantities = proposals.greatest.shape[1] - keys
    per_row = int(work.objectives.ndim == 3 and len(work.objectives) > 1)
    settings = (keys, quantities, work.strongest.shape[1], per_row, int(both), int(vertices))
    proposals.distance[:] = _run(work, sign, proposals, settings)
    proposals.failed[:] = work.state[:, 0] != _DONE
    return proposals


def _initial_state(rows: Rows, question: Question) -> tuple[_State, Tensor]:
    """Return the state before the first step: the artificial columns are the basis; and their signs."""
    right = rows.right
    count, rank = right.shape
    n = rows.attention.shape[1]
    sign = torch.where(right < 0, -1.0, 1.0).to(right)
    columns = torch.arange(-1, -1 - rank, -1, dtype=torch.int32, device=right.device).repeat(count, 1)
    state = torch.zeros(count, 2, dtype=torch.int32, device=right.device)
    bounded = torch.ones(n, dtype=torch.bool) if question.keys is None else question.keys
    keys = question.keys_of(rows)
    strongest = strongest_keys(rows, keys)[:, : min(question.top, n)].int().contiguous()
    objectives = question.all_objectives(rows)[:, 0 if question.keys is None else n :].contiguous()
    work = _State(
        rows.basis.contiguous(), rows.basis.mT.contiguous(), rows.group.int(), rows.visible.to(torch.int8),
        bounded.to(right.device, torch.int8), strongest, objectives, right, torch.diag_embed(sign), right.abs(),
        columns, state, keys.to(torch.int8), torch.zeros_like(rows.visible, dtype=torch.int8),
    )  # fmt: skip
    return work, sign


def _run(work: _State, sign: Tensor, proposals: Proposals, settings: tuple[int, ...]) -> Float[Tensor, "row"]:
    """Let all rows make their steps; return how far each row's vertices were from its set, by the constraints."""
    count, n = work.visible.shape
    rank = work.right.shape[1]
    block = triton.next_power_of_2(max(n, 32))
    sizes = {"BN": block, "BR": triton.next_power_of_2(max(rank, 32)), "CHUNK": max(1, min(8, 1024 // block))}
    ends = (proposals.upper, proposals.lower, proposals.greatest, proposals.least)
    outputs = (*ends, proposals.leads, proposals.vertices)
    distance = work.right.new_zeros(count)
    for _ in range(_ROUNDS):
        active = (work.state[:, 0] < _DONE).nonzero()[:, 0]
        if not len(active):
            break
        launch: Any = _steps[(len(active),)]  # pyright: ignore[reportIndexIssue]
        launch(*work, *outputs, active, n, rank, *settings, _ROUND, **sizes, num_warps=1)
        distance[active] = torch.maximum(distance[active], _refresh(work, sign, active))
    return distance


def _refresh(work: _State, sign: Tensor, active: Tensor) -> Float[Tensor, "row"]:
    r"""Bring inverses back to full precision: $M \leftarrow M (2I - BM)$; return how far the vertices were off."""
    n = work.visible.shape[1]
    rank = work.right.shape[1]
    columns = work.columns[active].long()
    right = work.right[active]
    inverse = work.inverse[active].mT
    matrix = work.basis[work.group[active].long()[:, None], columns.clamp(0, n - 1)].mT.contiguous()
    artificial = (-1 - columns).clamp(min=0)
    unit = F.one_hot(artificial, rank).to(matrix) * sign[active].gather(1, artificial)[..., None]
    matrix = torch.where((columns < 0)[:, None], unit.mT, matrix)
    key_weights = work.values[active].masked_fill(columns < 0, 0.0)  # what an artificial column holds is missing
    distance = (torch.einsum("bij,bj->bi", matrix, key_weights) - right).abs().amax(-1)
    distance = distance.masked_fill(work.state[active, 0] == _SEARCHING, 0.0)  # there is no vertex yet
    error = torch.eye(rank, dtype=matrix.dtype, device=matrix.device) - matrix @ inverse
    lost = error.abs().amax((1, 2)) > _DRIFT
    inverse = inverse + inverse @ error
    if bool(lost.any()):
        inverse[lost] = torch.linalg.inv_ex(matrix[lost]).inverse
    work.inverse[active] = inverse.mT
    work.values[active] = (inverse @ right[..., None])[..., 0]
    return distance
