"""Three ways to the same Jacobians, for one text: the structured sweep, plain forward mode, and reverse mode.

- `sweep`: all layers and pairs in one forward sweep over the parts of a model that splits; chunks of inputs outside,
  layers inside, since the Jacobian of a whole text does not fit in memory;
- `generic`: forward mode through the whole model, for models that do not split and for a handful of probes;
- `reverse`: one backward pass for each direction of each target's vector, for few targets.

Each returns the norms of the Jacobian blocks (layer, input, output), or with probes the squared length of each block's
image of each direction (layer, input, output, direction).
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import nn
from torch.func import jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from identikit.errors import InputError
from identikit.machine import products
from identikit.maths import jacobian
from identikit.maths.jacobian import BlockDerivative
from identikit.models import families
from identikit.models.model import Block, Model, Split
from identikit.models.reading import Reading
from identikit.shapes import Float, Tensor
from identikit.text import TokenBatch

Tick = Callable[[int], None]
Run = Callable[[Tensor, int], list[Tensor]]


@dataclass(frozen=True)
class Request:
    """What an engine is asked for.

    - `layers`, `targets`: layers and output positions; `targets` None: all
    - `norm`: of the Jacobian blocks; `probes`: how many random directions (from `seed`), None: the whole basis
    - `after`: x is what enters the first block, not the embedding sum
    - `precision`: "full" computes in the model's dtype, "tf32" lets float32 products round so, "bfloat16" holds
      tangents and derivatives in it
    """

    layers: tuple[int, ...]
    targets: tuple[int, ...] | None
    norm: str
    probes: int | None
    seed: int
    after: bool
    precision: str

    def measure(self, tangents: Float[Tensor, "output feature input direction"]) -> Tensor:
        """Return the blocks' norms, or with probes the squares along each direction: (input, output, …)."""
        measured = (jacobian.block_norms if self.probes is None else jacobian.direction_squares)(tangents, self.norm)
        return measured.transpose(0, 1)

    def directions(self, d: int, like: Tensor) -> Float[Tensor, "direction d"]:
        """Return the directions of R^d to go along, in the dtype and at the place of `like`."""
        if self.probes is None:
            return torch.eye(d, dtype=like.dtype, device=like.device)
        return jacobian.orthogonal_probes(d, self.probes, seed=self.seed).to(like)

    def nothing(self, n: int, like: Tensor) -> Tensor:
        """Return the answer of a model in which no input moves anything."""
        outputs = n if self.targets is None else len(self.targets)
        shape = (len(self.layers), n, outputs, *(() if self.probes is None else (self.probes,)))
        return torch.zeros(shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


def sweep(reading: Reading, request: Request, *, chunk: int, keep: bool, tick: Tick) -> Tensor:
    """Push the tangents of `chunk` inputs at a time through all layers; `keep`: hold every layer's derivative."""
    with reading.split() as split, forward_mode(), products(request.precision):
        start = _first_tangents(split, request)
        n, _, directions = start.shape
        causal = not any(block.call.visible().triu(1).any() for block in split.blocks)
        targets = torch.arange(n) if request.targets is None else torch.tensor(request.targets)
        answer, scratch = request.nothing(n, split.inputs), _Scratch(start)

        def derivative(layer: int) -> BlockDerivative:
            return block_derivative(split.blocks[layer]).to(start.dtype)

        derivative = cache(derivative) if keep else derivative

        def work(first: int, last: int) -> None:
            before = first if causal else 0  # what comes earlier feels nothing of these inputs
            blocks = (derivative(layer).after(before) for layer in range(max(request.layers) + 1))
            felt = targets >= before
            outputs = (targets[felt] - before).to(start.device)
            for layer, moved in enumerate(_through(blocks, start[first:last], first - before, scratch)):
                if layer in request.layers:
                    moved = moved if request.targets is None else moved[outputs]
                    found = request.measure(moved.unflatten(-1, (last - first, directions)))
                    answer[request.layers.index(layer), first:last, felt] = found

        in_chunks(n, chunk, work, tick)
    return answer.cpu()


def _first_tangents(split: Split, request: Request) -> Float[Tensor, "n d direction"]:
    """Return how the first block's input at each token moves along each direction of the token's own x."""
    dtype = torch.bfloat16 if request.precision == "bfloat16" else split.inputs.dtype
    if request.after:
        directions = request.directions(split.blocks[0].input.shape[-1], split.inputs)
        return directions.T.expand(split.inputs.shape[1], -1, -1).to(dtype)
    _, n, d_x = split.inputs.shape
    directions = request.directions(d_x, split.inputs)[:, None, None].expand(-1, 1, n, -1)
    return _forward(split.tail, split.inputs, directions)[:, 0].permute(1, 2, 0).to(dtype)


def _through(
    blocks: Iterator[BlockDerivative], start: Float[Tensor, "input d direction"], first: int, scratch: "_Scratch"
) -> Iterator[Float[Tensor, "n d tangent"]]:
    """Yield the tangents of every block's output in turn; each is written over two blocks later."""
    inputs, d, directions = start.shape
    moved = start
    for layer, block in enumerate(blocks):
        n, _, outputs = block.by_output.shape
        mixed = scratch.take(2, n, outputs, inputs * directions)
        result = scratch.take(layer % 2, n, d, inputs * directions)
        if layer == 0:
            jacobian.push_first(start, block, first=first, mixed=mixed, result=result)
        else:
            read = scratch.take(3, n, block.read.shape[1], inputs * directions)
            jacobian.push(moved, block, read=read, mixed=mixed, result=result)
        moved = result
        yield moved


class _Scratch:
    """Memory taken once and used again: on a CPU, fresh pages cost a tenth of the products that fill them."""

    def __init__(self, like: Tensor):
        self._like = like
        self._flat: dict[int, Tensor] = {}

    def take(self, place: int, *shape: int) -> Tensor:
        """Return the memory at a place in this shape, with whatever it holds."""
        size, held = prod(shape), self._flat.get(place)
        if held is None or not size <= held.numel() < 2 * size:  # what is far too large is given back
            del held
            self._flat.pop(place, None)
            self._flat[place] = self._like.new_empty(size)
        return self._flat[place][:size].view(shape)


def block_derivative(block: Block) -> BlockDerivative:
    """Return a block's derivative at one text: each token's own Jacobians, and attention's in closed form.

    `pre` and `post` act on each position alone, so one product with a basis vector broadcast over positions gives a
    column (forward) or a row (backward) of every token's Jacobian at once.
    """
    call, x = block.call, block.input
    attention = jacobian.attention_derivative(
        call.query[0], call.key[0], call.value[0], call.weights()[0], scaling=call.scaling, softcap=call.softcap
    )
    pull = vjp(block.post, x, call.output)[1]
    basis = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    by_vector, by_output = vmap(lambda row: pull(row.expand_as(x)), chunk_size=_at_once(x))(basis)
    post = by_vector[:, 0].transpose(0, 1), by_output[:, 0].permute(2, 0, 1, 3)
    return jacobian.fold(attention, call.query[0], _pre_jacobians(block), post)


def _pre_jacobians(block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """Return the Jacobians of queries, keys and values by each token's vector; one for all tokens where they agree.

    They agree where `pre` is linear and knows no position. Each position can then carry a basis vector of its own.
    """
    x = block.input
    _, n, d = x.shape
    drawn = torch.randn(1, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x)
    differing = [_spread_over_positions(part) for part in _forward(block.pre, x, drawn.expand(1, 1, n, d))]
    agree = bool((torch.stack(differing) <= 16 * torch.finfo(x.dtype).eps).all())
    basis = torch.eye(d, dtype=x.dtype, device=x.device)
    if not agree:
        columns = _forward(block.pre, x, basis[:, None, None].expand(-1, 1, n, -1))
        query, key, value = (part[:, 0].permute(2, 1, 3, 0) for part in columns)
        return query, key, value
    packed = torch.cat([basis, basis.new_zeros(-d % n, d)]).view(-1, 1, n, d)
    columns = (part[:, 0].transpose(1, 2).flatten(0, 1)[:d] for part in _forward(block.pre, x, packed))
    query, key, value = (part.permute(1, 2, 0).unsqueeze(0) for part in columns)
    return query, key, value


def _spread_over_positions(part: Float[Tensor, "1 1 head n d"]) -> Float[Tensor, ""]:
    """Return how far positions lie apart, of the largest entry; nothing is brought to the CPU for it."""
    return (part - part[..., :1, :]).abs().max() / part.abs().max()


def _forward(
    function: Callable[[Tensor], Any], x: Tensor, tangents: Float[Tensor, "tangent 1 n d"], heads: int = 0
) -> Any:
    """Return a function's derivatives along each tangent; `heads` as in `product_bytes`."""
    return vmap(lambda tangent: jvp(function, (x,), (tangent,))[1], chunk_size=_at_once(x, heads))(tangents)


def _at_once(x: Tensor, heads: int = 0) -> int:
    """Return how many products through a block may run at once."""
    return max(1, working_bytes(x.device) // product_bytes(x.shape[1], x.shape[2], heads, x.dtype.itemsize))


def product_bytes(n: int, d: int, heads: int, itemsize: int) -> int:
    """Return what one product through a block has in flight: some 24 vectors a token, and three maps of each head.

    Where the product does not go through attention, there are no `heads`.
    """
    return itemsize * n * (24 * d + 3 * heads * n)


def working_bytes(device: torch.device) -> int:
    """Return what one batch of Jacobian-vector products may take."""
    return 1 << (26 if device.type == "cpu" else 32)  # on a CPU more only leaves the cache


def generic(reading: Reading, request: Request, *, chunk: int, tick: Tick) -> Tensor:
    """Run the whole model in forward mode, with the tangents of `chunk` inputs at a time."""
    model = reading.model
    with _running(reading, request) as (x, run), forward_mode(), products(request.precision):
        _, n, d_x = x.shape
        directions = request.directions(d_x, x)
        answer = request.nothing(n, x)

        def hidden(vectors: Tensor) -> Tensor:
            found = run(vectors, max(request.layers) + 1)
            return torch.stack([found[layer][0] for layer in request.layers])

        def work(first: int, last: int) -> None:
            at = torch.eye(n, dtype=x.dtype, device=x.device)[first:last]
            tangents = torch.einsum("in,bd->ibnd", at, directions).flatten(0, 1).unsqueeze(1)
            moved = _forward(hidden, x, tangents, model.n_heads)
            for index, layer in enumerate(moved.unflatten(0, (last - first, -1)).permute(2, 3, 4, 0, 1)):
                layer = layer if request.targets is None else layer[list(request.targets)]
                answer[index, first:last] = request.measure(layer)

        in_chunks(n, chunk, work, tick)
    return answer.cpu()


def reverse(reading: Reading, request: Request, *, chunk: int, tick: Tick) -> Tensor:
    """Go backward from `chunk` targets at a time, once for each direction of the target's vector.

    The sum of a vector's components is a single direction, so that norm takes one pass per target.
    """
    model = reading.model
    with _running(reading, request) as (x, run), sdpa_kernel(SDPBackend.MATH), products(request.precision):
        n = x.shape[1]
        targets = list(range(n)) if request.targets is None else list(request.targets)
        answer = request.nothing(n, x)
        summed = request.norm == "sum"
        directions = x.new_ones(1, model.d_model) if summed else request.directions(model.d_model, x)
        lengths = replace(request, norm="frobenius") if summed else request

        def work(first: int, last: int) -> None:
            for index, layer in enumerate(request.layers):
                pull = vjp(lambda vectors: run(vectors, layer + 1)[-1], x)[1]  # noqa: B023 - used only in this turn
                at = torch.eye(n, dtype=x.dtype, device=x.device)[targets[first:last]]
                rows = torch.einsum("jn,bd->jbnd", at, directions).flatten(0, 1).unsqueeze(1)
                gradients = vmap(lambda row: pull(row)[0][0], chunk_size=_at_once(x, model.n_heads))(rows)  # noqa: B023
                blocks = gradients.unflatten(0, (last - first, -1)).permute(2, 3, 0, 1)  # each block transposed
                answer[index, :, first:last] = lengths.measure(blocks).transpose(0, 1)

        in_chunks(len(targets), chunk, work, tick)
    return answer.cpu()


@contextmanager
def _running(reading: Reading, request: Request) -> Iterator[tuple[Tensor, Run]]:
    """Yield x, and the function from x to the outputs of the first so many blocks."""
    if not reading.model.family.splits:
        model = reading.model
        trace = model.trace(reading.batch) if reading.trace is None else reading.trace
        name = None if request.after else model.family.embedding
        first = model.blocks[0] if name is None else families.find(model.hf.base_model, name)
        x = trace.inputs if name == model.family.embedding else trace.blocks[0][1][0]
        yield x, partial(_outputs, model, reading.batch, first)
        return
    with reading.split() as split:

        def run(vectors: Tensor, depth: int) -> list[Tensor]:
            hidden = [vectors if request.after else split.tail(vectors)]
            for block in split.blocks[:depth]:
                hidden.append(block.whole(hidden[-1]))
            return hidden[1:]

        yield split.blocks[0].input if request.after else split.inputs, run


class _Enough(Exception):  # noqa: N818 - not an error: it ends a run whose wanted part is done
    pass


def _outputs(model: Model, batch: TokenBatch, first: nn.Module, vectors: Tensor, depth: int) -> list[Tensor]:
    """Run a model that does not split with `vectors` entering `first`, up to block `depth`; its blocks are distinct."""
    turned = model.family.sequence_first
    found: list[Tensor] = []

    def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (vectors.transpose(0, 1) if turned else vectors, *args[1:])

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        found.append(hidden.transpose(0, 1) if turned else hidden)
        if len(found) == depth:
            raise _Enough  # before the language-model head, which would cost more than the blocks

    with ExitStack() as stack:
        stack.callback(first.register_forward_pre_hook(enter).remove)
        for block in model.blocks:
            stack.callback(block.register_forward_hook(leave).remove)
        with suppress(_Enough):
            model.trace(batch)
    return found


def in_chunks(total: int, size: int, work: Callable[[int, int], None], tick: Tick) -> None:
    """Do `work(first, last)` over a range, `size` at a time, and half as many each time memory runs out."""
    first = 0
    while first < total:
        last = min(first + size, total)
        if _fits(work, first, last):
            tick(last - first)
            first = last
        elif size > 1:
            size //= 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        else:
            raise InputError(
                "Attributing a text: memory ran out even for the tangents of a single token. Use fewer probes "
                "(probes=16, say), or a shorter text."
            )


def _fits(work: Callable[[int, int], None], first: int, last: int) -> bool:
    """Do the work and say whether there was memory for it."""
    try:
        work(first, last)
    except (MemoryError, RuntimeError) as error:  # torch raises a RuntimeError; on a CPU it has no type of its own
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error):
            return False
        raise
    return True


@contextmanager
def forward_mode() -> Iterator[None]:
    """Compute derivatives forward: attention by the kernel that has them."""
    with warnings.catch_warnings():  # torch compiles some of its own rules on first use, in a way it deprecates
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=DeprecationWarning)
        jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))
    with sdpa_kernel(SDPBackend.MATH):
        yield
