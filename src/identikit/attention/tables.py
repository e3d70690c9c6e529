"""The tables of `identikit attention` and `identikit measures`."""

from collections.abc import Mapping

from identikit.attention.certainty import GROUPS
from identikit.attention.result import EffectiveAttention
from identikit.attention.token_types import MAPS, SOURCES, TYPES
from identikit.results.measure import Measure
from identikit.results.table import HEAD, LAYER, TEXT, TEXTS, TOKENS, DataColumn, DataTable, count, number, word

_DRAWN = "no row was drawn there"


def _with_error(name: str, meaning: str, range: str, missing: str = "never") -> dict[str, DataColumn]:
    """Return the columns of a mean over texts and of its standard error."""
    return {
        name: number(f"{meaning}; mean over texts", range, missing),
        f"{name}_error": number("its standard error over texts", "0 or more", "there is one text"),
    }


OF_HEADS = [measure for measure in EffectiveAttention.measures.values() if measure.over_texts]
"""The measures of effective attention that the table of heads has a column of."""


def _measure_column(measure: Measure) -> DataColumn:
    """Return the column of a measure; one that is over rows is averaged over the rows of a head."""
    meaning = measure.meaning.split("\n\n")[0].rstrip(".").replace("\n", " ")
    if "query" in measure.axes:
        meaning = f"{meaning}; mean over the head's rows"
    return number(meaning, measure.range, measure.missing)


_HEAD_KEYS = {"text": TEXT, "tokens": TOKENS, "layer": LAYER, "head": HEAD}
_PEARSON = number("correlation of raw and effective attention over all visible entries", "−1 to 1", "it is undefined")

ATTENTION: Mapping[str, DataTable] = {
    "texts": TEXTS,
    "correlation": DataTable(
        "How similar raw and effective attention are, over all layers and heads of a text (Fig. 1a).",
        "one row per text",
        {"text": TEXT, "tokens": TOKENS, "pearson": _PEARSON},
    ),
    "correlation_by_layer": DataTable(
        "The same by layer, over all heads of the layer.",
        "one row per text and layer",
        {"text": TEXT, "tokens": TOKENS, "layer": LAYER, "pearson": _PEARSON},
    ),
    "correlation_by_head": DataTable(
        "The same by head.",
        "one row per text, layer and head",
        {**_HEAD_KEYS, "pearson": _PEARSON},
    ),
    "heads": DataTable(
        "What is measured of every head: the measures that `EffectiveAttention` declares for datasets.",
        "one row per text, layer and head",
        {
            **_HEAD_KEYS,
            **{measure.name: _measure_column(measure) for measure in OF_HEADS},
        },
    ),
    "null_dimension": DataTable(
        "How many dimensions of attention do not affect the output, and how exactly that was computed.",
        "one row per text and layer",
        {
            "text": TEXT,
            "tokens": TOKENS,
            "layer": LAYER,
            "least": count("smallest dimension of the null space of any head and query", "0 to tokens"),
            "greatest": count("largest dimension of the null space of any head and query", "0 to tokens"),
            "residual": number("largest relative change of a head's output under effective attention", "0 or more"),
            "slack_least": count(
                "smallest min(visible keys, size of a value vector) − rank, as in Eq. 3; with --mass the size plus 1"
            ),
            "slack_greatest": count("the largest; above 0 where values are linearly dependent"),
        },
    ),
    "types": DataTable(
        "Average attention from kinds of queries to kinds of keys (Fig. 1b, 1c and 5).",
        "one row per map, layer, head, source and target",
        {
            "map": word("which part of attention: raw = effective + null_space", *MAPS, key=True),
            "layer": LAYER,
            "head": HEAD,
            "source": word(
                "which queries: all, all but [SEP] (rest), or those of a kind",
                *SOURCES,
                key=True,
            ),
            "target": word("which keys", *TYPES, key=True),
            "attention": number(
                "attention to all keys of the target together, averaged over the source's queries, then over texts",
                "raw: 0 to 1; others: any number",
            ),
            "texts": count("number of texts that have a query of the source", "1 or more"),
        },
    ),
    "intervals": DataTable(
        "How much of attention is determined by the output, measured on rows (one query in one head) drawn at random. "
        "An alternative is other attention with the same head output, an interval the range of a weight over all "
        "alternatives, and what all of them share is determined. Written with `--intervals`.",
        "one row per text, layer and head that rows were drawn from",
        {
            **_HEAD_KEYS,
            "rows": count("number of rows drawn", "1 or more"),
            "free": count("number of free ones: they see linearly dependent values; all other rows are determined"),
            "certain_mass": number("determined share of a row, the sum of its lower ends; mean over rows", "0 to 1"),
            "strongest": number("largest raw weight of a row, mean over rows", "0 to 1"),
            "width": number("width of that weight's interval, mean over rows", "0 to 1"),
            "certain": number(
                "share of the decided rows whose strongest edge is determined: the strongest in all alternatives",
                "0 to 1",
                "no row is decided",
            ),
            "undecided": count("number of rows for which that was not decided"),
        },
    ),
    "intervals_by_length": DataTable(
        "The same by length: each text is the mean of its rows. Written with `--intervals`.",
        "one row per range of lengths",
        {
            "tokens_from": count("least number of tokens of the range", "1 or more", key=True),
            "tokens_to": count("greatest number of tokens of the range", "16 or more"),
            "texts": count("number of texts", "1 or more"),
            "rows": count("number of rows drawn", "1 or more"),
            "tokens": number("mean number of tokens", "1 or more"),
            **_with_error("free", "share of rows that are free", "0 to 1"),
            **_with_error("certain_mass", "determined share of a row", "0 to 1"),
            **_with_error("strongest", "largest raw weight of a row", "0 to 1"),
            **_with_error("width", "width of that weight's interval", "0 to 1"),
            **_with_error(
                "certain", "share of decided rows whose strongest edge is determined", "0 to 1", "no row is decided"
            ),
            "undecided": count("number of rows for which that was not decided"),
            **_with_error("first_raw", "what the first token receives", "0 to 1"),
            **_with_error("first_effective", "effective attention to the first token", "any number"),
            **_with_error("first_lower", "the least that the first token receives in any alternative", "0 to 1"),
            **_with_error("first_upper", "the most that the first token receives in any alternative", "0 to 1"),
        },
    ),
    "groups": DataTable(
        "What groups of keys, such as attention sinks, receive from the drawn rows, and how large their values are. "
        "Written with `--intervals`.",
        "one row per text, layer, head and group that the text has",
        {
            **_HEAD_KEYS,
            "group": word(
                "which keys: all special tokens, the first token, what opens a text and what separates or closes it "
                "(cls and sep, in models that are not causal), or periods and commas",
                *GROUPS,
                key=True,
            ),
            "rows": count("number of rows drawn; the next four are means over them"),
            "raw": number("attention to all keys of the group together", "0 to 1", _DRAWN),
            "effective": number("effective attention to them", "any number", _DRAWN),
            "lower": number("the least that they receive in any alternative", "0 to 1", _DRAWN),
            "upper": number("the most that they receive in any alternative", "0 to 1", _DRAWN),
            "value_size": number(
                "mean norm of their values, as the output projection passes them on, over the median of the other keys",
                "0 or more",
                "there are no others, or most are 0",
            ),
        },
    ),
}

