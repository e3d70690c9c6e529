import numpy as np
import pytest
import torch
from hypothesis import assume, given

from identikit.errors import InputError
from identikit.maths.polytope import alternative as polytope
from identikit.maths.polytope.exact import extreme_rows
from identikit.maths.polytope.rows import decompose_values
from tests.maths.polytope.cases import decaying_values, hard_row, intervals, one_hot, one_row, random_row
from tests.reference import intervals as reference


def assert_same_output(found, attention, values, tolerance=1e-12):
    assert found.min() >= 0
    assert abs(float(found.sum()) - 1) <= 1e-12
    values = values.double()
    assert (found @ values - attention @ values).abs().max() <= tolerance * values.abs().max()


def assert_equal_to_reference(attention, values):
    found = intervals(attention, values)
    lower, upper = reference.intervals(attention.numpy(), values.double().numpy())
    np.testing.assert_allclose(found.lower, lower, atol=1e-7)
    np.testing.assert_allclose(found.upper, upper, atol=1e-7)
    assert (found.lower <= attention).all()
    assert (attention <= found.upper).all()
    assert found.gap.max() < 1e-8
    return found


# The column space of [V, 1], whose complement is the null space


def range_basis(values):
    basis = decompose_values(values[None]).basis()[0]
    return basis[:, basis.any(0)]


def null_projector(values):
    """The projector on LN([V, 1]), as the module finds it; its basis must be orthonormal."""
    basis = range_basis(values)
    torch.testing.assert_close(basis.T @ basis, torch.eye(basis.shape[1], dtype=torch.float64))
    return torch.eye(len(values), dtype=torch.float64) - basis @ basis.T


def rank(values):
    return range_basis(values).shape[1]


@given(hard_row())
def test_the_rank_is_exact(row):
    values = row[1].numpy()
    assert rank(row[1]) == np.linalg.matrix_rank(reference.augmented(values), tol=1e-6)
    np.testing.assert_allclose(null_projector(row[1]), reference.null_projector(values, rank(row[1])), atol=1e-12)


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("shift", [0.0, 1e3])
def test_the_null_space_depends_neither_on_the_scale_of_the_values_nor_on_a_constant_added_to_them(scale, shift):
    _, values = random_row(20, 6)
    torch.testing.assert_close(null_projector(scale * (values + shift)), null_projector(values), atol=1e-11, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n", [20, 130])
def test_small_singular_values_of_real_heads_count(dtype, n):
    assert rank(decaying_values(n, 16).to(dtype)) == 17


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rounding_of_the_values_adds_no_rank(dtype):
    generator = torch.Generator().manual_seed(1)
    factors = torch.randn(130, 8, generator=generator, dtype=torch.float64)
    values = factors @ torch.randn(8, 32, generator=generator, dtype=torch.float64)
    assert rank(values.to(dtype)) == 9
    assert rank(values.bfloat16()) == rank(values.half()) == 33  # half precision is read as the numbers that it is


def test_a_constant_among_the_values_adds_no_rank():
    _, values = random_row(12, 3)
    constant = torch.full((12, 1), 0.1, dtype=torch.float32)
    assert rank(torch.cat([values.float(), constant], dim=1)) == 4
    assert rank(torch.zeros(5, 2)) == 1


# Alternatives


@pytest.mark.parametrize(("n", "d_v"), [(5, 3), (40, 8), (30, 24)])
def test_an_alternative_goes_along_the_projected_direction_until_a_weight_is_zero(n, d_v):
    attention, values = random_row(n, d_v)
    direction, _ = random_row(n, d_v, seed=7)
    found = polytope.alternative(attention, values, direction)
    assert_same_output(found, attention, values)
    null = reference.null_projector(values.numpy(), d_v + 1) @ direction.numpy()
    step = reference.largest_step(attention.numpy(), null)
    assert step > 0 and (found == 0).any()
    np.testing.assert_allclose(found, attention.numpy() + step * null, atol=1e-12)


def test_a_zero_weight_on_an_identifiable_key_stops_no_step():
    values = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [1.0, 3.0]], dtype=torch.float64) / 3
    attention = torch.tensor([0.2, 0.3, 0.5, 0.0], dtype=torch.float64)
    for key in range(3):
        assert polytope.alternative(attention, values, one_hot(4, key))[key] > attention[key] + 0.05


