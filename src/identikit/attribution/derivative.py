"""The derivatives of a block at some texts: each token's own Jacobians, and attention's in closed form.

Autograd sees all texts of a batch at once, since `pre` and `post` act on each position alone. What follows is done text
by text.
"""

from collections.abc import Sequence

import torch
from torch.func import vjp, vmap

from identikit.attribution.request import Place, at_once, forward, working_bytes
from identikit.maths import jacobian
from identikit.maths.jacobian import AttentionDerivative, BlockDerivative
from identikit.models.model import Block
from identikit.models.tap import AttentionCall
from identikit.shapes import Float, Tensor


def block_derivatives(block: Block, places: Sequence[Place], *, agree: bool) -> list[BlockDerivative]:
    """Return a block's derivative at each text; `agree`: see `agreeing`."""
    own, by_output = _of_post(block)
    query, key, value = (_rows(block, part, agree) for part in range(3))
    found: list[BlockDerivative] = []
    for place in places:
        call, of = place.call(block.call), place.of
        attention, kv_heads = _of_attention(call), call.key.shape[1]
        queries, keys, values = ((part if agree else of(part)) for part in (query, key, value))
        _add_path_of_query(of(own), of(by_output), attention.of_query, queries)
        heads, n, d_k = call.query.shape[1:]
        folded = jacobian.folds(n, own.shape[-1], (heads, d_k), kv_heads)
        found.append(
            BlockDerivative(
                read=torch.cat([jacobian.folded(keys, call.query[0]) if folded else keys, values], 1),
                own=of(own),
                by_output=of(by_output),
                query=None if folded else call.query[0],
                of_values=attention.of_values,
                of_scores=attention.of_scores,
                kv_heads=kv_heads,
            )
        )
    return found


def _of_post(block: Block) -> tuple[Float[Tensor, "batch n d d"], Float[Tensor, "batch n d d_o"]]:
    """Return the Jacobians of `post` at every token: by its vector, and by its head outputs.

    One product with a basis vector broadcast over positions gives a row of every token's Jacobian at once. The rows are
    written where they stay.
    """
    x, output = block.input, block.call.output
    through_post = vjp(block.post, x, output)[1]
    (batch, heads, n, d_v), d, step = output.shape, x.shape[2], at_once(x)
    own, by_output = x.new_empty(batch, n, d, d), x.new_empty(batch, n, d, heads, d_v)
    basis = torch.eye(d, dtype=x.dtype, device=x.device)
    for first in range(0, d, step):
        rows = slice(first, first + step)
        by_vector, by_head = vmap(lambda row: through_post(row.expand_as(x)))(basis[rows])
        own[:, :, rows], by_output[:, :, rows] = by_vector.permute(1, 2, 0, 3), by_head.permute(1, 3, 0, 2, 4)
        del by_vector, by_head
    return own, by_output.flatten(3)


def _add_path_of_query(
    own: Float[Tensor, "n d d"],
    by_output: Float[Tensor, "n d d_o"],
    of_query: Float[Tensor, "n head d_v d_k"],
    queries: Float[Tensor, "#n d_q d"],
) -> None:
    """Add what a token's vector does through its own query, some rows at a time."""
    n, d, _ = own.shape
    heads = of_query.shape[1]
    step = max(1, working_bytes(own.device) // (4 * own.element_size() * n * queries.shape[1]))
    for first in range(0, d, step):
        rows = slice(first, first + step)
        by_query = (by_output[:, rows].unflatten(2, (heads, -1)).transpose(1, 2) @ of_query).transpose(1, 2)
        own[:, rows].baddbmm_(by_query.flatten(2), queries.expand(n, -1, -1))


def _of_attention(call: AttentionCall) -> AttentionDerivative:
    """Return attention's derivative in the dtype of the call, computed in float32 or better some queries at a time."""
    dtype, (_, heads, n, d_k) = call.query.dtype, call.query.shape
    wide = torch.promote_types(dtype, torch.float32)
    key, value = call.key[0].to(wide), call.value[0].to(wide)
    d_v = value.shape[2]
    empty = call.query.new_empty
    found = AttentionDerivative(empty(heads, n, n), empty(n, heads, d_v, n), empty(n, heads, d_v, d_k))
    step = max(1, working_bytes(key.device) // (4 * wide.itemsize * n * heads * d_v))
    for first in range(0, n, step):
        rows = slice(first, first + step)
        weights = call.weights(rows, dtype=wide)[0]
        part = jacobian.attention_derivative(
            call.query[0, :, rows].to(wide), key, value, weights, scaling=call.scaling, softcap=call.softcap
        )
        found.of_values[:, rows], found.of_scores[rows], found.of_query[rows] = part
    return found


def _rows(block: Block, part: int, agree: bool) -> Tensor:
    """Return the Jacobian of queries, keys or values (part 0, 1 or 2) by each token's vector: (batch, n, row, d).

    Where all tokens agree, it is one matrix, (1, row, d), and each position can carry a row of its own.
    """
    call, x = block.call, block.input
    batch, n, d = x.shape
    shape = (call.query, call.key, call.value)[part].shape
    count = shape[1] * shape[3]
    basis = torch.eye(count, dtype=x.dtype, device=x.device).unflatten(1, (shape[1], shape[3]))
    pull, step = vjp(lambda vectors: block.pre(vectors)[part], x)[1], at_once(x)
    if agree:
        packed = torch.cat([basis, basis.new_zeros(-count % (batch * n), *basis.shape[1:])])
        by_position = packed.unflatten(0, (-1, batch, n)).transpose(2, 3)
        return vmap(lambda rows: pull(rows)[0], chunk_size=step)(by_position).flatten(0, 2)[None, :count]
    found = x.new_empty(batch, n, count, d)
    for first in range(0, count, step):
        rows = slice(first, first + step)
        some = vmap(lambda row: pull(row.unsqueeze(1).expand(shape))[0])(basis[rows])
        found[:, :, rows] = some.permute(1, 2, 0, 3)
    return found


def agreeing(blocks: Sequence[Block]) -> list[bool]:
    """Say of each block whether the Jacobians of its queries, keys and values are the same at all tokens.

    They are where `pre` is linear and knows no position, and where they are on a random direction.
    """
    like = blocks[0].input
    drawn = torch.randn(1, like.shape[-1], generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(like)
    eps, found = torch.finfo(like.dtype).eps, []
    for block in blocks:
        parts = forward(block.pre, block.input, drawn.expand(1, *block.input.shape))
        differing = [(part - part[:, :1, :, :1]).abs().max() / part.abs().max() for part in parts]
        found.append(torch.stack(differing).max())
    return (torch.stack(found) <= min(16 * eps, max(2 * eps, 1e-4))).tolist()  # the machine is waited for once
