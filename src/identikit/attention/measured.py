"""What people read from attention: each reading is declared once, by what multiplies the weights.

Readings of one head, and their mean over heads, multiply each weight by a number that no attention with the same output
changes. Readings through layers are products of such layers (`maths.chain`). Gradients are the model's own, and held.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from identikit.attention.layer import Layer
from identikit.shapes import Float, Tensor

Factor = Float[Tensor, "head #query key"]


class MeasuredLayer(NamedTuple):
    """A layer that is read, and the derivative of the target by its head outputs where the reading needs one."""

    layer: Layer
    gradient: Float[Tensor, "head query d_v"] | None = None

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


@dataclass(frozen=True)
class ReadingKind:
    """A reading of attention: its name, what it is, and the numbers that multiply the weights.

    - `axes`: "layer head query key", "layer query key" for the mean over heads, or "layer output input" through layers
    - `factor`: the numbers; None: 1
    - `needs_target`: whether it needs the derivative of a target
    - `joint`: it is the length of the sum over heads of what a key adds, not a number times the weight
    - `keep`, `give`: through layers, what a token keeps of what it had, and takes of what its heads bring
    """

    name: str
    meaning: str
    axes: tuple[str, ...]
    factor: Callable[[MeasuredLayer], Factor] | None = None
    needs_target: bool = False
    joint: bool = False
    keep: float = 0.0
    give: float = 1.0

    @property
    def through(self) -> bool:
        """Whether it goes through layers."""
        return self.axes[-1] == "input"


READINGS: dict[str, ReadingKind] = {}
_EDGE = ("layer", "head", "query", "key")
_MEAN = ("layer", "query", "key")
_THROUGH = ("layer", "output", "input")


def reading(
    name: str, axes: tuple[str, ...] = _EDGE, *, needs_target: bool = False, keep: float = 0.0, give: float = 1.0
) -> Callable[[Callable[[MeasuredLayer], Factor]], ReadingKind]:
    """Declare a reading by the function that gives the numbers on the weights; the docstring says what it is."""

    def declare(factor: Callable[[MeasuredLayer], Factor]) -> ReadingKind:
        meaning = " ".join((factor.__doc__ or "").split())
        READINGS[name] = ReadingKind(name, meaning, axes, factor, needs_target, keep=keep, give=give)
        return READINGS[name]

    return declare


def _ones(measured: MeasuredLayer) -> Factor:
    return torch.ones_like(measured.values[:, None, :, 0])


@reading("attention")
def attention(measured: MeasuredLayer) -> Factor:
    """The attention weight itself."""
    return _ones(measured)


@reading("mean", _MEAN)
def mean(measured: MeasuredLayer) -> Factor:
    """The attention weight, averaged over the heads of a layer."""
    return _ones(measured)


@reading("value norm")
def value_norm(measured: MeasuredLayer) -> Factor:
    """Length of what a key adds to the output, ‖a v H‖ (Kobayashi et al., 2020)."""
    passed = measured.values[:, None] * measured.gate[:, :, None]  # head, query or 1, key, d_v
    squared = ((passed @ measured.products[:, None]) * passed).sum(-1)
    return squared.clamp(min=0).sqrt()


@reading("output share")
def output_share(measured: MeasuredLayer) -> Factor:
    """Share of the head's output that a key adds along the output's direction, a⟨vH, oH⟩/‖oH‖²."""
    output = measured.layer.made.output.double() * measured.gate
    toward = output @ measured.products
    length = (toward * output).sum(-1, keepdim=True)
    toward = torch.where(length > 0, toward / length, 0.0)
    return (toward * measured.gate) @ measured.values.mT


def _derivative(measured: MeasuredLayer) -> Factor:
    assert measured.gradient is not None
    return measured.gradient.double() @ measured.values.mT


@reading("gradient", needs_target=True)
def gradient(measured: MeasuredLayer) -> Factor:
    """Weight times the derivative of the target by it, a·∂y/∂a (gradient × attention)."""
    return _derivative(measured)


READINGS["norm"] = ReadingKind(
    "norm", "Length of what a key adds to the layer's output, ‖Σ_h a v H‖ (Kobayashi et al., 2020).", _MEAN, joint=True
)


@reading("rollout", _THROUGH, keep=0.5, give=0.5)
def rollout(measured: MeasuredLayer) -> Factor:
    """Attention rolled out through the layers, with half of it kept as residual (Abnar and Zuidema, 2020)."""
    return _ones(measured)


@reading("rollout without residual", _THROUGH)
def plain_rollout(measured: MeasuredLayer) -> Factor:
    """Attention multiplied through the layers, without the residual (Abnar and Zuidema, 2020)."""
    return _ones(measured)


@reading("relevance", _THROUGH, needs_target=True, keep=1.0, give=1.0)
def relevance(measured: MeasuredLayer) -> Factor:
    """Relevance R ← R + mean(∇A ⊙ A)⁺ R through the layers (Chefer et al., 2021)."""
    return _derivative(measured).clamp(min=0)
