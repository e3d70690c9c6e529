"""Every claim can come out both ways, is undecided on few texts and not applicable where it cannot be had."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from identikit.errors import InputError
from identikit.maths.jacobian import NORMS
from identikit.paper.claims.catalogue import CLAIMS, judge, sample_sizes, texts_in_words
from identikit.paper.claims.claim import EXACT, TEXTS, WHOLE, Verdict
from identikit.paper.claims.report import SECTIONS
from identikit.paper.evidence import Evidence, Subject

from .broken import (
    BROKEN,
    GROUPS,
    LINEAR,
    OFFSETS,
    OWN,
    TAGS,
    Change,
    context,
    edit,
    enough,
    judged,
    like_bert,
    put,
    rates,
    together,
    twelve_layers,
)

HOLDS, FAILS, UNDECIDED, NOT_APPLICABLE = Verdict.HOLDS, Verdict.FAILS, Verdict.UNDECIDED, Verdict.NOT_APPLICABLE


def test_every_claim_holds_and_fails_on_enough_texts():
    """With fewer texts than it takes a claim is undecided; that of exact claims is 1."""
    assert sorted(BROKEN) == sorted(CLAIMS)
    for claim in CLAIMS.values():
        evidence = like_bert(claim)
        if claim.texts == EXACT:
            evidence = replace(evidence, texts=1)
        broken = BROKEN[claim.name](evidence)
        held, failed = judged(claim, evidence), judged(claim, broken)
        assert (held.verdict, failed.verdict) == (HOLDS, FAILS), (claim.name, held, failed)
        assert held.measured != failed.measured or held.why != failed.why, claim.name
        if claim.texts not in (EXACT, WHOLE):
            few = judged(claim, replace(evidence, texts=claim.texts - 1))
            assert (few.verdict, few.measured) == (UNDECIDED, held.measured), claim.name
            assert few.why.endswith(f"only {claim.texts - 1} texts; it takes {claim.texts}"), claim.name
            counts = claim.name == "outweighed-never-early"  # a counterexample does
            few = judged(claim, replace(broken, texts=claim.texts - 1))
            assert few.verdict == (FAILS if counts else UNDECIDED), claim.name


def test_every_claim_is_described():
    tables = set(twelve_layers().tables)
    for claim in CLAIMS.values():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", claim.name)
        assert all((claim.where, claim.words, claim.paper, claim.rule)), claim.name
        assert claim.section in SECTIONS and claim.texts in TEXTS, claim.name
        assert (claim.data == "") == (claim.needs in (("sentence",), ("passage",))), claim.name
        assert claim.data in {"mrpc", "wikitext", ""} or (claim.only and claim.data in {"cola", "mnli", "mnli-500"})
        assert {need.format(norm="sum") for need in claim.needs} <= tables, claim.name


@pytest.mark.parametrize(("layers", "changes"), [(1, {"causal": True}), (2, {}), (6, {"d_value": 256})], ids=str)
def test_any_model_is_judged(layers: int, changes: dict[str, Any]):
    evidence = enough(layers, **changes)
    for claim in CLAIMS.values():
        for norm in NORMS if claim.by_norm else ("",):
            found = judge(claim, evidence, norm)
            assert found.verdict in (HOLDS, FAILS, UNDECIDED, NOT_APPLICABLE)
            assert "nan" not in found.measured + found.why
            assert found.why or found.verdict not in (UNDECIDED, NOT_APPLICABLE)


# Order


ORDERED = """
    own-contribution-falls outweighed-rises rate-falls-with-depth late-maps-transfer late-maps-transfer-in-all-maps
    last-map-serves-early-layers later-single-layers-harder neighbours-fall-with-depth nearest-neighbours-early
    distant-neighbours-deep distant-contributions-grow
