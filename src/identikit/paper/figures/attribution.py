"""Figures on where hidden vectors come from: 3, 4, 18 to 37 and 40 to 43."""

from functools import partial

import pandas as pd
from matplotlib.axes import Axes
from pandas import DataFrame

from identikit.paper.evidence import Evidence
from identikit.paper.figures.figure import (
    LAYER,
    Drawing,
    Figures,
    draw_panels,
    label_of_text,
    label_shares_by_layer,
    rows_with,
)
from identikit.plots import forms as form
from identikit.plots.style import BLUE, DOUBLE, legend, percent, styles

FEWEST = 20  # a part of speech with fewer tokens is not shown
REACH = {"offsets": 30, "to_cls": 100, "around_separator": 40}  # tokens; how far each view is shown

_NORM = "Contributions are measured by the Frobenius norm."
_OWN = "of a hidden vector comes from the token at its own position, by layer; outliers are not shown"
_OUTWEIGHED = "of tokens to whose hidden vector another token contributes most, by layer"
_GROUPS = "which layers neighbours at each distance contribute most; the points of a line sum to 100 %"
_OFFSETS = "by the input's position relative to the output, in the first, middle and last layer"
_RELATIVE = "input's position relative to the output"
_OWN_SHARE = "own contribution (%)"
_BOX = ["low", "lower", "median", "upper", "high"]
_DISTANCES = styles(
    zip(("1", "2", "3", "4-5", "6-10", "11-"), ("1st", "2nd", "3rd", "4th–5th", "6th–10th", "11th on"), strict=True)
)

figure = Figures()


def _own_boxes(axes: Axes, data: DataFrame, evidence: Evidence, title: str = "") -> None:
    form.boxes(axes, data, data["layer"].tolist())
    label_shares_by_layer(axes, evidence)
    axes.set_ylabel(_OWN_SHARE)
    axes.set_title(title, loc="left")


def _outweighed_bars(axes: Axes, data: DataFrame, evidence: Evidence, title: str = "") -> None:
    axes.bar(data["layer"], data["outweighed"], width=0.7, color=BLUE)
    label_shares_by_layer(axes, evidence)
    axes.set_ylabel("tokens outweighed, P̃ (%)")
    axes.set_title(title, loc="left")


def _group_lines(axes: Axes, data: DataFrame, evidence: Evidence, title: str = "") -> None:
    form.lines(axes, data, _DISTANCES, by=["distance"], x="layer", y="share")
    label_shares_by_layer(axes, evidence)
    axes.set_ylabel("share of the group's total (%)")
    legend(axes, columns=3, title=f"{title} neighbours by distance".strip())


def _offset_lines(axes: Axes, data: DataFrame, evidence: Evidence, title: str = "", xlabel: str = _RELATIVE) -> None:
    series = styles((layer, f"layer {layer}") for layer in _three_layers(evidence))
    form.lines(axes, data, series, by=["layer"], x="offset", y="share")
    percent(axes.yaxis)
    axes.set_ylim(bottom=0)
    axes.set(xlabel=xlabel, ylabel="share of the layer's total (%)")
    legend(axes, columns=3, title=f"{title} layers counted from 1".strip())


def _three_layers(evidence: Evidence) -> list[int]:
    return [evidence.subject.named_layers[layer] for layer in (1, 6, 12)]


def _groups(evidence: Evidence) -> DataFrame:
    return evidence.tables["groups frobenius"].filter(["distance", "layer", "share"])


def _offsets(evidence: Evidence, view: str) -> DataFrame:
    """Share of contribution by relative position in the first, middle and last layer.

    Offsets outside the furthest at which a pair of tokens exists are left out; one within, at which none exists (a
    token itself), has no share.
    """
    table = rows_with(evidence.tables["offsets frobenius"], {"view": [view], "layer": _three_layers(evidence)})
    table = table.assign(share=table["share"].where(table["mean"].notna()))
    offsets = table.dropna()["offset"].clip(-REACH[view], REACH[view])
    return table.loc[table["offset"].between(offsets.min(), offsets.max()), ["layer", "offset", "share"]]


