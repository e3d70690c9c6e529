"""How far each weight could go while the head's output stays the same."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from identikit.attention.captured import Captured, Place
from identikit.attention.effective import captured_attention
from identikit.attention.interval_result import AttentionIntervals
from identikit.attention.proofs import Provable, edge_claims
from identikit.attention.quantities import TOP, asked_of, membership
from identikit.attention.result import EffectiveAttention
from identikit.checks import function, known_name, real_number
from identikit.errors import InputError
from identikit.maths.polytope.bounds import Bounds, Question, trivial_bounds
from identikit.maths.polytope.certified import certified_bounds
from identikit.maths.polytope.exact import FIRST_PORTION, compile_solver, exact_bounds, portions_in_time
from identikit.maths.polytope.rows import Rows
from identikit.models.isolation import standard_torch_state
from identikit.models.model import Model, checked_model
from identikit.models.text_run import run_texts
from identikit.progress import Progress, Watched, reporting, silent
from identikit.results.axis import Axis, Index, selected_indices
from identikit.results.pictures import image_regions
from identikit.results.several import Results, of_texts
from identikit.shapes import Float, Tensor
from identikit.texts.text import is_text_list

LONGEST_SECONDS = 600.0  # intervals that would take longer are refused unless a limit is given
_TIMED = 31  # rows that say how long all will take: the first can wait for other work on the machine
_ROWS = ("layer", "head", "query")


@dataclass(frozen=True)
class Bounding:
    """How intervals are found; see `attention_intervals`.

    Bounding stops at `until`, on the monotonic clock. None: it does not, and is refused where it would take long.
    """

    method: str = "exact"
    epsilon: float = 0.0
    until: float | None = None

    @classmethod
    def checked(cls, seconds: float | int | None, method: str = "exact", epsilon: float = 0.0) -> "Bounding":
        """Return how intervals are to be found, for so many seconds from now, or say what cannot be used.

        By itself, "auto" is exact, unless the output may move: then the set is not a polytope.
        """
        known_name("method", method, ("auto", "exact", "certified"))
        epsilon = real_number("epsilon", epsilon, least=0, below=1)
        limit = checked_seconds(seconds)
        if epsilon and method == "exact":
            raise InputError(
                "method='exact' cannot be used with epsilon=: where the output may move, ends are certified, with a "
                "gap. Use method='certified' or 'auto'."
            )
        if method == "auto":
            method = "certified" if epsilon else "exact"
        return cls(method, epsilon, None if limit is None else time.monotonic() + limit)

    def shared(self, texts: int) -> "Bounding":
        """Return it with a text's share of the time that is left of the limit; the next so many texts share it."""
        if self.until is None:
            return self
        now = time.monotonic()
        return replace(self, until=now + (self.until - now) / texts)


def checked_seconds(seconds: float | int | None) -> float | None:
    """Return a limit of time in seconds; None: there is none."""
    return None if seconds is None else real_number("seconds", seconds, above=0, most=math.inf)


EXACTLY = Bounding(until=math.inf)
"""Without a limit, where the caller has chosen how many rows; the same call gives the same bits again."""


