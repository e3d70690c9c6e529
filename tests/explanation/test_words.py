"""The verdict as a document: which tokens' sources are listed, what is said where something is missing, and facts."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from identikit.errors import Unavailable, for_command_line, for_page
from identikit.explanation import time_limit
from identikit.explanation.explain import explain
from identikit.explanation.result import Explanation, Sources, TokenSource
from identikit.explanation.words import LONGEST_LISTED, LONGEST_TEXT, _opening_and_end, sources_table, verdict
from identikit.results.words import ShareEstimate, Table, estimate, percent
from identikit.tokens.result import layers_in_words
from tests.explanation.test_result import MAPS
from tests.explanation.truth import unfounded
from tests.models import tiny


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    return explain(tiny.loaded("bert"), "w5 w6 w5 w7", maps=MAPS, probes="exact")


def listed(tokens: Sequence[str], outweighed: Sequence[int] = ()) -> Table:
    """The table for tokens that contribute less to themselves the later they stand; each one's source is the next."""
    sources = []
    for place, token in enumerate(tokens):
        following = min(place + 1, len(tokens) - 1)
        source = TokenSource(tokens[following], following, 0.25)
        own = (len(tokens) - place) / (2 * len(tokens))
        sources.append(Sources(token, place, ((source,),) * 3, own, place in outweighed))
    return sources_table(sources)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([3], "layer 3"),
        ([0, 1], "layers 0 and 1"),
        ([0, 1, 2], "layers 0 to 2"),
        ([0, 4, 7], "layers 0, 4 and 7"),
        ([0, 3, 4, 5, 9, 10, 11, 12], "layers 0, 3 to 5 and 9 to 12"),
    ],
)
def test_layers_that_follow_each_other_are_said_as_a_range(layers: list[int], words: str):
    assert layers_in_words(layers) == words


LONG = [f"t{place}" for place in range(40)]


@pytest.mark.parametrize(
    ("tokens", "outweighed", "rows", "caption"),
    [
        (["a", "b", "c"], [1], ["a", "b *", "c"], "each token:"),
        (["a", "b"], [], ["a", "b"], "each token:"),
        (["Ġthe", "Ġcat", "Ġthe", "mat"], [2], ["the@0", "cat", "the@2 *", "mat"], "each token; @ gives the position"),
        (LONG[:30], [3, 28], ["t3 *", "t28 *"], "each token that is no longer its own largest contributor (2 of 30;"),
        (LONG[:30], [], LONG[6:30], "(all 30 are still their own largest contributor;"),
        (LONG, range(35), [f"{token} *" for token in LONG[11:35]], "(of 35 that are no longer their own largest"),
    ],
)
def test_of_a_long_text_the_most_mixed_tokens_are_listed(tokens: list[str], outweighed, rows: list[str], caption: str):
    table = listed(tokens, outweighed)
    assert table.column("token") == rows and len(rows) <= LONGEST_LISTED
    assert caption in table.caption and ("`to_dict()` has all" in table.caption) == (len(tokens) > LONGEST_LISTED)
    assert bool(table.notes) == any(row.endswith(" *") for row in rows)


def test_sources_carry_their_position_too():
    assert listed(["Ġthe", "Ġcat", "Ġthe", "mat"]).column("last layer")[:2] == [[("cat", 0.25)], [("the@2", 0.25)]]


def test_tokens_and_those_that_cannot_be_told_apart_are_counted():
    model = tiny.loaded("llama")
    assert verdict(explain(model, [5, 6, 5, 5], maps=MAPS, probes=2)).facts["repeated"] == 3
    document = verdict(explain(model, [5], maps=MAPS, probes=2))
    assert document.facts["tokens"] == 1 and document.facts["outweighed"] == 0 and "repeated" not in document.facts
    assert "1 token: w5" in str(document) and "1 tokens" not in str(document)


def test_what_is_missing_says_why(explanation: Explanation):
    reason = "It needs [more] memory."
    document = verdict(replace(explanation, attribution=Unavailable(reason), identity=Unavailable(reason)))
    for question in ("Which token is this?", "Where did it come from?"):
        (paragraph,) = document.under(question).blocks
        assert paragraph.words == f"Not answered: {reason}"  # pyright: ignore[reportAttributeAccessIssue]


def test_every_number_in_words_is_a_fact():
    document = verdict(explain(tiny.loaded("llama"), "w5 w6 w5 w7 w8 w9 w6", maps=MAPS, probes=4, seconds=1e-9))
    assert [unfounded(paragraph) for paragraph in document.paragraphs] == [[]] * len(document.paragraphs)


