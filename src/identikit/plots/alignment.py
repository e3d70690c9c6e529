"""Source against target: which token each target token is aligned to, and whether every alternative agrees."""

from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes

from identikit.errors import InputError
from identikit.plots import style
from identikit.plots.forms import Panels, colour_bar, from_zero, heat_map, new_axes, outline
from identikit.plots.maps import WEIGHT
from identikit.plots.reading import check, head_of, named, panels_of, table
from identikit.plots.style import house_style, legend, percent, token_axis
from identikit.results.result import Result

_ENDS = ("raw", "lower", "upper")


def alignment(intervals: Result, *, axes: Iterable[Axes] | None = None) -> Panels:
    """Draw the attention of one head as an alignment of target and source; return the axes of a map and of bars.

    The map is raw attention. A cell is framed where the target token is aligned to it in every attention with this
    output: there, it has the largest weight of its row. Beside it, a bar for each target token says from where to where
    the weight of its strongest source token can go; the tick is the raw weight. Of intervals of groups="words", source
    words take the place of tokens.
    """
    last = next((axis.name for axis in getattr(intervals, "axes", ()) if axis.name in ("key", "group")), "key")
    check("alignment", intervals, _ENDS, axes=("query", last))
    aligned = getattr(intervals, "aligned", None)
    if aligned is None:
        raise InputError(f"Cannot draw alignment of {intervals.a_kind}: expected attention intervals.")
    raw, lower, upper = (table(intervals, name, "query", last) for name in _ENDS)
    sources = named(intervals.axis(last))
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
        token_axis(panels[0].yaxis, named(intervals.axis("query")))
        panels[0].set(xlabel="source", ylabel="target")
        panels[0].set_title(f"{head_of(intervals)}, raw", loc="left")
        colour_bar(image, panels[:1], scale, WEIGHT)
        ends = lower[rows, best], upper[rows, best]
        kinds = (("in every attention", certain, style.BLUE), ("not in every one", ~certain, style.GREY))
        for label, which, colour in kinds:
            chosen = np.flatnonzero(which)
            if not len(chosen):
                continue
            bars = panels[1].barh(chosen, (ends[1] - ends[0])[chosen], left=ends[0][chosen], height=0.6, label=label)
            for bar in bars:
                bar.set(facecolor=colour, alpha=0.5, edgecolor=colour, linewidth=0.8)
        panels[1].plot(raw[rows, best], rows, "|", markersize=7, markeredgewidth=1.4, color=style.BLACK, label="raw")
        panels[1].set(ylim=(len(raw) - 0.5, -0.5), xlim=(0.0, None), xlabel=WEIGHT)
        token_axis(panels[1].yaxis, [sources[place] for place in best])
        panels[1].set_ylabel("strongest source")
        percent(panels[1].xaxis)
        legend(panels[1], columns=3, title="aligned to it")
    return panels
