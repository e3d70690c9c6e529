"""What the views show, as one safetensors file: named arrays, and JSON about them in the file's metadata.

A head's maps go as factors, n × d numbers, and the browser builds rows of n × n from them: queries and keys for raw
attention; for effective attention, an orthonormal basis of the values and each row's coefficients in it. Where a model
adds a bias to its scores, the weights were given, or a Result holds only numbers, the maps go as they are.
`static/head.js` and `static/rows.js` read what is written here.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from identikit.attention.interval_result import AttentionIntervals
from identikit.attention.measure_result import AttentionMeasure, HeadScores
from identikit.attention.result import EffectiveAttention
from identikit.attribution.result import TokenAttribution
from identikit.errors import InputError, Unavailable, for_page
from identikit.explanation.result import NEAR, Explanation
from identikit.explanation.words import verdict
from identikit.progress import Progress, silent
from identikit.results.measure import Measure
from identikit.results.result import Result
from identikit.shapes import Tensor
from identikit.texts.text import SOURCE
from identikit.tokens.result import IdentityMap, TokenInversion
from identikit.web.file import FORMAT, SHORT, File, bits, factors
from identikit.web.header import captured_run, header, inputs
from identikit.web.images import add_images
from identikit.web.rows import add_bounded, add_intervals

MEASURES = 24 << 20  # bytes that the measures of attention in a file take at most
SOURCES = 32  # sources that a file holds of each hidden vector of a long text; of a short one it holds all
_AXES = ("sink_mass", "certain_mass")  # the readings across and up that the heads are shown by at first


def packed(result: Result, *, opening: Mapping[str, int] | None = None, progress: Progress = silent) -> bytes:
    """Return everything that the views show of a result; they open with the row `opening`, or one of their own."""
    if SOURCE in result.about and not isinstance(result, EffectiveAttention | AttentionIntervals):
        raise InputError(
            f"Of a source and a target, a page shows attention and its intervals, and this is {result.a_kind}. Use "
            "plot() instead."
        )
    for kind, add in _PARTS.items():
        if isinstance(result, kind):
            file = File(about=header(result))
            add(file, result, progress)
            if "attention" in file.about:
                add_images(file, result)
            if opening:
                file.about["first"] = {**file.about.get("first", {}), **opening}
            return file.bytes()
    raise InputError(
        f"{result.a_kind.capitalize()} has no page of its own: use plot(), or the page of explain(model, text)."
    )


def packed_simplex(attention: EffectiveAttention, layer: int, head: int) -> bytes:
    """Return the simplex map of one head, by its numbers."""
    file = File(about={"format": FORMAT, "kind": "simplex"})
    file.arrays["simplex"] = attention.sel(layer=layer, head=head).simplex.float()
    return file.bytes()


# The parts of a file


def _add_explanation(file: File, result: Explanation, progress: Progress) -> None:
    file.about["verdict"] = verdict(result).spoken(for_page).to_dict()
    for name in ("attention", "identity", "attribution"):
        answer = getattr(result, name)
        if isinstance(answer, Unavailable):
            file.about["unavailable"][name] = for_page(answer.reason)
    if isinstance(result.attention, EffectiveAttention):
        file.about |= inputs(result.attention)
        _add_attention(file, result.attention, progress)
        add_bounded(file, result, progress)
        _add_measures(file, result)
    if isinstance(result.identity, IdentityMap):
        _add_identity(file, result.identity, progress)
    if isinstance(result.attribution, TokenAttribution):
        _add_attribution(file, result.attribution, progress)
        file.about["attribution"] |= {"near": result.about.get("near"), "near_within": NEAR}


def _add_attention(file: File, result: EffectiveAttention, progress: Progress) -> None:
    """Add the heads: their maps, the readings that they are found by, and the masks."""
    if any(list(result.axis(name).tokens or ()) != list(result.text_of(name)["tokens"]) for name in ("query", "key")):
        raise InputError("A page shows whole maps: select layers and heads, but not queries or keys.")
    key_text = file.about.get("keys", file.about)
    special = [position for position, is_special in enumerate(key_text["special"]) if is_special]
    readings, values = _readings(result, special)
    file.about["attention"] = {
        "layer_numbers": list(result.layers),
        "head_numbers": list(result.heads),
        "layers": _add_layers(file, result, progress),
        "special_group": "special tokens" if special else "first token",
        "readings": readings,
        "axes": _AXES,
    }
    if result.about.get("causal") and "keys" not in file.about:
        file.about["first"] = {"query": len(result.tokens) - 1}  # the first token sees only itself
    file.arrays |= {f"heads.{name}": array.float() for name, array in values.items()}
    if "residual" in result.source.dims:
        file.arrays["heads.residual"] = result.read("residual").float()


def _add_layers(file: File, result: EffectiveAttention, progress: Progress) -> list[dict[str, Any]]:
    """Add the maps of every layer; return how the browser builds them, and which mask each layer uses."""
    facts: list[dict[str, Any]] = []
    masks: list[Tensor] = []
    captured = captured_run(result)
    shape = len(result.tokens), len(result.keys)
    for index, number in enumerate(result.layers):
        progress("page, layers", index, len(result.layers))
        layer = result.sel(layer=[number])
        (captured_index,) = layer.axis("layer").source_indices
        captured_layer = None if captured is None else captured.layers[captured_index]
        if captured_layer is None or captured_layer.call.bias is not None or captured_layer.call.given is not None:
            arrays = {name: layer.read(name)[0].float() for name in ("raw", "effective")}
            fact: dict[str, object] = {"form": "dense"}
        else:
            arrays, factored = factors(captured_layer, layer.axis("head").source_indices)
            fact = {"form": "factors", **factored}
        if captured is not None and max(shape) <= SHORT:
            arrays["simplex"] = layer.simplex.reshape(-1, *shape).float()
        if "visible" in result.source.dims:
            visible = layer.read("visible")[0].cpu()
            equal = [number for number, mask in enumerate(masks) if torch.equal(mask, visible)]
            fact["mask"] = equal[0] if equal else len(masks)
            if not equal:
                masks.append(visible)
        facts.append(fact)
        file.arrays |= {f"layer{index}.{name}": array for name, array in arrays.items()}
    progress("page, layers", len(result.layers), len(result.layers))
    if masks:
        file.arrays["visible"] = torch.stack([bits(mask) for mask in masks])
    return facts


def _readings(result: EffectiveAttention, special: list[int]) -> tuple[list[dict[str, object]], dict[str, Tensor]]:
    """Return what heads can be found by, in the order in which it is shown, and the values by name, (layer, head).

    Of each, the page shows the name (`label`), the explanation (`meaning`) and the Python (`code`), the least and the
    most that it can be (`range`), where that is known, and how many `digits` come after the point.

    A result by words or a difference lacks some values; those of `certain_mass` are added with the bounded rows. The
    page leaves out a reading without values.
    """
    readings = []
    values = {}
    for measure in result.measures.values():
        if measure.over_texts is None:
            continue
        digits = 2
        if measure.name in result.source.dims:
            array = result.read(measure.name)
            digits = 2 if array.is_floating_point() else 1
            values[measure.name] = array.double().mean(-1) if "query" in measure.axes else array
        readings.append(_reading(measure, "attention", digits))
    readings.append(_reading(AttentionIntervals.measures["certain_mass"], "attention.intervals()", 2))
    sinks = special or [0]
    values["sink_mass"] = result.sel(key=sinks).read("raw").double().sum(-1).mean(-1)
    readings.append(
        {
            "name": "sink_mass",
            "label": "sink mass",
            "meaning": f"The raw weight that goes to {'special tokens' if special else 'the first token'}, "
            "on average over rows.",
            "code": f"attention.raw[..., {sinks}].sum(-1).mean(-1)",
            "range": (0, 1),
            "digits": 2,
        }
    )
    return readings, values


def _reading(measure: Measure, source: str, digits: int) -> dict[str, Any]:
    """Return what a Result declares of a measure, of a row's as a mean over rows."""
    meaning = measure.meaning.split("\n\n")[0].replace("\n", " ")
    code = f'{source}.array("{measure.name}")'
    if "query" in measure.axes:
        meaning = f"{meaning.rstrip('.')}, on average over rows."
        code = f"{source}.{measure.name}.double().mean(-1)"
    about = {"name": measure.name, "label": measure.label, "meaning": meaning, "code": code}
    return about | {"range": measure.limits, "digits": digits}


