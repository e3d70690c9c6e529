"""The structured sweep: the Jacobians of all layers and pairs of one text, for models that split.

The tangents of some inputs (a round) go through a layer in chunks, then through the next: each layer's derivative is
prepared once per round and dropped again, and tangents are held once. Where all inputs do not fit, there are several
rounds, and where that is less memory, every layer's derivative is kept and a round is a single chunk.

Engines return the norms of the Jacobian blocks (layer, input, output), or with probes the squared length of each
block's image of each direction (layer, input, output, direction).
"""

from collections.abc import Hashable
from functools import cache
from math import prod

import torch
from torch.func import vjp, vmap

from identikit.attribution import request as shared
from identikit.attribution.request import (
    Request,
    Tick,
    at_once,
    first_tangents,
    forward,
    forward_mode,
    in_chunks,
    scaled,
    sees_no_later_token,
    working_bytes,
)
from identikit.machine import products
from identikit.maths import jacobian
from identikit.maths.jacobian import AttentionDerivative, BlockDerivative
from identikit.models.model import Block
from identikit.models.reading import Reading
from identikit.models.tap import AttentionCall
from identikit.shapes import Float, Int, Tensor

RETRIES = 3  # with tangents scaled down, where a block makes them overflow


def sweep(reading: Reading, request: Request, *, chunk: int, together: int, keep: bool, tick: Tick) -> Tensor:
    """Push tangents through all layers: `together` inputs in a round, `chunk` at a time.

    `keep`: hold every layer's derivative, so that no round prepares it again.
    """
    rounded = "full" if request.precision == "full" else "tf32"  # of what prepares the sweep
    with reading.split() as split, forward_mode(), products(rounded):
        dtype = torch.bfloat16 if request.precision == "bfloat16" else split.inputs.dtype
        start = first_tangents(split, request, dtype)
        n, depth = len(start), max(request.layers) + 1
        causal = sees_no_later_token(split)
        targets = torch.arange(n) if request.targets is None else torch.tensor(request.targets)
        answer, scratch, told = request.nothing(n, split.inputs), _Scratch(start), _Told(tick)

        def derivative(layer: int) -> BlockDerivative:
            return block_derivative(split.blocks[layer]).to(start.dtype, more=-n % _multiple(start))

        derivative = cache(derivative) if keep else derivative

        def work(first: int, last: int) -> None:
            places = [(at, min(at + chunk, last)) for at in range(first, last, chunk)]
            chunks = [_Chunk(start, place, causal, (scratch, index)) for index, place in enumerate(places)]
            for layer in range(depth):
                block = derivative(layer)
                for one in chunks:
                    one.push(block, alone=len(chunks) == 1)
                    if layer in request.layers:
                        felt = targets >= one.before
                        found = one.measured(request, None if request.targets is None else targets[felt])
                        answer[request.layers.index(layer), one.first : one.last, felt] = found
                    told.reach(first + ((last - first) * layer + one.last - first) / depth)
                del block  # before the next is prepared

        in_chunks(n, together, work, lambda count: None)
    return answer.cpu()


def _multiple(tangents: Tensor) -> int:
    """Return what the number of positions is made a multiple of: on a GPU, what its matrix units take at a time."""
    return 8 if tangents.is_cuda else 1


class _Told:
    """Progress in whole inputs, from how far the work has come; work that is done again is not told again."""

    def __init__(self, tick: Tick):
        self._tick, self._done = tick, 0

    def reach(self, place: float) -> None:
        more = int(place + 1e-9) - self._done
        if more > 0:
            self._tick(more)
            self._done += more


