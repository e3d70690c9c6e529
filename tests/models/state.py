"""All that a call could leave changed: of a model, of torch and transformers, of Python."""

import warnings
from typing import Any

import numpy
import torch
from huggingface_hub.utils import logging as hub_logging
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import _cur_sdpa_kernel_backends
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import logging as hf_logging

from identikit.models import isolation

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_METHODS = ("forward", "_attn", "rel_attn_core", "_compiled_call_impl")


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return everything about a model and its surroundings that must be the same after a call as before it."""
    modules = list(model.modules())
    configs = {id(one.config): one.config for one in modules if hasattr(one, "config")}
    implementations = ("_attn_implementation_internal", "_experts_implementation_internal")
    return {
        "training": [one.training for one in modules],
        "hooks": [[list(getattr(one, name).items()) for name in _HOOKS] for one in modules],
        "attributes": [sorted(vars(one)) for one in modules],
        "methods": [[id(vars(one).get(name)) for name in _METHODS] for one in modules],
        "config": [config.to_dict() for config in configs.values()],
        "implementation": [[getattr(config, name, None) for name in implementations] for config in configs.values()],
        "weights": [(p.data_ptr(), p.dtype, p.requires_grad, p.grad is None) for p in model.parameters()],
        "buffers": [buffer.data_ptr() for buffer in model.buffers()],
        "sums": [float(p.detach().double().sum()) for p in [*model.parameters(), *model.buffers()]],
        "locks": sum(isolation._locks[one].depth for one in modules if one in isolation._locks),
        "standard state": getattr(isolation._thread, "standard", False),
    } | _globals()


def _globals() -> dict[str, Any]:
    kinds = ("cpu", "cuda")
    return {
        "registries": [sorted(AttentionInterface._global_mapping), sorted(AttentionMaskInterface._global_mapping)],
        "verbosity": [hf_logging.get_verbosity(), hub_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()],
        "products": [torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision],
        "convolutions": torch.backends.cudnn.allow_tf32,
        # Python's own random numbers are left out: in tests, beartype draws from them.
        "random": [torch.get_rng_state().tolist(), str(numpy.random.get_state())],
        "defaults": [torch.get_default_dtype(), torch.get_default_device()],
        "grad": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()],
        "autocast": [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds],
        "deterministic": [torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()],
        "attention": sorted(map(str, _cur_sdpa_kernel_backends())),
        "forward mode": forward_ad._current_level,
        "warnings": list(warnings.filters),
    }
