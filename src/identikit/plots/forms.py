"""Drawing forms: each puts the numbers of a tidy table, unchanged, on the axes of a sheet."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from pandas import DataFrame

from identikit.plots.style import (
    GREY,
    ORANGE,
    SINGLE,
    SMALL,
    YELLOW,
    Style,
    footer,
    heat_colours,
    house_style,
    percent,
    sheet_of,
)

Panel = Callable[[Axes], None]
"""Draws on the axes it is given."""

Styles = Mapping[Any, Style]
"""How each series looks, by its values in the columns that tell series apart."""


def sheet(
    label: str, *panels: Panel, width: float = SINGLE, height: float = 2.6, columns: Sequence[int] | None = None
) -> Figure:
    """Return a figure with panels side by side, `label` small at its foot; sizes in inches.

    `columns` are the relative widths of the columns, by default one for each panel; panels fill row after row.
    """
    columns = columns or [1] * len(panels)
    with house_style():
        layout = ConstrainedLayoutEngine()
        figure = Figure(figsize=(width, height), layout=layout)
        grid = figure.subplots(len(panels) // len(columns), len(columns), squeeze=False, width_ratios=columns)
        for axes, panel in zip(grid.flat, panels, strict=True):
            panel(axes)
            if not axes.has_data():
                axes.text(0.5, 0.5, "nothing to show", ha="center", va="center", color=GREY, transform=axes.transAxes)
        figure.supxlabel(footer(label, width), fontsize=SMALL, color=GREY)
        for _ in range(2):  # the first round may change which ticks there are, and with them the room they need
            layout.execute(figure)
        figure.set_layout_engine("none")  # saving must not move anything
    return figure


def save(figure: Figure) -> tuple[bytes, bytes]:
    """Return a figure as PNG, at 200 dots an inch, and as SVG; the same figure gives the same bytes."""
    png, svg = io.BytesIO(), io.BytesIO()
    with house_style():
        figure.savefig(png, format="png", dpi=200, metadata={"Software": None})
        figure.savefig(svg, format="svg", dpi=200, metadata={"Date": None, "Creator": None})
    return png.getvalue(), svg.getvalue()


def lines(axes: Axes, frame: DataFrame, series: Styles, *, by: Sequence[str], x: str, y: str) -> None:
    """Draw a line for each series that the table has; `by` are the columns that tell series apart."""
    parts = dict(iter(frame.groupby(list(by), sort=False)))
    for key, style in series.items():
        if key in parts:
            part = parts[key].sort_values(x)
            axes.plot(
                part[x],
                part[y],
                color=style.colour,
                linestyle=style.line,
                marker=style.marker,
                markerfacecolor=style.colour if style.filled else "white",
                markeredgewidth=0.8,
                markevery=max(1, len(part) // 15),
                label=style.label,
            )


def clouds(axes: Axes, frame: DataFrame, series: Styles, *, by: str, x: str, y: str) -> None:
    """Draw the points of each series around each place on x, side by side, so that none hides another."""
    shifts = np.linspace(-0.2, 0.2, len(series)) if len(series) > 1 else [0.0]
    for (key, style), shift in zip(series.items(), shifts, strict=True):
        part = frame[frame[by] == key[0]]
        axes.scatter(part[x] + shift, part[y], s=7, color=style.colour, marker=style.marker, alpha=0.45, linewidths=0)


def scatter(axes: Axes, frame: DataFrame, style: Style, *, x: str, y: str) -> None:
    """Draw one point for each row."""
    axes.scatter(frame[x], frame[y], s=9, color=style.colour, marker=style.marker, alpha=0.6, linewidths=0)


def boxes(axes: Axes, frame: DataFrame, places: Sequence[int]) -> None:
    """Draw a box for each row, from its columns low, lower, median, upper and high; the median is orange."""
    names = {"low": "whislo", "lower": "q1", "median": "med", "upper": "q3", "high": "whishi"}
    whole = frame.assign(place=list(places)).dropna(subset=list(names))
    if whole.empty:
        return
    thin = {"linewidth": 0.8}
    drawn = axes.bxp(
        whole.rename(columns=names).to_dict("records"),
        positions=whole["place"].tolist(),
        widths=0.6,
        showfliers=False,
        manage_ticks=False,
        boxprops=thin,
        whiskerprops=thin,
        capprops=thin,
        medianprops={"linewidth": 1.6, "color": ORANGE},
    )
    for part in ("boxes", "medians", "whiskers"):
        for line in drawn[part]:
            line.set_label(f"_{part}")
    axes.set_ylim(bottom=0)


def bars(axes: Axes, frame: DataFrame, *, x: str, y: str, colour: str) -> None:
    """Draw an upright bar for each row."""
    axes.bar(frame[x], frame[y], width=0.7, color=colour)


def level_bars(axes: Axes, frame: DataFrame, *, x: str, y: str, colour: str) -> None:
    """Draw a level bar for each row, at y and as long as x."""
    axes.barh(frame[y], frame[x], height=0.7, color=colour)


def heat_map(axes: Axes, table: DataFrame, *, label: str, greatest: float | None = None) -> None:
    """Draw a table of shares as cells, with a scale in per cent on which zero has the same colour in every map.

    Above `greatest`, if given, the colour stays the same.
    """
    cells = table.to_numpy(float)
    least, most = float(np.nanmin(cells, initial=0.0)), float(np.nanmax(cells, initial=0.0))
    top = most if greatest is None else greatest
    reach = max(-least, top) or 1.0
    look = {"cmap": heat_colours(), "vmin": -reach, "vmax": reach, "aspect": "auto", "interpolation": "nearest"}
    image = axes.imshow(cells, **look)
    axes.grid(visible=False)
    scale = {"pad": 0.01, "fraction": 0.03, "aspect": 30, "extend": "max" if most > top else "neither"}
    bar = sheet_of(axes).colorbar(image, ax=axes, **scale)
    bar.ax.set_ylim(least, top or 1.0)
    bar.ax.tick_params(labelsize=SMALL, width=0.4, length=2)
    percent(bar.ax.yaxis)
    bar.set_label(label)


def crosshair(axes: Axes, *, x: int, y: int) -> None:
    """Lead yellow lines from a cell of a heat map to the labels of its row and its column."""
    left, bottom = axes.get_xlim()[0], axes.get_ylim()[0]
    for across, down in (([left, x - 0.5], [y, y]), ([x, x], [y + 0.5, bottom])):
        axes.plot(across, down, color=YELLOW, linewidth=0.8, marker="", label="_crosshair")


def outline(axes: Axes, column: int, *, colour: str) -> None:
    """Frame a column of a heat map."""
    bottom, top = sorted(axes.get_ylim())
    frame = Rectangle(
        (column - 0.5, bottom), 1, top - bottom, fill=False, edgecolor=colour, linewidth=1.2, clip_on=False
    )
    axes.add_patch(frame)
