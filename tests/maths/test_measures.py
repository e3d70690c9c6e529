"""Correlation of two maps by value and by rank, and certain order, against numpy, scipy and their definitions."""

import numpy as np
import pytest
import torch
from scipy.stats import sem, spearmanr

from identikit.maths.measures import (
    certain_order,
    mean_over_texts,
    ordered_share,
    pearson,
    pearson_sums,
    rank_correlation,
)
from tests.reference import chain as reference


def test_pearson_over_visible_entries():
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(4, 20, 20, generator=generator, dtype=torch.float64) for _ in range(2))
    second += first
    mask = torch.ones(20, 20, dtype=torch.bool).tril()
    sums = pearson_sums(first, second, mask)
    for head in range(4):
        expected = np.corrcoef(first[head][mask], second[head][mask])[0, 1]
        assert float(pearson(sums.pooled(-1))[head]) == pytest.approx(expected, abs=1e-12)
    expected = np.corrcoef(first[:, mask].flatten(), second[:, mask].flatten())[0, 1]
    assert float(pearson(sums.pooled())) == pytest.approx(expected, abs=1e-12)


def pearson_of(first: list[float], second: list[float]) -> float:
    x, y = (torch.tensor(each, dtype=torch.float64)[None, None] for each in (first, second))
    return float(pearson(pearson_sums(x, y, torch.ones(1, len(first), dtype=torch.bool))))


def test_pearson_of_constant_maps():
    assert pearson_of([0.1] * 7, [0.1] * 7) == 1
    assert np.isnan(pearson_of([0.1] * 7, [0.1, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1]))
    assert np.isnan(pearson_of([0.1] * 7, [0.3] * 7))
    assert np.isnan(pearson_of([], []))
    assert pearson_of([0.1, 0.2], [0.2, 0.1]) == pytest.approx(-1)


def test_rank_correlation_is_that_of_scipy():
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(8, 9, generator=generator).mul(2).round().double() for _ in range(2))  # with ties
    asked = torch.rand(8, 9, generator=generator) < 0.7
    found = rank_correlation(first, second, asked)
    for row in range(8):
        expected = spearmanr(first[row, asked[row]], second[row, asked[row]]).statistic
        assert float(found[row]) == pytest.approx(expected, abs=1e-12)
    assert rank_correlation(torch.ones(1, 4), torch.randn(1, 4), torch.ones(1, 4).bool()).isnan()


def possible_rows(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What some rows may be, (row, choice, source), and the first of each; and which sources are asked for."""
    generator = torch.Generator().manual_seed(seed)
    strength = torch.linspace(2, 0, 6).exp()
    possible = strength + 1.5 * torch.randn(40, 4, 6, generator=generator, dtype=torch.float64)
    return possible, possible[:, 0], torch.rand(40, 6, generator=generator) < 0.9


@pytest.mark.parametrize("seed", range(3))
def test_certain_order_is_that_of_all_possible_rows(seed: int):
    possible, raw, asked = possible_rows(seed)
    calls = []

    def compare(row: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.extend(row.tolist())
        ahead = (possible[row, :, second] - possible[row, :, first]).amax(-1)
        return ahead, torch.zeros_like(ahead)

    ends = possible.amin(1), possible.amax(1)
    found, decided = certain_order(raw, ends, asked, compare, 4)
    assert decided.all()
    for row in range(40):
        wanted = asked[row].nonzero()[:, 0].tolist()
        assert int(found[row]) == reference.certain_order(raw[row].numpy(), possible[row].numpy(), wanted, 4)
    assert len(set(found.tolist())) > 2 and len(calls) < 40 * 4 * 3
    alone, decided = certain_order(raw, ends, asked, None, 4)  # what the ends show is right; the rest is not decided
    assert ((alone == -1) | (alone <= found)).all() and (alone == -1).any() and (alone > 0).any()
    assert ((alone > 0) & ~decided).any()

    def tiring(row: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ahead, gap = compare(row, first, second)
        return ahead.masked_fill(row >= 20, torch.nan), gap.masked_fill(row >= 20, torch.nan)

    some, decided = certain_order(raw, ends, asked, tiring, 4)
    assert decided[:20].all() and not decided[20:].all()
    assert torch.equal(some[decided], found[decided]) and torch.equal(some[20:], alone[20:])


@pytest.mark.parametrize(("gap", "told"), [(0.1, (0, True)), (0.9, (-1, False))])
def test_a_source_is_ahead_only_where_something_attains_it(gap: float, told: tuple[int, bool]):
    """The second can be ahead by 0.5 less the gap at least: with a large gap, nobody knows."""
    raw = torch.tensor([[0.6, 0.4]], dtype=torch.float64)
    ends = torch.tensor([[0.1, 0.0]]).double(), torch.tensor([[1.0, 0.9]]).double()
    halves = torch.full((1,), 0.5, dtype=torch.float64)
    found = certain_order(raw, ends, torch.ones(1, 2) > 0, lambda *pair: (halves, gap * halves / 0.5), 2)
    assert (int(found.sources), bool(found[1])) == told


def test_readings_of_any_size_have_the_same_order():
    possible, raw, asked = possible_rows(0)
    orders = []
    for size in (1.0, 1e-12, 1e12):
        readings = size * possible

        def compare(row: torch.Tensor, first: torch.Tensor, second: torch.Tensor, readings: torch.Tensor = readings):
            ahead = (readings[row, :, second] - readings[row, :, first]).amax(-1)
            return ahead, torch.zeros_like(ahead)

        ends = readings.amin(1), readings.amax(1)
        found = certain_order(size * raw, ends, asked, compare, 4, scale=size * raw.abs().amax(-1))
        orders.append(found.sources.tolist())
    assert orders[0] == orders[1] == orders[2] and len(set(orders[0])) > 2


def test_pairs_are_ordered_where_their_ends_do_not_overlap():
    possible, _, asked = possible_rows(0)
    lower, upper = possible.amin(1).round(), possible.amax(1).round()  # some touch
    found = ordered_share(lower, upper, asked)
    for row in range(40):
        sources = asked[row].nonzero()[:, 0].tolist()
        pairs = [(one, other) for one in sources for other in sources if one < other]
        apart = [lower[row, i] >= upper[row, j] or lower[row, j] >= upper[row, i] for i, j in pairs]
        assert float(found[row]) == pytest.approx(np.mean(apart))


def test_means_over_texts_leave_out_what_is_missing():
    numbers = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    numbers[2:5, 1] = torch.nan
    numbers[1:, 2] = torch.nan
    numbers[:, 3] = torch.nan
    mean, error = mean_over_texts(numbers)
    for place in range(4):
        known = numbers[:, place][~numbers[:, place].isnan()].numpy()
        expected = [known.mean() if len(known) else np.nan, sem(known) if len(known) > 1 else np.nan]
        assert [float(mean[place]), float(error[place])] == pytest.approx(expected, nan_ok=True)
