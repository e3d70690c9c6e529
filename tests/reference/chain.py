"""Products of attention through layers by their definition, and their ends by trying vertices."""

from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from tests.reference.intervals import augmented

Array = NDArray[np.float64]


def vertices(attention: Array, values: Array) -> Array:
    """All vertices of {a' ≥ 0, a'[V, 1] = a[V, 1]}: the solutions with independent columns, one per support."""
    matrix = augmented(values).T
    rank = np.linalg.matrix_rank(matrix, tol=1e-9)
    found = []
    for size in range(1, rank + 1):
        for support in combinations(range(len(attention)), size):
            some = matrix[:, support]
            if np.linalg.matrix_rank(some, tol=1e-9) < size:
                continue
            weights = np.zeros(len(attention))
            weights[list(support)] = np.linalg.lstsq(some, matrix @ attention, rcond=None)[0]
            if weights.min() >= -1e-12 and np.abs(matrix @ (weights - attention)).max() <= 1e-10:
                found.append(weights)
    return np.array(found)


def product_of_layers(maps: list[Array], start: Array, keep: float, give: float) -> Array:
    """Π (keep·I + give·mean_h A) applied to a vector; maps are (head, query, key)."""
    weights = start
    for heads in maps:
        weights = keep * weights + give * sum(head @ weights for head in heads) / len(heads)
    return weights


def greatest_by_choices(sets: list[list[list[Array]]], start: Array, keep: float, give: float) -> Array:
    """The greatest product, by trying every vertex of every row of every head of every layer at once."""
    rows = [vertices for layer in sets for head in layer for vertices in head]
    heads, n = len(sets[0]), len(start)
    best = np.full(n, -np.inf)
    for choice in product(*rows):
        maps = list(np.array(choice).reshape(len(sets), heads, n, n))
        best = np.maximum(best, product_of_layers(maps, start, keep, give))
    return best
