"""Attention's derivative, the sweep's steps, norms and estimates, against their definitions in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import jvp

from identikit.maths import jacobian
from tests.reference import attribution as reference

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's, on the first jvp


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def visibility(kind: str, n: int) -> torch.Tensor:
    places = torch.arange(n)
    ahead = places[None] - places[:, None]
    return {
        "all": torch.ones(n, n, dtype=torch.bool),
        "causal": ahead <= 0,
        "window": ahead.abs() <= 1,
        "left-padded": (ahead <= 0) & (places >= 2)[None],  # the first two queries see nothing
    }[kind]


class Attention:
    """A small attention layer: heads, some sharing keys and values, with any mask, soft-cap and bias."""

    def __init__(self, n: int, heads: int, kv_heads: int, *, kind: str, softcap: float | None, biased: bool, seed: int):
        self.query = drawn(heads, n, 3, seed=seed)
        self.key = drawn(kv_heads, n, 3, seed=seed + 1)
        self.value = drawn(kv_heads, n, 2, seed=seed + 2)
        self.visible = visibility(kind, n)
        self.softcap = softcap
        self.bias = drawn(heads, n, n, seed=seed + 3) if biased else None

    def output(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return reference.attention(query, key, value, self.visible, scaling=0.7, softcap=self.softcap, bias=self.bias)

    def derivative(self) -> jacobian.AttentionDerivative:
        scores = 0.7 * self.query @ self.key.repeat_interleave(len(self.query) // len(self.key), 0).mT
        scores = self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores
        scores = scores if self.bias is None else scores + self.bias
        weights = torch.softmax(scores.masked_fill(~self.visible, -torch.inf), -1).nan_to_num(0.0)
        return jacobian.attention_derivative(
            self.query, self.key, self.value, weights, scaling=0.7, softcap=self.softcap
        )


@given(
    n=st.integers(3, 6),
    groups=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    kind=st.sampled_from(["all", "causal", "window", "left-padded"]),
    softcap=st.sampled_from([None, 1.5]),
    biased=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60)
def test_attention_derivative_is_the_derivative(n, groups, kind, softcap, biased, seed):
    layer = Attention(n, *groups, kind=kind, softcap=softcap, biased=biased, seed=seed)
    moves = [drawn(*part.shape, seed=seed + 7) for part in (layer.query, layer.key, layer.value)]
    _, expected = jvp(layer.output, (layer.query, layer.key, layer.value), tuple(moves))
    found = layer.derivative()
    repeats = groups[0] // groups[1]
    d_query = moves[0]
    d_key = moves[1].repeat_interleave(repeats, 0)
    d_value = moves[2].repeat_interleave(repeats, 0)
    moved_scores = layer.query @ d_key.mT
    total = (
        found.of_values @ d_value
        + torch.einsum("jhvm,hjm->hjv", found.of_scores, moved_scores)
        + torch.einsum("jhvk,hjk->hjv", found.of_query, d_query)
    )
    assert (total - expected).abs().max() <= 1e-12 * expected.abs().max().clamp(min=1)


def block_parts(n: int, heads: int, kv_heads: int, *, shared: bool, d: int = 5, kind: str = "all"):
    layer = Attention(n, heads, kv_heads, kind=kind, softcap=1.5, biased=True, seed=3)
    tokens = 1 if shared else n
    pre = tuple(
        drawn(tokens, h, k, d, seed=10 + i) for i, (h, k) in enumerate([(heads, 3), (kv_heads, 3), (kv_heads, 2)])
    )
    post = drawn(n, d, d, seed=20), drawn(n, d, heads, 2, seed=21)
    return layer, pre, post


def folded(layer: Attention, pre, post) -> jacobian.BlockDerivative:
    """The derivative that `push` takes, made of the block's parts by its definition."""
    d_query, d_key, d_value = pre
    by_vector, by_output = post
    derivative = layer.derivative()
    heads, n, d_k = layer.query.shape
    kv_heads = d_key.shape[1]
    d = d_key.shape[-1]
    own = by_vector + torch.einsum("ndhv,nhvk,nhke->nde", by_output, derivative.of_query, d_query.expand(n, -1, -1, -1))
    rows = d_key.flatten(1, 2)
    by_query = jacobian.fold_queries(rows, layer.query)
    if folds := jacobian.is_folding_cheaper(n, d, (heads, d_k), kv_heads):
        d_key = d_key.repeat_interleave(heads // kv_heads, 1)
        rows = torch.einsum("hjk,mhkd->mjhd", layer.query, d_key).flatten(1, 2)
        assert torch.allclose(by_query, rows, rtol=1e-12)
    return jacobian.BlockDerivative(
        read=torch.cat([rows, d_value.flatten(1, 2)], dim=1),
        own=own,
        by_output=by_output.flatten(2),
        query=None if folds else layer.query,
        of_values=derivative.of_values,
        of_scores=derivative.of_scores,
        kv_heads=kv_heads,
    )


def dense_push(layer: Attention, pre, post, tangents: torch.Tensor) -> torch.Tensor:
    """The block's derivative along each tangent, by the chain rule over the reference attention."""
    columns = []
    for tangent in tangents.unbind(-1):
        moves = [torch.einsum("nhkd,nd->hnk", part.expand(len(tangent), -1, -1, -1), tangent) for part in pre]
        _, moved = jvp(layer.output, (layer.query, layer.key, layer.value), tuple(moves))
        columns.append(torch.einsum("nde,ne->nd", post[0], tangent) + torch.einsum("ndhv,hnv->nd", post[1], moved))
    return torch.stack(columns, dim=-1)


def unwritten(n: int, features: int, tangents: int) -> torch.Tensor:
    return torch.full((n, features, tangents), torch.nan, dtype=torch.float64)


def pushed(block: jacobian.BlockDerivative, tangents: torch.Tensor) -> torch.Tensor:
    n, d, count = tangents.shape
    result = unwritten(n, d, count)
    jacobian.push(tangents, block, **scratch(block, count), result=result)
    return result


def scratch(block: jacobian.BlockDerivative, count: int) -> dict[str, torch.Tensor]:
    return {
        "read": unwritten(block.of_values.shape[2], block.read.shape[1], count),
        "mixed": unwritten(len(block.own), block.by_output.shape[2], count),
    }


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("n", "heads", "kv_heads", "folds"), [(2, 2, 2, True), (8, 2, 2, False), (2, 4, 2, True), (6, 4, 2, False)]
)
def test_push_is_the_chain_rule(n, heads, kv_heads, folds, shared):
    layer, pre, post = block_parts(n, heads, kv_heads, shared=shared)
    block = folded(layer, pre, post)
    assert (block.query is None) == folds
    tangents = drawn(n, 5, 7, seed=30)
    expected = dense_push(layer, pre, post, tangents)
    assert (pushed(block, tangents) - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize(("n", "heads", "kv_heads"), [(2, 2, 2), (8, 2, 2), (2, 4, 2), (6, 4, 2)])
@pytest.mark.parametrize(("first", "inputs"), [(0, 1), (1, 1), (0, 2)])
def test_first_push_is_the_push_of_tangents_at_their_own_token(n, heads, kv_heads, first, inputs):
    layer, pre, post = block_parts(n, heads, kv_heads, shared=False)
    block = folded(layer, pre, post)
    start = drawn(inputs, 5, 3, seed=40)
    spread = torch.zeros(n, 5, inputs, 3, dtype=torch.float64)
    for index in range(inputs):
        spread[first + index, :, index] = start[index]
    expected = pushed(block, spread.flatten(2))
    result = unwritten(n, 5, inputs * 3)
    jacobian.push_first(start, block, first=first, **scratch(block, inputs * 3), result=result)
    assert (result - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize(("n", "heads"), [(3, 1), (8, 2)])
@pytest.mark.parametrize("shared", [True, False])
def test_later_tokens_of_a_causal_block_are_a_block(n, heads, shared):
    layer, pre, post = block_parts(n, heads, heads, shared=shared, kind="causal")
    block = folded(layer, pre, post)
    tangents = drawn(n, 5, 4, seed=50)
    tangents[:2] = 0.0
    whole = pushed(block, tangents)
    assert torch.equal(whole[:2], torch.zeros_like(whole[:2]))
    for multiple in (1, 8):  # keys that give nothing are added
        later = block.after(2, multiple)
        assert later.of_values.shape[2] % multiple == 0
        assert (pushed(later, tangents[2:]) - whole[2:]).abs().max() <= 1e-12 * whole.abs().max()


@pytest.mark.parametrize("norm", jacobian.NORMS)
def test_block_norms_are_those_of_each_block(norm):
    tangents = drawn(3, 6, 2, 4)
    found = jacobian.block_norms(tangents, norm)
    for output in range(3):
        for source in range(2):
            assert found[output, source] == pytest.approx(
                reference.block_norm(tangents[output, :, source], norm), rel=1e-12
            )


@pytest.mark.parametrize("norm", ["frobenius", "sum"])
def test_squares_along_a_basis_sum_to_the_squared_norm(norm):
    tangents = drawn(3, 6, 2, 4)
    squares = jacobian.direction_squares(tangents, norm)
    assert torch.allclose(squares.sum(-1), jacobian.block_norms(tangents, norm).square(), rtol=1e-12)


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1), (7, 3), (3, 7), (40, 60), (60, 40)])
def test_spectral_norm_is_the_largest_singular_value(shape):
    matrices = drawn(4, *shape)
    matrices[1] = 0.0
    matrices[2] = matrices[2, :, :1] * matrices[2, :1]  # rank 1: the Krylov space ends early
    expected = torch.linalg.svdvals(matrices)[:, 0]
    assert (jacobian.spectral_norm(matrices) - expected).abs().max() <= 1e-12 * expected.max()


