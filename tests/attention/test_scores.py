"""Roles of heads by their definitions, and their ranges by one linear program per end of each row."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import identikit as ik
from identikit.attention import scores
from identikit.attention.scores import ROLES
from identikit.results.source import StoredArrays
from tests.attention.literal import literal_row
from tests.models import tiny
from tests.reference import roles

TEXT = "w5 w6 w7 w5 w6 w8 w9 w5 w6 w7 w10 w11"


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_scores_are_their_definitions(name: str):
    model = tiny.loaded(name, dtype=torch.float64)
    found = ik.head_scores(model, TEXT)
    attention = ik.effective_attention(model, TEXT)
    (encoded,) = model.encode(TEXT)
    assert found.scores == tuple(ROLES) and found.gap.max() < 1e-9
    for at, score in enumerate(found.scores):
        for array in ("raw", "effective"):
            maps = attention.array(array).numpy()
            visible = attention.visible[0].numpy()
            expected = [
                [roles.role(score, head, visible, encoded.ids, encoded.special) for head in layer] for layer in maps
            ]
            if score == "sink rate":
                expected = (np.array(expected) > 0.3).astype(float)
            np.testing.assert_allclose(found.array(array)[at], expected, atol=1e-9)


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("score", ["induction", "distance"])
def test_ends_are_means_of_linear_programs(name: str, score: str):
    model = tiny.loaded(name, dtype=torch.float64)
    found = ik.head_scores(model, TEXT, scores=score, layers=[1], heads=[2])
    attention = ik.effective_attention(model, TEXT)
    (encoded,) = model.encode(TEXT)
    visible = attention.visible[1].numpy()
    pattern = roles.pattern(score, encoded.ids, encoded.special) * visible
    ends = []
    for query in range(len(pattern)):
        if not pattern[query].any() or visible[query].sum() < 2:
            continue
        row = literal_row(attention, 1, 2, query)
        ends.append(row.ends(pattern[query][row.keys]))
    made = float(found.lower.squeeze()), float(found.upper.squeeze())
    np.testing.assert_allclose(made, np.mean(ends, 0), atol=1e-8)
    assert float(found.lower.squeeze()) < float(found.upper.squeeze())


def test_over_texts_there_are_means_and_standard_errors():
    model = tiny.shared("llama")
    texts = [TEXT, "w5 w6 w7 w8", "w9 w9 w10 w9 w9 w10"]
    found = ik.head_scores(model, texts, scores=["previous", "induction"])
    alone = torch.stack([ik.head_scores(model, text, scores=["previous", "induction"]).raw for text in texts])
    torch.testing.assert_close(found.raw[0], alone[:, 0].mean(0))
    assert found.raw_stderr is not None
    torch.testing.assert_close(found.raw_stderr[0], alone[:, 0].std(0) / 3**0.5)
    assert found.scored_texts.tolist() == [3, 2]  # the second text repeats nothing
    torch.testing.assert_close(found.raw[1], alone[[0, 2], 1].mean(0))


def test_repeated_tokens_are_repeated_between_special_ones():
    model = tiny.shared("bert")
    ids = ik.repeated_tokens(model, 7, seed=3)
    assert ids[0] == 1 and ids[-1] == 2 and ids[1:8] == ids[8:15] and len(ids) == 16
    assert ids == ik.repeated_tokens(model, 7, seed=3) != ik.repeated_tokens(model, 7, seed=4)
    assert not set(ids[1:-1]) & {0, 1, 2}


def test_a_text_without_a_target_has_no_score():
    found = ik.head_scores(tiny.shared("llama"), "w5 w6 w7", scores="induction")
    assert found.raw.isnan().all() and "No row" in str(found)


def test_what_was_not_bounded_in_time_says_so():
    found = ik.head_scores(tiny.shared("bert"), TEXT, scores="self", seconds=1e-9)
    assert found.gap.isnan().any() and "in time" in str(found)
    exact = ik.head_scores(tiny.shared("bert"), TEXT, scores="self")
    assert (found.lower <= exact.lower + 1e-9).all() and (found.upper >= exact.upper - 1e-9).all()


def test_a_head_that_has_a_role_in_every_alternative_is_named():
    """A head of one value dimension whose rows see two keys is determined."""
    found = ik.head_scores(tiny.shared("llama"), "w5 w6", scores=["self", "distance"])
    lower = found.lower[0].flatten()
    place = int(lower.argmax())
    assert float(lower[place]) > 0.5
    layer, head = divmod(place, found.lower.shape[2])
    score = float(found.raw[0, layer, head])
    sentence = f"L{layer}H{head} is a self-attending head in every attention with this output: score {score:.2f}."
    assert sentence in str(found) and str(found).count("in every attention") == 1  # distance is no share of attention


@pytest.mark.parametrize(
    ("width", "words"),
    [
        (0.0, "the same in all alternatives"),
        (0.004, "within 0.005 of it in all"),
        (0.2, "between 0.40 and 0.60 in all"),
    ],
)
def test_a_narrow_range_is_not_said_to_be_none(width: float, words: str):
    found = ik.head_scores(tiny.loaded("bert"), TEXT, scores="previous", layers=[0], heads=[0])
    raw = torch.full_like(found.raw, 0.5)
    arrays = {name: found.array(name) for name in found.source.dims}
    arrays |= {"raw": raw, "lower": raw - width / 2, "upper": raw + width / 2}
    assert f"L0H0 0.50, {words}" in str(replace(found, source=StoredArrays(arrays, found.source.dims)))


def test_texts_share_a_time_limit(monkeypatch: pytest.MonkeyPatch):
    limits = []
    found = scores.text_scores

    def noted(captured, roles, bounding):
        limits.append(bounding.until - time.monotonic())
        return found(captured, roles, bounding)

    monkeypatch.setattr(scores, "text_scores", noted)
    ik.head_scores(tiny.loaded("bert"), [TEXT, TEXT, TEXT], scores="previous", seconds=300)
    assert limits[0] <= 100 < limits[1] <= 150 < limits[2] <= 300
