"""Exact ends by every solver, on the CPU and on a GPU, against plain linear programs; and what proves them."""

import time
from functools import cache
from typing import NamedTuple

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from identikit.maths.polytope import cpu, exact, simplex
from identikit.maths.polytope import rows as polytopes
from identikit.maths.polytope.bounds import Bounds, Proposals, Question, proven_bounds, trivial_bounds
from identikit.maths.polytope.exact import exact_bounds
from identikit.maths.polytope.rows import Polytopes, Rows, join_rows
from identikit.maths.visible import visible_from_mask
from tests.maths.polytope.cases import decaying_values, every_key, hard_row, one_row, rank_of, rows_of
from tests.reference import intervals as reference

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
KINDS = ("random", "causal", "window", "padded", "repeated", "deficient", "sharp")
TOP = 5


class Case(NamedTuple):
    """Rows of one head and its values, what is asked of them, and what plain linear programs answer.

    - `wanted`: all keys, the order of the strongest, and two objectives of real numbers
    - `lower`, `upper`: of keys, then of objectives; `order`: -1 where a row is not free
    """

    rows: Rows
    values: torch.Tensor
    wanted: Question
    lower: torch.Tensor
    upper: torch.Tensor
    order: list[int]


def some_rows(kind, n=30, d_v=6, seed=0):
    """Rows of one head of a kind, and its values."""
    generator = torch.Generator().manual_seed(seed)
    count = n if kind in ("causal", "window") else 8
    scores = 2 * torch.randn(count, n, generator=generator, dtype=torch.float64)
    values = torch.randn(n, d_v, generator=generator, dtype=torch.float64)
    visible = torch.ones(count, n, dtype=torch.bool)
    if kind in ("causal", "window", "repeated"):
        visible = torch.ones(n, n, dtype=torch.bool).tril()[-count:]
    if kind == "window":
        visible &= torch.ones(n, n, dtype=torch.bool).triu(-14)
    if kind == "padded":
        visible[:, 20:] = False
    if kind == "repeated":
        values = values[torch.arange(n) % 9]
    if kind == "deficient":
        values = decaying_values(n, d_v, rank=4, seed=seed)
    if kind == "sharp":
        scores = 8 * scores
    attention = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return rows_of(attention, values, visible, rank_of(values, visible)), values


def optima(objectives, attention, values):
    """The least and the greatest of each objective of one row, by linprog."""
    lower = [float(c @ reference.optimum(c, attention, values)) for c in objectives]
    upper = [float(c @ reference.optimum(-c, attention, values)) for c in objectives]
    return torch.tensor([lower, upper], dtype=torch.float64)


