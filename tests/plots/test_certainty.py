"""Plots of how certain attention is: from tables alone, and what is drawn is what they hold."""

import numpy as np
import pytest
from matplotlib.axes import Axes
from pandas import DataFrame

from identikit import plots
from identikit.attention.certainty import head_means
from identikit.errors import InputError
from identikit.plots.certainty import mass_band, value_points
from identikit.plots.forms import new_axes
from identikit.plots.style import sheet_of
from tests.plots.test_plots import check_layout

WEIGHTS = {"raw": 0.4, "effective": -0.01, "lower": 0.3, "upper": 0.6}


def groups(layers: int = 3, heads: int = 4) -> DataFrame:
    """Two texts; in the second every weight is half of that in the first, and has three times the rows."""
    return DataFrame(
        {"text": text, "tokens": 50, "layer": layer, "head": head, "group": "first", "rows": 1 + 2 * text}
        | {name: weight * (1 + layer) / layers / (1 + text) for name, weight in WEIGHTS.items()}
        | {"value_size": 0.1 * (1 + head)}
        for text in range(2)
        for layer in range(layers)
        for head in range(heads)
    )


def drawn(table: DataFrame, group: str = "first") -> tuple[Axes, Axes]:
    """What a group of keys receives, and how large its values are."""
    mass, values = new_axes(columns=2)
    mass_band(mass, head_means(table, group))
    value_points(values, head_means(table, group))
    return mass, values


def test_sinks_by_layer():
    mass, values = drawn(groups())
    mean = np.array([1, 2, 3]) / 3 * (1 + 3 * 0.5) / 4  # over rows
    raw, effective = mass.get_lines()
    np.testing.assert_allclose(raw.get_ydata(), 0.4 * mean)
    np.testing.assert_allclose(effective.get_ydata(), -0.01 * mean)
    band = mass.collections[0].get_paths()[0].vertices
    np.testing.assert_allclose(sorted({*np.round(band[:, 1], 9)}), sorted({*np.round([*0.3 * mean, *0.6 * mean], 9)}))
    assert mass.get_ylim()[0] < -0.01 * mean.max()
    assert len(values.collections[0].get_offsets()) == 12
    np.testing.assert_allclose(values.get_lines()[0].get_ydata(), [0.25] * 3)  # the median of 0.1 to 0.4
    check_layout(sheet_of(mass))


def test_heads_without_rows_are_left_out():
    table = groups()
    unseen = table["layer"] == 1
    table.loc[unseen, ["rows", *WEIGHTS]] = [0, *[np.nan] * 4]
    mass, values = drawn(table)
    assert list(mass.get_lines()[0].get_xdata()) == [0, 2]
    assert len(values.collections[0].get_offsets()) == 12  # values need no rows
    with pytest.raises(InputError, match="group='cls' is not known: use 'first'"):
        drawn(table, "cls")


def test_certain_mass_is_the_mean_over_a_texts_rows():
    heads = DataFrame({"text": [0, 0, 1], "tokens": [40, 40, 20], "rows": [1, 3, 2], "certain_mass": [0.8, 0.4, 1.0]})
    axes = plots.certain_mass_by_length(heads, 32)
    np.testing.assert_allclose(sorted(axes.collections[0].get_offsets().tolist()), [[20, 1.0], [40, 0.5]])
    assert list(axes.get_lines()[0].get_xdata()) == [32, 32]
    pearson = DataFrame({"tokens": [40, 20], "pearson": [0.3, 1.0]})
    both = plots.certain_mass_by_length(heads, 32, correlation=pearson)
    alone = plots.correlation_by_length(pearson, 32)
    for drawn in (both, alone):
        np.testing.assert_allclose(drawn.collections[0].get_offsets(), pearson)
        assert list(drawn.get_lines()[0].get_xdata()) == [32, 32]
    check_layout(sheet_of(both))
