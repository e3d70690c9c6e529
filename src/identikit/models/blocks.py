"""The blocks of a model: watch a run of them, and split each into parts that act on every position alone.

A run is refused unless each block attends just once, or in a decoder twice: to the target and to the source.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from identikit.errors import ModelError
from identikit.models import families
from identikit.models.table import Family
from identikit.models.taps.tap import AttentionCall, CallCounter, Visitor, visit_calls
from identikit.shapes import Bool, Float, Tensor

_NO_CALL = -1  # as the number of the attention call that is visited


class BlockCall(NamedTuple):
    """A block (`module`) that ran, and what it was called with: `args` and `kwargs`."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def hidden(self) -> Float[Tensor, "batch n d"]:
        """The hidden vectors that entered it."""
        return self.args[0] if self.args else self.kwargs["hidden_states"]

    def with_input(self, x: Tensor) -> "BlockCall":
        """Return the call with other hidden vectors."""
        if self.args:
            return self._replace(args=(x, *self.args[1:]))
        return self._replace(kwargs=self.kwargs | {"hidden_states": x})

    def run(self, x: Tensor) -> Tensor:
        """Call the block again with other hidden vectors, and return what it makes of them where they are."""
        call = self.with_input(x)
        return first_output(self.module(*call.args, **call.kwargs)).to(x.device)


@dataclass(frozen=True)
class Trace:
    """One run of a model: the embedding sum x (`inputs`), every block's output e^l (`hidden`), and the `logits`.

    `hidden` is before any final norm. `blocks` holds each block that ran and what it was called with, so that the run
    can be taken apart afterwards.
    """

    inputs: Float[Tensor, "batch n d_x"]
    hidden: tuple[Float[Tensor, "batch n d"], ...]
    logits: Tensor | None
    blocks: tuple[BlockCall, ...] = ()


# Watching a run


