"""Rows of attention as the model computed them, for comparison with literal definitions."""

from typing import NamedTuple

import torch
from torch import Tensor

from identikit.attention.result import EffectiveAttention


class LiteralRow(NamedTuple):
    """A row: the keys that it sees, its weights over them, and their values; a learned sink comes last, of value 0."""

    keys: Tensor
    attention: Tensor
    values: Tensor


def literal_row(result: EffectiveAttention, layer: int, head: int, query: int) -> LiteralRow:
    """Read one row from the captured call, in float64."""
    call = result.captured().layers[layer].call
    query = range(len(result.tokens))[query]
    keys = call.visible()[0, 0, query].nonzero()[:, 0]
    weights = call.weights(torch.tensor([query]), heads=torch.tensor([head]), dtype=torch.float64)[0, 0, 0, keys]
    values = call.value[0, head // call.groups, keys].double()
    if call.sink is None:
        return LiteralRow(keys, weights / weights.sum(), values)
    rest = 1 - weights.sum(0, keepdim=True)
    return LiteralRow(keys, torch.cat([weights, rest]), torch.cat([values, torch.zeros_like(values[:1])]))
