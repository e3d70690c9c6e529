"""House style of figures: sizes, colours, ticks and legends, so that every figure reads at column width and in grey."""

import textwrap
from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

SINGLE, DOUBLE = 3.3, 6.9
"""Widths in inches of one and of two columns of a page."""

BLACK, ORANGE, SKY, GREEN, YELLOW = "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, RED, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#666666"
"""The colours of Okabe and Ito, which colour-blind readers tell apart."""

SMALL = 6.0
"""The least size of text, in points."""

_SETTINGS = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
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
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.1,
    "lines.markersize": 3.6,
    "svg.hashsalt": "identikit",
    "text.parse_math": False,  # tokens and tags hold dollar signs
}


def house_style() -> AbstractContextManager[None]:
    """Within this context matplotlib draws in the house style, whatever the reader's own settings are."""
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
    """Give each series, in order, a colour, a marker and a line of its own; there are six."""
    return {(key,): Style(label, *look) for (key, label), look in zip(dict(labels).items(), _CYCLE, strict=False)}


def heat_colours() -> ListedColormap:
    """Colours of a scale around zero: from black towards light blue below, and by purple and orange to light above."""
    below = LinearSegmentedColormap.from_list("below", [SKY, BLACK])
    steps = np.linspace(0, 1, 256)
    return ListedColormap(np.vstack([below(steps), matplotlib.colormaps["magma"](steps)]), name="heat")


def sheet_of(axes: Axes) -> Figure:
    """The figure that axes are drawn on."""
    figure = axes.get_figure(root=True)
    assert figure is not None, "axes without a figure"
    return figure


def percent(axis: Axis) -> None:
    """Write an axis of shares in per cent; the unit belongs into the axis label."""
    axis.set_major_formatter(FuncFormatter(lambda share, _: f"{round(100 * share, 9):g}"))


def layer_axis(axes: Axes, layers: int, label: str = "layer") -> None:
    """Count layers along x, from 1, leaving labels out where there are too many."""
    axes.set_xticks(layer_ticks(layers))
    axes.set_xlim(0.4, layers + 0.6)
    axes.set_xlabel(label)


def layer_ticks(layers: int) -> list[int]:
    """The layers that get a label: the first, and about twelve at equal steps."""
    step = -(-layers // 12)
    return sorted({1, *range(step, layers + 1, step)})


def token_axis(axes: Axes, tokens: list[str]) -> None:
    """Write a token below each column, upright, in two tiers where one would be too dense.

    The labels of the lower tier hang on long ticks between those of the upper.
    """
    width = sheet_of(axes).get_figwidth() * 72
    tiers = 2 if len(tokens) * SMALL > 0.85 * width else 1
    for tier in range(tiers):
        places = range(tier, len(tokens), tiers)
        axes.set_xticks(places, [tokens[place] for place in places], minor=tier > 0, rotation=90, fontsize=SMALL)
    reach = max(len(token) for token in tokens[::tiers]) * SMALL * 0.62
    axes.tick_params(axis="x", which="major", length=1.5, pad=1)
    axes.tick_params(axis="x", which="minor", length=reach + 4, width=0.25, pad=1, color=GREY)


def legend(axes: Axes, *, columns: int, title: str = "") -> None:
    """Put the legend above the axes, where it covers no data; `title` heads it."""
    if axes.get_legend_handles_labels()[0]:
        box = axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, title=title or None, borderaxespad=0.3
        )
        box.set(alignment="left")


def footer(label: str, width: float) -> str:
    """Break a label into lines that fit the width of a figure, given in inches, in small type."""
    lines = textwrap.wrap(label, width=int(width * 72 / (SMALL * 0.56)), break_on_hyphens=False)
    return "\n".join(line.removesuffix(" ·") for line in lines)
