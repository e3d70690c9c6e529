"""Effective attention, intervals and alternatives of hostile models: right, or refused with the layer named."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import identikit as ik
from identikit.attention.result import EffectiveAttention
from identikit.models.load.check import TOLERANCE
from identikit.models.model import Model
from tests.hostile.made import stock_attention, strict_json
from tests.numerics.cases import EVERY, FLOATS, HEAD, HOSTILE, LAYER, Case
from tests.reference import effective as reference

ROUNDING = {dtype: max(1e-5, torch.finfo(dtype).eps) for dtype in EVERY}


def chosen(cases: list[Case], *, every: int = 1) -> list[Any]:
    """Return cases in all of their dtypes. One in `every` few is quick, in one dtype in turn; the rest is slow."""
    found = []
    for place, case in enumerate(cases):
        for at, dtype in enumerate(case.dtypes):
            quick = at == place % len(case.dtypes) and (place + place // every) % every == 0
            marks = () if quick else pytest.mark.slow
            name = f"{case.name}, {str(dtype).removeprefix('torch.')}"
            found.append(pytest.param(case, dtype, id=name, marks=marks))
    return found


READ = [case for case in HOSTILE if case.refused is None]
REFUSED = [case for case in HOSTILE if case.refused is not None]
IGNORED = [case for case in READ if "ignored" in case.name]
TRUSTED = [case for case in READ if case not in IGNORED]
# In half precision, transformers' own scores are rounded: they are no measure.
STOCK = [
    replace(case, dtypes=tuple(dtype for dtype in case.dtypes if dtype in FLOATS))
    for case in READ
    if case.family in ("bert", "llama")
]


@contextmanager
def flushed(active: bool) -> Iterator[None]:
    """Let the processor take denormal numbers as 0."""
    if active and not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(("case", "dtype"), chosen(REFUSED, every=4))
def test_what_has_no_answer_is_refused_with_the_layer(case: Case, dtype: torch.dtype):
    model, text = case(dtype)
    calls = [ik.effective_attention, ik.explain]
    calls += [ik.attention_intervals, partial(ik.alternative_attention, layer=LAYER, head=HEAD, query=-1)]
    if "squares" not in case.name:  # which only attention takes
        calls += [ik.token_attribution] + [ik.invert] * model.causal
    for call in calls:
        with pytest.raises(ik.IdentikitError, match=case.refused) as told:
            call(model, text)
        assert "\n" not in str(told.value) and str(told.value).endswith(".")


@pytest.mark.parametrize(("case", "dtype"), chosen(TRUSTED, every=6))
def test_effective_attention_is_its_definition(case: Case, dtype: torch.dtype):
    model, text = case(dtype)
    check_effective(model, ik.effective_attention(model, text), dtype)


@pytest.mark.filterwarnings("ignore:Do not trust")
@pytest.mark.parametrize(("case", "dtype"), chosen(STOCK, every=8))
def test_raw_attention_is_transformers_own(case: Case, dtype: torch.dtype):
    model, text = case(dtype)
    raw = ik.effective_attention(model, text).raw.double()
    expected = stock_attention(model.hf, list(map(int, model.encode(text)[0].ids)))
    within = 1e-9 if dtype == torch.float64 else 1e-4
    if case.family == "llama":
        within = max(within, 1e-5)  # its own softmax is in float32
    assert float((raw - expected).abs().max()) <= within


@pytest.mark.parametrize(
    ("name", "call"),
    [("embeddings are 0, bert", ik.effective_attention), ("values are 0, bert", partial(ik.explain, probes=4))],
)
def test_numbers_that_do_not_exist_are_null_in_json(name: str, call: Any):
    (case,) = [case for case in HOSTILE if case.name == name]
    strict_json(json.dumps(call(*case(torch.float32)).to_dict()))


@pytest.mark.parametrize(("case", "dtype"), chosen([case for case in TRUSTED if "denormal" in case.name], every=4))
def test_denormal_numbers_may_be_flushed(case: Case, dtype: torch.dtype):
    model, text = case(dtype)
    with flushed(True):
        attention = ik.effective_attention(model, text)
        check_effective(model, attention, dtype)
        check_intervals(attention)
        shares = ik.token_attribution(model, text).contribution.sum(-2)
    assert torch.allclose(shares, torch.ones_like(shares), atol=1e-5)


def check_effective(model: Model, attention: EffectiveAttention, dtype: torch.dtype) -> None:
    """Compare the hostile layer with the definition in float64, and every number with what it may be."""
    source: Any = attention.source
    layer = min(LAYER, len(attention.layers) - 1)
    call, projection = source.layers[layer].call, source.layers[layer].projection.double()
    raw = call.weights(dtype=torch.float64)[0]
    visible = call.visible()[0, 0].expand(raw.shape[1:])
    given = raw, call.value[0].double(), projection, visible
    (expected, rank), (_, coarse) = (reference.effective_attention(*given, cutoff=cut) for cut in (1e-10, 1e-5))
    sure = rank == coarse  # no singular value lies where the unit of a dtype decides
    assert torch.equal(attention.rank[layer][sure], rank[sure])
    assert torch.allclose(attention.raw[layer].double(), raw, atol=1e-5)
    assert torch.allclose(attention.effective[layer][sure].double(), expected[sure], atol=1e-5)
    assert float(attention.residual.max()) < 1e-5 and float(attention.norm_ratio.max()) < 1.01
    assert float(attention.row_residual.max()) <= ROUNDING[dtype]
    assert bool((attention.reachable_dim <= attention.polytope_dim).all())
    assert bool((attention.polytope_dim <= attention.null_dim).all())
    check_pearson(attention, layer, visible)
    change = attention.verify()
    if max(one for one in change if one is not None) > TOLERANCE[dtype]:
        assert "which is more than" in change.beyond(str(dtype).removeprefix("torch."))


def check_pearson(attention: EffectiveAttention, layer: int, visible: Tensor) -> None:
    """A correlation is that of the visible entries, 1 where maps are equal, and NaN where one is constant."""
    found = attention.pearson("head")[layer]
    for head, own in enumerate(found.tolist()):
        maps = [one[layer, head][visible].double() for one in (attention.raw, attention.effective)]
        if torch.equal(*maps):
            assert own == 1
            continue
        spread = min(float(one.std() / one.abs().max().clamp(min=1e-300)) for one in maps)
        if spread < 1e-8:
            assert own != own
        elif own == own:  # sums of squares lose what is common to all entries
            expected = float(torch.corrcoef(torch.stack(maps))[0, 1])
            assert own == pytest.approx(expected, abs=1e-6 if spread > 1e-4 else 1e-3)


@pytest.mark.parametrize(("case", "dtype"), chosen(TRUSTED, every=14))
def test_intervals_and_alternatives_keep_the_output(case: Case, dtype: torch.dtype):
    model, text = case(dtype)
    attention = ik.effective_attention(model, text, layers=min(LAYER, model.n_layers - 1))
    check_intervals(attention)
    least, raw = attention.simplex, attention.raw.double()
    assert float(least.min()) >= 0 and bool((least.norm(dim=-1) <= raw.norm(dim=-1) + 1e-6).all())
    assert torch.allclose(least.sum(-1), raw.sum(-1), atol=1e-5) or bool(attention.sink.any())
    assert relative_change(attention, least) <= ROUNDING[dtype]
    where = {"layer": attention.layers[0], "head": min(HEAD, model.n_heads - 1), "query": -1}
    try:
        other = ik.alternative_attention(model, text, **where)
    except ik.InputError as refusal:
        assert "only the row's own attention gives this output" in str(refusal)
        return
    assert float(other.attention.min()) >= 0 and other.row_residual <= ROUNDING[dtype]
    assert "Careful" not in str(other)


def check_intervals(attention: EffectiveAttention) -> None:
    """Bounds hold the raw weights; exact ends lie within certified ones, and no witness lies outside them."""
    exact, certified = (attention.intervals(method=method) for method in ("exact", "certified"))
    for found in (exact, certified):
        assert bool((found.lower <= found.raw + 1e-12).all() and (found.raw <= found.upper + 1e-12).all())
        assert (
            bool(found.gap.isfinite().all()) and float(found.lower.min()) >= 0 and float(found.upper.max()) < 1 + 1e-9
        )
    assert float(exact.gap.max()) < 1e-6
    assert bool((certified.lower <= exact.lower + 1e-7).all() and (exact.upper <= certified.upper + 1e-7).all())
    if not attention.sink.any():
        least = attention.simplex  # an attention with this output
        assert bool((exact.lower <= least + 1e-6).all() and (least <= exact.upper + 1e-6).all())


def relative_change(attention: EffectiveAttention, other: Tensor) -> float:
    """How far other rows are from giving the output, relative to the lengths that it adds up."""
    part = attention.source.layers[0]  # pyright: ignore[reportAttributeAccessIssue]
    T = part.call.value[0].double().repeat_interleave(part.call.groups, 0) @ part.projection.double()
    raw = part.call.weights(dtype=torch.float64)[0]
    moved, size = ((other[0] - raw) @ T).norm(dim=-1), (raw @ T.norm(dim=-1, keepdim=True))[..., 0]
    return float(torch.where(moved == 0, 0.0, moved / size).max())


@pytest.mark.parametrize(("case", "dtype"), chosen(IGNORED))
def test_values_that_count_as_0_in_rows_that_add_up_nothing_else_are_told(case: Case, dtype: torch.dtype):
    """The head's certificate is dominated by rows with huge outputs; that of each row is not."""
    model, text = case(dtype)
    with pytest.warns(UserWarning, match=r"Do not trust L1H\d.*: effective attention reproduces .* only to within"):
        attention = ik.effective_attention(model, text)
    assert float(attention.row_residual[LAYER].max()) > 0.1 and "Careful: some values are so small" in str(attention)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        intervals = ik.attention_intervals(model, text, layer=LAYER)
    assert "Careful: some values" in str(intervals)
    assert "Careful" not in str(attention.sel(layer=0)) + str(attention.intervals(layer=0))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_tolerance_is_not_taken_for_rounding(dtype: torch.dtype):
    """What a tolerance leaves out is asked for, and said as a number."""
    case = next(case for case in READ if case.name.startswith("softmax is half"))
    loose = ik.effective_attention(*case(dtype), tolerance=0.3)
    assert float(loose.residual.max()) > 0.01
    assert f"to within {float(loose.residual.max()):.1g} (relative)" in str(loose)
