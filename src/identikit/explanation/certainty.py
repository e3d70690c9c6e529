"""What a sample of bounded rows says about a text's attention: groups of keys, and the edges worth naming."""

from typing import Any

import torch

from identikit.attention.sample import Mean, RowSample, mean_over_rows
from identikit.shapes import Float, Tensor

SECONDS = 20.0  # how long `explain` bounds rows
EDGES_NAMED = 5  # how many edges a list names, each of another head
VISIBLE = 1e-3  # intervals narrower than this, and weights outside one by less, look the same with three digits
SEED = 0


def group_bounds(sample: RowSample, group: int, raw: Float[Tensor, "layer"]) -> tuple[Mean, Mean]:
    """Return the least and the greatest mean weight that each layer's rows can give to a group of keys.

    `raw` is the mean over all rows. How far below and above it the ends are is what is estimated from the rows that
    were bounded, so the ends always enclose it.
    """
    own, lower, upper = sample.bounded.groups[:, :, group].unbind(1)
    below, above = (mean_over_rows(sample, part, 0.0) for part in (own - lower, upper - own))
    return Mean((raw - below.mean).clamp(min=0), below.stderr), Mean((raw + above.mean).clamp(max=1), above.stderr)


def least_certain(sample: RowSample) -> list[dict[str, Any]]:
    """Return the edges with the widest intervals, one per head."""
    return _largest(sample, sample.bounded.upper - sample.bounded.lower)


def outside(sample: RowSample, pearson: Float[Tensor, "layer head"]) -> list[dict[str, Any]]:
    """Return the edges whose effective weight is farthest outside the interval, one per head.

    A head whose raw and effective attention correlate at 1.00 is left out.
    """
    beyond = torch.maximum(
        sample.bounded.lower - sample.bounded.effective, sample.bounded.effective - sample.bounded.upper
    )
    alike = ~(pearson.cpu() < 0.995)[sample.bounded.places[:, 0], sample.bounded.places[:, 1]]
    return _largest(sample, beyond.masked_fill(alike[:, None], 0.0))


def _largest(sample: RowSample, sizes: Float[Tensor, "row key"]) -> list[dict[str, Any]]:
    found: dict[tuple[int, int], dict[str, Any]] = {}
    largest, keys = sizes.max(1) if sizes.numel() else (sizes.new_zeros(0), sizes.new_zeros(0))
    for row in largest.argsort(descending=True, stable=True).tolist():
        layer, head, query = sample.bounded.places[row].tolist()
        if float(largest[row]) < VISIBLE or len(found) == EDGES_NAMED:
            break
        key, arrays = int(keys[row]), ("attention", "effective", "lower", "upper")
        raw, effective, lower, upper = (float(getattr(sample.bounded, name)[row, key]) for name in arrays)
        edge = {"layer": layer, "head": head, "query": query, "key": key, "raw": raw, "effective": effective}
        found.setdefault((layer, head), edge | {"lower": lower, "upper": upper})
    return list(found.values())
