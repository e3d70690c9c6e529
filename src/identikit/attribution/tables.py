"""The tables of `identikit attribution`."""

from collections.abc import Mapping

from identikit.results.table import LAYER, TEXT, TEXTS, DataColumn, DataTable, count, number, word

_BOX = {
    "low": number("lower whisker of the tokens' own contributions (Tukey)", "0 to 1", "there are no tokens"),
    "lower": number("first quartile", "0 to 1", "there are no tokens"),
    "median": number("median", "0 to 1", "there are no tokens"),
    "upper": number("third quartile", "0 to 1", "there are no tokens"),
    "high": number("upper whisker", "0 to 1", "there are no tokens"),
}

ATTRIBUTION: Mapping[str, DataTable] = {
    "texts": TEXTS,
    "tokens": DataTable(
        "How much each token contributes to its own hidden vector.",
        "one row per text, position and layer",
        {
            "text": TEXT,
            "position": count("position of the token in its text, counted from 0", "0 to tokens − 1", key=True),
            "token": word("the token as the tokenizer spells it"),
            "layer": LAYER,
            "own_contribution": DataColumn(
                "float", "the token's contribution to its own hidden vector (Eq. 11)", "0 to 1"
            ),
            "outweighed": DataColumn(
                "bool", "whether another token contributes more than the token itself", "true, false"
            ),
        },
    ),
    "own": DataTable(
        "The tokens' own contributions, summarised for box plots (Fig. 3).",
        "one row per layer",
        {
            "layer": LAYER,
            **_BOX,
            "outweighed": number("share of tokens to which another contributes more than they do", "0 to 1"),
        },
    ),
    "groups": DataTable(
        "In which layers neighbours at a distance contribute most (Fig. 4a).",
        "one row per layer and distance",
        {
            "layer": LAYER,
            "distance": word("distance to the neighbours, in tokens", "1", "2", "3", "4-5", "6-10", "11-", key=True),
            "share": number(
                "the layer's share of these neighbours' contribution; sums to 1 over layers",
                "0 to 1",
                "no text is long enough",
            ),
        },
    ),
    "offsets": DataTable(
        "Contribution by relative position (Fig. 4b and 18).",
        "one row per view, layer and offset",
        {
            "view": word(
                "offsets: of inputs to outputs, over all pairs; to_cls: contributions to [CLS], from [CLS]; "
                "around_separator: the same, from the first [SEP]",
                *("offsets", "to_cls", "around_separator"),
                key=True,
            ),
            "layer": LAYER,
            "offset": count(
                "position of the input minus the position it is counted from", "any whole number", key=True
            ),
            "share": number("the offset's share of the layer's total; a token's own is left out", "0 to 1"),
            "mean": number("mean contribution over the pairs at this offset", "0 to 1", "there are no such pairs"),
        },
    ),
    "tags": DataTable(
        "The tokens' own contributions by part of speech (Fig. 26 to 37); written with `--tags`.",
        "one row per tag and layer",
        {
            "tag": word("Penn tag of the token's word; special tokens are their own tag", key=True),
            "tokens": count("number of tokens with this tag", "1 or more"),
            "layer": LAYER,
            **_BOX,
        },
    ),
}
