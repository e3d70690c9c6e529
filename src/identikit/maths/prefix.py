r"""Minimum-norm solutions where each row sees the first keys up to some point, as under a causal mask.

The question is that of `linalg`: the coefficients $y_p = G_p^+ o$ and the rank of $G_p = \sum_{m < p} v_m v_m^\top$,
for rows that see the first p keys. Rows share factorisations, and every answer comes with whether it is certain:

1. Rows that see at most d **distinct** keys share one QR of these keys (`_first_rows`). Equal keys count as one with a
   weight: repeated tokens have equal values in the first layer of a model without positions in its inputs.
2. Later rows share the Cholesky factor of the keys before their block (`_block_roots`) by Woodbury's identity. $G_p$ is
   at its worst where the number of distinct keys has just reached d, so blocks start short there and double.
3. What is left is nearly or truly rank-deficient, and is solved row by row (`linalg.rowwise_solve`).

All of it is products, triangular solves and Cholesky factors over many heads and blocks at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.linalg import eigvalsh, matrix_norm, qr, solve_triangular

from identikit.maths import linalg
from identikit.maths.linalg import WELL_CONDITIONED, Resolution, cholesky_inverses, is_certified, rounding_floor
from identikit.maths.threads import decompose
from identikit.shapes import Bool, Float, Int, Tensor

SHORTEST = 4  # keys in the first block after the first d distinct keys
REFINED_ABOVE = (1e7, 1e10)  # conditions of a Gram above which a solution is refined once, and once more


def prefix_solve(
    values: Float[Tensor, "kv key d"],
    output: Float[Tensor, "kv group query d"],
    stop: Int[Tensor, "query"],
    resolution: Resolution,
) -> tuple[Float[Tensor, "kv group query d"], Int[Tensor, "kv query"]]:
    """Find coefficients and ranks where row i sees the first `stop[i]` keys."""
    width = values.shape[-1]
    coefficients = torch.zeros_like(output)
    rank = torch.zeros(len(values), len(stop), dtype=torch.long, device=values.device)
    good = (stop == 0).repeat(len(values), 1)
    number, start = _number_distinct(values, width)
    rows = ((stop > 0) & (stop <= start)).nonzero()[:, 0]
    if len(rows):
        solution, distinct, sure = _first_rows(values[:, :start], number, output[:, :, rows], stop[rows], resolution)
        coefficients[:, :, rows] = solution
        rank[:, rows] = distinct
        good[:, rows] = sure
    blocks_at_once = 1
    if not resolution.exact:  # blocks of d keys that are solved together; a GPU needs more of them to be busy
        room = linalg.BYTES * (8 if output.is_cuda else 1)
        blocks_at_once = max(1, room // (8 * len(values) * width * width * (6 * output.shape[1] + 8)))
    for begin, blocks in _all_blocks(values, start, blocks_at_once):
        length = blocks.keys.shape[2]
        rows = ((stop > begin) & (stop <= begin + len(blocks.start) * length)).nonzero()[:, 0]
        if len(rows):
            line, table = _tabulate((stop[rows] - 1 - begin) // length, length)
            is_row = table >= 0
            row_table = rows[table.clamp(min=0)]
            right = output[:, :, row_table].transpose(1, 2)
            solution, sure = _solve_blocks(blocks.select(line), right, stop[row_table], resolution)
            rows = row_table[is_row]
            coefficients[:, :, rows] = solution.transpose(1, 2)[:, :, is_row]
            good[:, rows] = sure[:, is_row]
            rank[:, rows] = width
    for head in (~good).any(1).nonzero()[:, 0].tolist():
        unsolved = (~good[head]).nonzero()[:, 0]
        visible = torch.arange(int(stop[unsolved].max()), device=stop.device) < stop[unsolved, None]
        V = values[head][None, : visible.shape[1]]
        solution, ranks = linalg.rowwise_solve(V, output[head][None, :, unsolved], visible, resolution)
        coefficients[head][:, unsolved] = solution[0]
        rank[head][unsolved] = ranks[0]
    return coefficients, rank


def _number_distinct(values: Float[Tensor, "kv key d"], limit: int) -> tuple[Int[Tensor, "first"], int]:
    """Number the distinct keys as they appear, up to the key that would be one more than `limit`.

    Returns the number of each key before that one, and how many there are. Keys are equal if they are in all heads.
    """
    keys = values.shape[1]
    counted_keys = 2 * limit
    while True:
        counted_keys = min(keys, counted_keys)
        _, class_of_key = torch.unique(values[:, :counted_keys].transpose(0, 1).flatten(1), dim=0, return_inverse=True)
        index = torch.arange(counted_keys, device=values.device)
        first_of_class = torch.full_like(index, counted_keys).scatter_reduce_(0, class_of_key, index, "amin")
        first = first_of_class[class_of_key]
        number = (first == index).cumsum(0) - 1
        start = int((number < limit).sum())
        if start < counted_keys or counted_keys == keys:
            return number[first[:start]], start
        counted_keys *= 2


def _first_rows(
    values: Float[Tensor, "kv key d"],
    number: Int[Tensor, "key"],
    output: Float[Tensor, "kv group row d"],
    ends: Int[Tensor, "row"],
    resolution: Resolution,
) -> tuple[Float[Tensor, "kv group row d"], Int[Tensor, "row"], Bool[Tensor, "kv row"]]:
    r"""Solve rows that see at most d distinct keys; return ranks too, and where those keys are surely independent.

    Key m is the distinct key `number[m]`. Row p sees the first k distinct keys, $U_k$, with counts $C$. With
    $U^\top = QR$, $U_k^\top = Q_k R_k$. $R_k$ is the leading block of $R$, and its inverse is the leading block of
    $R^{-1}$. So $y = Q_k R_k^{-\top} C^{-1} R_k^{-1} Q_k^\top o$ for all rows from one factorisation, by leaving out
    the coordinates from k on.

    It is safe because $\lambda_{min}(R_k C R_k^\top) \ge \lambda_{min}(R_k R_k^\top) \ge 1/\|R_k^{-1} R_k^{-\top}\|$, a
    norm over leading blocks of $R^{-\top}R^{-1}$. No Gram matrix is made, so nothing is squared by rounding.
    """
    width = values.shape[-1]
    floor = WELL_CONDITIONED if resolution.exact else 1e-13
    counts = torch.nn.functional.one_hot(number).cumsum(0)[ends - 1].to(values)
    distinct = (counts > 0).sum(-1)
    index = torch.arange(len(number), device=number.device)
    first = torch.full_like(counts[0], len(number), dtype=torch.long).scatter_reduce_(0, number, index, "amin")
    U = values[:, first]
    Q, R = decompose(qr, U.mT)
    size = U.square().sum(-1)
    independent = R.diagonal(dim1=-2, dim2=-1).square() > floor * size.cumsum(-1)
    independent = independent.long().cumprod(-1).bool()
    identity = torch.eye(len(first), dtype=R.dtype, device=R.device)
    regular = torch.where(independent[:, None], R, identity)
    inverse = decompose(lambda matrices: solve_triangular(matrices, identity, upper=True), regular)
    inverse = torch.where(independent[:, None], inverse, 0.0)
    norm = (inverse.mT @ inverse).square().cumsum(-1).cumsum(-2).diagonal(dim1=-2, dim2=-1).sqrt()
    last = distinct - 1
    good = independent[:, last] & is_certified(1 / norm[:, last], size @ counts.mT, ends, width, resolution, floor)
    leading = counts > 0
    Q = Q[:, None]
    inverse = inverse[:, None]
    weighted = (((output @ Q) * leading) @ inverse.mT) / counts.clamp(min=1) * leading
    return ((weighted @ inverse) * leading) @ Q.mT, distinct, good


@dataclass(frozen=True)
class _Blocks:
    """Blocks of keys, one after another, and the Gram matrices of the keys before each and up to its end."""

    start: Int[Tensor, "block"]
    keys: Float[Tensor, "kv block key d"]
    gram: Float[Tensor, "kv block d d"]
    after: Float[Tensor, "kv block d d"]
    earlier: Float[Tensor, "kv seen d"]
    """All keys before the first block."""

    def select(self, index: Int[Tensor, "line"]) -> "_Blocks":
        """Return some of the blocks."""
        return _Blocks(self.start[index], self.keys[:, index], self.gram[:, index], self.after[:, index], self.earlier)


def _all_blocks(values: Float[Tensor, "kv key d"], start: int, blocks_at_once: int) -> Iterator[tuple[int, _Blocks]]:
    """Yield the keys from `start` on in blocks, and where they begin: short ones, then of d keys, several at once.

    Gram matrices are carried along: they are sums of positive terms, so nothing cancels.
    """
    keys, width = values.shape[1:]
    first = start
    length = min(SHORTEST, width)
    gram = values[:, :start].mT @ values[:, :start]
    while start < keys:
        stop = start + length * (blocks_at_once if length == width else 1)
        portion = values[:, start:stop]
        portion = torch.nn.functional.pad(portion, (0, 0, 0, -portion.shape[1] % length))
        blocks = portion.unflatten(1, (-1, length))
        after = gram[:, None] + (blocks.mT @ blocks).cumsum(1)
        starts = torch.arange(start, start + blocks.shape[1] * length, length, device=values.device)
        before = torch.cat([gram[:, None], after[:, :-1]], 1)
        yield start, _Blocks(starts, blocks, before, after, values[:, :start])
        start = stop
        gram = after[:, -1]
        length = min(width, start - first)


def _tabulate(block: Int[Tensor, "row"], size: int) -> tuple[Int[Tensor, "line"], Int[Tensor, "line column"]]:
    """Lay the rows of each block out in lines of `size`; return each line's block, and a table of rows (−1: none)."""
    count = torch.bincount(block)
    lines = (count + size - 1) // size
    order = block.argsort(stable=True)
    index_in_block = torch.arange(len(block), device=block.device) - (count.cumsum(0) - count)[block[order]]
    line = (lines.cumsum(0) - lines)[block[order]] + index_in_block // size
    table = torch.full((int(lines.sum()), size), -1, device=block.device)
    table[line, index_in_block % size] = order
    return torch.arange(len(count), device=block.device).repeat_interleave(lines), table


