"""Other attention with the same output, on the real model: put in, measured, and bounded."""

import numpy as np
import pytest
import torch

import identikit as ik
from identikit.attention import alternatives
from identikit.models.model import Model
from tests.attention.test_effective import LONG, TEXTS
from tests.models import tiny
from tests.reference import intervals as reference

WHERE = {"layer": 3, "head": 2}


@pytest.fixture(scope="module")
def minilm() -> Model:
    return ik.load()


@pytest.fixture(scope="module")
def captured(minilm: Model):
    return ik.effective_attention(minilm, LONG, layers=[3], heads=[2])


def test_the_default_goes_to_the_farthest_end_of_the_edge_that_can_move_most(minilm: Model, captured):
    found = ik.alternative_attention(minilm, LONG, **WHERE, query=60)
    assert torch.allclose(found.raw, captured.sel(**WHERE, query=60).raw.double(), atol=1e-6)
    assert found.attention.min() >= 0 and torch.isclose(found.attention.sum(), torch.ones(()).double())
    assert torch.allclose(found.attention, found.raw + found.step * found.direction, atol=1e-12)
    assert found.output_change.hidden < 1e-5
    ends = captured.intervals(query=60).sel(**WHERE)
    reach = torch.maximum(ends.upper - ends.raw, ends.raw - ends.lower)
    moved = (found.attention - found.raw).abs()
    assert torch.isclose(moved[reach.argmax()], reach.max(), atol=1e-8)


def test_the_asked_edge_goes_to_the_farther_end_of_its_interval(minilm: Model, captured):
    ends = captured.intervals(query=60, key=5).sel(**WHERE)
    found = ik.alternative_attention(minilm, LONG, **WHERE, query=60, toward=5)
    farther = max((ends.lower, ends.upper), key=lambda end: float((end - ends.raw).abs()))
    assert torch.isclose(found.attention[5], farther.squeeze(), atol=1e-8)
    assert found.output_change.hidden < 1e-5
    token = found.tokens[5]
    assert torch.equal(found.sel(key=f"{token}@5").attention, found.attention[5])


@pytest.mark.parametrize("end", ["lower", "upper"])
def test_a_chosen_end_is_reached_and_the_captured_row_goes_there_too(minilm: Model, captured, end: str):
    ends = captured.intervals(query=60, key=5).sel(**WHERE)
    found = ik.alternative_attention(minilm, LONG, **WHERE, query=60, toward=5, end=end)
    assert torch.isclose(found.attention[5], getattr(ends, end).squeeze(), atol=1e-8)
    assert found.output_change.hidden < 1e-5
    whole = ik.effective_attention(minilm, LONG, layers=[1, 3], heads=[0, 2])
    again = alternatives.alternative_of(whole.sel(**WHERE, query=60), toward=5, end=end)
    assert torch.allclose(again.attention, found.attention, atol=1e-8)
    assert again.output_change.hidden < 1e-5 and again.row_residual < 1e-5


def test_a_given_direction_is_followed(minilm: Model):
    towards = torch.zeros(130, dtype=torch.float64)
    towards[0] = -1.0
    found = ik.alternative_attention(minilm, LONG, **WHERE, query=60, direction=towards)
    assert found.attention[0] < found.raw[0] and found.attention.min() == 0
    assert found.output_change.hidden < 1e-5


def test_a_wrong_row_changes_the_output(minilm: Model, monkeypatch: pytest.MonkeyPatch):
    """`output_change` is measured, not assumed: a row with another output must show."""
    uniform = torch.full((1, 1, 2, 130), 1 / 130, dtype=torch.float64)
    monkeypatch.setattr(alternatives, "extreme_rows", lambda rows, c: (uniform, torch.tensor([False])))
    assert ik.alternative_attention(minilm, LONG, **WHERE, query=60, toward=0).output_change.hidden > 1e-4


def test_a_weight_that_the_output_fixes_is_refused_and_the_others_are_not():
    model = tiny.loaded("llama")  # rotary: repeated tokens have equal values in the first layer
    ids = [5, 6, 7, 6, 8]
    where = {"layer": 0, "head": 0, "query": 4}
    moved = ik.alternative_attention(model, ids, **where, toward=1)
    assert abs(float(moved.attention[1] - moved.raw[1])) > 1e-4
    assert float(moved.attention[1] + moved.attention[3]) == pytest.approx(float(moved.raw[1] + moved.raw[3]), abs=1e-6)
    with pytest.raises(
        ik.InputError, match=r"toward=0: the output fixes this weight at 0\.\d+, though others can move"
    ):
        ik.alternative_attention(model, ids, **where, toward=0)


def test_an_alternative_can_be_saved_whatever_it_went_toward(minilm: Model, tmp_path):
    for number, toward in enumerate((np.int64(3), slice(0, 3), [0, 1], "[CLS]")):
        found = ik.alternative_attention(minilm, LONG, **WHERE, query=60, toward=toward)
        found.save(tmp_path / str(number))
        again = ik.open_result(tmp_path / str(number))
        assert str(again) == str(found) and " goes from " in str(found)


