"""What the views show, as one safetensors file: named arrays, and JSON about them in the file's metadata.

A head's maps go as factors, n × d numbers, and the browser builds rows of n × n from them: queries and keys for raw
attention; for effective attention, an orthonormal basis of the values and each row's coefficients in it. Where a model
adds a bias to its scores, or a Result holds only numbers, the maps go as they are. `static/head.js` and
`static/rows.js` read what is written here.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from identikit.attention.interval_result import AttentionIntervals
from identikit.attention.result import EffectiveAttention
from identikit.attribution.result import TokenAttribution
from identikit.errors import InputError, Unavailable
from identikit.explanation.result import NEAR, Explanation
from identikit.explanation.words import verdict
from identikit.progress import Progress, silent
from identikit.results.files import plain
from identikit.results.result import Result
from identikit.shapes import Tensor
from identikit.texts.text import shown
from identikit.tokens.result import IdentityMap, TokenInversion
from identikit.version import __version__
from identikit.web.factors import bits, factors
from identikit.web.file import FORMAT, SHORT, File
from identikit.web.rows import add_bounded, add_intervals

SOURCES = 32  # sources that a file holds of each hidden vector of a long text; of a short one it holds all


def packed(result: Result, *, progress: Progress = silent) -> bytes:
    """Return everything that the views show of a result."""
    for kind, pack in _PACKERS.items():
        if isinstance(result, kind):
            file = File(about=_header(result))
            pack(file, result, progress)
            return file.bytes()
    raise InputError(
        f"{result.a_kind.capitalize()} has no page of its own: use plot(), or the page of explain(model, text)."
    )


def _header(result: Result) -> dict[str, Any]:
    tokens = [shown(token) for token in result.tokens]
    reading = getattr(result.source, "reading", None)
    recipe = None if reading is None else reading.model.recipe
    return {
        "format": FORMAT,
        "version": __version__,
        "kind": result.kind,
        "model": result.model_name,
        "source": _named(recipe and recipe.source),
        "text": None if reading is None else _plain_text(reading.text),
        "tokens": tokens,
        "special": result.about.get("special") or [False] * len(tokens),
        "words": result.about.get("words") or [],
        "provenance": plain(asdict(result.provenance)),
        "unavailable": {},
    }


def _named(source: str | None) -> str | None:
    """Return where a model was loaded from, as a page may say it: of a folder only its own name."""
    return f"path/to/{Path(source).name}" if source is not None and Path(source).is_absolute() else source


def _plain_text(text: Any) -> Any:
    """Return a text as JSON holds it: a string, two, or token ids; None for what is not text."""
    if isinstance(text, str):
        return text
    if isinstance(text, tuple | list) and all(isinstance(one, str | int) for one in text):
        return list(text)
    return None


# The parts of a file


def _explanation(file: File, result: Explanation, progress: Progress) -> None:
    words = verdict(result).to_dict()
    file.about["verdict"] = {"headline": words["sections"][0]["paragraphs"][0], **words}
    for name in ("attention", "identity", "attribution"):
        part = getattr(result, name)
        if isinstance(part, Unavailable):
            file.about["unavailable"][name] = part.reason
    if isinstance(result.attention, EffectiveAttention):
        file.about |= {name: _header(result.attention)[name] for name in ("source", "text")}
        _attention(file, result.attention, progress)
        add_bounded(file, result, progress)
    if isinstance(result.identity, IdentityMap):
        _identity(file, result.identity, progress)
    if isinstance(result.attribution, TokenAttribution):
        _attribution(file, result.attribution, progress)
        file.about["attribution"] |= {"near": result.about.get("near"), "near_within": NEAR}


def _attention(file: File, result: EffectiveAttention, progress: Progress) -> None:
    """Add the heads: their maps, what they are found by, and the masks."""
    n = len(result.tokens)
    if any(result.axis(name).tokens != result.tokens for name in ("query", "key")):
        raise InputError("A page shows whole maps: select layers and heads, but not queries or keys.")
    layers, heads = result.axis("layer"), result.axis("head")
    special = [place for place, is_special in enumerate(file.about["special"]) if is_special]
    live = result.captured() if result.is_live else None
    about: list[dict[str, Any]] = []
    masks: list[Tensor] = []
    for place, layer in enumerate(layers.places):
        progress("page, layers", place, len(layers))
        where: dict[str, Sequence[int]] = {"layer": [layer], "head": heads.places, "query": range(n), "key": range(n)}
        if live is None or live.layers[layer].call.bias is not None:
            arrays = {name: result.source.read(name, where)[0].float() for name in ("raw", "effective")}
            about.append({"form": "dense"})
        else:
            arrays, facts = factors(live.layers[layer], heads.places)
            about.append({"form": "factors", **facts})
        if live is not None and n <= SHORT:
            whole = replace(
                result, axes=(replace(layers, values=(layers.values[place],), places=(layer,)), *result.axes[1:])
            )
            arrays["simplex"] = whole.simplex.reshape(len(heads), n, n).float()
        if "visible" in result.source.dims:
            seen = result.source.read("visible", where)[0].cpu()
            about[-1]["mask"] = next((at for at, mask in enumerate(masks) if torch.equal(mask, seen)), len(masks))
            masks += [seen] * (about[-1]["mask"] == len(masks))
        file.arrays |= {f"layer{place}.{name}": array for name, array in arrays.items()}
    progress("page, layers", len(layers), len(layers))
    if masks:
        file.arrays["visible"] = torch.stack([bits(mask) for mask in masks])
    file.about["attention"] = {
        "layer_numbers": list(layers.values),
        "head_numbers": list(heads.values),
        "layers": about,
        "special_group": "special tokens" if special else "first token",
        "sinks": special or [0],
        "dtype": result.provenance.dtype,
        "causal": bool(result.about.get("causal")),
        "d_value": result.about.get("d_value"),
        "live": live is not None,
    }
    file.arrays |= {f"heads.{name}": array.float() for name, array in _readings(result, special or [0]).items()}


def _readings(result: EffectiveAttention, sinks: list[int]) -> dict[str, Tensor]:
    """Return what heads are found by, (layer, head); what a result by words or a difference lacks is left out."""
    axes = {axis.name: axis.places for axis in result.axes}
    raw = result.source.read("raw", {**axes, "key": sinks})
    found = {"sink_mass": raw.double().sum(-1).mean(-1)}
    found |= {name: result.source.read(name, axes) for name in ("pearson", "residual") if name in result.source.dims}
    if "null_dim" in result.source.dims:
        found["null_dim"] = result.source.read("null_dim", axes).double().mean(-1)
    return found


def _identity(file: File, result: Result, progress: Progress) -> None:
    """Add whether each token is still itself, layer by layer."""
    facts = ("map", "distance", "fitted_to", "repeated", "candidates", "vocabulary", "prefix")
    known = {name: result.about[name] for name in facts if name in result.about}
    file.about["identity"] = {"layers": list(result.axis("layer").values), **known}
    file.arrays |= {
        "identity.recovered": result.read("recovered").to(torch.uint8),
        "identity.margin": result.read("margin").float(),
        "identity.winner": result.read("winner").int(),
    }


def _attribution(file: File, result: TokenAttribution, progress: Progress) -> None:
    """Add the largest sources of every hidden vector: all of them in a short text."""
    shares = result.whole().mT
    kept = len(result.tokens) if len(result.tokens) <= SHORT else SOURCES
    top = shares.topk(kept, dim=-1)
    file.arrays |= {"attribution.input": top.indices.int(), "attribution.share": top.values.float()}
    if "stderr" in result.source.dims:
        file.arrays["attribution.stderr"] = result.read("stderr").mT.gather(-1, top.indices).float()
    facts = {name: result.about.get(name) for name in ("probes", "norm")}
    file.about["attribution"] = {"layers": list(result.layers), "kept": kept, "near": None, **facts}


def packed_simplex(attention: EffectiveAttention, layer: int, head: int) -> bytes:
    """Return the simplex map of one head, by its numbers."""
    file = File(about={"format": FORMAT, "kind": "simplex"})
    file.arrays["simplex"] = attention.sel(layer=layer, head=head).simplex.float()
    return file.bytes()


_PACKERS: dict[type[Result], Callable[[File, Any, Progress], None]] = {
    Explanation: _explanation,
    EffectiveAttention: _attention,
    AttentionIntervals: add_intervals,
    IdentityMap: _identity,
    TokenInversion: _identity,
    TokenAttribution: _attribution,
}
