"""A model's weights: plain numbers or packed, in memory or offloaded by accelerate, under an adapter or not.

What transformers itself turns into plain weights is read that way; packed ones are known by their layers' outputs
(`linear.py`). A weight is never cast without its scale, and never silently missing.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from identikit.errors import ModelError, reason_of
from identikit.shapes import Bool, Tensor

PLAIN = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_PLAIN_MODULES = ("torch.nn.", "transformers.pytorch_utils")  # their modules read only plain weights
_DEQUANTISING_CONFIGS = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}  # needs no kernel there


# Packed weights


def dequantise_options(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the arguments with which transformers reads a checkpoint's weights as plain numbers, where it can."""
    method = _packing_settings(config).get("quant_method")
    if method not in _DEQUANTISING_CONFIGS:
        return {}
    return {"quantization_config": getattr(transformers, _DEQUANTISING_CONFIGS[method])(dequantize=True)}


def packing_method(config: PreTrainedConfig) -> str:
    """Return what a configuration says its weights are packed by, such as 'bitsandbytes'; '' if they are not."""
    return _packing_settings(config).get("quant_method", "")


def _packing_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Return what a configuration says about packed weights, with `quant_method` as a plain name; {} if nothing."""
    text = config.get_text_config()
    stated = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if stated is None:
        return {}
    settings = stated if isinstance(stated, dict) else stated.to_dict()
    method = settings.get("quant_method")
    return settings | {"quant_method": str(getattr(method, "value", method))}


def is_packed(module: nn.Module) -> bool:
    """Whether a module's own weights are codes and scales, which only it can read."""
    if any(weight is not None and not _is_plain(weight) for weight in module._parameters.values()):
        return True
    buffers = (buffer for buffer in module._buffers.values() if buffer is not None)
    return hasattr(module, "in_features") and any(not buffer.is_floating_point() for buffer in buffers)


def _is_plain(weight: Tensor) -> bool:
    return weight.dtype in PLAIN and type(weight.data) is Tensor


@contextmanager
def unpacking_errors(method: str, source: str) -> Iterator[None]:
    """Report in one line that transformers cannot unpack weights, such as for want of a package."""
    try:
        yield
    except (ImportError, ValueError) as error:
        if not method:
            raise
        raise ModelError(
            f"Loading {source}: its weights are packed ({method}), and transformers cannot read them here "
            f"({reason_of(error)}). Install the package that it names (and accelerate), or load the checkpoint it was "
            "made from."
        ) from error


