"""A wrong value for every argument of the public functions, and for every option of the command line.

That a check refuses every wrong value is proved in `tests/test_checks.py` and `tests/results/test_axis.py`; here, that
every argument has its check.
"""

import inspect
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import identikit as ik
from tests.hostile.judging import refused
from tests.hostile.made import TEXT, command, same, saved, texts_file, workshop
from tests.models import pictured, tiny

TEXTS = [f"w{i} w{i + 1} w{i + 2}" for i in range(4, 34)]
ROW = {"layer": 0, "head": 0, "query": 3}
FUNCTIONS = [name for name in ik.__all__ if inspect.isfunction(getattr(ik, name))]

WRONG: dict[str, dict[str, Any]] = {
    "load": {"model": 5, "tokenizer": 5, "device": "abacus", "device_map": "abacus", "dtype": "int8",
             "tower": "north", "revision": 1.5,
             "trust_remote_code": "yes"},
    "explain": {"model": None, "text": 5, "probes": 1.5, "maps": "naive", "measures": "zebra", "target": "w5",
                "seconds": -1.0, "truncate": "yes", "progress": 5, "ready": 5},
    "effective_attention": {"model": "bert", "text": 5, "target": "w5", "generate": 3, "attention": "cross",
                            "layers": 99, "heads": [1.5], "bias": 1, "mass": None,
                            "tolerance": math.nan, "truncate": "yes", "max_tokens": 0,
                            "progress": 5},
    "attention_intervals": {"model": None, "text": 5, "layer": -99, "head": "zebra", "query": slice(9, 9), "key": 1.5,
                            "groups": {"a": [99]}, "weights": {"a": "x"}, "method": "zebra", "epsilon": 1.5,
                            "seconds": math.nan, "truncate": 1, "progress": 5},
    "attention_from": {"values": "zebra", "weights": 5, "queries": 5, "keys": 5, "scaling": 1.0, "mask": "zebra",
                       "output": [1.5], "output_projection": {}, "tokens": 5, "source": 5, "name": 5},
    "alternative_attention": {"model": None, "text": 5, "layer": None, "head": True, "query": 99, "toward": "zebra",
                              "end": "nearer", "direction": [1.5], "truncate": None},
    "attention_measure": {"model": None, "text": 5, "name": "zebra", "target": 3, "layers": 99, "heads": [0],
                          "seconds": -1.0, "truncate": 1, "progress": 5},
    "head_scores": {"model": None, "texts": 5, "scores": "zebra", "layers": 99, "heads": [1.5], "seconds": math.nan,
                    "truncate": "yes", "progress": 5},
    "agreement": {"model": None, "texts": 5, "measures": "zebra", "target": "w5 w6", "seconds": -1.0,
                  "truncate": "yes", "progress": 5},
    "evaluate": {"model": None, "texts": 5, "measures": "zebra", "tests": "zebra", "target": "zebra", "truth": [[5]],
                 "replacement": "zebra", "beam": 0, "probes": 1.5, "seed": -1, "seconds": -1.0, "truncate": "yes",
                 "max_tokens": 0, "progress": 5},
    "save_html": {"results": [None, None], "path": 5, "progress": 5},
    "image_regions": {"result": None, "grid": (2,), "box": (3, 0, 1, 1), "image": 9, "overview": 5},
    "repeated_tokens": {"model": None, "n": 0, "seed": -1},
    "token_attribution": {"model": object(), "text": None, "messages": 5, "target": "w5",
                          "target_text": "w5", "generate": 3, "probes": 0, "norm": "l7",
                          "layers": [[0]],
                          "targets": {}, "source": "zebra", "precision": None, "seed": -1, "truncate": [],
                          "max_tokens": True, "progress": 5},
    "captum_attribution": {"model": None, "text": 5, "method": "zebra", "target": "w5 w6", "baseline": "one",
                           "steps": 0, "truncate": 1, "max_tokens": 0, "progress": 5},
    "scores": {"tokens": "zebra", "array": "zebra", "name": 5},
    "token_identifiability": {"model": None, "texts": "zebra", "states": 5, "maps": "zebra", "distances": [None],
                              "layers": 99, "experiment": "zebra", "settings": {}, "truncate": 1.0, "max_tokens": 1.5,
                              "progress": 5},
    "invert": {"model": None, "text": b"x", "layer": 99, "layers": "zebra", "positions": [True], "prefix": "zebra",
               "noise": math.inf, "distance": "zebra", "seed": 2**70, "truncate": "", "max_tokens": -99,
               "progress": 5},
    "open_result": {"folder": 1.5},
    "read_texts": {"source": 1.5, "columns": [None], "data_dir": ".", "split": "dev"},
    "sample_texts": {},
    "cite": {},
}  # fmt: skip


