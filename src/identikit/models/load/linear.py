"""What a linear layer computes, x·W + b: read from its weight where that is plain, from its outputs where it is not.

A packed layer (bitsandbytes, torchao, GPTQ, AWQ, …) has codes and scales in the place of a weight, each package in a
way of its own. All of them can be run. So W is the output for unit vectors, less the output for zero, in the number
format that the model computes in. Since many give a wrong derivative, or silently none, their derivative is W's.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from identikit.errors import ModelError
from identikit.models.load.weights import device_of, has_adapter, is_packed, keep_offloaded, weight_of
from identikit.models.taps.switch import HubModule, set_temporarily
from identikit.shapes import Float, Tensor

PACKED_TOLERANCE = 0.05
"""How far a packed layer's output may be from x·W + b, of the largest entry: some round what they take to 8 bits."""
_CHUNK = 1024  # unit vectors, or ids, that a layer is run on at once


def linear_weight(layer: HubModule, dtype: torch.dtype) -> Float[Tensor, "in out"]:
    """Return W of what a linear layer computes, x·W + b; under an adapter such as LoRA, W + B·A with its scale.

    A packed layer is run in `dtype`, the one that the model computes in.
    """
    if any(map(is_packed, layer.modules())):
        return _measure_weight(layer, layer, dtype)
    if not has_adapter(layer):
        weight = weight_of(layer, "weight").detach()
        return weight if isinstance(layer, Conv1D) else weight.T  # GPT-2 stores (in, out), linear layers (out, in)
    return _measure_weight(layer, _in_float64(layer), torch.float64).to(layer.weight.dtype)


def linear_size(layer: HubModule) -> tuple[int, int]:
    """Return how many numbers a linear layer takes, and how many it makes."""
    if hasattr(layer, "in_features"):
        return layer.in_features, layer.out_features
    in_features, out_features = linear_weight(layer, layer.weight.dtype).shape
    return in_features, out_features


def matrix_shapes(module: nn.Module) -> list[tuple[int, ...]]:
    """Return the shapes of a module's matrices, packed or not."""
    packed = [layer for layer in module.modules() if is_packed(layer) and hasattr(layer, "in_features")]
    packed_weights = {id(weight) for layer in packed for weight in layer.parameters()}
    plain = [weight for weight in module.parameters() if weight.ndim > 1 and id(weight) not in packed_weights]
    return [*map(linear_size, packed), *(tuple(weight.shape) for weight in plain)]


@torch.no_grad()
def linear_bias(layer: HubModule) -> Float[Tensor, "out"] | None:
    """Return b of what a linear layer computes, x·W + b; None if it has none."""
    bias = getattr(layer, "bias", None)
    if not has_adapter(layer) or any(map(is_packed, layer.modules())):
        return None if bias is None else weight_of(layer, "bias").detach()
    zero = torch.zeros(1, layer.in_features, dtype=torch.float64, device=device_of(layer))
    output = _in_float64(layer)(zero)[0]
    return output.to(layer.weight.dtype) if bias is not None or output.any() else None


def vocabulary_size(embedding: HubModule) -> int:
    """Return how many ids an embedding has vectors for, packed or not."""
    return embedding.num_embeddings if is_packed(embedding) else len(embedding.weight)


def embedding_rows(layer: HubModule) -> Float[Tensor, "id d"]:
    """Return the vectors of an embedding's ids, from running it where they are packed."""
    if not is_packed(layer):
        return weight_of(layer, "weight").detach()
    with torch.no_grad():
        return torch.cat([layer(ids) for ids in torch.arange(layer.num_embeddings).to(device_of(layer)).split(_CHUNK)])


def _in_float64(layer: HubModule) -> Callable[[Tensor], Tensor]:
    """Return a function that runs a float64 copy of a layer and its adapters, without any hooks on it."""
    twin = copy.deepcopy(layer).double().eval()
    return partial(type(twin).forward, twin)


@torch.no_grad()
def _measure_weight(layer: HubModule, run: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Float[Tensor, "in out"]:
    """Return a layer's output for unit vectors, less its output for zero."""
    options = {"dtype": dtype, "device": device_of(layer)}
    zero = run(torch.zeros(1, layer.in_features, **options))
    units = torch.eye(layer.in_features, **options).split(_CHUNK)
    return torch.cat([run(vectors) - zero for vectors in units])


# Derivatives


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Differentiate packed layers as the linear maps that they are, and let accelerate's hooks work in derivatives.

    The layers' outputs stay as they are.
    """
    with keep_offloaded(model), ExitStack() as stack:
        for name, layer in model.named_modules():
            if is_packed(layer) and not hasattr(layer, "num_embeddings"):
                set_temporarily(stack, layer, "forward", _with_derivative(layer, name))
        yield


def _with_derivative(layer: HubModule, name: str) -> Callable[..., Tensor]:
    run = layer.forward
    is_linear = hasattr(layer, "in_features")

    def forward(*args: Tensor, **kwargs: object) -> Tensor:
        core: Any = torch._C
        if not core._functorch.peek_interpreter_stack() and not torch.is_grad_enabled():
            return run(*args, **kwargs)
        if not is_linear or len(args) != 1 or kwargs:
            raise ModelError(
                f"Differentiating the model: {name!r} ({type(layer).__name__}) is packed and is no linear layer, so it "
                "has no derivative here. What needs none, such as attention and its intervals, can be read; for the "
                "rest load a checkpoint with plain weights."
            )
        return _Linear.apply(args[0], layer, run, name)[0]

    return forward


class _Linear(torch.autograd.Function):
    """A packed layer whose derivative is that of x·W + b, with W from its outputs."""

    @staticmethod
    def forward(x: Tensor, layer: HubModule, run: Callable[[Tensor], Tensor], name: str) -> tuple[Tensor, Tensor]:
        """Return the layer's own output, and W."""
        output = run(x)
        weight = _measure_weight(layer, run, x.dtype)
        residual = output - x @ weight
        if layer.bias is not None:
            residual = residual - weight_of(layer, "bias").to(residual.dtype)
        error = residual.abs().max()
        scale = output.abs().max()
        if error > PACKED_TOLERANCE * scale:
            raise ModelError(
                f"Differentiating the model: the packed layer {name!r} ({type(layer).__name__}) is not linear; it is "
                f"off by {error / scale:.0e} of its largest answer. Load a checkpoint with plain weights."
            )
        return output, weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep W for both directions."""
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.save_for_forward(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        """Pull a gradient back through W."""
        return gradients[0] @ ctx.saved_tensors[0].mT, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, None]:
        """Push a tangent through W."""
        return tangents[0] @ ctx.saved_tensors[0], None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        """Take many inputs as more rows of one."""
        if in_dims[0] is None:
            return _Linear.apply(*args), (None, None)
        return _Linear.apply(args[0].movedim(in_dims[0], 0), *args[1:]), (0, None)
