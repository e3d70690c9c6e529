r"""How far a head's own queries can move its attention while the output stays the same.

Three sets answer the question of what a row of attention could have been, each inside the one before: any weights with
this output (`effective`), any attention with this output (`polytope`), and any attention that the head could produce.
For the last, the keys are given and only the query moves. One row has attention $a$ over keys $k_p$ and values $v_p$,
and output $o = \sum_p a_p v_p$. To first order, a step $dq$ of its query moves attention and output by

$$da_p = s\,a_p\,(D_p k_p - \bar k) \cdot dq, \qquad do = s\,C\,dq, \qquad
C = \sum_p a_p (v_p - o)(D_p k_p)^\top, \qquad \bar k = \sum_p a_p D_p k_p$$

where $s$ is the scaling and $D_p$ the slope of a soft-cap at the score of key p, otherwise 1. With $B$ the matrix of
rows $\sqrt{a_p}\,(D_p k_p - \bar k)$, the attention that the head can reach near $a$ without moving the output has
dimension

$$\mathrm{rank}(B) - \mathrm{rank}(C).$$

The weights belong into $B$: a key whose weight underflows cannot be reached. A bias on the scores that does not depend
on the query changes nothing but $a$. Where queries are normalised (qk-norm) they move on a surface, and this is an
upper bound.
"""

import math
from typing import NamedTuple

import torch
from torch.linalg import eigvalsh, svdvals, vector_norm

from identikit.maths.linalg import BYTES, column_scales
from identikit.maths.threads import decompose
from identikit.shapes import Float, Int, Tensor


class Reach(NamedTuple):
    r"""What the queries of each row can reach.

    - `dim`: the dimension of the reachable attention with the same output
    - `condition`: the largest singular value of $C$ divided by the smallest that is not 0; NaN where all are, because
      no query moves the output
    """

    dim: Int[Tensor, "head query"]
    condition: Float[Tensor, "head query"]


def reachable(
    attention: Float[Tensor, "head query key"],
    keys: Float[Tensor, "head #query key d_k"],
    values: Float[Tensor, "head key d_v"],
    *,
    eps: float,
    slope: Float[Tensor, "head query key"] | None = None,
) -> Reach:
    r"""Compute the reachable dimension of every row, a few queries at a time; all in float64.

    `attention` is $a$, 0 on keys that the row does not see; `keys` are $k_p$ (with a query axis of more than 1 where a
    row has keys of its own), `values` $v_p$, and `slope` is $D_p$. Values are as the output projection passes them on.

    `eps` is the unit in which keys and values were rounded, and it decides the ranks. Errors $\delta k_p$ and
    $\delta v_p$ of relative size eps, independent of each other, move $B$ and $C$ in the Frobenius norm by about

    $$\mathrm{eps}\,\Bigl(\sum_p a_p |D_p k_p|^2\Bigr)^{1/2} \quad\text{and}\quad
    \mathrm{eps}\,\Bigl(\sum_p a_p^2\,\bigl(|v_p|^2\,|D_p k_p - \bar k|^2 + |v_p - o|^2\,|D_p k_p|^2\bigr)\Bigr)^{1/2}$$

    Singular values up to 4 times that are rounding. The dimension is that of keys and values whose uneven columns are
    brought to one size (`linalg.column_scales`); how far the output moves is measured as it is.
    """
    heads, rows, n = attention.shape
    width = keys.shape[-1] + values.shape[-1]
    step = max(1, BYTES // (24 * heads * n * width))
    reaches = []
    for start in range(0, rows, step):
        queries = slice(start, start + step)
        weights = attention[:, queries].double()
        sloped = (keys if keys.shape[1] == 1 else keys[:, queries]).double()
        if slope is not None:
            sloped = sloped * slope[:, queries, :, None].double()
        reach = _reach(weights, sloped, values.double(), eps)
        by_key = column_scales(sloped)
        by_value = column_scales(values.double())
        if bool((by_key != 1).any() | (by_value != 1).any()):
            reach = reach._replace(dim=_reach(weights, sloped * by_key, values.double() * by_value, eps).dim)
        reaches.append(reach)
    return Reach(*(torch.cat(field, dim=1) for field in zip(*reaches, strict=True)))


def _reach(
    weights: Float[Tensor, "head row key"],
    keys: Float[Tensor, "head #row key d_k"],
    values: Float[Tensor, "head key d_v"],
    eps: float,
) -> Reach:
    """Compute `reachable` for as many rows as fit in memory."""
    exact = eps <= torch.finfo(torch.float64).eps  # a Gram matrix cannot resolve it, and our products round as much
    unit = 4 * eps * (math.sqrt(keys.shape[-1]) if exact else 1.0)
    root = weights.sqrt()[..., None]
    B = root * (keys - weights[:, :, None] @ keys)
    W = root * (values[:, None] - (weights @ values)[:, :, None])
    C = W.mT @ B
    by_value = weights * vector_norm(values, dim=-1)[:, None].square() * vector_norm(B, dim=-1).square()
    by_key = weights * vector_norm(W, dim=-1).square() * vector_norm(keys, dim=-1).square()
    singular = decompose(svdvals, C)
    real = singular > (unit * (by_value + by_key).sum(-1).sqrt())[..., None]
    fixed = real.sum(-1)
    # The row space of B contains that of C: where no larger rank is possible, that of B is known.
    largest_rank = ((weights > 0).sum(-1) - 1).clamp(min=0, max=keys.shape[-1])
    moved = fixed.clone()
    unknown = fixed < largest_rank
    size = (weights * vector_norm(keys, dim=-1).square()).sum(-1).sqrt()
    lengths = decompose(svdvals if exact else _singular_by_gram, B[unknown])
    moved[unknown] = moved[unknown].maximum((lengths > unit * size[unknown][:, None]).sum(-1))
    smallest = singular.masked_fill(~real, torch.inf).amin(-1)
    condition = torch.where(fixed > 0, singular.amax(-1) / smallest, torch.nan)
    return Reach(moved - fixed, condition)


def _singular_by_gram(matrices: Float[Tensor, "*batch key d"]) -> Float[Tensor, "*batch d"]:
    return eigvalsh(matrices.mT @ matrices).clamp(min=0).sqrt()