def test_readings_are_said_with_numbers_that_are_facts():
    text = " ".join(f"w{place % 9 + 3}" for place in range(14))
    read = explain(tiny.loaded("bert"), text, maps=MAPS, probes=4, measures=("rollout", "norm", "roles"), seconds=None)
    section = verdict(read).under("Which explanation can be trusted?")
    assert [unfounded(paragraph) for paragraph in section.paragraphs] == [[]] * len(section.paragraphs)
    facts = read.about["readings"]
    measures, roles = section.tables
    assert measures.column("reading") == ["rollout", "norm"] and measures.column("ends") == ["exact", "exact"]
    assert measures.column("determined") == [(facts[name]["determined"], False) for name in ("rollout", "norm")]
    assert f"Rollout: {percent(facts['rollout']['determined'])} of it is determined." in section.paragraphs[0].words
    scores = read.readings["roles"]
    assert not isinstance(scores, Unavailable)
    for role, head, raw, least, most in roles.rows:
        at = scores.sel(score=role, layer=int(head[1]), head=int(head[3:]))  # pyright: ignore
        assert (float(at.raw), float(at.lower), float(at.upper)) == (raw, least, most)
        assert raw == float(scores.sel(score=role).raw.max())


def test_facts_are_those_of_the_results(explanation: Explanation):
    facts = verdict(explanation).facts
    identity = explanation.identity
    attribution = explanation.attribution
    assert not isinstance(identity, Unavailable) and not isinstance(attribution, Unavailable)
    assert facts["recovered"] == identity.recovered.double().mean(1).tolist()
    assert facts["recovered_after_layers"] == facts["own_after_layers"] == (0, 2)
    medians = attribution.own.median(1).values.tolist()
    assert facts["own"] == (medians[0], medians[-1]) and facts["probes"] is None
    assert facts["outweighed"] == float(attribution.outweighed[-1].double().mean())
    assert facts["near"] == (explanation.about["near"][0], explanation.about["near"][-1])


def test_the_document_is_what_print_and_latex_show(explanation: Explanation):
    assert str(explanation) == f"{explanation!r}\n{verdict(explanation)}"
    assert "Layers and heads count from 0." in str(explanation).replace("\n", " ")
    latex = explanation.to_latex()
    assert latex.count(r"\begin{tabular}") == len(verdict(explanation).tables) > 0
    assert latex.count(r"\subsection*") == 3


def test_a_pair_says_what_stands_between_its_halves_in_a_causal_model(explanation: Explanation):
    causal, other = (explain(tiny.loaded(name), ("w5 w6", "w7"), maps=MAPS, probes=2) for name in ("llama", "bert"))
    between = [verdict(one).facts.get("joined_by") for one in (causal, other, explanation)]
    assert between == [["</s>"], None, None]


def test_a_long_text_is_shown_by_its_opening_and_end():
    words = _opening_and_end([f"t{position}" for position in range(1000)]).split()
    half = LONGEST_TEXT // 2
    assert words == [*(f"t{i}" for i in range(half)), "…", *(f"t{i}" for i in range(1000 - half, 1000))]
    assert _opening_and_end(["a", "b"]) == "a b"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (ShareEstimate(0.9996, 0.0, 0.9996, 0.9996), ">99.9%"),
        (ShareEstimate(0.9, 0.05, 0.8, 1.0), "90%±5%"),
        (ShareEstimate(0.05, 0.06, 0.0, 0.17), "0% to 17%"),
        (ShareEstimate(0.9, 0.3, 0.3, 1.0), "30% to 100%"),
        (ShareEstimate(float("nan"), float("nan"), 0.92, 1.0), "92% to 100%"),
    ],
)
def test_a_share_with_a_large_error_is_a_range(found: ShareEstimate, words: str):
    assert estimate(percent)(found) == words


def test_attribution_that_does_not_fit_in_the_time_offers_what_does(monkeypatch: pytest.MonkeyPatch):
    def slow(model, lengths, request):
        return 1.0 if request.targets else 4000.0

    monkeypatch.setattr(time_limit, "is_affordable", lambda model, n, request: False)
    monkeypatch.setattr(time_limit, "expected_seconds", slow)
    found = explain(tiny.loaded("bert"), "w5 w6 w7", maps=MAPS, seconds=20)
    assert isinstance(found.attribution, Unavailable)
    assert "`token_attribution(model, text, targets=[4], probes=16)` takes about" in found.attribution.reason
    document = verdict(found)
    assert "left of the time limit (seconds=20). Of the last" in document.to_text(None)
    page = document.spoken(for_page).to_dict()["sections"][2]["paragraphs"]
    assert page == ["Not answered: Attribution takes about 67 minutes, more than is left of the time limit."]
    typed = document.spoken(lambda words: for_command_line(words, {"seconds": "--seconds"})).to_text(None)
    assert "left of the time limit (--seconds 20). Of the last" in typed and "probes=16)` in Python takes" in typed
    assert "layers=range(1)" in found.attribution.reason
