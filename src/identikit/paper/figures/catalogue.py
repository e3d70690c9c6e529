"""Every figure: the paper's in its order, and then our own."""

import re

from identikit.paper.figures import attention, attribution, identity, ours
from identikit.paper.figures.figure import Figure


def _number(name: str) -> tuple[float, str]:
    """Return a figure's number in the paper and its letter; figures without a number come last."""
    number = re.fullmatch(r"fig(\d+)([a-c]?)", name)
    return (float(number[1]), number[2]) if number else (float("inf"), "")


_ALL = {**attention.figure, **identity.figure, **attribution.figure, **ours.figure}
FIGURES: dict[str, Figure] = {name: _ALL[name] for name in sorted(_ALL, key=_number)}
"""Figures by name."""
