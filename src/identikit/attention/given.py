"""Attention that another tool captured: the same Result from tensors alone, less what needs the model."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

import numpy as np
import torch

from identikit.attention.effective import checked_attention
from identikit.attention.result import EffectiveAttention
from identikit.checks import is_collection, is_unicode, real_number, shortened
from identikit.errors import InputError
from identikit.models.isolation import standard_torch_state
from identikit.models.load.check import TOLERANCE
from identikit.models.model import Model
from identikit.models.taps.tap import AttentionCall
from identikit.models.text_run import TextRun, visible_keys
from identikit.results.provenance import Provenance, package_versions, text_hash
from identikit.shapes import Bool, Float, Tensor
from identikit.texts.text import TokenBatch

_NEEDS_MODEL = frozenset(["hidden"])
_NEEDS_KEYS = frozenset(["reachable_dim", "reachable_condition", "q", "k"])


@dataclass(frozen=True, eq=False)
class TensorModel:
    """What stands in for a model of which only the tensors of one text are known.

    It answers what attention alone can answer. What needs the model itself is refused, in one place.
    """

    name: str
    weights: str
    value: Float[Tensor, "layer kv_head key d_v"]
    output_projection: Float[Tensor, "layer head d_v d"]
    causal: bool
    decoder_attention: str | None = None
    recipe: None = None
    tokenizer: None = None
    modality: str = "tensor"

    @property
    def n_heads(self) -> int:
        """How many heads a layer has."""
        return self.output_projection.shape[1]

    @property
    def d_value(self) -> int:
        """How many dimensions a head's values have."""
        return self.value.shape[-1]

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers, counted from 0."""
        return tuple(range(len(self.value)))

    def projection(self, layer: int) -> Float[Tensor, "head d_v d"]:
        """Return each head's slice of the output projection."""
        return self.output_projection[layer].clone()

    def provenance(self, text: Any, **settings: object) -> Provenance:
        """Return where a result comes from: a SHA-256 of the tensors stands for the weights."""
        dtype = str(self.value.dtype).removeprefix("torch.")
        about = (self.name, None, self.weights, "none", "none", text_hash(text), dtype, str(self.value.device))
        return Provenance(*about, settings, package_versions())

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse what only a model can tell."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise InputError(
            "This needs the model, and this attention was given as tensors (attention_from). "
            "Load the model and use effective_attention(model, text)."
        )


