"""Readings of contributions against loops, and statistics that merge to the last bit."""

from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.cbook import boxplot_stats

from identikit.errors import InputError
from identikit.maths import mixing
from tests.reference import attribution as reference


def contributions(n: int, *, layers: int = 3, causal: bool = False, seed: int = 0) -> torch.Tensor:
    drawn = torch.rand(layers, n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3
    drawn = drawn.triu() if causal else drawn  # rows are inputs: what comes later contributes nothing
    return drawn / drawn.sum(1, keepdim=True)


lengths = st.integers(1, 16)
seeds = st.integers(0, 10_000)
few = settings(max_examples=25)


@few
@given(lengths, seeds)
def test_own_contribution_and_who_is_outweighed(n, seed):
    found = contributions(n, seed=seed)
    own = mixing.own_contribution(found)
    lost = mixing.outweighed(found)
    for layer in range(3):
        for token in range(n):
            assert own[layer, token] == found[layer, token, token]
            others = [found[layer, source, token] for source in range(n) if source != token]
            assert lost[layer, token] == any(other > found[layer, token, token] for other in others)


def test_a_token_that_is_equalled_is_not_outweighed():
    assert not mixing.outweighed(torch.full((1, 2, 2), 0.5)).any()


@few
@given(lengths, seeds, st.booleans())
def test_neighbour_groups_are_means_over_the_neighbours_there_are(n, seed, causal):
    found = contributions(n, causal=causal, seed=seed)
    groups = mixing.neighbour_groups(found, causal=causal)
    for group, (first, last) in enumerate(mixing.GROUPS):
        for layer in range(3):
            for token in range(n):
                expected = reference.neighbour_group(found[layer], token, first, last or n, causal)
                value = float(groups[layer, group, token])
                assert np.isnan(value) if expected is None else value == pytest.approx(expected, rel=1e-12)


@few
@given(lengths, seeds, st.booleans())
def test_offsets_are_sums_over_pairs(n, seed, causal):
    found = contributions(n, causal=causal, seed=seed)
    offsets = mixing.by_offset(found, causal=causal)
    assert offsets.positions.tolist() == list(range(1 - n, n))
    for layer in range(3):
        sums, pairs = reference.by_offset(found[layer], causal)
        total = sum(sums.values())
        for index, offset in enumerate(offsets.positions.tolist()):
            assert offsets.pairs[index] == pairs.get(offset, 0)
            assert offsets.share()[layer, index] == pytest.approx(
                sums.get(offset, 0.0) / total if total else 0.0, abs=1e-9
            )
            if offset in pairs:
                assert offsets.mean()[layer, index] == pytest.approx(sums[offset] / pairs[offset], abs=1e-10)
            else:
                assert offsets.mean()[layer, index].isnan()


@few
@given(st.integers(2, 12), seeds, st.data())
def test_contributions_to_one_token_around_any_centre(n, seed, data):
    token = data.draw(st.integers(0, n - 1))
    centre = data.draw(st.integers(0, n - 1))
    found = contributions(n, seed=seed)
    offsets = mixing.to_token(found, token, centre=centre)
    places = offsets.positions.tolist()
    assert offsets.pairs.sum() == n - 1
    for source in range(n):
        index = places.index(source - centre)
        assert offsets.pairs[index] == (source != token)
        if source != token:
            assert offsets.mean()[1, index] == pytest.approx(float(found[1, source, token]), abs=1e-10)


def test_the_three_layers_shown():
    assert mixing.first_middle_last(12) == (0, 5, 11)
    assert mixing.first_middle_last(6) == (0, 2, 5)
    assert mixing.first_middle_last(1) == (0, 0, 0)


def texts() -> list[mixing.Mixing]:
    """Texts of many lengths; some have no [CLS], no [SEP]."""
    found = []
    for seed, n in enumerate((1, 2, 5, 13, 30, 8)):
        separator = n // 2 if seed not in (1, 3) else None
        cls = None if seed == 3 else 0
        found.append(mixing.mixing(contributions(n, seed=seed), causal=False, cls=cls, separator=separator))
    return found


def flat(statistics: mixing.Mixing) -> dict[str, torch.Tensor]:
    parts = {}
    for name, value in statistics._asdict().items():
        for key, part in enumerate(value if isinstance(value, tuple) else [value]):
            parts[f"{name} {key}"] = part
    return parts


@few
@given(st.permutations(range(6)), st.integers(0, 6))
def test_merging_is_exact_whatever_the_order_and_the_shards(order, cut):
    found = texts()
    shards = [[found[index] for index in part] for part in (order[:cut], order[cut:]) if part]
    merged = flat(reduce(mixing.Mixing.merge, [reduce(mixing.Mixing.merge, shard) for shard in shards]))
    expected = flat(reduce(mixing.Mixing.merge, found))
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], expected[name]) for name in expected)


