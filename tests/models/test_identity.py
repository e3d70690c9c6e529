"""Which changes of a model make it another one: a table of changes, and what fingerprint and `verify` say of each."""

from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AttentionInterface

import identikit as ik
from identikit.models.load.fingerprint import identity_of
from tests.models import tiny

TEXT = "w5 w6 w7 w8 w9 w10"
CHANGED = r"changed after it was first read"


def doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def doubled_before(module: nn.Module, args: Any) -> Any:
    return (args[0] * 2,)


def scaled_by(factor: float | torch.Tensor) -> Callable:
    return lambda module, args, output: output * factor


def patched(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    own = mlp.forward
    mlp.forward = lambda x: own(x) * 2


def kept_buffer(model: Any) -> None:
    model.get_buffer("kept").add_(1)


def set_tensor(model: Any) -> None:
    model.model.layers[0].self_attn.scale_of_mine.mul_(2)


def set_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(1.1)


NOTICED: dict[str, Callable[[Any], Any]] = {
    "a weight": lambda model: model.model.layers[0].mlp.up_proj.weight.data.add_(0.1),
    "a configuration": lambda model: setattr(model.config, "rms_norm_eps", 0.1),
    "a saved buffer": lambda model: model.register_buffer("another", torch.ones(2)),
    "an unsaved buffer": set_buffer,
    "the scaling of attention": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.9),
    "the epsilon of a norm": lambda model: setattr(model.model.layers[0].input_layernorm, "variance_epsilon", 0.5),
    "the scaling of rotary positions": lambda model: setattr(model.model.rotary_emb, "attention_scaling", 1.5),
    "a hook": lambda model: model.model.layers[0].mlp.register_forward_hook(doubled),
    "a hook before": lambda model: model.model.layers[0].mlp.register_forward_pre_hook(doubled_before),
    "a hook of numbers": lambda model: model.model.layers[0].mlp.register_forward_hook(scaled_by(1.5)),
    "a partial hook": lambda model: model.model.layers[0].mlp.register_forward_hook(partial(doubled)),
    "a patched forward": patched,
    "a function in a module's place": lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.Tanh()),
    "what a saved buffer holds": kept_buffer,
    "a tensor that is set on a module": set_tensor,
    "a module of another class": lambda model: setattr(model.model.layers[0], "mlp", nn.Identity()),
}
SAME: dict[str, Callable[[Any], Any]] = {
    "training": lambda model: model.train(),
    "gradients": lambda model: model.requires_grad_(False),
    "gradient checkpointing": lambda model: (model.gradient_checkpointing_enable(), model.enable_input_require_grads()),
    "a stock attention function": lambda model: model.set_attn_implementation("eager"),
    "a compiled module": lambda model: model.model.layers[0].compile(),
    "a backward hook": lambda model: model.model.layers[0].register_full_backward_hook(lambda *given: None),
}


def built() -> Any:
    """A model with a buffer that is saved, and a tensor that is neither buffer nor parameter."""
    own: Any = tiny.build("llama")
    own.register_buffer("kept", torch.zeros(3))
    own.model.layers[0].self_attn.scale_of_mine = torch.ones(2)
    return own


@pytest.mark.parametrize("what", NOTICED)
def test_what_changes_what_is_computed_makes_it_another(what: str):
    own = built()
    model = ik.load(own, tiny.tokenizer())
    result = ik.effective_attention(model, TEXT)
    result.verify()
    NOTICED[what](own)
    for check in (model.check_unchanged, result.verify):
        with pytest.raises(ik.ModelError, match=CHANGED):
            check()
    assert ik.effective_attention(model, TEXT).provenance.weights != result.provenance.weights


@pytest.mark.parametrize("what", SAME)
def test_what_changes_nothing_leaves_it_the_same(what: str):
    own = tiny.build("llama")
    model = ik.load(own, tiny.tokenizer())
    result = ik.effective_attention(model, TEXT)
    SAME[what](own)
    model.check_unchanged()
    result.verify()


def test_a_hook_is_known_by_what_it_does():
    """In another process, the same hook makes the same model; another number in it makes another."""
    prints = []
    for factor in (1.5, 1.5, 2.5, torch.ones(2), torch.zeros(2)):
        own = tiny.build("llama")
        own.model.layers[0].mlp.register_forward_hook(scaled_by(factor))
        prints.append(identity_of(own, None).model)
    assert prints[0] == prints[1] and len(set(prints)) == 4


def test_the_scale_of_an_adapter_is_part_of_it():
    adapted = peft.get_peft_model(tiny.build("llama"), peft.LoraConfig(target_modules=["v_proj"], r=2))
    model = ik.load(adapted, tiny.tokenizer())
    model.check_unchanged()
    for module in model.hf.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 3.0)
    with pytest.raises(ik.ModelError, match=CHANGED):
        model.check_unchanged()


@pytest.mark.parametrize("change", ["switched", "off"])
def test_which_adapter_is_active_is_part_of_it(change: str):
    config = peft.LoraConfig(target_modules=["v_proj"], r=2, init_lora_weights=False)
    adapted: Any = peft.get_peft_model(tiny.build("llama"), config)
    adapted.add_adapter("other", config)
    model = ik.load(adapted, tiny.tokenizer())
    result = ik.effective_attention(model, TEXT)
    result.verify()
    adapted.set_adapter("other") if change == "switched" else adapted.base_model.disable_adapter_layers()
    for check in (model.check_unchanged, result.verify):
        with pytest.raises(ik.ModelError, match=CHANGED):
            check()


def test_another_tokenizer_makes_it_another():
    model = ik.load(tiny.build("llama"), tiny.tokenizer())
    result = ik.effective_attention(model, TEXT)
    model.tokenizer.add_tokens(["zebra"])
    for check in (model.check_unchanged, result.verify):
        with pytest.raises(ik.ModelError, match=CHANGED):
            check()


def test_a_method_that_is_patched_on_a_class_is_proved_anew_and_leaves_the_fingerprint(monkeypatch: Any):
    """As limits.md says: a class is shared by all models, and its code is not part of a fingerprint."""
    own: Any = tiny.build("llama")
    model = ik.load(own, tiny.tokenizer())
    before = ik.effective_attention(model, TEXT).provenance.weights
    kind = type(own.model.layers[0].mlp)
    plain = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: plain(self, x) * 2)
    assert ik.effective_attention(model, TEXT).provenance.weights == before


def flat(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **terms: Any) -> Any:
    mean = value.mean(2, keepdim=True).repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return mean.expand(*query.shape[:3], -1).transpose(1, 2).contiguous(), None


def test_an_attention_function_of_the_users_is_refused_whenever_it_is_set():
    AttentionInterface.register("flat", flat)
    own = tiny.build("llama")
    model = ik.load(own, tiny.tokenizer())
    result = ik.effective_attention(model, TEXT)
    own.set_attn_implementation("flat")
    for call in (lambda: ik.effective_attention(model, TEXT), result.verify):
        with pytest.raises(ik.ModelError, match="output with the tap"):
            call()
    own.set_attn_implementation("sdpa")
    result.verify()


def test_a_model_that_is_no_longer_in_memory_is_refused():
    own = tiny.build("bert")
    model = ik.load(own, tiny.tokenizer())
    result = ik.effective_attention(model, TEXT)
    own.to("meta")
    for call in (lambda: ik.effective_attention(model, TEXT), result.verify):
        with pytest.raises(ik.ModelError, match="is not in memory"):
            call()
