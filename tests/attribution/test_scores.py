"""Anybody's scores as a Result, and Captum through us: the same as Captum by hand, and complete."""

import sys
from typing import Any

import numpy as np
import pytest
import torch

import identikit as ik
from identikit.models.model import Model
from tests.models import tiny

TEXT = "w4 w9 w4 w17 w20"
TOKENS = ["the", "cat", "sat"]


def test_an_array_of_each_shape_is_a_result():
    one = ik.scores(TOKENS, [0.5, -2.0, 1.0], name="LRP")
    assert one.score.tolist() == [0.5, -2.0, 1.0] and "cat -2" in str(one) and "LRP" in str(one)
    assert one.sel(input="cat").score == -2.0 and len(one.to_frame()) == 3
    pairs = ik.scores(TOKENS, np.arange(9.0).reshape(3, 3), name="pairs")
    assert pairs.sel(output="the", input="sat").score == 2.0 and pairs.source.dims["score"] == ("output", "input")
    layers = ik.scores(TOKENS, torch.arange(18).reshape(2, 3, 3), name="layers")
    assert layers.sel(layer=1, output=2, input=2).score == 17.0 and "layer 1 sat → sat 17" in str(layers)
    for result in (one, pairs, layers):
        assert result.plot() is not None


def test_a_result_gives_tokens_words_and_model():
    like = ik.token_attribution(tiny.shared("llama"), TEXT, target="w5")
    found = ik.scores(like, like.contribution * 2, name="twice")
    assert found.tokens == like.tokens and found.model_name == like.model_name
    assert len(found.words().tokens) == 7 and (found - found).score.abs().max() == 0


@pytest.mark.parametrize(
    ("tokens", "array", "message"),
    [
        (TOKENS, [1.0, 2.0], "array= has 2 along its axis of inputs, and there are 3 tokens"),
        (TOKENS, [[1.0, 2.0, 3.0]], "array= has 1 along its axis of outputs"),
        (TOKENS, [1.0, float("inf"), 2.0], "holds infinity"),
        (TOKENS, [True, False, True], "expected numbers"),
        (TOKENS, np.zeros((1, 1, 1, 3)), "expected numbers"),
        (TOKENS, "abc", "expected numbers"),
        ("abc", [1.0, 2.0, 3.0], "expected several strings"),
        ([1, 2, 3], [1.0, 2.0, 3.0], "expected several strings"),
        ({"a", "b"}, [1.0, 2.0], "expected several strings"),  # in which order?
        ([], [], "axis of inputs"),
    ],
)
def test_what_does_not_fit_is_refused(tokens: Any, array: Any, message: str):
    with pytest.raises(ik.InputError, match=message):
        ik.scores(tokens, array, name="mine")


# Captum


captum = pytest.importorskip("captum.attr", reason="Captum is not installed (extra [captum])")


def llama() -> Model:
    return tiny.shared("llama", dtype=torch.float64)


def by_hand(model: Model) -> tuple[Any, torch.Tensor]:
    """The model as transformers runs it, from the embeddings (a Llama adds nothing to them)."""
    (encoded,) = model.encode(TEXT)
    embedded = model.hf.get_input_embeddings()(torch.tensor([encoded.ids])).detach()

    def logit(vectors: torch.Tensor) -> torch.Tensor:
        return model.hf(inputs_embeds=vectors, use_cache=False).logits[:, -1, 9]

    return logit, embedded


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def test_integrated_gradients_are_captums_and_complete():
    model = llama()
    logit, embedded = by_hand(model)
    expected = captum.IntegratedGradients(logit).attribute(embedded, n_steps=50)[0].sum(-1)
    found = ik.captum_attribution(model, TEXT, target="w9")
    assert off(found.score, expected) < 1e-6
    with torch.no_grad():
        value = float(logit(embedded)), float(logit(0 * embedded))
    assert [found.details["value"], found.details["baseline_value"]] == pytest.approx(value, abs=1e-6)
    fine = ik.captum_attribution(model, TEXT, target="w9", baseline="pad", steps=300)
    total = fine.details["value"] - fine.details["baseline_value"]
    assert abs(float(fine.score.sum()) - total) < 1e-3 * abs(total)
    assert fine.details["gap"] == pytest.approx(float(fine.score.sum()) - total, abs=1e-12)
    assert "misses the difference" in str(fine) and found.provenance.settings["captum"]


def test_gradient_x_input_is_captums_and_ours():
    model = llama()
    logit, embedded = by_hand(model)
    expected = captum.InputXGradient(logit).attribute(embedded.requires_grad_())[0].sum(-1)
    found = ik.captum_attribution(model, TEXT, "gradient x input", target="w9")
    assert off(found.score, expected.detach()) < 1e-6
    assert off(found.score, ik.token_attribution(model, TEXT, target="w9").gradient_x_input) < 1e-6


def test_occlusion_is_captums_and_one_token_at_a_time():
    model = llama()
    logit, embedded = by_hand(model)
    with torch.no_grad():
        expected = captum.Occlusion(logit).attribute(embedded, sliding_window_shapes=(1, embedded.shape[2]))[0, :, 0]
        without = embedded.clone()
        without[0, 2] = 0.0
        change = float(logit(embedded) - logit(without))
    found = ik.captum_attribution(model, TEXT, "occlusion", target="w9")
    assert off(found.score, expected) < 1e-6 and float(found.score[2]) == pytest.approx(change, rel=1e-6)


def test_other_targets_texts_and_bidirectional_models():
    bert = tiny.shared("bert-mlm", dtype=torch.float64)
    pair = ("w8 w5 w21", "w40 w9")
    alike = ik.captum_attribution(bert, pair, target="similarity", baseline="pad", steps=200)
    total = alike.details["value"] - alike.details["baseline_value"]
    assert abs(alike.details["gap"]) < 1e-3 * abs(total) and len(alike.tokens) == 9
    both = ik.captum_attribution(bert, [TEXT, "w5 w6"], "gradient x input", target=("w5@1", "w6@1"))
    ours = ik.token_attribution(bert, [TEXT, "w5 w6"], target=("w5@1", "w6@1"))
    for theirs, mine in zip(both, ours, strict=True):
        assert off(theirs.score, mine.gradient_x_input) < 1e-9


def test_what_captum_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ik.InputError, match="takes one target"):
        ik.captum_attribution(llama(), TEXT, target=["w5", "w6"])
    with pytest.raises(ik.InputError, match="has no such token"):
        ik.captum_attribution(llama(), TEXT, baseline="mask")
    monkeypatch.setitem(sys.modules, "captum", None)
    with pytest.raises(ik.InputError, match="pip install 'identikit"):
        ik.captum_attribution(llama(), TEXT)


def test_scores_that_are_missing_are_not_listed():
    found = ik.scores(["a", "b", "c"], [1.0, float("nan"), 2.0], name="a score")
    assert "nan" not in str(found) and "c 2, a 1." in str(found)
    assert "There are no numbers" in str(found.sel(input="b"))
