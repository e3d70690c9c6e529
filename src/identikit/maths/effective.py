r"""Effective attention: the part of an attention map that its output depends on (section 3 of the paper).

For one head, $A$ is the attention (query × key), $V$ the values (key × d_v), $O = AV$ the head output, $H$ the head's
slice of the output projection (d_v × d) and $T = VH$. The part of $A$ in the left null space of $T$ changes nothing.
The rest is

$$A^\perp = A - \mathrm{Proj}_{LN(T)} A \qquad \text{(Eq. 9)}$$

Row i sees a set $S_i$ of keys, and its null space is that of $T$ restricted to $S_i$. With
$G_i = \sum_{m \in S_i} v_m v_m^\top$,

$$a^\perp_{im} = y_i \cdot v_m \text{ for } m \in S_i, \text{ else } 0, \qquad y_i = G_i^+ o_i$$

so $A^\perp$ is kept as $Y$ and $V$. It needs the head output but no attention matrix, and nothing of size query × key
is ever stored. Rows whose visible values are independent have no null space: they are their raw attention itself.

Functions take one layer and one text; where texts or layers share a mask, their heads can be laid end to end.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from identikit.errors import InputError
from identikit.maths import linalg
from identikit.maths.linalg import Resolution, rounding_unit
from identikit.maths.prefix import prefix_solve
from identikit.maths.visible import Visible, visible_from_mask
from identikit.shapes import Bool, Float, Int, Tensor

Selection = slice | Tensor
RawRows = Callable[[Tensor, Tensor], Tensor] | Tensor
"""Raw attention (head, query, key), or a function of head and query positions that returns those rows of it."""


@dataclass(frozen=True)
class Heads:
    """What effective attention is computed from: $V$, $O = AV$, who sees what, and the unit that $V$ was rounded to.

    Under grouped-query attention $V$ has fewer heads than $O$: query head h uses key-value head h // (heads /
    kv_heads).
    """

    values: Float[Tensor, "kv_head key d_v"]
    output: Float[Tensor, "head query d_v"]
    visible: Visible
    eps: float
    back: Float[Tensor, "head wide wide"] | None = None
    """What turns `values` into $V$ as $H$ passes it on, where that is not all of it."""

    mass: Float[Tensor, "head query"] | None = None
    """The sum of each row of $A$ where a learned sink takes a part of it; None: 1, or 0 for a row that sees no key."""

    @property
    def group(self) -> int:
        """How many query heads share a key-value head."""
        return len(self.output) // len(self.values)

    @property
    def sums(self) -> Float[Tensor, "#head query 1"]:
        """The sum of each row of $A$."""
        return ((self.visible.count > 0).double()[None] if self.mass is None else self.mass.double())[..., None]


def attention_heads(
    values: Float[Tensor, "kv_head key d_v"],
    output: Float[Tensor, "head query d_v"],
    visible: Bool[Tensor, "..."] | Visible | None = None,
    *,
    mass: Float[Tensor, "head query"] | None = None,
) -> Heads:
    """Gather one layer's values $V$, head outputs $O$ and mask; `mass` is the sum of each row, if it is not 1."""
    if len(output) % len(values):
        raise InputError(
            f"Computing effective attention: {len(output)} heads cannot share {len(values)} key-value heads evenly. "
            "Pass the values before they are repeated."
        )
    if visible is None:
        visible = torch.ones(1, values.shape[1], dtype=torch.bool, device=values.device)
    if isinstance(visible, Tensor):
        visible = visible_from_mask(visible, output.shape[1])
    return Heads(values, output, visible, rounding_unit(values.dtype), mass=mass)


