"""The compiled simplex method, on the CPU and on a GPU, against one plain linear program per end."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from identikit.errors import IdentikitError
from identikit.maths.polytope import cpu as simplex
from identikit.maths.polytope import exact
from identikit.maths.polytope.one_row import row_bounds
from identikit.maths.polytope.rows import Bounds, Rows, joined_rows, proven_maximum, rows_of, unbounded
from tests.maths.polytope.test_one_row import decaying_values, one_hot, rows
from tests.reference import intervals as reference

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


def rank_of(values, visible):
    """The rank of each row's visible values, as exact arithmetic has it for the cases here."""
    return torch.tensor([int(torch.linalg.matrix_rank(values[seen].double(), rtol=1e-6)) for seen in visible])


def case(kind: str, n: int = 30, d_v: int = 6, seed: int = 0) -> tuple[Rows, torch.Tensor]:
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


KINDS = ("random", "causal", "window", "padded", "repeated", "deficient", "sharp")


def solved(some: Rows, objectives=None, *, device="cpu", top=5):
    if device == "cuda":
        from identikit.maths.polytope import cuda as simplex_cuda

        solve = simplex_cuda.simplex_bounds
    else:
        solve = simplex.simplex_bounds
    some = Rows(*(part.to(device) for part in some))
    objectives = None if objectives is None else objectives.to(device)
    found, failed = solve(some, objectives, asked=torch.ones(some.attention.shape[1], dtype=torch.bool), top=top)
    assert not failed.any()
    return type(found)(*(part.cpu() for part in found))


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("kind", KINDS)
def test_every_end_is_that_of_a_plain_linear_program(kind, device):
    some, values = case(kind)
    found = solved(some, device=device)
    assert found.gap.max() < 1e-9
    for index, seen in enumerate(some.visible):
        lower, upper = reference.intervals(some.attention[index, seen].numpy(), values[seen].numpy())
        np.testing.assert_allclose(found.lower[index, seen], lower, atol=1e-7)
        np.testing.assert_allclose(found.upper[index, seen], upper, atol=1e-7)
        assert not found.upper[index, ~seen].any() and not found.lower[index, ~seen].any()
    assert (found.lower <= some.attention).all() and (some.attention <= found.upper).all()


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_those_of_a_plain_linear_program_and_lie_inside_the_sums_of_their_keys(kind, device):
    some, values = case(kind)
    generator = torch.Generator().manual_seed(1)
    objectives = (torch.rand(4, some.attention.shape[1], generator=generator) > 0.7).double()
    found, keys = solved(some, objectives, device=device), solved(some, device=device)
    assert found.gap.max() < 1e-9
    assert (found.lower >= keys.lower @ objectives.mT - 1e-9).all()
    assert (found.upper <= keys.upper @ objectives.mT + 1e-9).all()
    own = some.attention @ objectives.mT
    assert (found.lower <= own).all() and (own <= found.upper).all()
    for index in (0, len(some.attention) - 1):
        seen = some.visible[index]
        for at, objective in enumerate(objectives[:, seen].numpy()):
            row = some.attention[index, seen].numpy(), values[seen].numpy()
            assert found.lower[index, at] == pytest.approx(objective @ reference.optimum(objective, *row), abs=1e-7)
            assert found.upper[index, at] == pytest.approx(objective @ reference.optimum(-objective, *row), abs=1e-7)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("kind", KINDS)
def test_the_certain_order_is_that_of_all_differences(kind, device):
    some, values = case(kind)
    found = solved(some, device=device)
    for index, seen in enumerate(some.visible):
        if some.free[index]:
            expected = reference.certain_order(some.attention[index, seen].numpy(), values[seen].numpy(), top=5)
            assert int(found.order[index]) == expected


@given(rows())
@settings(max_examples=400)
def test_rows_with_ties_zeros_and_lost_rank(row):
    """Such rows may be too degenerate for the compiled method; they are then handed on, and come out right."""
    attention, values = row
    visible = torch.ones(1, len(values), dtype=torch.bool)
    some = rows_of(attention[None], values, visible, rank_of(values, visible))
    found = exact.exact_bounds(joined_rows([some] * 3), top=5)
    lower, upper = reference.intervals(attention.numpy(), values.numpy())
    for index in range(3):
        np.testing.assert_allclose(found.lower[index], lower, atol=1e-7)
        np.testing.assert_allclose(found.upper[index], upper, atol=1e-7)
    assert found.gap.max() < 1e-8


def given_up(rows, objectives, **_):
    """Stand in for a solver that fails in every row, with nonsense left behind."""
    found = unbounded(rows, objectives)
    return Bounds(found.lower + 7, found.upper - 7, found.gap, found.order), rows.free.clone()


def test_rows_that_the_compiled_method_gives_up_are_handed_to_highs(monkeypatch):
    some, _ = case("random")
    monkeypatch.setattr(exact, "_compiled", lambda rows: given_up)
    found = exact.exact_bounds(some, top=5)
    for part, known in zip(found, row_bounds(some, None, top=5), strict=True):
        assert torch.equal(part, known)


def test_what_nobody_can_prove_keeps_the_bounds_that_always_hold(monkeypatch):
    some, _ = case("random")

    def refuse(*_, **__):
        raise IdentikitError("no")

    monkeypatch.setattr(exact, "_compiled", lambda rows: given_up)
    monkeypatch.setattr(exact, "row_bounds", refuse)
    found = exact.exact_bounds(some)
    assert not found.lower.any() and (found.upper == 1).all() and found.gap.isnan().all()


def test_of_two_proofs_the_better_one_counts(monkeypatch):
    some, _ = case("random")
    sharp = exact.exact_bounds(some, top=5)

    def loose(rows, objectives, **_):
        ends = sharp.lower - 0.01, sharp.upper + 0.01, sharp.gap + 0.01
        return Bounds(*ends, torch.full_like(sharp.order, -1)), torch.zeros_like(rows.free)

    monkeypatch.setattr(exact, "_compiled", lambda rows: loose)
    found = exact.exact_bounds(some, top=5)
    torch.testing.assert_close(found.lower, sharp.lower, atol=1e-9, rtol=0)
    assert found.gap.max() < 1e-8 and torch.equal(found.order, sharp.order)


def test_identifiable_rows_are_their_own_ends():
    some, _ = case("causal")
    found = solved(some)
    fixed = ~some.free
    assert fixed.sum() == 6  # up to d_v keys have independent values
    for end in (found.lower, found.upper):
        assert torch.equal(end[fixed], some.attention[fixed])
    assert not found.gap[fixed].any()


def test_any_dual_vector_proves_a_bound():
    some, _ = case("causal")
    found = solved(some)
    generator = torch.Generator().manual_seed(2)
    for key in (0, 3, 17):
        objective = one_hot(30, key).expand(30, -1)
        y = torch.randn(30, some.basis.shape[2], generator=generator, dtype=torch.float64)
        bound = proven_maximum(objective, y, some)
        assert (bound[some.visible[:, key]] >= found.upper[some.visible[:, key], key] - 1e-12).all()


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
    found, expected = exact.exact_bounds(joined_rows([some, some])), exact.exact_bounds(alone)
    torch.testing.assert_close(found.lower[1], expected.lower[0], atol=1e-7, rtol=0)
    torch.testing.assert_close(found.upper[1], expected.upper[0], atol=1e-7, rtol=0)
