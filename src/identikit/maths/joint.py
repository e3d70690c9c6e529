"""The null space of all heads of a layer together."""

import bisect
import functools

import torch

from identikit.maths import linalg
from identikit.maths.effective import Heads
from identikit.maths.linalg import Resolution, rounding_unit
from identikit.shapes import Float, Int, Tensor


def joint_null_dim(
    heads: Heads, rank: Int[Tensor, "head query"], projection: Float[Tensor, "head d_v d"]
) -> Int[Tensor, "query"]:
    r"""Count the dimensions of the null space of all heads together, per query.

    These are changes of all heads' rows that cancel out. Changes $(\tilde a_1, \dots, \tilde a_h)$ with
    $\sum_h \tilde a_h V_h H_h = 0$ form a space of dimension $\sum_h |S_i|$ minus the rank of the
    $T_h[S_i] = V_h[S_i] H_h$ stacked on each other. `heads` holds $V$ before `through_projection`, `rank` the rank of
    $T$ per head (`Factors.rank`, without a tolerance), `projection` is $H$. The paper has only Eq. 6, the case of one
    head.

    When the stacked projections have full row rank, the heads write into independent subspaces, ranks add up, and this
    is the sum of the per-head dimensions. Otherwise (always where n_heads·d_v > d) the stacked rank of row i is that of
    the $B_h H_h$ stacked, $B_h$ being an orthonormal basis of the span of head h's visible values: at most n_heads·d_v
    rows, however long the text is. Spans of nested rows grow, so ranks add up until some row, and nothing is left to
    gain from some row on. Both rows are found by bisection; only the rows in between are computed one by one.
    """
    H = projection.double()
    resolution = Resolution(rounding_unit(projection.dtype))
    all_dims = H.shape[0] * H.shape[1]
    visible = heads.visible
    added = rank.sum(0).tolist()
    limit = linalg.matrix_rank(_scale_rows_evenly(H.flatten(0, 1)), resolution)

    @functools.cache
    def stacked_rank(query: int) -> int:
        if added[query] == all_dims:
            return limit
        is_visible = visible.block(torch.tensor([query], device=visible.keys.device), visible.keys)[0]
        V = heads.values[:, visible.keys[is_visible]].double()
        scale = linalg.column_scales(V)
        singular, vectors = linalg.right_spectrum(V * scale)
        real = Resolution(heads.eps).is_real(singular, V.shape[1])
        turned = (vectors / scale.mT).mT
        spans = [turned[h // heads.group][real[h // heads.group]] @ H[h] for h in range(len(H))]
        return linalg.matrix_rank(_scale_rows_evenly(torch.cat(spans)), resolution)

    if limit == all_dims:
        joint = added
    elif visible.nested:
        stops = visible.stop.tolist()
        query_of_stop = {stop: query for query, stop in enumerate(stops)}
        distinct_stops = sorted(query_of_stop)
        rows = [query_of_stop[stop] for stop in distinct_stops]
        split = bisect.bisect_left(rows, True, key=lambda query: stacked_rank(query) < added[query])
        full = bisect.bisect_left(rows, True, lo=split, key=lambda query: stacked_rank(query) == limit)
        ranks = [added[query] for query in rows[:split]] + [stacked_rank(query) for query in rows[split:full]]
        ranks += [limit] * (len(rows) - full)
        rank_of_stop = dict(zip(distinct_stops, ranks, strict=True))
        joint = [rank_of_stop[stop] for stop in stops]
    else:
        joint = [stacked_rank(query) for query in range(len(added))]
    return len(rank) * visible.count - torch.tensor(joint, device=rank.device)


def _scale_rows_evenly(matrix: Float[Tensor, "row column"]) -> Float[Tensor, "row column"]:
    """Scale uneven rows to one size, which does not change the rank."""
    return matrix * linalg.column_scales(matrix.mT).mT
