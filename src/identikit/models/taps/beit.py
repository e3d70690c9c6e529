"""What is special about BEiT: it adds its relative position bias to the mask, and hands the sum over as the mask.

Images are never padded, so the mask is empty and the sum is the bias alone: under this tap it becomes the call's bias.
"""

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from identikit.models.taps import tap
from identikit.shapes import Tensor

NAME = f"{tap.NAME}_beit"


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, **terms: Any
) -> tuple[Tensor, None]:
    return tap.attention(module, query, key, value, None, position_bias=bias, **terms)


def _mask(*sizes: Any, **others: Any) -> None:
    """Return no mask: every patch sees every patch."""


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


def switched(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Put the tap in the place of the model's attention, and its own back at the end."""
    return tap.switched(model, NAME)
