r"""Dual vectors in the coordinates of the values themselves, for proofs that trust no decomposition.

Solvers propose vectors $y$ for the basis $U$ of a row's set (see `rows`). Its columns are combinations of those of
$[V, 1]$, so there is a vector $z$ with $Vz = Uy$ at the visible keys, but for a constant, which changes no bound. Any
$z$ gives a valid bound (`identikit.proof` states the theorem); one that is a little off only widens it a little.
"""

from collections.abc import Sequence
from fractions import Fraction
from importlib.util import find_spec
from typing import NamedTuple

import torch

from identikit.maths.polytope.bounds import Question
from identikit.maths.polytope.exact import solve
from identikit.maths.polytope.rows import Rows
from identikit.maths.threads import one_thread
from identikit.shapes import Float, Tensor


class Ends(NamedTuple):
    """Where a row's objective is least and greatest: vectors $z$ that prove it, and attention that attains it."""

    duals: Float[Tensor, "2 d_v"]
    vertices: Float[Tensor, "2 key"]


@one_thread()
def propose_ends(
    rows: Rows, values: list[Float[Tensor, "key d_v"]], low: Float[Tensor, "row key"], high: Float[Tensor, "row key"]
) -> list[Ends]:
    r"""Return for each row what bounds the least of `low` · a' and the greatest of `high` · a', and what attains them.

    `values` are those of each row's keys. Of a row that is not free, $z$ solves $Vz = c$ itself, and the row is its own
    only attention.
    """
    rows = Rows(*(array.cpu() for array in rows))
    objectives = torch.stack([low, high], dim=1)
    question, scale = Question(objectives=objectives).normalised()
    assert scale is not None
    proposals = solve(rows, question, vertices=True)
    solved = rows.free & ~proposals.failed
    ends = []
    for row, group in enumerate(rows.group.tolist()):
        visible = rows.visible[row]
        scores = objectives[row, :, visible].mT
        vertices = rows.attention[row].expand(2, -1)
        if solved[row]:
            y = torch.stack([-proposals.lower[row, 0], proposals.upper[row, 1]]) * scale[row, :, None]
            scores = rows.basis[group][visible] @ y.mT
            vertices = torch.stack([proposals.vertices[row, 0, 0], proposals.vertices[row, 1, 1]]).clamp(min=0)
        ends.append(Ends(_vectors_with_scores(values[row][visible].cpu().double(), scores), vertices))
    return ends


def _vectors_with_scores(V: Float[Tensor, "seen d_v"], scores: Float[Tensor, "seen side"]) -> Float[Tensor, "side d_v"]:
    """Solve for vectors that have these scores at the values, up to a constant; refined once."""
    centred = V - V.mean(0)
    scores = scores - scores.mean(0)
    z = torch.linalg.lstsq(centred, scores, driver="gelsd").solution
    z = z + torch.linalg.lstsq(centred, scores - centred @ z, driver="gelsd").solution
    return z.mT.nan_to_num(0.0, 0.0, 0.0)


def exact_vertex(
    values: Sequence[Sequence[Fraction]], total: Fraction, output: Sequence[Fraction], order: Sequence[int]
) -> dict[int, Fraction] | None:
    r"""Solve $a' [V, 1] = (o, \sum a)$ in rational numbers; returns the weights of the keys that have any.

    `order` lists the keys that may have weight, the likeliest first; as many are used as are independent. None where
    no such weights are at least 0, or python-flint is not installed.
    """
    if find_spec("flint") is None:
        return None
    from flint import fmpq, fmpq_mat

    def rational(number: Fraction | int) -> fmpq:
        return fmpq(number.numerator, number.denominator)

    keys = list(order)[: len(output) + 1]
    equations = [[*(values[key][dim] for key in keys), right] for dim, right in enumerate(output)]
    equations.append([*(Fraction(1) for _ in keys), total])
    entries = [rational(entry) for equation in equations for entry in equation]
    reduced, rank = fmpq_mat(len(equations), len(keys) + 1, entries).rref()
    weights = {}
    for line in range(rank):
        pivot = next(column for column in range(len(keys) + 1) if reduced[line, column] != 0)
        right = reduced[line, len(keys)]
        if pivot == len(keys) or right < 0:
            return None
        weights[keys[pivot]] = Fraction(int(right.p), int(right.q))
    return weights
