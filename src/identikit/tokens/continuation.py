"""Hidden vectors of every token of the vocabulary at a position of a text, and the search for the nearest.

In a causal model the hidden vector at a position depends on the tokens before it only through their keys and values. So
these are kept, and candidates for the position run as a batch of one-token texts whose attention is computed here, over
the kept keys and each candidate's own. Nothing is copied per candidate, and the result is what a full run would give.

Candidates come in chunks that fit in memory, and only the two nearest are kept: the search covers the whole vocabulary
exactly and holds nothing of its size.
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
    """One text of a causal model, run once; `at` prepares a position for other tokens.

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

    def at(self, index: int, *, depth: int) -> "Position":
        """Return the position, once its true token, tried as a candidate, has given the text's own hidden vectors."""
        before = {call.layer: self._before(index, call) for call in self.calls if call.layer < depth}
        position = Position(self, index, depth, before)
        ids = self.batch.ids
        assert ids is not None
        tolerance = max(_TOLERANCE[self.model.dtype], PACKED_TOLERANCE if self.model.packed else 0.0)
        for layer, (hidden,) in enumerate(position.hidden(ids[0, index : index + 1].to(self.model.device))):
            expected = self.trace.hidden[layer][0, index].double()
            error = float((hidden.double() - expected).norm() / expected.norm().clamp(min=1e-30))
            if not error <= tolerance:
                raise ModelError(
                    f"Inverting {self.model.name}: a token tried alone at position {index} differs from the same token "
                    f"in the whole text by {error:.1e} of its norm in layer {layer} (allowed: {tolerance:.0e}). Its "
                    "blocks depend on more than keys, values and the position, so candidates cannot be tried."
                )
        return position

    def _before(self, index: int, call: AttentionCall) -> "_Before":
        """Return what a layer's attention finds before a position, or refuse the model."""
        visible = call.visible(slice(index, index + 1))[0, :, 0]
        reason = ""
        if call.bias_keys is not None:
            reason = f"the scores of layer {call.layer} have a term that depends on the query and is not kept with keys"
        elif visible[:, index + 1 :].any():
            reason = f"position {index} sees later positions in layer {call.layer}"
        if reason:
            raise InputError(
                f"Inverting {self.model.name}: {reason}, so candidates cannot be tried one by one. Use another causal "
                "model."
            )
        dtype = torch.promote_types(call.query.dtype, torch.float32)
        bias = None if call.bias is None else call.bias[0, :, index, : index + 1].to(dtype)
        keys = call.key[0, :, :index].to(dtype)
        values = call.value[0, :, :index].to(dtype)
        return _Before(keys, values, visible[:, : index + 1], bias)


@dataclass(frozen=True)
class _Before:
    """What one layer's attention finds before a position: keys, values, and the scores' terms by key, itself last."""

    key: Float[Tensor, "kv_head before d_k"]
    value: Float[Tensor, "kv_head before d_v"]
    visible: Bool[Tensor, "#head key"]
    bias: Float[Tensor, "head key"] | None


