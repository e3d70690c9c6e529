"""Families that use transformers' attention interface, and have one thing of their own beside it.

Qwen3-Next and Qwen 3.5 have a gate after attention: their query layer also makes a gate for each head and query. Its
sigmoid multiplies the head output before the output projection, so a row's output projection is diag(gate)·H.

BEiT adds its relative position bias to the mask, and hands the sum over as the mask. Images are never padded, so the
mask is empty and the sum is the bias alone: here it becomes the call's bias.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from identikit.models.taps import tap
from identikit.shapes import Float, Tensor

_BIASED = f"{tap.NAME}_biased"


@contextmanager
def gated(model: PreTrainedModel) -> Iterator[None]:
    """Switch the tap in, and have every attention module pass its gate to the call."""
    with tap.switched(model), ExitStack() as stack:
        for module in model.modules():
            if _is_gated(module):
                stack.callback(module.q_proj.register_forward_hook(_keeper(module)).remove)  # pyright: ignore
                stack.callback(module.__dict__.pop, tap.GATE, None)
        yield


def _is_gated(module: nn.Module) -> bool:
    query = getattr(module, "q_proj", None)
    output = getattr(module, "o_proj", None)
    if not isinstance(query, nn.Linear) or not isinstance(output, nn.Linear):
        return False
    return query.out_features == 2 * output.in_features


def _keeper(attention: Any) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
    """Return a hook on the query layer that keeps the gate: of each head, the second half of what the layer makes."""

    def keep(module: nn.Module, args: tuple[Any, ...], made: Float[Tensor, "batch n made"]) -> None:
        halves = made.unflatten(-1, (-1, 2 * attention.head_dim))
        setattr(attention, tap.GATE, torch.sigmoid(halves[..., attention.head_dim :]).transpose(1, 2))

    return keep


def biased(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Switch the tap in, with what the model hands over as its mask as the bias."""
    return tap.switched(model, _BIASED)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, **terms: Any
) -> tuple[Tensor, None]:
    return tap.attention(module, query, key, value, None, position_bias=bias, **terms)


AttentionInterface.register(_BIASED, _attention)
AttentionMaskInterface.register(_BIASED, lambda *sizes, **others: None)  # every patch sees every patch
