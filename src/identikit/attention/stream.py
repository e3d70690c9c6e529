"""What attention is added to: the residual stream of each layer, and the norms that follow, with their scale held.

Nothing here knows architectures. One run is watched: a layer is understood if the input of some norm is the sum of what
entered the layer and what its heads bring, or if the feed-forward part is what is missing to the layer's output. A
layer that scales or normalises what its heads bring before adding it is refused.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from identikit.attention.layer import Layer
from identikit.errors import InputError
from identikit.models.blocks import Trace
from identikit.models.load.linear import linear_weight
from identikit.models.model import Model
from identikit.models.taps.tap import AttentionCall
from identikit.models.text_run import TextRun
from identikit.shapes import Float, Tensor

_LARGE_INPUT = 1e3  # shows a norm's gains: beside it, the epsilon in its scale is nothing
_ROUNDINGS = 1e3  # units in the last place of the largest entry by which equal sums may differ


class FrozenNorm(NamedTuple):
    r"""A norm as it acts on this text, its scale held: $x \mapsto \gamma \odot (x - \bar x) / \sigma_i$, linear in x.

    - `gain`: $\gamma$; `centred`: whether the mean is subtracted, as LayerNorm does and RMSNorm does not
    - `scale`: $\sigma_i$ of each token
    """

    gain: Float[Tensor, "d"]
    centred: bool
    scale: Float[Tensor, "token"]

    def without_scale(self, vectors: Float[Tensor, "*vector d"]) -> Float[Tensor, "*vector d"]:
        """Return what the norm makes of vectors before it divides by a token's scale."""
        return self.gain * (vectors - vectors.mean(-1, keepdim=True) if self.centred else vectors)


class StreamLayer(NamedTuple):
    """The stream that a layer's attention is added to.

    - `residual`: what enters the layer; `sum`: that plus what the heads bring and the bias, after the norm if one
      follows
    - `norms`: those of a layer that normalises its sums, after attention and after the feed-forward part; else none
    """

    residual: Float[Tensor, "token d"]
    sum: Float[Tensor, "token d"]
    norms: tuple[FrozenNorm, ...]


class _ModuleCall(NamedTuple):
    module: nn.Module
    input: Float[Tensor, "token d"]
    output: Float[Tensor, "token d"]

    @property
    def is_norm(self) -> bool:
        """Whether the module has one gain for each entry of a vector."""
        weight = getattr(self.module, "weight", None)
        return isinstance(weight, torch.Tensor) and weight.shape == self.input.shape[-1:]


class WatchedRun(NamedTuple):
    """A run of one text: its trace, and the modules that ran after each layer's attention, with what they made."""

    model: Model
    trace: Trace
    calls: dict[int, list[_ModuleCall]]


