"""The derivatives of a block at the texts of a batch: each token's own Jacobians, and attention's in closed form."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch.func import vjp, vmap

from identikit.attribution.memory import products_at_once, working_bytes
from identikit.maths import jacobian
from identikit.maths.jacobian import AttentionDerivative, BlockDerivative
from identikit.models.model import Block
from identikit.models.taps.tap import AttentionCall
from identikit.shapes import Float, Tensor


def block_derivatives(
    block: Block, lengths: Sequence[int], *, agree: bool, dtype: torch.dtype
) -> list[BlockDerivative]:
    """Return a block's derivative in a dtype at each text of a batch; `agree`: see `agreeing_rows`.

    The texts have these `lengths`, and are padded on the right.
    """
    call = block.call
    n, d = block.input.shape[1:]
    heads = call.query.shape[1]
    kv_heads, _, d_k = call.key.shape[1:]
    own, by_output = _post_jacobians(block)
    query, key, value = (_shared_rows if agree else _rows_by_token)(block)
    of_values, of_scores, of_query = _attention_derivative(call)
    _add_query_path(own.flatten(0, 1), by_output.flatten(0, 1), of_query.flatten(0, 1), query.flatten(0, 1))
    folded = jacobian.is_folding_cheaper(n, d, (heads, d_k), kv_heads)
    if folded:
        key = vmap(jacobian.fold_queries, in_dims=(None if agree else 0, 0))(key[0] if agree else key, call.query)
    read = torch.cat([key, value.expand(len(key), -1, -1, -1)], 2)
    factors = (read, own, by_output, call.query, of_values, of_scores)
    read, own, by_output, query, of_values, of_scores = (factor.to(dtype) for factor in factors)
    derivatives = []
    for text, length in enumerate(lengths):
        rows = read[text % len(read), :length]
        if folded and length < n:  # a row for each query and head comes before the values
            rows = torch.cat([rows[:, : length * heads], rows[:, n * heads :]], 1)
        derivatives.append(
            BlockDerivative(
                read=rows,
                own=own[text, :length],
                by_output=by_output[text, :length],
                query=None if folded else query[text, :, :length],
                of_values=of_values[text, :, :length, :length],
                of_scores=of_scores[text, :length, :, :, :length],
                kv_heads=kv_heads,
            )
        )
    return derivatives


def _post_jacobians(block: Block) -> tuple[Float[Tensor, "batch n d d"], Float[Tensor, "batch n d d_o"]]:
    """Return the Jacobians of `post` at every token: by its vector, and by its head outputs.

    One product with a basis vector broadcast over positions gives a row of every token's Jacobian at once. The rows are
    written where they stay.
    """
    x = block.input
    d = x.shape[2]
    batch, heads, n, d_v = block.call.output.shape
    through_post = vjp(block.post, x, block.call.output)[1]
    step = products_at_once(x)
    own = x.new_empty(batch, n, d, d)
    by_output = x.new_empty(batch, n, d, heads, d_v)
    basis = torch.eye(d, dtype=x.dtype, device=x.device)
    for first in range(0, d, step):
        rows = slice(first, first + step)
        by_vector, by_head = vmap(lambda row: through_post(row.expand_as(x)))(basis[rows])
        own[:, :, rows] = by_vector.permute(1, 2, 0, 3)
        by_output[:, :, rows] = by_head.permute(1, 3, 0, 2, 4)
        del by_vector, by_head
    return own, by_output.flatten(3)


def _add_query_path(
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


def _attention_derivative(call: AttentionCall) -> AttentionDerivative:
    """Return attention's derivative at each text, in the dtype of the call; computed in float32 or better.

    Some queries are done at a time.
    """
    batch, heads, n, d_k = call.query.shape
    wide = torch.promote_types(call.query.dtype, torch.float32)
    key = call.key.to(wide)
    value = call.value.to(wide)
    d_v = value.shape[3]
    empty = call.query.new_empty
    result = AttentionDerivative(
        empty(batch, heads, n, n), empty(batch, n, heads, d_v, n), empty(batch, n, heads, d_v, d_k)
    )
    derive = partial(jacobian.attention_derivative, scaling=call.scaling, softcap=call.softcap)
    step = max(1, working_bytes(key.device) // (4 * wide.itemsize * batch * n * heads * d_v))
    for first in range(0, n, step):
        rows = slice(first, first + step)
        portion = vmap(derive)(call.query[:, :, rows].to(wide), key, value, call.weights(rows, dtype=wide))
        result.of_values[:, :, rows] = portion.of_values
        result.of_scores[:, rows] = portion.of_scores
        result.of_query[:, rows] = portion.of_query
    return result


def _rows_by_token(block: Block) -> list[Float[Tensor, "batch n row d"]]:
    """Return the Jacobians of queries, keys and values by each token's vector."""
    call = block.call
    x = block.input
    step = products_at_once(x)
    jacobians = []
    for index, like in enumerate((call.query, call.key, call.value)):
        pull = vjp(lambda vectors, index=index: block.pre(vectors)[index], x)[1]
        basis = _token_basis(like)
        rows = x.new_empty(*x.shape[:2], len(basis), x.shape[2])
        for first in range(0, len(basis), step):
            directions = basis[first : first + step].unsqueeze(2).expand(-1, *like.shape[1:]).unsqueeze(1)
            moved = vmap(lambda row, pull=pull, like=like: pull(row.expand_as(like))[0])(directions)
            rows[:, :, first : first + step] = moved.permute(1, 2, 0, 3)
        jacobians.append(rows)
    return jacobians


