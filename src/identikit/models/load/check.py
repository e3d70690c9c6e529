"""The proof of a tap: what must hold for a model before a single number is read from it.

It runs on a small padded sample, so it costs a few short forward passes. Tests run the same proof on every family. A
model that fails is refused: a wrong number is worse than none.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from identikit.errors import ModelError
from identikit.models import families
from identikit.models.blocks import Trace, first_output
from identikit.models.isolation import clear_model_errors, standard_torch_state, structure_of
from identikit.models.load.linear import PACKED_TOLERANCE, linear_bias
from identikit.models.load.weights import first_broken_weight
from identikit.models.model import Model
from identikit.models.taps.switch import use_attention
from identikit.models.taps.tap import AttentionCall
from identikit.shapes import Tensor
from identikit.texts.text import TokenBatch, key_batch, single_text

_ROWS = 64  # about how many rows of attention are compared for a text with images, which is long
# How far apart two ways of computing one thing may be, relative to the largest entry.
# Most families compute norms, rotary tables or recurrences in float32, also where the model is in float64.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 2e-1}


def prove(model: Model) -> int:
    """Prove a tap, and return for how many layers; a ModelError names what does not hold."""
    with model.exclusive(), standard_torch_state(), torch.no_grad():
        weight = first_broken_weight(model.hf)
        if weight is not None:
            raise ModelError(
                f"Loading {model.name}: the weight {weight!r} holds NaN or infinity, so nothing computed with it means "
                "anything. Load an intact checkpoint."
            )
        batch = model.sample((7, 5) if model.modality == "text" else (7,))  # an image or sound is long, never padded
        if model.family.positions and batch.ids is not None:  # pad on the left
            order = batch.keep.long().argsort(dim=1, stable=True)
            batch = replace(batch, ids=batch.ids.gather(1, order), keep=batch.keep.gather(1, order))
        calls: list[AttentionCall] = []
        with _record_layers(model) as (values, outputs):
            trace = model.trace(batch, calls.append)
        _check_one_vector_per_token(model, "output", outputs, batch)
        for call, output in zip(calls, outputs, strict=True):
            _check_attention(model, call)
            _check_output_projection(model, call, output)
        if model.family.value is not None:
            _check_one_vector_per_token(model, "value", values, key_batch(batch, model.decoder_attention))
            for call, value in zip(calls, values, strict=True):
                _check_values(model, call, value)
        # Older transformers silently drop the soft-cap under sdpa; their eager attention keeps it.
        capped = any(call.softcap is not None for call in calls)
        with use_attention(model.hf, "eager") if capped else nullcontext():
            _check_output(model, batch, trace.hidden[-1])
        if model.family.splits:
            _check_split(model, batch, (trace, calls))
        model.proof = (structure_of(model.hf), prove)
        return len(calls)


def prove_with_images(model: Model, batch: TokenBatch) -> None:
    """Prove a tap on a text with images: what it captures gives the model's own output; else raise a ModelError."""
    rows = slice(None, None, max(1, batch.keep.shape[1] // _ROWS))  # a text with images is long

    def visit(call: AttentionCall) -> None:
        _check_attention(model, call, rows)

    with model.exclusive(), standard_torch_state(), torch.no_grad():
        with clear_model_errors(model.name, "a text with images", "Use the model's own processor."):
            trace = model.trace(batch, visit)
        _check_output(model, batch, trace.hidden[-1])


@contextmanager
def _record_layers(model: Model) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Record what the value layers and the output projections return, each in call order."""
    values: list[Tensor] = []
    outputs: list[Tensor] = []
    family = model.family
    with ExitStack() as stack:
        for block in {model.blocks[layer] for layer in model.attention_layers}:
            hooks = [] if family.value is None else [_record_outputs(families.find(block, family.value), values)]
            if family.watch_output is None:
                hooks.append(_record_outputs(families.find(block, family.output), outputs))
            else:
                hooks += family.watch_output(block, outputs.append)
            for hook in hooks:
                stack.callback(hook.remove)
        yield values, outputs


def _record_outputs(module: nn.Module, outputs: list[Any]) -> RemovableHandle:
    return module.register_forward_hook(lambda module, args, output: outputs.append(output))


def _check_attention(model: Model, call: AttentionCall, rows: slice = slice(None)) -> None:
    weights = call.weights(rows)
    where = f"layer {call.layer}:"
    sums = weights.sum(-1)[call.visible(rows).any(-1).expand(weights.shape[:-1])]
    expected = torch.ones_like(sums) if call.sink is None else sums.clamp(0, 1)
    _check_close(model, sums, expected, f"{where} rows of attention sum to 1, or to less with a learned sink")
    rebuilt = weights @ call.value.repeat_interleave(call.groups, dim=1)
    _check_close(model, rebuilt, call.output[:, :, rows], f"{where} attention times values is the head output")


def _check_output_projection(model: Model, call: AttentionCall, output: Tensor) -> None:
    size = families.output_size(model.family, model.blocks[call.layer])
    if size != (model.n_heads * model.d_value, output.shape[-1]):
        _refuse_row(
            model,
            "output",
            f"it takes {size[0]} numbers to {size[1]}, and {model.n_heads} heads of {model.d_value} values make "
            f"{model.n_heads * model.d_value}",
        )
    heads = call.output if call.gate is None else call.output * call.gate
    projected = torch.einsum("bhqv,hvd->bqd", heads, model.projection(call.layer))
    bias = linear_bias(families.find(model.blocks[call.layer], model.family.output))
    projected = projected if bias is None else projected + bias.to(projected.device)
    promise = f"layer {call.layer}: head outputs times H is the module's output (`output={model.family.output!r}`)"
    _check_close(model, projected, output, promise)


def _check_values(model: Model, call: AttentionCall, output: Tensor) -> None:
    family = model.family
    width = output.shape[-1]
    layers = model.n_heads // model.n_key_value_heads + 2 if family.interleaved else 1  # queries, key and value
    expected = model.n_key_value_heads * model.d_value * layers
    if width < expected or (family.interleaved and width != expected):
        _refuse_row(model, "value", f"it makes {width} numbers for each token, and the values take {expected}")
    values = families.value_part(family, output, model.n_key_value_heads, model.d_value)
    row = f"`value={family.value!r}`, `interleaved={family.interleaved}`"
    promise = f"layer {call.layer}: values are the value layer's, head by head ({row})"
    _check_close(model, values.transpose(1, 2), call.value, promise)


def _check_one_vector_per_token(model: Model, field: str, outputs: list[Tensor], batch: TokenBatch) -> None:
    """Refuse a row whose part did not make one vector for each token in every attention layer."""
    if len(outputs) != len(model.attention_layers):
        _refuse_row(model, field, f"it ran {len(outputs)} times in {len(model.attention_layers)} attention layers")
    for output in outputs:
        if not isinstance(output, Tensor) or output.ndim != 3 or output.shape[:2] != batch.keep.shape:
            kind = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            _refuse_row(model, field, f"it made {kind} for a batch of {list(batch.keep.shape)} tokens")


def _refuse_row(model: Model, field: str, why: str) -> NoReturn:
    raise ModelError(
        f"Proving {model.name}: the row of {model.hf.config.model_type!r} says "
        f"{field}={getattr(model.family, field)!r}, but {why}. Numbers read from this model would be wrong."
    )


def _check_output(model: Model, batch: TokenBatch, tapped: Tensor) -> None:
    """Compare the tapped run of a padded batch with the stock model's runs of each text alone.

    The stock model takes positions of its own, so this also proves the positions that a row passes.
    """
    promise = f"output with the tap, padded, is the model's own, alone (`positions={model.family.positions}`)"
    for row, keep in enumerate(batch.keep):
        arguments = model.arguments(single_text(batch, row))
        arguments.pop("position_ids", None)
        outputs: list[Any] = []
        hook = _record_outputs(model.blocks[-1], outputs)
        try:
            with model.prepared():
                model.hf(**arguments)
        finally:
            hook.remove()
        stock = first_output(outputs[-1])
        stock = stock.transpose(0, 1) if model.family.sequence_first else stock
        _check_close(model, tapped[row][keep.to(tapped.device)], stock[0], promise)


def _check_split(model: Model, batch: TokenBatch, run: tuple[Trace, list[AttentionCall]]) -> None:
    """Change one position: `pre`, `post` and the embedding's tail must change there and nowhere else."""
    with model.split(batch, run) as split:
        entering = split.tail(split.inputs)
        changed = split.tail(_change_position(split.inputs, 1))
        _check_by_position(model, entering, changed, "the embedding's tail")
        if torch.equal(entering, changed):
            _refuse_row(model, "embedding", "what enters the first block does not depend on that module's input")
        _check_close(model, entering, split.blocks[0].input, "the embedding's tail ends at the first block")
        for layer, block in enumerate(split.blocks):
            x = block.input
            moved = _change_position(x, 1)
            captured = (block.call.query, block.call.key, block.call.value)
            promise = f"layer {layer}: `pre` makes the same queries, keys and values again"
            for again, after_move, expected in zip(block.pre(x), block.pre(moved), captured, strict=True):
                _check_close(model, again, expected, promise)
                _check_by_position(model, again.transpose(1, 2), after_move.transpose(1, 2), f"layer {layer}: `pre`")
            heads = block.call.output
            changed = block.post(moved, _change_position(heads, 2))
            _check_by_position(model, block.post(x, heads), changed, f"layer {layer}: `post`")


def _change_position(vectors: Tensor, axis: int) -> Tensor:
    """Return the vectors with the one at position 1 changed, and not by a constant, which norms take out."""
    moved = vectors.clone()
    moved.select(axis, 1).add_(torch.arange(vectors.shape[-1], device=vectors.device).double().cos().to(vectors.dtype))
    return moved


def _check_by_position(model: Model, before: Tensor, after: Tensor, name: str) -> None:
    unchanged = [position for position in range(before.shape[1]) if position != 1]
    _check_close(model, after[:, unchanged], before[:, unchanged], f"{name} acts on each position alone")


def _check_close(model: Model, actual: Tensor, expected: Tensor, promise: str) -> None:
    if actual.shape != expected.shape:
        problem = f"the shapes are {list(actual.shape)} and {list(expected.shape)}"
    else:
        expected = expected.to(actual.device).double()
        difference = (actual.double() - expected).abs().max()
        scale = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
        allowed = max(TOLERANCE[model.dtype], PACKED_TOLERANCE if model.packed else 0.0)
        if difference <= allowed * scale:
            return
        problem = f"off by {difference / scale:.1e} of the largest entry; allowed: {allowed:.0e}"
    raise ModelError(
        f"Proving {model.name}: this check failed: {promise} ({problem}). Numbers read from this model would be wrong."
    )
