"""Passes through whole blocks, for one text: plain forward mode, and reverse mode.

- `generic`: forward mode through the blocks, for models that do not split and for a handful of probes;
- `reverse`: one backward pass for each direction of each target's vector, for few targets.

Both return what `sweep` does.
"""

from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.func import vjp, vmap

from identikit.attribution.memory import in_chunks, products_at_once
from identikit.attribution.request import Request, Tick
from identikit.attribution.tangents import (
    first_tangents,
    forward_mode,
    needs_scale,
    push_forward,
    rescale,
    sees_no_later_token,
)
from identikit.models.blocks import StopRun, first_output
from identikit.models.decoder import stacks_of
from identikit.models.machine import differentiable_attention, product_precision
from identikit.models.model import Block, Model, Split
from identikit.models.partial_run import EMBEDDING, FIRST_BLOCK, replace_input
from identikit.models.taps.tap import AttentionCall
from identikit.models.text_run import TextRun
from identikit.shapes import Float, Tensor
from identikit.texts.text import TokenBatch


def generic(text: TextRun, request: Request, chunk: int, tick: Tick) -> Tensor:
    """Go forward with the tangents of `chunk` inputs at a time.

    Models that do not split are gone through as a whole, from each stack's inputs in turn.
    """
    with text.model.exclusive(), forward_mode(), product_precision(request.precision):
        if text.model.family.splits:
            return _by_block(text, request, chunk, tick)
        answers = [_from_stack(text, stack, batch, request, chunk, tick) for stack, batch in stacks_of(text)]
        return torch.cat(answers, dim=1)


def _by_block(text: TextRun, request: Request, chunk: int, tick: Tick) -> Tensor:
    """Go through one block after another. Where no token sees a later one, tokens before the chunk are left out."""
    with text.split() as split:
        n = split.inputs.shape[1]
        (start,) = first_tangents(split, [request], [n], split.inputs.dtype)
        _, d, directions = start.shape
        targets = torch.arange(n) if request.targets is None else torch.tensor(request.targets)
        answer = request.zeros(n, split.inputs)
        narrow = sees_no_later_token(block.call for block in split.blocks) and _is_causal_throughout(split)

        def push_chunk(first: int, last: int) -> None:
            before = first if narrow else 0
            outputs = targets >= before
            rows = slice(None) if request.targets is None else (targets[outputs] - before).to(start.device)
            moved = start.new_zeros(last - first, directions, 1, n - before, d)
            for token in range(first, last):
                moved[token - first, :, 0, token - before] = start[token].T
            exponent = torch.zeros(last - first, dtype=torch.int32, device=start.device)
            for layer, block in enumerate(split.blocks[: max(request.layers) + 1]):
                _push(block, before, moved.flatten(0, 1))
                if needs_scale(moved.dtype):
                    exponent += rescale(moved, dim=0)
                if layer in request.layers:
                    tangents = moved[:, :, 0].permute(2, 3, 0, 1)[rows]
                    measured = request.measure(tangents, exponent, outputs=outputs)
                    answer[request.layers.index(layer), first:last, outputs] = measured
            tick(last - first)

        in_chunks(n, chunk, push_chunk)
    return answer.cpu()


def _push(block: Block, before: int, tangents: Float[Tensor, "tangent 1 n d"]) -> None:
    """Push tangents of the tokens from `before` on through a block, in place."""
    call = block.call
    later = block.after(before) if before else block
    wide = torch.promote_types(call.query.dtype, torch.float32)

    def attend(moved: AttentionCall) -> Tensor:
        pairs = ((call.query, moved.query), (call.key, moved.key), (call.value, moved.value))
        query, key, value = (torch.cat([whole[:, :, :before], later], dim=2) for whole, later in pairs)
        weights = replace(call, query=query, key=key, value=value).weights(slice(before, None), dtype=wide)
        output = weights @ value.repeat_interleave(call.groups, dim=1).to(wide)
        return output.to(moved.query.dtype)

    heads = call.query.shape[1]
    step = products_at_once(later.input, heads)
    for first in range(0, len(tangents), step):
        portion = tangents[first : first + step]
        portion.copy_(push_forward(lambda x: later.run(x, attend), later.input, portion, heads))