def _shared_rows(block: Block) -> list[Float[Tensor, "1 1 row d"]]:
    """Return the Jacobians of queries, keys and values where all tokens agree; each position carries its own rows."""
    call = block.call
    x = block.input
    batch, n, d = x.shape
    projected = (call.query, call.key, call.value)
    counts = [like.shape[1] * like.shape[3] for like in projected]
    carried = []
    first = 0
    for like, count in zip(projected, counts, strict=True):
        rows = x.new_zeros(math.ceil(sum(counts) / (batch * n)) * batch * n, like.shape[1], like.shape[3])
        rows[first : first + count] = _token_basis(like)
        carried.append(rows.unflatten(0, (-1, batch, n)).transpose(2, 3))
        first += count
    pull = vjp(block.pre, x)[1]
    jacobians = vmap(lambda *rows: pull(rows)[0], chunk_size=products_at_once(x))(*carried).reshape(1, 1, -1, d)
    return list(jacobians[:, :, : sum(counts)].split(counts, 2))


def _token_basis(like: Float[Tensor, "batch head n width"]) -> Float[Tensor, "row head width"]:
    """Return the basis of what one token has of queries, keys or values."""
    _, heads, _, width = like.shape
    return torch.eye(heads * width, dtype=like.dtype, device=like.device).unflatten(1, (heads, width))


def agreeing_rows(blocks: Sequence[Block]) -> list[bool]:
    """Return for each block whether the Jacobians of its queries, keys and values are the same at all tokens.

    They are where `pre` is linear and knows no position. They are taken to be where the gradient of a random
    combination is.
    """
    x = blocks[0].input
    eps = torch.finfo(x.dtype).eps
    generator = torch.Generator(x.device).manual_seed(0)
    differences = []
    for block in blocks:
        combination = []
        for like in (block.call.query, block.call.key, block.call.value):
            shape = (1, like.shape[1], 1, like.shape[3])
            drawn = torch.randn(shape, device=x.device, generator=generator).to(x.dtype)
            combination.append(drawn.expand_as(like))
        pull = vjp(block.pre, block.input)[1]
        (moved,) = pull(tuple(combination))
        differences.append((moved - moved[:1, :1]).abs().max() / moved.abs().max())
    return (torch.stack(differences) <= min(16 * eps, max(2 * eps, 1e-4))).tolist()  # the machine is waited for once
