"""Attention measures: what people compute from attention weights, each declared once.

Measures of one head, and their means over heads, multiply each weight by a factor that is the same in all alternatives.
Measures through layers are products of such layers (`maths.chain`). Joint measures combine all heads: as heads move
independently, an edge's weights in all heads can lie anywhere in a box. Gradients are the model's own, and held.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from identikit.attention.layer import Layer
from identikit.attention.stream import FrozenNorm, StreamLayer
from identikit.errors import InputError
from identikit.maths.boxes import norm_ends, norm_of
from identikit.models.target import Target
from identikit.shapes import Float, Tensor

Factor = Float[Tensor, "head #query key"]


class MeasureValues(NamedTuple):
    """A measure of raw and of effective attention, its ends over all alternatives, and how far from sharp these are."""

    raw: Tensor
    effective: Tensor
    lower: Tensor
    upper: Tensor
    gap: Tensor

    def apply(self, change: Callable[[Tensor], Tensor]) -> "MeasureValues":
        """Return the values with the same change made to each array."""
        return MeasureValues(*map(change, self))


@dataclass(frozen=True)
class MeasureKind:
    """An attention measure: its name, what it is, and how it is computed.

    - `axes`: "layer head query key", "layer query key" for the mean over heads, or "layer output input" through layers
    - `factor`: returns what multiplies the weights of a layer; None: 1
    - `joint`: returns the values of a layer from the weights of all its heads and their ends, (head, query, key);
      through layers, its rows are then divided by their sums
    - `needs`: what either function takes after these: "gradient" (the derivative of the target by the head outputs),
      "direction" (what moves the target's logit) or "stream" (what the layer adds to)
    - `keep`, `give`: through layers, what a token keeps of what it had, and takes of what its heads bring
    """

    name: str
    meaning: str
    axes: tuple[str, ...]
    factor: Callable[..., Factor] | None = None
    joint: Callable[..., MeasureValues] | None = None
    needs: str = ""
    keep: float = 0.0
    give: float = 1.0

    @property
    def through(self) -> bool:
        """Whether it goes through layers."""
        return self.axes[-1] == "input"

    @property
    def needs_target(self) -> bool:
        """Whether it is about a target, such as a logit."""
        return self.needs in ("gradient", "direction")

    def check_target(self, target: Target) -> None:
        """Refuse a target that it cannot be about."""
        if self.needs == "direction" and target.token is None:
            raise InputError(f"{self.name!r} is of a token's logit. Give target= a token, or its number.")


_EDGE = ("layer", "head", "query", "key")
_LAYER = ("layer", "query", "key")
_THROUGH = ("layer", "output", "input")
_ROLLOUT = "Attention rolled out through the layers, with half of it kept as residual (Abnar and Zuidema, 2020)."
_PRODUCT = "Attention multiplied through the layers, without the residual (Abnar and Zuidema, 2020)."

MEASURE_KINDS = {
    kind.name: kind
    for kind in (
        MeasureKind("attention", "The attention weight itself.", _EDGE),
        MeasureKind("mean", "The attention weight, averaged over the heads of a layer.", _LAYER),
        MeasureKind("rollout", _ROLLOUT, _THROUGH, keep=0.5, give=0.5),
        MeasureKind("rollout without residual", _PRODUCT, _THROUGH),
    )
}


def measure_kind(
    name: str, axes: tuple[str, ...] = _EDGE, *, joint: bool = False, **options: Any
) -> Callable[[Callable[..., Factor | MeasureValues]], MeasureKind]:
    """Declare a measure by its factor, or by its `joint` function; the docstring says what the measure is."""

    def declare(compute: Callable[..., Factor | MeasureValues]) -> MeasureKind:
        meaning = " ".join((compute.__doc__ or "").split())
        functions: dict[str, Any] = {"joint" if joint else "factor": compute}
        MEASURE_KINDS[name] = MeasureKind(name, meaning, axes, **functions, **options)
        return MEASURE_KINDS[name]

    return declare


# What the functions below are made of


def _values(layer: Layer) -> Float[Tensor, "head key d_v"]:
    """Return the values of each head."""
    return layer.call.value[0, layer.heads // layer.call.groups].double()


def _gate(layer: Layer) -> Float[Tensor, "head #query d_v"]:
    """Return what multiplies each row of the head output before the output projection; 1 where nothing does."""
    return torch.ones_like(_values(layer)[:, :1]) if layer.gate is None else layer.gate.double()


def _projection_products(layer: Layer) -> Float[Tensor, "head d_v d_v"]:
    r"""Return the inner products $H H^\top$ of each head's slice of the output projection."""
    projection = layer.projection.double()
    return projection @ projection.mT


def _additions(layer: Layer) -> Float[Tensor, "key head d"]:
    """Return what a key adds to the layer's output with a weight of 1, by head."""
    if layer.gate is not None:
        raise InputError("Heads cannot be put together where a gate multiplies their outputs: what a key adds varies.")
    return (_values(layer) @ layer.projection.double()).transpose(0, 1)


# Of one head


@measure_kind("value norm")
def value_norm(layer: Layer) -> Factor:
    """Length of what a key adds to the output, ‖a v H‖ (Kobayashi et al., 2020)."""
    gated = _values(layer)[:, None] * _gate(layer)[:, :, None]  # head, query or 1, key, d_v
    squared = ((gated @ _projection_products(layer)[:, None]) * gated).sum(-1)
    return squared.clamp(min=0).sqrt()


@measure_kind("output share")
def output_share(layer: Layer) -> Factor:
    """Share of the head's output that a key adds along the output's direction, a⟨vH, oH⟩/‖oH‖²."""
    output = layer.recomputed.output.double() * _gate(layer)
    direction = output @ _projection_products(layer)
    squared = (direction * output).sum(-1, keepdim=True)
    direction = torch.where(squared > 0, direction / squared, 0.0)
    return (direction * _gate(layer)) @ _values(layer).mT


def _weight_derivative(layer: Layer, gradient: Float[Tensor, "head query d_v"]) -> Factor:
    return gradient.double() @ _values(layer).mT


@measure_kind("gradient", needs="gradient")
def gradient(layer: Layer, gradient: Float[Tensor, "head query d_v"]) -> Factor:
    """Weight times the derivative of the target by it, a·∂y/∂a (gradient × attention)."""
    return _weight_derivative(layer, gradient)


@measure_kind("logit", needs="direction")
def logit(layer: Layer, direction: Float[Tensor, "query d"]) -> Factor:
    """What an edge adds to the target's logit at the query's own place, past all later layers, a⟨vH, u⟩, with the scale
    of the final norm held (direct logit attribution)."""
    return (direction @ layer.projection.double().mT * _gate(layer)) @ _values(layer).mT


# Of all heads together


@measure_kind("norm", _LAYER, joint=True)
def norm(layer: Layer, weights: MeasureValues) -> MeasureValues:
    """Length of what a key adds to the layer's output, ‖Σ_h a v H‖ (Kobayashi et al., 2020)."""
    return _lengths(_additions(layer), weights)


@measure_kind("norm with residual", _LAYER, joint=True, needs="stream")
def norm_with_residual(layer: Layer, weights: MeasureValues, stream: StreamLayer) -> MeasureValues:
    """Length of what a key adds to the stream, of which a token's own is part, ‖Σ_h a v H + x‖ (Kobayashi et al.,
    2021)."""
    return _lengths(_additions(layer), weights, stream.residual)


@measure_kind("norm after layer norm", _LAYER, joint=True, needs="stream")
def norm_after_layer_norm(layer: Layer, weights: MeasureValues, stream: StreamLayer) -> MeasureValues:
    """Length of what a key adds to the stream after the norm that follows, its scale held (Kobayashi et al., 2021)."""
    if not stream.norms:
        raise InputError(
            "'norm after layer norm' cannot be read here: this model normalises before its attention, not after."
        )
    return _lengths(_additions(layer), weights, stream.residual, stream.norms[:1])


def _lengths(
    vectors: Float[Tensor, "key head d"],
    weights: MeasureValues,
    residual: Float[Tensor, "token d"] | None = None,
    norms: tuple[FrozenNorm, ...] = (),
) -> MeasureValues:
    """Return the length of what each key adds through all heads, with a token's own `residual`, after some `norms`."""
    shape = weights.raw.shape[1:]
    residual_weights = weights.raw.new_zeros(0, shape.numel())
    if residual is not None:  # one more head, whose weight is known: 1 on the token itself
        vectors = torch.cat([vectors, residual[:, None]], dim=1)
        residual_weights = torch.eye(*shape).to(weights.raw).reshape(1, -1)
    scale = weights.raw.new_ones(shape[0], 1)
    for layer_norm in norms:
        vectors = layer_norm.without_scale(vectors)
        scale = scale * layer_norm.scale[:, None]
    products = (vectors @ vectors.mT).repeat(shape[0], 1, 1)  # edge after edge, by query
    raw, effective, lower, upper = (torch.cat([array.flatten(1), residual_weights]).mT for array in weights[:4])
    gap = torch.cat([weights.gap.flatten(1), torch.zeros_like(residual_weights)]).mT
    ends = norm_ends(products, lower, upper, ~gap.isnan().any(-1))  # what was not bounded in time is not searched
    gap = (gap * products.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()).sum(-1)
    lengths = MeasureValues(
        norm_of(products, raw), norm_of(products, effective), ends.least, ends.greatest, ends.gap + gap
    )
    return lengths.apply(lambda array: array.reshape(shape) / scale)


# Through layers


@measure_kind("relevance", _THROUGH, needs="gradient", keep=1.0, give=1.0)
def relevance(layer: Layer, gradient: Float[Tensor, "head query d_v"]) -> Factor:
    """Relevance R ← R + mean(∇A ⊙ A)⁺ R through the layers (Chefer et al., 2021)."""
    return _weight_derivative(layer, gradient).clamp(min=0)


@measure_kind("globenc", _THROUGH, joint=True, needs="stream")
def globenc(layer: Layer, weights: MeasureValues, stream: StreamLayer) -> MeasureValues:
    """Lengths of what tokens add, with residual and the layer's norms, as shares of a row and multiplied through the
    layers (GlobEnc, Modarressi et al., 2022)."""
    return _lengths(_additions(layer), weights, stream.residual, stream.norms)


@measure_kind("alti", _THROUGH, joint=True, needs="stream")
def alti(layer: Layer, weights: MeasureValues, stream: StreamLayer) -> MeasureValues:
    """How much nearer what a token adds is to the whole than nothing is, ‖y‖₁ − ‖y − y_j‖₁ or 0, as shares of a row and
    multiplied through the layers (ALTI, Ferrando et al., 2022)."""
    vectors = _additions(layer)
    residual = stream.residual
    scale = torch.ones_like(residual[:, 0])
    for layer_norm in stream.norms[:1]:
        vectors = layer_norm.without_scale(vectors)
        residual = layer_norm.without_scale(residual)
        scale = layer_norm.scale
    middle = (weights.lower + weights.upper) / 2
    maps = torch.stack([weights.raw, weights.effective, middle]).permute(3, 0, 2, 1)  # key, map, query, head
    reach = ((weights.upper - weights.lower) / 2).permute(2, 1, 0)  # key, query, head
    sizes = vectors.abs()
    rows = []
    for query, output in enumerate(stream.sum):
        added = maps[:, :, query] @ vectors  # key, map, d
        added[query] += residual[query]
        distances = (output - added / scale[query]).abs()
        room = (reach[:, query, None] @ sizes)[:, 0] / scale[query]
        raw, effective = distances[:, :2].sum(-1).unbind(1)
        farthest = (distances[:, 2] + room).sum(-1)
        nearest = (distances[:, 2] - room).clamp(min=0).sum(-1)
        rows.append((output.abs().sum() - torch.stack([raw, effective, farthest, nearest])).clamp(min=0))
    raw, effective, lower, upper = torch.stack(rows, dim=1)
    return MeasureValues(raw, effective, lower, upper, weights.gap.sum(0))