@given(st.integers(1, 50), st.integers(0, 1000))
def test_the_largest_ritz_value_is_that_of_the_tridiagonal_matrix(steps, seed):
    diagonal = drawn(3, steps, seed=seed)
    beside = drawn(3, steps - 1, seed=seed + 1).abs()
    matrices = torch.diag_embed(diagonal) + torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1)
    values, vectors = torch.linalg.eigh(matrices)
    value, last = jacobian._largest_ritz(diagonal, list(beside.unbind(-1)))
    assert (value - values[:, -1]).abs().max() <= 1e-12 * values.abs().max()
    assert (last - vectors[:, -1, -1].abs()).abs().max() <= 1e-6


def test_spectral_norm_of_equal_singular_values():
    basis = torch.linalg.qr(drawn(50, 50)).Q
    assert jacobian.spectral_norm(3 * basis) == pytest.approx(3.0, rel=1e-12)


def test_spectral_norm_in_float32_of_a_slowly_decaying_spectrum():
    left = torch.linalg.qr(drawn(200, 200)).Q
    right = torch.linalg.qr(drawn(200, 200, seed=1)).Q
    spectrum = torch.linspace(1.0, 0.99, 200, dtype=torch.float64)
    assert jacobian.spectral_norm(((left * spectrum) @ right).float()) == pytest.approx(1.0, rel=1e-5)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 1000))
