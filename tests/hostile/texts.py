"""Texts that are none, or that nobody expects, for an encoder and a causal model."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import identikit as ik
from tests.hostile.cases import Case, Refused, crossed, proved
from tests.hostile.made import command, environment, prove_bert, saved, stock_attention, strict_json, texts_file
from tests.models import tiny
from tests.reference.attribution import contributions

LIMIT = 64  # tokens that the tiny models read
MEGABYTE = 1 << 20

NO_TEXT: dict[str, Any] = {
    "empty": "",
    "a space": " ",
    "white space": " \t\r\n\u2003\u00a0",
    "a lone high surrogate": "w5 \ud800 w6",
    "a lone low surrogate": "w5 \udfff",
    "nothing": None,
    "bytes": b"w5 w6",
    "a number": 5,
    "a fraction": 1.5,
    "not a number": float("nan"),
    "an empty list": [],
    "an empty tuple": (),
    "a list with an empty text": ["w5", ""],
    "a list with nothing": ["w5", None],
    "a pair with a blank half": ("w5", "  "),
    "a pair with a number": ("w5", 6),
    "three halves": ("w5", "w6", "w7"),
    "a dictionary": {"text": "w5"},
    "a set": {"w5"},
    "a generator": (word for word in ("w5", "w6")),
    "a list of lists of lists": [[[5, 6]]],
    "texts and ids mixed": ["w5", 6],
    "an id beyond the vocabulary": [5, 60],
    "a huge id": [5, 2**40],
    "an id beyond 64 bits": [5, 2**80],
    "a negative id": [5, -1],
    "a fraction for an id": [5, 1.5],
    "not a number for an id": [5, float("nan")],
    "truth for an id": [5, True],
    "a word for an id": [5, "w6"],
    "an empty array of ids": np.array([], dtype=int),
    "ids as floats": np.array([5.0, 6.0]),
    "ids as truths": torch.tensor([True, False]),
    "ids in two dimensions": np.array([[5, 6]]),
    "ids without a dimension": torch.tensor(5),
    "ids as complex numbers": np.array([5j]),
    "ids as dates": np.array(["2020-01-01"], dtype="datetime64[D]"),
    "ids on no device": torch.empty(3, dtype=torch.long, device="meta"),
    "sparse ids": torch.tensor([5, 6]).to_sparse(),
    "one token too many": " ".join(["w5"] * (LIMIT - 1)),
    "a pair of too many tokens": (" ".join(["w5"] * 31), " ".join(["w6"] * 31)),
    "too many ids": [5] * (LIMIT + 1),
    "20 MB in one word": "w" * (20 * MEGABYTE),
    "20 MB of words": "w5 " * (20 * MEGABYTE // 3),
}

ODD_TEXTS: dict[str, Any] = {
    "unknown words": "zebra quagga",
    "emoji": "w5 👩‍👩‍👧‍👦 w6",
    "a zero-width space": "w5\u200bw6",
    "only a zero-width joiner": "\u200d",
    "right to left": "w5 \u202e שלום w6",
    "combining marks": "w5 e\u0301\u0302\u0303 w6",
    "an unassigned code point": "w5 \U000e0fff w6",
    "the last code point": "w5 \U0010ffff",
    "a NUL character": "w5 \0 w6",
    "control characters": "w5 \x01\x02\x1b[31m w6",
    "a byte order mark": "\ufeffw5 w6",
    "line separators": "w5\u2028w6\u2029w7\x85w8",
    "Windows lines": "w5\r\nw6\r\n",
    "special tokens spelled out": "w5 <s> </s> <pad> w6",
    "one word": "w5",
    "one word many times": "w5 " * 20,
    "exactly as long as allowed": " ".join(["w7"] * (LIMIT - 2)),
    "a word of 5,000 letters": "w" * 5000,
    "markup": "<script>alert('w5')</script> [bold] {w6} %s %n",
    "a path": "../../etc/passwd",
    "a pair of one word each": ("w5", "w6"),
    "a pair of the same text": ("w5 w6", "w5 w6"),
    "ids as a list": [5, 6, 7],
    "ids as a tuple": (5, 6, 7),
    "ids as a range": range(5, 9),
    "ids as an array": np.array([5, 6], dtype=np.uint8),
    "ids as big-endian numbers": np.array([5, 6], dtype=">i8"),
    "ids as a tensor": torch.tensor([5, 6, 7], dtype=torch.int16),
    "ids as a strided tensor": torch.arange(5, 15)[::2],
    "ids of numpy's own": [np.int64(5), np.int32(6)],
    "one id": [5],
    "only padding": [0, 0, 0],
    "only special tokens": [1, 2],
}

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "attention": ik.effective_attention,
    "attribution": ik.token_attribution,
    "intervals": lambda model, text: ik.attention_intervals(model, text, layer=0, head=0, query=0),
    "explain": lambda model, text: ik.explain(model, text if text is not None else ""),
}


def cases() -> Iterator[Case]:
    """Yield the cases with texts."""
    for (what, text), call, slow in crossed(NO_TEXT.items(), (*CALLS, "invert")):
        yield Case(f"{what} to {call}", "texts", _no_text(call, text), "refused", slow=slow)
    for (what, text), (model, read), slow in crossed(ODD_TEXTS.items(), READ.items()):
        yield Case(f"{what}, attention of {model}", "texts", read(text), "right", slow=slow)
    for what, text in ODD_TEXTS.items():
        if isinstance(text, str):
            run, slow = _odd_command(text), what not in ("emoji", "markup")
            yield Case(f"{what}, explained by the command line", "texts", run, "right", slow=slow)
    for what in ("one word", "only padding", "a pair of one word each"):
        yield Case(f"{what}, attribution", "texts", _odd_attribution(ODD_TEXTS[what]), "right")
    for what in ("20 MB in one word", "20 MB of words"):
        yield Case(
            f"{what} in a file takes little memory", "texts", _in_little_memory(NO_TEXT[what]), "refused", slow=True
        )
    yield Case("20 MB of words, cut", "texts", _cut_exactly, "either")


def _no_text(call: str, text: Any) -> Callable[[Path], None]:
    def run(_: Path) -> None:
        if call == "invert":
            ik.invert(tiny.shared("llama"), text)
        else:
            CALLS[call](tiny.shared("bert"), text)

    return run


def _ids(text: Any) -> list[int]:
    """Return what the tokenizer itself makes of a text."""
    if isinstance(text, str | tuple) and isinstance(text[0], str):
        return tiny.tokenizer()(*([text] if isinstance(text, str) else text))["input_ids"]
    return [int(index) for index in text]


def _odd_encoder(text: Any) -> Callable[[Path], None]:
    def run(_: Path) -> None:
        model = tiny.shared("bert")
        ids = _ids(text)
        prove_bert(ik.effective_attention(model, text), model.hf, ids, effective=len(ids) < 12)

    return run


def _odd_causal(text: Any) -> Callable[[Path], None]:
    def run(_: Path) -> None:
        model = tiny.shared("llama")
        found, expected = ik.effective_attention(model, text), stock_attention(model.hf, _ids(text))
        proved(torch.allclose(found.raw.double(), expected, atol=1e-5), "raw attention is not transformers' own")
        proved((found.raw - found.effective - found.null).abs().max() < 1e-6, "raw is not effective plus null")
        proved(found.residual.max() < 1e-4, f"the output changes by {found.residual.max():.1e}")

    return run


READ = {"an encoder": _odd_encoder, "a causal model": _odd_causal}


def _odd_command(text: str) -> Callable[[Path], None]:
    def run(_: Path) -> None:
        if "\0" in text:  # no process can be given one, but this call can
            return _odd_encoder(text)(_)
        told = strict_json(command("explain", text, "--model", saved("bert"), "--json").stdout)
        expected = tiny.tokenizer().convert_ids_to_tokens(_ids(text))
        proved(told["tokens"] == expected, f"the tokens {told['tokens']} instead of {expected}")
        in_words = command("explain", text, "--model", saved("bert")).stdout
        proved("Which attention is real?" in in_words, "the verdict lacks its first question")
        return None

    return run


def _odd_attribution(text: Any) -> Callable[[Path], None]:
    def run(_: Path) -> None:
        model, inputs = tiny.shared("bert"), []

        def leaf(_: Any, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            inputs.append(given[0].detach().requires_grad_())
            return (inputs[0],)

        handle = model.hf.embeddings.LayerNorm.register_forward_pre_hook(leaf)
        hidden = model.hf(input_ids=torch.tensor([_ids(text)]), output_hidden_states=True).hidden_states[1]
        handle.remove()
        rows = [
            [torch.autograd.grad(hidden[0, j, f], inputs[0], retain_graph=True)[0][0] for f in range(hidden.shape[2])]
            for j in range(hidden.shape[1])
        ]
        blocks = torch.stack([torch.stack(row) for row in rows]).permute(2, 0, 1, 3)  # input, output, f, g
        off = ik.token_attribution(model, text).contribution[0].double() - contributions(blocks, "frobenius")
        proved(off.abs().max() < 1e-4, f"contributions are off by {off.abs().max():.1e}")

    return run


def _in_little_memory(text: str) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        data = texts_file(place, ["w5 w6", text])
        out = place / "out"
        call = [sys.executable, "-m", "identikit", "attention", "--model", saved("bert"), "--data", data, "--out", out]
        watched = f"import resource, subprocess, sys\nsubprocess.run({[str(part) for part in call]!r})\n" + (
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)"
        )
        done = subprocess.run([sys.executable, "-c", watched], capture_output=True, text=True, env=environment())
        proved(int(done.stdout.split()[-1]) < 1500, f"it took {done.stdout.split()[-1]} MB")
        raise Refused(done.stderr.strip().removeprefix("identikit: "))

    return run


def _cut_exactly(_: Path) -> None:
    """Cutting a long text gives what tokenising the whole and cutting its tokens gives."""
    words = [f"w{40 + place % 19}" for place in range(200_000)]
    found = ik.effective_attention(tiny.shared("bert"), " ".join(words), truncate=True)
    proved(found.tokens == ("<s>", *words[: LIMIT - 2], "</s>"), f"the tokens are {found.tokens}")
