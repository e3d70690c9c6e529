"""Which explanation of a text can be trusted: readings of its attention, and how much of each is determined."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from identikit.attention.intervals import Bounding
from identikit.attention.measure import MeasuredText
from identikit.attention.measure_kinds import MEASURE_KINDS
from identikit.attention.measure_result import AttentionMeasure, HeadScores
from identikit.attention.result import EffectiveAttention
from identikit.attention.scores import ROLES, scores_result, text_scores
from identikit.checks import known_names
from identikit.errors import InputError, Unavailable
from identikit.explanation.result import Explanation
from identikit.explanation.time_limit import TimeLimit
from identikit.models.target import checked_target
from identikit.models.text_run import TextRun
from identikit.progress import Progress
from identikit.results.words import Block, Column, Heading, Paragraph, Table, joined, percent

HEAD_ROLES = "roles"


class MeasureChoice(NamedTuple):
    """A measure that `explain` can read, and whether it needs a target."""

    name: str
    meaning: str
    of_target: bool = False


MEASURE_CHOICES = (
    *(MeasureChoice(kind.name, kind.meaning, kind.needs_target) for kind in MEASURE_KINDS.values()),
    MeasureChoice(HEAD_ROLES, "Which role each head has, such as previous-token or induction head."),
)
"""What `explain(measures=…)` knows: the measures of `attention_measure`, and the roles of heads."""

_FEW_ORDERED = 2.5  # of five sources: fewer in a determined order are few
_OVERRUN = 1.5  # measures come last, and may take half of the time limit beyond it
Measured = AttentionMeasure | HeadScores | Unavailable


def checked_names(measures: Sequence[str] | str) -> tuple[str, ...]:
    """Return the names of measures, or refuse an unknown one."""
    if isinstance(measures, tuple | list) and not measures:
        return ()
    return known_names("measures", measures, tuple(choice.name for choice in MEASURE_CHOICES))


def check_target(reading: TextRun, names: Sequence[str], target: object) -> None:
    """Refuse a target that one of the measures cannot take."""
    kinds = [MEASURE_KINDS[name] for name in names if name in MEASURE_KINDS and MEASURE_KINDS[name].needs_target]
    if target is not None and kinds:
        checked = checked_target(reading.model, reading, target)
        for kind in kinds:
            kind.check_target(checked)


def read_measures(
    attention: EffectiveAttention, names: Sequence[str], target: object, limit: TimeLimit, progress: Progress
) -> tuple[dict[str, Measured], dict[str, dict[str, object]]]:
    """Read the named measures from captured attention within the limit; return them, and the facts about each."""
    until = math.inf if limit.seconds is None else limit.started + _OVERRUN * limit.seconds
    text = MeasuredText(attention.captured(), target, until, progress)
    measures: dict[str, Measured] = {}
    facts: dict[str, dict[str, object]] = {}
    for name in names:
        try:
            if time.monotonic() >= until:
                raise InputError(f"There was no time left for it (seconds={limit.seconds:g}).")
            if name == HEAD_ROLES:
                measures[name] = scores = _head_roles(text)
                facts[name] = _role_facts(scores)
            else:
                measures[name] = measure = _attention_measure(text, name)
                facts[name] = _measure_facts(measure, until)
        except InputError as refusal:
            reason = str(refusal)
            if target is None and name in MEASURE_KINDS and MEASURE_KINDS[name].needs_target:
                problem = reason.split(". ")[0].rstrip(".")
                reason = f"{problem}. `attention_measure(model, text, {name!r}, target=…)` may read it."
            measures[name] = Unavailable(reason)
            facts[name] = {"unavailable": reason}
    return measures, facts


def _head_roles(text: MeasuredText) -> HeadScores:
    reading = text.captured.text_run
    if reading.model.modality != "text":
        raise InputError(f"Roles compare tokens, and {reading.model.name} reads {reading.model.modality}s.")
    roles = [*ROLES.values()]
    numbers = text_scores(text.captured, roles, Bounding(until=text.until))
    return scores_result(text.captured, reading.text, [numbers], roles)


def _attention_measure(text: MeasuredText, name: str) -> AttentionMeasure:
    """Read all layers, or through layers what arrives after the last."""
    model = text.captured.text_run.model
    kind = MEASURE_KINDS[name]
    layers = text.captured.layer_numbers
    if kind.through and layers != model.select_layers(list(range(model.n_layers))):
        raise InputError(f"It goes through all layers, and there was time to read only {len(layers)} of them.")
    return text.measure_all(kind)


def _measure_facts(measure: AttentionMeasure, until: float) -> dict[str, object]:
    """Return how much of a measure is determined: at least, where it was not bounded in time or has outer bounds."""
    late = float(measure.gap.isnan().double().mean())
    facts: dict[str, object] = {"exact": bool(measure.exact), "through": measure.through, "late": late}
    if late or time.monotonic() >= until:
        unknown = dict.fromkeys(("strongest", "order", "undecided", "order_undecided"))
        return facts | {"determined": float(measure.certain_share.mean())} | unknown
    survival = measure.survival()
    return facts | {
        "order_late": time.monotonic() >= until,
        "determined": survival.determined,
        "strongest": survival.strongest,
        "order": survival.order,
        "undecided": survival.undecided / survival.rows,
        "order_undecided": survival.order_undecided / survival.rows,
    }


def _role_facts(scores: HeadScores) -> dict[str, object]:
    """Return for each role the head that has most of it, with the range of its score."""
    heads = [f"L{layer}H{head}" for layer in scores.axis("layer").values for head in scores.axis("head").values]
    rows = []
    for index, role in enumerate(scores.scores):
        raw, lower, upper = (scores.read(name)[index].flatten() for name in ("raw", "lower", "upper"))
        if ROLES[role].noun is None or bool(raw.isnan().all()):
            continue
        strongest = int(raw.nan_to_num(-1).argmax())
        rows.append([role, heads[strongest], *(float(scores[strongest]) for scores in (raw, lower, upper))])
    return {"late": float(scores.gap.isnan().all(0).double().mean()), "largest": rows}


# In words


def reading_blocks(explanation: Explanation) -> Iterator[Block]:
    """Yield which readings of attention can be trusted; nothing if no measures were requested."""
    readings = explanation.about.get("readings", {})
    if not readings:
        return
    yield Heading("Which explanation can be trusted?")
    measures = {name: facts for name, facts in readings.items() if "determined" in facts}
    if measures:
        ranked = sorted(measures, key=lambda name: -measures[name]["determined"])
        yield joined(_sentence(name, measures[name]) for name in dict.fromkeys([ranked[0], ranked[-1]]))
        yield _table(measures)
    if "largest" in readings.get(HEAD_ROLES, {}):
        numbers = [Column(name, "{:.2f}".format, "right") for name in ("raw", "least", "most")]
        columns = (Column("role"), Column("head"), *numbers)
        rows = tuple(tuple(row) for row in readings[HEAD_ROLES]["largest"])
        yield Table(columns, rows, "The head with most of each role, and its range over all alternatives:")
    for name, facts in readings.items():
        title = f"{name[0].upper()}{name[1:]}"
        if "unavailable" in facts:
            reason = facts["unavailable"]
            yield Paragraph(f"{title} was not read: {reason}", {"name": name, "reason": reason}, offers=True)
        elif facts["late"]:
            words = f"{title}: {percent(facts['late'])} of it was not bounded in time; more may be determined."
            yield Paragraph(words, {"late": facts["late"]}, "note")
        elif facts.get("order_late"):
            words = f"{title}: there was no time to compare all of its sources; more may be in a fixed order."
            yield Paragraph(words, {"order_undecided": facts["order_undecided"]}, "note")


def _sentence(name: str, facts: Mapping[str, Any]) -> Paragraph:
    """Return how much of one measure is determined, and how much of its ranking."""
    is_sharp = facts["exact"] and not facts["late"]
    share = percent(facts["determined"])
    at_least = "" if is_sharp or share == "100%" else "at least "
    words = f"{name[0].upper()}{name[1:]}: {at_least}{share} of it is determined"
    numbers = {name: [facts[key] for key in ("determined", "strongest", "order")]}
    if facts["order"] is None:
        return Paragraph(f"{words}; there was no time to compare its sources.", numbers)
    if facts["undecided"] == 1:
        return Paragraph(f"{words}, and its ends do not tell which source is the strongest of any row.", numbers)
    in_least = "at least " if facts["undecided"] else ""
    ordered_least = "at least " if facts["order_undecided"] else ""
    other_tokens = " among the other tokens" if facts["through"] else ""
    conjunction = "and on average" if ordered_least or facts["order"] >= _FEW_ORDERED else "but on average only"
    return Paragraph(
        f"{words}. Its strongest source{other_tokens} is the same in every alternative in {in_least}"
        f"{percent(facts['strongest'])} of the rows, {conjunction} {ordered_least}{facts['order']:.1f} of its five "
        "strongest are in a determined order.",
        numbers,
    )


def _table(measures: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = (
        Column("reading"),
        Column("determined", partial(_at_least, percent), "right"),
        Column("strongest source determined", partial(_at_least, percent), "right", "strongest\ndetermined"),
        Column("in a determined order", partial(_at_least, "{:.1f}".format), "right", "in determined\norder"),
        Column("ends"),
    )
    rows = []
    for name, facts in measures.items():
        is_outer = not facts["exact"] or bool(facts["late"])
        determined = (facts["determined"], is_outer)
        strongest = (facts["strongest"], bool(facts["undecided"]))
        order = (facts["order"], bool(facts["order_undecided"]))
        rows.append((name, determined, strongest, order, "outer bounds" if is_outer else "exact"))
    after = "; through layers, after the last" if any(facts["through"] for facts in measures.values()) else ""
    return Table(columns, tuple(rows), f"How much of each reading is the same in every alternative{after}:")


def _at_least(form: Callable[[float], str], value: tuple[float | None, bool]) -> str:
    number, is_lower_bound = value
    written = "–" if number is None else form(number)
    return f"≥ {written}" if is_lower_bound and written not in ("–", "100%") else written
