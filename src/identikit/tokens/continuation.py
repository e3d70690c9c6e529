"""Every token of the vocabulary in the place of one of a text's own: its hidden vectors, and which is nearest.

In a causal model the hidden vector at a position depends on the tokens before it only through their keys and values. So
these are kept, and candidates for the position run as a batch of one-token texts whose attention is computed here, over
the kept keys and each candidate's own. Nothing is copied per candidate, and the result is what a full run would give.

Candidates come in chunks that fit in memory. Of each chunk only the two nearest remain, so the whole vocabulary is
searched exactly and nothing of its size is kept.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from identikit.errors import InputError, ModelError
from identikit.maths.neighbours import paired_distance
from identikit.models.load.linear import PACKED_TOLERANCE, embedding_rows, matrix_shapes
from identikit.models.machine import free_bytes, product_rate
from identikit.models.model import Model, Trace
from identikit.models.partial_run import run_at_position
from identikit.models.taps.tap import AttentionCall
from identikit.shapes import Bool, Float, Int, Tensor
from identikit.texts.text import TokenBatch

LONG_SECONDS = 60.0
# How far a continuation may be from the text's own run, relative to the norm of the hidden vector.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
_CHUNK_BYTES = {"cpu": 1 << 27, "cuda": 1 << 33}  # at most; on a CPU larger chunks only leave the cache
_ROWS = 1 << 24  # entries of the embedding that are hashed at once
Tick = Callable[[float | int], None]


def check_continues(model: Model) -> None:
    """Refuse a model whose tokens cannot be tried one by one."""
    reason = ""
    if model.modality != "text":
        reason = f"it reads {model.modality}s, which have no vocabulary to search"
    elif not model.causal:
        reason = (
            "it is not causal. Its hidden vectors depend on later tokens too, so tokens cannot be recovered one by one "
            "(identikit.token_identifiability works for any model)"
        )
    elif model.family.by_place:
        reason = "it scales queries by their place in the batch, so tokens cannot be tried one by one"
    elif len(model.attention_layers) < model.n_layers:
        reason = (
            f"only {len(model.attention_layers)} of its {model.n_layers} layers have softmax attention. The others "
            "carry a state from token to token that is not kept, so tokens cannot be tried one by one"
        )
    elif getattr(getattr(model.hf.get_input_embeddings(), "weight", None), "ndim", 0) != 2:
        reason = "it has no embedding of a vocabulary, so there are no candidates"
    if reason:
        raise InputError(f"Inverting {model.name}: {reason}. Use a causal model that reads text.")


def ids_batch(ids: Int[Tensor, "batch n"], segments: Int[Tensor, "batch n"] | None) -> TokenBatch:
    """Return token ids as a batch without padding, whether a tokenizer knows them or not."""
    rows, n = ids.shape
    keep = torch.ones_like(ids, dtype=torch.bool)
    tokens = (("?",) * n,) * rows
    return TokenBatch(ids, keep, ~keep, segments, tokens, ((),) * rows, tuple(range(rows)))


@dataclass(frozen=True, eq=False)
class Continuations:
    """One text of a causal model, run once; `at` tries other tokens at any of its positions.

    - `batch`: the text, without padding; `trace`: its run; `calls`: its attention, layer by layer
    """

    model: Model
    batch: TokenBatch
    trace: Trace
    calls: tuple[AttentionCall, ...]

    @classmethod
    def read(cls, model: Model, batch: TokenBatch) -> "Continuations":
        """Run a text and keep its keys and values."""
        if batch.images is not None:
            raise InputError(f"Inverting {model.name}: images have no vocabulary to search. Pass a text alone.")
        calls: list[AttentionCall] = []
        trace = model.trace(batch, calls.append)
        return cls(model, batch, trace, tuple(calls))

    def at(self, place: int, *, depth: int) -> "Position":
        """Return the position, ready for candidates in its place, once its own token has been shown to come out."""
        position = Position(self, place, depth, {})
        position.before.update({call.layer: position.keys_before(call) for call in self.calls if call.layer < depth})
        ids = self.batch.ids
        assert ids is not None
        allowed = max(_TOLERANCE[self.model.dtype], PACKED_TOLERANCE if self.model.packed else 0.0)
        for layer, (hidden,) in enumerate(position.hidden(ids[0, place : place + 1].to(self.model.device))):
            expected = self.trace.hidden[layer][0, place].double()
            off = float((hidden.double() - expected).norm() / expected.norm().clamp(min=1e-30))
            if not off <= allowed:
                raise ModelError(
                    f"Inverting {self.model.name}: a token tried alone at position {place} differs from the same token "
                    f"in the whole text by {off:.1e} of its norm in layer {layer} (allowed: {allowed:.0e}). Its blocks "
                    "depend on more than keys, values and the position, so candidates cannot be tried."
                )
        return position


@dataclass(frozen=True)
class _Before:
    """What one layer's attention finds before a position: keys, values, and the scores' terms by key, itself last."""

    key: Float[Tensor, "kv_head before d_k"]
    value: Float[Tensor, "kv_head before d_v"]
    visible: Bool[Tensor, "#head key"]
    bias: Float[Tensor, "head key"] | None


@dataclass(frozen=True, eq=False)
class Position:
    """One position of a text that was run, and its first `depth` blocks, each with what is `before` the position."""

    text: Continuations
    place: int
    depth: int
    before: dict[int, _Before]

    def keys_before(self, call: AttentionCall) -> _Before:
        """Return a layer's keys and values before the position."""
        i = self.place
        visible = call.visible(slice(i, i + 1))[0, :, 0]
        reason = ""
        if call.bias_keys is not None:
            reason = f"the scores of layer {call.layer} have a term that depends on the query and is not kept with keys"
        elif visible[:, i + 1 :].any():
            reason = f"position {i} sees later positions in layer {call.layer}"
        if reason:
            raise InputError(
                f"Inverting {self.text.model.name}: {reason}, so candidates cannot be tried one by one. Use another "
                "causal model."
            )
        dtype = torch.promote_types(call.query.dtype, torch.float32)
        bias = None if call.bias is None else call.bias[0, :, i, : i + 1].to(dtype)
        return _Before(call.key[0, :, :i].to(dtype), call.value[0, :, :i].to(dtype), visible[:, : i + 1], bias)

    def hidden(self, ids: Int[Tensor, " candidate"]) -> tuple[Float[Tensor, "candidate d"], ...]:
        """Return what each of the blocks would make of each candidate at this position."""
        segments = self.text.batch.segments
        if segments is not None:
            segments = segments[:, self.place].to(ids.device).expand(len(ids))[:, None]
        batch = ids_batch(ids[:, None], segments)
        return run_at_position(self.text.model, batch, self.place, self._attend, depth=self.depth)

    def _attend(self, call: AttentionCall) -> Float[Tensor, "candidate head 1 d_v"]:
        r"""Return the head output of each candidate's query over the keys before it and its own.

        $$o = \frac{\sum_{j<i} e^{s_j} v_j + e^{s_i} v_i}{\sum_{j \le i} e^{s_j}},\quad
        s_j = c\tanh(s\,q\cdot k_j/c) + B_j$$

        with $k_i, v_i$ the candidate's own; the soft-cap, the bias and a learned sink (one more term of the sum below)
        where the layer has them.
        """
        before = self.before[call.layer]
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
        output = torch.einsum("chgj,hjd->chgd", weights[..., : self.place], before.value)
        output = output + weights[..., self.place, None] * value[:, :, None]
        return output.flatten(1, 2)[:, :, None].to(call.query.dtype)


