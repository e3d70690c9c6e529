"""Learned sinks: rows sum to less than 1, and what could have been is every row that sums to at most 1."""

from typing import Any

import pytest
import torch

import identikit as ik
from identikit.models.model import Model
from tests.attention.literal import literal_row
from tests.models import tiny
from tests.reference import intervals as reference

TEXT = " ".join(f"w{number}" for number in (5, 6, 7, 5, 8, 9, 5, 6, 10, 11, 12, 13, 14, 15, 16, 17))
ROWS = ((0, 0, -1), (1, 2, -2), (1, 1, 3), (1, 3, 12))  # layer 1 sees all keys; the others have a window of 6


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny.loaded("gpt_oss", dtype=torch.float64)


@pytest.fixture(scope="module")
def attention(model: Model) -> Any:
    return ik.effective_attention(model, TEXT)


@pytest.mark.parametrize("options", [{}, {"bias": False, "mass": True}])
def test_effective_attention_keeps_the_output(model: Model, options: dict):
    found = ik.effective_attention(model, TEXT, **options)
    assert float(found.residual.max()) < 1e-10
    change = found.verify()
    assert change.hidden < 1e-6 and change.logits is not None and change.logits < 1e-6  # RMSNorm casts to float32
    if options.get("mass"):
        assert torch.allclose(found.effective.sum(-1), found.raw.sum(-1))


def test_intervals_are_those_of_a_plain_linear_program(attention: Any):
    found = attention.intervals()
    assert found.raw.shape == found.lower.shape == attention.raw.shape and found.gap.max() < 1e-9
    assert (found.lower <= found.raw).all() and (found.raw <= found.upper).all()
    free = attention.null_dim > 0
    assert torch.equal(found.lower[~free], found.raw[~free]) and torch.equal(found.upper[~free], found.raw[~free])
    wider = 0
    for layer, head, query in ROWS:
        row = literal_row(attention, layer, head, query)
        raw, values = row.attention[:-1].numpy(), row.values[:-1].numpy()
        lower, upper = reference.sink_intervals(raw, values)
        ends = found.sel(layer=layer, head=head, query=query)
        torch.testing.assert_close(ends.lower[row.keys], torch.from_numpy(lower), atol=1e-7, rtol=0)
        torch.testing.assert_close(ends.upper[row.keys], torch.from_numpy(upper), atol=1e-7, rtol=0)
        expected = reference.certain_order(raw, values, 5, reference.sink_optimum)
        assert int(ends.certain_order) == expected
        alone = attention.intervals(layer=layer, head=head, query=query)
        torch.testing.assert_close(alone.upper, ends.upper, atol=1e-9, rtol=0)
        assert int(alone.certain_order) == expected
        wider += float(upper.sum()) > float(reference.intervals(raw, values)[1].sum()) + 1e-3
    assert wider  # the sink gives and takes


def test_certified_ends_and_room_for_the_output(attention: Any):
    rows = {"layer": 1, "head": [0, 3], "query": slice(10, 18)}
    exact, certified = attention.intervals(**rows), attention.intervals(**rows, method="certified")
    assert (certified.lower <= exact.lower + 1e-9).all() and (certified.upper >= exact.upper - 1e-9).all()
    assert (exact.lower - certified.lower <= certified.gap + 1e-9).all()
    decided = ~certified.strongest_is_certain.isnan()
    assert torch.equal(certified.strongest_is_certain[decided], exact.strongest_is_certain[decided])
    room = attention.intervals(**rows, epsilon=0.01)
    assert (room.upper >= exact.upper - 1e-9).all() and float((room.upper - exact.upper).max()) > 1e-3


def test_a_group_of_all_tokens_is_what_the_sink_leaves(attention: Any):
    row: dict[str, Any] = {"layer": 1, "head": 2, "query": -1}
    found = attention.intervals(**row, groups={"all": list(range(len(attention.tokens)))})
    one = literal_row(attention, 1, 2, -1)
    raw, values = one.attention[:-1].numpy(), one.values[:-1].numpy()
    least, most = (sign * reference.sink_optimum(sign * (raw * 0 + 1), raw, values) for sign in (1, -1))
    assert float(found.lower) == pytest.approx(float(least.sum()), abs=1e-7)
    assert float(found.upper) == pytest.approx(float(-most.sum()), abs=1e-7)
    assert float(found.raw) == pytest.approx(float(raw.sum()))


def test_another_attention_gives_and_takes_from_the_sink(model: Model):
    which: dict[str, Any] = {"layer": 1, "head": 2, "query": -1}
    found = ik.alternative_attention(model, TEXT, **which)
    assert found.attention.shape == found.raw.shape and float(found.attention.min()) >= 0
    assert float(found.attention.sum()) <= 1 + 1e-12 and found.step > 1e-3
    assert max(found.output_change) < 1e-6  # pyright: ignore
    ends = ik.attention_intervals(model, TEXT, **which)
    toward = int((ends.upper - ends.raw).argmax())
    moved = ik.alternative_attention(model, TEXT, **which, toward=toward).attention
    reached = min(abs(float(moved[toward] - end[toward])) for end in (ends.lower, ends.upper))
    assert reached < 1e-7
    direction = torch.linspace(-1, 1, len(found.tokens))
    along = ik.alternative_attention(model, TEXT, **which, direction=direction)
    assert along.output_change.hidden < 1e-6 and float(along.attention.sum()) <= 1 + 1e-12


def test_the_least_attention_counts_the_sink_as_a_key(attention: Any):
    row = attention.sel(layer=1, head=[2], query=7)
    one = literal_row(attention, 1, 2, 7)
    least = row.simplex[0]
    expected = reference.minimum_norm(one.attention.numpy(), one.values.numpy())
    torch.testing.assert_close(least[one.keys], torch.from_numpy(expected[:-1]), atol=1e-8, rtol=0)


def test_words_say_how_much_goes_to_the_sink(model: Model, attention: Any):
    share = float(attention.sink.mean())
    assert f"A learned sink takes {share:.2f} of a row's weight on average" in str(attention)
    told = " ".join(str(ik.explain(model, TEXT, seconds=1)).split())
    assert f"A learned sink takes {share:.2f} of a row's weight on average" in told
