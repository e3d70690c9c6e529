"""Which attention is real: effective attention of every layer and head of a text, with its certificate."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from numbers import Integral
from typing import Any, NamedTuple

import torch

from identikit.errors import InputError
from identikit.maths import effective as maths
from identikit.maths.visible import Visible
from identikit.models.model import Model
from identikit.models.reading import Change, encoded_batches, output_change, text_alone, visible_keys
from identikit.models.tap import AttentionCall
from identikit.provenance import Provenance, provenance
from identikit.shapes import Float, Int, Tensor
from identikit.text import Text, TokenBatch

Index = Any  # a number, a range, a list of numbers, or None for all


class Edges(NamedTuple):
    """Some edges of attention: raw = effective + null. Axes asked for as one number are dropped."""

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


@dataclass(frozen=True)
class Layer:
    """One layer of one text: the captured attention, what was computed from it, and the heads that were chosen."""

    call: AttentionCall
    heads: Int[Tensor, "head"]
    projection: Float[Tensor, "head d_v d"]
    bias: Float[Tensor, "kv_head d_v"] | None
    plain: maths.Heads
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

    @cached_property
    def residual(self) -> Float[Tensor, "head"]:
        """‖(A⊥V − O)H‖/‖OH‖ of each head."""
        values, output = _chosen(self.call, self.heads)
        return maths.residual(self.factors, values, output, self.projection, bias=self.bias)

    @cached_property
    def sums(self) -> maths.PearsonSums:
        """What the correlation of raw and effective attention is made from, per head and query."""
        blocks = []
        for rows, edges in self.chunks():
            visible = self.factors.visible.block(rows, torch.arange(edges.raw.shape[2], device=rows.device))
            blocks.append(maths.pearson_sums(edges.raw, edges.effective, visible))
        return maths.PearsonSums(*(torch.cat(part, dim=-1) for part in zip(*blocks, strict=True)))

    def attend(self, call: AttentionCall) -> Float[Tensor, "1 head query d_v"]:
        """Return the head output of this layer with effective attention in the place of raw attention."""
        output = call.output.clone()
        values = _chosen(call, self.heads)[0].double()
        repeats = len(self.heads) // len(values)
        shift = torch.zeros_like(values[:, :1]) if self.bias is None else self.bias.double()[:, None]
        values, shift = (part.repeat_interleave(repeats, 0) for part in (values - shift, shift))
        for rows in self.row_chunks():
            weights = maths.effective_rows(self.factors, queries=rows, raw=self.raw).double()
            output[0, self.heads[:, None], rows] = (weights @ values + shift).to(output)
        return output


@dataclass(frozen=True)
class EffectiveAttention:
    """Raw, effective and null attention of one text; maps are (layer, head, query, key) and made when asked for.

    - `layers`, `heads`: which of the model's the first two axes hold
    - `rank`, `null_dim`: of each row's visible values, (layer, head, query)
    - `residual`: ‖(A⊥V − O)H‖/‖OH‖, (layer, head): how exactly effective attention gives the same output
    """

    tokens: tuple[str, ...]
    special: tuple[bool, ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    provenance: Provenance
    parts: tuple[Layer, ...] = field(repr=False)
    model: Model = field(repr=False)
    batch: TokenBatch = field(repr=False)

    def at(self, *, layer: Index = None, head: Index = None, query: Index = None, key: Index = None) -> Edges:
        """Return raw, effective and null attention of these layers, heads, queries and keys alone.

        Each is a number, a range, a list or None for all; layers and heads by the model's own count, from 0.
        """
        n = len(self.tokens)
        chosen = _positions("layer", layer, self.layers), _positions("head", head, self.heads)
        places = _positions("query", query, range(n)), _positions("key", key, range(n))
        rows = [self.parts[i].edges(*(self._on_device(p) for p in (chosen[1], *places))) for i in chosen[0]]
        drop = tuple(0 if isinstance(index, Integral) else slice(None) for index in (layer, head, query, key))
        return Edges(*(torch.stack([getattr(row, name) for row in rows])[drop] for name in Edges._fields))

    def _on_device(self, positions: list[int]) -> Tensor:
        return torch.tensor(positions, dtype=torch.long, device=self.parts[0].heads.device)

    @property
    def raw(self) -> Float[Tensor, "layer head query key"]:
        """Attention as the model computes it."""
        return self.at().raw

    @property
    def effective(self) -> Float[Tensor, "layer head query key"]:
        """The part of attention that the output depends on (Eq. 9)."""
        return self.at().effective

    @property
    def null(self) -> Float[Tensor, "layer head query key"]:
        """The part of attention that changes nothing."""
        return self.at().null

    @property
    def rank(self) -> Int[Tensor, "layer head query"]:
        """Rank of the visible values of each row."""
        return torch.stack([part.factors.rank for part in self.parts])

    @property
    def null_dim(self) -> Int[Tensor, "layer head query"]:
        """Dimension of each row's null space (Eq. 6, over the keys that the row sees)."""
        return torch.stack([part.factors.null_dim for part in self.parts])

    @property
    def joint_null_dim(self) -> Int[Tensor, "layer query"]:
        """Dimension of the null space of a layer's heads together; above their sum where heads share directions."""
        found = []
        for part in self.parts:
            rank = maths.effective_factors(maths.through_projection(part.plain, part.projection)).rank
            found.append(maths.joint_null_dim(part.plain, rank, part.projection))
        return torch.stack(found)

    @property
    def residual(self) -> Float[Tensor, "layer head"]:
        """The certificate: ‖(A⊥V − O)H‖/‖OH‖."""
        return torch.stack([part.residual for part in self.parts])

    def pearson(self, by: str | None = None) -> Tensor:
        """Return the correlation of raw and effective attention over visible entries.

        Overall: one number over all layers and heads. `by="layer"`: (layer), `by="head"`: (layer, head),
        `by="visible"`: entry c is over the rows that see c keys, nan where no row does (rows without a null space
        correlate perfectly and inflate the pool).
        """
        sums = maths.PearsonSums(*map(torch.stack, zip(*(part.sums for part in self.parts), strict=True)))
        if by is None:
            return maths.pearson(sums.pooled())
        if by == "visible":
            seen = sums.entries.long()
            groups = [maths.PearsonSums(*(part[seen == n] for part in sums)) for n in range(len(self.tokens) + 1)]
            return torch.stack([maths.pearson(group.pooled()) for group in groups])
        if by not in ("layer", "head"):
            raise InputError(f"pearson(by={by!r}): use None, 'layer', 'head' or 'visible'.")
        heads = sums.pooled(-1)
        return maths.pearson(heads if by == "head" else heads.pooled(-1))

    def verify(self) -> Change:
        """Run the model with effective attention in the place of raw attention; return how much its output changed."""
        parts = dict(zip(self.layers, self.parts, strict=True))
        return output_change(
            self.model, self.batch, lambda call: parts[call.layer].attend(call) if call.layer in parts else None
        )


