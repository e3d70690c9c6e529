r"""Many attention rows at once, and the set of attention that gives each of them its output.

For one row, $a$ is its attention over the keys that it sees, $T = VH$ their values as the output projection passes them
on, $o = aT$ the output. All attention with this output, exactly or to within $\varepsilon$, is

$$P_\varepsilon(a) = \{a' \ge 0 : \textstyle\sum a' = 1, \; \|(a' - a) T\| \le \varepsilon \|o\|\}.$$

With $\mu$ the mean of $T$'s rows and $T - 1\mu^\top = L \Sigma Q^\top$, the basis $U = [1/\sqrt n, L]$ turns this into
coordinates that are at most 1: $U^\top a' = U^\top a + \delta$, where $\delta$ is 0 along the first column and
$\|\Sigma\delta\| \le \varepsilon\|o\|$ along the others. A row that sees only some of the keys uses the same $U$, and gives
no weight to the others. Results are float64.
"""

import math
from typing import NamedTuple

import torch

from identikit.shapes import Bool, Float, Int, Tensor


class Rows(NamedTuple):
    """Rows of attention, each with its set $P(a)$; several rows of a head share one basis.

    - `attention`: weights in float64 that sum to 1, 0 on keys that the row does not see; `visible`: the keys it sees
    - `group`: which basis each row uses; rows of a group stand together
    - `basis`: $U$; columns beyond a group's rank are 0
    - `scale`: $\\Sigma$, infinite for the column of ones and for columns that are 0
    - `output`: $\\|o\\|$ of each row
    - `free`: whether the row's visible values are dependent; any other row is the only attention with its output
    """

    attention: Float[Tensor, "row key"]
    visible: Bool[Tensor, "row key"]
    group: Int[Tensor, "row"]
    basis: Float[Tensor, "group key rank"]
    scale: Float[Tensor, "group rank"]
    output: Float[Tensor, "row"]
    free: Bool[Tensor, "row"]

    @property
    def right(self) -> Float[Tensor, "row rank"]:
        r"""The right-hand side $U^\top a$ of each row."""
        right = self.attention.new_zeros(len(self.group), self.basis.shape[2])
        for group, rows in self.by_group():
            right[rows] = self.attention[rows] @ self.basis[group]
        return right

    def by_group(self) -> list[tuple[int, slice]]:
        """Return each group that has rows, and where they stand."""
        groups, counts = torch.unique_consecutive(self.group, return_counts=True)
        stops = counts.cumsum(0).tolist()
        return [
            (group, slice(stop - count, stop))
            for group, count, stop in zip(groups.tolist(), counts.tolist(), stops, strict=True)
        ]

    def some(self, chosen: Tensor) -> "Rows":
        """Return the chosen rows (positions in order, or a mask) with all bases."""
        return self._replace(
            attention=self.attention[chosen],
            visible=self.visible[chosen],
            group=self.group[chosen],
            output=self.output[chosen],
            free=self.free[chosen],
        )


def range_basis(
    values: Float[Tensor, "key d_v"], through: Float[Tensor, "d_v d"] | None = None
) -> tuple[Float[Tensor, "key rank"], Float[Tensor, "rank"]]:
    r"""Find $U$, an orthonormal basis of $[T, 1]$, and the scale $\Sigma$ of its columns.

    $\mathrm{span}[V, 1] = \mathrm{span}(1) \oplus \mathrm{span}(V - 1\mu^\top)$: the ones vector is exact and comes first,
    so rows keep their sum whatever the scale of $V$. The precision in which $V$ (argument `values`) was computed decides
    the rank: singular values of the centred $V$ up to

    $$4\,\mathrm{eps}(V)\,(1 + \sqrt{d_v / n})\,\sigma_{max}(V)$$

    are rounding. The scale is that of $V$ before centring, where it was rounded. By interlacing, this rank is the rank
    of $V$ under the same tolerance, or one more. `through` is $R^\top$ with $H^\top = QR$, so that $VR^\top$ has the lengths
    of $T = VH$; without it, the columns are those of $V$ itself.
    """
    V = values.detach().double()
    n, d_v = V.shape
    left, singular, right = torch.linalg.svd(V - V.mean(dim=0), full_matrices=False)
    tolerance = 4 * torch.finfo(values.dtype).eps * (1 + math.sqrt(d_v / n)) * float(torch.linalg.matrix_norm(V, ord=2))
    real = singular > tolerance
    left, scale = left[:, real], singular[real]
    if through is not None and len(scale):
        turn, scale, _ = torch.linalg.svd(scale[:, None] * (right[real] @ through.double()), full_matrices=False)
        left = left @ turn
    spanning = torch.cat([V.new_ones(n, 1), left], dim=1)
    return torch.linalg.qr(spanning).Q, torch.cat([scale.new_full((1,), torch.inf), scale])


def proven_maximum(
    objective: Float[Tensor, "program key"],
    y: Float[Tensor, "program rank"],
    rows: Rows,
    *,
    epsilon: float = 0.0,
) -> Float[Tensor, "program"]:
    r"""Bound the greatest $c \cdot a'$ over $P_\varepsilon(a)$ from above, with any vector $y$; one program per row.

    $$c \cdot a' \le y \cdot U^\top a + \varepsilon \|o\|\,\|\Sigma^{-1} y\| + \max_m (c_m - y \cdot u_m)$$

    where m runs over the visible keys and $u_m$ is a row of $U$: it holds because $a'$ is a distribution. The bound is
    sharp at the best $y$, and valid at every other, whatever computed it. `objective` is $c$.
    """
    scores = torch.empty_like(objective)
    for group, some in rows.by_group():
        scores[some] = y[some] @ rows.basis[group].mT
    best = (objective - scores).masked_fill(~rows.visible, -torch.inf).amax(-1)
    moved = epsilon * rows.output * (y / rows.scale[rows.group]).norm(dim=-1)
    return (y * rows.right).sum(-1) + moved + best
