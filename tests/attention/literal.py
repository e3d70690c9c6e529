"""Rows of attention as the model computed them, for comparison with literal definitions."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from identikit.attention.interval_result import AttentionIntervals
from identikit.attention.result import EffectiveAttention
from tests.reference import intervals as reference


class LiteralRow(NamedTuple):
    """A row: the keys that it sees, its weights over them, and their values; a learned sink comes last, of value 0."""

    keys: Tensor
    attention: Tensor
    values: Tensor

    def ends(self, c: Tensor | np.ndarray) -> tuple[float, float]:
        """Return the least and the greatest c · a' of other attention with the same output, by linear programs."""
        c = np.asarray(c, dtype=float)
        given = self.attention.numpy(), self.values.numpy()
        return tuple(float(c @ reference.optimum(sign * c, *given)) for sign in (1, -1))


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


def assert_plain_programs(found: AttentionIntervals, result: EffectiveAttention, *places: tuple[int, int, int]) -> None:
    """The ends of these rows, and the order that is certain, are those of one linear program each."""
    for layer, head, query in places:
        row = literal_row(result, layer, head, query)
        given = row.attention.numpy(), row.values.numpy()
        lower, upper = reference.intervals(*given)
        ends = found.sel(layer=layer, head=head, query=query)
        torch.testing.assert_close(ends.lower[row.keys], torch.from_numpy(lower), atol=1e-7, rtol=0)
        torch.testing.assert_close(ends.upper[row.keys], torch.from_numpy(upper), atol=1e-7, rtol=0)
        expected = reference.certain_order(*given, top=5)
        assert int(ends.certain_order) == expected and ends.strongest_is_certain is (expected > 0)
