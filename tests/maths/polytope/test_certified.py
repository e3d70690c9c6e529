import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from identikit.maths.polytope import certified
from identikit.maths.polytope.bounds import Question, proven_maximum
from identikit.maths.polytope.certified import certified_bounds
from identikit.maths.polytope.exact import exact_bounds
from identikit.maths.polytope.rows import join_rows
from tests.maths.polytope.cases import every_key, rank_of, rows_of
from tests.reference import certified as reference
from tests.reference.intervals import optimum


def some_rows(*heads):
    """Rows of several heads, each (values, attention, visible) over the same keys, and the values of each row."""
    parts = []
    for values, attention, visible in heads:
        weights = attention * visible
        weights = weights / weights.sum(1, keepdim=True)
        lengths = torch.eye(values.shape[1], dtype=torch.float64)
        parts.append(rows_of(weights, values, visible, rank_of(values, visible), lengths))
    values = [values.double().expand(len(attention), -1, -1) for values, attention, _ in heads]
    return join_rows(parts), torch.cat(values)


def random_head(n, d_v, rows, seed=0, sharpness=1.5, mask="all", repeats=0, rank=None):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, d_v, generator=generator, dtype=torch.float64)
    if rank is not None:
        values = values[:, :rank] @ torch.randn(rank, d_v, generator=generator, dtype=torch.float64)
    for repeat in range(repeats):
        values[n - 1 - repeat] = values[repeat]
    attention = (sharpness * torch.randn(rows, n, generator=generator, dtype=torch.float64)).softmax(1)
    visible = torch.ones(rows, n, dtype=torch.bool)
    if mask == "causal":
        visible = torch.arange(n) <= torch.arange(n - rows, n)[:, None]
    elif mask == "padded":
        visible[:, n - 3 :] = False
    return values, attention, visible


def exact_ends(rows):
    """The least and the greatest weight of each key."""
    bounds = exact_bounds(rows, every_key(rows))
    assert bounds.gap.max() < 1e-8
    return bounds.lower, bounds.upper


