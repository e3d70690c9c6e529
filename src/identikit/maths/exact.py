"""Exact ends of many rows at once: which solver they are given to."""

from collections.abc import Sequence

import torch

from identikit.errors import IdentikitError
from identikit.maths.intervals import row_bounds
from identikit.maths.polytope import Bounds, Rows
from identikit.shapes import Float, Tensor

FEW = 2  # rows for which compiled code is not worth loading
GAP = 1e-9  # an exact end whose gap is larger is computed again


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
    if int(rows.free.sum()) <= FEW:
        return row_bounds(rows, objectives, keys=keys, top=top)
    from identikit.maths.simplex import simplex_bounds

    asked = torch.zeros(rows.attention.shape[1], dtype=torch.bool)
    asked[slice(None) if keys is None else list(keys)] = True
    found, failed = simplex_bounds(rows, objectives, asked=asked, top=top if keys is None else 0)
    failed |= (found.gap > GAP).any(-1)
    for index in failed.nonzero()[:, 0].tolist():
        try:
            again = row_bounds(rows.some(torch.tensor([index])), objectives, keys=keys, top=top)
        except IdentikitError:  # what could not be proven keeps 0 and 1
            continue
        for part, end in zip(found, again, strict=True):
            part[index] = end[0]
    return found
