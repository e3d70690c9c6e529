"""Forms of drawing, which put numbers on axes unchanged; the plots of Results and the paper's figures share them."""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.colorbar import make_axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from pandas import DataFrame

from identikit.plots import style
from identikit.plots.style import Style, diverging, house_style, layer_ticks, percent, sequential, sheet_of, token_axis

Panel = Callable[[Axes], None]
"""Draws on the axes it is given."""

Styles = Mapping[Any, Style]
"""How each series looks, by its values in the columns that tell series apart."""

Cells = NDArray[Any]
"""The numbers of a map, (row, column); NaN where there is none."""


class NotebookPicture:
    """Something that a notebook shows as the picture of its figure, although pyplot does not manage it."""

    def _repr_png_(self) -> bytes:
        return picture(self)  # pyright: ignore[reportArgumentType]


class SheetAxes(NotebookPicture, Axes):
    """Axes of a sheet."""


class Panels(NotebookPicture, np.ndarray):
    """An array of the axes of one figure."""


class Sheet(Figure):
    """A figure that is drawn and saved in the house style, with real text, whatever the user's settings are."""

    def draw(self, renderer: RendererBase) -> None:
        """Draw in the house style."""
        with house_style():
            super().draw(renderer)

    def savefig(self, *args: Any, **options: Any) -> None:
        """Save in the house style; PDF and SVG keep text as text."""
        with house_style():
            super().savefig(*args, **options)


def new_axes(width: float = style.SINGLE, height: float = 2.6, *, rows: int = 1, columns: int = 1) -> Panels:
    """Return the axes of a new figure, row after row; sizes in inches."""
    with house_style():
        figure = Sheet(figsize=(width, height), layout=ConstrainedLayoutEngine())
        grid = figure.subplots(rows, columns, squeeze=False, subplot_kw={"axes_class": SheetAxes})
    return grid.reshape(-1).view(Panels)


def sheet(*panels: Panel, width: float = style.SINGLE, height: float = 2.6) -> Figure:
    """Return a finished figure with panels side by side; sizes in inches."""
    grid = new_axes(width, height, columns=len(panels))
    with house_style():
        for axes, panel in zip(grid, panels, strict=True):
            panel(axes)
            if not axes.has_data():
                axes.text(
                    0.5, 0.5, "nothing to show", ha="center", va="center", color=style.GREY, transform=axes.transAxes
                )
    return finish(grid)


def finish(panels: Panels) -> Figure:
    """Lay out a figure for good, so that saving it moves nothing; return it."""
    figure = sheet_of(panels[0])
    layout = figure.get_layout_engine()
    with house_style():
        for _ in range(2):  # the first round may change which ticks there are, and with them the room they need
            layout.execute(figure)  # pyright: ignore[reportOptionalMemberAccess]
    figure.set_layout_engine("none")
    return figure


def save(figure: Figure) -> tuple[bytes, bytes]:
    """Return a figure as PNG, at 200 dots per inch, and as SVG; the same figure gives the same bytes."""
    svg = io.BytesIO()
    with house_style():
        figure.savefig(svg, format="svg", dpi=200, metadata={"Date": None, "Creator": None})
        return picture(figure.axes[0]), svg.getvalue()


def picture(drawn: Axes | Panels, dpi: int = 200) -> bytes:
    """Return what a plot has drawn as a PNG."""
    png = io.BytesIO()
    figure = sheet_of(drawn.flat[0] if isinstance(drawn, np.ndarray) else drawn)
    figure.savefig(png, format="png", dpi=dpi, metadata={"Software": None})
    return png.getvalue()


