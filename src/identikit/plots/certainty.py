"""Plots of how certain attention is over a dataset, from the tables that `identikit attention --intervals` writes."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from pandas import DataFrame

from identikit.checks import shortened
from identikit.errors import InputError
from identikit.plots.forms import Panels, add_footer, new_axes
from identikit.plots.reading import axes_for
from identikit.plots.style import (
    BLACK,
    BLUE,
    DOUBLE,
    ORANGE,
    RED,
    SINGLE,
    SKY,
    house_style,
    layer_axis,
    legend,
    percent,
    sheet_of,
)

WEIGHTS = ["raw", "effective", "lower", "upper"]
GROUPS = {
    "special": "special tokens",
    "first": "the first token",
    "cls": "[CLS]",
    "sep": "[SEP]",
    "punctuation": "periods and commas",
}


def mean_over_rows(table: DataFrame, columns: list[str], by: list[str]) -> DataFrame:
    """Average columns that are means over `rows` again, by the columns `by`; NaN where no row was drawn."""
    weighted = table.filter([*by, "rows"]).assign(**{name: table[name] * table["rows"] for name in columns})
    sums: Any = weighted.groupby(by, as_index=False).sum()
    rows = sums["rows"].where(sums["rows"] > 0)
    return sums.assign(**{name: sums[name] / rows for name in columns})


def head_means(groups: DataFrame, group: str) -> DataFrame:
    """Return what a group of keys receives from each head, and the size of its values, averaged over texts."""
    there = list(dict.fromkeys(groups["group"]))
    if group not in there:
        raise InputError(
            f"Cannot draw sinks: group={shortened(group)} is not in the table, which has {', '.join(there)}."
        )
    part: Any = groups[groups["group"] == group]
    sizes: Any = part.groupby(["layer", "head"], as_index=False)["value_size"].mean()
    return mean_over_rows(part, WEIGHTS, ["layer", "head"]).merge(sizes, on=["layer", "head"])


def certain_mass_by_length(
    intervals: DataFrame,
    d_value: int,
    ax: Axes | None = None,
    *,
    correlation: DataFrame | None = None,
    footer: str = "",
) -> Axes:
    """Draw the certain mass of texts by their length, a point per text, from the table `intervals`.

    Certain mass is the weight that all attention with the same output agrees on. With the table `correlation`, that of
    raw with effective attention stands beside it. Up to the line, at `d_value` tokens, everything is certain.
    """
    texts = mean_over_rows(intervals, ["certain_mass"], ["text", "tokens"])
    look: dict[str, Any] = {"s": 9, "alpha": 0.6, "linewidths": 0}
    with house_style():
        axes = axes_for(ax, SINGLE, 2.7)
        if correlation is not None:
            points = correlation["tokens"], correlation["pearson"]
            axes.scatter(*points, color=BLUE, marker="o", label="Pearson, raw with effective", **look)
        axes.scatter(texts["tokens"], texts["certain_mass"], color=ORANGE, marker="s", label="certain mass", **look)
        axes.axvline(d_value, color=RED, linestyle="--", linewidth=0.9, label=f"size of a value vector: {d_value}")
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
        axes.set(
            xlabel="tokens in the text", ylabel="certain mass" if correlation is None else "correlation, certain mass"
        )
        axes.set_ylim(top=1.03)
        legend(axes, columns=1)
        add_footer(sheet_of(axes), footer)
    return axes


def sinks(
    groups: DataFrame,
    group: str = "first",
    *,
    layer: int | None = None,
    axes: Iterable[Axes] | None = None,
    footer: str = "",
) -> Panels:
    """Draw what a sink receives and how large its values are, from the table `groups`; return two axes.

    (a) The raw attention to the group, its range over all attention with the same output, and its effective attention,
    by layer, averaged over heads and texts. (b) The size of its values against the median of the other keys, a point
    per head. With `layer`, both are by head of that layer.
    """
    heads: Any = head_means(groups, group)
    if layer is not None:
        if layer not in heads["layer"].tolist():
            raise InputError(f"Cannot draw sinks: layer={layer} is not in the table.")
        heads = heads[heads["layer"] == layer]
    given = None if axes is None else np.array([*axes], dtype=object).view(Panels)
    if given is not None and len(given) != 2:
        raise InputError(f"Cannot draw sinks: axes= has {len(given)} axes, and two are needed.")
    x = "layer" if layer is None else "head"
    where = "" if layer is None else f" in layer {layer}"
    with house_style():
        panels = new_axes(DOUBLE, 2.6, columns=2) if given is None else given
        mass_band(panels[0], heads, x=x)
        legend(panels[0], columns=3, title=f"(a) attention to {GROUPS[group]}{where}")
        value_points(panels[1], heads, x=x)
        legend(panels[1], columns=2, title=f"(b) size of values of {GROUPS[group]}{where}")
        for one in panels:
            layer_axis(one.xaxis, sorted(set(heads[x])), x)
        add_footer(sheet_of(panels[0]), footer)
    return panels


def mass_band(axes: Axes, heads: DataFrame, *, x: str) -> None:
    """Draw raw attention, its range as a band, and effective attention, averaged by x; heads are not joined."""
    means: Any = mean_over_rows(heads.dropna(subset=WEIGHTS), WEIGHTS, [x])
    places = means[x].to_numpy(float)
    look: dict[str, Any] = {"color": SKY, "alpha": 0.45, "linewidth": 0, "label": "possible [min, max]"}
    lines = ("-", "--") if x == "layer" else ("", "")
    if x == "layer":
        axes.fill_between(places, means["lower"], means["upper"], **look)
    else:
        axes.bar(places, means["upper"] - means["lower"], 0.6, means["lower"], **look)
    axes.plot(places, means["raw"], color=BLACK, linestyle=lines[0], marker="o", label="raw")
    axes.plot(places, means["effective"], color=RED, linestyle=lines[1], marker="s", label="effective")
    axes.set_ylabel("attention (%)")
    axes.set_ylim(bottom=min(0.0, 1.05 * float(means["effective"].min())))
    percent(axes.yaxis)


def value_points(axes: Axes, heads: DataFrame, *, x: str) -> None:
    """Draw the size of a group's values against the others', a point per head; a line joins the medians."""
    known = heads.dropna(subset="value_size")
    look: dict[str, Any] = {"s": 7, "alpha": 0.45, "linewidths": 0, "label": "head"}
    axes.scatter(known[x], known["value_size"], color=BLUE, **look)
    if x == "layer":
        medians = known.groupby(x)["value_size"].median()
        axes.plot(medians.index, medians, color=BLUE, marker="o", label="median of heads")
    axes.axhline(1.0, color=BLACK, linewidth=0.6)
    axes.set_ylabel("size / median of others")
    axes.set_ylim(bottom=0)
