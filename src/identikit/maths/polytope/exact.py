"""Exact ends of many rows at once: solved by compiled code, proved in one place, and solved again where that fails."""

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
FIRST_PORTION = {"cpu": 1, "cuda": 1024}  # in the first portion of what is done against the clock; later ones grow
_LONGEST = 10.0  # seconds between looks at the clock, about

Solver = Callable[..., Proposals]


@one_thread()
def exact_bounds(rows: Rows, wanted: Question) -> Bounds:
    """Find the least and the greatest of what is asked of every row, and the certain order of its strongest edges.

    Rows go to compiled code, on the GPU where they are there. Ends that are not proven to `GAP` are solved again, one
    plain linear program each, and keep what holds for any attention if that fails as well.
    """
    wanted, size = wanted.normalised()
    bounds = trivial_bounds(rows, wanted)
    duals = 2 * bounds.lower.shape[1] * rows.basis.shape[2]
    free = rows.free.nonzero()[:, 0]
    for chosen in free.split(rows_at_once(rows, duals)) if len(free) else ():
        part = _bounds_of(rows.select(chosen), wanted.select(chosen))
        for every, some in zip(bounds, part, strict=True):
            every[chosen] = some
    return bounds if size is None else bounds.rescaled(size)


@one_thread()
def maxima(
    rows: Rows, objectives: Float[Tensor, "_ quantity key"], *, until: float = math.inf
) -> tuple[Float[Tensor, "row quantity"], Float[Tensor, "row quantity"]]:
    """Find the greatest of objectives, shared by all rows or given for each: a proven bound, and its gap.

    The gap is at most how far the bound is from what some attention of the row's set attains. Rows that are not
    reached `until` then, on the monotonic clock, keep the greatest that any attention could have, and a gap of NaN.
    """
    wanted = Question(objectives=objectives.to(rows.attention), until=until)
    if time.monotonic() >= until:
        known = trivial_bounds(rows, wanted)
        return known.upper, known.gap
    wanted, size = wanted.normalised()
    assert size is not None
    c = wanted.all_objectives(rows)
    own = (rows.attention[:, None] @ c.mT)[:, 0]
    known = trivial_bounds(rows, wanted)
    bound = known.upper
    gap = known.gap
    free = rows.free.nonzero()[:, 0]
    for chosen in portions_in_time(free, until, most=rows_at_once(rows, 2 * c.shape[1] * rows.basis.shape[2])):
        some = rows.select(chosen)
        asked = wanted.select(chosen)
        proposed = _solved(some, asked, both=False)
        reached = proposed.greatest - proposed.missed(proposed.upper)
        attained = torch.where(proposed.failed[:, None], own[chosen], reached)
        proven = proven_maximum(some, asked.all_objectives(some), proposed.upper).minimum(bound[chosen])
        bound[chosen] = proven.maximum(own[chosen])
        gap[chosen] = bound[chosen] - attained.maximum(own[chosen])
    return bound * size, gap * size


def portions_in_time(
    places: Int[Tensor, "some"],
    until: float,
    *,
    most: int | None = None,
    first: int | None = None,
    repeatable: bool = False,
) -> Iterator[Int[Tensor, "_"]]:
    """Yield places in portions, until a time on the monotonic clock: no portion is more than the pace leaves time for.

    Against the clock, or with a `first` size, portions begin small, and each is at most twice as large as the last.
    Their sizes decide the last bits of what is computed; where that must be `repeatable`, they do not follow the pace.
    """
    most = len(places) if most is None else most
    size = float(first or (most if until == math.inf else FIRST_PORTION[places.device.type]))
    done = 0
    while done < len(places) and size >= 1 and time.monotonic() < until:
        begun = time.monotonic()
        some = places[done : done + int(min(size, most))]
        yield some
        done += len(some)
        size *= 2
        if not repeatable:
            now = time.monotonic()
            rate = len(some) / max(now - begun, 1e-6)
            size = min(size, rate * _LONGEST + 1, rate * (until - now))


@one_thread()
def proposals(rows: Rows, objectives: Float[Tensor, "row quantity key"]) -> Proposals:
    """Return what solvers propose for the ends of each row's objectives: dual vectors, and vertices."""
    return _solved(rows, Question(objectives=objectives), vertices=True)


@one_thread()
def extreme_rows(
    rows: Rows, objectives: Float[Tensor, "row quantity key"]
) -> tuple[Float[Tensor, "row quantity 2 key"], Bool[Tensor, "row"]]:
    """Find attention with the same output at which each $c \\cdot a'$ is least, and greatest; and which rows failed.

    A row that is not free is its own only attention.
    """
    own = rows.attention[:, None, None].expand(-1, objectives.shape[1], 2, -1)
    proposed = proposals(rows, objectives)
    weights = proposed.vertices.clamp(min=0)
    weights = weights / weights.sum(-1, keepdim=True)
    solved = rows.free & ~proposed.failed
    return torch.where(solved[:, None, None, None], weights, own), proposed.failed