@of_texts
@reporting
@standard_torch_state()
def attention_intervals(
    model: Model,
    text: object,
    *,
    layer: Index = None,
    head: Index = None,
    query: Index = None,
    key: Index = None,
    groups: object = None,
    weights: object = None,
    method: str = "auto",
    epsilon: float = 0.0,
    seconds: float | int | None = None,
    truncate: bool = False,
    progress: Watched = None,
) -> AttentionIntervals | Results[AttentionIntervals]:
    """Find the least and greatest weight that each edge can have while the head's output stays the same.

    The range is over all attention rows: weights of at least 0 that sum to 1, or to at most 1 where a learned sink
    takes the rest. One text gives an `AttentionIntervals`, a list of texts a list.

    - `layer`, `head`, `query`, `key`: what is bounded; None is all
    - `groups`: bound what groups of keys receive together instead, one program per row and end: a mapping from names to
      keys, or some of "special", "first", "words", "sentences" and "images"
    - `weights`: bound $\\sum_j c_j a_j$ instead, for real numbers $c$ of your own: one for each key, or for each query
      and key; or a mapping from names to these, or to mappings from some keys to numbers, such as
      `{"her over the": {"her": 1, "the@24": -1}}`, whose range says whether one weight is always the larger one
    - `method`: "exact" finds the sharp ends (for values as far as their dtype resolves them); "certified" finds valid
      bounds faster in long texts, with their `gap`; "auto" is exact, and certified with `epsilon`
    - `epsilon`: let the head's output move by this share of its norm
    - `seconds`: stop after this time, from the start of the call and for all texts together: what is not done keeps the
      bounds 0 and 1 and a `gap` of NaN. Without it, a request that would take more than ten minutes is refused
    """
    bounding = Bounding.checked(seconds, method, epsilon)
    progress = function("progress", progress)
    model = checked_model(model)
    layers = model.select_layers(layer)
    heads = selected_indices("head", head, model.n_heads)
    results = []
    texts = run_texts(model, text, layers=layers, truncate=truncate)
    for reading in texts:
        captured = captured_attention(reading, layers=layers, heads=heads)
        selected = captured.sel(layer=layer, head=head, query=query)
        limited = bounding.shared(len(texts) - len(results))
        results.append(
            intervals_of(selected, key=key, groups=groups, weights=weights, bounding=limited, progress=progress)
        )
    return Results(results) if is_text_list(text) else results[0]


@standard_torch_state()
def intervals_of(
    attention: EffectiveAttention,
    *,
    key: Index,
    groups: object,
    weights: object = None,
    bounding: Bounding,
    progress: Progress = silent,
) -> AttentionIntervals:
    """Bound the selected rows of attention that was captured; see `attention_intervals`."""
    captured = attention.captured("intervals()")
    n = len(attention.keys)
    last, wanted, members = asked_of(attention, key, groups, weights)
    axes = (*(attention.axis(name) for name in _ROWS), last)
    layers, heads, queries = (axis.source_indices for axis in axes[:3])
    places = [(layer, head, query) for layer in layers for head in heads for query in queries]
    images = _of_images(attention) if wanted.top else None
    asked = wanted if images is None else wanted._replace(objectives=images)
    rows, bounds = bounds_of(captured, places, asked, bounding=bounding, progress=progress)
    own = rows.attention[:, :n]
    raw = own if wanted.objectives is None else (own[:, None] @ wanted.all_objectives(rows).mT)[:, 0]
    arrays = {"raw": raw, "lower": bounds.lower, "upper": bounds.upper, "gap": bounds.gap}
    rounding = _rounding(captured)
    if rounding and not bounding.epsilon:
        room = Bounding("certified", rounding, math.inf if bounding.until is None else bounding.until)
        _, wide = bounds_of(captured, places, wanted, bounding=room, progress=progress)
        arrays |= {"rounded_lower": wide.lower, "rounded_upper": wide.upper}
    arrays = {name: array[:, list(last.source_indices)] for name, array in arrays.items()}
    if wanted.top:
        arrays |= {"certain_mass": bounds.lower[:, :n].sum(-1), "certain_order": bounds.order}
    if images is not None:
        arrays |= {"image_raw": own @ images[0].to(own)}
        arrays |= {"image_lower": bounds.lower[:, n], "image_upper": bounds.upper[:, n]}
    dims = {name: (*_ROWS, last.name)[: 2 + array.ndim] for name, array in arrays.items()}
    shape = [len(axis) for axis in axes[:3]]
    whole = {name: array.unflatten(0, shape) for name, array in arrays.items()}
    held = Provable(whole, dims, edge_claims(captured, places, wanted, bounding.epsilon))
    about = {
        "method": bounding.method,
        "epsilon": bounding.epsilon,
        "rounding": rounding,
        "row_residual": captured.largest_miss(places, rows),
        "unresolved": int((rows.free & ~rows.resolved[rows.group]).sum()),
    }
    about |= {"groups": members} if members else {}
    return AttentionIntervals(
        tuple(Axis(axis.name, axis.values, axis.tokens, single=axis.single) for axis in axes),
        held,
        attention.provenance,
        {**attention.about, **about},
    )


