"""The three sets of attention with the same output, by their definitions, one row at a time: SVDs and autograd.

`score` maps a query (d_k) to the scores of the visible keys; `T` holds their values as the output projection passes
them on. Written to be read, not to be fast.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from tests.reference.effective import left_null_space


def null_dim(T: Tensor) -> int:
    """The number of independent x with xᵀT = 0."""
    return left_null_space(T).shape[1]


def polytope_dim(T: Tensor) -> int:
    """The number of independent x with xᵀT = 0 and Σx = 0: where all weights are positive, a + tx stays attention."""
    return null_dim(torch.cat([T, torch.ones(len(T), 1, dtype=T.dtype)], dim=1))


def reachable_dim(score: Callable[[Tensor], Tensor], query: Tensor, T: Tensor) -> int:
    """The rank of ∂a/∂q on the kernel of ∂o/∂q, with a = softmax(score(q)) and o = aT."""
    of_attention = jacobian(lambda q: score(q).softmax(0), query)
    _, singular, directions = torch.linalg.svd(of_output(score, query, T))
    fixed = int((singular > small(of_attention) * torch.linalg.matrix_norm(T)).sum())
    kernel = directions[fixed:].T  # dq with (∂o/∂q) dq = 0
    return int((torch.linalg.svdvals(of_attention @ kernel) > small(of_attention)).sum())


def condition(score: Callable[[Tensor], Tensor], query: Tensor, T: Tensor) -> float:
    """The largest singular value of ∂o/∂q divided by the smallest that is not 0."""
    of_attention = jacobian(lambda q: score(q).softmax(0), query)
    singular = torch.linalg.svdvals(of_output(score, query, T))
    kept = singular[singular > small(of_attention) * torch.linalg.matrix_norm(T)]
    return float(kept.max() / kept.min()) if len(kept) else float("nan")


def of_output(score: Callable[[Tensor], Tensor], query: Tensor, T: Tensor) -> Tensor:
    """∂o/∂q."""
    return jacobian(lambda q: score(q).softmax(0) @ T, query)


def small(of_attention: Tensor) -> float:
    """What counts as 0 of ∂a/∂q; ∂o/∂q is at most ‖T‖ times as large."""
    return 1e-11 * float(torch.linalg.matrix_norm(of_attention)) + 1e-15
