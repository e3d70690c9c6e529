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
from tests.paper.drawn import drawing, figure
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


def check_layout(name: str, drawn: Figure) -> None:
    """Everything written can be read: large enough, within the sheet, axes named, and labels along x apart."""
    renderer = FigureCanvasAgg(drawn).get_renderer()
    with house_style():
        drawn.draw(renderer)
    sheet = drawn.bbox
    for text in written(drawn):
        box = text.get_window_extent(renderer)
        assert text.get_fontsize() >= 6, (name, text.get_text())
        inside = sheet.x0 - 1 <= box.x0 and box.x1 <= sheet.x1 + 1 and sheet.y0 - 1 <= box.y0 and box.y1 <= sheet.y1 + 1
        assert inside, f"{name}: {text.get_text()!r} is cut off"
    assert drawn.get_supxlabel() == "", name
    for axes in drawn.axes:
        assert axes.get_ylabel() or axes.get_xlabel(), name
        labels = [label for label in axes.get_xticklabels() if label in tick_labels(axes.xaxis, drawn=True)]
        boxes = [label.get_window_extent(renderer) for label in labels if label.get_text()]
        assert all(left.x1 <= right.x0 + 0.5 for left, right in pairwise(boxes)), (name, labels)


KINDS = (
    "fig1a fig1b fig1a-sharp fig1bc-sharp sinks fig2a fig2b fig3a fig3b fig4b fig5 fig6 fig12 fig18b fig22 fig26 fig41"
)


def test_figures_can_be_read():
    for name in (*KINDS.split(), "fig4a", "fig7", "fig14", "collapse"):
        check_layout(name, figure(name))
        words = " ".join(text.get_text() for text in written(figure(name)))
        assert "layer" not in words.replace("layer's", "") or "counted from 1" in words, name
        label = drawing(name).label
        assert label.startswith("MiniLM") and "seed 0" in label, name


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"n_layers": 2}, {"n_layers": 48}, {"n_layers": 12, "causal": True}], ids=str)
def test_any_model_can_be_drawn(changes: dict[str, Any]):
    other = evidence(model="an-organisation/some-model-with-a-long-name", **changes)
    for name in KINDS.split():
        entry = FIGURES[name]
        if not entry.missing(other.subject):
            check_layout(name, entry.draw(other).sheet())


def test_the_same_data_give_the_same_bytes():
    assert save(FIGURES["fig1b"].draw(evidence(6)).sheet()) == save(drawing("fig1b").sheet())
