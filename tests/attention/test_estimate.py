"""Standard errors of drawn rows: in made-up populations, two of them hold the truth in at least 93 % of draws.

Of shares the chance is computed; of other values 200 draws are simulated.
"""

import pytest
import torch
from scipy.stats import hypergeom

from identikit.attention.estimate import estimated

DRAWS = 200


def population(name: str, size: int) -> torch.Tensor:
    """Values of 0 to 1: skewed towards an end, spread evenly, or few low ones."""
    generator = torch.Generator().manual_seed(size)
    even = torch.rand(size, generator=generator, dtype=torch.float64)
    values = {
        "near 0": even**8,
        "near 1": 1 - even**8,
        "even": even,
        "a low tail": torch.where(torch.arange(size) < max(1, size // 12), 0.1, 0.95 + 0.05 * even),
    }
    return values[name]


@pytest.mark.parametrize("size", [6, 20, 64, 300])
@pytest.mark.parametrize("name", ["near 0", "near 1", "even", "a low tail"])
def test_two_standard_errors_hold_the_truth(name: str, size: int):
    values = population(name, size)
    rows = size + 10  # ten are not free, and 1
    true = (float(values.sum()) + 10) / rows
    for drawn in (1, 2, 3, 5, 12, 40, 60, 100):
        if drawn >= size:
            continue
        draws = [values[torch.randperm(size, generator=_seeded(draw))[:drawn]] for draw in range(DRAWS)]
        found = estimated(torch.full((DRAWS,), 10.0), draws, torch.full((DRAWS,), size), rows)
        within = (found.mean - true).abs() <= 2 * found.stderr + 1e-12
        assert float(within.double().mean()) >= 0.93, (drawn, float(within.double().mean()))
        assert (found.least - 1e-9 <= true).all() and (true <= found.most + 1e-9).all()
        spread = float(found.mean.std()) / DRAWS**0.5
        assert abs(float(found.mean.mean()) - true) <= 4 * spread + 1e-9  # it is not biased


def _seeded(draw: int) -> torch.Generator:
    return torch.Generator().manual_seed(draw)


def test_rows_that_are_all_known_have_no_error():
    found = estimated(torch.tensor([3.0]), [torch.tensor([0.5, 0.25])], torch.tensor([2]), 5)
    assert found.mean.tolist() == found.least.tolist() == found.most.tolist() == [0.75] and not found.stderr.any()
    assert found.words(lambda share: f"{share:.2f}") == ["0.75"]


@pytest.mark.parametrize("size", [5, 6, 10, 20, 40, 64, 150, 300])
def test_two_standard_errors_hold_a_share(size: int):
    """Over every number of rows in which it may hold, the exact chance that what is said of m rows holds the share."""
    for drawn in sorted({1, 2, 3, 4, 5, 6, 8, 12, 20, 30, 40, 60, 100, 200, size - 4, size - 2, size - 1}):
        if not 0 < drawn < size:
            continue
        samples = [(torch.arange(drawn) < holding).double() for holding in range(drawn + 1)]
        count = torch.full((drawn + 1,), size)
        found = estimated(torch.zeros(drawn + 1, dtype=torch.float64), samples, count, size)
        for holding in {*range(min(size, 12)), size // 4, size // 3, size // 2}:
            chance = torch.from_numpy(hypergeom.pmf(range(drawn + 1), size, holding, drawn))
            within = (found.mean - holding / size).abs() <= 2 * found.stderr + 1e-12
            assert float(chance[within].sum()) >= 0.93, (holding, drawn)
