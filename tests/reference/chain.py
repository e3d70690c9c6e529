"""Products of attention through layers by their definition, and their ends by trying vertices."""

from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

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


def all_products(sets: list[list[list[Array]]], keep: float, give: float) -> Array:
    """The product for every choice of a vertex in every row of every head of every layer: (choice, output, input)."""
    rows = [vertices for layer in sets for head in layer for vertices in head]
    heads, n = len(sets[0]), len(sets[0][0])
    found = []
    for choice in product(*rows):
        maps = list(np.array(choice).reshape(len(sets), heads, n, n))
        found.append(product_of_layers(maps, np.eye(n), keep, give))
    return np.array(found)


def product_through_stacks(
    encoder: list[Array], decoder: list[tuple[Array, Array]], start: Array, keep: float, give: float
) -> list[Array]:
    """What target tokens hold after each block of a decoder: `start` is of target tokens, and then of source tokens.

    Every layer keeps and gives as rollout has it; a decoder's block is two, its own attention and its cross-attention.
    """
    n = len(decoder[0][0][0])
    target, source = start[:n], start[n:]
    source = product_of_layers(encoder, source, keep, give)
    found = []
    for own, cross in decoder:
        target = product_of_layers([own], target, keep, give)
        target = keep * target + give * sum(head @ source for head in cross) / len(cross)
        found.append(target)
    return found


def certain_order(raw: Array, possible: Array, asked: list[int], top: int) -> int:
    """How many of the strongest asked sources of one row have no later one above them in any of the possible rows."""
    strongest = sorted(asked, key=lambda source: -raw[source])
    for place, source in enumerate(strongest[:top]):
        later = strongest[place + 1 :]
        if later and (possible[:, later] > possible[:, [source]] + 1e-9 * np.abs(raw).max()).any():
            return place
    return min(top, len(strongest))


def greatest_in_box(lower: Array, upper: Array, held: Array) -> float:
    """The greatest p·w over l ≤ p ≤ u, Σp = 1, by a linear program."""
    ends = list(zip(lower, upper, strict=True))
    found = linprog(-held, A_eq=np.ones((1, len(held))), b_eq=[1.0], bounds=ends)
    return float(-found.fun)
