"""Inversion as it is defined: one full forward pass per candidate, and the nearest one wins."""

import torch

from identikit.models.model import Model
from identikit.shapes import Float, Tensor
from identikit.tokens.continuation import ids_batch


def candidate_hidden(
    model: Model, before: list[int], candidates: list[int], segments: Tensor | None = None
) -> list[Float[Tensor, "layer d"]]:
    """Run each candidate behind the tokens before it, and return its hidden vector of every layer."""
    found = []
    for candidate in candidates:
        ids = torch.tensor([[*before, candidate]])
        part = None if segments is None else segments[:, : ids.shape[1]]
        trace = model.trace(ids_batch(ids, part))
        found.append(torch.stack([hidden[0, -1] for hidden in trace.hidden]))
    return found


def ranked(
    hidden: Float[Tensor, " d"], candidates: Float[Tensor, "candidate d"], distance: str
) -> list[tuple[float, int]]:
    """Return every candidate's distance to a hidden vector, relative to its norm where it is L2, nearest first."""
    found = []
    for index, vector in enumerate(candidates):
        if distance == "l2":
            off = float(((vector - hidden) ** 2).sum() ** 0.5 / (hidden**2).sum() ** 0.5)
        else:
            off = 1 - float((vector * hidden).sum() / ((vector**2).sum() ** 0.5 * (hidden**2).sum() ** 0.5))
        found.append((off, index))
    return sorted(found)
