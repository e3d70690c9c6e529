"""The main job: answer the three questions for a model on one text."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from identikit.attention.effective import attend
from identikit.attention.intervals import Bounding, membership
from identikit.attention.layer import EffectiveOptions
from identikit.attention.result import EffectiveAttention
from identikit.attention.sample import RowSample, mean_over_rows, sample_rows, share_of_rows
from identikit.attribution.attribute import attribute
from identikit.attribution.plan import estimate
from identikit.attribution.request import AttributionOptions
from identikit.attribution.result import TokenAttribution
from identikit.checks import function, shortened
from identikit.errors import InputError, Unavailable
from identikit.explanation.causes import candidates, causes, group_mass, is_sink, value_sizes
from identikit.explanation.certainty import SECONDS, SEED, group_bounds, least_certain, outside
from identikit.explanation.result import NEAR, Explanation
from identikit.maths.mixing import by_offset
from identikit.maths.threads import calm
from identikit.models.model import Model, checked_model
from identikit.models.reading import Reading, readings
from identikit.models.surroundings import undisturbed
from identikit.progress import Progress, silent
from identikit.results.axis import Axis
from identikit.results.source import Held
from identikit.shapes import Tensor
from identikit.texts.data import sample_text, sample_texts
from identikit.texts.text import is_several, joined_by
from identikit.tokens.identify import cached_maps, identity_of
from identikit.tokens.maps import FittedMap
from identikit.tokens.result import IdentityMap, TokenIdentifiability

PROBES = 16  # directions that attribution is estimated from
FEWEST_PROBES = 4  # the same where that would take more than a minute


@calm()
@undisturbed()
def explain(
    model: Model,
    text: Any = None,
    *,
    probes: Any = None,
    maps: TokenIdentifiability | Sequence[FittedMap] | None = None,
    seconds: float | int | None = SECONDS,
    truncate: bool = False,
    progress: Progress = silent,
) -> Explanation:
    """Answer the three questions for a model on a text; without one, on the sample text that comes with the package.

    - `probes`: how many random directions attribution is estimated from, or "exact"; left out, it is estimated from 16,
      or from 4 where 16 would take more than a minute
    - `maps`: what tokens are recovered with: the result of `token_identifiability` on texts of your own; left out,
      ridge maps fitted once to the sample texts
    - `seconds`: about how long rows of attention are bounded, in random order; None: until all are
    """
    model, progress = checked_model(model), function("progress", progress)
    seconds = Bounding.checked("auto", 0.0, seconds).seconds
    seconds = None if seconds == math.inf else seconds
    if text is None and model.modality != "text":
        raise InputError(
            f"explain without a text reads a packaged sample, and {model.name} reads {model.modality}s. Pass one."
        )
    text = sample_text() if text is None else text
    if is_several(text):
        raise InputError("explain reads one text at a time: pass a string, a pair of strings, or token ids.")
    if probes is not None:
        AttributionOptions(probes=probes).request(model)  # refuses a wrong number before anything is computed
    fitted = _checked_maps(maps)
    everything = model.attention_layers
    (reading,) = readings(model, text, layers=everything, truncate=truncate)
    attention = attend(reading, EffectiveOptions(), layers=everything, heads=tuple(range(model.n_heads)))
    identity = _identity(reading, fitted, progress)
    attribution = _attribution(reading, probes, progress)
    arrays, said, bounded = _attention(attention, seconds, progress)
    found = _explanation(reading, attention, identity, attribution, arrays, said)
    return replace(found, bounded=bounded)


def _explanation(
    reading: Reading,
    attention: EffectiveAttention,
    identity: IdentityMap | Unavailable,
    attribution: TokenAttribution | Unavailable,
    arrays: dict[str, Tensor],
    said: Mapping[str, Any],
) -> Explanation:
    model, change = reading.model, attention.verify()
    if isinstance(identity, IdentityMap):
        found = torch.full((model.n_layers, len(reading.tokens)), torch.nan, dtype=torch.float64)
        found[list(identity.axis("layer").values)] = identity.recovered.double()
        arrays["recovered"] = found[list(model.attention_layers)]
    if isinstance(attribution, TokenAttribution):
        there = list(model.attention_layers)
        arrays |= {"own": attribution.own[there], "outweighed": attribution.outweighed[there]}
    dims = {name: Explanation.measures[name].axes for name in arrays}
    about = reading.about | {
        "n_layers": model.n_layers,
        "n_heads": model.n_heads,
        "d_value": model.d_value,
        "causal": model.causal,
        "pearson_overall": _known([float(attention.pearson())])[0],
        "largest_residual": float(attention.residual.max()),
        "largest_row_residual": float(attention.row_residual.max()),
        "output_change": {"hidden": change.hidden, "logits": change.logits},
        "joined_by": _joined_by(reading),
        **said,
    }
    if isinstance(attribution, TokenAttribution):
        about |= _attribution_facts(attribution)
    axes = (
        Axis("layer", model.attention_layers),
        Axis("token", tuple(range(len(reading.tokens))), reading.tokens),
    )
    return Explanation(axes, Held(arrays, dims), attention.provenance, about, attention, identity, attribution)


def _joined_by(reading: Reading) -> list[str] | None:
    """Return the special tokens between the halves of a pair; None for a single text."""
    if not (isinstance(reading.text, tuple) and isinstance(reading.text[0], str)):
        return None
    return list(joined_by(reading.tokens, reading.batch.special[0].tolist()))


def _checked_maps(maps: Any) -> Sequence[FittedMap] | None:
    if maps is None:
        return None
    fitted = maps.maps if isinstance(maps, TokenIdentifiability) else maps
    if not isinstance(fitted, list | tuple) or not fitted or not all(isinstance(one, FittedMap) for one in fitted):
        raise InputError(
            f"maps={shortened(maps)} cannot be used: expected the result of token_identifiability(model, texts)."
        )
    return fitted


def _identity(reading: Reading, maps: Sequence[FittedMap] | None, progress: Progress) -> IdentityMap | Unavailable:
    unknown = 0.0
    reads = reading.model.modality
    if maps is None and reads != "text":
        return Unavailable(
            f"The sample texts do not fit a model that reads {reads}s. "
            f"Pass maps=identikit.token_identifiability(model, {reads}s)."
        )
    if maps is None:
        maps, unknown = cached_maps(reading.model, sample_texts(), progress=progress)
        fitted_to = "the sample texts"
    else:
        fitted_to = "your texts"
    try:
        found = identity_of(reading, maps)
    except InputError as reason:  # a text of one token, or of one token repeated, has nothing to be told apart from
        return Unavailable(str(reason))
    return replace(found, about={**found.about, "fitted_to": fitted_to, "unknown": unknown})


def _attribution(reading: Reading, probes: Any, progress: Progress) -> TokenAttribution | Unavailable:
    """Return a text's attribution, or why there is none."""
    model = reading.model
    length = [len(reading.tokens)]
    try:
        request = AttributionOptions(probes=min(PROBES, model.d_input) if probes is None else probes).request(model)
        ahead = estimate(model, length, request)
        if probes is None and ahead.long and model.d_input > FEWEST_PROBES:  # a slow or busy machine: fewer directions
            request = AttributionOptions(probes=FEWEST_PROBES).request(model)
            ahead = estimate(model, length, request)
        if ahead.said:
            warnings.warn(ahead.words(), stacklevel=4)
        return attribute([reading], request, progress=progress)[0]
    except InputError as refusal:
        return Unavailable(str(refusal))