def cast_plain(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert what is plain in a model with packed weights; transformers leaves some of it as it was saved."""
    for module in model.modules():
        if not is_packed(module):
            module._apply(lambda x: x.to(dtype) if x.is_floating_point() else x, recurse=False)


def describe_packing(model: PreTrainedModel) -> str:
    """Return how a model's weights are packed, such as '4-bit weights (bitsandbytes nf4)'; '' if they are plain."""
    kinds = sorted({type(module).__name__ for module in model.modules() if is_packed(module)})
    if not kinds:
        return ""
    settings = _packing_settings(model.config)
    if not settings:
        return f"packed weights ({', '.join(kinds)})"
    bits = settings.get("bits") or next((n for n in (4, 8) if settings.get(f"load_in_{n}bit")), None)
    kind = settings.get("quant_type") or (bits == 4 and settings.get("bnb_4bit_quant_type")) or ""
    kind = kind if isinstance(kind, str) else type(kind).__name__
    if isinstance(settings.get("quant_type"), dict):  # torchao's own, such as Int8WeightOnlyConfig
        kind = settings["quant_type"].get("default", {}).get("_type", "")
    by = " ".join(filter(None, (settings["quant_method"], kind)))
    if bits == 4 and "bnb_4bit_compute_dtype" in settings:
        by += f", computed in {str(settings['bnb_4bit_compute_dtype']).removeprefix('torch.')}"
    return f"{f'{bits}-bit' if bits else 'packed'} weights ({by})"


def check_weights(model: PreTrainedModel, model_name: str, method: str = "") -> None:
    """Refuse a model whose weights are missing, codes that no layer can read, or not packed as its config.json says."""
    if method and not any(map(is_packed, model.modules())):
        raise ModelError(
            f"Loading {model_name}: its config.json says that its weights are packed ({method}), and transformers "
            "reads none of them so. Repair config.json, or install a transformers that knows this."
        )
    for path, module in model.named_modules():
        for name, weight in module._parameters.items():
            if weight is None:
                continue
            key = f"{path}.{name}".lstrip(".")
            if weight.is_meta and (weight_of(module, name).is_meta or "base_layer" in key or is_packed(module)):
                raise ModelError(
                    f"Loading {model_name}: the weight {key!r} is not in memory (it is on the meta device), and no "
                    "hook of accelerate on its own module brings it in plain. Load the whole model on one device, or "
                    "offload it without preload_module_classes and adapters."
                )
            is_codes = not _is_plain(weight) and type(weight.data) is Tensor
            if is_codes and type(module).__module__.startswith(_PLAIN_MODULES):
                kind = str(weight.dtype).removeprefix("torch.")
                raise ModelError(
                    f"Loading {model_name}: the weight {key!r} is quantised ({kind}), and {type(module).__name__} has "
                    "no scale to read it with. Load the checkpoint it was made from."
                )


# Offloaded by accelerate


def weight_of(module: nn.Module, name: str) -> Tensor:
    """Return a weight of a module, from where accelerate keeps it while it is offloaded."""
    tensor: Tensor = getattr(module, name)
    if tensor.is_meta:
        for hook in offload_hooks(module):
            with suppress(KeyError):
                return hook.weights_map[name].detach()
    return tensor


def offload_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks of accelerate that bring a module's own weights in for each run, and take them out again."""
    hook = vars(module).get("_hf_hook")
    hooks: tuple[Any, ...] = getattr(hook, "hooks", (hook,))  # several in a row, or one
    return [hook for hook in hooks if getattr(hook, "offload", False) and not hook.place_submodules]


def all_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of a model once, offloaded ones too, one after another; tied weights under one name."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    names = set()
    for name, weight in model.named_parameters():
        shared = tied.get(name, name)
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        if is_packed(module):
            continue
        if not weight.is_meta or shared not in names:
            yield name, weight_of(module, last)
        names.add(shared)
    for path, module in model.named_modules():
        if is_packed(module):
            # The scales are in it, wherever a package keeps them. Of a copy: bitsandbytes (0.50) changes what it saves.
            for name, tensor in copy.deepcopy(module).state_dict().items():
                if isinstance(tensor, Tensor):
                    yield from _plain_tensors(f"{path}.{name}", tensor)


def _plain_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors that a tensor subclass is made of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor.detach()
        return
    names, about = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    for inner in names:
        yield from _plain_tensors(f"{name}.{inner} {about}", getattr(tensor, inner))


def device_of(module: nn.Module) -> torch.device:
    """Return the device that a module begins to compute on, also while its weights are offloaded."""
    for submodule in module.modules():
        for weight in submodule.parameters(recurse=False):
            hooks = offload_hooks(submodule) if weight.is_meta else []
            return torch.device(hooks[0].execution_device) if hooks else weight.device
    buffer = next(module.buffers(), None)  # only without weights: accelerate may leave a buffer behind
    return torch.device("cpu") if buffer is None else buffer.device


@contextmanager
def keep_offloaded(model: nn.Module) -> Iterator[None]:
    """Let accelerate's hooks work in derivatives; offload at the end what they had loaded when a run was cut short."""
    modules = [module for module in model.modules() if offload_hooks(module)]
    offloaded = [module for module in modules if not _is_loaded(module)]
    hooks = [hook for module in modules for hook in offload_hooks(module)]
    before = [(hook, hook.tied_params_map, hook.tied_params_names) for hook in hooks]
    try:
        for hook in hooks:  # else they ask for the addresses of tied weights, which a derivative does not give
            hook.tied_params_map = None
            hook.tied_params_names = set()
        yield
    finally:
        for hook, tied_map, tied_names in before:
            hook.tied_params_map = tied_map
            hook.tied_params_names = tied_names
        for module in filter(_is_loaded, offloaded):
            for hook in offload_hooks(module):
                hook.post_forward(module, ())


def _is_loaded(module: nn.Module) -> bool:
    """Whether a weight of the module itself is in memory."""
    return any(not weight.is_meta for weight in module.parameters(recurse=False))


# NaN and infinity


def check_finite(
    name: str, hf: nn.Module, keep: Bool[Tensor, "batch n"], vectors: list[Tensor], dtype: torch.dtype
) -> None:
    """Refuse a run whose embedding sum, or a block's output, is not finite at a token; padding does not count."""
    padding = ~keep.to(vectors[0].device)
    finite = torch.stack([(tensor.isfinite().all(-1) | padding).all() for tensor in vectors]).tolist()
    if all(finite):
        return
    first = finite.index(False)
    where = "before layer 0" if first == 0 else f"after layer {first - 1}"
    weight = first_broken_weight(hf)
    advice = dtype_advice(dtype) if weight is None else f"So does its weight {weight!r}: use an intact model."
    raise ModelError(
        f"Running {name}: its hidden vectors {where} hold NaN or infinity in {str(dtype).removeprefix('torch.')}, so "
        f"nothing can be read from this text. {advice}"
    )


def first_broken_weight(model: nn.Module) -> str | None:
    """Return the name of the first weight that holds NaN or infinity; None: all are finite."""
    for name, weight in all_weights(model):
        if weight.numel() and weight.dtype in PLAIN:
            extremes = torch.stack(torch.aminmax(weight.detach()))  # NaN is in both
            if not extremes.isfinite().all():
                return name
    return None


def dtype_advice(dtype: torch.dtype) -> str:
    """Return what to do about numbers that leave the range of a dtype."""
    if dtype == torch.float64:
        return "No wider dtype is read: check the model's weights, or use another text."
    wider = {torch.float16: '"bfloat16" or "float32"', torch.bfloat16: '"float32"', torch.float32: '"float64"'}[dtype]
    return f"Load the model with dtype={wider}."


# Adapters (PEFT)


def unwrap_adapter(model: Any) -> Any:
    """Return the model under a PEFT wrapper, its adapters in place; any other object as it is."""
    if isinstance(model, PreTrainedModel) or not (hasattr(model, "peft_config") and hasattr(model, "get_base_model")):
        return model
    for name, config in model.peft_config.items():
        if getattr(config, "is_prompt_learning", False):
            kind = getattr(config.peft_type, "value", config.peft_type)
            raise ModelError(
                f"Loading {type(model).__name__}: its adapter {name!r} ({kind}) puts learned vectors before every "
                "text, which no token stands for. Only adapters of layers, such as LoRA, are read."
            )
    return model.get_base_model()


def describe_adapters(model: nn.Module) -> str:
    """Return which adapters act on which layers, to tell two states of the same weights apart; '' if none do."""
    lines = []
    for name, layer in model.named_modules():
        if has_adapter(layer):
            merged = sorted(getattr(layer, "merged_adapters", ()))
            active = sorted(getattr(layer, "active_adapters", ()))
            lines.append(f"{name} {merged} {active} {getattr(layer, 'disable_adapters', False)}")
    return "\n".join(lines)


def has_adapter(layer: object) -> bool:
    """Whether a layer is under an adapter."""
    return isinstance(layer, nn.Module) and hasattr(layer, "base_layer")
