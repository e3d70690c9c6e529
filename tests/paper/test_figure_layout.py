"""Figures can be read: nothing is cut off or overlaps, at any depth; and the same data give the same bytes."""

from typing import Any

import pytest
from matplotlib.text import Text

from identikit.paper.figures.catalogue import FIGURES
from identikit.plots.forms import save
from identikit.plots.style import house_style
from tests.paper.drawn import drawing, figure
from tests.paper.made import evidence
from tests.plots.test_plots import check_layout

KINDS = (
    "fig1a fig1b fig1a-sharp fig1bc-sharp sinks fig2a fig2b fig3a fig3b fig4b fig5 fig6 fig12 fig18b fig22 fig26 fig41"
)


def test_figures_can_be_read():
    for name in (*KINDS.split(), "fig4a", "fig7", "fig14", "collapse"):
        with house_style():
            check_layout(figure(name))
        texts = [text for text in figure(name).findobj(Text) if text.get_visible()]
        words = " ".join(text.get_text() for text in texts)
        assert "layer" not in words.replace("layer's", "") or "counted from 1" in words, name
        label = drawing(name).label
        assert label.startswith("MiniLM") and "seed 0" in label, name


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"n_layers": 2}, {"n_layers": 48}, {"n_layers": 12, "causal": True}], ids=str)
def test_any_model_can_be_drawn(changes: dict[str, Any]):
    other = evidence(model="an-organisation/some-model-with-a-long-name", **changes)
    for name in KINDS.split():
        entry = FIGURES[name]
        if not entry.why_not(other.subject):
            with house_style():
                check_layout(entry.draw(other).sheet())


def test_the_same_data_give_the_same_bytes():
    assert save(FIGURES["fig1b"].draw(evidence(6)).sheet()) == save(drawing("fig1b").sheet())
