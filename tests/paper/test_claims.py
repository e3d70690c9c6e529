"""Every claim of the paper can come out both ways, does not apply where it cannot, and shuffled layers break order."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from identikit.analyses import attribution_tables
from identikit.analyses.attention import effective_attention
from identikit.analyses.attention_tables import attention_tables
from identikit.errors import InputError
from identikit.maths.mixing import mixing
from identikit.paper.claims import CLAIMS, FAILS, HOLDS, NOT_APPLICABLE, Claim, judge
from identikit.paper.evidence import NORMS, Evidence, Subject
from identikit.store import Store

from ..models import tiny
from . import made
from .broken import (
    BROKEN,
    BY_NAME,
    GROUPS,
    LINEAR,
    OFFSETS,
    OWN,
    TAGS,
    Change,
    edit,
    judged,
    like_bert,
    put,
    rates,
    together,
    twelve_layers,
)


def test_every_claim_is_broken():
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
