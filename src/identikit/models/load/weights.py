"""What a model's weights are: plain numbers on one device or offloaded by accelerate, quantised or under an adapter.

What transformers itself turns into plain weights is read that way; everything else is refused with a message. A weight
is never cast without its scale, and never silently missing.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from identikit.errors import ModelError
from identikit.shapes import Float, Tensor

PLAIN = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_DEQUANTISED = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}  # by transformers, without a kernel


# Quantised and offloaded weights


def how_to_dequantise(config: PreTrainedConfig, source: str) -> dict[str, Any]:
    """Return the arguments with which transformers reads a checkpoint's weights as plain numbers, or refuse them."""
    text = config.get_text_config()
    quantised = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if quantised is None:
        return {}
    settings = quantised if isinstance(quantised, dict) else quantised.to_dict()
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    if method not in _DEQUANTISED:
        raise ModelError(
            f"Loading {source}: its weights are quantised ({method}), and of quantised checkpoints only "
            f"{' and '.join(_DEQUANTISED)} are read. Name the checkpoint it was made from, or save a plain copy with "
            "transformers: model.dequantize().save_pretrained(folder)."
        )
    return {"quantization_config": getattr(transformers, _DEQUANTISED[method])(dequantize=True)}


def check_in_place(model: PreTrainedModel, name: str) -> None:
    """Refuse a model whose weights are not there, not plain numbers, or not all on one device."""
    devices: dict[torch.device, str] = {}
    method = getattr(model, "quantization_method", None)
    by = f" by {getattr(method, 'value', method)}" if method else ""
    advice = "and identikit reads plain weights. Load the checkpoint it was made from, or call model.dequantize() first"
    for key, weight in model.named_parameters():
        if weight.is_meta:
            weight = held(*_owner(model, key))
        if weight.is_meta or ("base_layer" in key and model.get_parameter(key).is_meta):
            raise ModelError(
                f"Loading {name}: the weight {key!r} is not in memory (it is on the meta device), and no hook of "
                "accelerate on its own module brings it in plain. Load the whole model on one device, or offload it "
                "without preload_module_classes and adapters."
            )
        if weight.dtype not in PLAIN:
            kind = str(weight.dtype).removeprefix("torch.")
            raise ModelError(f"Loading {name}: the weight {key!r} is quantised{by} ({kind}), {advice}.")
        devices.setdefault(weight.device, key)
    if getattr(model, "is_quantized", False):
        raise ModelError(f"Loading {name}: its weights are quantised{by} (packed), {advice}.")
    if len(devices) > 1:
        places = ", ".join(f"{device} ({key!r})" for device, key in devices.items())
        raise ModelError(
            f"Loading {name}: its weights are spread over {len(devices)} devices: {places}, …. identikit reads a model "
            "on one device. Load it there: device_map={'': 0}, in bfloat16 if it does not fit."
        )


# Offloaded by accelerate


def held(module: nn.Module, name: str) -> Tensor:
    """Return a weight of a module, from where accelerate keeps it while it is offloaded."""
    tensor: Tensor = getattr(module, name)
    if tensor.is_meta:
        for hook in offloading(module):
            with suppress(KeyError):
                return hook.weights_map[name].detach()
    return tensor


def offloading(module: nn.Module) -> list[Any]:
    """Return the hooks of accelerate that bring a module's own weights in for each run, and take them out again."""
    hook = vars(module).get("_hf_hook")
    hooks: tuple[Any, ...] = getattr(hook, "hooks", (hook,))  # several in a row, or one
    return [each for each in hooks if getattr(each, "offload", False) and not each.place_submodules]


def held_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of a model once, the offloaded ones too, one after another; tied weights under one name."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    seen = set()
    for name, weight in model.named_parameters():
        shared = tied.get(name, name)
        if not weight.is_meta or shared not in seen:
            yield name, held(*_owner(model, name))
        seen.add(shared)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last


def device_of(model: PreTrainedModel) -> torch.device:
    """Return the device that a model computes on, also while its weights are offloaded."""
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            hooks = offloading(module) if weight.is_meta else []
            return torch.device(hooks[0].execution_device) if hooks else weight.device
    return model.device


