"""Exact ends of many rows at once: solved by compiled code, proved by `bounds`, and solved again where that fails."""

import math
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch

from identikit.maths.measures import TIE, certain_order
from identikit.maths.polytope.bounds import (
    Bounds,
    Proposals,
    Question,
    proven_bounds,
    proven_maximum,
    rows_at_once,
    strongest_keys,
    trivial_bounds,
)
from identikit.maths.polytope.cpu import propose, propose_plainly
from identikit.maths.polytope.rows import Rows
from identikit.maths.threads import one_thread
from identikit.shapes import Bool, Float, Int, Tensor

GAP = 1e-8  # an exact end whose gap is larger is computed again
FIRST_PORTION = {"cpu": 1, "cuda": 1024}  # rows that are solved first against the clock; later portions grow
_LONGEST = 10.0  # seconds that a portion may take, about; the clock is read between portions

Solver = Callable[..., Proposals]


@one_thread()
def exact_bounds(rows: Rows, question: Question) -> Bounds:
    """Find the least and the greatest of every quantity in every row, and the certain order of its strongest edges.

    Rows go to compiled code, on the GPU where they are there. Ends that are not proven to `GAP` are solved again, one
    plain linear program each, and keep what holds for any attention if that fails as well.
    """
    question, scale = question.normalised()
    bounds = trivial_bounds(rows, question)
    numbers_per_row = 2 * bounds.lower.shape[1] * rows.basis.shape[2]
    free = rows.free.nonzero()[:, 0]
    for portion in free.split(rows_at_once(rows, numbers_per_row)) if len(free) else ():
        _write(bounds, portion, _bounds_of_free_rows(rows.select(portion), question.select(portion)))
    return bounds if scale is None else bounds.rescaled(scale)


def _bounds_of_free_rows(rows: Rows, question: Question) -> Bounds:
    proposals = solve(rows, question)
    bounds = proven_bounds(rows, question, proposals)
    for solver in _solvers(rows)[1:]:
        loose = ((bounds.gap > GAP) & ~proposals.failed[:, None]).any(-1).nonzero()[:, 0]
        if not len(loose):
            break
        # Of two proofs the better counts, end by end; the smaller gap holds for it.
        loose_rows = rows.select(loose)
        loose_question = question.select(loose)
        again = proven_bounds(loose_rows, loose_question, solver(loose_rows, loose_question))
        bounds.lower[loose] = torch.maximum(bounds.lower[loose], again.lower)
        bounds.upper[loose] = torch.minimum(bounds.upper[loose], again.upper)
        bounds.gap[loose] = bounds.gap[loose].fmin(again.gap)
    if question.keys is None or not question.top:
        return bounds
    return bounds._replace(order=_certain_order(rows, question, bounds, proposals.leads))


@one_thread()
def maxima(
    rows: Rows, objectives: Float[Tensor, "_ quantity key"], *, until: float = math.inf
) -> tuple[Float[Tensor, "row quantity"], Float[Tensor, "row quantity"]]:
    """Find the greatest of objectives, shared by all rows or of each row: a proven bound, and its gap.

    The gap is at most how far the bound is from what some attention of the row's set attains. Rows that are not
    reached `until` then, on the monotonic clock, keep the greatest that any attention could have, and a gap of NaN.
    """
    question = Question(objectives=objectives.to(rows.attention), until=until)
    if time.monotonic() >= until:
        trivial = trivial_bounds(rows, question)
        return trivial.upper, trivial.gap
    question, scale = question.normalised()
    assert scale is not None
    c = question.all_objectives(rows)
    raw = (rows.attention[:, None] @ c.mT)[:, 0]
    trivial = trivial_bounds(rows, question)
    bound = trivial.upper
    gap = trivial.gap
    free = rows.free.nonzero()[:, 0]
    for portion in portions_in_time(free, until, most=rows_at_once(rows, 2 * c.shape[1] * rows.basis.shape[2])):
        solved_rows = rows.select(portion)
        solved_question = question.select(portion)
        proposals = solve(solved_rows, solved_question, both=False)
        attained = proposals.greatest - proposals.excess(proposals.upper)
        attained = torch.where(proposals.failed[:, None], raw[portion], attained).maximum(raw[portion])
        proven = proven_maximum(solved_rows, solved_question.all_objectives(solved_rows), proposals.upper)
        bound[portion] = proven.minimum(bound[portion]).maximum(raw[portion])
        gap[portion] = bound[portion] - attained
    return bound * scale, gap * scale


def portions_in_time(
    indices: Int[Tensor, "row"],
    until: float,
    *,
    most: int | None = None,
    first: int | None = None,
    repeatable: bool = False,
) -> Iterator[Int[Tensor, "_"]]:
    """Yield indices in portions, until a time on the monotonic clock, each no larger than there is time for.

    Against the clock, or with a `first` size, portions begin small, and each is at most twice as large as the last.
    Their sizes decide the last bits of the results; where these must be `repeatable`, sizes do not follow the pace.
    """
    limit = len(indices) if most is None else most
    size = float(first or (limit if until == math.inf else FIRST_PORTION[indices.device.type]))
    start = 0
    while start < len(indices) and size >= 1 and time.monotonic() < until:
        begun = time.monotonic()
        portion = indices[start : start + int(min(size, limit))]
        yield portion
        start += len(portion)
        size *= 2
        if not repeatable:
            now = time.monotonic()
            rate = len(portion) / max(now - begun, 1e-6)
            size = min(size, rate * _LONGEST + 1, rate * (until - now))