def _add_measures(file: File, result: Explanation) -> None:
    """Add the readings of attention that an explanation was asked for: their ends, and the roles of heads.

    Of each, the page shows the `label`, the `meaning` and the Python (`code`); `axes` names its axes.
    """
    text = file.about["calls"].get("text", "")
    added: list[dict[str, Any]] = []
    left_out = []
    room = MEASURES
    for name, measure in result.readings.items():
        if isinstance(measure, HeadScores):
            _add_roles(file, measure, text)
        if not isinstance(measure, AttentionMeasure):
            continue
        arrays = {array: measure.read(array).float() for array in measure.main}
        arrays["certain"] = measure.read("certain_share").float()
        size = sum(array.nbytes for array in arrays.values())
        if size > room:
            left_out.append(name)
            continue
        room -= size
        file.arrays |= {f"measure{len(added)}.{array}": tensor for array, tensor in arrays.items()}
        about = {"name": name, "label": name, "meaning": measure.meaning}
        about["exact"] = bool(measure.exact) and not bool(measure.gap.isnan().any())
        about |= {"axes": [axis.name for axis in measure.axes], "layers": list(measure.axes[0].values)}
        added.append(about | {"code": f"ik.attention_measure(model, text, {json.dumps(name)}{text})"})
    file.about["measures"] = added
    if left_out:
        file.about["measures_left_out"] = f"Too large for a page: {', '.join(left_out)}."


