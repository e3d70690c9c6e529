"""Another attention with the same output, put into the model to see that nothing changes."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from identikit.attention.effective import Options, Row, attend
from identikit.attention.result import AlternativeAttention, EffectiveAttention
from identikit.checks import known, shortened
from identikit.errors import InputError
from identikit.maths.polytope import one_row as polytope
from identikit.models.model import Model, checked_model
from identikit.models.reading import readings
from identikit.models.surroundings import undisturbed
from identikit.models.taps.tap import AttentionCall
from identikit.results.axis import Axis, Index, one_of
from identikit.results.result import Held
from identikit.shapes import Float, Tensor
from identikit.texts.text import is_several

SAME = 1e-9  # weights that differ by less are the same
ENDS = ("farther", "lower", "upper")


@undisturbed()
def alternative_attention(
    model: Model,
    text: Any,
    *,
    layer: Index,
    head: Index,
    query: Index,
    toward: Index = None,
    end: str = "farther",
    direction: Tensor | None = None,
    truncate: bool = False,
) -> AlternativeAttention:
    """Find another attention row with the same output (section 3.3), put it into the model, and measure what changes.

    The row goes as far as it can: it takes the weight of the key `toward` (or of several keys together) to an `end` of
    its interval, "lower", "upper" or the "farther" one; by default, the weight of the key that can move most. With a
    `direction` (a number for each key, projected onto the null space of [T, 1]) it goes that way until a weight reaches
    zero.
    """
    if is_several(text):
        raise InputError("alternative_attention reads one text at a time: pass a text, a pair or token ids.")
    model = checked_model(model)
    (own,) = model.attending(one_of("layer", layer, model.n_layers))
    which = own, one_of("head", head, model.n_heads)
    (reading,) = readings(model, text, layers=which[:1], truncate=truncate)
    captured = attend(reading, Options(), layers=which[:1], heads=which[1:]).sel(layer=which[0], head=which[1])
    captured = captured.sel(query=query)
    if not captured._axis("query").single:
        raise InputError(f"query={shortened(query)}: expected one position or token.")
    return alternative_of(captured, toward=toward, end=end, direction=direction)


@undisturbed()
def alternative_of(
    attention: EffectiveAttention, *, toward: Index = None, end: str = "farther", direction: Tensor | None = None
) -> AlternativeAttention:
    """Do the same for the one selected row of attention that was captured; see `alternative_attention`."""
    source: Any = attention.source
    layer, head, query = (attention._axis(name).places[0] for name in ("layer", "head", "query"))
    which = attention._axis("layer").values[0], attention._axis("head").values[0]
    row = source.row(layer, head, query)
    known("end", end, ENDS)
    if direction is None:
        other = _at_end(row, attention._axis("key"), toward, end)
    elif toward is not None or end != ENDS[0]:
        raise InputError("alternative_attention takes toward= (and end=) or direction=, not both.")
    else:
        other = _along(row, direction)
    moved = other - row.attention
    step = float(moved[: len(row.keys)].norm())
    missed = source.parts[layer].missed_by(moved, row, head, query)
    change = source.reading.changed_by(lambda call: _replaced(call, which, query, row, other))
    arrays = {"raw": row.attention, "attention": other, "direction": moved / step if step else moved}
    arrays = {name: row.over_all_keys(array)[None, None, None] for name, array in arrays.items()}
    axes = tuple(Axis(axis.name, axis.values, axis.tokens, single=axis.single) for axis in attention.axes)
    asked = None if toward is None else list(attention._axis("key").sel(toward).values)
    settings = {"query": query, "toward": asked if direction is None else "direction", "end": end}
    return AlternativeAttention(
        axes,
        Held(arrays, dict.fromkeys(arrays, ("layer", "head", "query", "key"))),
        replace(attention.provenance, settings=attention.provenance.settings | settings),
        {**attention.about, "step": step, "output_change": list(change), "toward": asked, "row_residual": missed},
    )


def _at_end(row: Row, keys: Axis, toward: Index, end: str) -> Float[Tensor, "weighed"]:
    """Return the attention that takes the weight of some keys, or of the key that can move most, to an end."""
    wanted = _wanted(row, keys, toward)
    ends = polytope.witnesses(row.attention, row.values, wanted)
    if end != ENDS[0]:
        return ends[ENDS.index(end) - 1]
    other = max(ends, key=lambda end: float((end - row.attention)[wanted].sum().abs()))
    if abs(float((other - row.attention)[wanted].sum())) < SAME:
        if toward is not None and _width(row) >= SAME:
            raise InputError(
                f"toward={shortened(toward)}: the output fixes this weight at "
                f"{float(row.attention[wanted].sum()):.3g}, though others can move. Choose another key, or "
                "leave toward= out."
            )
        raise InputError(
            "Looking for another attention: only the row's own attention gives this output (keys that it sees: "
            f"{len(row.keys)}). Choose a query that sees more keys, or another head."
        )
    return other


def _wanted(row: Row, keys: Axis, toward: Index) -> list[int]:
    """Return where some keys stand in a row; by default, the key whose weight can move most."""
    if toward is None:
        ends = polytope.intervals(row.attention, row.values)
        room = torch.maximum(ends.upper - row.attention, row.attention - ends.lower)
        return [int(room[: len(row.keys)].argmax())]
    positions = torch.tensor(keys.sel(toward).values, device=row.keys.device)
    wanted = torch.isin(row.keys, positions).nonzero()[:, 0].tolist()
    if not wanted:
        raise InputError(f"toward={shortened(toward)}: the query does not see this key (it is masked).")
    return wanted


def _width(row: Row) -> float:
    """Return the width of the widest interval of a row."""
    ends = polytope.intervals(row.attention, row.values)
    return float((ends.upper - ends.lower)[: len(row.keys)].max())


def _along(row: Row, direction: Tensor) -> Float[Tensor, "weighed"]:
    fitting = isinstance(direction, Tensor) and direction.shape == (row.n,) and direction.dtype != torch.bool
    if not fitting or direction.is_complex() or not direction.isfinite().all():
        raise InputError(
            f"direction={shortened(direction)} cannot be used: expected a tensor with a finite number for each of the "
            f"{row.n} keys."
        )
    along = F.pad(direction.to(row.attention)[row.keys], (0, len(row.attention) - len(row.keys)))
    return polytope.alternative(row.attention, row.values, direction=along).attention


def _replaced(
    call: AttentionCall, which: tuple[int, int], query: int, row: Row, attention: Float[Tensor, "weighed"]
) -> Tensor | None:
    """Return a layer's head output with one row of attention replaced; None for the other layers."""
    layer, head = which
    if call.layer != layer:
        return None
    output = call.output.clone()
    values = call.value[0, head // call.groups, row.keys].double()
    output[0, head, query] = (attention[: len(values)].double() @ values).to(output)
    return output