"""


def shuffled(evidence: Evidence, order: list[int]) -> Evidence:
    """The evidence with its layers renamed: layer i becomes `order[i - 1]` in every table."""
    names = [0, *order]
    tables = {}
    for name, table in evidence.tables.items():
        columns = [column for column in ("layer", "test_layer") if column in table]
        tables[name] = table.assign(**{column: [names[layer] for layer in table[column]] for column in columns})
    return replace(evidence, tables=tables)


def test_order_fails_with_layers_reversed_and_a_course_with_layers_shuffled():
    backwards = shuffled(twelve_layers(), [*range(12, 0, -1)])
    for name in ORDERED.split():
        assert judged(CLAIMS[name], backwards).verdict == FAILS, name
    mixed = shuffled(twelve_layers(), (np.random.default_rng(0).permutation(12) + 1).tolist())
    for name in ("own-contribution-falls", "outweighed-rises"):
        assert judged(CLAIMS[name], mixed).verdict == FAILS, name


# What too few texts cannot decide


def small(evidence: Evidence, texts: int, share: float) -> Evidence:
    """The same numbers from fewer texts, which have only a share of the tokens."""
    tables = dict(evidence.tables)
    for name, table in evidence.tables.items():
        column = "tokens" if name.startswith("tags") else "n_tokens"
        if column in table:
            tables[name] = table.assign(**{column: (share * table[column]).round()})
    return replace(evidence, texts=texts, tokens=round(share * evidence.tokens), tables=tables)


NEAR_THEIR_LIMIT = """
    linear-cosine-last-layer first-map-fails-late rate-by-data-share more-data-gains-little left-and-right-differ
    own-contribution-first-layer outweighed-last-two-layers outweighed-above-identifiability-error
    cls-keeps-itself-first-layer
