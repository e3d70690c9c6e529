"""Run a model onward from given vectors: from its embedding sum, or from what any of its blocks returns.

Nothing here knows architectures. A run that starts after a block is a run of the whole model in which that block
returns the given vectors; what follows, such as the final norm and the head, is the model's own.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
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
    """Run a text onward with each of these vectors, all after one block; logits of tokens only at some `positions`.

    It is differentiable where the vectors are. They enter the model itself, or a `stack` of it: a decoder's encoder.
    """
    differentiated = torch.is_grad_enabled() and vectors.requires_grad
    given = vectors.transpose(0, 1) if model.family.sequence_first and after >= 0 else vectors
    last: list[Tensor] = [given]
    base: list[Tensor] = []
    arguments = model.arguments(repeat_batch(batch, len(vectors)))
    narrowed = positions is not None and "logits_to_keep" in model.accepted_arguments
    if narrowed:
        arguments["logits_to_keep"] = torch.tensor(positions, device=vectors.device)
    tapped = visit_calls(lambda call: None, model.gather_device)
    with model.tapped(), tapped, torch.set_grad_enabled(differentiated), ExitStack() as hooks:
        if after < 0:
            replace_input(hooks, model if stack is None else stack, given, after)
        else:
            _replace_block_output(hooks, model, given, after)
        if after < model.n_layers - 1:
            hooks.callback(model.blocks[-1].register_forward_hook(lambda *call: _keep(last, call[2])).remove)
        hooks.callback(model.hf.base_model.register_forward_hook(lambda *call: base.append(call[2])).remove)
        output = model.hf(**arguments)
    hidden = last[-1].transpose(0, 1) if model.family.sequence_first else last[-1]
    final = getattr(base[-1], "last_hidden_state", None) if base else None
    logits = getattr(output, "logits", None)
    if logits is not None and logits.ndim == 3 and positions is not None and not narrowed:
        logits = logits[:, list(positions)]
    home = vectors.device
    final, logits = (None if part is None else part.to(home) for part in (final, logits))
    return RunOutput(hidden.to(home), final, logits)


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


def _keep(kept: list[Tensor], output: object) -> None:
    kept.append(first_output(output))


def replace_input(stack: ExitStack, model: Model, given: Float[Tensor, "batch n d_x"], after: int) -> None:
    """Have vectors take the place of the embedding sum, or of what first enters a block."""
    name = model.family.embedding if after == EMBEDDING else None
    turned = name is None and model.family.sequence_first
    entered = model.blocks[0] if name is None else families.find(model.hf.base_model, name)
    waiting = [given.transpose(0, 1) if turned else given]

    def replaced(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        if not waiting:
            return None
        vectors = waiting.pop()
        return ((vectors, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": vectors})

    stack.callback(entered.register_forward_pre_hook(replaced, with_kwargs=True).remove)


def _replace_block_output(stack: ExitStack, model: Model, given: Tensor, after: int) -> None:
    """Have a block return the vectors, with whatever else it returns; one module may be several blocks.

    After the last block nothing else is needed, and no block runs.
    """
    called = [0]
    last = after == model.n_layers - 1

    def returning(forward: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> Any:
            block = called[0]
            called[0] += 1
            if last:
                return (
                    given if not model.returned_counts[block] else (given, *[None] * (model.returned_counts[block] - 1))
                )
            output = forward(*args, **kwargs)
            if block != after:
                return output
            return (given, *output[1:]) if isinstance(output, tuple) else given

        return run

    for module in dict.fromkeys(model.blocks):
        set_temporarily(stack, module, "forward", returning(module.forward))
        if module not in model.blocks[after + 1 :]:  # what hooks change is in the vectors already
            for name in ("_forward_hooks", "_forward_pre_hooks"):
                set_temporarily(stack, module, name, type(getattr(module, name))())
