r"""Which attention rows on the simplex give the same head output as a given one (section 3.3 of the paper).

One head and one query at a time. Throughout, $a$ is the row of attention over the keys that the query sees (argument
`attention`), $V$ their values (argument `values`), and the row's polytope is

$$P(a) = \{a' : a'[V, 1] = a[V, 1], \; a' \ge 0\},$$

all distributions over the visible keys with the output $aV$. The caller leaves invisible keys out of both arguments,
and gives the values in the precision in which they were computed: it decides their rank.

Departures from the paper: $V$ replaces $T = VH$. Where the head's slice $H$ of the output projection has full row rank,
$LN(V) = LN(T)$ and $P(a)$ is the same set; where it does not, give $V R^\top$ with $H^\top = QR$. And $a$ is first
renormalised in float64, because a sum that is off by float32 rounding leaves the simplex. Results are float64.
"""

import math

import numpy as np
import torch

from identikit.errors import IdentikitError, InputError
from identikit.maths.polytope.rows import decomposed
from identikit.shapes import Float, Tensor

_NO_COMPONENT = 1e-10  # of a direction's length
_ROUND_OFF = 1e-13  # a null direction's component this small is 0: against a weight of 0 it would stop every step
_SAME_OUTPUT = 1e-12  # in the orthonormal coordinates Uᵀa, which are at most 1
_PENALTY = 1e7  # M of `minimum_norm`; scipy below 1.15 squares its condition and loses the norm
_ROUNDS = 20


def alternative(
    attention: Float[Tensor, " key"], values: Float[Tensor, "key d_v"], direction: Float[Tensor, " key"]
) -> Float[Tensor, " key"]:
    r"""Move a row along a null direction until the first weight reaches zero: same output, still a distribution.

    $$a' = a + \lambda_{max}\,\tilde a, \qquad \lambda_{max} = \min_{i : \tilde a_i < 0} -a_i / \tilde a_i
    \qquad \text{(section 3.3)}$$

    $\tilde a$ is `direction` projected onto $LN([V, 1])$. The row stays where it is if it has a zero weight that
    $\tilde a$ would lower, as in almost every direction from a one-hot row.
    """
    weights, basis = _row(attention, values)
    n, rank = basis.shape
    if rank == n:
        raise InputError(
            f"Looking for an alternative attention in a row that is identifiable: its {n} visible keys have values of "
            f"rank {rank} (with the sum of the weights), so no other attention gives its output. Choose a query that "
            f"sees more keys than that."
        )
    null = _null_direction(direction.detach().to("cpu", torch.float64), basis)
    steps = torch.where(null < 0, -weights / null, math.inf)
    blocking = steps.argmin()
    moved = (weights + steps[blocking] * null).clamp(min=0.0)
    moved[blocking] = 0.0
    return (moved / moved.sum()).to(attention.device)


def minimum_norm(attention: Float[Tensor, " key"], values: Float[Tensor, "key d_v"]) -> Float[Tensor, " key"]:
    r"""Find the attention row of least Euclidean norm on the simplex with the same output (end of section 3.4).

    $$\min \|a'\|^2 \quad \text{subject to} \quad U^\top a' = U^\top a, \; a' \ge 0$$

    By the method of multipliers: $a' = \arg\min_{a' \ge 0} \|a'\|^2 + M^2 \|U^\top a' - t\|^2$ is a non-negative
    least-squares problem, which an active-set method solves exactly; then $t \leftarrow t + (U^\top a - U^\top a')$,
    from $t = U^\top a$. Each round shrinks the gap by about $1/M^2$; one or two reach rounding. It needs no interior
    point of $P(a)$, which a one-hot row may not have.
    """
    from scipy.optimize import nnls

    weights, basis = _row(attention, values)
    n, rank = basis.shape
    if rank == n:
        return weights.to(attention.device)
    U = basis.numpy()
    right = U.T @ weights.numpy()
    system = np.concatenate([_PENALTY * U.T, np.eye(n)])
    target = right.copy()
    gap = np.zeros(rank)
    for _ in range(_ROUNDS):
        target += gap
        least, _ = nnls(system, np.concatenate([_PENALTY * target, np.zeros(n)]), maxiter=50 * n)
        gap = right - U.T @ least
        if np.abs(gap).max() <= _SAME_OUTPUT:
            return torch.from_numpy(least / least.sum()).to(attention.device)
    raise IdentikitError(
        f"Finding the attention of least norm over {n} keys: after {_ROUNDS} rounds its output is off by "
        f"{np.abs(gap).max():.3g}; expected at most {_SAME_OUTPUT:g}. Please report this row."
    )


def _row(
    attention: Float[Tensor, " key"], values: Float[Tensor, "key d_v"]
) -> tuple[Float[Tensor, " key"], Float[Tensor, "key rank"]]:
    """Return the row's weights, summing to 1 in float64, and an orthonormal basis of $[V, 1]$, both on the CPU."""
    weights = attention.detach().to("cpu", torch.float64)
    total = float(weights.sum())
    if not (math.isfinite(total) and total > 0 and bool((weights >= 0).all())):
        raise InputError(
            f"Reading an attention row of {weights.numel()} visible keys whose weights sum to {total:.6g}: expected "
            f"finite weights of at least 0 with a positive sum. Check the model's output for this text."
        )
    basis = decomposed(values[None]).basis()[0]
    return weights / total, basis[:, basis.any(0)]


def _null_direction(wanted: Float[Tensor, " key"], basis: Float[Tensor, "key rank"]) -> Float[Tensor, " key"]:
    """Return the part of a direction orthogonal to the basis, of length 1; round-off components are exactly 0."""
    n, rank = basis.shape
    null = wanted - basis @ (basis.T @ wanted)
    null = null - basis @ (basis.T @ null)
    if not float(null.norm()) > _NO_COMPONENT * float(wanted.norm()):
        raise InputError(
            f"Looking for an alternative attention along a direction of length {float(wanted.norm()):.3g}: it has no "
            f"component in the row's null space ({n - rank} dimensions), so the output cannot stay the same. Give "
            f"another direction, or none."
        )
    null = null / null.norm()
    return torch.where(null.abs() <= _ROUND_OFF, 0.0, null)
