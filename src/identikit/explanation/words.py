"""An explanation in words, for a terminal and for `print`."""

from io import StringIO
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from identikit.attribution.result import TokenAttribution
from identikit.errors import Unavailable
from identikit.explanation.attention_words import attention_words, counted, plain_table
from identikit.explanation.result import NEAR, UNKNOWN, Explanation
from identikit.explanation.sources import Source, Sources, strongest_sources
from identikit.results.axis import Axis
from identikit.texts.text import shown
from identikit.tokens.result import IdentityMap

NAMED = 6  # how many lost tokens are named
LONGEST_LISTED = 24  # at most how many tokens' sources are listed
WIDTH = 100


def verdict(explanation: Explanation) -> str:
    """Return an explanation as plain text."""
    page = Console(file=StringIO(), width=WIDTH, color_system=None, legacy_windows=False)
    print_verdict(explanation, page)
    return page.file.getvalue().rstrip("\n")  # pyright: ignore[reportAttributeAccessIssue]


def sections(explanation: Explanation) -> list[dict[str, Any]]:
    """Return the verdict for a page: one section per question, with its paragraphs in order.

    A paragraph is a string, or a table as its columns and rows. What stands before the first question is left out.
    """
    parts = (attention_words(explanation), _identity(explanation), _origin(explanation))
    found = []
    for heading, *others in parts:
        question = heading.plain.strip()  # pyright: ignore[reportAttributeAccessIssue]
        found.append({"question": question, "paragraphs": [_paragraph(one) for one in others]})
    return found


def _paragraph(part: RenderableType) -> str | dict[str, Any]:
    if isinstance(part, Text):
        return part.plain.strip()
    assert isinstance(part, Table)
    columns = [" ".join(_cell(column.header).split()) for column in part.columns]
    rows = zip(*([_cell(cell) for cell in column.cells] for column in part.columns), strict=True)
    return {"columns": columns, "rows": [list(row) for row in rows]}


def _cell(cell: RenderableType) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


def print_verdict(explanation: Explanation, console: Console) -> None:
    """Print an explanation as a verdict that can be read."""
    console.print(
        Group(*_header(explanation), *attention_words(explanation), *_identity(explanation), *_origin(explanation))
    )


def _attending(explanation: Explanation) -> str:
    """Say which layers have softmax attention, where not all have."""
    layers = explanation.axis("layer").values
    if len(layers) == explanation.about["n_layers"]:
        return ""
    return f" (softmax attention in {', '.join(map(str, layers))}, and only these are read below)"


def _header(explanation: Explanation) -> list[RenderableType]:
    about = explanation.about
    tokens = "".join(_spaced(token) for token in explanation.tokens).strip()
    parts: list[RenderableType] = [
        Text(f"\n{explanation.model_name}", style="bold"),
        Text(
            f"{counted(about['n_layers'], 'layer')}{_attending(explanation)}, {counted(about['n_heads'], 'head')} per "
            f"layer, values of {about['d_value']} dimensions per head, "
            f"{'causal' if about['causal'] else 'bidirectional'}. Layers and "
            "heads count from 0."
        ),
        Text(f"\n{counted(len(explanation.tokens), 'token')}: {tokens}", style="dim"),
    ]
    if about["joined_by"] is not None and about["causal"]:
        added = " ".join(shown(token) for token in about["joined_by"])
        told = (
            f"The tokenizer puts {added} between the two texts." if added else "The two texts are joined as they are."
        )
        parts.append(Text(told, style="dim"))
    return parts


def _spaced(token: str) -> str:
    """Return a token as it is read in a row of tokens: with a space before it, except within a word."""
    read = shown(token)
    return read if read.startswith(" ") or not read.strip() else f" {read}"


def _identity(explanation: Explanation) -> list[RenderableType]:
    heading = Text("\nWhich token is this?", style="bold")
    identity = explanation.identity
    if isinstance(identity, Unavailable):
        return [heading, Text(f"Not answered: {identity.reason}")]
    parts: list[RenderableType] = [heading, Text(_recovered(identity))]
    unknown = identity.about.get("unknown", 0.0)
    if unknown > UNKNOWN:
        parts.append(
            Text(
                f"Careful: the tokenizer does not know {unknown:.0%} of the tokens in the sample texts that the maps "
                "were fitted to. Fit maps to texts of your own: explain(model, text, "
                "maps=token_identifiability(model, texts)).",
                style="bold",
            )
        )
    return parts


