r"""Another attention row with the same head output: a step along a null direction (section 3.3 of the paper).

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

import torch

from identikit.errors import InputError
from identikit.maths.polytope.rows import decompose_values
from identikit.shapes import Float, Tensor

_NO_COMPONENT = 1e-10  # of a direction's length
_ROUND_OFF = 1e-13  # a null direction's component this small is 0: against a weight of 0 it would stop every step


def alternative(
    attention: Float[Tensor, " key"], values: Float[Tensor, "key d_v"], direction: Float[Tensor, " key"]
) -> Float[Tensor, " key"]:
    r"""Move a row along a null direction until the first weight reaches zero: same output, still a distribution.

    $$a' = a + \lambda_{max}\,\tilde a, \qquad \lambda_{max} = \min_{i : \tilde a_i < 0} -a_i / \tilde a_i
    \qquad \text{(section 3.3)}$$

    $\tilde a$ is `direction` projected onto $LN([V, 1])$. The row stays where it is if it has a zero weight that
    $\tilde a$ would lower, as in almost every direction from a one-hot row.
    """
    weights = attention.detach().to("cpu", torch.float64)
    total = float(weights.sum())
    if not (math.isfinite(total) and total > 0 and bool((weights >= 0).all())):
        raise InputError(
            f"Reading an attention row of {weights.numel()} visible keys whose weights sum to {total:.6g}: expected "
            f"finite weights of at least 0 with a positive sum. Check the model's output for this text."
        )
    weights = weights / total
    basis = decompose_values(values[None]).basis()[0]
    basis = basis[:, basis.any(0)]
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


def _null_direction(direction: Float[Tensor, " key"], basis: Float[Tensor, "key rank"]) -> Float[Tensor, " key"]:
    """Return the part of a direction orthogonal to the basis, of length 1; round-off components are exactly 0."""
    n, rank = basis.shape
    null = direction - basis @ (basis.T @ direction)
    null = null - basis @ (basis.T @ null)
    if not float(null.norm()) > _NO_COMPONENT * float(direction.norm()):
        raise InputError(
            f"Looking for an alternative attention along a direction of length {float(direction.norm()):.3g}: it has "
            f"no component in the row's null space ({n - rank} dimensions), so the output cannot stay the same. Give "
            f"another direction, or none."
        )
    null = null / null.norm()
    return torch.where(null.abs() <= _ROUND_OFF, 0.0, null)
