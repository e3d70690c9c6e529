r"""Exact ends of many rows on the CPU: compiled, a row at a time on each thread, or one plain linear program per end.

A program is $\max c \cdot a'$ subject to $U^\top a' = U^\top a$, $a' \ge 0$ over the keys that a row sees. Plain
programs are solved by `scipy.optimize.linprog`, where compiled code gives up or is not available. What comes back is a
proposal either way: `bounds` proves it.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from identikit.maths.polytope.ahead import wait_for_compiler
from identikit.maths.polytope.bounds import Proposals, Question, strongest_keys
from identikit.maths.polytope.rows import Rows
from identikit.maths.polytope.simplex_state import RowTask
from identikit.maths.threads import worker_count
from identikit.shapes import Float, Tensor

_TOLERANCES = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}  # the smallest accepted
_AT_ONCE = 8  # rows that a thread takes at a time, some milliseconds each
_DEPENDENT = 1e-10  # of the largest singular value of an orthonormal basis at the visible keys


def propose(rows: Rows, wanted: Question, *, both: bool = True, vertices: bool = False) -> Proposals:
    """Solve what is asked of every free row with the method of `simplex`, on threads of their own; see `Proposals`.

    Without `both`, only the greatest of each objective is found.
    """
    wait_for_compiler()
    from identikit.maths.polytope.simplex import solve_rows

    device = rows.attention.device
    rows = Rows(*(part.cpu().contiguous() for part in rows))
    found = Proposals.empty(rows, wanted, vertices=vertices)
    asked = torch.zeros(0, dtype=torch.bool) if wanted.keys is None else wanted.keys.cpu()
    among = rows.visible if wanted.keys is None else rows.visible & asked
    task = RowTask(
        rows.attention.numpy(),
        rows.visible.numpy(),
        rows.group.numpy(),
        rows.basis.numpy(),
        asked.numpy(),
        wanted.all_objectives(rows)[:, len(asked) :].contiguous().numpy(),
        strongest_keys(rows, among)[:, : wanted.top].contiguous().numpy(),
        among.sum(-1).numpy(),
        both,
    )
    arrays: list[Any] = [part.numpy() for part in found]
    proposed = Proposals(*arrays)
    with ThreadPoolExecutor(worker_count()) as pool:
        list(pool.map(lambda some: solve_rows(task, proposed, some.numpy()), rows.free.nonzero()[:, 0].split(_AT_ONCE)))
    return Proposals(*(part.to(device) for part in found))


def propose_plainly(rows: Rows, wanted: Question, *, both: bool = True, vertices: bool = False) -> Proposals:
    """Solve what is asked of every free row, one linear program per end; see `propose`."""
    found = Proposals.empty(rows, wanted, vertices=vertices)
    for index in rows.free.nonzero()[:, 0].tolist():
        found.failed[index] = not _solve_row(rows, wanted, found, index, both)
    return found


def _solve_row(rows: Rows, wanted: Question, found: Proposals, index: int, both: bool) -> bool:
    """Write what is found for one row; returns whether every program was solved, in time."""
    attention = rows.attention[index]
    basis = rows.basis[rows.group[index]]
    seen = rows.visible[index].nonzero()[:, 0]
    program = _Program(attention[seen], basis[seen])
    objectives = wanted.all_objectives(rows)
    first = 0 if wanted.keys is None else len(wanted.keys)
    asked = torch.ones(objectives.shape[1], dtype=torch.bool)
    among = rows.visible[[index]]
    if wanted.keys is not None:
        among = among & wanted.keys.to(among.device)  # a learned sink is visible, and not asked for
        asked[:first] = among[0].cpu()
    strongest = strongest_keys(rows.select(torch.tensor([index])), among)[0, : wanted.top]
    for quantity in asked.nonzero()[:, 0].tolist():
        c = objectives[0 if len(objectives) == 1 else index, quantity]
        if time.monotonic() > wanted.until:
            return False
        for sense in (-1, 1) if both or quantity < first else (1,):
            solved = program.maximum(sense * c[seen])
            if solved is None:
                return False
            vertex = torch.zeros_like(attention)
            vertex[seen] = solved[0].to(vertex)
            duals = found.upper if sense > 0 else found.lower
            duals[index, quantity] = solved[1].to(duals)
            attained = found.greatest if sense > 0 else found.least
            attained[index, quantity] = c @ vertex
            off = ((vertex - attention) @ basis).abs().max()
            found.off[index] = torch.maximum(found.off[index], off)
            if sense > 0 and quantity < first:
                found.ahead[index, : len(strongest), quantity] = vertex[quantity] - vertex[strongest]
            if quantity >= first and found.vertices.shape[1]:
                found.vertices[index, quantity - first, (sense + 1) // 2] = vertex
    return True


class _Program:
    """One row's constraints; columns of $U$ may depend on each other at the keys that it sees, these do not."""

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
