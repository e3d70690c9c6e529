"""The bound that any dual vector proves, and a greatest reading with room for the output, from their definitions."""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

Array = NDArray[np.float64]


def dual_bound(objective: Array, attention: Array, values: Array, y: Array, room: float = 0.0) -> float:
    """Bound c·a' over all a' with ‖(a' − a)T‖ ≤ room, with one number of y per column of T.

    c·a' = (a'T)·y + a'·(c − Ty) ≤ (aT)·y + room·‖y‖ + the greatest of c_m − (Ty)_m.
    """
    output = sum(weight * value for weight, value in zip(attention, values, strict=True))
    greatest = max(c - float(value @ y) for c, value in zip(objective, values, strict=True))
    return float(output @ y) + room * float(np.linalg.norm(y)) + greatest


def greatest(objective: Array, attention: Array, values: Array, room: float) -> float:
    """The greatest c·a' over all distributions a' with ‖(a' − a)T‖ ≤ room, by a general solver."""
    found = minimize(
        lambda row: -objective @ row,
        attention,
        jac=lambda row: -objective,
        bounds=[(0, 1)] * len(attention),
        constraints=[
            {"type": "eq", "fun": lambda row: row.sum() - 1, "jac": np.ones_like},
            {
                "type": "ineq",
                "fun": lambda row: room**2 - ((row - attention) @ values) @ ((row - attention) @ values),
                "jac": lambda row: -2 * values @ ((row - attention) @ values),
            },
        ],
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 500},
    )
    assert found.success or found.status == 8, found.message  # 8: no better point on the line, as at an optimum
    return float(-found.fun)
