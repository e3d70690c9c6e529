"""Half precision against the same weights computed in float32: dimensions, certificates, maps, and what is said.

Two comparisons. *Model against model*: the half model's reading and that of the same weights in float32; their
activations differ by what half precision rounds on the way. *Numbers against numbers*: the half model's own queries,
keys and values, read as they are and with the definition in float64; what the reading itself adds.
"""

import copy
import warnings
from functools import cache
from typing import Any

import pytest
import torch

import identikit as ik
from identikit.attention import precision
from identikit.errors import ModelError
from identikit.models.model import Model
from tests.models import tiny
from tests.models.real import STORIES, needs_stories
from tests.reference import effective as reference

HALVES = (torch.bfloat16, torch.float16)
PROSE = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a "
    "big dog in the park. The dog was sad. Lily asked the dog why it was sad. The dog said it had lost its ball. Lily "
    "and the dog looked everywhere for the ball, under the bench and behind the tall trees, until they found it. Then "
    "they played together until it was time for dinner, and Lily went home with a smile."
)
REPEATED = "la " * 60


@cache
def pair(name: str, dtype: torch.dtype) -> tuple[Model, Model]:
    """A model rounded to half precision and computed in it, and the same rounded weights computed in float32."""
    model = ik.load() if name == "minilm" else ik.load(STORIES)
    half = copy.deepcopy(model.hf).to(dtype)  # pyright: ignore
    return ik.load(half, model.tokenizer), ik.load(copy.deepcopy(half).float(), model.tokenizer)


@cache
def read(name: str, dtype: torch.dtype, text: str) -> tuple[Any, Any]:
    half, single = pair(name, dtype)
    return ik.effective_attention(half, text), ik.effective_attention(single, text)


def correlations(half: Any, single: Any, *, least: float, most: float = torch.inf) -> torch.Tensor:
    """The correlation of the two effective maps by layer, over visible entries of rows that see so many keys."""
    found = []
    for layer, part in enumerate(single.captured().layers):
        count = part.factors.visible.count
        rows = ((count >= least) & (count < most)).nonzero()[:, 0]
        seen = part.factors.visible.block(rows, torch.arange(len(single.tokens)))
        maps = [one.effective[layer][:, rows][:, seen].double().flatten() for one in (half, single)]
        found.append(torch.corrcoef(torch.stack(maps))[0, 1])
    return torch.stack(found)


MODELS = ("minilm", pytest.param("stories", marks=needs_stories))
LEAST = {torch.bfloat16: 0.999, torch.float16: 0.9999}  # in every layer; docs/reading.md has the numbers


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", MODELS)
def test_prose_reads_as_in_float32(name: str, dtype: torch.dtype):
    half, single = read(name, dtype, PROSE)
    assert float((half.null_dim == single.null_dim).double().mean()) > 0.999
    assert float(half.residual.max()) < 1e-9  # far within the dtype's rounding, 1e-3 and 8e-3
    assert float(half.norm_ratio.max()) < 1 + 1e-9
    change = half.verify()
    assert max(one for one in change if one is not None) < 4 * torch.finfo(dtype).eps
    width, n = single.about["d_value"], len(single.tokens)
    assert n >= 2 * width
    assert float(correlations(half, single, least=2 * width).min()) > LEAST[dtype]
    if half.about["causal"]:  # rows up to d_v keys are raw attention; those just above amplify rounding most
        for least, most in ((2, width + 1), (width + 1, 1.25 * width), (1.25 * width, 1.5 * width), (1.5 * width, n)):
            assert float(correlations(half, single, least=least, most=most).min()) > LEAST[dtype]
    assert float(half.rank_is_sure.double().mean()) > 0.99
    assert "depends on the resolution" not in str(half)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", MODELS)
def test_the_reading_adds_nothing_to_the_rounding_of_the_model(name: str, dtype: torch.dtype):
    """The definition in float64, from the half model's own queries, keys and values."""
    half, _ = read(name, dtype, PROSE)
    for layer in (0, 5):
        call = half.captured().layers[layer].call
        visible, few = call.visible()[0, 0, -24:], slice(2, 4)  # heads
        projection = half.captured().layers[layer].projection[few].double()
        raw = call.weights(slice(-24, None), heads=few, dtype=torch.float64)[0]
        expected, rank = reference.effective_attention(raw, call.value[0, few].double(), projection, visible)
        assert torch.equal(half.rank[layer, few, -24:], rank)
        maps = torch.stack([half.effective[layer, few, -24:].double().flatten(), expected.flatten()])
        assert float(torch.corrcoef(maps)[0, 1]) > 1 - 1e-9


