"""The answer to the first question in words. Every number in it is an interval's, or stands beside one."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from identikit.attention.precision import careful_words, rounding_of, unsure_words
from identikit.explanation.result import Explanation
from identikit.models.reading import Change
from identikit.results.axis import Axis
from identikit.results.words import (
    UNKNOWN_SHARE,
    Block,
    Column,
    Heading,
    Paragraph,
    ShareEstimate,
    Table,
    counted,
    decimals,
    estimate,
    joined,
    percent,
    weight,
)

HEADS_NAMED = 5  # how many heads with a rank-deficient projection are named
QUESTION = "Which attention is determined?"
FREEST = "The edges that are most free"
OUTSIDE = "Where effective attention is outside the interval"

_LEGEND = (
    "Means over a layer's rows. [min, max]: over all alternatives. Null dim{reachable}: in how many independent ways a "
    "row can change with the same output, if weights may be negative{query}. Correlation: of raw and effective "
    "attention."
)
_REACHED = {"reachable": ", reachable", "query": ", and by a change of its query"}
_WIDE_BY_SELECTION = (
    "An interval is the range of a weight over all alternatives. These are the widest of {count:,}: the table above "
    "says what is usual."
)
_NOT_AN_ATTENTION = (
    "Effective attention is the least-norm set of weights with this output. It can be negative and need not sum to 1, "
    "so it is not an alternative."
)

_BOUNDED = "the intervals of their weights are known"
_ENDS = ("", "_stderr", "_least", "_most")
_two = decimals(2)
_three = decimals(3)


def attention_blocks(explanation: Explanation) -> Iterator[Block]:
    """Yield how much of the attention is determined by the output, why the rest is free, and on which edges."""
    about = explanation.about
    yield Heading(QUESTION)
    yield _headline(explanation)
    dtype = explanation.provenance.dtype
    residual = about["largest_row_residual"]
    for words in careful_words(residual, dtype):
        yield Paragraph(words, {"row_residual": residual, "rounding": rounding_of(getattr(torch, dtype))}, "warning")
    if about["certain"]["free_rows"]:
        yield joined((*_causes(explanation), *_yardstick(explanation)))
    if reservations := [*_reservations(explanation)]:
        yield joined(reservations)
    if about["certain"]["free_rows"]:  # otherwise it says of every layer that all is determined
        yield _table(explanation)
    if about["sinks"]:
        yield Heading("Sinks", 2)
        for sink in about["sinks"]:
            yield _sink(sink, explanation)
    if about["least_certain"]:
        yield Heading(FREEST, 2)
        count = about["certain"]["bounded_edges"]
        note = Paragraph(_WIDE_BY_SELECTION.format(count=count), {"bounded_edges": count}, "note")
        yield _edges(explanation, about["least_certain"], note, effective=False)
    if about["outside"]:
        yield Heading(OUTSIDE, 2)
        note = Paragraph(_NOT_AN_ATTENTION, tone="note")
        yield _edges(explanation, about["outside"], note, effective=True)
    yield Heading("Certificate", 2)
    yield _certificate(explanation)


def _headline(explanation: Explanation) -> Paragraph:
    certain = explanation.about["certain"]
    facts = {name: certain[name] for name in ("free_rows", "rows", "bounded_rows")}
    free, rows, bounded = facts.values()
    if not free:
        tokens = len(explanation.tokens)
        width = explanation.about["d_value"]
        return Paragraph(
            "All of it is determined by the output: no row has an alternative, which is other attention with the same "
            f"head output. With {counted(tokens, 'token')} and values of {width} dimensions, the values that a query "
            "sees are linearly independent.",
            {"free_rows": free, "tokens": tokens, "d_value": width},
        )
    facts |= {"fixed_rows": rows - free}
    shares = []
    for name in ("mass", "strongest"):
        found = ShareEstimate(_known(certain[name]), _known(certain[f"{name}_stderr"]), *certain[f"{name}_range"])
        shares.append(estimate(percent)(found))
        long = {"mass": "certain_mass", "strongest": "strongest_certain"}[name]
        facts |= {long: found.share, f"{long}_stderr": found.stderr, f"{long}_range": certain[f"{name}_range"]}
    words = f"{_determined(shares[0])} The rest is free. {_strongest(shares[1])}"
    others = f"; the other {rows - free:,} are determined" if free < rows else ""
    if bounded == free:
        return Paragraph(f"{words} All {free:,} free rows were bounded ({_BOUNDED}){others}.", facts)
    facts["seconds"] = certain["seconds"]
    drawn = f"{counted(bounded, 'was', 'were')} bounded ({_BOUNDED}), drawn at random, in {certain['seconds']:g} s"
    how = "± is the standard error, and a range holds two of them, or all that is possible"
    return Paragraph(f"{words} Of the {free:,} free rows, {drawn}{others}; {how}.", facts)


def _determined(share: str) -> str:
    """Say how much of a row is determined by the output, and what that means."""
    row = "a row (one token's attention in one head) is determined by the output"
    means = "the same in every alternative, which is other attention with the same head output"
    if share == UNKNOWN_SHARE:
        return f"Too few rows were bounded to say how much of {row}, that is, {means}."
    return f"On average, {share} of {row}: it is {means}."


def _strongest(share: str) -> str:
    """Say in how many rows it is determined which edge is the strongest."""
    if share == UNKNOWN_SHARE:
        return "In how many rows the strongest edge is determined is not known either."
    return f"In {share} of the rows the strongest edge is determined: it is the strongest in every alternative."


def _yardstick(explanation: Explanation) -> Iterator[Paragraph]:
    """Yield how much would be determined if weights met values at random."""
    found = explanation.about.get("shuffled")
    if found is not None:
        error = percent(found["shuffled_stderr"])
        yield Paragraph(
            f"As a yardstick: with each row's values shuffled over its keys, {percent(found['shuffled'])}±{error} of a "
            f"free row would be determined ({found['rows']} rows at random; as they are, {percent(found['mass'])}).",
            {f"yardstick_{name}": value for name, value in found.items()},
        )


def _known(number: float | None) -> float:
    return math.nan if number is None else number


def _causes(explanation: Explanation) -> Iterator[Paragraph]:
    """Yield why rows can change: a sentence for each cause that holds, and where."""
    causes = explanation.about["causes"]
    layers, tokens = explanation.axes
    width = explanation.about["d_value"]
    if causes["keys"]:
        yield Paragraph(
            f"Rows are free because a query sees up to {causes['most_keys']} keys, and a head's values have "
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


def _reservations(explanation: Explanation) -> Iterator[Paragraph]:
    """Yield what a learned sink takes, if there is one, and where ranks are not sure."""
    by_layer = explanation.about["learned_sink"]
    if any(by_layer):
        mean = sum(by_layer) / len(by_layer)
        yield Paragraph(
            f"A learned sink takes {mean:.2f} of a row's weight on average ({min(by_layer):.2f} to "
            f"{max(by_layer):.2f} by layer). It is not a token: the tokens' weights sum to the rest, and no more can "
            "be determined. Alternatives may give it more or less.",
            {"learned_sink": mean, "learned_sink_by_layer": by_layer},
        )
    unsure = explanation.about["unsure"]
    share = sum(unsure) / len(unsure)
    duplicates = sum(explanation.about["rounded_duplicates"])
    if sentences := unsure_words(share, duplicates, explanation.provenance.dtype):
        yield Paragraph(" ".join(sentences), {"unsure": share, "rounded_duplicates": duplicates})


def _layers(which: Sequence[int], layers: Axis) -> str:
    """Return layers in words: `every layer`, `layer 3`, `layers 0 to 4`, `layers 0, 2 and 5`."""
    if len(which) == len(layers):
        return "every layer" if layers.values == tuple(range(len(layers))) else "every layer that was read"
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
        Column("determined", estimate(weight), "right", "deter-\nmined"),
        Column("strongest determined", estimate(percent), "right", "strongest\ndetermined"),
        Column(f"{group} raw [min, max]", _weight_in_interval, "right", f"{group}\nraw [min, max]"),
        Column("effective", _two, "right", "effec-\ntive"),
        Column("null dim", _range, "right", "null\ndim"),
        Column("reachable", decimals(1), "right", "reach-\nable"),
        Column("correlation", _two, "right", "corre-\nlation"),
    )
    frame = {name: explanation.read(name).tolist() for name in explanation.main}
    rows = zip(
        explanation.axes[0].values,
        _estimates(frame, "certain_mass"),
        _estimates(frame, "strongest_certain"),
        zip(frame["special_raw"], *_special_ends(explanation), strict=True),
        frame["special_effective"],
        zip(frame["least_null_dim"], frame["greatest_null_dim"], strict=True),
        frame["reachable_dim"],
        frame["pearson"],
        strict=True,
    )
    rows = tuple(rows)
    certain = explanation.about["certain"]
    if certain["bounded_rows"] < certain["free_rows"]:  # in place of reachable dimensions, for want of room
        columns = (*columns[:1], Column("bounded", _of, "right", "rows\nbounded"), *columns[1:6], *columns[7:])
        counts = zip(certain["bounded_by_layer"], certain["free_by_layer"], strict=True)
        rows = tuple((row[0], count, *row[1:6], *row[7:]) for row, count in zip(rows, counts, strict=True))
    return Table(columns, rows, notes=(joined(_legend(explanation), "note"),))


def _estimates(frame: Mapping[str, Sequence[float]], name: str) -> list[ShareEstimate]:
    """Return a column of means with what says how well each is known."""
    return [ShareEstimate(*row) for row in zip(*(frame[f"{name}{end}"] for end in _ENDS), strict=True)]


def _special_ends(explanation: Explanation) -> tuple[list[float], list[float]]:
    """Return the ends of the weight on special tokens, two standard errors apart where they are estimated."""
    lower, upper = (explanation.array(f"special_{end}") for end in ("lower", "upper"))
    below, above = (2 * explanation.array(f"special_{end}_stderr") for end in ("lower", "upper"))
    return (lower - below).nan_to_num(0.0).clamp(min=0).tolist(), (upper + above).nan_to_num(1.0).clamp(max=1).tolist()


def _of(counts: tuple[int, int]) -> str:
    return f"{counts[0]:,}/{counts[1]:,}"


def _legend(explanation: Explanation) -> Iterator[Paragraph]:
    certain = explanation.about["certain"]
    all_bounded = certain["bounded_rows"] == certain["free_rows"]
    yield Paragraph(_LEGEND.format_map(_REACHED if all_bounded else dict.fromkeys(_REACHED, "")))
    if bool(explanation.array("pearson").isnan().any()):
        words = "A correlation of – is not defined: raw or effective attention is constant."
        yield Paragraph(words, {"constant_attention": "some"})
    if not all_bounded:
        yield Paragraph("Min and max hold two standard errors.", {"bounded_rows": certain["bounded_rows"]})


def _sink(sink: Mapping[str, Any], explanation: Explanation) -> Paragraph:
    """Say what a sink gets in the layers where it is one, and could get if rows are free: means over these layers."""
    layers = explanation.axes[0]
    places = [layers.values.index(layer) for layer in sink["layers"]]
    facts = {"sink": sink["token"], "keys": len(sink["keys"]), "layers": sink["layers"]}
    for name in ("raw", "lower", "upper", "effective", "value_size"):
        values = [sink[name][place] for place in places]
        if None not in values:
            facts[name] = sum(values) / len(values)
    several = f" ({len(sink['keys'])} of them)" if len(sink["keys"]) > 1 else ""
    ends = ""
    if explanation.about["certain"]["free_rows"]:
        alternatives = ""
        if "lower" in facts and "upper" in facts:
            alternatives = f", and {facts['lower']:.2f} to {facts['upper']:.2f} in its alternatives"
        ends = f"{alternatives} (effective: {facts['effective']:.2f})"
    return Paragraph(
        f"{sink['token']}{several} is a sink in {_layers(sink['layers'], layers)}: on average it gets "
        f"{facts['raw']:.2f} of a row's weight there{ends}. Its value is {facts['value_size']:.2f} times as long as "
        "the median of the others.",
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
    residual = explanation.about["largest_residual"]
    dtype = explanation.provenance.dtype
    facts = {"residual": residual}
    changed = "There was no time to run the model with it in place of raw attention (attention.verify() does that)"
    if measured := explanation.about["output_change"]:
        change = Change(**measured)
        beyond = change.beyond(dtype)
        changed = f"In {dtype}, putting it in place of raw attention {change.words()}{beyond}"
        facts |= {"hidden_change": change.hidden, "logits_change": change.logits}
        facts |= {"beyond_rounding_of": dtype} if beyond else {}
    outputs = "every head's output"
    rounds = ""
    if dtype in ("bfloat16", "float16"):
        wider = explanation.provenance.settings["outputs_computed_in"]
        unit = torch.finfo(getattr(torch, dtype)).eps / 2
        outputs += f", computed anew in {wider} from the model's queries, keys and values,"
        rounds = f"; {dtype} rounds each number by up to {unit:.1g}"
        facts |= {"outputs_computed_in": wider, "rounding": unit}
    return Paragraph(
        f"Effective attention reproduces {outputs} to within {residual:.1g} (relative). {changed}{rounds}.",
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
