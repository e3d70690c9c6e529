"""The three nested sets of every row: null space, attention with the same output, attention that queries can reach."""

from typing import Any

import pytest
import torch

import identikit as ik
from identikit.attention.result import EffectiveAttention
from identikit.models.model import Model
from identikit.paper.texts import PASSAGE
from tests.models import tiny
from tests.models.real import STORIES, needs_stories
from tests.models.test_contract import slow_unless
from tests.reference import reachable as reference

WORDS = ["w5 w6 w7 w8 w9 w10 w11 w12 w13 w14 w15", "w7 w9", "w3 w4 w5 w3 w4 w5 w3 w3 w30 w31 w32 w33"]
FAMILIES = ["bert", "gpt_oss", "llama", "gemma2", "xlnet", "deberta-v2"]


def assert_definition(model: Model, result: Any) -> None:
    """Every row against autograd and SVDs, with the bias of the scores taken as what is left of them."""
    for layer, part in enumerate(result.captured().layers):
        call, H = part.call, model.projection(layer).double()
        for head in range(model.n_heads):
            K, V = (tensor[0, head // call.groups].double() for tensor in (call.key, call.value))
            for row, seen in enumerate(call.visible()[0, 0]):
                query, keys = call.query[0, head, row].double(), K
                own = 0 if call.bias is None else call.bias[0, head, row].double()
                if call.bias_keys is not None:
                    more = call.bias_keys(0, torch.tensor([head]), torch.tensor([row]))[0, 0].double()
                    keys, own = K + more, own - call.scaling * more @ query

                sink = torch.zeros(0).double() if call.sink is None else call.sink[[head]].double()

                def score(q, keys=keys, own=own, seen=seen, call=call, sink=sink):
                    scores = call.scaling * keys @ q
                    if call.softcap is not None:
                        scores = call.softcap * torch.tanh(scores / call.softcap)
                    return torch.cat([(scores + own)[seen], sink])

                V_seen = torch.cat([V[seen], V.new_zeros(len(sink), V.shape[1])])  # a sink is a key of value 0
                T = V_seen @ H[head]
                raw = score(query).softmax(0)[: int(seen.sum())]
                assert torch.allclose(raw, result.raw[layer, head, row, seen], atol=1e-6)
                assert result.polytope_dim[layer, head, row] == reference.polytope_dim(T)
                assert result.null_dim[layer, head, row] == reference.null_dim(V[seen] @ H[head])
                assert result.reachable_dim[layer, head, row] == reference.reachable_dim(score, query, T)
                found = float(result.reachable_condition[layer, head, row])
                expected = reference.condition(score, query, V_seen)
                if torch.linalg.matrix_rank(H[head]) == len(H[head]):
                    assert found == pytest.approx(expected, rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("name", [slow_unless(name, {"bert", "gemma2", "deberta-v2"}) for name in FAMILIES])
def test_is_the_definition(name: str):
    """A padded batch with repeated tokens: causal, windowed, grouped, soft-capped, and biased scores."""
    model = tiny.loaded(name, dtype=torch.float64)
    for result in ik.effective_attention(model, WORDS):
        assert_definition(model, result)


def test_where_the_projection_loses_rank(monkeypatch: pytest.MonkeyPatch):
    model = tiny.loaded("llama", dtype=torch.float64)
    projection = model.projection

    def weak(layer: int) -> torch.Tensor:
        H = projection(layer).clone()
        H[1, 2:] = H[1, :1]
        return H

    monkeypatch.setattr(model, "projection", weak)
    result = ik.effective_attention(model, WORDS[0])
    assert_definition(model, result)
    assert (result.reachable_dim[:, 1].amax(-1) > result.reachable_dim[:, 0].amax(-1)).all()


def test_the_bias_of_xlnet_is_linear_in_the_query():
    """Without query biases of its own, the bias is s·q·r with the r that is said; for pairs, in a padded batch."""
    hf = tiny.build("xlnet", dtype=torch.float64)
    for block in hf.base_model.layer:  # pyright: ignore
        for name in ("r_w_bias", "r_r_bias", "r_s_bias"):
            getattr(block.rel_attn, name).data.zero_()
    model = Model(hf, tiny.tokenizer(), name="tiny xlnet")
    for result in ik.effective_attention(model, [("w5 w6 w7", "w8 w9"), ("w4 w5", "w6 w7 w8 w9 w10 w11")]):
        for part in result.captured().layers:
            call, n = part.call, len(result.tokens)
            keys = call.bias_keys(0, torch.arange(4), torch.arange(n))
            expected = call.scaling * torch.einsum("hqd,hqkd->hqk", call.query[0], keys)
            assert torch.allclose(call.bias[0], expected, atol=1e-12)


def test_a_selection_reads_its_own_rows():
    model = tiny.loaded("gemma2", dtype=torch.float64)
    whole = ik.effective_attention(model, WORDS[0])
    part = whole.sel(layer=[2, 0], head=[3, 0], query=[7, 2])
    alone = ik.effective_attention(model, WORDS[0], layers=[2, 0], heads=[3, 0])
    for name in ("polytope_dim", "reachable_dim", "reachable_condition"):
        expected = whole.array(name)[[2, 0]][:, [3, 0]]
        assert torch.allclose(part.array(name), expected[:, :, [7, 2]], equal_nan=True, rtol=1e-9)
        assert torch.allclose(alone.array(name), expected, equal_nan=True, rtol=1e-9)


def test_with_mass_kept_the_null_space_is_that_of_the_attention():
    model = tiny.loaded("bert", dtype=torch.float64)
    plain, kept = (ik.effective_attention(model, WORDS[0], mass=mass) for mass in (False, True))
    assert torch.equal(kept.null_dim, kept.polytope_dim)
    assert torch.equal(plain.polytope_dim, kept.polytope_dim)
    assert torch.equal(plain.reachable_dim, kept.reachable_dim)


def test_half_precision_reads_keys_and_values_as_they_are():
    text = WORDS[2]
    exact = ik.effective_attention(tiny.loaded("gpt2"), text)
    half = ik.effective_attention(tiny.loaded("gpt2", dtype=torch.bfloat16), text)
    assert (half.reachable_dim <= half.polytope_dim).all()
    assert (half.reachable_condition / exact.reachable_condition).nanmedian() == pytest.approx(1, abs=0.2)


def nested(result: EffectiveAttention) -> bool:
    return bool(
        (result.null_dim >= result.polytope_dim).all()
        and (result.polytope_dim >= result.reachable_dim).all()
        and (result.reachable_dim >= 0).all()
    )


def test_in_minilm_queries_reach_almost_nothing_else_though_barely():
    """With 98 null dimensions, the rank of C is full almost everywhere, and its condition is poor."""
    result = ik.effective_attention(ik.load(), PASSAGE)
    assert nested(result)
    assert result.null_dim.unique().tolist() == [98] and result.polytope_dim.unique().tolist() == [97]
    later = result.sel(layer=[1, 2, 3, 4, 5])
    assert float(later.reachable_dim.double().mean()) < 0.05
    assert 1e3 < float(later.reachable_condition.nanmedian()) < 1e5


@needs_stories
def test_in_a_rotary_model_repeated_tokens_are_within_reach_of_the_first_layer():
    story = (
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw "
        "a big dog in the park. The dog was sad. Lily asked the dog why it was sad. The dog said it had lost its ball."
    )
    stories = ik.load(STORIES)
    result = ik.effective_attention(stories, story)
    assert nested(result)
    assert nested(ik.effective_attention(stories, "The dog was sad. " * 12))  # values that hardly differ
    by_layer = result.reachable_dim.double().mean((1, 2))
    assert by_layer[0] > 2 and by_layer[1:].max() < 0.5