@cache
def case(kind) -> Case:
    rows, values = some_rows(kind)
    n = len(values)
    real = torch.randn(2, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = every_key(rows, objectives=real, top=TOP)
    ends = torch.zeros(2, len(rows.group), n + 2, dtype=torch.float64)
    order = []
    for index, seen in enumerate(rows.visible):
        attention = rows.attention[index, seen].numpy()
        asked = torch.cat([seen.nonzero()[:, 0], torch.tensor([n, n + 1])])
        objectives = wanted.all_objectives(rows)[0, asked][:, seen].numpy()
        ends[:, index, asked] = optima(objectives, attention, values[seen].numpy())
        order.append(reference.certain_order(attention, values[seen].numpy(), TOP) if rows.free[index] else -1)
    return Case(rows, values, wanted, ends[0], ends[1], order)


@pytest.fixture(params=["cpu", "linprog", CUDA])
def engine(request, monkeypatch):
    """A solver that alone decides what `exact_bounds` says: nothing that it leaves is solved again."""
    if request.param == "cuda":
        from identikit.maths.polytope import cuda

        propose = cuda.propose
    else:
        propose = {"cpu": cpu.propose, "linprog": cpu.propose_plainly}[request.param]
    monkeypatch.setattr(exact, "_solvers", lambda rows: [propose])
    device = "cuda" if request.param == "cuda" else "cpu"
    return lambda rows, wanted: Bounds(
        *(part.cpu() for part in exact_bounds(Rows(*(part.to(device) for part in rows)), wanted))
    )


def assert_close(found, expected, tolerance=1e-7):
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


# Every end


@pytest.mark.parametrize("kind", KINDS)
def test_every_end_and_the_order_are_those_of_plain_linear_programs(kind, engine):
    rows, values, wanted, lower, upper, order = case(kind)
    found = engine(rows, wanted)
    assert found.gap.max() < exact.GAP
    assert_close(found.lower, lower)
    assert_close(found.upper, upper)
    own = (rows.attention[:, None] @ wanted.all_objectives(rows).mT)[:, 0]
    assert (found.lower <= own + 1e-15).all() and (own <= found.upper + 1e-15).all()  # summed on another device
    n = len(values)
    assert not found.lower[:, :n][~rows.visible].any() and not found.upper[:, :n][~rows.visible].any()
    assert found.order[rows.free].tolist() == [place for place in order if place >= 0]


@pytest.mark.parametrize("kind", ["random", "causal", "deficient"])
def test_objectives_of_each_row_are_those_of_plain_linear_programs(kind, engine):
    rows, values = some_rows(kind)
    objectives = torch.randn(len(rows.group), 2, len(values), generator=torch.Generator().manual_seed(3)).double()
    found = engine(rows, Question(objectives=objectives))
    assert found.gap.max() < exact.GAP
    for index in range(0, len(rows.group), 3):
        seen = rows.visible[index]
        attention = rows.attention[index, seen].numpy()
        lower, upper = optima(objectives[index][:, seen].numpy(), attention, values[seen].numpy())
        assert_close(found.lower[index], lower)
        assert_close(found.upper[index], upper)


@pytest.mark.parametrize("propose", [cpu.propose, cpu.propose_plainly])
def test_vertices_attain_the_ends_that_are_proposed(propose):
    rows, _, question, *_ = case("random")
    assert question.objectives is not None
    proposals = propose(rows, Question(objectives=question.objectives), vertices=True)
    attained = (proposals.vertices * question.objectives[:, None]).sum(-1)
    assert_close(attained[rows.free], torch.stack([proposals.least, proposals.greatest], -1)[rows.free], 1e-12)


@pytest.mark.parametrize("kind", ["window", "deficient"])
def test_edges_and_groups_asked_together_are_those_asked_apart(kind):
    rows, values = some_rows(kind)
    n = len(values)
    groups = (torch.rand(4, n, generator=torch.Generator().manual_seed(1)) > 0.7).double()
    together = exact_bounds(rows, every_key(rows, objectives=groups, top=TOP))
    keys = exact_bounds(rows, every_key(rows, top=TOP))
    apart = exact_bounds(rows, Question(objectives=groups))
    for end in ("lower", "upper"):
        assert_close(getattr(together, end), torch.cat([getattr(keys, end), getattr(apart, end)], 1), 1e-9)
    assert torch.equal(together.order, keys.order)
    assert (apart.lower >= keys.lower @ groups.mT - 1e-9).all()
    assert (apart.upper <= keys.upper @ groups.mT + 1e-9).all()


def test_chosen_keys_have_the_ends_of_all_keys_and_others_what_always_holds():
    rows, _, _, lower, upper, _ = case("causal")
    chosen = torch.zeros(30, dtype=torch.bool)
    chosen[[7, 2]] = True
    found = exact_bounds(rows, Question(chosen))
    assert_close(found.lower[:, chosen], lower[:, :30][:, chosen])
    assert_close(found.upper[:, chosen], upper[:, :30][:, chosen])
    others = rows.visible & rows.free[:, None] & ~chosen
    assert found.gap[others].isnan().all() and (found.upper[others] == 1).all()


def test_the_order_of_edges_leaves_out_a_learned_sink(engine):
    """The sink is a key of value 0 that the row sees, here the strongest, and no edge."""
    direction = torch.tensor([2.0, 2.0, -1.0, -1.0, 1.0, -3.0], dtype=torch.float64)  # the only one that is free
    attention = torch.tensor([[0.28, 0.24, 0.06, 0.05, 0.03, 0.34]], dtype=torch.float64)
    values = torch.zeros(6, 4, dtype=torch.float64)
    values[:5] = torch.linalg.svd(direction[None, :5])[2][1:].mT
    visible = torch.ones(1, 6, dtype=torch.bool)
    rows = rows_of(attention, values, visible, rank_of(values, visible))
    edges = torch.arange(6) < 5
    edge_weights = attention[0, :5].numpy()
    expected = reference.certain_order(edge_weights, values[:5].numpy(), TOP, reference.sink_optimum)
    assert expected == 2
    assert engine(rows, Question(edges, top=TOP)).order.tolist() == [expected]


@given(hard_row())
@settings(max_examples=60)
def test_rows_with_ties_zeros_and_lost_rank(row):
    """Such rows may be too degenerate for the compiled method; they are then handed on, and come out right."""
    attention, values = row
    some = one_row(attention, values)
    found = exact_bounds(join_rows([some] * 3), every_key(some, top=TOP))
    lower, upper = reference.intervals(attention.numpy(), values.numpy())
    for index in range(3):
        np.testing.assert_allclose(found.lower[index], lower, atol=1e-7)
        np.testing.assert_allclose(found.upper[index], upper, atol=1e-7)
    assert found.gap.max() < 1e-8


def test_without_a_compiler_every_end_is_a_plain_program(monkeypatch):
    rows, _ = some_rows("random")
    assert exact._solvers(rows) == [cpu.propose, cpu.propose_plainly]
    monkeypatch.setattr(exact, "find_spec", lambda package: None if package == "numba" else package)
    assert exact._solvers(rows) == [cpu.propose_plainly]
    monkeypatch.setattr(exact, "find_spec", lambda package: None)
    assert exact_bounds(rows, every_key(rows)).gap[rows.free].isnan().any(-1).all()


# What proves an end


def nonsense(rows, wanted, *, both=True, vertices=False, size=1.0):
    """Propose random vectors, some of them not finite, with what the rows themselves attain."""
    proposed = Proposals.empty(rows, wanted, vertices=vertices)
    generator = torch.Generator().manual_seed(0)
    for duals in (proposed.upper, proposed.lower):
        duals.copy_(size * torch.randn(duals.shape, generator=generator, dtype=duals.dtype))
        duals[:, ::5, 1] = torch.nan
        duals[:, 1::5, 1] = torch.inf
    return proposed


def given_up(rows, wanted, **options):
    """Fail in every row, with nonsense left behind."""
    proposed = nonsense(rows, wanted, **options)
    return proposed._replace(greatest=proposed.greatest - 7, least=proposed.least + 7, failed=rows.free.clone())


@pytest.mark.parametrize("kind", ["random", "window", "deficient", "sharp"])
@pytest.mark.parametrize("size", [0.01, 1e6])
def test_a_solver_that_proposes_nonsense_gives_valid_wide_bounds(kind, size):
    rows, _, wanted, lower, upper, _ = case(kind)
    found = proven_bounds(rows, wanted, nonsense(rows, wanted, size=size))
    known = trivial_bounds(rows, wanted)
    assert (known.lower <= found.lower).all() and (found.upper <= known.upper).all()
    assert (found.lower <= lower + 1e-9).all() and (upper - 1e-9 <= found.upper).all()
    assert (lower - found.lower <= found.gap + 1e-9).all() and (found.upper - upper <= found.gap + 1e-9).all()
    assert float((found.upper - upper)[rows.free].mean()) > 0.1


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_known_unsolved_is_the_least_and_the_greatest_of_a_visible_key(shared):
    rows, _, _, _, _, _ = case("window")
    count, n = rows.attention.shape
    drawn = torch.randn(1 if shared else count, 3, n, generator=torch.Generator().manual_seed(0)).double()
    wanted = Question(torch.ones(n, dtype=torch.bool), drawn[0] if shared else drawn)
    known = trivial_bounds(rows, wanted)
    for row in rows.free.nonzero()[:, 0].tolist():
        every = torch.cat([torch.eye(n).double(), drawn[0 if shared else row]])[:, rows.visible[row]]
        assert torch.equal(known.lower[row], every.amin(1)) and torch.equal(known.upper[row], every.amax(1))
    fixed = ~rows.free
    assert torch.equal(known.lower[fixed, :n], rows.attention[fixed]) and (known.gap[fixed] == 0).all()


def test_what_is_known_unsolved_takes_no_cube_of_memory():
    n = 1500  # all rows and edges of all keys would be 48 GiB
    one = torch.full((1, 1), 1 / n, dtype=torch.float64)
    seen = torch.ones(1, 1, dtype=torch.bool).expand(2 * n, n)
    free = torch.ones(2 * n, dtype=torch.bool)
    basis = torch.ones(1, n, 1, dtype=torch.float64)
    group = torch.zeros(2 * n, dtype=torch.long)
    rows = Rows(one.expand(2 * n, n), seen, group, basis, basis[:, 0], free.double(), free, free[:1])
    known = trivial_bounds(rows, Question(seen[0]))
    assert float(known.lower.max()) == 0 and float(known.upper.min()) == 1


@pytest.mark.parametrize("solver", [nonsense, given_up])
@pytest.mark.parametrize("kind", ["random", "causal"])
def test_what_a_solver_leaves_loose_or_gives_up_is_solved_plainly(solver, kind, monkeypatch):
    rows, _, wanted, lower, upper, order = case(kind)
    monkeypatch.setattr(exact, "_solvers", lambda rows: [solver, cpu.propose_plainly])
    found = exact_bounds(rows, wanted)
    assert found.gap.max() < 1e-8
    assert_close(found.lower, lower)
    assert_close(found.upper, upper)
    expected = torch.tensor(order)[rows.free]
    assert (found.order[rows.free] <= expected).all()  # no order is certain without a proof
    assert solver is nonsense or torch.equal(found.order[rows.free], expected)


def test_plain_programs_end_with_the_time(monkeypatch):
    """A row that takes one program per end is given up then, and keeps what holds for any attention."""
    rows = case("random")[0]
    monkeypatch.setattr(exact, "_solvers", lambda rows: [cpu.propose_plainly])
    keys = torch.ones(rows.attention.shape[1], dtype=torch.bool)
    late = exact_bounds(rows, Question(keys, until=time.monotonic() - 1))
    soon = exact_bounds(rows, Question(keys, until=time.monotonic() + 100))
    assert rows.free.any()
    assert late.gap[rows.free].isnan().any(-1).all()
    assert not soon.gap[rows.free].isnan().any()
    assert (late.lower <= soon.lower).all() and (late.upper >= soon.upper).all()


def test_what_a_vertex_missed_counts_into_the_gap(monkeypatch):
    """A solver whose vertices are a thousandth off their sets, and attain by so much more than the sets allow."""
    rows, values, wanted, _, upper, _ = case("random")

    def off(rows, wanted, **options):
        far = torch.full((len(rows.group),), 1e-3, dtype=torch.float64)
        found = cpu.propose(rows, wanted, **options)._replace(distance=far)
        return found._replace(greatest=found.greatest + found.excess(found.upper))

    monkeypatch.setattr(exact, "_solvers", lambda rows: [off])
    bound, gap = exact.maxima(rows, wanted.objectives.reshape(1, 2, -1))
    assert (bound - upper[:, len(values) :] <= gap + 1e-9).all() and (bound >= upper[:, len(values) :] - 1e-9).all()


# Bases


def test_query_heads_that_share_values_are_decomposed_once(monkeypatch):
    """One call for all key-value heads of a layer; a row whose rank is its own adds one, however often it is asked."""
    calls = []
    decompose = polytopes.decompose_values
    monkeypatch.setattr(polytopes, "decompose_values", lambda values: calls.append(values.shape) or decompose(values))
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 12, 4, generator=generator, dtype=torch.float64)
    values[1, 1:6] = values[1, :1]  # early rows of the second head see one value only
    visible = torch.ones(12, 12, dtype=torch.bool).tril()
    rank = torch.stack([rank_of(head, visible) for head in values])
    layer = Polytopes.of(values, visible_from_mask(visible, 12), rank)
    scores = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    attention = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    for _ in range(3):  # query heads
        first = layer.rows([0] * 12, torch.arange(12), attention)
        assert len(first.basis) == 1
    assert calls == [(2, 12, 4)]
    for _ in range(3):
        second = layer.rows([1] * 4, torch.tensor([2, 3, 10, 11]), attention[[2, 3, 10, 11]])
        assert second.group.tolist() == [0, 1, 2, 2]
    assert calls == [(2, 12, 4), (1, 3, 4), (1, 4, 4)]


