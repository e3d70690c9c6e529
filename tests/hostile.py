"""Wrong arguments for every public function, tried as a user would: without the shape checks of the tests.

Run as a script. Prints each call that raised anything but an IdentikitError, or nothing.
"""

import sys

import numpy as np
import torch

import identikit as ik
from tests.models import tiny

WRONG = [
    -99,
    99,
    1.5,
    float("nan"),
    True,
    "zebra",
    "",
    b"x",
    None,
    [],
    [99],
    ["zebra"],
    [None],
    [[0]],
    {},
    {"a": 1},
    object(),
    slice("a", "b"),
    slice(9, 9),
    np.array([1.5]),
    np.array([[1]]),
    torch.tensor([True]),
    torch.tensor(0.5),
    lambda: 0,
]


def main() -> None:
    model = tiny.loaded("bert")
    text = "w5 w6 w7 w8 w9 w10 w11 w12 w13"
    attention = ik.effective_attention(model, text)
    origin = ik.token_attribution(model, text)
    texts = [f"w{i} w{i + 1} w{i + 2}" for i in range(4, 34)]
    fit = ik.token_identifiability(model, texts, maps="naive", distances="cosine")
    causal = tiny.loaded("llama")
    hidden = torch.zeros(2, causal.d_model)
    inverted = ik.invert(causal, "w5 w6")
    row = {"layer": 0, "head": 0, "query": 3}
    calls = {
        "load": lambda x: ik.load(x),
        "load pair": lambda x: ik.load((model.hf, x)) if x is not None else ik.load((x, x)),
        "load dtype": lambda x: ik.load(dtype=x if x is not None else "x"),
        "load device": lambda x: ik.load(device=x if x is not None else "x"),
        "model": lambda x: ik.effective_attention(x, text),
        "text": lambda x: ik.effective_attention(model, x),
        "ids": lambda x: ik.effective_attention(model, [5, x]),
        "layers": lambda x: ik.effective_attention(model, text, layers=x),
        "heads": lambda x: ik.effective_attention(model, text, heads=x),
        "tolerance": lambda x: ik.effective_attention(model, text, tolerance=x),
        "bias": lambda x: ik.effective_attention(model, text, bias=x),
        "dtype": lambda x: ik.effective_attention(model, text, dtype=x),
        "max_tokens": lambda x: ik.effective_attention(model, text, max_tokens=x),
        "pearson": lambda x: attention.pearson(x),
        **{
            f"sel {name}": lambda x, name=name: attention.sel(**{name: x}) for name in ("layer", "head", "query", "key")
        },
        **{
            f"intervals {name}": lambda x, name=name: ik.attention_intervals(model, text, **row | {name: x})
            for name in ("layer", "head", "query", "key", "seconds", "method")
        },
        "att.intervals": lambda x: attention.intervals(layer=0, head=0, query=x),
        "to_frame": lambda x: attention.to_frame(x),
        **{
            f"alternative {name}": lambda x, name=name: ik.alternative_attention(model, text, **row | {name: x})
            for name in ("layer", "head", "query", "toward", "direction")
        },
        **{
            f"attribution {name}": lambda x, name=name: ik.token_attribution(model, text, **{name: x})
            for name in ("probes", "norm", "layers", "targets", "source", "precision", "seed", "max_tokens")
        },
        "attribution text": lambda x: ik.token_attribution(model, x),
        **{
            f"attribution sel {name}": lambda x, name=name: origin.sel(**{name: x})
            for name in ("layer", "input", "output")
        },
        **{
            f"identifiability {name}": lambda x, name=name: ik.token_identifiability(
                model, texts, **{"maps": "naive", "distances": "cosine"} | {name: x}
            )
            for name in ("maps", "distances", "layers", "experiment", "settings")
        },
        "identifiability texts": lambda x: ik.token_identifiability(model, x, maps="naive", distances="cosine"),
        "identity text": lambda x: fit.identity_map(x),
        "identity map": lambda x: fit.identity_map(text, map=x),
        "identity invert": lambda x: fit.identity_map(text, invert=x),
        "invert text": lambda x: ik.invert(causal, x, layer=0),
        "invert model": lambda x: ik.invert(x, text),
        "invert hidden": lambda x: ik.invert(causal, hidden, layer=x),
        "invert sel": lambda x: inverted.sel(position=x),
        **{
            f"invert {name}": lambda x, name=name: ik.invert(causal, "w5 w6", **{name: x})
            for name in ("layer", "layers", "positions", "prefix", "noise", "distance", "seed", "max_tokens")
        },
        "rates sel": lambda x: fit.sel(layer=x),
        "explain text": lambda x: ik.explain(model, x),
        "explain probes": lambda x: ik.explain(model, text, probes=x),
        "explain seconds": lambda x: ik.explain(model, text, seconds="many" if x is None else x),
        "explain maps": lambda x: ik.explain(model, text, maps=x),
        "save": lambda x: attention.save("" if isinstance(x, str) else x),
        "open": lambda x: ik.open_result(x),
        "read_texts": lambda x: list(ik.read_texts(x)),
        "subtract": lambda x: attention - x,
    }
    failed = 0
    for name, call in calls.items():
        for wrong in WRONG:
            try:
                call(wrong)
            except ik.IdentikitError as refusal:
                if not str(refusal).strip():
                    failed += 1
                    print(f"{name}({wrong!r}): an empty message")
            except Exception as error:
                failed += 1
                print(
                    f"{name}({wrong!r}): {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[
                        :160
                    ]
                )
    sys.exit(min(failed, 100))


if __name__ == "__main__":
    main()
