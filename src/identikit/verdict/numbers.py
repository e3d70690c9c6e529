"""The main job: what can be said of a model on one text, as numbers that words are made from."""

import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, SupportsIndex

import torch

from identikit.attention.effective import EffectiveAttention, effective_attention
from identikit.attribution.attribute import CostWarning, Progress, TokenAttribution, foresee, token_attribution
from identikit.data import sample_text, sample_texts
from identikit.errors import InputError
from identikit.maths.mixing import by_offset, first_middle_last, outweighed, own_contribution
from identikit.models.model import Model
from identikit.models.reading import Change
from identikit.provenance import Provenance
from identikit.text import Text
from identikit.tokens.identify import TextIdentity, cached_maps, read_identity

HEADS_NAMED = 5  # how many heads whose raw and effective attention disagree are named
SOURCES_NAMED = 3  # how many of a token's strongest sources are named
NEAR = 3  # how many places away a neighbour is near
PROBES = 16  # directions that attribution is estimated from


@dataclass(frozen=True)
class LayerVerdict:
    """One layer (counted from 1).

    - `null_dim`: least and greatest dimension of a row's null space; `identifiable`: share of rows that have none
    - `kept`: share of the map (in squared weight) that is effective; `pearson`: raw against effective
    - `special_raw`, `special_effective`: average weight of a row on special tokens
    """

    layer: int
    null_dim: tuple[int, int]
    joint_null_dim: tuple[int, int]
    identifiable: float
    kept: float
    pearson: float
    special_raw: float
    special_effective: float


@dataclass(frozen=True)
class HeadVerdict:
    """A head (layer and head counted from 1) and the edge on which its raw and effective attention differ most."""

    layer: int
    head: int
    pearson: float
    query: str
    key: str
    raw: float
    effective: float


@dataclass(frozen=True)
class IdentityVerdict:
    """How much of a text's tokens each layer (counted from 1) still gives away, and which are lost in the last.

    `lost` holds each such token with the token whose input its hidden vector is nearer to. `map` and `distance` say how
    it was read: maps fitted once to the embedded sample texts.
    """

    map: str
    distance: str
    recovered: tuple[float, ...]
    lost: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Source:
    """An input token, its position in the text (counted from 0), and what it contributes."""

    token: str
    position: int
    contribution: float


@dataclass(frozen=True)
class Sources:
    """Where the hidden vectors of the token at a position (counted from 0) come from.

    - `sources`: the strongest at the first, middle and last layer, the largest first
    - `own`: what it contributes itself in the last layer; `outweighed`: whether another contributes more there
    """

    token: str
    position: int
    sources: tuple[tuple[Source, ...], ...]
    own: float
    outweighed: bool


@dataclass(frozen=True)
class MixingVerdict:
    """How a text's tokens mix, by layer: median own contribution, share of tokens outweighed by another, and how much
    of what comes from other tokens comes from near ones (None where nothing does). `probes` is None where contributions
    are exact, and `error` is the largest standard error otherwise.
    """

    layers: tuple[int, ...]
    own: tuple[float, ...]
    outweighed: tuple[float, ...]
    near: tuple[float, ...] | None
    tokens: tuple[Sources, ...]
    probes: int | None
    error: float | None


@dataclass(frozen=True)
class Explanation:
    """What can be said of a model on one text.

    `identity` is None where there is nothing to tell apart, `mixing` where it would take long or cannot be computed:
    `mixing_omitted` then says why, in one line.
    """

    model: str
    causal: bool
    n_layers: int
    n_heads: int
    d_value: int
    tokens: tuple[str, ...]
    layers: tuple[LayerVerdict, ...]
    heads: tuple[HeadVerdict, ...]
    pearson: float
    residual: float
    change: Change
    identity: IdentityVerdict | None
    mixing: MixingVerdict | None
    mixing_omitted: str | None
    provenance: Provenance

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, numbers and strings, for JSON."""
        return asdict(self) | {"change": self.change._asdict()}


def explain(
    model: Model,
    text: Text | None = None,
    *,
    probes: SupportsIndex | str | None = None,
    truncate: bool = False,
    progress: Progress | None = None,
) -> Explanation:
    """Say what can be said of a model on a text; without one, on the embedded sample.

    `probes` is how many directions attribution is estimated from, or "exact". Left out, it is estimated from a few, and
    left out itself where even that would take more than a minute. `progress(done, total)` is called as tokens are
    attributed.
    """
    text = sample_text() if text is None else text
    if probes is not None:
        foresee(model, [], probes=probes)  # refuses what is no number of probes before anything is computed
    result = effective_attention(model, text, truncate=truncate)[0]
    attribution = _attribution(model, text, probes, truncate, progress)
    return Explanation(
        model=model.name,
        causal=model.causal,
        n_layers=model.n_layers,
        n_heads=model.n_heads,
        d_value=model.d_value,
        tokens=result.tokens,
        layers=_layers(result),
        heads=_disagreeing(result),
        pearson=float(result.pearson()),
        residual=float(result.residual.max()),
        change=result.verify(),
        identity=None if model.vision else _identity(model, text, truncate),
        mixing=_mixing(attribution) if isinstance(attribution, TokenAttribution) else None,
        mixing_omitted=attribution if isinstance(attribution, str) else None,
        provenance=result.provenance,
    )


def _identity(model: Model, text: Text, truncate: bool) -> IdentityVerdict | None:
    try:
        read: TextIdentity = read_identity(model, text, cached_maps(model, sample_texts()), truncate=truncate)
    except InputError:  # a text of one token, or of one token repeated, has nothing to be told apart from
        return None
    last = zip(read.tokens, read.winners[-1], read.recovered[-1].tolist(), strict=True)
    return IdentityVerdict(
        map=read.map,
        distance=read.distance,
        recovered=tuple(read.recovered.double().mean(1).tolist()),
        lost=tuple((token, winner) for token, winner, found in last if not found),
    )


def _attribution(
    model: Model, text: Text, probes: SupportsIndex | str | None, truncate: bool, progress: Progress | None
) -> TokenAttribution | str:
    """Return a text's attribution, or why there is none. One that takes long is left out unless it was asked for."""
    asked = min(PROBES, model.d_input) if probes is None else probes
    with warnings.catch_warnings():
        if probes is None:
            warnings.simplefilter("error", CostWarning)
        try:
            return token_attribution(model, text, probes=asked, truncate=truncate, progress=progress)[0]
        except CostWarning as warning:
            return f"{warning} Ask for probes={asked} to have it all the same."
        except InputError as refusal:
            return str(refusal)


