r"""Which singular values are real, and minimum-norm solutions over each row's own set of keys.

Every solver here answers the same question. Row i of the output may use the values $v_m$ of a set of keys $S_i$. With
$G_i = \sum_{m \in S_i} v_m v_m^\top$, its **coefficients** are $y_i = G_i^+ o_i$, so that the weights $y_i \cdot v_m$
(m in $S_i$) are the smallest ones that give the output $o_i$. The solvers differ in how the sets relate, and so in what
can be shared:

| solver | sets | shared |
|---|---|---|
| `shared_solve` | every row sees the same keys | one factorisation |
| `prefix.prefix_solve` | row i sees the first p_i keys (causal) | one factorisation per block of keys |
| `rowwise_solve` | any sets (sliding windows, …) | one factorisation per distinct row |

All of them work in float64. `kv` is the axis of key-value heads, `group` that of the query heads that share one.
"""

import math
from dataclasses import dataclass

import torch
from torch.linalg import cholesky_ex, eigh, matrix_norm, qr, solve_triangular, svd, svdvals

from identikit.maths.threads import decompose
from identikit.shapes import Bool, Float, Int, Tensor

BYTES = 2**27  # about what a chunk of rows may take
UNEVEN = 2.0**10  # columns of a matrix whose sizes differ by more than this are brought to one size
WELL_CONDITIONED = 1e-10  # λ_min/λ_max of a Gram above which its inverse needs no refinement; far above its rounding


def rounding_floor(width: int) -> float:
    """Return λ_min/λ_max of a Gram matrix above which rounding does not decide its rank: 16·d·eps of float64."""
    return 16 * width * torch.finfo(torch.float64).eps


def rounding_unit(dtype: torch.dtype) -> float:
    """Return the unit in which a model's numbers are read, which decides every rank: eps of float64 or float32.

    Numbers in half precision are read in float32's unit. They are exact as they are: what their own eps calls noise is
    mostly real, and equal tokens have equal bits.
    """
    return min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


def column_scales(matrix: Float[Tensor, "*rows n d"]) -> Float[Tensor, "*rows 1 d"]:
    r"""Return what columns are multiplied by before a rank is decided: 1, or powers of 2 where their sizes are uneven.

    $V$ and $VD$ with a diagonal $D$ have the same left null space, and powers of 2 round nothing. But a cutoff relative
    to $\sigma_{max}$ reads every column in the unit of the largest, though each was rounded in its own: where one value
    dimension is 1e6 times the others, these would count as rounding. Columns of 0 stay as they are.
    """
    size = matrix.norm(dim=-2, keepdim=True)
    if size.shape[-1] == 0:
        return size
    smallest = torch.where(size > 0, size, torch.inf).amin(-1, keepdim=True)
    uneven = size.amax(-1, keepdim=True) > UNEVEN * smallest
    return torch.where(uneven, torch.ldexp(torch.ones_like(size), -torch.frexp(size).exponent), 1.0)


@dataclass(frozen=True)
class Resolution:
    r"""How small a singular value still counts: above the rounding of its dtype, and above a tolerance if one is given.

    A matrix of n rows and d columns whose entries were rounded to unit `eps` carries noise of spectral norm about
    $0.3\,\mathrm{eps}\,(1+\sqrt{d/n})\,\sigma_{max}$. Singular values up to
    $4\,\mathrm{eps}\,(1+\sqrt{d/n})\,\sigma_{max}$ count as noise, however many digits float64 would show. `tolerance`
    $\varepsilon$ raises the cutoff to $\varepsilon\,\sigma_{max}$.
    """

    eps: float
    tolerance: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether the unit is so fine, float64's own or near it, that a Gram matrix in float64 cannot resolve it."""
        return self.eps < 1e-9  # a Gram resolves singular values to about 1e-8 of the largest

    def cutoff(self, largest: Tensor, count: Tensor | int, width: int) -> Tensor:
        r"""Return the singular value up to which matrices of `count` rows and `width` columns hold nothing.

        In float64 our own factorisation rounds in the same unit as the values did, and $\sqrt{width}$ times as much.
        """
        rows = torch.as_tensor(count, dtype=largest.dtype, device=largest.device).clamp(min=1)
        unit = self.eps * (math.sqrt(width) if self.exact else 1.0)
        return largest * (4 * unit * (1 + (width / rows).sqrt())).clamp(min=self.tolerance)

    def is_real(self, singular: Float[Tensor, "*rows d"], count: Tensor | int) -> Bool[Tensor, "*rows d"]:
        """Return which singular values of matrices of `count` rows and d columns are above the cutoff."""
        return singular > self.cutoff(singular.amax(-1), count, singular.shape[-1])[..., None]


