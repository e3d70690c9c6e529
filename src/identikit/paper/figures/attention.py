"""Figures on raw and effective attention: 1a to 1c, 5 and 6."""

import re
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import matplotlib.figure
import numpy as np
from matplotlib.axes import Axes
from pandas import DataFrame

from identikit.paper.evidence import Evidence
from identikit.paper.figures.figure import (
    Drawing,
    Figures,
    draw_panels,
    label_of_text,
    label_shares_by_layer,
    make_room,
    rows_with,
)
from identikit.plots import forms as form
from identikit.plots.certainty import correlation_by_length
from identikit.plots.maps import Maps, map_panels
from identikit.plots.style import BLACK, BLUE, DOUBLE, RED, Style, house_style, legend, sheet_of

_TYPES = {
    ("cls",): Style("[CLS]", BLUE, "o", "-"),
    ("sep",): Style("[SEP]", RED, "s", "--"),
    ("punctuation",): Style("period, comma", BLACK, "^", "-."),
}
_OPENING = {("cls",): Style("opens a text", BLUE, "o", "-")}  # in a causal model, which has no [CLS]
_SOURCES = {("sep",): Style("[SEP] → [SEP]", RED, "s", "--"), ("rest",): Style("other → [SEP]", BLUE, "o", "-")}
_SPECIAL = re.compile(r"(?!\[UNK\]|<unk>)(\[[A-Z]+\]|<[^<>\s]+>)")  # an unknown piece is a word

figure = Figures()


@figure(
    "fig1a",
    "Correlation of raw with effective attention by the length of the text; each point is a text. Up to the dashed "
    "line a text has no more tokens than a value vector has numbers, so the two can be equal.",
    needs=("correlation",),
    shows="pearson by text",
    data="wikitext",
)
def correlation(evidence: Evidence) -> Drawing:
    """Correlation of raw with effective attention, a row per text."""
    data = evidence.tables["correlation"].filter(["text", "tokens", "pearson"])

    def panel(axes: Axes) -> None:
        correlation_by_length(data, evidence.subject.d_value, axes)

    return draw_panels(evidence, data, panel)


def _to_types(evidence: Evidence, targets: Sequence[str], maps: Sequence[str], sources: Sequence[str]) -> DataFrame:
    """Attention of each head to the target token types that occur in the texts, and the mean over heads."""
    table = evidence.tables["types"]
    present = [kind for kind in targets if kind in set(table["source"])]  # then its tokens are a source, too
    heads = rows_with(table, {"target": present, "map": maps, "source": sources})
    means = heads.groupby(["map", "source", "target", "layer"])["attention"].transform("mean")
    return heads.assign(mean=means)


def _draw_heads(axes: Axes, data: DataFrame, series: form.Styles, by: str) -> None:
    """Draw each head as a point, and the mean over heads as a line."""
    form.clouds(axes, data, series, by=by, x="layer", y="attention")
    form.lines(axes, data.drop_duplicates([by, "layer"]), series, by=[by], x="layer", y="mean")


def attention_to_types(evidence: Evidence, map: str) -> Drawing:
    """Attention of each head to [CLS], [SEP] and punctuation; raw and effective attention have the same scale."""
    types = [kind for (kind,) in _TYPES]
    raw_and_effective = _to_types(evidence, types, ("raw", "effective"), ("all",))
    data = rows_with(raw_and_effective, {"map": [map]}).filter(["target", "layer", "head", "attention", "mean"])
    series = _TYPES | _OPENING if evidence.subject.causal else _TYPES

    def panel(axes: Axes) -> None:
        _draw_heads(axes, data, series, by="target")
        label_shares_by_layer(axes, evidence)
        make_room(axes, min(raw_and_effective["attention"]), max(raw_and_effective["attention"]))
        axes.set_ylabel(f"average {map} attention (%)")
        legend(axes, columns=3)

    return draw_panels(evidence, data, panel)


for _name, _map in (("fig1b", "raw"), ("fig1c", "effective")):
    figure(
        _name,
        f"Average {_map} attention to [CLS] (in a causal model, to tokens that open a text), to [SEP], and to periods "
        "and commas. Points are heads, lines are means over heads. Figures 1b and 1c have the same scale.",
        needs=("types",),
        shows="attention by target, layer, head",
        data="wikitext",
    )(partial(attention_to_types, map=_map))


