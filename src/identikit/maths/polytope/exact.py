"""Exact ends of many rows at once: which solver they are given to."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import torch

from identikit.errors import IdentikitError
from identikit.maths.polytope.one_row import row_bounds
from identikit.maths.polytope.rows import Bounds, Rows, unbounded
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

    With `top`, `Bounds.order` is found for that many of the strongest edges among the asked keys. One or two rows go to
    HiGHS; more go to compiled code, on the GPU where the rows are there. Ends that are not proven to `GAP` go to HiGHS
    too, and keep 0 and 1 if that fails as well.
    """
    solve = _compiled(rows)
    if solve is None:
        return row_bounds(rows, objectives, keys=keys, top=top)
    asked = torch.zeros(rows.attention.shape[1], dtype=torch.bool)
    asked[slice(None) if keys is None else list(keys)] = True
    found, failed = solve(rows, objectives, asked=asked, top=top)
    for index in (failed | (found.gap > GAP).any(-1)).nonzero()[:, 0].tolist():
        one = rows.some(torch.tensor([index]))
        known = unbounded(one, objectives) if bool(failed[index]) else Bounds(*(part[[index]] for part in found))
        with suppress(IdentikitError, ImportError):  # what was proven stays
            known = _both(known, row_bounds(one, objectives, keys=keys, top=top))
        for part, end in zip(found, known, strict=True):
            part[index] = end[0]
    return found


def _both(one: Bounds, other: Bounds) -> Bounds:
    """Return the better of two proofs, end by end; the smaller gap holds for it."""
    ends = torch.maximum(one.lower, other.lower), torch.minimum(one.upper, other.upper), one.gap.fmin(other.gap)
    return Bounds(*ends, torch.maximum(one.order, other.order))


def _compiled(rows: Rows) -> Callable[..., tuple[Bounds, Any]] | None:
    """Return the compiled solver for these rows, or None where there is none or too few rows for it."""
    few = int(rows.free.sum()) <= FEW and find_spec("highspy") is not None
    if rows.attention.is_cuda and find_spec("triton") is not None:
        from identikit.maths.polytope import cuda as simplex_cuda

        if rows.attention.shape[1] <= simplex_cuda.LONGEST:
            return None if few else simplex_cuda.simplex_bounds
    if few or find_spec("numba") is None:
        return None
    from identikit.maths.polytope.cpu import simplex_bounds

    return simplex_bounds