@dataclass(frozen=True, eq=False)
class Position:
    """A position of a text, with what the attention of its first `depth` blocks finds `before` it, by layer."""

    text: Continuations
    index: int
    depth: int
    before: dict[int, _Before]

    def hidden(self, ids: Int[Tensor, " candidate"]) -> tuple[Float[Tensor, "candidate d"], ...]:
        """Return the hidden vectors of each candidate at this position, block by block."""
        segments = self.text.batch.segments
        if segments is not None:
            segments = segments[:, self.index].to(ids.device).expand(len(ids))[:, None]
        batch = ids_batch(ids[:, None], segments)
        return run_at_position(self.text.model, batch, self.index, self._attend, depth=self.depth)

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
        present = torch.einsum("chgd,chd->chg", query, key)
        scores = torch.cat([past, present[..., None]], dim=-1).flatten(1, 2) * call.scaling
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        if before.bias is not None:
            scores = scores + before.bias
        scores = scores.masked_fill(~before.visible, -torch.inf)
        if call.sink is not None:
            scores = torch.cat([scores, call.sink.to(scores)[:, None].expand(*scores.shape[:2], 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1).unflatten(1, (-1, call.groups))
        output = torch.einsum("chgj,hjd->chgd", weights[..., : self.index], before.value)
        output = output + weights[..., self.index, None] * value[:, :, None]
        return output.flatten(1, 2)[:, :, None].to(call.query.dtype)


# The search


class Vocabulary(NamedTuple):
    """The candidates: one id for each distinct embedding; `candidate_of` maps any id to its candidate's index."""

    ids: Int[Tensor, " candidate"]
    candidate_of: Int[Tensor, " token"]


class Aims(NamedTuple):
    """The hidden vectors that are searched for at one position or at all, each of a layer."""

    layers: tuple[int, ...]
    vectors: Float[Tensor, "aim *n d"]


class SearchResult(NamedTuple):
    """The result of a search for each aim: token ids, and distances relative to the norm of the aim.

    - `winner`, `runner_up`: the nearest token and the second, with their distances
    - `own_distance`: that of the true token; NaN where it is not known
    """

    winner: Int[Tensor, "*aim"]
    runner_up: Int[Tensor, "*aim"]
    winner_distance: Float[Tensor, "*aim"]
    runner_up_distance: Float[Tensor, "*aim"]
    own_distance: Float[Tensor, "*aim"]

    @classmethod
    def stack(cls, results: Sequence["SearchResult"]) -> "SearchResult":
        """Stack results along a new last axis."""
        return cls(*(torch.stack(field, -1) for field in zip(*results, strict=True)))


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
    index = torch.empty_like(first)
    index[kind[ids]] = torch.arange(len(ids))
    return Vocabulary(ids, index[kind])


def search(
    position: Position, aims: Aims, candidates: Vocabulary, *, token: int | None, distance: str, tick: Tick
) -> SearchResult:
    """Find the two candidates nearest to each aim, and how far the true `token` is.

    Distances are computed in float32 or wider, whatever the model computes in.
    """
    device = aims.vectors.device
    norms = torch.linalg.vector_norm(aims.vectors, dim=-1).clamp(min=1e-30)
    scale = norms if distance == "l2" else torch.ones_like(norms)  # the cosine distance has no scale
    nearest = torch.full((len(aims.layers), 2), torch.inf, dtype=aims.vectors.dtype, device=device)
    nearest_index = torch.zeros(nearest.shape, dtype=torch.long, device=device)
    true_distance = torch.full((len(nearest),), torch.nan, dtype=nearest.dtype, device=device)
    target = None if token is None else int(candidates.candidate_of[token])
    step = chunk_size(position.text.model, position.index, position.depth)
    for start in range(0, len(candidates.ids), step):
        ids = candidates.ids[start : start + step].to(device)
        hidden = position.hidden(ids)
        distances = []
        wide: Mapping[int, Tensor] = {}
        for layer, vector in zip(aims.layers, aims.vectors, strict=True):
            if layer not in wide:
                wide = {layer: hidden[layer].to(vector.dtype)}  # aims of one layer come together
            distances.append(paired_distance(wide[layer], vector.expand_as(wide[layer]), distance))
        relative = torch.stack(distances) / scale[:, None]
        if target is not None and start <= target < start + len(ids):
            true_distance = relative[:, target - start]
        index = torch.arange(start, start + len(ids), device=device).expand(relative.shape)
        nearest, order = torch.cat([nearest, relative], 1).topk(2, largest=False)
        nearest_index = torch.cat([nearest_index, index], 1).gather(1, order)
        tick(len(ids))
    ids = candidates.ids.to(device)[nearest_index].cpu()
    nearest = nearest.cpu()
    return SearchResult(ids[:, 0], ids[:, 1], nearest[:, 0], nearest[:, 1], true_distance.cpu())


def chunk_size(model: Model, before: int, depth: int) -> int:
    """Return how many candidates to try at once: as many as fit in a part of the free memory."""
    widest = max(max(shape[-2:]) for shape in matrix_shapes(model.blocks[0]))
    numbers = (depth + 12) * model.d_model + 4 * widest + 8 * model.n_heads * (before + 1)
    bytes_per_candidate = numbers * max(4, model.dtype.itemsize)
    memory = min(free_bytes(model.device) // 4, _CHUNK_BYTES.get(model.device.type, 1 << 28))
    return max(1, memory // bytes_per_candidate)


def expected_seconds(model: Model, candidates: int, positions: int, depth: int) -> float:
    """Estimate how long a search takes on this machine."""
    weights = sum(math.prod(shape) for block in model.blocks[:depth] for shape in matrix_shapes(block))
    operations = 2.0 * 2 * weights * candidates * positions
    if operations < LONG_SECONDS * 1e9:  # any machine does that in time
        return operations / 1e9
    return operations / product_rate(model.device, model.dtype, "full")
