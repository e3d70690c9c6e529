"""A time limit is a promise: what does not fit is left out, in an order that leaves honest answers, and said."""

import math
import time
from itertools import pairwise
from typing import Any

import pytest
import torch

import identikit as ik
from identikit.attention import intervals as bounding
from identikit.attention.layer import Layer
from identikit.errors import Unavailable
from identikit.explanation import attention_facts, time_limit
from identikit.explanation import explain as explaining
from identikit.explanation.explain import explain, spread_order
from identikit.explanation.time_limit import TimeLimit
from identikit.explanation.words import verdict
from tests.explanation.test_result import MAPS
from tests.models import tiny

LONG = " ".join(f"w{i}" for i in range(5, 19))


@pytest.mark.parametrize("count", [1, 2, 30])
def test_places_are_spread_from_the_last_on(count: int):
    order = spread_order(count)
    assert sorted(order) == list(range(count)) and order[0] == count - 1
    for taken in range(2, count):
        ends = sorted(order[:taken])
        gaps = [after - before for before, after in pairwise(ends)]
        assert ends[0] == 0 and max(gaps) <= 2 * math.ceil((count - 1) / (taken - 1))


def test_a_long_text_is_read_in_some_layers_and_says_which(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(explaining, "_FEW_WEIGHTS", 0)
    model = tiny.loaded("bert")
    some = explain(model, LONG, maps=MAPS, probes=2, seconds=1e-9)
    whole = explain(model, LONG, maps=MAPS, probes=2, seconds=None)
    assert some.axes[0].values == (2,) and some.about["layers_left_out"] == 2
    for name in ("special_raw", "special_effective", "pearson", "greatest_null_dim", "own", "recovered"):
        assert torch.equal(some.array(name), whole.array(name)[2:])
    assert verdict(some).facts["layers_read"] == (2,) and "attention was read in 2" in " ".join(str(some).split())
    assert "layers_read" not in verdict(whole).facts and whole.about["layers_left_out"] == 0
    assert "every layer that was read" in " ".join(str(some).split())
    assert not isinstance(some.identity, Unavailable) and len(some.identity.axes[0]) == 3


def test_what_there_is_no_time_for_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    monkeypatch.setattr(TimeLimit, "allows", lambda self, seconds: False)
    found = explain(tiny.loaded("bert"), LONG, maps=MAPS, probes=2, seconds=5)
    told = found.to_dict()
    assert told["output_change"] is None and told["reachable_dim"] == [None] * 3
    assert {"output_change", "reachable_dim"} <= set(told["null_because"])
    assert "There was no time to run the model" in " ".join(str(found).split()) and "nan" not in str(found)
    found.save_html(tmp_path / "page.html")
    found.save(tmp_path / "saved")
    assert str(ik.open_result(tmp_path / "saved")) == str(found)


def test_the_limit_and_what_comes_last_are_within_one_and_a_half(monkeypatch: pytest.MonkeyPatch):
    limit = TimeLimit(20.0, 100.0)
    for now, left in ((100.0, 20.0), (108.0, 12.0), (115.0, 10.0), (120.0, 10.0), (125.0, 5.0), (140.0, 0.0)):
        monkeypatch.setattr(time, "monotonic", lambda: now)  # noqa: B023 - called before the next
        assert limit.left() == pytest.approx(left)
    assert limit.passed(1.5) and not limit.passed(2.5) and not TimeLimit(None, 0.0).passed(0.1)
    assert TimeLimit(None, 0.0).allows(1e9) and not limit.allows(2.0)


def test_rows_come_before_attribution_which_keeps_its_time_free(monkeypatch: pytest.MonkeyPatch):
    """Attribution of some seconds runs whatever the clock says: after it, a busy machine had no time left for rows."""
    model = tiny.loaded("bert")
    told: list[str] = []
    explain(model, LONG, maps=MAPS, seconds=20, progress=lambda what, done, total: told.append(what))
    assert told.index("attention intervals, rows") < told.index("attribution, tokens")
    limits: list[TimeLimit] = []
    facts = attention_facts.attention_facts

    def noted(attention: Any, limit: TimeLimit, progress: Any) -> Any:
        limits.append(limit)
        return facts(attention, limit, progress)

    monkeypatch.setattr(explaining, "attention_facts", noted)
    monkeypatch.setattr(time_limit, "is_affordable", lambda *given: False)
    monkeypatch.setattr(time_limit, "expected_seconds", lambda *given: 300.0)
    assert not isinstance(explain(model, LONG, maps=MAPS, seconds=1000).attribution, Unavailable)
    assert 600 < limits[0].left() < 700
    assert isinstance(explain(model, LONG, maps=MAPS, seconds=200).attribution, Unavailable)
    assert limits[1].left() > 190


def test_attribution_that_takes_longer_than_expected_is_given_up_and_said(monkeypatch: pytest.MonkeyPatch):
    model = tiny.loaded("bert")
    monkeypatch.setattr(TimeLimit, "passed", lambda self, share: share == 2.0)
    found = explain(model, LONG, maps=MAPS, seconds=5)
    assert isinstance(found.attribution, Unavailable)
    assert "twice the time limit has passed" in " ".join(str(found).split())
    asked = explain(model, LONG, maps=MAPS, probes=2, seconds=5)
    assert not isinstance(asked.attribution, Unavailable)  # what is asked for is done


def test_what_is_done_once_does_not_count():
    limit = TimeLimit(1.0)
    started = limit.started
    with limit.paused():
        time.sleep(0.05)
    assert 0.05 <= limit.started - started < 0.5


def test_maps_are_gone_through_once_for_means_correlations_and_print(monkeypatch: pytest.MonkeyPatch):
    rows: list[int] = []
    effective = Layer.effective

    def counted(self: Layer, heads: torch.Tensor, queries: torch.Tensor, keys: Any) -> torch.Tensor:
        rows.append(len(heads) * len(queries))
        return effective(self, heads, queries, keys)

    attention = ik.effective_attention(tiny.loaded("bert"), LONG)
    monkeypatch.setattr(Layer, "effective", counted)
    attention_facts.group_mass(attention, torch.ones(1, len(attention.tokens), dtype=torch.float64))
    attention.pearson()
    str(attention)
    assert sum(rows) == 3 * 4 * len(attention.tokens)


def test_a_limit_of_intervals_counts_from_the_start_and_is_shared_by_texts(monkeypatch: pytest.MonkeyPatch):
    seconds: list[float] = []
    bounds_of = bounding.bounds_of

    def noted(*arguments: Any, bounding: Any, **options: Any) -> Any:
        seconds.append(bounding.until - time.monotonic())
        return bounds_of(*arguments, bounding=bounding, **options)

    monkeypatch.setattr(bounding, "bounds_of", noted)
    reads = bounding.run_texts
    monkeypatch.setattr(bounding, "run_texts", lambda *given, **options: time.sleep(0.3) or reads(*given, **options))
    model = tiny.loaded("bert")
    ik.attention_intervals(model, [LONG, LONG], seconds=100)
    first, second = seconds
    assert first < 49.9 and first < second < 99.7
    seconds.clear()
    nothing = ik.attention_intervals(model, LONG, seconds=0.1)
    assert seconds[0] < 0 and bool(nothing.gap.isnan().any())
