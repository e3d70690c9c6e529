"""Correlation of two maps, per head and over all, against numpy."""

import numpy as np
import pytest
import torch

from identikit.maths.measures import pearson, pearson_sums


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
