"""Put the tap in the place of a model's attention for a while, and restore everything afterwards."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from identikit.models.taps.tap import NAME

IMPLEMENTATION = "_attn_implementation_internal"  # the entry of a configuration that names the attention function
HubModule = Any
"""A module of transformers, or of a package that packs its weights: what is in it depends on its class, and torch types
all of that as a tensor or a module."""


def set_temporarily(stack: ExitStack, owner: object, name: str, value: object) -> None:
    """Set an attribute until the stack is closed; then give back what was there, or take it away again."""
    if name in vars(owner):  # such as the forward that accelerate's hooks have put there
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


def configs_of(model: nn.Module) -> list[Any]:
    """Return the configurations of a model and of the models inside it, each once."""
    configs = {id(config): config for config in (getattr(module, "config", None) for module in model.modules())}
    return [config for config in configs.values() if config is not None]


@contextmanager
def restored_configs(model: PreTrainedModel, *names: str) -> Iterator[list[Any]]:
    """Yield the model's configurations, and put their entries of these names back at the end."""
    configs = configs_of(model)
    before = [(config, name, getattr(config, name)) for config in configs for name in names if hasattr(config, name)]
    try:
        yield configs
    finally:
        for config, name, value in before:
            setattr(config, name, value)


@contextmanager
def use_attention(model: PreTrainedModel, implementation: str = NAME) -> Iterator[None]:
    """Put the tap, or another implementation, in the place of the model's attention, and its own back at the end."""
    with restored_configs(model, IMPLEMENTATION):
        for module in model.modules():
            if isinstance(module, PreTrainedModel):  # older transformers do not hand it on to stacks of T5
                module.set_attn_implementation(implementation)
        yield