def test_readings_over_texts():
    """Every reading of the merged statistics, against the numbers of all texts in one pot."""
    lengths = (1, 2, 5, 13, 30, 8)
    merged = reduce(mixing.Mixing.merge, texts())
    found = [contributions(n, seed=seed) for seed, n in enumerate(lengths)]
    own = torch.cat([mixing.own_contribution(one) for one in found], dim=1)
    expected = np.quantile(own.numpy(), (0.25, 0.5, 0.75), axis=1).T
    np.testing.assert_allclose(mixing.own_boxes(own)[:, 1:4].numpy(), expected, atol=0.51 / mixing.BINS)
    groups = torch.cat([mixing.neighbour_groups(one, causal=False) for one in found], dim=2).nanmean(2)
    np.testing.assert_allclose(merged.group_shares().numpy(), (groups / groups.sum(0)).numpy(), atol=1e-9)


def test_tags_are_ordered_by_the_last_layers_median_and_then_by_name():
    own = torch.tensor([[0.9, 0.1, 0.8, 0.2, 0.3, 0.2]] * 2)
    for tags, order in ((["DT", "NN", "DT", "NN", "NN", "AA"], ["DT", "AA", "NN"]), ([*"BADCEF"], [*"BDECFA"])):
        assert list(mixing.tag_boxes(own, tags)) == order
    turned = torch.cat([own.flip(1), own])  # all tags have another place in the first layer
    assert list(mixing.tag_boxes(turned, ["DT", "NN", "DT", "NN", "NN", "AA"])) == ["DT", "AA", "NN"]
    found = mixing.tag_boxes(own, ["DT", "NN", "DT", "NN", "NN", "AA"])
    assert found["NN"][1, 2] == pytest.approx(0.2, abs=1e-4)
    assert found["DT"][0].tolist() == pytest.approx([0.8, 0.825, 0.85, 0.875, 0.9], abs=1e-4)


@few
@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.floats(0, 1))
def test_quantiles_of_binned_numbers(numbers, level):
    counts = torch.bincount((torch.tensor(numbers, dtype=torch.float64) * 100).long().clamp(max=99), minlength=100)
    assert mixing.quantiles(counts, (level,)).item() == pytest.approx(np.quantile(numbers, level), abs=0.0051)


@few
@given(st.lists(st.integers(28, 33), min_size=1, max_size=40), st.lists(st.integers(0, 63), max_size=3))
def test_boxes_are_those_that_are_drawn(many, far):
    """Numbers in the middle of their bins, so nothing is rounded; the reference is matplotlib's own."""
    bins = many + far  # of which some are beyond the whiskers
    found = mixing.boxes(torch.bincount(torch.tensor(bins), minlength=64))
    drawn = boxplot_stats((np.array(bins) + 0.5) / 64)[0]
    assert found.tolist() == [drawn[key] for key in ("whislo", "q1", "med", "q3", "whishi")]


def test_quantiles_of_nothing():
    assert mixing.quantiles(torch.zeros(2, 100, dtype=torch.long), (0.5,)).isnan().all()
    assert mixing.boxes(torch.zeros(2, 100, dtype=torch.long)).isnan().all()


def test_mistakes_are_told():
    with pytest.raises(InputError, match="4 tokens by tag: got 2 tags"):
        mixing.tag_boxes(torch.ones(2, 4), ["NN", "VB"])
    with pytest.raises(InputError, match="of 3 and of 2 layers"):
        mixing.mixing(contributions(4), causal=False).merge(mixing.mixing(contributions(4, layers=2), causal=False))
