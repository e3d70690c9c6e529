"""What the Python of a view needs beside model and text, so that it gives the numbers which the view shows.

Each is written as it stands in a call, with a comma before it, or empty where the defaults give the same.
"""

import json
from typing import Any

from identikit.attention.captured import Captured
from identikit.attention.layer import EffectiveOptions
from identikit.attention.result import EffectiveAttention
from identikit.attribution.result import TokenAttribution
from identikit.errors import TooLongError
from identikit.explanation.result import Explanation
from identikit.models.load.load import Recipe
from identikit.models.reading import Reading
from identikit.results.result import Result
from identikit.tokens.result import IdentityMap


def arguments(result: Result) -> dict[str, str]:
    """Return the arguments of `ik.load`, of any function of the text, of `effective_attention` and of `explain`."""
    attention = result.attention if isinstance(result, Explanation) else result
    if not isinstance(attention, EffectiveAttention) or not isinstance(attention.source, Captured):
        return {}
    reading = attention.source.reading
    text = ", truncate=True" if is_too_long(reading) else ""
    found = {"load": _load(reading.model.recipe), "text": text, "attention": text + _attention(attention)}
    if isinstance(result, Explanation):
        found["explain"] = text + _explain(result)
    return found


def is_too_long(reading: Reading) -> bool:
    """Tell whether a text was cut because the model reads no more of it."""
    if not reading.may_be_cut or reading.model.modality != "text":
        return False
    try:
        reading.model.encode(reading.text)
    except TooLongError:
        return True
    return False


def _load(recipe: Recipe | None) -> str:
    if recipe is None:
        return ""
    usual = Recipe(None)
    names = ("dtype", "tower", "revision")
    return _written({name: getattr(recipe, name) for name in names if getattr(recipe, name) != getattr(usual, name)})


def _attention(attention: EffectiveAttention) -> str:
    settings = attention.provenance.settings
    model = attention.captured().reading.model
    usual = {name: getattr(EffectiveOptions(), name) for name in ("bias", "mass", "tolerance")}
    usual |= {"layers": list(model.attention_layers), "heads": list(range(model.n_heads))}
    given = settings | {"layers": list(attention.layers), "heads": list(attention.heads)}
    return _written({name: given[name] for name, value in usual.items() if given[name] != value})


def _explain(result: Explanation) -> str:
    certain = result.about["certain"]
    given: dict[str, Any] = {}
    if isinstance(result.attribution, TokenAttribution):
        given["probes"] = "exact" if result.attribution.probes is None else result.attribution.probes
        given["seconds"] = None  # how long it takes changes nothing where all rows were bounded
    if certain["bounded_rows"] < certain["free_rows"] or not given:
        given["seconds"] = certain["seconds"]
    own_maps = isinstance(result.identity, IdentityMap) and result.identity.about.get("fitted_to") == "your texts"
    return _written(given) + (", maps=..." if own_maps else "")


def _written(given: dict[str, Any]) -> str:
    """Write arguments as Python does."""
    words = {"true": "True", "false": "False", "null": "None"}
    values = {name: json.dumps(value) for name, value in given.items()}
    return "".join(f", {name}={words.get(value, value)}" for name, value in values.items())
