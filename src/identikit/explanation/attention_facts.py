"""What is said of a text's attention beyond why it is free: means by layer, sinks, and the edges worth naming.

Rows are drawn, bounded and averaged by `attention/sample.py`.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from identikit.attention.certainty import value_sizes
from identikit.attention.estimate import Mean, RowSample, mean_over_rows, share_of_rows
from identikit.attention.quantities import membership
from identikit.attention.result import EffectiveAttention
from identikit.attention.sample import sample_rows
from identikit.attention.yardstick import shuffled_rows
from identikit.explanation.causes import causes
from identikit.explanation.result import Explanation
from identikit.maths.polytope.exact import compile_solver
from identikit.progress import Progress
from identikit.shapes import Bool, Float, Tensor

SECONDS = 20.0  # how long `explain` may take
EDGES_NAMED = 5  # how many edges a list names, each of another head
VISIBLE = 1e-3  # intervals narrower than this, and weights outside one by less, look the same with three digits
SINK = 0.3  # a layer's mean weight on one token above which the token is a sink: no content word gets that much
SEED = 0
_TRIED = 4  # tokens whose rows tell how long the reachable dimensions of all take
_EVEN = 2.0  # a sink also gets this many times what equal weights would give it, which in a short text is a lot


Answer = TypeVar("Answer")


class Limit(NamedTuple):
    """How long a call may take, and when it started, on the monotonic clock; None: as long as it takes."""

    seconds: float | None
    started: float

    def passed(self, share: float) -> bool:
        """Tell whether this share of the time has passed."""
        return self.seconds is not None and time.monotonic() - self.started > share * self.seconds

    def allows(self, seconds: float) -> bool:
        """Tell whether there is time for something that others wait for: a quarter of what is left, or a second."""
        return seconds <= max(1.0, self.left() / 4)

    def earlier(self, seconds: float) -> "Limit":
        """Return the limit that keeps so many seconds free for what comes later."""
        return self._replace(started=self.started - seconds)

    def without(self, work: Callable[[], Answer]) -> tuple[Answer, "Limit"]:
        """Do something that does not count, and return what it gave with the limit that holds from then on."""
        begun = time.monotonic()
        answer = work()
        return answer, self._replace(started=self.started + time.monotonic() - begun)

    def left(self) -> float:
        """Return the seconds that are left; what comes last may take half of all beyond them, so it is not left out."""
        if self.seconds is None:
            return math.inf
        left = self.started + self.seconds - time.monotonic()
        return max(left, min(0.5 * self.seconds, left + 0.5 * self.seconds), 0.0)


def attention_facts(
    attention: EffectiveAttention, limit: Limit, progress: Progress
) -> tuple[dict[str, Tensor], dict[str, Any], RowSample]:
    """Return the arrays by layer and the other facts on attention, and the bounded rows that all of them rest on."""
    special = [place for place, is_special in enumerate(attention.about["special"]) if is_special]
    tokens = candidates(attention)
    groups = [special or [0], *tokens.values()]
    raw, effective, even = group_mass(attention, membership(groups, len(attention.tokens)))
    sunk = is_sink(raw, even)
    bounded = [0, *sunk[:, 1:].any(0).nonzero()[:, 0].add(1).tolist()]
    beside = _beside_intervals(attention)
    beside["reachable_dim"] = _reachable(attention, limit)
    facts = _free_facts(attention)
    _, limit = limit.without(lambda: compile_solver(attention.captured().layers[0].heads.device))
    seconds = None if limit.seconds is None else limit.left()  # what all else has left of it
    sample = sample_rows(attention, [groups[group] for group in bounded], seconds=seconds, seed=SEED, progress=progress)
    ends = {group: group_bounds(sample, at, raw[:, group]) for at, group in enumerate(bounded)}
    sinks = []
    for group in bounded[1:]:
        sizes = [value_sizes(layer, [groups[group]]).nanmean() for layer in attention.captured().layers]
        sinks.append(
            {
                "token": [*tokens][group - 1],
                "keys": groups[group],
                "layers": _numbers(attention, sunk[:, group]),
                "value_size": [float(size) for size in sizes],
                "raw": raw[:, group].tolist(),
                "effective": effective[:, group].tolist(),
                "lower": ends[group][0].ends()[0].tolist(),
                "upper": ends[group][1].ends()[1].tolist(),
            }
        )
    mass, strongest = _certainty(attention, sample)
    arrays = {"special_raw": raw[:, 0], "special_effective": effective[:, 0], **beside}
    estimates = {"certain_mass": mass, "strongest_certain": strongest}
    estimates |= dict(zip(("special_lower", "special_upper"), ends[0], strict=True))
    for name, estimate in estimates.items():
        arrays |= {name: estimate.mean, f"{name}_stderr": estimate.stderr}
        arrays |= {f"{name}_least": estimate.ends()[0], f"{name}_most": estimate.ends()[1]}
    facts |= {
        "certain": _overall(sample, mass, strongest) | {"seconds": limit.seconds},
        "shuffled": shuffled_rows(attention, sample, seed=SEED),
        "group": "special tokens" if special else "first token",
        "sinks": sinks,
        "least_certain": _at_layers(attention, least_certain(sample)),
        "outside": _at_layers(attention, outside(sample, attention.pearson("head"))),
    }
    return {name: arrays[name].cpu().double() for name in Explanation.main}, facts, sample


def _free_facts(attention: EffectiveAttention) -> dict[str, Any]:
    """Return why rows are free, what a learned sink takes, and where ranks are not sure."""
    return {
        "causes": causes(attention),
        "learned_sink": attention.sink.double().mean((1, 2)).tolist(),
        "unsure": (~attention.rank_is_sure).double().mean((1, 2)).tolist(),
        "rounded_duplicates": attention.rounded_duplicates.tolist(),
        "shared_outputs": _numbers(attention, (attention.joint_null_dim > attention.null_dim.sum(1)).any(1)),
    }


def _numbers(attention: EffectiveAttention, marked: Bool[Tensor, "layer"]) -> list[int]:
    """Return the numbers of the marked layers; a model may have layers without attention between them."""
    return [attention.layers[place] for place in marked.nonzero()[:, 0].tolist()]


def _at_layers(attention: EffectiveAttention, edges: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [edge | {"layer": attention.layers[edge["layer"]]} for edge in edges]


def _certainty(attention: EffectiveAttention, sample: RowSample) -> tuple[Mean, Mean]:
    """Return the determined share, and in what share of rows the strongest edge is; a learned sink's weight is not."""
    fixed = (attention.null_dim == 0).cpu()
    kept = ((1 - attention.sink.double().cpu()) * fixed).sum((1, 2)) / fixed.sum((1, 2)).clamp(min=1)
    mass = mean_over_rows(sample, sample.bounded.lower.sum(-1).clamp(max=1.0), kept.tolist())
    return mass, share_of_rows(sample, sample.bounded.strongest)


