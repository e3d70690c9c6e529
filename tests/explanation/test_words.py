"""The verdict in words: which tokens' sources are listed and why, and what is said where there is nothing to list."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from identikit.errors import Unavailable
from identikit.explanation import words
from identikit.explanation.explain import explain
from identikit.explanation.result import Explanation
from identikit.explanation.sources import Source, Sources
from identikit.explanation.words import LONGEST_LISTED
from tests.explanation.test_result import MAPS
from tests.models import tiny


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    return explain(tiny.loaded("bert"), "w5 w6 w5 w7", maps=MAPS, probes="exact")


def sources(tokens: Sequence[str], outweighed: Sequence[int] = ()) -> list[Sources]:
    """Each token's own contribution is smaller the later it stands; its one source is the token behind it."""
    last = len(tokens) - 1
    return [
        Sources(
            token=token,
            position=place,
            sources=((Source(tokens[min(place + 1, last)], min(place + 1, last), 0.25),),) * 3,
            own=(len(tokens) - place) / (2 * len(tokens)),
            outweighed=place in outweighed,
        )
        for place, token in enumerate(tokens)
    ]


def listed(tokens: Sequence[str], outweighed: Sequence[int] = ()) -> str:
    """Return what is printed below the words on mixing."""
    console = Console(width=160, color_system=None)
    with console.capture() as captured:
        for part in words._sources(sources(tokens, outweighed)):
            console.print(part)
    return captured.get()


def rows(told: str) -> list[str]:
    """Return the first cell of every row of the table of sources."""
    return [line.split("  ")[0] for line in told.splitlines() if "0.25" in line]


def long(count: int) -> list[str]:
    return [f"t{place}" for place in range(count)]


def test_a_short_text_is_listed_in_full():
    told = listed(["a", "b", "c"], outweighed=[1])
    assert "\nStrongest sources of each token:\n" in told and "--json" not in told and "@" not in told
    assert rows(told) == ["a", "b *", "c"]
    assert "* Another token is its largest source after the last layer." in told
    assert "*" not in listed(["a", "b", "c"])


def test_tokens_that_occur_again_carry_their_position():
    told = listed(["Ġthe", "Ġcat", "Ġthe", "mat"], outweighed=[2])
    assert "Strongest sources of each token; @ gives the position of a token that occurs more than once:" in told
    assert rows(told) == ["the@0", "cat", "the@2 *", "mat"]
    assert [line.split()[1] for line in told.splitlines() if line.startswith(("the@0", "cat"))] == ["cat", "the@2"]


def test_what_is_said_of_repeated_tokens_and_of_one_token():
    """Where inputs hold no position, repeated tokens cannot be told apart, and the verdict says so."""
    model = tiny.loaded("llama")
    repeated = explain(model, [5, 6, 5, 5], maps=MAPS, probes="exact")
    assert repeated.identity.repeated == 3  # pyright: ignore[reportAttributeAccessIssue]
    told = " ".join(str(repeated).split())
    assert "3 tokens share their input with another, and any of these counts as right." in told
    assert "share their input" not in str(explain(model, [5, 6, 7], maps=MAPS, probes="exact"))
    single = " ".join(str(explain(model, [5], maps=MAPS, probes="exact")).split())
    assert "1 token: w5" in single and "1 token, values of" in single and "1 tokens" not in single
    assert "every token is still its own largest contributor" in single


def test_of_a_long_text_the_outweighed_are_listed():
    told = listed(long(30), outweighed=[3, 28])
    assert "each token that is no longer its own largest contributor (2 of 30; --json lists all):" in told
    assert rows(told) == ["t3 *", "t28 *"]


def test_where_none_is_outweighed_the_smallest_are_listed():
    told = listed(long(30))
    assert "the 24 tokens with the smallest own contribution after the last layer (all 30 are still their own" in told
    assert rows(told) == long(30)[-LONGEST_LISTED:]
    assert "*" not in told


def test_of_too_many_outweighed_the_smallest_are_listed():
    told = listed(long(40), outweighed=range(35))
    assert "the 24 tokens with the smallest own contribution after the last layer (of 35 that are no longer" in told
    assert rows(told) == [f"{token} *" for token in long(35)[-LONGEST_LISTED:]]


def test_a_token_that_looks_like_markup_is_printed_as_it_is():
    assert rows(listed(["[/b]", "[red]", ":cat:"])) == ["[/b]", "[red]", ":cat:"]


def test_what_is_missing_says_why(explanation: Explanation):
    told = str(replace(explanation, attribution=Unavailable("It needs [more] memory.")))
    assert told.endswith("Where did it come from?\nNot answered: It needs [more] memory.")


def test_it_counts_from_zero_and_says_so(explanation: Explanation):
    told = " ".join(str(explanation).split())
    assert "Layers and heads count from 0." in told and "After layers 0 to 2," in told
    assert "after layer 0 and" in told and "layer 3" not in told
    assert "comes from within 3 positions" in told


def test_a_pair_says_what_stands_between_its_halves_in_a_causal_model():
    pair = ("w5 w6", "w7")
    told = str(explain(tiny.loaded("llama"), pair, maps=MAPS, probes=4))
    assert "The tokenizer puts </s> between the two texts." in told
    assert "between the two texts" not in str(explain(tiny.loaded("bert"), pair, maps=MAPS, probes=4))
    assert "between the two texts" not in str(explain(tiny.loaded("llama"), "w5 w6 w7", maps=MAPS, probes=4))