# The search


class Vocabulary(NamedTuple):
    """The candidates: one id for each distinct embedding. `of[id]` is the place among them of any id."""

    ids: Int[Tensor, " candidate"]
    of: Int[Tensor, " token"]


class Aims(NamedTuple):
    """What is looked for at one position, or at all: hidden vectors, each of a layer."""

    layers: tuple[int, ...]
    vectors: Float[Tensor, "aim *n d"]


class Found(NamedTuple):
    """What the search found for each aim: token ids, and distances relative to the norm of what was looked for.

    - `winner`, `runner_up`: the nearest token and the second, with their distances
    - `own_distance`: that of the true token; NaN where it is not known
    """

    winner: Int[Tensor, "*aim"]
    runner_up: Int[Tensor, "*aim"]
    winner_distance: Float[Tensor, "*aim"]
    runner_up_distance: Float[Tensor, "*aim"]
    own_distance: Float[Tensor, "*aim"]

    @classmethod
    def beside(cls, several: Sequence["Found"]) -> "Found":
        """Put several together along a new last axis."""
        return cls(*(torch.stack(field, -1) for field in zip(*several, strict=True)))


def vocabulary(model: Model) -> Vocabulary:
    """Return the model's tokens as candidates; tokens whose embeddings are equal are one candidate, the first id.

    Rows are compared by a 64-bit hash of their bits: a product with odd random numbers, added up modulo 2^64.
    """
    weight = embedding_rows(model.hf.get_input_embeddings())
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, weight.shape[1:], generator=generator).to(weight.device) * 2 + 1
    chunks = weight.split(max(1, _ROWS // weight.shape[1]))
    hashes = torch.cat([((rows + 0.0).view(bits).long() * factors).sum(-1) for rows in chunks]).cpu()
    _, kind = torch.unique(hashes, return_inverse=True)
    first = torch.full((int(kind.max()) + 1,), len(kind)).scatter_reduce(0, kind, torch.arange(len(kind)), "amin")
    ids = first.sort().values
    place = torch.empty_like(first)
    place[kind[ids]] = torch.arange(len(ids))
    return Vocabulary(ids, place[kind])


def search(
    position: Position, aims: Aims, candidates: Vocabulary, *, token: int | None, distance: str, tick: Tick
) -> Found:
    """Find the two candidates nearest to each aim, and how far the true `token` is.

    Distances are computed in float32 or wider, whatever the model computes in.
    """
    device = aims.vectors.device
    norms = torch.linalg.vector_norm(aims.vectors, dim=-1).clamp(min=1e-30)
    scale = norms if distance == "l2" else torch.ones_like(norms)  # the cosine distance has no scale
    near = torch.full((len(aims.layers), 2), torch.inf, dtype=aims.vectors.dtype, device=device)
    places = torch.zeros(near.shape, dtype=torch.long, device=device)
    true = torch.full((len(near),), torch.nan, dtype=near.dtype, device=device)
    target = None if token is None else int(candidates.of[token])
    step = chunk_size(position.text.model, position.place, position.depth)
    for start in range(0, len(candidates.ids), step):
        ids = candidates.ids[start : start + step].to(device)
        hidden = position.hidden(ids)
        distances = []
        wide: Mapping[int, Tensor] = {}
        for layer, vector in zip(aims.layers, aims.vectors, strict=True):
            if layer not in wide:
                wide = {layer: hidden[layer].to(vector.dtype)}  # aims of one layer come together
            distances.append(paired_distance(wide[layer], vector.expand_as(wide[layer]), distance))
        measured = torch.stack(distances) / scale[:, None]
        if target is not None and start <= target < start + len(ids):
            true = measured[:, target - start]
        here = torch.arange(start, start + len(ids), device=device).expand(measured.shape)
        near, order = torch.cat([near, measured], 1).topk(2, largest=False)
        places = torch.cat([places, here], 1).gather(1, order)
        tick(len(ids))
    ids = candidates.ids.to(device)[places].cpu()
    near = near.cpu()
    return Found(ids[:, 0], ids[:, 1], near[:, 0], near[:, 1], true.cpu())


def chunk_size(model: Model, before: int, depth: int) -> int:
    """Return how many candidates to try at once: as many as fit in part of the memory that is free."""
    widest = max(max(shape[-2:]) for shape in matrix_shapes(model.blocks[0]))
    numbers = (depth + 12) * model.d_model + 4 * widest + 8 * model.n_heads * (before + 1)
    each = numbers * max(4, model.dtype.itemsize)
    room = min(free_bytes(model.device) // 4, _CHUNK_BYTES.get(model.device.type, 1 << 28))
    return max(1, room // each)


def expected_seconds(model: Model, candidates: int, positions: int, depth: int) -> float:
    """Return about how long a search takes here."""
    weights = sum(math.prod(shape) for block in model.blocks[:depth] for shape in matrix_shapes(block))
    operations = 2.0 * 2 * weights * candidates * positions
    if operations < LONG_SECONDS * 1e9:  # any machine does that in time
        return operations / 1e9
    return operations / product_rate(model.device, model.dtype, "full")
