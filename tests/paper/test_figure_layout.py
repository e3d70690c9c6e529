"""Figures can be read: nothing is cut off or overlaps, at any depth; and the same data give the same bytes."""

from itertools import pairwise
from typing import Any

import pytest
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from identikit.paper.figures.catalogue import FIGURES
from identikit.plots.forms import save
from identikit.plots.style import house_style
from tests.paper.drawn import SHOWN, data, figure, made
from tests.paper.made import evidence


def tick_labels(axis: Axis, *, drawn: bool) -> set[Text]:
    """The labels of ticks within the limits of an axis, which are drawn, or of those beyond, which are not."""
    least, most = sorted(axis.get_view_interval())
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    chosen = [tick for tick in ticks if (least - 1e-9 <= tick.get_loc() <= most + 1e-9) == drawn]
    return {label for tick in chosen for label in (tick.label1, tick.label2)}


def written(drawn: Figure) -> list[Text]:
    """All texts that are drawn."""
    axes = [axis for axes in drawn.axes for axis in (axes.xaxis, axes.yaxis)]
    beyond = {label for axis in axes for label in tick_labels(axis, drawn=False)}
    found = [text for text in drawn.findobj(Text) if isinstance(text, Text) and text not in beyond]
    return [text for text in found if text.get_visible() and text.get_text().strip()]


def check_layout(drawn: Figure) -> None:
    """Everything written can be read: large enough, within the sheet, axes named, and labels along x apart."""
    renderer = FigureCanvasAgg(drawn).get_renderer()
    with house_style():
        drawn.draw(renderer)
    sheet = drawn.bbox
    for text in written(drawn):
        box = text.get_window_extent(renderer)
        assert text.get_fontsize() >= 6
        inside = sheet.x0 - 1 <= box.x0 and box.x1 <= sheet.x1 + 1 and sheet.y0 - 1 <= box.y0 and box.y1 <= sheet.y1 + 1
        assert inside, f"{text.get_text()!r} is cut off"
    assert drawn.get_supxlabel() == ""
    for axes in drawn.axes:
        assert axes.get_ylabel() or axes.get_xlabel()
        labels = [label for label in axes.get_xticklabels() if label in tick_labels(axes.xaxis, drawn=True)]
        boxes = [label.get_window_extent(renderer) for label in labels if label.get_text()]
        assert all(left.x1 <= right.x0 + 0.5 for left, right in pairwise(boxes)), [label.get_text() for label in labels]


@pytest.mark.parametrize("name", SHOWN)
def test_everything_written_can_be_read(name: str):
    check_layout(figure(name))


@pytest.mark.parametrize("name", SHOWN)
def test_what_stands_under_a_figure_names_model_and_seed(name: str):
    label = FIGURES[name].label(data(name), made())
    assert label.startswith("MiniLM")
    assert "seed 0" in label


@pytest.mark.parametrize("name", SHOWN)
def test_layers_are_said_to_count_from_one(name: str):
    words = [text.get_text() for text in written(figure(name))]
    if any("layer" in word and "layer's" not in word for word in words):
        assert any("counted from 1" in word for word in words)


KINDS = [
    "fig1a",
    "fig1b",
    "fig1a-sharp",
    "fig1bc-sharp",
    "sinks",
    "fig2a",
    "fig2b",
    "fig3a",
    "fig3b",
    "fig4b",
    "fig5",
    "fig12",
    "fig18b",
    "fig22",
    "fig26",
    "fig41",
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"n_layers": 2}, {"n_layers": 48}, {"n_layers": 12, "causal": True}], ids=str)
def test_any_model_can_be_drawn(changes: dict[str, Any]):
    other = evidence(model="an-organisation/some-model-with-a-long-name", **changes)
    for name in [*KINDS, "fig6"]:
        entry = FIGURES[name]
        if not entry.missing(other.subject):
            check_layout(entry.draw(entry.frame(other), other))


@pytest.mark.parametrize("name", ["fig1b", "fig3a", "fig22"])
def test_the_same_data_give_the_same_bytes(name: str):
    entry, again = FIGURES[name], evidence(6)
    assert save(entry.draw(entry.frame(again), again)) == save(entry.draw(data(name), made()))
