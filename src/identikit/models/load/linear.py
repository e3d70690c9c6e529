"""What a linear layer computes, x·W + b: read from its weight where that is plain, from its answers where it is not.

A packed layer (bitsandbytes, torchao, GPTQ, AWQ, …) has codes and scales in the place of a weight, each package in a
way of its own. All of them answer. So W is the answer to unit vectors, less the answer to zero, in the number format
that the model computes in; and since many of them give a wrong derivative, or silently none, their derivative is W's.
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
from identikit.models.load.weights import device_of, has_adapter, is_packed, offloaded_again, weight_of
from identikit.models.taps.switch import HubModule, set_temporarily
from identikit.shapes import Float, Tensor

PACKED_TOLERANCE = 0.05
"""How far a packed layer's answer may be from x·W + b, of the largest entry: some round what they take to 8 bits."""
_AT_ONCE = 1024  # unit vectors


def linear_weight(layer: HubModule, dtype: torch.dtype) -> Float[Tensor, "in out"]:
    """Return W of what a linear layer computes, x·W + b; under an adapter such as LoRA, W + B·A with its scale.

    A packed layer is asked in the dtype that the model computes in.
    """
    if any(map(is_packed, layer.modules())):
        return _answers(layer, layer, dtype)
    if not has_adapter(layer):
        weight = weight_of(layer, "weight").detach()
        return weight if isinstance(layer, Conv1D) else weight.T  # GPT-2 stores (in, out), linear layers (out, in)
    return _answers(layer, _in_float64(layer), torch.float64).to(layer.weight.dtype)


def linear_size(layer: HubModule) -> tuple[int, int]:
    """Return how many numbers a linear layer takes, and how many it makes."""
    if hasattr(layer, "in_features"):
        return layer.in_features, layer.out_features
    taken, made = linear_weight(layer, layer.weight.dtype).shape
    return taken, made


def matrix_shapes(module: nn.Module) -> list[tuple[int, ...]]:
    """Return the shapes of a module's matrices, packed or not."""
    linear = [layer for layer in module.modules() if is_packed(layer) and hasattr(layer, "in_features")]
    within = {id(weight) for layer in linear for weight in layer.parameters()}
    plain = [weight for weight in module.parameters() if weight.ndim > 1 and id(weight) not in within]
    return [*map(linear_size, linear), *(tuple(weight.shape) for weight in plain)]


@torch.no_grad()
def linear_bias(layer: HubModule) -> Float[Tensor, "out"] | None:
    """Return b of what a linear layer computes, x·W + b; None if it has none."""
    bias = getattr(layer, "bias", None)
    if not has_adapter(layer) or any(map(is_packed, layer.modules())):
        return None if bias is None else weight_of(layer, "bias").detach()
    made = _in_float64(layer)(torch.zeros(1, layer.in_features, dtype=torch.float64, device=device_of(layer)))[0]
    return made.to(layer.weight.dtype) if bias is not None or made.any() else None


def vocabulary_size(embedding: HubModule) -> int:
    """Return how many ids an embedding has vectors for, packed or not."""
    return embedding.num_embeddings if is_packed(embedding) else len(embedding.weight)


def embedding_rows(layer: HubModule) -> Float[Tensor, "id d"]:
    """Return the vectors of an embedding's ids, those that it answers with where they are packed."""
    if not is_packed(layer):
        return weight_of(layer, "weight").detach()
    with torch.no_grad():
        return torch.cat(
            [layer(ids) for ids in torch.arange(layer.num_embeddings).to(device_of(layer)).split(_AT_ONCE)]
        )


def _in_float64(layer: HubModule) -> Callable[[Tensor], Tensor]:
    """Return what runs a layer and its adapters, whatever they are, on a copy in float64, past any hooks on it."""
    twin = copy.deepcopy(layer).double().eval()
    return partial(type(twin).forward, twin)


@torch.no_grad()
def _answers(layer: HubModule, run: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Float[Tensor, "in out"]:
    """Return what a layer answers to unit vectors, less its answer to zero."""
    like = {"dtype": dtype, "device": device_of(layer)}
    zero = run(torch.zeros(1, layer.in_features, **like))
    units = torch.eye(layer.in_features, **like).split(_AT_ONCE)
    return torch.cat([run(some) - zero for some in units])


# Derivatives


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Have packed layers go into derivatives as the linear maps that they are, and so for hooks of accelerate.

    What the layers answer stays as it is.
    """
    with offloaded_again(model), ExitStack() as stack:
        for name, layer in model.named_modules():
            if is_packed(layer) and not hasattr(layer, "num_embeddings"):
                set_temporarily(stack, layer, "forward", _with_derivative(layer, name))
        yield


def _with_derivative(layer: HubModule, name: str) -> Callable[..., Tensor]:
    answer = layer.forward
    linear = hasattr(layer, "in_features")

    def forward(*args: Tensor, **kwargs: object) -> Tensor:
        inside: Any = torch._C
        if not inside._functorch.peek_interpreter_stack() and not torch.is_grad_enabled():
            return answer(*args, **kwargs)
        if not linear or len(args) != 1 or kwargs:
            raise ModelError(
                f"Differentiating the model: {name!r} ({type(layer).__name__}) is packed and is no linear layer, so it "
                "has no derivative here. What needs none, such as attention and its intervals, can be read; for the "
                "rest load a checkpoint with plain weights."
            )
        return _Linear.apply(args[0], layer, answer, name)[0]

    return forward


class _Linear(torch.autograd.Function):
    """A packed layer whose derivative is that of x·W + b, with W from its answers."""

    @staticmethod
    def forward(x: Tensor, layer: HubModule, answer: Callable[[Tensor], Tensor], name: str) -> tuple[Tensor, Tensor]:
        """Return the layer's own answer, and W."""
        made = answer(x)
        weight = _answers(layer, answer, x.dtype)
        off = made - x @ weight
        off = (off if layer.bias is None else off - weight_of(layer, "bias").to(off.dtype)).abs().max()
        if off > PACKED_TOLERANCE * made.abs().max():
            raise ModelError(
                f"Differentiating the model: the packed layer {name!r} ({type(layer).__name__}) is not linear; it is "
                f"off by {off / made.abs().max():.0e} of its largest answer. Load a checkpoint with plain weights."
            )
        return made, weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep W for both directions."""
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.save_for_forward(output[1])

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Tensor, None, None, None]:
        """Pull a derivative back through W."""
        return given[0] @ ctx.saved_tensors[0].mT, None, None, None

    @staticmethod
    def jvp(ctx: Any, *given: Any) -> tuple[Tensor, None]:
        """Push a tangent through W."""
        return given[0] @ ctx.saved_tensors[0], None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        """Take many inputs as more rows of one."""
        if in_dims[0] is None:
            return _Linear.apply(*args), (None, None)
        return _Linear.apply(args[0].movedim(in_dims[0], 0), *args[1:]), (0, None)