def lines(axes: Axes, frame: DataFrame, series: Styles, *, by: Sequence[str], x: str, y: str) -> None:
    """Draw a line for each series that the table has; `by` are the columns that tell series apart.

    Where the table has columns `low` and `high` that are known, they are error bars, and the series stand a little
    apart along x so that no bar hides another. Peaks and the ends of gaps always have a marker.
    """
    tables = {key: rows for key, rows in frame.groupby(list(by), sort=False) if key in series}
    has_errors = "low" in frame and bool(frame["low"].notna().any())
    keys = [key for key in series if key in tables]
    shifts = np.linspace(-0.15, 0.15, len(keys)) if has_errors and len(keys) > 1 else np.zeros(len(keys))
    for key, shift in zip(keys, shifts, strict=True):
        look = series[key]
        rows = tables[key].sort_values(x)
        positions = rows[x].to_numpy(float) + shift
        values = rows[y].to_numpy(float)
        axes.plot(
            positions,
            values,
            color=look.colour,
            linestyle=look.line,
            marker=look.marker,
            markerfacecolor=look.colour if look.filled else "white",
            markeredgewidth=0.8,
            markevery=_marks(values),
            label=look.label,
        )
        if has_errors:
            errors = np.abs(rows[["low", "high"]].to_numpy(float).T - values)
            axes.errorbar(positions, values, errors, fmt="none", ecolor=look.colour, elinewidth=0.7, capsize=1.2)