@figure(
    "fig5",
    "Attention to [SEP] from [SEP] and from all other tokens: (a) effective, (b) raw. Points are heads, lines are "
    "means over heads.",
    needs=("types",),
    shows="attention by map, source, layer, head",
    data="wikitext",
    not_causal="and its texts have no [SEP]",
)
def attention_to_separators(evidence: Evidence) -> Drawing:
    """Attention of each head to [SEP], from [SEP] and from all others, on the same scale."""
    table = _to_types(evidence, ["sep"], ("effective", "raw"), ("sep", "rest"))
    data = table.filter(["map", "source", "layer", "head", "attention", "mean"])

    def side(axes: Axes, letter: str, map: str) -> None:
        _draw_heads(axes, data.query("map == @map"), _SOURCES, by="source")
        label_shares_by_layer(axes, evidence)
        make_room(axes, min(data["attention"]), max(data["attention"]))
        axes.set_ylabel(f"average {map} attention (%)")
        legend(axes, columns=2, title=f"({letter}) {map}")

    panels = [partial(side, letter="a", map="effective"), partial(side, letter="b", map="raw")]
    return draw_panels(evidence, data, *panels, width=DOUBLE)


def passage_head(evidence: Evidence) -> DataFrame:
    """Attention of the head that looks most at `special` keys: [CLS] and [SEP], or what a tokenizer has for them.

    If the passage has none, it is the head that looks most at the first token, where idle attention goes then.
    """
    table = evidence.tables["passage"]
    special = np.array([bool(_SPECIAL.fullmatch(token)) for token in table["key_token"]])
    sink = special if special.any() else (table["key"] == table["key"].min()).to_numpy()
    head = table.loc[sink].pivot_table("raw", index="head").idxmax().item()
    return rows_with(table.assign(special=special), {"head": [head]}).sort_values(["query", "key"], ignore_index=True)


def passage(evidence: Evidence) -> DataFrame:
    """Attention of that head over the whole passage of Appendix A.3.

    `highlighted` is the largest effective weight that is neither near the diagonal nor on a special token.
    """
    head = passage_head(evidence)
    best = head.query("abs(query - key) > 1 and not special")["effective"].idxmax()
    return head.assign(highlighted=head.index == best)


@figure(
    "fig6",
    "Raw, effective and null attention of one sentence of the passage in Appendix A.3, in the head that looks most at "
    "special tokens. The black frame marks the largest effective weight away from the diagonal.",
    needs=("passage",),
    shows="raw, effective, null by query, key",
    data="",
)
def passage_sentence(evidence: Evidence) -> Drawing:
    """One sentence of the passage as queries; as keys also the first token, special tokens and the highlighted one."""
    edges = passage(evidence)
    keys = {*edges["query"], min(edges["key"]), *edges.query("special or highlighted")["key"]}
    data = rows_with(edges, {"key": sorted(keys)}).drop(columns="special")
    n_keys = len({*edges["key"]})
    label = label_of_text(evidence, "passage of Appendix A.3", n_keys)
    if len(keys) < n_keys:
        hidden = (edges[["raw", "effective"]].sum() - data[["raw", "effective"]].sum()) / len({*data["query"]})
        shares = f"{100 * hidden['raw']:.0f} % of raw and {100 * hidden['effective']:.0f} % of effective attention"
        label += f" · {len(keys)} keys shown; the others hold {shares} on average"
    return Drawing(data, label, partial(_passage_maps, data, evidence))


def _passage_maps(data: DataFrame, evidence: Evidence) -> matplotlib.figure.Figure:
    """Draw raw, effective and null attention on one scale."""
    tokens = dict(zip(data["key"], data["key_token"], strict=True))
    queries = data.drop_duplicates("query")
    sentence = queries["query"].tolist()
    columns = _with_gaps(sorted(tokens))
    visible = data[data["key"] <= data["query"]] if evidence.subject.causal else data
    maps = {}
    for letter, name in zip("abc", ("raw", "effective", "null"), strict=True):
        cells = visible.pivot(index="query", columns="key", values=name).reindex(columns=columns)
        maps[f"({letter}) {name}"] = cells.to_numpy(float)
    marked = data[data["highlighted"]].iloc[0]
    column = columns.index(marked["key"])
    row = sentence.index(marked["query"])
    outside = [index for index, key in enumerate(columns) if key in tokens and key not in sentence]
    keys = [tokens.get(key, "") for key in columns]
    panels = form.new_axes(DOUBLE, 1.1 + 0.105 * len(queries), columns=3)
    with house_style():
        map_panels(panels, Maps(maps, queries["query_token"].tolist(), keys), keep=[column, *outside])
        for axes in panels:
            form.outline(axes, x=(column, column), y=(row, row))
        title = f"layer {marked['layer']}, head {marked['head']} (counted from 1)"
        sheet_of(panels[0]).suptitle(title, x=0.01, ha="left", fontsize=8)
    return form.finish(panels)


def _with_gaps(keys: list[int]) -> list[int]:
    """Return the keys with one more between each two that are not neighbours; the map is blank there."""
    gaps = [(left + right) // 2 for left, right in pairwise(keys) if right - left > 1]
    return sorted([*keys, *gaps])
