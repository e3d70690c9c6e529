r"""The same programs one by one, with `scipy.optimize.linprog`: where compiled code gives up, or cannot be had.

A program is $\max c \cdot a'$ subject to $U^\top a' = U^\top a$, $a' \ge 0$ over the keys that a row sees. Columns of
$U$ may depend on each other there, so the constraints are first turned into independent ones. What comes back is a
proposal like any other: `bounds` proves it.
"""

from collections.abc import Iterator

import torch

from identikit.maths.polytope.bounds import Proposed, Wanted, strongest_keys
from identikit.maths.polytope.rows import Rows
from identikit.shapes import Float, Tensor

_TOLERANCES = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}  # the smallest accepted
_DEPENDENT = 1e-10  # of the largest singular value of an orthonormal basis at the visible keys


def propose(rows: Rows, wanted: Wanted, *, both: bool = True, vertices: bool = False) -> Proposed:
    """Solve what is asked of every free row, one linear program per end; see `Proposed`."""
    found = Proposed.nothing(rows, wanted, vertices=vertices)
    objectives = wanted.all_objectives(rows)
    first = 0 if wanted.keys is None else rows.attention.shape[1]
    for index in rows.free.nonzero()[:, 0].tolist():
        found.failed[index] = not _solve_row(rows, wanted, objectives, found, index, first, both)
    return found


def _solve_row(
    rows: Rows, wanted: Wanted, objectives: Tensor, found: Proposed, index: int, first: int, both: bool
) -> bool:
    """Write what is found for one row; returns whether every program was solved."""
    seen = rows.visible[index].nonzero()[:, 0]
    program = _Program(rows.attention[index, seen], rows.basis[rows.group[index], seen])
    strongest = strongest_keys(rows, rows.visible)[index, : found.ahead.shape[1]]
    for quantity, c in _asked(wanted, objectives[0 if len(objectives) == 1 else index], rows.visible[index]):
        for sense in (-1, 1) if both or quantity < first else (1,):
            solved = program.maximum(sense * c[seen])
            if solved is None:
                return False
            vertex = torch.zeros_like(rows.attention[index])
            vertex[seen] = solved[0].to(vertex)
            duals = found.upper if sense > 0 else found.lower
            duals[index, quantity] = solved[1].to(duals)
            attained = found.greatest if sense > 0 else found.least
            attained[index, quantity] = c @ vertex
            off = (vertex - rows.attention[index]) @ rows.basis[rows.group[index]]
            found.off[index] = torch.maximum(found.off[index], off.abs().max())
            if sense > 0 and quantity < first:
                found.ahead[index, : len(strongest), quantity] = vertex[quantity] - vertex[strongest]
            if quantity >= first and found.vertices.shape[1]:
                found.vertices[index, quantity - first, (sense + 1) // 2] = vertex
    return True


def _asked(
    wanted: Wanted, objectives: Float[Tensor, "quantity key"], visible: Tensor
) -> Iterator[tuple[int, Float[Tensor, "key"]]]:
    """Yield the quantities that are asked for, with their numbers."""
    n = objectives.shape[1]
    for quantity, c in enumerate(objectives):
        is_key = wanted.keys is not None and quantity < n
        if is_key and not (bool(wanted.keys[quantity]) and bool(visible[quantity])):  # pyright: ignore
            continue
        yield quantity, c


class _Program:
    """One row's constraints, made independent."""

    def __init__(self, attention: Float[Tensor, "seen"], basis: Float[Tensor, "seen rank"]):
        left, singular, right = torch.linalg.svd(basis.cpu(), full_matrices=False)
        kept = singular > _DEPENDENT * singular[0]
        self.matrix = left[:, kept].mT.numpy()
        self.right = self.matrix @ attention.cpu().numpy()
        self.back = (right[kept] / singular[kept, None]).mT

    def maximum(self, c: Float[Tensor, "seen"]) -> tuple[Float[Tensor, "seen"], Float[Tensor, "rank"]] | None:
        """Return a vertex with the greatest $c \\cdot a'$ and its dual vector in the row's own basis."""
        from scipy.optimize import linprog

        solved = linprog(
            -c.cpu().numpy(), A_eq=self.matrix, b_eq=self.right, bounds=(0, None), options=_TOLERANCES, method="highs"
        )
        if solved.status != 0:
            return None
        return torch.from_numpy(solved.x), self.back @ torch.from_numpy(-solved.eqlin.marginals)