def _of_images(attention: EffectiveAttention) -> Float[Tensor, "1 key"] | None:
    """Return which keys are tokens of images, as numbers; None: there are none."""
    if not attention.about.get("images"):
        return None
    positions = [place for places in image_regions(attention).values() for place in places]
    return membership([positions], len(attention.tokens))


def bounds_of(
    captured: Captured, places: Sequence[Place], wanted: Question, *, bounding: Bounding, progress: Progress = silent
) -> tuple[Rows, Bounds]:
    """Bound rows anywhere in captured attention: places of layer, head and query, with all rows of a head together.

    Returns the rows, with a learned sink as their last key, and the bounds of what is wanted of the text's tokens: of
    all keys, if any, then of objectives.
    """
    limit = math.inf if bounding.until is None else bounding.until
    started = time.monotonic()
    if bounding.until != math.inf:
        compile_solver(captured.layers[0].heads.device)
        compiling = time.monotonic() - started  # that does not count
        started += compiling
        limit += compiling
    rows = captured.rows(places, moving=bounding.epsilon > 0)
    n = len(captured.reading.keys)
    if bounding.epsilon:
        rows = rows._replace(free=rows.visible.sum(-1) > 1)  # the output may move, so every such row can
    sink = rows.attention.shape[1] - n  # one more key, which is not an edge
    keys = None if wanted.keys is None else F.pad(wanted.keys, (0, sink))
    objectives = None if wanted.objectives is None else F.pad(wanted.objectives, (0, sink))
    asked = Question(keys, objectives, wanted.top, min(limit, wanted.until))
    bounds = trivial_bounds(rows, asked)
    free = rows.free.nonzero()[:, 0]
    done = 0
    exact = bounding.method == "exact"
    repeatable = bounding.until == math.inf
    for some in portions_in_time(free, limit, first=FIRST_PORTION[free.device.type], repeatable=repeatable):
        portion = rows.select(some), asked.select(some)
        solved = exact_bounds(*portion) if exact else certified_bounds(*portion, epsilon=bounding.epsilon)
        for whole, part in zip(bounds, solved, strict=True):
            whole[some] = part.to(whole)
        done += len(some)
        now = time.monotonic()
        expected = (now - started) / done * len(free)
        timed = done >= _TIMED or now - started > LONGEST_SECONDS / 20
        if bounding.until is None and timed and expected > LONGEST_SECONDS:
            raise InputError(
                f"Intervals of {len(free):,} rows of {n} tokens would take about {expected / 60:.0f} minutes. Select "
                "some rows (layer=, head=, query=), or set a limit with seconds=."
            )
        progress("attention intervals, rows", int(some[-1]) + 1, len(places))
    if done == len(free):
        progress("attention intervals, rows", len(places), len(places))
    if sink and keys is not None:
        kept = [at for at in range(bounds.lower.shape[1]) if at != n]
        bounds = Bounds(bounds.lower[:, kept], bounds.upper[:, kept], bounds.gap[:, kept], bounds.order)
    bounds.lower.masked_fill_(bounds.lower == 0, 0.0)  # -0.0 is 0
    return rows, bounds._replace(order=bounds.order.minimum(rows.visible[:, :n].sum(-1)).clamp(max=TOP))


def _rounding(captured: Captured) -> float:
    """Return by which share of its norm rounding may move the output of a model in half precision; 0 in others."""
    dtype = captured.layers[0].call.value.dtype
    return torch.finfo(dtype).eps if dtype in (torch.bfloat16, torch.float16) else 0.0
