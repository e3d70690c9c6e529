"""How far each weight could go while the head's output stays the same."""

import time
from typing import Any

import torch

from identikit.attention.effective import Options, Row, attend
from identikit.attention.result import AttentionIntervals, EffectiveAttention
from identikit.errors import InputError
from identikit.indexing import Index, chosen, known
from identikit.maths import intervals as polytope
from identikit.models.model import Model, checked_model
from identikit.models.reading import readings
from identikit.progress import Progress, silent
from identikit.result import Held
from identikit.shapes import Float, Tensor
from identikit.text import is_several

LONGEST_SECONDS = 600.0  # intervals predicted to take longer are refused unless a limit is given
_ROWS = ("layer", "head", "query")
_DIMS = {**dict.fromkeys(("raw", "lower", "upper", "gap"), (*_ROWS, "key")), "certain_mass": _ROWS}


def attention_intervals(
    model: Model,
    text: Any,
    *,
    layer: Index = None,
    head: Index = None,
    query: Index = None,
    key: Index = None,
    method: str = "auto",
    seconds: float | int | None = None,
    truncate: bool = False,
    progress: Progress = silent,
) -> Any:
    """Find the least and greatest weight that each edge can have while the head's output stays the same.

    The range is over all attention rows: weights of at least 0 that sum to 1. `layer`, `head`, `query` and `key` select
    what is bounded; None is all. One text gives one Result, a list of texts a list. Without `seconds`, a request that
    would take more than ten minutes is refused; with it, what is not done in time keeps the bounds 0 and 1 and a `gap`
    of NaN.
    """
    known("method", method, ("auto", "exact"))
    _checked_seconds(seconds)
    model = checked_model(model)
    layers, heads = chosen("layer", layer, model.n_layers), chosen("head", head, model.n_heads)
    found = []
    for reading in readings(model, text, layers=layers, truncate=truncate):
        captured = attend(reading, Options(), layers=layers, heads=heads).sel(layer=layer, head=head, query=query)
        found.append(intervals_of(captured, key=key, seconds=seconds, progress=progress))
    return found if is_several(text) else found[0]


def intervals_of(
    attention: EffectiveAttention, *, key: Index = None, seconds: float | int | None = None, progress: Progress = silent
) -> AttentionIntervals:
    """Bound the selected rows of attention that was captured; see `attention_intervals`."""
    _checked_seconds(seconds)
    source: Any = attention.source
    layers, heads, queries = (attention._axis(name).places for name in _ROWS)
    keys = attention._axis("key").sel(key)
    rows = [(i, h, q) for i in layers for h in heads for q in queries]
    if seconds is None:
        _refuse_long(attention, len(rows), len(keys))
    started, found = time.monotonic(), []
    for done, place in enumerate(rows, start=1):
        row = source.row(*place)
        late = seconds is not None and time.monotonic() - started > seconds
        found.append(_unbounded(row) if late else _bounded(row, keys.places))
        progress("attention intervals, rows", done, len(rows))
    shape = len(layers), len(heads), len(queries)
    raw, lower, upper, gap = (torch.stack(part).unflatten(0, shape) for part in zip(*found, strict=True))
    places = list(keys.places)
    arrays = {"raw": raw, "lower": lower, "upper": upper, "gap": gap}
    arrays = {name: array[..., places] for name, array in arrays.items()} | {"certain_mass": lower.sum(-1)}
    if len(keys) < len(attention.tokens):
        del arrays["certain_mass"]  # the sum over some keys is not a row's certain mass
    axes = tuple(axis if axis.name != "key" else keys for axis in attention.axes)
    axes = tuple(type(axis)(axis.name, axis.values, axis.tokens, single=axis.single) for axis in axes)
    about = {**attention.about, "method": "exact"}
    dims = {name: _DIMS[name] for name in arrays}
    return AttentionIntervals(axes, Held(arrays, dims), attention.provenance, about)


def _bounded(row: Row, keys: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return raw weight, lower and upper end and gap over all keys; keys that are not asked for keep 0 and 1."""
    raw, lower, upper, gap = _unbounded(row)
    asked = torch.isin(row.keys, torch.tensor(keys, device=row.keys.device)).nonzero()[:, 0]
    if len(asked):
        found = polytope.intervals(row.attention, row.values, keys=asked.tolist())
        at = row.keys[asked]
        lower[at], upper[at], gap[at] = found.lower.to(lower), found.upper.to(upper), 0.0
    return raw, lower, upper, gap


def _unbounded(row: Row) -> tuple[Float[Tensor, "key"], ...]:
    """Return what is known of a row without solving anything: weights are from 0 to 1, and 0 on invisible keys."""
    upper = row.over_all_keys(torch.ones_like(row.attention))
    gap = torch.where(upper > 0, torch.nan, 0.0)
    return row.over_all_keys(row.attention), torch.zeros_like(upper), upper, gap


def _refuse_long(attention: EffectiveAttention, rows: int, keys: int) -> None:
    source: Any = attention.source
    part = source.parts[0]
    visible = int(part.factors.visible.count.max())
    expected = polytope.predicted_seconds(rows, visible, part.plain.values.shape[-1]) * min(1.0, keys / visible)
    if expected > LONGEST_SECONDS:
        raise InputError(
            f"Intervals of {rows:,} rows of {len(attention.tokens)} tokens would take about {expected / 60:.0f} "
            "minutes. Select some rows (layer=, head=, query=) or edges (key=), or set a limit with seconds=."
        )


def _checked_seconds(seconds: float | int | None) -> None:
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0):
        raise InputError(f"seconds={seconds!r} cannot be used: expected a positive number, or None for no limit.")
