"""Evidence in which every claim holds, and for each claim the change that breaks it."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from identikit.paper.claims.catalogue import judge
from identikit.paper.claims.claim import Claim, Finding
from identikit.paper.evidence import Evidence

from . import made

SIZES = {"mrpc": (408, 21_723), "cola": (1043, 12_165), "mnli": (4000, 155_964), "mnli-500": (500, 19_839)}
LENGTHS = {
    "mrpc": [26, 92, 56],
    "cola": [5, 35, 9, 9, 9, 9, 9, 9, 9, 9, 10, 10],
    "mnli": [6, 128, 27, 28, 28, 28, 28],
}
AVERAGES = {"mrpc": 58, "cola": 11, "mnli": 39}

Change = Callable[[Evidence], Evidence]


@cache
def enough(n_layers: int = 6, **changes: Any) -> Evidence:
    """Made-up evidence, as if it came from as many texts and tokens as it takes to decide every claim."""
    evidence = made.evidence(n_layers, **changes)
    tables = dict(evidence.tables)
    for name, table in evidence.tables.items():
        if name.startswith("tags"):
            tables[name] = table.assign(tokens=10 * table["tokens"])
        elif "n_tokens" in table:
            tables[name] = table.assign(n_tokens=200 * table["n_tokens"])
    return replace(evidence, texts=408, tokens=21_723, tables=tables)


def judged(claim: Claim, evidence: Evidence) -> Finding:
    return judge(claim, evidence, "frobenius" if claim.by_norm else "")


def put(evidence: Evidence, **tables: pd.DataFrame) -> Evidence:
    """The evidence with other tables."""
    return replace(evidence, tables={**evidence.tables, **tables})


def edit(name: str, where: str, column: str | list[str], value: Any) -> Change:
    """Change a column in the rows of a query: to a value, or by a function of those rows."""

    def change(evidence: Evidence) -> Evidence:
        table = evidence.tables[name].copy()
        rows = table.query(where).index
        assert len(rows), f"{where!r} is nowhere in {name}"
        table.loc[rows, column] = value(table.loc[rows]) if callable(value) else value
        return put(evidence, **{name: table})

    return change


def together(*changes: Change) -> Change:
    def change(evidence: Evidence) -> Evidence:
        for one in changes:
            evidence = one(evidence)
        return evidence

    return change


def offsets(evidence: Evidence) -> pd.DataFrame:
    """Context near the token and reaching further with depth; to [CLS] from around the [SEP] at position 30."""
    parts = []
    for layer in made.layers_of(evidence.subject):
        near = np.arange(-40, 41)
        mean = np.exp(-abs(near) / (2 + layer / 4))
        views = {
            "offsets": (near, np.where(near == 0, 0, 60 - abs(near)), mean),
            "to_cls": (near, near > 0, np.exp(-abs(near - 30) / 5)),
            "around_separator": (near, abs(near) < 30, np.exp(-abs(near) / 5) * np.where(near > 0, 1.2, near < 0)),
        }
        for view, (offset, pairs, value) in views.items():
            share = value * pairs / (value * pairs).sum()
            kept = {"share": share, "mean": np.where(pairs > 0, value, np.nan)}
            parts.append(pd.DataFrame({"view": view, "layer": layer, "offset": offset, **kept}))
    return pd.concat(parts, ignore_index=True)


def lengths(data: str) -> pd.DataFrame:
    tokens = LENGTHS[data]
    return pd.DataFrame({"text": range(len(tokens)), "tokens": tokens})


def context(word: str, source: str, contribution: float) -> Change:
    """Let one token contribute so much to a word of the sentence in the first seven layers."""
    where = f"output_token == '{word}' and input_token == '{source}' and layer <= 7"
    return edit("sentence", where, "contribution", contribution)


AS_IN_THE_PAPER = together(
    edit("types", "map == 'effective' and target == 'punctuation'", "attention", 0.05),
    edit("rates", "map == 'naive' and layer <= 4 and target == 'input'", "rate", 0.95),
    edit("rates", "map == 'linear' and distance == 'cosine' and layer == 1 and test_layer == 11", "rate", 0.68),
    edit("rates", "map == 'mlp' and layer < test_layer", "rate", lambda rows: rows["rate"] - 0.05),
    edit("tags frobenius", "tag != '[CLS]' and layer == 1", "median", lambda rows: 0.8 * rows["median"]),
    context("he", "said", 0.9),
    context("long", "term", 0.9),
    context("strategy", "growth", 0.9),
    lambda evidence: put(evidence, **{"offsets frobenius": offsets(evidence)}),
)


@cache
def twelve_layers() -> Evidence:
    return AS_IN_THE_PAPER(enough(12))


def like_bert(claim: Claim) -> Evidence:
    """Evidence in which a claim holds, of twelve layers; the paper's numbers on datasets exclude each other."""
    evidence = replace(twelve_layers(), data=claim.data)
    if claim.name.endswith("-size"):
        texts, tokens = SIZES[claim.data]
        return replace(evidence, texts=texts, tokens=tokens)
    if claim.name.endswith("-chance"):
        return replace(evidence, texts=1000, tokens=1000 * AVERAGES[claim.data])
    return put(evidence, lengths=lengths(claim.data)) if claim.name.endswith("-lengths") else evidence


