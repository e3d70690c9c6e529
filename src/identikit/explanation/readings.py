"""Which explanation of a text can be trusted: readings of its attention, and how much of each is determined."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from identikit.attention.intervals import Bounding
from identikit.attention.measure import MeasuredText
from identikit.attention.reading_result import AttentionMeasure, HeadScores
from identikit.attention.readings import READINGS
from identikit.attention.result import EffectiveAttention
from identikit.attention.scores import ROLES, scored, scores_result
from identikit.checks import known_names
from identikit.errors import InputError, Unavailable
from identikit.explanation.result import Explanation
from identikit.explanation.time_limit import TimeLimit
from identikit.models.reading import Reading
from identikit.models.target import checked_target
from identikit.progress import Progress
from identikit.results.words import Block, Column, Heading, Paragraph, Table, joined, percent

HEAD_ROLES = "roles"


class Offered(NamedTuple):
    """A measure that `explain` offers, and whether it needs a target."""

    name: str
    meaning: str
    of_target: bool = False


OFFERED = (
    *(Offered(kind.name, kind.meaning, kind.needs_target) for kind in READINGS.values()),
    Offered(HEAD_ROLES, "Which role each head has, such as previous-token or induction head."),
)
"""What `explain(measures=…)` knows: the readings of `attention_measure`, and the roles of heads."""

_MANY = 2.5  # of five sources; fewer in a determined order are few
_BEYOND = 1.5  # readings come last, and may take half of the time limit beyond it
AnyReading = AttentionMeasure | HeadScores | Unavailable


def checked_names(measures: Sequence[str] | str) -> tuple[str, ...]:
    """Return the names of measures that are known."""
    if isinstance(measures, tuple | list) and not measures:
        return ()
    return known_names("measures", measures, tuple(offered.name for offered in OFFERED))


def check_target(reading: Reading, names: Sequence[str], target: object) -> None:
    """Refuse a target that one of the measures cannot take."""
    aimed = [READINGS[name] for name in names if name in READINGS and READINGS[name].needs_target]
    if target is not None and aimed:
        aim = checked_target(reading.model, reading, target)
        for kind in aimed:
            kind.check_aim(aim)


def read_measures(
    attention: EffectiveAttention, names: Sequence[str], target: object, limit: TimeLimit, progress: Progress
) -> tuple[dict[str, AnyReading], dict[str, dict[str, object]]]:
    """Take the named readings of captured attention within the limit; return them, and the facts about each."""
    until = math.inf if limit.seconds is None else limit.started + _BEYOND * limit.seconds
    measured = MeasuredText(attention.captured(), target, until, progress)
    found: dict[str, AnyReading] = {}
    facts: dict[str, dict[str, object]] = {}
    for name in names:
        try:
            if time.monotonic() >= until:
                raise InputError(f"There was no time left for it (seconds={limit.seconds:g}).")
            found[name] = reading = _read(measured, name)
            facts[name] = _survives(reading, until) if isinstance(reading, AttentionMeasure) else _largest(reading)
        except InputError as refusal:
            reason = str(refusal)
            if target is None and name in READINGS and READINGS[name].needs_target:
                first = reason.split(". ")[0].rstrip(".")
                reason = f"{first}. `attention_measure(model, text, {name!r}, target=…)` may read it."
            found[name] = Unavailable(reason)
            facts[name] = {"unavailable": reason}
    return found, facts


def _read(measured: MeasuredText, name: str) -> AttentionMeasure | HeadScores:
    """Read a text in one way: all layers, or through layers what arrives after the last."""
    captured = measured.captured
    model = captured.reading.model
    layers = [layer.call.layer for layer in captured.layers]
    if name == HEAD_ROLES:
        if model.modality != "text":
            raise InputError(f"Roles compare tokens, and {model.name} reads {model.modality}s.")
        numbers = scored(captured, [*ROLES.values()], Bounding(until=measured.until))
        read = captured.reading
        return scores_result(read, read.text, [numbers], tuple(ROLES), layers, range(model.n_heads))
    kind = READINGS[name]
    if kind.through and layers != list(model.attending(list(range(model.n_layers)))):
        raise InputError(f"It goes through all layers, and there was time to read only {len(layers)} of them.")
    return measured.overall(kind)


def _survives(measure: AttentionMeasure, until: float) -> dict[str, object]:
    """Return how much of a reading is determined; of what was not bounded in time, and of outer bounds, at least."""
    late = float(measure.gap.isnan().double().mean())
    facts: dict[str, object] = {"exact": bool(measure.exact), "through": measure.through, "late": late}
    if late or time.monotonic() >= until:
        unknown = dict.fromkeys(("strongest", "order", "undecided", "order_undecided"))
        return facts | {"determined": float(measure.certain_share.mean())} | unknown
    survival = measure.survival()
    facts["order_late"] = time.monotonic() >= until
    shares = {name: getattr(survival, name) / survival.rows for name in ("undecided", "order_undecided")}
    return facts | {name: getattr(survival, name) for name in ("determined", "strongest", "order")} | shares


def _largest(scores: HeadScores) -> dict[str, object]:
    """Return for each role the head that has most of it, with the range of its score."""
    layers, heads = (scores.axis(name).values for name in ("layer", "head"))
    rows = []
    for at, role in enumerate(scores.scores):
        raw, lower, upper = (scores.read(name)[at].flatten() for name in ("raw", "lower", "upper"))
        if ROLES[role].noun is None or bool(raw.isnan().all()):
            continue
        place = int(raw.nan_to_num(-1).argmax())
        name = f"L{layers[place // len(heads)]}H{heads[place % len(heads)]}"
        rows.append([role, name, *(float(part[place]) for part in (raw, lower, upper))])
    return {"late": float(scores.gap.isnan().all(0).double().mean()), "largest": rows}


# In words


def reading_blocks(explanation: Explanation) -> Iterator[Block]:
    """Yield which readings of attention can be trusted; nothing where none was asked for."""
    read = explanation.about.get("readings", {})
    if not read:
        return
    yield Heading("Which explanation can be trusted?")
    measures = {name: facts for name, facts in read.items() if "determined" in facts}
    if measures:
        ranked = sorted(measures, key=lambda name: -measures[name]["determined"])
        yield joined(_sentence(name, measures[name]) for name in dict.fromkeys([ranked[0], ranked[-1]]))
        yield _table(measures)
    if HEAD_ROLES in read and "largest" in read[HEAD_ROLES]:
        numbers = [Column(name, "{:.2f}".format, "right") for name in ("raw", "least", "most")]
        columns = (Column("role"), Column("head"), *numbers)
        rows = tuple(tuple(row) for row in read[HEAD_ROLES]["largest"])
        yield Table(columns, rows, "The head with most of each role, and its range over all alternatives:")
    for name, facts in read.items():
        if "unavailable" in facts:
            reason = facts["unavailable"]
            yield Paragraph(f"{_titled(name)} was not read: {reason}", {"name": name, "reason": reason}, offers=True)
        elif facts["late"]:
            words = f"{_titled(name)}: {percent(facts['late'])} of it was not bounded in time; more may be determined."
            yield Paragraph(words, {"late": facts["late"]}, "note")
        elif facts.get("order_late"):
            words = f"{_titled(name)}: there was no time to compare all of its sources; more may be in a fixed order."
            yield Paragraph(words, {"order_undecided": facts["order_undecided"]}, "note")


def _sentence(name: str, facts: Mapping[str, Any]) -> Paragraph:
    """Say how much of one reading is determined, and how much of its ranking."""
    bounded = facts["exact"] and not facts["late"]
    share = percent(facts["determined"])
    words = f"{_titled(name)}: {'' if bounded or share == '100%' else 'at least '}{share} of it is determined"
    told = {name: [facts[key] for key in ("determined", "strongest", "order")]}
    if facts["order"] is None:
        return Paragraph(f"{words}; there was no time to compare its sources.", told)
    if facts["undecided"] == 1:
        return Paragraph(f"{words}, and its ends do not tell which source is the strongest of any row.", told)
    least = "at least " if facts["undecided"] else ""
    more = "at least " if facts["order_undecided"] else ""
    others = " among the other tokens" if facts["through"] else ""
    only = "and on average" if more or facts["order"] >= _MANY else "but on average only"
    return Paragraph(
        f"{words}. Its strongest source{others} is the same in every alternative in {least}"
        f"{percent(facts['strongest'])} of the rows, {only} {more}{facts['order']:.1f} of its five strongest are in a "
        "determined order.",
        told,
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
        short = not facts["exact"] or bool(facts["late"])
        ranked = [
            (facts[key], bool(facts[unknown]))
            for key, unknown in (("strongest", "undecided"), ("order", "order_undecided"))
        ]
        rows.append((name, (facts["determined"], short), *ranked, "outer bounds" if short else "exact"))
    after = "; through layers, after the last" if any(facts["through"] for facts in measures.values()) else ""
    return Table(columns, tuple(rows), f"How much of each reading is the same in every alternative{after}:")


def _at_least(form: Callable[[float], str], value: tuple[float | None, bool]) -> str:
    number, short = value
    written = "–" if number is None else form(number)
    return f"≥ {written}" if short and written not in ("–", "100%") else written


def _titled(name: str) -> str:
    return f"{name[0].upper()}{name[1:]}"
