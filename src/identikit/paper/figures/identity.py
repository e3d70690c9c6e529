"""Figures on how often tokens are recovered from hidden vectors: 2, 7 to 17, 38 and 39."""

from collections.abc import Hashable, Mapping, Sequence
from functools import partial

import pandas as pd
from matplotlib.axes import Axes
from pandas import DataFrame

from identikit.paper.evidence import Evidence
from identikit.paper.figures.figure import Drawing, Figures, draw_panels, label_shares_by_layer, rows_with
from identikit.plots import forms as form
from identikit.plots.style import BLUE, RED, Style, styles
from identikit.plots.tokens import RATE, RATES, rate_lines
from identikit.tokens.experiments import mean_rates

_FOLDED = "Means over folds, with 95 % confidence intervals."
_ONE_FOLD = "Measured only on the test sentences of the first fold."
_MAPS = {"linear": "A linear map", "mlp": "An MLP"}
_WORDS = {"linear": "linear", "mlp": "MLP", "cosine": "cosine", "l2": "L2"}

# How series look, by the columns of their data.
_SPLITS = {
    (map, split): Style(f"{_WORDS[map]}, {split}", colour, marker, line, split == "test")
    for split, line in (("train", "--"), ("test", "-"))
    for map, colour, marker in (("linear", BLUE, "s"), ("mlp", RED, "^"))
}
_TUNED = {
    (distance, tuned): Style(f"{_WORDS[distance]}, {words}", colour, marker, line, tuned)
    for tuned, words, line in ((True, "fine-tuned", "-"), (False, "before", "--"))
    for distance, colour, marker in (("cosine", BLUE, "s"), ("l2", RED, "^"))
}
_NEIGHBOURS = {
    (side * step,): Style(f"{words} {step}", colour, marker, line, side < 0)
    for side, words, colour in ((-1, "previous", BLUE), (1, "next", RED))
    for step, marker, line in ((1, "o", "-"), (2, "s", "--"), (3, "^", ":"))
}

ColumnValues = Mapping[str, Sequence[Hashable]]
_USUAL: ColumnValues = {"map": ("naive", "linear", "mlp"), "offset": (0,), "data_share": (1.0,), "split": ("test",)}

figure = Figures()


def _mean_rates(table: DataFrame, by: list[str], values: ColumnValues) -> DataFrame:
    """Average the rates with these column values over folds; by default on test data and of the token itself.

    Each has its 95 % confidence interval from `low` to `high` (NaN for one fold), its number of `folds`, and the mean
    number of `tokens` in a fold.
    """
    return mean_rates(rows_with(table, {**_USUAL, **values}), by)


def _same_layer(evidence: Evidence, table: str, by: list[str], values: ColumnValues) -> DataFrame:
    """Average the rates of maps that are tested on the layer they were fitted to."""
    return _mean_rates(evidence.tables[table].query("layer == test_layer"), by, values)


def _label(evidence: Evidence, data: DataFrame) -> str:
    """Return the label, with the number of folds and tokens that maps are tested on."""
    if data.empty:
        return evidence.label
    numbers = data["tokens"].round().astype(int)
    tokens = " to ".join(f"{number:,}" for number in dict.fromkeys((numbers.min(), numbers.max())))
    folds = max(data["folds"])
    tested = f"one fold of {tokens} tokens" if folds == 1 else f"{folds} folds of about {tokens} tokens"
    return f"{evidence.label} · rates over {tested}"


def _drawing(evidence: Evidence, data: DataFrame, series: form.Styles, by: list[str], ylabel: str = RATE) -> Drawing:
    """Draw rates by layer."""

    def panel(axes: Axes) -> None:
        rate_lines(axes, data, series, by=by)
        axes.set_ylabel(ylabel)
        label_shares_by_layer(axes, evidence)

    return draw_panels(evidence, data, panel, height=2.9, label=_label(evidence, data))


def same_layer(evidence: Evidence, table: str) -> Drawing:
    """Rates of all maps and distances by layer."""
    data = _same_layer(evidence, table, ["map", "distance", "layer"], {})
    return _drawing(evidence, data, RATES, ["map", "distance"])


