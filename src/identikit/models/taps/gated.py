"""What is special about Qwen3-Next and Qwen 3.5: a gate after attention.

Their query layer also makes a gate for each head and query. Its sigmoid multiplies the head output before the output
projection, so a row's output projection is diag(gate)·H. Attention itself goes through transformers' interface.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from identikit.models.taps import tap
from identikit.shapes import Float, Tensor


@contextmanager
def switched(model: PreTrainedModel) -> Iterator[None]:
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
