"""Values that are of the right type and still cannot be meant: each is refused in one line, or used as it is."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import identikit as ik
from identikit.results.files import seal_json, unseal_json
from tests.hostile.judging import refused
from tests.models import tiny

TEXT = "w5 w6 w7 w8 w9 w10"
ROW = {"layer": 0, "head": 0, "query": 3}
MAKERS: dict[str, Callable[[], Any]] = {
    "intervals": lambda: ik.attention_intervals(tiny.shared("bert"), TEXT, **ROW),
    "alternative": lambda: ik.alternative_attention(tiny.shared("bert"), TEXT, **ROW),
    "attribution": lambda: ik.token_attribution(tiny.shared("bert"), TEXT),
    "inversion": lambda: ik.invert(tiny.shared("llama"), TEXT, layers=[0]),
}


def test_groups_whose_names_are_written_alike_are_refused():
    with refused("groups"):
        ik.attention_intervals(tiny.shared("bert"), TEXT, groups={1: [1], "1": [2]})


@pytest.mark.parametrize("noise", [1e38, 1e300, 1e7])
def test_noise_that_leaves_nothing_is_refused(noise: float):
    with refused("noise"):
        ik.invert(tiny.shared("llama"), TEXT, noise=noise)


@pytest.mark.parametrize("made", [lambda: torch.ones(3, 24, device="meta"), lambda: torch.eye(3, 24).to_sparse()])
def test_hidden_vectors_without_numbers_are_refused(made: Callable[[], torch.Tensor]):
    with refused("dense"):
        ik.invert(tiny.shared("llama"), made(), layer=0)


def test_something_else_than_effective_attention_is_not_drawn():
    with refused("interval_bars"):
        MAKERS["intervals"]().sel(**ROW).plot(effective=5)


def test_backward_hooks_do_not_stand_in_the_way_of_derivatives():
    own = tiny.build("bert")
    expected = ik.token_attribution(ik.load(own, tiny.tokenizer()), TEXT).contribution
    seen: list[Any] = []
    own.encoder.layer[0].register_full_backward_hook(lambda *given: seen.append(given))
    own.encoder.layer[1].register_full_backward_pre_hook(lambda *given: seen.append(given))
    found = ik.token_attribution(ik.load(own, tiny.tokenizer()), TEXT).contribution
    torch.testing.assert_close(found, expected)
    assert not seen and own.encoder.layer[0]._backward_hooks and own.encoder.layer[1]._backward_pre_hooks


def test_an_answer_that_cannot_be_given_is_missing_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A tokenizer that knows none of the sample texts' words leaves nothing to fit maps to."""
    monkeypatch.setenv("IDENTIKIT_CACHE", str(tmp_path))
    monkeypatch.setattr("identikit.explanation.explain.sample_texts", lambda: ["x y z"] * 8)
    explanation = ik.explain(tiny.shared("llama"), TEXT, probes=2)
    assert not isinstance(explanation.identity, ik.Result) and explanation.identity.reason
    assert explanation.attention.raw.shape[-1] == len(explanation.tokens)
    str(explanation)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_result_with_forged_facts_is_refused_or_says_something(kind: str, tmp_path: Path):
    """Every fact as something else, in turn: refused as it is opened, and never a traceback where it is used."""
    MAKERS[kind]().save(tmp_path / "saved")
    file = tmp_path / "saved" / "result.json"
    about = unseal_json(file.read_bytes())
    facts = [("about", name) for name in about["about"]] + [("provenance", name) for name in about["provenance"]]
    opened = []
    for where, name in facts:
        for value in ("x", None, []):
            file.write_bytes(seal_json(about | {where: about[where] | {name: value}}))
            with suppress(ik.InputError):
                opened.append(str(ik.open_result(tmp_path / "saved")))
    assert 0 < len(opened) < 3 * len(facts)


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b", ""])
def test_what_cannot_be_the_name_of_a_file_is_refused(name: str):
    result = MAKERS["intervals"]()
    calls = (result.save, result.save_html, ik.open_result, lambda name: list(ik.read_texts(name)), ik.load)
    for call in calls:
        with refused("expected"):
            call(name)