def _beside_intervals(attention: EffectiveAttention) -> dict[str, Float[Tensor, "layer"]]:
    null = attention.null_dim.double()
    return {
        "least_null_dim": null.amin((1, 2)),
        "greatest_null_dim": null.amax((1, 2)),
        "identifiable": (null == 0).double().mean((1, 2)),
        "pearson": attention.pearson("layer"),
    }


def _reachable(attention: EffectiveAttention, limit: Limit) -> Float[Tensor, "layer"]:
    """Return the mean reachable dimension of each layer; NaN where there is no time for it, tried on a few rows."""
    layers = attention.captured().layers
    _ = layers[0].polytope_dim  # solved once, for all rows
    begun = time.monotonic()
    some = attention.axis("query").values[-_TRIED:]
    _ = attention.sel(layer=list(attention.layers[:1]), query=list(some)).reachable_dim
    share = len(some) / (len(layers) * len(attention.tokens))
    if not limit.allows((time.monotonic() - begun) / share):
        return torch.full((len(layers),), torch.nan, dtype=torch.float64)
    return attention.reachable_dim.double().mean((1, 2))


def _overall(sample: RowSample, mass: Mean, strongest: Mean) -> dict[str, Any]:
    """Return how much is determined overall, with standard errors, and how many rows that was read from."""
    facts: dict[str, Any] = {}
    for name, mean in (("mass", mass.overall()), ("strongest", strongest.overall())):
        facts |= dict(zip((name, f"{name}_stderr"), known_numbers([float(mean.mean), float(mean.stderr)]), strict=True))
        facts[f"{name}_range"] = [float(end) for end in mean.ends()]
    return {
        **facts,
        "free_by_layer": sample.free.tolist(),
        "bounded_by_layer": mass.rows.tolist(),
        "rows": sample.rows * len(sample.free),
        "free_rows": int(sample.free.sum()),
        "bounded_rows": len(sample.bounded.places),
        "bounded_edges": int(sample.bounded.seen.sum()),
    }