MEASURES: Mapping[str, DataTable] = {
    "texts": TEXTS,
    "measures": DataTable(
        "How much of what people read from attention is determined by the outputs of the heads. Rows are those of all "
        "layers and heads; through layers, those of the last layer.",
        "one row per text and measure",
        {
            "text": TEXT,
            "tokens": TOKENS,
            "measure": word("which reading; see `attention_measure`", key=True),
            "rows": count("number of rows: one token, in one head or layer", "1 or more"),
            "determined": number("determined share of a row, mean over rows", "0 to 1"),
            "strongest": number(
                "share of the rows whose strongest source is the strongest in all alternatives; at least this share "
                "where rows are undecided",
                "0 to 1",
            ),
            "order": number(
                "how many of a row's strongest sources have the same order in all alternatives, mean over rows; at "
                "least so many where orders are undecided",
                "0 to 5",
            ),
            "undecided": count("number of rows whose strongest source was not decided: they count as not determined"),
            "order_undecided": count("number of rows in which more sources than are counted may be in a fixed order"),
        },
    ),
    "roles": DataTable(
        "The role of every head, and between which ends it is in all alternatives; see `head_scores`.",
        "one row per score, layer and head",
        {
            "score": word("which role", key=True),
            "layer": LAYER,
            "head": HEAD,
            "texts": count("number of texts with a row that has a target"),
            **_with_error("raw", "score of raw attention", "0 or more", "no text has a target"),
            **_with_error("effective", "score of effective attention", "any number", "no text has a target"),
            **_with_error("lower", "least score of any alternative", "0 or more", "no text has a target"),
            **_with_error("upper", "greatest score of any alternative", "0 or more", "no text has a target"),
        },
    ),
}
