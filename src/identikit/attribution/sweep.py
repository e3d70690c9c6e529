"""The structured sweep: the Jacobians of all layers and pairs of texts, for models that split.

The tangents of some inputs (a round) go through a layer in chunks, then through the next: each layer's derivative is
prepared once per round and dropped again, and tangents are held once. Where all inputs do not fit, there are several
rounds, and where that is less memory, every layer's derivative is kept and a round is a single chunk. Short texts are
prepared side by side, since on a GPU most of that time goes into starting small operations.

Engines return the norms of the Jacobian blocks (layer, input, output), or with probes the squared length of each
block's image of each direction (layer, input, output, direction).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from itertools import accumulate
from math import prod

import torch

from identikit.attribution import request as shared
from identikit.attribution.derivative import agreeing, block_derivatives
from identikit.attribution.request import (
    Request,
    Tick,
    first_tangents,
    forward_mode,
    in_chunks,
    scaled,
    sees_no_later_token,
)
from identikit.maths import jacobian
from identikit.maths.jacobian import BlockDerivative
from identikit.models.machine import products
from identikit.models.model import Split
from identikit.models.reading import Reading
from identikit.shapes import Float, Tensor
from identikit.texts.text import stacked

KEYS = 8  # on a GPU, keys are made a multiple of this
RETRIES = 3  # with tangents scaled down, where a block makes them overflow


def sweep(
    texts: Sequence[Reading], requests: Sequence[Request], *, chunk: int, together: int, keep: bool, tick: Tick
) -> list[Tensor]:
    """Push tangents through all layers: `together` inputs in a round, counted on from text to text, `chunk` at a time.

    Requests may differ in their seeds and targets. `keep`: hold every layer's derivative, so that no round prepares it
    again.
    """
    asked = requests[0]
    rounded = "full" if asked.precision == "full" else "tf32"  # of what prepares the sweep
    lengths = [len(text.tokens) for text in texts]
    with _split(texts) as split, forward_mode(), products(rounded):
        dtype = torch.bfloat16 if asked.precision == "bfloat16" else split.inputs.dtype
        depth = max(asked.layers) + 1
        starts = first_tangents(split, requests, lengths, dtype)
        causal = sees_no_later_token(block.call for block in split.blocks)
        answers = [request.nothing(n, split.inputs) for request, n in zip(requests, lengths, strict=True)]
        memory = _Memory(starts[0])
        report = _whole_inputs(tick)
        agree = agreeing(split.blocks[:depth])

        def derivatives(layer: int) -> list[BlockDerivative]:
            return block_derivatives(split.blocks[layer], lengths, agree=agree[layer], dtype=dtype)

        derivatives = cache(derivatives) if keep else derivatives

        def work(first: int, last: int) -> None:
            memory.forget()
            chunks = [
                _Chunk(text, starts[text], inputs, causal, memory) for text, inputs in _cut(lengths, first, last, chunk)
            ]
            for layer in range(depth):
                blocks = derivatives(layer)
                done = layer * (last - first)
                for some in chunks:
                    some.push(blocks[some.text])
                    if layer in asked.layers:
                        some.write(requests[some.text], answers[some.text][asked.layers.index(layer)])
                    done += some.last - some.first
                    report(first + done / depth)
                del blocks  # before the next are prepared
            for some in chunks:
                some.end()

        in_chunks(sum(lengths), together, work, lambda count: None)
    return [answer.cpu() for answer in answers]


def _split(texts: Sequence[Reading]) -> AbstractContextManager[Split]:
    """Take the model apart for the texts, padded to one length."""
    if len(texts) == 1:
        return texts[0].split()
    return texts[0].model.split(stacked([text.batch for text in texts], texts[0].model.pad_id))


def _cut(lengths: Sequence[int], first: int, last: int, chunk: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Cut a range of inputs, counted on from text to text, into chunks of single texts."""
    for text, (end, n) in enumerate(zip(accumulate(lengths), lengths, strict=True)):
        stop = min(last - (end - n), n)
        for at in range(max(first - (end - n), 0), stop, chunk):
            yield text, (at, min(at + chunk, stop))