def test_an_option_without_effect_is_refused():
    attention = ik.effective_attention(tiny.shared("bert"), TEXT, layers=0)
    for part in (attention.sel(layer=0, head=0), attention.intervals(layer=0, head=0)):
        with refused("by='zebra' has no effect here"):
            part.plot(by="zebra")


def test_a_long_cell_is_read_from_a_file_whose_name_holds_two_colons(tmp_path: Path):
    text = "w5 " * 60_000
    (tmp_path / "a::b.csv").write_text(f'text\n"{text}"\n')
    assert list(ik.read_texts(tmp_path / "a::b.csv")) == [text]


# Functions of the user's that stand in for measures


def one(model: Any, text: Any) -> torch.Tensor:
    return torch.zeros(8, 8)


MEASURES: dict[str, tuple[Any, str]] = {
    "two of one name": ([one, type("one", (), {"__name__": "one", "__call__": one})()], "called 'one'"),
    "one that is called as a measure is": ([type("m", (), {"__name__": "mean", "__call__": one})()], "called 'mean'"),
    "no array of names": (np.array([]), "expected several"),
    "what gives nothing": ([lambda model, text: None], "expected real numbers"),
    "what gives words": ([lambda model, text: "zebra"], "expected real numbers"),
    "what gives complex numbers": ([lambda model, text: torch.zeros(8, 8, dtype=torch.complex64)], "real numbers"),
    "what gives no numbers": ([lambda model, text: torch.zeros(8, 8, device="meta")], "real numbers"),
    "what fails": ([lambda model, text: {}["w5"]], r"failed on the text \(KeyError: 'w5'\)"),
    "what has several heads": ([ik.effective_attention], "3 layers|4 heads"),
}


@pytest.mark.parametrize("function", [ik.agreement, partial(ik.evaluate, tests="leave one out")])
@pytest.mark.parametrize("what", MEASURES)
def test_functions_that_are_no_measures_are_refused(what: str, function: Callable[..., Any]):
    measures, why = MEASURES[what]
    with refused(why):
        function(tiny.shared("bert"), TEXT, measures)


def test_measures_may_be_an_array_of_names_and_sparse():
    names = np.array(["mean", "norm"])
    assert ik.agreement(tiny.shared("bert"), TEXT, names).axes[0].values == ("mean", "norm")
    sparse = ik.agreement(tiny.shared("bert"), TEXT, ["mean", lambda model, text: torch.eye(8).to_sparse()])
    plain = ik.agreement(tiny.shared("bert"), TEXT, ["mean", lambda model, text: torch.eye(8)])
    torch.testing.assert_close(sparse.correlation, plain.correlation, equal_nan=True)


@pytest.mark.parametrize("name", ["\ud800", "", " "])
def test_names_that_cannot_be_printed_are_refused(name: str):
    tensors: dict[str, Any] = {"values": torch.ones(1, 2, 3), "weights": torch.full((1, 2, 2), 0.5)}
    with refused("name"):
        ik.attention_from(**tensors, name=name)
    with refused("name"):
        ik.scores(["a"], [1.0], name=name)


def test_tokens_that_cannot_be_printed_are_refused():
    with refused("tokens"):
        ik.attention_from(values=torch.ones(1, 1, 3), weights=torch.ones(1, 1, 1), tokens=["\ud800"])
    with refused("tokens"):
        ik.scores(["\ud800"], [1.0], name="a score")


def test_a_text_is_not_repeated_endlessly():
    with refused("n="):
        ik.repeated_tokens(tiny.shared("llama"), 10**30)


def test_facts_of_a_result_are_not_changed_from_outside():
    found = ik.captum_attribution(tiny.shared("llama"), TEXT, "occlusion")
    before = dict(found.details)
    found.details["value"] = 5.0
    assert found.details == before != {}


def test_numbers_of_eight_bits_are_refused():
    with refused("float8"):
        ik.attention_from(values=torch.ones(1, 2, 3).to(torch.float8_e4m3fn), weights=torch.full((1, 2, 2), 0.5))
