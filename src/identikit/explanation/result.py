"""The main job: what can be said about a model on one text, as numbers from which words are made."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch

from identikit.attention.effective import Options as AttentionOptions
from identikit.attention.effective import attend
from identikit.attention.intervals import Bounding, membership
from identikit.attention.result import EffectiveAttention
from identikit.attribution.attribute import attribute
from identikit.attribution.plan import Options as AttributionOptions
from identikit.attribution.plan import estimate
from identikit.attribution.result import TokenAttribution
from identikit.checks import function, known, shortened
from identikit.errors import InputError, Unavailable
from identikit.explanation.causes import candidates, causes, group_mass, is_sink, value_sizes
from identikit.explanation.certainty import (
    SECONDS,
    Sample,
    bounded_rows,
    group_bounds,
    least_certain,
    mean_over_rows,
    outside,
    share_of_rows,
)
from identikit.maths.mixing import by_offset, first_middle_last
from identikit.models.model import Model, checked_model
from identikit.models.reading import Reading, readings
from identikit.models.surroundings import undisturbed
from identikit.progress import Progress, silent
from identikit.results.axis import Axis
from identikit.results.folders import Files
from identikit.results.result import Held, Result, result_of
from identikit.shapes import Tensor
from identikit.texts.data import sample_text, sample_texts
from identikit.texts.text import is_several, joined_by
from identikit.tokens.identify import cached_maps, identity_of
from identikit.tokens.maps import FittedMap
from identikit.tokens.result import IdentityMap, TokenIdentifiability

NOT_COMPUTED = Unavailable("It was not computed.")
ONLY_NUMBERS = Unavailable("An explanation by words, or a difference, holds only numbers.")
SOURCES_NAMED = 3  # how many of a token's strongest sources are named
NEAR = 3  # how many places away a neighbour is near
PROBES = 16  # directions that attribution is estimated from
UNKNOWN = 0.1  # share of unknown tokens in the sample texts above which maps fitted to them say little
_BY_LAYER = ("certain_mass", "certain_mass_stderr", "strongest_certain", "strongest_certain_stderr", "special_raw",
             "special_lower", "special_lower_stderr", "special_upper", "special_upper_stderr", "special_effective",
             "least_null_dim", "greatest_null_dim", "identifiable", "reachable_dim", "pearson")  # fmt: skip
_BOUNDED = "bounded.safetensors"
_PARTS: Mapping[str, type[Result]] = {
    "attention": EffectiveAttention,
    "identity": IdentityMap,
    "attribution": TokenAttribution,
}


class Source(NamedTuple):
    """An input token, its position in the text, and what it contributes."""

    token: str
    position: int
    contribution: float


class Sources(NamedTuple):
    """Where the hidden vectors of the token at a position come from.

    - `sources`: the strongest at the first, middle and last layer, the largest first
    - `own`: what it contributes itself in the last layer; `outweighed`: whether another contributes more there
    """

    token: str
    position: int
    sources: tuple[tuple[Source, ...], ...]
    own: float
    outweighed: bool


@dataclass(frozen=True, repr=False, eq=False)
class Explanation(Result):
    """What can be said about a model on one text: the answers to all three questions.

    Arrays by layer, all of them means over rows: the `certain_mass`, the share of rows whose strongest edge is certain
    (`strongest_certain`), and the weight on special tokens, or on the first token where there are none: `special_raw`,
    the least and the greatest that attention with the same output can give (`special_lower`, `special_upper`), and
    `special_effective`. What intervals give has a standard error (`…_stderr`), which is 0 where all rows were bounded,
    and NaN where too few were. Beside them the least and greatest null dimension of a row, the share of rows that are
    `identifiable`, the `reachable_dim`, and the correlation `pearson` of raw and effective attention. Arrays by layer
    and token: whether it is `recovered` (1 or 0, NaN in layers without a map), its `own` contribution, and whether it
    is `outweighed`.

    `about` has what is said beyond these: `certain` (overall, and how many rows were bounded), the `causes` of freedom,
    the `sinks`, what a `learned_sink` takes by layer, in what share of a layer's rows the rank is `unsure`, the edges
    that are `least_certain`, and those whose effective weight is `outside` the interval.

    `attention`, `identity` and `attribution` are the Results these were read from, or `Unavailable` with a reason;
    `bounded` has the rows of attention that were bounded, each with its intervals.
    """

    attention: EffectiveAttention | Unavailable = NOT_COMPUTED
    identity: IdentityMap | Unavailable = NOT_COMPUTED
    attribution: TokenAttribution | Unavailable = NOT_COMPUTED
    bounded: Sample | None = None

    kind = "explanation"
    main = _BY_LAYER
    missing: ClassVar = {
        **dict.fromkeys(_BY_LAYER, "Too few rows of the layer were bounded in time."),
        **dict.fromkeys(("pearson", "pearson_overall"), EffectiveAttention.missing["pearson"]),
        "recovered": "No map was fitted for the layer.",
    }
    by_word: ClassVar = {
        **{name: {} for name in _BY_LAYER},
        "recovered": {"token": "min"},
        "own": {"token": "mean"},
    }

    def words(self) -> "Explanation":
        """Return the result by words: a word is recovered if all of its pieces are, and contributes their mean."""
        return replace(super().words(), bounded=None, **dict.fromkeys(_PARTS, ONLY_NUMBERS))

    def __sub__(self, other: object) -> "Explanation":
        """Return the numbers of this explanation minus those of another."""
        return replace(super().__sub__(other), bounded=None, **dict.fromkeys(_PARTS, ONLY_NUMBERS))

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, numbers and strings, with the strongest sources of every token."""
        plain = super().to_dict()
        for name in _PARTS:
            part = getattr(self, name)
            if isinstance(part, Unavailable):
                plain[f"{name}_unavailable"] = part.reason
        if isinstance(self.attribution, TokenAttribution):
            plain["sources"] = [_as_dict(one) for one in strongest_sources(self.attribution)]
        return plain

    def said(self) -> str:
        """Say it as a verdict that can be read; of a selection, or of words, only give the means of its numbers."""
        from identikit.explanation.words import verdict

        sizes = [0 if axis.single else len(axis) for axis in self.axes]
        if isinstance(self.attention, EffectiveAttention) and sizes == [len(self.attention.layers), len(self.tokens)]:
            return str(verdict(self))
        means = {name: float(self.array(name).double().nanmean()) for name in self.arrays}
        return f"Means: {', '.join(f'{name} {value:.3g}' for name, value in means.items() if value == value)}."

    def plot(self, question: str = "attention", **options: Any) -> Any:
        """Draw the answer to one question: "attention" (heads), "identity" or "attribution" (the last layer)."""
        part = getattr(self, known("question", question, tuple(_PARTS)))
        if isinstance(part, Unavailable):
            raise InputError(f"Cannot draw {question}: {part.reason}")
        return (part.sel(layer=-1) if question == "attribution" else part).plot(**options)

    def _files(self) -> Files:
        files = dict(super()._files())
        for name in _PARTS:
            part = getattr(self, name)
            if isinstance(part, Unavailable):
                files[f"{name}.txt"] = part.reason.encode()
            else:
                files |= {f"{name}/{file}": content for file, content in part._content().items()}
        if self.bounded is not None:
            files[_BOUNDED] = self.bounded.to_bytes()
        return files

    @classmethod
    def _opened(cls, files: Files, about: Mapping[str, Any], where: str) -> "Explanation":
        numbers, parts = super()._opened(files, about, where), {}
        for name, wanted in _PARTS.items():
            own = {file.removeprefix(f"{name}/"): files[file] for file in files if file.startswith(f"{name}/")}
            part = result_of(own, f"{where}/{name}") if own else Unavailable(files[f"{name}.txt"].decode())
            if not isinstance(part, wanted | Unavailable):
                raise InputError(f"Opening {where}: {name} is not {wanted.kind} but {part.kind}.")
            parts[name] = part
        if _BOUNDED in files:
            parts["bounded"] = Sample.from_bytes(files[_BOUNDED])
        return cls(numbers.axes, numbers.source, numbers.provenance, numbers.about, **parts)


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
      and skipped where even that would take more than a minute
    - `maps`: what tokens are recovered with: the result of `token_identifiability` on texts of your own; left out,
      ridge maps fitted once to the sample texts
    - `seconds`: about how long rows of attention are bounded, in random order; None: until all are
    """
    model, progress = checked_model(model), function("progress", progress)
    seconds = Bounding(seconds=seconds).seconds
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
    attention = attend(reading, AttentionOptions(), layers=everything, heads=tuple(range(model.n_heads)))
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
    dims = dict.fromkeys(_BY_LAYER, ("layer",))
    if isinstance(identity, IdentityMap):
        found = torch.full((model.n_layers, len(reading.tokens)), torch.nan, dtype=torch.float64)
        found[list(identity._axis("layer").values)] = identity.recovered.double()
        arrays["recovered"] = found[list(model.attention_layers)]
    if isinstance(attribution, TokenAttribution):
        there = list(model.attention_layers)
        arrays |= {"own": attribution.own[there], "outweighed": attribution.outweighed[there]}
    dims |= {name: ("layer", "token") for name in arrays if name not in dims}
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
    unknown, reads = 0.0, reading.model.modality
    if maps is None and reads != "text":
        return Unavailable(
            f"The sample texts do not fit a model that reads {reads}s. "
            f"Pass maps=identikit.token_identifiability(model, {reads}s)."
        )
    if maps is None:
        samples = sample_texts()
        unknown = _unknown_share(reading.model, samples)
        maps = cached_maps(reading.model, samples, progress=progress)
        fitted_to = "the sample texts"
    else:
        fitted_to = "your texts"
    try:
        found = identity_of(reading, maps)
    except InputError as reason:  # a text of one token, or of one token repeated, has nothing to be told apart from
        return Unavailable(str(reason))
    return replace(found, about={**found.about, "fitted_to": fitted_to, "unknown": unknown})


def _unknown_share(model: Model, texts: list[Any]) -> float:
    """Return which share of the texts' tokens the tokenizer does not know."""
    unknown = getattr(model.tokenizer, "unk_token_id", None)
    ids = [token for one in model.encode(texts, truncate=True) for token in one.ids]
    return 0.0 if unknown is None else ids.count(unknown) / len(ids)


