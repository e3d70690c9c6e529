"""Why rows of attention are free to change."""

from typing import TypedDict

import torch

from identikit.attention.layer import Layer
from identikit.attention.precision import equal_values
from identikit.attention.result import EffectiveAttention
from identikit.maths.linalg import Resolution, column_scales, matrix_rank, rounding_unit
from identikit.shapes import Int, Tensor


class Repetition(TypedDict):
    """How many tokens of a layer repeat the value of an earlier one, and two of them: the earlier and the later."""

    layer: int
    tokens: int
    example: list[int]


class DeficientHead(TypedDict):
    """A head whose output projection passes on only `rank` dimensions."""

    layer: int
    head: int
    rank: int


class Causes(TypedDict):
    """Why rows are free: which of these hold, and in which layers or heads.

    - `keys`: layers where a query sees more keys than values have dimensions; `most_keys`: at most how many
    - `repeated`: layers where repeated tokens have equal values, with how many tokens repeat the value of an earlier
      one, and two of them as an example
    - `projections`: heads whose output projection passes on fewer dimensions than values have, where that frees a row
    - `dependent`: layers where a row has a larger null space than all of these explain
    """

    keys: list[int]
    most_keys: int
    repeated: list[Repetition]
    projections: list[DeficientHead]
    dependent: list[int]


def causes(attention: EffectiveAttention) -> Causes:
    """Return why rows are free."""
    found = Causes(keys=[], most_keys=0, repeated=[], projections=[], dependent=[])
    for layer, part in zip(attention.layers, attention.captured().layers, strict=True):
        width = part.projection.shape[1]
        seen = int(part.seen.count.max())
        ranks = _projection_ranks(part)
        same, _ = equal_values(part.call, attention.tokens)
        pairs = [(first, place) for place, first in enumerate(same.tolist()) if first < place]
        pairs = [pair for pair in pairs if _seen_together(part, pair)]
        if seen > width:
            found["keys"].append(layer)
            found["most_keys"] = max(found["most_keys"], seen)
        if pairs:
            found["repeated"].append({"layer": layer, "tokens": len(pairs), "example": list(pairs[0])})
        for head, rank in zip(attention.heads, ranks.tolist(), strict=True):
            if rank < min(width, seen):
                found["projections"].append({"layer": layer, "head": head, "rank": rank})
        if bool((part.factors.rank < _expected_rank(part, same, ranks)).any()):
            found["dependent"].append(layer)
    return found


def _projection_ranks(part: Layer) -> Int[Tensor, "head"]:
    """Return how many value dimensions each head's output projection passes on."""
    if part.factors.values is part.plain.values:
        return torch.full((len(part.projection),), part.projection.shape[1])
    resolution = Resolution(rounding_unit(part.projection.dtype))
    H = part.projection.double()
    return torch.tensor([matrix_rank(rows, resolution) for rows in H * column_scales(H.mT).mT])


def _seen_together(part: Layer, pair: tuple[int, int]) -> bool:
    queries = torch.arange(part.call.query.shape[2], device=part.heads.device)
    return bool(part.seen.block(queries, torch.tensor(pair, device=queries.device)).all(1).any())


def _expected_rank(part: Layer, same: Tensor, ranks: Tensor) -> Int[Tensor, "head query"]:
    """Return the rank of each row if only counting, equal values and the output projection limited it."""
    count = part.seen.count
    limit = torch.minimum(ranks.to(count)[:, None], count)
    queries = (part.factors.rank < limit).any(0).nonzero()[:, 0]
    if len(queries) and bool((same < torch.arange(len(same))).any()):
        seen = part.seen.block(queries, torch.arange(len(same), device=queries.device))
        distinct = [same.to(queries)[row].unique().numel() for row in seen]
        limit[:, queries] = torch.minimum(limit[:, queries], torch.tensor(distinct).to(limit))
    return limit
