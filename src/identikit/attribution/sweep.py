"""The structured sweep: the Jacobians of all layers and pairs of texts, for models that split.

The tangents of some inputs (a round) go through a layer in chunks, then through the next: each layer's derivative is
prepared once per round and dropped again, and tangents are held once. Where all inputs do not fit, there are several
rounds. Short texts are prepared side by side, since on a GPU most of that time goes into starting small operations.

Engines return the norms of the Jacobian blocks (layer, input, output), or with probes the squared length of each
block's image of each direction (layer, input, output, direction).
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod

import torch

from identikit.attribution.derivative import agreeing_rows, block_derivatives
from identikit.attribution.memory import in_chunks
from identikit.attribution.request import Request, Tick
from identikit.attribution.tangents import first_tangents, forward_mode, needs_scale, rescale, sees_no_later_token
from identikit.maths import jacobian
from identikit.maths.jacobian import BlockDerivative
from identikit.models.machine import product_precision
from identikit.models.text_run import TextRun
from identikit.shapes import Float, Tensor
from identikit.texts.text import stack_batches

KEYS = 8  # on a GPU, keys are made a multiple of this
TRIES = 4  # where a block makes tangents overflow, each with smaller ones


def sweep(
    texts: Sequence[TextRun], requests: Sequence[Request], *, chunk: int, round_size: int, tick: Tick
) -> list[Tensor]:
    """Push tangents through all layers: `round_size` inputs at a time, counted on from text to text, in chunks.

    Requests may differ in their seeds and targets.
    """
    request = requests[0]
    model = texts[0].model
    lengths = [len(text.tokens) for text in texts]
    if len(texts) == 1:
        opened = texts[0].split()
    else:
        opened = model.split(stack_batches([text.batch for text in texts], model.pad_id))
    preparing = "full" if request.precision == "full" else "tf32"
    with opened as split, forward_mode(), product_precision(preparing):
        dtype = torch.bfloat16 if request.precision == "bfloat16" else split.inputs.dtype
        depth = max(request.layers) + 1
        starts = first_tangents(split, requests, lengths, dtype)
        causal = sees_no_later_token(block.call for block in split.blocks)
        answers = [request.zeros(n, split.inputs) for request, n in zip(requests, lengths, strict=True)]
        scratch = _Scratch(starts[0])
        agree = agreeing_rows(split.blocks[:depth])

        def sweep_round(first: int, last: int) -> None:
            chunks = [
                _Chunk(text, starts[text], inputs, causal)
                for text, inputs in _chunks_of_texts(lengths, first, last, chunk)
            ]
            for layer in range(depth):
                derivatives = block_derivatives(split.blocks[layer], lengths, agree=agree[layer], dtype=dtype)
                for tangents in chunks:
                    tangents.push(derivatives[tangents.text], scratch)
                    if layer in request.layers:
                        answer = answers[tangents.text][request.layers.index(layer)]
                        tangents.write(requests[tangents.text], answer)
                    tick((tangents.last - tangents.first) / depth)
                del derivatives  # before the next are prepared

        in_chunks(sum(lengths), round_size, sweep_round)
    return [answer.cpu() for answer in answers]


def _chunks_of_texts(
    lengths: Sequence[int], first: int, last: int, chunk: int
) -> Iterator[tuple[int, tuple[int, int]]]:
    """Cut a range of inputs, counted on from text to text, into chunks of single texts."""
    for text, (end, n) in enumerate(zip(accumulate(lengths), lengths, strict=True)):
        stop = min(last - (end - n), n)
        for start in range(max(first - (end - n), 0), stop, chunk):
            yield text, (start, min(start + chunk, stop))


class _Scratch:
    """Memory that a push needs only while it runs.

    On a CPU it is used again, since fresh pages cost a tenth of the products that fill them. On a GPU, torch does this
    itself.
    """

    def __init__(self, like: Tensor):
        self._like = like
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """Return uninitialised memory of this shape."""
        if self._like.is_cuda:
            return self._like.new_empty(shape)
        size = prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers.pop(name, None)  # before more is taken
            self._buffers[name] = self._like.new_empty(size)
        return self._buffers[name][:size].view(shape)


class _Chunk:
    """The tangents of a few inputs of a text on their way through the layers; see `sweep`.

    In float16 they are kept from overflowing and underflowing: each input's tangents are scaled by a power of two after
    every block, which `write` undoes exactly, since derivatives are linear in the tangents.
    """

    def __init__(self, text: int, start: Tensor, inputs: tuple[int, int], causal: bool):
        self.text = text
        self.first, self.last = inputs
        self._before = self.first if causal else 0  # earlier tokens feel nothing
        self._start = start[self.first : self.last]
        self._moved: Tensor | None = None
        self._exponent = torch.zeros(self.last - self.first, dtype=torch.int32, device=start.device)

    def push(self, block: BlockDerivative, scratch: _Scratch) -> None:
        """Push the tangents through the next block."""
        block = block.after(self._before, KEYS if self._start.is_cuda else 1)
        moved = self._through(block, scratch)
        if needs_scale(moved.dtype):
            for _ in range(TRIES - 1):
                if moved.isfinite().all():
                    break
                if self._moved is None:  # make room for growth: scale what enters the block down
                    self._start = self._start * 2.0**-8
                else:
                    self._moved *= 2.0**-8
                self._exponent += 8
                moved = self._through(block, scratch)
            self._exponent += rescale(moved.unflatten(-1, (self.last - self.first, -1)), dim=2)
        self._moved = moved

    def write(self, request: Request, answer: Tensor) -> None:
        """Measure the tangents, without their scale, and write them into a layer's answer: (input, output, …)."""
        assert self._moved is not None
        moved = self._moved
        outputs = slice(self._before, None)
        if request.targets is not None:
            targets = torch.tensor(request.targets, device=moved.device)
            outputs = (targets >= self._before).nonzero().squeeze(1)
            moved = moved[targets[outputs] - self._before]
        exponent = self._exponent if needs_scale(moved.dtype) else None
        blocks = moved.unflatten(-1, (self.last - self.first, -1))
        answer[self.first : self.last, outputs] = request.measure(blocks, exponent, outputs=outputs)

    def _through(self, block: BlockDerivative, scratch: _Scratch) -> Float[Tensor, "n d tangent"]:
        inputs, d, directions = self._start.shape
        tangents = inputs * directions
        n, _, outputs = block.by_output.shape
        result = self._start.new_empty(n, d, tangents)
        memory = {
            "read": scratch.take("read", block.of_values.shape[2], block.read.shape[1], tangents),
            "mixed": scratch.take("mixed", n, outputs, tangents),
        }
        if self._moved is None:
            jacobian.push_first(self._start, block, first=self.first - self._before, **memory, result=result)
        else:
            jacobian.push(self._moved, block, **memory, result=result)
        return result
