"""How the figures of the paper look: from the data of a figure and the evidence to a finished sheet."""

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from pandas import DataFrame

from identikit.maths.mixing import first_middle_last
from identikit.paper.evidence import Evidence
from identikit.plots import forms as form
from identikit.plots.style import (
    BLACK,
    BLUE,
    DOUBLE,
    RED,
    SKY,
    SMALL,
    Style,
    layer_axis,
    layer_ticks,
    legend,
    percent,
    styles,
    token_axis,
)

_RATE = "token identifiability rate (%)"
_OWN = "own contribution (%)"
_RELATIVE = "input's position relative to the output"
_MAPS = {"naive": (BLACK, "o"), "linear": (BLUE, "s"), "mlp": (RED, "^")}
_WORDS = {"naive": "naive", "linear": "linear", "mlp": "MLP", "cosine": "cosine", "l2": "L2"}

# How the series of the figures with rates look, by the columns of their data.
PROBES = {
    (name, distance): Style(f"{_WORDS[name]}, {_WORDS[distance]}", *_MAPS[name], line, filled)
    for distance, line, filled in (("cosine", "-", True), ("l2", "--", False))
    for name in _MAPS
}
SPLITS = {
    (name, split): Style(f"{_WORDS[name]}, {split}", *_MAPS[name], line, filled)
    for split, line, filled in (("train", "--", False), ("test", "-", True))
    for name in ("linear", "mlp")
}
TUNED = {
    (distance, tuned): Style(f"{_WORDS[distance]}, {words}", colour, marker, line, filled)
    for tuned, words, line, filled in ((True, "fine-tuned", "-", True), (False, "before", "--", False))
    for distance, colour, marker in (("cosine", BLUE, "s"), ("l2", RED, "^"))
}
NEIGHBOURS = {
    (side * step,): Style(f"{words} {step}", colour, marker, line, side < 0)
    for side, words, colour in ((-1, "previous", BLUE), (1, "next", RED))
    for step, marker, line in ((1, "o", "-"), (2, "s", "--"), (3, "^", ":"))
}

_TYPES = {
    ("cls",): Style("[CLS]", BLUE, "o", "-"),
    ("sep",): Style("[SEP]", RED, "s", "--"),
    ("punctuation",): Style("period, comma", BLACK, "^", "-."),
}
_SOURCES = {("sep",): Style("[SEP] → [SEP]", RED, "s", "--"), ("rest",): Style("other → [SEP]", BLUE, "o", "-")}
_DISTANCES = styles(
    zip(("1", "2", "3", "4-5", "6-10", "11-"), ("1st", "2nd", "3rd", "4th–5th", "6th–10th", "11th on"), strict=True)
)


_COLLAPSED = {
    (which, quantity): Style(f"{words}, {label}", colour, marker, line)
    for which, words, line in (("query-key", "Q·Kᵀ", "-"), ("value", "V·H", "--"))
    for quantity, label, colour, marker in (
        ("float64", "float64", BLUE, "o"),
        ("float32", "float32", RED, "s"),
        ("model", "model", BLACK, "^"),
        ("operations", "multiply-adds", BLUE, "o"),
        ("time", "time", RED, "s"),
    )
}


def draw_collapse(frame: DataFrame, evidence: Evidence) -> Figure:
    """Error and cost of one matrix for each product of two, by length."""

    def side(axes: Axes, letter: str, label: str, scale: str) -> None:
        form.lines(axes, frame.query("panel == @letter"), _COLLAPSED, by=["product", "quantity"], x="tokens", y="value")
        axes.set(xlabel="tokens in the text", ylabel=label, yscale=scale)
        axes.set_xticks(sorted(frame["tokens"].unique()))
        if scale == "log":
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
        else:
            axes.axhline(1, color=BLACK, linewidth=0.6)
        legend(axes, columns=2, title=f"({letter})")

    sides = (("a", "largest relative error", "log"), ("b", "collapsed over factored", "linear"))
    panels = [partial(side, letter=letter, label=label, scale=scale) for letter, label, scale in sides]
    words = f"{evidence.subject.model} · made-up tokens · seed {evidence.seed}"
    return form.sheet(words, *panels, width=DOUBLE)


