"""MPNet, DeBERTa, BLOOM, Falcon and GPT-J against the eager attention of their own modules and their definitions."""

import copy
import pickle

import pytest
import torch
import transformers as hf

import identikit as ik
from identikit.models.families import FAMILIES
from identikit.models.model import Model
from identikit.models.taps.tap import LONGEST_MASK, RowMask
from tests.models import tiny
from tests.models.made import stock_attention
from tests.models.test_contract import batch_of, captured, slow_unless
from tests.reference import scores as reference

OWN = ["mpnet", "deberta-v2", "deberta-v2-conv", "bloom", "falcon", "falcon-7b", "falcon-rw", "gptj"]
# The eager attention of BLOOM and GPT-J casts to float32, whatever the model's dtype.
TOLERANCE = {"bloom": 1e-6, "gptj": 1e-6, "deberta-v2": 1e-7, "deberta-v2-conv": 1e-7}


@pytest.mark.parametrize("name", [name for name in OWN if name != "falcon-rw"])
def test_attention_is_that_of_the_stock_module(name: str):
    """Every layer's probabilities in float64, of a padded batch, before the tap was ever there and after."""
    hf_model = tiny.build(name, dtype=torch.float64)
    model = Model(hf_model, tiny.tokenizer(), name=name)
    batch = batch_of(model, (11, 6))
    arguments = model.arguments(batch)
    stock = stock_attention(tiny.build(name, dtype=torch.float64), **arguments)
    after = stock_attention(hf_model, **arguments)
    calls = captured(model, batch)
    assert len(calls) == len(stock) == 3
    for call, expected, again in zip(calls, stock, after, strict=True):
        assert torch.equal(expected, again)
        for row, length in enumerate((11, 6)):
            off = (call.weights()[row, :, :length] - expected[row, :, :length]).abs().max()
            assert off < TOLERANCE.get(name, 1e-14)


def test_stock_eager_attention_of_falcon_adds_alibi_twice_and_is_refused():
    """The bias is in its mask and again in its scores; with sdpa it is in the mask only, which is what we read."""
    hf_model = tiny.build("falcon-rw", dtype=torch.float64)
    model = Model(hf_model, tiny.tokenizer(), name="falcon-rw")
    batch = batch_of(model, (9,))
    twice = stock_attention(hf_model, **model.arguments(batch))
    call = captured(model, batch)[0]
    assert (call.weights() - twice[0]).abs().max() > 1e-3
    assert call.bias is not None
    doubled = torch.softmax((call.weights().log() + call.bias).masked_fill(~call.visible(), -torch.inf), -1)
    assert torch.allclose(doubled, twice[0], atol=1e-14)
    hf_model.config._attn_implementation_internal = "eager"
    with pytest.raises(ik.ModelError, match=r"adds its ALiBi bias twice\. Load it with attn_implementation='sdpa'"):
        ik.load(hf_model, tiny.tokenizer())


def test_falcon_with_alibi_reads_no_more_than_a_mask_can_hold():
    config = hf.FalconConfig(alibi=True, max_position_embeddings=8192)
    assert FAMILIES["falcon"].limit(config) == LONGEST_MASK
    config.alibi = False
    assert FAMILIES["falcon"].limit(config) == 8192


@pytest.mark.parametrize(("name", "scaled"), [("bloom", False), ("falcon-rw", True)])
def test_alibi_is_its_definition(name: str, scaled: bool):
    model = tiny.loaded(name, dtype=torch.float64)
    for call in captured(model, batch_of(model, (8,))):
        for head in range(4):
            scores = reference.alibi(call.query[0, head], call.key[0, head], head, 4, scaled=scaled)
            expected = torch.softmax(scores.masked_fill(~torch.ones(8, 8).tril().bool(), -torch.inf), -1)
            assert torch.allclose(call.weights()[0, head], expected, atol=1e-14)


