"""Which sources of a row come in the same order in all alternatives: by the ends, and by comparing two sources."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from identikit.attention.measure_kinds import MeasureValues
from identikit.attention.quantities import TOP
from identikit.attention.walk import Walk
from identikit.maths.chain import Chain, greatest_through_layers
from identikit.maths.measures import certain_order
from identikit.maths.polytope.exact import greatest_lead, portions_in_time
from identikit.maths.polytope.rows import Rows
from identikit.models.isolation import standard_torch_state
from identikit.shapes import Float, Int, Tensor

ORDER_ARRAYS = ("certain_order", "order_is_decided")
_LARGEST_BATCH = 2**23  # numbers of one kind that are held while pairs of sources are compared
TimedCompare = Callable[[float, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Compares two sources of rows as `maths.measures.Compare` does, until a time on the monotonic clock."""


@standard_torch_state()
def order_of_sources(
    limits: tuple[float | None, float | None],
    values: MeasureValues,
    through: bool,
    compare: TimedCompare | None,
    layer_indices: Sequence[int],
) -> dict[str, Tensor]:
    """Count the strongest sources that are in this order in all alternatives, in these layers.

    `limits` are `until` and `order_seconds` of `MeasuredText`.
    """
    until, seconds = limits
    deadline = math.inf if until is None else until
    if seconds is not None:
        deadline = time.monotonic() + seconds
    shape = values.raw.shape
    sources = torch.zeros(shape, dtype=torch.bool)
    sources[layer_indices] = ((values.upper != 0) | (values.lower != 0))[layer_indices]
    if through:
        sources &= ~torch.eye(*shape[-2:], dtype=torch.bool)
    raw, lower, upper, sources = (
        array.reshape(-1, shape[-1]) for array in (values.raw, values.lower, values.upper, sources)
    )
    timed = None if compare is None else partial(compare, deadline)
    order = certain_order(raw, (lower, upper), sources, timed, TOP, scale=raw.abs().amax(-1))
    by_layer = (array.reshape(shape[:-1])[layer_indices] for array in order)
    return dict(zip(ORDER_ARRAYS, by_layer, strict=True))


def compare_edges(
    rows: Rows,
    factor: Float[Tensor, "layer head query key"],
    mean: bool,
    deadline: float,
    row: Int[Tensor, "pair"],
    first: Int[Tensor, "pair"],
    second: Int[Tensor, "pair"],
) -> tuple[Float[Tensor, "pair"], Float[Tensor, "pair"]]:
    """Solve one program per pair and row; where rows are means over heads, one per head."""
    ahead = factor.new_full(row.shape, torch.nan, device="cpu")
    gap = ahead.clone()
    heads, queries, keys = factor.shape[1:]
    scales = factor.flatten(0, 2)
    largest = _LARGEST_BATCH // (keys * (heads if mean else 1)) + 1
    for pairs in portions_in_time(torch.arange(len(row)), deadline, most=largest):
        solved_rows = row[pairs][None]
        if mean:  # rows of a head stand together
            first_row = solved_rows // queries * heads * queries + solved_rows % queries
            solved_rows = first_row + torch.arange(heads)[:, None] * queries
        shape = solved_rows.shape
        solved_rows = solved_rows.flatten().to(factor.device)
        sources = (source[pairs.repeat(shape[0])].to(factor.device) for source in (first, second))
        of_heads = greatest_lead(rows, solved_rows, *sources, scales=scales[solved_rows])
        ahead[pairs], gap[pairs] = (array.reshape(shape).mean(0).cpu() for array in of_heads)
    return ahead, gap


def compare_through(
    rows: Sequence[Rows],
    chain: Chain,
    walk: Walk,
    deadline: float,
    row: Int[Tensor, "pair"],
    first: Int[Tensor, "pair"],
    second: Int[Tensor, "pair"],
) -> tuple[Float[Tensor, "pair"], Float[Tensor, "pair"]]:
    """Send the difference of two sources through the layers, each distinct pair once for all rows that need it."""
    distinct, index = torch.stack([first, second]).unique(dim=1, return_inverse=True)
    ahead = torch.full(row.shape, torch.nan, dtype=torch.float64)
    gap = ahead.clone()
    block = row // walk.outputs
    for portion in portions_in_time(
        torch.arange(distinct.shape[1]), deadline, most=_LARGEST_BATCH // len(rows[0].group) + 1
    ):
        first_sources, second_sources = F.one_hot(distinct[:, portion], walk.inputs).double()
        pairs = ((index >= portion[0]) & (index <= portion[-1])).nonzero()[:, 0]
        ends = walk.ends[: int(block[pairs].max()) + 1]
        start = (second_sources - first_sources).to(rows[0].attention)
        extremes = greatest_through_layers(rows[: ends[-1] + 1], chain, start, until=deadline)
        values, gaps = (torch.stack(arrays)[ends].cpu() for arrays in zip(*extremes, strict=True))
        entry = block[pairs], index[pairs] - portion[0], row[pairs] % walk.outputs
        ahead[pairs] = values[entry]
        gap[pairs] = gaps[entry]
    return ahead, gap
