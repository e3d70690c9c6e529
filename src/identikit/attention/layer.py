"""One layer of one text: what was captured, and what is solved from it, each thing once, when it is first needed.

Effective attention asks for `factors`, intervals for `polytopes`; neither needs the other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import torch
import torch.nn.functional as F

from identikit.attention.precision import Recomputed, check_range, coarser_unit, recompute
from identikit.checks import flag, real_number
from identikit.maths import effective as maths
from identikit.maths import linalg, measures, reachable
from identikit.maths.joint import joint_null_dim
from identikit.maths.polytope.rows import Lengths, Polytopes, Rows
from identikit.maths.visible import Visible, visible_from_mask
from identikit.models.taps.tap import AttentionCall
from identikit.models.text_run import TextRun
from identikit.shapes import Bool, Float, Int, Tensor

_BLOCK_BYTES = 1 << 23  # of a map that is read at a time: larger blocks leave the cache and are slower


@dataclass(frozen=True)
class EffectiveOptions:
    """How effective attention is read; see `effective_attention`."""

    bias: bool = True
    mass: bool = False
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        flag("bias", self.bias)
        flag("mass", self.mass)
        real_number("tolerance", self.tolerance, least=0, below=1)


USUAL = EffectiveOptions()

HeadRow = tuple[int, int]
"""Which row of a layer: indices of its head and query."""


class At(NamedTuple):
    """Where a layer's arrays are read: indices of its heads, queries and keys."""

    heads: Int[Tensor, "head_"]
    queries: Int[Tensor, "query_"]
    keys: Int[Tensor, "key_"]

    def take(self, array: Tensor) -> Tensor:
        """Return an array over heads and queries at these indices."""
        return array[self.heads][:, self.queries]


