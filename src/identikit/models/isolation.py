"""What surrounds a call must not change its numbers: other threads, autocast, inference mode, compiled modules.

One thread at a time reads a model, because reading sets hooks and configurations on it (`exclusive_access`). What torch
keeps for a thread (autocast, inference mode, a default device, gradients, modes that see every call) is set aside
meanwhile and given back at the end (`standard_torch_state`). A user's own forward pass in another thread cannot be held
off: while a model is read, nobody else may run it.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from identikit.errors import IdentikitError, InputError, ModelError, reason_of
from identikit.models.load.fingerprint import ON_EVERY_MODULE, captures_hidden_vectors, changes_nothing, module_settings
from identikit.models.machine import product_precision
from identikit.models.taps.switch import IMPLEMENTATION, configs_of, restored_configs, set_temporarily

Structure = tuple[object, ...]
_CAPTURING = "_output_capturing_hooks_installed"  # where transformers notes that its hooks are on a model
_LAST_IMAGE = "rope_deltas"  # what a model keeps of the last image that it read, for the next run
_AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")


@dataclass
class _ModelLock:
    lock: Any = field(default_factory=threading.RLock)
    depth: int = 0


_locks: WeakKeyDictionary[nn.Module, _ModelLock] = WeakKeyDictionary()
_locks_lock = threading.Lock()
_thread = threading.local()


@contextmanager
def exclusive_access(module: nn.Module) -> Iterator[bool]:
    """Wait until no other thread reads the model of this module; yield whether this is this thread's outermost use."""
    with _locks_lock:
        state = _locks.setdefault(module, _ModelLock())
    with state.lock:
        state.depth += 1
        try:
            yield state.depth == 1
        finally:
            state.depth -= 1


@contextmanager
def standard_torch_state() -> Iterator[None]:
    """Compute in the dtype of the numbers, without gradients, on the devices where they are; also a decorator.

    What torch keeps for a thread is set aside, the hooks of saved tensors too, which derivatives cannot have.
    """
    if getattr(_thread, "standard", False):
        yield
        return
    refuse_transforms()
    grad_enabled = torch.is_grad_enabled()
    core: Any = getattr(torch._C, "_autograd")  # noqa: B009 - torch does not declare it
    top_hooks = getattr(core, "_top_saved_tensors_default_hooks", lambda _: None)  # not in every version of torch
    try:
        with ExitStack() as stack:
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))  # what is made there has no derivative
            for kind in _AUTOCAST_DEVICES:
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(_disable_current_modes())  # such as FlopCounterMode, which lacks some derivatives
            while torch._C._len_torch_function_stack():
                stack.callback(_push_mode, _pop_mode())
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            while (hooks := top_hooks(True)) is not None:
                stack.callback(core._push_saved_tensors_default_hooks, *hooks)
                core._pop_saved_tensors_default_hooks()
            stack.enter_context(torch.no_grad())
            stack.enter_context(product_precision("full"))
            _thread.standard = True
            yield
    finally:  # also where Ctrl-C came between two steps of setting aside or giving back
        _thread.standard = False
        torch.set_grad_enabled(grad_enabled)


def refuse_transforms() -> None:
    """Refuse to read a model inside torch.func or a trace, where tensors are not plain numbers."""
    core: Any = torch._C
    if core._functorch.peek_interpreter_stack() is not None:
        where = "inside a torch.func transform (vmap, grad, jvp, …)"
    elif core._is_tracing():
        where = "inside torch.jit.trace"
    elif core._get_dispatch_mode(core._TorchDispatchModeKey.FAKE) is not None:
        where = "inside FakeTensorMode"
    elif core._get_dispatch_mode(core._TorchDispatchModeKey.PROXY) is not None:
        where = "inside make_fx"
    else:
        return
    raise InputError(f"Reading a model {where}: tensors are not plain numbers there. Call identikit outside of it.")


