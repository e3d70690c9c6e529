"""The attention of one text as it was captured: computes each measure lazily, only at the selected indices."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

import torch

from identikit.attention.layer import USUAL, At, EffectiveOptions, HeadRow, Layer
from identikit.maths.polytope.rows import Rows, join_rows
from identikit.models.isolation import standard_torch_state
from identikit.models.taps.tap import AttentionCall
from identikit.models.text_run import Change, TextRun
from identikit.results.measure import Measure
from identikit.shapes import Float, Tensor

RowIndex = tuple[int, int, int]
"""Which row of attention: indices of its layer, head and query."""


@dataclass(frozen=True, eq=False)
class Captured:
    """The captured attention of one text, layer by layer, and the measures that can be computed from it."""

    text_run: TextRun
    layers: tuple[Layer, ...]
    measures: Mapping[str, Measure] = field(default_factory=dict)

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Which layers these are, as the model counts them."""
        return tuple(layer.call.layer for layer in self.layers)

    @property
    def head_numbers(self) -> tuple[int, ...]:
        """Which heads of each layer these are, as the model counts them."""
        return tuple(self.layers[0].heads.tolist())

    @property
    def dims(self) -> dict[str, tuple[str, ...]]:
        """The axes of each measure."""
        return {name: declared.axes for name, declared in self.measures.items()}

    @standard_torch_state()
    def read(self, name: str, indices: Mapping[str, Sequence[int]]) -> Tensor:
        """Compute a measure at these indices of its axes."""
        compute = self.measures[name].compute
        if compute is None:
            raise KeyError(name)
        at = self._at(indices)
        return torch.stack([compute(self.layers[index], at) for index in indices["layer"]])

    def _at(self, indices: Mapping[str, Sequence[int]]) -> At:
        device = self.layers[0].heads.device
        return At(*(torch.tensor(indices[axis], dtype=torch.long, device=device) for axis in ("head", "query", "key")))

    @standard_torch_state()
    def change(self, indices: Mapping[str, Sequence[int]], weights: Tensor | None = None) -> Change:
        """Run the model with other attention at these indices; return how much its output changed.

        The raw weights are replaced by `weights` (layer, head, query, key), or without these, whole rows by effective
        attention.
        """
        at = self._at(indices)
        changed_layers = {self.layers[index].call.layer: order for order, index in enumerate(indices["layer"])}

        def changed_output(call: AttentionCall) -> Tensor | None:
            if call.layer not in changed_layers:
                return None
            order = changed_layers[call.layer]
            layer = self.layers[indices["layer"][order]]
            if weights is None:
                return layer.output_with_effective(call, at.heads, at.queries)
            return layer.output_with(call, weights[order], at)

        return self.text_run.changed_by(changed_output)

    def rows(self, row_indices: Sequence[RowIndex], *, moving: bool = False) -> Rows:
        """Return rows with the sets of attention that give them their outputs; see `Layer.rows`."""
        return join_rows([self.layers[layer].rows(rows, moving=moving) for layer, rows in _by_layer(row_indices)])

    def effective_rows(self, row_indices: Sequence[RowIndex]) -> Float[Tensor, "row key"]:
        """Return rows of effective attention in float64, those of a head together."""
        return torch.cat([self.layers[layer].effective_rows(rows) for layer, rows in _by_layer(row_indices)])

    def largest_miss(self, row_indices: Sequence[RowIndex], rows: Rows) -> float:
        """Return the largest share of a row's output that its basis does not hold; see `Layer.largest_miss`."""
        largest = 0.0
        start = 0
        for layer, head_rows in _by_layer(row_indices):
            stop = start + len(head_rows)
            of_layer = rows.select(torch.arange(start, stop, device=rows.group.device))
            largest = max(largest, self.layers[layer].largest_miss(of_layer, head_rows))
            start = stop
        return largest


def capture(
    text_run: TextRun,
    options: EffectiveOptions = USUAL,
    *,
    layers: Collection[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Captured:
    """Take the attention of a text out of its run: these layers and heads, by default all. Nothing is solved yet."""
    layers = text_run.calls if layers is None else layers
    heads = range(text_run.model.n_heads) if heads is None else heads
    return Captured(text_run, tuple(Layer.of(text_run, layer, heads, options) for layer in layers))


def _by_layer(row_indices: Sequence[RowIndex]) -> Iterator[tuple[int, list[HeadRow]]]:
    """Yield each layer with the heads and queries of its rows, which stand together."""
    for layer, rows in groupby(row_indices, key=itemgetter(0)):
        yield layer, [(head, query) for _, head, query in rows]