def _add_roles(file: File, scores: HeadScores, text: str) -> None:
    """Add the roles of heads to what heads can be found by, each with its ends."""
    for number, role in enumerate(scores.scores):
        raw, lower, upper = (scores.read(name)[number] for name in ("raw", "lower", "upper"))
        if bool(raw.isnan().all()):
            continue
        name = f"role_{role.replace(' ', '_')}"
        file.arrays |= {f"heads.{name}": raw.float()}
        file.arrays |= {f"heads.{name}.lower": lower.float(), f"heads.{name}.upper": upper.float()}
        ends = zip(raw.flatten().tolist(), lower.flatten().tolist(), upper.flatten().tolist(), strict=True)
        words = [f"{value:.2f} ({least:.2f} to {greatest:.2f})" for value, least, greatest in ends]
        file.about.setdefault("sampled", {})[name] = {"said": words}
        code = f'ik.head_scores(model, text{text}).sel(score="{role}").raw'
        label = f"role: {role}"
        reading = {"name": name, "label": label, "meaning": scores.about["meanings"][role], "code": code}
        file.about["attention"]["readings"].append(reading | {"range": None, "digits": 2})


def _add_identity(file: File, result: IdentityMap | TokenInversion, progress: Progress) -> None:
    """Add whether each token is still itself, layer by layer."""
    file.about["identity"] = {
        "layers": list(result.axis("layer").values),
        "candidates": result.about.get("candidates"),
        "vocabulary": result.about.get("vocabulary"),
    }
    file.arrays |= {
        "identity.recovered": result.read("recovered").to(torch.uint8),
        "identity.margin": result.read("margin").float(),
        "identity.winner": result.read("winner").int(),
    }


def _add_attribution(file: File, result: TokenAttribution, progress: Progress) -> None:
    """Add the largest sources of every hidden vector: all of them in a short text."""
    count = len(result.tokens) if len(result.tokens) <= SHORT else SOURCES
    top = result.whole().mT.topk(count, dim=-1)
    file.arrays |= {"attribution.input": top.indices.int(), "attribution.share": top.values.float()}
    if "stderr" in result.source.dims:
        file.arrays["attribution.stderr"] = result.read("stderr").mT.gather(-1, top.indices).float()
    file.about["attribution"] = {
        "layers": list(result.layers),
        "kept": count,
        "near": None,
        "probes": result.about.get("probes"),
        "norm": result.about.get("norm"),
    }


_PARTS: Mapping[type[Result], Callable[[File, Any, Progress], None]] = {
    Explanation: _add_explanation,
    EffectiveAttention: _add_attention,
    AttentionIntervals: add_intervals,
    IdentityMap: _add_identity,
    TokenInversion: _add_identity,
    TokenAttribution: _add_attribution,
}