@one_thread()
def extreme_rows(
    rows: Rows, objectives: Float[Tensor, "row quantity key"]
) -> tuple[Float[Tensor, "row quantity 2 key"], Bool[Tensor, "row"]]:
    """Find attention with the same output at which each $c \\cdot a'$ is least, and greatest; and which rows failed.

    A row that is not free is its own only attention.
    """
    raw = rows.attention[:, None, None].expand(-1, objectives.shape[1], 2, -1)
    proposals = solve(rows, Question(objectives=objectives), vertices=True)
    weights = proposals.vertices.clamp(min=0)
    weights = weights / weights.sum(-1, keepdim=True)
    solved = rows.free & ~proposals.failed
    return torch.where(solved[:, None, None, None], weights, raw), proposals.failed


def _solvers(rows: Rows) -> list[Solver]:
    """Return the solvers of these rows in the order to try them: on the GPU, compiled, and one program per end."""
    solvers: list[Solver] = []
    if rows.attention.is_cuda and find_spec("triton") is not None:
        from identikit.maths.polytope import cuda

        if rows.attention.shape[1] <= cuda.LONGEST:
            solvers.append(cuda.propose)
    if find_spec("numba") is not None:
        solvers.append(propose)
    if find_spec("scipy") is not None:
        solvers.append(propose_plainly)
    return solvers


def compile_solver(device: torch.device) -> None:
    """Solve the smallest possible rows, so that code that is compiled on first use is ready."""
    third = torch.full((1, 3), 1 / 3, dtype=torch.float64, device=device)
    visible = torch.ones_like(third, dtype=torch.bool)
    group = torch.zeros(1, dtype=torch.long, device=device)
    output = third[:, 0]
    basis = third[:1, :, None] * 3**0.5
    rows = Rows(third, visible, group, basis, output[:, None] * torch.inf, output, visible[:, 0], visible[:, 0])
    exact_bounds(rows, Question(visible[0], third[:, :] * 3, top=2))
    extreme_rows(rows, third[None] * 3)


def solve(rows: Rows, question: Question, *, both: bool = True, vertices: bool = False) -> Proposals:
    """Return what the first solver proposes, and for rows that it gives up what the next ones do."""
    solvers = _solvers(rows)
    if not solvers:
        return Proposals.empty(rows, question, vertices=vertices)._replace(failed=rows.free.clone())
    proposals = solvers[0](rows, question, both=both, vertices=vertices)
    for solver in solvers[1:]:
        failed = proposals.failed.nonzero()[:, 0]
        if not len(failed):
            break
        again = solver(rows.select(failed), question.select(failed), both=both, vertices=vertices)
        _write(proposals, failed, again)
    return proposals


def _write(answers: Bounds | Proposals, indices: Tensor, portion: Bounds | Proposals) -> None:
    """Write the answers of some rows among those of all."""
    for target, source in zip(answers, portion, strict=True):
        target[indices] = source.to(target)


def _certain_order(
    rows: Rows, question: Question, bounds: Bounds, leads: Float[Tensor, "row top key"]
) -> Int[Tensor, "row"]:
    """Count the strongest edges, up to `top`, whose order is the same in the row's whole set; -1: not decided.

    Two edges are compared by their ends, then by their weights where one of them is greatest, and only if neither
    tells, by a program of their own.
    """
    n = rows.attention.shape[1]
    keys = question.keys_of(rows)
    bounded = ~(bounds.gap[:, :n].isnan() & keys).any(-1)
    strongest = strongest_keys(rows, keys)[:, : question.top]

    def compare(row: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        rank = (strongest[row] == first[:, None]).byte().argmax(-1)
        lead = leads[row, rank, second]
        gap = torch.zeros_like(lead)
        open_pairs = (lead <= TIE).nonzero()[:, 0]
        lead[open_pairs], gap[open_pairs] = greatest_lead(rows, row[open_pairs], first[open_pairs], second[open_pairs])
        return lead, gap

    ends = bounds.lower[:, :n], bounds.upper[:, :n]
    order = certain_order(rows.attention, ends, keys & bounded[:, None], compare, question.top)
    return order.sources.masked_fill(~bounded, -1)


def greatest_lead(
    rows: Rows,
    row: Int[Tensor, "pair"],
    first: Int[Tensor, "pair"],
    second: Int[Tensor, "pair"],
    scales: Float[Tensor, "pair key"] | None = None,
) -> tuple[Float[Tensor, "pair"], Float[Tensor, "pair"]]:
    """Return the most by which the second key's weight, times its scale, can exceed the first's, and the gaps."""
    objectives = rows.attention.new_zeros(len(row), rows.attention.shape[1])
    pairs = torch.arange(len(row), device=row.device)
    for key, sign in ((first, -1.0), (second, 1.0)):
        objectives[pairs, key] = sign if scales is None else sign * scales[pairs, key]
    bound, gap = maxima(rows.select(row), objectives[:, None])
    return bound[:, 0], gap[:, 0]