def after(steps, rows):
    """Bounds that a search of so many steps finds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certified, "STEPS", steps)
        return certified_bounds(rows, every_key(rows))


def assert_contains(bounds, lower, upper, slack=1e-9):
    assert (bounds.lower <= lower + slack).all()
    assert (upper <= bounds.upper + slack).all()


def assert_gap_true(bounds, lower, upper, slack=1e-9):
    assert (bounds.gap >= 0).all()
    assert (lower - bounds.lower <= bounds.gap + slack).all()
    assert (bounds.upper - upper <= bounds.gap + slack).all()


CASES = {
    "random": {},
    "sharp": {"sharpness": 8.0},
    "causal": {"mask": "causal"},
    "padded": {"mask": "padded"},
    "repeated": {"repeats": 4},
    "repeated and causal": {"repeats": 6, "mask": "causal"},
    "rank-deficient": {"rank": 3},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("n", "d_v"), [(12, 4), (40, 8)])
def test_bounds_contain_the_exact_ends_and_say_how_far_they_can_be_off(n, d_v, case):
    rows, _ = some_rows(*(random_head(n, d_v, 3, seed, **CASES[case]) for seed in (1, 2)))
    lower, upper = exact_ends(rows)
    found = certified_bounds(rows, every_key(rows))
    assert_contains(found, lower, upper)
    assert_gap_true(found, lower, upper)
    assert found.gap.max() < 1e-6


@st.composite
def hard_rows(draw):
    """Two heads of one to three rows with ties, zeros, one-hot weights, masks, and values that repeat or lose rank."""
    n, d_v = draw(st.integers(1, 8)), draw(st.integers(1, 4))

    def whole(lines, columns, least, most):
        line = st.lists(st.integers(least, most), min_size=columns, max_size=columns)
        return torch.tensor(draw(st.lists(line, min_size=lines, max_size=lines)))

    def head():
        count = draw(st.integers(1, 3))
        visible = whole(count, n, 0, 3) > 0
        visible[:, draw(st.integers(0, n - 1))] = True
        weights = whole(count, n, 0, 5).double() ** draw(st.sampled_from([1, 6]))
        empty = ~(weights * visible).any(1)
        weights[empty] = visible[empty].double()
        return whole(n, d_v, -2, 2).double(), weights, visible

    return head(), head()


@settings(max_examples=40)
@given(hard_rows(), st.integers(0, 14))
def test_bounds_are_valid_after_any_number_of_steps(case, steps):
    rows, _ = some_rows(*case)
    lower, upper = exact_ends(rows)
    found = after(steps, rows)
    assert_contains(found, lower, upper)
    assert_gap_true(found, lower, upper)
    assert (found.lower <= rows.attention).all()
    assert (rows.attention <= found.upper).all()
    assert (found.lower >= 0).all()
    assert (found.upper <= 1).all()


@settings(max_examples=30)
@given(hard_rows(), st.data())
def test_readings_of_groups_and_differences(case, data):
    rows, values = some_rows(*case)
    line = st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=rows.visible.shape[1], max_size=rows.visible.shape[1])
    objectives = torch.tensor(data.draw(st.lists(line, min_size=1, max_size=3)), dtype=torch.float64)
    found = certified_bounds(rows, Question(objectives=objectives))
    for row, reading in itertools.product(range(len(rows.visible)), range(len(objectives))):
        seen = rows.visible[row]
        cost = objectives[reading, seen].numpy()
        given_row = rows.attention[row, seen].numpy(), values[row, seen].numpy()
        least, greatest = (float(cost @ optimum(sign * cost, *given_row)) for sign in (1, -1))
        assert found.lower[row, reading] <= least + 1e-9
        assert least - found.lower[row, reading] <= found.gap[row, reading] + 1e-8
        assert greatest <= found.upper[row, reading] + 1e-9
        assert found.upper[row, reading] - greatest <= found.gap[row, reading] + 1e-8


# The set with room for the output


@settings(max_examples=20)
@given(case=hard_rows(), seed=st.integers(0, 1000), epsilon=st.sampled_from([1e-6, 0.01, 0.3, 2.0]))
def test_any_attention_whose_output_moves_little_is_inside(case, seed, epsilon):
    rows, values = some_rows(*case)
    found = certified_bounds(rows, every_key(rows), epsilon=epsilon)
    generator = torch.Generator().manual_seed(seed)
    other = torch.randn(20, *rows.attention.shape, generator=generator, dtype=torch.float64).mul(4).exp() * rows.visible
    other = other / other.sum(-1, keepdim=True)
    moved = (torch.einsum("srk,rkd->srd", other - rows.attention, values)).norm(dim=-1)
    step = (epsilon * rows.output / moved).clamp(max=1).nan_to_num(1.0)[..., None]
    other = rows.attention + step * (other - rows.attention)
    assert (found.lower <= other + 1e-9).all()
    assert (other <= found.upper + 1e-9).all()


@pytest.mark.parametrize("mask", ["padded", "causal"])
@pytest.mark.parametrize("epsilon", [0.003, 0.5])
def test_room_is_used_to_the_full(mask, epsilon):
    rows, values = some_rows(random_head(9, 3, 2, seed=3, mask=mask), random_head(9, 3, 1, seed=4, mask=mask))
    found = certified_bounds(rows, every_key(rows), epsilon=epsilon)
    assert found.gap.max() < 1e-5
    for row, key in itertools.product(range(3), (0, 2, 5)):
        seen = rows.visible[row]
        objective = torch.eye(9, dtype=torch.float64)[key, seen].numpy()
        given_row = rows.attention[row, seen].numpy(), values[row, seen].numpy()
        room = epsilon * float(rows.output[row])
        upper, lower = (
            reference.greatest(objective, *given_row, room),
            -reference.greatest(-objective, *given_row, room),
        )
        assert float(found.upper[row, key]) == pytest.approx(upper, abs=2e-5)
        assert float(found.lower[row, key]) == pytest.approx(lower, abs=2e-5)


def test_a_row_that_is_alone_with_its_output_moves_when_there_is_room():
    rows, _ = some_rows(random_head(4, 6, 2))
    assert not rows.free.any()
    alone = certified_bounds(rows, every_key(rows))
    assert torch.equal(alone.lower, rows.attention)
    assert torch.equal(alone.upper, rows.attention)
    assert (alone.gap == 0).all()
    found = certified_bounds(rows, every_key(rows), epsilon=0.1)
    assert (found.upper > rows.attention + 0.005).all()
    assert found.gap.max() < 1e-6


# What proves a bound


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
@pytest.mark.parametrize("mask", ["all", "causal", "padded"])
def test_any_dual_vector_proves_the_bound_of_the_definition(mask, epsilon):
    rows, values = some_rows(random_head(9, 3, 3, mask=mask), random_head(9, 3, 2, seed=5, mask=mask))
    generator = torch.Generator().manual_seed(0)
    y = 3 * torch.randn(5, 2, 4, generator=generator, dtype=torch.float64)
    objective = torch.randn(5, 2, 9, generator=generator, dtype=torch.float64) + 50 * ~rows.visible[:, None]
    found = proven_maximum(rows, objective, y.clone(), epsilon=epsilon)
    for row, program in itertools.product(range(5), range(2)):
        seen = rows.visible[row]
        columns = rows.basis[rows.group[row]]
        scale = rows.scale[rows.group[row]]
        scaled = (columns * scale)[:, 1:]  # the values themselves but for a turn and a constant
        some = columns.any(1)  # keys that any row of the head sees
        centred = values[row, some] - values[row, some].mean(0)
        torch.testing.assert_close(scaled[some] @ scaled[some].T, centred @ centred.T)
        literal = reference.dual_bound(
            objective[row, program, seen].numpy(),
            rows.attention[row, seen].numpy(),
            scaled[seen].numpy(),
            (y[row, program] / scale)[1:].numpy(),
            epsilon * float(rows.output[row]),
        )
        assert float(found[row, program]) == pytest.approx(literal, abs=1e-12)
        assert float(found[row, program]) >= literal - 1e-15


@settings(max_examples=30)
@given(hard_rows(), st.sampled_from([0.0, 0.05]))
def test_attention_found_on_the_way_is_in_the_set(case, epsilon):
    rows, values = some_rows(*case)
    frame = certified._frame(rows, epsilon)
    objectives = torch.eye(rows.visible.shape[1], dtype=torch.float64)
    wanted = torch.ones(len(rows.free), len(objectives), dtype=torch.bool)
    _, found = certified._programs(frame, objectives[None], wanted)
    assert (found >= 0).all()
    assert (found[~rows.visible[:, None].expand_as(found)] == 0).all()
    torch.testing.assert_close(found.sum(-1), torch.ones_like(found[..., 0]), atol=1e-12, rtol=0)
    moved = torch.einsum("rpk,rkd->rpd", found - rows.attention[:, None], values).norm(dim=-1)
    assert (moved <= epsilon * rows.output[:, None] + 1e-12).all()


def test_ends_that_overlap_do_not_say_which_key_is_ahead():
    """Keys 0 and 2 gain and lose together, so 0 is always ahead of 2, which can pass 1. Programs tell; ends cannot."""
    attention = torch.tensor([[0.40, 0.355, 0.35, 0.06, 0.04]], dtype=torch.float64)
    attention = attention / attention.sum()
    moves = torch.tensor([1.0, 0.0, 1.0, -3.0, 1.0], dtype=torch.float64)
    spanning = torch.cat([torch.stack([torch.ones(5).double(), moves], dim=1), torch.eye(5).double()], dim=1)
    values = torch.linalg.qr(spanning).Q[:, 2:]
    rows, _ = some_rows((values, attention, torch.ones(1, 5, dtype=torch.bool)))
    exact = exact_bounds(rows, every_key(rows, top=2))
    assert exact.lower[0, 0] < exact.upper[0, 2] and exact.lower[0, 1] < exact.upper[0, 2]
    assert exact.order.tolist() == [1]
    certified = certified_bounds(rows, every_key(rows, top=2))
    assert certified.lower[0, 0] < certified.upper[0, 2] and certified.gap.max() < 1e-6
    assert certified.order.tolist() == [-1]


# Work


def test_the_deadline_leaves_what_any_attention_can_be():
    rows, _ = some_rows(random_head(12, 4, 4, mask="padded"))
    found = certified_bounds(rows, every_key(rows, until=0.0))
    assert found.gap.isnan().all()
    assert (found.lower == 0).all()
    assert torch.equal(found.upper, rows.visible.double())


def test_what_was_done_before_the_deadline_is_kept(monkeypatch):
    monkeypatch.setattr(certified, "_BYTES", {"cpu": 1})
    rows, _ = some_rows(random_head(12, 4, 4))
    clock = itertools.count()
    monkeypatch.setattr(certified, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    found = certified_bounds(rows, every_key(rows, until=2 * 12 + 12 + 2))
    known = ~found.gap.isnan()
    assert known[0].all()
    assert known[1].tolist() == [True] * 3 + [False] * 9
    assert not known[2:].any()
    assert (found.upper[1] < 1).all()  # all upper ends of the second row were found in time
    assert (found.upper[2:] == 1).all()
    assert_contains(found, *exact_ends(rows))


def test_small_portions_give_the_same_bounds(monkeypatch):
    rows, _ = some_rows(random_head(12, 4, 5, mask="causal"), random_head(12, 4, 3, seed=1))
    together = certified_bounds(rows, every_key(rows))
    for room in (1, 100_000):
        monkeypatch.setattr(certified, "_BYTES", {"cpu": room})
        found = certified_bounds(rows, every_key(rows))
        torch.testing.assert_close(found.lower, together.lower, atol=1e-7, rtol=0)
        torch.testing.assert_close(found.upper, together.upper, atol=1e-7, rtol=0)


def test_more_steps_close_the_gap_and_few_are_enough():
    rows, _ = some_rows(random_head(60, 16, 4))
    gaps = [float(after(steps, rows).gap.max()) for steps in (1, 4, 8, 14)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[1] < 0.1
    assert gaps[3] < 1e-6