def without_bias(heads: Heads, bias: Float[Tensor, "kv_head d_v"]) -> Heads:
    r"""Take the value bias out: $V - 1b^\top$ and $O - A1b^\top$, the paper's $T = E W^V H$ to the letter (Eq. 3).

    Real models have a bias $b$ (argument `bias`). With it in $V$, the default, $A^\perp V = O$; without it,
    $A^\perp (V - 1b^\top) + A1b^\top = O$. Rows sum to 1, $A1 = 1$, unless a learned sink takes a part of them.
    """
    shift = bias.double()[:, None]
    output = heads.output.double() - shift.repeat_interleave(heads.group, 0) * heads.sums
    return replace(heads, values=heads.values.double() - shift, output=output)


def length_factor_of_head(heads: Heads, projection: Float[Tensor, "head d_v d"], head: int) -> Float[Tensor, "d_v d_v"]:
    """Return the matrix that gives a head's values, after `through_projection`, the lengths of $T = VH$."""
    R = length_factor(projection[head : head + 1])[0]
    return R if heads.back is None else heads.back[head] @ R


def through_projection(heads: Heads, projection: Float[Tensor, "head d_v d"]) -> Heads:
    """Leave out of $V$ and $O$ what the output projection $H$ does not pass on.

    Nothing changes when $H$ (argument `projection`) has full row rank. Otherwise $LN(VH) = LN(VU)$, where the columns
    of $U$ are an orthonormal basis of $H$'s column space within the $d_v$ value dimensions (its left singular vectors),
    padded with zero columns. Under grouped-query attention $V$ is then repeated per head. Uneven rows of $H$ are first
    brought to one size, and $V$'s columns take over what they lose.
    """
    H = projection.double()
    scale = linalg.column_scales(H.mT)
    H = H * scale.mT
    resolution = Resolution(rounding_unit(projection.dtype))
    if bool(linalg.triangular_roots(H @ H.mT, H.shape[2], resolution)[1].all()):
        return heads
    singular, vectors = linalg.right_spectrum(H.mT)
    real = resolution.is_real(singular, H.shape[2])
    if bool(real.all()):
        return heads
    basis = vectors * real[:, None]
    values = heads.values.double().repeat_interleave(heads.group, 0) / scale
    return replace(heads, values=values @ basis, output=heads.output.double() / scale @ basis, back=basis.mT * scale)


def with_mass(heads: Heads) -> Heads:
    r"""Return the form whose rows keep their sum: $[V, c1]$ and $[O, cA1]$, with null space $LN([T, 1])$ (section 3.3).

    It does not change when a constant is added to all values. The weight $c$ is the size of a typical value, so that
    the column of ones is neither lost nor drowns the values; $A^\perp$ is the same for every $c \ne 0$.
    """
    V = heads.values.double()
    visible_values = V[:, heads.visible.keys]
    size = visible_values.square().sum(-1).mean(-1).sqrt() if visible_values.shape[1] else V.new_zeros(len(V))
    size = torch.where(size > 0, size, 1.0)[:, None, None]
    ones = size.expand(-1, V.shape[1], 1)
    sums = size.repeat_interleave(heads.group, 0) * heads.sums
    return replace(heads, values=torch.cat([V, ones], -1), output=torch.cat([heads.output.double(), sums], -1))


@dataclass(frozen=True)
class Factors:
    r"""Effective attention in factors, $A^\perp = Y V^\top$ on visible entries, and the rank of each row's values."""

    coefficients: Float[Tensor, "head query d_v"]
    values: Float[Tensor, "kv_head key d_v"]
    rank: Int[Tensor, "head query"]
    visible: Visible

    @property
    def null_dim(self) -> Int[Tensor, "head query"]:
        r"""Dimension of each row's null space, $\dim LN(T)$ = visible keys − rank($T$) (Eq. 6)."""
        return self.visible.count - self.rank

    @property
    def identifiable(self) -> Bool[Tensor, "head query"]:
        """Rows with no null space: their effective attention is their raw attention."""
        return self.null_dim == 0

    @property
    def group(self) -> int:
        """How many query heads share a key-value head."""
        return len(self.coefficients) // len(self.values)