def draw_correlation(frame: DataFrame, evidence: Evidence) -> Figure:
    """Correlation of raw with effective attention by length (Fig. 1a)."""
    size = evidence.subject.d_value

    def panel(axes: Axes) -> None:
        form.scatter(axes, frame, Style("", BLUE), x="tokens", y="pearson")
        axes.axvline(size, color=RED, linestyle="--", linewidth=0.9, label=f"size of a value vector: {size}")
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
        axes.set(xlabel="tokens in the text", ylabel="Pearson, raw with effective")
        legend(axes, columns=1)

    return form.sheet(evidence.label, panel)


def draw_types(frame: DataFrame, evidence: Evidence, *, map: str) -> Figure:
    """Attention to token types (Fig. 1b, 1c)."""

    def panel(axes: Axes) -> None:
        _heads(axes, frame, evidence, _TYPES, by="target", ylabel=f"average {map} attention (%)")
        legend(axes, columns=3)

    return form.sheet(evidence.label, panel)


def draw_separators(frame: DataFrame, evidence: Evidence) -> Figure:
    """Attention to [SEP], effective and raw (Fig. 5)."""

    def side(axes: Axes, letter: str, name: str) -> None:
        part = frame.query("map == @name")
        _heads(axes, part, evidence, _SOURCES, by="source", ylabel=f"average {name} attention (%)")
        legend(axes, columns=2, title=f"({letter}) {name}")

    panels = [partial(side, letter=letter, name=name) for letter, name in (("a", "effective"), ("b", "raw"))]
    return form.sheet(evidence.label, *panels, width=DOUBLE)


def _heads(axes: Axes, frame: DataFrame, evidence: Evidence, series: form.Styles, *, by: str, ylabel: str) -> None:
    """Each head a point, the mean over heads a line."""
    form.clouds(axes, frame.query("head > 0"), series, by=by, x="layer", y="attention")
    form.lines(axes, frame.query("head == 0"), series, by=[by], x="layer", y="attention")
    layer_axis(axes, evidence.subject.n_layers)
    percent(axes.yaxis)
    axes.set_ylabel(ylabel)


def draw_passage(frame: DataFrame, evidence: Evidence) -> Figure:
    """Raw, effective and null attention of one head (Fig. 6)."""
    first = frame.iloc[0]
    marked = frame[frame["highlighted"]].iloc[0]
    keys = frame.drop_duplicates("key")["key_token"].tolist()
    queries = frame.drop_duplicates("query")["query_token"].tolist()

    def panel(axes: Axes, letter: str, name: str) -> None:
        form.heat_map(axes, frame.pivot(index="query", columns="key", values=name), label="weight (%)")
        form.crosshair(axes, x=int(marked["key"]), y=int(marked["query"] - first["query"]))
        axes.set_yticks(range(len(queries)), queries, fontsize=SMALL)
        axes.tick_params(axis="y", length=1.5, pad=1)
        axes.set_title(f"({letter}) {name} attention weights, layer {first['layer']}, head {first['head']}", loc="left")
        axes.set(xticks=[], ylabel="query")
        if name == "null":
            axes.set_xlabel("key")
            token_axis(axes, keys)

    panels = [
        partial(panel, letter=letter, name=name)
        for letter, name in zip("abc", ("raw", "effective", "null"), strict=True)
    ]
    label = _own_text(evidence, "passage of Appendix A.3", len(keys))
    return form.sheet(label, *panels, width=DOUBLE, height=3 * 0.088 * len(queries) + 2.0, columns=[1])


def _own_text(evidence: Evidence, words: str, tokens: int) -> str:
    return f"{evidence.subject.model} · {words} · n = 1 text, {tokens} tokens · seed {evidence.seed}"


