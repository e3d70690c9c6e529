"""Attribution and inversion of hostile models: contributions sum to 1 or are 0, and no token is recovered by chance."""

import pytest
import torch

import identikit as ik
from identikit.maths.jacobian import contributions, estimated_contributions
from identikit.tokens.protocol import Settings
from identikit.tokens.ridge import RELATIVE_STRENGTHS, ridge_weights, spectra
from tests.numerics.cases import HOSTILE, LAYER, Case
from tests.numerics.test_attention import READ, chosen

CAUSAL = [case for case in READ if case.family in ("llama", "gpt_oss")]


@pytest.mark.parametrize(("case", "dtype"), chosen(READ, every=16))
@pytest.mark.parametrize("probes", ["exact", 3])
def test_contributions_sum_to_1_or_are_0(case: Case, dtype: torch.dtype, probes: str | int):
    model, text = case(dtype)
    try:
        found = ik.token_attribution(model, text, probes=probes)
    except ik.InputError as refusal:
        assert "overflow in" in str(refusal) and f"from layer {LAYER} on" in str(refusal)
        return
    sums = found.contribution.sum(-2)
    assert bool(((sums - 1).abs() < 1e-4).logical_or(sums == 0).all()) and float(found.contribution.min()) >= 0
    assert found.stderr is None or bool(found.stderr.isfinite().all())
    unmoved = int((sums[-1] == 0).sum())
    assert (f"no input moves {unmoved} of the" in str(found)) == bool(unmoved)
    if unmoved == sums.shape[1]:
        assert "own largest contributor" not in str(found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_a_norm_of_0_ends_moves_nothing(dtype: torch.dtype):
    case = next(case for case in HOSTILE if case.name == "norm of weight 0, bert")
    found = ik.token_attribution(*case(dtype))
    assert bool((found.contribution[LAYER:] == 0).all()) and not found.outweighed[LAYER:].any()
    assert "After layer 2, no input moves 11 of the 11 hidden vectors: their derivatives are 0." in str(found)


@pytest.mark.parametrize("size", [1e-37, 1e-20, 1.0, 1e20, 1e37])
def test_shares_do_not_depend_on_the_size_of_derivatives(size: float):
    drawn = torch.rand(2, 5, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1
    expected = estimated_contributions(drawn, population=24)
    found = estimated_contributions((drawn * size).float(), population=24)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one.double(), other, rtol=1e-5)
    norms = drawn[..., 0]
    assert torch.allclose(contributions((norms * size).float()).double(), contributions(norms), rtol=1e-5)


@pytest.mark.parametrize(("case", "dtype"), chosen(CAUSAL, every=6))
def test_a_token_is_recovered_only_where_it_is_nearest(case: Case, dtype: torch.dtype):
    model, text = case(dtype)
    try:
        found = ik.invert(model, text)
    except ik.IdentikitError as refusal:  # an edit that depends on the position, or routers that flip
        assert ("any answer would count" if "embeddings are 0" in case.name else "tried alone") in str(refusal)
        return
    assert not found.margin.isnan().any()
    assert torch.equal(found.recovered, found.margin > 0)
    assert bool((found.winner_distance <= found.own_distance + 1e-6).all())
    assert bool(found.margin.isfinite().all())


@pytest.mark.parametrize("distance", ["cosine", "l2"])
def test_hidden_vectors_of_0_recover_what_a_guess_of_0_does(distance: str):
    """Ridge has nothing to fit: weights of 0, as the naive map has vectors of 0."""
    case = next(case for case in HOSTILE if case.name == "norm of weight and bias 0, bert")
    model, _ = case(torch.float32)
    texts = [f"w{i} w{i + 1} w{i + 2}" for i in range(4, 44)]
    found = ik.token_identifiability(
        model, texts, maps=["naive", "ridge"], distances=[distance], layers=[LAYER], settings=Settings(folds=1)
    )
    rates = found.summary.set_index("map")["rate"]
    assert rates["ridge"] == rates["naive"] and (distance == "l2" or rates["ridge"] == 0)
    assert all(bool(one.parameters["weight"].isfinite().all()) for one in found.maps if one.map == "ridge")


def test_ridge_of_singular_matrices():
    cross = torch.ones(3, 2, dtype=torch.float64)
    constant = torch.ones(3, 3, dtype=torch.float64)  # one direction, three equal features
    of_zeros, of_constant = spectra([0 * constant, 4 * constant])
    assert not any(weight.any() for weight in ridge_weights(of_zeros, 0 * cross, [0.0, 1.0]))
    weakest = 4 * RELATIVE_STRENGTHS[-1]  # what is weaker only magnifies rounding along the two directions of 0
    (weight,) = ridge_weights(of_constant, 4 * cross, [weakest])
    assert torch.allclose(weight, 4 * cross / (12 + weakest), atol=1e-8)
