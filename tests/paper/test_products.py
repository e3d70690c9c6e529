"""Collapsed attention against its definition, number by number, and its cost against counting."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from identikit.paper import products as collapse
from identikit.paper.products import Affine, Sizes
from tests.reference import collapse as reference

seeds = st.integers(0, 10_000)
# Heads, and how many of them share a key-value head.
shared_heads = st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)])


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def affine(seed: int, heads: int, d: int, width: int) -> Affine:
    return Affine(drawn(seed, heads, d, width), drawn(seed + 1, heads, width))


def as_numpy(parts: Affine) -> tuple[np.ndarray, np.ndarray]:
    return parts.weight.numpy(), parts.bias.numpy()


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6), shared_heads, seeds)
def test_scores_are_those_of_the_definition(n, d, width, heads, seed):
    tokens = drawn(seed, n, d)
    query, key = affine(seed + 1, heads[0], d, width), affine(seed + 3, heads[1], d, width)
    expected = torch.from_numpy(reference.scores(tokens.numpy(), as_numpy(query), as_numpy(key), 0.3))
    collapsed = collapse.collapse_scores(query, key, scaling=0.3)
    torch.testing.assert_close(collapse.factored_scores(tokens, query, key, scaling=0.3), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(collapse.collapsed_scores(tokens, collapsed), expected, rtol=0, atol=1e-12)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6), shared_heads, seeds)
def test_output_is_that_of_the_definition(n, d, width, heads, seed):
    tokens, weights = drawn(seed, n, d), drawn(seed + 1, heads[0], n, n).softmax(-1)
    weights[:, 0] = 0  # a query that sees no key gets no bias either
    value, projection = affine(seed + 2, heads[1], d, width), drawn(seed + 4, heads[0], width, d)
    by_head = reference.output(weights.numpy(), tokens.numpy(), as_numpy(value), projection.numpy())
    expected = torch.from_numpy(by_head.sum(0))
    collapsed = collapse.collapse_values(value, projection)
    found = collapse.factored_output(weights, tokens, value, projection)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(collapse.collapsed_output(weights, tokens, collapsed), expected, rtol=0, atol=1e-12)


def test_a_bias_in_the_keys_does_not_reach_attention():
    tokens, query, key = drawn(0, 6, 5), affine(1, 2, 5, 3), affine(3, 2, 5, 3)
    with_bias = collapse.collapsed_scores(tokens, collapse.collapse_scores(query, key, scaling=0.5))
    without = collapse.collapse_scores(query, key._replace(bias=torch.zeros_like(key.bias)), scaling=0.5)
    assert not torch.allclose(with_bias, collapse.collapsed_scores(tokens, without))
    torch.testing.assert_close(with_bias.softmax(-1), collapse.collapsed_scores(tokens, without).softmax(-1))


def test_parts_change_dtype():
    scores = collapse.collapse_scores(affine(0, 2, 4, 3), affine(2, 2, 4, 3), scaling=1.0)
    values = collapse.collapse_values(affine(4, 2, 4, 3), drawn(6, 2, 3, 4))
    for parts in (scores, values, affine(7, 2, 4, 3)):
        for part, small in zip(parts, parts.to(torch.float32), strict=True):
            assert small.dtype == torch.float32
            torch.testing.assert_close(small, part.float(), rtol=0, atol=0)


small = st.integers(1, 5)


@given(small, small, st.sampled_from([(1, 1), (2, 1), (3, 3)]), small)
def test_operations_are_counted(d, width, heads, tokens):
    sizes = Sizes(d, heads[0], heads[1], width)
    expected = reference.factored_operations(d, heads[0], heads[1], width, tokens)
    assert collapse.factored_cost(sizes, tokens).operations == expected
    expected = reference.collapsed_operations(d, heads[0], tokens)
    assert collapse.collapsed_cost(sizes, tokens).operations == expected


@given(st.integers(1, 64), st.integers(1, 64), st.sampled_from([(1, 1), (8, 1), (8, 8)]), st.integers(1, 300))
def test_collapsing_pays_above_a_head_width(d, width, heads, n):
    """The bound of docs/collapse.md, with heads that share keys and values."""
    sizes = Sizes(d, heads[0], heads[1], width)
    wider = width * (d * sum(heads) + n * heads[0]) > heads[0] * d * (d + n)
    factored, collapsed = collapse.factored_cost(sizes, n), collapse.collapsed_cost(sizes, n)
    assert (collapsed.operations < factored.operations) == wider


@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 5000))
def test_heads_that_split_the_width_pay_only_alone(heads, width, n):
    sizes = Sizes(heads * width, heads, heads, width)
    factored, collapsed = collapse.factored_cost(sizes, n), collapse.collapsed_cost(sizes, n)
    assert (collapsed.operations < factored.operations) == (heads == 1)