def is_certified(
    smallest: Tensor,
    largest: Tensor,
    count: Tensor | int,
    width: int,
    resolution: Resolution,
    floor: float = WELL_CONDITIONED,
) -> Bool[Tensor, "..."]:
    r"""Return whether a Gram matrix $G$ is surely of full rank and well conditioned, from bounds on its eigenvalues.

    The bounds are `smallest` $\le \lambda_{min}$ and $\lambda_{max} \le$ `largest`. Some need no eigenvalues:
    $\lambda_{max}(G) \le \|G\| \le \mathrm{tr}(G)$ (the Frobenius norm) and, with $G = LL^\top$,
    $\lambda_{min}(G) \ge 1/\|G^{-1}\| \ge 1/\mathrm{tr}(G^{-1}) = 1/\|L^{-1}\|^2$. $L$ is the exact factor of a matrix
    within some $d\,\mathrm{eps}\,\|G\|$ of $G$ (eps of float64), and `floor` $\cdot\|G\|$ is required beyond the
    cutoff: rounding cannot turn a singular $G$ into a certified one.
    """
    needed = resolution.cutoff(largest.sqrt(), count, width).square()
    return smallest > needed + floor * largest


def cholesky_inverses(
    gram: Float[Tensor, "*batch d d"],
) -> tuple[Float[Tensor, "*batch d d"], Bool[Tensor, "*batch"]]:
    r"""Invert the Cholesky factors of Gram matrices, and report which have none: $L^{-1}$ with $G = LL^\top$."""
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)

    def invert(matrices: Tensor) -> tuple[Tensor, Tensor]:
        factor, failed = cholesky_ex(matrices)
        return solve_triangular(factor, identity, upper=False), failed != 0

    return decompose(invert, gram)


def triangular_roots(
    gram: Float[Tensor, "*rows d d"], count: Tensor | int, resolution: Resolution, floor: float = WELL_CONDITIONED
) -> tuple[Float[Tensor, "*rows d d"], Bool[Tensor, "*rows"]]:
    r"""Find $F$ with $G^{-1} = FF^\top$ by Cholesky, and where it may be used (elsewhere $F$ is meaningless)."""
    inverse, failed = cholesky_inverses(gram)
    smallest = 1 / inverse.square().sum((-2, -1))
    good = is_certified(smallest, matrix_norm(gram), count, gram.shape[-1], resolution, floor)
    return inverse.mT, good & ~failed


def right_spectrum(values: Float[Tensor, "*rows n d"]) -> tuple[Float[Tensor, "*rows d"], Float[Tensor, "*rows d d"]]:
    """Find the singular values and the right singular vectors, as columns, of the matrix itself.

    There are d singular values; those beyond the number of rows are 0.
    """
    missing = max(0, values.shape[-1] - values.shape[-2])
    padded = torch.nn.functional.pad(values, (0, 0, 0, missing))
    _, singular, vectors = decompose(lambda matrices: svd(qr(matrices, mode="r").R), padded)
    return singular, vectors.mT


