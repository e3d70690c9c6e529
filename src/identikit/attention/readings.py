"""What people read from attention: each reading is declared once, by what it makes of the weights.

Readings of one head, and their mean over heads, multiply each weight by a number that no attention with the same output
changes. Readings through layers are products of such layers (`maths.chain`). Others put all heads together: an edge's
weights in all heads lie anywhere in a box, as heads are independent. Gradients are the model's own, and held.
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


class Numbers(NamedTuple):
    """What a reading is: of raw attention, of effective attention, its ends, and how far these are from sharp ones."""

    raw: Tensor
    effective: Tensor
    lower: Tensor
    upper: Tensor
    gap: Tensor


class MeasuredLayer(NamedTuple):
    """A layer that is read, and what a reading needs beside it.

    - `gradient`: the derivative of the target by the head outputs; `direction`: what moves the target's logit
    - `stream`: what the layer adds to
    """

    layer: Layer
    gradient: Float[Tensor, "head query d_v"] | None = None
    direction: Float[Tensor, "query d"] | None = None
    stream: StreamLayer | None = None

    @property
    def values(self) -> Float[Tensor, "head key d_v"]:
        """The values of each head."""
        call = self.layer.call
        return call.value[0, self.layer.heads // call.groups].double()

    @property
    def gate(self) -> Float[Tensor, "head #query d_v"]:
        """What multiplies each row of the head output before the output projection; 1 where nothing does."""
        gate = self.layer.gate
        return torch.ones_like(self.values[:, :1]) if gate is None else gate.double()

    @property
    def products(self) -> Float[Tensor, "head d_v d_v"]:
        r"""The inner products $H H^\top$ of each head's slice of the output projection."""
        projection = self.layer.projection.double()
        return projection @ projection.mT

    @property
    def added(self) -> Float[Tensor, "key head d"]:
        """What a key adds to the layer's output with a weight of 1, by head."""
        if self.layer.gate is not None:
            raise InputError(
                "Heads cannot be put together where a gate multiplies their outputs: what a key adds varies."
            )
        return (self.values @ self.layer.projection.double()).transpose(0, 1)

    @property
    def adds_to(self) -> StreamLayer:
        """What the layer adds to, where it was asked for."""
        assert self.stream is not None
        return self.stream


@dataclass(frozen=True)
class ReadingKind:
    """A reading of attention: its name, what it is, and how it is made.

    - `axes`: "layer head query key", "layer query key" for the mean over heads, or "layer output input" through layers
    - `factor`: the numbers that multiply the weights, None: 1; or `joint`: what it makes of the weights of all heads
      and their ends, (head, query, key), one layer at a time. Through layers, its rows are divided by their sums
    - `needs`: what it needs beside the layer: "gradient", "direction" or "stream"
    - `keep`, `give`: through layers, what a token keeps of what it had, and takes of what its heads bring
    """

    name: str
    meaning: str
    axes: tuple[str, ...]
    factor: Callable[[MeasuredLayer], Factor] | None = None
    joint: Callable[[MeasuredLayer, Numbers], Numbers] | None = None
    needs: str = ""
    keep: float = 0.0
    give: float = 1.0

    @property
    def through(self) -> bool:
        """Whether it goes through layers."""
        return self.axes[-1] == "input"

    @property
    def needs_target(self) -> bool:
        """Whether it is of a target, such as a logit."""
        return self.needs in ("gradient", "direction")

    def check_aim(self, aim: "Target") -> None:
        """Refuse a target that it cannot be of."""
        if self.needs == "direction" and aim.token is None:
            raise InputError(f"{self.name!r} is of a token's logit. Give target= a token, or its number.")


READINGS: dict[str, ReadingKind] = {}
_EDGE = ("layer", "head", "query", "key")
_LAYER = ("layer", "query", "key")
_THROUGH = ("layer", "output", "input")


