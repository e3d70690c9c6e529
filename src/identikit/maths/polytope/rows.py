r"""Many attention rows at once, and the set of attention that gives each of them its output.

For one row, $a$ is its attention over the keys that it sees, $T = VH$ their values as the output projection passes them
on, $o = aT$ the output. All attention with this output, exactly or to within $\varepsilon$, is

$$P_\varepsilon(a) = \{a' \ge 0 : \textstyle\sum a' = 1, \; \|(a' - a) T\| \le \varepsilon \|o\|\}.$$

A learned sink is one more key, of value 0: without it, $\sum a' \le 1$.

With $\mu$ the mean of $T$'s rows and $T - 1\mu^\top = L \Sigma Q^\top$, the basis $U = [1/\sqrt n, L]$ turns this into
coordinates that are at most 1: $U^\top a' = U^\top a + \delta$, where $\delta$ is 0 along the first column and
$\|\Sigma\delta\| \le \varepsilon\|o\|$ along the others. A row that sees only some of the keys uses the same $U$, and
gives no weight to the others. Results are float64.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from identikit.maths.linalg import Resolution, matrix_rank, rounding_unit
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


def rows_of(
    attention: Float[Tensor, "row key"],
    values: Float[Tensor, "key d_v"],
    visible: Bool[Tensor, "row key"],
    rank: Int[Tensor, "row"],
    through: Float[Tensor, "d_v d"] | None = None,
    *,
    sink: bool = False,
) -> Rows:
    r"""Describe rows of one head: their attention, the head's values $V$, the keys each row sees, and $V$'s rank there.

    All rows share the basis over the keys that any of them sees, except those whose visible values have another rank
    than their number and the head's rank allow (repeated tokens, say): what rounding decides there is decided for their
    own keys, and each gets a basis of its own. `through` is as in `range_basis`.

    With a learned `sink`, rows sum to less than 1, and other rows with the same output may sum to anything up to 1. The
    rest goes to one more key, the last of the `Rows`, whose value is 0.
    """
    seen, count = visible.any(0), visible.sum(-1)
    free = rank < count
    full = matrix_rank(values[seen].cpu().double(), Resolution(rounding_unit(values.dtype)))
    alone = (free & (rank != count.clamp(max=full)) & (count < seen.sum())).nonzero()[:, 0].tolist()
    if sink:
        rest = (1 - attention.sum(-1, keepdim=True)).clamp(min=0) * (count > 0)[:, None]
        attention, values = torch.cat([attention, rest], dim=1), F.pad(values, (0, 0, 0, 1))
        visible, seen = torch.cat([visible, (count > 0)[:, None]], dim=1), F.pad(seen, (0, 1), value=True)
    basis, scale = range_basis(values[seen], through)
    found = [(seen, basis, scale)]
    group = torch.zeros(len(visible), dtype=torch.long, device=visible.device)
    for row in alone:
        group[row] = len(found)
        found.append((visible[row], *range_basis(values[visible[row]], through)))
    width = max(part[1].shape[1] for part in found)
    bases = basis.new_zeros(len(found), visible.shape[1], width)
    scales = basis.new_full((len(found), width), torch.inf)
    for at, (keys, own, size) in enumerate(found):
        bases[at, keys, : own.shape[1]] = own
        scales[at, : len(size)] = size
    output = attention @ (values.double() if through is None else values.double() @ through)
    return Rows(attention, visible, group, bases, scales, output.norm(dim=-1), free)


def joined_rows(parts: Sequence[Rows]) -> Rows:
    """Return the rows of several heads as one; every head keeps its bases."""
    width = max(part.basis.shape[2] for part in parts)
    starts = [0, *itertools.accumulate(len(part.basis) for part in parts)]
    padded = [width - part.basis.shape[2] for part in parts]
    return Rows(
        torch.cat([part.attention for part in parts]),
        torch.cat([part.visible for part in parts]),
        torch.cat([part.group + start for part, start in zip(parts, starts, strict=False)]),
        torch.cat([F.pad(part.basis, (0, pad)) for part, pad in zip(parts, padded, strict=True)]),
        torch.cat([F.pad(part.scale, (0, pad), value=torch.inf) for part, pad in zip(parts, padded, strict=True)]),
        torch.cat([part.output for part in parts]),
        torch.cat([part.free for part in parts]),
    )


class Bounds(NamedTuple):
    """Proven ends of some quantities $c \\cdot a'$ of each row, and how far the sharp ends can be from them.

    - `lower`, `upper`: no attention of the row's set has less or more
    - `gap`: at most how far an end is from what some attention attains; NaN where none is known
    - `order`: how many of the strongest edges have the same order in all attention, as far as is known; -1 where not
      even that of the strongest is decided
    """

    lower: Float[Tensor, "row quantity"]
    upper: Float[Tensor, "row quantity"]
    gap: Float[Tensor, "row quantity"]
    order: Int[Tensor, "row"]


def unbounded(rows: Rows, objectives: Float[Tensor, "quantity key"] | None = None) -> Bounds:
    """Return what is known without solving anything: from 0 to the sum of the largest weights that are possible.

    Quantities are the weights of all keys, or these `objectives`, whose entries are 0 or 1. Where the row is the only
    attention with its output, both ends are its own.
    """
    own = rows.attention if objectives is None else rows.attention @ objectives.mT
    seen = rows.visible if objectives is None else rows.visible.to(own) @ objectives.mT > 0
    loose, fixed = seen & rows.free[:, None], ~rows.free
    lower, upper = own.masked_fill(loose, 0.0), own.masked_fill(loose, 1.0)
    gap = torch.where(loose, torch.nan, 0.0).to(own)
    strongest = torch.where(fixed, rows.visible.sum(-1), -1)
    return Bounds(lower, upper, gap, strongest)


def ordered(rows: Rows, bounds: Bounds, top: int) -> Bounds:
    """Read from the ends of all keys how many of the strongest edges, up to `top`, are certainly in that order.

    An edge is certainly above another if its lower end is above the other's upper end. It is certainly not if some
    attention gives the other more than this one can have there.
    """
    place = rows.attention.masked_fill(~rows.visible, -1.0).argsort(dim=-1, descending=True, stable=True)
    lower, upper = bounds.lower.gather(1, place), bounds.upper.gather(1, place)
    attained = upper - bounds.gap.gather(1, place).nan_to_num(1.0)
    count, certain = torch.zeros_like(bounds.order), torch.ones_like(rows.free)
    beaten = torch.zeros_like(certain)
    for at in range(min(top, place.shape[1])):
        others, reached = upper[:, at + 1 :], attained[:, at + 1 :]
        above = (lower[:, at, None] >= others).all(-1) & (rows.visible.sum(-1) > at)
        if at == 0:
            beaten = (reached > torch.minimum(upper[:, :1], 1 - reached)).any(-1)
        certain = certain & above
        count += certain
    return bounds._replace(order=torch.where((count == 0) & ~beaten, -1, count))


def range_basis(
    values: Float[Tensor, "key d_v"], through: Float[Tensor, "d_v d"] | None = None
) -> tuple[Float[Tensor, "key rank"], Float[Tensor, "rank"]]:
    r"""Find $U$, an orthonormal basis of $[T, 1]$, and the scale $\Sigma$ of its columns.

    $\mathrm{span}[V, 1] = \mathrm{span}(1) \oplus \mathrm{span}(V - 1\mu^\top)$: the ones vector is exact and comes
    first, so rows keep their sum whatever the scale of $V$. The unit eps in which $V$ (argument `values`) is read
    (`linalg.rounding_unit`) decides the rank: singular values of the centred $V$ up to

    $$4\,\mathrm{eps}\,(1 + \sqrt{d_v / n})\,\sigma_{max}(V)$$

    are rounding. The scale is that of $V$ before centring, where it was rounded. By interlacing, this rank is the rank
    of $V$ under the same tolerance, or one more. `through` is $R^\top$ with $H^\top = QR$, so that $VR^\top$ has the
    lengths of $T = VH$; without it, the columns are those of $V$ itself.
    """
    device, V = values.device, values.detach().cpu().double()  # small matrices: the CPU decomposes them sooner
    n, d_v = V.shape
    left, singular, right = torch.linalg.svd(V - V.mean(dim=0), full_matrices=False)
    largest = float(torch.linalg.eigvalsh(V.mT @ V)[-1].clamp(min=0).sqrt())
    tolerance = 4 * rounding_unit(values.dtype) * (1 + math.sqrt(d_v / n)) * largest
    real = singular > tolerance
    left, scale = left[:, real], singular[real]
    if through is not None and len(scale):
        turn, scale, _ = torch.linalg.svd(scale[:, None] * (right[real] @ through.cpu().double()), full_matrices=False)
        left = left @ turn
    spanning = torch.cat([V.new_ones(n, 1), left], dim=1)
    scale = torch.cat([scale.new_full((1,), torch.inf), scale])
    return torch.linalg.qr(spanning).Q.to(device), scale.to(device)


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