def unwrap_module(model: object) -> Any:
    """Return the model under torch.compile's wrapper or a data-parallel one; any other object as it is."""
    while True:
        if isinstance(model, nn.DataParallel | DistributedDataParallel):
            model = model.module
        elif isinstance(model, nn.Module) and "_orig_mod" in model._modules:
            model = model._modules["_orig_mod"]
        else:
            break
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            f"Loading {type(model).__name__}: TorchScript has fixed its attention, so it cannot be read. Load the "
            "transformers model that it was made from."
        )
    return model


@contextmanager
def clear_model_errors(name: str, inputs: str, advice: str) -> Iterator[None]:
    """Report a model's failure on some inputs in one line: its modules are the user's, and raise what they like."""
    try:
        yield
    except IdentikitError:
        raise
    except Exception as error:
        raise ModelError(
            f"Reading {name}: it failed on {inputs} ({type(error).__name__}: {reason_of(error)}). {advice}"
        ) from error


@contextmanager
def standard_model_state(model: PreTrainedModel) -> Iterator[None]:
    """Run a model as it is written: in evaluation mode, not compiled, with plain outputs and experts one by one.

    Hooks that change no number, those on gradients and those that only watch, are left out meanwhile.
    """
    with ExitStack() as stack:
        before = [(module, _CAPTURING in vars(module), set(module._forward_hooks)) for module in model.modules()]
        stack.callback(_remove_capturing_hooks, before)
        for module in model.modules():
            written = getattr(vars(module).get("forward"), "_torchdynamo_orig_callable", None)
            if written is not None:  # compiled code may leave out hooks and the tap
                set_temporarily(stack, module, "forward", written)
            if module._compiled_call_impl is not None:
                set_temporarily(stack, module, "_compiled_call_impl", None)
            set_temporarily(stack, module, "training", False)
            if _LAST_IMAGE in vars(module):
                set_temporarily(stack, module, _LAST_IMAGE, None)
            for name in ("_backward_hooks", "_backward_pre_hooks"):
                if getattr(module, name):  # derivatives cannot have them
                    set_temporarily(stack, module, name, OrderedDict())
        for hooks in (*(module._forward_hooks for module in model.modules()), *ON_EVERY_MODULE):
            passive = [key for key, hook in hooks.items() if changes_nothing(hook)]
            if passive:
                stack.callback(hooks.update, dict(hooks))
                stack.callback(hooks.clear)  # before: hooks get their order back, which is part of `structure_of`
                for key in passive:
                    del hooks[key]
        settings = {"return_dict": True, "_output_attentions": False, "output_hidden_states": False}
        for config in stack.enter_context(restored_configs(model, *settings, "_experts_implementation_internal")):
            for name, value in settings.items():
                if hasattr(config, name):
                    setattr(config, name, value)
        model.set_experts_implementation("eager")  # fused products have no derivative forward, and none in float64
        yield


def _remove_capturing_hooks(before: Iterable[tuple[nn.Module, bool, set[int]]]) -> None:
    """Remove the hooks with which transformers captures hidden vectors, where a run has put them on modules.

    `before` says of each module whether transformers had noted such hooks on it, and which hooks it had.
    """
    for module, noted, keys in before:
        if not noted:
            vars(module).pop(_CAPTURING, None)
        for key, hook in list(module._forward_hooks.items()):
            if captures_hidden_vectors(hook) and key not in keys:
                del module._forward_hooks[key]


def structure_of(model: nn.Module) -> Structure:
    """Return what a model is made of, but for its weights; where it changes, the model is proved anew.

    These are its modules, what is set on them, their hooks, methods and attention functions, its dtypes and devices.
    """
    modules = tuple(
        (
            id(module),
            *module._forward_pre_hooks,
            *module._forward_hooks,
            id(vars(module).get("forward")),
            id(type(module).forward),
            module_settings(module),
        )
        for module in model.modules()
    )
    names = [getattr(config, IMPLEMENTATION, None) for config in configs_of(model)]
    functions = tuple((str(name), id(ALL_ATTENTION_FUNCTIONS.get(name))) for name in names)
    return modules, functions, tuple((weight.dtype, weight.device) for weight in model.parameters())
