"""Effective attention of whole models against its definition, its certificates, and each mistake with its message."""

import numpy as np
import pytest
import torch
from PIL import Image

import identikit as ik
from identikit.attention.token_types import SOURCES, TYPES, token_types, type_sums, types_table
from identikit.models.model import Model
from identikit.paper.texts import PASSAGE
from identikit.texts.data import read_texts
from tests.models import tiny
from tests.models.real import SHARED, STORIES, needs_data, needs_stories
from tests.reference import effective as reference

LONG = PASSAGE  # 130 tokens
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a "
    "big dog in the park. The dog was sad. Lily asked the dog why it was sad. The dog said it had lost its ball."
)


@pytest.fixture(scope="module")
def minilm() -> Model:
    return ik.load()


@pytest.fixture(scope="module")
def stories() -> Model:
    return ik.load(STORIES)


def words(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)


TEXTS = [words(*range(5, 17)), words(7, 9), words(3, 4, 5, 3, 4, 5, 3, 3, 30, 31, 32, 33, 34)]


@pytest.mark.parametrize(
    ("name", "mass"), [("bert", True), ("gpt_oss", True), ("llama", True), ("mistral", True), ("mistral", False)]
)
def test_is_the_definition(name: str, mass: bool):
    """SVD of T for every head and row, on a padded batch of texts longer and shorter than the value dimension.

    Other families, one text and no mass: test_measures.py.
    """
    model = tiny.loaded(name, dtype=torch.float64)
    for result in ik.effective_attention(model, TEXTS, mass=mass):
        raw = result.raw
        for layer, part in enumerate(result.captured().layers):
            visible = part.call.visible()[0, 0]
            expected, rank = reference.effective_attention(
                raw[layer], part.call.value[0], model.projection(layer), visible, mass=mass
            )
            assert torch.allclose(result.effective[layer], expected, atol=1e-10, rtol=0)
            assert torch.equal(result.rank[layer], rank)
            assert torch.equal(result.null_dim[layer], visible.sum(-1) - rank)
            assert not result.effective[layer][:, ~visible].any()
            if not mass:
                joint = reference.joint_null_dim(part.call.value[0], model.projection(layer), visible)
                assert torch.equal(result.joint_null_dim[layer], joint)
        assert float(result.residual.max()) < 1e-10
        if mass:
            assert torch.allclose(result.effective.sum(-1), raw.sum(-1))
            assert name == "gpt_oss" or torch.allclose(raw.sum(-1), torch.ones(()).double())


def test_without_bias_is_the_papers_letter():
    model = tiny.loaded("llama", dtype=torch.float64)
    result = ik.effective_attention(model, TEXTS[0], bias=False)
    for layer, part in enumerate(result.captured().layers):
        bias = model.value_bias(layer)
        assert bias is not None
        visible = part.call.visible()[0, 0]
        expected, _ = reference.effective_attention(
            result.raw[layer], part.call.value[0] - bias[:, None], model.projection(layer), visible
        )
        assert torch.allclose(result.effective[layer], expected, atol=1e-10, rtol=0)
    assert float(result.residual.max()) < 1e-10
    assert result.verify().hidden < 1e-6  # RMSNorm casts to float32
    with_bias = ik.effective_attention(model, TEXTS[0])
    assert not torch.allclose(result.effective, with_bias.effective, atol=1e-3)


@pytest.mark.parametrize("name", ["bert", "mistral"])
def test_a_list_gives_what_single_texts_give(name: str):
    model = tiny.loaded(name)
    together = ik.effective_attention(model, TEXTS)
    for text, result in zip(TEXTS, together, strict=True):
        alone = ik.effective_attention(model, text)
        assert result.tokens == alone.tokens
        assert torch.equal(result.null_dim, alone.null_dim)
        assert torch.allclose(result.effective, alone.effective, atol=2e-5)


def test_repeated_tokens_in_the_first_layer_of_a_rotary_model():
    """No position in the input, so equal tokens have equal values: the null space is there below d_v tokens."""
    model = tiny.loaded("llama", dtype=torch.float64)
    result = ik.effective_attention(model, words(5, 6, 5, 5))
    assert result.null_dim[0, 0].tolist() == [0, 0, 0, 1, 2, 2]  # <s> w5 w6 w5 w5 </s>
    assert result.null_dim[1].max() == 0


