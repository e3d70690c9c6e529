"""Exact ends of many rows on the CPU: the simplex method of `simplex`, a row at a time on each thread."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from identikit.maths.polytope.bounds import Proposed, Wanted, strongest_keys
from identikit.maths.polytope.rows import Rows
from identikit.maths.polytope.simplex import solve as compiled
from identikit.maths.threads import independent


def propose(rows: Rows, wanted: Wanted, *, both: bool = True, vertices: bool = False) -> Proposed:
    """Solve what is asked of every free row, on threads of their own; see `Proposed`.

    Without `both`, only the greatest of each objective is found.
    """
    device = rows.attention.device
    rows = Rows(*(part.cpu() for part in rows))
    n = rows.attention.shape[1]
    found = Proposed.nothing(rows, wanted, vertices=vertices)
    asked = np.zeros(0, np.bool_) if wanted.keys is None else wanted.keys.cpu().numpy()
    first = 0 if wanted.keys is None else n
    objectives = wanted.all_objectives(rows)[:, first:].numpy()
    among = rows.visible if wanted.keys is None else rows.visible & wanted.keys.cpu()
    strongest = strongest_keys(rows, among)[:, : min(wanted.top, n)].contiguous().numpy()
    basis = rows.basis.numpy()
    group = rows.group.tolist()
    attention = rows.attention.numpy()
    failed = found.failed.numpy()
    off = found.off[:, None].numpy()
    outputs = [part.numpy() for part in (found.upper, found.lower, found.greatest, found.least, found.ahead)]
    shown = found.vertices.numpy()

    def solve(index: int) -> None:
        seen = rows.visible[index].nonzero()[:, 0].numpy()
        c = np.ascontiguousarray(objectives[0 if len(objectives) == 1 else index])
        known = int(among[index].sum())
        own = [part[index] for part in outputs]
        failed[index] = not compiled(
            basis[group[index]], seen, attention[index], asked, c, strongest[index, :known], both,
            *own, off[index], shown[index],
        )  # fmt: skip

    with ThreadPoolExecutor(independent()) as pool:
        list(pool.map(solve, rows.free.nonzero()[:, 0].tolist()))
    return Proposed(*(part.to(device) for part in found))
