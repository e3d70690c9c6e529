"""Plots of readings of attention with their ranges: roles of heads, rows of a measure, and its maps."""

from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes

from identikit.checks import whole_number
from identikit.plots.forms import Cells, Panels
from identikit.plots.maps import draw_maps, read_maps
from identikit.plots.reading import check, drawing, named, places_of, read, table
from identikit.plots.style import BLACK, BLUE, RED, SINGLE, SKY, legend, token_axis
from identikit.results.result import Result

_SHOWN = ("raw", "effective", "lower", "upper")
_ENDS = ("raw", "lower", "upper")


def role_bars(scores: Result, ax: Axes | None = None, *, most: int = 20, footer: str = "") -> Axes:
    """Draw one score of all heads, a bar from the least to the greatest that it can be; strongest heads first.

    A tick is the score of raw attention, a dot that of effective attention. The `most` heads with the highest raw score
    are shown.
    """
    data = read("role_bars", scores, _SHOWN, axes=("layer", "head"))
    layers = places_of(data, "layer")
    heads = places_of(data, "head")
    names = [f"L{layer}H{head}" for layer in layers for head in heads]
    arrays = {name: table(data, name, "layer", "head").ravel() for name in _SHOWN}
    title = str(data["score"].item())
    return _bars(arrays, names, "head", title, ax, most=most, footer=footer)


def measure_bars(measure: Result, ax: Axes | None = None, *, most: int = 20, footer: str = "") -> Axes:
    """Draw one row of a measure: for each source a bar from the least to the greatest that it can be.

    A tick is the reading of raw attention, a dot that of effective attention. The `most` sources with the largest raw
    reading are shown.
    """
    last = measure.axes[-1].name if isinstance(measure, Result) else "key"
    data = read("measure_bars", measure, _SHOWN, axes=(last,))
    arrays = {name: table(data, name, last) for name in _SHOWN}
    where = ", ".join(f"{axis.name} {axis.label}" for axis in measure.axes if axis.single)
    title = f"{measure.about['measure']}, {where}"
    return _bars(arrays, named(data, last), last, title, ax, most=most, footer=footer)


def _bars(
    arrays: dict[str, Cells], names: Sequence[str], what: str, title: str, ax: Axes | None, *, most: int, footer: str
) -> Axes:
    known = np.flatnonzero(~np.isnan(arrays["raw"]))
    order = known[np.argsort(-np.abs(arrays["raw"][known]), kind="stable")]
    chosen = order[: whole_number("most", most, least=1)]
    raw, effective, lower, upper = (arrays[name][chosen] for name in _SHOWN)
    rows = np.arange(len(chosen))
    with drawing(ax, SINGLE, 1.1 + 0.14 * len(chosen), footer) as axes:
        axes.barh(
            rows, upper - lower, left=lower, height=0.6, color=SKY, edgecolor=BLUE, linewidth=0.5, label="possible"
        )
        axes.plot(raw, rows, "|", markersize=7, markeredgewidth=1.4, color=BLACK, label="raw")
        axes.plot(effective, rows, "o", color=RED, label="effective")
        axes.set_ylim(len(chosen) - 0.4, -0.6)
        token_axis(axes.yaxis, [names[int(place)] for place in chosen])
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
        axes.set_ylabel(what if len(chosen) == len(known) else f"{what} ({len(chosen)} of {len(known)} shown)")
        legend(axes, columns=3, title=title)
    return axes


def measure_maps(measure: Result, *, axes: Iterable[Axes] | None = None, footer: str = "") -> Panels:
    """Draw a measure as maps on one scale: the reading of raw attention, and the least and the greatest it can be.

    Where no layer is selected, the last one is drawn. What cannot be anything but 0 is hatched.
    """
    rows, columns = (axis.name for axis in measure.axes[-2:])
    if not measure.axis("layer").single:
        measure = measure.sel(layer=-1)
    check("measure_maps", measure, _ENDS, axes=(rows, columns))
    name = measure.about["measure"]

    def maps_of(part: Result) -> dict[str, Cells]:
        data = part.to_xarray(*_ENDS)
        cells = {end: table(data, end, rows, columns) for end in _ENDS}
        possible = (cells["upper"] != 0) | (cells["lower"] != 0)
        return {f"{name}, {end}": np.where(possible, numbers, np.nan) for end, numbers in cells.items()}

    maps = read_maps(measure, maps_of, rows=rows, columns=columns)
    return draw_maps("measure_maps", maps, axes, footer, (rows, columns, name))


def agreement_map(agreement: Result, ax: Axes | None = None, *, footer: str = "") -> Axes:
    """Draw the rank correlation of each pair of measures, from −1 to 1, with its number."""
    data = read("agreement_map", agreement, ("correlation",), axes=("measure", "other"))
    cells = table(data, "correlation", "measure", "other")
    names = [str(name) for name in data["measure"].values]
    with drawing(ax, SINGLE, 0.9 + 0.35 * len(names), footer) as axes:
        axes.imshow(cells, cmap="RdBu_r", vmin=-1, vmax=1)
        for row, column in np.ndindex(*cells.shape):
            axes.text(column, row, f"{cells[row, column]:.2f}", ha="center", va="center", fontsize="small")
        token_axis(axes.yaxis, names)
        token_axis(axes.xaxis, [str(name) for name in data["other"].values])
        axes.grid(visible=False)
    return axes