"""


def test_numbers_near_their_limit_are_undecided():
    """The numbers are those in which the claim holds; with a few of the tokens they are too uncertain."""
    doubt = r"200 texts: [\d.e+]+ points from the rule's limit, less than two standard errors of "
    for name in NEAR_THEIR_LIMIT.split():
        claim = CLAIMS[name]
        share = 0.05 if claim.where == "Appendix C.5" else 0.003  # that of tags must leave 20 tokens
        found = judged(claim, small(like_bert(claim), 200, share))
        assert found.verdict == UNDECIDED and re.search(doubt, found.why), name


@pytest.mark.parametrize(("rate", "verdict"), [(0.72, UNDECIDED), (0.3, FAILS), (0.99, HOLDS)])
def test_a_clear_margin_is_decided_on_few_tokens(rate: float, verdict: Verdict):
    claim = CLAIMS["single-layers-change-little"]
    evidence = small(rates("map == 'naive'", rate, "previous")(like_bert(claim)), 24, 0.002)
    assert judged(claim, evidence).verdict == verdict


@pytest.mark.parametrize(("times", "verdict"), [(1, UNDECIDED), (10, FAILS)])
def test_a_rank_test_without_power_decides_nothing(times: int, verdict: Verdict):
    """Eleven texts of more than 32 tokens without a trend; and ten times as many, in which one would show."""
    claim = CLAIMS["correlation-falls-with-length"]
    evidence = like_bert(claim)
    table = evidence.tables["correlation"]
    random = np.random.default_rng(0)
    many = pd.concat([table] * times, ignore_index=True)
    found = judged(claim, put(evidence, correlation=many.assign(pearson=random.uniform(0.5, 0.9, len(many)))))
    assert found.verdict == verdict
    assert verdict == FAILS or found.why == (
        "11 texts above 32 tokens show no clear trend, and it takes 100 to rule one out"
    )
    rising = judged(claim, put(evidence, correlation=table.assign(pearson=table["tokens"] / 200)))
    assert rising.verdict == FAILS  # a clear trend the other way


def test_sample_sizes_are_told_from_the_claims():
    told = sample_sizes()
    assert len(told) == len(TEXTS) and sum(int(line.rsplit("(")[1].split()[0]) for line in told) == len(CLAIMS)
    assert {texts_in_words(claim.texts) for claim in CLAIMS.values()} == {line.split(":")[0] for line in told}


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
        (["correlation-one-in-short-texts"], edit("correlation", "tokens <= 32", "tokens", 33), "32 tokens or fewer"),
        (["correlation-falls-with-length"], edit("correlation", "tokens > 32", "tokens", 40), "different length"),
        (["sep-peak-disappears", "punctuation-over-special-tokens"], NO_SEPARATOR, "these texts have no [SEP]"),
        (["punctuation-peak-disappears"], edit("correlation", "tokens > 32", "tokens", 32), "no null space"),
        (["passage-special-tokens-vanish", "passage-make-to-them"], without("key > 20", "passage"), "no null space"),
        (["passage-make-to-them"], without("key_token in ('[CLS]', '[SEP]')", "passage"), "no [CLS]"),
        (["passage-make-to-them"], without("key_token == 'them'", "passage"), "no pieces “make” and “them”"),
        (["linear-over-naive"], without("map == 'naive'", "rates"), "no rates of map naive"),
        (["rate-by-data-share", "more-data-gains-little"], without("data_share < 0.9", "shares"), "shares of the data"),
        (["neighbours-fall-with-distance"], without("offset != 0", "neighbours"), "no rates of neighbours"),
        (["distant-neighbours-deep"], edit(GROUPS, "distance == '11-'", "share", np.nan), "long enough"),
        (["cls-gathers-from-position-30"], nothing_around("to_cls"), "no [CLS]"),
        (["cls-gathers-beside-separator"], nothing_around("around_separator"), "have no [CLS] and [SEP]"),
        (["cls-gathers-beside-separator", "cls-gathers-from-second-sentence"], NO_PAIRS, "not pairs"),
        (["cls-keeps-itself-first-layer"], without("tag == '[CLS]'", TAGS), "no [CLS]"),
        (["content-words-keep-more"], without("tag in ('DT', 'IN', 'CC', 'TO', 'PRP')", TAGS), "no function words"),
        (["context-of-he"], without("output_token == 'he'", "sentence"), "“he”"),
        (["context-of-strategy"], without("input_token == 'growth'", "sentence"), "no piece “growth”"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_does_not_apply(names: list[str], change: Change, why: str):
    for name in names:
        found = judged(CLAIMS[name], change(like_bert(CLAIMS[name])))
        assert found.verdict == NOT_APPLICABLE
        assert why in found.why


NOT_CAUSAL = """
    left-and-right-differ cls-gathers-beside-separator cls-gathers-from-second-sentence cls-gathers-from-position-30
    cls-keeps-itself-first-layer context-of-he context-of-long
"""


def test_does_not_apply_to_causal_models_unless_the_source_stands_before_the_word():
    evidence = enough(12, causal=True)
    for name in NOT_CAUSAL.split():
        assert judged(CLAIMS[name], evidence).verdict == NOT_APPLICABLE, name
    assert judged(CLAIMS["context-of-strategy"], context("strategy", "growth", 0.9)(evidence)).verdict == HOLDS
    assert judged(CLAIMS["context-of-strategy"], context("strategy", "said", 0.9)(evidence)).verdict == FAILS


NEED_TWO_LAYERS = """
    punctuation-peak-disappears naive-close-in-early-layers first-map-fails-late last-map-serves-early-layers
    linear-maps-generalise-better later-single-layers-harder outweighed-last-two-layers nearest-neighbours-early
    distant-neighbours-deep distant-contributions-grow