def draw_rates(
    frame: DataFrame, evidence: Evidence, *, series: form.Styles, by: Sequence[str], ylabel: str = _RATE
) -> Figure:
    """Rates by layer (Fig. 2a, 7, 11 to 17, 38, 39)."""

    def panel(axes: Axes) -> None:
        form.lines(axes, frame, series, by=by, x="layer", y="rate")
        layer_axis(axes, evidence.subject.n_layers)
        percent(axes.yaxis)
        axes.set_ylabel(ylabel)
        legend(axes, columns=2)

    return form.sheet(_tested(frame, evidence), panel, height=2.9)


def draw_across(frame: DataFrame, evidence: Evidence) -> Figure:
    """Rates of maps trained on one layer and tested on all (Fig. 2b, 8 to 10)."""
    series = styles((layer, str(layer)) for layer in evidence.subject.named_layers)

    def panel(axes: Axes) -> None:
        form.lines(axes, frame, series, by=["layer"], x="test_layer", y="rate")
        layer_axis(axes, evidence.subject.n_layers, "tested on layer")
        percent(axes.yaxis)
        axes.set_ylabel(_RATE)
        legend(axes, columns=4, title="trained on layer")

    return form.sheet(_tested(frame, evidence), panel, height=2.8)


def _tested(frame: DataFrame, evidence: Evidence) -> str:
    """The label of a figure of rates, and what the rates are over: maps are tested on a part of the texts."""
    numbers, folds = sorted({round(tokens) for tokens in frame["tokens"]}), max(frame["folds"])
    tokens = " to ".join(f"{number:,}" for number in dict.fromkeys((numbers[0], numbers[-1])))
    over = f"one fold of {tokens} tokens" if folds == 1 else f"{folds} folds of about {tokens} tokens"
    return f"{evidence.label} · rates over {over}"


def _own_boxes(axes: Axes, frame: DataFrame, evidence: Evidence, *, title: str = "") -> None:
    form.boxes(axes, frame, frame["layer"].tolist())
    layer_axis(axes, evidence.subject.n_layers)
    percent(axes.yaxis)
    axes.set_ylabel(_OWN)
    axes.set_title(title, loc="left")


def _outweighed_bars(axes: Axes, frame: DataFrame, evidence: Evidence, *, title: str = "") -> None:
    form.bars(axes, frame, x="layer", y="outweighed", colour=BLUE)
    layer_axis(axes, evidence.subject.n_layers)
    percent(axes.yaxis)
    axes.set_ylabel("tokens outweighed, P̃ (%)")
    axes.set_title(title, loc="left")


def _group_lines(axes: Axes, frame: DataFrame, evidence: Evidence, *, title: str = "") -> None:
    form.lines(axes, frame, _DISTANCES, by=["distance"], x="layer", y="share")
    layer_axis(axes, evidence.subject.n_layers)
    percent(axes.yaxis)
    axes.set_ylabel("share of the group's total (%)")
    legend(axes, columns=3, title=title)


def _offset_lines(axes: Axes, frame: DataFrame, evidence: Evidence, *, xlabel: str, title: str = "") -> None:
    layers = [layer + 1 for layer in first_middle_last(evidence.subject.n_layers)]
    form.lines(axes, frame, styles((layer, f"layer {layer}") for layer in layers), by=["layer"], x="offset", y="share")
    percent(axes.yaxis)
    axes.set_ylim(bottom=0)
    axes.set(xlabel=xlabel, ylabel="share of the layer's total (%)")
    legend(axes, columns=3, title=title)


def draw_own(frame: DataFrame, evidence: Evidence) -> Figure:
    """Own contribution by layer (Fig. 3a)."""
    return form.sheet(evidence.label, partial(_own_boxes, frame=frame, evidence=evidence))


def draw_outweighed(frame: DataFrame, evidence: Evidence) -> Figure:
    """Share of outweighed tokens by layer (Fig. 3b)."""
    return form.sheet(evidence.label, partial(_outweighed_bars, frame=frame, evidence=evidence))


