"""Whether what transformers read is what a checkpoint's files mean.

transformers drops weights that a model has no place for, makes up those that are missing, and casts integers. Here each
of these is refused, by the name of the first weight.
"""

from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from identikit.errors import ModelError
from identikit.models.families import find_all, stack_of
from identikit.models.load.files import StoredWeight
from identikit.models.table import FAMILIES

_PLAIN = ("F32", "F64", "F16", "BF16")
# Tables that older versions saved and newer ones make from the configuration.
_TABLES = ("position_ids", "token_type_ids", "inv_freq", "masked_bias", "relative_position_index", "version")
_UNUSED = ("pooler", "mtp")  # parts of a stack that nothing read here goes through


def check_read(
    model: PreTrainedModel, report: Mapping[str, Any], stored: Mapping[str, StoredWeight], source: str, *, plain: bool
) -> None:
    """Refuse a checkpoint of which a part was left out, made up or misread; `plain`: its weights are not quantised."""
    for key, shape, expected in sorted(report["mismatched_keys"]):
        raise ModelError(
            f"Loading {source}: the weight {key!r} is of shape {list(shape)}, and with its config.json it has to be "
            f"{list(expected)}. Load the checkpoint with the config.json it was saved with."
        )
    _refuse_missing(model, report["missing_keys"], source)
    if plain:
        _refuse_numbers(model, report["unexpected_keys"], stored, source)
    path = _path_read(model)
    for key in sorted(report["unexpected_keys"]):
        if _inside(model, path, key) and not _is_table(key, stored.get(key)):
            raise ModelError(
                f"Loading {source}: the checkpoint holds the weight {key!r}, which {type(model).__name__} with its "
                "config.json has no place for. Left out, it would make this another model, so it is refused; load it "
                "with the config.json (and the code) it was saved with."
            )


def _refuse_missing(model: PreTrainedModel, keys: Iterable[str], source: str) -> None:
    """Refuse weights that would be random; a pooler that nothing goes through is taken off instead."""
    missing = []
    for key in sorted(keys):
        path, pooler, _ = key.partition("pooler.")
        if pooler and model.base_model is model:
            model.get_submodule(path.rstrip(".")).register_module("pooler", None)
        else:
            missing.append(key)
    if missing:
        raise ModelError(
            f"Loading {source}: the checkpoint lacks {len(missing)} weights of {type(model).__name__} (the first is "
            f"{missing[0]}); they would be random. Load a complete checkpoint."
        )


def _refuse_numbers(
    model: PreTrainedModel, unused: Iterable[str], stored: Mapping[str, StoredWeight], source: str
) -> None:
    """Refuse weights that are not plain floating-point numbers: they would be cast without their scales."""
    whole = tuple(name for name, buffer in model.named_buffers() if not buffer.is_floating_point())
    for name, entry in sorted(stored.items()):
        meant = name in unused or _is_table(name, entry) or name.endswith(whole)
        if entry.dtype not in _PLAIN and not meant:
            raise ModelError(
                f"Loading {source}: the weight {name!r} is stored as {entry.dtype}, and its config.json does not say "
                "how it was quantised, so its value is unknown. Name the checkpoint it was made from."
            )


def _is_table(name: str, stored: StoredWeight | None) -> bool:
    """Whether a weight is a table that newer versions of transformers make themselves, such as a causal mask."""
    mask = name.endswith((".attn.bias", ".attention.bias")) and stored is not None and len(stored.shape) == 4
    return mask or name.rpartition(".")[2] in _TABLES


def _path_read(model: PreTrainedModel) -> list[str]:
    """Return the path to the part of a model that is read: the smallest that holds its blocks and embeddings."""
    family = FAMILIES.get(model.config.model_type)
    if family is None:
        return []
    stack = stack_of(family, model)
    wanted: list[nn.Module] = [stack.base_model]
    if family.features is None:
        blocks = find_all(stack.base_model, family.blocks)
        wanted = [*blocks, stack.get_input_embeddings()] if blocks else []
    ids = set(map(id, wanted))
    paths = [name.split(".") for name, module in model.named_modules() if name and id(module) in ids]
    return [names[0] for names in takewhile(lambda names: len({*names}) == 1, zip(*paths, strict=False))]


def _inside(model: PreTrainedModel, read: list[str], key: str) -> bool:
    """Whether a weight that the model has no place for belongs to the part of it that is read.

    `read` is the path to that part. Files of a bare model spell names without the base model's prefix, and so do heads:
    there, only what begins like a module of the part belongs to it.
    """
    prefix = f"{model.base_model_prefix}."
    root = model.get_submodule(".".join(read))
    path = key.removeprefix(prefix).split(".")
    read = read[1:] if read[:1] == [model.base_model_prefix] else read
    depth = len(read)
    if path[:depth] != read or len(path) == depth or path[depth].startswith(_UNUSED):
        return False
    children = dict([*root.named_children(), *root.named_parameters(recurse=False)])
    return key.startswith(prefix) or path[depth] in children
