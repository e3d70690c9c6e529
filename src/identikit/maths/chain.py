r"""Products of attention through layers, and how large or small each can be while every head's output stays the same.

Fix every head's output. Then every hidden vector and every later value stays, and each row $a_{hi}$ of each head of
each layer moves in its own set $P_{hi}$ (see `polytope.rows`), independently of all others. Readings such as rollout
are products of such layers: from the inputs up,

$$w_l(i) = k\,w_{l-1}(i) + g\,\frac{1}{H} \sum_h a_{hi} \cdot (f_{hi} \odot w_{l-1}),$$

where $w_0$ is the unit vector of an input token, or the difference of two. All that multiplies $w_{l-1}$ is at least 0,
so the whole is greatest if each row, for itself, makes its own term greatest, given the greatest $w_{l-1}$: a dynamic
program over layers, one linear program per row and input (a robust Markov chain whose rows lie in sets of their own;
Iyengar 2005). The least is minus the greatest of $-w$.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from identikit.maths.polytope.bounds import rows_at_once
from identikit.maths.polytope.exact import maxima
from identikit.maths.polytope.rows import Rows
from identikit.shapes import Float, Tensor


class Chain(NamedTuple):
    """How a reading goes through layers.

    - `keep`: k, what a token keeps of what it had; `give`: g, what it takes of what its heads bring
    - `factors`: f of each layer, numbers of at least 0 on the weights of each head, query and key; None: 1
    - `spans`: of each layer, which tokens look and which are seen, where there are those of several texts; the others
      keep what they have. None: all look at all
    """

    keep: float
    give: float
    factors: Sequence[Float[Tensor, "head query key"]] | None = None
    spans: Sequence[tuple[slice, slice]] | None = None

    def factor(self, layer: int) -> Float[Tensor, "head query key"] | None:
        """Return the factor of a layer, if there is one."""
        return None if self.factors is None else self.factors[layer]

    def span(self, layer: int) -> tuple[slice, slice]:
        """Return which tokens look in a layer, and which are seen."""
        return (slice(None), slice(None)) if self.spans is None else self.spans[layer]


class Extreme(NamedTuple):
    """The greatest value of a reading after a layer, and a bound on its distance from an attained value."""

    value: Float[Tensor, "source token"]
    gap: Float[Tensor, "source token"]


def through_layers(
    maps: Sequence[Float[Tensor, "head _ _"]], chain: Chain, start: Float[Tensor, "source token"]
) -> Iterator[Float[Tensor, "source token"]]:
    """Yield what each layer's tokens hold of each source, with the attention that is given."""
    weights = start
    for layer, attention in enumerate(maps):
        factor = chain.factor(layer)
        attention = attention if factor is None else attention * factor
        queries, keys = chain.span(layer)
        brought = weights[:, keys] @ attention.mean(0).mT
        weights = weights.clone()
        weights[:, queries] = chain.keep * weights[:, queries] + chain.give * brought
        yield weights


def greatest_through_layers(
    layers: Sequence[Rows],
    chain: Chain,
    start: Float[Tensor, "source token"],
    *,
    until: float = math.inf,
) -> Iterator[Extreme]:
    """Yield the greatest that each layer's tokens can hold of each source; `layers` have all heads' rows, in order.

    What a layer can reach at most is what its rows reach at most of what the layer below can reach at most; gaps add
    up, as the rows that attain one layer's end also attain the others'. Rows that are not reached `until` then, on the
    monotonic clock, count with the greatest that any attention could bring, and their gaps are NaN.
    """
    value = start
    gap = torch.zeros_like(start)
    for layer, rows in enumerate(layers):
        factor = chain.factor(layer)
        queries, keys = chain.span(layer)
        brought, missed = _brought(rows, value[:, keys], None if factor is None else factor.flatten(0, 1), until)
        value = value.clone()
        here = gap[:, keys]
        gap = gap.clone()
        n = value[:, queries].shape[1]
        below = here.amax(-1, keepdim=True).expand(-1, n)
        if factor is not None:
            below = (here @ factor.amax(0).mT).minimum(below * factor.amax((0, 2)))
        value[:, queries] = chain.keep * value[:, queries] + chain.give * brought.unflatten(1, (-1, n)).mean(1)
        over = missed.unflatten(1, (-1, n)).mean(1) + below
        gap[:, queries] = chain.keep * gap[:, queries] + chain.give * over
        yield Extreme(value, gap)


def _brought(
    rows: Rows,
    weights: Float[Tensor, "source key"],
    factor: Float[Tensor, "row key"] | None,
    until: float,
) -> tuple[Float[Tensor, "source row"], Float[Tensor, "source row"]]:
    """Return the most that each row can bring of each source, and the gaps; a learned sink brings nothing."""
    padded = F.pad(weights, (0, rows.attention.shape[1] - weights.shape[1])).to(rows.attention)
    if factor is None:
        bounds = [maxima(rows, padded[None], until=until)]
    else:
        factor = F.pad(factor, (0, padded.shape[1] - factor.shape[1])).to(rows.attention)
        step = max(1, rows_at_once(rows, 3 * factor.numel()))
        bounds = [maxima(rows, factor[:, None] * some, until=until) for some in padded.split(step)]
    value, gap = (torch.cat(part, dim=1).mT.to(weights) for part in zip(*bounds, strict=True))
    return value, gap


def greatest_over_boxes(
    boxes: Sequence[tuple[Float[Tensor, "query key"], Float[Tensor, "query key"]]], start: Float[Tensor, "source key"]
) -> Iterator[Float[Tensor, "source query"]]:
    r"""Yield the most that each layer's tokens can hold of each source, if rows lie in boxes, and sum to 1.

    Of all $l \le p \le u$ with $\sum_j p_j = 1$, best is to give every key its least, and what is left of 1 to the keys
    with most of the source. Boxes contain what rows can be, and more: these are outer bounds.
    """
    value = start
    for lower, upper in boxes:
        rows = []
        for held in value:
            place = held.argsort(descending=True)
            room = (upper - lower)[:, place]
            before = room.cumsum(-1) - room
            given = (1 - lower.sum(-1, keepdim=True) - before).clamp(min=0).minimum(room)
            rows.append(lower @ held + given @ held[place])
        value = torch.stack(rows)
        yield value


def shares_of(
    lower: Float[Tensor, "*row key"], upper: Float[Tensor, "*row key"]
) -> tuple[Float[Tensor, "*row key"], Float[Tensor, "*row key"]]:
    r"""Return between which ends each share $r_j / \sum_k r_k$ of a row is, if $l \le r \le u$ with $l \ge 0$.

    A share is least where its own part is least and all others are greatest. A row that can be 0 has shares of 0 to 1.
    """
    least = lower / (lower + upper.sum(-1, keepdim=True) - upper)
    most = upper / (upper + lower.sum(-1, keepdim=True) - lower)
    return least.nan_to_num(0.0), most.nan_to_num(1.0)