def _mixing(found: TokenAttribution) -> MixingVerdict:
    contribution = found.contribution
    others = by_offset(contribution, causal=found.causal)
    near = others.share()[:, others.positions.abs() <= NEAR].sum(1)
    return MixingVerdict(
        layers=tuple(layer + 1 for layer in found.layers),
        own=tuple(own_contribution(contribution).median(1).values.tolist()),
        outweighed=tuple(outweighed(contribution).double().mean(1).tolist()),
        near=tuple(near.tolist()) if others.sums.any() else None,
        tokens=tuple(_sources(found)),
        probes=found.probes,
        error=None if found.stderr is None else float(found.stderr.max()),
    )


def _sources(found: TokenAttribution) -> Iterator[Sources]:
    shown = found.contribution[list(first_middle_last(len(found.layers)))]
    top = shown.topk(min(SOURCES_NAMED, len(found.tokens)), dim=1)
    own = own_contribution(found.contribution)[-1].tolist()
    outdone = outweighed(found.contribution)[-1].tolist()
    for place, token in enumerate(found.tokens):
        layers = zip(top.indices[..., place].tolist(), top.values[..., place].tolist(), strict=True)
        strongest = tuple(
            tuple(Source(found.tokens[i], i, weight) for i, weight in zip(*layer, strict=True) if weight)
            for layer in layers
        )
        yield Sources(token, place, strongest, own[place], outdone[place])


def _layers(result: EffectiveAttention) -> tuple[LayerVerdict, ...]:
    verdicts = []
    for part, joint, pearson in zip(result.parts, result.joint_null_dim, result.pearson("layer"), strict=True):
        null = part.factors.null_dim
        special = torch.tensor(result.special, device=part.heads.device)
        squares, on_special = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        for _, edges in part.chunks():
            for index, weights in enumerate((edges.raw.double(), edges.effective.double())):
                squares[index] += float(weights.square().sum())
                on_special[index] += float(weights[..., special].sum()) / null.numel()
        verdicts.append(
            LayerVerdict(
                layer=part.call.layer + 1,
                null_dim=(int(null.min()), int(null.max())),
                joint_null_dim=(int(joint.min()), int(joint.max())),
                identifiable=float((null == 0).double().mean()),
                kept=float(squares[1] / squares[0]),
                pearson=float(pearson),
                special_raw=float(on_special[0]),
                special_effective=float(on_special[1]),
            )
        )
    return tuple(verdicts)


def _disagreeing(result: EffectiveAttention) -> tuple[HeadVerdict, ...]:
    """Return the heads of lowest correlation, each with the edge on which raw and effective differ most."""
    pearson = result.pearson("head")
    order = pearson.nan_to_num(1.0).flatten().argsort()[:HEADS_NAMED].tolist()
    found = []
    for layer, head in (divmod(place, pearson.shape[1]) for place in order):
        if not result.null_dim[layer, head].any():
            continue
        edges = result.at(layer=result.layers[layer], head=result.heads[head])
        query, key = divmod(int(edges.null.abs().argmax()), edges.null.shape[1])
        found.append(
            HeadVerdict(
                layer=result.layers[layer] + 1,
                head=result.heads[head] + 1,
                pearson=float(pearson[layer, head]),
                query=result.tokens[query],
                key=result.tokens[key],
                raw=float(edges.raw[query, key]),
                effective=float(edges.effective[query, key]),
            )
        )
    return tuple(found)