def effective_factors(heads: Heads, *, tolerance: float = 0.0) -> Factors:
    r"""Compute effective attention (Eq. 9) as factors $Y$ and $V$, and the rank of every row.

    $$y_i = G_i^+ o_i, \qquad G_i = \sum_{m \in S_i} v_m v_m^\top$$

    $V$ and $O$ are `heads.values` and `heads.output`; $S_i$ is row i of `heads.visible`. Where every row sees the same
    keys this is $A^\perp = O V^+$. One factorisation serves all query heads of a key-value head.

    The paper projects with the singular vectors of $T$, and treats all rows alike. We restrict each row to the keys
    that it sees, and read the rank from the spectrum of $V$, whose rounding is known (`linalg.Resolution`), not from
    that of $T$; uneven columns are brought to one size first (`linalg.column_scales`), unless there is a tolerance,
    which is relative to the length of the output. `tolerance` $\varepsilon$ also counts singular values below
    $\varepsilon\,\sigma_{max}$ as null; the output is then the same only to about $\varepsilon$. All is in float64.
    """
    visible = heads.visible
    resolution = Resolution(heads.eps, tolerance)
    V = heads.values[:, visible.keys].double()
    scale = V.new_ones(len(V), 1, V.shape[2]) if tolerance else linalg.column_scales(V)
    V = V * scale
    scale = scale[:, None]
    right = heads.output.double().unflatten(0, (len(V), heads.group)) * scale
    if visible.shared:
        Y, rank = linalg.shared_solve(V, right, resolution)
        attends = visible.stop > 0
        Y = Y.masked_fill_(~attends[:, None], 0)
        rank = rank[:, None] * attends
    elif visible.nested:
        Y, rank = prefix_solve(V, right, visible.stop, resolution)
    else:
        rows = torch.arange(right.shape[2], device=V.device).split(1024)
        keys = visible.keys
        solutions = [linalg.rowwise_solve(V, right[:, :, row], visible.block(row, keys), resolution) for row in rows]
        Y = torch.cat([coefficients for coefficients, _ in solutions], 2)
        rank = torch.cat([ranks for _, ranks in solutions], 1)
    Y = Y * scale
    return Factors(Y.flatten(0, 1), heads.values, rank.repeat_interleave(heads.group, 0), visible)


def row_ranks(heads: Heads, *, eps: float | None = None) -> Int[Tensor, "head query"]:
    """Find only the rank of each row's values: in the unit that they were rounded to, or in another, `eps`."""
    eps = heads.eps if eps is None else eps
    one_per_group = replace(heads, output=heads.output[:: heads.group], eps=eps, mass=None)
    return effective_factors(one_per_group).rank.repeat_interleave(heads.group, 0)


