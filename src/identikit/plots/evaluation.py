"""Plots of how measures fare in tests."""

import numpy as np
from matplotlib.axes import Axes

from identikit.plots import style
from identikit.plots.reading import check_drawable, drawing, read_table
from identikit.plots.style import legend, percent, token_axis
from identikit.results.result import Result

_BASELINES = {"random": style.BLACK, "reversed": style.RED}


def score_bars(evaluation: Result, ax: Axes | None = None) -> Axes:
    """Draw one score of each measure, the best on top, with its 95% bootstrap interval over texts.

    A dashed line is what orders that say nothing score on average, where that is known beforehand.
    """
    names = ("mean", "low", "high")
    check_drawable("score_bars", evaluation, names, axes=("measure",))
    measures = evaluation.axis("measure").values
    score = evaluation.axis("score").label
    mean, low, high = (read_table(evaluation, name, "measure") for name in names)
    order = np.argsort(-np.nan_to_num(mean, nan=-np.inf), kind="stable")
    rows = np.arange(len(order))
    reach = np.nan_to_num(np.stack([mean - low, high - mean])[:, order], nan=0.0).clip(0)
    ranked = [measures[index] for index in order]
    colours = [_BASELINES.get(name, style.BLUE) for name in ranked]
    with drawing(ax, style.SINGLE, 0.9 + 0.22 * len(order)) as axes:
        axes.barh(rows, mean[order], height=0.6, color=colours, alpha=0.75)
        axes.errorbar(mean[order], rows, xerr=reach, fmt="none", ecolor=style.BLACK, elinewidth=0.9, capsize=2)
        chance = evaluation.about["chance"][score]
        if chance is not None:
            axes.axvline(chance, color=style.BLACK, linestyle="--", linewidth=0.9)
        axes.set_ylim(len(order) - 0.4, -0.6)
        token_axis(axes.yaxis, ranked)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(score)
    return axes


def change_curves(evaluation: Result, way: str = "deletion", ax: Axes | None = None) -> Axes:
    """Draw how far an output moves as sources are replaced ("deletion"), or put back ("insertion"), by each measure.

    The best and the worst order that the search found stand beside them.
    """
    name = f"{way}_curve"
    check_drawable("change_curves", evaluation, (name,), axes=("curve", "share"))
    curves = evaluation.axis("curve").values
    shares = evaluation.axis("share").values
    with drawing(ax, style.SINGLE, 2.8) as axes:
        for curve, values in zip(curves, read_table(evaluation, name, "curve", "share"), strict=True):
            (line,) = axes.plot(shares, values, label=curve)
            if curve.endswith(" found"):
                line.set(linestyle="--", color="0.5")
        axes.set_xlabel(f"sources {'replaced' if way == 'deletion' else 'put back'}, the largest first (%)")
        percent(axes.xaxis)
        axes.set_ylabel("change")
        legend(axes, columns=2)
    return axes