"""


def test_one_layer_has_no_parts_to_compare_and_two_have_no_middle():
    one, two, three = (enough(layers) for layers in (1, 2, 3))
    for name in NEED_TWO_LAYERS.split():
        assert judged(CLAIMS[name], one).verdict == NOT_APPLICABLE, name
        assert judged(CLAIMS[name], two).verdict != NOT_APPLICABLE, name
    for name in ("sep-peak-disappears", "sep-attention-in-null-space"):
        assert judged(CLAIMS[name], two).verdict == NOT_APPLICABLE, name
        assert judged(CLAIMS[name], three).verdict != NOT_APPLICABLE, name


@pytest.mark.parametrize(
    ("layers", "first", "middle", "last"),
    [
        (1, [1], [], [1]),
        (2, [1], [], [2]),
        (6, [1], [3, 4], [6]),
        (10, [1, 2], [4, 5, 6, 7], [9, 10]),
        (12, [1, 2, 3], [4, 5, 6, 7, 8, 9], [10, 11, 12]),
    ],
)
def test_parts_of_the_depth_have_the_layers_wholly_within(
    layers: int, first: list[int], middle: list[int], last: list[int]
):
    subject = Subject("made", layers, 32, False)
    parts = ((0.0, 1 / 4), (1 / 4, 3 / 4), (3 / 4, 1.0))
    assert [subject.layers_within(*part) for part in parts] == [first, middle, last]


@pytest.mark.parametrize(("layers", "early", "third"), [(2, 1, 1), (7, 1, 2), (12, 3, 4)])
def test_the_first_quarter_and_third_of_the_layers(layers: int, early: int, third: int):
    never, rises = CLAIMS["outweighed-never-early"], CLAIMS["outweighed-rises"]
    evidence = enough(layers)
    assert judged(never, edit(OWN, f"layer > {early}", "outweighed", 0.2)(evidence)).verdict == HOLDS
    assert judged(never, edit(OWN, f"layer == {early}", "outweighed", 0.2)(evidence)).verdict == FAILS
    assert judged(rises, evidence).measured.startswith(f"0.0 % at layer {early}, ")
    assert f"up to layer {third};" in judged(CLAIMS["naive-close-in-early-layers"], evidence).measured


def test_layers_that_stand_for_the_papers_are_told():
    found = judged(CLAIMS["first-map-fails-late"], enough(2))  # whose first map is not late on itself
    assert (found.verdict, found.why) == (HOLDS, "layer 2 of 2 stands for the paper's 12")
    assert re.fullmatch(r"100.0 % at layer 1, 6\d.\d % at layer 2", found.measured)
    found = judged(CLAIMS["cls-gathers-beside-separator"], enough(1))
    assert found.why == "layer 1 of 1 stands for the paper's 6 and 12"
    found = judged(CLAIMS["outweighed-last-two-layers"], enough(6))
    assert found.why == "layers 5 and 6 of 6 stand for the paper's 11 and 12"
    assert judged(CLAIMS["own-contribution-middle-layer"], enough(6)).measured == "14.4 % at layer 3"
    assert judged(CLAIMS["own-contribution-middle-layer"], enough(12)).why == ""


# Details


def test_no_error_where_nothing_is_outweighed_does_not_count_against_it():
    claim = CLAIMS["outweighed-above-identifiability-error"]
    evidence = like_bert(claim)
    assert evidence.tables[OWN]["outweighed"].iloc[0] == 0
    assert judged(claim, evidence).verdict == HOLDS
    one_error = rates(f"{LINEAR} and layer == 1 and test_layer == 1", 0.99)
    assert judged(claim, one_error(evidence)).verdict == FAILS


def test_norms_are_judged_apart():
    claim, evidence = CLAIMS["own-contribution-last-layer"], enough(12)
    assert [judge(claim, evidence, norm).verdict for norm in ("frobenius", "sum")] == [HOLDS, FAILS]
    with pytest.raises(InputError, match="norm='' is not known"):
        judge(claim, evidence)
    with pytest.raises(InputError, match="finetuning-hurts-l2-mrpc on mrpc: the table finetuned is missing"):
        judged(CLAIMS["finetuning-hurts-l2-mrpc"], enough(finetuned=None))


def test_offsets_of_a_few_pairs_are_left_out_of_means():
    claim = CLAIMS["nearest-contribute-most-per-pair"]
    far = "view == 'offsets' and offset == 40"
    rare = together(edit(OFFSETS, far, "mean", 2.0), edit(OFFSETS, far, "share", 1e-4))
    assert judged(claim, rare(like_bert(claim))).verdict == HOLDS
