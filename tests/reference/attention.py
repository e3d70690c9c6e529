"""Attention of one layer by its definition (Eq. 1), one number at a time."""

import math

import torch
from torch import Tensor


def visible(kind: str, query: int, key: int, window: int | None = None) -> bool:
    """Say whether `query` sees `key`: 'causal' or 'both'.

    With 'window': the last `window` keys, or that many each side; with 'chunk': those of its own chunk of `window`.
    """
    if kind.startswith("causal") and key > query:
        return False
    if kind == "causal window":
        return query - key < window
    if kind == "causal chunk":
        return query // window == key // window
    if kind == "both window":
        return abs(query - key) <= window
    return True


def head_output(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sees,
    scaling: float,
    softcap: float | None,
    bias: Tensor | None,
    sink: float | None = None,
) -> Tensor:
    """Return O (query, d_v) of one head.

    `sees(i, j)` is the mask, `bias` (query, key) is added to the scores, and an extra key of value 0 has the score
    `sink`.
    """
    output = torch.zeros(len(query), value.shape[1], dtype=torch.float64)
    for i in range(len(query)):
        scores = {}
        for j in range(len(key)):
            if sees(i, j):
                score = scaling * sum(float(a) * float(b) for a, b in zip(query[i], key[j], strict=True))
                score = softcap * math.tanh(score / softcap) if softcap else score
                scores[j] = score + (float(bias[i, j]) if bias is not None else 0.0)
        total = sum(math.exp(score) for score in scores.values()) + (0.0 if sink is None else math.exp(sink))
        for j, score in scores.items():
            output[i] += math.exp(score) / total * value[j].double()
    return output
