"""The answer to the first question in words. Every number in it is an interval's, or stands beside one."""

from collections.abc import Sequence
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from identikit.attention.precision import careful_words
from identikit.attention.result import unsure_words
from identikit.explanation.result import Explanation
from identikit.models.reading import Change
from identikit.results.axis import Axis

ROUNDING = 1e-6  # what a share may be off from 0 or 1 by the programs' tolerance
HEADS_NAMED = 5  # how many heads with a rank-deficient projection are named

LEGEND = (
    "Means over a layer's rows. certain mass: how much of a row's weight stays on the same tokens in every attention "
    "with the same output; strongest certain: rows whose strongest edge is the strongest in every such attention; "
    "{group}: a row's weight on {them}, the least and the greatest that such attention can give, and what effective "
    "attention gives; null dim: in how many independent ways a row's weights can change with the same output, if they "
    "may be negative; reachable: in how many the head's own query could change them, its keys being what they are; "
    "correlation: of raw and effective attention."
)
LEAST_CERTAIN = (
    "These are the widest of {count} intervals, so they are wide by selection: the table says what is usual."
)
OUTSIDE = (
    "Effective attention is the least-norm set of weights with this output. It can be negative and need not sum to 1, "
    "so it is not what the attention could have been: that is the interval."
)


def attention_words(explanation: Explanation) -> list[RenderableType]:
    """Say how much of the attention is certain, why the rest is not, and on which edges that shows."""
    about = explanation.about
    parts: list[RenderableType] = [Text("\nWhich attention is real?", style="bold"), Text(_headline(explanation))]
    dtype = explanation.provenance.dtype
    parts += [Text(careful, style="bold") for careful in careful_words(about["largest_row_residual"], dtype)]
    if about["certain"]["free_rows"]:
        parts.append(Text(" ".join(_causes(explanation))))
    if beside := _beside(explanation):
        parts.append(Text(" ".join(beside)))
    parts += [_table(explanation), Text(_legend(explanation), style="dim")]
    if about["sinks"]:
        parts.append(Text("\nSinks", style="bold"))
        parts += [Text(_sink(sink, explanation.axis("layer"))) for sink in about["sinks"]]
    if about["least_certain"]:
        parts.append(Text("\nThe least certain edges:", style="bold"))
        parts += [Text(f"  {_edge(explanation, edge)}") for edge in about["least_certain"]]
        parts.append(Text(LEAST_CERTAIN.format(count=f"{about['certain']['bounded_edges']:,}"), style="dim"))
    if about["outside"]:
        parts.append(Text("\nWhere effective attention is outside the interval:", style="bold"))
        parts += [Text(f"  {_edge(explanation, edge, effective=True)}") for edge in about["outside"]]
        parts.append(Text(OUTSIDE, style="dim"))
    return [*parts, Text(f"\n{_certificate(explanation)}", style="dim")]


def _headline(explanation: Explanation) -> str:
    certain, n = explanation.about["certain"], len(explanation.tokens)
    if not certain["free_rows"]:
        return (
            "All of it. In every row, the values of the visible keys are linearly independent, so the head's output "
            f"determines each weight: {counted(n, 'token')}, values of {explanation.about['d_value']} dimensions."
        )
    rows, free, bounded = (certain[name] for name in ("rows", "free_rows", "bounded_rows"))
    if not bounded:
        return (
            f"Perhaps not all of it: {free:,} of {rows:,} rows (one token's attention in one head) have a null space, "
            f"and none of them was bounded within {certain['seconds']:g} s."
        )
    mass, strongest = _share(certain["mass"]), _share(certain["strongest"])
    told = (
        f"{mass.capitalize()} of it is certain: on average, this share of a row (one token's attention in one head) "
        f"stays on the same tokens in every attention with the same output. In {strongest} of the rows, the strongest "
        "edge is the strongest in every such attention."
    )
    others = f"; in the other {rows - free:,}, the output determines each weight" if free < rows else ""
    if bounded == free:
        return f"{told} All {free:,} rows with a null space were bounded{others}."
    errors = [certain[f"{name}_stderr"] for name in ("mass", "strongest")]
    known = f"standard errors {errors[0]:.1%} and {errors[1]:.1%}" if None not in errors else "too few for an error"
    several = counted(bounded, "was", "were")
    drawn = f"Of the {free:,} rows with a null space, {several} bounded, drawn at random"
    return f"{told} {drawn} ({known}){others}."