def effective_attention_of_a_picture() -> Any:
    return ik.effective_attention(pictured.shared("llava"), (pictured.picture(), "w5"))


@cache
def given(function: str) -> dict[str, Any]:
    """Return arguments with which a public function goes through."""
    bert = {"model": tiny.shared("bert")}
    if function == "read_texts":
        folder = workshop() / "a text"
        folder.mkdir()
        return {"source": texts_file(folder, ["w5 w6"])}
    return {
        "load": {"model": saved("bert")},
        "attention_intervals": bert | {"text": TEXT} | ROW,
        "attention_from": {"values": torch.ones(1, 2, 3), "weights": torch.full((1, 2, 2), 0.5)},
        "alternative_attention": bert | {"text": TEXT} | ROW,
        "repeated_tokens": bert | {"n": 5},
        "image_regions": {"result": effective_attention_of_a_picture()},
        "save_html": {"results": effective_attention_of_a_picture(), "path": str(workshop() / "page.html")},
        "head_scores": bert | {"texts": TEXT},
        "agreement": {"model": tiny.shared("llama"), "texts": TEXT, "measures": ["gradient"]},
        "evaluate": bert | {"texts": TEXT, "measures": "leave one out", "tests": "leave one out"},
        "token_identifiability": bert | {"texts": TEXTS, "maps": "naive", "distances": "cosine"},
        "invert": {"model": tiny.shared("llama"), "text": "w5 w6"},
        "captum_attribution": {"model": tiny.shared("llama"), "text": "w5 w6", "method": "occlusion"},
        "scores": {"tokens": ["a", "b"], "array": [1.0, 2.0], "name": "a score"},
    }.get(function, bert | {"text": TEXT})


@pytest.mark.parametrize(
    ("function", "argument"),
    [(name, argument) for name in FUNCTIONS for argument in inspect.signature(getattr(ik, name)).parameters],
)
def test_every_argument_is_checked(function: str, argument: str):
    arguments = given(function) if len(WRONG[function]) > 1 else {}
    with refused():
        result = getattr(ik, function)(**arguments | {argument: WRONG[function][argument]})
        list(result)  # a generator starts when it is read


@cache
def result(function: str) -> Any:
    return getattr(ik, function)(**given(function))


METHODS: dict[str, Callable[[], object]] = {
    "attention, sel key": lambda: result("effective_attention").sel(key=1.5),
    "attention, sel of no axis": lambda: result("effective_attention").sel(zebra=0),
    "attention, pearson": lambda: result("effective_attention").pearson("zebra"),
    "attention, to_frame": lambda: result("effective_attention").to_frame("zebra"),
    "attention, minus": lambda: result("effective_attention") - 5,
    "attention, intervals": lambda: result("effective_attention").intervals(layer=0, head=0, query=1.5),
    "identity map, text": lambda: result("token_identifiability").identity_map(5),
    "identity map, map": lambda: result("token_identifiability").identity_map(TEXT, map="zebra"),
    "identity map, distance": lambda: result("token_identifiability").identity_map(TEXT, distance="zebra"),
    "identity map, invert": lambda: result("token_identifiability").identity_map(TEXT, invert="yes"),
    "load, a pair": lambda: ik.load((tiny.build("bert"), 5)),
    "load, a tokenizer of a model in memory": lambda: ik.load(tiny.build("bert"), "zebra"),
    "invert, layer of hidden vectors": lambda: ik.invert(tiny.shared("llama"), torch.zeros(2, 24), layer=99),
}


