"""Attention's scores and output written from their definitions: one head, one pair of tokens, one number at a time."""

import math

import numpy as np


def affine(token: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """A query, key or value of one head from one token's vector."""
    return np.array(
        [
            bias[column] + math.fsum(token[row] * weight[row, column] for row in range(len(token)))
            for column in range(len(bias))
        ]
    )


def scores(tokens, query, key, scaling: float) -> np.ndarray:
    """s (e_i W^Q + b^Q)·(e_j W^K + b^K) for every head and pair; query and key are (weight, bias)."""
    heads, n = len(query[0]), len(tokens)
    found = np.zeros((heads, n, n))
    for head in range(heads):
        shared = head // (heads // len(key[0]))
        for i in range(n):
            for j in range(n):
                q = affine(tokens[i], query[0][head], query[1][head])
                k = affine(tokens[j], key[0][shared], key[1][shared])
                found[head, i, j] = scaling * math.fsum(q * k)
    return found


def output(weights, tokens, value, projection) -> np.ndarray:
    """Σ_j A_ij (e_j W^V + b^V) H for every head and token."""
    heads, queries, n = weights.shape
    found = np.zeros((heads, queries, projection.shape[-1]))
    for head in range(heads):
        shared = head // (heads // len(value[0]))
        for i in range(queries):
            for j in range(n):
                v = affine(tokens[j], value[0][shared], value[1][shared])
                found[head, i] += weights[head, i, j] * (v @ projection[head])
    return found


class Counter:
    """Multiplies matrices as it is taught at school, and counts the multiply-adds."""

    def __init__(self):
        self.operations = 0

    def product(self, rows: int, inner: int, columns: int) -> None:
        for _ in range(rows):
            for _ in range(columns):
                for _ in range(inner):
                    self.operations += 1


def factored_operations(d, heads, kv_heads, width, tokens) -> int:
    """Q for every head, K for every key-value head, then Q·Kᵀ."""
    counter = Counter()
    for _ in range(heads):
        counter.product(tokens, d, width)
        counter.product(tokens, width, tokens)
    for _ in range(kv_heads):
        counter.product(tokens, d, width)
    return counter.operations


def collapsed_operations(d, heads, tokens) -> int:
    """E·M for every head, then times Eᵀ."""
    counter = Counter()
    for _ in range(heads):
        counter.product(tokens, d, d)
        counter.product(tokens, d, tokens)
    return counter.operations
