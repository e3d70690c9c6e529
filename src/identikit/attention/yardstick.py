"""A yardstick for determined weight: what it would be if the same weights had met the same values at random."""

import torch

from identikit.attention.estimate import RowSample
from identikit.attention.quantities import key_weights
from identikit.attention.result import EffectiveAttention
from identikit.maths.polytope.exact import exact_bounds

_MOST_ROWS = 64  # rows that are shuffled
_FEWEST_ROWS = 8  # fewer say too little
_BOUNDED_PER_ROW = 20  # one row is shuffled for so many bounded ones, which adds about a twentieth to the time


def shuffled_rows(attention: EffectiveAttention, sample: RowSample, *, seed: int) -> dict[str, object] | None:
    """Return how much is determined in some bounded rows, and in the same rows with their values shuffled.

    The weights of a row keep their sizes and its keys keep their values, but which weight goes with which value is
    drawn at random. Both are means over the same `rows`, the second with its standard error; None for a small sample.
    """
    bounded = sample.bounded
    count = min(_MOST_ROWS, len(bounded.places) // _BOUNDED_PER_ROW)
    if count < _FEWEST_ROWS:
        return None
    generator = torch.Generator().manual_seed(seed)
    row_indices = [(layer, head, query) for layer, head, query in bounded.places.tolist()]
    in_order = sorted(range(len(row_indices)), key=row_indices.__getitem__)  # that of bounding depends on the machine
    drawn = torch.randperm(len(row_indices), generator=generator)[:count].sort().values
    drawn_rows = [in_order[index] for index in drawn.tolist()]
    n = len(attention.keys)
    rows = attention.captured().rows([row_indices[row] for row in drawn_rows])
    weights = rows.attention.clone()
    for row, visible in zip(weights, rows.visible[:, :n], strict=True):
        keys = visible.nonzero()[:, 0]
        row[keys] = row[keys[torch.randperm(len(keys), generator=generator).to(keys.device)]]
    question = key_weights(weights.shape[1], range(n), top=0)
    lower = exact_bounds(rows._replace(attention=weights), question).lower[:, :n]
    shuffled = lower.sum(-1).clamp(max=1.0).cpu()
    return {
        "rows": count,
        "mass": float(bounded.lower[drawn_rows].sum(-1).clamp(max=1.0).mean()),
        "shuffled": float(shuffled.mean()),
        "shuffled_stderr": float(shuffled.std() / count**0.5),
    }