def types_from_raw(name: str, target: str, share: float) -> Change:
    """Make effective or null attention to a type a share of the raw attention to it."""

    def change(evidence: Evidence) -> Evidence:
        table = evidence.tables["types"].set_index(["map", "layer", "head", "source", "target"]).sort_index()
        raw = table.xs(("raw", target), level=("map", "target"))["attention"]
        table.loc[(name, slice(None), slice(None), slice(None), target), "attention"] = share * raw.to_numpy()
        return put(evidence, types=table.reset_index())

    return change


def transposed(map: str, distance: str) -> Change:
    """Exchange the layers that maps were fitted on and those that they were tested on."""
    columns = ["layer", "test_layer"]
    where = f"map == '{map}' and distance == '{distance}' and layer != test_layer"
    return edit("rates", where, columns, lambda rows: rows[columns[::-1]].to_numpy())


def rates(where: str, value: Any, name: str = "rates") -> Change:
    return edit(name, where, "rate", value)


def symmetric(evidence: Evidence) -> Evidence:
    """Let neighbours to the right be recovered as those to the left are."""
    left = evidence.tables["neighbours"].query("offset < 0")
    right = left.assign(offset=-left["offset"])
    return put(evidence, neighbours=pd.concat([left, right], ignore_index=True))


LINEAR = "map == 'linear' and distance == 'cosine' and target == 'input' and offset == 0 and split == 'test'"
LAST = f"{LINEAR} and layer == 12 and test_layer == 12"
SHARE = (
    "map == 'mlp' and distance == 'l2' and split == 'test' and layer == 11 and test_layer == 11 and data_share == {}"
)
NAIVE_STEP = "map == 'naive' and target == 'previous'"
OWN, GROUPS, OFFSETS, TAGS = (f"{name} frobenius" for name in ("own", "groups", "offsets", "tags"))
TUNED = {
    "finetuning-hurts-l2": edit("finetuned", "distance == 'l2' and layer == 12", "rate", 0.8),
    "finetuning-spares-cosine": edit("finetuned", "distance == 'cosine' and layer == 12", "rate", 0.5),
}

