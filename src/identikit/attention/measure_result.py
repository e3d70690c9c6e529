"""What `attention_measure` gives back."""

from typing import Any

import torch

from identikit.results.gathered import strongest
from identikit.results.measure import held
from identikit.results.result import Fact, Result
from identikit.results.words import percent
from identikit.shapes import Tensor

_EDGE = "layer head query key"
_WORDS = {"query": "mean", "key": "sum", "output": "mean", "input": "sum"}


class AttentionMeasure(Result):
    """A reading of attention, with its range over all alternatives: other attention with the same head outputs.

    Axes are (layer, head, query, key) for readings of one head, (layer, query, key) for a layer's mean, and (layer,
    output, input) for readings through layers.
    """

    kind = "attention measure"
    main = ("raw", "effective", "lower", "upper")
    raw = held(_EDGE, "The reading of attention as the model computes it.", words=_WORDS)
    effective = held(_EDGE, "The reading of effective attention.", words=_WORDS)
    lower = held(_EDGE, "The least reading of any alternative.", words=_WORDS)
    upper = held(_EDGE, "The greatest reading of any alternative.", words=_WORDS)
    gap = held(_EDGE, "How far the ends can be from the sharp ones; NaN where nothing was bounded.", range="0 or more")
    certain_order = held(
        "layer head query",
        "How many of the strongest sources come in this order in all alternatives, as far as their ends tell; through "
        "layers, of the other tokens.",
        range="0 to 5",
    )
    measure = Fact("Which reading it is.")
    meaning = Fact("What the reading is, in words.")
    target = Fact("What gradients are of; None where the reading needs none.")
    exact = Fact("Whether the ends are exact: attained by some attention, but for their gap.")

    @property
    def certain_share(self) -> Tensor:
        """Share of each row of `raw` that every alternative gives to the same sources."""
        certain = self.read("lower").clamp(min=0) + (-self.read("upper")).clamp(min=0)
        total = self.read("raw").abs().sum(-1)
        share = torch.where(total > 0, certain.sum(-1) / total, 1.0)
        return share[tuple(0 if axis.single else slice(None) for axis in self.axes[:-1])]

    def said(self) -> str:
        """Say what the reading is, how much of it is determined, and which entries are largest."""
        words = [f"{self.meaning}"]
        if self.target is not None:
            words.append(f"Target: {self.target}; gradients are held.")
        if "certain_order" in self.source.dims:
            rows = self.read("certain_order")
            first = float((rows > 0).double().mean())
            share = percent(float(self.certain_share.mean()))
            words.append(f"{share} of it is determined by the outputs of the heads.")
            words.append(f"The strongest source is determined in {percent(first)} of the rows.")
        late = float(self.read("gap").isnan().double().mean()) if "gap" in self.source.dims else 0.0
        if late:
            words.append(f"{percent(late)} of the entries were not bounded in time.")
        for value, labels in strongest(self, "raw", 3):
            at = self._at(labels)
            ends = f"[{float(self.array('lower')[at]):.3f}, {float(self.array('upper')[at]):.3f}]"
            words.append(f"{_place(self, labels)} {value:.3f} in {ends}.")
        return " ".join(words)

    def _at(self, labels: dict[str, str]) -> tuple[int, ...]:
        places = []
        for axis in self.axes:
            if not axis.single:
                names = [axis.name_of(place) for place in range(len(axis))]
                places.append(names.index(labels[axis.name]))
        return tuple(places)

    def plot(self, **options: Any) -> Any:
        """Draw one selected row as bars from the least to the greatest, a head or a layer as maps, or a grid of heads.

        Without a head, layers are drawn as maps, the last one if none is selected.
        """
        from identikit import plots

        if all(axis.single for axis in self.axes[:-1]):
            return plots.measure_bars(self, **options)
        if self.axes[1].name == "head" and not (self.axes[0].single and self.axes[1].single):
            return plots.head_grid(self, **{"by": "certain_order", **options})
        return plots.measure_maps(self, **options)


def _place(result: Result, labels: dict[str, str]) -> str:
    """Return where an entry is: `L4H5 foot → her`; through layers, from the input to the output."""
    head = "".join(f"{letter}{labels[name]}" for name, letter in (("layer", "L"), ("head", "H")) if name in labels)
    query, key = (labels.get(axis.name, axis.label) for axis in result.axes[-2:])
    arrow = "←" if result.axes[-1].name == "input" else "→"
    return f"{head} {query} {arrow} {key}".strip()
