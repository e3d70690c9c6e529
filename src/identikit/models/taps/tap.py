"""The tap: one capture point for the attention of every architecture.

transformers lets a caller register an attention function and a mask function under one name. Ours receives, at every
layer, the query, key and value (after rotary, keys and values not repeated), the mask and the scaling; it shows them to
a *visitor* as an `AttentionCall` and returns the head output, or what the visitor returns instead. Nothing of
transformers is forked, and no attention matrix is needed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import and_masks, causal_mask_function, padding_mask_function, sdpa_mask

from identikit.errors import InputError, ModelError
from identikit.shapes import Bool, Float, Int, Tensor

GATE = "identikit_gate"  # where an attention module keeps the gate of its next call
NAME = "identikit_tap"  # must contain none of: sdpa, flash, flex, '/', 'paged|' (transformers matches on those)
LONGEST_MASK = 4096  # tokens up to which a mask is materialised
ROW_BYTES = 1 << 28  # bytes of scores held at once when rows are taken in chunks

# Arguments of the attention call that are already in the mask, or have no effect in evaluation mode.
_WITHOUT_EFFECT = frozenset([
    "is_causal", "sliding_window", "position_ids", "use_cache", "cache_position", "past_key_values", "deterministic",
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch",
])  # fmt: skip

MaskRule = Callable[[Any, Any, Any, Any], Any]  # batch, head, query and key indices to bool, by broadcasting
Selection = slice | Tensor  # a range of queries or heads, or their positions
BiasKeys = Callable[[int, Tensor, Tensor], Tensor]  # text, heads, queries to (head, query, key, d_k)
Visitor = Callable[["AttentionCall"], Tensor | None]

_visitor: ContextVar[Visitor] = ContextVar("identikit_visitor")
_counter: ContextVar["CallCounter"] = ContextVar("identikit_calls")


@dataclass
class CallCounter:
    """How far a run is: the index of the `block` that is running, and how many attention `calls` were made so far.

    Where layers are on several devices, captured tensors go to `gather_device`; None: they are on one. Where blocks
    attend several times, `visited_call` is the number of the only call that the visitor sees now; None: it sees all.
    """

    gather_device: torch.device | None = None
    block: int = 0
    calls: int = 0
    visited_call: int | None = None


@dataclass(frozen=True)
class RowMask:
    """A mask too long to hold: the `rule` that made it, evaluated only for the selected rows.

    It covers `batch` texts of `length` keys, on `device`, and `queries` (None: as many as keys); `plain_causal` says
    that each token sees itself and all before it.
    """

    rule: MaskRule
    batch: int
    length: int
    device: torch.device
    plain_causal: bool
    queries: int | None = None

    def rows(self, queries: Selection) -> Bool[Tensor, "batch 1 row key"]:
        """Return the rows of the chosen queries."""
        sizes = self.batch, 1, self.queries or self.length, self.length
        batch, head, query, key = (torch.arange(n, device=self.device) for n in sizes)
        index = torch.meshgrid(batch, head, query[queries], key, indexing="ij")
        return self.rule(*index).expand(index[0].shape)

    def __getstate__(self) -> dict[str, object]:
        if self.rule is not causal_mask_function:  # a function that transformers puts together
            raise InputError(f"Copying or pickling attention of {self.length} tokens: its mask is a rule. Use save().")
        return vars(self)


@dataclass(frozen=True)
class AttentionCall:
    r"""What one layer's attention was called with, and what can be computed from it.

    $$O = A V,\quad A = \mathrm{softmax}(s\,Q K^\top + B)$$ (Eq. 1, with the terms that later models added)

    - `query`, `key`, `value`: Q, K, V; rotary applied, keys and values one per key-value head
    - `scaling`: s; `softcap`: c of $c\tanh(\cdot/c)$ on the scaled scores; `bias`: B, added after it
    - `mask`: which keys a query sees (True); None: all keys
    - `bias_keys`: where B depends on the query, $B_{ij} = s\,q_i \cdot r_{ij}$ + a constant (XLNet): r of a text of the
      batch, for selected heads and queries; None: it does not
    - `gate`: what multiplies O before the output projection (Qwen3-Next), so that H is diag(gate)·H; None: nothing
    - `layer`: the index of the block, also where other blocks have no softmax attention
    - `sink`: a learned score per head that competes with the keys, as an extra key of value 0 would (gpt-oss), so that
      rows of A sum to less than 1; None: there is none
    - `given`: A itself, where it was captured elsewhere; Q and K are then 0. None: A is computed
    """

    layer: int
    query: Float[Tensor, "batch head query d_k"]
    key: Float[Tensor, "batch kv_head key d_k"]
    value: Float[Tensor, "batch kv_head key d_v"]
    scaling: float
    mask: Bool[Tensor, "batch #head query key"] | RowMask | None = None
    softcap: float | None = None
    bias: Float[Tensor, "#batch head query key"] | None = None
    bias_keys: BiasKeys | None = None
    gate: Float[Tensor, "batch head query d_v"] | None = None
    sink: Float[Tensor, "head"] | None = None
    given: Float[Tensor, "batch head query key"] | None = None

    @property
    def groups(self) -> int:
        """How many heads share a key-value head."""
        return self.query.shape[1] // self.key.shape[1]

    def visible(self, queries: Selection = slice(None)) -> Bool[Tensor, "batch #head row key"]:
        """Return which keys the chosen queries see."""
        if isinstance(self.mask, RowMask):
            return self.mask.rows(queries)
        if self.mask is None:
            batch, _, rows, _ = self.query[:, :, queries].shape
            return torch.ones(batch, 1, rows, self.key.shape[2], dtype=torch.bool, device=self.query.device)
        return self.mask[:, :, queries]

    def weights(
        self, queries: Selection = slice(None), *, heads: Selection = slice(None), dtype: torch.dtype | None = None
    ) -> Float[Tensor, "batch chosen_head row key"]:
        """Return the raw attention of the chosen queries and heads; a row that sees no key is all zero."""
        dtype = dtype or self.query.dtype
        head_indices = torch.arange(self.query.shape[1], device=self.query.device)[heads]
        if self.given is not None:
            return self.given[:, head_indices][:, :, queries].to(dtype)
        if len(head_indices) == self.query.shape[1] and isinstance(heads, slice):  # keys need not be repeated
            query = self.query[:, :, queries].to(dtype).unflatten(1, (-1, self.groups))
            scores = (query.flatten(2, 3) @ self.key.to(dtype).mT * self.scaling).unflatten(2, query.shape[2:4])
            scores = scores.flatten(1, 2)
        else:
            key = self.key[:, head_indices // self.groups].to(dtype)
            scores = self.query[:, head_indices][:, :, queries].to(dtype) @ key.mT * self.scaling
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if self.bias is not None:
            scores = scores + self.bias[:, head_indices][:, :, queries].to(dtype)
        visible = None
        if self.mask is not None:
            visible = self.visible(queries)
            visible = visible[:, head_indices] if visible.shape[1] > 1 else visible
            scores = scores.masked_fill(~visible, -torch.inf)
        if self.sink is not None:
            sink = self.sink[head_indices].to(dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : self.key.shape[2]]
        return weights if visible is None else weights.masked_fill(~visible, 0.0)

    def slope(self, queries: Selection, *, heads: Selection) -> Float[Tensor, "chosen_head row key"] | None:
        """Return the soft-cap's derivative at each score of the first text, in float64; None: no soft-cap."""
        if self.softcap is None:
            return None
        head_indices = torch.arange(self.query.shape[1], device=self.query.device)[heads]
        query = self.query[0, head_indices][:, queries].double()
        key = self.key[0, head_indices // self.groups].double()
        return 1 - torch.tanh(query @ key.mT * self.scaling / self.softcap).square()

    def of_text(self, row: int, positions: Int[Tensor, "n"], keys: Tensor | None = None) -> "AttentionCall":
        """Return the call of one text of the batch, without its padding; `keys` are positions in its source."""
        keys = positions if keys is None else keys
        row_index = slice(None) if len(positions) == self.query.shape[2] else positions
        key_index = slice(None) if len(keys) == self.key.shape[2] else keys

        def select(tensor: Tensor, index: Selection = row_index) -> Tensor:
            return tensor[row : row + 1, :, index]

        mask = self.mask
        bias = self.bias
        if isinstance(mask, RowMask) and (
            mask.batch > 1 or isinstance(row_index, Tensor) or isinstance(key_index, Tensor)
        ):
            raise ModelError(f"Reading a text of over {LONGEST_MASK} tokens: it must be run alone, not in a batch.")
        if isinstance(mask, Tensor):
            mask = select(mask)[..., key_index]
        if bias is not None:
            bias = select(bias if len(bias) > 1 else bias.expand(row + 1, -1, -1, -1))[..., key_index]
        return replace(
            self,
            query=select(self.query),
            key=select(self.key, key_index),
            value=select(self.value, key_index),
            mask=mask,
            bias=bias,
            bias_keys=None if self.bias_keys is None else partial(_keys_of_text, self.bias_keys, row, positions),
            gate=None if self.gate is None else select(self.gate),
        )

    def on(self, device: torch.device | None) -> "AttentionCall":
        """Return the call with all its tensors on a device; None: where they are."""
        if device is None or self.query.device == device:
            return self
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        if self.bias_keys is not None:
            moved["bias_keys"] = partial(_keys_on, self.bias_keys, self.query.device, device)
        return replace(self, **moved)

    def row_chunks(self) -> Iterator[slice]:
        """Yield ranges of queries whose scores, for all heads, fit in `ROW_BYTES`."""
        batch, head, length, _ = self.query.shape
        step = max(1, ROW_BYTES // (batch * head * self.key.shape[2] * self.query.element_size()))
        for start in range(0, length, step):
            yield slice(start, min(start + step, length))

    @cached_property
    def output(self) -> Float[Tensor, "batch head query d_v"]:
        """The head output $O = AV$, through the fused kernel where the layer allows it."""
        value = self.value.repeat_interleave(self.groups, dim=1)
        fused = self.softcap is None and self.sink is None and self.given is None
        if isinstance(self.mask, RowMask) and self.mask.plain_causal and fused and self.bias is None:
            key = self.key.repeat_interleave(self.groups, dim=1)
            return F.scaled_dot_product_attention(self.query, key, value, is_causal=True, scale=self.scaling)
        if fused:
            rows = [self._fused_rows(value, rows) for rows in self.row_chunks()]
        else:
            rows = [self.weights(rows) @ value for rows in self.row_chunks()]
        return torch.cat(rows, dim=2)

    def _fused_rows(self, value: Tensor, rows: slice) -> Tensor:
        query = self.query[:, :, rows]
        key = self.key.repeat_interleave(self.groups, dim=1)
        if self.mask is None and self.bias is None:
            return F.scaled_dot_product_attention(query, key, value, scale=self.scaling)
        visible = self.visible(rows)
        sees_any = visible.any(dim=-1, keepdim=True)
        allowed = visible | ~sees_any  # a row that sees nothing would be NaN, and NaN spreads to real tokens
        if self.bias is not None:
            allowed = self.bias[:, :, rows].to(query.dtype).masked_fill(~allowed, -torch.inf)
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=self.scaling)
        return output.masked_fill(~sees_any, 0.0)


def _keys_of_text(
    bias_keys: BiasKeys, row: int, positions: Int[Tensor, "n"], _: int, heads: Tensor, queries: Tensor
) -> Float[Tensor, "head row n d_k"]:
    """Return the `bias_keys` of one text of a batch, without its padding; not a closure, which cannot be pickled."""
    return bias_keys(row, heads, positions[queries])[:, :, positions]


def _keys_on(
    bias_keys: BiasKeys, layer: torch.device, target: torch.device, text: int, heads: Tensor, queries: Tensor
) -> Float[Tensor, "head row n d_k"]:
    """Return the `bias_keys` of a layer on one device for heads and queries on another."""
    return bias_keys(text, heads.to(layer), queries.to(layer)).to(target)


def show_visitor(call: AttentionCall) -> Float[Tensor, "batch head query d_v"]:
    """Show a layer's call to the visitor; return the head output that the model continues with."""
    counter = _counter.get()
    if counter.visited_call not in (None, counter.calls - 1):
        return call.output
    replaced = _visitor.get()(call.on(counter.gather_device))
    return call.output if replaced is None else replaced.to(call.query.device)


def count_call() -> int:
    """Count an attention call; return the index of its block: ALBERT runs one module many times, so order counts."""
    counter = _counter.get()
    counter.calls += 1
    return counter.block


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks, and show the visitor the call."""
    unknown = sorted(name for name, term in others.items() if term is not None and name not in _WITHOUT_EFFECT)
    if unknown or dropout:
        raise ModelError(
            f"Reading the attention of {type(module).__name__}: it passes {', '.join(unknown) or 'dropout'}, which "
            "identikit does not know and will not ignore. Use another model, or add the term (CONTRIBUTING.md)."
        )
    call = AttentionCall(
        layer=count_call(),
        query=query,
        key=key,
        value=value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        mask=checked_mask(module, attention_mask, query),
        softcap=softcap,
        bias=position_bias,
        gate=getattr(module, GATE, None),
        sink=None if s_aux is None else s_aux.detach().clone(),  # a result outlives changes of the weights
    )
    return show_visitor(call).transpose(1, 2).contiguous(), None


def checked_mask(module: nn.Module, mask: Tensor | None, query: Tensor) -> Tensor | RowMask | None:
    """Return the mask as bool or as its rule, and refuse one that did not come from our mask function."""
    if mask is None:
        if getattr(module, "is_causal", False) and query.shape[2] > 1:
            raise _unknown_mask(module, "it is causal but came without a mask")
        return None
    rule = getattr(mask, "identikit_rule", None)
    if rule is not None:
        return rule
    if mask.dtype != torch.bool or mask.is_meta:
        raise _unknown_mask(module, f"the model rewrote its mask ({mask.dtype})")
    return mask


def _unknown_mask(module: nn.Module, why: str) -> ModelError:
    return ModelError(
        f"Reading the attention of {type(module).__name__}: {why}, so what it sees is unknown. Its architecture needs "
        "a tap of its own (CONTRIBUTING.md)."
    )


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: MaskRule = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor | None:
    """Return the mask as bool, or for a long text an empty stand-in that carries its rule."""
    has_stand_in = kv_length > LONGEST_MASK and _counter.get().gather_device is None  # it cannot change its device
    if not has_stand_in:
        others |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(
            batch_size, q_length, kv_length, mask_function=mask_function, attention_mask=attention_mask,
            use_vmap=use_vmap, device=device, **others,
        )  # fmt: skip
    if use_vmap:
        raise ModelError(f"Reading a text of {kv_length} tokens: this model's mask has no rule by index. Shorten it.")
    rule = mask_function
    if attention_mask is not None and not bool(attention_mask.all()):
        rule = and_masks(mask_function, padding_mask_function(attention_mask))
    plain_causal = rule is causal_mask_function
    stand_in = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    rows = RowMask(rule, batch_size, kv_length, torch.device(device), plain_causal, q_length)
    stand_in.identikit_rule = rows  # pyright: ignore
    return stand_in


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _mask)


@contextmanager
def visit_calls(visitor: Visitor, gather_device: torch.device | None = None) -> Iterator[CallCounter]:
    """Send the attention calls made inside to `visitor`; yield their counter, which whoever watches the blocks sets."""
    counter = CallCounter(gather_device)
    visitor_before = _visitor.set(visitor)
    counter_before = _counter.set(counter)
    try:
        yield counter
    finally:
        _visitor.reset(visitor_before)
        _counter.reset(counter_before)
