"""How hidden vectors move when inputs move: attention's derivative, the exact sweep, norms of Jacobian blocks.

One text at a time. A block is $post(x, mix(pre(x)))$, where pre and post act on each position on its own and mix is
softmax attention, so its derivative is a matrix for each token and the closed form of attention's derivative. Tangents
are laid out (token, feature, tangent): splitting features into heads is then a free view, and every step is a matrix
product.

$A$ is attention; $Q$, $K$, $V$ are queries, keys and values; $O = AV$; j counts queries and m keys; $s$ is the scaling.
"""

from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F

from identikit.maths.threads import decompose
from identikit.shapes import Float, Tensor

NORMS = {"frobenius": "Frobenius", "spectral": "spectral", "sum": "sum"}
"""The norms of a Jacobian block, by name, and how each is written."""

_CANDIDATES = 64
_ROUNDS = 8  # 6 bits a round: together more than an eigenvalue's square root keeps


class AttentionDerivative(NamedTuple):
    """The derivative of $O = AV$ at one text, as three maps; see `attention_derivative`."""

    of_values: Float[Tensor, "head query key"]
    of_scores: Float[Tensor, "query head d_v key"]
    of_query: Float[Tensor, "query head d_v d_k"]


class BlockDerivative(NamedTuple):
    r"""The derivative of one block at one text, as `push` applies it.

    $$de_j = \Bigl(\frac{\partial post_j}{\partial x_j} + \frac{\partial post_j}{\partial O_j} C_j
    \frac{\partial Q_j}{\partial x_j}\Bigr) dx_j + \frac{\partial post_j}{\partial O_j} (dO_j - C_j\, dQ_j)$$

    `own` and `by_output` are the two matrices, so the query's path costs the sweep nothing. `read` gives keys, then
    values: the rows of $\partial K/\partial x$ and $\partial V/\partial x$ by key-value head, one matrix for all tokens
    where they agree. Or, where `is_folding_cheaper`, rows that give $Q_j \cdot dK_m$ by query and head instead of
    $dK_m$; `query` is then None. `of_values` and `of_scores` are attention's (see `attention_derivative`).
    """

    read: Float[Tensor, "#n read d"]
    own: Float[Tensor, "n d d"]
    by_output: Float[Tensor, "n d d_o"]
    query: Float[Tensor, "head n d_k"] | None
    of_values: Float[Tensor, "head n key"]
    of_scores: Float[Tensor, "n head d_v key"]
    kv_heads: int

    def after(self, start: int, multiple: int) -> "BlockDerivative":
        """Restrict the derivative to the tokens from `start` on, with keys that give nothing up to a `multiple`.

        Where no token sees a later one, this is all that their tangents need. A GPU's matrix units take a multiple of
        eight numbers at a time.
        """
        padding = -(len(self.own) - start) % multiple

        def by_key(factor: Tensor) -> Tensor:
            return F.pad(factor[..., start:], (0, padding)) if padding else factor[..., start:].contiguous()

        read = self.read[start:] if len(self.read) > 1 else self.read
        return self._replace(
            read=read[:, start * len(self.of_values) :] if self.query is None else read,
            own=self.own[start:],
            by_output=self.by_output[start:],
            query=None if self.query is None else self.query[:, start:],
            of_values=by_key(self.of_values[:, start:]),
            of_scores=by_key(self.of_scores[start:]),
        )


