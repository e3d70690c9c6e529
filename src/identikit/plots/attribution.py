"""Plots of attribution: what inputs contribute to outputs in a layer, and to one token through the layers."""

import numpy as np
from matplotlib.axes import Axes

from identikit.plots.forms import History, Panels, add_footer, colour_bar, from_zero, heat_map, history
from identikit.plots.reading import Drawable, axes_for, places_of, read, table, tokens_of
from identikit.plots.style import DOUBLE, SINGLE, house_style, sheet_of, token_axis


def attribution_map(attribution: Drawable, ax: Axes | None = None, *, footer: str = "") -> Axes:
    """Draw what each input contributes to each output in one layer: a row per output, summing to 100 %.

    Colours are scaled to the context; a token's own contribution may be larger and then has the last colour.
    """
    data = read("attribution_map", attribution, ["contribution"], axes=("input", "output"))
    cells = table(data, "contribution", "output", "input")
    same = np.equal.outer(places_of(data, "output"), places_of(data, "input"))
    context = np.where(same, np.nan, cells)
    scale = from_zero(cells, most=float(np.nanmax(context, initial=0.0)))
    with house_style():
        width = SINGLE if cells.shape[1] <= 32 else DOUBLE
        axes = axes_for(ax, width, 0.6 + 0.8 * width * min(1.0, cells.shape[0] / cells.shape[1]))
        image = heat_map(axes, cells, scale)
        token_axis(axes.xaxis, tokens_of(data, "input"))
        token_axis(axes.yaxis, tokens_of(data, "output"))
        axes.set(xlabel="input token", ylabel="output token")
        axes.set_title(f"L{int(data['layer'])}", loc="left")
        colour_bar(image, [axes], scale, "contribution (%)")
        add_footer(sheet_of(axes), footer)
    return axes


def sources(attribution: Drawable, ax: Axes | None = None, *, footer: str = "") -> Panels:
    """Draw where one output token comes from, layer by layer; return the axes of the map and of the bars beside it.

    The map has a column per input, the token's own framed; the bars are its own contribution. Colours are scaled to the
    context. Where standard errors are known, bars carry two of them and dots mark cells within two of zero.
    """
    data = read("sources", attribution, ["contribution"], axes=("layer", "input"))
    place = int(data["output"])
    inputs, layers = places_of(data, "input"), places_of(data, "layer")
    past = History(
        contribution=table(data, "contribution", "layer", "input"),
        own=inputs.index(place) if place in inputs else None,
        tokens=tokens_of(data, "input"),
        layers=layers,
        stderr=table(data, "stderr", "layer", "input") if "stderr" in data else None,
    )
    with house_style():
        axes = axes_for(ax, DOUBLE, 1.4 + min(0.16 * len(layers), 4.0))
        side = history(axes, past)
        axes.set_title(f"contribution to “{tokens_of(data, 'output')[0]}”, position {place}", loc="left")
        add_footer(sheet_of(axes), footer)
    drawn = np.empty(2, dtype=object)
    drawn[:] = [axes, side]
    return drawn.view(Panels)