def reading(
    name: str,
    axes: tuple[str, ...] = _EDGE,
    *,
    joint: bool = False,
    needs: str = "",
    keep: float = 0.0,
    give: float = 1.0,
) -> Callable[[Callable[..., Factor | Numbers]], ReadingKind]:
    """Declare a reading by its factor, or by what it makes of all heads jointly; the docstring says what it is."""

    def declare(made: Callable[..., Factor | Numbers]) -> ReadingKind:
        meaning = " ".join((made.__doc__ or "").split())
        how: dict[str, Any] = {"joint" if joint else "factor": made}
        READINGS[name] = ReadingKind(name, meaning, axes, needs=needs, keep=keep, give=give, **how)
        return READINGS[name]

    return declare


for _plain in (
    ReadingKind("attention", "The attention weight itself.", _EDGE),
    ReadingKind("mean", "The attention weight, averaged over the heads of a layer.", _LAYER),
    ReadingKind(
        "rollout",
        "Attention rolled out through the layers, with half of it kept as residual (Abnar and Zuidema, 2020).",
        _THROUGH,
        keep=0.5,
        give=0.5,
    ),
    ReadingKind(
        "rollout without residual",
        "Attention multiplied through the layers, without the residual (Abnar and Zuidema, 2020).",
        _THROUGH,
    ),
):
    READINGS[_plain.name] = _plain


# Of one head


@reading("value norm")
def value_norm(measured: MeasuredLayer) -> Factor:
    """Length of what a key adds to the output, ‖a v H‖ (Kobayashi et al., 2020)."""
    passed = measured.values[:, None] * measured.gate[:, :, None]  # head, query or 1, key, d_v
    squared = ((passed @ measured.products[:, None]) * passed).sum(-1)
    return squared.clamp(min=0).sqrt()


@reading("output share")
def output_share(measured: MeasuredLayer) -> Factor:
    """Share of the head's output that a key adds along the output's direction, a⟨vH, oH⟩/‖oH‖²."""
    output = measured.layer.recomputed.output.double() * measured.gate
    toward = output @ measured.products
    length = (toward * output).sum(-1, keepdim=True)
    toward = torch.where(length > 0, toward / length, 0.0)
    return (toward * measured.gate) @ measured.values.mT


def _derivative(measured: MeasuredLayer) -> Factor:
    assert measured.gradient is not None
    return measured.gradient.double() @ measured.values.mT


@reading("gradient", needs="gradient")
def gradient(measured: MeasuredLayer) -> Factor:
    """Weight times the derivative of the target by it, a·∂y/∂a (gradient × attention)."""
    return _derivative(measured)


@reading("logit", needs="direction")
def logit(measured: MeasuredLayer) -> Factor:
    """What an edge adds to the target's logit at the query's own place, past all later layers, a⟨vH, u⟩, with the scale
    of the final norm held (direct logit attribution)."""
    assert measured.direction is not None
    return (measured.direction @ measured.layer.projection.double().mT * measured.gate) @ measured.values.mT


# Of all heads together


@reading("norm", _LAYER, joint=True)
def norm(measured: MeasuredLayer, weights: Numbers) -> Numbers:
    """Length of what a key adds to the layer's output, ‖Σ_h a v H‖ (Kobayashi et al., 2020)."""
    return _lengths(measured.added, weights)


@reading("norm with residual", _LAYER, joint=True, needs="stream")
def norm_with_residual(measured: MeasuredLayer, weights: Numbers) -> Numbers:
    """Length of what a key adds to the stream, of which a token's own is part, ‖Σ_h a v H + x‖ (Kobayashi et al.,
    2021)."""
    return _lengths(measured.added, weights, measured.adds_to.residual)


@reading("norm after layer norm", _LAYER, joint=True, needs="stream")
def norm_after_layer_norm(measured: MeasuredLayer, weights: Numbers) -> Numbers:
    """Length of what a key adds to the stream after the norm that follows, its scale held (Kobayashi et al., 2021)."""
    if not measured.adds_to.norms:
        raise InputError(
            "'norm after layer norm' cannot be read here: this model normalises before its attention, not after."
        )
    return _lengths(measured.added, weights, measured.adds_to.residual, measured.adds_to.norms[:1])