def _whole_inputs(tick: Tick) -> Callable[[float], None]:
    """Report progress in whole inputs, from how far the work has come; repeated work is reported once."""
    reported = 0

    def reach(place: float) -> None:
        nonlocal reported
        more = int(place + 1e-9) - reported
        if more > 0:
            tick(more)
            reported += more

    return reach


class _Chunk:
    """The tangents of a few inputs of a text on their way through the layers; see `sweep`.

    In float16 they are kept from overflowing and underflowing: each input's tangents are scaled by a power of two after
    every block, which `write` undoes exactly, since derivatives are linear in the tangents.
    """

    def __init__(self, text: int, start: Tensor, inputs: tuple[int, int], causal: bool, memory: "_Memory"):
        self.text = text
        self.first, self.last = inputs
        self._before = self.first if causal else 0  # earlier tokens feel nothing
        self._start = start[self.first : self.last]
        self._memory = memory
        self._held: Tensor | None = None
        self._exponent = torch.zeros(self.last - self.first, dtype=torch.int32, device=start.device)

    def push(self, block: BlockDerivative) -> None:
        """Push the tangents through the next block."""
        block = block.after(self._before, KEYS if self._start.is_cuda else 1)
        result = self._through(block)
        for _ in range(RETRIES if result.dtype in shared.SCALED else 0):
            if result.isfinite().all():
                self._exponent += scaled(result.unflatten(-1, (self.last - self.first, -1)), dim=2)
                break
            self._lower()
            self._memory.give(result)
            result = self._through(block)
        self.end()
        self._held = result

    def write(self, asked: Request, answer: Tensor) -> None:
        """Write what is asked of the tangents, without the scale, into a layer's answer: (input, output, …)."""
        assert self._held is not None
        moved = self._held
        felt = slice(self._before, None)
        if asked.targets is not None:
            targets = torch.tensor(asked.targets, device=moved.device)
            felt = (targets >= self._before).nonzero().squeeze(1)
            moved = moved[targets[felt] - self._before]
        measured = asked.measure(moved.unflatten(-1, (self.last - self.first, -1)))
        if moved.dtype in shared.SCALED:
            measured = asked.unscaled(measured, self._exponent)
        answer[self.first : self.last, felt] = measured

    def end(self) -> None:
        """Give the tangents' memory back."""
        if self._held is not None:
            self._memory.give(self._held)
        self._held = None

    def _through(self, block: BlockDerivative) -> Float[Tensor, "n d tangent"]:
        inputs, d, directions = self._start.shape
        n, _, outputs = block.by_output.shape
        take = self._memory.take
        read = take(block.of_values.shape[2], block.read.shape[1], inputs * directions)
        mixed = take(n, outputs, inputs * directions)
        result = take(n, d, inputs * directions)
        scratch = {"read": read, "mixed": mixed, "result": result}
        if self._held is None:
            jacobian.push_first(self._start, block, first=self.first - self._before, **scratch)
        else:
            jacobian.push(self._held, block, **scratch)
        self._memory.give(read)
        self._memory.give(mixed)
        return result

    def _lower(self) -> None:
        """Make room for growth that overflowed: scale what enters the block down."""
        if self._held is None:
            self._start = self._start * 2.0**-8
        else:
            self._held *= 2.0**-8
        self._exponent += 8


class _Memory:
    """Memory that is used again: on a CPU, fresh pages cost a tenth of the products that fill them.

    On a GPU, torch does this itself.
    """

    def __init__(self, like: Tensor):
        self._like = like
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}

    def take(self, *shape: int) -> Tensor:
        """Return memory of this shape, with whatever it holds."""
        size = prod(shape)
        if self._like.is_cuda:
            return self._like.new_empty(shape)
        fitting = [place for place, flat in enumerate(self._free) if size <= flat.numel() < 2 * size]
        if fitting:
            flat = self._free.pop(min(fitting, key=lambda place: self._free[place].numel()))
        else:
            self._free.clear()  # before more is taken
            flat = self._like.new_empty(size)
        self._lent[flat.data_ptr()] = flat
        return flat[:size].view(shape)

    def forget(self) -> None:
        """Forget what was not given back: memory ran out, and it is tried again with less."""
        self._lent.clear()

    def give(self, taken: Tensor) -> None:
        """Give back what was taken."""
        if not taken.is_cuda:
            self._free.append(self._lent.pop(taken.data_ptr()))
