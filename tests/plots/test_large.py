"""A plot reads what it draws and nothing else, so results of any size are drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import identikit as ik
from identikit import plots
from identikit.attention.result import AttentionIntervals, EffectiveAttention
from identikit.plots import maps
from identikit.results.result import LARGEST, Result
from tests.models import tiny
from tests.plots.made_up import EDGE, PROVENANCE, attribution, axes_of, identity
from tests.plots.test_plots import check_layout, images, titles

WIDE = 2048
CELLS = 64  # of a map in each direction, at most; fewer than for users


@pytest.fixture(autouse=True)
def small_maps(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(maps, "MOST_CELLS", CELLS)


@dataclass(frozen=True)
class Counting:
    """A source that notes how many entries it is asked for; it makes the weights that `weight` says."""

    dims: Mapping[str, tuple[str, ...]]
    reads: list[tuple[str, int]] = field(default_factory=list)

    def read(self, name: str, places: Mapping[str, Sequence[int]]) -> torch.Tensor:
        shape = [len(places[dim]) for dim in self.dims[name]]
        self.reads.append((name, int(np.prod(shape))))
        if name == "visible":
            return torch.tensor(places["key"]) <= torch.tensor(places["query"])[:, None].expand(shape)
        if self.dims[name] != EDGE:
            return torch.arange(np.prod(shape)).reshape(shape) / float(np.prod(shape))
        return weight(torch.tensor(places["query"])[:, None], torch.tensor(places["key"])).expand(shape)


def weight(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A weight between -1 and 1 for each query and key that no other pair near it has."""
    return ((query * 7919 + key * 104729) % 2003) / 1001.5 - 1


ARRAYS = {
    **dict.fromkeys(("raw", "effective", "null", "lower", "upper"), EDGE),
    "visible": ("layer", "query", "key"),
    **dict.fromkeys(("reachable_dim", "null_dim", "certain_mass"), EDGE[:3]),
    "pearson": EDGE[:2],
}


def large(kind: type[Result] = EffectiveAttention, n: int = WIDE) -> tuple[Result, list[tuple[str, int]]]:
    """A result of 32 × 32 heads, and what is read from it."""
    source = Counting(ARRAYS)
    axes = axes_of(EDGE, {"layer": 32, "head": 32}, [f"t{place}" for place in range(n)])
    return kind(axes, source, PROVENANCE), source.reads


@pytest.mark.parametrize(("by", "entries"), [("pearson", 32 * 32), ("null_dim", 32 * 32 * WIDE)])
def test_a_grid_of_heads_reads_one_array(by: str, entries: int):
    result, reads = large()
    assert 32 * 32 * WIDE**2 > LARGEST
    axes = result.plot(by=by)
    assert reads == [(by, entries)]
    assert images([axes])[0].shape == (32, 32)
    check_layout(axes.get_figure(root=True))


@pytest.mark.parametrize(
    ("kind", "names", "n"),
    [
        (EffectiveAttention, ("raw", "effective", "null", "visible"), 3 * CELLS + 1),
        (AttentionIntervals, ("raw", "lower", "upper"), 4 * CELLS),
    ],
)
def test_maps_of_a_long_text_are_read_in_parts_and_say_so(kind: type[Result], names: tuple[str, ...], n: int):
    result, reads = large(kind, n)
    drawn = result.sel(layer=3, head=5).plot()
    assert {name for name, _ in reads} == set(names)
    assert max(entries for _, entries in reads) <= CELLS**2
    assert sum(entries for _, entries in reads) == len(names) * n * n
    step = -(-n // CELLS)
    for axes, cells in zip(drawn, images(drawn), strict=True):
        assert cells.shape == (-(-n // step),) * 2
        assert axes.get_xlabel() == f"key (cells: largest of {step} × {step})"
        assert axes.get_xlim() == (-0.5, n - 0.5) and axes.get_ylim() == (n - 0.5, -0.5)
    places = torch.arange(n)
    whole = weight(places[:, None], places).numpy()
    hidden = whole == 0 if kind is AttentionIntervals else ~np.tri(n, dtype=bool)
    np.testing.assert_allclose(images(drawn)[0], slow_largest(np.where(hidden, np.nan, whole), step), rtol=1e-6)
    check_layout(drawn[0].figure)


def slow_largest(cells: np.ndarray, step: int) -> np.ndarray:
    count = -(-len(cells) // step)
    found = np.full((count, count), np.nan)
    for row in range(count):
        for column in range(count):
            block = cells[row * step : (row + 1) * step, column * step : (column + 1) * step]
            known = block[~np.isnan(block)]
            if len(known):
                found[row, column] = known[np.abs(known).argmax()]
    return found


def test_one_selected_row_of_a_long_text_is_a_map_of_one_row():
    result, reads = large()
    drawn = result.sel(layer=3, head=5, query=9).plot(maps=["raw"])
    assert reads == [("raw", WIDE), ("visible", WIDE)] and titles(drawn) == ["L3H5 raw"]


def test_bars_read_one_row_of_what_stands_beside_them():
    row, reads = large(AttentionIntervals)
    beside, read_beside = large()
    plots.interval_bars(row.sel(layer=1, head=2, query=700), beside)
    assert reads == [("raw", WIDE), ("lower", WIDE), ("upper", WIDE)] and read_beside == [("effective", WIDE)]


def test_contributions_of_a_long_text_keep_the_scale_of_the_context():
    n = CELLS + 8
    made = attribution(tokens=[f"t{place}" for place in range(n)]).sel(layer=1)
    axes = plots.attribution_map(made)
    cells = made.contribution.T.numpy()
    np.testing.assert_array_equal(images([axes])[0], slow_largest(cells, 2))
    assert axes.get_images()[0].norm.vmax == cells[~np.eye(n, dtype=bool)].max()
    assert axes.get_xlabel() == "input token (cells: largest of 2 × 2)"
    check_layout(axes.get_figure(root=True))


def test_only_named_arrays_are_read():
    result, reads = large()
    data = result.sel(layer=[0, 1], head=3).to_xarray("pearson", "null_dim")
    assert set(data.data_vars) == {"pearson", "null_dim"} and [name for name, _ in reads] == ["pearson", "null_dim"]
    with pytest.raises(ik.InputError, match="has no array 'weight'"):
        identity().to_xarray("weight")


def test_a_notebook_reads_no_array_that_it_does_not_show(monkeypatch: pytest.MonkeyPatch):
    result = ik.effective_attention(tiny.loaded("bert"), "w5 w6 w7 w8")
    names = []
    read = type(result.source).read

    def noted(source: Any, name: str, places: Any) -> torch.Tensor:
        names.append(name)
        return read(source, name, places)

    monkeypatch.setattr(type(result.source), "read", noted)
    assert "<img" in result._repr_html_()
    assert "pearson" in names and not {"reachable_dim", "polytope_dim", "raw", "effective", "null"} & set(names)
