"""Maps of a head: raw, effective and null attention side by side, and the ends of intervals."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.image import AxesImage

from identikit.attention.result import EffectiveAttention
from identikit.checks import known_name, known_names
from identikit.errors import InputError
from identikit.plots.forms import Cells, Panels, Scale, around_zero, colour_bar, heat_map, new_axes
from identikit.plots.reading import axis_labels, check_drawable, drawing, head_of, panels_of, read_table, tokens_of
from identikit.plots.style import DOUBLE, SINGLE, house_style, token_axis
from identikit.results.result import Result

MOST_CELLS = 512  # of a map in each direction: a page has no room for more
THUMBNAIL_CELLS = 1200  # of all thumbnails side by side
WEIGHT = "attention weight (%)"
Labels = tuple[str, str, str]  # of rows, columns and the colour bar
LABELS: Labels = ("query", "key", WEIGHT)
_MAPS = ("raw", "effective", "null")
_BOUNDS = ("lower", "upper", "width")
_ENDS = ("raw", "lower", "upper")


@dataclass(frozen=True)
class Maps:
    """Maps by title, (row, column), with the tokens along both.

    A cell stands for `step` tokens in each direction; where that is more than one, it is the largest of its weights.
    """

    cells: Mapping[str, Cells]
    rows: Sequence[str]
    columns: Sequence[str]
    step: int = 1

    def draw(self, axes: Axes, title: str, scale: Scale, *, keep: Sequence[int] = ()) -> AxesImage:
        """Draw one of the maps with its columns labelled; return the image. `keep` are columns always labelled."""
        image = heat_map(axes, self.cells[title], scale, step=self.step)
        axes.set_xlim(-0.5, len(self.columns) - 0.5)
        axes.set_ylim(len(self.rows) - 0.5, -0.5)
        token_axis(axes.xaxis, self.columns, keep=keep)
        return image

    def label(self, name: str) -> str:
        """Return the label of the columns, which says so where a cell is the largest of several weights."""
        return name if self.step == 1 else f"{name} (cells: largest of {self.step} × {self.step})"


def read_maps(
    result: Result,
    read_rows: Callable[[Result], Mapping[str, Cells]],
    *,
    rows: str,
    columns: str,
    most: int | None = None,
) -> Maps:
    """Read maps over two axes, some rows at a time; with more tokens than `most`, a cell covers several.

    `read_rows` returns the maps, by title, of some rows of the result.
    """
    axes = {axis.name: axis for axis in result.axes}
    height = len(axes[rows])
    width = len(axes[columns])
    step = -(-max(height, width) // (most or MOST_CELLS))
    block = step * max(1, MOST_CELLS**2 // (step * width))
    blocks: dict[str, list[Cells]] = {}
    for start in range(0, height, block):
        some_rows = result if block >= height else result.sel(**{rows: slice(start, start + block)})
        for title, cells in read_rows(some_rows).items():
            blocks.setdefault(title, []).append(largest(cells, step))
    maps = {title: np.concatenate(cells) for title, cells in blocks.items()}
    return Maps(maps, tokens_of(axes[rows]), tokens_of(axes[columns]), step)


def largest(cells: Cells, step: int) -> Cells:
    """Return the number largest in size of each block of `step` × `step` cells; NaN only where all of them are."""
    if step == 1:
        return cells
    height, width = cells.shape
    padded = np.pad(cells.astype(float), ((0, -height % step), (0, -width % step)), constant_values=np.nan)
    blocks = padded.reshape(len(padded) // step, step, -1, step).swapaxes(1, 2)
    blocks = blocks.reshape(*blocks.shape[:2], step * step)
    sizes = np.nan_to_num(np.abs(blocks), nan=-1.0)
    return np.take_along_axis(blocks, sizes.argmax(-1)[..., None], axis=-1)[..., 0]


def head_maps(
    attention: Result,
    intervals: Result | None = None,
    *,
    maps: Sequence[str] | None = None,
    axes: Iterable[Axes] | None = None,
) -> Panels:
    """Draw maps of one head side by side, on one diverging scale with one colour bar; return their axes.

    `maps` are any of raw, effective and null, and with `intervals` of lower, upper and width (upper − lower); by
    default all of them. "simplex", which needs the model, is the alternative of least norm. Keys that a query cannot
    see, and intervals that were not computed, are hatched, not zero. Of a text with more than 512 tokens, a cell is the
    largest of several weights, and the label says of how many.
    """
    if maps is None:
        maps = _MAPS if intervals is None else _MAPS + _BOUNDS
    names = known_names("maps", maps, (*_MAPS, "simplex", *_BOUNDS))
    if intervals is None and any(name in _BOUNDS for name in names):
        raise InputError("Cannot draw head_maps: lower, upper and width need intervals=.")
    check_drawable("head_maps", attention, _MAPS, axes=("query", "key"))
    if intervals is not None:
        check_drawable("head_maps", intervals, ("lower", "upper"), axes=("query", "key"))
    if "simplex" in names and not isinstance(attention, EffectiveAttention):
        raise InputError(
            f"Cannot draw head_maps: maps='simplex' needs what effective_attention returned, not {attention.kind}."
        )

    def read_rows(rows: Result) -> dict[str, Cells]:
        weights = {name: read_table(rows, name, "query", "key") for name in names if name in _MAPS}
        if "simplex" in names and isinstance(rows, EffectiveAttention):
            weights["simplex"] = rows.simplex.cpu().numpy().reshape(len(rows.axis("query")), len(rows.axis("key")))
        if intervals is not None:
            weights |= _bounds(intervals, rows)
        visible = _visible(rows)
        return {f"{head_of(rows)} {name}": np.where(visible, weights[name], np.nan) for name in names}

    return _draw_maps("head_maps", read_maps(attention, read_rows, rows="query", columns="key"), axes)


def _visible(rows: Result) -> Cells | bool:
    """Return which keys each query sees."""
    return read_table(rows, "visible", "query", "key") if "visible" in rows.arrays else True


def _bounds(intervals: Result, attention: Result) -> dict[str, Cells]:
    """Return lower, upper and width on the queries and keys of a map, NaN where no interval was computed."""
    if head_of(intervals) != head_of(attention):
        raise InputError(
            f"Cannot draw head_maps: attention= is of {head_of(attention)} and intervals= of {head_of(intervals)}. "
            "Give the same head of both."
        )
    rows = attention.axis("query").values
    columns = attention.axis("key").values
    ends = {name: np.full((len(rows), len(columns)), np.nan) for name in ("lower", "upper")}
    queries = [query for query in intervals.axis("query").values if query in rows]
    keys = [key for key in intervals.axis("key").values if key in columns]
    if queries and keys:
        bounded = np.ix_([rows.index(query) for query in queries], [columns.index(key) for key in keys])
        for name, cells in ends.items():
            cells[bounded] = read_table(intervals.sel(query=queries, key=keys), name, "query", "key")
    return {**ends, "width": ends["upper"] - ends["lower"]}


def thumbnails(attention: Result, name: str = "raw", ax: Axes | None = None) -> Axes:
    """Draw a map of every head, small: layers from below, heads from left to right, all on one scale.

    `name` is raw, effective or null. Where there is no room for every weight, a cell is the largest of several.
    """
    known_name("name", name, _MAPS)
    check_drawable("thumbnails", attention, [name], axes=("layer", "head", "query", "key"))
    layers = attention.axis("layer").values
    heads = attention.axis("head").values
    most_cells = max(4, THUMBNAIL_CELLS // max(len(layers), len(heads)))

    def read_rows(rows: Result) -> dict[str, Cells]:
        return {name: np.where(_visible(rows), read_table(rows, name, "query", "key"), np.nan)}

    grid = []
    for layer in reversed(layers):
        row = []
        for head in heads:
            maps = read_maps(
                attention.sel(layer=layer, head=head), read_rows, rows="query", columns="key", most=most_cells
            )
            row.append(np.pad(maps.cells[name], 1, constant_values=np.nan))
        grid.append(row)
    cells = np.block(grid)
    height = cells.shape[0] / len(layers)
    width = cells.shape[1] / len(heads)
    scale = around_zero(cells)
    with drawing(ax, DOUBLE, 1.0 + (DOUBLE - 1.5) * cells.shape[0] / cells.shape[1]) as axes:
        image = axes.imshow(cells, cmap=scale.colours, vmin=scale.least, vmax=scale.most, aspect="auto")
        axes.set_xticks((np.arange(len(heads)) + 0.5) * width - 0.5, [str(head) for head in heads])
        axes.set_yticks((np.arange(len(layers)) + 0.5) * height - 0.5, [str(layer) for layer in reversed(layers)])
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        axes.set(xlabel="head", ylabel="layer")
        axes.set_title(f"{name} attention of every head, queries from above, keys from the left", loc="left")
        colour_bar(image, [axes], scale, WEIGHT)
    return axes


def interval_maps(intervals: Result, *, axes: Iterable[Axes] | None = None) -> Panels:
    """Draw raw weight, lower and upper end of one head side by side, on one scale; return their axes.

    Edges that no alternative can use, such as invisible keys, are hatched.
    """
    return _draw_ends("interval_maps", intervals, LABELS, lambda end: f"{head_of(intervals)} {end}", axes)


def measure_maps(measure: Result, *, axes: Iterable[Axes] | None = None) -> Panels:
    """Draw a measure as maps on one scale: the reading of raw attention, and the least and the greatest it can be.

    Where no layer is selected, the last one is drawn. What cannot be anything but 0 is hatched.
    """
    rows, columns = (axis.name for axis in measure.axes[-2:])
    if not measure.axis("layer").single:
        measure = measure.sel(layer=-1)
    name = measure.about["measure"]
    return _draw_ends("measure_maps", measure, (rows, columns, name), lambda end: f"{name}, {end}", axes)


def _draw_ends(
    plot: str, result: Result, labels: Labels, title: Callable[[str], str], axes: Iterable[Axes] | None
) -> Panels:
    """Draw raw numbers and both ends as maps, blank where nothing but 0 is possible."""
    rows, columns, _ = labels
    check_drawable(plot, result, _ENDS, axes=(rows, columns))

    def read_rows(some_rows: Result) -> dict[str, Cells]:
        ends = {end: read_table(some_rows, end, rows, columns) for end in _ENDS}
        possible = (ends["upper"] != 0) | (ends["lower"] != 0)
        return {title(end): np.where(possible, cells, np.nan) for end, cells in ends.items()}

    return _draw_maps(plot, read_maps(result, read_rows, rows=rows, columns=columns), axes, labels)


def _draw_maps(plot: str, maps: Maps, axes: Iterable[Axes] | None, labels: Labels = LABELS) -> Panels:
    """Draw titled maps on the user's axes, or on new ones."""
    count = len(maps.cells)
    if axes is not None:
        panels = panels_of(plot, axes, count)
    else:
        columns = 2 if count == 4 else min(count, 3)
        rows = -(-count // columns)
        width = SINGLE if count == 1 else DOUBLE
        grid = new_axes(width, rows * (0.8 + 0.82 * width / columns), rows=rows, columns=columns)
        for spare in grid[count:]:
            spare.remove()
        panels = grid[:count].view(Panels)
    with house_style():
        map_panels(panels, maps, labels=labels)
    return panels


def map_panels(panels: Panels, maps: Maps, *, keep: Sequence[int] = (), labels: Labels = LABELS) -> None:
    """Draw maps on one diverging scale with one colour bar; `keep` are keys always labelled."""
    scale = around_zero(*maps.cells.values())
    image = None
    for axes, title in zip(panels, maps.cells, strict=True):
        image = maps.draw(axes, title, scale, keep=keep)
        axes.set_title(title, loc="left")
        axes.set_xlabel(maps.label(labels[1]))
        axes.spines[:].set_visible(True)
        cell = axes.get_subplotspec()
        if cell is None or cell.is_first_col():
            axes.set_ylabel(labels[0])
            token_axis(axes.yaxis, maps.rows)
        else:
            axes.set_yticks([])
    assert image is not None, "maps without a map"
    colour_bar(image, panels, scale, labels[2], shares=labels[2] == WEIGHT)


def agreement_map(agreement: Result, ax: Axes | None = None) -> Axes:
    """Draw the rank correlation of each pair of measures, from −1 to 1, with its number."""
    check_drawable("agreement_map", agreement, ("correlation",), axes=("measure", "other"))
    cells = read_table(agreement, "correlation", "measure", "other")
    names = axis_labels(agreement.axis("measure"))
    with drawing(ax, SINGLE, 0.9 + 0.35 * len(names)) as axes:
        axes.imshow(cells, cmap="RdBu_r", vmin=-1, vmax=1)
        for row, column in np.ndindex(*cells.shape):
            axes.text(column, row, f"{cells[row, column]:.2f}", ha="center", va="center", fontsize="small")
        token_axis(axes.yaxis, names)
        token_axis(axes.xaxis, axis_labels(agreement.axis("other")))
        axes.grid(visible=False)
    return axes