BROKEN: dict[str, Change] = {
    "mrpc-size": lambda evidence: replace(evidence, texts=407),
    "cola-size": lambda evidence: replace(evidence, texts=1042),
    "mnli-size": lambda evidence: replace(evidence, tokens=155_946),
    "mnli-500-size": lambda evidence: replace(evidence, tokens=19_838),
    "mrpc-lengths": edit("lengths", "tokens == 92", "tokens", 86),
    "cola-lengths": edit("lengths", "tokens == 10", "tokens", 20),
    "mnli-lengths": edit("lengths", "tokens == 6", "tokens", 5),
    "mrpc-chance": lambda evidence: replace(evidence, texts=408, tokens=21_723),
    "cola-chance": lambda evidence: replace(evidence, tokens=12_000),
    "mnli-chance": lambda evidence: replace(evidence, tokens=41_000),
    "null-space-bound": edit("null_dimension", "text == 15 and layer == 3", "slack_least", -1),
    "correlation-one-in-short-texts": edit("correlation", "text == 4", "pearson", 0.99999),
    "correlation-falls-with-length": edit("correlation", "tokens > 32", "pearson", lambda rows: rows["tokens"] / 200),
    "sep-peak-disappears": types_from_raw("effective", "sep", 0.2),
    "sep-attention-in-null-space": types_from_raw("null_space", "sep", 0.45),
    "punctuation-peak-disappears": types_from_raw("effective", "punctuation", 0.2),
    "punctuation-over-special-tokens": types_from_raw("effective", "cls", 1.0),
    "passage-special-tokens-vanish": edit("passage", "head == 5", "effective", lambda rows: rows["raw"] / 5),
    "passage-make-to-them": edit(
        "passage", "head == 5 and query_token == 'mobility' and key_token == 'research'", "effective", 0.5
    ),
    "all-certain-in-short-texts": edit("intervals", "text == 4", "certain_mass", 0.9999),
    "certain-mass-falls-with-length": edit(
        "intervals", "tokens > 32", "certain_mass", lambda rows: rows["tokens"] / 200
    ),
    "special-mass-certain-where-effective-loses-it": edit(
        "groups", "tokens > 32 and group == 'special'", "lower", lambda rows: 0.3 * rows["raw"]
    ),
    "sep-peak-certain": edit("groups", "tokens > 32 and group == 'sep'", "lower", lambda rows: 0.2 * rows["raw"]),
    "strongest-edge-certain": edit("intervals", "tokens > 32", "certain", 0.3),
    "linear-cosine-last-layer": rates(LAST, 0.88),
    "linear-cosine-last-layer-one-split": rates(f"{LAST} and fold == 0", 0.99),
    "linear-over-naive": rates("map == 'naive' and layer == 12", 0.95),
    "naive-close-in-early-layers": rates("map == 'naive' and distance == 'l2' and layer == 3", 0.85),
    "mostly-identifiable": rates(LAST, 0.45),
    "rate-falls-with-depth": rates(f"{LINEAR} and layer == 9 and test_layer == 9", 0.99),
    "cosine-over-l2": rates("map == 'linear' and distance == 'l2' and layer == 12 and test_layer == 12", 0.99),
    "first-map-fails-late": rates(f"{LINEAR} and layer == 1 and test_layer == 11", 0.8),
    "last-map-serves-early-layers": rates(f"{LINEAR} and layer == 12 and test_layer == 4", 0.93),
    "late-maps-transfer": transposed("linear", "cosine"),
    "drop-to-last-layer": rates(f"{LINEAR} and layer == 11 and test_layer == 12", 0.96),
    "late-maps-transfer-in-all-maps": transposed("mlp", "l2"),
    "linear-maps-generalise-better": rates("map == 'mlp' and distance == 'l2' and layer != test_layer", 0.9),
    "rate-by-data-share": rates(SHARE.format(0.8), 0.7, "shares"),
    "more-data-gains-little": rates(SHARE.format(0.9), 0.7, "shares"),
    "linear-and-mlp-overfit-alike": rates("map == 'linear' and split == 'train'", 1.0),
    "linear-and-mlp-equal-under-cosine": rates(
        "map == 'mlp' and distance == 'cosine' and layer == 9 and test_layer == 9", 0.9
    ),
    "single-layers-change-little": rates(f"{NAIVE_STEP} and distance == 'l2'", 0.7, "previous"),
    "single-layers-keep-angle": rates(f"{NAIVE_STEP} and distance == 'l2'", 0.97, "previous"),
    "later-single-layers-harder": rates("target == 'previous' and layer > 6", 1.0, "previous"),
    **{f"{name}-{data}": change for name, change in TUNED.items() for data in ("mrpc", "cola")},
    "neighbours-recovered-less": rates(
        "offset == 1 and layer == 12 and map == 'mlp' and distance == 'l2'", 0.9, "neighbours"
    ),
    "neighbours-fall-with-distance": rates("offset in (-3, 3)", 0.4, "neighbours"),
    "neighbours-fall-with-depth": rates("offset != 0 and layer == 8", 0.5, "neighbours"),
    "left-and-right-differ": symmetric,
    "own-contribution-first-layer": edit(OWN, "layer == 1", "median", 0.27),
    "own-contribution-middle-layer": edit(OWN, "layer == 6", "median", 0.16),
    "own-contribution-last-layer": edit(OWN, "layer == 12", "median", 0.095),
    "own-contribution-below-a-third": edit(OWN, "layer == 1", "median", 0.36),
    "own-contribution-falls": edit(OWN, "layer == 8", "median", 0.16),
    "own-token-largest": edit(OWN, "layer == 10", "outweighed", 0.55),
    "outweighed-never-early": edit(OWN, "layer == 3", "outweighed", 1 / 21_723),
    "outweighed-middle-layer": edit(OWN, "layer == 6", "outweighed", 0.22),
    "outweighed-last-two-layers": edit(OWN, "layer == 12", "outweighed", 0.34),
    "outweighed-rises": edit(OWN, "layer == 9", "outweighed", 0.2),
    "outweighed-above-identifiability-error": edit(OWN, "layer == 12", "outweighed", 0.06),
    "nearest-neighbours-early": edit(GROUPS, "distance == '1' and layer == 7", "share", 0.2),
    "distant-neighbours-deep": edit(GROUPS, "distance == '11-' and layer == 6", "share", 0.2),
    "nearest-contribute-most-in-total": edit(
        OFFSETS, "view == 'offsets' and layer == 5 and offset == -4", "share", 0.3
    ),
    "nearest-contribute-most-per-pair": edit(
        OFFSETS, "view == 'offsets' and layer == 5 and offset in (-4, 4)", "mean", 1.0
    ),
    "distant-contributions-grow": edit(OFFSETS, "view == 'offsets' and layer == 1 and offset == -20", "share", 0.9),
    "cls-gathers-beside-separator": edit(
        OFFSETS, "view == 'around_separator' and layer == 12 and offset == -3", "share", 0.3
    ),
    "cls-gathers-from-second-sentence": edit(
        OFFSETS, "view == 'around_separator' and layer == 6 and offset == -3", "share", 0.3
    ),
    "cls-gathers-from-position-30": edit(OFFSETS, "view == 'to_cls' and layer == 1 and offset == 1", "share", 0.5),
    "cls-keeps-itself-first-layer": edit(TAGS, "tag == '[CLS]' and layer == 1", "median", 0.3),
    "other-tags-keep-less-first-layer": edit(TAGS, "tag == 'MD' and layer == 1", "median", 0.45),
    "content-words-keep-more": edit(TAGS, "tag == 'RB' and layer == 12", "median", 0.07),
    "context-of-he": context("he", "the", 0.95),
    "context-of-long": context("long", "s", 0.95),
    "context-of-strategy": context("strategy", "said", 0.95),
}
