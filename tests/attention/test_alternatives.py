"""Other attention with the same output: put in, measured, and bounded."""

from typing import Any

import numpy as np
import pytest
import torch

import identikit as ik
from identikit.attention import alternatives
from identikit.models.model import Model
from tests.attention.test_effective import LONG, TEXTS
from tests.models import tiny

ROW: dict[str, Any] = {"layer": 1, "head": 2, "query": 8}


@pytest.fixture(scope="module")
def bert() -> Model:
    return tiny.loaded("bert", dtype=torch.float64)


@pytest.fixture(scope="module")
def ends(bert: Model) -> Any:
    """The intervals of the row."""
    return ik.attention_intervals(bert, TEXTS[0], **ROW)


def test_the_default_goes_to_the_farthest_end_of_the_edge_that_can_move_most():
    minilm = ik.load()
    where = {"layer": 3, "head": 2, "query": 60}
    found = ik.alternative_attention(minilm, LONG, **where)
    attention = ik.effective_attention(minilm, LONG, layers=[3], heads=[2])
    assert torch.allclose(found.raw, attention.sel(**where).raw.double(), atol=1e-6)
    assert found.attention.min() >= 0 and torch.isclose(found.attention.sum(), torch.ones(()).double())
    assert torch.allclose(found.attention, found.raw + found.step * found.direction, atol=1e-12)
    assert found.output_change.hidden < 1e-5
    ends = attention.intervals(**where)
    reach = torch.maximum(ends.upper - ends.raw, ends.raw - ends.lower)
    assert torch.isclose((found.attention - found.raw).abs()[reach.argmax()], reach.max(), atol=1e-8)


@pytest.mark.parametrize("end", ["farther", "lower", "upper"])
def test_the_asked_edge_goes_to_the_end_of_its_interval_from_captured_rows_too(bert: Model, ends: Any, end: str):
    lower, upper, raw = (float(part[5]) for part in (ends.lower, ends.upper, ends.raw))
    reached = {"lower": lower, "upper": upper, "farther": max((lower, upper), key=lambda weight: abs(weight - raw))}
    found = ik.alternative_attention(bert, TEXTS[0], **ROW, toward=5, end=end)
    assert float(found.attention[5]) == pytest.approx(reached[end], abs=1e-8)
    assert found.output_change.hidden < 1e-10
    assert torch.equal(found.sel(key=found.tokens[5]).attention, found.attention[5])
    whole = ik.effective_attention(bert, TEXTS[0], layers=[2, 1], heads=[0, 2])
    again = alternatives.alternative_of(whole.sel(**ROW), toward=5, end=end)
    assert torch.allclose(again.attention, found.attention, atol=1e-8)
    assert again.output_change.hidden < 1e-10 and again.row_residual < 1e-10


def test_a_given_direction_is_followed(bert: Model):
    direction = -torch.eye(14, dtype=torch.float64)[0]
    found = ik.alternative_attention(bert, TEXTS[0], **ROW, direction=direction)
    assert found.attention[0] < found.raw[0] and found.attention.min() == 0
    assert found.output_change.hidden < 1e-10


def test_a_wrong_row_changes_the_output(bert: Model, monkeypatch: pytest.MonkeyPatch):
    """`output_change` is measured, not assumed: a row with another output must show."""
    wrong = torch.eye(14, dtype=torch.float64)[:2].expand(1, 1, 2, 14)
    monkeypatch.setattr(alternatives, "extreme_rows", lambda rows, c: (wrong, torch.tensor([False])))
    assert ik.alternative_attention(bert, TEXTS[0], **ROW, toward=0).output_change.hidden > 1e-4


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


def test_an_alternative_can_be_saved_whatever_it_went_toward(bert: Model, tmp_path):
    for number, toward in enumerate((np.int64(3), slice(0, 3), [0, 1], "<s>")):
        found = ik.alternative_attention(bert, TEXTS[0], **ROW, toward=toward)
        found.save(tmp_path / str(number))
        assert str(ik.open_result(tmp_path / str(number))) == str(found) and " goes from " in str(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"query": [0, 1]}, "expected one position or token"),
        ({"direction": torch.ones(3)}, r"direction=tensor\(\[1., 1., 1.\]\) cannot be used: expected a tensor with a"),
        ({"direction": torch.ones(14), "toward": 1}, "not both"),
        ({"text": TEXTS[1], "query": 0}, r"only the row's own attention gives this output \(keys that it sees: 4\)"),
        ({"text": [TEXTS[0]]}, "one text at a time"),
    ],
)
def test_mistakes(bert: Model, options: dict[str, Any], message: str):
    with pytest.raises(ik.InputError, match=message):
        ik.alternative_attention(bert, **{"text": TEXTS[0], **ROW, **options})


def test_a_key_that_the_query_does_not_see_is_refused():
    with pytest.raises(ik.InputError, match="the query does not see this key"):
        ik.alternative_attention(tiny.loaded("llama"), TEXTS[0], **ROW, toward=10)
