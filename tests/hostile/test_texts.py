"""Texts that nobody expects, for an encoder and a causal model.

What is no text is in `tests/texts/test_text.py`; here, that every function refuses it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import identikit as ik
from tests.hostile.judging import refused, refused_or_right
from tests.hostile.made import command, saved, stock_attention, strict_json
from tests.models import tiny

LIMIT = 64  # tokens that the tiny models read

ODD_TEXTS: dict[str, Any] = {
    "unknown words": "zebra quagga",
    "emoji": "w5 👩‍👩‍👧‍👦 w6",
    "a zero-width space": "w5\u200bw6",
    "only a zero-width joiner": "\u200d",
    "right to left": "w5 \u202e שלום w6",
    "combining marks": "w5 e\u0301\u0302\u0303 w6",
    "the last code point": "w5 \U0010ffff",
    "a NUL character": "w5 \0 w6",
    "control characters": "w5 \x01\x02\x1b[31m w6",
    "a byte order mark": "\ufeffw5 w6",
    "line separators": "w5\u2028w6\u2029w7\x85w8",
    "special tokens spelled out": "w5 <s> </s> <pad> w6",
    "exactly as long as allowed": " ".join(["w7"] * (LIMIT - 2)),
    "a word of 5,000 letters": "w" * 5000,
    "a pair of the same text": ("w5 w6", "w5 w6"),
    "ids as a range": range(5, 9),
    "ids as big-endian numbers": np.array([5, 6], dtype=">i8"),
    "ids as a strided tensor": torch.arange(5, 15, dtype=torch.int16)[::2],
    "ids of numpy's own": [np.int64(5), np.int32(6)],
    "one id": [5],
    "only padding": [0, 0, 0],
}
CALLS: dict[str, Callable[[Any], Any]] = {
    "attention": lambda text: ik.effective_attention(tiny.shared("bert"), text),
    "alternative": lambda text: ik.alternative_attention(tiny.shared("bert"), text, layer=0, head=0, query=0),
    "attribution": lambda text: ik.token_attribution(tiny.shared("bert"), text),
    "explain": lambda text: ik.explain(tiny.shared("bert"), text),
    "identifiability": lambda text: ik.token_identifiability(tiny.shared("bert"), ["w5", text]),
    "intervals": lambda text: ik.attention_intervals(tiny.shared("bert"), text),
    "invert": lambda text: ik.invert(tiny.shared("llama"), text),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("text", [" ", [5, 60], " ".join(["w5"] * (LIMIT - 1))], ids=["blank", "id", "long"])
def test_every_function_reads_texts_in_the_same_way(call: str, text: Any):
    with refused():
        CALLS[call](text)


def ids_of(text: Any) -> list[int]:
    """Return what the tokenizer itself makes of a text."""
    if isinstance(text, str):
        return tiny.tokenizer()(text)["input_ids"]
    if isinstance(text, tuple):
        return tiny.tokenizer()(*text)["input_ids"]
    return [int(index) for index in text]


def check_read(model: ik.Model, text: Any) -> None:
    """A text is read as the tokenizer reads it, with transformers' own weights."""
    attention = ik.effective_attention(model, text)
    expected = stock_attention(model.hf, ids_of(text))
    assert attention.raw.shape == expected.shape
    assert torch.allclose(attention.raw.double(), expected, atol=1e-5)
    assert torch.allclose(attention.raw, attention.effective + attention.null, atol=1e-6)


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("what", ODD_TEXTS)
def test_an_odd_text_is_read(what: str, name: str):
    check_read(tiny.shared(name), ODD_TEXTS[what])


STRANGE = st.text(st.characters(), max_size=20)
WORDS = st.sampled_from([f"w{i}" for i in range(4, 60) if i // 10 != 3])  # w3 is what unknown words become


@settings(max_examples=30)
@given(text=st.one_of(STRANGE, st.tuples(STRANGE, STRANGE), st.lists(WORDS, max_size=70).map(" ".join)))
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_any_text_is_read_as_its_tokenizer_reads_it(name: str, text: Any):
    with refused_or_right():
        check_read(tiny.shared(name), text)


ANYTHING = st.one_of(st.integers(0, 59), st.integers(), st.floats(), st.none(), st.booleans())


@settings(max_examples=30)
@given(ids=st.one_of(st.lists(st.integers(0, 59), min_size=1, max_size=70), st.lists(ANYTHING, max_size=8)))
def test_ids_are_read_as_they_are_or_refused(ids: list[Any]):
    readable = 0 < len(ids) <= LIMIT and all(type(index) is int and 0 <= index < 60 for index in ids)
    if readable:
        check_read(tiny.shared("bert"), ids)
    else:
        with refused():
            ik.effective_attention(tiny.shared("bert"), ids)


@pytest.mark.parametrize(
    "text", [ODD_TEXTS["emoji"], ODD_TEXTS["control characters"], "<script>'w5'</script> [bold] {w6} %s"]
)
def test_an_odd_text_is_explained_by_the_command_line(text: str):
    told = strict_json(command("explain", text, "--model", saved("bert"), "--json").stdout)
    assert told["tokens"] == tiny.tokenizer().convert_ids_to_tokens(ids_of(text))
    assert "Which attention is determined?" in command("explain", text, "--model", saved("bert")).stdout


@pytest.mark.parametrize("text", ["w5", ("w5", "w6"), [0, 0, 0]], ids=str)
def test_an_odd_text_is_attributed(text: Any):
    contribution = ik.token_attribution(tiny.shared("bert"), text).contribution
    assert (contribution >= 0).all()
    torch.testing.assert_close(contribution.sum(1), torch.ones(contribution.shape[0], len(ids_of(text))))