@figure("fig3a", f"How much {_OWN}. {_NORM}", needs=("own frobenius",), shows=f"{', '.join(_BOX)} by layer")
def own_contribution(evidence: Evidence) -> Drawing:
    """Quartiles and whiskers of the tokens' own contribution."""
    data = evidence.tables["own frobenius"].filter(["layer", *_BOX])
    return draw_panels(evidence, data, partial(_own_boxes, data=data, evidence=evidence))


@figure("fig3b", f"Share {_OUTWEIGHED}. {_NORM}", needs=("own frobenius",), shows="outweighed by layer")
def outweighed(evidence: Evidence) -> Drawing:
    """Share of tokens that are not their own largest contributor."""
    data = evidence.tables["own frobenius"].filter(["layer", "outweighed"])
    return draw_panels(evidence, data, partial(_outweighed_bars, data=data, evidence=evidence))


def mixing(evidence: Evidence) -> Drawing:
    """Figures 3a and 3b side by side."""
    data = evidence.tables["own frobenius"].filter(["layer", *_BOX, "outweighed"])
    boxes = partial(_own_boxes, data=data, evidence=evidence, title="(a)")
    bars = partial(_outweighed_bars, data=data, evidence=evidence, title="(b)")
    return draw_panels(evidence, data, boxes, bars, width=DOUBLE)


@figure("fig4a", f"In {_GROUPS}. {_NORM}", needs=("groups frobenius",), shows="share by distance, layer")
def neighbour_groups(evidence: Evidence) -> Drawing:
    """Share of each layer in what neighbours at a distance contribute."""
    data = _groups(evidence)
    panel = partial(_group_lines, data=data, evidence=evidence)
    return draw_panels(evidence, data, panel, height=2.8)


def relative_positions(evidence: Evidence, view: str, xlabel: str) -> Drawing:
    """Share of contribution by relative position."""
    data = _offsets(evidence, view)
    panel = partial(_offset_lines, data=data, evidence=evidence, xlabel=xlabel)
    return draw_panels(evidence, data, panel, height=2.8)


def context(evidence: Evidence) -> Drawing:
    """Figures 4a and 4b side by side."""
    groups = _groups(evidence).assign(panel="a")
    offsets = _offsets(evidence, "offsets").assign(panel="b")
    left = partial(_group_lines, data=groups, evidence=evidence, title="(a)")
    right = partial(_offset_lines, data=offsets, evidence=evidence, title="(b)")
    data = pd.concat([groups, offsets], ignore_index=True)
    return draw_panels(evidence, data, left, right, width=DOUBLE, height=2.8)


for _name, _data in (("fig40", "cola"), ("fig42", "mnli")):
    figure(
        _name,
        f"(a) how much {_OWN}. (b) share {_OUTWEIGHED}. {_NORM}",
        needs=("own frobenius",),
        shows="low, lower, median, upper, high, outweighed by layer",
        data=_data,
    )(mixing)
for _name, _data in (("fig41", "cola"), ("fig43", "mnli")):
    figure(
        _name,
        f"(a) in {_GROUPS}. (b) contribution {_OFFSETS}. {_NORM}",
        needs=("groups frobenius", "offsets frobenius"),
        shows="share by panel, distance, layer, offset",
        data=_data,
    )(context)

figure("fig4b", f"Contribution {_OFFSETS}. {_NORM}", needs=("offsets frobenius",), shows="share by layer, offset")(
    partial(relative_positions, view="offsets", xlabel=_RELATIVE)
)
for _name, _view, _centre, _positions in (
    ("fig18a", "to_cls", "[CLS]", "the input's position in the text"),
    ("fig18b", "around_separator", "[SEP]", "the input's position relative to the first [SEP]"),
):
    figure(
        _name,
        f"Contribution of the context to [CLS] by {_positions}, in the first, middle and last layer. {_NORM}",
        needs=("offsets frobenius",),
        shows="share by layer, offset",
        not_causal="so its first token sees only itself",
    )(partial(relative_positions, view=_view, xlabel=f"input's position relative to {_centre}"))


