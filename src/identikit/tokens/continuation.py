"""A text that was run once, and any other token in the place of one of its own: every candidate's hidden vectors.

In a causal model the hidden vector at a position depends on the tokens before it only through their keys and values. So
these are kept, and candidates for the position run as a batch of one-token texts whose attention is computed here, over
the kept keys and each candidate's own. Nothing is copied per candidate, and the result is what a full run would give.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from identikit.errors import InputError, ModelError
from identikit.models.model import Model, Trace
from identikit.models.taps.tap import AttentionCall
from identikit.shapes import Bool, Float, Int, Tensor
from identikit.texts.text import TokenBatch

# How far a continuation may be from the text's own run, relative to the norm of the hidden vector.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}


def check_continues(model: Model) -> None:
    """Refuse a model whose tokens cannot be tried one by one."""
    if model.modality != "text":
        raise InputError(
            f"Inverting {model.name}: it reads {model.modality}s, which have no vocabulary to search. Use a causal "
            "model that reads text."
        )
    if not model.causal:
        raise InputError(
            f"Inverting {model.name}: it is not causal. Its hidden vectors depend on later tokens too, so tokens "
            "cannot be recovered one by one. Use a causal model; identikit.token_identifiability works for any model."
        )
    if model.family.by_place:
        raise InputError(
            f"Inverting {model.name}: it scales queries by their place in the batch, so tokens cannot be tried one by "
            "one. Use another causal model."
        )
    if len(model.attention_layers) < model.n_layers:
        raise InputError(
            f"Inverting {model.name}: only {len(model.attention_layers)} of its {model.n_layers} layers have softmax "
            "attention. The others carry a state from token to token that is not kept, so tokens cannot be tried one "
            "by one. Use another model."
        )
    weight = getattr(model.hf.get_input_embeddings(), "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise InputError(f"Inverting {model.name}: it has no embedding of a vocabulary, so there are no candidates.")


def ids_batch(ids: Int[Tensor, "batch n"], segments: Int[Tensor, "batch n"] | None) -> TokenBatch:
    """Return token ids as a batch without padding, whether a tokenizer knows them or not."""
    rows, n = ids.shape
    keep = torch.ones_like(ids, dtype=torch.bool)
    tokens = (("?",) * n,) * rows
    return TokenBatch(ids, keep, ~keep, segments, tokens, ((),) * rows, tuple(range(rows)))


@dataclass(frozen=True)
class _Before:
    """What one layer's attention finds before a position: keys, values, and the scores' terms by key, itself last."""

    key: Float[Tensor, "kv_head before d_k"]
    value: Float[Tensor, "kv_head before d_v"]
    visible: Bool[Tensor, "#head key"]
    bias: Float[Tensor, "head key"] | None


@dataclass(frozen=True, eq=False)
class Continuations:
    """One text of a causal model, run once; `hidden` tries other tokens in the place of any of its own.

    - `batch`: the text, without padding; `trace`: its run; `calls`: its attention, layer by layer
    """

    model: Model
    batch: TokenBatch
    trace: Trace
    calls: tuple[AttentionCall, ...]

    @classmethod
    def read(cls, model: Model, batch: TokenBatch) -> "Continuations":
        """Run a text and keep its keys and values."""
        calls: list[AttentionCall] = []
        trace = model.trace(batch, calls.append)
        return cls(model, batch, trace, tuple(calls))

    def at(self, position: int, *, depth: int) -> "Position":
        """Return the position, ready for candidates in its place, once its own token has been shown to come out."""
        ready = Position(self, position, depth)
        ready.prove()
        return ready


@dataclass(frozen=True, eq=False)
class Position:
    """One position of a text that was run, and its first `depth` blocks."""

    text: Continuations
    position: int
    depth: int

    @cached_property
    def _before(self) -> dict[int, _Before]:
        return {call.layer: self._before_layer(call) for call in self.text.calls if call.layer < self.depth}

    def _before_layer(self, call: AttentionCall) -> _Before:
        i = self.position
        name = self.text.model.name
        if call.bias_keys is not None:
            raise InputError(
                f"Inverting {name}: the scores of layer {call.layer} have a term that depends on the query and is not "
                "kept with the keys, so candidates cannot be tried one by one. Use another model."
            )
        visible = call.visible(slice(i, i + 1))[0, :, 0]
        if visible[:, i + 1 :].any():
            raise InputError(
                f"Inverting {name}: position {i} sees later positions in layer {call.layer}, so tokens cannot be "
                "recovered one by one. Use a causal model."
            )
        dtype = torch.promote_types(call.query.dtype, torch.float32)
        bias = None if call.bias is None else call.bias[0, :, i, : i + 1].to(dtype)
        return _Before(call.key[0, :, :i].to(dtype), call.value[0, :, :i].to(dtype), visible[:, : i + 1], bias)

    def hidden(self, ids: Int[Tensor, " candidate"]) -> tuple[Float[Tensor, "candidate d"], ...]:
        """Return what each of the blocks would make of each candidate at this position."""
        model = self.text.model
        segments = self.text.batch.segments
        if segments is not None:
            segments = segments[:, self.position].to(ids.device).expand(len(ids))[:, None]
        return model.at_position(ids_batch(ids[:, None], segments), self.position, self._attend, depth=self.depth)

    def _attend(self, call: AttentionCall) -> Float[Tensor, "candidate head 1 d_v"]:
        r"""Return the head output of each candidate's query over the keys before it and its own.

        $$o = \frac{\sum_{j<i} e^{s_j} v_j + e^{s_i} v_i}{\sum_{j \le i} e^{s_j}},\quad
        s_j = c\tanh(s\,q\cdot k_j/c) + B_j$$

        with $k_i, v_i$ the candidate's own; the soft-cap, the bias and a learned sink (one more term of the sum below)
        where the layer has them.
        """
        before = self._before[call.layer]
        dtype = before.key.dtype
        query = call.query[:, :, 0].to(dtype).unflatten(1, (-1, call.groups))
        key = call.key[:, :, 0].to(dtype)
        value = call.value[:, :, 0].to(dtype)
        past = torch.einsum("chgd,hjd->chgj", query, before.key)
        itself = torch.einsum("chgd,chd->chg", query, key)
        scores = torch.cat([past, itself[..., None]], dim=-1).flatten(1, 2) * call.scaling
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        if before.bias is not None:
            scores = scores + before.bias
        scores = scores.masked_fill(~before.visible, -torch.inf)
        if call.sink is not None:
            scores = torch.cat([scores, call.sink.to(scores)[:, None].expand(*scores.shape[:2], 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1).unflatten(1, (-1, call.groups))
        i = self.position
        output = torch.einsum("chgj,hjd->chgd", weights[..., :i], before.value)
        output = output + weights[..., i, None] * value[:, :, None]
        return output.flatten(1, 2)[:, :, None].to(call.query.dtype)

    def prove(self) -> None:
        """Check that the text's own token comes out as it did in the run of the whole text."""
        model = self.text.model
        i = self.position
        ids = self.text.batch.ids
        assert ids is not None
        for layer, (hidden,) in enumerate(self.hidden(ids[0, i : i + 1].to(model.device))):
            expected = self.text.trace.hidden[layer][0, i].double()
            off = float((hidden.double() - expected).norm() / expected.norm().clamp(min=1e-30))
            if not off <= _TOLERANCE[model.dtype]:
                raise ModelError(
                    f"Inverting {model.name}: a token tried alone at position {i} differs from the same token in the "
                    f"whole text by {off:.1e} of its norm in layer {layer} (allowed: {_TOLERANCE[model.dtype]:.0e}). "
                    "Its blocks depend on more than keys, values and the position, so candidates cannot be tried."
                )
