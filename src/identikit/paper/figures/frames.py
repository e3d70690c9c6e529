"""The data of each figure, exactly as it is drawn: tidy tables taken from those of the evidence."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from pandas import DataFrame

from identikit.attention.averages import head_means, mean_over_rows
from identikit.attention.certainty import WEIGHTS
from identikit.maths.mixing import first_middle_last
from identikit.paper.evidence import Evidence
from identikit.tokens.experiments import mean_rates

MAPS = ("naive", "linear", "mlp")
TYPES = ("cls", "sep", "punctuation")
REACH = {"offsets": 30, "to_cls": 100, "around_separator": 40}
"""How far, in tokens, each view of contribution by relative position is shown."""

FEWEST = 20
"""A part of speech with fewer tokens is not shown."""

_SPECIAL = re.compile(r"(?!\[UNK\]|<unk>)(\[[A-Z]+\]|<[^<>\s]+>)")  # an unknown piece is a word
_ALSO = {"[CLS]": ("[cls]", "<s>", "<cls>"), "[SEP]": ("[sep]", "</s>", "<sep>")}


def correlation(evidence: Evidence) -> DataFrame:
    """Correlation of raw with effective attention, a row per text (Fig. 1a)."""
    return evidence.tables["correlation"].filter(["text", "tokens", "pearson"])


def attention_to_types(evidence: Evidence, *, map: str) -> DataFrame:
    """Attention of each head to [CLS], [SEP] and punctuation, and the mean over heads (Fig. 1b, 1c)."""
    table = _to_present(evidence.tables["types"], TYPES, map=map, source="all")
    return _with_mean(table, ["target", "layer"])


def attention_to_separators(evidence: Evidence) -> DataFrame:
    """Attention of each head to [SEP], from [SEP] and from all others, and the mean over heads (Fig. 5)."""
    table = _to_present(evidence.tables["types"], ("sep",), map=("effective", "raw"), source=("sep", "rest"))
    return _with_mean(table, ["map", "source", "layer"])


def certain_by_length(evidence: Evidence) -> DataFrame:
    """Certain mass beside the correlation of raw with effective attention, a row per text."""
    mass = mean_over_rows(evidence.tables["intervals"], ["certain_mass"], ["text", "tokens"])
    return correlation(evidence).merge(mass.filter(["text", "rows", "certain_mass"]), on="text")


def mass_of_types(evidence: Evidence) -> DataFrame:
    """Raw and effective attention to [CLS], [SEP] and punctuation by layer, and the least and greatest possible.

    A causal model has the first token instead of the first two.
    """
    groups = _rows(evidence.tables["groups"], group=("first", "punctuation") if evidence.subject.causal else TYPES)
    return mean_over_rows(groups.query("rows > 0"), WEIGHTS, ["group", "layer"])


def sink(evidence: Evidence) -> DataFrame:
    """What the special tokens (in a causal model the first token) receive from each head, and their values' size."""
    groups = evidence.tables["groups"]
    group = "first" if evidence.subject.causal or "special" not in set(groups["group"]) else "special"
    return head_means(groups, group).assign(group=group)


def passage(evidence: Evidence) -> DataFrame:
    """Attention of the head that looks most at [CLS] and [SEP], over the passage of Appendix A.3.

    `highlighted` is the largest effective weight that is neither near the diagonal nor on a special token.
    """
    chosen = passage_head(evidence)
    best = chosen.query("abs(query - key) > 1 and not special")["effective"].idxmax()
    return chosen.assign(highlighted=chosen.index == best)


def passage_sentence(evidence: Evidence) -> DataFrame:
    """The part of the passage that Fig. 6 shows: one sentence, the first token, special tokens, the highlighted key."""
    whole = passage(evidence)
    shown = {*whole["query"], min(whole["key"]), *whole.query("special or highlighted")["key"]}
    return _rows(whole, key=sorted(shown)).drop(columns="special")


def passage_head(evidence: Evidence) -> DataFrame:
    """The head of the passage that looks most at [CLS] and [SEP], or what a tokenizer has for them: `special` keys.

    Where the passage has none, the first token, which then gathers idle attention, stands for them in the choice.
    """
    table = evidence.tables["passage"]
    special = np.array([bool(_SPECIAL.fullmatch(token)) for token in table["key_token"]])
    sink = special if special.any() else (table["key"] == table["key"].min()).to_numpy()
    head = table.loc[sink].pivot_table("raw", index="head").idxmax().item()
    return _rows(table.assign(special=special), head=head).sort_values(["query", "key"], ignore_index=True)


def rates(evidence: Evidence, *, by: Sequence[str], table: str = "rates", **wanted: Any) -> DataFrame:
    """Mean rate over folds by the columns `by`, of maps tested on their own layer (Fig. 2a, 7, 11 to 17, 38, 39).

    `table` names the table of rates; unless more is `wanted`, rates are those on test data, of the token itself. Beside
    a rate stand the ends of its 95 % confidence interval, `low` and `high` (NaN for one fold), how many `folds` it is
    the mean of, and over how many `tokens` of a fold, on average.
    """
    return _mean_rates(evidence.tables[table].query("layer == test_layer"), list(by), **wanted)


def rates_across_layers(evidence: Evidence, *, map: str, distance: str) -> DataFrame:
    """Rates of maps trained on the named layers and tested on all (Fig. 2b, 8 to 10)."""
    wanted = {"map": map, "distance": distance, "layer": evidence.subject.named_layers}
    return _mean_rates(evidence.tables["rates"], ["layer", "test_layer"], **wanted)