def _marks(values: NDArray[np.float64]) -> list[int]:
    """Return which points of a line have a marker: about fifteen, its peak, and those beside a gap."""
    known = ~np.isnan(values)
    if not known.any():
        return []
    beside_gap = known & ~(np.r_[True, known[:-1]] & np.r_[known[1:], True])
    evenly = range(0, len(values), max(1, len(values) // 15))
    return sorted({*evenly, int(np.nanargmax(values)), *np.flatnonzero(beside_gap).tolist()})


def clouds(axes: Axes, frame: DataFrame, series: Styles, *, by: str, x: str, y: str) -> None:
    """Draw the points of each series around each x, side by side, so that none hides another."""
    shifts = np.linspace(-0.2, 0.2, len(series)) if len(series) > 1 else [0.0]
    for (key, look), shift in zip(series.items(), shifts, strict=True):
        rows = frame[frame[by] == key[0]]
        axes.scatter(rows[x] + shift, rows[y], s=7, color=look.colour, marker=look.marker, alpha=0.45, linewidths=0)


def boxes(axes: Axes, frame: DataFrame, positions: Sequence[int]) -> None:
    """Draw a box for each row, from its columns low, lower, median, upper and high; the median is orange."""
    names = {"low": "whislo", "lower": "q1", "median": "med", "upper": "q3", "high": "whishi"}
    known = frame.assign(position=list(positions)).dropna(subset=list(names))
    if known.empty:
        return
    thin = {"linewidth": 0.8}
    drawn = axes.bxp(
        known.rename(columns=names).to_dict("records"),
        positions=known["position"].tolist(),
        widths=0.6,
        showfliers=False,
        manage_ticks=False,
        boxprops=thin,
        whiskerprops=thin,
        capprops=thin,
        medianprops={"linewidth": 1.6, "color": style.ORANGE},
    )
    for kind in ("boxes", "medians", "whiskers"):
        for line in drawn[kind]:
            line.set_label(f"_{kind}")
    axes.set_ylim(bottom=0)


@dataclass(frozen=True)
class Scale:
    """The colours of heat maps and the numbers at their ends; one scale may serve several maps.

    The colour bar shows the part between `low` and `high`. `beyond`: larger numbers occur and have the last colour.
    """

    colours: Colormap
    least: float
    most: float
    low: float
    high: float
    beyond: bool = False


def around_zero(*maps: Cells) -> Scale:
    """Return one diverging scale for maps: zero is white, and the same number has the same colour in all of them."""
    numbers = np.concatenate([np.ravel(cells) for cells in maps])
    low = float(np.nanmin(numbers, initial=0.0))
    high = float(np.nanmax(numbers, initial=0.0))
    if low == high == 0.0:
        high = 1.0
    reach = max(-low, high)
    return Scale(diverging(), -reach, reach, low, high)


def from_zero(cells: Cells, *, most: float | None = None) -> Scale:
    """Return a sequential scale from zero to the largest number, or to `most`, where larger ones have its colour."""
    largest = float(np.nanmax(cells, initial=0.0))
    top = (largest if most is None else most) or 1.0
    return Scale(sequential(), 0.0, top, 0.0, top, beyond=largest > top)


def heat_map(axes: Axes, cells: Cells, scale: Scale, *, step: int = 1) -> AxesImage:
    """Draw cells; those that are NaN stay blank and hatched, so that none of them looks like a zero.

    A cell is `step` places wide and high.
    """
    height, width = cells.shape
    image = axes.imshow(
        cells,
        cmap=scale.colours,
        vmin=scale.least,
        vmax=scale.most,
        aspect="auto",
        interpolation="nearest",
        extent=(-0.5, step * width - 0.5, step * height - 0.5, -0.5),
    )
    axes.grid(visible=False)
    if np.isnan(cells).any():
        axes.patch.set(facecolor="#F4F4F4", hatch="//////", edgecolor="#D0D0D0", linewidth=0)
    return image


def colour_bar(image: AxesImage, axes: Iterable[Axes], scale: Scale, label: str, *, shares: bool = True) -> None:
    """Put the scale of heat maps beside their axes; `shares` are written in per cent."""
    panels = list(axes)
    extend = "max" if scale.beyond else "neither"
    bar = sheet_of(panels[0]).colorbar(image, ax=panels, pad=0.01, fraction=0.03, aspect=None, extend=extend)
    bar.ax.set_ylim(scale.low, scale.high)
    bar.ax.grid(visible=False)
    bar.ax.tick_params(labelsize=style.SMALL, width=0.4, length=2)
    if shares:
        percent(bar.ax.yaxis)
    bar.set_label(label)


def outline(axes: Axes, *, x: tuple[int, int], y: tuple[int, int], colour: str = style.BLACK) -> None:
    """Frame the cells of a heat map from the first to the last in each direction; the frame covers none of them."""
    width = x[1] - x[0] + 1
    height = y[1] - y[0] + 1
    frame = Rectangle((x[0] - 0.5, y[0] - 0.5), width, height, fill=False, edgecolor=colour)
    frame.set(linewidth=0.9, clip_on=False)
    axes.add_patch(frame)


@dataclass(frozen=True)
class History:
    """What inputs contribute to one token: (layer, input), the input tokens, the layers' numbers.

    `own` is the input that is the token itself, None where it is not among the inputs.
    """

    contribution: NDArray[np.float64]
    own: int | None
    tokens: Sequence[str]
    layers: Sequence[int]
    stderr: NDArray[np.float64] | None = None


def history(axes: Axes, past: History, *, layer_label: str = "layer") -> Axes:
    """Draw a token's sources through the layers, and beside them its own contribution; return the axes beside.

    Colours are scaled to the context, and the token's own column, framed, has the last colour above. With standard
    errors the bars carry two of them, and a dot marks each cell that lies within two of zero.
    """
    cells = past.contribution
    count = len(past.layers)
    own = [] if past.own is None else [past.own]
    scale = from_zero(cells, most=float(np.nanmax(np.delete(cells, own, axis=1), initial=0.0)))
    image = heat_map(axes, cells, scale)
    axes.set_ylim(-0.5, count - 0.5)
    ticks = layer_ticks(past.layers)
    axes.set_yticks([past.layers.index(layer) for layer in ticks], list(map(str, ticks)))
    axes.set(xlabel="input token", ylabel=layer_label)
    token_axis(axes.xaxis, past.tokens, keep=own)
    colour_bar(image, [axes], scale, "contribution (%)")
    side = make_axes(axes, location="right", fraction=0.16, pad=0.02, aspect=None)[0]  # pyright: ignore
    side.set(ylim=(-0.5, count - 0.5), yticks=[], xlabel="its own (%)")
    for column in own:
        outline(axes, x=(column, column), y=(0, count - 1), colour=style.SKY)
        error = None if past.stderr is None else 2 * past.stderr[:, column]
        look = {"elinewidth": 0.7, "capsize": 1.5}
        side.barh(range(count), cells[:, column], height=0.7, color=style.SKY, xerr=error, error_kw=look)
    percent(side.xaxis)
    if past.stderr is not None:
        unsure = np.argwhere(cells < 2 * past.stderr)
        axes.plot(
            unsure[:, 1], unsure[:, 0], linestyle="", marker=".", markersize=1.5, color=style.GREY, label="_unsure"
        )
    return side
