"""Run a model onward from given vectors: from its embedding sum, or from what any of its blocks returns.

Nothing here knows architectures. A run that starts after a block is a run of the whole model in which that block
returns the given vectors; what follows, such as the final norm and the head, is the model's own.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import nn

from identikit.models import families
from identikit.models.blocks import StopRun, first_output, watch_blocks
from identikit.models.model import Model
from identikit.models.taps.switch import set_temporarily
from identikit.models.taps.tap import Visitor, visit_calls
from identikit.shapes import Float, Tensor
from identikit.texts.text import TokenBatch, repeat_batch

EMBEDDING = -1
"""As the block to run after: vectors take the place of the embedding sum."""
FIRST_BLOCK = -2
"""As the block to run after: vectors take the place of what enters the first block."""


class RunOutput(NamedTuple):
    """What a model makes of given vectors.

    - `hidden`: what its last block returns
    - `final`: what its base model returns, after a final norm if it has one; None where only parts of that are run
    - `logits`: None where the model makes none
    """

    hidden: Float[Tensor, "batch n d"]
    final: Float[Tensor, "batch n d"] | None
    logits: Tensor | None


def run_from(
    model: Model,
    batch: TokenBatch,
    vectors: Float[Tensor, "batch n d_x"],
    after: int = EMBEDDING,
    *,
    positions: Sequence[int] | None = None,
    stack: Model | None = None,
) -> RunOutput:
    """Run a text onward from each of these vectors, put in after one block; `positions` limits where logits are made.

    It is differentiable where the vectors are. They enter the model itself, or a `stack` of it: a decoder's encoder.
    """
    differentiated = torch.is_grad_enabled() and vectors.requires_grad
    device = vectors.device
    entering = vectors.transpose(0, 1) if model.family.sequence_first and after >= 0 else vectors
    last: Any = entering
    base: Any = None
    arguments = model.arguments(repeat_batch(batch, len(vectors)))
    narrowed = positions is not None and "logits_to_keep" in model.accepted_arguments
    if narrowed:
        arguments["logits_to_keep"] = torch.tensor(positions, device=device)

    def record_last(module: nn.Module, args: object, output: object) -> None:
        nonlocal last
        last = first_output(output)

    def record_base(module: nn.Module, args: object, output: object) -> None:
        nonlocal base
        base = output

    ignore_calls = visit_calls(lambda call: None, model.gather_device)
    with model.tapped(), ignore_calls, torch.set_grad_enabled(differentiated), ExitStack() as hooks:
        if after < 0:
            replace_input(hooks, model if stack is None else stack, entering, after)
        else:
            _replace_block_output(hooks, model, entering, after)
        if after < model.n_layers - 1:
            hooks.callback(model.blocks[-1].register_forward_hook(record_last).remove)
        hooks.callback(model.hf.base_model.register_forward_hook(record_base).remove)
        output = model.hf(**arguments)
    hidden = last.transpose(0, 1) if model.family.sequence_first else last
    final = getattr(base, "last_hidden_state", None)
    logits = getattr(output, "logits", None)
    if logits is not None and logits.ndim == 3 and positions is not None and not narrowed:
        logits = logits[:, list(positions)]
    return RunOutput(
        hidden.to(device),
        None if final is None else final.to(device),
        None if logits is None else logits.to(device),
    )


def run_at_position(
    model: Model, batch: TokenBatch, position: int, visit: Visitor, *, depth: int
) -> tuple[Float[Tensor, "batch d"], ...]:
    """Run texts of one token each through the first `depth` blocks, as if each stood at `position`.

    Such a token sees nothing before it, so `visit` has to return the head output of every layer. Returns what each
    block makes of the token.
    """
    arguments = model.arguments(batch)
    if "position_ids" in model.accepted_arguments:
        arguments["position_ids"] = torch.full_like(arguments["input_ids"], position)

    def stop(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        if len(watch.hidden) == depth:
            raise StopRun

    watched = watch_blocks(model.name, model.family, model.hf.base_model, visit, model.gather_device)
    with model.tapped(), watched as watch, ExitStack() as stack, suppress(StopRun):
        for module in dict.fromkeys(model.blocks):
            stack.callback(module.register_forward_hook(stop).remove)
        model.hf(**arguments)
    return tuple(hidden[:, 0] for hidden in watch.hidden)


def replace_input(stack: ExitStack, model: Model, vectors: Float[Tensor, "batch n d_x"], after: int) -> None:
    """Put vectors in the place of the embedding sum, or of what enters the first block."""
    embedding = model.family.embedding if after == EMBEDDING else None
    entered_module = model.blocks[0] if embedding is None else families.find(model.hf.base_model, embedding)
    is_block_first = embedding is None and model.family.sequence_first
    unused_vectors = [vectors.transpose(0, 1) if is_block_first else vectors]  # the first call takes them

    def replace(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        if not unused_vectors:
            return None
        entering = unused_vectors.pop()
        return ((entering, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": entering})

    stack.callback(entered_module.register_forward_pre_hook(replace, with_kwargs=True).remove)


def _replace_block_output(stack: ExitStack, model: Model, vectors: Tensor, after: int) -> None:
    """Make a block return the vectors, beside whatever else it returns; one module may be several blocks.

    After the last block nothing else is needed, and no block runs.
    """
    block_indices = count()
    is_last = after == model.n_layers - 1

    def replace(forward: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> Any:
            block = next(block_indices)
            if is_last:
                returned = model.returned_counts[block]
                return (vectors, *[None] * (returned - 1)) if returned else vectors
            output = forward(*args, **kwargs)
            if block != after:
                return output
            return (vectors, *output[1:]) if isinstance(output, tuple) else vectors

        return run

    for module in dict.fromkeys(model.blocks):
        set_temporarily(stack, module, "forward", replace(module.forward))
        if module not in model.blocks[after + 1 :]:  # the vectors already have what hooks change
            for name in ("_forward_hooks", "_forward_pre_hooks"):
                set_temporarily(stack, module, name, type(getattr(module, name))())
