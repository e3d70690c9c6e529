"""Section 3.3 from its definitions: the null space by SVD, λ_max by a loop, intervals by one linprog per edge end."""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog, minimize

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


def intervals(attention: Array, values: Array) -> tuple[Array, Array]:
    """min and max of each a'_j subject to a'[V, 1] = a[V, 1] and a' ≥ 0, each program from scratch."""
    matrix = augmented(values).T
    ends = np.empty((2, len(attention)))
    for key in range(len(attention)):
        for end, sense in enumerate((1.0, -1.0)):
            cost = np.zeros(len(attention))
            cost[key] = sense
            found = linprog(cost, A_eq=matrix, b_eq=matrix @ attention, bounds=(0, None), options=_TOLERANCES)
            assert found.status == 0, found.message
            ends[end, key] = found.x[key]
    return ends[0], ends[1]


def minimum_norm(attention: Array, values: Array) -> Array:
    """min ‖a'‖² subject to a'[V, 1] = a[V, 1] and a' ≥ 0, by sequential quadratic programming from a."""
    _, singular, right = np.linalg.svd(augmented(values))
    matrix = (augmented(values) @ right[: int((singular > 1e-9 * singular[0]).sum())].T).T
    found = minimize(
        lambda row: row @ row,
        attention,
        jac=lambda row: 2 * row,
        bounds=[(0, None)] * len(attention),
        constraints={"type": "eq", "fun": lambda row: matrix @ (row - attention), "jac": lambda _: matrix},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    assert found.success, found.message
    return found.x