def _lengths(
    vectors: Float[Tensor, "key head d"],
    weights: Numbers,
    residual: Float[Tensor, "token d"] | None = None,
    norms: tuple[FrozenNorm, ...] = (),
) -> Numbers:
    """Return the lengths of what keys add with weights in a box, and to a token's own vector, as norms turn them."""
    shape = weights.raw.shape[1:]
    more = weights.raw.new_zeros(0, shape.numel())
    if residual is not None:
        vectors = torch.cat([vectors, residual[:, None]], dim=1)
        more = torch.eye(*shape).to(weights.raw).reshape(1, -1)  # one more head, whose weight is known
    for turn in norms:
        vectors = turn.turned(vectors)
    products = (vectors @ vectors.mT).repeat(shape[0], 1, 1)  # an edge after the other, by query
    raw, effective, lower, upper = (torch.cat([part.flatten(1), more]).mT for part in weights[:4])
    gap = torch.cat([weights.gap.flatten(1), torch.zeros_like(more)]).mT
    ends = norm_ends(products, lower, upper, ~gap.isnan().any(-1))  # what was not bounded in time takes no more
    off = (gap * products.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()).sum(-1)
    found = norm_of(products, raw), norm_of(products, effective), ends.least, ends.greatest, ends.gap + off
    scale = weights.raw.new_ones(shape[0], 1)
    for turn in norms:
        scale = scale * turn.scale[:, None]
    return Numbers(*(part.reshape(shape) / scale for part in found))


# Through layers


@reading("relevance", _THROUGH, needs="gradient", keep=1.0, give=1.0)
def relevance(measured: MeasuredLayer) -> Factor:
    """Relevance R ← R + mean(∇A ⊙ A)⁺ R through the layers (Chefer et al., 2021)."""
    return _derivative(measured).clamp(min=0)


@reading("globenc", _THROUGH, joint=True, needs="stream")
def globenc(measured: MeasuredLayer, weights: Numbers) -> Numbers:
    """Lengths of what tokens add, with residual and the layer's norms, as shares of a row and multiplied through the
    layers (GlobEnc, Modarressi et al., 2022)."""
    return _lengths(measured.added, weights, measured.adds_to.residual, measured.adds_to.norms)


@reading("alti", _THROUGH, joint=True, needs="stream")
def alti(measured: MeasuredLayer, weights: Numbers) -> Numbers:
    """How much nearer what a token adds is to the whole than nothing is, ‖y‖₁ − ‖y − y_j‖₁ or 0, as shares of a row and
    multiplied through the layers (ALTI, Ferrando et al., 2022)."""
    stream = measured.adds_to
    vectors = measured.added
    residual = stream.residual
    scale = torch.ones_like(residual[:, 0])
    for turn in stream.norms[:1]:
        vectors = turn.turned(vectors)
        residual = turn.turned(residual)
        scale = turn.scale
    middle = (weights.lower + weights.upper) / 2
    reach = ((weights.upper - weights.lower) / 2).permute(2, 1, 0)  # key, query, head
    maps = torch.stack([weights.raw, weights.effective, middle]).permute(3, 0, 2, 1)
    sizes = vectors.abs()
    rows = []
    for query, whole in enumerate(stream.sum):
        added = maps[:, :, query] @ vectors  # key, map, d
        added[query] += residual[query]
        apart = (whole - added / scale[query]).abs()
        room = (reach[:, query, None] @ sizes)[:, 0] / scale[query]
        raw, effective = apart[:, :2].sum(-1).unbind(1)
        far = (apart[:, 2] + room).sum(-1)
        near = (apart[:, 2] - room).clamp(min=0).sum(-1)
        rows.append((whole.abs().sum() - torch.stack([raw, effective, far, near])).clamp(min=0))
    raw, effective, lower, upper = torch.stack(rows, dim=1)
    return Numbers(raw, effective, lower, upper, weights.gap.sum(0))