@standard_torch_state()
def attention_from(
    *,
    values: object,
    weights: object = None,
    queries: object = None,
    keys: object = None,
    scaling: float | None = None,
    mask: object = None,
    output: object = None,
    output_projection: object = None,
    tokens: Sequence[str] | None = None,
    source: Sequence[str] | None = None,
    name: str = "tensors",
) -> EffectiveAttention:
    r"""Read attention that another tool captured: tensors of one text, from NumPy or PyTorch.

    The Result is the one that `effective_attention` gives, with intervals, maps, tables, plots and the page. What needs
    the model, such as `verify()`, says so.

    - `values`: (layer, head, key, d_v); every tensor may leave out the axis of layers, which is then one layer. Fewer
      heads than queries have is fine if they are shared in groups, as in grouped-query attention
    - `weights`: the attention itself, (layer, head, query, key); or `queries` (layer, head, query, d_k), `keys` and
      `scaling` (left out: $1/\sqrt{d_k}$), as they enter the product: rotary positions applied
    - `mask`: which keys a query sees, True = sees it: (query, key), one per layer, or "causal"; left out: all
    - `output`: the head outputs, (layer, head, query, d_v). Where they are given, they are checked against $AV$
    - `output_projection`: each head's slice of it, (layer, head, d_v, d). Left out, the head's output itself is what
      stays the same, which is the same set of alternatives unless a slice has lost rank
    - `tokens`: of the text; left out, positions. `name`: what tables and pages call the model
    - `source`: in cross-attention, the tokens that keys are; `tokens` are then what queries are. Where the numbers of
      queries and keys differ, it can only be cross-attention, and `source` may be left out, too
    """
    value = _tensor("values", values, "head, key, d_v")
    layers, kv_heads, n_keys, d_value = value.shape
    query, key, given_weights, scale = _attention_inputs(value, weights, queries, keys, scaling)
    heads, n_queries = query.shape[1:3]
    decoder_attention = None if source is None and n_queries == n_keys else "cross"
    if heads % kv_heads:
        raise InputError(f"attention_from: {heads} heads cannot share the values of {kv_heads}. Pass values per head.")
    visible = _mask(mask, (layers, n_queries, n_keys), value.device)
    _check_weights(given_weights, visible, explicit=mask is not None or decoder_attention is not None)
    projection = torch.eye(d_value, dtype=value.dtype, device=value.device).expand(layers, heads, d_value, d_value)
    if output_projection is not None:
        projection = _tensor("output_projection", output_projection, "head, d_v, d")
        _match("output_projection", projection, (layers, heads, d_value, projection.shape[-1]), value)
    batch = _batch("tokens", tokens, n_queries)
    if decoder_attention is not None:
        batch = replace(batch, source=_batch("source", source, n_keys))
    if not is_unicode(name) or not name.strip():
        raise InputError(f"attention_from: name={shortened(name)} cannot be used: expected what the model is called.")
    calls = {}
    for layer in range(layers):
        one_layer = slice(layer, layer + 1)
        layer_mask = None if visible is None else visible[one_layer, None]
        layer_weights = None if given_weights is None else given_weights[one_layer]
        calls[layer] = AttentionCall(
            layer, query[one_layer], key[one_layer], value[one_layer], scale, layer_mask, given=layer_weights
        )
    if output is not None:
        _check_output(_tensor("output", output, "head, query, d_v"), calls)
    causal = decoder_attention is None and visible is not None and not bool(visible.triu(1).any())
    digest = _digest(value, query, key, given_weights, visible, projection)
    model = TensorModel(name, digest, value, projection, causal, decoder_attention)
    seen_keys = {layer: visible_keys(call) for layer, call in calls.items()}
    text_run = TextRun(cast("Model", model), batch, list(batch.tokens[0]), calls, seen_keys, None)  # pyright: ignore
    result = checked_attention(text_run)
    unknown = _NEEDS_MODEL if given_weights is None else _NEEDS_MODEL | _NEEDS_KEYS
    measures = {name: measure for name, measure in EffectiveAttention.measures.items() if name not in unknown}
    return replace(result, source=replace(result.captured(), measures=measures))


def _attention_inputs(
    value: Tensor, weights: object, queries: object, keys: object, scaling: float | None
) -> tuple[Tensor, Tensor, Tensor | None, float]:
    """Return queries, keys, given weights and scaling; where weights are given, queries and keys are 0."""
    if (weights is None) == (queries is None) or (queries is None) != (keys is None):
        raise InputError("attention_from takes either weights, or queries and keys. Pass one of the two.")
    if weights is not None:
        if scaling is not None:
            raise InputError("attention_from: scaling belongs to queries and keys; weights are taken as they are.")
        given = _tensor("weights", weights, "head, query, key")
        layers, heads, n_queries, _ = given.shape
        _match("weights", given, (len(value), heads, n_queries, value.shape[2]), value)
        return value.new_zeros(layers, heads, n_queries, 1), torch.zeros_like(value[..., :1]), given, 1.0
    query = _tensor("queries", queries, "head, query, d_k")
    key = _tensor("keys", keys, "head, key, d_k")
    _match("keys", key, (*value.shape[:3], query.shape[-1]), value)
    _match("queries", query, (len(value), *query.shape[1:]), value)
    usual = query.shape[-1] ** -0.5
    return query, key, None, usual if scaling is None else float(cast("float", real_number("scaling", scaling)))


def _tensor(name: str, value: object, axes: str) -> Float[Tensor, "layer head row column"]:
    """Return a copy of a tensor or array with an axis of layers; refuse what does not hold real numbers."""
    try:
        tensor = value.detach().clone() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    except (TypeError, ValueError) as error:
        raise InputError(f"attention_from: {name}={shortened(value)} cannot be read as a tensor.") from error
    tensor = tensor[None] if tensor.ndim == 3 else tensor
    if tensor.ndim != 4 or tensor.dtype not in TOLERANCE or not tensor.numel():
        raise InputError(
            f"attention_from: {name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}: expected floats over "
            f"({axes}) or (layer, {axes})."
        )
    if tensor.device.type == "meta" or tensor.layout != torch.strided or not bool(tensor.isfinite().all()):
        raise InputError(f"attention_from: {name} holds NaN or infinity, or no numbers. Pass finite, dense tensors.")
    return tensor