def token_history(evidence: Evidence, token: str, spellings: tuple[str, ...]) -> Drawing:
    """What each input contributes to a token of Appendix C.4's sentence, layer by layer.

    The token is the first that has one of the spellings, and `own` marks its own contribution. There are no data where
    the model's tokenizer writes the sentence without such a token.
    """
    table = evidence.tables["sentence"]
    words = table["output_token"].str.lstrip("Ġ▁").str.lower()
    position = table.loc[words.isin(spellings), "output"].min()
    history = table.loc[table["output"] == position, ["layer", "input", "input_token", "output", "contribution"]]
    data = history.assign(own=history["input"] == history["output"])
    layers = range(1, evidence.subject.n_layers + 1)

    def panel(axes: Axes) -> None:
        if data.empty:
            return
        cells = data.pivot(index="layer", columns="input", values="contribution").to_numpy(float)
        inputs = data.drop_duplicates("input")
        own_column = inputs["own"].tolist().index(True)
        form.history(axes, form.History(cells, own_column, inputs["input_token"].tolist(), layers), layer_label=LAYER)
        axes.set_title(f"contribution to “{token}”, its own column framed", loc="left")

    label = label_of_text(evidence, "sentence of Appendix C.4", data["input"].nunique())
    return draw_panels(evidence, data, panel, width=DOUBLE, height=1.6 + min(0.12 * len(layers), 3.0), label=label)


for _name, _token, _spellings, _not_causal in (
    ("fig19", "[CLS]", ("[cls]", "<s>", "<cls>"), "so its first token sees only itself"),
    ("fig20", "he", ("he",), ""),
    ("fig21", "said", ("said",), ""),
    ("fig22", "fit", ("fit",), ""),
    ("fig23", "long", ("long",), ""),
    ("fig24", "strategy", ("strategy",), ""),
    ("fig25", "[SEP]", ("[sep]", "</s>", "<sep>"), "and its texts have no [SEP]"),
):
    figure(
        _name,
        f"What the inputs of the sentence in Appendix C.4 contribute to “{_token}”, layer by layer. Colours are scaled "
        f"to the context; bars show the token's own contribution. {_NORM}",
        needs=("sentence",),
        shows="contribution by layer, input",
        data="",
        not_causal=_not_causal,
    )(partial(token_history, token=_token, spellings=_spellings))


def parts_of_speech(evidence: Evidence, layer: int) -> Drawing:
    """Quartiles and whiskers of the own contribution by part of speech; boxes of few tokens would say nothing."""
    table = rows_with(evidence.tables["tags frobenius"], {"layer": [layer]}).drop(columns="layer")
    data = table.query("tokens >= @FEWEST")
    rare = table.query("tokens < @FEWEST")
    label = evidence.label
    if len(rare):
        tags = "1 tag" if len(rare) == 1 else f"{len(rare)} tags"
        label += f" · {tags} with fewer than {FEWEST} tokens not shown ({rare['tokens'].sum():,} tokens)"

    def panel(axes: Axes) -> None:
        form.boxes(axes, data, range(len(data)))
        names = [f"{tag} · {tokens:,}" for tag, tokens in zip(data["tag"], data["tokens"], strict=True)]
        axes.set_xticks(range(len(data)), names, rotation=90)
        axes.set_xlim(-0.7, len(data) - 0.3)
        percent(axes.yaxis)
        axes.set(xlabel="part of speech · number of tokens", ylabel=_OWN_SHARE)
        axes.set_title(f"layer {layer} (counted from 1)", loc="left")

    return draw_panels(evidence, data, panel, width=DOUBLE, height=3.0, label=label)


for _layer in range(1, 13):
    figure(
        f"fig{25 + _layer}",
        f"Own contribution by part of speech in layer {_layer}, sorted by the medians in the last layer. Tags with "
        f"fewer than {FEWEST} tokens are left out. {_NORM}",
        needs=("tags frobenius",),
        shows="low, lower, median, upper, high by tag",
        layer=_layer,
    )(partial(parts_of_speech, layer=_layer))