def test_intervals_of_a_row(minilm: Model, captured):
    found = ik.attention_intervals(minilm, LONG, **WHERE, query=60)
    assert found.lower.shape == found.upper.shape == found.raw.shape == (130,)
    assert (found.lower <= found.raw).all() and (found.raw <= found.upper).all() and found.gap.max() < 1e-9
    assert torch.isclose(found.certain_mass, found.lower.sum()) and 0 < found.certain_mass < 1
    part = captured.captured().layers[0]
    for key in (0, 17, 60):
        edge = ik.attention_intervals(minilm, LONG, **WHERE, query=60, key=key)
        assert torch.allclose(edge.lower, found.lower[key], atol=1e-7)
        assert torch.allclose(edge.upper, found.upper[key], atol=1e-7)
        cost = torch.zeros(130).double()
        cost[key] = 1.0
        values = part.call.value[0, 2].double().numpy()
        least = reference.optimum(cost.numpy(), found.raw.numpy(), values)
        greatest = reference.optimum(-cost.numpy(), found.raw.numpy(), values)
        assert abs(least[key] - float(found.lower[key])) < 1e-7
        assert abs(greatest[key] - float(found.upper[key])) < 1e-7


def test_intervals_of_a_causal_head():
    progress = []
    found = ik.attention_intervals(
        tiny.loaded("llama"), TEXTS[0], layer=1, head=3, progress=lambda *told: progress.append(told)
    )
    n = len(found.tokens)
    assert found.lower.shape == (n, n) and progress[-1] == ("attention intervals, rows", n, n)
    future = torch.ones(n, n).triu(1).bool()
    assert not found.upper[future].any()
    assert torch.allclose(found.certain_mass[:7], torch.ones(7).double())  # up to d_v + 1 keys there is one attention
    assert found.certain_mass[-1] < 1


def test_several_heads_and_texts_are_those_of_each():
    model = tiny.loaded("llama")
    together = ik.attention_intervals(model, TEXTS[:2], layer=[0, 2], head=[1, 3], query=[2, -1])
    assert [one.lower.shape[:3] for one in together] == [(2, 2, 2)] * 2
    alone = ik.attention_intervals(model, TEXTS[0], layer=2, head=3, query=-1)
    assert torch.allclose(together[0].sel(layer=2, head=3, query=-1).upper, alone.upper, atol=1e-6)


def test_what_is_not_done_in_time_is_bounded_by_what_is_known():
    found = ik.attention_intervals(tiny.loaded("bert"), TEXTS[0], layer=0, head=0, seconds=1e-9)
    late = found.gap.isnan()
    assert late.any()
    assert (found.lower[late] == 0).all() and (found.upper[late] == 1).all()
    assert (found.lower <= found.raw).all() and (found.raw <= found.upper).all()


def test_mistakes(minilm: Model, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("identikit.attention.intervals.LONGEST_SECONDS", 0.001)
    with pytest.raises(ik.InputError, match=r"130 rows of 130 tokens would take about \d+ minutes. Select some rows"):
        ik.attention_intervals(minilm, LONG, **WHERE)
    for wrong, message in (
        ({"query": 130}, "There is no query 130. The positions are 0 to 129"),
        ({"query": 0, "key": 130}, "There is no key 130"),
        ({"query": 0, "seconds": -1.0}, "seconds=-1.0 cannot be used"),
        ({"query": 0, "method": "magic"}, "method='magic' is not known: use 'auto', 'exact'"),
    ):
        with pytest.raises(ik.InputError, match=message):
            ik.attention_intervals(minilm, LONG, **WHERE, **wrong)
    for wrong, message in (
        ({"layer": 6, "head": 0, "query": 0}, "There is no layer 6"),
        ({"layer": 0, "head": 12, "query": 0}, "There is no head 12"),
        ({"layer": 0, "head": None, "query": 0}, "Selecting head None: expected one"),
        ({"layer": 0, "head": 0, "query": [0, 1]}, "expected one position or token"),
        (
            WHERE | {"query": 0, "direction": torch.ones(3)},
            r"direction=tensor\(\[1., 1., 1.\]\) cannot be used: expected a tensor with a finite number",
        ),
        (WHERE | {"query": 0, "toward": "zebra"}, "There is no key 'zebra'"),
    ):
        with pytest.raises(ik.InputError, match=message):
            ik.alternative_attention(minilm, LONG, **wrong)
    with pytest.raises(ik.InputError, match=r"only the row's own attention gives this output \(keys that it sees: 6\)"):
        ik.alternative_attention(minilm, "A short text.", layer=0, head=0, query=0)
    with pytest.raises(ik.InputError, match="one text at a time"):
        ik.alternative_attention(minilm, [LONG], layer=0, head=0, query=0)
