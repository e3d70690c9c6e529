"""What replacing sources one after another does to an output: curves, their areas, and the best and the worst order.

A *change* says how far a set of replaced sources moves an output. The change of no source is 0.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from identikit.shapes import Bool, Float, Int, Tensor

Change = Callable[[Bool[Tensor, "set source"]], Float[Tensor, "set"]]
"""Given sets of sources, True where one is replaced: how far each set moves the output."""


def ordered(scores: Float[Tensor, "source"]) -> Int[Tensor, "source"]:
    """Return sources from the largest score to the smallest; equal ones in their own order."""
    return scores.argsort(descending=True, stable=True)


def replaced_first(order: Int[Tensor, "source"]) -> Bool[Tensor, "step source"]:
    """Return the sets that replacing sources in this order goes through: none of them, the first, … and all."""
    n = len(order)
    place = torch.empty_like(order).index_copy(0, order, torch.arange(n))
    return place < torch.arange(n + 1)[:, None]


def area(curve: Float[Tensor, "step"]) -> float:
    r"""Return the mean change over all numbers of replaced sources (AOPC, Samek et al., 2017).

    $$\frac{1}{n} \sum_{k=1}^{n} c(\{s_1, \dots, s_k\})$$

    $c$ is the change, `curve`, whose first entry belongs to no replaced source.
    """
    return float(curve[1:].double().mean())


class Extremes(NamedTuple):
    """The curves of the orders with the greatest and the least area that were found."""

    best: Float[Tensor, "step"]
    worst: Float[Tensor, "step"]

    def normalised(self, curve: Float[Tensor, "step"]) -> float:
        r"""Return where a curve's area lies between the least and the greatest that was found; NaN where these agree.

        $$\frac{A - A_{\min}}{A_{\max} - A_{\min}}$$

        This is NAOPC (Edin et al., 2025). The ends come from a search, so a curve can lie outside of them.
        """
        least = area(self.worst)
        span = area(self.best) - least
        return (area(curve) - least) / span if span > 0 else torch.nan


class _Beam(NamedTuple):
    """The orders a search keeps: the sources that each has replaced, and its curve so far."""

    sets: Bool[Tensor, "order source"]
    curves: Float[Tensor, "order step"]


def extremes(change: Change, n: int, width: int) -> Extremes:
    """Search for the orders of n sources with the greatest and the least area, keeping the best `width` at each step.

    Orders that have replaced the same sources are one from there on, and the better of them is kept. So a width of
    2^n makes the search exact. The two searches share the changes of sets that both ask for.
    """
    start = _Beam(torch.zeros(1, n, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.float64))
    beams = {1.0: start, -1.0: start}
    for _ in range(n):
        grown = {sign: _grown(beam, sign) for sign, beam in beams.items()}
        sets, index = torch.cat([beam.sets for beam in grown.values()]).unique(dim=0, return_inverse=True)
        changes = change(sets).double()[index]
        done = 0
        for sign, beam in grown.items():
            last = changes[done : done + len(beam.sets), None]
            done += len(beam.sets)
            curves = torch.cat([beam.curves, last], dim=1)
            kept = ordered(sign * curves.sum(1))[:width]
            beams[sign] = _Beam(beam.sets[kept], curves[kept])
    return Extremes(beams[1.0].curves[0], beams[-1.0].curves[0])


def _grown(beam: _Beam, sign: float) -> _Beam:
    """Return each order with one more source, for each source that it lacks; of equal sets the best order."""
    order, source = (~beam.sets).nonzero().mT
    sets = beam.sets[order]
    sets[torch.arange(len(source)), source] = True
    best_first = ordered(sign * beam.curves.sum(1)[order])
    unique, index = sets[best_first].unique(dim=0, return_inverse=True)
    first = torch.full((len(unique),), len(index)).scatter_reduce(0, index, torch.arange(len(index)), "amin")
    chosen = best_first[first]
    return _Beam(unique, beam.curves[order[chosen]])
