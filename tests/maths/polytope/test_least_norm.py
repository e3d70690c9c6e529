import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from identikit.maths.polytope import least_norm
from identikit.maths.polytope.rows import Rows, join_rows
from tests.maths.polytope.cases import rows_of
from tests.reference import intervals as reference

ALONE = least_norm._solve_alone
SHAPES = [(9, 3), (40, 8)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_mask(kind: str, n: int) -> Tensor:
    full = torch.ones(n, n, dtype=torch.bool)
    return {
        "full": full,
        "causal": full.tril(),
        "padded": full & (torch.arange(n) < n - n // 4),
    }[kind]


def rows(scores: Tensor, values: Tensor, mask: Tensor | None = None) -> Rows:
    """Rows of one head; the rank of each row's values by SVD."""
    mask = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
    attention = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    rank = torch.tensor([int(torch.linalg.matrix_rank(values[seen].double(), rtol=1e-6)) for seen in mask])
    return rows_of(attention, values, mask, rank)


def row_by_row(given: Rows) -> Tensor:
    """The same, one row at a time, by non-negative least squares."""
    found = given.attention.clone()
    for row in given.free.nonzero()[:, 0].tolist():
        found[row] = ALONE(given, row)
    return found


@pytest.fixture
def fallen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that the batched method left to the row-wise one: if they are many, that one is compared with itself."""
    left = []
    monkeypatch.setattr(least_norm, "_solve_alone", lambda rows, row: left.append(row) or ALONE(rows, row))
    return left


def assert_least(given: Rows) -> Tensor:
    found = least_norm.least_norm(given)
    assert found.min() >= 0 and not found[~given.visible].any()
    assert (found.sum(-1) - 1).abs().max() <= 1e-12
    for group, some in given.by_group():
        assert ((found[some] - given.attention[some]) @ given.basis[group]).abs().max() <= least_norm.CERTIFIED
    assert (found.norm(dim=-1) <= given.attention.norm(dim=-1) + 1e-10).all()
    torch.testing.assert_close(found, row_by_row(given), atol=1e-8, rtol=0)
    return found


@pytest.mark.parametrize("sharpness", [0.3, 4.0, 4000.0])
@pytest.mark.parametrize("mask", ["full", "causal", "padded"])
@pytest.mark.parametrize(("n", "d_v"), SHAPES)
def test_equals_the_row_wise_method(n, d_v, mask, sharpness, fallen):
    assert_least(rows(sharpness * drawn(n, n, seed=1), drawn(n, d_v, seed=2), make_mask(mask, n)))
    assert len(fallen) <= n // 20


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_repeated_tokens_share_their_weight_evenly(mask, dtype, fallen):
    n = 30
    values = drawn(10, 16, seed=1)[torch.arange(n) % 10].to(dtype)
    given = rows(drawn(n, n, seed=2), values, make_mask(mask, n))
    assert given.free.any()
    last = assert_least(given)[-1].reshape(3, 10)
    torch.testing.assert_close(last, last.mean(0).expand(3, 10), atol=1e-9, rtol=0)
    assert not fallen


def test_values_that_lose_rank(fallen):
    given = rows(3 * drawn(40, 40, seed=3), (drawn(40, 4, seed=1) @ drawn(4, 12, seed=2)).float())
    assert int(given.basis[0].any(0).sum()) == 5
    assert assert_least(given).norm(dim=-1).mean() < 0.9 * given.attention.norm(dim=-1).mean()
    assert not fallen


def test_values_with_the_spectrum_and_the_mean_of_a_real_head(fallen):
    left, right = torch.linalg.qr(drawn(60, 16, seed=1)).Q, torch.linalg.qr(drawn(16, 16, seed=2)).Q
    values = (left * torch.logspace(0, -3, 16, dtype=torch.float64)) @ right + 0.3 * right[0]
    for sharpness in (1.0, 6.0):
        assert_least(rows(sharpness * drawn(60, 60, seed=3), values.float(), make_mask("causal", 60)))
    assert not fallen


def test_one_hot_rows():
    """At a corner of the values nothing can move; inside, the weight spreads over all of them."""
    one_hot = torch.eye(5, dtype=torch.float64)
    values = torch.tensor([[0.0, 0], [2, 0], [0, 2], [2, 2], [1, 1]], dtype=torch.float64)
    found = assert_least(rows(one_hot.log(), values))
    torch.testing.assert_close(found[:4], one_hot[:4], atol=1e-9, rtol=0)
    torch.testing.assert_close(found[4], torch.full_like(found[4], 0.2), atol=1e-9, rtol=0)
    assert_least(rows(torch.eye(60, dtype=torch.float64).log(), drawn(60, 4)))


@st.composite
def small(draw) -> tuple[Tensor, Tensor]:
    """Scores of rows with ties, zeros, one-hot weights, and values that repeat or lose rank."""
    n, d_v = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    whole = st.lists(st.integers(-2, 2), min_size=d_v, max_size=d_v)
    values = torch.tensor(draw(st.lists(whole, min_size=n, max_size=n))).double()
    weights = st.lists(st.integers(0, 5), min_size=n, max_size=n).filter(any)
    return torch.tensor(draw(st.lists(weights, min_size=1, max_size=3))).double().log(), values


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(case=small())
def test_is_the_best_of_every_support(case, fallen):
    given = rows(*case)
    found = assert_least(given)
    columns = given.basis[0][:, 1:].numpy()
    for row, alone, attention in zip(found, row_by_row(given), given.attention, strict=True):
        expected = reference.minimum_norm(attention.numpy(), columns)
        np.testing.assert_allclose(row, expected, atol=1e-7)
        np.testing.assert_allclose(alone, expected, atol=1e-10)
    assert len(fallen) <= 5  # over all examples


def test_rows_of_many_heads_at_once_are_those_of_each(monkeypatch):
    """Heads of few and of many rows, in as many portions as fit in memory."""
    shapes = ((3, 8), (20, 5), (2, 12), (30, 4))
    heads = [rows(3 * drawn(many, 30, seed=many), drawn(30, d_v, seed=d_v)) for many, d_v in shapes]
    together = least_norm.least_norm(join_rows(heads))
    alone = torch.cat([least_norm.least_norm(head) for head in heads])
    torch.testing.assert_close(together, alone, atol=1e-10, rtol=0)
    for room in (1, 2**18):
        monkeypatch.setattr(least_norm, "BYTES", room)
        torch.testing.assert_close(least_norm.least_norm(join_rows(heads)), together, atol=1e-10, rtol=0)


def test_few_steps_are_enough_for_most_rows(monkeypatch, fallen):
    monkeypatch.setattr(least_norm, "_ROUNDS", least_norm._ROUNDS[:1])
    assert_least(rows(4 * drawn(40, 40, seed=1), drawn(40, 8, seed=2), make_mask("causal", 40)))
    assert len(fallen) <= 2


def test_a_row_that_is_not_free_is_its_own():
    given = rows(drawn(4, 4), drawn(4, 6, seed=1), make_mask("causal", 4))
    assert not given.free.any()
    assert torch.equal(least_norm.least_norm(given), given.attention)


def test_a_row_without_a_certificate_goes_to_the_row_wise_method(monkeypatch, fallen):
    given = rows(4 * drawn(12, 20), drawn(20, 5, seed=1))
    monkeypatch.setattr(least_norm, "_ROUNDS", ((2, 0),))
    torch.testing.assert_close(least_norm.least_norm(given), row_by_row(given), atol=1e-10, rtol=0)
    assert len(fallen) == 12


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu():
    given = rows(4 * drawn(60, 60), drawn(60, 16, seed=1), make_mask("causal", 60))
    there = Rows(*(part.cuda() for part in given))
    torch.testing.assert_close(least_norm.least_norm(there).cpu(), least_norm.least_norm(given), atol=1e-9, rtol=0)
