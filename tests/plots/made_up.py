"""Results of made-up numbers, for plots to draw."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from identikit.attention.interval_result import AlternativeAttention, AttentionIntervals
from identikit.attention.result import EffectiveAttention
from identikit.attribution.result import TokenAttribution
from identikit.results.axis import Axis
from identikit.results.provenance import Provenance
from identikit.results.source import Source, StoredArrays
from identikit.tokens.result import IdentityMap, TokenIdentifiability

LAYERS = 3
HEADS = 4
TOKENS = ["[CLS]", " the", " cat", "$", " sees", " the", " dog", "[SEP]"]
N = len(TOKENS)
PROVENANCE = Provenance("made up", None, "", "", "", "", "float32", "cpu")
EDGE = ("layer", "head", "query", "key")


def axes_of(dims: Sequence[str], sizes: Mapping[str, int], tokens: Sequence[str] = TOKENS) -> tuple[Axis, ...]:
    axes = []
    for dim in dims:
        names = None if dim in ("layer", "head") else tuple(tokens)
        axes.append(Axis(dim, tuple(range(sizes.get(dim, len(tokens)))), names))
    return tuple(axes)


def held(arrays: Mapping[str, tuple[Sequence[str], np.ndarray]]) -> Source:
    tensors = {name: torch.as_tensor(np.array(values)) for name, (_, values) in arrays.items()}
    return StoredArrays(tensors, {name: tuple(dims) for name, (dims, _) in arrays.items()})


def attention(causal: bool = False, **more: np.ndarray) -> EffectiveAttention:
    """Attention of made-up weights; `more` are further arrays over heads, rows or edges."""
    random = np.random.default_rng(0)
    visible = np.broadcast_to(np.tri(N, dtype=bool) if causal else np.ones((N, N), bool), (LAYERS, N, N))
    raw = random.random((LAYERS, HEADS, N, N)) * visible[:, None]
    raw = raw / raw.sum(-1, keepdims=True)
    effective = raw * random.uniform(-0.3, 1.0, raw.shape)
    arrays = {"raw": raw, "effective": effective, "null": raw - effective}
    arrays |= {"null_dim": random.integers(0, 9, raw.shape[:3]), "pearson": random.random(raw.shape[:2])} | more
    over = {name: (EDGE[: values.ndim], values) for name, values in arrays.items()}
    source = held(over | {"visible": (("layer", "query", "key"), visible)})
    return EffectiveAttention(axes_of(EDGE, {"layer": LAYERS, "head": HEADS}), source, PROVENANCE)


def intervals(upper: np.ndarray | None = None) -> AttentionIntervals:
    made = attention()
    raw = made.raw.numpy()
    random = np.random.default_rng(1)
    above = raw * (1 + random.random(raw.shape)) if upper is None else upper
    lower = np.minimum(raw * random.random(raw.shape), above)
    arrays = {name: (EDGE, values) for name, values in (("raw", raw), ("lower", lower), ("upper", above))}
    return AttentionIntervals(made.axes, held(arrays | {"certain_mass": (EDGE[:3], lower.sum(-1))}), PROVENANCE)


def alternative() -> AlternativeAttention:
    row = attention().sel(layer=1, head=2, query=4)
    arrays = {"raw": row.raw, "attention": row.raw.flip(0), "direction": row.null}
    whole = {name: (EDGE, values.numpy()[None, None, None]) for name, values in arrays.items()}
    return AlternativeAttention(_from_zero(row.axes), held(whole), PROVENANCE)


def _from_zero(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    return tuple(Axis(axis.name, axis.values, axis.tokens, tuple(range(len(axis))), axis.single) for axis in axes)


def attribution(stderr: bool = False, tokens: Sequence[str] = TOKENS) -> TokenAttribution:
    n = len(tokens)
    cells = np.random.default_rng(2).random((LAYERS, n, n)) + 4 * np.eye(n)
    cells = cells / cells.sum(1, keepdims=True)
    dims = ("layer", "input", "output")
    arrays = {"contribution": (dims, cells)}
    if stderr:
        arrays["stderr"] = (dims, np.full(cells.shape, 0.3 * cells.mean()))
    return TokenAttribution(axes_of(dims, {"layer": LAYERS}, tokens), held(arrays), PROVENANCE)


def identity(tokens: Sequence[str] = TOKENS, scale: float = 1.0) -> IdentityMap:
    margin = np.random.default_rng(3).uniform(-0.4, 0.8, (LAYERS, N))
    dims = ("layer", "token")
    winner = np.where(margin > 0, np.arange(N), (np.arange(N) + 1) % N)
    arrays = {"recovered": (dims, margin > 0), "margin": (dims, scale * margin), "winner": (dims, winner)}
    return IdentityMap(axes_of(dims, {"layer": LAYERS}, tokens), held(arrays), PROVENANCE)


def identifiability(**more: list[Any]) -> TokenIdentifiability:
    values: dict[str, list[Any]] = {"map": ["naive", "linear"], "distance": ["cosine"], "layer": [0, 1, 2]}
    values |= {"test_layer": [0, 1, 2], "target": ["input"], "offset": [0], "data_share": [1.0]}
    values |= {"split": ["train", "test"], "fold": [0, 1, 2]} | more
    random = np.random.default_rng(4)
    shape = [len(names) for names in values.values()]
    layer, tested = np.meshgrid(range(3), range(3), indexing="ij")
    elsewhere = np.reshape(layer != tested, (3, 3, *[1] * (len(shape) - 4)))
    arrays = {}
    for name in ("rate", "unique_rate", "duplicates", "n_tokens"):
        numbers = np.full(shape, 90.0) if name == "n_tokens" else random.uniform(0.5, 0.9, shape)
        arrays[name] = ([*values], np.where(elsewhere, np.nan, numbers))
    axes = tuple(Axis(name, tuple(names)) for name, names in values.items())
    return TokenIdentifiability(axes, held(arrays), PROVENANCE)
