"""The paper's figures: what each shows and needs, where its data come from, and how it is drawn."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import matplotlib.figure
from pandas import DataFrame

from identikit.paper.evidence import Evidence, Subject
from identikit.paper.figures import drawings, frames, labels
from identikit.plots.tokens import RATES


@dataclass(frozen=True)
class Figure:
    """One figure of the paper.

    - `needs`: the tables of the evidence it is drawn from; `frame` gives its data, exactly what `draw` draws
    - `label` says what stands under it beside the caption: model, data, numbers, seed
    - `data`: the dataset the paper used, "" where the texts are the paper's own; `only`: no other will do
    - `layer`: the one layer it shows, 0 for several; `not_causal`: why a causal model has none, if so
    """

    name: str
    caption: str
    needs: tuple[str, ...]
    data: str
    frame: Callable[[Evidence], DataFrame]
    draw: Callable[[DataFrame, Evidence], matplotlib.figure.Figure]
    label: Callable[[DataFrame, Evidence], str] = labels.of_texts
    only: bool = False
    layer: int = 0
    not_causal: str = ""

    def missing(self, subject: Subject) -> str | None:
        """Say why this model has no such figure, or nothing if it has."""
        if self.layer > subject.n_layers:
            return f"not applicable: {subject.model} has {subject.n_layers} layers"
        if subject.causal and self.not_causal:
            return f"not applicable: {subject.model} is causal, {self.not_causal}"
        return None


_ALONE = "so its first token sees only itself"
_UNPARTED = "and its texts have no [SEP]"
_MAPS = {"linear": "A linear map", "mlp": "An MLP"}
_DISTANCES = {"cosine": "cosine", "l2": "L2"}
_FOLDED = "Means over folds, with 95 % confidence intervals."
_ONE_FOLD = "Measured only on the test sentences of the first fold."
_NORM = "Contributions are measured by the Frobenius norm."


def _attention() -> list[Figure]:
    return [
        Figure(
            "fig1a",
            "Correlation of raw with effective attention by the length of the text; each point is a text. Up to the "
            "dashed line a text has no more tokens than a value vector has numbers, so the two can be equal.",
            ("correlation",),
            "wikitext",
            frames.correlation,
            drawings.draw_correlation,
        ),
        *(
            Figure(
                name,
                f"Average {map} attention to [CLS] (in a causal model, to tokens that open a text), to [SEP], and to "
                "periods and commas. Points are heads, lines are means over heads. Figures 1b and 1c have the same "
                "scale.",
                ("types",),
                "wikitext",
                partial(frames.attention_to_types, map=map),
                partial(drawings.draw_types, map=map),
            )
            for name, map in (("fig1b", "raw"), ("fig1c", "effective"))
        ),
        Figure(
            "fig5",
            "Attention to [SEP] from [SEP] and from all other tokens: (a) effective, (b) raw. Points are heads, lines "
            "are means over heads.",
            ("types",),
            "wikitext",
            frames.attention_to_separators,
            drawings.draw_separators,
            not_causal=_UNPARTED,
        ),
        Figure(
            "fig6",
            "Raw, effective and null attention of one sentence of the passage in Appendix A.3, in the head that looks "
            "most at special tokens. The black frame marks the largest effective weight away from the diagonal.",
            ("passage",),
            "",
            frames.passage_sentence,
            drawings.draw_passage,
            labels.of_passage,
        ),
    ]


def _same_layer(name: str, data: str, only: bool) -> Figure:
    return Figure(
        name,
        "Share of tokens recovered from their hidden vectors, by layer; maps are trained and tested on the same "
        f"layer. {_FOLDED}",
        ("rates",),
        data,
        partial(frames.rates, by=["map", "distance", "layer"]),
        partial(drawings.draw_rates, series=RATES, by=["map", "distance"]),
        labels.of_rates,
        only=only,
    )


def _across_layers(name: str, map: str, distance: str) -> Figure:
    return Figure(
        name,
        f"{_MAPS[map]} trained for {_DISTANCES[distance]} distance on one layer and tested on all of them. {_FOLDED}",
        ("rates",),
        "mrpc",
        partial(frames.rates_across_layers, map=map, distance=distance),
        drawings.draw_across,
        labels.of_rates,
    )


def _generalisation() -> Figure:
    return Figure(
        "fig7",
        f"Rates on training and test data under L2 distance: how much the linear map and the MLP overfit. {_FOLDED}",
        ("rates",),
        "mrpc",
        partial(
            frames.rates, by=["map", "split", "layer"], map=("linear", "mlp"), distance="l2", split=("train", "test")
        ),
        partial(drawings.draw_rates, series=drawings.SPLITS, by=["map", "split"]),
        labels.of_rates,
    )


def _previous_layer() -> Figure:
    return Figure(
        "fig11",
        f"Share of tokens recovered across a single layer: from a layer's output to its own input. {_ONE_FOLD}",
        ("previous",),
        "mrpc",
        partial(frames.rates, by=["map", "distance", "layer"], table="previous"),
        partial(drawings.draw_rates, series=RATES, by=["map", "distance"]),
        labels.of_rates,
    )


def _finetuned(name: str, data: str, only: bool) -> Figure:
    return Figure(
        name,
        "Tokens recovered across single layers by the naive map, before (dashed) and after fine-tuning (solid). "
        f"{_FOLDED}",
        ("untuned", "finetuned"),
        data,
        frames.rates_before_and_after,
        partial(drawings.draw_rates, series=drawings.TUNED, by=["distance", "finetuned"]),
        labels.of_rates,
        only=only,
    )


def _neighbours(name: str, map: str, distance: str) -> Figure:
    return Figure(
        name,
        f"{_MAPS[map]} trained for {_DISTANCES[distance]} distance recovers the tokens up to three places before "
        f"(blue) and after (red) a hidden vector's own. {_ONE_FOLD}",
        ("neighbours",),
        "mrpc",
        partial(
            frames.rates,
            by=["offset", "layer"],
            table="neighbours",
            map=map,
            distance=distance,
            offset=(-3, -2, -1, 1, 2, 3),
        ),
        partial(drawings.draw_rates, series=drawings.NEIGHBOURS, by=["offset"], ylabel="neighbours recovered (%)"),
        labels.of_rates,
    )


def _identity() -> list[Figure]:
    return [
        _same_layer("fig2a", "mrpc", only=False),
        _same_layer("fig38", "cola", only=True),
        _same_layer("fig39", "mnli-500", only=True),
        *(
            _across_layers(name, map, distance)
            for name, map, distance in (
                ("fig2b", "linear", "cosine"),
                ("fig8", "linear", "l2"),
                ("fig9", "mlp", "l2"),
                ("fig10", "mlp", "cosine"),
            )
        ),
        _generalisation(),
        _previous_layer(),
        _finetuned("fig12", "mrpc", only=False),
        _finetuned("fig13", "cola", only=True),
        *(
            _neighbours(name, map, distance)
            for name, map, distance in (
                ("fig14", "linear", "cosine"),
                ("fig15", "mlp", "cosine"),
                ("fig16", "mlp", "l2"),
                ("fig17", "linear", "l2"),
            )
        ),
    ]


_OWN = "how much of a hidden vector comes from the token at its own position, by layer; outliers are not shown"
_OUTWEIGHED = "share of tokens to whose hidden vector another token contributes most, by layer"
_GROUPS = "in which layers neighbours at each distance contribute most; the points of a line sum to 100 %"
_OFFSETS = "contribution by the input's position relative to the output, in the first, middle and last layer"


def _mixing() -> list[Figure]:
    """Figures 3 and 4, and their likes on other datasets, 40 to 43."""
    parts = (
        ("fig3a", _OWN, "own", frames.own_contribution, drawings.draw_own),
        ("fig3b", _OUTWEIGHED, "own", frames.outweighed, drawings.draw_outweighed),
        ("fig4a", _GROUPS, "groups", frames.groups, drawings.draw_groups),
        ("fig4b", _OFFSETS, "offsets", partial(frames.offsets, view="offsets"), drawings.draw_offsets),
    )
    whole = (
        (("fig40", "cola"), ("fig42", "mnli"), (_OWN, _OUTWEIGHED), ("own",), frames.mixing, drawings.draw_mixing),
        (
            ("fig41", "cola"),
            ("fig43", "mnli"),
            (_GROUPS, _OFFSETS),
            ("groups", "offsets"),
            frames.context,
            drawings.draw_context,
        ),
    )
    return [
        *(
            Figure(name, f"{words[0].upper()}{words[1:]}. {_NORM}", (f"{table} frobenius",), "mrpc", frame, draw)
            for name, words, table, frame, draw in parts
        ),
        *(
            Figure(
                name,
                f"(a) {words[0]}. (b) {words[1]}. {_NORM}",
                tuple(f"{table} frobenius" for table in tables),
                data,
                frame,
                draw,
                only=True,
            )
            for first, second, words, tables, frame, draw in whole
            for name, data in (first, second)
        ),
    ]


def _to_cls() -> list[Figure]:
    places = (
        ("fig18a", "to_cls", "[CLS]", "the input's position in the text"),
        ("fig18b", "around_separator", "[SEP]", "the input's position relative to the first [SEP]"),
    )
    return [
        Figure(
            name,
            f"Contribution of the context to [CLS] by {words}, in the first, middle and last layer. {_NORM}",
            ("offsets frobenius",),
            "mrpc",
            partial(frames.offsets, view=view),
            partial(drawings.draw_offsets, xlabel=f"input's position relative to {centre}"),
            not_causal=_ALONE,
        )
        for name, view, centre, words in places
    ]


def _histories() -> list[Figure]:
    tokens = ("[CLS]", "he", "said", "fit", "long", "strategy", "[SEP]")
    reasons = {"[CLS]": _ALONE, "[SEP]": _UNPARTED}
    return [
        Figure(
            f"fig{number}",
            f"What the inputs of the sentence in Appendix C.4 contribute to “{token}”, layer by layer. Colours are "
            f"scaled to the context; bars show the token's own contribution. {_NORM}",
            ("sentence",),
            "",
            partial(frames.token_history, token=token),
            partial(drawings.draw_history, token=token),
            labels.of_sentence,
            not_causal=reasons.get(token, ""),
        )
        for number, token in enumerate(tokens, start=19)
    ]


def _tags() -> list[Figure]:
    return [
        Figure(
            f"fig{25 + layer}",
            f"Own contribution by part of speech in layer {layer}, sorted by the medians in the last layer. Tags with "
            f"fewer than {frames.FEWEST} tokens are left out. {_NORM}",
            ("tags frobenius",),
            "mrpc",
            partial(frames.tags, layer=layer),
            partial(drawings.draw_tags, layer=layer),
            partial(labels.of_tags, layer=layer),
            layer=layer,
        )
        for layer in range(1, 13)
    ]


def _collapse() -> Figure:
    return Figure(
        "collapse",
        "Not in the paper: each product of two of a head's matrices collapsed into one matrix. (a) The error this "
        "causes, next to the model's own rounding. (b) The cost: below the line it would pay off.",
        ("collapse",),
        "",
        frames.collapse,
        drawings.draw_collapse,
        labels.of_model,
    )


_POSSIBLE = "over all attention with the same output"


def _sharp() -> list[Figure]:
    """What attention could have been, beside Figures 1a to 1c."""
    figures = (
        (
            "fig1a-sharp",
            "the mass of attention that is certain, that is the same in all attention with the same output, beside the "
            "correlation of Figure 1a; each point is a text.",
            ("correlation", "intervals"),
            frames.certain_by_length,
            drawings.draw_certain,
        ),
        (
            "fig1bc-sharp",
            f"Figures 1b and 1c with the range of raw attention {_POSSIBLE}. Means over heads.",
            ("groups",),
            frames.mass_of_types,
            drawings.draw_mass,
        ),
        (
            "sinks",
            f"(a) raw and effective attention to a sink, and its range {_POSSIBLE}. (b) The norm of its values against "
            "the median of the other tokens'.",
            ("groups",),
            frames.sink,
            drawings.draw_sink,
        ),
    )
    return [
        Figure(name, f"Not in the paper: {caption}", needs, "wikitext", frame, draw, labels.of_rows)
        for name, caption, needs, frame, draw in figures
    ]


def _place(figure: Figure) -> tuple[int, str]:
    number = figure.name.removeprefix("fig")
    return int(number.rstrip("abc")), number


FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (
        *sorted([*_attention(), *_identity(), *_mixing(), *_to_cls(), *_histories(), *_tags()], key=_place),
        *_sharp(),
        _collapse(),
    )
}
"""Every figure of the paper by name, in the paper's order, and then our own."""
