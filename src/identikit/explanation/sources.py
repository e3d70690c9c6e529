"""The strongest sources of every token's hidden vectors."""

from typing import Any, NamedTuple

from identikit.attribution.result import TokenAttribution
from identikit.maths.mixing import first_middle_last

SOURCES_NAMED = 3  # how many of a token's strongest sources are named


class TokenSource(NamedTuple):
    """An input token, its position in the text, and what it contributes."""

    token: str
    position: int
    contribution: float


class Sources(NamedTuple):
    """Where the hidden vectors of the token at a position come from.

    - `sources`: the strongest at the first, middle and last layer, the largest first
    - `own`: what it contributes itself in the last layer; `outweighed`: whether another contributes more there
    """

    token: str
    position: int
    sources: tuple[tuple[TokenSource, ...], ...]
    own: float
    outweighed: bool


def strongest_sources(found: TokenAttribution) -> list[Sources]:
    """Return the strongest sources of every token at the first, middle and last layer."""
    three = found.contribution[list(first_middle_last(len(found.layers)))]
    top = three.topk(min(SOURCES_NAMED, len(found.tokens)), dim=1)
    own, outdone = found.own[-1].tolist(), found.outweighed[-1].tolist()
    tokens = []
    for place, token in enumerate(found.tokens):
        layers = zip(top.indices[..., place].tolist(), top.values[..., place].tolist(), strict=True)
        strongest = tuple(
            tuple(TokenSource(found.tokens[i], i, weight) for i, weight in zip(*layer, strict=True) if weight)
            for layer in layers
        )
        tokens.append(Sources(token, place, strongest, own[place], outdone[place]))
    return tokens


def as_dict(one: Sources) -> dict[str, Any]:
    """Return sources as JSON holds them."""
    return one._asdict() | {"sources": [[source._asdict() for source in layer] for layer in one.sources]}
