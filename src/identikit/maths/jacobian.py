"""How hidden vectors move when inputs move: attention's derivative, the exact sweep, norms of Jacobian blocks.

One text at a time. A block is $post(x, mix(pre(x)))$, where pre and post act on each position on its own and mix is
softmax attention, so its derivative is a matrix for each token and the closed form of attention's derivative. Tangents
are laid out (token, feature, tangent): splitting features into heads is then a free view, and every step is a matrix
product.

$A$ is attention; $Q$, $K$, $V$ are queries, keys and values; $O = AV$; j counts queries and m keys; $s$ is the scaling.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from identikit.shapes import Float, Tensor

NORMS = {"frobenius": "Frobenius", "spectral": "spectral", "sum": "sum"}
"""The norms of a Jacobian block, by name, and how each is written."""


class AttentionDerivative(NamedTuple):
    """The derivative of $O = AV$ at one text, as three maps; see `attention_derivative`."""

    of_values: Float[Tensor, "head query key"]
    of_scores: Float[Tensor, "query head d_v key"]
    of_query: Float[Tensor, "query head d_v d_k"]


class BlockDerivative(NamedTuple):
    r"""The derivative of one block at one text, as `push` applies it: what each token gives, and what is written to it.

    $$de_j = \Bigl(\frac{\partial post_j}{\partial x_j} + \frac{\partial post_j}{\partial O_j} C_j
    \frac{\partial Q_j}{\partial x_j}\Bigr) dx_j + \frac{\partial post_j}{\partial O_j} (dO_j - C_j\, dQ_j)$$

    `own` and `by_output` are the two matrices, so the query's path costs the sweep nothing. `read` gives keys, then
    values: the rows of $\partial K/\partial x$ and $\partial V/\partial x$ by key-value head, one matrix for all tokens
    where they agree. Or, where `folds`, rows that give $Q_j \cdot dK_m$ by query and head instead of $dK_m$; `query` is
    then None. `of_values` and `of_scores` are attention's (see `attention_derivative`).
    """

    read: Float[Tensor, "#n read d"]
    own: Float[Tensor, "n d d"]
    by_output: Float[Tensor, "n d d_o"]
    query: Float[Tensor, "head n d_k"] | None
    of_values: Float[Tensor, "head n n"]
    of_scores: Float[Tensor, "n head d_v n"]
    kv_heads: int

    def after(self, start: int) -> "BlockDerivative":
        """Restrict the derivative to the tokens from `start` on.

        Where no token sees a later one, this is all that their tangents need.
        """
        read = self.read[start:] if len(self.read) > 1 else self.read
        return self._replace(
            read=read[:, start * len(self.of_values) :] if self.query is None else read,
            own=self.own[start:],
            by_output=self.by_output[start:],
            query=None if self.query is None else self.query[:, start:],
            of_values=self.of_values[:, start:, start:],
            of_scores=self.of_scores[start:, :, :, start:],
        )

    def to(self, dtype: torch.dtype, *, more: int = 0) -> "BlockDerivative":
        """Convert to another dtype, with so many `more` tokens that neither give nor take anything.

        Matrix units work on eight entries at a time, and where a text's length is a multiple of eight, so do they.
        """
        read, cut = self.read.to(dtype), self.read.shape[1] - self.kv_heads * self.of_scores.shape[2]
        if more and self.query is None:  # a row for each query and head comes before the values
            read = torch.cat([F.pad(read[:, :cut], (0, 0, 0, more * len(self.of_values))), read[:, cut:]], 1)
        return self._replace(
            read=F.pad(read, (0, 0, 0, 0, 0, more)) if len(read) > 1 else read,
            own=F.pad(self.own.to(dtype), (0, 0, 0, 0, 0, more)),
            by_output=F.pad(self.by_output.to(dtype), (0, 0, 0, 0, 0, more)),
            query=None if self.query is None else F.pad(self.query.to(dtype), (0, 0, 0, more)),
            of_values=F.pad(self.of_values.to(dtype), (0, more, 0, more)),
            of_scores=F.pad(self.of_scores.to(dtype), (0, more, 0, 0, 0, 0, 0, more)),
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
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    slope = scaling * weights
    if softcap is not None:
        slope = slope * (1 - torch.tanh(query @ key.mT * scaling / softcap).square())
    centred = value.mT - (weights @ value).transpose(0, 1).unsqueeze(-1)
    of_scores = centred * slope.transpose(0, 1).unsqueeze(2)
    return AttentionDerivative(weights, of_scores, of_scores @ key)


def folds(n: int, d: int, query: tuple[int, int], kv_heads: int) -> bool:
    r"""Say whether reading $Q_j \cdot dK_m$ for every query takes fewer operations than reading $dK_m$.

    `query` is (heads, d_k). It does up to about as many tokens as a head has features.
    """
    heads, d_k = query
    return n * heads * (d - d_k) < kv_heads * d_k * d


def folded(
    keys: Float[Tensor, "#n d_keys d"], query: Float[Tensor, "head query d_k"]
) -> Float[Tensor, "#n query*head d"]:
    r"""Return the rows that give $Q_j \cdot dK_m$ by query and head, from those that give $dK_m$ by key-value head."""
    by_head = keys.unflatten(1, (-1, query.shape[2]))
    kv_heads, (heads, n, _) = by_head.shape[1], query.shape
    grouped = query.unflatten(0, (kv_heads, -1)).transpose(1, 2).flatten(1, 2)
    rows = (grouped @ by_head).unflatten(2, (n, heads // kv_heads))
    return rows.transpose(1, 2).flatten(1, 3)


def push(
    tangents: Float[Tensor, "n d tangent"],
    block: BlockDerivative,
    *,
    read: Float[Tensor, "n read tangent"],
    mixed: Float[Tensor, "n d_o tangent"],
    result: Float[Tensor, "n d tangent"],
) -> None:
    """Push tangents through one block: fill `result` with its outputs' derivatives along them.

    `read` and `mixed` are scratch: what the tokens give, and the head outputs' tangents without the query's path.
    """
    n, _, count = tangents.shape
    heads = len(block.of_values)
    torch.bmm(block.read.expand(n, -1, -1), tangents, out=read)
    keys, values = _keys_and_values(read, block)
    by_head = mixed.view(n, heads, -1, count)
    if block.query is None:
        scores = keys.flatten(1, 2).transpose(0, 1)
        torch.bmm(block.of_scores.flatten(0, 1), scores, out=by_head.flatten(0, 1))
    else:
        for head in range(heads):
            scores = torch.bmm(block.query[head].expand(n, -1, -1), keys[:, head * block.kv_heads // heads])
            torch.bmm(block.of_scores[:, head], scores.transpose(0, 1), out=by_head[:, head])
    for first in range(heads // block.kv_heads):  # the heads that use each of the values in turn
        some = slice(first, None, heads // block.kv_heads)
        given, taken = values.flatten(2).transpose(0, 1), by_head[:, some].flatten(2).transpose(0, 1)
        torch.baddbmm(taken, block.of_values[some], given, out=taken)
    torch.bmm(block.by_output, mixed, out=result)
    result.baddbmm_(block.own, tangents)


def push_first(
    start: Float[Tensor, "input d direction"],
    block: BlockDerivative,
    *,
    first: int,
    mixed: Float[Tensor, "n d_o tangent"],
    result: Float[Tensor, "n d tangent"],
) -> None:
    """Push tangents through the first block, where each lives only at its own token: as `push`, with far less to do.

    `start` holds those of the tokens from `first` on. The tangents of `result` are (input, direction), flattened.
    """
    inputs, _, directions = start.shape
    n, heads = len(result), len(block.of_values)
    here = slice(first, first + inputs)
    keys, values = _keys_and_values(torch.bmm(block.read.expand(n, -1, -1)[here], start), block)
    if block.query is not None:
        query = block.query.unflatten(0, (block.kv_heads, -1))
        keys = torch.einsum("grjk,igkt->ijgrt", query, keys).flatten(2, 3)
    values = values.repeat_interleave(heads // block.kv_heads, dim=1)
    by_head = mixed.view(n, heads, -1, inputs, directions)
    torch.mul(block.of_scores[..., here].unsqueeze(-1), keys.permute(1, 2, 0, 3).unsqueeze(2), out=by_head)
    by_head.addcmul_(block.of_values[..., here].transpose(0, 1)[:, :, None, :, None], values.permute(1, 2, 0, 3))
    torch.bmm(block.by_output, mixed, out=result)
    at_own_token = result.unflatten(-1, (inputs, directions))[here].diagonal(dim1=0, dim2=2)
    at_own_token += torch.bmm(block.own[here], start).permute(1, 2, 0)


def _keys_and_values(read: Tensor, block: BlockDerivative) -> tuple[Tensor, Tensor]:
    """Split what `read` gives into keys and values.

    Keys are Q·dK as (token, query, head, tangent), or else dK by key-value head; values are dV by key-value head.
    """
    n, heads, d_v, _ = block.of_scores.shape
    cut = read.shape[1] - block.kv_heads * d_v
    by_head = (n, heads) if block.query is None else (block.kv_heads, -1)
    return read[:, :cut].unflatten(1, by_head), read[:, cut:].unflatten(1, (block.kv_heads, d_v))


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


def spectral_norm(matrices: Float[Tensor, "*batch row column"]) -> Float[Tensor, "*batch"]:
    r"""Compute the largest singular value of each matrix, by Lanczos steps on $J^\top J$.

    It needs no full decomposition. The basis is kept orthogonal. The steps end when the residual of every largest Ritz
    value is below eps^¾ of it (the error falls with the residual's square), or when the basis is complete.
    """
    complete, eps = min(matrices.shape[-2:]), torch.finfo(matrices.dtype).eps
    gram = matrices @ matrices.mT if matrices.shape[-2] < matrices.shape[-1] else matrices.mT @ matrices
    drawn = torch.randn(complete, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    basis = _unit(gram @ drawn.to(matrices), 0.0)[0]
    diagonal, beside = [], []
    while True:
        image = gram @ basis[..., -1:]
        diagonal.append((basis[..., -1:] * image).sum((-2, -1)))
        rounding = 64 * eps * torch.linalg.vector_norm(image, dim=(-2, -1))
        for _ in range(2):  # once leaves rounding behind
            image = image - basis @ (basis.mT @ image)
        following, length = _unit(image, rounding)
        if len(diagonal) % 8 == 0 or len(diagonal) == complete:
            value, last = _largest_ritz(torch.stack(diagonal, -1), beside)
            if len(diagonal) == complete or (length * last <= eps**0.75 * value).all():
                return value.clamp(min=0.0).sqrt()
        beside.append(length)
        basis = torch.cat([basis, following], dim=-1)


def _largest_ritz(diagonal: Float[Tensor, "*batch step"], beside: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the largest eigenvalue of tridiagonal matrices, and the size of its eigenvector's last entry."""
    matrices = torch.diag_embed(diagonal)
    if beside:
        off = torch.stack(beside, -1)
        matrices = matrices + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    values, vectors = torch.linalg.eigh(matrices)
    return values[..., -1], vectors[..., -1, -1].abs()


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
    count, largest = squares.shape[-1], squares.amax((-3, -1), keepdim=True)
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
    basis, upper = torch.linalg.qr(drawn)
    return (basis * upper.diagonal().sign()).T
