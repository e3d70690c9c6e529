"""The answer to the first question in words. Every number in it is an interval's, or stands beside one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from identikit.attention.precision import careful_words, rounding_of
from identikit.attention.result import unsure_words
from identikit.explanation.result import Explanation
from identikit.models.reading import Change
from identikit.results.axis import Axis
from identikit.results.words import Block, Column, Heading, Paragraph, Table, counted, decimals, joined, percent

ROUNDING = 1e-6  # how far the programs' tolerance may put a share from 0 or 1
HEADS_NAMED = 5  # how many heads with a rank-deficient projection are named
QUESTION = "Which attention is real?"
SINKS = "Sinks"
LEAST_CERTAIN = "The least certain edges"
OUTSIDE = "Where effective attention is outside the interval"
CERTIFICATE = "Certificate"

_LEGEND = (
    "Means over a layer's rows. certain mass: how much of a row's weight stays on the same tokens in every attention "
    "with the same output; strongest certain: rows whose strongest edge is the strongest in every such attention; "
    "{group}: a row's weight on {them}, the least and the greatest that such attention can give, and what effective "
    "attention gives; null dim: in how many independent ways a row's weights can change with the same output, if they "
    "may be negative; reachable: in how many the head's own query could change them, its keys being what they are; "
    "correlation: of raw and effective attention."
)
_WIDE_BY_SELECTION = (
    "These are the widest of {count:,} intervals, so they are wide by selection: the table says what is usual."
)
_NOT_AN_ATTENTION = (
    "Effective attention is the least-norm set of weights with this output. It can be negative and need not sum to 1, "
    "so it is not what the attention could have been: that is the interval."
)

_two = decimals(2)
_three = decimals(3)


def attention_blocks(explanation: Explanation) -> Iterator[Block]:
    """Yield how much of the attention is certain, why the rest is not, and on which edges that shows."""
    about = explanation.about
    yield Heading(QUESTION)
    yield _headline(explanation)
    dtype = explanation.provenance.dtype
    residual = about["largest_row_residual"]
    for words in careful_words(residual, dtype):
        yield Paragraph(words, {"row_residual": residual, "rounding": rounding_of(getattr(torch, dtype))}, "warning")
    if about["certain"]["free_rows"]:
        yield joined(_causes(explanation))
    reservations = [*_learned_sink(about["learned_sink"]), *_unsure(explanation)]
    if reservations:
        yield joined(reservations)
    yield _table(explanation)
    if about["sinks"]:
        yield Heading(SINKS, 2)
        for sink in about["sinks"]:
            yield _sink(sink, explanation.axes[0])
    if about["least_certain"]:
        yield Heading(LEAST_CERTAIN, 2)
        count = about["certain"]["bounded_edges"]
        note = Paragraph(_WIDE_BY_SELECTION.format(count=count), {"bounded_edges": count}, "note")
        yield _edges(explanation, about["least_certain"], note, effective=False)
    if about["outside"]:
        yield Heading(OUTSIDE, 2)
        note = Paragraph(_NOT_AN_ATTENTION, tone="note")
        yield _edges(explanation, about["outside"], note, effective=True)
    yield Heading(CERTIFICATE, 2)
    yield _certificate(explanation)


def _headline(explanation: Explanation) -> Paragraph:
    certain = explanation.about["certain"]
    rows = certain["rows"]
    free = certain["free_rows"]
    bounded = certain["bounded_rows"]
    if not free:
        tokens = len(explanation.tokens)
        width = explanation.about["d_value"]
        return Paragraph(
            "All of it. In every row, the values of the visible keys are linearly independent, so the head's output "
            f"determines each weight: {counted(tokens, 'token')}, values of {width} dimensions.",
            {"free_rows": free, "tokens": tokens, "d_value": width},
        )
    facts = {"free_rows": free, "rows": rows, "bounded_rows": bounded}
    if not bounded:
        return Paragraph(
            f"Perhaps not all of it: {free:,} of {rows:,} rows (one token's attention in one head) have a null space, "
            f"and none of them was bounded within {certain['seconds']:g} s.",
            {**facts, "seconds": certain["seconds"]},
        )
    facts |= {"certain_mass": certain["mass"], "strongest_certain": certain["strongest"], "fixed_rows": rows - free}
    words = (
        f"{_share(certain['mass']).capitalize()} of it is certain: on average, this share of a row (one token's "
        "attention in one head) stays on the same tokens in every attention with the same output. In "
        f"{_share(certain['strongest'])} of the rows, the strongest edge is the strongest in every such attention."
    )
    others = f"; in the other {rows - free:,}, the output determines each weight" if free < rows else ""
    if bounded == free:
        return Paragraph(f"{words} All {free:,} rows with a null space were bounded{others}.", facts)
    errors = [certain["mass_stderr"], certain["strongest_stderr"]]
    known = "too few for an error"
    if None not in errors:
        known = f"standard errors {errors[0]:.1%} and {errors[1]:.1%}"
        facts |= {"certain_mass_stderr": errors[0], "strongest_certain_stderr": errors[1]}
    drawn = f"{counted(bounded, 'was', 'were')} bounded, drawn at random ({known})"
    return Paragraph(f"{words} Of the {free:,} rows with a null space, {drawn}{others}.", facts)


def _share(share: float) -> str:
    """Return a percentage that is 0 or 100 only where the share is, but for rounding."""
    if ROUNDING < share < 0.005:
        return "less than 1%"
    return "more than 99%" if 0.995 <= share < 1 - ROUNDING else f"{share:.0%}"


def _causes(explanation: Explanation) -> Iterator[Paragraph]:
    """Yield why rows can change: a sentence for each cause that holds, and where."""
    causes = explanation.about["causes"]
    layers, tokens = explanation.axes
    width = explanation.about["d_value"]
    if causes["keys"]:
        yield Paragraph(
            f"Rows have a null space because a query sees up to {causes['most_keys']} keys, and a head's values have "
            f"only {width} dimensions ({_layers(causes['keys'], layers)}).",
            {"most_keys": causes["most_keys"], "d_value": width, "keys_in_layers": causes["keys"]},
        )
    if causes["repeated"]:
        first = causes["repeated"][0]
        earlier, later = map(tokens.name_of, first["example"])
        where = [layer["layer"] for layer in causes["repeated"]]
        yield Paragraph(
            f"In {_layers(where, layers)}, repeated tokens have equal values and can exchange their weight "
            f"({counted(first['tokens'], 'repetition')} in layer {first['layer']}, such as {later} of {earlier}).",
            {"repeated_in_layers": where, "repetitions": first["tokens"], "repetition": (later, earlier)},
        )
    if causes["projections"]:
        heads = causes["projections"]
        named = [f"L{head['layer']}H{head['head']} ({head['rank']})" for head in heads[:HEADS_NAMED]]
        more = f" and {len(heads) - HEADS_NAMED} more" if len(heads) > HEADS_NAMED else ""
        yield Paragraph(
            f"The output projection passes on fewer than {width} dimensions of {', '.join(named)}{more}, so values "
            "that differ can give the same output.",
            {
                "full_projection": width,
                "deficient_heads": [(head["layer"], head["head"], head["rank"]) for head in heads],
                "heads_not_named": max(0, len(heads) - HEADS_NAMED),
            },
        )
    if causes["dependent"]:
        others = causes["keys"] or causes["repeated"] or causes["projections"]
        also = " for other reasons" if others else ""
        where = _layers(causes["dependent"], layers)
        yield Paragraph(
            f"Some values depend linearly on others{also} in {where}.", {"dependent_in_layers": causes["dependent"]}
        )
    if shared := explanation.about["shared_outputs"]:
        yield Paragraph(
            f"Intervals take each head's own output as given; in {_layers(shared, layers)}, heads could also trade "
            "outputs with each other.",
            {"shared_in_layers": shared},
        )


def _learned_sink(by_layer: Sequence[float]) -> Iterator[Paragraph]:
    """Yield what a learned sink takes, if there is one."""
    if any(by_layer):
        mean = sum(by_layer) / len(by_layer)
        yield Paragraph(
            f"A learned sink takes {mean:.2f} of a row's weight on average ({min(by_layer):.2f} to "
            f"{max(by_layer):.2f} by layer). It is not a token: the tokens' weights sum to the rest, and certain mass "
            "cannot be more. Other attention with the same output may give it more or less.",
            {"learned_sink": mean, "learned_sink_by_layer": by_layer},
        )


def _unsure(explanation: Explanation) -> Iterator[Paragraph]:
    """Yield where ranks are not sure."""
    unsure = explanation.about["unsure"]
    share = sum(unsure) / len(unsure)
    duplicates = sum(explanation.about["rounded_duplicates"])
    if sentences := unsure_words(share, duplicates, explanation.provenance.dtype):
        yield Paragraph(" ".join(sentences), {"unsure": share, "rounded_duplicates": duplicates})


def _layers(which: Sequence[int], layers: Axis) -> str:
    """Return layers in words: `every layer`, `layer 3`, `layers 0 to 4`, `layers 0, 2 and 5`."""
    if len(which) == len(layers):
        return "every layer"
    if len(which) == 1:
        return f"layer {which[0]}"
    if len(which) > 2 and list(which) == list(range(which[0], which[-1] + 1)):
        return f"layers {which[0]} to {which[-1]}"
    return f"layers {', '.join(map(str, which[:-1]))} and {which[-1]}"


def _table(explanation: Explanation) -> Table:
    """Return means over the rows of each layer."""
    group = explanation.about["group"]
    columns = (
        Column("layer", align="right"),
        Column("certain mass", _two, "right", "certain\nmass"),
        Column("strongest certain", percent, "right", "strongest\ncertain"),
        Column(f"{group} raw [min, max]", _weight_in_interval, "right", f"{group}\nraw [min, max]"),
        Column("effective", _two, "right"),
        Column("null dim", _range, "right", "null\ndim"),
        Column("reachable", decimals(1), "right", "reach-\nable"),
        Column("correlation", _two, "right", "corre-\nlation"),
    )
    rows = tuple(
        (
            row["layer"],
            row["certain_mass"],
            row["strongest_certain"],
            (row["special_raw"], row["special_lower"], row["special_upper"]),
            row["special_effective"],
            (row["least_null_dim"], row["greatest_null_dim"]),
            row["reachable_dim"],
            row["pearson"],
        )
        for row in explanation.to_frame().to_dict("records")
    )
    return Table(columns, rows, notes=(joined(_legend(explanation), "note"),))


def _legend(explanation: Explanation) -> Iterator[Paragraph]:
    group = explanation.about["group"]
    yield Paragraph(_LEGEND.format(group=group, them="them" if group == "special tokens" else "it"))
    if bool(explanation.array("certain_mass").isnan().any()):
        yield Paragraph("–: no row of the layer was bounded in time.", {"layers_not_bounded": "some"})
    if bool(explanation.array("pearson").isnan().any()):
        words = "A correlation of – is not defined: raw or effective attention is constant."
        yield Paragraph(words, {"constant_attention": "some"})
    certain = explanation.about["certain"]
    names = ("certain_mass", "strongest_certain", "special_lower", "special_upper")
    errors = torch.stack([explanation.array(f"{name}_stderr") for name in names])
    if certain["bounded_rows"] in (0, certain["free_rows"]) or bool(errors.isnan().any()):
        return
    mass, strongest, lower, upper = errors.amax(1).tolist()
    ends = max(lower, upper)
    yield Paragraph(
        f"Standard errors: {_at_most(mass, '.2f')}, {_at_most(strongest, '.0%')} and, for min and max, "
        f"{_at_most(ends, '.2f')}.",
        {"largest_mass_stderr": mass, "largest_strongest_stderr": strongest, "largest_ends_stderr": ends},
    )


def _at_most(error: float, form: str) -> str:
    """Say a standard error with few digits, and not that it is 0."""
    smallest = 0.01
    return f"below {smallest:{form}}" if error < smallest / 2 else f"up to {error:{form}}"


def _sink(sink: Mapping[str, Any], layers: Axis) -> Paragraph:
    """Say what a sink gets in the layers where it is one: means over these layers."""
    places = [layers.values.index(layer) for layer in sink["layers"]]
    facts = {"sink": sink["token"], "keys": len(sink["keys"]), "layers": sink["layers"]}
    for name in ("raw", "lower", "upper", "effective", "value_size"):
        values = [sink[name][place] for place in places]
        if None not in values:
            facts[name] = sum(values) / len(values)
    several = f" ({len(sink['keys'])} of them)" if len(sink["keys"]) > 1 else ""
    ends = ""
    if "lower" in facts and "upper" in facts:
        ends = f", and between {facts['lower']:.2f} and {facts['upper']:.2f} in any attention with the same output"
    return Paragraph(
        f"{sink['token']}{several} is a sink in {_layers(sink['layers'], layers)}: on average it gets "
        f"{facts['raw']:.2f} of a row's weight there{ends} (effective: {facts['effective']:.2f}). Its value is "
        f"{facts['value_size']:.2f} times as long as the median of the others.",
        facts,
    )


def _edges(explanation: Explanation, edges: Sequence[Mapping[str, Any]], note: Paragraph, *, effective: bool) -> Table:
    tokens = explanation.axes[1]
    columns = [Column("head", _head), Column("query"), Column("key"), Column("raw", _three, "right")]
    if effective:
        columns.append(Column("effective", _three, "right"))
    columns.append(Column("interval", _interval))
    rows = []
    for edge in edges:
        weights = [edge["raw"], edge["effective"]] if effective else [edge["raw"]]
        names = [tokens.name_of(edge["query"]), tokens.name_of(edge["key"])]
        rows.append(((edge["layer"], edge["head"]), *names, *weights, (edge["lower"], edge["upper"])))
    return Table(tuple(columns), tuple(rows), notes=(note,))


def _certificate(explanation: Explanation) -> Paragraph:
    change = Change(**explanation.about["output_change"])
    residual = explanation.about["largest_residual"]
    dtype = explanation.provenance.dtype
    beyond = change.beyond(dtype)
    facts = {"residual": residual, "hidden_change": change.hidden, "logits_change": change.logits}
    if beyond:
        facts["beyond_rounding_of"] = dtype
    outputs = "every head's output"
    rounds = ""
    if dtype in ("bfloat16", "float16"):
        wider = explanation.provenance.settings["outputs_computed_in"]
        unit = torch.finfo(getattr(torch, dtype)).eps / 2
        outputs += f", computed anew in {wider} from the model's queries, keys and values,"
        rounds = f"; {dtype} rounds each number by up to {unit:.1g}"
        facts |= {"outputs_computed_in": wider, "rounding": unit}
    return Paragraph(
        f"Effective attention reproduces {outputs} to within {residual:.1g} (relative). In {dtype}, putting it in "
        f"place of raw attention {change.words()}{beyond}{rounds}.",
        facts,
        "note",
    )


def _weight_in_interval(weights: tuple[float, float, float]) -> str:
    raw, lower, upper = map(_two, weights)
    return f"{raw} [{lower}, {upper}]"


def _interval(ends: tuple[float, float]) -> str:
    return f"[{ends[0]:.3f}, {ends[1]:.3f}]"


def _head(place: tuple[int, int]) -> str:
    return f"L{place[0]}H{place[1]}"


def _range(ends: tuple[float, float]) -> str:
    least, greatest = ends
    return f"{least:.0f}" if least == greatest else f"{least:.0f}–{greatest:.0f}"