@contextmanager
def offloaded_again(model: nn.Module) -> Iterator[None]:
    """Have hooks of accelerate work in derivatives; take out at the end what they brought in for a run cut short."""
    modules = [module for module in model.modules() if offloading(module)]
    hooks = [hook for module in modules for hook in offloading(module)]
    kept = [(hook, hook.tied_params_map, hook.tied_params_names) for hook in hooks]
    try:
        for hook in hooks:  # else they ask for the addresses of tied weights, which a derivative does not give
            hook.tied_params_map = None
            hook.tied_params_names = set()
        yield
    finally:
        for hook, tied, names in kept:
            hook.tied_params_map = tied
            hook.tied_params_names = names
        for module in modules:
            if any(not weight.is_meta for weight in module.parameters(recurse=False)):
                for hook in offloading(module):
                    hook.post_forward(module, ())


def gguf_words(file: Path) -> str:
    """Return what is wrong with a GGUF file, and what to do."""
    return (
        "it is a GGUF file, whose weights are packed. Save them as plain ones with transformers and its package gguf: "
        f"AutoModelForCausalLM.from_pretrained({str(file.parent)!r}, gguf_file={file.name!r}).save_pretrained(folder), "
        "and the tokenizer likewise; then name that folder."
    )


# NaN and infinity


def broken_weight(model: nn.Module) -> str | None:
    """Return the name of the first weight that holds NaN or infinity; None: all are finite."""
    for name, weight in held_weights(model):
        if weight.numel() and not torch.stack(torch.aminmax(weight.detach())).isfinite().all():  # NaN is in both
            return name
    return None


def wider_dtype(dtype: torch.dtype) -> str:
    """Return what to do about numbers that leave the range of a dtype."""
    if dtype == torch.float64:
        return "No wider dtype is read: check the model's weights, or use another text."
    wider = {torch.float16: '"bfloat16" or "float32"', torch.bfloat16: '"float32"', torch.float32: '"float64"'}[dtype]
    return f"Load the model with dtype={wider}."


# Adapters (PEFT)


def unwrapped(model: Any) -> Any:
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


def adapter_state(model: nn.Module) -> str:
    """Return which adapters act on which layers, to tell two states of the same weights apart; '' if none do."""
    lines = []
    for name, layer in model.named_modules():
        if _adapted(layer):
            merged = sorted(getattr(layer, "merged_adapters", ()))
            active = sorted(getattr(layer, "active_adapters", ()))
            lines.append(f"{name} {merged} {active} {getattr(layer, 'disable_adapters', False)}")
    return "\n".join(lines)


def _adapted(layer: object) -> bool:
    return isinstance(layer, nn.Module) and hasattr(layer, "base_layer")


# Linear layers


def linear_weight(layer: Any) -> Float[Tensor, "in out"]:
    """Return W of what a linear layer computes, x·W + b; under an adapter such as LoRA, W + B·A with its scale."""
    if not _adapted(layer):
        weight = held(layer, "weight").detach()
        return weight if isinstance(layer, Conv1D) else weight.T  # GPT-2 stores (in, out), linear layers (out, in)
    unit = torch.eye(layer.in_features + 1, layer.in_features).roll(1, 0)  # zero first, then the unit vectors
    made = _computed(layer, unit)
    return (made[1:] - made[0]).to(layer.weight.dtype)


def linear_bias(layer: Any) -> Float[Tensor, "out"] | None:
    """Return b of what a linear layer computes, x·W + b; None if it has none."""
    bias = getattr(layer, "bias", None)
    if not _adapted(layer):
        return None if bias is None else held(layer, "bias").detach()
    made = _computed(layer, torch.zeros(1, layer.in_features))[0]
    return made.to(layer.weight.dtype) if bias is not None or made.any() else None


def _computed(layer: Any, x: Float[Tensor, "n in"]) -> Float[Tensor, "n out"]:
    """Run a layer and its adapters, whatever they are, on a copy in float64, past any hooks on it."""
    twin = copy.deepcopy(layer).double().eval()
    with torch.no_grad():
        return type(twin).forward(twin, x.double().to(layer.weight.device))