for _name, _data in (("fig2a", "mrpc"), ("fig38", "cola"), ("fig39", "mnli-500")):
    figure(
        _name,
        "Share of tokens recovered from their hidden vectors, by layer; maps are trained and tested on the same "
        f"layer. {_FOLDED}",
        needs=("rates",),
        shows="rate by map, distance, layer",
        data=_data,
    )(partial(same_layer, table="rates"))

figure(
    "fig11",
    f"Share of tokens recovered across a single layer: from a layer's output to its own input. {_ONE_FOLD}",
    needs=("previous",),
    shows="rate by map, distance, layer",
)(partial(same_layer, table="previous"))


def across_layers(evidence: Evidence, map: str, distance: str) -> Drawing:
    """Rates of maps trained on the named layers and tested on all."""
    layers = list(evidence.subject.named_layers.values())
    values: ColumnValues = {"map": [map], "distance": [distance], "layer": layers}
    data = _mean_rates(evidence.tables["rates"], ["layer", "test_layer"], values)

    def panel(axes: Axes) -> None:
        series = styles((layer, str(layer)) for layer in layers)
        rate_lines(axes, data, series, by=["layer"], x="test_layer", title="trained on layer")
        label_shares_by_layer(axes, evidence, "tested on layer (counted from 1)")

    return draw_panels(evidence, data, panel, height=2.8, label=_label(evidence, data))


for _name, _map, _distance in (
    ("fig2b", "linear", "cosine"),
    ("fig8", "linear", "l2"),
    ("fig9", "mlp", "l2"),
    ("fig10", "mlp", "cosine"),
):
    figure(
        _name,
        f"{_MAPS[_map]} trained for {_WORDS[_distance]} distance on one layer and tested on all of them. {_FOLDED}",
        needs=("rates",),
        shows="rate by layer, test_layer",
    )(partial(across_layers, map=_map, distance=_distance))


@figure(
    "fig7",
    f"Rates on training and test data under L2 distance: how much the linear map and the MLP overfit. {_FOLDED}",
    needs=("rates",),
    shows="rate by map, split, layer",
)
def generalisation(evidence: Evidence) -> Drawing:
    """Rates of learned maps on training and on test data."""
    values = {"map": ("linear", "mlp"), "distance": ("l2",), "split": ("train", "test")}
    data = _same_layer(evidence, "rates", ["map", "split", "layer"], values)
    return _drawing(evidence, data, _SPLITS, ["map", "split"])


def before_and_after(evidence: Evidence) -> Drawing:
    """Naive rates across single layers, of the model and of its fine-tuned form."""
    before = _same_layer(evidence, "untuned", ["distance", "layer"], {"map": ["naive"]})
    after = _same_layer(evidence, "finetuned", ["distance", "layer"], {"map": ["naive"]})
    data = pd.concat([before.assign(finetuned=False), after.assign(finetuned=True)], ignore_index=True)
    return _drawing(evidence, data, _TUNED, ["distance", "finetuned"])


for _name, _data in (("fig12", "mrpc"), ("fig13", "cola")):
    figure(
        _name,
        "Tokens recovered across single layers by the naive map, before (dashed) and after fine-tuning (solid). "
        f"{_FOLDED}",
        needs=("untuned", "finetuned"),
        shows="rate by distance, finetuned, layer",
        data=_data,
    )(before_and_after)


def neighbours(evidence: Evidence, map: str, distance: str) -> Drawing:
    """Rates of the tokens around a hidden vector's own."""
    offsets = [offset for (offset,) in _NEIGHBOURS]
    values = {"map": [map], "distance": [distance], "offset": offsets}
    data = _same_layer(evidence, "neighbours", ["offset", "layer"], values)
    return _drawing(evidence, data, _NEIGHBOURS, ["offset"], ylabel="neighbours recovered (%)")


for _name, _map, _distance in (
    ("fig14", "linear", "cosine"),
    ("fig15", "mlp", "cosine"),
    ("fig16", "mlp", "l2"),
    ("fig17", "linear", "l2"),
):
    figure(
        _name,
        f"{_MAPS[_map]} trained for {_WORDS[_distance]} distance recovers the tokens up to three places before (blue) "
        f"and after (red) a hidden vector's own. {_ONE_FOLD}",
        needs=("neighbours",),
        shows="rate by offset, layer",
    )(partial(neighbours, map=_map, distance=_distance))
