"""Every claim of the paper can come out both ways, does not apply where it cannot, and shuffled layers break order."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from identikit.analyses import attribution_tables
from identikit.analyses.attention import effective_attention
from identikit.analyses.attention_tables import attention_tables
from identikit.errors import InputError
from identikit.maths.mixing import mixing
from identikit.paper.claims import CLAIMS, FAILS, HOLDS, NOT_APPLICABLE, Claim, Finding, judge
from identikit.paper.evidence import NORMS, Evidence, Subject
from identikit.store import Store

from ..models import tiny
from . import made

BY_NAME = {claim.name: claim for claim in CLAIMS}
SIZES = {"mrpc": (408, 21_723), "cola": (1043, 12_165), "mnli": (4000, 155_964), "mnli-500": (500, 19_839)}
LENGTHS = {
    "mrpc": [26, 92, 56],
    "cola": [5, 35, 9, 9, 9, 9, 9, 9, 9, 9, 10, 10],
    "mnli": [6, 128, 27, 28, 28, 28, 28],
}
AVERAGES = {"mrpc": 58, "cola": 11, "mnli": 39}

Change = Callable[[Evidence], Evidence]


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
    edit("tags frobenius", "tag != '[CLS]' and layer == 1", "median", lambda rows: 0.8 * rows["median"]),
    context("he", "said", 0.9),
    context("long", "term", 0.9),
    context("strategy", "growth", 0.9),
    lambda evidence: put(evidence, **{"offsets frobenius": offsets(evidence)}),
)


@cache
def twelve_layers() -> Evidence:
    return AS_IN_THE_PAPER(made.evidence(12))


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
    "null-space-bound": edit("null", "text == 15 and layer == 3", "slack_least", -1),
    "correlation-one-in-short-texts": edit("correlation", "text == 4 and layer == 0", "pearson", 0.99999),
    "correlation-falls-with-length": edit("correlation", "tokens > 32", "pearson", lambda rows: rows["tokens"] / 200),
    "sep-peak-disappears": types_from_raw("effective", "sep", 0.2),
    "sep-attention-in-null-space": types_from_raw("null", "sep", 0.45),
    "punctuation-peak-disappears": types_from_raw("effective", "punctuation", 0.2),
    "punctuation-over-special-tokens": types_from_raw("effective", "cls", 1.0),
    "passage-special-tokens-vanish": edit("passage", "head == 5", "effective", lambda rows: rows["raw"] / 5),
    "linear-cosine-last-layer": rates(f"{LAST} and fold != 0", 0.88),
    "linear-cosine-last-layer-one-split": rates(f"{LAST} and fold == 0", 0.965),
    "linear-over-naive": rates("map == 'naive' and layer == 12", 0.95),
    "naive-close-in-early-layers": rates("map == 'naive' and distance == 'l2' and layer == 3", 0.85),
    "mostly-identifiable": rates(LAST, 0.45),
    "rate-falls-with-depth": rates(f"{LINEAR} and layer == 9 and test_layer == 9", 0.99),
    "cosine-over-l2": rates("map == 'linear' and distance == 'l2' and layer == 12 and test_layer == 12", 0.94),
    "first-map-fails-late": rates(f"{LINEAR} and layer == 1 and test_layer == 11", 0.71),
    "last-map-serves-early-layers": rates(f"{LINEAR} and layer == 12 and test_layer == 4", 0.93),
    "late-maps-transfer": transposed("linear", "cosine"),
    "drop-to-last-layer": rates(f"{LINEAR} and layer == 11 and test_layer == 12", 0.95),
    "late-maps-transfer-in-all-maps": transposed("mlp", "l2"),
    "rate-by-data-share": rates(SHARE.format(0.8), 0.77, "shares"),
    "more-data-gains-little": rates(SHARE.format(0.9), 0.79, "shares"),
    "linear-and-mlp-overfit-alike": rates("map == 'mlp' and split == 'train'", 1.0),
    "single-layers-change-little": rates(f"{NAIVE_STEP} and distance == 'l2'", 0.79, "previous"),
    "single-layers-keep-angle": rates(f"{NAIVE_STEP} and distance == 'l2'", 0.97, "previous"),
    "later-single-layers-harder": rates("target == 'previous' and layer > 6", 1.0, "previous"),
    **{f"{name}-{data}": change for name, change in TUNED.items() for data in ("mrpc", "cola")},
    "neighbours-recovered-less": rates(
        "offset == 1 and layer == 12 and map == 'mlp' and distance == 'l2'", 0.9, "neighbours"
    ),
    "neighbours-fall-with-distance": rates("offset in (-3, 3)", 0.4, "neighbours"),
    "neighbours-fall-with-depth": rates("offset != 0 and layer == 8", 0.4, "neighbours"),
    "left-and-right-differ": symmetric,
    "own-contribution-first-layer": edit(OWN, "layer == 1", "median", 0.27),
    "own-contribution-middle-layer": edit(OWN, "layer == 6", "median", 0.16),
    "own-contribution-last-layer": edit(OWN, "layer == 12", "median", 0.095),
    "own-contribution-below-a-third": edit(OWN, "layer == 1", "median", 0.334),
    "own-contribution-falls": edit(OWN, "layer == 8", "median", 0.139),
    "own-token-largest": edit(OWN, "layer == 10", "outweighed", 0.5),
    "outweighed-never-early": edit(OWN, "layer == 3", "outweighed", 1 / 21_723),
    "outweighed-middle-layer": edit(OWN, "layer == 6", "outweighed", 0.2),
    "outweighed-last-two-layers": edit(OWN, "layer == 12", "outweighed", 0.34),
    "outweighed-rises": edit(OWN, "layer == 9", "outweighed", 0.22),
    "outweighed-above-identifiability-error": edit(OWN, "layer == 12", "outweighed", 0.06),
    "nearest-neighbours-early": edit(GROUPS, "distance == '1' and layer == 7", "share", 0.2),
    "distant-neighbours-deep": edit(GROUPS, "distance == '11-' and layer == 6", "share", 0.2),
    "nearest-contribute-most-in-total": edit(
        OFFSETS, "view == 'offsets' and layer == 5 and offset == -4", "share", 0.3
    ),
    "nearest-contribute-most-per-pair": edit(OFFSETS, "view == 'offsets' and layer == 5 and offset == -4", "mean", 1.0),
    "distant-contributions-grow": edit(OFFSETS, "view == 'offsets' and layer == 1 and offset == -20", "share", 0.9),
    "cls-gathers-beside-separator": edit(
        OFFSETS, "view == 'around_separator' and layer == 12 and offset == -3", "share", 0.3
    ),
    "cls-gathers-from-second-sentence": edit(
        OFFSETS, "view == 'around_separator' and layer == 6 and offset == -3", "share", 0.3
    ),
    "cls-gathers-from-position-30": edit(OFFSETS, "view == 'to_cls' and layer == 1 and offset == 1", "share", 0.5),
    "cls-keeps-itself-first-layer": edit(TAGS, "tag == '[CLS]' and layer == 1", "median", 0.39),
    "other-tags-keep-less-first-layer": edit(TAGS, "tag == 'MD' and layer == 1", "median", 0.36),
    "content-words-keep-more": edit(TAGS, "tag == 'RB' and layer == 12", "median", 0.07),
    "context-of-he": context("he", "the", 0.95),
    "context-of-long": context("long", "s", 0.95),
    "context-of-strategy": context("strategy", "said", 0.95),
}


def test_every_claim_is_broken_below():
    assert sorted(BROKEN) == sorted(BY_NAME)
    assert len(BY_NAME) == len(CLAIMS)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_holds_and_fails(claim: Claim):
    evidence = like_bert(claim)
    held, failed = judged(claim, evidence), judged(claim, BROKEN[claim.name](evidence))
    assert (held.verdict, failed.verdict) == (HOLDS, FAILS), (held, failed)
    assert held.measured != failed.measured or held.why != failed.why


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_is_described(claim: Claim):
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", claim.name)
    assert all((claim.where, claim.words, claim.paper, claim.rule))
    assert (claim.data == "") == (claim.needs in (("sentence",), ("passage",)))
    assert claim.data in {"mrpc", "cola", "mnli", "mnli-500", "wikitext", ""}
    assert claim.by_norm == any("{norm}" in need for need in claim.needs)
    assert {need.format(norm="sum") for need in claim.needs} <= set(twelve_layers().tables)
    assert claim.only or claim.data in {"mrpc", "wikitext", ""}


@pytest.mark.parametrize(
    ("layers", "changes"),
    [
        (1, {}),
        (1, {"causal": True}),
        (2, {}),
        (3, {}),
        (3, {"causal": True}),
        (6, {"d_value": 256}),
        (7, {"d_value": 4}),
    ],
    ids=str,
)
def test_any_model_is_judged(layers: int, changes: dict[str, Any]):
    evidence = made.evidence(layers, **changes)
    for claim in CLAIMS:
        for norm in NORMS if claim.by_norm else ("",):
            found = judge(claim, evidence, norm)
            assert found.verdict in (HOLDS, FAILS, NOT_APPLICABLE)
            assert "nan" not in found.measured + found.why
            assert found.why or found.verdict != NOT_APPLICABLE


# Order


ORDERED = (
    "own-contribution-falls",
    "outweighed-rises",
    "rate-falls-with-depth",
    "late-maps-transfer",
    "late-maps-transfer-in-all-maps",
    "last-map-serves-early-layers",
    "later-single-layers-harder",
    "neighbours-fall-with-depth",
    "nearest-neighbours-early",
    "distant-neighbours-deep",
    "distant-contributions-grow",
)
MONOTONE = (*ORDERED[:3], "neighbours-fall-with-depth")


def shuffled(evidence: Evidence, order: list[int]) -> Evidence:
    """The evidence with its layers renamed: layer i becomes `order[i - 1]` in every table."""
    names = [0, *order]
    tables = {}
    for name, table in evidence.tables.items():
        columns = [column for column in ("layer", "test_layer") if column in table]
        tables[name] = table.assign(**{column: [names[layer] for layer in table[column]] for column in columns})
    return replace(evidence, tables=tables)


@pytest.mark.parametrize("name", ORDERED)
def test_fails_with_layers_reversed(name: str):
    evidence = like_bert(BY_NAME[name])
    assert judged(BY_NAME[name], shuffled(evidence, [*range(12, 0, -1)])).verdict == FAILS
    assert judged(BY_NAME[name], shuffled(evidence, [*range(1, 13)])).verdict == HOLDS


@pytest.mark.parametrize("name", MONOTONE)
@pytest.mark.parametrize("seed", range(5))
def test_fails_with_layers_shuffled(name: str, seed: int):
    order = np.random.default_rng(seed).permutation(12) + 1
    assert judged(BY_NAME[name], shuffled(like_bert(BY_NAME[name]), order.tolist())).verdict == FAILS


# What does not apply


def without(query: str, name: str) -> Change:
    """The evidence without those rows of a table."""
    return lambda evidence: put(evidence, **{name: evidence.tables[name].query(f"not ({query})")})


def nothing_around(view: str) -> Change:
    return edit(OFFSETS, f"view == '{view}'", "share", 0.0)


NO_PAIRS = edit(OFFSETS, "view == 'around_separator' and offset > 0", "share", 0.0)
NO_SEPARATOR = edit("types", "target == 'sep'", "attention", 0.0)


@pytest.mark.parametrize(
    ("names", "change", "why"),
    [
        (["correlation-one-in-short-texts"], edit("correlation", "tokens <= 32", "tokens", 33), "at most 32"),
        (["correlation-falls-with-length"], edit("correlation", "tokens > 32", "tokens", 32), "0 texts above 32"),
        (["correlation-falls-with-length"], edit("correlation", "tokens > 32", "tokens", 40), "too few to rank"),
        (
            ["sep-peak-disappears", "sep-attention-in-null-space", "punctuation-over-special-tokens"],
            NO_SEPARATOR,
            "no [SEP] in these texts",
        ),
        (["punctuation-peak-disappears"], edit("correlation", "tokens > 32", "tokens", 32), "no null space"),
        (["passage-special-tokens-vanish"], without("key > 20", "passage"), "no null space"),
        (["passage-special-tokens-vanish"], without("key_token in ('[CLS]', '[SEP]')", "passage"), "no [CLS]"),
        (
            ["linear-over-naive", "naive-close-in-early-layers"],
            without("map == 'naive'", "rates"),
            "no rates of map naive",
        ),
        (["rate-by-data-share", "more-data-gains-little"], without("data_share < 0.9", "shares"), "shares of the data"),
        (["neighbours-fall-with-distance"], without("offset != 0", "neighbours"), "no rates of neighbours"),
        (["distant-neighbours-deep"], edit(GROUPS, "distance == '11-'", "share", np.nan), "long enough"),
        (["cls-gathers-from-position-30"], nothing_around("to_cls"), "no [CLS]"),
        (["cls-gathers-beside-separator"], nothing_around("around_separator"), "no [CLS] and [SEP]"),
        (["cls-gathers-beside-separator", "cls-gathers-from-second-sentence"], NO_PAIRS, "no pairs"),
        (["cls-keeps-itself-first-layer"], without("tag == '[CLS]'", TAGS), "no [CLS]"),
        (["content-words-keep-more"], without("tag in ('DT', 'IN', 'CC', 'TO', 'PRP')", TAGS), "one of the kinds"),
        (["context-of-he"], without("output_token == 'he'", "sentence"), "“he”"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_does_not_apply(names: list[str], change: Change, why: str):
    for name in names:
        found = judged(BY_NAME[name], change(like_bert(BY_NAME[name])))
        assert found.verdict == NOT_APPLICABLE
        assert why in found.why


@pytest.mark.parametrize(
    "name",
    [
        "left-and-right-differ",
        "cls-gathers-beside-separator",
        "cls-gathers-from-second-sentence",
        "cls-gathers-from-position-30",
        "cls-keeps-itself-first-layer",
    ],
)
def test_does_not_apply_to_causal_models(name: str):
    assert judged(BY_NAME[name], made.evidence(6, causal=True)).verdict == NOT_APPLICABLE


@pytest.mark.parametrize(
    "name",
    [
        "sep-peak-disappears",
        "sep-attention-in-null-space",
        "punctuation-peak-disappears",
        "naive-close-in-early-layers",
        "first-map-fails-late",
        "last-map-serves-early-layers",
        "later-single-layers-harder",
        "outweighed-last-two-layers",
        "nearest-neighbours-early",
        "distant-neighbours-deep",
        "distant-contributions-grow",
    ],
)
def test_one_layer_has_no_parts_to_compare(name: str):
    assert judged(BY_NAME[name], made.evidence(1)).verdict == NOT_APPLICABLE
    assert judged(BY_NAME[name], made.evidence(2)).verdict != NOT_APPLICABLE


def test_the_map_of_the_first_layer_is_not_tested_on_itself():
    found = judged(BY_NAME["first-map-fails-late"], made.evidence(2))
    assert (found.verdict, found.why) == (HOLDS, "layer 2 of 2 stands for the paper's 12")
    assert found.measured.endswith("at layer 2") and "layer 1" not in found.measured


def test_one_layer_that_stands_for_two_is_named_once():
    found = judged(BY_NAME["cls-gathers-beside-separator"], made.evidence(1))
    assert found.why == "layer 1 of 1 stands for the paper's 6 and 12"


# Wrong judgements that were found


@pytest.mark.parametrize("name", ["bert", "llama", "mistral", "modernbert"])
def test_the_bound_on_rank_holds_under_any_mask(name: str, tmp_path: Path):
    model = tiny.loaded(name)
    texts = [" ".join(f"w{3 + (7 * place) % 50}" for place in range(length)) for length in (4, 24)]
    null = attention_tables(model, texts, Store(str(tmp_path), {}))["null"]
    subject = Subject(name, model.n_layers, model.n_heads, model.d_value, model.causal)
    evidence = Evidence(subject, "made", len(texts), 28, 0, {"null": null})
    assert judged(BY_NAME["null-space-bound"], evidence).verdict == HOLDS
    for text, result in enumerate(effective_attention(model, texts)):
        visible = (result.raw > 0).sum(-1)  # no weight of a softmax over so few keys is 0
        slack = visible.clamp(max=model.d_value) - result.rank
        expected = torch.stack([slack.amin((1, 2)), slack.amax((1, 2))], dim=1)
        found = null.loc[null["text"] == text, ["slack_least", "slack_greatest"]]
        assert found.to_numpy().tolist() == expected.tolist()
    assert judged(BY_NAME["null-space-bound"], edit("null", "layer == 2", "slack_least", -1)(evidence)).verdict == FAILS


def test_a_rank_below_its_bound_is_told():
    found = judged(BY_NAME["null-space-bound"], edit("null", "layer > 3", "slack_greatest", 1)(made.evidence(6)))
    assert (found.verdict, found.measured[-6:]) == (HOLDS, "50.0 %")


@pytest.mark.parametrize(
    ("cosine", "l2", "verdict"),
    [
        (0.52, 0.4, HOLDS),
        (0.48, 0.4, HOLDS),
        (0.44, 0.4, FAILS),
        (0.56, 0.4, FAILS),
        (0.9, 0.4, FAILS),
        (0.5, 0.5, FAILS),
    ],
)
def test_cosine_is_spared_only_where_it_moves_little(cosine: float, l2: float, verdict: str):
    """Before, both rates are 0.5."""
    claim = BY_NAME["finetuning-spares-cosine-mrpc"]
    change = together(
        edit("untuned", "layer == 12", "rate", 0.5),
        edit("finetuned", "layer == 12 and distance == 'cosine'", "rate", cosine),
        edit("finetuned", "layer == 12 and distance == 'l2'", "rate", l2),
    )
    assert judged(claim, change(like_bert(claim))).verdict == verdict


def evenly_mixed(first: float) -> Evidence:
    """A model in which every token contributes 1/n to every other, on pairs whose first sentence is such a part."""
    texts = [
        mixing(torch.full((6, n, n), 1 / n, dtype=torch.float64), causal=False, cls=0, separator=int(n * first))
        for n in range(27, 93, 2)
    ]
    tables = attribution_tables.frames(attribution_tables.merged(texts))
    named = {f"{name} frobenius": table for name, table in tables.items()}
    return Evidence(Subject("even", 6, 12, 32, False), "made", len(texts), sum(range(27, 93, 2)), 0, named)


@pytest.mark.parametrize("name", ["nearest-contribute-most-per-pair", "cls-gathers-from-second-sentence"])
@pytest.mark.parametrize("first", [0.25, 0.5])
def test_even_mixing_gathers_from_nowhere(name: str, first: float):
    """Not even where second sentences are three times as long, and so give more in total."""
    assert judged(BY_NAME[name], evenly_mixed(first)).verdict == FAILS


def test_nearest_per_pair_needs_its_margin_at_every_layer():
    claim = BY_NAME["nearest-contribute-most-per-pair"]
    flat = edit(OFFSETS, "view == 'offsets' and layer == 4 and abs(offset) > 1 and abs(offset) < 11", "mean", 0.6)
    found = judged(claim, flat(like_bert(claim)))
    assert found.verdict == FAILS and "11 of 12 layers, not at 4; 1.19 times" in found.measured


def noise(tokens: int, seed: int) -> Change:
    """Neighbours recovered at a quarter, left and right alike, as far as so many test tokens can tell."""
    random = np.random.default_rng(seed)
    return rates("offset != 0", lambda rows: random.binomial(tokens, 0.25, len(rows)) / tokens, "neighbours")


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_tell_left_from_right(seed: int):
    claim = BY_NAME["left-and-right-differ"]
    evidence = noise(140, seed)(like_bert(claim))
    assert judged(claim, evidence).verdict == FAILS
    right = rates("offset > 0", lambda rows: rows["rate"] + 0.04, "neighbours")
    assert judged(claim, right(evidence)).verdict == HOLDS


@pytest.mark.parametrize(
    ("linear", "mlp", "verdict"),
    [(0.0001, 0.0199, FAILS), (0.02, 0.031, FAILS), (0.031, 0.02, FAILS), (0.1, 0.14, HOLDS), (-0.01, -0.01, FAILS)],
)
def test_overfitting_is_compared_by_ratio(linear: float, mlp: float, verdict: str):
    claim = BY_NAME["linear-and-mlp-overfit-alike"]
    own = "layer == test_layer and distance == 'l2'"
    change = together(
        rates(f"{own} and split == 'test'", 0.8),
        rates(f"{own} and split == 'train' and map == 'linear'", 0.8 + linear),
        rates(f"{own} and split == 'train' and map == 'mlp'", 0.8 + mlp),
    )
    assert judged(claim, change(like_bert(claim))).verdict == verdict


def test_no_probability_is_zero():
    claim = BY_NAME["correlation-falls-with-length"]
    straight = edit("correlation", "tokens > 32", "pearson", lambda rows: 1 - rows["tokens"] / 200)
    found = judged(claim, straight(like_bert(claim)))
    assert found.verdict == HOLDS and "p < 1e-300" in found.measured


def test_special_tokens_of_other_tokenizers():
    evidence = twelve_layers()
    names = {"[CLS]": "<cls>", "[SEP]": "<sep>"}
    passage = evidence.tables["passage"].replace({"key_token": names})
    tags = evidence.tables[TAGS].replace({"tag": names})
    other = put(evidence, passage=passage, **{TAGS: tags})
    for name in (
        "passage-special-tokens-vanish",
        "cls-keeps-itself-first-layer",
        "other-tags-keep-less-first-layer",
    ):
        assert judged(BY_NAME[name], other) == judged(BY_NAME[name], evidence)


# Details


def test_no_error_where_nothing_is_outweighed_does_not_count_against_it():
    claim = BY_NAME["outweighed-above-identifiability-error"]
    evidence = like_bert(claim)
    assert evidence.tables[OWN]["outweighed"].iloc[0] == 0
    assert judged(claim, evidence).verdict == HOLDS
    one_error = rates(f"{LINEAR} and layer == 1 and test_layer == 1 and fold == 0", 0.999)
    assert judged(claim, one_error(evidence)).verdict == FAILS


def test_norms_are_judged_apart():
    claim, evidence = BY_NAME["own-contribution-last-layer"], made.evidence(12)
    assert [judge(claim, evidence, norm).verdict for norm in ("frobenius", "sum")] == [HOLDS, FAILS]
    with pytest.raises(InputError, match="norm='' is not known"):
        judge(claim, evidence)


def test_offsets_of_a_few_pairs_are_left_out_of_means():
    claim = BY_NAME["nearest-contribute-most-per-pair"]
    far = "view == 'offsets' and offset == 40"
    rare = together(edit(OFFSETS, far, "mean", 2.0), edit(OFFSETS, far, "share", 1e-4))
    assert judged(claim, rare(like_bert(claim))).verdict == HOLDS


def test_missing_tables_are_named():
    with pytest.raises(InputError, match="finetuning-hurts-l2-mrpc on mrpc: no table finetuned"):
        judged(BY_NAME["finetuning-hurts-l2-mrpc"], made.evidence(finetuned=None))


def test_stand_ins_are_told():
    found = judged(BY_NAME["outweighed-last-two-layers"], made.evidence(6))
    assert found.why == "layers 5 and 6 of 6 stand for the paper's 11 and 12"
    assert judged(BY_NAME["own-contribution-middle-layer"], made.evidence(6)).measured == "14.4 % at layer 3"
    assert judged(BY_NAME["own-contribution-middle-layer"], made.evidence(12)).why == ""
