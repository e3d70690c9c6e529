"""The main job: what can be said of a model's attention on one text, as numbers that words are made from."""

from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

import torch

from identikit.analyses.attention import Change, EffectiveAttention, effective_attention
from identikit.data import read_texts
from identikit.models.model import Model
from identikit.results import Provenance
from identikit.text import Text

HEADS_NAMED = 5  # how many heads whose raw and effective attention disagree are named


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
class Explanation:
    """What can be said of a model's attention on one text."""

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
    provenance: Provenance

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, numbers and strings, for JSON."""
        return asdict(self) | {"change": self.change._asdict()}


def sample_text() -> Text:
    """Return the embedded sample: the longest of the sample pairs."""
    return max(sample_texts(), key=lambda pair: sum(map(len, pair)))


def sample_texts() -> list[Text]:
    """Return the embedded sample pairs, written for this package."""
    return list(read_texts(str(files("identikit") / "samples.tsv"), columns=["first", "second"]))


def explain(model: Model, text: Text | None = None, *, truncate: bool = False) -> Explanation:
    """Say what can be said of a model's attention on a text; without one, on the embedded sample."""
    result = effective_attention(model, sample_text() if text is None else text, truncate=truncate)[0]
    return Explanation(
        model=model.name,
        causal=model.causal,
        n_layers=model.n_layers,
        n_heads=model.n_heads,
        d_value=model.d_value,
        tokens=result.tokens,
        layers=tuple(_layer(result, place) for place in range(len(result.layers))),
        heads=_disagreeing(result),
        pearson=float(result.pearson()),
        residual=float(result.residual.max()),
        change=result.verify(),
        provenance=result.provenance,
    )


def _layer(result: EffectiveAttention, place: int) -> LayerVerdict:
    part = result.parts[place]
    null, joint = part.factors.null_dim, result.joint_null_dim[place]
    special = torch.tensor(result.special, device=part.heads.device)
    squares, on_special = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for _, edges in part.chunks():
        for index, weights in enumerate((edges.raw.double(), edges.effective.double())):
            squares[index] += float(weights.square().sum())
            on_special[index] += float(weights[..., special].sum())
    on_special /= null.numel()
    return LayerVerdict(
        layer=result.layers[place] + 1,
        null_dim=(int(null.min()), int(null.max())),
        joint_null_dim=(int(joint.min()), int(joint.max())),
        identifiable=float((null == 0).double().mean()),
        kept=float(squares[1] / squares[0]),
        pearson=float(result.pearson("layer")[place]),
        special_raw=float(on_special[0]),
        special_effective=float(on_special[1]),
    )


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