def _solvers(rows: Rows) -> list[Solver]:
    """Return what solves these rows, each what those before it leave: on the GPU, compiled, one program per end."""
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
    """Have rows solved that are as small as can be: what is compiled when it is first used is then ready."""
    third = torch.full((1, 3), 1 / 3, dtype=torch.float64, device=device)
    seen = torch.ones_like(third, dtype=torch.bool)
    first = torch.zeros(1, dtype=torch.long, device=device)
    output = third[:, 0]
    basis = third[:1, :, None] * 3**0.5
    rows = Rows(third, seen, first, basis, output[:, None] * torch.inf, output, seen[:, 0], seen[:, 0])
    exact_bounds(rows, Question(seen[0], third[:, :] * 3, top=2))
    extreme_rows(rows, third[None] * 3)


def _bounds_of(rows: Rows, wanted: Question) -> Bounds:
    """Bound rows that are all free."""
    proposed = _solved(rows, wanted)
    bounds = proven_bounds(rows, wanted, proposed)
    for other in _solvers(rows)[1:]:
        loose = ((bounds.gap > GAP) & ~proposed.failed[:, None]).any(-1).nonzero()[:, 0]
        if not len(loose):
            break
        some = rows.select(loose)  # of two proofs the better counts, end by end; the smaller gap holds for it
        asked = wanted.select(loose)
        again = proven_bounds(some, asked, other(some, asked))
        bounds.lower[loose] = torch.maximum(bounds.lower[loose], again.lower)
        bounds.upper[loose] = torch.minimum(bounds.upper[loose], again.upper)
        bounds.gap[loose] = bounds.gap[loose].fmin(again.gap)
    if wanted.keys is None or not wanted.top:
        return bounds
    return bounds._replace(order=_certain_order(rows, wanted, bounds, proposed.ahead))


def _solved(rows: Rows, wanted: Question, *, both: bool = True, vertices: bool = False) -> Proposals:
    """Return what the first solver proposes, and for rows that it gives up what the next ones do."""
    first, *others = _solvers(rows) or [_nothing]
    proposed = first(rows, wanted, both=both, vertices=vertices)
    for solver in others:
        failed = proposed.failed.nonzero()[:, 0]
        if not len(failed):
            break
        again = solver(rows.select(failed), wanted.select(failed), both=both, vertices=vertices)
        for every, some in zip(proposed, again, strict=True):
            every[failed] = some.to(every)
    return proposed


def _nothing(rows: Rows, wanted: Question, *, both: bool, vertices: bool) -> Proposals:
    """Solve no row."""
    return Proposals.empty(rows, wanted, vertices=vertices)._replace(failed=rows.free.clone())


def _certain_order(
    rows: Rows, wanted: Question, bounds: Bounds, ahead: Float[Tensor, "row top key"]
) -> Int[Tensor, "row"]:
    """Count the strongest asked edges, up to `top`, whose order is the same in the row's whole set; -1: not decided.

    Where their ends do not tell, and one is not `ahead` where it is greatest itself, two edges take a program.
    """
    assert wanted.keys is not None
    n = rows.attention.shape[1]
    asked = rows.visible & wanted.keys.to(rows.visible.device)
    known = ~(bounds.gap[:, :n].isnan() & asked).any(-1)
    strongest = strongest_keys(rows, asked)[:, : wanted.top]

    def compare(row: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        place = (strongest[row] == first[:, None]).byte().argmax(-1)
        most = ahead[row, place, second]
        gap = torch.zeros_like(most)
        left = (most <= TIE).nonzero()[:, 0]
        most[left], gap[left] = greatest_lead(rows, row[left], first[left], second[left])
        return most, gap

    ends = bounds.lower[:, :n], bounds.upper[:, :n]
    order = certain_order(rows.attention, ends, asked & known[:, None], compare, wanted.top)
    return order.sources.masked_fill(~known, -1)


def greatest_lead(
    rows: Rows,
    row: Int[Tensor, "pair"],
    first: Int[Tensor, "pair"],
    second: Int[Tensor, "pair"],
    scales: Float[Tensor, "pair key"] | None = None,
) -> tuple[Float[Tensor, "pair"], Float[Tensor, "pair"]]:
    """Return the most by which the second key's weight, times its scale, can exceed the first's, and the gaps."""
    objectives = rows.attention.new_zeros(len(row), rows.attention.shape[1])
    every = torch.arange(len(row), device=row.device)
    for key, sign in ((first, -1.0), (second, 1.0)):
        objectives[every, key] = sign if scales is None else sign * scales[every, key]
    bound, gap = maxima(rows.select(row), objectives[:, None])
    return bound[:, 0], gap[:, 0]
