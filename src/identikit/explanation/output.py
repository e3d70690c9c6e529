"""Which tokens an output comes from, as `explain(target=…)` says it."""

from collections.abc import Iterator

from identikit.attribution.result import OutputAttribution
from identikit.checks import as_whole
from identikit.explanation.result import Explanation
from identikit.results.words import Block, Column, Heading, Paragraph, Table, percent

_NAMED = 8  # of the tokens that an output comes from


def output_facts(outputs: OutputAttribution, target: object) -> dict[str, object]:
    """Return the facts about each output: its value, and the tokens that contribute most, with their signs.

    `target` is the one that was asked for, or None if that is not a word or a number.
    """
    axis = outputs.axis("input")
    rows = zip(outputs.read("contribution"), outputs.read("gradient_x_input"), strict=True)
    facts = []
    for place, (shares, signed) in enumerate(rows):
        strongest = shares.topk(min(_NAMED, len(shares))).indices.tolist()
        facts.append(
            {
                "target": outputs.target[place],
                "value": outputs.value[place],
                "probability": outputs.probability[place],
                "sources": [[axis.name_of(token), float(shares[token]), float(signed[token])] for token in strongest],
            }
        )
    return {"output": facts, "target": target if isinstance(target, str) else as_whole(target)}


def output_blocks(explanation: Explanation) -> Iterator[Block]:
    """Yield where each output comes from; nothing where none was asked for."""
    outputs = explanation.about.get("output", ())
    if outputs:
        yield Heading("Where does the output come from?")
    for facts in outputs:
        chance = "" if facts["probability"] is None else f", probability {percent(facts['probability'])}"
        said = f"The {facts['target']}: {facts['value']:.4g}{chance}. Its derivative is exact."
        yield Paragraph(said, {"target": facts["target"], "value": facts["value"]})
        columns = (
            Column("token"),
            Column("contribution", percent, "right"),
            Column("gradient × input", "{:+.3g}".format, "right"),
        )
        caption = "The tokens that move it most: shares of the derivative, and its value along the token with its sign:"
        yield Table(columns, tuple(tuple(row) for row in facts["sources"]), caption)
