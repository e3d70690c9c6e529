"""Measures of effective attention from their definitions, found by name: one head and one row at a time.

Every function takes a layer's attention A (head, query, key), values V (head, key, d_v), slices H of the output
projection (head, d_v, d) and which keys each query sees (query, key). Written to be read, not to be fast.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from tests.reference.effective import effective_attention
from tests.reference.effective import joint_null_dim as stacked_null_dim

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
_CUTOFF = 1e-9  # of the largest singular value


def raw(A: Array, V: Array, H: Array, mask: Mask) -> Array:
    """A itself, 0 where a key is not seen."""
    return np.where(mask, A, 0.0)


def visible(A: Array, V: Array, H: Array, mask: Mask) -> Mask:
    """The mask."""
    return mask


def effective(A: Array, V: Array, H: Array, mask: Mask) -> Array:
    """A⊥ = A − Proj_LN(T) A (Eq. 9), over the keys that a row sees."""
    return effective_attention(*_tensors(A, V, H, mask))[0].numpy()


def null(A: Array, V: Array, H: Array, mask: Mask) -> Array:
    """What the output does not depend on."""
    return raw(A, V, H, mask) - effective(A, V, H, mask)


def rank(A: Array, V: Array, H: Array, mask: Mask) -> Array:
    """The rank of T = VH over the keys that a row sees."""
    return effective_attention(*_tensors(A, V, H, mask))[1].numpy()


def null_dim(A: Array, V: Array, H: Array, mask: Mask) -> Array:
    """Visible keys − rank(T) (Eq. 6)."""
    return mask.sum(-1) - rank(A, V, H, mask)


def polytope_dim(A: Array, V: Array, H: Array, mask: Mask) -> Array:
    """The number of independent x with xT = 0 and Σx = 0, where a learned sink is one more key, of value 0."""

    def dim(head: int, query: int, keys: Mask) -> int:
        T = V[head, keys] @ H[head]
        if A[head, query, keys].sum() < 1 - 1e-9:
            T = np.concatenate([T, np.zeros_like(T[:1])])
        return len(T) - _rank(np.concatenate([T, np.ones((len(T), 1))], axis=1))

    return _of_rows(A, mask, dim)


def joint_null_dim(A: Array, V: Array, H: Array, mask: Mask) -> Array:
    """The number of independent (x_1, …, x_h) with Σ_h x_h V_h H_h = 0, by query."""
    _, *others = _tensors(A, V, H, mask)
    return stacked_null_dim(*others).numpy()


def entropy(A: Array, V: Array, H: Array, mask: Mask) -> Array:
    """−Σ a log a of a row, in nats."""

    def of_row(head: int, query: int, keys: Mask) -> float:
        return -sum(weight * math.log(weight) for weight in A[head, query, keys].tolist() if weight > 0)

    return _of_rows(A, mask, of_row)


def sink(A: Array, V: Array, H: Array, mask: Mask) -> Array:
    """What is left of a row's sum."""
    return _of_rows(A, mask, lambda head, query, keys: 1 - A[head, query, keys].sum())


def norm_ratio(A: Array, V: Array, H: Array, mask: Mask) -> Array:
    """‖a⊥‖/‖a‖ of each row."""
    return np.linalg.norm(effective(A, V, H, mask), axis=-1) / np.linalg.norm(raw(A, V, H, mask), axis=-1)


def residual(A: Array, V: Array, H: Array, mask: Mask) -> Array:
    """‖(A⊥V − O)H‖/‖OH‖ of each head."""
    missing = -null(A, V, H, mask) @ V @ H
    output = raw(A, V, H, mask) @ V @ H
    return np.linalg.norm(missing, axis=(1, 2)) / np.linalg.norm(output, axis=(1, 2))


def row_residual(A: Array, V: Array, H: Array, mask: Mask) -> Array:
    """‖(a⊥V − o)H‖ of each row against Σ a‖vH‖."""
    missing = np.linalg.norm(null(A, V, H, mask) @ V @ H, axis=-1)
    lengths = np.linalg.norm(V @ H, axis=-1)
    return missing / (raw(A, V, H, mask) @ lengths[..., None])[..., 0]


def pearson(A: Array, V: Array, H: Array, mask: Mask) -> Array:
    """The correlation of raw and effective attention over all weights of a head."""
    other = effective(A, V, H, mask)
    return np.array([np.corrcoef(A[head][mask], other[head][mask])[0, 1] for head in range(len(A))])


def _of_rows(A: Array, mask: Mask, of_row: Callable[[int, int, Mask], float]) -> Array:
    heads, queries, _ = A.shape
    return np.array([[of_row(head, query, mask[query]) for query in range(queries)] for head in range(heads)])


def _tensors(*arrays: NDArray) -> tuple[torch.Tensor, ...]:
    return tuple(map(torch.tensor, arrays))


def _rank(T: Array) -> int:
    singular = np.linalg.svd(T, compute_uv=False)
    return int((singular > _CUTOFF * singular.max()).sum())
