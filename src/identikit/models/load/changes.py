"""What is set on a module beside its weights, and decides what it computes: numbers, functions, hooks, small buffers.

It is put into words that are the same in every process and on every device. A function is known by its name, its code
and the plain values it closes over; what else it may look up when it runs is not.
"""

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils.module_tracker import ModuleTracker

from identikit.shapes import Tensor

# Numbers that do not change what is computed, or that a model sets itself while it runs.
_ASIDE = frozenset(["training", "gradient_checkpointing", "max_seq_len_cached", "original_max_seq_len"])
ON_EVERY_MODULE = (torch_modules._global_forward_pre_hooks, torch_modules._global_forward_hooks)
_ASKS_FOR_GRADIENTS = "make_inputs_require_grads"  # the hook's name in transformers
_SELF_SET = ("dynamic", "longrope")  # kinds of rotary embedding that make their table anew for a long text
_SMALL = 4096  # entries of an unsaved buffer; larger tables are made from the configuration


def changes(module: nn.Module) -> str:
    """Return what is set on a module beside its weights, in words."""
    return "; ".join([*_numbers(module), *_functions(module), *_hooks(module), *_buffers(module)])


def _numbers(module: nn.Module) -> Iterator[str]:
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or name in _ASIDE:
            continue
        if isinstance(value, int | float):
            yield f"{name}={float(value)!r}"
        elif isinstance(value, Tensor):  # one that is neither a parameter nor a buffer
            yield f"{name}={_value(value)}"
        elif isinstance(value, dict):  # such as the scales of adapters
            yield from (f"{name}.{key}={entry!r}" for key, entry in value.items() if isinstance(entry, float))


def _functions(module: nn.Module) -> Iterator[str]:
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or isinstance(value, nn.Module | type | Tensor) or not callable(value):
            continue
        if name == "forward":
            value = getattr(value, "_torchdynamo_orig_callable", value)
            if "_hf_hook" in vars(module) or value == type(module).forward.__get__(module):
                continue  # accelerate's, which only moves numbers to their device, or the class's own
        yield f"{name}={_described(value)}"


def _hooks(module: nn.Module) -> Iterator[str]:
    for hooks in (module._forward_pre_hooks, module._forward_hooks, *ON_EVERY_MODULE):
        yield from (f"hook={_described(hook)}" for hook in hooks.values() if not only_watches(hook))


def only_watches(hook: Any) -> bool:
    """Tell whether a hook changes no number: it asks for gradients, or says which module runs (as FlopCounterMode)."""
    if isinstance(getattr(hook, "__self__", None), ModuleTracker):
        return True
    return getattr(hook, "__name__", "") == _ASKS_FOR_GRADIENTS


def _buffers(module: nn.Module) -> Iterator[str]:
    """Yield what small buffers hold that are not saved, coarsely: a GPU makes the last bits of them differently."""
    if any(kind in str(getattr(module, "rope_type", "")) for kind in _SELF_SET):
        return
    for name in sorted(module._non_persistent_buffers_set):
        buffer = module._buffers.get(name)
        if buffer is not None and buffer.numel() <= _SMALL:
            coarse = buffer.to(torch.bfloat16).float() if buffer.is_floating_point() else buffer
            yield f"{name}={_digest(repr(coarse.tolist()))}"


def _described(function: Any) -> str:
    """Return a function's name, code and plain values it closes over; of another callable, its class."""
    if isinstance(function, partial):
        given = [*function.args, *function.keywords.values()]
        return f"{_described(function.func)}({', '.join(map(_value, given))})"
    function = getattr(function, "__func__", function)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    if code is None:
        return name
    values = [*_closed_over(function), *(function.__defaults__ or ())]
    return f"{name} {_digest(_code(code))} {list(map(_value, values))}"


def _closed_over(function: Any) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a cell that is empty yet
            yield cell.cell_contents


def _code(code: CodeType) -> str:
    constants = [_code(entry) if isinstance(entry, CodeType) else repr(entry) for entry in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _value(value: Any) -> str:
    """Return a plain value or the content of a tensor in words; of any other object, its class."""
    if isinstance(value, Tensor):
        return _digest(repr(value.tolist())) if value.numel() <= _SMALL else str(tuple(value.shape))
    if isinstance(value, int | float | str | None):
        return repr(value)
    return type(value).__qualname__


def _digest(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()[:16]