@pytest.mark.parametrize("what", METHODS)
def test_every_argument_of_a_method_is_checked(what: str):
    with refused():
        METHODS[what]()


@pytest.mark.parametrize(
    ("function", "odd", "plain"),
    [
        ("effective_attention", {"tolerance": torch.tensor(0.5)}, {"tolerance": 0.5}),
        ("effective_attention", {"layers": None, "max_tokens": 10**30}, {}),
        ("attention_intervals", {"query": None}, {"query": slice(None)}),
        ("attention_intervals", {"groups": {"a": 1}}, {"groups": {"a": [1]}}),
        ("attention_intervals", {"seconds": math.inf, "epsilon": 0}, {}),
        ("token_attribution", {"seed": 99, "targets": None}, {}),  # nothing is drawn
        ("invert", {"noise": torch.tensor(0.5)}, {"noise": 0.5}),
    ],
)
def test_odd_values_that_are_taken_mean_what_the_plain_ones_do(
    function: str, odd: dict[str, Any], plain: dict[str, Any]
):
    call = getattr(ik, function)
    same(call(**given(function) | odd), call(**given(function) | plain))


# The command line

OPTIONS: dict[str, dict[str, str]] = {
    "explain": {"--probes": "1.5", "--seconds": "nan", "--device": "cuda:99", "--dtype": "float8_e4m3fn",
                "--tower": "north", "--model": "x" * 5000, "--pair": "  ", "--measure": "zebra"},
    "attention": {"--first": "0", "--intervals": "-1", "--seed": str(2**70), "--column": "third", "--split": "dev",
                  "--data": "nothing.txt", "--data-dir": ".", "--dtype": "nan"},
    "attribution": {"--probes": "many", "--norm": "l7", "--precision": "half", "--first": "0"},
    "tokens": {"--experiment": "magic", "--map": "", "--distance": "magic", "--folds": "11", "--seed": "-1",
               "--max-tokens": "2"},
    "tokens --experiment=inversion": {"--noise": "inf", "--prefix": "some"},
    "measures": {"--measure": "zebra", "--max-tokens": "0"},
    "evaluate": {"--measure": "zebra", "--test": "zebra", "--target": "zebra", "--replacement": "mask", "--beam": "0",
                 "--probes": "1.5", "--seed": "-1"},
    "reproduce": {"--first": "-1", "--seed": "-1", "--data": "nothing.tsv"},
    "finetune": {"--epochs": "0", "--batch-size": "0", "--learning-rate": "nan"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name, options in OPTIONS.items() for option in options]
)
def test_every_option_is_checked(name: str, option: str, tmp_path: Path):
    options: dict[str, Any] = {"--model": saved("llama" if "inversion" in name else "bert")}
    if name == "finetune":
        options |= {"--data-dir": tmp_path, "--out": tmp_path / "out"}
    elif name != "explain":
        options |= {"--data": texts_file(tmp_path), "--out": tmp_path / "out"}
    options[option] = OPTIONS[name][option]
    words = {"explain": ["w5 w6"], "finetune": ["mrpc"]}.get(name, [])
    with refused():
        command(*name.split(), *words, *(f"{key}={value}" for key, value in options.items()))


@pytest.mark.parametrize(
    "words",
    ["nonsense", "explain a b c", "attention", "--nonsense", "tokens --out", "reproduce fig99", "finetune x --out out"],
)
def test_words_that_are_no_command_are_refused(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with refused():
        command(*words.split())
    assert not list(tmp_path.iterdir())