def test_chosen_layers_and_heads_are_those_of_the_whole():
    for name in ("bert", "llama"):
        model = tiny.loaded(name, dtype=torch.float64)
        whole = ik.effective_attention(model, TEXTS[0])
        part = ik.effective_attention(model, TEXTS[0], layers=[2, 0], heads=[3, 1])
        assert torch.allclose(part.effective, whole.effective[[2, 0]][:, [3, 1]], atol=1e-12)
        assert torch.equal(part.null_dim, whole.null_dim[[2, 0]][:, [3, 1]])
        some = whole.sel(layer=2, head=[3, 1], query=slice(1, 5), key=4)
        assert some.effective.shape == (2, 4)
        assert torch.allclose(some.effective, whole.effective[2, [3, 1], 1:5, 4], atol=1e-14)
        assert torch.equal(some.raw - some.effective, some.null)
        assert torch.equal(part.sel(layer=2, head=3).raw, whole.raw[2, 3])
        assert part.verify().hidden < 1e-6


@pytest.mark.parametrize(("heads", "bias"), [([3, 2, 1, 0], True), ([3, 2, 1, 0], False), ([2, 0], False)])
def test_heads_come_in_the_order_asked_for(heads: list[int], bias: bool):
    """As many heads as the model has, but in another order: nothing may be mixed up."""
    model = tiny.loaded("llama", dtype=torch.float64)
    whole = ik.effective_attention(model, TEXTS[0], bias=bias)
    part = ik.effective_attention(model, TEXTS[0], heads=heads, bias=bias)
    assert torch.allclose(part.effective, whole.effective[:, heads], atol=1e-12)
    assert torch.equal(part.rank, whole.rank[:, heads])
    assert torch.allclose(part.pearson("head"), whole.pearson("head")[:, heads])
    assert part.verify().hidden < 1e-6


def test_tolerance_gives_an_approximate_reading_and_verify_sees_it():
    model = tiny.loaded("bert", dtype=torch.float64)
    exact = ik.effective_attention(model, TEXTS[0])
    rough = ik.effective_attention(model, TEXTS[0], tolerance=0.5)
    assert (rough.null_dim >= exact.null_dim).all() and (rough.null_dim > exact.null_dim).any()
    assert exact.verify().hidden < 1e-12
    assert rough.verify().hidden > 1e-3
    assert float(rough.residual.max()) > 1e-3


def test_pearson_is_over_visible_entries():
    model = tiny.loaded("llama", dtype=torch.float64)
    result = ik.effective_attention(model, TEXTS[0])
    visible = torch.ones(len(result.tokens), len(result.tokens)).tril().bool()
    raw, effective = result.raw[:, :, visible], result.effective[:, :, visible]

    def coefficient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1]

    assert torch.allclose(result.pearson(), coefficient(raw, effective))
    assert torch.allclose(result.pearson("layer")[1], coefficient(raw[1], effective[1]))
    assert torch.allclose(result.pearson("head")[1, 2], coefficient(raw[1, 2], effective[1, 2]))
    row = coefficient(result.raw[:, :, 9, :10], result.effective[:, :, 9, :10])
    assert torch.allclose(result.pearson("visible")[10], row)
    assert result.pearson("visible")[0].isnan()
    assert (result.pearson("visible")[1:4] == 1).all()
    row = result.sel(layer=1, head=2, query=9)
    assert torch.allclose(row.pearson(), coefficient(row.raw[:10], row.effective[:10]))
    assert row.pearson("head").shape == ()
    assert torch.allclose(result.sel(head=[2]).pearson("head")[:, 0], result.pearson("head")[:, 2])


def test_images_are_texts_of_patches():
    image = np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    result = ik.effective_attention(tiny.loaded("vit"), Image.fromarray(image))
    assert result.null_dim.unique().tolist() == [11]  # 17 patches, values of 6 dimensions
    assert result.verify().hidden < 1e-4


def test_the_trap_of_float32_values(minilm: Model):
    """At n = 130 and d_v = 32 the obvious code (SVD of T, machine-epsilon tolerance) finds more rank than there is."""
    result = ik.effective_attention(minilm, LONG)
    assert len(result.tokens) == 130
    assert result.rank.unique().tolist() == [32]
    T = result.captured().layers[3].call.value[0, 0] @ minilm.projection(3)[0]
    assert int(torch.linalg.matrix_rank(T, rtol=torch.finfo(T.dtype).eps)) > 32
    assert result.verify().hidden < 1e-4
    assert float(result.residual.max()) < 1e-6