def attention_derivative(
    query: Float[Tensor, "head query d_k"],
    key: Float[Tensor, "kv_head key d_k"],
    value: Float[Tensor, "kv_head key d_v"],
    weights: Float[Tensor, "head query key"],
    *,
    scaling: float,
    softcap: float | None = None,
) -> AttentionDerivative:
    r"""Differentiate a layer's attention in closed form, as maps that act on tangents.

    $$dO_j = \sum_m A_{jm}\, dV_m + \sum_m N_{jm} (Q_j \cdot dK_m) + C_j\, dQ_j, \qquad
    N_{jm} = s A_{jm} \gamma_{jm} (V_m - O_j), \quad C_j = \sum_m N_{jm} K_m^\top$$

    `of_values` is $A$ (argument `weights`; masks and a position bias act only through it), `of_scores` is $N$, keys
    last, and `of_query` is $C$. $s$ is `scaling`. With a soft-cap $c$ the scores are $c \tanh(s\,Q_j\cdot K_m/c)$ and
    $\gamma = 1 - \tanh^2(s\,Q_j\cdot K_m/c)$, else $\gamma = 1$. Heads may share keys and values. A query that sees no
    key has a row of zeros in $A$, and a zero derivative.
    """
    groups = len(query) // len(key)
    key = key.repeat_interleave(groups, 0)
    value = value.repeat_interleave(groups, 0)
    slope = scaling * weights
    if softcap is not None:
        slope = slope * (1 - torch.tanh(query @ key.mT * scaling / softcap).square())
    centred = value.mT - (weights @ value).transpose(0, 1).unsqueeze(-1)
    of_scores = centred * slope.transpose(0, 1).unsqueeze(2)
    return AttentionDerivative(weights, of_scores, of_scores @ key)


def is_folding_cheaper(n: int, d: int, query: tuple[int, int], kv_heads: int) -> bool:
    r"""Return whether reading $Q_j \cdot dK_m$ for every query takes fewer operations than reading $dK_m$.

    `query` is (heads, d_k). It does up to about as many tokens as a head has features.
    """
    heads, d_k = query
    return n * heads * (d - d_k) < kv_heads * d_k * d


