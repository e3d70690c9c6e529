"""Rollout through an encoder and its decoder: its definition, and its ends by trying all vertices."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import identikit as ik
from identikit import proof
from identikit.models.decoder import model_for_attention
from identikit.models.text_run import rerun_with
from tests.models import tiny
from tests.reference import chain as reference

SIZES = {"d_model": 4, "encoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}


def small(decoder_layers: int) -> Any:
    """Return a model of values of two dimensions, so that four tokens leave each row one direction."""
    config = hf.BartConfig(**tiny._TWO_STACKS | SIZES | {"decoder_layers": decoder_layers})
    return ik.load(tiny.drawn(hf.BartForConditionalGeneration(config).eval(), dtype=torch.float64), tiny.tokenizer())


def calls_of(attention: Any) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """Return the calls of the encoder, and of both attentions of each block of the decoder."""
    reading = attention.captured().text_run
    encoder = reading.model.encoder
    source = rerun_with(reading, encoder, reading.batch.source)
    own, cross = (
        rerun_with(reading, model_for_attention(encoder, side), reading.batch) for side in ("decoder", "cross")
    )
    return list(source.calls.values()), list(zip(own.calls.values(), cross.calls.values(), strict=True))


def maps_of(calls: list[Any]) -> list[np.ndarray]:
    return [call.weights()[0].numpy() for call in calls]


@pytest.mark.parametrize(("name", "residual"), [("rollout", 0.5), ("rollout without residual", 0.0)])
def test_rollout_is_a_product_through_both_stacks(name: str, residual: float):
    model = tiny.two_stacks("t5-both")
    attention = ik.effective_attention(model, "w5 w6 w7 w5 w9 w10", target="w8 w9", attention="cross")
    encoder, decoder = calls_of(attention)
    decoder_maps = [(own, cross) for own, cross in (maps_of(list(pair)) for pair in decoder)]
    expected = reference.product_through_stacks(maps_of(encoder), decoder_maps, np.eye(12), residual, 1 - residual)
    found = ik.attention_measure(attention, name=name)
    np.testing.assert_allclose(found.raw, np.stack(expected), atol=1e-12)
    np.testing.assert_allclose(found.raw.sum(-1), 1.0, atol=1e-12)
    assert found.axis("output").tokens == attention.tokens
    assert found.axis("input").tokens == (*attention.tokens, *attention.keys)
    same = ik.effective_attention(model, "w5 w6 w7 w5 w9 w10", target="w8 w9", attention="decoder")
    assert torch.equal(ik.attention_measure(same, name=name).upper, found.upper)
    if residual:
        assert not found.raw[:, :, :4].triu(1).any()
    else:  # what comes through cross-attention alone
        assert not found.raw[:, :, :4].any()


def test_its_ends_are_those_of_all_vertices():
    attention = ik.effective_attention(small(1), "w5 w6", target=[2, 9], attention="cross")
    ((encoder,), ((own, cross),)) = calls_of(attention)
    found = ik.attention_measure(attention, name="rollout")
    assert found.exact and found.gap.max() < 1e-9 and (found.lower < found.upper - 1e-3).any()
    sets = []
    for call in (encoder, own, cross):
        for head in range(2):
            for weights in call.weights()[0, head].numpy():
                seen = weights > 0
                ends = reference.vertices(weights[seen], call.value[0, head].numpy()[seen])
                whole = np.zeros((len(ends), len(weights)))
                whole[:, seen] = ends
                sets.append(whole)
    assert 2**8 < np.prod([len(ends) for ends in sets]) < 2**14
    every = []
    for choice in product(*sets):
        source = np.stack(choice[:8]).reshape(2, 4, 4)
        target = np.stack(choice[8:12]).reshape(2, 2, 2)
        across = np.stack(choice[12:]).reshape(2, 2, 4)
        every.append(reference.product_through_stacks([source], [(target, across)], np.eye(6), 0.5, 0.5)[0])
    np.testing.assert_allclose(found.lower[0], np.min(every, 0), atol=1e-8)
    np.testing.assert_allclose(found.upper[0], np.max(every, 0), atol=1e-8)
    order = found.certain_order[0]
    for query, raw in enumerate(found.raw[0].numpy()):
        possible = np.stack(every)[:, query]
        asked = [at for at in range(6) if possible[:, at].any() and at != query]
        assert int(order[query]) == reference.certain_order(raw, possible, asked, top=5)


def test_no_alternative_exceeds_its_ends_in_deeper_decoders():
    attention = ik.effective_attention(small(3), "w5 w6 w9", target="w8 w9", attention="cross")
    encoder, decoder = calls_of(attention)
    found = ik.attention_measure(attention, name="rollout")
    generator = np.random.default_rng(0)

    def other(call: Any) -> np.ndarray:
        maps = call.weights()[0].numpy().copy()
        for head, query in product(*map(range, maps.shape[:2])):
            seen = maps[head, query] > 0
            ends = reference.vertices(maps[head, query, seen], call.value[0, head].numpy()[seen])
            maps[head, query, seen] = generator.dirichlet(np.ones(len(ends)) * 0.3) @ ends
        return maps

    for _ in range(30):
        pairs = [(other(own), other(cross)) for own, cross in decoder]
        made = reference.product_through_stacks([other(call) for call in encoder], pairs, np.eye(9), 0.5, 0.5)
        assert (found.lower.numpy() - 1e-9 <= np.stack(made)).all()
        assert (np.stack(made) <= found.upper.numpy() + 1e-9).all()
    first = ik.attention_measure(attention.sel(layer=[0]), name="rollout")
    torch.testing.assert_close(first.upper[0], found.upper[0])


def test_its_ends_are_proven(tmp_path):
    attention = ik.effective_attention(small(2), "w5 w6", target=[2, 9], attention="cross")
    found = ik.attention_measure(attention, name="rollout")
    saved = found.save_proof(tmp_path / "proof.json")
    checked = list(proof.check((tmp_path / "proof.json").read_text()))
    assert len(checked) == saved.steps and all(slack >= 0 for *_, slack in checked)
    assert sum(name is not None for name, *_ in checked) == saved.claims == 2 * 2 * 6
    assert saved.loss < 1e-9
    one = found.sel(layer=1, output=1, input=3).save_proof(tmp_path / "one.json")
    assert one.claims == 1 and one.steps < saved.steps


def test_what_else_goes_through_layers_is_refused():
    attention = ik.effective_attention(small(1), "w5 w6", target="w9", attention="decoder")
    for name in ("relevance", "globenc", "alti"):
        with pytest.raises(ik.InputError, match="follows what one stack adds to its own tokens"):
            ik.attention_measure(attention, name=name)
    given = ik.attention_from(values=torch.randn(2, 3, 4), weights=torch.full((2, 2, 3), 1 / 3))
    with pytest.raises(ik.InputError, match="so they need the model"):
        ik.attention_measure(given, name="rollout")
