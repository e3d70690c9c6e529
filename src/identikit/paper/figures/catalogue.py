"""Every figure: the paper's in its order, and then our own."""

import re

from identikit.paper.figures import attention, attribution, identity, ours  # noqa: F401  (they register figures)
from identikit.paper.figures.figure import REGISTERED, Figure


def _number(name: str) -> tuple[float, str]:
    """Return a figure's number in the paper and its letter; those that have none come last."""
    number = re.fullmatch(r"fig(\d+)([a-c]?)", name)
    return (float(number[1]), number[2]) if number else (float("inf"), "")


FIGURES: dict[str, Figure] = {name: REGISTERED[name] for name in sorted(REGISTERED, key=_number)}
"""Figures by name."""
