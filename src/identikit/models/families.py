"""Apply the table to a model: find its row, say why it cannot be read, and find the parts that the row names."""

import inspect
import sys
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from identikit.errors import ModelError
from identikit.models.load.linear import linear_bias, linear_size, linear_weight
from identikit.models.load.weights import weight_of
from identikit.models.table import FAMILIES, Family
from identikit.models.taps.switch import HubModule
from identikit.shapes import Float, Tensor

_WITHOUT_SOFTMAX = frozenset(["rwkv"])  # it calls its recurrence attention; others show it in their modules' names
_STREAMS = "carries several vectors for each token from block to block, and identikit reads one"
_UNEVEN = "has layers that differ in their numbers of heads or value dimensions, and identikit reads models that do not"
_REFUSED = dict.fromkeys(["gemma3n", "gemma3n_text"], _STREAMS) | dict.fromkeys(
    ["gemma4", "gemma4_text", "mimo_v2_flash"], _UNEVEN
)


def family_of(model: PreTrainedModel) -> Family:
    """Return a model's row, or say why the model cannot be read."""
    family = FAMILIES.get(model.config.model_type)
    reason = _unlisted_reason(model) if family is None else next(_refusals(family, model), None)
    if reason is not None:
        raise ModelError(f"Loading {type(model).__name__}: {reason}")
    assert family is not None
    return family


def _unlisted_reason(model: PreTrainedModel) -> str:
    """Return why an architecture that is not in the table cannot be read."""
    kind = model.config.model_type
    classes = {type(module) for module in model.modules()}
    if kind in _WITHOUT_SOFTMAX or not any("attention" in module.__name__.lower() for module in classes):
        return f"the architecture {kind!r} has no softmax attention, which is what identikit reads. Use another model."
    if kind in _REFUSED:
        return f"the architecture {kind!r} {_REFUSED[kind]}. It is not supported."
    if any("Indexer" in module.__name__ for module in classes):
        return (
            f"the architecture {kind!r} picks a few keys for each query (sparse attention), and its attention does not "
            "say which in its mask. Read as dense attention it would be wrong, so it is not supported."
        )
    if not any(hasattr(sys.modules[module.__module__], "ALL_ATTENTION_FUNCTIONS") for module in classes):
        return (
            f"the architecture {kind!r} is not supported: it computes attention on its own, outside transformers' "
            "attention interface, so it needs a tap of its own ('Add a family' in CONTRIBUTING.md)."
        )
    return (
        f"the architecture {kind!r} is not supported: its blocks and projections are not in the table of families "
        "(`identikit models` prints it). To add it, see 'Add a family' in CONTRIBUTING.md."
    )


def _refusals(family: Family, model: PreTrainedModel) -> Iterator[str]:
    """Yield why a model of a supported architecture cannot be read, or which part that its row names is not there.

    `check.py` proves that what is there is the right part.
    """
    stack = stack_of(family, model)
    base = stack.base_model
    blocks = find_all(base, family.blocks)
    row = f"the row of {model.config.model_type!r} says"
    refusal = family.refusal(model.config)
    if refusal is not None:
        yield refusal
    if any(parent.__name__.endswith("ForMultipleChoice") for parent in type(model).__mro__):
        yield (
            "it reads several choices at once (inputs of three dimensions), and identikit reads one text at a time. "
            "Pass its encoder: load(model.base_model, tokenizer)."
        )
    if not blocks:
        yield f"{row} blocks={family.blocks!r}, and {type(base).__name__} has none there."
    if getattr(model.config, "is_encoder_decoder", False) and hasattr(base, "decoder"):
        yield "it has an encoder and a decoder, and identikit reads one stack. Pass its encoder: model.get_encoder()."
    if family.embedding is not None and not isinstance(find(base, family.embedding), nn.Module):
        yield f"{row} embedding={family.embedding!r}, and {type(base).__name__} has no module there."
    for block in blocks:
        if other_mixer(family, block) is not None:
            continue
        paths = {"output": family.output}
        if family.value is not None:
            paths["value"] = family.value
        for field, path in paths.items():
            layer = find(block, path)
            is_bare = isinstance(layer, nn.Parameter) and field == "output" and family.watch_output is not None
            if not is_bare and not _is_linear(layer):
                yield f"{row} {field}={path!r}, and {type(block).__name__} has no linear layer there."
    if family.splits and family.instead is not None:
        yield f"{row} instead={family.instead!r} and splits=True, and blocks without softmax attention do not split."
    if family.positions and "position_ids" not in inspect.signature(stack.forward).parameters:
        yield f"{row} positions=True, and its forward takes no position_ids."


