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
_ROWS_PER_JOB = 8  # that a thread takes at a time, some milliseconds each
_DEPENDENT = 1e-10  # of the largest singular value of an orthonormal basis at the visible keys


def propose(rows: Rows, question: Question, *, both: bool = True, vertices: bool = False) -> Proposals:
    """Solve every free row with the method of `simplex`, on threads of their own; see `Proposals`.

    Without `both`, only the greatest of each objective is found.
    """
    wait_for_compiler()
    from identikit.maths.polytope.simplex import solve_rows

    device = rows.attention.device
    rows = Rows(*(array.cpu().contiguous() for array in rows))
    proposals = Proposals.empty(rows, question, vertices=vertices)
    bounded = torch.zeros(0, dtype=torch.bool) if question.keys is None else question.keys.cpu()
    keys = question.keys_of(rows)
    task = RowTask(
        rows.attention.numpy(),
        rows.visible.numpy(),
        rows.group.numpy(),
        rows.basis.numpy(),
        bounded.numpy(),
        question.all_objectives(rows)[:, len(bounded) :].contiguous().numpy(),
        strongest_keys(rows, keys)[:, : question.top].contiguous().numpy(),
        keys.sum(-1).numpy(),
        both,
    )
    arrays: list[Any] = [tensor.numpy() for tensor in proposals]
    results = Proposals(*arrays)
    jobs = rows.free.nonzero()[:, 0].split(_ROWS_PER_JOB)
    with ThreadPoolExecutor(worker_count()) as pool:
        list(pool.map(lambda indices: solve_rows(task, results, indices.numpy()), jobs))
    return Proposals(*(tensor.to(device) for tensor in proposals))


def propose_plainly(rows: Rows, question: Question, *, both: bool = True, vertices: bool = False) -> Proposals:
    """Solve every free row, one linear program per end; see `propose`."""
    proposals = Proposals.empty(rows, question, vertices=vertices)
    for index in rows.free.nonzero()[:, 0].tolist():
        proposals.failed[index] = not _solve_row(rows, question, proposals, index, both)
    return proposals


def _solve_row(rows: Rows, question: Question, proposals: Proposals, index: int, both: bool) -> bool:
    """Write one row's proposals; returns whether every program was solved, in time."""
    attention = rows.attention[index]
    basis = rows.basis[rows.group[index]]
    visible = rows.visible[index].nonzero()[:, 0]
    program = _Program(attention[visible], basis[visible])
    objectives = question.all_objectives(rows)
    row = rows.select(torch.tensor([index]))
    keys = question.keys_of(row)
    key_count = 0 if question.keys is None else len(question.keys)
    quantities = torch.ones(objectives.shape[1], dtype=torch.bool)
    quantities[:key_count] = keys[0, :key_count].cpu()
    strongest = strongest_keys(row, keys)[0, : question.top]
    for quantity in quantities.nonzero()[:, 0].tolist():
        c = objectives[0 if len(objectives) == 1 else index, quantity]
        is_key = quantity < key_count
        if time.monotonic() > question.until:
            return False
        for sense in (-1, 1) if both or is_key else (1,):
            solution = program.maximum(sense * c[visible])
            if solution is None:
                return False
            vertex = torch.zeros_like(attention)
            vertex[visible] = solution[0].to(vertex)
            duals = proposals.upper if sense > 0 else proposals.lower
            duals[index, quantity] = solution[1].to(duals)
            attained = proposals.greatest if sense > 0 else proposals.least
            attained[index, quantity] = c @ vertex
            distance = ((vertex - attention) @ basis).abs().max()
            proposals.distance[index] = torch.maximum(proposals.distance[index], distance)
            if sense > 0 and is_key:
                proposals.leads[index, : len(strongest), quantity] = vertex[quantity] - vertex[strongest]
            if not is_key and proposals.vertices.shape[1]:
                proposals.vertices[index, quantity - key_count, (sense + 1) // 2] = vertex
    return True


class _Program:
    """One row's constraints: columns of $U$ may depend on each other at its visible keys, rows of `matrix` do not."""

    def __init__(self, attention: Float[Tensor, "seen"], basis: Float[Tensor, "seen rank"]):
        left, singular, right = torch.linalg.svd(basis.cpu(), full_matrices=False)
        real = singular > _DEPENDENT * singular[0]
        self.matrix = left[:, real].mT.numpy()
        self.right = self.matrix @ attention.cpu().numpy()
        self.back = (right[real] / singular[real, None]).mT

    def maximum(self, c: Float[Tensor, "seen"]) -> tuple[Float[Tensor, "seen"], Float[Tensor, "rank"]] | None:
        """Return a vertex with the greatest $c \\cdot a'$ and its dual vector in the row's own basis."""
        from scipy.optimize import linprog

        solution = linprog(
            -c.cpu().numpy(), A_eq=self.matrix, b_eq=self.right, bounds=(0, None), options=_TOLERANCES, method="highs"
        )
        if solution.status != 0:
            return None
        return torch.from_numpy(solution.x), self.back @ torch.from_numpy(-solution.eqlin.marginals)
