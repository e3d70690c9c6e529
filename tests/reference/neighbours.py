"""Nearest neighbours and distances by their definition, one pair at a time."""

import math

import numpy as np


def distance(first, second, name):
    """Cosine distance, 1 when either vector is zero; or Euclidean distance."""
    if name == "l2":
        return math.sqrt(sum((a - b) ** 2 for a, b in zip(first, second, strict=True)))
    product = sum(a * b for a, b in zip(first, second, strict=True))
    lengths = math.sqrt(sum(a * a for a in first)) * math.sqrt(sum(b * b for b in second))
    return 1.0 if lengths == 0 else 1.0 - product / lengths


def nearest(predicted, candidates, name, offset=0):
    """For each token of one sentence: hit, winner, margin and whether its target is duplicated; None without target."""
    found = []
    for i, vector in enumerate(predicted):
        if not 0 <= i + offset < len(candidates):
            found.append(None)
            continue
        own = candidates[i + offset]
        right, wrong, winner, equals = math.inf, math.inf, None, 0
        for j, candidate in enumerate(candidates):
            away = distance(vector, candidate, name)
            if np.array_equal(candidate, own):
                right, equals = min(right, away), equals + 1
            elif away < wrong:
                wrong, winner = away, j
        hit = right < wrong
        found.append((hit, i + offset if hit else winner, wrong - right, equals > 1))
    return found