def _is_causal_throughout(split: Split) -> bool:
    """Return whether the blocks give the same for the second half of the positions alone."""
    half = split.inputs.shape[1] // 2
    try:
        for block in split.blocks:
            call = block.call
            later = block.after(half)
            expected = [whole[:, :, half:] for whole in (call.query, call.key, call.value)]
            expected.append(block.post(block.input, call.output)[:, half:])
            halves = [*later.pre(later.input), later.post(later.input, call.output[:, :, half:])]
            for actual, reference in zip(halves, expected, strict=True):
                if (actual - reference).abs().max() > 8 * torch.finfo(actual.dtype).eps * reference.abs().max():
                    return False
    except (RuntimeError, IndexError):  # what the block was called with cannot be cut
        return False
    return True


def _from_stack(text: TextRun, stack: Model, batch: TokenBatch, request: Request, chunk: int, tick: Tick) -> Tensor:
    """Go through the whole model from the inputs of one stack, which reads the batch."""
    model = text.model
    trace = stack.trace(batch) if text.trace is None or stack is not model else text.trace
    after = EMBEDDING if request.source == "before" else FIRST_BLOCK
    x = trace.inputs if after == EMBEDDING or stack.family.embedding is None else trace.blocks[0].hidden
    _, n, d_x = x.shape
    directions = request.directions(d_x, x)
    answer = request.zeros(n, x, outputs=len(text.tokens))

    def hidden(vectors: Tensor) -> Tensor:
        outputs = _block_outputs(text, stack, vectors, after, max(request.layers) + 1)
        return torch.stack([outputs[layer][0] for layer in request.layers])

    def push_chunk(first: int, last: int) -> None:
        inputs = torch.eye(n, dtype=x.dtype, device=x.device)[first:last]
        tangents = torch.einsum("in,bd->ibnd", inputs, directions).flatten(0, 1).unsqueeze(1)
        moved = push_forward(hidden, x, tangents, model.n_heads)
        for index, blocks in enumerate(moved.unflatten(0, (last - first, -1)).permute(2, 3, 4, 0, 1)):
            blocks = blocks if request.targets is None else blocks[list(request.targets)]
            answer[index, first:last] = request.measure(blocks)
        tick(last - first)

    in_chunks(n, chunk, push_chunk)
    return answer.cpu()


def _block_outputs(text: TextRun, stack: Model, vectors: Tensor, after: int, depth: int) -> list[Tensor]:
    """Run a model that does not split, with vectors entering a stack, up to block `depth`; its blocks are distinct."""
    model = text.model
    outputs: list[Tensor] = []

    def leave(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        hidden = first_output(output)
        outputs.append(hidden.transpose(0, 1) if model.family.sequence_first else hidden)
        if len(outputs) == depth:
            raise StopRun  # before the language-model head, which would cost more than the blocks

    with model.exclusive(), ExitStack() as hooks, suppress(StopRun):
        replace_input(hooks, stack, vectors, after)
        for block in model.blocks:
            hooks.callback(block.register_forward_hook(leave).remove)
        model.trace(text.batch)
    return outputs


def reverse(text: TextRun, request: Request, chunk: int, tick: Tick) -> Tensor:
    """Go backward from `chunk` targets at a time, once for each direction of the target's vector.

    The sum of a vector's components is a single direction, so that norm takes one pass per target.
    """
    model = text.model
    with text.split() as split, differentiable_attention(), product_precision(request.precision):
        x = split.blocks[0].input if request.source == "after" else split.inputs
        n = x.shape[1]
        targets = list(range(n)) if request.targets is None else list(request.targets)
        answer = request.zeros(n, x)
        if request.norm == "sum":
            directions = x.new_ones(1, model.d_model)
            request = replace(request, norm="frobenius")  # of one direction: its length
        else:
            directions = request.directions(model.d_model, x)

        def run(vectors: Tensor, layer: int) -> Tensor:
            hidden = vectors if request.source == "after" else split.tail(vectors)
            for block in split.blocks[: layer + 1]:
                hidden = block.run(hidden, lambda call: None)
            return hidden

        def pull_chunk(first: int, last: int) -> None:
            for index, layer in enumerate(request.layers):
                pull = vjp(partial(run, layer=layer), x)[1]
                outputs = torch.eye(n, dtype=x.dtype, device=x.device)[targets[first:last]]
                rows = torch.einsum("jn,bd->jbnd", outputs, directions).flatten(0, 1).unsqueeze(1)
                step = products_at_once(x, model.n_heads)
                gradients = vmap(lambda row: pull(row)[0][0], chunk_size=step)(rows)  # noqa: B023
                blocks = gradients.unflatten(0, (last - first, -1)).permute(2, 3, 0, 1)  # each block transposed
                answer[index, :, first:last] = request.measure(blocks).transpose(0, 1)
            tick(last - first)

        in_chunks(len(targets), chunk, pull_chunk)
    return answer.cpu()
