"""Models that mix softmax attention with other layers: a layer is a block, and only some layers attend."""

from pathlib import Path

import pytest
import torch

import identikit as ik
from identikit.attention.dataset import AttentionOptions, attention_tables
from identikit.attribution import passes
from identikit.models.model import Model
from identikit.models.taps.tap import AttentionCall
from identikit.runs.run import Run
from identikit.runs.store import Store
from tests.attribution.test_attribute import asked, off, read, reference_norms
from tests.models import tiny
from tests.models.test_contract import slow_unless

TEXT = "w4 w9 w4 w17 w20 w9 w33 w21 w7"
MIXED = ["qwen3_next", "qwen3_5", "qwen3_5_moe-text", "lfm2", "jamba", "granitemoehybrid"]


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny.loaded("qwen3_next")


def test_layers_are_blocks_and_calls_know_theirs(model: Model):
    assert (model.n_layers, model.attention_layers) == (4, (1, 3))
    calls: list[AttentionCall] = []
    trace = model.trace(model.sample((5,)), calls.append)
    assert [call.layer for call in calls] == [1, 3]
    assert len(trace.hidden) == 4
    assert model.projection(3).shape == (4, 8, 24)


@pytest.mark.parametrize("name", [slow_unless(name, {"qwen3_next", "lfm2"}) for name in MIXED])
def test_attention_of_the_layers_that_attend(name: str):
    model = tiny.loaded(name)
    attention = ik.effective_attention(model, TEXT)
    assert attention.layers == model.attention_layers
    assert attention.verify().hidden < 1e-4
    assert ik.attention_intervals(model, TEXT, head=0, query=8).axis("layer").values == model.attention_layers


def test_a_layer_without_softmax_is_refused_by_its_name(model: Model):
    words = r"Layer 0 of .* has no softmax attention \(Qwen3NextGatedDeltaNet\); its attention layers are 1, 3\."
    with pytest.raises(ik.InputError, match=words):
        ik.effective_attention(model, TEXT, layers=[0, 1])
    with pytest.raises(ik.InputError, match=words):
        ik.attention_intervals(model, TEXT, layer=0)
    with pytest.raises(ik.InputError, match=words):
        ik.alternative_attention(model, TEXT, layer=0, head=0, query=3)
    with pytest.raises(ik.InputError, match=words):
        model.projection(0)
    assert ik.effective_attention(model, TEXT, layers=-1).layers == (3,)


def test_the_gate_of_a_text_of_a_batch(model: Model):
    """That gate times head output times H is the module's output is proved on load."""
    calls: list[AttentionCall] = []
    model.trace(model.sample((6, 4)), calls.append)
    for call in calls:
        assert call.gate is not None and call.gate.shape == call.output.shape
        alone = call.of_text(1, torch.arange(4))
        assert alone.gate is not None and torch.equal(alone.gate, call.gate[1:, :, :4])


@pytest.mark.parametrize("name", [slow_unless(name, {"qwen3_next", "lfm2"}) for name in (*MIXED, "falcon_h1")])
def test_attribution_goes_forward_through_whole_blocks(name: str):
    model = tiny.loaded(name, dtype=torch.float64)
    batch = model.sample((4,))
    expected = reference_norms(model, batch, [3], ("frobenius",))[0]
    found = passes.generic(read(model, batch), asked(model), chunk=4, tick=lambda count: None)
    assert off(found[:, :, [3]], expected) < 1e-6
    assert ik.token_attribution(model, "w4", probes=2).layers == tuple(range(model.n_layers))


def test_explain_says_which_layers_it_reads(model: Model):
    maps = ik.token_identifiability(model, [f"w{3 + i} w{4 + i} w9" for i in range(20)], maps=("ridge",))
    explanation = ik.explain(model, TEXT, seconds=None, maps=maps, probes=2)
    assert explanation.axis("layer").values == (1, 3)
    assert "4 layers (softmax attention in 1, 3" in " ".join(str(explanation).split())
    named = {edge["layer"] for edge in explanation.about["least_certain"]}
    assert named <= {1, 3}


def test_tables_number_layers_by_block(model: Model, tmp_path: Path):
    options = AttentionOptions(intervals=4)
    tables = attention_tables(model, [TEXT, "w5 w6 w7"], Run(Store(tmp_path, {})), options)
    for name, table in tables.items():
        if "layer" in table:
            assert set(table["layer"]) <= {1, 3}, name
    assert set(tables["null_dimension"]["layer"]) == {1, 3}
