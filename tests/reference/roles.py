"""Roles of heads by their definitions, one weight at a time."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def pattern(score: str, ids: Sequence[int], special: Sequence[bool]) -> Array:
    """What a weight from query i to key j counts in a score."""
    n = len(ids)
    counts = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            if score == "self":
                counts[i, j] = i == j
            elif score == "previous":
                counts[i, j] = j == i - 1
            elif score in ("first", "sink rate"):
                counts[i, j] = j == 0 and i != 0
            elif score == "special":
                counts[i, j] = special[j]
            elif score == "same token":
                counts[i, j] = j < i and ids[j] == ids[i]
            elif score == "induction":
                counts[i, j] = 0 < j <= i and ids[j - 1] == ids[i]
            elif score == "distance":
                counts[i, j] = abs(i - j)
            else:
                raise KeyError(score)
    return counts


def crossing(score: str, ids: Sequence[int], keys: Sequence[int], special: Sequence[bool]) -> Array:
    """What a weight from query i to key j of another text counts in a score."""
    counts = np.zeros((len(ids), len(keys)))
    for i in range(len(ids)):
        for j in range(len(keys)):
            counts[i, j] = {"first": j == 0, "special": special[j], "same token": ids[i] == keys[j]}[score]
    return counts


def role(score: str, attention: Array, visible: Array, ids: Sequence[int], special: Sequence[bool]) -> float:
    """The mean over the rows that see several keys, one of which counts."""
    counts = pattern(score, ids, special)
    rows = []
    for i, weights in enumerate(attention):
        seen = [j for j in range(len(weights)) if visible[i, j]]
        if len(seen) > 1 and any(counts[i, j] for j in seen):
            rows.append(sum(counts[i, j] * weights[j] for j in seen))
    return float(np.mean(rows)) if rows else float("nan")
