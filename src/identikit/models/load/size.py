"""How large a checkpoint is before it is loaded: from its config.json and the headers of its weights alone."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_safetensors_metadata
from torch import nn
from transformers import AutoModel

from identikit.errors import ModelError
from identikit.models import families
from identikit.models.load.checkpoint import (
    Checkpoint,
    StoredWeight,
    check_depth,
    read_config,
    stored_weights,
    weight_files,
)
from identikit.models.load.load import class_for, one_line_errors, quiet_libraries, resolve_source
from identikit.models.table import Family

_BITS = {"F64": 64, "F32": 32, "I64": 64, "I32": 32, "F8_E4M3": 8, "F8_E5M2": 8, "I8": 8, "U8": 8, "BOOL": 8}


@dataclass(frozen=True)
class Sizes:
    """What is known of a model before it is loaded: as much of `Model` as estimates of time and memory ask for.

    `blocks` are its modules on the meta device, without numbers; `stored` is the bytes of its weights by number format,
    and `parameters` how many numbers they hold. `limit` is how many tokens it has positions for (None: no limit).
    """

    name: str
    family: Family
    device: torch.device
    dtype: torch.dtype
    blocks: tuple[nn.Module, ...]
    n_heads: int
    n_key_value_heads: int
    d_model: int
    d_value: int
    vocabulary: int
    stored: dict[str, int]
    parameters: int
    limit: int | None

    @property
    def n_layers(self) -> int:
        """How many blocks it has."""
        return len(self.blocks)

    @property
    def d_input(self) -> int:
        """The width of the embedding sum, assumed to be the model's."""
        return self.d_model

    @property
    def causal(self) -> bool:
        """Whether a token sees only those before it."""
        return self.family.causal

    @property
    def weights(self) -> int:
        """The bytes of its weights in memory, in the dtype that it will be loaded in."""
        return self.parameters * self.dtype.itemsize


def sizes_of(model: object, *, dtype: torch.dtype, device: torch.device, revision: str | None = None) -> Sizes:
    """Return the sizes of a folder's or hub id's model, None for the packaged one; no weight is read or fetched."""
    source, name = resolve_source(model)
    checkpoint = Checkpoint(source, revision)
    if checkpoint.gguf is not None:
        raise ModelError(f"Planning {name}: only safetensors say what they hold before they are read. Load it instead.")
    with quiet_libraries(), one_line_errors(source):
        config = read_config(checkpoint)
        stored = _read_headers(checkpoint, config)
        check_depth(config, stored, source)
        model_class = class_for(config)
        with torch.device("meta"):
            full_model = model_class.from_config(config) if model_class is AutoModel else model_class(config)
        _check_sizes(full_model, stored, source)
        family = families.family_of(full_model)
        stack = families.stack_of(family, full_model)
        blocks = tuple(families.find_all(stack.base_model, family.blocks))
        attending = next(block for block in blocks if families.other_mixer(family, block) is None)
        head_outputs, d_model = families.output_size(family, attending)
    stack_config: Any = stack.config if hasattr(stack.config, "num_attention_heads") else stack.config.get_text_config()
    heads = stack_config.num_attention_heads
    by_format: Counter[str] = Counter()
    for weight in stored.values():
        by_format[weight.dtype] += prod(weight.shape) * _BITS.get(weight.dtype, 16) // 8
    return Sizes(
        name=name,
        family=family,
        device=device,
        dtype=dtype,
        blocks=blocks,
        n_heads=heads,
        n_key_value_heads=getattr(stack_config, "num_key_value_heads", None) or heads,
        d_model=d_model,
        d_value=head_outputs // heads,
        vocabulary=getattr(stack_config, "vocab_size", 0),
        stored=dict(by_format),
        parameters=sum(parameter.numel() for parameter in full_model.parameters()),
        limit=family.limit(full_model.config),
    )


def _check_sizes(model: nn.Module, stored: Mapping[str, StoredWeight], source: str) -> None:
    """Refuse a configuration that makes weights of other sizes than those that are stored."""
    for name, weight in model.named_parameters():
        if name in stored and stored[name].dtype.startswith(("F", "BF")) and prod(stored[name].shape) != weight.numel():
            raise ModelError(
                f"Loading {source}: by config.json {name!r} has the shape {tuple(weight.shape)}, and the checkpoint's "
                f"has {stored[name].shape}. Repair config.json."
            )


def _read_headers(checkpoint: Checkpoint, config: Any) -> dict[str, StoredWeight]:
    """Return what the weight files say they hold; from a hub, only the beginning of each file is fetched."""
    if Path(checkpoint.source).is_dir():
        return stored_weights(weight_files(checkpoint, config), checkpoint.source)
    metadata = get_safetensors_metadata(checkpoint.source, revision=checkpoint.revision)
    return {
        name: StoredWeight(Path(file), entry.dtype, tuple(entry.shape))
        for file, content in metadata.files_metadata.items()
        for name, entry in content.tensors.items()
    }
