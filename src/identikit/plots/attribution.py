"""Plots of attribution: what inputs contribute in a layer, to one token through the layers, and to outputs."""

import numpy as np
from matplotlib.axes import Axes

from identikit.checks import whole_number
from identikit.plots import style
from identikit.plots.forms import Cells, History, Panels, around_zero, colour_bar, from_zero, heat_map, history
from identikit.plots.maps import read_maps
from identikit.plots.reading import axis_labels, check_drawable, drawing, read_table, tokens_of
from identikit.plots.style import DOUBLE, SINGLE, token_axis
from identikit.results.result import Result


def attribution_map(attribution: Result, ax: Axes | None = None) -> Axes:
    """Draw what each input contributes to each output in one layer: a row per output, summing to 100 %.

    Colours are scaled to the context; a token's own contribution may be larger and then has the last colour. Of a text
    with more than 512 tokens, a cell is the largest of several contributions, and the label says of how many.
    """
    check_drawable("attribution_map", attribution, ["contribution"], axes=("input", "output"))
    (layer,) = attribution.axes[0].values
    title = f"L{layer}"
    context = 0.0  # the largest contribution of another token

    def read_rows(rows: Result) -> dict[str, Cells]:
        nonlocal context
        cells = read_table(rows, "contribution", "output", "input")
        own = np.equal.outer(rows.axis("output").values, rows.axis("input").values)
        context = float(np.nanmax(np.where(own, np.nan, cells), initial=context))
        return {title: cells}

    maps = read_maps(attribution, read_rows, rows="output", columns="input")
    scale = from_zero(maps.cells[title], most=context)
    width = SINGLE if len(maps.columns) <= 32 else DOUBLE
    with drawing(ax, width, 0.6 + 0.8 * width * min(1.0, len(maps.rows) / len(maps.columns))) as axes:
        image = maps.draw(axes, title, scale)
        token_axis(axes.yaxis, maps.rows)
        axes.set(xlabel=maps.label("input token"), ylabel="output token")
        axes.set_title(title, loc="left")
        colour_bar(image, [axes], scale, "contribution (%)")
    return axes


def sources(attribution: Result, ax: Axes | None = None) -> Panels:
    """Draw where one output token comes from, layer by layer; return the axes of the map and of the bars beside it.

    The map has a column per input, the token's own framed; the bars are its own contribution. Colours are scaled to the
    context. Where standard errors are known, bars carry two of them and dots mark cells within two of zero.
    """
    check_drawable("sources", attribution, ["contribution"], axes=("layer", "input"))
    output = attribution.axis("output")
    (position,) = output.values
    inputs = attribution.axis("input")
    layers = attribution.axis("layer").values
    past = History(
        contribution=read_table(attribution, "contribution", "layer", "input"),
        own=inputs.values.index(position) if position in inputs.values else None,
        tokens=tokens_of(inputs),
        layers=layers,
        stderr=read_table(attribution, "stderr", "layer", "input") if "stderr" in attribution.arrays else None,
    )
    with drawing(ax, DOUBLE, 1.4 + min(0.16 * len(layers), 4.0)) as axes:
        side = history(axes, past)
        axes.set_title(f"contribution to “{tokens_of(output)[0]}”, position {position}", loc="left")
    return np.array([axes, side], dtype=object).view(Panels)


def token_scores(scores: Result, ax: Axes | None = None, *, most: int = 20) -> Axes:
    """Draw a score of each token: bars of the `most` largest by size, or a map where there is a second axis.

    Bars are blue above 0 and orange below. Drawn is the first of the result's main arrays.
    """
    name = scores.main[0] if isinstance(scores, Result) else ""
    rows = next((axis.name for axis in getattr(scores, "axes", ()) if axis.name != "input" and not axis.single), None)
    check_drawable("token_scores", scores, [name], axes=("input",) if rows is None else ("input", rows))
    most = whole_number("most", most, least=1)
    label = scores.measures[name].label
    tokens = axis_labels(scores.axis("input"))
    if rows is not None:
        cells = read_table(scores, name, rows, "input")
        scale = around_zero(cells) if np.nanmin(cells, initial=0.0) < 0 else from_zero(cells)
        axis = scores.axis(rows)
        with drawing(ax, DOUBLE, 1.2 + min(0.16 * len(axis), 6.0)) as axes:
            image = heat_map(axes, cells, scale)
            token_axis(axes.xaxis, tokens)
            token_axis(axes.yaxis, [axis.name_of(index) for index in range(len(axis))])
            axes.set(xlabel="input token", ylabel=rows)
            colour_bar(image, [axes], scale, label, shares=False)
        return axes
    values = read_table(scores, name, "input")
    order = np.argsort(-np.nan_to_num(np.abs(values)), kind="stable")[:most][::-1]
    with drawing(ax, SINGLE, 0.7 + 0.16 * len(order)) as axes:
        colours = np.where(values[order] >= 0, style.BLUE, style.ORANGE)
        axes.barh(range(len(order)), values[order], color=colours, height=0.7)
        axes.axvline(0.0, color=style.GREY, linewidth=0.6)
        axes.set_yticks(range(len(order)), [tokens[index] for index in order])
        axes.set_xlabel(label)
    return axes
