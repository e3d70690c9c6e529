"""Plots of attention: all heads at once, bars of intervals, scores, measures and an alternative, and an alignment."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from identikit.checks import known_name, whole_number
from identikit.errors import InputError
from identikit.plots import style
from identikit.plots.forms import Cells, Panels, Scale, around_zero, colour_bar, from_zero, heat_map, new_axes, outline
from identikit.plots.maps import WEIGHT
from identikit.plots.reading import axis_labels, check_drawable, drawing, head_of, panels_of, read_table, tokens_of
from identikit.plots.style import house_style, legend, percent, sequential, sheet_of, token_axis
from identikit.results import words
from identikit.results.result import Result

_HEAD = ("layer", "head")
_ROW = (*_HEAD, "query")
_ENDS = ("raw", "lower", "upper")
_SHARES = ("certain_mass", "sink")
_LABELS: Mapping[str, str] = {
    "pearson": "Pearson, raw with effective",
    "null_dim": "null dimension",
    "polytope_dim": "dimension of the set of alternatives",
    "reachable_dim": "reachable dimension",
    "certain_mass": "determined share",
    "sink": "weight of the learned sink",
}


def head_grid(result: Result, by: str = "pearson", ax: Axes | None = None) -> Axes:
    """Draw all heads as a grid, layers from below, shaded by a number and, where there is room, with it written.

    `by` names an array of the result over heads, such as "pearson" (correlation of raw with effective attention), or
    over rows, such as "null_dim", "reachable_dim" or "certain_mass": of these it draws means over queries, and says
    so. Heads that were not measured are hatched.
    """
    if isinstance(result, Result):
        drawable = [name for name in result.arrays if result.source.dims[name] in (_HEAD, _ROW)]
        if drawable:
            known_name("by", by, drawable)
    check_drawable("head_grid", result, [by], axes=_ROW)
    values = read_table(result, by, *result.source.dims[by])
    share = by in _SHARES or values.dtype == bool
    label = _LABELS.get(by, by.replace("_", " "))
    if values.ndim > len(_HEAD):
        label = f"mean {label}"
        values = np.ma.masked_invalid(values).mean(-1).filled(np.nan)
    cells = values.astype(float)
    layers, heads = (result.axis(name).values for name in _HEAD)
    scale = _grid_scale(cells, by, share=share)
    with drawing(ax, style.SINGLE if len(heads) <= 16 else style.DOUBLE, 1.0 + min(0.22 * len(layers), 6.0)) as axes:
        image = heat_map(axes, cells, scale)
        axes.set_ylim(-0.5, len(layers) - 0.5)
        axes.set(xlabel="head", ylabel="layer")
        token_axis(axes.xaxis, [str(head) for head in heads])
        token_axis(axes.yaxis, [str(layer) for layer in layers])
        axes.tick_params(axis="x", labelrotation=0)
        axes.set_title(f"{label} (%)" if share else label, loc="left")
        colour_bar(image, [axes], scale, "", shares=share)
        _write_numbers(axes, cells, scale, share=share)
    return axes


def _grid_scale(cells: Cells, by: str, *, share: bool) -> Scale:
    least = np.nanmin(cells, initial=0.0)
    if least < 0:
        return around_zero(np.array([-1.0, 1.0]) if by == "pearson" else cells)
    if share or by == "pearson":
        return Scale(sequential(), 0.0, 1.0, 0.0, 1.0)
    return from_zero(cells)


def _write_numbers(axes: Axes, cells: Cells, scale: Scale, *, share: bool) -> None:
    """Write the numbers into the cells of a grid, if they fit."""
    room = axes.bbox.width / sheet_of(axes).dpi * 72 / cells.shape[1]
    form = _short
    if share:
        form = words.percent
    elif 0 < np.nanmax(np.abs(cells), initial=0.0) < 0.005:
        form = "{:.0e}".format
    written = {cell: form(value).removesuffix("%") for cell, value in np.ndenumerate(cells)}
    if room < max(map(len, written.values())) * style.SMALL * 0.68:
        return
    for (row, column), word in written.items():
        if not np.isnan(cells[row, column]):
            shade = (cells[row, column] - scale.least) / (scale.most - scale.least)
            dark = np.dot(scale.colours(shade)[:3], (0.30, 0.59, 0.11)) < 0.5
            axes.text(
                column, row, word, ha="center", va="center", fontsize=style.SMALL, color="white" if dark else "black"
            )


def _short(value: float) -> str:
    """Write a number in at most three characters: .97, 1, 26."""
    rounded = round(value, 2) + 0.0  # without the sign of -0.0
    return f"{rounded:.0f}" if not abs(rounded) < 1 else f"{rounded:.2f}".replace("0.", ".", 1)


def interval_bars(
    intervals: Result, effective: Result | None = None, ax: Axes | None = None, *, most: int = 20, order: str = "upper"
) -> Axes:
    """Draw the intervals of one row: for each key a bar from the least to the largest weight it can have.

    A tick is the raw weight; a dot, with `effective`, the effective one. The `most` keys with the largest "upper" or
    "width" (`order`) are shown.
    """
    check_drawable("interval_bars", intervals, _ENDS, axes=("key", "group", "quantity"))
    axis = intervals.axes[-1]
    arrays = {name: read_table(intervals, name, axis.name) for name in _ENDS}
    known_name("order", order, ("upper", "width"))
    if effective is not None:
        check_drawable("interval_bars", effective, ("effective",), axes=("layer", "head", "query", "key"))
        arrays["effective"] = _effective_row(effective, intervals)
    rank = arrays["upper"] if order == "upper" else arrays["upper"] - arrays["lower"]
    title = f"{_row_of(intervals)}, {axis.name}s by {order}"
    return _interval_bars(arrays, rank, axis_labels(axis), (axis.name, title, WEIGHT), ax, most=most)


def role_bars(scores: Result, ax: Axes | None = None, *, most: int = 20) -> Axes:
    """Draw one score of all heads, a bar from the least to the greatest that it can be; strongest heads first.

    A tick is the score of raw attention, a dot that of effective attention. The `most` heads with the highest raw score
    are shown.
    """
    check_drawable("role_bars", scores, (*_ENDS, "effective"), axes=_HEAD)
    names = [f"L{layer}H{head}" for layer in scores.axis("layer").values for head in scores.axis("head").values]
    arrays = {name: read_table(scores, name, *_HEAD).ravel() for name in (*_ENDS, "effective")}
    return _interval_bars(arrays, np.abs(arrays["raw"]), names, ("head", scores.axis("score").label, ""), ax, most=most)


def measure_bars(measure: Result, ax: Axes | None = None, *, most: int = 20) -> Axes:
    """Draw one row of a measure: for each source a bar from the least to the greatest that it can be.

    A tick is the reading of raw attention, a dot that of effective attention. The `most` sources with the largest raw
    reading are shown.
    """
    last = measure.axes[-1].name if isinstance(measure, Result) else "key"
    check_drawable("measure_bars", measure, (*_ENDS, "effective"), axes=(last,))
    arrays = {name: read_table(measure, name, last) for name in (*_ENDS, "effective")}
    where = ", ".join(f"{axis.name} {axis.label}" for axis in measure.axes if axis.single)
    title = f"{measure.about['measure']}, {where}"
    return _interval_bars(
        arrays, np.abs(arrays["raw"]), axis_labels(measure.axis(last)), (last, title, ""), ax, most=most
    )


def _interval_bars(
    arrays: Mapping[str, Cells],
    rank: Cells,
    names: Sequence[str],
    labels: tuple[str, str, str],
    ax: Axes | None,
    *,
    most: int,
) -> Axes:
    """Draw intervals as bars, those of highest rank on top; labels of rows, title, and x where it is a share."""
    row_label, title, x_label = labels
    ranked = np.flatnonzero(~np.isnan(rank))
    strongest = ranked[np.argsort(-rank[ranked], kind="stable")][: whole_number("most", most, least=1)]
    bars = {name: values[strongest] for name, values in arrays.items()}
    rows = np.arange(len(strongest))
    width = bars["upper"] - bars["lower"]
    look = {"color": style.SKY, "edgecolor": style.BLUE, "linewidth": 0.5, "label": "possible"}
    with drawing(ax, style.SINGLE, 1.1 + 0.14 * len(strongest)) as axes:
        axes.barh(rows, width, left=bars["lower"], height=0.6, **look)
        axes.plot(bars["raw"], rows, "|", markersize=7, markeredgewidth=1.4, color=style.BLACK, label="raw")
        if "effective" in bars:
            axes.plot(bars["effective"], rows, "o", color=style.RED, label="effective")
        _label_rows(axes, [names[int(index)] for index in strongest], len(ranked), row_label)
        if x_label:
            axes.set_xlabel(x_label)
            percent(axes.xaxis)
        legend(axes, columns=3, title=title)
    return axes


def _effective_row(effective: Result, intervals: Result) -> Cells:
    """Return the effective weights of the row and keys that the intervals belong to."""
    open_axes = [axis.name for axis in effective.axes if axis.name in _ROW and not axis.single]
    row = effective.sel(**{name: intervals.axis(name).values[0] for name in open_axes})
    if _row_of(row) != _row_of(intervals):
        raise InputError(
            f"Cannot draw interval_bars: the intervals belong to {_row_of(intervals)}, and effective= to "
            f"{_row_of(row)}. Give the same row of both."
        )
    weights = dict(zip(row.axis("key").values, read_table(row, "effective", "key"), strict=True))
    return np.array([weights.get(key, np.nan) for key in intervals.axis("key").values])


def alternative_bars(alternative: Result, ax: Axes | None = None, *, most: int = 20) -> Axes:
    """Draw the raw attention of one row and an alternative, a pair of bars per key.

    The `most` keys with the largest weight in either are shown.
    """
    check_drawable("alternative_bars", alternative, ("raw", "attention"), axes=("key",))
    names = axis_labels(alternative.axis("key"))
    raw = read_table(alternative, "raw", "key")
    changed = read_table(alternative, "attention", "key")
    strongest = np.argsort(-np.fmax(raw, changed), kind="stable")[: whole_number("most", most, least=1)]
    rows = np.arange(len(strongest))
    with drawing(ax, style.SINGLE, 1.1 + 0.16 * len(strongest)) as axes:
        axes.barh(rows - 0.19, raw[strongest], height=0.36, color=style.BLUE, label="raw")
        axes.barh(rows + 0.19, changed[strongest], height=0.36, color=style.ORANGE, label="alternative")
        _label_rows(axes, [names[key] for key in strongest], len(names), "key")
        axes.set_xlabel(WEIGHT)
        percent(axes.xaxis)
        legend(axes, columns=2, title=_row_of(alternative))
    return axes


def _row_of(result: Result) -> str:
    query = result.axis("query")
    token = "" if query.tokens is None else f" “{tokens_of(query)[0]}”"
    return f"{head_of(result)}, query {query.values[0]}{token}"


def _label_rows(axes: Axes, names: Sequence[str], count: int, label: str) -> None:
    """Name the rows of bars, the first on top; where some are not shown, the label says how many there are."""
    axes.set_ylim(len(names) - 0.4, -0.6)
    token_axis(axes.yaxis, names)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.set_ylabel(label if len(names) == count else f"{label} ({len(names)} of {count} shown)")
    axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))


def alignment(intervals: Result, *, axes: Iterable[Axes] | None = None) -> Panels:
    """Draw the attention of one head as an alignment of target and source; return the axes of a map and of bars.

    The map is raw attention. A cell is framed where the target token is aligned to it in every attention with this
    output: there, it has the largest weight of its row. Beside it, a bar for each target token says from where to where
    the weight of its strongest source token can go; the tick is the raw weight. Of intervals of groups="words", source
    words take the place of tokens.
    """
    last = next((axis.name for axis in getattr(intervals, "axes", ()) if axis.name in ("key", "group")), "key")
    check_drawable("alignment", intervals, _ENDS, axes=("query", last))
    aligned = getattr(intervals, "aligned", None)
    if aligned is None:
        raise InputError(f"Cannot draw alignment of {intervals.a_kind}: expected attention intervals.")
    raw, lower, upper = (read_table(intervals, name, "query", last) for name in _ENDS)
    sources = axis_labels(intervals.axis(last))
    rows = range(len(raw))
    best = raw.argmax(1)
    certain = np.atleast_1d(aligned.cpu().numpy()) >= 0
    width = style.DOUBLE
    panels = (
        new_axes(width, 1.2 + min(0.22 * len(raw), 6.0), columns=2) if axes is None else panels_of("alignment", axes, 2)
    )
    with house_style():
        scale = from_zero(raw)
        image = heat_map(panels[0], raw, scale)
        for row in np.flatnonzero(certain):
            column = int(best[row])
            outline(panels[0], x=(column, column), y=(int(row), int(row)))
        token_axis(panels[0].xaxis, sources)
        token_axis(panels[0].yaxis, axis_labels(intervals.axis("query")))
        panels[0].set(xlabel="source", ylabel="target")
        panels[0].set_title(f"{head_of(intervals)}, raw", loc="left")
        colour_bar(image, panels[:1], scale, WEIGHT)
        ends = lower[rows, best], upper[rows, best]
        kinds = (("in every attention", certain, style.BLUE), ("not in every one", ~certain, style.GREY))
        for label, is_kind, colour in kinds:
            rows_of_kind = np.flatnonzero(is_kind)
            if not len(rows_of_kind):
                continue
            start = ends[0][rows_of_kind]
            bars = panels[1].barh(rows_of_kind, ends[1][rows_of_kind] - start, left=start, height=0.6, label=label)
            for bar in bars:
                bar.set(facecolor=colour, alpha=0.5, edgecolor=colour, linewidth=0.8)
        panels[1].plot(raw[rows, best], rows, "|", markersize=7, markeredgewidth=1.4, color=style.BLACK, label="raw")
        panels[1].set(ylim=(len(raw) - 0.5, -0.5), xlim=(0.0, None), xlabel=WEIGHT)
        token_axis(panels[1].yaxis, [sources[column] for column in best])
        panels[1].set_ylabel("strongest source")
        percent(panels[1].xaxis)
        legend(panels[1], columns=3, title="aligned to it")
    return panels