class _Chunk:
    """The tangents of a few inputs on their way through the layers; see `sweep`.

    In float16 they are kept from overflowing and underflowing: each input's tangents are scaled by a power of two after
    every block, which `measured` undoes exactly, since derivatives are linear in the tangents.
    """

    def __init__(self, start: Tensor, inputs: tuple[int, int], causal: bool, memory: tuple["_Scratch", int]):
        self.first, self.last = first, last = inputs
        self._n = len(start)
        self.before = first - first % _multiple(start) if causal else 0  # earlier tokens feel nothing
        self._start, (self._scratch, self._place) = start[first:last], memory
        self._held: Tensor | None = None
        self._exponent = torch.zeros(last - first, dtype=torch.int32, device=start.device)

    def push(self, block: BlockDerivative, *, alone: bool) -> None:
        """Push the tangents through the next block; `alone`: no other chunk is on its way beside this one."""
        block = block.after(self.before)
        result = self._through(block)
        for _ in range(RETRIES if result.dtype in shared.SCALED else 0):
            if result.isfinite().all():
                self._exponent += scaled(result.unflatten(-1, (self.last - self.first, -1)), dim=2)
                break
            self._lower()
            result = self._through(block)
        if alone:
            self._scratch.swap("result", self._place)
            self._held = result
        else:
            self._held = self._scratch.take(self._place, *result.shape).copy_(result)

    def measured(self, asked: Request, targets: Int[Tensor, "output"] | None) -> Tensor:
        """Return what is asked of the tangents, without the scale: (input, output, …)."""
        moved = self._moved[: self._n - self.before]
        held = moved if targets is None else moved[(targets - self.before).to(moved.device)]
        found = asked.measure(held.unflatten(-1, (self.last - self.first, -1)))
        return asked.unscaled(found, self._exponent)

    @property
    def _moved(self) -> Tensor:
        assert self._held is not None
        return self._held

    def _through(self, block: BlockDerivative) -> Float[Tensor, "n d tangent"]:
        inputs, d, directions = self._start.shape
        n, _, outputs = block.by_output.shape
        take = self._scratch.take
        mixed, result = take("mixed", n, outputs, inputs * directions), take("result", n, d, inputs * directions)
        if self._held is None:
            jacobian.push_first(self._start, block, first=self.first - self.before, mixed=mixed, result=result)
        else:
            read = take("read", n, block.read.shape[1], inputs * directions)
            jacobian.push(self._held, block, read=read, mixed=mixed, result=result)
        return result

    def _lower(self) -> None:
        """Make room for growth that overflowed: scale what enters the block down."""
        if self._held is None:
            self._start = self._start * 2.0**-8
        else:
            self._held *= 2.0**-8
        self._exponent += 8


class _Scratch:
    """Memory taken once and used again: on a CPU, fresh pages cost a tenth of the products that fill them."""

    def __init__(self, like: Tensor):
        self._like = like
        self._flat: dict[Hashable, Tensor] = {}

    def take(self, place: Hashable, *shape: int) -> Tensor:
        """Return the memory at a place in this shape, with whatever it holds."""
        size, held = prod(shape), self._flat.get(place)
        if held is None or not size <= held.numel() < 2 * size:  # what is far too large is given back
            del held
            self._flat.pop(place, None)
            self._flat[place] = self._like.new_empty(size)
        return self._flat[place][:size].view(shape)

    def swap(self, place: Hashable, other: Hashable) -> None:
        """Exchange what two places hold."""
        first, second = self._flat.pop(place, None), self._flat.pop(other, None)
        self._flat |= {name: held for name, held in ((place, second), (other, first)) if held is not None}


def block_derivative(block: Block) -> BlockDerivative:
    """Return a block's derivative at one text: each token's own Jacobians, and attention's in closed form.

    `pre` and `post` act on each position alone, so one product with a basis vector broadcast over positions gives a row
    of every token's Jacobian at once. The rows are written where they stay.
    """
    call, x = block.call, block.input
    attention = _attention_derivative(call)
    through_post = vjp(block.post, x, call.output)[1]

    def pull(row: Tensor) -> tuple[Tensor, Tensor]:
        return through_post(row.expand_as(x))

    _, heads, n, d_v = call.output.shape
    d, step = x.shape[2], at_once(x)
    own, by_output = x.new_empty(n, d, d), x.new_empty(n, d, heads, d_v)
    every = torch.eye(heads * call.query.shape[3], dtype=x.dtype, device=x.device).unflatten(1, (heads, -1))
    queries = _rows(block, slice(1), (every,)).expand(n, -1, -1)
    basis = torch.eye(d, dtype=x.dtype, device=x.device)
    for first in range(0, d, step):
        rows = slice(first, first + step)
        by_vector, by_head = vmap(pull)(basis[rows])
        by_output[:, rows] = by_head[:, 0].permute(2, 0, 1, 3)
        by_query = (by_output[:, rows].transpose(1, 2) @ attention.of_query).transpose(1, 2).flatten(2)
        torch.baddbmm(by_vector[:, 0].transpose(0, 1), by_query, queries, out=own[:, rows])
        del by_vector, by_head, by_query
    kv_heads, d_k = call.key.shape[1], call.key.shape[3]
    folded = jacobian.folds(n, d, (heads, d_k), kv_heads)
    return BlockDerivative(
        read=_rows(block, slice(1, 3), _cotangents(call, folded)),
        own=own,
        by_output=by_output.flatten(2),
        query=None if folded else call.query[0],
        of_values=attention.of_values,
        of_scores=attention.of_scores,
        kv_heads=kv_heads,
    )