def _recovered(identity: IdentityMap) -> str:
    shares = identity.recovered.double().mean(-1).tolist()
    layers = identity.axis("layer").values
    after = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
    told = (
        f"After {after}, {', '.join(f'{share:.0%}' for share in shares)} of the hidden vectors still point to their "
        f"own token ({identity.map} maps fitted to {identity.about.get('fitted_to', 'texts')}, {identity.distance} "
        "distance)."
    )
    if identity.repeated:
        told += f" {identity.repeated} tokens share their input with another, and any of these counts as right."
    positions = identity.axis("token")
    last = zip(identity.recovered[-1].tolist(), identity.winner[-1].tolist(), strict=True)
    lost = [(place, winner) for place, (found, winner) in enumerate(last) if not found]
    if not lost:
        return f"{told} After the last layer, no token is lost."
    named = ", ".join(f"{positions.name_of(place)} (nearer to {positions.name_of(at)})" for place, at in lost[:NAMED])
    more = f" and {len(lost) - NAMED} more" if len(lost) > NAMED else ""
    return f"{told} Lost after the last layer: {named}{more}."


def _origin(explanation: Explanation) -> list[RenderableType]:
    heading = Text("\nWhere did it come from?", style="bold")
    found = explanation.attribution
    if isinstance(found, Unavailable):
        return [heading, Text(f"Not answered: {found.reason}")]
    return [heading, Text(_mixing(explanation, found)), *_sources(strongest_sources(found))]


def _mixing(explanation: Explanation, found: TokenAttribution) -> str:
    about, own = explanation.about, found.own.median(1).values
    exact = (
        "exact"
        if found.probes is None
        else f"estimated from {found.probes} random directions, standard error up to {about['largest_stderr']:.1g}"
    )
    last = found.layers[-1]
    told = (
        f"A token contributes {float(own[0]):.0%} to its own hidden vector after layer {found.layers[0]} and "
        f"{float(own[-1]):.0%} after layer {last} (medians of Hidden Token Attribution, {exact}). "
        f"{found.largest_words()}"
    )
    if about["near"] is None:
        return told
    return (
        f"{told} Of what the other tokens contribute, {about['near'][0]:.0%} comes from within {NEAR} positions after "
        f"layer {found.layers[0]}, and {about['near'][-1]:.0%} after layer {last}."
    )


def _sources(tokens: list[Sources]) -> list[RenderableType]:
    """The strongest sources of the listed tokens, under words that say which tokens these are."""
    which, listed = _listed(tokens)
    positions = Axis("token", tuple(range(len(tokens))), tuple(one.token for one in tokens))

    def name(one: Source | Sources) -> str:
        return positions.name_of(one.position)

    repeats = any("@" in name(one) and name(one) != one.token for one in listed)
    marks = "; @ gives the position of a token that occurs more than once" if repeats else ""
    table = plain_table()
    for column in ("token", "first layer", "middle layer", "last layer"):
        table.add_column(column)
    for one in listed:
        cells = [", ".join(f"{name(source)} {source.contribution:.2f}" for source in layer) for layer in one.sources]
        first = f"{name(one)}{' *' if one.outweighed else ''}"
        table.add_row(*map(Text, (first, *cells)))  # plain: a token may look like markup
    heading = Text(f"\nStrongest sources of {which}{marks}:")
    if not any(one.outweighed for one in listed):
        return [heading, table]
    return [heading, table, Text("* Another token is its largest source after the last layer.", style="dim")]


def _listed(tokens: list[Sources]) -> tuple[str, list[Sources]]:
    """Which tokens' sources are listed, in words and in the order of the text: of a long text, the most mixed ones."""
    if len(tokens) <= LONGEST_LISTED:
        return "each token", tokens
    lost = [one for one in tokens if one.outweighed]
    if 0 < len(lost) <= LONGEST_LISTED:
        share = f"{len(lost)} of {len(tokens)}; --json lists all"
        return f"each token that is no longer its own largest contributor ({share})", lost
    least = sorted(lost or tokens, key=lambda one: one.own)[:LONGEST_LISTED]
    those = f"of {len(lost)} that are no longer" if lost else f"all {len(tokens)} are still"
    words = f"own contribution after the last layer ({those} their own largest contributor; --json lists all)"
    return f"the {LONGEST_LISTED} tokens with the smallest {words}", sorted(least, key=lambda one: one.position)
