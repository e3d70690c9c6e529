"""What transformers computes is what the papers say, in float64."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf

from identikit.models.model import Model
from identikit.models.taps.tap import AttentionCall
from tests.models import tiny
from tests.reference import forward

IDS = [1, 5, 9, 12, 5, 33, 7, 21, 9, 14, 50, 9, 2]  # longer than the windows
TINY = {
    "bert": "bert-mlm", "roberta": "roberta", "gpt2": "gpt2", "llama": "llama", "mistral": "mistral", "qwen3": "qwen3",
    "gemma3": "gemma3", "t5": "t5-both",
}  # fmt: skip


_SINGLE = torch.float32


@pytest.fixture
def all_in_float64(monkeypatch):
    """Make the casts to float32 that transformers does in norms and rotary tables casts to float64."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.double)
    yield
    torch.set_default_dtype(_SINGLE)


def _built(family: str) -> hf.PreTrainedModel:
    if family != "roberta":
        return tiny.build(TINY[family], dtype=torch.float64)
    config = tiny.BUILDERS["roberta"].config()
    return tiny.drawn(hf.RobertaForMaskedLM(config).eval(), dtype=torch.float64)


@pytest.mark.parametrize("family", TINY)
def test_transformers_computes_what_was_published(family, all_in_float64):
    built = _built(family)
    weights = {name: tensor.double().numpy() for name, tensor in built.state_dict().items()}
    logits, heads = getattr(forward, family)(weights, built.config, np.array(IDS))
    ids = torch.tensor([IDS])
    more = {"decoder_input_ids": ids} if family == "t5" else {}
    with torch.no_grad():
        found = built(input_ids=ids, **more).logits[0]
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), logits, rtol=0, atol=1e-10 * np.abs(logits).max())
    model = Model(built, tiny.tokenizer(), name=family)
    calls: list[AttentionCall] = []
    batch = next(model.batches(model.encode([tuple(IDS)])))
    model.trace(batch, calls.append)
    assert len(calls) == len(heads) == 3
    for call, (attention, values, outputs) in zip(calls, heads, strict=True):
        for ours, literal in ((call.weights(), attention), (call.value, values), (call.output, outputs)):
            np.testing.assert_allclose(ours[0].detach().numpy(), literal, rtol=0, atol=1e-10)


def test_provenance_has_the_hash_of_the_modelling_file():
    model = tiny.shared("llama")
    file = Path(hf.__file__).parent / "models" / "llama" / "modeling_llama.py"
    assert model.provenance("w5").code == hashlib.sha256(file.read_bytes()).hexdigest()
    assert tiny.shared("bert").provenance("w5").code != model.provenance("w5").code