def _share(share: float) -> str:
    """Return a percentage that is 0 or 100 only where the share is, but for rounding."""
    if ROUNDING < share < 0.005:
        return "less than 1%"
    return "more than 99%" if 0.995 <= share < 1 - ROUNDING else f"{share:.0%}"


def _causes(explanation: Explanation) -> list[str]:
    """Say why rows can change, one sentence for each cause that holds, and where."""
    found, layers, tokens = explanation.about["causes"], explanation.axis("layer"), explanation.axis("token")
    d_value, told = explanation.about["d_value"], []
    if found["keys"]:
        told.append(
            f"Rows have a null space because a query sees up to {found['most_keys']} keys, and a head's values have "
            f"only {d_value} dimensions ({_layers(found['keys'], layers)})."
        )
    if found["repeated"]:
        first = found["repeated"][0]
        earlier, later = (tokens.name_of(place) for place in first["example"])
        where = _layers([one["layer"] for one in found["repeated"]], layers)
        told.append(
            f"In {where}, repeated tokens have equal values and can exchange their weight "
            f"({counted(first['tokens'], 'repetition')} in layer {first['layer']}, such as {later} of {earlier})."
        )
    if found["projections"]:
        named = [f"L{one['layer']}H{one['head']} ({one['rank']})" for one in found["projections"]]
        more = f" and {len(named) - HEADS_NAMED} more" if len(named) > HEADS_NAMED else ""
        told.append(
            f"The output projection passes on fewer than {d_value} dimensions of {', '.join(named[:HEADS_NAMED])}"
            f"{more}, so values that differ can give the same output."
        )
    if found["dependent"]:
        also = " for other reasons" if told else ""
        told.append(f"Some values depend linearly on others{also} in {_layers(found['dependent'], layers)}.")
    if shared := explanation.about["shared_outputs"]:
        told.append(
            f"Intervals take each head's own output as given; in {_layers(shared, layers)}, heads could also trade "
            "outputs with each other."
        )
    return told


def _beside(explanation: Explanation) -> list[str]:
    """Say what a learned sink takes, and where ranks are not sure."""
    about, told = explanation.about, []
    by_layer = about["learned_sink"]
    if any(by_layer):
        told.append(
            f"A learned sink takes {sum(by_layer) / len(by_layer):.2f} of a row's weight on average "
            f"({min(by_layer):.2f} to {max(by_layer):.2f} by layer). It is not a token: the tokens' weights sum to the "
            "rest, and certain mass cannot be more. Other attention with the same output may give it more or less."
        )
    unsure, duplicates = about["unsure"], sum(about["rounded_duplicates"])
    return told + unsure_words(sum(unsure) / len(unsure), duplicates, explanation.provenance.dtype)


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
    table = plain_table()
    names = ("", "layer"), ("certain", "mass"), ("strongest", "certain"), (explanation.about["group"], "raw [min, max]")
    for name in (*names, ("", "effective"), ("null", "dim"), ("reach-", "able"), ("corre-", "lation")):
        table.add_column(Text("\n".join(name)), justify="right", no_wrap=True)
    for row in explanation.to_frame().to_dict("records"):
        ends = f"[{_two(row['special_lower'])}, {_two(row['special_upper'])}]"
        table.add_row(
            str(row["layer"]),
            _two(row["certain_mass"]),
            _percent(row["strongest_certain"]),
            Text(f"{_two(row['special_raw'])} {ends}"),
            _two(row["special_effective"]),
            _range(row["least_null_dim"], row["greatest_null_dim"]),
            f"{row['reachable_dim']:.1f}",
            _two(row["pearson"]),
        )
    return table