def fold_queries(
    keys: Float[Tensor, "#n d_keys d"], query: Float[Tensor, "head query d_k"]
) -> Float[Tensor, "#n query*head d"]:
    r"""Return the rows that give $Q_j \cdot dK_m$ by query and head, from those that give $dK_m$ by key-value head."""
    by_head = keys.unflatten(1, (-1, query.shape[2]))
    kv_heads = by_head.shape[1]
    heads, n, _ = query.shape
    grouped = query.unflatten(0, (kv_heads, -1)).transpose(1, 2).flatten(1, 2)
    rows = (grouped @ by_head).unflatten(2, (n, heads // kv_heads))
    return rows.transpose(1, 2).flatten(1, 3)


def push(
    tangents: Float[Tensor, "n d tangent"],
    block: BlockDerivative,
    *,
    read: Float[Tensor, "key read tangent"],
    mixed: Float[Tensor, "n d_o tangent"],
    result: Float[Tensor, "n d tangent"],
) -> None:
    """Push tangents through one block: fill `result` with its outputs' derivatives along them.

    `read` and `mixed` are scratch: what the keys give, and the head outputs' tangents without the query's path.
    """
    n = len(tangents)
    torch.bmm(block.read.expand(n, -1, -1), tangents, out=read[:n])
    read[n:] = 0
    _mix(read, block, mixed)
    torch.bmm(block.by_output, mixed, out=result)
    result.baddbmm_(block.own, tangents)


def push_first(
    start: Float[Tensor, "input d direction"],
    block: BlockDerivative,
    *,
    first: int,
    read: Float[Tensor, "key read tangent"],
    mixed: Float[Tensor, "n d_o tangent"],
    result: Float[Tensor, "n d tangent"],
) -> None:
    """Push tangents through the first block, where each lives only at its own token: as `push`, with less to do.

    `start` holds those of the tokens from `first` on. The tangents of `result` are (input, direction), flattened.
    """
    inputs = len(start)
    tokens = slice(first, first + inputs)

    def at_own_token(spread: Tensor) -> Tensor:
        return spread.unflatten(-1, (inputs, -1))[tokens].diagonal(dim1=0, dim2=2)  # (feature, direction, input)

    read.zero_()
    at_own_token(read).copy_(torch.bmm(block.read.expand(len(result), -1, -1)[tokens], start).permute(1, 2, 0))
    _mix(read, block, mixed)
    torch.bmm(block.by_output, mixed, out=result)
    at_own_token(result).add_(torch.bmm(block.own[tokens], start).permute(1, 2, 0))


def _mix(
    read: Float[Tensor, "key read tangent"], block: BlockDerivative, mixed: Float[Tensor, "n d_o tangent"]
) -> None:
    """Fill `mixed` with the head outputs' tangents, without the query's path, from what the keys give."""
    heads, d_v = block.of_scores.shape[1:3]
    cut = read.shape[1] - block.kv_heads * d_v
    keys = read[:, :cut]
    values = read[:, cut:]
    by_head = mixed.unflatten(1, (heads, d_v))
    if block.query is None:
        torch.bmm(block.of_scores.flatten(0, 1), keys.transpose(0, 1), out=by_head.flatten(0, 1))
    else:
        keys_by_kv_head = keys.unflatten(1, (block.kv_heads, -1))
        for head in range(heads):
            of_head = keys_by_kv_head[:, head * block.kv_heads // heads]
            scores = torch.bmm(block.query[head].expand(len(read), -1, -1), of_head)
            torch.bmm(block.of_scores[:, head], scores.transpose(0, 1), out=by_head[:, head])
    by_kv_head = values.unflatten(1, (block.kv_heads, d_v)).flatten(2).transpose(0, 1)
    for first in range(heads // block.kv_heads):  # the heads that use each of the values in turn
        sharing = slice(first, None, heads // block.kv_heads)
        output = by_head[:, sharing].flatten(2).transpose(0, 1)
        torch.baddbmm(output, block.of_values[sharing], by_kv_head, out=output)


def block_norms(tangents: Float[Tensor, "output feature input direction"], norm: str) -> Float[Tensor, "output input"]:
    r"""Compute the norm of every Jacobian block $\nabla_{ij} = \partial e_j/\partial x_i$ (Eq. 11), given whole.

    `tangents` holds the blocks' entries: the derivative of each feature of $e_j$ (`output`) along each direction of
    $x_i$ (`input`). The directions are an orthonormal basis. `norm` is

    - "frobenius": the root of the sum of squares;
    - "sum": the length of the gradient of the *sum* of $e_j$'s components, $\|1^\top \nabla_{ij}\|_2$, which older
      frameworks return for the gradient of a vector;
    - "spectral": the largest singular value, which is what $\|\cdot\|_2$ of a matrix means.

    The paper does not say which one it used.
    """
    wide = torch.promote_types(tangents.dtype, torch.float32)
    if norm == "frobenius":
        lengths = torch.linalg.vector_norm(tangents, dim=1, dtype=wide)  # over features first, as memory lies
        return torch.linalg.vector_norm(lengths, dim=-1)
    if norm == "sum":
        return torch.linalg.vector_norm(tangents.sum(1, dtype=wide), dim=-1)
    return spectral_norm(tangents.transpose(1, 2).to(wide, memory_format=torch.contiguous_format))


def direction_squares(
    tangents: Float[Tensor, "output feature input direction"], norm: str
) -> Float[Tensor, "output input direction"]:
    """Compute the squared length of each Jacobian block's image of each direction.

    Over a basis they sum to the squared norm. `norm` is "frobenius" or "sum" (see `block_norms`); the spectral norm is
    not a sum over directions.
    """
    wide = torch.promote_types(tangents.dtype, torch.float32)
    if norm == "frobenius":
        return torch.linalg.vector_norm(tangents, dim=1, dtype=wide).square()
    return tangents.sum(1, dtype=wide).square()


def fisher_root(by_logit: Float[Tensor, "token d"], logits: Float[Tensor, "token"]) -> Float[Tensor, "d d"]:
    r"""Return a root $R$ of how hidden vectors move a distribution over tokens: $R^\top R = F$.

    $$F = W^\top (\mathrm{diag}(p) - p p^\top) W, \qquad p = \mathrm{softmax}(\mathrm{logits})$$

    is Fisher's information of the tokens' probabilities, by the hidden vector that makes the logits; $W$ (`by_logit`)
    is the logits' derivative by it. Then $\|R J\|_F^2 = tr(J^\top F J)$ for a Jacobian block $J$ of the vector. With
    rows of $W$ centred at their mean under $p$, F is a sum of squares, and rounding cannot make it indefinite.
    """
    p = logits.double().softmax(0)
    centred = by_logit.double()
    centred = (centred - p @ centred) * p.sqrt()[:, None]
    values, vectors = decompose(torch.linalg.eigh, centred.mT @ centred)
    return values.clamp(min=0.0).sqrt()[:, None] * vectors.mT


def spectral_norm(matrices: Float[Tensor, "*batch row column"]) -> Float[Tensor, "*batch"]:
    r"""Compute the largest singular value of each matrix, by Lanczos steps on $J^\top J$.

    It needs no full decomposition. The basis is kept orthogonal. The steps end when the residual of every largest Ritz
    value is below eps^¾ of it (the error falls with the residual's square), or when the basis is complete.
    """
    complete = min(matrices.shape[-2:])
    eps = torch.finfo(matrices.dtype).eps
    gram = matrices @ matrices.mT if matrices.shape[-2] < matrices.shape[-1] else matrices.mT @ matrices
    drawn = torch.randn(complete, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    basis = _unit(gram @ drawn.to(matrices), 0.0)[0]
    diagonal = []
    off_diagonal: list[Tensor] = []
    while True:
        image = gram @ basis[..., -1:]
        diagonal.append((basis[..., -1:] * image).sum((-2, -1)))
        rounding = 64 * eps * torch.linalg.vector_norm(image, dim=(-2, -1))
        for _ in range(2):  # once leaves rounding behind
            image = image - basis @ (basis.mT @ image)
        following, length = _unit(image, rounding)
        if len(diagonal) % 8 == 0 or len(diagonal) == complete:
            value, last = _largest_ritz(torch.stack(diagonal, -1), off_diagonal)
            if len(diagonal) == complete or ((length * last <= eps**0.75 * value) | value.isnan()).all():
                return value.clamp(min=0.0).sqrt()
        off_diagonal.append(length)
        basis = torch.cat([basis, following], dim=-1)


def _largest_ritz(diagonal: Float[Tensor, "*batch step"], off_diagonal: list[Tensor]) -> tuple[Tensor, Tensor]:
    r"""Return the largest eigenvalue of tridiagonal matrices, and the size of its eigenvector's last entry.

    $\theta$ lies above all eigenvalues where all pivots of $\theta - T$ are positive, so 64 candidates at a time narrow
    it down. The eigenvector follows from the pivots from above and from below, which are exact where its entries grow,
    and meet at its largest. A batched `eigh` would give both, but on a GPU torch takes matrices of more than 32 rows
    one by one.
    """
    steps = diagonal.double().movedim(-1, 0)
    off = torch.stack(off_diagonal).double() if off_diagonal else steps[:0]
    none = torch.zeros_like(steps[:1])
    low = steps.amax(0)
    high = (steps + torch.cat([none, off]) + torch.cat([off, none])).amax(0)  # by Gershgorin's theorem
    fractions = torch.arange(1, _CANDIDATES + 1, device=steps.device) / _CANDIDATES
    for _ in range(_ROUNDS):
        width = (high - low) / _CANDIDATES
        candidates = low[..., None] + (high - low)[..., None] * fractions
        above = reduce(torch.minimum, _pivots(steps[..., None], off[..., None], candidates)) > 0
        above[..., -1] = True
        high = low + width * (above.int().argmax(-1) + 1)
        low = high - width
    from_above = torch.stack([*_pivots(steps, off, high)])
    from_below = torch.stack([*_pivots(steps.flip(0), off.flip(0), high)]).flip(0)
    rows = torch.arange(len(steps), device=steps.device).view(-1, *[1] * high.ndim)
    largest = (from_above + from_below - (high - steps)).abs().argmin(0)  # the row of the vector's largest entry
    up = torch.where((rows[:-1] < largest) & (off > 0), off / from_above[:-1], (rows[:-1] >= largest).double())
    down = torch.where((rows[1:] > largest) & (off > 0), off / from_below[1:], (rows[1:] <= largest).double())
    ones = torch.ones_like(high)[None]
    vector = torch.cat([up.flip(0).cumprod(0).flip(0), ones]) * torch.cat([ones, down.cumprod(0)])
    last = vector[-1].abs() / torch.linalg.vector_norm(vector, dim=0)
    return high.to(diagonal), last.nan_to_num(nan=1.0).to(diagonal)  # where it cannot be told, the most it can be


def _pivots(
    diagonal: Float[Tensor, "step *batch"], off_diagonal: Float[Tensor, "less *batch"], shift: Float[Tensor, "*wider"]
) -> Iterator[Float[Tensor, "*wider"]]:
    """Yield the pivots of `shift` minus a tridiagonal matrix, from its first row on."""
    yield (pivot := shift - diagonal[0])
    for entry, next_to in zip(diagonal[1:], off_diagonal, strict=True):
        share = torch.where(next_to > 0, next_to.square() / pivot, 0.0)
        yield (pivot := shift - entry - share)


def _unit(vector: Float[Tensor, "*batch d 1"], least: Tensor | float) -> tuple[Tensor, Float[Tensor, "*batch"]]:
    """Scale vectors to length 1, and return the lengths they had; one no longer than `least` becomes 0, of length 0."""
    length = torch.linalg.vector_norm(vector, dim=(-2, -1))
    length = torch.where(length > least, length, 0.0)
    return torch.where(length > 0, 1 / length, 0.0)[..., None, None] * vector, length


def contributions(norms: Float[Tensor, "*layer input output"]) -> Float[Tensor, "*layer input output"]:
    r"""Compute what share of a hidden vector's sensitivity each input has.

    $$c_{ij} = \frac{\|\nabla_{ij}\|}{\sum_k \|\nabla_{kj}\|} \qquad \text{(Eq. 11)}$$

    `norms` holds $\|\nabla_{ij}\|$. A hidden vector that no input moves (all its norms are 0, as under the sum after a
    LayerNorm of constant gain) has no shares: its column is all 0 and does not sum to 1. Rounding can leave tiny norms
    there, whose shares mean nothing.
    """
    total = norms.double().sum(-2, keepdim=True)  # squares and sums of float32 can leave its range
    return torch.where(total > 0, norms / total, 0.0).to(norms.dtype)


def estimated_contributions(
    squares: Float[Tensor, "*layer input output direction"], *, population: int
) -> tuple[Float[Tensor, "*layer input output"], Float[Tensor, "*layer input output"]]:
    r"""Estimate contributions (Eq. 11) from k of the d directions of a random orthonormal basis, with standard errors.

    $$\widehat{\|\nabla_{ij}\|^2} = \frac{d}{k} \sum_b y_{ijb}, \qquad
    \mathrm{se}(c_{ij})^2 = \Bigl(1 - \frac{k}{d}\Bigr) \frac{1}{k} \mathrm{Var}_b \Bigl[
    \frac{d}{\sum_k N_{kj}} \Bigl(\frac{y_{ijb}}{2 N_{ij}} - c_{ij} \sum_k \frac{y_{kjb}}{2 N_{kj}}\Bigr)\Bigr]$$

    $y$ is `squares` (see `direction_squares`; all inputs share the same directions), $d$ is `population`, and $N$ are
    the norms. The squared norms are unbiased, and exact when k = d. The error is the delta method's, from $c$ as a
    linear function of the $y$'s, with the finite-population factor of drawing k of d directions. The paper has no
    estimate.
    """
    count = squares.shape[-1]
    largest = squares.amax((-3, -1), keepdim=True)
    squares = squares / torch.where(largest > 0, largest, 1.0)  # shares stay the same, and nothing leaves the range
    norms = (squares.mean(-1) * population).sqrt()
    share = contributions(norms)
    half = torch.where(norms > 0, 0.5 * population / norms, 0.0).unsqueeze(-1) * squares
    linear = half - share.unsqueeze(-1) * half.sum(-3, keepdim=True)
    total = norms.sum(-2, keepdim=True)
    spread = (linear.var(-1) * (1 - count / population) / count).sqrt()
    return share, torch.where(total > 0, spread / total, 0.0)


def orthogonal_probes(d: int, count: int, *, seed: int) -> Float[Tensor, "count d"]:
    """Draw `count` orthonormal directions of R^d, in float64.

    They are uniformly random: the first columns of a Haar matrix.
    """
    drawn = torch.randn(d, count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    basis, upper = decompose(torch.linalg.qr, drawn)
    return (basis * upper.diagonal().sign()).T
