"""The user's model in a strange state: the numbers are the plain ones, and the model is as it came.

Surroundings such as autocast are in `tests/models/test_isolation.py`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf

import identikit as ik
from tests.hostile.judging import refused
from tests.hostile.made import TEXT, same
from tests.models import tiny
from tests.models.state import state_of

CALLS: dict[str, Callable[[Any], Any]] = {
    "attention": lambda model: ik.effective_attention(model, TEXT),
    "intervals": lambda model: ik.attention_intervals(model, TEXT, layer=0, head=0, query=[2, 3]),
    "attribution": lambda model: ik.token_attribution(model, "w5 w6 w7"),
}


@cache
def expected(call: str) -> Any:
    """Return the answer in plain surroundings."""
    return CALLS[call](tiny.loaded("bert"))


def look_at_everything(model: hf.PreTrainedModel) -> None:
    for module in model.modules():
        module.register_forward_hook(lambda *_: None)
        module.register_forward_pre_hook(lambda *_: None)


def fill_gradients(model: hf.PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def return_everything(model: hf.PreTrainedModel) -> None:
    model.set_attn_implementation("eager")
    for name in ("output_attentions", "output_hidden_states", "use_cache"):
        setattr(model.config, name, True)
    model.config.return_dict = False


def drop_out_everywhere(model: hf.PreTrainedModel) -> None:
    for module in model.train().modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5


CHANGES: dict[str, Callable[[hf.PreTrainedModel], object]] = {
    "with parts in training mode": lambda model: [module.train() for module in list(model.modules())[::3]],
    "with frozen weights": lambda model: model.requires_grad_(False),
    "with gradients on its weights": fill_gradients,
    "with hooks that only look": look_at_everything,
    "that returns everything it can, as tuples": return_everything,
    "with gradient checkpointing": lambda model: model.train().gradient_checkpointing_enable(),
    "with dropout everywhere": drop_out_everywhere,
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_model_in_another_state_gives_the_same(what: str):
    """Every call gives the plain numbers, and leaves the model as it was."""
    changed = tiny.build("bert")
    CHANGES[what](changed)
    model = ik.load(changed, tiny.tokenizer())
    before = state_of(model.hf)
    for name, call in CALLS.items():
        same(call(model), expected(name), within=1e-4)
        assert state_of(model.hf) == before


NO_MODELS: dict[str, Callable[[hf.PreTrainedModel], Any]] = {
    "traced": lambda model: torch.jit.trace(model, (torch.tensor([[5, 6]]),), strict=False),
    "without weights": lambda model: model.to("meta"),
    "that is only its state": lambda model: model.state_dict(),
    "that is a class": type,
    "that is a function": lambda model: model.forward,
}


@pytest.mark.parametrize("what", NO_MODELS)
def test_what_is_no_model_is_refused(what: str):
    given = NO_MODELS[what](tiny.build("bert"))
    with refused():
        CALLS["attention"](ik.load(given, tiny.tokenizer()))


def test_a_block_that_was_put_in_after_loading_is_refused():
    model = ik.load(tiny.build("bert"), tiny.tokenizer())
    model.hf.encoder.layer[1] = tiny.build("bert", seed=1).encoder.layer[1]
    with refused("block 1"):
        ik.effective_attention(model, TEXT)
