"""The verdict on one text as numbers: where tokens come from, what is left out and why, what is refused."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import identikit as ik
from identikit.attention import measure as measuring
from identikit.attribution import plan
from identikit.attribution.attribute import token_attribution
from identikit.errors import InputError, Unavailable
from identikit.explanation import explain as explaining
from identikit.explanation.explain import explain
from identikit.explanation.result import Explanation
from identikit.models.model import Model
from identikit.tokens.maps import FittedMap
from identikit.tokens.protocol import Task
from identikit.web.header import _explain_call
from tests.models import tiny

TEXT = "w5 w6 w5 w7 w8"
LONGER = " ".join(f"w{place % 9 + 3}" for place in range(14))
MAPS = [FittedMap("naive", "cosine", layer, 0, Task(), 0, {}) for layer in range(3)]


def told(model: Model, **options):
    """Return the JSON of an explanation as a program reads it."""
    return json.loads(json.dumps(explain(model, TEXT, maps=MAPS, **options).to_dict(), allow_nan=False))


def test_sources_say_where_they_stand():
    model = tiny.loaded("llama")
    found = told(model)
    assert found["probes"] is None and found["largest_stderr"] is None  # what costs little is exact
    contribution = token_attribution(model, TEXT).contribution
    rows = found["sources"]
    assert [row["position"] for row in rows] == list(range(7))
    for row in rows:
        assert found["tokens"][row["position"]] == row["token"]
        assert row["own"] == pytest.approx(float(contribution[2, row["position"], row["position"]]))
        for layer, sources in zip((0, 1, 2), row["sources"], strict=True):
            column = contribution[layer, :, row["position"]]
            expected = [weight for weight in column.sort(descending=True).values.tolist() if weight][:3]
            assert [source["contribution"] for source in sources] == pytest.approx(expected)
            for source in sources:
                assert found["tokens"][source["position"]] == source["token"]
                assert source["contribution"] == pytest.approx(float(column[source["position"]]))


def test_an_outweighed_token_is_not_its_own_first_source():
    rows = told(tiny.loaded("t5"), probes="exact")["sources"]
    assert {row["outweighed"] for row in rows} == {True, False}
    for row in rows:
        first = row["sources"][-1][0]
        assert row["outweighed"] == (first["position"] != row["position"]) == (first["contribution"] > row["own"])


def test_what_does_not_fit_in_memory_leaves_the_rest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan, "free_bytes", lambda device: 1 << 10)
    found = told(tiny.loaded("bert"))
    assert "sources" not in found and len(found["pearson"]) == 3
    assert "needs at least" in found["attribution_unavailable"] and "\n" not in found["attribution_unavailable"]


def test_what_takes_long_is_said_and_estimated_from_fewer_directions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan, "AFFORDABLE", {"cpu": 0.0})
    monkeypatch.setattr(plan, "LONG_SECONDS", {"cpu": 0.0})
    model = tiny.loaded("bert")
    with pytest.warns(UserWarning, match="Attribution takes about"):
        assert explain(model, TEXT, maps=MAPS).attribution.probes == 4


def test_nothing_is_near_where_there_is_nothing_else():
    words = tiny.tokenizer()
    words.backend_tokenizer.post_processor = None  # pyright: ignore[reportAttributeAccessIssue]
    found = explain(Model(tiny.build("gpt2"), words, name="tiny gpt2"), "w5", maps=MAPS)
    assert found.about["near"] is None and found.array("own")[-1].tolist() == pytest.approx([1.0])
    assert isinstance(found.identity, Unavailable) and "nothing to tell it apart from" in found.identity.reason


def test_maps_of_ones_own_are_used():
    model = tiny.loaded("bert")
    texts = [f"w{i} w{i + 1} w{i + 2} w{i + 3}" for i in range(4, 44)]
    fit = ik.token_identifiability(model, texts, maps="ridge", distances="l2", layers=[1])
    found = explain(model, TEXT, maps=fit, probes=4)
    assert found.identity.map == "ridge" and found.identity.distance == "l2"
    assert found.identity.about["fitted_to"] == "your texts"
    recovered = found.array("recovered")
    assert recovered[0].isnan().all() and torch.equal(recovered[1], fit.identity_map(TEXT).recovered[0].double())


def test_a_tokenizer_that_does_not_know_the_sample_texts_is_warned_of(monkeypatch, tmp_path):
    monkeypatch.setenv("IDENTIKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(explaining, "sample_texts", lambda: ik.sample_texts()[:24])
    found = explain(tiny.loaded("bert"), TEXT, probes=4)
    assert found.identity.about["unknown"] > 0.5
    assert "does not know" in str(found) and "Fit maps to texts of your own" in str(found)


def test_progress_is_told():
    seen: dict[str, list[tuple[int, int]]] = {}
    model = tiny.loaded("llama")
    explain(model, TEXT, maps=MAPS, progress=lambda what, *counts: seen.setdefault(what, []).append(counts))
    assert {what: told[-1] for what, told in seen.items()} == {
        "effective attention, layers": (3, 3),
        "attribution, tokens": (7, 7),
        "attention intervals, rows": (24, 24),
    }
    for told in seen.values():
        assert [done for done, _ in told] == sorted(done for done, _ in told) and len({total for _, total in told}) == 1


def test_measures_are_read_from_what_was_captured_and_saved_with_it(tmp_path):
    model = tiny.loaded("bert")
    names = ("rollout", "value norm", "mean", "norm", "roles")
    runs = []
    hook = model.hf.register_forward_hook(lambda *_: runs.append(1))
    explain(model, LONGER, maps=MAPS, probes=4, seconds=None)
    plain = len(runs)
    found = explain(model, LONGER, maps=MAPS, probes=4, measures=names, seconds=None)
    hook.remove()
    assert len(runs) == 2 * plain > 0
    assert tuple(found.readings) == names
    for name in names[:-1]:
        expected = ik.attention_measure(model, LONGER, name)
        last = slice(-1, None) if expected.axes[-1].name == "input" else slice(None)
        for array in ("raw", "lower", "upper"):
            torch.testing.assert_close(found.readings[name].read(array), expected.read(array)[last], msg=name)
        order = expected.certain_order[last]
        facts = found.about["readings"][name]
        assert facts["exact"] == expected.exact and facts["late"] == 0
        assert facts["determined"] == pytest.approx(float(expected.certain_share[last].mean()))
        assert facts["strongest"] == pytest.approx(float((order > 0).double().mean()))
        assert facts["undecided"] == pytest.approx(float((order < 0).double().mean()))
    scores = ik.head_scores(model, LONGER)
    torch.testing.assert_close(found.readings["roles"].lower, scores.lower, equal_nan=True)
    found.save(tmp_path / "saved")
    again = ik.open_result(tmp_path / "saved")
    assert isinstance(again, Explanation) and str(again) == str(found)
    torch.testing.assert_close(again.readings["rollout"].upper, found.readings["rollout"].upper)
    assert found.to_dict()["readings"]["rollout"]["determined"] == found.about["readings"]["rollout"]["determined"]
    assert found.words().readings == {} and explain(model, TEXT, maps=MAPS, probes=4).readings == {}


def test_no_measure_is_read_that_was_not_asked_for(monkeypatch: pytest.MonkeyPatch):
    counts = {"bounds_of": 0, "gradients": 0, "watched_run": 0}

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            counts[name] += 1
            return function(*given, **options)

        return call

    for name in ("bounds_of", "watched_run"):
        monkeypatch.setattr(measuring, name, counting(name, getattr(measuring, name)))
    monkeypatch.setattr(Model, "gradients", counting("gradients", Model.gradients))
    explain(tiny.loaded("bert"), TEXT, maps=MAPS, probes=4)
    assert counts == {"bounds_of": 0, "gradients": 0, "watched_run": 0}
    explain(tiny.loaded("llama"), TEXT, probes=4, measures=["mean", "norm with residual", "gradient"])
    assert counts == {"bounds_of": 1, "gradients": 1, "watched_run": 1}


def test_measures_that_cannot_be_read_or_come_too_late_say_so():
    model = tiny.loaded("bert")
    found = explain(model, LONGER, maps=MAPS, probes=4, measures=["gradient", "rollout"], seconds=1e-9)
    assert all(isinstance(reading, Unavailable) for reading in found.readings.values())
    assert "Rollout was not read: There was no time left for it (seconds=1e-09)." in " ".join(str(found).split())
    assert "rollout" in str(explain(model, LONGER, maps=MAPS, probes=4, measures="rollout", seconds=None))
    with pytest.raises(InputError, match="'attention flow' is not known: use 'attention', 'mean', 'rollout'"):
        explain(model, TEXT, measures=["attention flow"])


def square(logits: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor:
    return hidden[0, -1].square().sum()


@pytest.mark.parametrize("target", ["w9", 9, square])
def test_measures_of_a_target_are_those_of_attention_measure(target, tmp_path):
    model = tiny.loaded("llama")
    names = ("gradient", "relevance") if target is square else ("gradient", "relevance", "logit")
    found = explain(model, LONGER, probes=4, measures=names, target=target, seconds=None)
    for name in names:
        expected = ik.attention_measure(model, LONGER, name, target=target)
        last = slice(-1, None) if expected.through else slice(None)
        torch.testing.assert_close(found.readings[name].upper, expected.upper[last])
        assert found.readings[name].target == expected.target
    found.save(tmp_path / "saved")
    assert str(ik.open_result(tmp_path / "saved")) == str(found)
    shown = {"w9": ', target="w9"', 9: ", target=9", square: ", target=..."}[target]
    assert shown in _explain_call(found)


def test_a_target_is_checked_before_anything_is_computed():
    model = tiny.loaded("llama")
    seen = []
    for message, options in (
        ("is 2 tokens", {"measures": "gradient", "target": "w5 w6"}),
        ("a token, or its number", {"measures": ["gradient", "logit"], "target": square}),
    ):
        with pytest.raises(InputError, match=message):
            explain(model, LONGER, **options, progress=lambda *told: seen.append(told))
    assert not seen


def test_an_order_for_which_time_ran_out_is_a_lower_bound_and_said(monkeypatch: pytest.MonkeyPatch):
    compare = measuring.compare_through

    def late(*given):
        monkeypatch.setattr(time, "monotonic", lambda: 1e12)  # once the order has begun
        return compare(*given)

    monkeypatch.setattr(measuring, "compare_through", late)
    found = explain(tiny.loaded("bert"), LONGER, maps=MAPS, probes=4, measures="rollout", seconds=600)
    monkeypatch.undo()
    facts = found.about["readings"]["rollout"]
    assert facts["order_late"] and facts["order_undecided"] > 0 and facts["late"] == 0
    assert "there was no time to compare all of its sources" in " ".join(str(found).split())


def test_mistakes():
    model = tiny.loaded("bert")
    for message, text, options in (
        ("seconds=0 cannot be used: expected a number above 0", TEXT, {"seconds": 0}),
        ("probes=25 cannot be used", TEXT, {"probes": 25}),
        ("one text at a time", [TEXT], {}),
        ("expected the result of token_identifiability", TEXT, {"maps": []}),
    ):
        with pytest.raises(InputError, match=message):
            explain(model, text, **options)
    with pytest.raises(InputError, match=r"'weather'.* is not known: use 'attention', 'identity', 'attribution'"):
        explain(model, TEXT, maps=MAPS).plot("weather")
