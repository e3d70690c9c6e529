"""Other attention with the same output: one alternative, the least-norm one, and how far each edge could go."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from identikit.attention.effective import EffectiveAttention, effective_attention
from identikit.errors import InputError
from identikit.maths import intervals as polytope
from identikit.models.model import Model
from identikit.models.reading import Change, output_change
from identikit.models.tap import AttentionCall
from identikit.provenance import Provenance
from identikit.shapes import Float, Tensor

LONGEST_SECONDS = 600.0  # intervals predicted to take longer are refused unless more is allowed


@dataclass(frozen=True)
class AlternativeAttention:
    """Another attention row on the simplex with the same output; weights are over all keys, invisible ones 0.

    - `attention` = `raw` + `step` · `direction`
    - `output_change`: what the model's output changed by when the row was put in
    """

    tokens: tuple[str, ...]
    raw: Float[Tensor, "key"]
    attention: Float[Tensor, "key"]
    direction: Float[Tensor, "key"]
    step: float
    output_change: Change
    provenance: Provenance


@dataclass(frozen=True)
class AttentionIntervals:
    """The sharp range of every edge over all attention on the simplex with the same output.

    `lower`, `upper` and `raw` are (key) for one query, (query, key) for a whole head; `certain_mass`, the sum of the
    lower bounds, is the weight that every such attention agrees on.
    """

    tokens: tuple[str, ...]
    raw: Tensor
    lower: Tensor
    upper: Tensor
    provenance: Provenance

    @property
    def certain_mass(self) -> Tensor:
        """The sum of the lower bounds of each row."""
        return self.lower.sum(-1)


def alternative_attention(
    model: Model,
    text: Any,
    *,
    layer: int,
    head: int,
    query: int,
    direction: Tensor | None = None,
    seed: int = 0,
) -> AlternativeAttention:
    """Find another attention row with the same output (section 3.3), put it in, and measure what changed.

    The row goes from the raw one along `direction` (over all keys; projected onto the null space of [T, 1]), or along a
    random one drawn with `seed`, until a weight reaches zero.
    """
    drawn = {"seed": seed} if direction is None else {"direction": "given"}
    row = _Row(_one_layer(model, text, layer, head), query, **drawn)
    if direction is not None and direction.shape != (len(row.result.tokens),):
        raise InputError(
            f"direction of shape {tuple(direction.shape)}: it must have a number for each of the "
            f"{len(row.result.tokens)} tokens of the text."
        )
    along = None if direction is None else direction.to(row.keys.device)[row.keys]
    found = polytope.alternative(row.attention, row.values, direction=along, seed=seed)
    return row.put_in(found.attention, found.direction, found.step)


def minimum_norm_attention(model: Model, text: Any, *, layer: int, head: int, query: int) -> AlternativeAttention:
    """Find the attention row of least norm on the simplex with the same output, put it in, and measure what changed."""
    row = _Row(_one_layer(model, text, layer, head), query)
    found = polytope.minimum_norm(row.attention, row.values)
    difference = found - row.attention
    step = float(difference.norm())
    return row.put_in(found, difference / step if step else difference, step)


def attention_intervals(
    model: Model,
    text: Any,
    *,
    layer: int,
    head: int,
    query: int | None = None,
    key: int | None = None,
    max_seconds: float = LONGEST_SECONDS,
    progress: Callable[[int, int], None] | None = None,
) -> AttentionIntervals:
    """Find the least and greatest weight that each edge can have while the head's output stays the same.

    For one `query`, or every query of the head; for one `key` alone if given. A request predicted to take more than
    `max_seconds` is refused before it starts. `progress(done, total)` is called row by row.
    """
    result = _one_layer(model, text, layer, head)
    n = len(result.tokens)
    queries = range(n) if query is None else [query]
    expected = _expected_seconds(result, len(queries), key)
    if expected > max_seconds:
        raise InputError(
            f"intervals of {len(queries)} rows of {n} tokens would take about {expected:.0f} s, over the "
            f"{max_seconds:.0f} s allowed. Ask for one row (query=), one edge (key=), or allow more (max_seconds=)."
        )
    rows = []
    for done, one in enumerate(queries, start=1):
        rows.append(_Row(result, one).interval(key))
        if progress:
            progress(done, len(queries))
    raw, lower, upper = (torch.stack(part) for part in zip(*rows, strict=True))
    if query is not None:
        raw, lower, upper = raw[0], lower[0], upper[0]
    return AttentionIntervals(result.tokens, raw, lower, upper, result.provenance)


def _one_layer(model: Model, text: Any, layer: int, head: int) -> EffectiveAttention:
    if not model.vision and not isinstance(text, (str, tuple)):
        raise InputError("one text at a time: pass a text or a pair, not a list.")
    return effective_attention(model, text, layers=[layer], heads=[head])[0]


def _expected_seconds(result: EffectiveAttention, rows: int, key: int | None) -> float:
    part = result.parts[0]
    visible = int(part.factors.visible.count.max())
    seconds = polytope.predicted_seconds(rows, visible, part.plain.values.shape[-1])
    return seconds if key is None else seconds / visible


class _Row:
    """One row of one head, over the keys that its query sees."""

    def __init__(self, result: EffectiveAttention, query: int, **settings: Any):
        if not 0 <= query < len(result.tokens):
            raise InputError(f"query {query} does not exist: the text has tokens 0 to {len(result.tokens) - 1}.")
        self.result, self.query = result, query
        self.layer, self.head = result.layers[0], result.heads[0]
        part = result.parts[0]
        positions = torch.arange(len(result.tokens), device=part.heads.device)
        self.keys = positions[part.factors.visible.block(positions[[query]], positions)[0]]
        weights = part.call.weights(positions[[query]], heads=part.heads, dtype=torch.float64)[0, 0, 0]
        self.attention = weights[self.keys] / weights[self.keys].sum()
        # Values as the output projection passes them on, in the precision they were computed in.
        self.values = part.factors.values[0, self.keys].to(part.call.value.dtype)
        source = result.provenance
        self.provenance = replace(source, settings=source.settings | {"query": query} | settings)

    def over_all_keys(self, weights: Tensor) -> Float[Tensor, "key"]:
        full = torch.zeros(len(self.result.tokens), dtype=torch.float64, device=self.keys.device)
        full[self.keys] = weights.to(full)
        return full

    def put_in(self, attention: Tensor, direction: Tensor, step: float) -> AlternativeAttention:
        """Run the model with another attention row in the place of this one."""

        def visit(call: AttentionCall) -> Tensor | None:
            if call.layer != self.layer:
                return None
            output = call.output.clone()
            values = call.value[0, self.head // call.groups, self.keys].double()
            output[0, self.head, self.query] = (attention.double() @ values).to(output)
            return output

        return AlternativeAttention(
            tokens=self.result.tokens,
            raw=self.over_all_keys(self.attention),
            attention=self.over_all_keys(attention),
            direction=self.over_all_keys(direction),
            step=step,
            output_change=output_change(self.result.model, self.result.batch, visit),
            provenance=self.provenance,
        )

    def interval(self, key: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return raw weight, lower and upper bound: of all keys, or of one."""
        if key is None:
            found = polytope.intervals(self.attention, self.values)
            return tuple(self.over_all_keys(part) for part in (self.attention, *found))  # pyright: ignore
        if not 0 <= key < len(self.result.tokens):
            raise InputError(f"key {key} does not exist: the text has tokens 0 to {len(self.result.tokens) - 1}.")
        place = (self.keys == key).nonzero()[:, 0].tolist()
        if not place:
            nothing = torch.zeros(1, dtype=torch.float64, device=self.keys.device)
            return nothing, nothing, nothing
        found = polytope.intervals(self.attention, self.values, keys=place)
        return self.attention[place], found.lower, found.upper