@pytest.mark.parametrize("name", ["deberta-v2", "deberta-v2-conv"])
def test_disentangled_attention_is_its_definition(name: str):
    """Log buckets with shared projections and a norm, and clipped positions with projections of their own."""
    model = tiny.loaded(name, dtype=torch.float64)
    encoder = model.hf.base_model.encoder
    table = encoder.get_rel_embedding().detach()
    for call, block in zip(captured(model, batch_of(model, (14,))), encoder.layer, strict=True):
        own = block.attention.self
        layers = (own.key_proj, own.query_proj) if own.share_att_key else (own.pos_key_proj, own.pos_query_proj)
        keys, queries = (layer(table).detach().unflatten(-1, (4, -1)) for layer in layers)
        for head in range(4):
            expected = reference.disentangled(
                call.query[0, head], call.key[0, head], keys[:, head], queries[:, head],
                own.position_buckets, own.max_relative_positions,
            )  # fmt: skip
            assert torch.allclose(call.weights()[0, head], torch.softmax(expected, -1), atol=1e-14)


@pytest.mark.parametrize("kinds", [["c2p"], ["p2c"], []])
def test_disentangled_attention_with_fewer_terms(kinds: list[str]):
    model = Model(tiny.deberta(pos_att_type=kinds)().double().eval(), tiny.tokenizer(), name="deberta")
    batch = batch_of(model, (9, 4))
    stock = stock_attention(model.hf, **model.arguments(batch))
    for call, expected in zip(captured(model, batch), stock, strict=True):
        assert (call.bias is None, call.bias_keys is None) == (not kinds, "c2p" not in kinds)
        assert (call.weights()[1, :, :4] - expected[1, :, :4]).abs().max() < 1e-7


def test_sliced_projections_of_bloom_are_refused_in_words():
    model = tiny.build("bloom")
    model.config.slow_but_exact = True
    model.config.pretraining_tp = 2
    with pytest.raises(ik.ModelError, match=r"slow_but_exact=True with pretraining_tp=2.*slow_but_exact=False"):
        ik.load(model, tiny.tokenizer())


@pytest.mark.parametrize("name", [slow_unless(name, {"deberta-v2", "falcon-rw", "mpnet"}) for name in OWN])
def test_every_question_can_be_asked(name: str):
    model = ik.load(tiny.build(name), tiny.tokenizer())
    text = "w5 w6 w7 w8 w9 w10 w11 w12 w13"
    att = ik.effective_attention(model, text)
    assert float(att.residual.max()) < 1e-5
    assert att.verify().hidden < 1e-3
    intervals = att.intervals(layer=1, head=2, query=-1)
    assert ((intervals.lower <= intervals.raw + 1e-6) & (intervals.raw <= intervals.upper + 1e-6)).all()
    shares = ik.token_attribution(model, text).contribution.sum(1)
    assert torch.allclose(shares, torch.ones_like(shares), atol=1e-5)


@pytest.mark.parametrize(
    "name", [slow_unless(name, {"xlnet", "deberta-v2", "bloom"}) for name in [*OWN, "xlnet", "bert"]]
)
def test_a_result_can_be_copied_and_pickled(name: str):
    """With its model and all that was captured, so that it can still be asked everything."""
    attention = ik.effective_attention(tiny.loaded(name), "w5 w6 w7 w8 w9 w10 w11 w12 w13")
    for again in (pickle.loads(pickle.dumps(attention)), copy.deepcopy(attention)):
        for array in ("raw", "effective", "reachable_dim"):
            assert torch.equal(again.array(array), attention.array(array)), array
        assert torch.equal(again.intervals(layer=1, head=2).upper, attention.intervals(layer=1, head=2).upper)
        assert again.verify().hidden < 1e-3


def test_a_mask_that_is_a_rule_is_not_pickled():
    rule = RowMask(lambda *index: index[2] >= index[3], 1, 5000, torch.device("cpu"), False)
    with pytest.raises(ik.InputError, match=r"pickling attention of 5000 tokens.*save\(\)"):
        pickle.dumps(rule)
