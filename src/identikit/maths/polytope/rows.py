r"""Many attention rows at once, and the set of attention that gives each of them its output.

For one row, $a$ is its attention over the keys that it sees, $T = VH$ their values as the output projection passes them
on, $o = aT$ the output. All attention with this output, exactly or to within $\varepsilon$, is

$$P_\varepsilon(a) = \{a' \ge 0 : \textstyle\sum a' = 1, \; \|(a' - a) T\| \le \varepsilon \|o\|\}.$$

A learned sink is one more key, of value 0: without it, $\sum a' \le 1$.

With $\mu$ the mean of $V$'s rows and $V - 1\mu^\top = L S R^\top$, the basis $U = [1/\sqrt n, L]$ turns this into
coordinates that are at most 1: $U^\top a' = U^\top a + \delta$, where $\delta$ is 0 along the first column and
$\|\delta S R^\top H\| \le \varepsilon\|o\|$ along the others. The basis does not depend on $H$ where $H$ has full row
rank, so all query heads that share values share it. A row that sees only some of the keys uses the same $U$, and gives
no weight to the others. Results are float64.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F

from identikit.maths import threads
from identikit.maths.linalg import Resolution, column_scales, rounding_unit
from identikit.maths.visible import Visible
from identikit.shapes import Bool, Float, Int, Tensor

_NEAR = (1 / 8, 4.0)  # of the cutoff: singular values about as large as rounding; noise itself is 13 times below it
_ALL_KEYS = -1  # in place of a query: the keys that any query sees


class Rows(NamedTuple):
    """Rows of attention, each with its set $P(a)$; several rows of a head share one basis.

    - `attention`: weights in float64 that sum to 1, 0 on keys that the row does not see; `visible`: the keys it sees
    - `group`: which basis each row uses; rows of a group stand together
    - `basis`: $U$; columns beyond a group's rank are 0
    - `scale`: $\\Sigma$, the length of the output's change along each column, infinite for the column of ones and for
      columns that are 0; it is known where the output may move
    - `output`: $\\|o\\|$ of each row, likewise
    - `free`: whether the row's visible values are dependent; any other row is the only attention with its output
    - `resolved`: whether no direction of a group's values is about as small as rounding. Elsewhere what is below it
      counts as free: bounds hold, and can be wider than those of all digits of the values
    """

    attention: Float[Tensor, "row key"]
    visible: Bool[Tensor, "row key"]
    group: Int[Tensor, "row"]
    basis: Float[Tensor, "group key rank"]
    scale: Float[Tensor, "group rank"]
    output: Float[Tensor, "row"]
    free: Bool[Tensor, "row"]
    resolved: Bool[Tensor, "group"]

    @property
    def right(self) -> Float[Tensor, "row rank"]:
        r"""The right-hand side $U^\top a$ of each row."""
        right = self.attention.new_zeros(len(self.group), self.basis.shape[2])
        for group, rows in self.by_group():
            right[rows] = self.attention[rows] @ self.basis[group]
        return right

    def by_group(self) -> list[tuple[int, slice]]:
        """Return each group that has rows, and the slice of its rows."""
        groups, counts = torch.unique_consecutive(self.group, return_counts=True)
        stops = counts.cumsum(0).tolist()
        slices = [slice(stop - count, stop) for count, stop in zip(counts.tolist(), stops, strict=True)]
        return list(zip(groups.tolist(), slices, strict=True))

    def select(self, indices: Tensor) -> "Rows":
        """Return some of the rows (indices in order, or a mask) with all bases."""
        return self._replace(
            attention=self.attention[indices],
            visible=self.visible[indices],
            group=self.group[indices],
            output=self.output[indices],
            free=self.free[indices],
        )


class DecomposedValues(NamedTuple):
    r"""Centred values of several heads, $V - 1\mu^\top = L S R^\top$, without directions that are mere rounding.

    - `left`: $L$, its columns beyond a head's rank 0; `mixed`: $S R^\top$, its rows beyond the rank 0
    - `rank`: of $V$ itself; `resolved`: as in `Rows`
    """

    left: Float[Tensor, "head key d_v"]
    mixed: Float[Tensor, "head d_v d_v"]
    rank: Int[Tensor, "head"]
    resolved: Bool[Tensor, "head"]

    def basis(self) -> Float[Tensor, "head key rank"]:
        r"""Return $U = [1/\sqrt n, L]$, orthonormal."""
        return _with_ones(self.left)

    def scaled_basis(
        self, head: int, through: Float[Tensor, "d_v d"]
    ) -> tuple[Float[Tensor, "key rank"], Float[Tensor, "rank"]]:
        r"""Return a head's $U$, turned so that each column moves the output along one direction, and by how much.

        `through` is $R^\top$ with $H^\top = QR$, so that $VR^\top$ has the lengths of $T = VH$.
        """
        rank = int(self.left[head].any(0).sum())
        turn, scale, _ = threads.decompose(_thin_svd, self.mixed[head, :rank] @ through.cpu().double())
        basis = _with_ones((self.left[head, :, :rank] @ turn)[None])[0]
        return basis, F.pad(scale, (1, 0), value=torch.inf)


def _with_ones(left: Float[Tensor, "head key d_v"]) -> Float[Tensor, "head key rank"]:
    """Put the vector of ones first and bring all columns back to orthonormal; columns of 0 stay 0."""
    spanning = torch.cat([left.new_ones(*left.shape[:2], 1), left], dim=2)[:, :, : left.shape[1]]
    return threads.decompose(torch.linalg.qr, spanning).Q * spanning.any(1)[:, None]


def _thin_svd(matrices: Float[Tensor, "*head n d"]) -> tuple[Tensor, Tensor, Tensor]:
    left, singular, right = torch.linalg.svd(matrices, full_matrices=False)
    return left, singular, right


def decompose_values(values: Float[Tensor, "head key d_v"]) -> DecomposedValues:
    r"""Decompose the values of heads, centred, all heads in one call.

    $\mathrm{span}[V, 1] = \mathrm{span}(1) \oplus \mathrm{span}(V - 1\mu^\top)$: the ones vector is exact and comes
    first, so rows keep their sum whatever the scale of $V$. The unit eps in which $V$ (argument `values`) is read
    (`linalg.rounding_unit`) decides the rank: singular values of the centred $V$ up to

    $$4\,\mathrm{eps}\,(1 + \sqrt{d_v / n})\,\sigma_{max}(V)$$

    are rounding. The scale is that of $V$ before centring, where it was rounded, and uneven columns are brought to one
    size first (`linalg.column_scales`). By interlacing, this rank is the rank of $V$ under the same tolerance, or one
    more. $V = U M$ with the small matrix $M = [\sqrt n\,\mu^\top; S R^\top]$, whose singular values are those of $V$:
    one decomposition serves both ranks.
    """
    V = values.detach().cpu().double()  # small matrices: the CPU decomposes them sooner than a GPU
    n, d_v = V.shape[1:]
    scale = column_scales(V)
    V = V * scale
    mean = V.mean(dim=1, keepdim=True)
    left, singular, right = threads.decompose(_thin_svd, V - mean)
    mixed = singular[..., None] * right
    uncentred = threads.decompose(torch.linalg.svdvals, torch.cat([n**0.5 * mean, mixed], dim=1))
    resolution = Resolution(rounding_unit(values.dtype))
    rank = resolution.is_real(uncentred, n).sum(-1)
    cutoff = 4 * resolution.eps * (1 + (d_v / n) ** 0.5) * uncentred[:, :1]
    real = singular > cutoff
    near = (singular > _NEAR[0] * cutoff) & (singular < _NEAR[1] * cutoff)
    left = F.pad(left * real[:, None], (0, d_v - singular.shape[1]))
    mixed = F.pad(mixed * real[..., None] / scale, (0, 0, 0, d_v - singular.shape[1]))
    resolved = ~near.any(-1) | resolution.exact  # in float64 the decomposition itself rounds as much
    return DecomposedValues(left, mixed, rank.clamp(max=n), resolved)


class Lengths(NamedTuple):
    r"""How values become lengths of the output: matrices $R^\top$ with $H^\top = QR$, and which one each row uses."""

    through: Float[Tensor, "matrix d_v d"]
    matrix_of_row: Sequence[int]


class _BasisName(NamedTuple):
    """What identifies a basis: a key-value head, a query or `_ALL_KEYS`, and a matrix of `Lengths` (0 without)."""

    head: int
    query: int
    matrix: int


@dataclass(frozen=True)
class Polytopes:
    """The sets of all rows of a layer: values that are decomposed once, and which keys each query sees.

    Rows share the basis of their values over the keys that any row sees, except those whose visible values have another
    rank than their number and the head's rank allow (repeated tokens, say): what rounding decides there is decided for
    their own keys, and each gets its own basis, once.

    With a learned `sink`, rows sum to less than 1, and other rows with the same output may sum to anything up to 1. The
    rest goes to one more key, the last of the `Rows`, whose value is 0.
    """

    values: Float[Tensor, "kv key d_v"]
    visible: Visible
    rank: Int[Tensor, "kv query"]
    sink: bool
    over_all_keys: DecomposedValues
    _of_single_rows: dict[tuple[int, int], DecomposedValues] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, values: Float[Tensor, "kv key d_v"], visible: Visible, rank: Int[Tensor, "kv query"], *, sink: bool = False
    ) -> "Polytopes":
        """Decompose the values of a layer's key-value heads; `rank` is that of each row's visible values."""
        return cls(values, visible, rank, sink, decompose_values(F.pad(values[:, visible.keys], (0, 0, 0, sink))))

    def rows(
        self,
        heads: Sequence[int],
        queries: Int[Tensor, "row"],
        attention: Float[Tensor, "row key"],
        lengths: Lengths | None = None,
    ) -> Rows:
        """Describe rows by key-value head (argument `heads`) and query, those of a head together.

        With `lengths` the output may move, and rows come with the scale of their bases and the size of their output.
        """
        visible = self.visible.block(queries, torch.arange(self.values.shape[1], device=queries.device))
        count = visible.sum(-1)
        rank = self.rank[list(heads), queries]
        free = rank < count
        if self.sink:
            sees_any = (count > 0)[:, None]
            rest = (1 - attention.sum(-1, keepdim=True)).clamp(min=0) * sees_any
            attention = torch.cat([attention, rest], dim=1)
            visible = torch.cat([visible, sees_any], dim=1)
        usual_rank = count.minimum(self.over_all_keys.rank.to(count.device)[list(heads)])
        is_unusual = free & (rank != usual_rank) & (count < len(self.visible.keys))
        basis_query = torch.where(is_unusual, queries, _ALL_KEYS).tolist()
        matrices = [0] * len(heads) if lengths is None else lengths.matrix_of_row
        names = list(map(_BasisName, heads, basis_query, matrices))
        distinct = list(dict.fromkeys(names))
        number = {name: index for index, name in enumerate(distinct)}
        group = torch.tensor([number[name] for name in names], dtype=torch.long, device=attention.device)
        basis, scale = self._bases(distinct, lengths)
        output = attention.new_zeros(len(attention))
        if lengths is not None:
            output = self._output_lengths(heads, attention, lengths)
        resolved = []
        for name in distinct:
            values, index = self._decomposition(name)
            resolved.append(bool(values.resolved[index]))
        resolved = torch.tensor(resolved, dtype=torch.bool, device=attention.device)
        return Rows(attention, visible, group, basis.to(attention), scale.to(attention), output, free, resolved)

    def _bases(
        self, names: Sequence[_BasisName], lengths: Lengths | None
    ) -> tuple[Float[Tensor, "group key rank"], Float[Tensor, "group rank"]]:
        """Return each basis with its scale."""
        keys = self.values.shape[1] + self.sink
        width = min(keys, self.values.shape[2] + 1)
        bases = torch.zeros(len(names), keys, width, dtype=torch.float64)
        scales = torch.full((len(names), width), torch.inf, dtype=torch.float64)
        for group, name in enumerate(names):
            values, index = self._decomposition(name)
            if lengths is not None:
                basis, scale = values.scaled_basis(index, lengths.through[name.matrix])
                scales[group, : len(scale)] = scale
            elif name.query == _ALL_KEYS:
                basis = self._shared_bases[index]
            else:
                basis = values.basis()[index]
            bases[group, self._visible_keys(name.query), : basis.shape[1]] = basis
        return bases, scales

    def _output_lengths(
        self, heads: Sequence[int], attention: Float[Tensor, "row key"], lengths: Lengths
    ) -> Float[Tensor, "row"]:
        """Return the length of each row's output as the projection passes it on."""
        sizes = []
        weights = attention[:, : self.values.shape[1]]
        for head, row, matrix in zip(heads, weights, lengths.matrix_of_row, strict=True):
            output = row @ self.values[head].to(row)
            sizes.append((output @ lengths.through[matrix].to(row)).norm())
        return torch.stack(sizes)

    @cached_property
    def _shared_bases(self) -> Float[Tensor, "kv seen rank"]:
        return self.over_all_keys.basis()

    def _visible_keys(self, query: int) -> Int[Tensor, "seen"]:
        """Return the keys that a query sees, or any query, and the sink."""
        keys = self.visible.keys
        if query != _ALL_KEYS:
            keys = keys[self.visible.block(torch.tensor([query], device=keys.device), keys)[0]]
        return torch.cat([keys.cpu(), torch.arange(self.values.shape[1], self.values.shape[1] + self.sink)])

    def _decomposition(self, name: _BasisName) -> tuple[DecomposedValues, int]:
        """Return the decomposition that a basis comes from, and the index of its head in there."""
        if name.query == _ALL_KEYS:
            return self.over_all_keys, name.head
        head_and_query = name.head, name.query
        if head_and_query not in self._of_single_rows:
            values = F.pad(self.values[name.head], (0, 0, 0, self.sink))
            visible_values = values[None, self._visible_keys(name.query).to(values.device)]
            self._of_single_rows[head_and_query] = decompose_values(visible_values)
        return self._of_single_rows[head_and_query], 0


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Return the rows of several heads or layers as one; all bases are kept."""
    width = max(rows.basis.shape[2] for rows in parts)
    starts = itertools.accumulate((len(rows.basis) for rows in parts), initial=0)
    padded = [
        rows._replace(
            group=rows.group + start,
            basis=F.pad(rows.basis, (0, width - rows.basis.shape[2])),
            scale=F.pad(rows.scale, (0, width - rows.basis.shape[2]), value=torch.inf),
        )
        for rows, start in zip(parts, starts, strict=False)
    ]
    return Rows(*(torch.cat(arrays) for arrays in zip(*padded, strict=True)))