def _is_linear(layer: object) -> bool:
    weight = getattr(layer, "weight", None)
    has_matrix = hasattr(layer, "in_features") or (weight is not None and weight.ndim == 2)
    return isinstance(layer, nn.Module) and has_matrix and not isinstance(layer, nn.Embedding)


def stack_of(family: Family, model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model that is read: the model itself, or where the row says so one of its stacks."""
    stack = None if family.stack is None else getattr(model.base_model, family.stack, None)
    return model if stack is None else stack


def has_decoder(family: Family, model: PreTrainedModel) -> bool:
    """Whether a model has the decoder that its row names; a checkpoint may be of the encoder alone."""
    return family.decoder is not None and bool(find_all(model.base_model, family.decoder["cross"].blocks))


def other_mixer(family: Family, block: nn.Module) -> nn.Module | None:
    """Return what a block has in the place of softmax attention; None: it attends."""
    mixer = None if family.instead is None else getattr(block, family.instead, None)
    return mixer if isinstance(mixer, nn.Module) else None


def find_all(root: nn.Module, path: str) -> list[HubModule]:
    """Return the parts at a dotted path in which `*` stands for every entry of a list; [] where there is nothing.

    Of several paths (`a.b|c.d`), the first that leads anywhere counts.
    """
    path, _, alternatives = path.partition("|")
    modules: list[HubModule] = [root]
    for name in path.split("."):
        if name == "*":
            modules = [child for module in modules for child in module.children()]
        else:
            modules = [getattr(module, name) for module in modules if hasattr(module, name)]
    return find_all(root, alternatives) if alternatives and not modules else modules


def find(root: nn.Module, path: str) -> HubModule:
    """Return the module or parameter at a dotted path; None if there is nothing."""
    return next(iter(find_all(root, path)), None)


def output_projection(family: Family, block: nn.Module, heads: int, dtype: torch.dtype) -> Float[Tensor, "head d_v d"]:
    """Return H of Eq. 2 for every head of a block: its slice of the output projection (a packed one in `dtype`)."""
    projection = find(block, family.output)
    if isinstance(projection, nn.Parameter):
        path, _, name = family.output.rpartition(".")
        return weight_of(find(block, path) if path else block, name).detach().permute(1, 2, 0)
    return linear_weight(projection, dtype).unflatten(0, (heads, -1))


def output_size(family: Family, block: nn.Module) -> tuple[int, int]:
    """Return how many numbers a block's output projection takes, of all heads together, and how many it makes."""
    projection = find(block, family.output)
    if isinstance(projection, nn.Parameter):
        return projection.shape[1:].numel(), projection.shape[0]
    return linear_size(projection)


def value_part(
    family: Family, output: Float[Tensor, "*rest made"], kv_heads: int, d_v: int
) -> Float[Tensor, "*rest kv d"]:
    """Return the values of every key-value head from what the value layer makes."""
    if family.interleaved:
        return output.unflatten(-1, (kv_heads, -1, d_v)).select(-2, -1)
    return output[..., -kv_heads * d_v :].unflatten(-1, (kv_heads, d_v))


def value_bias(family: Family, block: nn.Module, kv_heads: int, d_v: int) -> Float[Tensor, "kv_head d_v"] | None:
    """Return the bias that is in every value of a head, or None if there is none."""
    if family.value is None:
        return None
    bias = linear_bias(find(block, family.value))
    return None if bias is None else value_part(family, bias, kv_heads, d_v)
