"""What tells one model from another: all that decides what it computes, as one SHA-256.

That is every weight and buffer, the configuration, the modules with what is set on them beside their weights (numbers,
functions, hooks, small buffers, adapters), and the tokenizer. What is set on a module is put into words that are the
same in every process and on every device: a function is known by its name, its code and the plain values it closes
over; what else it may look up when it runs is not.

Each tensor is summed where it lives: its bits, in words of 32, each times an odd 64-bit number for its index in a row,
modulo 2^64. So a change of any entry changes the sum of its row, on every device alike, and no tensor is copied.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils.module_tracker import ModuleTracker
from transformers import PreTrainedModel

from identikit.models.load.weights import all_weights, describe_adapters, describe_packing, device_of
from identikit.shapes import Int, Tensor

_ROW = 1 << 18  # how many words are added up to one sum
_ROWS = 16  # how many rows are multiplied at once: 32 MiB of products; on a CPU one row, which stays in its cache
# Entries of a configuration that do not change what is computed, nor do those that begin with an underscore.
_IGNORED = frozenset(
    ["architectures", "dtype", "gradient_checkpointing", "id2label", "is_encoder_decoder", "label2id", "name_or_path",
     "output_attentions", "output_hidden_states", "problem_type", "quantization_config", "return_dict", "torch_dtype",
     "transformers_version", "use_cache"]
)  # fmt: skip
# Numbers on a module that do not change what is computed, or that a model sets itself while it runs.
_IGNORED_ON_MODULES = frozenset(
    ["training", "gradient_checkpointing", "max_seq_len_cached", "original_max_seq_len", "rope_deltas"]
)
ON_EVERY_MODULE = (torch_modules._global_forward_pre_hooks, torch_modules._global_forward_hooks)
_GRADIENT_HOOK = "make_inputs_require_grads"  # the hook's name in transformers
_REBUILT_TABLES = ("dynamic", "longrope")  # kinds of rotary embedding that make their table anew for a long text
_MOVING_METHODS = ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa")
_SMALL = 4096  # entries of an unsaved buffer; larger tables are made from the configuration


class Identity(NamedTuple):
    """The SHA-256 of a `model` with its `reader` (such as a tokenizer), and that of the reader alone."""

    model: str
    reader: str


def identity_of(model: PreTrainedModel, reader: object) -> Identity:
    """Return the fingerprints of a model and of its tokenizer or processor, as they are now."""
    reader_digest = hashlib.sha256(_reader_content(reader).encode()).hexdigest()
    settings = json.dumps(_relevant_settings(model.config.to_dict()), sort_keys=True, default=str)
    modules = []
    unsaved = set()
    for path, module in model.named_modules():
        modules.append(f"{path} {type(module).__qualname__} {module_settings(module)}")  # with its unsaved buffers
        unsaved |= {f"{path}.{name}".lstrip(".") for name in module._non_persistent_buffers_set}
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name not in unsaved]
    tensors = sorted([*all_weights(model), *buffers], key=lambda item: item[0])
    shapes = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
    states = [describe_adapters(model), *filter(None, [describe_packing(model)])]
    digest = hashlib.sha256("\n".join([reader_digest, settings, *states, *modules, *shapes]).encode())
    device = device_of(model)
    rows = 1 if device.type == "cpu" else _ROWS
    buffer = torch.empty(rows, _ROW, dtype=torch.long, device=device)
    sums = torch.cat([_row_sums(tensor.to(device), buffer) for _, tensor in tensors])
    digest.update(sums.cpu().numpy().tobytes())
    return Identity(digest.hexdigest(), reader_digest)


def _row_sums(tensor: Tensor, products: Int[Tensor, "rows word"]) -> Int[Tensor, "row"]:
    """Return a 64-bit sum for every row of a tensor's bits; `products` is a buffer to multiply in."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    flat = flat if flat.storage_offset() % 4 == 0 else flat.clone()
    words = flat.view(torch.int32) if len(flat) % 4 == 0 else flat
    factors = _factors(words.device)
    remainder = len(words) % _ROW
    rows = words[: len(words) - remainder].view(-1, _ROW)
    sums = [
        torch.mul(chunk, factors, out=products[: len(chunk)]).sum(1)
        for chunk in (rows.split(len(products)) if len(rows) else ())
    ]
    last = torch.mul(words[len(words) - remainder :], factors[:remainder], out=products[0, :remainder])
    return torch.cat([*sums, last.sum()[None]])


@cache
def _factors(device: torch.device) -> Int[Tensor, "word"]:
    """Return an odd 64-bit number for every index in a row (as splitmix64 mixes them), the same on every device."""
    mixed = torch.arange(1, _ROW + 1, device=device) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    return (mixed ^ (mixed >> 31)) | 1