@dataclass(frozen=True, eq=False)
class Layer:
    """The chosen heads of one layer of one text.

    - `call`: the captured attention; `heads`: which of its heads were chosen
    - `value_heads`: which key-value heads these use: all of them if all heads were chosen, else one for each head
    - `projection`: each head's slice H of the output projection; `bias`: of the values, where it is left out
    - `seen`: which keys each query sees; `tokens`: the tokens that are keys
    - `hidden`: what the block returns; None where the text was run together with others
    """

    call: AttentionCall
    heads: Int[Tensor, "head"]
    value_heads: slice | Int[Tensor, "head"]
    projection: Float[Tensor, "head d_v d"]
    bias: Float[Tensor, "kv_head d_v"] | None
    seen: Visible
    tokens: tuple[str, ...]
    options: EffectiveOptions
    hidden: Float[Tensor, "n d"] | None = None
    _reaches: dict[tuple[tuple[int, ...], tuple[int, ...]], reachable.Reach] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, text_run: TextRun, number: int, head_numbers: Sequence[int], options: EffectiveOptions) -> "Layer":
        """Take some heads of a layer out of a text's run."""
        call = text_run.calls[number]
        heads = torch.tensor(head_numbers, device=call.query.device)
        kv_heads = heads // call.groups
        projection = text_run.model.projection(number)[heads]
        numbers = {"keys": call.key[0, kv_heads], "values": call.value[0, kv_heads], "output projection": projection}
        check_range(numbers, number, heads)
        all_heads = torch.equal(heads, torch.arange(call.query.shape[1], device=heads.device))
        value_heads = slice(None) if all_heads else kv_heads
        bias = None if options.bias else text_run.model.value_bias(number)
        if bias is not None:
            bias = bias[value_heads]
        seen = text_run.visible[number]
        if seen is None:
            every_key = torch.ones(1, call.key.shape[2], dtype=torch.bool, device=heads.device)
            seen = visible_from_mask(every_key, call.query.shape[2])
        hidden = None if text_run.trace is None else text_run.trace.hidden[number][0]
        return cls(call, heads, value_heads, projection, bias, seen, text_run.keys, options, hidden)

    # Values and outputs

    @cached_property
    def recomputed(self) -> Recomputed:
        """Head outputs, computed anew, and the norm, size and sum of rows."""
        return recompute(self.call, self.heads, self.projection)

    @cached_property
    def with_bias(self) -> maths.Heads:
        """Values and outputs as the model has them, the bias included."""
        values = self.call.value[0][self.value_heads]
        return maths.attention_heads(values, self.recomputed.output, self.seen, mass=self.recomputed.mass)

    @cached_property
    def plain(self) -> maths.Heads:
        """Values and outputs, less the bias where the options leave it out."""
        return self.with_bias if self.bias is None else maths.without_bias(self.with_bias, self.bias)

    @cached_property
    def passed(self) -> maths.Heads:
        """The heads with their values as the output projection passes them on, the bias included."""
        return maths.through_projection(self.with_bias, self.projection)

    @cached_property
    def solved_from(self) -> maths.Heads:
        """What `factors` are solved from: `passed`, unless the options leave out the bias or keep the mass."""
        heads = self.passed if self.bias is None else maths.through_projection(self.plain, self.projection)
        return maths.with_mass(heads) if self.options.mass else heads

    @property
    def dtype(self) -> torch.dtype:
        """The number format of raw maps."""
        return torch.promote_types(self.call.query.dtype, torch.float32)

    @property
    def gate(self) -> Float[Tensor, "head query d_v"] | None:
        """What multiplies each row of the head output before the output projection; None: nothing."""
        return None if self.call.gate is None else self.call.gate[0, self.heads]

    def raw(self, heads: Tensor, queries: Tensor) -> Float[Tensor, "head_ query_ key"]:
        """Return raw attention of chosen heads (positions in `heads`) and queries."""
        return self.call.weights(queries, heads=self.heads[heads], dtype=self.dtype)[0]

    def row_chunks(self) -> Iterator[Int[Tensor, "row"]]:
        """Yield positions of queries in ranges whose maps fit in memory."""
        positions = torch.arange(self.call.query.shape[2], device=self.call.query.device)
        return (positions[rows] for rows in self.call.row_chunks())

    # Effective attention

    @cached_property
    def factors(self) -> maths.Factors:
        """Effective attention in factors, with the rank of each row."""
        return maths.effective_factors(self.solved_from, tolerance=self.options.tolerance)

    def effective(self, heads: Tensor, queries: Tensor, keys: Tensor | slice) -> Float[Tensor, "head_ query_ key_"]:
        """Return effective attention of chosen heads, queries and keys."""
        return maths.effective_rows(self.factors, heads, queries, keys, raw=self.raw)

    def effective_rows(self, rows: Sequence[HeadRow]) -> Float[Tensor, "row key"]:
        """Return rows of effective attention, those of a head together, in float64."""
        maps = [self.effective(head, queries, slice(None))[0] for head, queries in self._by_head(rows)]
        return torch.cat(maps).double()

    def _by_head(self, rows: Sequence[HeadRow]) -> Iterator[tuple[Int[Tensor, "1"], Int[Tensor, "row"]]]:
        """Yield each head and its queries; rows of a head stand together."""
        for head, head_rows in groupby(rows, key=itemgetter(0)):
            queries = [query for _, query in head_rows]
            yield torch.tensor([head], device=self.heads.device), torch.tensor(queries, device=self.heads.device)

    @cached_property
    def _missing(self) -> Float[Tensor, "head query d_v"]:
        """A⊥V − O of each head."""
        return maths.output_error(self.factors, self.plain)

    @cached_property
    def residual(self) -> Float[Tensor, "head"]:
        """‖(A⊥V − O)H‖/‖OH‖ of each head."""
        return maths.relative_residual(self._missing, self.recomputed.output, self.projection, gate=self.gate)

    @cached_property
    def row_residual(self) -> Float[Tensor, "head query"]:
        r"""‖(a⊥V − o)H‖ of each row against $\sum_m a_m \|v_m H\|$, of which the model rounds off about eps."""
        missing = (self._missing @ maths.length_factor(self.projection)).norm(dim=-1)
        missing = missing.masked_fill(self.factors.identifiable, 0.0)  # these rows are their raw attention
        return torch.where(missing == 0, 0.0, missing / self.recomputed.size)

    @cached_property
    def norm_ratio(self) -> Float[Tensor, "head query"]:
        r"""‖a⊥‖/‖a‖ of each row, from the factors: $\|a^\perp_i\|^2 = y_i^\top G_i y_i = y_i \cdot o_i$."""
        square = (self.factors.coefficients.double() * self.solved_from.output.double()).sum(-1).clamp(min=0)
        ratio = square.sqrt() / self.recomputed.norm.double().clamp(min=torch.finfo(torch.float32).tiny)
        return ratio.masked_fill(self.factors.identifiable, 1.0)

    @cached_property
    def _over_maps(self) -> tuple[measures.PearsonSums, Float[Tensor, "3 key"]]:
        """What is summed up in one pass over the maps: `pearson_sums` and `received`."""
        heads = torch.arange(len(self.heads), device=self.heads.device)
        keys = torch.arange(self.call.key.shape[2], device=self.heads.device)
        blocks = []
        received = torch.zeros(3, len(keys), dtype=torch.float64, device=keys.device)
        step = max(1, _BLOCK_BYTES // (8 * len(heads) * len(keys)))
        for rows in (block for chunk in self.row_chunks() for block in chunk.split(step)):
            seen = self.seen.block(rows, keys)
            raw = self.raw(heads, rows)
            effective = self.effective(heads, rows, slice(None))
            blocks.append(measures.pearson_sums(raw, effective.to(raw), seen))
            for index, weights in enumerate((raw, effective)):
                received[index] += weights.sum((0, 1), dtype=torch.float64) / len(heads)
            received[2] += (seen.double() / seen.sum(-1, keepdim=True).clamp(min=1)).sum(0)
        sums = measures.PearsonSums(*(torch.cat(arrays, dim=-1) for arrays in zip(*blocks, strict=True)))
        return sums, received / self.call.query.shape[2]

    @property
    def pearson_sums(self) -> measures.PearsonSums:
        """What the correlation of raw and effective attention is made from, per head and query."""
        return self._over_maps[0]

    @property
    def received(self) -> Float[Tensor, "3 key"]:
        """The mean weight that each key receives over all rows of all heads: raw, effective, and with equal weights."""
        return self._over_maps[1]

    def output_with_effective(
        self, call: AttentionCall, heads: Tensor, queries: Tensor
    ) -> Float[Tensor, "1 head query d_v"]:
        """Return this layer's head output with effective attention in place of raw attention in chosen rows."""
        output = call.output.clone()
        values = call.value[0][self.value_heads].double()
        repeats = len(self.heads) // len(values)
        shift = torch.zeros_like(values[:, :1]) if self.bias is None else self.bias.double()[:, None]
        centred = (values - shift).repeat_interleave(repeats, 0)[heads]
        shift = shift.repeat_interleave(repeats, 0)[heads] * self.plain.sums.expand(len(self.heads), -1, 1)[heads]
        for rows in self.row_chunks():
            rows = rows[torch.isin(rows, queries)]
            if len(rows):
                weights = self.effective(heads, rows, slice(None)).double()
                output[0, self.heads[heads][:, None], rows] = (weights @ centred + shift[:, rows]).to(output)
        return output

    def output_with(
        self, call: AttentionCall, weights: Float[Tensor, "head_ query_ key_"], at: At
    ) -> Float[Tensor, "1 head query d_v"]:
        """Return this layer's head output with these weights in place of the raw ones at chosen indices."""
        output = call.output.clone()
        heads = self.heads[at.heads]
        rows = self.raw(at.heads, at.queries).double()
        rows[:, :, at.keys] = weights.to(rows)
        values = call.value[0, heads // call.groups].double()
        output[0, heads[:, None], at.queries] = (rows @ values).to(output)
        return output

    # Ranks and dimensions

    @cached_property
    def passed_rank(self) -> Int[Tensor, "head query"]:
        """The rank of each row's values as the output projection passes them on, whatever the options are."""
        if "factors" in vars(self) and self.solved_from is self.passed and not self.options.tolerance:
            return self.factors.rank
        return maths.row_ranks(self.passed)

    @cached_property
    def rank_is_sure(self) -> Bool[Tensor, "head query"]:
        """Whether each row's rank is the same in a coarser unit; where it is not, it depends on the resolution."""
        heads = self.solved_from
        rank = self.passed_rank if heads is self.passed else maths.row_ranks(heads)
        return maths.row_ranks(heads, eps=coarser_unit(self.call.value.dtype, heads.values.shape[-1])) == rank

    @cached_property
    def joint_null_dim(self) -> Int[Tensor, "query"]:
        """Dimension of the null space of the heads together; above their sum where heads share directions."""
        rank = self.passed_rank
        if self.bias is not None:
            rank = maths.row_ranks(maths.through_projection(self.plain, self.projection))
        return joint_null_dim(self.plain, rank, self.projection)

    @cached_property
    def polytope_dim(self) -> Int[Tensor, "head query"]:
        """Dimension of the attention rows with the same output, visible keys − rank([T, 1]); never above `null_dim`.

        With a learned sink rows need not keep their sum, and it is visible keys − rank(T).
        """
        rank = self.passed_rank
        if self.call.sink is None:
            rank = maths.row_ranks(maths.with_mass(self.passed))
        return (self.seen.count - rank).minimum(self.factors.null_dim)

    def reach(self, at: At) -> reachable.Reach:
        """Return what the chosen queries of chosen heads can reach, given the head's keys."""
        rows = tuple(at.heads.tolist()), tuple(at.queries.tolist())
        if rows not in self._reaches:
            step = max(1, linalg.BYTES // (8 * len(at.heads) * self.call.key.shape[2]))
            blocks = [self._reach(at.heads, queries) for queries in at.queries.split(step)]
            reach = reachable.Reach(*(torch.cat(arrays, dim=1) for arrays in zip(*blocks, strict=True)))
            dim = reach.dim.minimum(at.take(self.polytope_dim))  # it lies in that set, whose rank is surer
            self._reaches[rows] = reach._replace(dim=dim)
        return self._reaches[rows]

    def _reach(self, heads: Tensor, queries: Tensor) -> reachable.Reach:
        call = self.call
        values = self.passed.values[heads // self.passed.group]
        heads = self.heads[heads]
        keys = call.key[0, heads // call.groups, None]
        if call.bias_keys is not None:
            keys = keys + call.bias_keys(0, heads, queries)
        weights = call.weights(queries, heads=heads, dtype=torch.float64)[0]
        slope = call.slope(queries, heads=heads)
        if call.sink is not None:  # a key and a value of 0, whose score no query moves
            rest = (1 - weights.sum(-1, keepdim=True)).clamp(min=0)
            weights = torch.cat([weights, rest], -1)
            slope = None if slope is None else F.pad(slope, (0, 1))
            keys = F.pad(keys, (0, 0, 0, 1))
            values = F.pad(values, (0, 0, 0, 1))
        return reachable.reachable(weights, keys, values, eps=linalg.rounding_unit(call.value.dtype), slope=slope)

    # All alternatives

    @cached_property
    def polytopes(self) -> Polytopes:
        """The sets of attention with the same output: one basis per key-value head.

        Values come in the precision they were computed in, which decides their rank; half precision's are exact as they
        are, and come in float32.
        """
        dtype = torch.promote_types(self.call.value.dtype, torch.float32)
        values = self.passed.values.to(dtype)
        return Polytopes.of(values, self.seen, self.passed_rank[:: self.passed.group], sink=self.call.sink is not None)

    def values_with_sink(self, head: int) -> Float[Tensor, "key d_v"]:
        """Return the values that a head's rows are bounded with; a learned sink is one more key, of value 0."""
        return F.pad(self.polytopes.values[head // self.passed.group], (0, 0, 0, int(self.polytopes.sink)))

    def rows(self, rows: Sequence[HeadRow], *, moving: bool = False) -> Rows:
        """Return rows by head and query, those of a head together, each with the attention that gives the same output.

        With `moving`, the output may move, and rows know how far each direction moves it. Rows are in float64 and sum
        to exactly 1, unless a learned sink takes a part of them.
        """
        weights = [
            self.call.weights(queries, heads=self.heads[head], dtype=torch.float64)[0, 0]
            for head, queries in self._by_head(rows)
        ]
        attention = torch.cat(weights)
        if self.call.sink is None:
            attention = attention / attention.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        kv_heads = [head // self.passed.group for head, _ in rows]
        queries = torch.tensor([query for _, query in rows], device=self.heads.device)
        return self.polytopes.rows(kv_heads, queries, attention, self._lengths(rows) if moving else None)

    def _lengths(self, rows: Sequence[HeadRow]) -> Lengths:
        """Return the lengths of each row's output: of its head, or of the row itself where a gate multiplies it."""
        heads = list(dict.fromkeys(head for head, _ in rows))
        factors = [maths.length_factor_of_head(self.passed, self.projection, head) for head in heads]
        factor_indices = [heads.index(head) for head, _ in rows]
        gate = self.gate
        if gate is None or self.passed.back is not None:  # a gate acts on values, not in a basis
            return Lengths(torch.stack(factors), factor_indices)
        gated = []
        for (head, query), index in zip(rows, factor_indices, strict=True):
            gated.append(gate[head, query].double()[:, None] * factors[index])
        return Lengths(torch.stack(gated), range(len(rows)))

    def missed_by(self, change: Float[Tensor, "row key"], rows: Sequence[HeadRow]) -> Float[Tensor, "row"]:
        """Return how far changes of rows move their outputs, as `row_residual` has it; a sink moves nothing."""
        heads, queries = torch.tensor(rows, device=change.device).mT
        miss = change.new_zeros(len(change))
        for head in heads.unique().tolist():
            values = self.passed.values[head // self.passed.group].double()
            factor = maths.length_factor_of_head(self.passed, self.projection, head).to(values)
            of_head = heads == head
            miss[of_head] = (change[of_head, : len(values)].to(values) @ values @ factor).norm(dim=-1)
        return torch.where(miss == 0, 0.0, miss / self.recomputed.size[heads, queries])

    def largest_miss(self, rows: Rows, head_rows: Sequence[HeadRow]) -> float:
        """Return the largest share of a row's output that its basis does not hold, relative as in `row_residual`.

        Attention in the row's set can miss the output by about that much.
        """
        outside = rows.attention.clone()
        for group, indices in rows.by_group():
            outside[indices] -= rows.attention[indices] @ rows.basis[group] @ rows.basis[group].mT
        return float(self.missed_by(outside.masked_fill(~rows.free[:, None], 0.0), head_rows).max())