def _block_roots(
    blocks: _Blocks, resolution: Resolution
) -> tuple[Float[Tensor, "kv block d d"], Bool[Tensor, "kv block key"], Tensor]:
    r"""Find $F$ with $G^{-1} = FF^\top$ for the keys before each block, and for which keys of the block it can serve.

    $G_k = G + W_k^\top W_k \succeq G$, with $W_k$ the first k keys of the block, so
    $\lambda_{min}(G_k) \ge \lambda_{min}(G) \ge 1/\|G^{-1}\|$. This is certified against $\mathrm{tr}(G_k)$ or
    $\|G_{all}\|$, both of them at least $\lambda_{max}(G_k)$; if that fails, against eigenvalues. The factor is that of
    a matrix within $d\,\mathrm{eps}\,\mathrm{tr}(G)$ of $G$, and 16 times as much is required of $\lambda_{min}$.
    Also returns the largest condition of $G$ that was accepted.
    """
    gram = blocks.gram
    width = gram.shape[-1]
    floor = WELL_CONDITIONED if resolution.exact else rounding_floor(width)
    inverse, failed = cholesky_inverses(gram)
    usable = ~failed & inverse.isfinite().all(-1).all(-1)
    root = torch.where(usable[..., None, None], inverse.mT, 0.0)
    smallest = (1 / matrix_norm(root @ root.mT))[..., None]
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True) + blocks.keys.square().sum(-1).cumsum(-1)
    largest = trace.minimum(matrix_norm(blocks.after)[..., None])
    counts = blocks.start[:, None] + torch.arange(1, trace.shape[-1] + 1, device=gram.device)
    good = is_certified(smallest, largest, counts, width, resolution, floor) & usable[..., None]
    unsure = usable & ~good.all(-1)
    if unsure.any():  # with a tolerance the cutoff is so high that bounds are not enough
        least = decompose(eigvalsh, gram[unsure])[:, :1]
        greatest = decompose(eigvalsh, blocks.after[unsure])[:, -1:]
        good[unsure] = is_certified(least, greatest, counts.expand(good.shape)[unsure], width, resolution, floor)
    return root, good, torch.where(good, largest / smallest, 0.0).amax()


