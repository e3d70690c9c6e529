"""A model taken apart: each block as what acts on every position alone, and attention between."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn

from identikit.errors import ModelError
from identikit.models.taps.tap import AttentionCall, Visitor, visiting
from identikit.models.watch import BlockCall
from identikit.shapes import Float, Tensor


@dataclass(frozen=True)
class Block:
    """One block as post(x, mix(pre(x))): `pre` and `post` act on each position alone, and only `mix` looks across.

    - `input`: the hidden vectors that enter it; `call`: its attention, as captured
    - `pre(x)`: queries, keys and values; `post(x, o)`: the block's output for the head output o
    - `run(x, visitor)`: the whole block, with the head output that the visitor returns for its attention, if any
    - `after(start)`: the same block for the positions from `start` on; only its `call` is still that of all positions
    """

    input: Float[Tensor, "batch n d"]
    call: AttentionCall
    pre: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    post: Callable[[Tensor, Tensor], Tensor]
    run: Callable[[Tensor, Visitor], Tensor]
    after: Callable[[int], "Block"]


@dataclass(frozen=True)
class Split:
    """A model taken apart for one batch: x (`inputs`), from there to the first block (`tail`), and its `blocks`."""

    inputs: Float[Tensor, "batch n d_x"]
    tail: Callable[[Tensor], Tensor]
    blocks: tuple[Block, ...]


class Reached(Exception):  # noqa: N818 - not an error: it ends a run once the wanted part is done
    """Ends a run, and carries what it was run for."""

    def __init__(self, *parts: Tensor):
        self.parts = parts


def block_of(entry: BlockCall, call: AttentionCall) -> Block:
    """Return a block that ran, taken apart; `call` is its attention. The tap has to be in place where it is used."""

    def run(x: Tensor, visitor: Visitor) -> Tensor:
        with visiting(visitor):
            return entry.run(x)

    def stop(call: AttentionCall) -> None:
        raise Reached(call.query, call.key, call.value)

    def pre(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        try:
            run(x, stop)
        except Reached as reached:
            query, key, value = reached.parts
            return query, key, value
        raise ModelError(f"Taking {type(entry.module).__name__} apart: it did not call its attention.")

    def post(x: Tensor, output: Tensor) -> Tensor:
        return run(x, lambda call: output)

    def after(start: int) -> Block:
        return block_of(entry.after(start, call.query.shape[2]), call)

    return Block(entry.hidden, call, pre, post, run, after)


def embedding_tail(run: Callable[[], object], embedding: nn.Module, first: nn.Module, x: Tensor) -> Tensor:
    """Return what enters the `first` block when the model runs with x in the place of the `embedding`'s input."""

    def replace(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (x, *args[1:])

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise Reached(BlockCall(module, args, kwargs).hidden)

    with ExitStack() as stack:
        stack.callback(embedding.register_forward_pre_hook(replace).remove)
        stack.callback(first.register_forward_pre_hook(stop, with_kwargs=True).remove)
        try:
            run()
        except Reached as reached:
            return reached.parts[0]
    raise ModelError(f"Running an embedding: {type(first).__name__}, the first block, was never called.")
