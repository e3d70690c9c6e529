"""How far each weight could go while the head's output stays the same."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from identikit.attention.effective import Options, attend
from identikit.attention.groups import key_groups
from identikit.attention.result import AttentionIntervals, EffectiveAttention
from identikit.checks import function, known, real_number
from identikit.errors import InputError
from identikit.maths.polytope.ascent import certified_bounds
from identikit.maths.polytope.exact import exact_bounds
from identikit.maths.polytope.rows import Bounds, Rows, ordered, unbounded
from identikit.models.model import Model, checked_model
from identikit.models.reading import readings
from identikit.models.surroundings import undisturbed
from identikit.progress import Progress, silent
from identikit.results.axis import Axis, Index, chosen
from identikit.results.result import Held
from identikit.shapes import Float, Tensor
from identikit.texts.text import is_several, of_texts

LONGEST_SECONDS = 600.0  # intervals that would take longer are refused unless a limit is given
TOP = 5  # of how many of the strongest edges the order is found
_FIRST = {"cpu": 8, "cuda": 1024}  # rows in the first batch; later ones grow
_LONGEST_BATCH = 10.0  # seconds between looks at the clock, about
_WARM_UP = 4  # rows that are solved before the clock starts
_ROWS = ("layer", "head", "query")


@dataclass(frozen=True)
class Bounding:
    """How intervals are found; see `attention_intervals`."""

    method: str = "auto"
    epsilon: float = 0.0
    seconds: float | int | None = None

    def __post_init__(self) -> None:
        known("method", self.method, ("auto", "exact", "certified"))
        seconds = None if self.seconds is None else real_number("seconds", self.seconds, above=0, most=math.inf)
        vars(self).update(epsilon=real_number("epsilon", self.epsilon, least=0, below=1), seconds=seconds)
        if self.epsilon and self.method == "exact":
            raise InputError(
                "method='exact' cannot be used with epsilon=: where the output may move, ends are certified, with a "
                "gap. Use method='certified' or 'auto'."
            )


@of_texts
@undisturbed()
def attention_intervals(
    model: Model,
    text: Any,
    *,
    layer: Index = None,
    head: Index = None,
    query: Index = None,
    key: Index = None,
    groups: Any = None,
    method: str = "auto",
    epsilon: float = 0.0,
    seconds: float | int | None = None,
    truncate: bool = False,
    progress: Progress = silent,
) -> AttentionIntervals | list[AttentionIntervals]:
    """Find the least and greatest weight that each edge can have while the head's output stays the same.

    The range is over all attention rows: weights of at least 0 that sum to 1, or to at most 1 where a learned sink
    takes the rest. One text gives an `AttentionIntervals`, a list of texts a list.

    - `layer`, `head`, `query`, `key`: what is bounded; None is all
    - `groups`: bound what groups of keys receive together instead, one program per row and end: a mapping from names to
      keys, or some of "special", "first", "words" and "sentences"
    - `method`: "exact" finds the sharp ends; "certified" finds valid bounds faster in long texts, with their `gap`;
      "auto" is exact, and certified with `epsilon`
    - `epsilon`: let the head's output move by this share of its norm
    - `seconds`: stop after this time: what is not done keeps the bounds 0 and 1 and a `gap` of NaN. Without it, a
      request that would take more than ten minutes is refused
    """
    bounding, progress = Bounding(method, epsilon, seconds), function("progress", progress)
    model = checked_model(model)
    layers, heads = model.attending(layer), chosen("head", head, model.n_heads)
    found = []
    for reading in readings(model, text, layers=layers, truncate=truncate):
        captured = attend(reading, Options(), layers=layers, heads=heads).sel(layer=layer, head=head, query=query)
        found.append(intervals_of(captured, key=key, groups=groups, bounding=bounding, progress=progress))
    return found if is_several(text) else found[0]


@undisturbed()
def intervals_of(
    attention: EffectiveAttention,
    *,
    key: Index = None,
    groups: Any = None,
    bounding: Bounding = Bounding(),  # noqa: B008
    progress: Progress = silent,
) -> AttentionIntervals:
    """Bound the selected rows of attention that was captured; see `attention_intervals`."""
    if key is not None and groups is not None:
        raise InputError("attention_intervals takes key= or groups=, not both.")
    layers, heads, queries = (attention._axis(name).places for name in _ROWS)
    places = [(i, h, q) for i in layers for h in heads for q in queries]
    members = {} if groups is None else key_groups(attention, groups)
    last = Axis("group", tuple(members)) if members else attention._axis("key").sel(key)
    objectives = membership(list(members.values()), len(attention.tokens)) if members else None
    every = not members and len(last) == len(attention.tokens)
    asked = None if every or members else last.places

    def bounded(bounding: Bounding) -> tuple[Rows, Bounds]:
        return bounds_of(attention, places, keys=asked, objectives=objectives, bounding=bounding, progress=progress)

    started = time.monotonic()
    rows, found = bounded(bounding)
    raw = rows.attention if objectives is None else rows.attention @ objectives.to(rows.attention).mT
    edges = {"raw": raw, "lower": found.lower, "upper": found.upper, "gap": found.gap}
    rounding = _rounding(attention)
    if rounding and not bounding.epsilon:
        left = math.inf if bounding.seconds is None else max(started + bounding.seconds - time.monotonic(), 1e-9)
        _, wide = bounded(Bounding("certified", rounding, left))
        edges |= {"rounded_lower": wide.lower, "rounded_upper": wide.upper}
    of_rows = {"certain_mass": found.lower.sum(-1), "certain_order": found.order} if every else {}
    arrays = {name: array[:, list(last.places)] for name, array in edges.items()} | of_rows
    dims = {name: _ROWS if name in of_rows else (*_ROWS, last.name) for name in arrays}
    shape = len(layers), len(heads), len(queries)
    arrays = {name: array.unflatten(0, shape) for name, array in arrays.items()}
    axes = (*(attention._axis(name) for name in _ROWS), last)
    axes = tuple(Axis(axis.name, axis.values, axis.tokens, single=axis.single) for axis in axes)
    about = {**attention.about, "method": _method(bounding), "epsilon": bounding.epsilon, "rounding": rounding}
    about |= {"row_residual": float(attention.row_residual.max())} | ({"groups": members} if members else {})
    return AttentionIntervals(axes, Held(arrays, dims), attention.provenance, about)


def bounds_of(
    attention: EffectiveAttention,
    places: Sequence[tuple[int, int, int]],
    *,
    keys: Sequence[int] | None = None,
    objectives: Float[Tensor, "quantity key"] | None = None,
    bounding: Bounding = Bounding(),  # noqa: B008
    progress: Progress = silent,
) -> tuple[Rows, Bounds]:
    """Bound rows anywhere in captured attention: places of layer, head and query, with all rows of a head together.

    Returns the rows, and the ends of all keys (only `keys`, if given, are bounded), or of the `objectives`.
    """
    source: Any = attention.source
    rows: Rows = source.rows(places)
    n = len(attention.tokens)
    if bounding.epsilon:
        rows = rows._replace(free=rows.visible.sum(-1) > 1)  # the output may move, so every such row can
    if objectives is not None:
        objectives = F.pad(objectives, (0, rows.attention.shape[1] - n)).to(rows.attention)
    found = unbounded(rows, objectives)
    free = rows.free.nonzero()[:, 0]
    batch = _FIRST[free.device.type]
    if len(free) > batch:
        _solved(rows.some(free[:_WARM_UP]), n, objectives, keys, bounding, math.inf)  # compiling does not count
    started, done = time.monotonic(), 0
    limit = math.inf if bounding.seconds is None else started + bounding.seconds
    while done < len(free) and batch and time.monotonic() < limit:
        begun, chosen = time.monotonic(), free[done : done + batch]
        ends = _solved(rows.some(chosen), n, objectives, keys, bounding, limit)
        for part, end in zip(found, ends, strict=True):
            part[chosen] = end.to(part)
        done += len(chosen)
        now = time.monotonic()
        expected = (now - started) / done * len(free)
        if bounding.seconds is None and expected > LONGEST_SECONDS:
            raise InputError(
                f"Intervals of {len(free):,} rows of {len(attention.tokens)} tokens would take about "
                f"{expected / 60:.0f} minutes. Select some rows (layer=, head=, query=), or set a limit with seconds=."
            )
        rate = len(chosen) / max(now - begun, 1e-6)
        batch = int(min(2 * batch, rate * _LONGEST_BATCH + 1, rate * (limit - now)))
        progress("attention intervals, rows", int(chosen[-1]) + 1, len(places))
    progress("attention intervals, rows", len(places), len(places))
    found.lower.abs_()  # -0.0 is 0
    rows, found = _of_tokens(rows, found, n if objectives is None else len(objectives), n)
    return rows, found._replace(order=found.order.minimum(rows.visible.sum(-1)).clamp(max=TOP))


def _of_tokens(rows: Rows, found: Bounds, quantities: int, n: int) -> tuple[Rows, Bounds]:
    """Return rows and ends of the n tokens, without the column of a learned sink."""
    cut = rows._replace(attention=rows.attention[:, :n], visible=rows.visible[:, :n])
    lower, upper, gap = (part[:, :quantities] for part in found[:3])
    return cut, Bounds(lower, upper, gap, found.order)


def _solved(
    rows: Rows,
    n: int,
    objectives: Float[Tensor, "quantity key"] | None,
    keys: Sequence[int] | None,
    bounding: Bounding,
    limit: float,
) -> Bounds:
    """Bound these rows of n tokens as was chosen; certified ends stop at the limit of the monotonic clock."""
    if _method(bounding) == "exact":
        tokens = range(n) if keys is None and rows.attention.shape[1] > n else keys  # a learned sink is not an edge
        return exact_bounds(rows, objectives, keys=tokens, top=TOP if keys is None and objectives is None else 0)
    asked = objectives
    if objectives is None and keys is not None:
        asked = membership([[key] for key in keys], rows.attention.shape[1]).to(rows.attention)
    found = certified_bounds(rows, asked, epsilon=bounding.epsilon, deadline=lambda: time.monotonic() > limit)
    if objectives is None and keys is None:
        return found._replace(order=ordered(*_of_tokens(rows, found, n, n), TOP).order)
    if objectives is None:
        every, places = unbounded(rows), list(keys or ())
        for part, end in zip(every[:3], found[:3], strict=True):
            part[:, places] = end
        return every
    return found


def membership(groups: Sequence[Sequence[int]], n: int) -> Float[Tensor, "group key"]:
    """Return which of n keys belong to each group: 1 or 0."""
    found = torch.zeros(len(groups), n, dtype=torch.float64)
    for at, places in enumerate(groups):
        found[at, list(places)] = 1.0
    return found


def _method(bounding: Bounding) -> str:
    """Return how ends are found: the set is a polytope, whose ends are exact, unless the output may move."""
    if bounding.method != "auto":
        return bounding.method
    return "certified" if bounding.epsilon else "exact"


def _rounding(attention: EffectiveAttention) -> float:
    """Return by which share of its norm rounding may move the output of a model in half precision; 0 in others."""
    source: Any = attention.source
    dtype = source.parts[0].call.value.dtype
    return torch.finfo(dtype).eps if dtype in (torch.bfloat16, torch.float16) else 0.0