def _solve_blocks(
    blocks: _Blocks,
    output: Float[Tensor, "kv block group row d"],
    ends: Int[Tensor, "block row"],
    resolution: Resolution,
) -> tuple[Float[Tensor, "kv block group row d"], Bool[Tensor, "kv block row"]]:
    r"""Solve rows that see all keys before a block and its first k, and tell which solutions are surely right.

    With $G^{-1} = FF^\top$ of the keys before, $W$ the block's values and $Z = WF$, Woodbury's identity gives
    $G_k^{-1} = F(I - Z_k^\top (I + Z_k Z_k^\top)^{-1} Z_k) F^\top$. The inner matrix is the leading k×k block of
    $I + ZZ^\top = CC^\top$, and Cholesky factors nest: all k share $C^{-1}$, by leaving out the coordinates from k on
    in the middle. What cancels is about $\mathrm{eps}\,\|Z\|^2$, at most eps times the condition of $G$; steps of
    refinement make up for it.
    """
    root, good, condition = _block_roots(blocks, resolution)
    Z = blocks.keys @ root
    identity = torch.eye(Z.shape[-2], dtype=Z.dtype, device=Z.device)
    inner, _ = cholesky_inverses(identity + Z @ Z.mT)
    keys_seen = ends - blocks.start[:, None]
    leading = (torch.arange(Z.shape[-2], device=Z.device) < keys_seen[..., None])[:, None]
    root, Z, inner, W, gram = (factor[:, :, None] for factor in (root, Z, inner, blocks.keys, blocks.gram))

    def solve(right: Tensor) -> Tensor:
        white = right @ root
        return (white - (((white @ Z.mT @ inner.mT) * leading) @ inner) @ Z) @ root.mT

    def multiply(rows: Tensor) -> Tensor:
        earlier = linalg.apply_gram(rows, blocks.earlier[:, None, None]) if resolution.exact else rows @ gram
        return earlier + ((rows @ W.mT) * leading) @ W

    solution = solve(output)
    for _ in range(int(resolution.exact) or sum(float(condition) > limit for limit in REFINED_ABOVE)):
        solution = solution + solve(output - multiply(solution))
    return solution, good.gather(2, (keys_seen - 1).clamp(0, good.shape[2] - 1).expand(len(good), -1, -1))
