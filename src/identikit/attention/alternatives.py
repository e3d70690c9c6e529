"""Another attention with the same output, put into the model to see that nothing changes."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from identikit.attention.captured import capture
from identikit.attention.effective import attention_of
from identikit.attention.interval_result import AlternativeAttention
from identikit.attention.layer import Layer
from identikit.attention.quantities import membership
from identikit.attention.result import EffectiveAttention
from identikit.checks import known_name, shortened
from identikit.errors import IdentikitError, InputError
from identikit.maths.polytope.alternative import alternative
from identikit.maths.polytope.bounds import Question
from identikit.maths.polytope.exact import exact_bounds, extreme_rows
from identikit.maths.polytope.rows import Rows
from identikit.models.isolation import standard_torch_state
from identikit.models.model import Model, checked_model
from identikit.models.text_run import run_texts
from identikit.results.axis import Axis, Index, selected_index
from identikit.results.source import StoredArrays
from identikit.shapes import Float, Tensor
from identikit.texts.text import is_text_list

SAME = 1e-9  # weights that differ by less are the same
FARTHER = "farther"
ENDS = (FARTHER, "lower", "upper")


@standard_torch_state()
def alternative_attention(
    model: Model,
    text: object,
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
    if is_text_list(text):
        raise InputError("alternative_attention reads one text at a time: pass a text, a pair or token ids.")
    model = checked_model(model)
    layers = model.select_layers(selected_index("layer", layer, model.n_layers))
    heads = (selected_index("head", head, model.n_heads),)
    (text_run,) = run_texts(model, text, layers=layers, truncate=truncate)
    attention = attention_of(capture(text_run, layers=layers, heads=heads))
    row = attention.sel(layer=layers[0], head=heads[0], query=query)
    if not row.axis("query").single:
        raise InputError(f"query={shortened(query)}: expected one position or token.")
    return alternative_of(row, toward=toward, end=end, direction=direction)


@standard_torch_state()
def alternative_of(
    attention: EffectiveAttention, *, toward: Index = None, end: str = "farther", direction: Tensor | None = None
) -> AlternativeAttention:
    """Find another attention row for the one selected row of captured attention; see `alternative_attention`."""
    known_name("end", end, ENDS)
    if direction is not None and (toward is not None or end != FARTHER):
        raise InputError("alternative_attention takes toward= (and end=) or direction=, not both.")
    captured = attention.captured("alternative_of()")
    layer_index, head, query = (attention.axis(name).source_indices[0] for name in ("layer", "head", "query"))
    layer = captured.layers[layer_index]
    rows = layer.rows([(head, query)])
    n = len(attention.keys)
    if direction is None:
        other = _alternative_at_end(rows, attention.axis("key"), toward, end)
    else:
        other = _alternative_along(layer, rows, head, direction)
    change = other - rows.attention[0]
    step = float(change[:n].norm())
    miss = float(layer.missed_by(change[None], [(head, query)])[0])
    output_change = attention.run_with(other[:n])
    arrays = {"raw": rows.attention[0], "attention": other, "direction": change / step if step else change}
    arrays = {name: array[None, None, None, :n] for name, array in arrays.items()}
    axes = tuple(Axis(axis.name, axis.values, axis.tokens, single=axis.single) for axis in attention.axes)
    toward_keys = None if toward is None else list(attention.axis("key").sel(toward).values)
    settings = {"query": query, "toward": toward_keys if direction is None else "direction", "end": end}
    facts = {"step": step, "output_change": list(output_change), "toward": toward_keys, "row_residual": miss}
    return AlternativeAttention(
        axes,
        StoredArrays(arrays, dict.fromkeys(arrays, ("layer", "head", "query", "key"))),
        replace(attention.provenance, settings=attention.provenance.settings | settings),
        {**attention.about, **facts},
    )


def _alternative_at_end(rows: Rows, axis: Axis, toward: Index, end: str) -> Float[Tensor, "key"]:
    """Return the attention that takes the weight of some keys, or of the key that can move most, to an end."""
    if toward is None:
        keys = [int(_largest_moves(rows)[: len(axis)].argmax())]
    else:
        keys = [key for key in axis.sel(toward).values if bool(rows.visible[0, key])]
    if not keys:
        raise InputError(f"toward={shortened(toward)}: the query does not see this key (it is masked).")
    objective = membership([keys], rows.attention.shape[1]).to(rows.attention)
    vertices, failed = extreme_rows(rows, objective[None])
    if bool(failed[0]):
        raise IdentikitError("Looking for another attention: no solver ended. Please report this row.")
    ends = vertices[0, 0]
    if end != FARTHER:
        return ends[("lower", "upper").index(end)]
    distance = (ends - rows.attention)[:, keys].sum(-1).abs()
    if float(distance.max()) >= SAME:
        return ends[int(distance.argmax())]
    if toward is not None and float(_largest_moves(rows).max()) >= SAME:
        raise InputError(
            f"toward={shortened(toward)}: the output fixes this weight at {float(rows.attention[0, keys].sum()):.3g},"
            " though others can move. Choose another key, or leave toward= out."
        )
    raise InputError(
        "Looking for another attention: only the row's own attention gives this output (keys that it sees: "
        f"{int(rows.visible[0, : len(axis)].sum())}). Choose a query that sees more keys, or another head."
    )


def _largest_moves(rows: Rows) -> Float[Tensor, "key"]:
    """Return how far each weight of a row can move, up or down, whichever is more."""
    bounds = exact_bounds(rows, Question(torch.ones(rows.attention.shape[1], dtype=torch.bool)))
    return torch.maximum(bounds.upper - rows.attention, rows.attention - bounds.lower)[0]


def _alternative_along(layer: Layer, rows: Rows, head: int, direction: Tensor) -> Float[Tensor, "key"]:
    """Return the attention reached by going along a direction until a weight is zero."""
    n = len(layer.tokens)
    fits = isinstance(direction, Tensor) and direction.shape == (n,) and direction.dtype != torch.bool
    if not fits or direction.is_complex() or not direction.isfinite().all():
        raise InputError(
            f"direction={shortened(direction)} cannot be used: expected a tensor with a finite number for each of the "
            f"{n} keys."
        )
    visible = rows.visible[0].nonzero()[:, 0]
    values = layer.values_with_sink(head)
    direction = F.pad(direction.to(rows.attention), (0, len(values) - n))
    weights = alternative(rows.attention[0, visible], values[visible], direction[visible])
    return torch.zeros_like(rows.attention[0]).index_put((visible,), weights)
