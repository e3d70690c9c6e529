import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from identikit.maths import neighbours
from identikit.maths.neighbours import (
    DISTANCES,
    distance_gradient,
    nearest_in_sentences,
    number_distinct,
    paired_distance,
)
from tests.reference import neighbours as literal

BOTH = pytest.mark.parametrize("distance", DISTANCES)


def sentences(lengths, width, seed, *, vocabulary=None):
    """Predictions near their candidates; with a vocabulary, candidates repeat."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    if vocabulary:
        table = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64)
        candidates = table[torch.randint(vocabulary, (tokens,), generator=generator)]
    else:
        candidates = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    return candidates + torch.randn(tokens, width, generator=generator, dtype=torch.float64), candidates


def look_up(predicted, candidates, lengths, distance, offset=0):
    return nearest_in_sentences(
        predicted,
        candidates,
        lengths=torch.tensor(lengths),
        identity=number_distinct(candidates),
        distance=distance,
        offset=offset,
    )


def assert_as_by_loop(predicted, candidates, lengths, distance, offset=0):
    found = look_up(predicted, candidates, lengths, distance, offset)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        expected = literal.nearest(predicted[part].numpy(), candidates[part].numpy(), distance, offset)
        for row, each in enumerate(expected, start=start):
            if each is None:
                each = (False, -1, np.nan, False)
            assert (bool(found.hit[row]), int(found.winner[row]), bool(found.duplicated[row])) == (*each[:2], each[3])
            np.testing.assert_allclose(float(found.margin[row]), each[2], rtol=1e-7, atol=1e-7)
        start += length


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    width=st.integers(2, 5),
    seed=st.integers(0, 10_000),
    vocabulary=st.sampled_from([None, 3, 8]),
    distance=st.sampled_from(DISTANCES),
    offset=st.integers(-3, 3),
)
def test_lookup_agrees_with_a_double_loop(lengths, width, seed, vocabulary, distance, offset):
    predicted, candidates = sentences(lengths, width, seed, vocabulary=vocabulary)
    assert_as_by_loop(predicted, candidates, lengths, distance, offset)


@BOTH
def test_lookup_in_pieces_agrees_with_a_double_loop(monkeypatch, distance):
    monkeypatch.setattr(neighbours, "_MAX_PAIRS", 40)
    monkeypatch.setattr(neighbours, "_MIN_QUERIES", 2)
    lengths = [3, 30, 1, 4, 4, 2]
    assert_as_by_loop(*sentences(lengths, 3, seed=1), lengths, distance)


@BOTH
def test_an_equal_input_is_right_and_any_other_tie_is_a_miss(distance):
    candidates = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    predicted = torch.tensor([[1.0, 1.0], [0.0, 1.0], [2.0, 0.1]])
    found = look_up(predicted, candidates, [3], distance)
    assert found.hit.tolist() == [False, True, True]
    assert found.winner.tolist() == [1, 1, 2]
    assert float(found.margin[0]) == 0
    assert found.duplicated.tolist() == [True, False, True]


def test_zero_vectors_are_at_cosine_distance_one_from_everything():
    candidates = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    found = look_up(torch.tensor([[0.0, 0.0], [0.0, 0.0], [-2.0, 0.0]]), candidates, [3], "cosine")
    assert found.hit.tolist() == [False, False, True]
    torch.testing.assert_close(found.margin, torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64))
    assert paired_distance(torch.zeros(2), torch.ones(2), "cosine") == 1


def test_without_a_wrong_candidate_the_margin_is_infinite():
    found = look_up(torch.randn(3, 2), torch.ones(3, 2), [1, 2], "l2")
    assert found.hit.all() and found.margin.isinf().all()
    assert found.duplicated.tolist() == [False, True, True]


def test_distinct_numbers_equal_vectors_alike():
    numbers = number_distinct(torch.tensor([[1.0, 2.0], [0.0, 1.0], [1.0, 2.0], [1.0, 2.5]]))
    assert numbers[0] == numbers[2]
    assert len(set(numbers.tolist())) == 3


@BOTH
@settings(max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_distances_and_gradients_agree_with_loop_and_autograd(distance, seed):
    predicted, target = sentences([6], 4, seed)
    weight = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected = [literal.distance(a, b, distance) for a, b in zip(predicted.numpy(), target.numpy(), strict=True)]
    torch.testing.assert_close(paired_distance(predicted, target, distance), torch.tensor(expected).double())
    leaf = predicted.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((weight * paired_distance(leaf, target, distance)).sum(), leaf)
    torch.testing.assert_close(distance_gradient(predicted, target, weight, distance), gradient, rtol=1e-9, atol=1e-12)


@BOTH
def test_gradient_is_zero_where_the_distance_has_none(distance):
    predicted = torch.zeros(1, 3) if distance == "cosine" else torch.ones(1, 3)
    assert not distance_gradient(predicted, torch.ones(1, 3), torch.ones(1), distance).any()
