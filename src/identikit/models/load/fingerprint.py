"""What tells one model from another: all that decides what it computes, as one SHA-256.

That is every weight and buffer, the configuration, the modules with the numbers and functions set on them, their hooks
and adapters, and the tokenizer.

Each tensor is summed where it lives: its bits, in words of 32, each times an odd 64-bit number of its place in a row,
modulo 2^64. So a change of any entry changes the sum of its row, on every device alike, and no tensor is copied.
"""

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from identikit.models.load.changes import changes
from identikit.models.load.weights import adapter_state
from identikit.shapes import Int, Tensor

_ROW = 1 << 18  # how many words are added up to one sum
_AT_ONCE = 16  # how many rows are multiplied at once: 32 MiB of products; on a CPU one row, which stays in its cache
# Entries of a configuration that do not change what is computed; those that begin with an underscore do not either.
_ASIDE = frozenset(
    ["architectures", "dtype", "gradient_checkpointing", "id2label", "is_encoder_decoder", "label2id", "name_or_path",
     "output_attentions", "output_hidden_states", "problem_type", "quantization_config", "return_dict", "torch_dtype",
     "transformers_version", "use_cache"]
)  # fmt: skip


class Identity(NamedTuple):
    """The SHA-256 of a `model` with its `reader` (such as a tokenizer), and that of the reader alone."""

    model: str
    reader: str


def identity_of(model: PreTrainedModel, reader: Any) -> Identity:
    """Return the fingerprints of a model and of what reads for it, as they are now."""
    read = hashlib.sha256(_reader_content(reader).encode()).hexdigest()
    kinds = [f"{name} {type(module).__qualname__} {changes(module)}" for name, module in model.named_modules()]
    settings = json.dumps(_computed(model.config.to_dict()), sort_keys=True, default=str)
    tensors = sorted(_tensors(model), key=lambda named: named[0])
    shapes = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
    digest = hashlib.sha256("\n".join([read, settings, adapter_state(model), *kinds, *shapes]).encode())
    room = _room(model.device)
    digest.update(torch.cat([_sums(tensor, room) for _, tensor in tensors]).cpu().numpy().tobytes())
    return Identity(digest.hexdigest(), read)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter once, and every buffer that is saved; `changes` has the others."""
    yield from model.named_parameters()
    unsaved = {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name not in unsaved)


def _sums(tensor: Tensor, products: Int[Tensor, "rows place"]) -> Int[Tensor, "row"]:
    """Return a 64-bit sum for every row of a tensor's bits; `products` is room to multiply in."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    flat = flat if flat.storage_offset() % 4 == 0 else flat.clone()
    words = flat.view(torch.int32) if len(flat) % 4 == 0 else flat
    factors = _factors(words.device)
    rest = len(words) % _ROW
    whole = words[: len(words) - rest].view(-1, _ROW)
    last = words[len(words) - rest :]
    parts = whole.split(len(products)) if len(whole) else ()
    sums = [torch.mul(rows, factors, out=products[: len(rows)]).sum(1) for rows in parts]
    return torch.cat([*sums, torch.mul(last, factors[:rest], out=products[0, :rest]).sum()[None]])


def _room(device: torch.device) -> Int[Tensor, "rows place"]:
    return torch.empty(1 if device.type == "cpu" else _AT_ONCE, _ROW, dtype=torch.long, device=device)


@cache
def _factors(device: torch.device) -> Int[Tensor, "place"]:
    """Return an odd 64-bit number for every place in a row (as splitmix64 mixes them), the same on every device."""
    mixed = torch.arange(1, _ROW + 1, device=device) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    return (mixed ^ (mixed >> 31)) | 1


def _computed(settings: Any) -> Any:
    """Return the entries of a configuration that change what is computed, also of the configurations inside it."""
    if isinstance(settings, dict):
        kept = ((str(key), value) for key, value in settings.items())
        return {key: _computed(value) for key, value in kept if key not in _ASIDE and not key.startswith("_")}
    return settings


def _reader_content(reader: Any) -> str:
    """Return the content of a tokenizer, image processor or feature extractor, without where it came from."""
    backend = getattr(reader, "backend_tokenizer", None)
    if backend is not None:  # what comes before is the padding and cutting of the last text
        return backend.to_str().partition('"added_tokens":')[2]
    if hasattr(reader, "to_dict"):
        return json.dumps(_computed(reader.to_dict()), sort_keys=True, default=str)
    vocabulary = reader.get_vocab() if hasattr(reader, "get_vocab") else {}
    settings = _computed({k: v for k, v in getattr(reader, "init_kwargs", {}).items() if not k.endswith("_file")})
    return json.dumps([type(reader).__qualname__, vocabulary, settings], sort_keys=True, default=str)
