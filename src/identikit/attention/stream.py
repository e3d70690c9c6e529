"""What attention is added to: the residual stream of each layer, and the norms that follow, with their scale held.

Nothing here knows architectures. One run is watched: a layer is understood if some norm is given the sum of what
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

_FAR = 1e3  # how large the input is that shows a norm's gains
_NEAR = 1e3  # roundings, of the largest number, that two sums may differ by


class FrozenNorm(NamedTuple):
    r"""A norm as it acts on this text, its scale held: $x \mapsto \gamma \odot (x - \bar x) / \sigma_i$, linear in x.

    - `gain`: $\gamma$; `centred`: whether the mean is taken off, as LayerNorm does and RMSNorm does not
    - `scale`: $\sigma_i$ of each token
    """

    gain: Float[Tensor, "d"]
    centred: bool
    scale: Float[Tensor, "token"]

    def turned(self, vectors: Float[Tensor, "*some d"]) -> Float[Tensor, "*some d"]:
        """Return what the norm makes of vectors, before it divides by a token's scale."""
        return self.gain * (vectors - vectors.mean(-1, keepdim=True) if self.centred else vectors)


class StreamLayer(NamedTuple):
    """What a layer's attention is added to.

    - `residual`: what enters the layer; `sum`: that plus what the heads bring and the bias, after the norm if one
      follows
    - `norms`: those of a layer that normalises its sums, after attention and after the feed-forward part; else none
    """

    residual: Float[Tensor, "token d"]
    sum: Float[Tensor, "token d"]
    norms: tuple[FrozenNorm, ...]


class _ModuleCall(NamedTuple):
    module: nn.Module
    given: Float[Tensor, "token d"]
    made: Float[Tensor, "token d"]


class WatchedRun(NamedTuple):
    """A run of one text: its trace, and the modules that ran after each layer's attention, with what they made."""

    model: Model
    trace: Trace
    calls: dict[int, list[_ModuleCall]]


def watched_run(reading: TextRun) -> WatchedRun:
    """Run a text again and keep what every module that makes a vector of each token's vector was given, and made."""
    model = reading.model
    calls: dict[int, list[_ModuleCall]] = defaultdict(list)
    handles = []
    reached = [0]
    vectors = (len(reading.tokens), model.d_model)
    shapes = ((1, *vectors), vectors)  # OPT drops the batch for its feed-forward part

    def keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        tensors = [part for part in (*args[:1], output) if isinstance(part, torch.Tensor)]
        if len(tensors) == 2 and all(part.shape in shapes for part in tensors):
            given, made = (
                part.reshape(shapes[1]).to(torch.float64, copy=True) for part in tensors
            )  # Falcon adds to it
            calls[reached[0]].append(_ModuleCall(module, given, made))

    def visit(call: AttentionCall) -> None:
        reached[0] = call.layer
        if not handles:  # only now, inside the run: hooks that were there before it would have the model proved anew
            handles.extend(module.register_forward_hook(keep) for module in model.hf.modules())

    try:
        trace = model.trace(reading.batch, visit)
    finally:
        for handle in handles:
            handle.remove()
    return WatchedRun(model, trace, calls)


def stream_of(run: WatchedRun, layer: Layer) -> StreamLayer:
    """Return what a layer, all of its heads, adds to; or say that it does not simply add."""
    at = layer.call.layer
    entered = run.trace.blocks[at].hidden[0].double()
    left = run.trace.hidden[at][0].double()
    output = layer.recomputed.output.double()
    if layer.gate is not None:
        output = output * layer.gate.double()
    added = entered + (output @ layer.projection.double()).sum(0)
    norms = [call for call in run.calls[at] if _is_norm(call)]
    for call in norms:
        if _same(call.given - added, added, run.model):
            after = [other for other in norms if torch.equal(other.made, left)]
            if not after:
                return StreamLayer(entered, call.given, ())
            return StreamLayer(entered, call.made, (frozen_norm(run.model, call), frozen_norm(run.model, after[0])))
    for call in reversed(run.calls[at]):
        if _same(call.made - (left - added), added, run.model):  # both parts side by side
            return StreamLayer(entered, left - call.made, ())
    raise InputError(
        f"Layer {at} of {run.model.name} does not simply add what its heads bring to what entered it: it scales or "
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
            if torch.equal(call.given, run.trace.hidden[-1][0].double()) and _is_norm(call):
                made = call.made @ weight.mT
                if _same(logits[0] - made, made, run.model):  # but for a bias of each logit
                    norm = frozen_norm(run.model, call)
                    weighted = norm.gain * weight[token]
                    centre = weighted.mean() if norm.centred else 0.0
                    return (weighted - centre) / norm.scale[:, None]
    raise InputError(
        f"What an edge adds to a logit is not defined for {run.model.name}: its logits are not made from the sum of "
        "what its layers add, by one norm and one projection."
    )


def frozen_norm(model: Model, call: _ModuleCall) -> FrozenNorm:
    """Find out what a norm does from what it makes of 0 and of ±1000, and of this text."""
    sign = torch.ones_like(call.given[:1])
    sign[:, 1::2] = -1.0
    dtype = next(call.module.parameters()).dtype
    with model.prepared():
        offset, far = (call.module(scale * sign[None].to(dtype))[0].double() for scale in (0.0, _FAR))
    gain = ((far - offset) * sign)[0]
    for centred in (True, False):
        norm = FrozenNorm(gain, centred, torch.ones_like(call.given[:, 0]))
        turned = norm.turned(call.given)
        scale = turned.norm(dim=-1) / (call.made - offset).norm(dim=-1)
        if _same(turned / scale[:, None] + offset - call.made, call.made, model, but_constant=False):
            return norm._replace(scale=scale)
    raise InputError(f"{type(call.module).__name__} of {model.name} is not a norm that is linear with its scale held.")


def _is_norm(call: _ModuleCall) -> bool:
    """Tell whether a module has one gain for each entry of a vector."""
    weight = getattr(call.module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.shape == call.given.shape[-1:]


def _same(difference: Float[Tensor, "token d"], size: Tensor, model: Model, *, but_constant: bool = True) -> bool:
    """Tell whether a difference is rounding, but for a vector that is the same for all tokens, such as a bias."""
    if but_constant:
        difference = difference - difference.mean(0)
    eps = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)  # many a float64 model norms in float32
    return float(difference.abs().max()) <= min(0.05, _NEAR * eps) * float(size.abs().max())