def effective_rows(
    factors: Factors,
    heads: Selection = slice(None),
    queries: Selection = slice(None),
    keys: Selection = slice(None),
    *,
    raw: RawRows | None = None,
) -> Float[Tensor, "head_ query_ key_"]:
    r"""Compute effective attention $a^\perp_{im} = y_i \cdot v_m$ for the chosen heads, queries and keys.

    It is exactly 0 on invisible keys. Identifiable rows are copied from `raw` where it is given (it is called only for
    those rows); without it they are the same numbers to rounding.
    """
    device = factors.values.device
    h = torch.arange(len(factors.coefficients), device=device)[heads]
    q = torch.arange(factors.coefficients.shape[1], device=device)[queries]
    k = torch.arange(factors.values.shape[1], device=device)[keys]
    Y = factors.coefficients[heads][:, queries]
    V = factors.values[heads if factors.group == 1 else h // factors.group][:, keys]
    rows = Y @ V.to(Y).mT
    if raw is not None:
        identifiable = factors.identifiable[h][:, q]
        copied = identifiable.any(0).nonzero()[:, 0]
        if len(copied):
            raw_rows = raw[h][:, q[copied]] if isinstance(raw, Tensor) else raw(h, q[copied])
            rows[:, copied] = torch.where(identifiable[:, copied, None], raw_rows[:, :, k].to(rows), rows[:, copied])
    is_visible = factors.visible.block(q, k)
    return rows if bool(is_visible.all()) else rows.masked_fill_(~is_visible, 0)


def relative_residual(
    missing: Float[Tensor, "head query d_v"],
    output: Float[Tensor, "head query d_v"],
    projection: Float[Tensor, "head d_v d"],
    *,
    gate: Float[Tensor, "head query d_v"] | None = None,
) -> Float[Tensor, "head"]:
    r"""Measure how far effective attention is from giving the same output.

    $$\frac{\|(A^\perp V - O) H\|}{\|O H\|} \quad \text{per head, and 0 where both are 0}$$

    `missing` is $A^\perp V - O$ (`output_error`), $O$ and $H$ are `output` and `projection` as the model has them.
    Where a `gate` $g_i$ multiplies each row of $O$ before the projection, $H$ is $\mathrm{diag}(g_i) H$.
    """
    through = length_factor(projection)
    open_ = 1.0 if gate is None else gate.double()
    change = (missing * open_ @ through).norm(dim=(1, 2))
    size = (output.double() * open_ @ through).norm(dim=(1, 2))
    return torch.where(change == 0, 0.0, change / size)


def length_factor(projection: Float[Tensor, "head d_v d"]) -> Float[Tensor, "head d_v d_v_"]:
    r"""Return $R^\top$ with $H^\top = QR$: $\|XH\| = \|XR^\top\|$."""
    return torch.linalg.qr(projection.double().mT, mode="r").R.mT


def output_error(factors: Factors, heads: Heads) -> Float[Tensor, "head query d_v"]:
    r"""Compute $A^\perp V - O$, with $V$ and $O$ of `heads` as the model has them, or `without_bias`.

    For factors made `without_bias`, pass such heads: this is then what $A^\perp (V - 1b^\top) + A1b^\top$ misses.
    """
    keys = factors.visible.keys
    Y = factors.coefficients.double().unflatten(0, (len(factors.values), -1))
    V = factors.values[:, keys].double()
    X = heads.values[:, keys].double()
    X = X.repeat_interleave(len(V) // len(X), 0)
    if factors.visible.nested:
        product = _prefix_multiply(Y, V, X, factors.visible.stop)
    else:
        product = torch.empty_like(Y[..., :1]).repeat(1, 1, 1, X.shape[2])
        step = max(1, linalg.BYTES // (8 * len(factors.coefficients) * max(1, factors.visible.n_keys)))
        for rows in torch.arange(Y.shape[2], device=Y.device).split(step):
            product[:, :, rows] = linalg.masked_multiply(Y[:, :, rows], V, X, factors.visible.block(rows, keys))
    return product.flatten(0, 1) - heads.output.double()


def _prefix_multiply(
    coefficients: Float[Tensor, "kv group query d"],
    values: Float[Tensor, "kv key d"],
    vectors: Float[Tensor, "kv key k"],
    stop: Int[Tensor, "query"],
) -> Float[Tensor, "kv group query k"]:
    """Compute `linalg.masked_multiply` where row i sees the first `stop[i]` keys, in time linear in them."""
    width = values.shape[-1]
    product = coefficients.new_zeros(*coefficients.shape[:-1], vectors.shape[-1])
    carried = values.new_zeros(len(values), width, vectors.shape[-1])
    for start in range(0, values.shape[1], width):
        V = values[:, start : start + width]
        X = vectors[:, start : start + width]
        rows = ((stop > start) & (stop <= start + width)).nonzero()[:, 0]
        visible = torch.arange(start, start + V.shape[1], device=stop.device) < stop[rows, None]
        Y = coefficients[:, :, rows]
        product[:, :, rows] = Y @ carried[:, None] + linalg.masked_multiply(Y, V, X, visible)
        carried = carried + V.mT @ X
    return product
