import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from identikit.maths.linalg import (
    Resolution,
    matrix_rank,
    right_spectrum,
    rowwise_solve,
    shared_solve,
    triangular_roots,
)
from identikit.maths.prefix import prefix_solve

SINGLE = Resolution(torch.finfo(torch.float32).eps)
DOUBLE = Resolution(torch.finfo(torch.float64).eps)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_pseudo_inverse(values: torch.Tensor, output: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """y_i = G_i⁺ o_i = V_i⁺ V_i⁺ᵀ o_i, one head and one row at a time."""
    rows = torch.zeros_like(output)
    for head in range(values.shape[0]):
        for query, row in enumerate(seen):
            inverse = torch.linalg.pinv(values[head, row], rtol=1e-9)
            rows[head, :, query] = output[head, :, query] @ inverse @ inverse.T
    return rows


def weights(coefficients: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    return (coefficients @ values[:, None].mT) * seen


def test_cutoff_is_the_formula():
    cutoff = Resolution(2.0**-7).cutoff(torch.tensor([3.0]), torch.tensor([16]), 64)
    assert float(cutoff) == pytest.approx(4 * 2.0**-7 * (1 + math.sqrt(64 / 16)) * 3)
    assert float(Resolution(2.0**-7, 0.5).cutoff(torch.tensor([3.0]), 16, 64)) == pytest.approx(1.5)
    assert SINGLE.is_real(torch.zeros(2, 4), 3).sum() == 0


@pytest.mark.parametrize(("n", "d"), [(3000, 64), (64, 64), (20, 128)])
def test_float64_noise_is_below_the_cutoff_and_a_small_value_above(n, d):
    for rank in (1, min(n, d) // 2, min(n, d) - 1):
        singular, _ = right_spectrum(random(n, rank) @ random(rank, d, seed=1))
        assert int(DOUBLE.is_real(singular, n).sum()) == rank
        singular[-1] = 1e-12 * singular[0]
        assert bool(DOUBLE.is_real(singular, n)[-1])


@given(st.integers(0, 2**32), st.integers(2, 12), st.floats(-20, 0))
def test_certificate_holds(seed, d, exponent):
    """Whatever is certified has a smallest singular value that is above the cutoff, and well within a Gram's reach."""
    spectrum = torch.logspace(0, exponent, d, dtype=torch.float64)
    left, right = (torch.linalg.qr(random(20, d, seed=seed + add)).Q for add in (0, 1))
    values = left * spectrum @ right[:d].T
    root, good = triangular_roots(values.T @ values, 20, SINGLE)
    singular = torch.linalg.svdvals(values)
    if bool(good):
        assert bool(SINGLE.is_real(singular, 20).all())
        assert float(singular[-1] / singular[0]) > 1e-5
        torch.testing.assert_close(values @ root @ root.T @ values.T, left @ left.T, atol=1e-5, rtol=0)
    else:
        assert float(singular[-1] / singular[0]) < d * 1e-5


def test_certificate_is_given_to_ordinary_values():
    values = random(12, 512, 64)
    assert bool(triangular_roots(values.mT @ values, 512, SINGLE)[1].all())


@pytest.mark.parametrize(("rows", "columns", "rank"), [(5, 9, 5), (9, 5, 5), (6, 6, 2), (4, 7, 0), (0, 3, 0)])
@pytest.mark.parametrize("resolution", [SINGLE, DOUBLE])
def test_matrix_rank(rows, columns, rank, resolution):
    assert matrix_rank(random(rows, rank) @ random(rank, columns, seed=1), resolution) == rank


@pytest.mark.parametrize("resolution", [SINGLE, DOUBLE])
@pytest.mark.parametrize("rank", [0, 3, 8])
def test_shared_solve(rank, resolution):
    values = random(2, 30, rank) @ random(2, rank, 8, seed=1)
    output = random(2, 3, 5, 30, seed=2) @ values[:, None]
    coefficients, ranks = shared_solve(values, output, resolution)
    seen = torch.ones(5, 30, dtype=torch.bool)
    expected = by_pseudo_inverse(values, output, seen)
    torch.testing.assert_close(weights(coefficients, values, seen), weights(expected, values, seen), atol=1e-10, rtol=0)
    assert ranks.tolist() == [rank] * 2


def test_float64_values_are_solved_as_well_as_their_conditioning_allows():
    """A Gram alone would be wrong by cond²·eps, some 1e-8."""
    spectrum = torch.logspace(0, -4, 8, dtype=torch.float64)
    left, right = (torch.linalg.qr(random(2, size, 8, seed=size)).Q for size in (40, 8))
    values = (left * spectrum) @ right.mT
    for ends in (torch.arange(30, 41), torch.full((11,), 40)):
        seen = torch.arange(40) < ends[:, None]
        output = (random(2, 1, 11, 40) * seen) @ values[:, None]
        expected = weights(by_pseudo_inverse(values, output, seen), values, seen)
        found = [prefix_solve(values, output, ends, DOUBLE), rowwise_solve(values, output, seen, DOUBLE)]
        if bool(seen.all()):
            found.append(shared_solve(values, output, DOUBLE))
        for coefficients, _ in found:
            torch.testing.assert_close(weights(coefficients, values, seen), expected, atol=3e-11, rtol=0)


def test_a_square_matrix_of_full_rank_needs_no_singular_values(monkeypatch):
    """Its smallest singular value is some 1e-4 of the largest, so the Gram matrix's is below 1e-8."""
    matrix = random(300, 300) * torch.arange(1, 301) ** -0.5
    monkeypatch.setattr("identikit.maths.linalg.svdvals", None)
    assert matrix_rank(matrix, SINGLE) == 300
