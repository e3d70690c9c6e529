"""A yardstick for determined weight: what it would be if the same weights had met the same values at random."""

import torch

from identikit.attention.estimate import RowSample
from identikit.attention.quantities import edges_wanted
from identikit.attention.result import EffectiveAttention
from identikit.maths.polytope.exact import exact_bounds

_MOST = 64  # rows that are shuffled
_LEAST = 8  # fewer say too little
_SHARE = 20  # one row is shuffled for so many that were bounded: it may cost a twentieth of them


def shuffled_rows(attention: EffectiveAttention, sample: RowSample, *, seed: int) -> dict[str, object] | None:
    """Return how much is determined in some bounded rows, and in the same rows with their values shuffled.

    The weights of a row keep their sizes and its keys keep their values, but which weight goes with which value is
    drawn at random. Both are means over the same `rows`, the second with its standard error; None for a small sample.
    """
    bounded = sample.bounded
    count = min(_MOST, len(bounded.places) // _SHARE)
    if count < _LEAST:
        return None
    generator = torch.Generator().manual_seed(seed)
    places = bounded.places.tolist()
    ordered = sorted(range(len(places)), key=places.__getitem__)  # the order of bounding depends on the machine's speed
    drawn = torch.randperm(len(places), generator=generator)[:count].sort().values
    chosen = [ordered[index] for index in drawn.tolist()]
    n = len(attention.keys)
    rows = attention.captured().rows([(layer, head, query) for layer, head, query in bounded.places[chosen].tolist()])
    weights = rows.attention.clone()
    for row, seen in zip(weights, rows.visible[:, :n], strict=True):
        keys = seen.nonzero()[:, 0]
        row[keys] = row[keys[torch.randperm(len(keys), generator=generator).to(keys.device)]]
    lower = exact_bounds(rows._replace(attention=weights), edges_wanted(weights.shape[1], range(n), top=0)).lower[:, :n]
    shuffled = lower.sum(-1).clamp(max=1.0).cpu()
    return {
        "rows": count,
        "mass": float(bounded.lower[chosen].sum(-1).clamp(max=1.0).mean()),
        "shuffled": float(shuffled.mean()),
        "shuffled_stderr": float(shuffled.std() / count**0.5),
    }
