"""How the paper's figures look: from the data of a figure and the evidence to a finished sheet.

The forms are those of `identikit.plots`. Layers and heads count from 1 here, as in the paper, and the axes say so.
"""

from functools import partial
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from identikit.maths.mixing import first_middle_last
from identikit.paper.evidence import Evidence
from identikit.paper.figures.frames import attention_to_types
from identikit.plots import forms as form
from identikit.plots.certainty import GROUPS, certain_mass_by_length, correlation_by_length, mass_band, value_points
from identikit.plots.maps import Maps, map_panels
from identikit.plots.style import (
    BLACK,
    BLUE,
    DOUBLE,
    RED,
    Style,
    house_style,
    layer_axis,
    legend,
    percent,
    sheet_of,
    styles,
)
from identikit.plots.tokens import RATE, rate_lines

_OWN = "own contribution (%)"
_RELATIVE = "input's position relative to the output"
_LAYER = "layer (counted from 1)"
_WORDS = {"linear": "linear", "mlp": "MLP", "cosine": "cosine", "l2": "L2"}
_LEARNED = {"linear": (BLUE, "s"), "mlp": (RED, "^")}

# How the series of the figures with rates look, by the columns of their data.
SPLITS = {
    (name, split): Style(f"{_WORDS[name]}, {split}", *_LEARNED[name], line, filled)
    for split, line, filled in (("train", "--", False), ("test", "-", True))
    for name in _LEARNED
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
_OPENING = {("cls",): Style("opens a text", BLUE, "o", "-")}  # in a causal model, which has no [CLS]
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
    return form.sheet(*panels, width=DOUBLE)


def draw_correlation(frame: DataFrame, evidence: Evidence) -> Figure:
    """Correlation of raw with effective attention by length (Fig. 1a)."""

    def panel(axes: Axes) -> None:
        correlation_by_length(frame, evidence.subject.d_value, axes)

    return form.sheet(panel)


def draw_certain(frame: DataFrame, evidence: Evidence) -> Figure:
    """Certain mass and the correlation of raw with effective attention, by length."""

    def panel(axes: Axes) -> None:
        certain_mass_by_length(frame, evidence.subject.d_value, axes, correlation=frame)

    return form.sheet(panel, height=2.9)


def draw_mass(frame: DataFrame, evidence: Evidence) -> Figure:
    """Raw attention to each token type with its possible range, and effective attention, on one scale."""
    groups = [name for name in GROUPS if name in set(frame["group"])]
    ends = frame[["raw", "effective", "lower", "upper"]].min().min(), frame["upper"].max()
    room = 0.05 * (ends[1] - ends[0])

    def panel(axes: Axes, group: str, letter: str) -> None:
        mass_band(axes, frame.query("group == @group"), x="layer")
        _by_layer(axes, evidence)
        axes.set_ylim(ends[0] - room, ends[1] + room)
        legend(axes, columns=1, title=f"({letter}) to {GROUPS[group]}")

    panels = [partial(panel, group=group, letter=letter) for group, letter in zip(groups, "abc", strict=False)]
    return form.sheet(*panels, width=DOUBLE, height=2.9)


def draw_sink(frame: DataFrame, evidence: Evidence) -> Figure:
    """What a sink receives by layer, and the size of its values."""
    words = GROUPS[frame["group"].iloc[0]]

    def mass(axes: Axes) -> None:
        mass_band(axes, frame, x="layer")
        _by_layer(axes, evidence)
        legend(axes, columns=3, title=f"(a) attention to {words}")

    def values(axes: Axes) -> None:
        value_points(axes, frame, x="layer")
        layer_axis(axes.xaxis, range(1, evidence.subject.n_layers + 1), _LAYER)
        legend(axes, columns=2, title=f"(b) size of values of {words}")

    return form.sheet(mass, values, width=DOUBLE)


def draw_types(frame: DataFrame, evidence: Evidence, *, map: str) -> Figure:
    """Attention to token types (Fig. 1b, 1c); raw and effective attention have the same scale."""
    both = [attention_to_types(evidence, map=name) for name in ("raw", "effective")]
    weights = [weight for part in both for weight in part["attention"]]
    types = _TYPES | _OPENING if evidence.subject.causal else _TYPES

    def panel(axes: Axes) -> None:
        _heads(axes, frame, evidence, types, by="target", ends=(min(weights), max(weights)))
        axes.set_ylabel(f"average {map} attention (%)")
        legend(axes, columns=3)

    return form.sheet(panel)


def draw_separators(frame: DataFrame, evidence: Evidence) -> Figure:
    """Attention to [SEP], effective and raw, on the same scale (Fig. 5)."""
    ends = min(frame["attention"]), max(frame["attention"])

    def side(axes: Axes, letter: str, name: str) -> None:
        _heads(axes, frame.query("map == @name"), evidence, _SOURCES, by="source", ends=ends)
        axes.set_ylabel(f"average {name} attention (%)")
        legend(axes, columns=2, title=f"({letter}) {name}")

    panels = [partial(side, letter=letter, name=name) for letter, name in (("a", "effective"), ("b", "raw"))]
    return form.sheet(*panels, width=DOUBLE)


def _heads(
    axes: Axes, frame: DataFrame, evidence: Evidence, series: form.Styles, *, by: str, ends: tuple[float, float]
) -> None:
    """Each head a point, the mean over heads a line, on a scale that holds `ends`."""
    form.clouds(axes, frame, series, by=by, x="layer", y="attention")
    form.lines(axes, frame.drop_duplicates([by, "layer"]), series, by=[by], x="layer", y="mean")
    _by_layer(axes, evidence)
    room = 0.05 * (ends[1] - ends[0])
    axes.set_ylim(ends[0] - room, ends[1] + room)


def _by_layer(axes: Axes, evidence: Evidence, label: str = _LAYER) -> None:
    """Shares in per cent by layer."""
    layer_axis(axes.xaxis, range(1, evidence.subject.n_layers + 1), label)
    percent(axes.yaxis)


def draw_passage(frame: DataFrame, evidence: Evidence) -> Figure:
    """Raw, effective and null attention of one head, on one scale (Fig. 6)."""
    first, marked = frame.iloc[0], frame[frame["highlighted"]].iloc[0]
    tokens = dict(zip(frame["key"], frame["key_token"], strict=True))
    queries = frame.drop_duplicates("query")
    columns, sentence = _with_gaps(sorted(tokens)), queries["query"].tolist()
    seen = frame[frame["key"] <= frame["query"]] if evidence.subject.causal else frame
    names = {f"({letter}) {name}": name for letter, name in zip("abc", ("raw", "effective", "null"), strict=True)}
    maps = {
        title: seen.pivot(index="query", columns="key", values=name).reindex(columns=columns).to_numpy(float)
        for title, name in names.items()
    }
    column, row = columns.index(marked["key"]), sentence.index(marked["query"])
    keys = [tokens.get(key, "") for key in columns]
    others = [place for place, key in enumerate(columns) if key in tokens and key not in sentence]
    panels = form.new_axes(DOUBLE, 1.1 + 0.105 * len(queries), columns=3)
    with house_style():
        map_panels(panels, Maps(maps, queries["query_token"].tolist(), keys), keep=[column, *others])
        for axes in panels:
            form.outline(axes, x=(column, column), y=(row, row))
        words = f"layer {first['layer']}, head {first['head']} (counted from 1)"
        sheet_of(panels[0]).suptitle(words, x=0.01, ha="left", fontsize=8)
    return form.finish(panels)


def _with_gaps(keys: list[int]) -> list[int]:
    """Return keys with a place between those that do not follow each other: there the map is blank."""
    gaps = [(left + right) // 2 for left, right in pairwise(keys) if right - left > 1]
    return sorted([*keys, *gaps])


def draw_rates(
    frame: DataFrame, evidence: Evidence, *, series: form.Styles, by: list[str], ylabel: str = RATE
) -> Figure:
    """Rates by layer (Fig. 2a, 7, 11 to 17, 38, 39)."""

    def panel(axes: Axes) -> None:
        rate_lines(axes, frame, series, by=by)
        axes.set_ylabel(ylabel)
        _by_layer(axes, evidence)

    return form.sheet(panel, height=2.9)


def draw_across(frame: DataFrame, evidence: Evidence) -> Figure:
    """Rates of maps trained on one layer and tested on all (Fig. 2b, 8 to 10)."""
    series = styles((layer, str(layer)) for layer in evidence.subject.named_layers)

    def panel(axes: Axes) -> None:
        rate_lines(axes, frame, series, by=["layer"], x="test_layer", title="trained on layer")
        _by_layer(axes, evidence, "tested on layer (counted from 1)")

    return form.sheet(panel, height=2.8)


def _own_boxes(axes: Axes, frame: DataFrame, evidence: Evidence, *, title: str = "") -> None:
    form.boxes(axes, frame, frame["layer"].tolist())
    _by_layer(axes, evidence)
    axes.set_ylabel(_OWN)
    axes.set_title(title, loc="left")


def _outweighed_bars(axes: Axes, frame: DataFrame, evidence: Evidence, *, title: str = "") -> None:
    form.bars(axes, frame, x="layer", y="outweighed", colour=BLUE)
    _by_layer(axes, evidence)
    axes.set_ylabel("tokens outweighed, P̃ (%)")
    axes.set_title(title, loc="left")


def _group_lines(axes: Axes, frame: DataFrame, evidence: Evidence, *, title: str = "") -> None:
    form.lines(axes, frame, _DISTANCES, by=["distance"], x="layer", y="share")
    _by_layer(axes, evidence)
    axes.set_ylabel("share of the group's total (%)")
    legend(axes, columns=3, title=f"{title} neighbours by distance".strip())


def _offset_lines(axes: Axes, frame: DataFrame, evidence: Evidence, *, xlabel: str, title: str = "") -> None:
    layers = [layer + 1 for layer in first_middle_last(evidence.subject.n_layers)]
    form.lines(axes, frame, styles((layer, f"layer {layer}") for layer in layers), by=["layer"], x="offset", y="share")
    percent(axes.yaxis)
    axes.set_ylim(bottom=0)
    axes.set(xlabel=xlabel, ylabel="share of the layer's total (%)")
    legend(axes, columns=3, title=f"{title} layers counted from 1".strip())


def draw_own(frame: DataFrame, evidence: Evidence) -> Figure:
    """Own contribution by layer (Fig. 3a)."""
    return form.sheet(partial(_own_boxes, frame=frame, evidence=evidence))


def draw_outweighed(frame: DataFrame, evidence: Evidence) -> Figure:
    """Share of outweighed tokens by layer (Fig. 3b)."""
    return form.sheet(partial(_outweighed_bars, frame=frame, evidence=evidence))


def draw_groups(frame: DataFrame, evidence: Evidence) -> Figure:
    """Contribution of neighbours by layer (Fig. 4a)."""
    return form.sheet(partial(_group_lines, frame=frame, evidence=evidence), height=2.8)


def draw_offsets(frame: DataFrame, evidence: Evidence, *, xlabel: str = _RELATIVE) -> Figure:
    """Contribution by relative position (Fig. 4b, 18)."""
    panel = partial(_offset_lines, frame=frame, evidence=evidence, xlabel=xlabel)
    return form.sheet(panel, height=2.8)


def draw_mixing(frame: DataFrame, evidence: Evidence) -> Figure:
    """Own contribution and the share of outweighed tokens (Fig. 40, 42)."""
    return form.sheet(
        partial(_own_boxes, frame=frame, evidence=evidence, title="(a)"),
        partial(_outweighed_bars, frame=frame, evidence=evidence, title="(b)"),
        width=DOUBLE,
    )


def draw_context(frame: DataFrame, evidence: Evidence) -> Figure:
    """Contribution of neighbours by layer and by relative position (Fig. 41, 43)."""
    near, far = (frame.query("panel == @panel") for panel in "ab")
    return form.sheet(
        partial(_group_lines, frame=near, evidence=evidence, title="(a)"),
        partial(_offset_lines, frame=far, evidence=evidence, xlabel=_RELATIVE, title="(b)"),
        width=DOUBLE,
        height=2.8,
    )


def draw_history(frame: DataFrame, evidence: Evidence, *, token: str) -> Figure:
    """What the inputs contribute to one token, layer by layer (Fig. 19 to 25)."""
    layers = range(1, evidence.subject.n_layers + 1)
    inputs = frame.drop_duplicates("input")

    def panel(axes: Axes) -> None:
        if frame.empty:
            return
        cells = frame.pivot(index="layer", columns="input", values="contribution").to_numpy(float)
        own = inputs["own"].tolist().index(True)
        form.history(axes, form.History(cells, own, inputs["input_token"].tolist(), layers), layer_label=_LAYER)
        axes.set_title(f"contribution to “{token}”, its own column framed", loc="left")

    return form.sheet(panel, width=DOUBLE, height=1.6 + min(0.12 * len(layers), 3.0))


def draw_tags(frame: DataFrame, evidence: Evidence, *, layer: int) -> Figure:
    """Own contribution by part of speech in one layer (Fig. 26 to 37)."""

    def panel(axes: Axes) -> None:
        form.boxes(axes, frame, range(len(frame)))
        names = [f"{tag} · {tokens:,}" for tag, tokens in zip(frame["tag"], frame["tokens"], strict=True)]
        axes.set_xticks(range(len(frame)), names, rotation=90)
        axes.set_xlim(-0.7, len(frame) - 0.3)
        percent(axes.yaxis)
        axes.set(xlabel="part of speech · number of tokens", ylabel=_OWN)
        axes.set_title(f"layer {layer} (counted from 1)", loc="left")

    return form.sheet(panel, width=DOUBLE, height=3.0)
