from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from identikit.errors import InputError
from identikit.maths import linalg
from identikit.maths.effective import (
    attention_heads,
    effective_factors,
    effective_rows,
    output_error,
    relative_residual,
    row_ranks,
    through_projection,
    with_mass,
    without_bias,
)
from identikit.maths.joint import joint_null_dim
from tests.reference import effective as reference

MASKS = ("full", "causal", "window", "both_sides", "padded", "padded_causal", "prefix", "packed", "random")
SOLVERS = ("full", "causal", "window", "random")  # one mask for each way in which rows share their work

few = settings(max_examples=20)


@dataclass(frozen=True)
class Case:
    attention: Tensor
    values: Tensor
    projection: Tensor
    mask: Tensor

    @property
    def output(self) -> Tensor:
        return self.attention @ self.values.double().repeat_interleave(len(self.attention) // len(self.values), 0)

    def factors(self, **options):
        heads = attention_heads(self.values, self.output, self.mask)
        return effective_factors(through_projection(heads, self.projection), **options)

    def reference(self, **options) -> tuple[Tensor, Tensor]:
        return reference.effective_attention(
            self.attention, self.values.double(), self.projection, self.mask, **options
        )


def residual(factors, values, output, projection, *, bias=None, gate=None) -> Tensor:
    heads = attention_heads(values, output, factors.visible)
    missing = output_error(factors, heads if bias is None else without_bias(heads, bias))
    return relative_residual(missing, output, projection, gate=gate)


def make_mask(kind: str, n: int, generator: torch.Generator) -> Tensor:
    full = torch.ones(n, n, dtype=torch.bool)
    keep = torch.arange(n) >= n // 3
    segment = torch.arange(n) // 4
    return {
        "full": full,
        "causal": full.tril(),
        "window": full.tril() & full.triu(-3),
        "both_sides": full.tril(2) & full.triu(-2),
        "padded": keep.flip(0).expand(n, n) & keep.flip(0)[:, None],
        "padded_causal": full.tril() & keep,
        "prefix": full.tril() | (torch.arange(n) < n // 2),
        "packed": segment[:, None] == segment,
        "random": torch.rand(n, n, generator=generator) < 0.5,
    }[kind]


def make_matrix(spectrum: Tensor, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """U·diag(s)·Wᵀ with random orthonormal U and W."""

    def orthonormal(size: int) -> Tensor:
        gaussian = torch.randn(size, len(spectrum), generator=generator, dtype=torch.float64)
        return torch.linalg.qr(gaussian).Q

    return orthonormal(rows) * spectrum @ orthonormal(columns).T


def make_attention(heads: int, mask: Tensor, generator: torch.Generator, one_hot: bool = False) -> Tensor:
    scores = 2 * torch.randn(heads, *mask.shape, generator=generator, dtype=torch.float64)
    if one_hot:
        scores[:, ::2] *= 1e6
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0)


def random_case(
    n: int,
    width: int,
    kind: str,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    mask = make_mask(kind, n, generator)
    values = torch.randn(kv_heads, n, width, generator=generator, dtype=torch.float64).to(dtype)
    projection = torch.randn(heads, width, heads * width, generator=generator, dtype=torch.float64)
    return Case(make_attention(heads, mask, generator), values, projection, mask)


@st.composite
def cases(draw) -> Case:
    n, width, hidden = draw(st.integers(1, 14)), draw(st.integers(1, 6)), draw(st.integers(1, 14))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    mask = make_mask(draw(st.sampled_from(MASKS)), n, generator)

    def spectrum(size: int, smallest: float) -> Tensor:
        each = st.one_of(st.just(0.0), st.floats(smallest, 1.0))
        return torch.tensor(draw(st.lists(each, min_size=size, max_size=size)), dtype=torch.float64)

    values = torch.stack([make_matrix(spectrum(min(n, width), 1e-3), n, width, generator) for _ in range(kv_heads)])
    if draw(st.booleans()):
        values = values[:, torch.randint(n, (n,), generator=generator)]
    projection = [
        make_matrix(spectrum(min(width, hidden), 0.1), width, hidden, generator) for _ in range(kv_heads * group)
    ]
    attention = make_attention(kv_heads * group, mask, generator, one_hot=draw(st.booleans()))
    return Case(attention, values, torch.stack(projection), mask)


@settings(max_examples=60)
@given(cases())
def test_agrees_with_the_definition(case):
    factors = case.factors()
    expected, rank = case.reference()
    torch.testing.assert_close(effective_rows(factors), expected, atol=1e-10, rtol=0)
    assert torch.equal(factors.rank, rank)
    assert torch.equal(factors.null_dim, case.mask.sum(-1) - rank)
    assert float(residual(factors, case.values, case.output, case.projection).max()) < 1e-10


@pytest.mark.parametrize("kind", (*SOLVERS, "padded_causal"))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("n", "repeats"), [(9, False), (60, False), (60, True)])
def test_agrees_with_the_definition_at_and_above_the_head_width(n, repeats, kind, dtype):
    case = random_case(n, 8, kind, dtype=dtype)
    if repeats:  # as in the first layer of a model without positions in its inputs: equal tokens, equal values
        tokens = torch.randint(11, (n,), generator=torch.Generator().manual_seed(1))
        case = replace(case, values=case.values[:, tokens])
    factors = case.factors()
    expected, rank = case.reference()
    torch.testing.assert_close(effective_rows(factors), expected, atol=1e-10, rtol=0)
    assert torch.equal(factors.rank, rank)


@few
@given(cases())
def test_nothing_on_invisible_keys_and_raw_rows_where_there_is_no_null_space(case):
    factors = case.factors()
    poisoned = case.attention.masked_fill(~case.mask, torch.nan)
    rows = effective_rows(factors, raw=poisoned)
    assert bool((rows.masked_select(~case.mask) == 0).all())
    assert torch.equal(rows[factors.identifiable], case.attention[factors.identifiable])
    torch.testing.assert_close(effective_rows(factors), rows, atol=1e-10, rtol=0)


def test_tiny_values_in_bfloat16_are_not_drowned_by_the_column_of_ones():
    values = (1e-3 * torch.randn(1, 40, 8)).bfloat16()
    factors = effective_factors(with_mass(attention_heads(values, torch.zeros(1, 40, 8))))
    assert factors.rank.tolist() == [[9] * 40]


@pytest.mark.parametrize("kind", ["full", "causal", "padded_causal"])
def test_value_bias_taken_out(kind):
    case = random_case(20, 6, kind)
    bias = torch.randn(2, 6, dtype=torch.float64)
    biased = replace(case, values=case.values + bias[:, None])
    heads = without_bias(attention_heads(biased.values, biased.output, case.mask), bias)
    factors = effective_factors(heads)
    torch.testing.assert_close(effective_rows(factors), case.reference()[0], atol=1e-10, rtol=0)
    inputs = (biased.values, biased.output, case.projection)
    assert float(residual(factors, *inputs, bias=bias).max()) < 1e-12
    assert float(residual(factors, *inputs).min()) > 1e-2


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", SOLVERS)
def test_residual_is_that_of_the_map(kind, gated):
    case = random_case(20, 6, kind)
    gate = torch.rand(case.output.shape, generator=torch.Generator().manual_seed(0)).double() if gated else None
    through = 1.0 if gate is None else gate
    factors = case.factors()
    wrong = replace(factors, coefficients=factors.coefficients + 0.1)
    change = (replace(case, attention=effective_rows(wrong)).output - case.output) * through @ case.projection
    expected = change.norm(dim=(1, 2)) / (case.output * through @ case.projection).norm(dim=(1, 2))
    torch.testing.assert_close(residual(wrong, case.values, case.output, case.projection, gate=gate), expected)


def test_projection_of_rank_zero_leaves_nothing():
    case = random_case(10, 4, "causal")
    case = replace(case, projection=torch.zeros_like(case.projection))
    factors = case.factors()
    assert int(factors.rank.abs().sum()) == 0
    assert torch.equal(factors.null_dim, torch.arange(1, 11).expand(4, -1))
    assert float(effective_rows(factors).abs().max()) == 0
    assert residual(factors, case.values, case.output, case.projection).tolist() == [0] * 4


def test_float32_values_have_the_rank_of_their_width():
    """The trap: T was rounded to float32, so its SVD with float64's epsilon finds full rank and A⊥ = A."""
    case = random_case(130, 32, "full", heads=12, kv_heads=12, dtype=torch.float32)
    T = (case.values @ case.projection.float()).double()
    singular = torch.linalg.svdvals(T)
    naive = (singular > torch.finfo(torch.float64).eps * max(T.shape[1:]) * singular[:, :1]).sum(-1)
    assert naive.tolist() == [130] * 12
    factors = case.factors()
    assert bool((factors.rank == 32).all())
    assert float((effective_rows(factors) - case.attention).abs().max()) > 1e-2


@pytest.mark.parametrize(("n", "width", "rank"), [(130, 32, 32), (20, 32, 20), (33, 32, 5), (130, 32, 31), (9, 64, 4)])
def test_rank_in_low_precision(n, width, rank):
    values = make_matrix(torch.linspace(1, 0.8, rank).double(), n, width, torch.Generator().manual_seed(n + rank))
    for kind in ("full", "causal"):
        case = replace(random_case(n, width, kind, heads=1, kv_heads=1), values=values.float()[None])
        factors = case.factors()
        assert int(factors.rank[0, -1]) == rank
        assert bool((factors.rank[0] <= case.mask.sum(-1).clamp(max=rank)).all())
        assert int(factors.rank[0, 0]) == (1 if kind == "causal" else rank)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["full", "causal"])
def test_half_precision_is_read_as_it_is(dtype, kind):
    """A singular value far below the dtype's eps is real; a repeated value is not another dimension."""
    generator = torch.Generator().manual_seed(0)
    values = make_matrix(torch.logspace(0, -3, 16).double(), 40, 16, generator).to(dtype)[None]
    values[0, 20:] = values[0, :20]
    case = replace(random_case(40, 16, kind, heads=1, kv_heads=1), values=values)
    exact = replace(case, values=values.double())
    assert float(torch.linalg.svdvals(values.double())[0, -1]) < 4 * torch.finfo(dtype).eps
    assert torch.equal(case.factors().rank, exact.factors().rank)
    assert int(case.factors().rank[0, -1]) == 16
    short = replace(random_case(16, 16, kind, heads=1, kv_heads=1), values=values[:, [*range(8), *range(8)]])
    assert int(short.factors().rank[0, -1]) == 8
    heads = attention_heads(case.values, case.output, case.mask)
    assert torch.equal(row_ranks(heads), case.factors().rank)
    assert int(row_ranks(heads, eps=1e-2)[0, -1]) < 16


def test_tolerance_drops_small_singular_values():
    generator = torch.Generator().manual_seed(0)
    spectrum = torch.tensor([1.0, 0.5, 1e-2], dtype=torch.float64)
    U, V = (torch.linalg.qr(torch.randn(size, 3, generator=generator, dtype=torch.float64)).Q for size in (9, 5))
    case = random_case(9, 5, "full", heads=1, kv_heads=1)
    case = replace(case, values=(U * spectrum @ V.T)[None])
    kept = replace(case, values=(U[:, :2] * spectrum[:2] @ V[:, :2].T)[None])
    for dtype in (torch.float64, torch.float32):
        heads = attention_heads(case.values.to(dtype), case.output, case.mask)
        factors = effective_factors(heads, tolerance=0.1)
        assert factors.rank.unique().tolist() == [2]
        torch.testing.assert_close(effective_rows(factors), kept.reference()[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", SOLVERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_chunks_do_not_show(kind, dtype, monkeypatch):
    case = random_case(40, 8, kind, dtype=dtype)
    whole = case.factors()
    heads = attention_heads(case.values, case.output, case.mask)
    missing = output_error(whole, heads)
    monkeypatch.setattr(linalg, "BYTES", 1)
    parts = case.factors()
    torch.testing.assert_close(parts.coefficients, whole.coefficients, atol=1e-9, rtol=1e-9)
    assert torch.equal(parts.rank, whole.rank)
    torch.testing.assert_close(output_error(parts, heads), missing, atol=1e-10, rtol=0)


def test_chosen_rows_and_columns_are_those_of_the_map_and_raw_is_asked_for_no_others():
    case = random_case(20, 6, "causal")
    factors, asked = case.factors(), []

    def raw(heads: Tensor, queries: Tensor) -> Tensor:
        asked.append((heads.tolist(), queries.tolist()))
        return case.attention[heads][:, queries]

    h, q, k = torch.tensor([3, 1]), torch.tensor([19, 2, 5, 7]), torch.tensor([0, 6, 4])
    expected = effective_rows(factors, raw=case.attention)
    chosen = effective_rows(factors, h, q, k, raw=raw)
    torch.testing.assert_close(chosen, expected[h][:, q][:, :, k], atol=1e-14, rtol=0)
    assert asked == [([3, 1], [2, 5])]
    block = effective_rows(factors, slice(1, 2), slice(3, 9))
    torch.testing.assert_close(block, effective_rows(factors)[1:2, 3:9], atol=1e-14, rtol=0)


@pytest.mark.parametrize("kind", ["causal", "window"])
@pytest.mark.parametrize("alike", [2, 4])
def test_joint_null_dimension_of_heads_that_coincide(kind, alike):
    """Ranks never add, and where all heads are alike the limit is reached one by one: every row in between counts."""
    case = random_case(14, 6, kind, kv_heads=1)
    case.projection[1:alike] = case.projection[0].clone()
    heads = attention_heads(case.values, case.output, case.mask)
    joint = joint_null_dim(heads, case.factors().rank, case.projection)
    assert torch.equal(joint, reference.joint_null_dim(case.values, case.projection, case.mask))


def test_joint_null_dimension_of_heads_whose_values_have_different_ranks():
    """Query heads that stand side by side share values, and only the first two of four share those of rank 2."""
    case = random_case(14, 6, "window")
    case.values[0] = make_matrix(torch.ones(2, dtype=torch.float64), 14, 6, torch.Generator().manual_seed(1))
    case.projection[1::2] = case.projection[::2].clone()
    heads = attention_heads(case.values, case.output, case.mask)
    joint = joint_null_dim(heads, case.factors().rank, case.projection)
    assert torch.equal(joint, reference.joint_null_dim(case.values, case.projection, case.mask))


@few
@given(cases())
def test_joint_null_dimension_of_drawn_cases(case):
    heads = attention_heads(case.values, case.output, case.mask)
    joint = joint_null_dim(heads, case.factors().rank, case.projection)
    assert torch.equal(joint, reference.joint_null_dim(case.values, case.projection, case.mask))


def test_bad_input_is_refused():
    with pytest.raises(InputError, match="3 heads cannot share 2 key-value heads evenly"):
        attention_heads(torch.zeros(2, 5, 4), torch.zeros(3, 5, 4))
    mask = torch.ones(2, 5, 5, dtype=torch.bool)
    mask[1, 0, 0] = False
    with pytest.raises(InputError, match="masks differ between heads"):
        attention_heads(torch.zeros(2, 5, 4), torch.zeros(2, 5, 4), mask)
