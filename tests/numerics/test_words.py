"""What is said of hostile models: no number that is none, and no claim that the measured residual does not carry."""

import math
import re
import warnings
from dataclasses import replace

import pytest
import torch

import identikit as ik
from identikit.explanation.result import Explanation
from identikit.models.reading import Change
from tests.explanation.test_result import MAPS
from tests.models import tiny
from tests.numerics.cases import HOSTILE, TEXT, Case
from tests.numerics.test_attention import IGNORED, TRUSTED, chosen


def explained(case: Case, dtype: torch.dtype) -> str:
    model, text = case(dtype)
    maps = [replace(one, distance="l2") for one in MAPS]
    return " ".join(str(ik.explain(model, text, maps=maps, probes="exact", seconds=None)).split())


@pytest.mark.parametrize(("case", "dtype"), chosen(TRUSTED, every=9))
def test_the_verdict_holds_only_numbers(case: Case, dtype: torch.dtype):
    told = explained(case, dtype)
    assert not re.search(r"\b(nan|inf)\b", told) and "Careful: some values" not in told
    assert "Certificate: effective attention reproduces every head's output" in told


@pytest.mark.parametrize(("case", "dtype"), chosen(IGNORED))
def test_the_verdict_says_where_the_same_output_is_not_the_same(case: Case, dtype: torch.dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        told = explained(case, dtype)
    assert told.index("Careful: some values are so small beside others") < told.index("Certificate")


def test_a_constant_map_has_no_correlation_and_says_so():
    case = next(case for case in HOSTILE if case.name == "embeddings are 0, bert")
    attention = ik.effective_attention(*case(torch.float64))
    assert math.isnan(float(attention.pearson()))
    assert "Raw or effective attention is constant, so their correlation is not defined." in str(attention)
    assert "A correlation of – is not defined" in explained(case, torch.float64)


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    return ik.explain(tiny.loaded("bert"), TEXT, maps=MAPS, probes="exact", seconds=None)


@pytest.mark.parametrize(("size", "told"), [(0.0, False), (1e-5, False), (1e-3, True), (0.5, True)])
def test_a_change_beyond_rounding_is_never_said_without_that(explanation: Explanation, size: float, told: bool):
    changed = replace(explanation, about={**explanation.about, "output_change": {"hidden": size, "logits": None}})
    words = " ".join(str(changed).split())
    assert ("more than the rounding of float32 explains" in words) == told
    assert ("bit-identical" in words) == (size == 0)


@pytest.mark.parametrize(("residual", "told"), [(0.0, False), (1e-6, False), (1e-4, True), (1.0, True)])
def test_a_residual_beyond_rounding_is_told_beside_the_headline(explanation: Explanation, residual: float, told: bool):
    changed = replace(explanation, about={**explanation.about, "largest_row_residual": residual})
    assert ("Careful: some values are so small" in " ".join(str(changed).split())) == told


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
