"""The yardstick for determined weight: rows whose values are shuffled, against linear programs written out."""

from typing import Any

import numpy as np
import pytest
import torch

import identikit as ik
from identikit.attention.estimate import RowSample
from identikit.attention.sample import sample_rows
from identikit.attention.yardstick import shuffled_rows
from tests.models import tiny
from tests.reference import intervals as reference

TEXT = "w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 w11 w12 w13 w14 w15 w16"


def literal(attention: Any, sample: RowSample, seed: int) -> list[float]:
    """The determined share of each shuffled row: the sum of what one linear program per key gives."""
    places = sorted(map(tuple, sample.bounded.places.tolist()))
    generator = torch.Generator().manual_seed(seed)
    count = min(64, len(places) // 20)
    chosen = sorted(places[index] for index in torch.randperm(len(places), generator=generator)[:count].tolist())
    shares = []
    for layer, head, query in chosen:
        call = attention.source.layers[layer].call
        seen = attention.array("visible")[layer, query].nonzero()[:, 0]
        row = attention.raw[layer, head, query, seen].double()
        row = (row / row.sum())[torch.randperm(len(seen), generator=generator)].numpy()
        values = call.value[0, head // call.groups, seen].double().numpy()
        least = [float(reference.optimum(unit, row, values) @ unit) for unit in np.eye(len(seen))]
        shares.append(sum(least))
    return shares


@pytest.fixture(scope="module", params=["bert", "llama"])
def sampled(request: pytest.FixtureRequest) -> tuple[Any, RowSample]:
    attention = ik.effective_attention(tiny.loaded(request.param), TEXT)
    return attention, sample_rows(attention, [[0]], seconds=None, seed=0)


def test_shuffled_rows_are_bounded_exactly(sampled: tuple[Any, RowSample]):
    attention, sample = sampled
    found = shuffled_rows(attention, sample, seed=3)
    assert found is not None
    shares = literal(attention, sample, 3)
    assert found["rows"] == len(shares) >= 8
    assert found["shuffled"] == pytest.approx(np.mean(shares), abs=1e-6)
    assert found["shuffled_stderr"] == pytest.approx(np.std(shares, ddof=1) / len(shares) ** 0.5, abs=1e-6)
    assert found["mass"] != pytest.approx(found["shuffled"], abs=1e-6)  # the rows themselves have another share


def test_few_rows_give_no_yardstick(sampled: tuple[Any, RowSample]):
    attention, sample = sampled
    few = sample._replace(bounded=sample.bounded.select(torch.arange(159)))
    assert shuffled_rows(attention, few, seed=0) is None


def test_the_order_in_which_rows_were_bounded_changes_nothing(sampled: tuple[Any, RowSample]):
    attention, sample = sampled
    order = torch.randperm(len(sample.bounded.places), generator=torch.Generator().manual_seed(5))
    other = sample._replace(bounded=sample.bounded.select(order))
    assert shuffled_rows(attention, other, seed=3) == shuffled_rows(attention, sample, seed=3)
