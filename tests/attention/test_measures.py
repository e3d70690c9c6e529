"""Every measure of effective attention against its definition, found by its name in tests/reference/measures.py."""

from functools import cache

import numpy as np
import pytest
import torch

import identikit as ik
from identikit.attention.result import EffectiveAttention
from identikit.models.taps.tap import AttentionCall
from tests.models import tiny
from tests.reference import measures as reference

TEXT = "w5 w6 w7 w5 w8 w9 w5 w6 w10 w11 w12 w13"
MODELS = ("bert", "llama", "gpt_oss", "gemma2")  # plain; causal, with shared values; learned sinks; soft-capped

ELSEWHERE = {
    "simplex": "needs every support of a row: tests/maths/polytope/test_least_norm.py",
    "reachable_dim": "needs queries and keys, and autograd: test_reachable.py",
    "reachable_condition": "needs queries and keys, and autograd: test_reachable.py",
    "rank_is_sure": "compares two precisions, not numbers with a definition: test_half_precision.py",
    **dict.fromkeys(("q", "k", "v", "z", "hidden"), "are what the tap saw, or its product: test_run_with.py"),
    "rounded_duplicates": "counts what a model's rounding makes different: test_half_precision.py",
}
PUBLIC = [name for name in EffectiveAttention.measures if not name.startswith("_")]


def literal_attention(call: AttentionCall, mask: np.ndarray) -> np.ndarray:
    """Softmax of scaled, soft-capped and biased scores (Eq. 1); a learned sink is one more score."""
    rows = []
    for head in range(call.query.shape[1]):
        scores = call.scaling * call.query[0, head].numpy() @ call.key[0, head // call.groups].numpy().T
        if call.softcap is not None:
            scores = call.softcap * np.tanh(scores / call.softcap)
        powers = np.where(mask, np.exp(scores), 0.0)
        rest = 0.0 if call.sink is None else np.exp(float(call.sink[head]))
        rows.append(powers / (powers.sum(-1, keepdims=True) + rest))
    return np.stack(rows)


@cache
def read(name: str) -> tuple[EffectiveAttention, list[tuple[np.ndarray, ...]]]:
    """Effective attention of a text, and what its definitions start from: A, V, H and the mask of each layer."""
    model = tiny.loaded(name, dtype=torch.float64)
    result = ik.effective_attention(model, TEXT)
    layers = []
    for layer, captured in enumerate(result.captured().layers):
        call = captured.call
        assert call.bias is None
        mask = call.visible()[0, 0].numpy()
        values = call.value[0].repeat_interleave(call.groups, 0).numpy()
        layers.append((literal_attention(call, mask), values, model.projection(layer).numpy(), mask))
    return result, layers


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("measure", [name for name in PUBLIC if name not in ELSEWHERE])
def test_is_its_definition(measure: str, model: str):
    result, layers = read(model)
    define = getattr(reference, measure, None)
    assert define is not None, f"Write {measure} into tests/reference/measures.py, or say where it is tested."
    expected = np.stack([define(*layer) for layer in layers])
    found = result.array(measure)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-9, rtol=0)


def test_what_is_tested_elsewhere_exists_and_has_no_twin():
    assert ELSEWHERE.keys() <= {*PUBLIC}
    assert not [name for name in ELSEWHERE if hasattr(reference, name)]