@dataclass
class BlockWatcher:
    """Hooks that record one run of the model called `name`: its embedding sum, and what enters and leaves its blocks.

    `returned_counts` says of each block how many things it returns in a tuple, 0 where it returns its vectors alone,
    and `attended` is how many attention calls were made by the end of the last block.
    """

    name: str
    family: Family
    counter: CallCounter
    embedded: Tensor | None = None
    hidden: list[Tensor] = field(default_factory=list)
    blocks: list[BlockCall] = field(default_factory=list)
    returned_counts: list[int] = field(default_factory=list)
    attended: int = 0

    @property
    def inputs(self) -> Tensor:
        """The embedding sum x."""
        if self.embedded is None:
            raise ModelError(
                f"Reading {self.name}: its first block ran before the module that the row's `embedding` names, or that "
                "module was given nothing. `embedding` is the module whose input is the embedding sum."
            )
        return self.embedded

    def on_embedding(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Record what enters the module that takes the embedding sum."""
        self.embedded = self._gather(args[0]) if args else None

    def on_enter(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Record what a block is called with."""
        call = BlockCall(module, args, kwargs)
        if self.counter.gather_device is not None:
            call = call.with_input(self._gather(call.hidden))
        if self.family.embedding is None and self.embedded is None:
            self.embedded = self._batch_first(call.hidden)
        _ = self.inputs  # refuses a row whose embedding comes after the first block
        self.counter.block = len(self.blocks)
        if self.family.reads is not None:
            if not self.blocks:  # the calls so far were the encoder's
                self.counter.calls = 0
            self.counter.visited_call = self.counter.calls + self.family.reads
        self.blocks.append(call)

    def on_leave(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        """Record what a block returns; refuse one that did not attend just once, or twice in a decoder."""
        self.hidden.append(self._batch_first(self._gather(first_output(output))))
        self.returned_counts.append(len(output) if isinstance(output, tuple) else 0)
        expected = 2 if self.family.reads is not None else int(families.other_mixer(self.family, module) is None)
        calls = self.counter.calls - self.attended
        if calls != expected:
            raise ModelError(
                f"Reading {self.name}: block {self.counter.block} ({type(module).__name__}) called the tapped "
                f"attention {calls} times, not {('never', 'once', 'twice')[expected]}."
            )
        self.attended = self.counter.calls
        if self.family.reads is not None:
            self.counter.visited_call = _NO_CALL

    def _gather(self, vectors: Tensor) -> Tensor:
        return vectors if self.counter.gather_device is None else vectors.to(self.counter.gather_device)

    def _batch_first(self, hidden: Tensor) -> Tensor:
        return hidden.transpose(0, 1) if self.family.sequence_first else hidden

    def check_vectors(self, keep: Bool[Tensor, "batch n"], kind: str) -> None:
        """Refuse a row, of the model type `kind`, under which there is not one vector per token."""
        blocks = f"blocks={self.family.blocks!r} and sequence_first={self.family.sequence_first}"
        rows = [blocks] * len(self.hidden) + [f"embedding={self.family.embedding!r}"]
        for row, tensor in zip(rows, [*self.hidden, self.inputs], strict=True):
            if tensor.ndim != 3 or tensor.shape[:2] != keep.shape or not tensor.is_floating_point():
                raise ModelError(
                    f"Reading {self.name}: the row of {kind!r} says {row}, and there is a tensor {list(tensor.shape)} "
                    f"({tensor.dtype}) where a vector for each token of a batch {list(keep.shape)} is expected."
                )


@contextmanager
def watch_blocks(
    name: str, family: Family, base: nn.Module, visit: Visitor, gather_device: torch.device | None = None
) -> Iterator[BlockWatcher]:
    """Send attention calls to `visit` and watch every block of `base`; refuse attention that is outside of any block.

    Where blocks are on several devices, all that is recorded is brought to `gather_device`.
    """
    with visit_calls(visit, gather_device) as counter, ExitStack() as stack:
        watch = BlockWatcher(name, family, counter)
        counter.visited_call = None if family.reads is None else _NO_CALL
        if family.embedding is not None:
            embedding = families.find(base, family.embedding)
            stack.callback(embedding.register_forward_pre_hook(watch.on_embedding).remove)
        for module in families.find_all(base, family.blocks):
            stack.callback(module.register_forward_pre_hook(watch.on_enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(watch.on_leave).remove)
        yield watch
    if not watch.hidden or counter.calls != watch.attended:
        raise ModelError(
            f"Reading {name}: its {len(watch.blocks)} blocks called the tapped attention {counter.calls} times, not "
            "once each. Its attention does not go through transformers' attention interface as identikit needs."
        )


def check_layers_agree(name: str, calls: list[AttentionCall]) -> None:
    """Refuse a model whose layers differ in their number format or in their heads."""
    dtypes = {call.value.dtype: call.layer for call in calls}
    if len(dtypes) > 1:
        listed = "; ".join(f"layer {layer}: {str(dtype).removeprefix('torch.')}" for dtype, layer in dtypes.items())
        raise ModelError(
            f"Reading {name}: its layers differ in the number format of their values ({listed}), so the model has no "
            "single precision. Convert it with model.to(dtype)."
        )
    shapes = {(call.query.shape[1], *call.key.shape[1:2], call.value.shape[-1]): call.layer for call in calls}
    if len(shapes) > 1:
        listed = "; ".join(f"layer {layer}: {h}, {kv} and {d}" for (h, kv, d), layer in shapes.items())
        raise ModelError(
            f"Reading {name}: its layers differ in their numbers of heads, key-value heads and value dimensions "
            f"({listed}), and identikit reads models whose layers agree in them."
        )


def first_output(output: Any) -> Tensor:
    """Return the hidden vectors out of what a block returns."""
    return output[0] if isinstance(output, tuple) else output


# Splitting blocks


@dataclass(frozen=True)
class Block:
    """One block as post(x, mix(pre(x))): `pre` and `post` act on each position alone, and only `mix` looks across.

    - `entry`: the block and what it was called with; `call`: its attention, as captured

    The tap has to be in place where a block is run.
    """

    entry: BlockCall
    call: AttentionCall

    @property
    def input(self) -> Float[Tensor, "batch n d"]:
        """The hidden vectors that enter it."""
        return self.entry.hidden

    def run(self, x: Tensor, visitor: Visitor) -> Tensor:
        """Run the whole block, with the head output that the visitor returns for its attention, if any."""
        with visit_calls(visitor, x.device):
            return self.entry.run(x)

    def pre(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values."""
        try:
            self.run(x, _stop)
        except StopRun as stopped:
            query, key, value = stopped.tensors
            return query, key, value
        raise ModelError(f"Taking {type(self.entry.module).__name__} apart: it did not call its attention.")

    def post(self, x: Tensor, output: Tensor) -> Tensor:
        """Return the block's output for a head output."""
        return self.run(x, lambda call: output)

    def after(self, start: int) -> "Block":
        """Return the block for the positions from `start` on; only its `call` is still that of all positions."""
        n = self.call.query.shape[2]
        args, kwargs = _cut_positions((self.entry.args, self.entry.kwargs), n, start)
        return Block(BlockCall(self.entry.module, args, kwargs), self.call)


@dataclass(frozen=True)
class Split:
    """A model taken apart for one batch: x (`inputs`), from there to the first block (`tail`), and its `blocks`."""

    inputs: Float[Tensor, "batch n d_x"]
    tail: Callable[[Tensor], Tensor]
    blocks: tuple[Block, ...]


class StopRun(Exception):  # noqa: N818 - not an error: it ends a run once the wanted part is done
    """Ends a run, and carries the tensors that it was run for."""

    def __init__(self, *tensors: Tensor):
        self.tensors = tensors


def _stop(call: AttentionCall) -> None:
    raise StopRun(call.query, call.key, call.value)


def _cut_positions(argument: object, n: int, start: int) -> Any:
    """Cut a block's argument to the positions from `start` on; tensors of four axes are maps of positions."""
    if isinstance(argument, tuple):
        return tuple(_cut_positions(item, n, start) for item in argument)
    if isinstance(argument, dict):
        return {name: _cut_positions(value, n, start) for name, value in argument.items()}
    if not isinstance(argument, Tensor) or argument.ndim == 0:
        return argument
    axes = (2, 3) if argument.ndim == 4 else (min(1, argument.ndim - 1),)
    for axis in axes:
        if argument.shape[axis] == n:
            argument = argument.narrow(axis, start, n - start)
    return argument


def embedding_tail(run: Callable[[], object], embedding: nn.Module, first: nn.Module, x: Tensor) -> Tensor:
    """Return what enters the `first` block when the model runs with x in the place of the `embedding`'s input."""

    def stop(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        raise StopRun(BlockCall(module, args, kwargs).hidden)

    with ExitStack() as stack:
        stack.callback(embedding.register_forward_pre_hook(lambda module, args: (x, *args[1:])).remove)
        stack.callback(first.register_forward_pre_hook(stop, with_kwargs=True).remove)
        try:
            run()
        except StopRun as stopped:
            return stopped.tensors[0]
    raise ModelError(f"Running an embedding: {type(first).__name__}, the first block, was never called.")