def test_a_one_hot_row_stays_where_it_is_unless_the_direction_only_lowers_its_key():
    values = torch.tensor([[0.0], [-1.0], [1.0], [2.0]], dtype=torch.float64)
    assert torch.equal(polytope.alternative(one_hot(4, 0), values, one_hot(4, 0)), one_hot(4, 0))
    free = polytope.alternative(one_hot(4, 0), values, torch.tensor([-2.0, 1, 1, 0]))
    torch.testing.assert_close(free, torch.tensor([0, 0.5, 0.5, 0], dtype=torch.float64))


def test_an_identifiable_row_has_no_alternative():
    attention, values = random_row(4, 3)
    with pytest.raises(InputError, match=r"identifiable: its 4 visible keys have values of rank 4 .* sees more keys"):
        polytope.alternative(attention, values, one_hot(4, 0))


@pytest.mark.parametrize("direction", [torch.zeros(9), torch.ones(9)])
def test_a_direction_outside_the_null_space_is_refused(direction):
    attention, values = random_row(9, 3)
    with pytest.raises(InputError, match=r"no component in the row's null space \(5 dimensions\)"):
        polytope.alternative(attention, values, direction)


# Intervals


@pytest.mark.parametrize(("n", "d_v"), [(40, 8), (40, 32)])
def test_intervals_of_float32_values_with_the_spectrum_of_a_real_head(n, d_v):
    attention, _ = random_row(n, d_v, seed=5)
    assert_equal_to_reference(attention, decaying_values(n, d_v).float())


def test_rounded_values_of_lost_rank_have_the_intervals_of_the_exact_ones():
    attention, _ = random_row(30, 12)
    exact = decaying_values(30, 12, rank=5)
    found = intervals(attention, exact.float())
    expected = assert_equal_to_reference(attention, exact)
    torch.testing.assert_close(found.lower, expected.lower, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.upper, expected.upper, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("n", "d_v"), [(9, 3), (20, 12)])
def test_both_ends_are_attained(n, d_v):
    attention, values = random_row(n, d_v, seed=2)
    found = intervals(attention, values)
    vertices, failed = extreme_rows(one_row(attention, values), torch.eye(n, dtype=torch.float64)[None])
    assert not failed.any()
    for key, (least, greatest) in enumerate(vertices[0]):
        assert_same_output(least, attention, values, 1e-9)
        assert_same_output(greatest, attention, values, 1e-9)
        assert float(least[key]) == pytest.approx(float(found.lower[key]), abs=1e-9)
        assert float(greatest[key]) == pytest.approx(float(found.upper[key]), abs=1e-9)


@given(hard_row())
def test_an_alternative_lies_in_the_intervals(row):
    attention, values = row
    assume(rank(values) < len(values))
    found = intervals(attention, values)
    direction = torch.randn(len(values), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    other = polytope.alternative(attention, values, direction)
    assert_same_output(other, attention, values)
    assert (found.lower - 1e-9 <= other).all()
    assert (other <= found.upper + 1e-9).all()


@pytest.mark.parametrize(("n", "tolerance"), [(3, 0), (4, 1e-12)])
def test_an_identifiable_row_is_its_own_interval_and_extreme(n, tolerance):
    """Three independent values leave nothing to solve; of four, the sum of the weights fixes the last one."""
    attention, values = random_row(n, 3)
    found = intervals(attention, values)
    vertices, _ = extreme_rows(one_row(attention, values), one_hot(n, 2)[None, None])
    for row in (found.lower, found.upper, *vertices[0, 0]):
        torch.testing.assert_close(row, attention, atol=tolerance, rtol=0)


def test_a_one_hot_row_collapses_at_a_corner_and_not_inside():
    values = torch.tensor([[0.0, 0], [2, 0], [0, 2], [2, 2], [1, 1]], dtype=torch.float64)
    corner = intervals(one_hot(5, 3), values)
    torch.testing.assert_close(corner.lower, one_hot(5, 3), atol=1e-12, rtol=0)
    torch.testing.assert_close(corner.upper, one_hot(5, 3), atol=1e-12, rtol=0)
    centre = intervals(one_hot(5, 4), values)
    torch.testing.assert_close(centre.lower, torch.zeros(5, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(centre.upper, torch.tensor([0.5, 0.5, 0.5, 0.5, 1], dtype=torch.float64))


@pytest.mark.parametrize("weights", [[0.5, -0.1, 0.6], [0.0, 0.0, 0.0], [0.5, 0.5, float("nan")]])
def test_weights_that_are_no_distribution_are_refused(weights):
    with pytest.raises(InputError, match=r"attention row of 3 visible keys .* expected finite weights of at least 0"):
        polytope.alternative(torch.tensor(weights), torch.zeros(3, 1), one_hot(3, 0))