def _attribution(reading: Reading, probes: Any, progress: Progress) -> TokenAttribution | Unavailable:
    """Return a text's attribution, or why there is none. One that takes long is skipped unless it was asked for."""
    model = reading.model
    options = AttributionOptions(probes=min(PROBES, model.d_input) if probes is None else probes)
    try:
        ahead = estimate(model, [len(reading.tokens)], options.request(model))
        if probes is None and ahead.long:
            return Unavailable(f"{ahead.words()} So it was left out; probes={options.probes} computes it all the same.")
        if ahead.said:
            warnings.warn(ahead.words(), stacklevel=4)
        return attribute([reading], options, progress=progress)[0]
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


def strongest_sources(found: TokenAttribution) -> list[Sources]:
    """Return the strongest sources of every token at the first, middle and last layer."""
    three = found.contribution[list(first_middle_last(len(found.layers)))]
    top = three.topk(min(SOURCES_NAMED, len(found.tokens)), dim=1)
    own, outdone = found.own[-1].tolist(), found.outweighed[-1].tolist()
    tokens = []
    for place, token in enumerate(found.tokens):
        layers = zip(top.indices[..., place].tolist(), top.values[..., place].tolist(), strict=True)
        strongest = tuple(
            tuple(Source(found.tokens[i], i, weight) for i, weight in zip(*layer, strict=True) if weight)
            for layer in layers
        )
        tokens.append(Sources(token, place, strongest, own[place], outdone[place]))
    return tokens


