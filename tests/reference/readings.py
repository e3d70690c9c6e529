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
