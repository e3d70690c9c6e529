"""The results of several texts as one table, and what of a Result is easily mistaken."""

import pandas as pd
import pytest

import identikit as ik
from tests.models import tiny

TEXTS = ["w5 w6 w7", "w8 w9 w5 w6 w7"]


@pytest.fixture(scope="module")
def model() -> ik.Model:
    return tiny.loaded("gpt2")


def test_results_of_a_list_make_one_table(model: ik.Model):
    for found in (
        ik.effective_attention(model, TEXTS),
        ik.attention_intervals(model, TEXTS, layer=1, head=0),
        ik.token_attribution(model, TEXTS),
        ik.invert(model, TEXTS, layer=1),
    ):
        assert isinstance(found, list) and len(found) == 2
        table = found.to_frame()
        assert list(table.columns) == ["text", *found[0].to_frame().columns]
        for number, result in enumerate(found):
            part = table[table["text"] == number].drop(columns="text").reset_index(drop=True)
            pd.testing.assert_frame_equal(part, result.to_frame())
    several = ik.effective_attention(model, TEXTS)
    assert len(several.to_frame("null_dim")) == sum(result.null_dim.numel() for result in several)


def test_an_uncalled_correlation_says_how_to_call_it(model: ik.Model):
    attention = ik.effective_attention(model, TEXTS[1])
    assert 'call it: pearson() for one number, or pearson(by="layer")' in repr(attention.pearson)
    with pytest.raises(AttributeError, match=r"no 'mean' before it is called; call it: pearson\(\)"):
        attention.pearson.mean()  # pyright: ignore
    assert attention.pearson().ndim == 0 and len(attention.pearson(by="layer")) == model.n_layers


def test_words_say_how_to_bound_words(model: ik.Model):
    words = ik.effective_attention(model, TEXTS[1]).words()
    with pytest.raises(ik.InputError, match=r'gathered into words. Call it before words\(\); .*groups="words"'):
        words.intervals()


def test_an_attribution_of_few_targets_prints_their_sources(model: ik.Model):
    few = ik.token_attribution(model, TEXTS[1], targets=[2, 4])
    said = str(few)
    for target in (2, 4):
        largest = float(few.sel(layer=-1, output=target).contribution.max())
        assert f" {largest:.2f}" in said
    assert f"after layer {model.n_layers - 1} (frobenius norm, exact)" in said and said.count(";") == 1
    estimated = str(ik.token_attribution(model, TEXTS[1], targets=[2, 4], probes=4))
    assert "±" in estimated or " to " in estimated
