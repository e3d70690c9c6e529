"""Plots of how much of attention is determined, from the tables that `identikit attention --intervals` writes."""

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from pandas import DataFrame

from identikit.attention.certainty import WEIGHTS, mean_over_rows
from identikit.plots import style
from identikit.plots.reading import drawing
from identikit.plots.style import legend, percent

_PEARSON = "Pearson, raw with effective"
GROUPS = {
    "special": "special tokens",
    "first": "the first token",
    "cls": "[CLS]",
    "sep": "[SEP]",
    "punctuation": "periods and commas",
}


def certain_mass_by_length(
    intervals: DataFrame,
    d_value: int,
    ax: Axes | None = None,
    *,
    correlation: DataFrame | None = None,
) -> Axes:
    """Draw the determined share of texts by their length, a point per text, from the table `intervals`.

    It is the weight that all alternatives share. With the table `correlation`, that of raw with effective attention
    stands beside it. Up to the line, at `d_value` tokens, everything is determined.
    """
    texts = mean_over_rows(intervals, ["certain_mass"], ["text", "tokens"])
    with drawing(ax, style.SINGLE, 2.7) as axes:
        label = "determined share"
        if correlation is not None:
            label = "correlation, determined share"
            _points(axes, correlation, "pearson", style.BLUE, "o", label=_PEARSON)
        _points(axes, texts, "certain_mass", style.ORANGE, "s", label="determined share")
        _length_axis(axes, d_value)
        axes.set_ylabel(label)
        axes.set_ylim(top=1.03)
        legend(axes, columns=1)
    return axes


def correlation_by_length(frame: DataFrame, d_value: int, ax: Axes | None = None) -> Axes:
    """Draw the correlation of raw with effective attention by the length of the text, a point per text.

    `frame` has columns `tokens` and `pearson`. Up to the line, at `d_value` tokens, a text has no more tokens than a
    value vector has numbers, and the two can be equal.
    """
    with drawing(ax, style.SINGLE, 2.6) as axes:
        _points(axes, frame, "pearson", style.BLUE, "o")
        _length_axis(axes, d_value)
        axes.set_ylabel(_PEARSON)
        legend(axes, columns=1)
    return axes


def _points(axes: Axes, texts: DataFrame, column: str, colour: str, marker: str, *, label: str | None = None) -> None:
    """Draw a number of each text by its length."""
    axes.scatter(texts["tokens"], texts[column], s=9, color=colour, marker=marker, alpha=0.6, linewidths=0, label=label)


def _length_axis(axes: Axes, d_value: int) -> None:
    """Label the lengths of texts along x, with a line at the size of a value vector."""
    axes.axvline(d_value, color=style.RED, linestyle="--", linewidth=0.9, label=f"size of a value vector: {d_value}")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel("tokens in the text")


def mass_band(axes: Axes, heads: DataFrame) -> None:
    """Draw raw attention by layer, its range as a band, and effective attention, averaged over heads."""
    means = mean_over_rows(heads.dropna(subset=list(WEIGHTS)), WEIGHTS, ["layer"])
    layers = means["layer"].to_numpy(float)
    band = axes.fill_between(layers, means["lower"], means["upper"], color=style.SKY, alpha=0.45, linewidth=0)
    band.set_label("possible [min, max]")
    axes.plot(layers, means["raw"], color=style.BLACK, marker="o", label="raw")
    axes.plot(layers, means["effective"], color=style.RED, linestyle="--", marker="s", label="effective")
    axes.set_ylabel("attention (%)")
    axes.set_ylim(bottom=min(0.0, 1.05 * means["effective"].to_numpy(float).min()))
    percent(axes.yaxis)


def value_points(axes: Axes, heads: DataFrame) -> None:
    """Draw the size of a group's values against the others' by layer, a point per head; a line joins the medians."""
    heads = heads.dropna(subset="value_size")
    axes.scatter(heads["layer"], heads["value_size"], s=7, alpha=0.45, linewidths=0, color=style.BLUE, label="head")
    medians = heads.groupby("layer")["value_size"].median()
    axes.plot(medians.index, medians, color=style.BLUE, marker="o", label="median of heads")
    axes.axhline(1.0, color=style.BLACK, linewidth=0.6)
    axes.set_ylabel("size / median of others")
    axes.set_ylim(bottom=0)