def watched_run(text_run: TextRun) -> WatchedRun:
    """Run a text again and record input and output of every module that maps each token's vector to a vector."""
    model = text_run.model
    calls: dict[int, list[_ModuleCall]] = defaultdict(list)
    handles = []
    last_layer = 0
    vectors = (len(text_run.tokens), model.d_model)
    shapes = ((1, *vectors), vectors)  # OPT drops the batch for its feed-forward part

    def record(module: nn.Module, args: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        tensors = [value for value in (*args[:1], output) if isinstance(value, torch.Tensor)]
        if len(tensors) == 2 and all(tensor.shape in shapes for tensor in tensors):
            copies = [tensor.reshape(vectors).to(torch.float64, copy=True) for tensor in tensors]  # Falcon adds to it
            calls[last_layer].append(_ModuleCall(module, *copies))

    def visit(call: AttentionCall) -> None:
        nonlocal last_layer
        last_layer = call.layer
        if not handles:  # only now, inside the run: hooks that were there before it would have the model proved anew
            handles.extend(module.register_forward_hook(record) for module in model.hf.modules())

    try:
        trace = model.trace(text_run.batch, visit)
    finally:
        for handle in handles:
            handle.remove()
    return WatchedRun(model, trace, calls)


def stream_of(run: WatchedRun, layer: Layer) -> StreamLayer:
    """Return the stream that a layer with all of its heads adds to; refuse a layer that does more than add."""
    number = layer.call.layer
    layer_input = run.trace.blocks[number].hidden[0].double()
    layer_output = run.trace.hidden[number][0].double()
    head_outputs = layer.recomputed.output.double()
    if layer.gate is not None:
        head_outputs = head_outputs * layer.gate.double()
    attended = layer_input + (head_outputs @ layer.projection.double()).sum(0)
    norms = [call for call in run.calls[number] if call.is_norm]
    for call in norms:
        if _is_rounding(call.input - attended, attended, run.model):
            last_norms = [norm for norm in norms if torch.equal(norm.output, layer_output)]
            if not last_norms:
                return StreamLayer(layer_input, call.input, ())
            frozen = frozen_norm(run.model, call), frozen_norm(run.model, last_norms[0])
            return StreamLayer(layer_input, call.output, frozen)
    for call in reversed(run.calls[number]):
        if _is_rounding(call.output - (layer_output - attended), attended, run.model):  # both parts side by side
            return StreamLayer(layer_input, layer_output - call.output, ())
    raise InputError(
        f"Layer {number} of {run.model.name} does not simply add what its heads bring to what entered it: it scales or "
        "normalises it first. Use a measure without the residual."
    )


def logit_directions(run: WatchedRun, layers: Sequence[Layer], token: int) -> Float[Tensor, "token d"]:
    """Return for each token the direction in which its stream moves its logit of a token of the vocabulary, norm held.

    `layers` are those whose attention goes past all later layers, so none of them may normalise its sum.
    """
    unembedding = run.model.hf.get_output_embeddings()
    logits = run.trace.logits
    if unembedding is not None and logits is not None and not any(stream_of(run, layer).norms for layer in layers):
        weight = linear_weight(unembedding, run.model.dtype).mT.double()
        for call in run.calls[max(run.calls)]:
            if torch.equal(call.input, run.trace.hidden[-1][0].double()) and call.is_norm:
                expected = call.output @ weight.mT
                if _is_rounding(logits[0] - expected, expected, run.model):  # but for a bias of each logit
                    norm = frozen_norm(run.model, call)
                    weighted = norm.gain * weight[token]
                    centre = weighted.mean() if norm.centred else 0.0
                    return (weighted - centre) / norm.scale[:, None]
    raise InputError(
        f"What an edge adds to a logit is not defined for {run.model.name}: its logits are not made from the sum of "
        "what its layers add, by one norm and one projection."
    )


def frozen_norm(model: Model, call: _ModuleCall) -> FrozenNorm:
    """Find out what a norm does from its outputs for 0, for ±1000, and for this text."""
    sign = torch.ones_like(call.input[:1])
    sign[:, 1::2] = -1.0
    dtype = next(call.module.parameters()).dtype
    with model.prepared():
        offset, large = (call.module(size * sign[None].to(dtype))[0].double() for size in (0.0, _LARGE_INPUT))
    gain = ((large - offset) * sign)[0]
    for centred in (True, False):
        norm = FrozenNorm(gain, centred, torch.ones_like(call.input[:, 0]))
        vectors = norm.without_scale(call.input)
        scale = vectors.norm(dim=-1) / (call.output - offset).norm(dim=-1)
        difference = vectors / scale[:, None] + offset - call.output
        if _is_rounding(difference, call.output, model, up_to_bias=False):
            return norm._replace(scale=scale)
    raise InputError(f"{type(call.module).__name__} of {model.name} is not a norm that is linear with its scale held.")


def _is_rounding(difference: Float[Tensor, "token d"], size: Tensor, model: Model, *, up_to_bias: bool = True) -> bool:
    """Whether a difference is rounding; with `up_to_bias`, but for a vector that is the same for all tokens."""
    if up_to_bias:
        difference = difference - difference.mean(0)
    eps = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)  # many a float64 model norms in float32
    return float(difference.abs().max()) <= min(0.05, _ROUNDINGS * eps) * float(size.abs().max())
