"""The data dictionary: what every column of every table of a run means, kept in this one place.

`columns.json` in a run's folder and the tables of `docs/tables.md` are made from it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from identikit.results.provenance import text_hash
from identikit.texts.text import Text

if TYPE_CHECKING:
    from pandas import DataFrame


class Column(NamedTuple):
    """A column: its type in Parquet, what it means, its unit or range, and when a value is missing, if ever."""

    type: str
    meaning: str
    range: str
    missing: str = "never"


class Table(NamedTuple):
    """A table: what it holds, one row per what, and its columns in order."""

    about: str
    rows: str
    columns: Mapping[str, Column]


def _number(meaning: str, range: str, missing: str = "never") -> Column:
    return Column("double", meaning, range, missing)


def _count(meaning: str, range: str = "0 or more") -> Column:
    return Column("int64", meaning, range)


def _word(meaning: str, *values: str) -> Column:
    return Column("string", meaning, ", ".join(values) or "any text")


_TEXT = _count("number of the text, in the order of the data; joins all tables with `texts`")
_TOKENS = _count("number of tokens of the text, special tokens included", "1 or more")
_LAYER = _count("layer, counted from 0", "0 to layers − 1")
_HEAD = _count("head, counted from 0", "0 to heads − 1")

_TEXTS = Table(
    "The texts that were read.",
    "one row per text",
    {
        "text": _TEXT,
        "first": _word("the text, or the first text of a pair"),
        "second": Column("string", "the second text of a pair", "any text", "single texts"),
        "tokens": _TOKENS,
        "sha256": _word("SHA-256 of the text, the same as in a result's provenance", "64 hexadecimal digits"),
    },
)

_DRAWN = "no row was drawn there"
_FIRST = {  # means over texts of the weight of the first token
    "raw": ("what the first token receives", "0 to 1"),
    "effective": ("effective attention to the first token", "any number"),
    "lower": ("the least that the first token receives in any attention with the same output", "0 to 1"),
    "upper": ("the most that the first token receives in any attention with the same output", "0 to 1"),
}


def _with_error(name: str, meaning: str, range: str, missing: str = "never") -> dict[str, Column]:
    """Return the columns of a mean over texts and of its standard error."""
    return {
        name: _number(f"{meaning}; mean over texts", range, missing),
        f"{name}_error": _number("its standard error over texts", "0 or more", "there is one text"),
    }


_PEARSON = _number("correlation of raw and effective attention over all visible entries", "−1 to 1", "it is undefined")

ATTENTION: Mapping[str, Table] = {
    "texts": _TEXTS,
    "correlation": Table(
        "How similar raw and effective attention are, over all layers and heads of a text (Fig. 1a).",
        "one row per text",
        {"text": _TEXT, "tokens": _TOKENS, "pearson": _PEARSON},
    ),
    "correlation_by_layer": Table(
        "The same by layer, over all heads of the layer.",
        "one row per text and layer",
        {"text": _TEXT, "tokens": _TOKENS, "layer": _LAYER, "pearson": _PEARSON},
    ),
    "correlation_by_head": Table(
        "The same by head.",
        "one row per text, layer and head",
        {"text": _TEXT, "tokens": _TOKENS, "layer": _LAYER, "head": _HEAD, "pearson": _PEARSON},
    ),
    "null_dimension": Table(
        "How many dimensions of attention do not affect the output, and how exactly that was computed.",
        "one row per text and layer",
        {
            "text": _TEXT,
            "tokens": _TOKENS,
            "layer": _LAYER,
            "least": _count("smallest dimension of the null space of any head and query", "0 to tokens"),
            "greatest": _count("largest dimension of the null space of any head and query", "0 to tokens"),
            "residual": _number("largest relative change of a head's output under effective attention", "0 or more"),
            "slack_least": _count(
                "smallest min(visible keys, size of a value vector) − rank, as in Eq. 3; with --mass the size plus 1"
            ),
            "slack_greatest": _count("the largest; above 0 where values are linearly dependent"),
        },
    ),
    "types": Table(
        "Average attention from kinds of queries to kinds of keys (Fig. 1b, 1c and 5).",
        "one row per map, layer, head, source and target",
        {
            "map": _word("which part of attention: raw = effective + null_space", "raw", "effective", "null_space"),
            "layer": _LAYER,
            "head": _HEAD,
            "source": _word(
                "which queries: all, all but [SEP] (rest), or those of a kind",
                *("all", "rest", "cls", "sep", "punctuation", "other"),
            ),
            "target": _word("which keys", "cls", "sep", "punctuation", "other"),
            "attention": _number(
                "attention to all keys of the target together, averaged over the source's queries, then over texts",
                "raw: 0 to 1; others: any number",
            ),
            "texts": _count("number of texts that have a query of the source", "1 or more"),
        },
    ),
    "intervals": Table(
        "How certain attention is, measured on rows of attention (one query in one head) drawn at random. An interval "
        "is the range of a weight over all attention with the same output. Written with `--intervals`.",
        "one row per text, layer and head that rows were drawn from",
        {
            "text": _TEXT,
            "tokens": _TOKENS,
            "layer": _LAYER,
            "head": _HEAD,
            "rows": _count("number of rows drawn", "1 or more"),
            "free": _count("number of them that see linearly dependent values; all other rows are certain"),
            "certain_mass": _number("sum of a row's lower bounds, mean over rows", "0 to 1"),
            "strongest": _number("largest raw weight of a row, mean over rows", "0 to 1"),
            "width": _number("width of that weight's interval, mean over rows", "0 to 1"),
            "certain": _number(
                "share of the decided rows whose strongest edge is the strongest in all attention with the same output",
                "0 to 1",
                "no row is decided",
            ),
            "undecided": _count("number of rows for which that was not decided"),
        },
    ),
    "intervals_by_length": Table(
        "The same by length: each text is the mean of its rows. Written with `--intervals`.",
        "one row per range of lengths",
        {
            "tokens_from": _count("least number of tokens of the range", "1 or more"),
            "tokens_to": _count("greatest number of tokens of the range", "16 or more"),
            "texts": _count("number of texts", "1 or more"),
            "rows": _count("number of rows drawn", "1 or more"),
            "tokens": _number("mean number of tokens", "1 or more"),
            **_with_error("free", "share of rows that see linearly dependent values", "0 to 1"),
            **_with_error("certain_mass", "sum of a row's lower bounds", "0 to 1"),
            **_with_error("strongest", "largest raw weight of a row", "0 to 1"),
            **_with_error("width", "width of that weight's interval", "0 to 1"),
            **_with_error(
                "certain", "share of decided rows whose strongest edge is certain", "0 to 1", "no row is decided"
            ),
            "undecided": _count("number of rows for which that was not decided"),
            **{
                key: column
                for name, (meaning, range) in _FIRST.items()
                for key, column in _with_error(f"first_{name}", meaning, range).items()
            },
        },
    ),
    "groups": Table(
        "What groups of keys, such as attention sinks, receive from the drawn rows, and how large their values are. "
        "Written with `--intervals`.",
        "one row per text, layer, head and group that the text has",
        {
            "text": _TEXT,
            "tokens": _TOKENS,
            "layer": _LAYER,
            "head": _HEAD,
            "group": _word(
                "which keys: all special tokens, the first token, what opens a text and what separates or closes it "
                "(cls and sep, in models that are not causal), or periods and commas",
                *("special", "first", "cls", "sep", "punctuation"),
            ),
            "rows": _count("number of rows drawn; the next four are means over them"),
            "raw": _number("attention to all keys of the group together", "0 to 1", _DRAWN),
            "effective": _number("effective attention to them", "any number", _DRAWN),
            "lower": _number("the least that they receive in any attention with the same output", "0 to 1", _DRAWN),
            "upper": _number("the most that they receive in any attention with the same output", "0 to 1", _DRAWN),
            "value_size": _number(
                "mean norm of their values, as the output projection passes them on, over the median of the other keys",
                "0 or more",
                "there are no others, or most are 0",
            ),
        },
    ),
}

_BOX = {
    "low": _number("lower whisker of the tokens' own contributions (Tukey)", "0 to 1", "there are no tokens"),
    "lower": _number("first quartile", "0 to 1", "there are no tokens"),
    "median": _number("median", "0 to 1", "there are no tokens"),
    "upper": _number("third quartile", "0 to 1", "there are no tokens"),
    "high": _number("upper whisker", "0 to 1", "there are no tokens"),
}

ATTRIBUTION: Mapping[str, Table] = {
    "texts": _TEXTS,
    "tokens": Table(
        "How much each token contributes to its own hidden vector.",
        "one row per text, position and layer",
        {
            "text": _TEXT,
            "position": _count("position of the token in its text, counted from 0", "0 to tokens − 1"),
            "token": _word("the token as the tokenizer spells it"),
            "layer": _LAYER,
            "own_contribution": Column("float", "the token's contribution to its own hidden vector (Eq. 11)", "0 to 1"),
            "outweighed": Column("bool", "whether another token contributes more than the token itself", "true, false"),
        },
    ),
    "own": Table(
        "The tokens' own contributions, summarised for box plots (Fig. 3).",
        "one row per layer",
        {
            "layer": _LAYER,
            **_BOX,
            "outweighed": _number("share of tokens to which another contributes more than they do", "0 to 1"),
        },
    ),
    "groups": Table(
        "In which layers neighbours at a distance contribute most (Fig. 4a).",
        "one row per layer and distance",
        {
            "layer": _LAYER,
            "distance": _word("distance to the neighbours, in tokens", "1", "2", "3", "4-5", "6-10", "11-"),
            "share": _number(
                "the layer's share of these neighbours' contribution; sums to 1 over layers",
                "0 to 1",
                "no text is long enough",
            ),
        },
    ),
    "offsets": Table(
        "Contribution by relative position (Fig. 4b and 18).",
        "one row per view, layer and offset",
        {
            "view": _word(
                "offsets: of inputs to outputs, over all pairs; to_cls: contributions to [CLS], from [CLS]; "
                "around_separator: the same, from the first [SEP]",
                *("offsets", "to_cls", "around_separator"),
            ),
            "layer": _LAYER,
            "offset": _count("position of the input minus the position it is counted from", "any whole number"),
            "share": _number("the offset's share of the layer's total; a token's own is left out", "0 to 1"),
            "mean": _number("mean contribution over the pairs at this offset", "0 to 1", "there are no such pairs"),
        },
    ),
    "tags": Table(
        "The tokens' own contributions by part of speech (Fig. 26 to 37); written with `--tags`.",
        "one row per tag and layer",
        {
            "tag": _word("Penn tag of the token's word; special tokens are their own tag"),
            "tokens": _count("number of tokens with this tag", "1 or more"),
            "layer": _LAYER,
            **_BOX,
        },
    ),
}

_FIT = {
    "model": _word("name of the model"),
    "map": _word("the map from hidden vectors to input vectors", "naive", "linear", "mlp", "ridge"),
    "distance": _word("the distance of the nearest-neighbour search", "cosine", "l2"),
    "layer": _count("layer that the map was fitted to, counted from 0", "0 to layers − 1"),
    "test_layer": _count("layer that it was tested on, counted from 0", "0 to layers − 1"),
    "target": _word("what is recovered: the input vector, or the previous layer's hidden vector", "input", "previous"),
    "offset": _count("recovers the token this many places to the right; 0 is the token itself", "any whole number"),
    "data_share": _number("share of the training texts that the map was fitted to", "above 0, up to 1"),
}
_SPLIT = _word("which part of the fold's texts was tested", "train", "validation", "test")
_CHANCE = _number("rate of guessing at random: 1 / mean number of tokens per text", "0 to 1")
_UNIQUE = "rate over tokens whose target occurs once in its text"

TOKENS: Mapping[str, Table] = {
    "texts": _TEXTS,
    "rates": Table(
        "How often tokens are recovered from hidden vectors, fold by fold.",
        "one row per map, distance, layer, tested layer, target, offset, data share, fold and split",
        {
            **_FIT,
            "fold": _count("fold, counted from 0", "0 to 9"),
            "split": _SPLIT,
            "rate": _number("share of tokens that are recovered", "0 to 1"),
            "unique_rate": _number(_UNIQUE, "0 to 1", "there are none"),
            "duplicates": _number("share of tokens whose target occurs more than once in its text", "0 to 1"),
            "chance": _CHANCE,
            "n_tokens": _count("number of tokens tested", "1 or more"),
        },
    ),
    "summary": Table(
        "The rates averaged over folds, with their confidence.",
        "one row per map, distance, layer, tested layer, target, offset, data share and split",
        {
            **_FIT,
            "split": _SPLIT,
            "chance": _CHANCE,
            "folds": _count("number of folds", "1 to 10"),
            "rate": _number("mean share of tokens that are recovered", "0 to 1"),
            "deviation": _number("standard deviation over folds", "0 to 1", "there is one fold"),
            "unique_rate": _number(f"mean {_UNIQUE}", "0 to 1", "there are none"),
            "duplicates": _number("mean share of tokens whose target occurs more than once in its text", "0 to 1"),
            "low": _number("lower end of the 95 % confidence interval of the rate", "0 to 1", "there is one fold"),
            "high": _number("upper end of the 95 % confidence interval of the rate", "0 to 1", "there is one fold"),
        },
    ),
}

_NOISE = _number("Gaussian noise on the hidden vectors, relative to their norm", "0 or more")
_WHERE = {"layer": _LAYER, "noise": _NOISE}
_NORM = "relative to the norm of the hidden vector where the distance is l2"
_MARGIN = f"how much nearer the true token is than the best other; negative where another won; {_NORM}"
_FOUND = {
    "tokens": _count("number of tokens", "1 or more"),
    "rate": _number("share of them for which the true token is the nearest of the whole vocabulary", "0 to 1"),
    "margin_least": _number(f"smallest margin: {_MARGIN}", "any number"),
    "margin_median": _number("median margin", "any number"),
    "own_distance_median": _number(f"median distance of the true token, {_NORM}", "0 or more"),
    "own_distance_greatest": _number("largest distance of the true token", "0 or more"),
    "runner_up_distance_least": _number("smallest distance of a second nearest token", "0 or more"),
    "runner_up_distance_median": _number("median distance of the second nearest token", "0 or more"),
}

INVERSION: Mapping[str, Table] = {
    "texts": _TEXTS,
    "inversion": Table(
        "How often the token of a hidden vector is recovered by trying the whole vocabulary in its place.",
        "one row per layer and noise",
        {**_WHERE, **_FOUND},
    ),
    "positions": Table(
        "The same by position.",
        "one row per layer, noise and position",
        {**_WHERE, "position": _count("position in the text, counted from 0", "0 to tokens − 1"), **_FOUND},
    ),
    "tokens": Table(
        "What was found for each token.",
        "one row per text, layer, noise and position",
        {
            "text": _TEXT,
            **_WHERE,
            "position": _count("position in the text, counted from 0", "0 to tokens − 1"),
            "token": _word("the true token, as the tokenizer writes it"),
            "recovered": Column("bool", "whether the true token is the nearest", "true or false"),
            "margin": _number(_MARGIN, "any number"),
            "winner": _count("id of the nearest token"),
            "winner_token": _word("the nearest token"),
            "runner_up": _count("id of the second nearest token"),
            "runner_up_token": _word("the second nearest token"),
            "winner_distance": _number(f"how far the nearest token is, {_NORM}", "0 or more"),
            "runner_up_distance": _number("how far the second nearest token is", "0 or more"),
            "own_distance": _number("how far the true token is", "0 or more"),
        },
    ),
}

COMMANDS: Mapping[str, Mapping[str, Table]] = {
    "attention": ATTENTION,
    "attribution": ATTRIBUTION,
    "tokens": TOKENS,
    "tokens --experiment inversion": INVERSION,
}
"""The tables of each command."""


def texts_table(texts: Sequence[Text], lengths: Sequence[int]) -> "DataFrame":
    """Return the table to join the others with: the texts, their lengths in tokens and their hashes."""
    from pandas import DataFrame

    halves = [text if isinstance(text, tuple) and isinstance(text[0], str) else (text, None) for text in texts]
    return DataFrame(
        {
            "text": range(len(texts)),
            "first": [first if isinstance(first, str) else repr(first) for first, _ in halves],
            "second": [second for _, second in halves],
            "tokens": list(lengths),
            "sha256": [text_hash(text) for text in texts],
        }
    ).astype({"second": "string"})


def data_dictionary(tables: Mapping[str, Table]) -> dict[str, dict[str, dict[str, str]]]:
    """Return tables as nested dictionaries: table, column, what is known about it."""
    return {
        name: {column: about._asdict() for column, about in table.columns.items()} for name, table in tables.items()
    }


def markdown() -> str:
    """Return the data dictionary as the Markdown that `docs/tables.md` ends with."""
    return "\n".join(_markdown_lines())


def _markdown_lines() -> Iterator[str]:
    for command, tables in COMMANDS.items():
        yield f"## identikit {command}\n"
        for name, table in tables.items():
            yield f"### {name}\n\n{table.about} {table.rows.capitalize()}.\n"
            yield "| column | type | meaning | range | missing where |\n|---|---|---|---|---|"
            for column, about in table.columns.items():
                yield f"| `{column}` | {about.type} | {about.meaning} | {about.range} | {about.missing} |"
            yield ""