def _attribution_facts(found: TokenAttribution) -> dict[str, Any]:
    """Return how much of what comes from other tokens comes from near ones, by layer, and how exact it is."""
    others = by_offset(found.contribution, causal=found.causal)
    near = others.share()[:, others.positions.abs() <= NEAR].sum(1)
    return {
        "near": near.tolist() if others.sums.any() else None,
        "probes": found.probes,
        "largest_stderr": None if found.stderr is None else float(found.stderr.max()),
    }


def _attention(
    attention: EffectiveAttention, seconds: float | int | None, progress: Progress
) -> tuple[dict[str, Tensor], dict[str, Any], RowSample]:
    """Return the arrays by layer and the other facts on attention, and the bounded rows that all of them rest on."""

    def numbered(layers: Tensor) -> list[int]:
        """Return the numbers of the layers marked; a model may have layers without attention between them."""
        return [attention.layers[place] for place in layers.nonzero()[:, 0].tolist()]

    def at_layers(edges: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [edge | {"layer": attention.layers[edge["layer"]]} for edge in edges]

    special = [place for place, is_special in enumerate(attention.about["special"]) if is_special]
    tokens = candidates(attention)
    groups = [special or [0], *tokens.values()]
    raw, effective, even = group_mass(attention, membership(groups, len(attention.tokens)))
    sunk = is_sink(raw, even)
    bounded = [0, *sunk[:, 1:].any(0).nonzero()[:, 0].add(1).tolist()]
    asked = [groups[group] for group in bounded]
    sample = sample_rows(attention, asked, seconds=seconds, seed=SEED, progress=progress)
    ends = [group_bounds(sample, at, raw[:, group]) for at, group in enumerate(bounded)]
    sink, fixed = attention.sink.double().cpu(), (attention.null_dim == 0).cpu()
    kept = ((1 - sink) * fixed).sum((1, 2)) / fixed.sum((1, 2)).clamp(min=1)
    mass = mean_over_rows(sample, sample.bounded.lower.sum(-1), kept.tolist())
    strongest = share_of_rows(sample, sample.bounded.strongest)
    by_layer = (*mass, *strongest, raw[:, 0], *ends[0][0], *ends[0][1], effective[:, 0], *_beside(attention))
    sinks = [
        {
            "token": [*tokens][group - 1],
            "keys": groups[group],
            "layers": numbered(sunk[:, group]),
            "value_size": value_sizes(attention, groups[group]),
            "raw": raw[:, group].tolist(),
            "effective": effective[:, group].tolist(),
            "lower": _known(lower.mean.tolist()),
            "upper": _known(upper.mean.tolist()),
        }
        for group, (lower, upper) in zip(bounded[1:], ends[1:], strict=True)
    ]
    said = {
        "certain": _certain(sample, mass.overall(), strongest.overall()) | {"seconds": seconds},
        "group": "special tokens" if special else "first token",
        "causes": causes(attention),
        "learned_sink": sink.mean((1, 2)).tolist(),
        "unsure": (~attention.rank_is_sure).double().mean((1, 2)).tolist(),
        "rounded_duplicates": attention.rounded_duplicates.tolist(),
        "shared_outputs": numbered((attention.joint_null_dim > attention.null_dim.sum(1)).any(1)),
        "sinks": sinks,
        "least_certain": at_layers(least_certain(sample)),
        "outside": at_layers(outside(sample, attention.pearson("head"))),
    }
    arrays = {name: array.cpu().double() for name, array in zip(Explanation.main, by_layer, strict=True)}
    return arrays, said, sample


def _beside(attention: EffectiveAttention) -> tuple[Tensor, ...]:
    """Return what stands beside intervals, by layer: null dimension, reachable dimension, correlation."""
    null, reachable = attention.null_dim.double(), attention.reachable_dim.double().mean((1, 2))
    dims = null.amin((1, 2)), null.amax((1, 2)), (null == 0).double().mean((1, 2))
    return *dims, reachable, attention.pearson("layer")


def _certain(sample: RowSample, mass: tuple[float, float], strongest: tuple[float, float]) -> dict[str, Any]:
    """Return how much is certain overall, with standard errors, and how many rows that was read from."""
    names = "mass", "mass_stderr", "strongest", "strongest_stderr"
    return {
        **dict(zip(names, _known((*mass, *strongest)), strict=True)),
        "rows": sample.rows * len(sample.free),
        "free_rows": int(sample.free.sum()),
        "bounded_rows": len(sample.bounded.places),
        "bounded_edges": int(sample.bounded.seen.sum()),
    }


def _known(numbers: Sequence[float]) -> list[float | None]:
    """Return numbers with None in place of NaN, as JSON holds them."""
    return [None if number != number else number for number in numbers]