def _legend(explanation: Explanation) -> str:
    group = explanation.about["group"]
    told = LEGEND.format(group=group, them="them" if group == "special tokens" else "it")
    unknown = bool(explanation.array("certain_mass").isnan().any())
    told += " –: no row of the layer was bounded in time." if unknown else ""
    if bool(explanation.array("pearson").isnan().any()):
        told += " A correlation of – is not defined: raw or effective attention is constant."
    certain = explanation.about["certain"]
    names = "certain_mass", "strongest_certain", "special_lower", "special_upper"
    errors = torch.stack([explanation.array(f"{name}_stderr") for name in names])
    if certain["bounded_rows"] in (0, certain["free_rows"]) or bool(errors.isnan().any()):
        return told
    mass, strongest, lower, upper = errors.amax(1).tolist()
    told += f" Standard errors: {_at_most(mass, '.2f')}, {_at_most(strongest, '.0%')}"
    return f"{told} and, for min and max, {_at_most(max(lower, upper), '.2f')}."


def _at_most(error: float, form: str) -> str:
    """Say a standard error with few digits, and not that it is 0."""
    smallest = 0.01
    return f"below {smallest:{form}}" if error < smallest / 2 else f"up to {error:{form}}"


def _sink(sink: dict[str, Any], layers: Axis) -> str:
    """Say what a sink gets in the layers where it is one: means over these layers."""

    def mean(name: str) -> float | None:
        found = [sink[name][layers.values.index(layer)] for layer in sink["layers"]]
        return None if None in found else sum(found) / len(found)

    lower, upper = mean("lower"), mean("upper")
    several = f" ({len(sink['keys'])} of them)" if len(sink["keys"]) > 1 else ""
    where = _layers(sink["layers"], layers)
    ends = ""
    if lower is not None and upper is not None:
        ends = f", and between {lower:.2f} and {upper:.2f} in any attention with the same output"
    return (
        f"{sink['token']}{several} is a sink in {where}: on average it gets {mean('raw'):.2f} of a row's weight there"
        f"{ends} (effective: {mean('effective'):.2f}). Its value is {mean('value_size'):.2f} times as long as the "
        "median of the others."
    )


def _edge(explanation: Explanation, edge: dict[str, Any], *, effective: bool = False) -> str:
    query, key = (explanation.axis("token").name_of(edge[name]) for name in ("query", "key"))
    beside = f"effective {edge['effective']:.3f}, " if effective else ""
    return (
        f"L{edge['layer']}H{edge['head']} {query} → {key}: raw {edge['raw']:.3f}, {beside}interval "
        f"[{edge['lower']:.3f}, {edge['upper']:.3f}]"
    )


def _certificate(explanation: Explanation) -> str:
    change = Change(**explanation.about["output_change"])
    residual, dtype = explanation.about["largest_residual"], explanation.provenance.dtype
    outputs, rounds = "every head's output", ""
    if dtype in ("bfloat16", "float16"):
        anew = explanation.provenance.settings["outputs_computed_in"]
        outputs += f", computed anew in {anew} from the model's queries, keys and values,"
        rounds = f"; {dtype} rounds each number by up to {torch.finfo(getattr(torch, dtype)).eps / 2:.1g}"
    return (
        f"Certificate: effective attention reproduces {outputs} to within {residual:.1g} (relative). In {dtype}, "
        f"putting it in place of raw attention {change.words()}{change.beyond(dtype)}{rounds}."
    )


def counted(number: int, one: str, several: str | None = None) -> str:
    """Return a number with what it counts."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def plain_table() -> Table:
    """Return a table without lines."""
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")


def _two(number: float) -> str:
    return "–" if number != number else f"{number:.2f}"


def _percent(share: float) -> str:
    return "–" if share != share else f"{share:.0%}"


def _range(least: float, greatest: float) -> str:
    return f"{least:.0f}" if least == greatest else f"{least:.0f}–{greatest:.0f}"
