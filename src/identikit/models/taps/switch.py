"""Put the tap in the place of a model's attention, and everything back as it was."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from transformers import PreTrainedModel

from identikit.models.taps.tap import NAME

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


@contextmanager
def restored_configs(model: PreTrainedModel, name: str = "_attn_implementation_internal") -> Iterator[list[Any]]:
    """Yield the model's configurations, and give each its own setting back at the end."""
    configs = {id(config): config for config in (getattr(module, "config", None) for module in model.modules())}
    before = [(config, getattr(config, name)) for config in configs.values() if hasattr(config, name)]
    try:
        yield [config for config, _ in before]
    finally:
        for config, setting in before:
            setattr(config, name, setting)


@contextmanager
def use_attention(model: PreTrainedModel, implementation: str = NAME) -> Iterator[None]:
    """Put the tap in the place of the model's attention, and its own back at the end, whatever happens."""
    with restored_configs(model):
        for part in model.modules():
            if isinstance(part, PreTrainedModel):  # older transformers do not hand it on to stacks of T5
                part.set_attn_implementation(implementation)
        yield
