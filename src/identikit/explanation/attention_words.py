"""The answer to the first question in words. Every number in it is an interval's, or stands beside one."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from identikit.attention.precision import careful_words, rounding_of, unsure_words
from identikit.explanation.result import Explanation
from identikit.models.text_run import Change
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
from identikit.tokens.result import layers_in_words

HEADS_NAMED = 5  # how many heads with a rank-deficient projection are named
QUESTION = "Which attention is determined?"
FREEST = "The edges that are most free"
OUTSIDE = "Where effective attention is outside the interval"

_LEGEND = (
    "Means over a layer's rows. [min, max]: over all alternatives. Null dim{reachable}: in how many independent ways a "
    "row can change with the same output, if weights may be negative{query}. Correlation: of raw and effective "
    "attention."
)
_WIDE_BY_SELECTION = (
    "An interval is the range of a weight over all alternatives. These are the widest of {count:,}: the table above "
    "says what is usual."
)
_NOT_AN_ATTENTION = (
    "Effective attention is the least-norm set of weights with this output. It can be negative and need not sum to 1, "
    "so it is not an alternative."
)

_ROW = "a row (one token's attention in one head) is determined by the output"
_THE_SAME = "the same in every alternative, which is other attention with the same head output"
_two = decimals(2)


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
    yield from map(_to_image, about["to_images"])
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
    """Return how much of a row is determined by the output, and in how many rows the strongest edge is."""
    certain = explanation.about["certain"]
    facts = {name: certain[name] for name in ("free_rows", "rows", "bounded_rows")}
    free, rows, bounded = facts.values()
    if not free:
        tokens = len(explanation.tokens)
        width = explanation.about["d_value"]
        return Paragraph(
            "All of it is determined by the output: no row has an alternative, that is, other attention with the same "
            f"head output. With {counted(tokens, 'token')} and values of {width} dimensions, the values that a query "
            "sees are linearly independent.",
            {"free_rows": free, "tokens": tokens, "d_value": width},
        )
    facts |= {"fixed_rows": rows - free}
    shares = []
    for short, name in (("mass", "certain_mass"), ("strongest", "strongest_certain")):
        mean, stderr = (math.nan if certain[key] is None else certain[key] for key in (short, f"{short}_stderr"))
        share = ShareEstimate(mean, stderr, *certain[f"{short}_range"])
        shares.append(estimate(percent)(share))
        facts |= {name: share.share, f"{name}_stderr": share.stderr, f"{name}_range": certain[f"{short}_range"]}
    mass = f"On average, {shares[0]} of {_ROW}: it is {_THE_SAME}."
    if shares[0] == UNKNOWN_SHARE:
        mass = f"Too few rows were bounded to say how much of {_ROW}, that is, {_THE_SAME}."
    strongest = (
        f"In {shares[1]} of the rows the strongest edge is determined: it is the strongest in every alternative."
    )
    if shares[1] == UNKNOWN_SHARE:
        strongest = "In how many rows the strongest edge is determined is not known either."
    words = f"{mass} The rest is free. {strongest}"
    fixed = f"; the other {rows - free:,} are determined" if free < rows else ""
    known_ends = "(the intervals of their weights are known)"
    if bounded == free:
        return Paragraph(f"{words} All {free:,} free rows were bounded {known_ends}{fixed}.", facts)
    facts["seconds"] = certain["seconds"]
    drawn = f"{counted(bounded, 'was', 'were')} bounded {known_ends}, drawn at random, in {certain['seconds']:g} s"
    errors = "± is the standard error, and a range holds two of them, or all that is possible"
    return Paragraph(f"{words} Of the {free:,} free rows, {drawn}{fixed}; {errors}.", facts)


def _yardstick(explanation: Explanation) -> Iterator[Paragraph]:
    """Yield how much would be determined if weights met values at random."""
    shuffled = explanation.about.get("shuffled")
    if shuffled is not None:
        error = percent(shuffled["shuffled_stderr"])
        yield Paragraph(
            f"As a yardstick: of {shuffled['rows']} free rows drawn at random, {percent(shuffled['mass'])} is "
            f"determined, and {percent(shuffled['shuffled'])}±{error} once each row's values are shuffled over its "
            "keys.",
            {f"yardstick_{name}": value for name, value in shuffled.items()},
        )


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
        names = ", ".join(f"L{head['layer']}H{head['head']} ({head['rank']})" for head in heads[:HEADS_NAMED])
        if len(heads) > HEADS_NAMED:
            names += f" and {len(heads) - HEADS_NAMED} more"
        yield Paragraph(
            f"The output projection passes on fewer than {width} dimensions of {names}, so values that differ can give "
            "the same output.",
            {
                "full_projection": width,
                "deficient_heads": [(head["layer"], head["head"], head["rank"]) for head in heads],
                "heads_not_named": max(0, len(heads) - HEADS_NAMED),
            },
        )
    if causes["dependent"]:
        other_causes = causes["keys"] or causes["repeated"] or causes["projections"]
        also = " for other reasons" if other_causes else ""
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


def _layers(numbers: Sequence[int], layers: Axis) -> str:
    """Return layers in words: `every layer`, `layer 3`, `layers 0 to 4`, `layers 0, 2 and 5`."""
    if len(numbers) < len(layers):
        return layers_in_words(numbers)
    return "every layer" if layers.values == tuple(range(len(layers))) else "every layer that was read"


def _table(explanation: Explanation) -> Table:
    """Return means over the rows of each layer."""
    group = explanation.about["group"]
    certain = explanation.about["certain"]
    frame = {name: explanation.read(name).tolist() for name in explanation.main}
    ends = []
    for name, sign in (("special_lower", -1), ("special_upper", 1)):  # two standard errors apart where estimated
        end = explanation.array(name) + sign * 2 * explanation.array(f"{name}_stderr")
        ends.append(end.nan_to_num(float(sign > 0)).clamp(0, 1).tolist())
    columns: list[tuple[Column, Iterable[Any]]] = [
        (Column("layer", align="right"), explanation.axes[0].values),
        (Column("determined", estimate(weight), "right", "deter-\nmined"), _estimates(frame, "certain_mass")),
        (
            Column("strongest determined", estimate(percent), "right", "strongest\ndetermined"),
            _estimates(frame, "strongest_certain"),
        ),
        (
            Column(f"{group} raw [min, max]", _weight_in_interval, "right", f"{group}\nraw [min, max]"),
            zip(frame["special_raw"], *ends, strict=True),
        ),
        (Column("effective", _two, "right", "effec-\ntive"), frame["special_effective"]),
        (
            Column("null dim", _range, "right", "null\ndim"),
            zip(frame["least_null_dim"], frame["greatest_null_dim"], strict=True),
        ),
        (Column("reachable", decimals(1), "right", "reach-\nable"), frame["reachable_dim"]),
        (Column("correlation", _two, "right", "corre-\nlation"), frame["pearson"]),
    ]
    legend = [Paragraph(_LEGEND.format(reachable=", reachable", query=", and by a change of its query"))]
    partial = certain["bounded_rows"] < certain["free_rows"]
    if partial:  # in place of reachable dimensions, for want of room
        del columns[6]
        counts = zip(certain["bounded_by_layer"], certain["free_by_layer"], strict=True)
        columns.insert(
            1, (Column("bounded", lambda count: f"{count[0]:,}/{count[1]:,}", "right", "rows\nbounded"), counts)
        )
        legend = [Paragraph(_LEGEND.format(reachable="", query=""))]
    if any(math.isnan(value) for value in frame["pearson"]):
        words = "A correlation of – is not defined: raw or effective attention is constant."
        legend.append(Paragraph(words, {"constant_attention": "some"}))
    if partial:
        legend.append(Paragraph("Min and max hold two standard errors.", {"bounded_rows": certain["bounded_rows"]}))
    heads, values = zip(*columns, strict=True)
    return Table(heads, tuple(zip(*values, strict=True)), notes=(joined(legend, "note"),))


def _estimates(frame: Mapping[str, Sequence[float]], name: str) -> list[ShareEstimate]:
    """Return a column of means with what says how well each is known."""
    ends = (frame[f"{name}{end}"] for end in ("", "_stderr", "_least", "_most"))
    return [ShareEstimate(*row) for row in zip(*ends, strict=True)]


def _to_image(gets: Mapping[str, Any]) -> Paragraph:
    """Return what an image gets of all rows, and could get if rows are free: means over the layers."""
    facts = {name: sum(gets[name]) / len(gets[name]) for name in ("raw", "lower", "upper") if None not in gets[name]}
    ends = f", and {facts['lower']:.2f} to {facts['upper']:.2f} in its alternatives" if len(facts) == 3 else ""
    words = f"{str(gets['image']).capitalize()} gets {facts['raw']:.2f} of a row's weight on average{ends}."
    return Paragraph(words, {"image": gets["image"], **facts})


def _sink(sink: Mapping[str, Any], explanation: Explanation) -> Paragraph:
    """Return what a sink gets in the layers where it is one, and could get: means over these layers."""
    layers = explanation.axes[0]
    layer_indices = [layers.values.index(layer) for layer in sink["layers"]]
    facts = {"sink": sink["token"], "keys": len(sink["keys"]), "layers": sink["layers"]}
    for name in ("raw", "lower", "upper", "effective", "value_size"):
        values = [sink[name][index] for index in layer_indices]
        if None not in values:
            facts[name] = sum(values) / len(values)
    several = f" ({len(sink['keys'])} of them)" if len(sink["keys"]) > 1 else ""
    ends = ""
    if explanation.about["certain"]["free_rows"]:
        if "lower" in facts and "upper" in facts:
            lower, upper = (f"{facts[name]:.2f}" for name in ("lower", "upper"))
            ends = ", as in its alternatives" if lower == upper else f", and {lower} to {upper} in its alternatives"
        ends += f" (effective: {facts['effective']:.2f})"
    return Paragraph(
        f"{sink['token']}{several} is a sink in {_layers(sink['layers'], layers)}: on average it gets "
        f"{facts['raw']:.2f} of a row's weight there{ends}. Its value is {facts['value_size']:.2f} times as long as "
        "the median of the others.",
        facts,
    )


def _edges(explanation: Explanation, edges: Sequence[Mapping[str, Any]], note: Paragraph, *, effective: bool) -> Table:
    tokens = explanation.axes[1]
    weights = ["raw", "effective"] if effective else ["raw"]
    rows = []
    for edge in edges:
        names = [tokens.name_of(edge["query"]), tokens.name_of(edge["key"])]
        ends = (edge["lower"], edge["upper"])
        rows.append(((edge["layer"], edge["head"]), *names, *(edge[name] for name in weights), ends))
    columns = (
        Column("head", lambda head: f"L{head[0]}H{head[1]}"),
        Column("query"),
        Column("key"),
        *(Column(name, decimals(3), "right") for name in weights),
        Column("interval", lambda ends: f"[{ends[0]:.3f}, {ends[1]:.3f}]"),
    )
    return Table(columns, tuple(rows), notes=(note,))


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


def _range(ends: tuple[float, float]) -> str:
    least, greatest = ends
    return f"{least:.0f}" if least == greatest else f"{least:.0f}–{greatest:.0f}"
