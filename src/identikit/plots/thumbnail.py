"""A result's own plot as a small picture, for a notebook."""

import io
from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes

from identikit.plots.forms import Panels
from identikit.plots.style import sheet_of


def thumbnail(plot: Callable[[], Axes | Panels]) -> bytes:
    """Return what a plot draws as a PNG of notebook size."""
    drawn = plot()
    figure = sheet_of(drawn.flat[0] if isinstance(drawn, np.ndarray) else drawn)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=90, metadata={"Software": None})
    return picture.getvalue()