def test_contributions_are_shares(inputs, outputs, seed):
    norms = drawn(2, inputs, outputs, seed=seed).abs()
    norms[0, :, 0] = 0.0  # nothing moves this output
    found = jacobian.contributions(norms)
    assert torch.equal(found[0, :, 0], torch.zeros(inputs, dtype=torch.float64))
    assert (found >= 0).all()
    assert torch.allclose(found[1].sum(0), torch.ones(outputs, dtype=torch.float64), rtol=1e-14)


def estimate(blocks: torch.Tensor, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    probes = jacobian.orthogonal_probes(blocks.shape[-1], count, seed=seed)
    tangents = torch.einsum("ijfg,kg->jfik", blocks, probes)
    squares = jacobian.direction_squares(tangents, "frobenius").transpose(0, 1)
    return squares, *jacobian.estimated_contributions(squares, population=blocks.shape[-1])


def uneven_blocks(inputs: int = 5, outputs: int = 3, d: int = 24) -> torch.Tensor:
    """Jacobian blocks with decaying spectra, so that directions differ."""
    return drawn(inputs, outputs, 6, d) * torch.logspace(0, -1.5, d, dtype=torch.float64)


def test_probes_are_orthonormal_and_repeatable():
    probes = jacobian.orthogonal_probes(12, 5, seed=3)
    assert torch.allclose(probes @ probes.T, torch.eye(5, dtype=torch.float64), atol=1e-14)
    assert torch.equal(probes, jacobian.orthogonal_probes(12, 5, seed=3))
    assert not torch.equal(probes, jacobian.orthogonal_probes(12, 5, seed=4))


def test_probes_have_no_preferred_direction():
    """Uniform directions: every entry has mean 0 and mean square 1/d, over many seeds."""
    entries = torch.stack([jacobian.orthogonal_probes(6, 2, seed=seed) for seed in range(2000)])
    assert entries.mean(0).abs().max() <= 5 / (6 * 2000) ** 0.5
    assert (entries.square().mean(0) - 1 / 6).abs().max() <= 5 * 0.2 / 2000**0.5


def test_a_whole_basis_of_probes_is_exact():
    blocks = uneven_blocks()
    _, found, stderr = estimate(blocks, 24, seed=0)
    assert (found - reference.contributions(blocks, "frobenius")).abs().max() <= 1e-14
    assert torch.equal(stderr, torch.zeros_like(stderr))


def test_estimated_squares_are_unbiased():
    blocks = uneven_blocks()
    seeds = 400
    means = torch.stack([estimate(blocks, 6, seed)[0].mean(-1) * 24 for seed in range(seeds)])
    exact = blocks.square().sum((2, 3))
    assert ((means.mean(0) - exact).abs() <= 4.5 * means.std(0) / seeds**0.5).all()


def test_standard_errors_are_the_spread_of_the_estimates():
    blocks = uneven_blocks()
    exact = reference.contributions(blocks, "frobenius")
    found, stderr = (
        torch.stack(part) for part in zip(*(estimate(blocks, 8, seed)[1:] for seed in range(400)), strict=True)
    )
    covered = ((found - exact).abs() <= 2 * stderr).double().mean()
    assert 0.88 <= covered <= 0.97
    ratio = stderr.square().mean(0).sqrt() / found.std(0)
    assert ((ratio > 0.8) & (ratio < 1.25)).all()


def test_estimates_of_what_nothing_moves_are_zero():
    blocks = uneven_blocks()
    blocks[:, 1] = 0.0
    blocks[2] = 0.0
    _, found, stderr = estimate(blocks, 5, seed=0)
    for part in (found, stderr):
        assert torch.equal(part[:, 1], torch.zeros(5, dtype=torch.float64))
        assert torch.equal(part[2], torch.zeros(3, dtype=torch.float64))