def draw_groups(frame: DataFrame, evidence: Evidence) -> Figure:
    """Contribution of neighbours by layer (Fig. 4a)."""
    return form.sheet(evidence.label, partial(_group_lines, frame=frame, evidence=evidence), height=2.8)


def draw_offsets(frame: DataFrame, evidence: Evidence, *, xlabel: str = _RELATIVE) -> Figure:
    """Contribution by relative position (Fig. 4b, 18)."""
    panel = partial(_offset_lines, frame=frame, evidence=evidence, xlabel=xlabel)
    return form.sheet(evidence.label, panel, height=2.8)


def draw_mixing(frame: DataFrame, evidence: Evidence) -> Figure:
    """Own contribution and the share of outweighed tokens (Fig. 40, 42)."""
    return form.sheet(
        evidence.label,
        partial(_own_boxes, frame=frame, evidence=evidence, title="(a)"),
        partial(_outweighed_bars, frame=frame, evidence=evidence, title="(b)"),
        width=DOUBLE,
    )


def draw_context(frame: DataFrame, evidence: Evidence) -> Figure:
    """Contribution of neighbours by layer and by relative position (Fig. 41, 43)."""
    near, far = (frame.query("panel == @panel") for panel in "ab")
    return form.sheet(
        evidence.label,
        partial(_group_lines, frame=near, evidence=evidence, title="(a)"),
        partial(_offset_lines, frame=far, evidence=evidence, xlabel=_RELATIVE, title="(b)"),
        width=DOUBLE,
        height=2.8,
    )


def draw_history(frame: DataFrame, evidence: Evidence, *, token: str) -> Figure:
    """What the inputs contribute to one token, layer by layer (Fig. 19 to 25)."""
    layers = evidence.subject.n_layers
    tokens = frame.drop_duplicates("input")["input_token"].tolist()
    own, context = frame.query("own"), frame.query("not own")

    def cells(axes: Axes) -> None:
        if frame.empty:
            return
        table = frame.pivot(index="layer", columns="input", values="contribution")
        form.heat_map(axes, table, label="contribution (%)", greatest=context["contribution"].to_numpy(float).max())
        axes.set_ylim(-0.5, layers - 0.5)
        axes.set_yticks([layer - 1 for layer in layer_ticks(layers)], [str(layer) for layer in layer_ticks(layers)])
        axes.set(xlabel="input token", ylabel="layer")
        axes.set_title(f"contribution to “{token}”, the token framed", loc="left")
        form.outline(axes, own["input"].tolist()[0], colour=SKY)
        token_axis(axes, tokens)

    def side(axes: Axes) -> None:
        form.level_bars(axes, own, x="contribution", y="layer", colour=SKY)
        axes.set_ylim(0.5, layers + 0.5)
        axes.set_yticks([])
        percent(axes.xaxis)
        axes.set_xlabel("its own (%)")

    label = _own_text(evidence, "sentence of Appendix C.4", len(tokens))
    return form.sheet(label, cells, side, width=DOUBLE, height=2.0 + min(0.12 * layers, 3.0), columns=[6, 1])


def draw_tags(frame: DataFrame, evidence: Evidence, *, layer: int) -> Figure:
    """Own contribution by part of speech in one layer (Fig. 26 to 37)."""

    def panel(axes: Axes) -> None:
        form.boxes(axes, frame, range(len(frame)))
        names = [f"{tag} · {tokens:,}" for tag, tokens in zip(frame["tag"], frame["tokens"], strict=True)]
        axes.set_xticks(range(len(frame)), names, rotation=90)
        axes.set_xlim(-0.7, len(frame) - 0.3)
        percent(axes.yaxis)
        axes.set(xlabel="part of speech · number of tokens", ylabel=_OWN)
        axes.set_title(f"layer {layer}", loc="left")

    return form.sheet(evidence.label, panel, width=DOUBLE, height=3.0)