def _as_dict(one: Sources) -> dict[str, Any]:
    return one._asdict() | {"sources": [[source._asdict() for source in layer] for layer in one.sources]}


def _attention(
    attention: EffectiveAttention, seconds: float | int | None, progress: Progress
) -> tuple[dict[str, Tensor], dict[str, Any], Sample]:
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
    sample = bounded_rows(attention, [groups[group] for group in bounded], seconds=seconds, progress=progress)
    ends = [group_bounds(sample, at, raw[:, group]) for at, group in enumerate(bounded)]
    sink, fixed = attention.sink.double().cpu(), (attention.null_dim == 0).cpu()
    kept = ((1 - sink) * fixed).sum((1, 2)) / fixed.sum((1, 2)).clamp(min=1)
    mass = mean_over_rows(sample, sample.lower.sum(-1), kept.tolist())
    strongest = share_of_rows(sample, sample.strongest)
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
    arrays = {name: array.cpu().double() for name, array in zip(_BY_LAYER, by_layer, strict=True)}
    return arrays, said, sample


def _beside(attention: EffectiveAttention) -> tuple[Tensor, ...]:
    """Return what stands beside intervals, by layer: null dimension, reachable dimension, correlation."""
    null, reachable = attention.null_dim.double(), attention.reachable_dim.double().mean((1, 2))
    dims = null.amin((1, 2)), null.amax((1, 2)), (null == 0).double().mean((1, 2))
    return *dims, reachable, attention.pearson("layer")


def _certain(sample: Sample, mass: tuple[float, float], strongest: tuple[float, float]) -> dict[str, Any]:
    """Return how much is certain overall, with standard errors, and how many rows that was read from."""
    names = "mass", "mass_stderr", "strongest", "strongest_stderr"
    return {
        **dict(zip(names, _known((*mass, *strongest)), strict=True)),
        "rows": sample.rows * len(sample.free),
        "free_rows": int(sample.free.sum()),
        "bounded_rows": len(sample.places),
        "bounded_edges": int(sample.seen.sum()),
    }


def _known(numbers: Sequence[float]) -> list[float | None]:
    """Return numbers with None in place of NaN, as JSON holds them."""
    return [None if number != number else number for number in numbers]
