"""How far each weight could go while the head's output stays the same."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

from identikit.attention.captured import Captured, RowIndex, capture
from identikit.attention.effective import attention_of
from identikit.attention.interval_result import AttentionIntervals
from identikit.attention.proofs import Provable, edge_claims
from identikit.attention.quantities import TOP, membership, requested_quantities
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
_TIMED_ROWS = 31  # rows to solve before the total time is estimated: the first may wait for other work on the machine
_ROW_AXES = ("layer", "head", "query")


@dataclass(frozen=True)
class Bounding:
    """How intervals are found; see `attention_intervals`.

    Bounding stops at `until`, on the monotonic clock. None: there is no limit, and a request that would take long is
    refused.
    """

    method: str = "exact"
    epsilon: float = 0.0
    until: float | None = None

    @classmethod
    def checked(cls, seconds: float | int | None, method: str = "exact", epsilon: float = 0.0) -> "Bounding":
        """Check the options for finding intervals; a time limit counts from now.

        "auto" is exact, unless the output may move: then the set of alternatives is not a polytope.
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
        """Return a copy with one text's share of the remaining time, if this many texts are left."""
        if self.until is None:
            return self
        now = time.monotonic()
        return replace(self, until=now + (self.until - now) / texts)


def checked_seconds(seconds: float | int | None) -> float | None:
    """Return a time limit in seconds; None: there is none."""
    return None if seconds is None else real_number("seconds", seconds, above=0, most=math.inf)


EXACTLY = Bounding(until=math.inf)
"""No time limit, for callers that have chosen how many rows to bound; repeated calls return identical bits."""


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
    text_runs = run_texts(model, text, layers=layers, truncate=truncate)
    for text_run in text_runs:
        attention = attention_of(capture(text_run, layers=layers, heads=heads))
        rows = attention.sel(layer=layer, head=head, query=query)
        share = bounding.shared(len(text_runs) - len(results))
        results.append(intervals_of(rows, key=key, groups=groups, weights=weights, bounding=share, progress=progress))
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
    """Bound the selected rows of captured attention; see `attention_intervals`."""
    captured = attention.captured("intervals()")
    last_axis, question, members = requested_quantities(attention, key, groups, weights)
    axes = (*(attention.axis(name) for name in _ROW_AXES), last_axis)
    layers, heads, queries = (axis.source_indices for axis in axes[:3])
    row_indices = list(product(layers, heads, queries))
    image_keys = _image_keys(attention) if question.top else None
    with_images = question if image_keys is None else question._replace(objectives=image_keys)
    rows, bounds = bounds_of(captured, row_indices, with_images, bounding=bounding, progress=progress)
    n = len(attention.keys)
    weights_of_keys = rows.attention[:, :n]
    raw = weights_of_keys
    if question.objectives is not None:
        raw = (weights_of_keys[:, None] @ question.all_objectives(rows).mT)[:, 0]
    arrays = {"raw": raw, "lower": bounds.lower, "upper": bounds.upper, "gap": bounds.gap}
    dtype = captured.layers[0].call.value.dtype
    rounding = torch.finfo(dtype).eps if dtype in (torch.bfloat16, torch.float16) else 0.0
    if rounding and not bounding.epsilon:
        rounded = Bounding("certified", rounding, math.inf if bounding.until is None else bounding.until)
        _, wide_bounds = bounds_of(captured, row_indices, question, bounding=rounded, progress=progress)
        arrays |= {"rounded_lower": wide_bounds.lower, "rounded_upper": wide_bounds.upper}
    arrays = {name: array[:, list(last_axis.source_indices)] for name, array in arrays.items()}
    if question.top:
        arrays |= {"certain_mass": bounds.lower[:, :n].sum(-1), "certain_order": bounds.order}
    if image_keys is not None:
        arrays |= {"image_raw": weights_of_keys @ image_keys[0].to(weights_of_keys)}
        arrays |= {"image_lower": bounds.lower[:, n], "image_upper": bounds.upper[:, n]}
    dims = {name: (*_ROW_AXES, last_axis.name)[: 2 + array.ndim] for name, array in arrays.items()}
    arrays = {name: array.unflatten(0, [len(axis) for axis in axes[:3]]) for name, array in arrays.items()}
    about = {
        "method": bounding.method,
        "epsilon": bounding.epsilon,
        "rounding": rounding,
        "row_residual": captured.largest_miss(row_indices, rows),
        "unresolved": int((rows.free & ~rows.resolved[rows.group]).sum()),
    }
    about |= {"groups": members} if members else {}
    return AttentionIntervals(
        tuple(Axis(axis.name, axis.values, axis.tokens, single=axis.single) for axis in axes),
        Provable(arrays, dims, edge_claims(captured, row_indices, question, bounding.epsilon)),
        attention.provenance,
        {**attention.about, **about},
    )


