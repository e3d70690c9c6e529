"""Curves of replaced sources, and the search for the best and the worst order."""

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from identikit.maths.measures import bootstrap_ends
from identikit.maths.orders import area, extremes, ordered, replaced_first


class Changes:
    """A change drawn for each set of sources, and how many sets were asked for."""

    def __init__(self, n: int, seed: int):
        self.values = torch.rand(2**n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.values[0] = 0.0
        self.powers = 2 ** torch.arange(n)
        self.asked = 0

    def __call__(self, sets: torch.Tensor) -> torch.Tensor:
        self.asked += len(sets)
        return self.values[(sets * self.powers).sum(1)]


@given(st.integers(1, 5), st.integers(0, 1000))
def test_a_wide_search_finds_the_best_and_the_worst_of_all_orders(n: int, seed: int):
    change = Changes(n, seed)
    areas = [area(change(replaced_first(torch.tensor(order)))) for order in permutations(range(n))]
    found = extremes(change, n, 2**n)
    assert area(found.best) == pytest.approx(max(areas)) and area(found.worst) == pytest.approx(min(areas))
    narrow = extremes(change, n, 2)
    assert min(areas) - 1e-12 <= area(narrow.worst) <= area(narrow.best) <= max(areas) + 1e-12


def test_a_search_asks_for_each_set_once_and_grows_with_its_width():
    change = Changes(6, 0)
    extremes(change, 6, 64)
    assert change.asked == 63  # every set but the empty one
    change = Changes(6, 0)
    extremes(change, 6, 1)
    assert change.asked <= 2 * 21


@given(st.permutations(range(5)), st.integers(0, 1000))
def test_an_order_and_its_reverse_add_up(order: list[int], seed: int):
    """Insertion is 1 minus the deletion of the reversed order: both ways of an order and its reverse make 1."""
    change = Changes(5, seed)
    found = extremes(change, 5, 32)
    down, up = (change(replaced_first(torch.tensor(way))) for way in (order, order[::-1]))
    left = [
        float(change((torch.ones(1, 5) > 0).index_fill(1, torch.tensor(order[:k], dtype=torch.long), False)))
        for k in range(5)
    ]
    assert np.mean(left) == pytest.approx(area(up))
    assert 0 <= found.normalised(down) <= 1


def test_equal_scores_keep_their_order_and_where_nothing_matters_there_is_no_area():
    assert ordered(torch.tensor([1.0, 3.0, 3.0, 2.0])).tolist() == [1, 2, 3, 0]
    assert replaced_first(torch.tensor([2, 0, 1])).tolist() == [
        [False, False, False], [False, False, True], [True, False, True], [True, True, True],
    ]  # fmt: skip
    found = extremes(lambda sets: sets.any(1).double(), 3, 4)
    assert np.isnan(found.normalised(torch.tensor([0.0, 1.0, 1.0, 1.0])))


def test_bootstrap_intervals_cover_the_mean_as_often_as_they_say():
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(40, 300, generator=generator, dtype=torch.float64)
    low, high = bootstrap_ends(numbers, seed=0)
    assert 0.9 <= float(((low < 0) & (high > 0)).double().mean()) <= 0.98
    gap = torch.nan
    missing = torch.tensor([[1.0, gap, gap, 1.0], [2.0, 5.0, gap, gap], [3.0, gap, gap, 3.0]]).double()
    low, high = bootstrap_ends(missing, seed=1)
    assert 1.0 <= float(low[0]) < 2.0 < float(high[0]) <= 3.0 and low[1:3].isnan().all() and high[1:3].isnan().all()
    assert (float(low[3]), float(high[3])) == (1.0, 3.0)  # two numbers will do
    assert torch.equal(bootstrap_ends(missing, seed=1)[0][:1], low[:1])