def _attention_derivative(call: AttentionCall) -> AttentionDerivative:
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


def _rows(block: Block, parts: slice, cotangents: tuple[Tensor, ...]) -> Float[Tensor, "#n row d"]:
    """Return rows of the Jacobian of queries, keys and values, or of some `parts` of these, by each token's vector.

    Each row is a combination of a token's entries, with the weights in `cotangents`, (row, head, width). One matrix
    serves all tokens where they agree: where `pre` is linear and knows no position. Each position can then carry a row
    of its own.
    """
    call, x = block.call, block.input
    _, n, d = x.shape
    count, shapes = len(cotangents[0]), [part.shape for part in (call.query, call.key, call.value)[parts]]
    pull = vjp(lambda vectors: block.pre(vectors)[parts], x)[1]

    def one(*weights: Tensor) -> Tensor:
        return pull(tuple(part.expand(shape) for part, shape in zip(weights, shapes, strict=True)))[0][0]

    if _agree(block):
        packed = (torch.cat([part, part.new_zeros(-count % n, *part.shape[1:])]) for part in cotangents)
        by_position = (part.unflatten(0, (-1, n)).transpose(1, 2) for part in packed)
        return vmap(one, chunk_size=at_once(x))(*by_position).flatten(0, 1)[None, :count]
    found, step = x.new_empty(n, count, d), at_once(x)
    for first in range(0, count, step):
        rows = slice(first, first + step)
        found[:, rows] = vmap(one)(*(part[rows].unsqueeze(2) for part in cotangents)).transpose(0, 1)
    return found


def _cotangents(
    call: AttentionCall, folded: bool
) -> tuple[Float[Tensor, "read kv_head d_k"], Float[Tensor, "read kv_head d_v"]]:
    """Return, for each row to read, its weights on a token's keys and on its values."""
    _, heads, _, d_k = call.query.shape
    _, kv_heads, _, d_v = call.value.shape

    def basis(size: int) -> Tensor:
        return torch.eye(size, dtype=call.query.dtype, device=call.query.device)

    if folded:  # by query and head
        own = basis(kv_heads).repeat_interleave(heads // kv_heads, 0)
        keys = torch.einsum("hjk,hg->jhgk", call.query[0], own).flatten(0, 1)
    else:
        keys = basis(kv_heads * d_k).unflatten(1, (kv_heads, d_k))
    values = basis(kv_heads * d_v).unflatten(1, (kv_heads, d_v))
    return (
        torch.cat([keys, keys.new_zeros(len(values), kv_heads, d_k)]),
        torch.cat([values.new_zeros(len(keys), kv_heads, d_v), values]),
    )


def _agree(block: Block) -> bool:
    """Say whether the Jacobians of keys and values are the same at all tokens: on a random direction they are."""
    _, n, d = block.input.shape
    drawn = torch.randn(1, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(block.input)
    parts = forward(block.pre, block.input, drawn.expand(1, 1, n, d))
    differing = [(part - part[..., :1, :]).abs().max() / part.abs().max() for part in parts]
    eps = torch.finfo(block.input.dtype).eps
    return bool((torch.stack(differing) <= min(16 * eps, max(2 * eps, 1e-4))).all())
