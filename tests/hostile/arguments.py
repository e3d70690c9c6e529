"""Wrong values for every argument of the public API, and for every option of the command line.

A value that an argument does take is compared with the plain way to say the same.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

import identikit as ik
from identikit.texts.data import sample_text
from tests.hostile.cases import Case, crossed, proved
from tests.hostile.made import TEXT, command, same, saved, texts_file
from tests.models import tiny

TEXTS = [f"w{i} w{i + 1} w{i + 2}" for i in range(4, 34)]
ROW = {"layer": 0, "head": 0, "query": 3}
DEFAULT = object()  # the plain way is to leave the argument out

WRONG: dict[str, Any] = {
    "-99": -99, "99": 99, "10**30": 10**30, "1.5": 1.5, "1.0": 1.0, "nan": float("nan"), "inf": float("inf"),
    "-1.0": -1.0, "True": True, "'zebra'": "zebra", "''": "", "bytes": b"x", "None": None, "[]": [], "[99]": [99],
    "[1.5]": [1.5], "[True]": [True], "['zebra']": ["zebra"], "[None]": [None], "[[0]]": [[0]], "{}": {},
    "{'a': 1}": {"a": 1}, "an object": object(), "slice('a', 'b')": slice("a", "b"), "slice(9, 9)": slice(9, 9),
    "array([1.5])": np.array([1.5]), "array([[1]])": np.array([[1]]), "array(nan)": np.array(float("nan")),
    "tensor([True])": torch.tensor([True]), "tensor(0.5)": torch.tensor(0.5), "a function": lambda: 0,
    "a complex number": 1j, "a class": int,
}  # fmt: skip


class Argument(NamedTuple):
    """One argument: the call that takes it, and which of the wrong values it does take, each with its plain way."""

    call: Callable[[Any], Any]
    takes: Mapping[str, Any] = MappingProxyType({})


@cache
def fitted() -> Any:
    return ik.token_identifiability(tiny.shared("bert"), TEXTS, maps="naive", distances="cosine")


@cache
def attention() -> Any:
    return ik.effective_attention(tiny.shared("bert"), TEXT)


@cache
def origin() -> Any:
    return ik.token_attribution(tiny.shared("bert"), TEXT)


@cache
def inverted() -> Any:
    return ik.invert(tiny.shared("llama"), "w5 w6")


@cache
def hidden() -> torch.Tensor:
    return torch.zeros(2, tiny.shared("llama").d_model)


def _named(function: Callable[..., Any], name: str, **others: Any) -> Callable[[Any], Any]:
    """Return a call with one argument by name; `DEFAULT` leaves it out."""
    return lambda value: function(**({**others} if value is DEFAULT else {**others, name: value}))


def _positional(function: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda value: function() if value is DEFAULT else function(value)


NONE = {"None": DEFAULT}
UNKNOWN = {"'zebra'": "w3"}  # a word that the tokenizer does not know
SEVERAL = UNKNOWN | {"['zebra']": ["w3"], "[[0]]": [(0,)]}  # a list of texts
TIME = dict.fromkeys(("99", "10**30", "inf", "1.5", "1.0", "tensor(0.5)"), 99)  # more seconds than these texts take
SEED = {"99": DEFAULT, "10**30": DEFAULT}  # nothing is drawn


def _reading() -> Iterator[tuple[str, Argument]]:
    """Yield the arguments of loading and of attention."""
    bert = tiny.shared("bert")

    def attend(**given: Any) -> Any:
        return ik.effective_attention(bert, **{"text": TEXT} | given)

    def bound(**given: Any) -> Any:
        return ik.attention_intervals(bert, TEXT, **{**ROW, **given})

    def change(**given: Any) -> Any:
        return ik.alternative_attention(bert, TEXT, **{**ROW, **given})

    def load(**given: Any) -> Any:
        return ik.effective_attention(ik.load(saved("bert"), **given), TEXT)

    yield "load", Argument(lambda x: ik.load(x) if x is not None else ik.load(""))
    yield "load, the tokenizer", Argument(lambda x: ik.effective_attention(ik.load(bert.hf, x), TEXT))
    yield "load, a pair", Argument(lambda x: ik.effective_attention(ik.load((bert.hf, x)), TEXT))
    for name in ("dtype", "device", "tower", "revision", "trust_remote_code"):
        takes = {"revision": NONE | {"'zebra'": DEFAULT}, "trust_remote_code": {"True": DEFAULT}}
        yield f"load, {name}", Argument(_named(load, name), takes.get(name, NONE))
    yield "attention, the model", Argument(lambda x: ik.effective_attention(x, TEXT))
    yield "attention, the text", Argument(_named(attend, "text"), SEVERAL)
    yield "attention, one id of the text", Argument(lambda x: attend(text=[5, x]))
    for name in ("layers", "heads"):
        yield f"attention, {name}", Argument(_named(attend, name), NONE)
    yield "attention, tolerance", Argument(_named(attend, "tolerance"), {"tensor(0.5)": 0.5})
    for name in ("bias", "mass", "truncate"):
        yield (
            f"attention, {name}",
            Argument(_named(attend, name), {"True": DEFAULT} if name == "bias" else {"True": True}),
        )
    yield "attention, dtype", Argument(_named(attend, "dtype"))
    yield "attention, max_tokens", Argument(_named(attend, "max_tokens"), NONE | {"99": DEFAULT, "10**30": DEFAULT})
    yield "attention, pearson", Argument(_positional(lambda *x: attention().pearson(*x)), NONE)
    yield "attention, to_frame", Argument(lambda x: attention().to_frame(x))
    yield "attention, minus", Argument(lambda x: attention() - x)
    for name in ("layer", "head", "query", "key"):
        yield f"attention, sel {name}", Argument(_named(lambda **given: attention().sel(**given), name), NONE)
        takes = NONE if name == "key" else {"None": slice(None)}
        yield f"intervals, {name}", Argument(_named(bound, name), takes)
    for name in ("method", "epsilon", "seconds", "groups", "truncate"):
        takes = {"epsilon": {"1.0": 1.0, "tensor(0.5)": 0.5}, "seconds": NONE | TIME,
                 "groups": NONE | {"{'a': 1}": {"a": [1]}}, "truncate": {"True": True}}  # fmt: skip
        yield f"intervals, {name}", Argument(_named(bound, name), takes.get(name, {}))
    yield (
        "intervals of a result",
        Argument(lambda x: attention().intervals(layer=0, head=0, query=x), {"None": slice(None)}),
    )
    for name in ("layer", "head", "query", "toward", "end", "direction"):
        yield f"alternative, {name}", Argument(_named(change, name), NONE if name in ("toward", "direction") else {})


def _answers() -> Iterator[tuple[str, Argument]]:
    """Yield the arguments of attribution, identifiability, inversion and the verdict."""
    bert, llama = tiny.shared("bert"), tiny.shared("llama")

    def attribute(**given: Any) -> Any:
        return ik.token_attribution(bert, **{"text": TEXT} | given)

    def identify(**given: Any) -> Any:
        return ik.token_identifiability(bert, **{"texts": TEXTS, "maps": "naive", "distances": "cosine"} | given)

    def invert(**given: Any) -> Any:
        return ik.invert(llama, **{"text": "w5 w6"} | given)

    def explain(**given: Any) -> Any:
        return ik.explain(bert, **{"text": "w5 w6 w7"} | given)

    room = NONE | {"99": DEFAULT, "10**30": DEFAULT}
    for name in ("probes", "norm", "layers", "targets", "source", "precision", "seed", "max_tokens", "truncate"):
        takes = {"layers": NONE, "targets": NONE, "seed": SEED, "max_tokens": room,
                 "truncate": {"True": True}}  # fmt: skip
        yield f"attribution, {name}", Argument(_named(attribute, name), takes.get(name, {}))
    yield "attribution, the text", Argument(_named(attribute, "text"), SEVERAL)
    for name in ("layer", "input", "output"):
        yield f"attribution, sel {name}", Argument(_named(lambda **given: origin().sel(**given), name), NONE)
    for name in ("maps", "distances", "layers", "experiment", "settings", "max_tokens", "truncate", "texts"):
        takes = {"layers": NONE, "settings": NONE, "max_tokens": room, "truncate": {"True": True}}
        yield f"identifiability, {name}", Argument(_named(identify, name), takes.get(name, {}))
    yield "identity, the text", Argument(lambda x: fitted().identity_map(x), UNKNOWN)
    for name in ("map", "invert"):
        takes = {"map": NONE, "invert": {"True": True}}
        yield (
            f"identity, {name}",
            Argument(_named(lambda **given: fitted().identity_map(TEXT, **given), name), takes[name]),
        )
    yield "rates, sel layer", Argument(_named(lambda **given: fitted().sel(**given), "layer"), NONE)
    yield "inversion, the model", Argument(lambda x: ik.invert(x, TEXT))
    yield "inversion, the text", Argument(_named(invert, "text"), SEVERAL)
    yield "inversion, the layer of hidden vectors", Argument(lambda x: ik.invert(llama, hidden(), layer=x))
    yield "inversion, sel position", Argument(_named(lambda **given: inverted().sel(**given), "position"), NONE)
    for name in ("layer", "layers", "positions", "prefix", "noise", "distance", "seed", "max_tokens", "truncate"):
        takes = {"layer": NONE, "layers": NONE, "positions": NONE, "prefix": NONE, "seed": SEED,
                 "noise": {"99": 99, "10**30": 1e30, "1.5": 1.5, "1.0": 1.0, "tensor(0.5)": 0.5}, "max_tokens": room,
                 "truncate": {"True": True}}  # fmt: skip
        yield f"inversion, {name}", Argument(_named(invert, name), takes.get(name, {}))
    yield "explain, the text", Argument(_named(explain, "text"), UNKNOWN | {"None": sample_text()})
    yield "explain, probes", Argument(_named(explain, "probes"), NONE)
    yield "explain, seconds", Argument(_named(explain, "seconds"), TIME | {"None": 99})
    yield "explain, maps", Argument(_named(explain, "maps"), NONE)
    yield "save", Argument(lambda x: attention().save("" if isinstance(x, str) else x))
    yield "open_result", Argument(ik.open_result)
    yield "read_texts", Argument(lambda x: list(ik.read_texts(x)))


# The command line

OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "explain": {
        "--probes": ("0", "-1", "1.5", "many", "nan", "", "99999999999999999999"),
        "--seconds": ("0", "-1", "nan", "-inf", "many", ""),
        "--device": ("abacus", "", "cuda:99", "cpu:-1"),
        "--dtype": ("int8", "float9", "", "bool", "complex64", "float8_e4m3fn"),
        "--tower": ("text", "vision", "north", ""),
        "--model": ("", " ", "no/such/model/at/all", "x" * 5000, "/dev/null", "nobody/nothing"),
        "--pair": ("", "  "),
    },
    "attention": {
        "--sample": ("0", "-1", "1.5", "nan", "many"),
        "--intervals": ("-1", "1.5", "many", "nan", ""),
        "--seed": ("-1", "1.5", "nan", str(2**70)),
        "--column": ("third", ""),
        "--split": ("dev", ""),
        "--data": ("", "nothing.txt", "mrpc", "datasets:"),
        "--data-dir": (".",),
        "--dtype": ("int8", "nan"),
    },
    "attribution": {
        "--probes": ("0", "-1", "nan", "many"),
        "--norm": ("l7", ""),
        "--precision": ("half", ""),
        "--sample": ("0",),
    },
    "tokens": {
        "--experiment": ("magic", ""),
        "--map": ("magic", ""),
        "--distance": ("magic",),
        "--folds": ("0", "11", "1.5"),
        "--seed": ("-1", str(2**70)),
        "--noise": ("nan", "inf", "-1", "loud"),
        "--prefix": ("some",),
        "--max-tokens": ("0", "-1", "2"),
    },
    "reproduce": {"names": ("fig99", ""), "--sample": ("0", "-1"), "--seed": ("-1",), "--data": ("nothing.tsv",)},
    "finetune": {
        "--epochs": ("0",),
        "--batch-size": ("0",),
        "--learning-rate": ("nan", "0", "-1", "inf"),
        "names": ("x",),
    },
}


def cases() -> Iterator[Case]:
    """Yield the cases with arguments."""
    for (what, argument), (shown, value), slow in crossed((*_reading(), *_answers()), WRONG.items()):
        expect = "either" if shown in argument.takes else "refused"
        yield Case(f"{what}={shown}", "arguments", _api(argument, shown, value), expect, slow=slow)
    for name, options in OPTIONS.items():
        for number, (option, values) in enumerate(options.items()):
            for place, value in enumerate(values):
                shown = f"identikit {name} {option} {value!r:.40}"
                run, slow = _command(name, option, value), place != number % len(values)
                yield Case(shown, "arguments", run, "refused", slow=slow)
    for words in (["nonsense"], ["explain", "a", "b"], ["attention"], ["--nonsense"], ["tokens", "--out"]):
        yield Case(f"identikit {' '.join(words)}", "arguments", _command_words(words), "refused")


def _api(argument: Argument, shown: str, value: Any) -> Callable[[Path], None]:
    def run(_: Path) -> None:
        found = argument.call(value)
        proved(shown in argument.takes, f"accepted, and returned {found!r:.80}")
        expected = argument.call(argument.takes[shown])
        if isinstance(found, torch.Tensor):
            proved(torch.equal(found, expected), "not what the plain way gives")
            return
        pairs = zip(found, expected, strict=True) if isinstance(found, list) else [(found, expected)]
        for one, other in pairs:
            same(one, other, tokens=value != "zebra" and value != ["zebra"])

    return run


def _command(name: str, option: str, value: str) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        given: dict[str, Any] = {"--model": saved("bert")}
        words: list[Any] = ["w5 w6"] if name == "explain" else []
        if name in ("attention", "attribution", "tokens", "reproduce"):
            given |= {"--data": texts_file(place), "--out": place / "out"}
        if name == "finetune":
            given, words = {"--model": saved("bert"), "--data-dir": place, "--out": place / "out"}, ["mrpc"]
        if option in ("--noise", "--prefix"):
            given |= {"--experiment": "inversion", "--model": saved("llama")}
        if option == "names":
            words = [value]
        else:
            given[option] = value
        command(name, *words, *(f"{key}={one}" for key, one in given.items()))

    return run


def _command_words(words: list[str]) -> Callable[[Path], None]:
    def run(_: Path) -> None:
        command(*words)

    return run
