"""What a figure of the paper is, the decorator that adds one, and what figures share.

A figure is one function: it takes the evidence, and returns its data, its label and a way to draw it.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import matplotlib.figure
import numpy as np
from matplotlib.axes import Axes
from pandas import DataFrame

from identikit.paper.evidence import Evidence, Subject
from identikit.plots.forms import Panel, sheet
from identikit.plots.style import SINGLE, layer_axis, percent

LAYER = "layer (counted from 1)"
REPEATED = ("cola", "mnli", "mnli-500")  # a figure on these repeats one on MRPC, so no other dataset will do


class Drawing(NamedTuple):
    """A figure of one model: `data` is exactly what `sheet` draws, `label` stands under it beside its caption."""

    data: DataFrame
    label: str
    sheet: Callable[[], matplotlib.figure.Figure]


Draw = Callable[[Evidence], Drawing]


@dataclass(frozen=True)
class Figure:
    """One figure of the paper.

    - `needs`: the tables of the evidence it is drawn from
    - `shows`: the columns of its data that are drawn, "by" the columns that tell rows apart: "rate by map, layer"
    - `data`: the dataset the paper used, "" where the texts are the paper's own
    - `layer`: the one layer it shows, 0 for several; `not_causal`: why a causal model cannot have it; empty if it can
    """

    name: str
    caption: str
    needs: tuple[str, ...]
    shows: str
    data: str
    layer: int
    not_causal: str
    draw: Draw

    @property
    def only(self) -> bool:
        """Whether no other dataset will do."""
        return self.data in REPEATED

    def why_not(self, subject: Subject) -> str | None:
        """Return why this model cannot have the figure; None if it can."""
        if self.layer > subject.n_layers:
            return f"not applicable: {subject.model} has {subject.n_layers} layers"
        if subject.causal and self.not_causal:
            return f"not applicable: {subject.model} is causal, {self.not_causal}"
        return None


class Figures(dict[str, Figure]):
    """The figures of a module by name, in order; an instance is the decorator that adds one."""

    def __call__(
        self,
        name: str,
        caption: str,
        *,
        needs: tuple[str, ...],
        shows: str,
        data: str = "mrpc",
        layer: int = 0,
        not_causal: str = "",
    ) -> Callable[[Draw], Draw]:
        """Add a function as a figure; the arguments are the fields of `Figure`."""

        def add(draw: Draw) -> Draw:
            self[name] = Figure(name, caption, needs, shows, data, layer, not_causal, draw)
            return draw

        return add


def draw_panels(
    evidence: Evidence, data: DataFrame, *panels: Panel, label: str = "", width: float = SINGLE, height: float = 2.6
) -> Drawing:
    """Return a drawing of panels side by side; sizes in inches. Its label is that of the evidence by default."""
    return Drawing(data, label or evidence.label, partial(sheet, *panels, width=width, height=height))


def rows_with(table: DataFrame, values: Mapping[str, Sequence[Hashable]]) -> DataFrame:
    """Return the rows in which every named column has one of its values."""
    matches = [table[column].isin(list(allowed)) for column, allowed in values.items()]
    return table.loc[np.logical_and.reduce(matches)].reset_index(drop=True)


def label_shares_by_layer(axes: Axes, evidence: Evidence, label: str = LAYER) -> None:
    """Label axes that show shares in per cent by layer."""
    layer_axis(axes.xaxis, range(1, evidence.subject.n_layers + 1), label)
    percent(axes.yaxis)


def make_room(axes: Axes, lowest: float, highest: float) -> None:
    """Give the vertical axis room for numbers from `lowest` to `highest`."""
    margin = 0.05 * (highest - lowest)
    axes.set_ylim(lowest - margin, highest + margin)


def label_of_text(evidence: Evidence, description: str, tokens: int) -> str:
    """Return the label of a figure that shows one text of the paper's own."""
    return f"{evidence.subject.model} · {description} · n = 1 text, {tokens} tokens · seed {evidence.seed}"
