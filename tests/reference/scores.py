"""Scores of attention that later models made, one number at a time: relative positions (DeBERTa) and ALiBi."""

import math

import torch
from torch import Tensor


def bucket(distance: int, buckets: int, longest: int) -> int:
    """Return DeBERTa's δ before its shift: exact below half of the buckets, logarithmic up to `longest` beyond."""
    middle = buckets // 2
    if buckets <= 0 or abs(distance) <= middle:
        return distance
    far = math.log(abs(distance) / middle) / math.log((longest - 1) / middle) * (middle - 1)
    return (math.ceil(far) + middle) * (1 if distance > 0 else -1)


def disentangled(
    query: Tensor, key: Tensor, position_key: Tensor, position_query: Tensor, buckets: int, longest: int
) -> Tensor:
    """Return (q_i·k_j + q_i·r_δ + p_δ·k_j) / sqrt(3d) of one head: He et al. 2021, Eq. 4, δ of both terms as run."""
    span, n = buckets if buckets > 0 else longest, len(query)
    scores = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(n):
            place = min(max(bucket(i - j, buckets, longest) + span, 0), 2 * span - 1)
            total = query[i] @ key[j] + query[i] @ position_key[place] + position_query[place] @ key[j]
            scores[i, j] = total / math.sqrt(3 * query.shape[1])
    return scores


def alibi(query: Tensor, key: Tensor, head: int, heads: int, *, scaled: bool) -> Tensor:
    """Return q_i·k_j / sqrt(d) - m (i - j) of one head, m = 2^(-8 (head + 1) / heads): Press et al. 2022.

    `scaled`: m is divided by sqrt(d) too, as Falcon does.
    """
    n, d = query.shape
    slope = 2 ** (-8 * (head + 1) / heads) / (math.sqrt(d) if scaled else 1)
    scores = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(n):
            scores[i, j] = query[i] @ key[j] / math.sqrt(d) - slope * (i - j)
    return scores
