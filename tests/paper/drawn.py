"""The figures made from made-up evidence, each once, for the tests that look at them."""

from functools import cache

from matplotlib.figure import Figure
from pandas import DataFrame

from identikit.paper.evidence import Evidence
from identikit.paper.figures.catalogue import FIGURES
from identikit.paper.figures.figure import Drawing
from tests.paper.made import evidence

NAMES = [
    *("fig1a", "fig1b", "fig1c", "fig2a", "fig2b", "fig3a", "fig3b", "fig4a", "fig4b", "fig5", "fig6", "fig7"),
    *(f"fig{number}" for number in range(8, 18)),
    *("fig18a", "fig18b"),
    *(f"fig{number}" for number in range(19, 44)),
    "fig1a-sharp",
    "fig1bc-sharp",
    "sinks",
    "collapse",
]
DEEP = [f"fig{number}" for number in range(32, 38)]
"""By part of speech in layers 7 to 12: not of a model of 6 layers."""

SHOWN = [name for name in NAMES if name not in DEEP]


@cache
def made() -> Evidence:
    return evidence(6)


@cache
def causal() -> Evidence:
    return evidence(6, causal=True)


@cache
def drawing(name: str) -> Drawing:
    return FIGURES[name].draw(made())


def data(name: str) -> DataFrame:
    return drawing(name).data


@cache
def figure(name: str) -> Figure:
    return drawing(name).sheet()
