"""The tables of `identikit tokens`."""

from collections.abc import Mapping

from identikit.results.table import LAYER, TEXT, TEXTS, DataColumn, DataTable, count, number, word

_FIT = {
    "model": word("name of the model"),
    "map": word("the map from hidden vectors to input vectors", "naive", "linear", "mlp", "ridge", key=True),
    "distance": word("the distance of the nearest-neighbour search", "cosine", "l2", key=True),
    "layer": count("layer that the map was fitted to, counted from 0", "0 to layers − 1", key=True),
    "test_layer": count("layer that it was tested on, counted from 0", "0 to layers − 1", key=True),
    "target": word(
        "what is recovered: the input vector, or the previous layer's hidden vector", "input", "previous", key=True
    ),
    "offset": count(
        "recovers the token this many places to the right; 0 is the token itself", "any whole number", key=True
    ),
    "data_share": number("share of the training texts that the map was fitted to", "above 0, up to 1", key=True),
}
_SPLIT = word("which part of the fold's texts was tested", "train", "validation", "test", key=True)
_CHANCE = number("rate of guessing at random: 1 / mean number of tokens per text", "0 to 1")
_UNIQUE = "rate over tokens whose target occurs once in its text"

TOKENS: Mapping[str, DataTable] = {
    "texts": TEXTS,
    "rates": DataTable(
        "How often tokens are recovered from hidden vectors, fold by fold.",
        "one row per map, distance, layer, tested layer, target, offset, data share, fold and split",
        {
            **_FIT,
            "fold": count("fold, counted from 0", "0 to 9", key=True),
            "split": _SPLIT,
            "rate": number("share of tokens that are recovered", "0 to 1"),
            "unique_rate": number(_UNIQUE, "0 to 1", "there are none"),
            "duplicates": number("share of tokens whose target occurs more than once in its text", "0 to 1"),
            "chance": _CHANCE,
            "n_tokens": count("number of tokens tested", "1 or more"),
        },
    ),
    "summary": DataTable(
        "The rates averaged over folds, with their confidence.",
        "one row per map, distance, layer, tested layer, target, offset, data share and split",
        {
            **_FIT,
            "split": _SPLIT,
            "chance": _CHANCE,
            "folds": count("number of folds", "1 to 10"),
            "rate": number("mean share of tokens that are recovered", "0 to 1"),
            "deviation": number("standard deviation over folds", "0 to 1", "there is one fold"),
            "unique_rate": number(f"mean {_UNIQUE}", "0 to 1", "there are none"),
            "duplicates": number("mean share of tokens whose target occurs more than once in its text", "0 to 1"),
            "low": number("lower end of the 95 % confidence interval of the rate", "0 to 1", "there is one fold"),
            "high": number("upper end of the 95 % confidence interval of the rate", "0 to 1", "there is one fold"),
        },
    ),
}

_NOISE = number("Gaussian noise on the hidden vectors, relative to their norm", "0 or more", key=True)
_POSITION = count("position in the text, counted from 0", "0 to tokens − 1", key=True)
_WHERE = {"layer": LAYER, "noise": _NOISE}
_NORM = "relative to the norm of the hidden vector where the distance is l2"
_MARGIN = f"how much nearer the true token is than the best other; negative where another won; {_NORM}"
_FOUND = {
    "tokens": count("number of tokens", "1 or more"),
    "rate": number("share of them for which the true token is the nearest of the whole vocabulary", "0 to 1"),
    "margin_least": number(f"smallest margin: {_MARGIN}", "any number"),
    "margin_median": number("median margin", "any number"),
    "own_distance_median": number(f"median distance of the true token, {_NORM}", "0 or more"),
    "own_distance_greatest": number("largest distance of the true token", "0 or more"),
    "runner_up_distance_least": number("smallest distance of a second nearest token", "0 or more"),
    "runner_up_distance_median": number("median distance of the second nearest token", "0 or more"),
}

INVERSION: Mapping[str, DataTable] = {
    "texts": TEXTS,
    "inversion": DataTable(
        "How often the token of a hidden vector is recovered by trying the whole vocabulary in its place.",
        "one row per layer and noise",
        {**_WHERE, **_FOUND},
    ),
    "positions": DataTable(
        "The same by position.",
        "one row per layer, noise and position",
        {**_WHERE, "position": _POSITION, **_FOUND},
    ),
    "tokens": DataTable(
        "What was found for each token.",
        "one row per text, layer, noise and position",
        {
            "text": TEXT,
            **_WHERE,
            "position": _POSITION,
            "token": word("the true token, as the tokenizer writes it"),
            "recovered": DataColumn("bool", "whether the true token is the nearest", "true or false"),
            "margin": number(_MARGIN, "any number"),
            "winner": count("id of the nearest token"),
            "winner_token": word("the nearest token"),
            "runner_up": count("id of the second nearest token"),
            "runner_up_token": word("the second nearest token"),
            "winner_distance": number(f"how far the nearest token is, {_NORM}", "0 or more"),
            "runner_up_distance": number("how far the second nearest token is", "0 or more"),
            "own_distance": number("how far the true token is", "0 or more"),
        },
    ),
}