def rates_before_and_after(evidence: Evidence) -> DataFrame:
    """Naive rates across single layers, of the model and of its fine-tuned form (Fig. 12, 13)."""
    parts = [
        rates(evidence, by=["distance", "layer"], table=table, map="naive").assign(finetuned=state)
        for table, state in (("untuned", False), ("finetuned", True))
    ]
    return pd.concat(parts, ignore_index=True)


def own_contribution(evidence: Evidence) -> DataFrame:
    """Quartiles and whiskers of the tokens' own contribution by layer (Fig. 3a)."""
    return evidence.tables["own frobenius"].filter(["layer", "low", "lower", "median", "upper", "high"])


def outweighed(evidence: Evidence) -> DataFrame:
    """Share of tokens that are not their own largest contributor, by layer (Fig. 3b)."""
    return evidence.tables["own frobenius"].filter(["layer", "outweighed"])


def mixing(evidence: Evidence) -> DataFrame:
    """Own contribution and the share of outweighed tokens, by layer (Fig. 40, 42)."""
    return own_contribution(evidence).merge(outweighed(evidence), on="layer")


def groups(evidence: Evidence) -> DataFrame:
    """Share of each layer in what neighbours at a distance contribute (Fig. 4a)."""
    return evidence.tables["groups frobenius"].filter(["distance", "layer", "share"])


def offsets(evidence: Evidence, *, view: str) -> DataFrame:
    """Share of contribution by relative position in the first, middle and last layer (Fig. 4b, 18).

    Offsets outside the furthest at which a pair of tokens exists are left out; one within, at which none exists (a
    token itself), has no share.
    """
    layers = [layer + 1 for layer in first_middle_last(evidence.subject.n_layers)]
    table = _rows(evidence.tables["offsets frobenius"], view=view, layer=layers)
    table = table.assign(share=table["share"].where(table["mean"].notna()))
    there = table.dropna()["offset"].clip(-REACH[view], REACH[view])
    return table.loc[table["offset"].between(there.min(), there.max()), ["layer", "offset", "share"]]


def context(evidence: Evidence) -> DataFrame:
    """Contribution of neighbours by layer (panel a) and by relative position (panel b), as in Fig. 4 (Fig. 41, 43)."""
    parts = {"a": groups(evidence), "b": offsets(evidence, view="offsets")}
    return pd.concat([part.assign(panel=panel) for panel, part in parts.items()], ignore_index=True)


def token_history(evidence: Evidence, *, token: str) -> DataFrame:
    """What each input contributes to a token of Appendix C.4's sentence, layer by layer (Fig. 19 to 25).

    The token is the first that reads so, and `own` marks its own contribution. Empty where the model's tokenizer
    writes the sentence without such a token.
    """
    table = evidence.tables["sentence"]
    plain = table["output_token"].str.lstrip("Ġ▁").str.lower()
    place = table.loc[plain.isin(_ALSO.get(token, (token,))), "output"].min()
    chosen = table.loc[table["output"] == place, ["layer", "input", "input_token", "output", "contribution"]]
    return chosen.assign(own=chosen["input"] == chosen["output"])


def tags(evidence: Evidence, *, layer: int) -> DataFrame:
    """Quartiles and whiskers of the own contribution by part of speech, in one layer (Fig. 26 to 37).

    Tags with fewer than `FEWEST` tokens are left out: their boxes would say nothing.
    """
    return _rows(evidence.tables["tags frobenius"], layer=layer).query("tokens >= @FEWEST").drop(columns="layer")


def tags_left_out(evidence: Evidence, *, layer: int) -> DataFrame:
    """The tags with too few tokens, and how many each has."""
    return _rows(evidence.tables["tags frobenius"], layer=layer).query("tokens < @FEWEST").filter(["tag", "tokens"])


def collapse(evidence: Evidence) -> DataFrame:
    """What collapsing a head's matrices does, by product and length, where it applies (panels a and b of `collapse`).

    Panel a has the largest relative error over layers, panel b the mean ratio of collapsed to factored.
    """
    table = evidence.tables["collapse"].query("applies")
    table = table.assign(operations=table["operations_collapsed"] / table["operations_factored"])
    quantities = (
        ("a", "float64", "error_float64", "max"),
        ("a", "float32", "error_float32", "max"),
        ("a", "model", "error_model", "max"),
        ("b", "operations", "operations", "mean"),
        ("b", "time", "time_ratio", "mean"),
    )
    parts = [
        table.groupby(["product", "tokens"], as_index=False)
        .agg(value=(column, how))
        .assign(panel=panel, quantity=quantity)
        for panel, quantity, column, how in quantities
    ]
    return pd.concat(parts, ignore_index=True)


def _rows(table: DataFrame, **wanted: Any) -> DataFrame:
    """The rows in which every named column has the value, or one of the values, that is wanted."""
    kept = [table[column].isin(np.atleast_1d(value).tolist()) for column, value in wanted.items()]
    return table.loc[np.logical_and.reduce(kept)].reset_index(drop=True)


def _mean_rates(table: DataFrame, by: list[str], **wanted: Any) -> DataFrame:
    usual = {"map": MAPS, "offset": 0, "data_share": 1.0, "split": "test"}
    return mean_rates(_rows(table, **usual | wanted), by)


def _to_present(table: DataFrame, targets: Sequence[str], **wanted: Any) -> DataFrame:
    """Attention to those of the token types that some text has: then tokens of the type are a source, too."""
    sources = set(table["source"])
    return _rows(table, target=[kind for kind in targets if kind in sources], **wanted)


def _with_mean(table: DataFrame, by: list[str]) -> DataFrame:
    means = table.groupby(by)["attention"].transform("mean")
    return table.filter([*by, "head", "attention"]).assign(mean=means)
