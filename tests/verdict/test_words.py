"""The verdict in words: which tokens' sources are listed and why, and what is said where there is nothing to list."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from identikit.verdict.numbers import Explanation, MixingVerdict, Source, Sources, explain
from identikit.verdict.words import LONGEST_LISTED, print_verdict
from tests.models import tiny


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    with pytest.MonkeyPatch.context() as patched:  # maps are not fitted here
        patched.setattr(sys.modules["identikit.verdict.numbers"], "_identity", lambda *asked: None)
        return explain(tiny.loaded("bert"), "w5 w6 w5 w7")


def mixing(tokens: Sequence[str], outweighed: Sequence[int] = ()) -> MixingVerdict:
    """Each token's own contribution is smaller the later it stands; its one source is the token behind it."""
    last = len(tokens) - 1
    rows = [
        Sources(
            token=token,
            position=place,
            sources=((Source(tokens[min(place + 1, last)], min(place + 1, last), 0.25),),) * 3,
            own=(len(tokens) - place) / (2 * len(tokens)),
            outweighed=place in outweighed,
        )
        for place, token in enumerate(tokens)
    ]
    return MixingVerdict(
        layers=(1, 2, 3),
        own=(0.5, 0.4, 0.3),
        outweighed=(0.0, 0.0, len(outweighed) / len(tokens)),
        near=(0.75, 0.5, 0.25),
        tokens=tuple(rows),
        probes=None,
        error=None,
    )


def printed(explanation: Explanation, **others) -> str:
    """Return what is printed below the last question."""
    console = Console(file=StringIO(), width=160)
    print_verdict(replace(explanation, **others), console)
    return console.file.getvalue().split("Where did it come from?\n")[1]  # pyright: ignore[reportAttributeAccessIssue]


def rows(told: str) -> list[str]:
    """Return the first cell of every row of the table of sources."""
    return [line.split("  ")[0] for line in told.splitlines() if "0.25" in line]


def long(count: int) -> list[str]:
    return [f"t{place}" for place in range(count)]


def test_a_short_text_is_listed_in_full(explanation: Explanation):
    told = printed(explanation, mixing=mixing(["a", "b", "c"], outweighed=[1]))
    assert "\nStrongest sources of each token:\n" in told and "--json" not in told and "@" not in told
    assert rows(told) == ["a", "b *", "c"]
    assert "* another token is its largest source in the last layer" in told
    assert "*" not in printed(explanation, mixing=mixing(["a", "b", "c"]))


def test_tokens_that_occur_again_carry_their_position(explanation: Explanation):
    told = printed(explanation, mixing=mixing(["the", "cat", "the", "mat"], outweighed=[2]))
    heading = (
        "Strongest sources of each token; @ gives the position, counted from 0, of a token that occurs more than once:"
    )
    assert heading in told
    assert rows(told) == ["the@0", "cat", "the@2 *", "mat"]
    assert [line.split()[1] for line in told.splitlines() if line.startswith(("the@0", "cat"))] == ["cat", "the@2"]


def test_of_a_long_text_the_outweighed_are_listed(explanation: Explanation):
    told = printed(explanation, mixing=mixing(long(30), outweighed=[3, 28]))
    assert "each token that is no longer its own largest contributor (2 of 30; --json lists all):" in told
    assert rows(told) == ["t3 *", "t28 *"]


def test_where_none_is_outweighed_the_smallest_are_listed(explanation: Explanation):
    told = printed(explanation, mixing=mixing(long(30)))
    assert (
        "of the 24 tokens with the smallest own contribution in the last layer (all 30 are still their own largest"
        in told
    )
    assert rows(told) == long(30)[-LONGEST_LISTED:]
    assert "*" not in told


def test_of_too_many_outweighed_the_smallest_are_listed(explanation: Explanation):
    told = printed(explanation, mixing=mixing(long(40), outweighed=range(35)))
    assert "of the 24 tokens with the smallest own contribution in the last layer (of 35 that are no longer" in told
    assert rows(told) == [f"{token} *" for token in long(35)[-LONGEST_LISTED:]]


def test_a_token_that_looks_like_markup_is_printed_as_it_is(explanation: Explanation):
    assert rows(printed(explanation, mixing=mixing(["[/b]", "[red]", ":cat:"]))) == ["[/b]", "[red]", ":cat:"]


def test_nearness_is_told_where_other_tokens_give_something(explanation: Explanation):
    one = mixing(["a"])
    assert "Of what other tokens give, 75% comes from within 3 places in layer 1 and 25% in" in printed(
        explanation, mixing=one
    )
    assert "Of what other tokens give" not in printed(explanation, mixing=replace(one, near=None))


def test_what_is_left_out_says_why(explanation: Explanation):
    assert printed(explanation, mixing=None, mixing_omitted="it needs [more] memory.") == (
        "Left out: it needs [more] memory.\n"
    )
