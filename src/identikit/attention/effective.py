"""Effective attention of every layer and head of a text, in factors, with its certificate."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from identikit.attention.precision import (
    Recomputed,
    check_range,
    coarser_unit,
    computed_in,
    equal_values,
    recomputed,
    warn_of,
)
from identikit.attention.result import EffectiveAttention
from identikit.checks import flag, float_dtype, real_number
from identikit.maths import effective as maths
from identikit.maths import linalg, measures, reachable
from identikit.maths.polytope.least_norm import least_norm
from identikit.maths.polytope.rows import Rows, joined_rows, rows_of
from identikit.models.model import Model, checked_model
from identikit.models.reading import Change, Reading, readings
from identikit.models.surroundings import undisturbed
from identikit.models.taps.tap import AttentionCall
from identikit.results.axis import Axis, Index, chosen
from identikit.shapes import Bool, Float, Int, Tensor
from identikit.texts.text import is_several, of_texts

_LAYER_HEAD = ("layer", "head")
_ROW = (*_LAYER_HEAD, "query")
_EDGE = (*_ROW, "key")
_REACH = {"reachable_dim": "dim", "nearly_reachable_dim": "nearly_dim", "reachable_condition": "condition"}
DIMS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("raw", "effective", "null"), _EDGE),
    "visible": ("layer", "query", "key"),
    **dict.fromkeys(("rank", "null_dim", "polytope_dim", "rank_is_sure", "norm_ratio", "row_residual", "sink"), _ROW),
    **dict.fromkeys(_REACH, _ROW),
    "joint_null_dim": ("layer", "query"),
    "rounded_duplicates": ("layer",),
    **dict.fromkeys(("residual", "pearson"), _LAYER_HEAD),
    **{f"_{name}": _ROW for name in measures.PearsonSums._fields},
}


class Edges(NamedTuple):
    """Some edges of attention: raw = effective + null."""

    raw: Tensor
    effective: Tensor
    null: Tensor


@dataclass(frozen=True)
class Options:
    """How effective attention is read; see `effective_attention`."""

    bias: bool = True
    mass: bool = False
    tolerance: float = 0.0
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {name: flag(name, getattr(self, name)) for name in ("bias", "mass")}
        checked["tolerance"] = real_number("tolerance", self.tolerance, least=0, below=1)
        checked["dtype"] = float_dtype("dtype", self.dtype, ("float64", "float32"))
        vars(self).update(checked)  # as Python's own


@dataclass(frozen=True)
class Layer:
    """One layer of one text: the captured attention, what was computed from it, and the heads that were chosen.

    - `plain`: values and outputs, without the bias if that is left out; `read`: what `factors` were solved from
    - `dtype`: of the raw maps
    """

    call: AttentionCall
    heads: Int[Tensor, "head"]
    projection: Float[Tensor, "head d_v d"]
    bias: Float[Tensor, "kv_head d_v"] | None
    made: Recomputed
    plain: maths.Heads
    read: maths.Heads
    factors: maths.Factors
    dtype: torch.dtype

    def raw(self, heads: Tensor, queries: Tensor) -> Float[Tensor, "head_ query_ key"]:
        """Return raw attention of chosen heads (positions in `heads`) and queries."""
        return self.call.weights(queries, heads=self.heads[heads], dtype=self.dtype)[0]

    def edges(self, heads: Tensor, queries: Tensor, keys: Tensor) -> Edges:
        """Return raw, effective and null attention of chosen heads, queries and keys."""
        raw = self.raw(heads, queries)[:, :, keys]
        effective = maths.effective_rows(self.factors, heads, queries, keys, raw=self.raw).to(raw)
        return Edges(raw, effective, raw - effective)

    def row_chunks(self) -> Iterator[Int[Tensor, "row"]]:
        """Yield positions of queries in ranges whose maps fit in memory."""
        positions = torch.arange(self.call.query.shape[2], device=self.call.query.device)
        return (positions[rows] for rows in self.call.row_chunks())

    def chunks(self) -> Iterator[tuple[Int[Tensor, "row"], Edges]]:
        """Yield the whole map in ranges of rows."""
        heads = torch.arange(len(self.heads), device=self.heads.device)
        for rows in self.row_chunks():
            yield rows, self.edges(heads, rows, torch.arange(self.call.key.shape[2], device=rows.device))

    def passed_on(self, head: int) -> Float[Tensor, "key d_v"]:
        """Return a head's values as the output projection passes them on, bias and all.

        They come in the precision they were computed in, which decides their rank; half precision's are exact as they
        are, and come in float32.
        """
        dtype = torch.promote_types(self.call.value.dtype, torch.float32)
        return self.passed.values[head // self.passed.group].to(dtype)

    def rows(self, head: int, queries: Int[Tensor, "row"]) -> Rows:
        """Return rows of one head with the set of attention that gives each its output."""
        keys = torch.arange(self.call.key.shape[2], device=queries.device)
        visible = self.factors.visible.block(queries, keys)
        attention, values, rank = self.attention(head, queries), self.passed_on(head), self._rank[head, queries]
        through, sink = maths.lengths_through(self.passed, self.projection, head), self.call.sink is not None
        if self.gate is None or self.passed.basis is not None:  # a gate acts on values, not in a basis
            return rows_of(attention, values, visible, rank, through, sink=sink)
        gated = self.gate[head, queries].double()[..., None] * through
        one = [slice(row, row + 1) for row in range(len(queries))]
        return joined_rows(
            [rows_of(attention[at], values, visible[at], rank[at], gated[at][0], sink=sink) for at in one]
        )

    def missed_by(self, moved: Float[Tensor, "weighed"], row: "Row", head: int, query: int) -> float:
        """Return how far a change of a head's row moves its output, as `row_residual` has it."""
        through = maths.lengths_through(self.passed, self.projection, head)
        missing = float((moved.double() @ row.values.double() @ through.to(moved)).norm())
        return missing and missing / float(self.made.size[head, query])

    @property
    def gate(self) -> Float[Tensor, "head query d_v"] | None:
        """What multiplies each row of the head output before the output projection; None: nothing."""
        gate = getattr(self.call, "gate", None)
        return None if gate is None else gate[0, self.heads]

    def attention(self, head: int, queries: Int[Tensor, "row"]) -> Float[Tensor, "row key"]:
        """Return rows of one head in float64; they sum to exactly 1 unless a learned sink takes a part of them."""
        weights = self.call.weights(queries, heads=self.heads[[head]], dtype=torch.float64)[0, 0]
        if self.call.sink is not None:
            return weights
        return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)

    @cached_property
    def _rank(self) -> Int[Tensor, "head query"]:
        """The rank of each row's values as the output projection passes them on, whatever the options are."""
        return maths.row_ranks(self.passed)

    @cached_property
    def _missing(self) -> Float[Tensor, "head query d_v"]:
        """A⊥V − O of each head."""
        options = {"bias": self.bias, "mass": self.made.mass}
        return maths.missing_output(self.factors, _values(self.call, self.heads), self.made.output, **options)

    @cached_property
    def residual(self) -> Float[Tensor, "head"]:
        """‖(A⊥V − O)H‖/‖OH‖ of each head."""
        return maths.relative_size(self._missing, self.made.output, self.projection, gate=self.gate)

    @cached_property
    def row_residual(self) -> Float[Tensor, "head query"]:
        r"""‖(a⊥V − o)H‖ of each row against $\sum_m a_m \|v_m H\|$, of which the model rounds off about eps."""
        missing = (self._missing @ maths.lengths_of(self.projection)).norm(dim=-1)
        missing = missing.masked_fill(self.factors.identifiable, 0.0)  # these rows are their raw attention
        return torch.where(missing == 0, 0.0, missing / self.made.size)

    @cached_property
    def norm_ratio(self) -> Float[Tensor, "head query"]:
        r"""‖a⊥‖/‖a‖ of each row, from the factors: $\|a^\perp_i\|^2 = y_i^\top G_i y_i = y_i \cdot o_i$."""
        square = (self.factors.coefficients.double() * self.read.output.double()).sum(-1).clamp(min=0)
        ratio = square.sqrt() / self.made.norm.double().clamp(min=torch.finfo(torch.float32).tiny)
        return ratio.masked_fill(self.factors.identifiable, 1.0)

    @property
    def sink(self) -> Float[Tensor, "head query"]:
        """What a learned sink takes of each row; 0 where there is none."""
        mass = self.made.mass
        return torch.zeros_like(self.made.norm) if mass is None else 1 - mass

    @cached_property
    def rank_is_sure(self) -> Bool[Tensor, "head query"]:
        """Whether each row's rank is the same in a coarser unit; where it is not, it depends on the resolution."""
        unit = coarser_unit(self.call.value.dtype, self.read.values.shape[-1])
        return maths.row_ranks(self.read, eps=unit) == maths.row_ranks(self.read)

    @cached_property
    def joint_null_dim(self) -> Int[Tensor, "query"]:
        """Dimension of the null space of the heads together; above their sum where heads share directions."""
        rank = maths.row_ranks(maths.through_projection(self.plain, self.projection))
        return maths.joint_null_dim(self.plain, rank, self.projection)

    @cached_property
    def passed(self) -> maths.Heads:
        """The heads with their values as the output projection passes them on, bias and all."""
        values = _values(self.call, self.heads)
        heads = maths.attention_heads(values, self.made.output, self.factors.visible, mass=self.made.mass)
        return maths.through_projection(heads, self.projection)

    @cached_property
    def polytope_dim(self) -> Int[Tensor, "head query"]:
        """Dimension of the attention rows with the same output, visible keys − rank([T, 1]); never above `null_dim`.

        With a learned sink rows need not keep their sum, and it is visible keys − rank(T).
        """
        if self.call.sink is not None:
            return (self.factors.visible.count - self._rank).minimum(self.factors.null_dim)
        found = maths.effective_factors(maths.keeping_mass(self.passed)).null_dim
        return found.minimum(self.factors.null_dim)

    def reach(self, heads: Tensor, queries: Tensor) -> reachable.Reach:
        """Return what the chosen queries of chosen heads (positions in `heads`) can reach; the last answer is kept."""
        asked = heads.tolist(), queries.tolist()
        if self._reached.get("asked") != asked:
            step = max(1, linalg.BYTES // (8 * len(heads) * self.call.key.shape[2]))
            parts = [self._reach(heads, rows) for rows in queries.split(step)]
            found = reachable.Reach(*(torch.cat(part, dim=1) for part in zip(*parts, strict=True)))
            dim = found.dim.minimum(self.polytope_dim[heads][:, queries])  # it lies in that set, whose rank is surer
            self._reached.update(asked=asked, found=found._replace(dim=dim))
        return self._reached["found"]

    @cached_property
    def _reached(self) -> dict[str, Any]:
        return {}

    def _reach(self, heads: Tensor, queries: Tensor) -> reachable.Reach:
        call, own = self.call, self.heads[heads]
        eps = linalg.rounding_unit(call.value.dtype)
        keys, values = call.key[0, own // call.groups, None], self.passed.values[heads // self.passed.group]
        if call.bias_keys is not None:
            keys = keys + call.bias_keys(0, own, queries)
        weights, slope = call.weights(queries, heads=own, dtype=torch.float64)[0], call.slope(queries, heads=own)
        if call.sink is not None:  # a key and a value of 0, whose score no query moves
            rest = (1 - weights.sum(-1, keepdim=True)).clamp(min=0)
            weights, slope = torch.cat([weights, rest], -1), None if slope is None else F.pad(slope, (0, 1))
            keys, values = F.pad(keys, (0, 0, 0, 1)), F.pad(values, (0, 0, 0, 1))
        return reachable.reachable(weights, keys, values, eps=eps, slope=slope)

    @cached_property
    def sums(self) -> measures.PearsonSums:
        """What the correlation of raw and effective attention is made from, per head and query."""
        blocks = []
        for rows, edges in self.chunks():
            visible = self.factors.visible.block(rows, torch.arange(edges.raw.shape[2], device=rows.device))
            blocks.append(measures.pearson_sums(edges.raw, edges.effective, visible))
        return measures.PearsonSums(*(torch.cat(part, dim=-1) for part in zip(*blocks, strict=True)))

    def attend(self, call: AttentionCall, heads: Tensor, queries: Tensor) -> Float[Tensor, "1 head query d_v"]:
        """Return this layer's head output with effective attention in place of raw attention in the chosen rows."""
        output = call.output.clone()
        values = _values(call, self.heads).double()
        repeats = len(self.heads) // len(values)
        shift = torch.zeros_like(values[:, :1]) if self.bias is None else self.bias.double()[:, None]
        values, shift = (part.repeat_interleave(repeats, 0)[heads] for part in (values - shift, shift))
        shift = shift * self.plain.sums.expand(len(self.heads), -1, 1)[heads]
        for rows in self.row_chunks():
            rows = rows[torch.isin(rows, queries)]
            if len(rows):
                weights = maths.effective_rows(self.factors, heads, rows, raw=self.raw).double()
                output[0, self.heads[heads][:, None], rows] = (weights @ values + shift[:, rows]).to(output)
        return output


@dataclass(frozen=True, eq=False)
class Captured:
    """The attention of one text as it was captured: computes the arrays of an `EffectiveAttention` when asked."""

    reading: Reading
    parts: tuple[Layer, ...]
    dims: Mapping[str, tuple[str, ...]]

    @undisturbed()
    def read(self, name: str, places: Mapping[str, Sequence[int]]) -> Tensor:
        """Return an array at these places of its axes."""
        at = {dim: self.positions(found) for dim, found in places.items()}
        parts = [self.parts[place] for place in places["layer"]]
        if name in Edges._fields:
            found = [getattr(part.edges(at["head"], at["query"], at["key"]), name) for part in parts]
        elif name == "visible":
            found = [part.factors.visible.block(at["query"], at["key"]) for part in parts]
        elif name in ("rank", "null_dim"):
            found = [getattr(part.factors, name)[at["head"]][:, at["query"]] for part in parts]
        elif name in ("polytope_dim", "rank_is_sure", "norm_ratio", "row_residual", "sink"):
            found = [getattr(part, name)[at["head"]][:, at["query"]] for part in parts]
        elif name == "rounded_duplicates":
            found = [torch.tensor(equal_values(part.call, self.reading.tokens)[1]) for part in parts]
        elif name in _REACH:
            found = [getattr(part.reach(at["head"], at["query"]), _REACH[name]) for part in parts]
        elif name == "pearson":
            found = [measures.pearson(part.sums.pooled(-1))[at["head"]] for part in parts]
        elif name.startswith("_"):
            found = [getattr(part.sums, name[1:])[at["head"]][:, at["query"]] for part in parts]
        else:
            axis = self.dims[name][1]
            found = [getattr(part, name)[at[axis]] for part in parts]
        return torch.stack(found)

    def positions(self, places: Sequence[int]) -> Int[Tensor, "chosen"]:
        """Return places as a tensor where the model is."""
        return torch.tensor(places, dtype=torch.long, device=self.parts[0].heads.device)

    @undisturbed()
    def change(self, layers: Sequence[int], heads: Sequence[int], queries: Sequence[int]) -> Change:
        """Run the model with effective attention in the chosen rows; return how much its output changed."""
        parts = {self.parts[place].call.layer: self.parts[place] for place in layers}
        rows = self.positions(heads), self.positions(queries)
        return self.reading.changed_by(
            lambda call: parts[call.layer].attend(call, *rows) if call.layer in parts else None
        )

    def row(self, layer: int, head: int, query: int) -> "Row":
        """Return one row over the keys that its query sees, ready for the questions of `maths.intervals`."""
        part = self.parts[layer]
        positions = self.positions(range(len(self.reading.tokens)))
        keys = positions[part.factors.visible.block(positions[[query]], positions)[0]]
        attention, values = part.attention(head, positions[[query]])[0, keys], part.passed_on(head)[keys]
        if part.call.sink is not None:
            attention = torch.cat([attention, (1 - attention.sum(0, keepdim=True)).clamp(min=0)])
            values = F.pad(values, (0, 0, 0, 1))
        return Row(keys, attention, values, len(positions))

    def rows(self, places: Sequence[tuple[int, int, int]]) -> Rows:
        """Return these rows (layer, head and query, all rows of a head together) for the questions about many."""
        heads: dict[tuple[int, int], list[int]] = {}
        for layer, head, query in places:
            heads.setdefault((layer, head), []).append(query)
        found = [self.parts[layer].rows(head, self.positions(queries)) for (layer, head), queries in heads.items()]
        return joined_rows(found)


class Row(NamedTuple):
    """One row of one head: attention over its visible keys, and their values; a learned sink is one more, the last."""

    keys: Int[Tensor, "seen"]
    attention: Float[Tensor, "weighed"]
    values: Float[Tensor, "weighed d_v"]
    n: int

    def over_all_keys(self, weights: Float[Tensor, "weighed"]) -> Float[Tensor, "key"]:
        """Return weights of the visible keys as weights of all keys, invisible ones 0, without the sink's."""
        full = torch.zeros(self.n, dtype=torch.float64, device=self.keys.device)
        full[self.keys] = weights[: len(self.keys)].to(full)
        return full


@of_texts
@undisturbed()
def effective_attention(
    model: Model,
    text: Any,
    *,
    layers: Index = None,
    heads: Index = None,
    bias: bool = True,
    mass: bool = False,
    tolerance: float = 0.0,
    dtype: torch.dtype = torch.float64,
    truncate: bool = False,
    max_tokens: int | None = None,
) -> EffectiveAttention | list[EffectiveAttention]:
    """Compute the effective attention of a text (Eq. 9): an `EffectiveAttention`, or a list for a list of texts.

    `text` is a string, a pair of strings, token ids, or a list of these. Where the model reads images or
    sounds, it is an image or its path, or a sound file's path or samples.

    - `layers`, `heads`: only these, counted from 0
    - `bias`: keep the values' bias, so that the real model's output is kept; without it, T = E·W^V·H is the paper's
      letter
    - `mass`: keep the sum of every row (null space LN([T, 1]))
    - `tolerance`: also take singular values below this share of the largest as null
    - `dtype`: of the factors that are kept; they are solved for in float64
    - `truncate`: cut texts that are too long for the model, or than `max_tokens`, instead of refusing them
    """
    options = Options(bias=bias, mass=mass, tolerance=tolerance, dtype=dtype)
    model = checked_model(model)
    which = model.attending(layers), chosen("head", heads, model.n_heads)
    found = [
        attend(reading, options, layers=which[0], heads=which[1])
        for reading in readings(model, text, layers=which[0], truncate=truncate, max_tokens=max_tokens)
    ]
    return found if is_several(text) else found[0]


def attend(reading: Reading, options: Options, *, layers: Sequence[int], heads: Sequence[int]) -> EffectiveAttention:
    """Compute the effective attention of a text that was read."""
    parts = tuple(_layer(reading, layer, heads, options) for layer in layers)
    warn_of(parts, tolerance=options.tolerance, stacklevel=3)
    settings = {"bias": options.bias, "mass": options.mass, "tolerance": options.tolerance}
    settings |= {"outputs_computed_in": str(computed_in(parts[0].call)).removeprefix("torch.")}
    source = reading.model.provenance(reading.text, **settings, layers=layers, heads=heads)
    positions = tuple(range(len(reading.tokens)))
    axes = (
        Axis("layer", tuple(layers)),
        Axis("head", tuple(heads)),
        Axis("query", positions, reading.tokens),
        Axis("key", positions, reading.tokens),
    )
    about = reading.about | {"d_value": reading.model.d_value, "causal": reading.model.causal}
    return EffectiveAttention(axes, Captured(reading, parts, DIMS), source, about)


@undisturbed()
def simplex_rows(attention: EffectiveAttention) -> Float[Tensor, "layer head query key"]:
    """Return the attention of least norm on the simplex with the same output, for the selected rows; all axes kept."""
    source: Any = attention.source
    layers, heads, queries, keys = (attention._axis(name).places for name in _EDGE)
    wanted, at = source.positions(queries), source.positions(keys)

    def least(part: Layer) -> Float[Tensor, "head query key"]:
        rows = joined_rows([part.rows(head, wanted) for head in heads])  # a learned sink's column is not in `keys`
        return least_norm(rows)[:, at].unflatten(0, (len(heads), len(queries)))

    return torch.stack([least(source.parts[layer]) for layer in layers])


def _layer(reading: Reading, layer: int, heads: Sequence[int], options: Options) -> Layer:
    call, visible = reading.calls[layer], reading.visible[layer]
    model, wanted = reading.model, torch.tensor(heads, device=call.query.device)
    projection = model.projection(call.layer)[wanted]
    made = recomputed(call, wanted, projection)
    own = wanted // call.groups
    numbers = {"keys": call.key[0, own], "values": call.value[0, own], "output projection": projection}
    check_range(numbers, call.layer, wanted)
    bias = None if options.bias else model.value_bias(call.layer)
    plain = maths.attention_heads(_values(call, wanted), made.output, visible, mass=made.mass)
    if bias is not None:
        bias = bias if _all_of(call, wanted) else bias[wanted // call.groups]
        plain = maths.without_bias(plain, bias)
    read = maths.through_projection(plain, projection)
    read = maths.keeping_mass(read) if options.mass else read
    factors = maths.effective_factors(read, tolerance=options.tolerance, dtype=options.dtype)
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    return Layer(call, wanted, projection, bias, made, plain, read, factors, dtype)


def _values(call: AttentionCall, heads: Tensor) -> Float[Tensor, "kv key d_v"]:
    """Return the values of the chosen heads; with all of them, in order, one per group."""
    return call.value[0] if _all_of(call, heads) else call.value[0, heads // call.groups]


def _all_of(call: AttentionCall, heads: Tensor) -> bool:
    return torch.equal(heads, torch.arange(call.query.shape[1], device=heads.device))
