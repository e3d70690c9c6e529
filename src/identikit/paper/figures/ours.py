"""Our own figures, beside the paper's: what attention could have been, and what collapsing a head's matrices does."""

from functools import partial

import pandas as pd
from matplotlib.axes import Axes
from pandas import DataFrame

from identikit.attention.certainty import WEIGHTS, head_means, mean_over_rows
from identikit.paper.evidence import Evidence
from identikit.paper.figures.figure import (
    LAYER,
    Drawing,
    Figures,
    draw_panels,
    label_shares_by_layer,
    make_room,
    rows_with,
)
from identikit.plots import forms as form
from identikit.plots.certainty import GROUPS, certain_mass_by_length, mass_band, value_points
from identikit.plots.style import BLACK, BLUE, DOUBLE, RED, Style, layer_axis, legend

_POSSIBLE = "over all alternatives (attention with the same output)"
_COLLAPSED = {
    (product, quantity): Style(f"{formula}, {label}", colour, marker, line)
    for product, formula, line in (("query-key", "Q·Kᵀ", "-"), ("value", "V·H", "--"))
    for quantity, label, colour, marker in (
        ("float64", "float64", BLUE, "o"),
        ("float32", "float32", RED, "s"),
        ("model", "model", BLACK, "^"),
        ("operations", "multiply-adds", BLUE, "o"),
        ("time", "time", RED, "s"),
    )
}

figure = Figures()


def _label(evidence: Evidence, data: DataFrame) -> str:
    return f"{evidence.label} · {sum(data['rows']):,} rows drawn at random"


@figure(
    "fig1a-sharp",
    "Not in the paper: the share of attention that is determined, that is the same in all alternatives, "
    "beside the correlation of Figure 1a; each point is a text.",
    needs=("correlation", "intervals"),
    shows="pearson, certain_mass by text",
    data="wikitext",
)
def certain_by_length(evidence: Evidence) -> Drawing:
    """Determined share beside the correlation of raw with effective attention, a row per text."""
    mass = mean_over_rows(evidence.tables["intervals"], ["certain_mass"], ["text", "tokens"])
    correlation = evidence.tables["correlation"].filter(["text", "tokens", "pearson"])
    data = correlation.merge(mass.filter(["text", "rows", "certain_mass"]), on="text")

    def panel(axes: Axes) -> None:
        certain_mass_by_length(data, evidence.subject.d_value, axes, correlation=data)

    return draw_panels(evidence, data, panel, height=2.9, label=_label(evidence, data))


@figure(
    "fig1bc-sharp",
    f"Not in the paper: Figures 1b and 1c with the range of raw attention {_POSSIBLE}. Means over heads.",
    needs=("groups",),
    shows="raw, effective, lower, upper by group, layer",
    data="wikitext",
)
def mass_of_types(evidence: Evidence) -> Drawing:
    """Attention to each token type by layer, and the least and greatest possible.

    A causal model has the first token instead of [CLS] and [SEP].
    """
    types = ("first", "punctuation") if evidence.subject.causal else ("cls", "sep", "punctuation")
    table = rows_with(evidence.tables["groups"], {"group": types})
    data = mean_over_rows(table.query("rows > 0"), WEIGHTS, ["group", "layer"])

    def panel(axes: Axes, group: str, letter: str) -> None:
        mass_band(axes, data.query("group == @group"))
        label_shares_by_layer(axes, evidence)
        make_room(axes, data[list(WEIGHTS)].to_numpy().min(), max(data["upper"]))
        legend(axes, columns=1, title=f"({letter}) to {GROUPS[group]}")

    groups = [name for name in GROUPS if name in set(data["group"])]
    panels = [partial(panel, group=group, letter=letter) for group, letter in zip(groups, "abc", strict=False)]
    return draw_panels(evidence, data, *panels, width=DOUBLE, height=2.9, label=_label(evidence, data))


@figure(
    "sinks",
    f"Not in the paper: (a) raw and effective attention to a sink, and its range {_POSSIBLE}. (b) The norm of its "
    "values against the median of the other tokens'.",
    needs=("groups",),
    shows="value_size by layer, head",
    data="wikitext",
)
def sinks(evidence: Evidence) -> Drawing:
    """What the special tokens (in a causal model the first token) receive from each head, and their values' size."""
    groups = evidence.tables["groups"]
    first = evidence.subject.causal or "special" not in set(groups["group"])
    group = "first" if first else "special"
    data = head_means(groups, group).assign(group=group)

    def mass(axes: Axes) -> None:
        mass_band(axes, data)
        label_shares_by_layer(axes, evidence)
        legend(axes, columns=3, title=f"(a) attention to {GROUPS[group]}")

    def values(axes: Axes) -> None:
        value_points(axes, data)
        layer_axis(axes.xaxis, range(1, evidence.subject.n_layers + 1), LAYER)
        legend(axes, columns=2, title=f"(b) size of values of {GROUPS[group]}")

    return draw_panels(evidence, data, mass, values, width=DOUBLE, label=_label(evidence, data))


@figure(
    "collapse",
    "Not in the paper: each product of two of a head's matrices collapsed into one matrix. (a) The error this causes, "
    "next to the model's own rounding. (b) The cost: below the line it would pay off.",
    needs=("collapse",),
    shows="value by panel, product, quantity, tokens",
    data="",
)
def collapse(evidence: Evidence) -> Drawing:
    """The largest relative error over layers, and the mean ratio of collapsed to factored, where it applies."""
    table = evidence.tables["collapse"].query("applies")
    table = table.assign(operations=table["operations_collapsed"] / table["operations_factored"])
    series = []
    for panel, quantity, column, average in (
        ("a", "float64", "error_float64", "max"),
        ("a", "float32", "error_float32", "max"),
        ("a", "model", "error_model", "max"),
        ("b", "operations", "operations", "mean"),
        ("b", "time", "time_ratio", "mean"),
    ):
        values = table.groupby(["product", "tokens"], as_index=False).agg(value=(column, average))
        series.append(values.assign(panel=panel, quantity=quantity))
    data = pd.concat(series, ignore_index=True)

    def lines(axes: Axes, panel: str, ylabel: str) -> None:
        form.lines(axes, data.query("panel == @panel"), _COLLAPSED, by=["product", "quantity"], x="tokens", y="value")
        axes.set(xlabel="tokens in the text", ylabel=ylabel)
        axes.set_xticks(sorted(data["tokens"].unique()))
        legend(axes, columns=2, title=f"({panel})")

    def errors(axes: Axes) -> None:
        lines(axes, "a", "largest relative error")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")

    def costs(axes: Axes) -> None:
        lines(axes, "b", "collapsed over factored")
        axes.axhline(1, color=BLACK, linewidth=0.6)

    label = f"{evidence.subject.model} · made-up tokens · seed {evidence.seed}"
    return draw_panels(evidence, data, errors, costs, width=DOUBLE, label=label)