def _image_keys(attention: EffectiveAttention) -> Float[Tensor, "1 key"] | None:
    """Return which keys are tokens of images, as numbers; None: there are none."""
    if not attention.about.get("images"):
        return None
    positions = [position for region in image_regions(attention).values() for position in region]
    return membership([positions], len(attention.tokens))


def bounds_of(
    captured: Captured,
    row_indices: Sequence[RowIndex],
    question: Question,
    *,
    bounding: Bounding,
    progress: Progress = silent,
) -> tuple[Rows, Bounds]:
    """Bound any rows of captured attention, given with all rows of a head together.

    Returns the rows, with a learned sink as their last key, and the bounds without it: of all keys, if the question
    has any, then of objectives.
    """
    deadline = math.inf if bounding.until is None else bounding.until
    started = time.monotonic()
    if bounding.until != math.inf:
        compile_solver(captured.layers[0].heads.device)
        compiling = time.monotonic() - started  # does not count against the limit
        started += compiling
        deadline += compiling
    rows = captured.rows(row_indices, moving=bounding.epsilon > 0)
    n = len(captured.text_run.keys)
    if bounding.epsilon:
        rows = rows._replace(free=rows.visible.sum(-1) > 1)  # the output may move, so every such row can
    sink = rows.attention.shape[1] - n  # one more key, which is not an edge
    keys = None if question.keys is None else F.pad(question.keys, (0, sink))
    objectives = None if question.objectives is None else F.pad(question.objectives, (0, sink))
    padded = Question(keys, objectives, question.top, min(deadline, question.until))
    bounds = trivial_bounds(rows, padded)
    free = rows.free.nonzero()[:, 0]
    done = 0
    repeatable = bounding.until == math.inf
    solve = exact_bounds if bounding.method == "exact" else partial(certified_bounds, epsilon=bounding.epsilon)
    for portion in portions_in_time(free, deadline, first=FIRST_PORTION[free.device.type], repeatable=repeatable):
        solved = solve(rows.select(portion), padded.select(portion))
        for array, values in zip(bounds, solved, strict=True):
            array[portion] = values.to(array)
        done += len(portion)
        elapsed = time.monotonic() - started
        if bounding.until is None and (done >= _TIMED_ROWS or elapsed > LONGEST_SECONDS / 20):
            _refuse_long(elapsed / done * len(free), len(free), n)
        progress("attention intervals, rows", int(portion[-1]) + 1, len(row_indices))
    if done == len(free):
        progress("attention intervals, rows", len(row_indices), len(row_indices))
    if sink and keys is not None:
        without_sink = [key for key in range(bounds.lower.shape[1]) if key != n]
        lower, upper, gap = (array[:, without_sink] for array in bounds[:3])
        bounds = Bounds(lower, upper, gap, bounds.order)
    bounds.lower.masked_fill_(bounds.lower == 0, 0.0)  # -0.0 is 0
    return rows, bounds._replace(order=bounds.order.minimum(rows.visible[:, :n].sum(-1)).clamp(max=TOP))


def _refuse_long(expected_seconds: float, rows: int, tokens: int) -> None:
    if expected_seconds > LONGEST_SECONDS:
        raise InputError(
            f"Intervals of {rows:,} rows of {tokens} tokens would take about {expected_seconds / 60:.0f} minutes. "
            "Select some rows (layer=, head=, query=), or set a limit with seconds=."
        )
