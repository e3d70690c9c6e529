"""Texts that are none, or that nobody expects, for an encoder and a causal model."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import identikit as ik
from tests.hostile.judging import refused, unclear
from tests.hostile.made import command, environment, prove_bert, saved, stock_attention, strict_json, texts_file
from tests.models import tiny
from tests.reference.attribution import contributions

LIMIT = 64  # tokens that the tiny models read
MEGABYTE = 1 << 20

NO_TEXT: dict[str, Any] = {
    "empty": "",
    "white space": " \t\r\n\u2003\u00a0",
    "a lone high surrogate": "w5 \ud800 w6",
    "nothing": None,
    "bytes": b"w5 w6",
    "a fraction": 1.5,
    "an empty list": [],
    "a list with an empty text": ["w5", ""],
    "a list with nothing": ["w5", None],
    "a pair with a blank half": ("w5", "  "),
    "a pair with a number": ("w5", 6),
    "three halves": ("w5", "w6", "w7"),
    "a dictionary": {"text": "w5"},
    "a set": {"w5"},
    "a generator": (word for word in ("w5", "w6")),
    "a list of lists of lists": [[[5, 6]]],
    "an id beyond the vocabulary": [5, 60],
    "an id beyond 64 bits": [5, 2**80],
    "a negative id": [5, -1],
    "a fraction for an id": [5, 1.5],
    "truth for an id": [5, True],
    "a word for an id": [5, "w6"],
    "an empty array of ids": np.array([], dtype=int),
    "ids as floats": np.array([5.0, 6.0]),
    "ids as truths": torch.tensor([True, False]),
    "ids in two dimensions": np.array([[5, 6]]),
    "ids without a dimension": torch.tensor(5),
    "ids as dates": np.array(["2020-01-01"], dtype="datetime64[D]"),
    "ids on no device": torch.empty(3, dtype=torch.long, device="meta"),
    "sparse ids": torch.tensor([5, 6]).to_sparse(),
    "a pair of too many tokens": (" ".join(["w5"] * 31), " ".join(["w6"] * 31)),
    "too many ids": [5] * (LIMIT + 1),
    "20 MB in one word": "w" * (20 * MEGABYTE),
}
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
    "alternative": lambda text: ik.alternative_attention(tiny.shared("bert"), text, layer=0, head=0, query=0),
    "attribution": lambda text: ik.token_attribution(tiny.shared("bert"), text),
    "explain": lambda text: ik.explain(tiny.shared("bert"), text),
    "identifiability": lambda text: ik.token_identifiability(tiny.shared("bert"), ["w5", text]),
    "intervals": lambda text: ik.attention_intervals(tiny.shared("bert"), text),
    "invert": lambda text: ik.invert(tiny.shared("llama"), text),
}


@pytest.mark.parametrize("what", NO_TEXT)
def test_what_is_no_text_is_refused(what: str):
    with refused():
        ik.effective_attention(tiny.shared("bert"), NO_TEXT[what])


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("text", [" ", "w5 \udfff", [5, 60], " ".join(["w5"] * (LIMIT - 1))], ids=ascii)
def test_every_other_function_reads_texts_in_the_same_way(call: str, text: Any):
    with refused():
        CALLS[call](text)


def ids_of(text: Any) -> list[int]:
    """Return what the tokenizer itself makes of a text."""
    if isinstance(text, str):
        return tiny.tokenizer()(text)["input_ids"]
    if isinstance(text, tuple):
        return tiny.tokenizer()(*text)["input_ids"]
    return [int(index) for index in text]


@pytest.mark.parametrize("what", ODD_TEXTS)
def test_an_odd_text_is_read_by_an_encoder(what: str):
    model = tiny.shared("bert")
    ids = ids_of(ODD_TEXTS[what])
    prove_bert(ik.effective_attention(model, ODD_TEXTS[what]), model.hf, ids, effective=len(ids) < 12)


@pytest.mark.parametrize("what", ["emoji", "a NUL character", "a pair of the same text", "one id", "only padding"])
def test_an_odd_text_is_read_by_a_causal_model(what: str):
    model = tiny.shared("llama")
    attention = ik.effective_attention(model, ODD_TEXTS[what])
    expected = stock_attention(model.hf, ids_of(ODD_TEXTS[what]))
    assert torch.allclose(attention.raw.double(), expected, atol=1e-5)
    assert (attention.raw - attention.effective - attention.null).abs().max() < 1e-6
    assert attention.residual.max() < 1e-4


@pytest.mark.parametrize(
    "text", [ODD_TEXTS["emoji"], ODD_TEXTS["control characters"], "<script>'w5'</script> [bold] {w6} %s"]
)
def test_an_odd_text_is_explained_by_the_command_line(text: str):
    told = strict_json(command("explain", text, "--model", saved("bert"), "--json").stdout)
    assert told["tokens"] == tiny.tokenizer().convert_ids_to_tokens(ids_of(text))
    assert "Which attention is real?" in command("explain", text, "--model", saved("bert")).stdout


@pytest.mark.parametrize("text", ["w5", ("w5", "w6"), [0, 0, 0]], ids=str)
def test_an_odd_text_is_attributed(text: Any):
    """Contributions after the first block are those of its Jacobian, entry by entry."""
    model = tiny.shared("bert")
    inputs = []

    def leaf(_: Any, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        inputs.append(given[0].detach().requires_grad_())
        return (inputs[0],)

    handle = model.hf.embeddings.LayerNorm.register_forward_pre_hook(leaf)
    hidden = model.hf(input_ids=torch.tensor([ids_of(text)]), output_hidden_states=True).hidden_states[1][0]
    handle.remove()
    rows = [torch.autograd.grad(entry, inputs[0], retain_graph=True)[0][0] for entry in hidden.flatten()]
    jacobian = torch.stack(rows).unflatten(0, hidden.shape).permute(2, 0, 1, 3)  # input, output, f, g
    found = ik.token_attribution(model, text).contribution[0].double()
    assert (found - contributions(jacobian, "frobenius")).abs().max() < 1e-4


def test_a_huge_text_in_a_file_takes_little_memory(tmp_path: Path):
    data = texts_file(tmp_path, ["w5 w6", NO_TEXT["20 MB in one word"]])
    words = ["attention", "--model", saved("bert"), "--data", data, "--out", tmp_path / "out"]
    call = [sys.executable, "-m", "identikit", *map(str, words)]
    peak = "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)"
    script = f"import resource, subprocess\nsubprocess.run({call!r})\n{peak}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment())
    assert int(done.stdout.split()[-1]) < 1500  # MB
    assert unclear(done.stderr.strip()) == ""


def test_a_huge_text_is_cut_as_its_tokens_are():
    words = [f"w{40 + place % 19}" for place in range(200_000)]
    attention = ik.effective_attention(tiny.shared("bert"), " ".join(words), truncate=True)
    assert attention.tokens == ("<s>", *words[: LIMIT - 2], "</s>")
