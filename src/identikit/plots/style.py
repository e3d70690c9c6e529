"""House style of figures: sizes, colours, ticks and legends, so that every figure reads at column width and in grey."""

from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, Locator

SINGLE = 3.3  # inches: the width of one column of a page
DOUBLE = 6.9  # and of two

# The colours of Okabe and Ito, which colour-blind readers can tell apart, and a grey.
BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
BLUE = "#0072B2"
RED = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#666666"

SMALL = 6.0
"""The smallest size of text, in points."""

_SETTINGS = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "axes.titlelocation": "left",
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.title_fontsize": 8,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "legend.columnspacing": 1.2,
    "legend.labelspacing": 0.3,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.5,
    "hatch.color": "#D0D0D0",
    "hatch.linewidth": 0.4,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.1,
    "lines.markersize": 3.6,
    "svg.fonttype": "none",  # text stays text
    "pdf.fonttype": 42,
    "svg.hashsalt": "identikit",
    "text.parse_math": False,  # tokens and tags contain dollar signs
}


def house_style() -> AbstractContextManager[None]:
    """Within this context matplotlib draws in the house style, whatever the user's own settings are."""
    return matplotlib.style.context(["default", _SETTINGS])


@dataclass(frozen=True)
class Style:
    """How one series looks: its words in the legend, colour, marker, line, and whether markers are filled."""

    label: str
    colour: str
    marker: str = "o"
    line: str = "-"
    filled: bool = True


_CYCLE = [
    (BLUE, "o", "-"),
    (ORANGE, "s", "--"),
    (GREEN, "^", "-."),
    (RED, "D", ":"),
    (PURPLE, "v", "-"),
    (BLACK, "X", "--"),
]


def styles(labels: Iterable[tuple[Hashable, str]]) -> dict[tuple[Hashable, ...], Style]:
    """Return a colour, marker and line of its own for each series, in order; there are six."""
    return {(key,): Style(label, *look) for (key, label), look in zip(dict(labels).items(), _CYCLE, strict=False)}


_ABOVE = ["#FFFFFF", "#FDD49E", "#F0803C", "#B3320F", "#4A0D0D"]
_BELOW = ["#FFFFFF", "#B9D9F0", "#5BA3D9", "#1F6FB2", "#0B3F78"]

_EARLY = (0.0, 0.1, 0.35, 0.7, 1.0)  # beside a sink of 95 %, weights of a few per cent must show


def _colours(
    name: str, stops: Sequence[str], positions: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)
) -> LinearSegmentedColormap:
    return LinearSegmentedColormap.from_list(name, list(zip(positions, stops, strict=True)))


def sequential() -> ListedColormap:
    """Colours of numbers from zero upwards: white, orange, dark red."""
    return ListedColormap(_colours("above", _ABOVE)(np.linspace(0, 1, 256)), name="sequential")


def diverging() -> ListedColormap:
    """Colours around zero: white at zero, blue below, orange to dark red above; each side darkens steadily."""
    steps = np.linspace(0, 1, 256)
    below = _colours("below", _BELOW, _EARLY)(steps[:0:-1])
    return ListedColormap(np.vstack([below, _colours("above", _ABOVE, _EARLY)(steps)]), name="diverging")


def two_sided() -> ListedColormap:
    """Colours of two cases: orange below zero, blue above, never white, so that even a cell near zero has a side."""
    thirds = (0.0, 0.5, 1.0)
    below = _colours("below", _ABOVE[1:4], thirds)(np.linspace(1, 0, 128))
    above = _colours("above", _BELOW[1:4], thirds)(np.linspace(0, 1, 128))
    return ListedColormap(np.vstack([below, above]), name="two_sided")


def sheet_of(axes: Axes) -> Figure:
    """Return the figure that axes are drawn on."""
    figure = axes.get_figure(root=True)
    assert figure is not None, "axes without a figure"
    return figure


def percent(axis: Axis) -> None:
    """Write the ticks of an axis of shares in per cent; the unit belongs in the axis label."""
    axis.set_major_formatter(FuncFormatter(lambda share, _: f"{round(100 * share, 9):g}"))


def layer_axis(axis: XAxis, layers: Sequence[int], label: str = "layer") -> None:
    """Write layers along x, at their own numbers, leaving labels out where there are too many."""
    axis.set_ticks(layer_ticks(layers))
    axis.set_label_text(label)
    axis.axes.set_xlim(layers[0] - 0.6, layers[-1] + 0.6)


def layer_ticks(layers: Sequence[int]) -> list[int]:
    """Return the layers that get a label: the first, and about twelve at equal steps."""
    step = -(-len(layers) // 12)
    return [layer for layer in layers if layer % step == 0 or layer == layers[0]]


class TokenLocator(Locator):
    """Ticks at tokens, as many as fit when the figure is drawn: those in `keep`, then others that do not overlap."""

    def __init__(self, count: int, keep: Sequence[int] = ()):
        self.count = count
        self.keep = tuple(keep)

    def __call__(self) -> list[int]:
        """Return the tokens that are labelled, by index."""
        axis: Any = self.axis
        figure = axis.get_figure(root=True)
        box = axis.axes.bbox
        length = (box.width if axis.axis_name == "x" else box.height) / figure.dpi * 72
        first, last = sorted(axis.get_view_interval())
        spacing = SMALL * 1.2 * (last - first) / max(length, 1.0)
        step = max(1, int(np.ceil(spacing)))
        ticks: list[int] = []
        for index in (*self.keep, *range(0, self.count, step)):
            if all(abs(index - tick) >= step for tick in ticks):
                ticks.append(index)
        return sorted(tick for tick in ticks if first <= tick <= last)

    def tick_values(self, vmin: float, vmax: float) -> list[int]:
        """Return the ticks; they do not depend on these limits."""
        return self()


def token_axis(axis: Axis, tokens: Sequence[str], *, keep: Sequence[int] = ()) -> None:
    """Write tokens along an axis, upright below a map; where they are too dense some are left out, `keep` last."""
    axis.set_major_locator(TokenLocator(len(tokens), keep))
    words = dict(enumerate(tokens))
    axis.set_major_formatter(FuncFormatter(lambda tick, _: words.get(round(tick), "")))
    axis.get_major_ticks(min(len(tokens), 100))  # made here, so that no dollar sign starts a formula later
    axis.set_tick_params(length=1.5, pad=1, labelsize=SMALL, labelrotation=90 if isinstance(axis, XAxis) else 0)


def legend(axes: Axes, *, columns: int, title: str = "") -> None:
    """Put the legend above the axes, where it covers no data; `title` heads it."""
    if axes.get_legend_handles_labels()[0]:
        box = axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, title=title or None, borderaxespad=0.3
        )
        box.set(alignment="left")
