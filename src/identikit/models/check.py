"""The proof of a tap: what must hold for a model before a single number is read from it.

It runs on a small padded sample, so it costs a few short forward passes. Tests run the same proof on every family. A
model that fails is refused: a wrong number is worse than none.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from identikit.errors import ModelError
from identikit.models import families
from identikit.models.model import Model
from identikit.models.tap import AttentionCall, evaluating, switched
from identikit.models.weights import linear_bias
from identikit.shapes import Tensor
from identikit.text import TokenBatch

# How far apart two ways of computing one thing may be, relative to the largest entry.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 2e-1}


def prove(model: Model) -> int:
    """Prove a tap and return the number of layers it was proved for; a ModelError names what does not hold."""
    finite_weights(model)
    batch = model.sample((7, 5))
    calls: list[AttentionCall] = []
    with _watched(model) as made:
        trace = model.trace(batch, calls.append)
    for call in calls:
        _attention_rebuilds_output(model, call)
        _projections_are_the_modules(model, call, made)
    # Older transformers drop the soft-cap under sdpa without a word; their eager attention keeps it.
    capped = any(call.softcap is not None for call in calls)
    with switched(model.hf, "eager") if capped else nullcontext():
        _output_is_the_models_own(model, batch, trace.hidden[-1])
    if model.family.splits:
        _split_is_by_position(model, batch)
    return len(calls)


def finite_weights(model: Model) -> None:
    """Refuse weights that are NaN or infinite, by name."""
    for name, parameter in model.hf.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ModelError(
                f"Loading {model.name}: the weight {name!r} holds NaN or infinity, so nothing computed with it means "
                "anything. Load an intact checkpoint."
            )


class _Made(NamedTuple):
    """What the value layer and the output projection of each block returned, in call order."""

    values: list[Tensor]
    outputs: list[Tensor]


@contextmanager
def _watched(model: Model) -> Iterator[_Made]:
    made, family = _Made([], []), model.family
    with ExitStack() as stack:
        for block in {id(block): block for block in model.blocks}.values():
            hooks = [] if family.value is None else _watch(families.find(block, family.value), made.values)
            if family.watch_output is None:
                hooks += _watch(families.find(block, family.output), made.outputs)
            else:
                hooks += family.watch_output(block, made.outputs.append)
            for hook in hooks:
                stack.callback(hook.remove)
        yield made


def _watch(module: Any, record: list[Tensor]) -> list[Any]:
    return [module.register_forward_hook(lambda module, args, output: record.append(output))]


def _attention_rebuilds_output(model: Model, call: AttentionCall) -> None:
    weights, where = call.weights(), f"layer {call.layer}:"
    sums = weights.sum(-1)[call.visible().any(-1).expand(weights.shape[:-1])]
    whole = torch.ones_like(sums) if call.sink is None else sums.clamp(0, 1)
    _near(model, sums, whole, f"{where} rows of attention sum to 1, or to less with a learned sink")
    rebuilt = weights @ call.value.repeat_interleave(call.groups, dim=1)
    _near(model, rebuilt, call.output, f"{where} attention times values is the head output")


def _projections_are_the_modules(model: Model, call: AttentionCall, made: _Made) -> None:
    block, where = model.blocks[call.layer], f"layer {call.layer}:"
    projected = torch.einsum("bhqv,hvd->bqd", call.output, model.projection(call.layer))
    bias = linear_bias(families.find(block, model.family.output))
    projected = projected if bias is None else projected + bias
    _near(model, projected, made.outputs[call.layer], f"{where} head outputs times H is the module's output")
    if model.family.value is not None:
        parts = families.value_part(model.family, made.values[call.layer], model.n_key_value_heads, model.d_value)
        _near(model, parts.transpose(1, 2), call.value, f"{where} values are the value layer's, head by head")


def _output_is_the_models_own(model: Model, batch: TokenBatch, tapped: Tensor) -> None:
    """Compare the tapped run of a padded batch with the stock model's runs of each text alone."""
    for row in range(len(batch)):
        length = int(batch.keep[row].sum())
        alone = model.sample((length,)) if batch.pixels is None else batch
        own = stock_hidden(model, alone)[0 if batch.pixels is None else row]
        what = "output with the tap, padded, is the model's own, alone"
        _near(model, tapped[row][batch.keep[row].to(tapped.device)], own, what)


def stock_hidden(model: Model, batch: TokenBatch) -> Tensor:
    """Return the last block's output of the model as it came, without the tap."""
    outputs: list[Any] = []
    hook = model.blocks[-1].register_forward_hook(
        lambda module, args, output: outputs.append(output[0] if isinstance(output, tuple) else output)
    )
    try:
        with evaluating(model.hf), torch.no_grad():
            model.hf(**model.arguments(batch))
    finally:
        hook.remove()
    return outputs[-1].transpose(0, 1) if model.family.sequence_first else outputs[-1]


def _split_is_by_position(model: Model, batch: TokenBatch) -> None:
    """Change one position: `pre`, `post` and the embedding's tail must change there and nowhere else."""
    with model.split(batch) as split:
        moved = split.inputs.clone()
        moved[:, 1] += 1.0
        _unmoved(model, split.tail(split.inputs), split.tail(moved), "the embedding's tail")
        _near(model, split.tail(split.inputs), split.blocks[0].input, "the embedding's tail ends at the first block")
        for layer, block in enumerate(split.blocks):
            x, output = block.input, block.call.output
            moved = x.clone()
            moved[:, 1] += 1.0
            other = output.clone()
            other[:, :, 1] += 1.0
            for before, after in zip(block.pre(x), block.pre(moved), strict=True):
                _unmoved(model, before.transpose(1, 2), after.transpose(1, 2), f"layer {layer}: `pre`")
            _unmoved(model, block.post(x, output), block.post(moved, other), f"layer {layer}: `post`")


def _unmoved(model: Model, before: Tensor, after: Tensor, what: str) -> None:
    others = [position for position in range(before.shape[1]) if position != 1]
    _near(model, after[:, others], before[:, others], f"{what} acts on each position alone")


def _near(model: Model, found: Tensor, expected: Tensor, what: str) -> None:
    difference = (found.double() - expected.double()).abs().max()
    scale = expected.double().abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    if not difference <= _TOLERANCE[model.dtype] * scale:
        raise ModelError(
            f"Proving {model.name}: it does not hold that {what} (off by {difference / scale:.1e} relative to the "
            f"largest entry; allowed: {_TOLERANCE[model.dtype]:.0e}). Numbers read from this model would be wrong."
        )
