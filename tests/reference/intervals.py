"""Section 3.3 from its definitions: the null space by SVD, λ_max by a loop, intervals by one linprog per edge end.

Also the minimum-norm row by trying every support. Written to be read, not to be fast.
"""

from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

Array = NDArray[np.float64]
_TOLERANCES = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}


def augmented(values: Array) -> Array:
    """[V, 1]."""
    return np.concatenate([values, np.ones((len(values), 1))], axis=1)


def null_projector(values: Array, rank: int) -> Array:
    """The projector on LN([V, 1]) when [V, 1] has this rank: its left singular vectors past the first ones."""
    left, _, _ = np.linalg.svd(augmented(values), full_matrices=True)
    null = left[:, rank:]
    return null @ null.T


def largest_step(attention: Array, direction: Array) -> float:
    """λ_max = min over {i : ã_i < 0} of −a_i / ã_i."""
    step = np.inf
    for weight, change in zip(attention, direction, strict=True):
        if change < 0:
            step = min(step, -weight / change)
    return float(step)


def optimum(cost: Array, attention: Array, values: Array) -> Array:
    """argmin of cost·a' subject to a'[V, 1] = a[V, 1] and a' ≥ 0, from scratch."""
    matrix = augmented(values).T
    found = linprog(cost, A_eq=matrix, b_eq=matrix @ attention, bounds=(0, None), options=_TOLERANCES)
    assert found.status == 0, found.message
    return found.x


def intervals(attention: Array, values: Array) -> tuple[Array, Array]:
    """min and max of each a'_j, one linear program per end."""
    unit = np.eye(len(attention))
    lower = [optimum(unit[key], attention, values)[key] for key in range(len(attention))]
    upper = [optimum(-unit[key], attention, values)[key] for key in range(len(attention))]
    return np.array(lower), np.array(upper)


def minimum_norm(attention: Array, values: Array) -> Array:
    """min ‖a'‖² subject to a'[V, 1] = a[V, 1] and a' ≥ 0: the best of the least-norm solutions of every support."""
    matrix = augmented(values).T
    best = attention
    for support in product([False, True], repeat=len(attention)):
        row = np.zeros(len(attention))
        row[list(support)] = np.linalg.pinv(matrix[:, list(support)], rcond=1e-10) @ (matrix @ attention)
        feasible = row.min() >= 0 and np.abs(matrix @ (row - attention)).max() <= 1e-10
        if feasible and row @ row < best @ best:
            best = row
    return best


def certain_order(attention: Array, values: Array, top: int, best=optimum) -> int:
    """How many of the strongest keys, up to `top`, come in the same order in every such row: all differences tried."""
    order = np.argsort(-attention, kind="stable")
    for place in range(min(top, len(order))):
        for other in order[place + 1 :]:
            cost = np.zeros(len(order))
            cost[order[place]], cost[other] = 1.0, -1.0
            if -cost @ best(cost, attention, values) > 1e-9:
                return place
    return min(top, len(order))


def sink_optimum(cost: Array, attention: Array, values: Array) -> Array:
    """argmin of cost·a' subject to a'V = aV, Σa' ≤ 1 and a' ≥ 0: a learned sink takes what is left."""
    found = linprog(
        cost,
        A_ub=np.ones((1, len(attention))),
        b_ub=[1.0],
        A_eq=values.T,
        b_eq=values.T @ attention,
        bounds=(0, None),
        options=_TOLERANCES,
    )
    assert found.status == 0, found.message
    return found.x


def sink_intervals(attention: Array, values: Array) -> tuple[Array, Array]:
    """min and max of each a'_j where a learned sink takes what is left of a row."""
    unit = np.eye(len(attention))
    lower = [sink_optimum(unit[key], attention, values)[key] for key in range(len(attention))]
    upper = [sink_optimum(-unit[key], attention, values)[key] for key in range(len(attention))]
    return np.array(lower), np.array(upper)