@needs_stories
@pytest.mark.parametrize("dtype", HALVES)
def test_one_phrase_repeated_says_that_ranks_depend_on_the_resolution(dtype: torch.dtype):
    half, single = read("stories", dtype, REPEATED)
    differ = half.null_dim != single.null_dim
    assert float(differ.double().mean()) > 0.001
    assert float((~half.rank_is_sure)[differ].double().mean()) > 0.9  # and most of these rows are among the unsure ones
    share = float((~half.rank_is_sure).double().mean())
    assert share > 0.2 and f"In {share:.0%} of the rows, the rank of the values depends on the resolution" in str(half)
    assert not half.rounded_duplicates[0]  # no position in its values: equal bits
    if dtype == torch.bfloat16:
        assert half.rounded_duplicates[1:].sum() > 0
        assert "repeated tokens (counted in each layer)" in str(half)
    assert float(half.residual.max()) < 1e-6 and float(half.norm_ratio.max()) < 1 + 1e-6


@needs_stories
def test_explain_gives_the_causes_of_float32():
    dtype = torch.bfloat16
    text = "Lily saw a dog and a cat and a dog."
    half, single = (ik.explain(model, text, seconds=2, probes=2) for model in pair("stories", dtype))
    assert half.about["causes"] == single.about["causes"]
    assert half.about["certain"]["free_rows"] == single.about["certain"]["free_rows"]
    told = " ".join(str(half).split())
    assert "for other reasons" not in told
    assert "In layer 0, repeated tokens have equal values and can exchange their weight (4 repetitions in" in told
    assert "computed anew in float64 from the model's queries, keys and values" in told
    assert half.provenance.dtype == str(dtype).removeprefix("torch.")
    assert half.provenance.settings["outputs_computed_in"] == "float64"


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.bfloat16), ("gpt_oss", torch.float16)])
def test_long_texts_are_computed_in_float32(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Rows in several parts, and in float32: the same reading to its rounding."""
    model, text = tiny.loaded(name, dtype=dtype), " ".join(f"w{3 + 7 * i % 50}" for i in range(30))
    exact = ik.effective_attention(model, text)
    monkeypatch.setattr(precision, "EXACT_TOKENS", 8)
    monkeypatch.setattr(precision.linalg, "BYTES", 4096)
    rough = ik.effective_attention(model, text)
    assert rough.provenance.settings["outputs_computed_in"] == "float32"
    assert rough.captured().layers[0].recomputed.output.dtype == torch.float32
    assert torch.equal(rough.null_dim, exact.null_dim)
    assert torch.allclose(rough.effective, exact.effective, atol=1e-4)
    assert torch.allclose(rough.norm_ratio, exact.norm_ratio, atol=1e-4)
    expected = exact.effective.norm(dim=-1) / exact.raw.norm(dim=-1)
    assert torch.allclose(exact.norm_ratio.float(), expected.float(), atol=1e-5)


def test_a_reading_that_fails_is_not_silent(monkeypatch: pytest.MonkeyPatch):
    model = tiny.loaded("llama", dtype=torch.bfloat16)
    monkeypatch.setattr(precision, "LARGEST_RESIDUAL", -1.0)
    with pytest.warns(UserWarning, match=r"Do not trust L0H0, L0H1, L0H2, L0H3, L1H0 and 7 more heads: effective"):
        ik.effective_attention(model, "w5 w6 w7")
    monkeypatch.setattr(precision, "LARGEST_RESIDUAL", 1.0)
    monkeypatch.setattr(precision, "LARGEST_RATIO", 0.5)
    with pytest.warns(UserWarning, match=r"Do not trust L2H3: rows of effective attention are up to 1 times as long"):
        ik.effective_attention(model, "w5 w6 w7", layers=2, heads=3)


@needs_stories
def test_rounded_outputs_would_be_noticed(monkeypatch: pytest.MonkeyPatch):
    """With the model's own output, rounded, in the place of the one computed anew, rows become longer than raw ones."""
    model, whole = pair("stories", torch.bfloat16)[0], precision.recompute

    def rounded(call: Any, heads: Any, projection: Any) -> Any:
        return whole(call, heads, projection)._replace(output=call.output[0, heads].double())

    monkeypatch.setattr("identikit.attention.layer.recompute", rounded)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        wrong = ik.effective_attention(model, PROSE)
    assert [str(one.message).split(": ")[1][:20] for one in told] == ["effective attention ", "rows of effective at"]
    assert float(wrong.norm_ratio.max()) > 1.05


def test_overflow_is_an_error_that_names_the_layer():
    model = tiny.loaded("llama", dtype=torch.float16)
    with torch.no_grad():
        model.blocks[1].self_attn.v_proj.weight *= 1e6  # pyright: ignore
    with pytest.raises(ModelError, match=r"after layer 1 hold NaN or infinity in float16"):
        ik.effective_attention(model, "w5 w6 w7")


@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_ranks_of_plain_values_are_sure_in_float64(name: str):
    """Fewer and more keys than value dimensions, windowed, with a sink: no rank is near any cutoff."""
    model = tiny.loaded(name, dtype=torch.float64)
    for text in ("w4 w9", "w4 w9 w17 w20 w31 w7 w44 w23 w50 w11"):
        result = ik.effective_attention(model, text)
        assert bool(result.rank_is_sure.all())
        assert "depends on the resolution" not in str(result)
