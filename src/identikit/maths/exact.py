"""Exact ends of many rows at once: which solver they are given to."""

from collections.abc import Sequence

from identikit.maths.intervals import row_bounds
from identikit.maths.polytope import Bounds, Rows
from identikit.shapes import Float, Tensor


def exact_bounds(
    rows: Rows,
    objectives: Float[Tensor, "quantity key"] | None = None,
    *,
    keys: Sequence[int] | None = None,
    top: int = 0,
) -> Bounds:
    """Find the least and the greatest weight of every key, or of these `keys`, or of 0/1 `objectives`.

    With `top`, and with all keys asked for, `Bounds.order` is found for that many of the strongest edges.
    """
    return row_bounds(rows, objectives, keys=keys, top=top)
