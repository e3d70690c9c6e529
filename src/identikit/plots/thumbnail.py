"""A result's own plot as a small picture, for a notebook."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np


def thumbnail(plot: Callable[[], Any]) -> bytes:
    """Return what a plot draws as a PNG of notebook size."""
    figure = np.ravel(plot())[0].get_figure(root=True)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=90, metadata={"Software": None})
    return picture.getvalue()
