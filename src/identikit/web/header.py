"""The header of a view file: the text, the model, and the arguments that give the same numbers in Python."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from identikit.attention.captured import Captured
from identikit.attention.layer import EffectiveOptions
from identikit.attention.result import EffectiveAttention
from identikit.attribution.result import TokenAttribution
from identikit.errors import TooLongError
from identikit.explanation.result import Explanation
from identikit.models.load.load import Recipe
from identikit.models.text_run import TextRun
from identikit.results.files import plain
from identikit.results.result import Result
from identikit.texts.text import SOURCE, Translation, readable_token
from identikit.tokens.result import IdentityMap
from identikit.version import __version__
from identikit.web.file import FORMAT

_NUMBERS_ONLY = ', target=..., attention="cross"'  # of results that hold only numbers


def header(result: Result) -> dict[str, Any]:
    """Return the facts that every file states about its result."""
    tokens = [readable_token(token) for token in result.tokens]
    return {
        "format": FORMAT,
        "version": __version__,
        "kind": result.kind,
        "model": result.model_name,
        "tokens": tokens,
        "special": result.about.get("special") or [False] * len(tokens),
        "words": result.about.get("words") or [],
        "provenance": plain(asdict(result.provenance)),
        "unavailable": {},
        **_key_text(result),
        **inputs(result),
        "calls": _call_arguments(result),
    }


def _key_text(result: Result) -> dict[str, Any]:
    """Return the text of the keys, where that is not the text of the queries."""
    if SOURCE not in result.about:
        return {}
    text = result.about[SOURCE]
    tokens = [readable_token(token) for token in text["tokens"]]
    special = text.get("special") or [False] * len(tokens)
    keys = {"tokens": tokens, "special": special, "words": text.get("words") or []}
    alone = "A page of attention to a source shows it alone."
    attribution = f"{alone} In Python, token_attribution(model, text, target_text=…) says where vectors came from."
    return {"keys": keys, "unavailable": {"identity": alone, "attribution": attribution}}


def captured_run(result: Result) -> Captured | None:
    """Return the captured run of a model; None where a result holds only numbers."""
    return result.source if isinstance(result.source, Captured) else None


def inputs(result: Result) -> dict[str, Any]:
    """Return where the model was loaded from and the text, where they are known; of a folder only its own name."""
    captured = captured_run(result)
    if captured is None:
        return {"source": None, "text": None}
    model = captured.text_run.model
    source = None if model.recipe is None else model.recipe.source
    if source is not None and Path(source).is_absolute():
        source = f"path/to/{Path(source).name}"
    text: object = captured.text_run.text
    if isinstance(text, Translation):
        return {"source": source, "text": _listed(text.source)}
    is_text = model.modality == "text" and isinstance(text, str | tuple)
    if is_text and captured.text_run.truncate and not _is_too_long(captured.text_run):
        (cut,) = model.encode(text, truncate=True, max_tokens=len(captured.text_run.tokens))
        if len(cut.ids) < len(model.encode(text)[0].ids):  # cut by choice: its tokens say what is left
            text = cut.ids
    return {"source": source, "text": _listed(text)}


def _listed(text: object) -> str | list[str | int] | None:
    """Return a text, a pair of texts or token ids as JSON holds them; None: it is something else."""
    if isinstance(text, tuple | list) and all(isinstance(item, str | int) for item in text):
        return list(text)
    return text if isinstance(text, str) else None


def _is_too_long(reading: TextRun) -> bool:
    """Whether a text was cut to the model's limit."""
    if not reading.truncate or reading.model.modality != "text":
        return False
    try:
        reading.model.encode(reading.text)
    except TooLongError:
        return True
    return False


def _call_arguments(result: Result) -> dict[str, str]:
    """Return the arguments, besides model and text, with which the Python of a view gives the numbers that it shows.

    They are those of `ik.load`, of any function of the text, of `effective_attention` and of `explain`, each as it
    stands in a call, after a comma, or empty where the defaults give the same.
    """
    attention = result.attention if isinstance(result, Explanation) else result
    if not isinstance(attention, EffectiveAttention) or not isinstance(attention.source, Captured):
        return {"looking": _NUMBERS_ONLY} if SOURCE in result.about else {}
    model = attention.source.text_run.model
    text = ", truncate=True" if _is_too_long(attention.source.text_run) else ""
    side = _side_arguments(attention.source.text_run)
    defaults: dict[str, Any] = asdict(EffectiveOptions())
    defaults |= {"layers": list(model.attention_layers), "heads": list(range(model.n_heads))}
    settings = attention.provenance.settings | {"layers": list(attention.layers), "heads": list(attention.heads)}
    options = {name: settings[name] for name in ("bias", "mass", "tolerance", "layers", "heads")}
    recipe = asdict(model.recipe or Recipe(None))
    loaded = {name: recipe[name] for name in ("dtype", "tower", "revision")}
    calls = {
        "load": _format_arguments(loaded, asdict(Recipe(None))),
        "text": text,
        "attention": side + text + _format_arguments(options, defaults),
        **({"looking": side} if side else {}),
    }
    if isinstance(result, Explanation):
        calls["explain"] = text + _explain_call(result)
    return calls


def _side_arguments(reading: TextRun) -> str:
    """Return the arguments for the attention of a decoder; empty for any other."""
    if not isinstance(reading.text, Translation):
        return ""
    target = _listed(reading.text.target)
    written = "..." if target is None else json.dumps(target)
    return f", target={written}, attention={json.dumps(reading.model.decoder_attention)}"


def _explain_call(result: Explanation) -> str:
    certain = result.about["certain"]
    arguments: dict[str, Any] = {}
    if isinstance(result.attribution, TokenAttribution):
        arguments["probes"] = "exact" if result.attribution.probes is None else result.attribution.probes
        arguments["seconds"] = None  # how long it takes changes nothing where all rows were bounded
    if certain["bounded_rows"] < certain["free_rows"] or not arguments:
        arguments["seconds"] = certain["seconds"]
    if result.readings:
        arguments["measures"] = list(result.readings)
    target = result.about.get("target")
    if target is not None:
        arguments["target"] = target
    own_target = target is None and "output" in result.about
    own_maps = isinstance(result.identity, IdentityMap) and result.identity.about.get("fitted_to") == "your texts"
    return (
        _format_arguments(arguments, {}) + (", target=..." if own_target else "") + (", maps=..." if own_maps else "")
    )


def _format_arguments(arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Write arguments as Python does, without those that have their default."""
    words = {"true": "True", "false": "False", "null": "None"}
    values = {
        name: json.dumps(value) for name, value in arguments.items() if name not in defaults or value != defaults[name]
    }
    return "".join(f", {name}={words.get(value, value)}" for name, value in values.items())