def matrix_rank(matrix: Float[Tensor, "row column"], resolution: Resolution) -> int:
    """Return the rank of one matrix.

    Its singular values are computed only where full rank is not certain without them.
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    full, count = wide.shape
    floor = WELL_CONDITIONED if resolution.exact else rounding_floor(full)
    if full == 0 or bool(triangular_roots(wide @ wide.mT, count, resolution, floor)[1]):
        return full
    singular = decompose(lambda matrices: svdvals(qr(matrices, mode="r").R), wide.mT)
    return int(resolution.is_real(singular, count).sum())


def masked_multiply(
    coefficients: Float[Tensor, "kv group query d"],
    values: Float[Tensor, "kv key d"],
    vectors: Float[Tensor, "kv key k"],
    visible: Bool[Tensor, "query key"],
) -> Float[Tensor, "kv group query k"]:
    r"""Apply the map given by its factors to $X$ (`vectors`): ($YV^\top$ where visible, else 0)·$X$."""
    return ((coefficients @ values[:, None].mT) * visible) @ vectors[:, None]


def apply_gram(rows: Float[Tensor, "... query d"], values: Float[Tensor, "... key d"]) -> Tensor:
    r"""Compute $Y V^\top V$ without making $V^\top V$, which would square $V$'s rounding.

    It takes some keys at a time, to save memory.
    """
    return sum(((rows @ V.mT) @ V for V in values.split(256, dim=-2)), start=torch.zeros_like(rows))


def shared_solve(
    values: Float[Tensor, "kv key d"], output: Float[Tensor, "kv group query d"], resolution: Resolution
) -> tuple[Float[Tensor, "kv group query d"], Int[Tensor, "kv"]]:
    r"""Find the coefficients $Y = O(V^\top V)^+$ where every row sees every key, and the rank of $V$."""
    everything = torch.ones(1, values.shape[1], dtype=torch.bool, device=values.device)
    root, rank = _row_roots(values, everything, resolution)
    coefficients = (output @ root) @ root.mT
    if resolution.exact:
        coefficients += ((output - apply_gram(coefficients, values[:, None])) @ root) @ root.mT
    return coefficients, rank[:, 0]


def rowwise_solve(
    values: Float[Tensor, "kv key d"],
    output: Float[Tensor, "kv group query d"],
    visible: Bool[Tensor, "query key"],
    resolution: Resolution,
) -> tuple[Float[Tensor, "kv group query d"], Int[Tensor, "kv query"]]:
    """Find coefficients and ranks where row i sees any set of keys, given as row i of the mask `visible`.

    Rows are taken in chunks; equal neighbouring rows share a factorisation. In float64, one step of refinement against
    $V$ itself makes up for the squared rounding of the Gram matrix.
    """
    heads, _, width = values.shape
    chunk = max(1, BYTES // (32 * heads * width * width))
    coefficients = []
    ranks = []
    for right, mask in zip(output.split(chunk, dim=-2), visible.split(chunk), strict=True):
        used = mask.any(0)
        mask = mask[:, used]
        V = values[:, used]
        distinct, index = torch.unique_consecutive(mask, dim=0, return_inverse=True)
        root, rank = _row_roots(V, distinct, resolution)
        root = root[:, index]
        Y = (right.transpose(1, 2) @ root @ root.mT).transpose(1, 2)
        if resolution.exact:
            missing = right - masked_multiply(Y, V, V, mask)
            Y = Y + (missing.transpose(1, 2) @ root @ root.mT).transpose(1, 2)
        coefficients.append(Y)
        ranks.append(rank[:, index])
    return torch.cat(coefficients, dim=-2), torch.cat(ranks, dim=-1)


def _row_roots(
    values: Float[Tensor, "kv key d"], visible: Bool[Tensor, "row key"], resolution: Resolution
) -> tuple[Float[Tensor, "kv row d d"], Int[Tensor, "kv row"]]:
    r"""Find $F$ with $G_i^+ = FF^\top$ and the rank of each row: by Cholesky if certified, else from the spectrum."""
    gram = _row_grams(values, visible)
    count = visible.sum(-1)
    root, good = triangular_roots(gram, count, resolution)
    rank = torch.full(good.shape, values.shape[-1], device=good.device)
    head, row = (~good).nonzero(as_tuple=True)
    if len(row):
        if resolution.exact:  # the Gram matrix has lost what decides: the values themselves
            pairs = zip(head.tolist(), row.tolist(), strict=True)
            spectra = [right_spectrum(values[h, visible[r]]) for h, r in pairs]
            singular = torch.stack([singular for singular, _ in spectra])
            vectors = torch.stack([vectors for _, vectors in spectra])
        else:
            eigenvalues, vectors = decompose(eigh, gram[head, row])
            singular = eigenvalues.clamp(min=0).sqrt()
        keep = resolution.is_real(singular, count[row])
        root[head, row] = vectors * torch.where(keep, 1 / singular, 0.0)[..., None, :]
        rank[head, row] = keep.sum(-1)
    return root, rank


def _row_grams(values: Float[Tensor, "kv key d"], visible: Bool[Tensor, "row key"]) -> Float[Tensor, "kv row d d"]:
    """Compute each row's $G_i$: one product for the keys that all rows see, a masked sum for the others.

    Nothing is subtracted.
    """
    seen_by_all = visible.all(0)
    common = values[:, seen_by_all]
    masked_values = values[:, ~seen_by_all]
    mask = visible[:, ~seen_by_all].to(values)
    heads, _, width = values.shape
    gram = (common.mT @ common)[:, None].repeat(1, len(visible), 1, 1)
    chunk = max(1, BYTES // (32 * heads * width * width))
    for V, weight in zip(masked_values.split(chunk, dim=1), mask.split(chunk, dim=1), strict=True):
        products = (V[..., :, None] * V[..., None, :]).flatten(-2)
        gram += (weight @ products).unflatten(-1, (width, width))
    return gram
