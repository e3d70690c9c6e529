"""Models whose numbers are at the edge of what floating point holds: each is read right, or refused by its layer."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import identikit as ik
from tests.hostile.cases import Case, proved
from tests.hostile.made import bert_values, stock_attention, strict_json
from tests.numerics.cases import FLOATS, HOSTILE
from tests.numerics.cases import Case as Edge

WITHIN = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}


def cases() -> Iterator[Case]:
    """Yield the cases with numbers at the edge, in every dtype that each is meant for."""
    for place, edge in enumerate(HOSTILE):  # an encoder and a causal model by turns: `make test` tries one of the two
        for number, dtype in enumerate(edge.dtypes):
            shown = f"{edge.name}, {str(dtype).removeprefix('torch.')}"
            expect, names = ("refused", (edge.refused,)) if edge.refused else ("either", ())
            run, slow = _attention(edge, dtype), (place // 2 + place) % 2 or number != place // 2 % len(edge.dtypes)
            yield Case(f"{shown}: attention", "numerics", run, expect, names, slow=bool(slow))
            if dtype == torch.float32:
                run, slow = _attribution(edge, dtype), place % 7 != 0
                yield Case(f"{shown}: attribution", "numerics", run, expect, names, slow=bool(slow))
                yield Case(f"{shown}: explain", "numerics", _explained(edge, dtype), expect, names, slow=True)


def _attention(edge: Edge, dtype: torch.dtype) -> Callable[[Path], None]:
    """Raw attention is transformers' own, and effective attention has the same output, values taken from hooks."""

    def run(_: Path) -> None:
        model, text = edge(dtype)
        found, within = ik.effective_attention(model, text), WITHIN[dtype]
        raw = found.raw.double()
        proved(torch.isfinite(raw).all() and torch.isfinite(found.effective).all(), "attention that is not finite")
        proved((raw >= 0).all() and (raw.sum(-1) <= 1 + within).all(), "raw attention is no distribution")
        if edge.family not in ("bert", "llama") or dtype not in FLOATS:
            return  # in half precision, transformers' own scores are rounded: they are no measure
        ids = [int(index) for index in model.encode(text)[0].ids]
        off = (raw - stock_attention(model.hf, ids)).abs().max()
        soft = 1e-5 if edge.family == "llama" else 0.0  # its own softmax is in float32
        proved(off <= max(within, soft), f"raw attention is off by {off:.1e}")
        if edge.family == "bert":
            _same_output(model.hf, ids, found, within)

    return run


def _same_output(model: Any, ids: list[int], found: Any, within: float) -> None:
    """Prove that raw and effective attention of a BERT give one output, layer by layer and head by head."""
    values, heads = bert_values(model, ids), found.raw.shape[1]
    for layer, block in enumerate(model.base_model.encoder.layer):
        projection = block.attention.output.dense.weight.detach().double().T.unflatten(0, (heads, -1))
        passed = values[layer] @ projection  # head, key, d
        moved = ((found.raw[layer].double() - found.effective[layer].double()) @ passed).abs().amax((-1, -2))
        size = passed.abs().amax((-1, -2))
        off = (moved / size.clamp(min=torch.finfo(torch.float64).tiny)).max()
        proved(off <= within, f"effective attention of layer {layer} moves the output by {off:.1e} of its values")


def _attribution(edge: Edge, dtype: torch.dtype) -> Callable[[Path], None]:
    """Contributions are shares: at least 0, and they sum to 1 for every hidden vector that anything moves."""

    def run(_: Path) -> None:
        model, text = edge(dtype)
        shares = ik.token_attribution(model, text).contribution.double()
        proved(torch.isfinite(shares).all() and (shares >= 0).all(), "contributions that are no shares")
        sums = shares.sum(1)  # over inputs
        fine = ((sums - 1).abs() < 1e-4) | (sums == 0)
        proved(fine.all(), f"contributions sum to {sums.min():.3g} to {sums.max():.3g}")

    return run


def _explained(edge: Edge, dtype: torch.dtype) -> Callable[[Path], None]:
    """The verdict is strict JSON, and never promises the same output where the output of a row moved."""

    def run(_: Path) -> None:
        model, text = edge(dtype)
        told = ik.explain(model, text, probes=4)
        strict_json(json.dumps(told.to_dict()))
        words, moved = " ".join(str(told).split()), ik.effective_attention(model, text).row_residual.max()
        careful = "miss it by up to" in words
        proved(careful or moved < 1e-4, f"it does not say that the output moves by {moved:.1e}")
        proved("without changing anything" not in words or not careful, "it says both that it changes and that not")

    return run
