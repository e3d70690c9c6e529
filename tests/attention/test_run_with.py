"""Weights of one's own in the model, and the tensors that attention is made from, by the names of the field."""

import math
from typing import Any

import pytest
import torch

import identikit as ik
from identikit.attention.result import EffectiveAttention
from identikit.errors import InputError
from identikit.models.model import Model
from identikit.models.taps.tap import AttentionCall
from tests.attention.test_effective import TEXTS
from tests.models import tiny

WHERE: dict[str, Any] = {"layer": 1, "head": 2}


@pytest.fixture(scope="module", params=["bert", "llama", "gpt_oss"])
def model(request: pytest.FixtureRequest) -> Model:
    return tiny.loaded(request.param, dtype=torch.float64)


def changed_by_hand(attention: EffectiveAttention, weights: torch.Tensor) -> tuple[float, float | None]:
    """Run the model with one head's whole map replaced: the largest change of the last hidden vectors and of logits."""
    reading = attention.captured().text_run

    def visit(call: AttentionCall) -> torch.Tensor | None:
        if call.layer != WHERE["layer"]:
            return None
        maps = call.weights()
        maps[0, WHERE["head"]] = weights.to(maps)
        return maps @ call.value.repeat_interleave(call.groups, 1)

    before = reading.model.trace(reading.batch)
    after = reading.model.trace(reading.batch, visit)

    def relative(new: torch.Tensor, old: torch.Tensor) -> float:
        return float((new - old).abs().max() / old.abs().max())

    logits = None
    if before.logits is not None and after.logits is not None:
        logits = relative(after.logits, before.logits)
    return relative(after.hidden[-1], before.hidden[-1]), logits


def test_weights_of_ones_own_change_the_output_as_by_hand(model: Model):
    head = ik.effective_attention(model, TEXTS[0]).sel(**WHERE)
    assert head.run_with(head.raw).hidden < 1e-6  # some norms cast to float32
    assert head.run_with(head.effective).hidden < 1e-6
    uniform = head.visible / head.visible.sum(-1, keepdim=True)
    for weights in (uniform.double(), torch.zeros_like(uniform).double()):
        hidden, logits = changed_by_hand(head, weights)
        found = head.run_with(weights)
        assert found.hidden == pytest.approx(hidden, rel=1e-4) and found.hidden > 1e-4
        assert (found.logits is None) == (logits is None)
        assert logits is None or found.logits == pytest.approx(logits, rel=1e-4)
    assert head.run_with(0) == head.run_with(torch.zeros_like(uniform))  # one number is for all
    edge = head.raw.clone()
    edge[5, 3] = 0
    assert head.sel(query=5, key=3).run_with(0.0).hidden == pytest.approx(changed_by_hand(head, edge)[0], rel=1e-4)
    row = head.raw.clone()
    row[4] = 2 * row[4]
    assert head.sel(query=4).run_with(row[4]).hidden == pytest.approx(changed_by_hand(head, row)[0], rel=1e-4)


def test_heads_of_several_layers_are_switched_off_together(model: Model):
    attention = ik.effective_attention(model, TEXTS[0])
    both = attention.sel(layer=[0, 2], head=[1, 3])

    def visit(call: AttentionCall) -> torch.Tensor | None:
        if call.layer not in (0, 2):
            return None
        output = call.output.clone()
        output[0, [1, 3]] = 0
        return output

    reading = attention.captured().text_run
    before = reading.model.trace(reading.batch).hidden[-1]
    after = reading.model.trace(reading.batch, visit).hidden[-1]
    expected = float((after - before).abs().max() / before.abs().max())
    assert both.run_with(0).hidden == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "weights", [math.nan, "much", [1.0, 2.0], None, True, 1j, torch.zeros(3, 3), torch.zeros(14, 14, device="meta")]
)
def test_weights_that_do_not_fit_are_refused(weights: Any):
    head = ik.effective_attention(tiny.shared("bert"), TEXTS[0]).sel(**WHERE)
    with pytest.raises(InputError, match=r"^weights=.*14 × 14\.$"):
        head.run_with(weights)


def test_weights_on_keys_that_are_not_seen_are_refused():
    row = ik.effective_attention(tiny.shared("llama"), TEXTS[0]).sel(**WHERE, query=2)
    with pytest.raises(InputError, match="must be 0 where a query does not see the key"):
        row.run_with(torch.ones(len(row.tokens)))
    with pytest.raises(InputError, match="must be 0 where a query does not see the key"):
        row.sel(key=[4, 5]).run_with(1)
    assert row.sel(key=[4, 5]).run_with(0).hidden < 1e-6
    assert row.run_with(1).hidden > 0  # one number goes to the keys that are seen


def test_what_attention_is_made_from_is_what_the_tap_saw(model: Model):
    attention = ik.effective_attention(model, TEXTS[0])
    reading = attention.captured().text_run
    for layer, call in reading.calls.items():
        part = attention.sel(layer=layer)
        assert torch.equal(part.q, call.query[0])
        assert torch.equal(part.k, call.key[0].repeat_interleave(call.groups, 0))
        assert torch.equal(part.v, call.value[0].repeat_interleave(call.groups, 0))
        assert torch.allclose(part.raw @ part.v, part.z, atol=1e-12)
        assert torch.allclose(part.z, call.output[0], atol=1e-12)
        assert reading.trace is not None and torch.equal(part.hidden, reading.trace.hidden[layer][0])
    some = attention.sel(layer=1, head=[3, 0], query=4, key=[2, 5])
    assert torch.equal(some.v, attention.v[1][[3, 0]][:, [2, 5]])
    assert torch.equal(some.z, attention.z[1][[3, 0], 4])
    assert torch.equal(some.hidden, attention.hidden[1, 4])
    table = attention.to_xarray("q", "v")
    assert table["q"].dims == ("layer", "head", "query", "dimension")
    assert not {"q", "k", "v", "z", "hidden"} & {*attention.arrays}  # made only where they are asked for
    with pytest.raises(InputError, match=r"to_xarray\(\)"):
        attention.to_frame("q")


def test_hidden_vectors_of_texts_that_were_run_together_are_not_kept():
    several = ik.effective_attention(tiny.shared("bert"), [TEXTS[0], TEXTS[0]])
    with pytest.raises(InputError, match="Read this text alone"):
        _ = several[0].hidden