def _match(name: str, tensor: Tensor, shape: tuple[int, ...], value: Tensor) -> None:
    """Refuse a tensor that does not fit the values."""
    if tuple(tensor.shape) != shape:
        raise InputError(f"attention_from: {name} has shape {tuple(tensor.shape)}, and with these values {shape} fits.")
    if tensor.device != value.device:
        raise InputError(f"attention_from: {name} is on {tensor.device}, and values are on {value.device}.")


def _mask(mask: object, shape: tuple[int, int, int], device: torch.device) -> Bool[Tensor, "layer query key"] | None:
    """Return which keys each query sees, for every layer; None: all."""
    if mask is None:
        return None
    if isinstance(mask, str) and mask == "causal" and shape[1] == shape[2]:
        return torch.ones(shape[1:], dtype=torch.bool, device=device).tril().expand(shape)
    try:
        visible = torch.as_tensor(mask, device=device)
    except (TypeError, ValueError, RuntimeError):
        visible = torch.zeros(0)
    if visible.dtype != torch.bool or visible.shape not in (shape[1:], shape):
        raise InputError(
            f"attention_from: mask={shortened(mask)} cannot be used: expected 'causal', or True and False over "
            f"(query, key), here {shape[1:]}, or one such mask per layer."
        )
    return visible.expand(shape).clone()


def _check_weights(weights: Tensor | None, visible: Bool[Tensor, "layer query key"] | None, *, explicit: bool) -> None:
    """Refuse weights that are no attention under this mask."""
    if weights is None:
        return
    if not explicit and weights.shape[-1] > 1 and not bool(weights.triu(1).any()):
        raise InputError(
            "attention_from: no query gives weight to a later key. Pass mask='causal', or a mask of True if later keys "
            "were visible all the same: what a query sees decides what its attention could have been."
        )
    if float(weights.min()) < 0:
        raise InputError(f"attention_from: weights hold {float(weights.min()):.3g}: attention is never below 0.")
    if visible is not None and bool(weights.masked_fill(visible[:, None], 0.0).any()):
        raise InputError("attention_from: weights are above 0 where the mask hides a key. Pass the model's mask.")
    off = (weights.double().sum(-1) - 1).abs()
    if visible is not None:
        off = off.masked_fill(~visible.any(-1)[:, None], 0.0)  # a row that sees nothing is all zero
    if float(off.max()) > torch.finfo(weights.dtype).eps + 1e-5:
        layer, head, query = (int(index) for index in np.unravel_index(int(off.argmax()), off.shape))
        raise InputError(
            f"attention_from: the weights of layer {layer}, head {head}, query {query} sum to "
            f"{float(weights[layer, head, query].double().sum()):.6g}, not 1. Pass probabilities, after the softmax."
        )


def _check_output(output: Tensor, calls: dict[int, AttentionCall]) -> None:
    """Refuse head outputs that weights and values do not give."""
    expected = torch.cat([call.output for call in calls.values()])
    _match("output", output, tuple(expected.shape), expected)
    off = float((expected.double() - output.double()).abs().max() / output.double().abs().max().clamp(min=1e-30))
    allowed = max(TOLERANCE[tensor.dtype] for tensor in (expected, output))
    if off > allowed:
        raise InputError(
            f"attention_from: weights times values miss the output by {off:.2g} of its largest entry ({allowed:.0e} is "
            "allowed): the tensors are not of one run, or the order of heads or tokens differs."
        )


def _batch(argument: str, tokens: object, n: int) -> TokenBatch:
    """Return n tokens by their names, as a text alone; by position where none are given."""
    names: list[object] = [str(position) for position in range(n)]
    if tokens is not None:
        names = list(tokens) if is_collection(tokens) else []
    if len(names) != n or not all(map(is_unicode, names)):
        raise InputError(f"attention_from: {argument}={shortened(tokens)} cannot be used: expected {n} strings.")
    alone = torch.ones(1, n, dtype=torch.bool)
    words = tuple((position, position + 1) for position in range(n))
    return TokenBatch(None, alone, ~alone, None, (tuple(cast("list[str]", names)),), (words,), (0,))


def _digest(*tensors: Tensor | None) -> str:
    """Return a SHA-256 of everything that was given."""
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            digest.update(repr((tensor.shape, tensor.dtype)).encode())
            digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
