"""Effective attention written from its definition: one head and one row at a time, the whole SVD of T, ranks."""

import torch
from torch import Tensor


def left_null_space(T: Tensor, cutoff: float = 1e-9) -> Tensor:
    """Orthonormal basis (columns) of LN(T) = {x : xᵀT = 0} (Eq. 4): left singular vectors of zero singular values."""
    U, singular, _ = torch.linalg.svd(T, full_matrices=True)
    largest = float(singular.max()) if len(singular) else 0.0
    rank = int((singular > cutoff * largest).sum())
    return U[:, rank:]


def in_own_units(values: Tensor, projection: Tensor) -> tuple[Tensor, Tensor]:
    """V and H with each value dimension in its own unit: columns of V and rows of H divided by their lengths.

    That leaves LN(VH) as it is where H has full row rank, since it is LN(V) then; elsewhere V and H stay as they are.
    """
    lengths, rows = values.norm(dim=0), projection.norm(dim=1)
    even = projection / torch.where(rows > 0, rows, 1.0)[:, None]
    if int(torch.linalg.matrix_rank(even, rtol=1e-6)) < len(projection):
        return values, projection
    return values / torch.where(lengths > 0, lengths, 1.0), even


def effective_attention(
    attention: Tensor,
    values: Tensor,
    projection: Tensor,
    visible: Tensor,
    mass: bool = False,
    cutoff: float = 1e-9,
) -> tuple[Tensor, Tensor]:
    """A⊥ = A − Proj_LN(T) A (Eq. 9) and rank(T), T = V·H restricted to the keys that the row sees.

    attention (head, query, key), values (kv_head, key, d_v), projection (head, d_v, d), visible (query, key).
    With ``mass`` the null space is that of [T, 1].
    """
    n_heads, n_queries, _ = attention.shape
    effective = torch.zeros_like(attention)
    ranks = torch.zeros(n_heads, n_queries, dtype=torch.long)
    for head in range(n_heads):
        V = values[head // (n_heads // len(values))]
        for query in range(n_queries):
            keys = visible[query].nonzero()[:, 0]
            own, passing = in_own_units(V[keys], projection[head])
            T = own @ passing
            if mass:
                T = torch.cat([T, torch.ones(len(keys), 1, dtype=T.dtype)], dim=1)
            null = left_null_space(T, cutoff)
            row = attention[head, query, keys]
            effective[head, query, keys] = row - null @ (null.T @ row)
            ranks[head, query] = len(keys) - null.shape[1]
    return effective, ranks


def joint_null_dim(values: Tensor, projection: Tensor, visible: Tensor) -> Tensor:
    """Per query: dim {(ã_1, …, ã_h) : Σ_h ã_h V_h H_h = 0}, from the SVD of all T_h stacked."""
    n_heads = len(projection)
    dims = []
    for row in visible:
        stacked = [values[head // (n_heads // len(values))][row] @ projection[head] for head in range(n_heads)]
        dims.append(left_null_space(torch.cat(stacked)).shape[1])
    return torch.tensor(dims)