@pytest.mark.slow
@needs_data
def test_correlation_falls_with_length(minilm: Model):
    """Every fourth MRPC pair by length, and CoLA sentences for the short end."""
    pairs = sorted(read_texts("mrpc", data_dir=SHARED / "data"), key=lambda pair: len(pair[0] + pair[1]))
    texts = [*list(read_texts("cola", data_dir=SHARED / "data"))[:12], *pairs[::16]]
    results = ik.effective_attention(minilm, texts)
    short = [float(r.pearson()) for r in results if len(r.tokens) <= 32]
    assert short and min(short) >= 1 - 1e-6
    long = [float(r.pearson()) for r in results if len(r.tokens) > 40]
    assert len(long) > 15 and max(long) < 0.6
    lengths = torch.tensor([float(len(r.tokens)) for r in results if len(r.tokens) > 32])
    falling = torch.tensor([float(r.pearson()) for r in results if len(r.tokens) > 32])
    assert torch.corrcoef(torch.stack([lengths, falling]))[0, 1] < -0.6


@needs_stories
def test_causal_rows_of_independent_values_keep_their_raw_attention_and_no_others(stories: Model):
    result = ik.effective_attention(stories, STORY)
    identifiable = result.null_dim == 0
    same = (result.raw == result.effective).all(-1)
    assert torch.equal(same, identifiable)
    assert identifiable.any() and (~identifiable).any()
    change = result.verify()
    assert change.hidden < 1e-4 and change.logits is not None and change.logits < 1e-4


def test_token_type_sums_by_definition(minilm: Model):
    result = ik.effective_attention(minilm, ("One, two, and a third one. Yes.", "No, not that. " * 9))
    types = token_types(minilm.tokenizer, result.tokens)
    assert types[0] == "cls" and types[-1] == "sep" and types.count("punctuation") == 22
    sums, number = type_sums(result)
    for index, maps in enumerate((result.raw, result.effective)):
        for source, name in enumerate(SOURCES):
            queries = [i for i, kind in enumerate(types) if name in ("all", kind) or (name == "rest" and kind != "sep")]
            assert number[source] == len(queries)
            for target, wanted in enumerate(TYPES):
                keys = [i for i, kind in enumerate(types) if kind == wanted]
                expected = maps[:, :, queries][..., keys].double().sum((-1, -2)) / len(queries)
                assert torch.allclose(sums[index, :, :, source, target], expected, atol=1e-6)
    others, unmarked = type_sums(ik.effective_attention(minilm, "No mark at all"))
    frame = types_table(sums + others, (number > 0).double() + (unmarked > 0), result.layers)
    assert frame.query("source == 'punctuation'")["texts"].unique().tolist() == [1]
    assert frame.query("source == 'all'")["texts"].unique().tolist() == [2]
    both = frame.query("map == 'raw' and source == 'all' and target == 'cls'")["attention"].to_numpy()
    assert both == pytest.approx((sums + others)[0, :, :, 0, 0].flatten().numpy() / 2)


def test_mistakes_in_reading():
    result = ik.effective_attention(tiny.loaded("bert"), TEXTS[1], layers=[1])
    with pytest.raises(ik.InputError, match=r"There is no layer 0. There is 1."):
        result.sel(layer=0)
    assert result.sel(layer=np.int64(1), head=[0], query=slice(1, 3)).raw.shape == (1, 2, 4)
    with pytest.raises(ik.InputError, match="use 'layer', 'head', 'visible'"):
        result.pearson(by="token")
    with pytest.raises(ik.InputError, match="blank"):
        ik.effective_attention(tiny.loaded("bert"), "  ")
    with pytest.raises(ik.InputError, match="empty"):
        ik.effective_attention(tiny.loaded("bert"), [])


def test_a_selection_is_verified_in_its_rows_alone():
    model = tiny.loaded("llama", dtype=torch.float64)
    rough = ik.effective_attention(model, TEXTS[0], tolerance=0.5)
    change = rough.verify().hidden
    some = rough.sel(layer=0, head=1, query=-1).verify().hidden
    assert 0 < some < change
    identifiable = rough.sel(query=0)
    assert int(identifiable.null_dim.max()) == 0 and identifiable.verify().hidden < 1e-6
    with pytest.raises(ik.InputError, match="but not keys"):
        rough.sel(key=2).verify()
