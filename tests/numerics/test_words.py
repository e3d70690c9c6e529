"""What is said of hostile models: no number that is none, and no claim that the measured residual does not carry."""

import math
import re
import warnings
from dataclasses import replace

import pytest
import torch

import identikit as ik
from identikit.explanation.result import Explanation
from identikit.explanation.words import verdict
from identikit.models.text_run import Change
from identikit.results.words import Document
from tests.explanation.test_result import MAPS
from tests.models import tiny
from tests.numerics.cases import HOSTILE, TEXT, Case
from tests.numerics.test_attention import IGNORED, TRUSTED, chosen


def explained(case: Case, dtype: torch.dtype) -> Document:
    model, text = case(dtype)
    maps = [replace(fitted, distance="l2") for fitted in MAPS]
    return verdict(ik.explain(model, text, maps=maps, probes="exact", seconds=None))


@pytest.mark.parametrize(("case", "dtype"), chosen(TRUSTED, every=14))
def test_the_verdict_holds_only_numbers(case: Case, dtype: torch.dtype):
    document = explained(case, dtype)
    assert not re.search(r"\b(nan|inf)\b", str(document))
    assert "residual" in document.facts and "row_residual" not in document.facts


@pytest.mark.parametrize(("case", "dtype"), chosen(IGNORED))
def test_the_verdict_says_where_the_same_output_is_not_the_same(case: Case, dtype: torch.dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        document = explained(case, dtype)
    names = [set(paragraph.facts) for paragraph in document.under("Which attention is determined?").paragraphs]
    assert names[1] == {"row_residual", "rounding"}  # right below the headline
    assert document.facts["row_residual"] > document.facts["rounding"]  # pyright: ignore[reportOperatorIssue]


def test_a_constant_map_has_no_correlation_and_says_so():
    case = next(case for case in HOSTILE if case.name == "embeddings are 0, bert")
    attention = ik.effective_attention(*case(torch.float64))
    assert math.isnan(float(attention.pearson()))
    assert "Raw or effective attention is constant, so their correlation is not defined." in str(attention)
    assert "constant_attention" in explained(case, torch.float64).facts


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    return ik.explain(tiny.loaded("bert"), TEXT, maps=MAPS, probes="exact", seconds=None)


@pytest.mark.parametrize(("size", "beyond"), [(0.0, False), (1e-5, False), (1e-3, True), (0.5, True)])
def test_a_change_beyond_rounding_is_never_said_without_that(explanation: Explanation, size: float, beyond: bool):
    change = {"hidden": size, "logits": None}
    certificate = verdict(replace(explanation, about={**explanation.about, "output_change": change})).under(
        "Certificate"
    )
    assert certificate.facts["hidden_change"] == size
    assert ("beyond_rounding_of" in certificate.facts) == beyond
    assert ("more than the rounding of float32 explains" in certificate.paragraphs[0].words) == beyond
    assert ("bit-identical" in certificate.paragraphs[0].words) == (size == 0)


@pytest.mark.parametrize(("residual", "told"), [(0.0, False), (1e-6, False), (1e-4, True), (1.0, True)])
def test_a_residual_beyond_rounding_is_told_beside_the_headline(explanation: Explanation, residual: float, told: bool):
    changed = replace(explanation, about={**explanation.about, "largest_row_residual": residual})
    assert ("row_residual" in verdict(changed).facts) == told


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_what_a_dtype_explains(dtype: str):
    eps = torch.finfo(getattr(torch, dtype)).eps
    assert not Change(eps, None).beyond(dtype) and not Change(0.0, eps).beyond(dtype)
    assert Change(0.0, 0.5).beyond(dtype) == f", which is more than the rounding of {dtype} explains by itself"


def test_logits_that_are_not_numbers_are_refused():
    model = tiny.loaded("llama")
    model.hf.lm_head.weight.data[0] = torch.nan  # pyright: ignore[reportAttributeAccessIssue]
    attention = ik.effective_attention(model, TEXT)
    with pytest.raises(ik.ModelError, match="its logits hold NaN or infinity"):
        attention.verify()