def test_rows_that_do_not_see_a_huge_value_keep_the_directions_it_drowns():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(24, 8, generator=generator)
    values[0] *= 3e6
    visible = torch.ones(2, 24, dtype=torch.bool)
    visible[1, 0] = False
    attention = torch.rand(2, 24, generator=generator, dtype=torch.float64).masked_fill(~visible, 0.0)
    attention /= attention.sum(-1, keepdim=True)
    some = rows_of(attention, values, visible, torch.tensor([7, 8]))
    alone = rows_of(attention[1:], values, visible[1:], torch.tensor([8]))
    found = exact_bounds(join_rows([some, some]), every_key(some))
    expected = exact_bounds(alone, every_key(alone))
    assert_close(found.lower[1], expected.lower[0])
    assert_close(found.upper[1], expected.upper[0])


def test_an_artificial_column_never_grows_once_a_vertex_is_found():
    """What rounding left in it would widen the set: the vertex would have another output, and exceed the true end."""
    column = np.array([-0.5, 0.3])
    values = np.array([5e-12, 0.5])
    inside = np.array([2, 0])  # with two keys, 2 is the first artificial column
    room = np.zeros((2, 2))
    leaving = numba.njit(lambda *given: simplex._choose_leaving(*given))  # only compiled functions can call it
    assert leaving(column, values, inside, 2, room, np.inf) == 0
    assert room[1, 0] == 0
    assert leaving(column, values, inside, 2, room, simplex.ZERO) == 1  # while a vertex is searched, it may
    assert room[1, 1] == 0.5 / 0.3


def test_objectives_with_few_rows_are_shared_out_on_a_gpu_and_stay_the_same():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    from identikit.maths.polytope import cuda

    rows = Rows(*(part.cuda() for part in some_rows("causal")[0]))
    wanted = Question(objectives=torch.randn(50, 30, generator=torch.Generator().manual_seed(2)).double().cuda())
    assert cuda._blocks(rows, wanted) == 6
    apart = cuda.propose(rows, wanted, vertices=True)
    free = rows.free.nonzero()[:, 0]
    together = cuda._solve_rows(rows.select(free), wanted, both=True, vertices=True)
    assert_close(apart.greatest[free], together.greatest, 1e-10)
    assert_close(apart.least[free], together.least, 1e-10)
    assert apart.vertices.shape == (len(rows.group), 50, 2, 30)
    assert not apart.failed.any()
