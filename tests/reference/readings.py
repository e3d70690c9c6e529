"""Readings of attention by their definitions: what multiplies a weight, key by key, and products of layers."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def attention(weights: Array, values: Array, projection: Array) -> Array:
    """a."""
    return weights


def value_norm(weights: Array, values: Array, projection: Array) -> Array:
    """‖a v H‖."""
    n = len(weights)
    return np.array(
        [[np.linalg.norm(weights[i, j] * values[j] @ projection) for j in range(n)] for i in range(n)]
    ) * np.where(weights < 0, -1, 1)


def output_share(weights: Array, values: Array, projection: Array, raw: Array) -> Array:
    """⟨a v H, o H⟩/‖oH‖², where o is the head's output, of raw attention."""
    output = raw @ values @ projection
    n = len(weights)
    return np.array(
        [
            [weights[i, j] * values[j] @ projection @ output[i] / (output[i] @ output[i]) for j in range(n)]
            for i in range(n)
        ]
    )


def norm(weights: Array, values: Array, projections: Array) -> Array:
    """‖Σ_h a v H‖, of weights (head, query, key), values (head, key, d_v) and projections (head, d_v, d)."""
    heads, n, _ = weights.shape
    found = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            found[i, j] = np.linalg.norm(sum(weights[h, i, j] * values[h, j] @ projections[h] for h in range(heads)))
    return found


def rollout(layers: list[Array], residual: float) -> list[Array]:
    """The product of residual·I + (1 − residual)·mean_h A, after each layer; layers are (head, query, key)."""
    n = layers[0].shape[-1]
    product = np.eye(n)
    found = []
    for heads in layers:
        product = (residual * np.eye(n) + (1 - residual) * heads.mean(0)) @ product
        found.append(product)
    return found


def relevance(layers: list[Array], gradients: list[Array]) -> list[Array]:
    """R ← R + mean_h (∇A ⊙ A)⁺ R, after each layer."""
    product = np.eye(layers[0].shape[-1])
    found = []
    for heads, gradient in zip(layers, gradients, strict=True):
        product = product + np.maximum(gradient * heads, 0).mean(0) @ product
        found.append(product)
    return found


def logit(weights: Array, values: Array, projection: Array, directions: Array) -> Array:
    """⟨a v H, u_i⟩, where u_i is what the query's logit moves by."""
    n = len(weights)
    return np.array([[weights[i, j] * values[j] @ projection @ directions[i] for j in range(n)] for i in range(n)])


def logit_direction(stream: Array, gain: Array, centred: bool, eps: float, unembedding: Array) -> Array:
    """The gradient of ⟨norm(x), w⟩ by x with the norm's scale held, for each vector of the stream."""
    found = []
    for x in stream:
        centre = np.eye(len(x)) - (np.ones((len(x), len(x))) / len(x) if centred else 0)
        scale = np.sqrt(np.mean((centre @ x) ** 2) + eps)
        found.append(centre.T @ (gain * unembedding) / scale)
    return np.array(found)


def parts(weights: Array, values: Array, projections: Array, residual: Array) -> Array:
    """What key j adds to the stream of query i, Σ_h a v H, and to its own the residual: (…, query, key, d)."""
    added = np.einsum("...hij,hjv,hvd->...ijd", weights, values, projections)
    n = len(residual)
    added[..., range(n), range(n), :] += residual
    return added


def layer_norm(parts: Array, whole: Array, gain: Array, eps: float) -> Array:
    """What a LayerNorm makes of parts of each query's vector, its scale held at that of the whole."""
    scale = np.sqrt(whole.var(-1) + eps)
    return gain * (parts - parts.mean(-1, keepdims=True)) / scale[:, None, None]


def lengths(parts: Array) -> Array:
    """‖·‖."""
    return np.linalg.norm(parts, axis=-1)


def nearness(parts: Array, whole: Array) -> Array:
    """max(0, ‖y_i‖₁ − ‖y_i − y_ij‖₁)."""
    return np.maximum(0, np.abs(whole).sum(-1)[:, None] - np.abs(whole[:, None] - parts).sum(-1))


def multiplied_shares(layers: list[Array]) -> list[Array]:
    """The product of rows that are divided by their sums, after each layer."""
    product = np.eye(layers[0].shape[-1])
    found = []
    for rows in layers:
        product = (rows / rows.sum(-1, keepdims=True)) @ product
        found.append(product)
    return found