def known_numbers(numbers: Sequence[float]) -> list[float | None]:
    """Return numbers with None in place of NaN, as JSON holds them."""
    return [None if number != number else number for number in numbers]


# Sinks


def candidates(attention: EffectiveAttention) -> dict[str, list[int]]:
    """Return the tokens that may be sinks, with their positions: each kind of special token, and the first token."""
    keys = attention.axes[-1]
    kinds: dict[str, list[int]] = {}
    for place, is_special in enumerate(attention.about["special"]):
        if is_special:
            kinds.setdefault(attention.tokens[place], []).append(place)
    named = {keys.name_of(places[0]) if len(places) == 1 else token: places for token, places in kinds.items()}
    return named if attention.about["special"][0] else {keys.name_of(0): [0], **named}


def group_mass(
    attention: EffectiveAttention, groups: Float[Tensor, "group key"]
) -> tuple[Float[Tensor, "layer group"], Float[Tensor, "layer group"], Float[Tensor, "layer group"]]:
    """Return the mean weight of all rows of each layer on groups of keys: raw, effective, and with equal weights."""
    received = torch.stack([layer.received.cpu() for layer in attention.captured().layers], dim=1)
    raw, effective, even = received @ groups.mT
    return raw, effective, even


def is_sink(raw: Float[Tensor, "*layers"], even: Float[Tensor, "*layers"]) -> Bool[Tensor, "*layers"]:
    """Tell where a token's mean attention makes it a sink, given what it would get with equal weights."""
    return (raw > SINK) & (raw > _EVEN * even)


# What bounded rows say


def group_bounds(sample: RowSample, group: int, raw: Float[Tensor, "layer"]) -> tuple[Mean, Mean]:
    """Return the least and the greatest mean weight that each layer's rows can give to a group of keys.

    `raw` is the mean over all rows. How far below and above it the ends are is what is estimated from the rows that
    were bounded, so the ends always enclose it.
    """
    weight, lower, upper = sample.bounded.groups[:, :, group].unbind(1)
    below = mean_over_rows(sample, weight - lower, 0.0)
    above = mean_over_rows(sample, upper - weight, 0.0)
    least, most = (raw - below.most).clamp(min=0), (raw - below.least).clamp(min=0)
    lower = below._replace(mean=(raw - below.mean).clamp(min=0), least=least, most=most)
    least, most = (raw + above.least).clamp(max=1), (raw + above.most).clamp(max=1)
    return lower, above._replace(mean=(raw + above.mean).clamp(max=1), least=least, most=most)


def least_certain(sample: RowSample) -> list[dict[str, Any]]:
    """Return the edges with the widest intervals, one per head."""
    return _largest(sample, sample.bounded.upper - sample.bounded.lower)


def outside(sample: RowSample, pearson: Float[Tensor, "layer head"]) -> list[dict[str, Any]]:
    """Return the edges whose effective weight is farthest outside the interval, one per head.

    A head whose raw and effective attention correlate at 1.00 is left out.
    """
    rows = sample.bounded
    beyond = torch.maximum(rows.lower - rows.effective, rows.effective - rows.upper)
    alike = ~(pearson.cpu() < 0.995)[rows.places[:, 0], rows.places[:, 1]]
    return _largest(sample, beyond.masked_fill(alike[:, None], 0.0))


def _largest(sample: RowSample, sizes: Float[Tensor, "row key"]) -> list[dict[str, Any]]:
    rows = sample.bounded
    edges: dict[tuple[int, int], dict[str, Any]] = {}
    largest, keys = sizes.max(1)
    for row in largest.argsort(descending=True, stable=True).tolist():
        if float(largest[row]) < VISIBLE or len(edges) == EDGES_NAMED:
            break
        layer, head, query = rows.places[row].tolist()
        key = int(keys[row])
        edge = {"layer": layer, "head": head, "query": query, "key": key, "raw": float(rows.attention[row, key])}
        edge |= {name: float(getattr(rows, name)[row, key]) for name in ("effective", "lower", "upper")}
        edges.setdefault((layer, head), edge)
    return list(edges.values())
