"""Minimum-norm solutions over the first keys, written from their definition: one row and one SVD at a time."""

import math

import torch
from torch import Tensor


def prefix_solution(values: Tensor, output: Tensor, stop: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y_i = G_i⁺ o_i with G_i = V_iᵀV_i, V_i the first stop[i] keys, and singular values up to the cutoff left out.

    values (key, d), output (group, query, d), stop (query). Also the rank of each row, and how far the nearest singular
    value is from the cutoff, as a share of it.
    """
    width = values.shape[1]
    solution, rank, margin = torch.zeros_like(output), torch.zeros(len(stop)), torch.full((len(stop),), math.inf)
    for row, count in enumerate(stop.tolist()):
        _, singular, right = torch.linalg.svd(values[:count], full_matrices=False)
        cutoff = 4 * eps * (1 + math.sqrt(width / max(1, count))) * float(singular[0] if count else 0.0)
        kept = singular > cutoff
        basis = right[kept].T / singular[kept]
        solution[:, row] = output[:, row] @ basis @ basis.T
        rank[row] = kept.sum()
        if cutoff:
            margin[row] = float(((singular - cutoff).abs() / cutoff).min())
    return solution, rank.long(), margin