def effective_attention(
    model: Model,
    text: Text | list[Text] | Any,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    bias: bool = True,
    mass: bool = False,
    tolerance: float = 0.0,
    dtype: torch.dtype = torch.float64,
    truncate: bool = False,
    max_tokens: int | None = None,
) -> list[EffectiveAttention]:
    """Compute the effective attention of texts (Eq. 9), one result per text, in order.

    `text` is a text, a pair, or a list of either (images or their paths for a vision model). `layers` and `heads` count
    from 0; None is all of them. With `bias` the values hold their bias, so that the real model's output is kept;
    without, T = E·W^V·H is the paper's letter. `mass` keeps every row's sum (null space LN([T, 1])). `tolerance` ε also
    takes singular values below ε·σ_max as null. Factors are solved for in float64 and kept in `dtype`. `truncate` cuts
    texts at the model's positions instead of refusing.
    """
    options = Options(bias=bias, mass=mass, tolerance=tolerance, dtype=dtype)
    chosen = tuple(range(model.n_layers)) if layers is None else tuple(model.layer(layer) for layer in layers)
    which = _positions("head", None if heads is None else list(heads), range(model.n_heads))
    if tolerance < 0 or not chosen or not which:
        raise InputError("effective_attention: tolerance must be at least 0, and layers and heads not empty.")
    prepare = partial(_layer, model, which, options)
    results: dict[int, EffectiveAttention] = {}
    for batch, texts in encoded_batches(model, text, truncate=truncate, max_tokens=max_tokens):
        parts: list[list[Layer]] = [[] for _ in batch.order]
        model.trace(batch, _collector(batch, chosen, prepare, parts))
        for row, index in enumerate(batch.order):
            settings = {"bias": bias, "mass": mass, "tolerance": tolerance, "layers": chosen, "heads": which}
            alone, source = text_alone(batch, row), provenance(model, texts[row], **settings)
            special = tuple(alone.special[0].tolist())
            results[index] = EffectiveAttention(
                batch.tokens[row], special, chosen, tuple(which), source, _ordered(parts[row], chosen), model, alone
            )
    return [results[index] for index in sorted(results)]


