"""Token identifiability on real models: hidden states read rightly, rates that follow, one text read in full."""

from pathlib import Path

import pytest
import torch

import identikit as ik
from identikit.models.model import Model
from identikit.texts.data import sample_texts
from identikit.tokens import identify as identity
from identikit.tokens import states as vectors
from identikit.tokens.protocol import Settings
from identikit.tokens.states import hidden_states
from tests.models import tiny
from tests.tokens.test_experiments import COLUMNS

QUICK = Settings(folds=2)


@pytest.fixture(scope="module")
def minilm() -> Model:
    return ik.load()


@pytest.fixture(scope="module")
def fit(minilm: Model):
    return ik.token_identifiability(
        minilm, sample_texts()[:24], maps=["naive", "ridge"], distances=["cosine"], layers=[0, 5], settings=QUICK
    )


@pytest.mark.parametrize("name", ["bert", "albert", "llama"])
def test_hidden_states_are_those_of_each_text_alone(name: str, monkeypatch: pytest.MonkeyPatch):
    model = tiny.loaded(name)
    texts = ["w5 w6 w7 w8 w9", "w10 w11", "w12 w13 w14"]
    states = hidden_states(model, texts)
    assert states.lengths.tolist() == [7, 4, 5]
    assert states.inputs.shape == (16, model.d_input)
    alone = model.trace(next(model.batches(model.encode(texts[1]))))
    rows = states.rows(torch.tensor([1]))
    assert torch.allclose(states.inputs[rows], alone.inputs[0])
    for layer in range(model.n_layers):
        assert torch.allclose(states.hidden[layer, rows], alone.hidden[layer][0], atol=1e-5)
    monkeypatch.setattr(vectors, "LARGEST_IN_MEMORY", 100)
    assert torch.equal(hidden_states(model, texts).hidden, states.hidden)  # in a mapped file


def test_rates_fall_with_depth(fit: identity.TokenIdentifiability):
    rates = fit.summary.set_index(["map", "layer"])["rate"]
    assert rates["naive", 0] > 0.99 and rates["ridge", 0] > 0.99
    assert 0.3 < rates["naive", 5] < 0.9 and 0.3 < rates["ridge", 5] < 0.9
    assert list(fit.rates.columns)[: len(COLUMNS)] == COLUMNS
    assert fit.rates["chance"].iloc[0] < 0.05


def test_one_text_is_read(fit: identity.TokenIdentifiability, tmp_path: Path):
    text = "The dog chased the cat through the garden."
    found = fit.identity_map(text)
    assert found.map == "ridge" and found.recovered.shape == found.margin.shape == (2, len(found.tokens))
    assert found.recovered[0].all() and found.winners[0] == found.tokens
    assert torch.equal(found.margin > 0, found.recovered)
    fit.save(tmp_path / "fit")
    again = identity.identity_of_text(fit.model, text, ik.open_result(tmp_path / "fit").maps)
    assert torch.equal(again.margin, found.margin)


def test_maps_are_fitted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("IDENTIKIT_CACHE", str(tmp_path / "cache"))
    model = tiny.loaded("bert")
    texts = [f"w{i} w{i + 1} w{i + 2} w{i + 3}" for i in range(4, 44)]
    maps, unknown = identity.cached_maps(model, texts)
    ids = [token for text in model.encode(texts) for token in text.ids]
    assert unknown == ids.count(model.tokenizer.unk_token_id) / len(ids) > 0
    assert [fitted.layer for fitted in maps] == [0, 1, 2]
    (kept,) = (tmp_path / "cache").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(identity, "fit_maps", None)
        again = identity.cached_maps(model, texts)
    assert torch.equal(again.maps[2].parameters["weight"], maps[2].parameters["weight"]) and again.unknown == unknown
    kept.write_bytes(b"half a file")
    with pytest.warns(UserWarning, match=r"The maps kept in .* are damaged, and are fitted again\."):
        assert len(identity.cached_maps(model, texts).maps) == 3
    monkeypatch.setenv("IDENTIKIT_CACHE", str(kept / "not a folder"))
    assert len(identity.cached_maps(model, texts).maps) == 3


def test_mistakes(minilm: Model):
    texts = sample_texts()
    repeated = Model(tiny.build("llama"), tiny.tokenizer(), name="tiny")
    repeated.tokenizer.backend_tokenizer.post_processor = None
    for model, some, options, message in (
        (minilm, texts, {"layers": [6]}, "There is no layer 6"),
        (minilm, texts, {"experiment": "magic"}, "experiment='magic' is not known: use 'same layer'"),
        (repeated, ["w5 w5 w5"] * 20, {}, "all 3 tokens of text 0 have the same input vector"),
    ):
        with pytest.raises(ik.InputError, match=message):
            ik.token_identifiability(model, some, **options)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_rates_in_half_precision_are_those_of_float32(minilm: Model, fit: identity.TokenIdentifiability, dtype: str):
    """Hidden vectors are widened before anything is fitted; the same tokens are distinct."""
    half = ik.load(dtype=dtype)
    texts = sample_texts()[:24]
    found = ik.token_identifiability(
        half, texts, maps=["naive", "ridge"], distances=["cosine"], layers=[0, 5], settings=QUICK
    )
    states = hidden_states(half, texts)
    full = hidden_states(minilm, texts)
    assert states.dtype == torch.float32 and len(states.identity.unique()) == len(full.identity.unique())
    both = [one.summary.set_index(["map", "layer"])["rate"] for one in (found, fit)]
    assert (both[0] - both[1]).abs().max() < 0.02


def test_what_overflows_in_half_precision_is_told():
    model = tiny.loaded("llama", dtype=torch.float16)
    for block in model.blocks:
        block.mlp.down_proj.weight.data *= 1e5
    texts = [f"w{i} w{i + 1} w{i + 2}" for i in range(4, 44)]
    with pytest.raises(ik.ModelError, match=r"after layer 0 hold NaN or infinity in float16"):
        ik.token_identifiability(model, texts, maps="naive", distances="cosine", settings=QUICK)
