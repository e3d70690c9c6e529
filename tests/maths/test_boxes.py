"""Lengths of sums over boxes of weights: all corners, random points, and what proves the ends."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from identikit.maths import boxes


def made(count: int, vectors: int, seed: int, fixed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Vectors of some sums, and boxes of their weights; the first `fixed` weights cannot move."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, vectors, 6, generator=generator, dtype=torch.float64)
    ends = torch.rand(2, count, vectors, generator=generator, dtype=torch.float64).sort(0).values
    ends[1, :, :fixed] = ends[0, :, :fixed]
    return x, ends[0], ends[1]


def length(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (weights[..., None] * x).sum(-2).norm(dim=-1)


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(0, 3))
def test_the_greatest_is_at_a_corner_and_the_least_is_proven(seed: int, vectors: int, fixed: int):
    x, lower, upper = made(3, vectors, seed, min(fixed, vectors))
    ends = boxes.norm_ends(x @ x.mT, lower, upper, torch.ones(len(x), dtype=torch.bool))
    choices = itertools.product([False, True], repeat=vectors)
    corners = [torch.where(torch.tensor(choice), upper, lower) for choice in choices]
    best = torch.stack([length(x, corner) for corner in corners]).amax(0)
    torch.testing.assert_close(ends.greatest, best, atol=1e-10, rtol=1e-10)
    assert ends.exact.all() and ends.gap.max() < 1e-6
    points = torch.rand(500, 3, vectors, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    lengths = length(x, lower + points * (upper - lower))
    assert (lengths >= ends.least - 1e-9).all() and (lengths <= ends.greatest + 1e-9).all()


def test_the_least_can_be_0():
    x = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]], dtype=torch.float64)
    ends = boxes.norm_ends(
        x @ x.mT, torch.zeros(1, 2).double(), torch.ones(1, 2).double(), torch.ones(1, dtype=torch.bool)
    )
    assert float(ends.least) == 0.0 and float(ends.greatest) == pytest.approx(1.0)


def test_sums_that_are_not_asked_for_have_ends_that_hold():
    x, lower, upper = made(3, 4, 1)
    ends = boxes.norm_ends(x @ x.mT, lower, upper, torch.tensor([True, False, False]))
    sharp = boxes.norm_ends(x @ x.mT, lower, upper, torch.ones(3, dtype=torch.bool))
    assert ends.exact.tolist() == [True, False, False]
    assert ends.greatest[0] == sharp.greatest[0] and ends.least[0] == sharp.least[0]
    assert (ends.greatest >= sharp.greatest).all() and (ends.least <= sharp.least).all()
    none = boxes.norm_ends(x @ x.mT, lower, upper, torch.zeros(3, dtype=torch.bool))
    assert (none.greatest >= sharp.greatest).all() and (none.least == 0).all()


def test_more_free_weights_than_corners_can_be_tried_for_have_a_bound():
    x, lower, upper = made(4, boxes.CORNERS + 2, 1)
    ends = boxes.norm_ends(x @ x.mT, lower, upper, torch.ones(len(x), dtype=torch.bool))
    assert not ends.exact.any()
    points = torch.rand(2000, 4, boxes.CORNERS + 2, generator=torch.Generator().manual_seed(0)).double().round()
    lengths = length(x, lower + points * (upper - lower))
    assert (lengths <= ends.greatest + 1e-9).all() and (lengths >= ends.least - 1e-9).all()
    assert (ends.greatest - lengths.amax(0) <= ends.gap + 1e-9).all()