def _ordered(parts: list[Layer], layers: tuple[int, ...]) -> tuple[Layer, ...]:
    found = {part.call.layer: part for part in parts}
    return tuple(found[layer] for layer in layers)


def _collector(
    batch: TokenBatch, layers: tuple[int, ...], prepare: Callable[[AttentionCall, Visible | None], Layer],
    parts: list[list[Layer]],
) -> Callable[[AttentionCall], None]:  # fmt: skip
    """Return a visitor that takes each chosen layer apart by texts; layers that share a mask share its reading."""
    seen: dict[tuple[int, int], tuple[Any, Visible | None]] = {}

    def visit(call: AttentionCall) -> None:
        if call.layer not in layers:
            return
        for row in range(len(batch)):
            alone = call.of_text(row, batch.rows(row).to(call.query.device))
            key = id(call.mask), row
            if key not in seen:
                seen[key] = call.mask, visible_keys(alone)  # the mask is kept alive so that its id stays its own
            parts[row].append(prepare(alone, seen[key][1]))

    return visit


def _layer(model: Model, heads: list[int], options: Options, call: AttentionCall, visible: Visible | None) -> Layer:
    chosen = torch.tensor(heads, device=call.query.device)
    values, output = _chosen(call, chosen)
    projection = model.projection(call.layer)[chosen]
    bias = None if options.bias else model.value_bias(call.layer)
    plain = maths.attention_heads(values, output, visible)
    if bias is not None:
        bias = bias if _all_of(call, chosen) else bias[chosen // call.groups]
        plain = maths.without_bias(plain, bias)
    read = maths.through_projection(plain, projection)
    read = maths.keeping_mass(read) if options.mass else read
    factors = maths.effective_factors(read, tolerance=options.tolerance, dtype=options.dtype)
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    return Layer(call, chosen, projection, bias, plain, factors, dtype)


def _chosen(call: AttentionCall, heads: Tensor) -> tuple[Float[Tensor, "kv n d_v"], Float[Tensor, "head n d_v"]]:
    """Return values and head outputs of the chosen heads; with all of them, in order, values stay one per group."""
    if _all_of(call, heads):
        return call.value[0], call.output[0]
    return call.value[0, heads // call.groups], call.output[0, heads]


def _all_of(call: AttentionCall, heads: Tensor) -> bool:
    return torch.equal(heads, torch.arange(call.query.shape[1], device=heads.device))


def _positions(name: str, index: Index, available: Sequence[int]) -> list[int]:
    """Return where the asked-for layers, heads, queries or keys stand among those that there are."""
    if index is None or isinstance(index, slice):
        return list(range(len(available)))[index or slice(None)]
    wanted = [int(index)] if isinstance(index, Integral) else list(index)
    if not wanted and name == "layer":
        raise InputError("no layer was asked for: give one or more, or None for all of them.")
    for one in wanted:
        if one not in available:
            there = f"0 to {len(available) - 1}" if isinstance(available, range) else ", ".join(map(str, available))
            raise InputError(f"{name} {one} does not exist: there are {there} (counted from 0).")
    return [list(available).index(one) for one in wanted]