def _relevant_settings(settings: object) -> Any:
    """Return the entries of a configuration that change what is computed, also of the configurations inside it."""
    if not isinstance(settings, dict):
        return settings
    relevant = {}
    for key, value in settings.items():
        if str(key) not in _IGNORED and not str(key).startswith("_"):
            relevant[str(key)] = _relevant_settings(value)
    return relevant


def _reader_content(reader: Any) -> str:
    """Return the content of a tokenizer, image processor or feature extractor, without where it came from."""
    backend = getattr(reader, "backend_tokenizer", None)
    if backend is not None:  # what comes before is the padding and cutting of the last text
        return backend.to_str().partition('"added_tokens":')[2]
    if hasattr(reader, "to_dict"):
        return json.dumps(_relevant_settings(reader.to_dict()), sort_keys=True, default=str)
    vocabulary = reader.get_vocab() if hasattr(reader, "get_vocab") else {}
    options = getattr(reader, "init_kwargs", {})
    settings = _relevant_settings({name: value for name, value in options.items() if not name.endswith("_file")})
    return json.dumps([type(reader).__qualname__, vocabulary, settings], sort_keys=True, default=str)


# What is set on a module


def module_settings(module: nn.Module) -> str:
    """Describe what is set on a module beside its weights."""
    return "; ".join([*_number_settings(module), *_function_settings(module), *_unsaved_buffers(module)])


def _number_settings(module: nn.Module) -> Iterator[str]:
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or name in _IGNORED_ON_MODULES:
            continue
        if isinstance(value, int | float):
            yield f"{name}={float(value)!r}"
        elif isinstance(value, Tensor):  # one that is neither a parameter nor a buffer
            yield f"{name}={_describe_value(value)}"
        elif isinstance(value, dict):  # such as the scales of adapters
            entries = sorted((str(key), entry) for key, entry in value.items() if isinstance(entry, float))
            yield from (f"{name}.{key}={entry!r}" for key, entry in entries)


def _function_settings(module: nn.Module) -> Iterator[str]:
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or isinstance(value, nn.Module | type | Tensor) or not callable(value):
            continue
        if name in _MOVING_METHODS and "_hf_hook" in vars(module):
            continue  # accelerate's, which only warn
        if name == "forward":
            value = getattr(value, "_torchdynamo_orig_callable", value)
            if "_hf_hook" in vars(module) or value == type(module).forward.__get__(module):
                continue  # accelerate's, which only moves numbers to their device, or the class's own
        yield f"{name}={_describe_function(value)}"
    for hooks in (module._forward_pre_hooks, module._forward_hooks, *ON_EVERY_MODULE):
        for hook in hooks.values():
            if not changes_nothing(hook) and not captures_hidden_vectors(hook):
                yield f"hook={_describe_function(hook)}"


def _unsaved_buffers(module: nn.Module) -> Iterator[str]:
    """Yield what small buffers hold that are not saved, coarsely: a GPU makes the last bits of them differently."""
    if any(kind in str(getattr(module, "rope_type", "")) for kind in _REBUILT_TABLES):
        return
    for name in sorted(module._non_persistent_buffers_set):
        buffer = module._buffers.get(name)
        if buffer is not None and buffer.numel() <= _SMALL:
            coarse = buffer.to(torch.bfloat16).float() if buffer.is_floating_point() else buffer
            yield f"{name}={_describe_value(coarse)}"


def changes_nothing(hook: object) -> bool:
    """Whether a hook changes no number: it asks for gradients, or says which module runs (as FlopCounterMode)."""
    tracks = isinstance(getattr(hook, "__self__", None), ModuleTracker)
    return tracks or getattr(hook, "__name__", "") == _GRADIENT_HOOK


def captures_hidden_vectors(hook: object) -> bool:
    """Whether a hook is one of transformers' own, with which a model returns the hidden vectors of its parts."""
    return getattr(hook, "__qualname__", "").endswith(".output_capturing_hook")


def _describe_function(function: Any) -> str:
    """Return a function's name, code and plain values it closes over; of another callable, its class."""
    if isinstance(function, partial):
        arguments = [*function.args, *function.keywords.values()]
        return f"{_describe_function(function.func)}({', '.join(map(_describe_value, arguments))})"
    function = getattr(function, "__func__", function)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    if code is None:
        return name
    values = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a cell that is empty yet
            values.append(cell.cell_contents)
    values += function.__defaults__ or ()
    return f"{name} {_digest(_describe_code(code))} {list(map(_describe_value, values))}"


def _describe_code(code: CodeType) -> str:
    constants = [_describe_code(entry) if isinstance(entry, CodeType) else repr(entry) for entry in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _describe_value(value: object) -> str:
    """Describe a plain value, or the content of a tensor; of any other object, its class."""
    if isinstance(value, Tensor):
        return _digest(repr(value.tolist())) if value.numel() <= _SMALL else str(tuple(value.shape))
    if isinstance(value, int | float | str | None):
        return repr(value)
    return type(value).__qualname__


def _digest(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()[:16]
