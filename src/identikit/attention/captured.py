"""The attention of one text as it was captured: computes what is asked of it, at the places that are asked for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch

from identikit.attention.layer import At, HeadPlace, Layer
from identikit.maths.polytope.rows import Rows, join_rows
from identikit.models.isolation import standard_torch_state
from identikit.models.taps.tap import AttentionCall
from identikit.models.text_run import Change, TextRun
from identikit.results.measure import Measure
from identikit.shapes import Float, Int, Tensor

Place = tuple[int, int, int]
"""A row of attention: places of its layer, head and query."""


@dataclass(frozen=True, eq=False)
class Captured:
    """A text that was read, layer by layer, and the measures that can be computed from it."""

    reading: TextRun
    layers: tuple[Layer, ...]
    measures: Mapping[str, Measure]

    @property
    def dims(self) -> dict[str, tuple[str, ...]]:
        """The axes of each measure."""
        return {name: declared.axes for name, declared in self.measures.items()}

    @standard_torch_state()
    def read(self, name: str, places: Mapping[str, Sequence[int]]) -> Tensor:
        """Compute a measure at these places of its axes."""
        compute = self.measures[name].compute
        if compute is None:
            raise KeyError(name)
        at = At(*(self.positions(places[axis]) for axis in ("head", "query", "key")))
        return torch.stack([compute(self.layers[place], at) for place in places["layer"]])

    def positions(self, places: Sequence[int]) -> Int[Tensor, "chosen"]:
        """Return places as a tensor where the model is."""
        return torch.tensor(places, dtype=torch.long, device=self.layers[0].heads.device)

    @standard_torch_state()
    def change(self, places: Mapping[str, Sequence[int]], weights: Tensor | None = None) -> Change:
        """Run the model with other attention at these places; return how much its output changed.

        It is effective attention, in whole rows, or these `weights` (layer, head, query, key) in place of the raw ones.
        """
        at = At(*(self.positions(places[axis]) for axis in ("head", "query", "key")))
        chosen = {self.layers[place].call.layer: order for order, place in enumerate(places["layer"])}

        def replaced(call: AttentionCall) -> Tensor | None:
            if call.layer not in chosen:
                return None
            order = chosen[call.layer]
            layer = self.layers[places["layer"][order]]
            if weights is None:
                return layer.output_with_effective(call, at.heads, at.queries)
            return layer.output_with(call, weights[order], at)

        return self.reading.changed_by(replaced)

    def rows(self, places: Sequence[Place], *, moving: bool = False) -> Rows:
        """Return rows with the sets of attention that give them their outputs; see `Layer.rows`."""
        return join_rows([self.layers[layer].rows(some, moving=moving) for layer, some in _by_layer(places)])

    def effective_rows(self, places: Sequence[Place]) -> Float[Tensor, "row key"]:
        """Return rows of effective attention in float64, those of a head together."""
        return torch.cat([self.layers[layer].effective_rows(some) for layer, some in _by_layer(places)])

    def largest_miss(self, places: Sequence[Place], rows: Rows) -> float:
        """Return what attention in a row's set can miss its output by, at most; see `Layer.largest_miss`."""
        largest = 0.0
        start = 0
        for layer, some in _by_layer(places):
            part = rows.select(torch.arange(start, start + len(some), device=rows.group.device))
            largest = max(largest, self.layers[layer].largest_miss(part, some))
            start += len(some)
        return largest


def _by_layer(places: Sequence[Place]) -> Iterator[tuple[int, list[HeadPlace]]]:
    """Yield the heads and queries of each layer; those of a layer stand together."""
    for layer, some in groupby(places, key=itemgetter(0)):
        yield layer, [(head, query) for _, head, query in some]
