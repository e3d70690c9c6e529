"""The fingerprint: it tells apart what computes differently, and nothing else, and a changed model is noticed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from tokenizers import normalizers
from torch import nn
from transformers import AttentionInterface

import identikit as ik
from identikit.models.load import fingerprint
from identikit.models.load.fingerprint import identity_of
from tests.models import tiny
from tests.models.made import rewritten, saved

TEXT = "w5 w6 w7 w8 w9 w10"
CHANGED = r"its weights, configuration or tokenizer changed after it was first read.*again"


def of(model: Any, reader: Any = None) -> str:
    return identity_of(model, reader or tiny.tokenizer()).model


def test_the_same_model_is_the_same_wherever_it_comes_from(tmp_path: Path):
    own = ik.load(tiny.build("llama"), tiny.tokenizer()).fingerprint
    assert ik.load(saved(tmp_path / "whole")).fingerprint == own
    sharded = saved(tmp_path / "sharded", max_shard_size="20KB")
    assert ik.load(sharded).fingerprint == own
    assert ik.load(sharded, dtype="float64").fingerprint != own


# Sums of tensors


def sums_of(tensor: torch.Tensor, rows: int = 1) -> torch.Tensor:
    return fingerprint._row_sums(tensor, torch.empty(rows, fingerprint._ROW, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_entry_counts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fingerprint, "_ROW", 64)  # several rows and a rest, in a tensor that is quick to go through
    fingerprint._factors.cache_clear()
    weight = torch.randn(23, 19, dtype=torch.float64).to(dtype)
    sums = {tuple(sums_of(weight).tolist())}
    for place in range(weight.numel()):
        changed = weight.clone()
        changed.view(-1)[place] = -changed.view(-1)[place]
        sums.add(tuple(sums_of(changed).tolist()))
    for changed in (-weight, weight.flip(0), weight.roll(1, 1), weight * 2, weight.T.contiguous()):
        sums.add(tuple(sums_of(changed).tolist()))
    for first in range(0, 60, 2):  # two changes of the highest bit at once
        changed = weight.clone()
        changed.view(-1)[[first, first + 1]] *= -1
        sums.add(tuple(sums_of(changed).tolist()))
    assert len(sums) == 1 + weight.numel() + 5 + 30
    fingerprint._factors.cache_clear()


def test_memory_and_rows_that_are_multiplied_at_once_have_no_say():
    """On a GPU several rows are, so that its fingerprint is the one of the CPU."""
    weight = torch.randn(7, 9).bfloat16()
    held = torch.cat([torch.zeros(1).bfloat16(), weight.flatten()])[1:].view(7, 9)  # begins in the middle of a word
    assert torch.equal(sums_of(weight), sums_of(held))
    assert torch.equal(sums_of(weight), sums_of(weight.T.contiguous().T))
    words = torch.randn(5 * fingerprint._ROW + 3)
    assert torch.equal(sums_of(words), sums_of(words, rows=3)) and len(sums_of(words)) == 6


# What makes a model another


def doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def scaled_by(factor: float | torch.Tensor) -> Callable:
    return lambda module, args, output: output * factor


def patched(model: Any, reader: Any) -> None:
    mlp = model.model.layers[0].mlp
    own = mlp.forward
    mlp.forward = lambda x: own(x) * 2


def changed_attribute(path: str, value: Any) -> Callable[[Any, Any], None]:
    """Return a change that sets an attribute somewhere in the model."""
    owner, _, name = path.rpartition(".")
    return lambda model, reader: setattr(model.get_submodule(owner), name, value)


def hooked(hook: Any, method: str = "register_forward_hook") -> Callable[[Any, Any], None]:
    return lambda model, reader: getattr(model.model.layers[0].mlp, method)(hook)


NOTICED: dict[str, Callable[[Any, Any], Any]] = {
    "a weight": lambda model, reader: model.model.layers[0].mlp.up_proj.weight.data.add_(0.1),
    "one entry": lambda model, reader: model.model.norm.weight.data.view(-1)[3].add_(1e-6),
    "a negated weight": lambda model, reader: model.lm_head.weight.data.neg_(),
    "a configuration": lambda model, reader: setattr(model.config, "rms_norm_eps", 0.1),
    "rotary positions": lambda model, reader: setattr(model.config, "rope_parameters", {"rope_theta": 1e6}),
    "a saved buffer": lambda model, reader: model.register_buffer("another", torch.ones(2)),
    "what a saved buffer holds": lambda model, reader: model.get_buffer("kept").add_(1),
    "an unsaved buffer": lambda model, reader: model.model.rotary_emb.inv_freq.mul_(1.1),
    "a tensor that is set": lambda model, reader: model.model.layers[0].self_attn.scale_of_mine.mul_(2),
    "the scaling of attention": changed_attribute("model.layers.0.self_attn.scaling", 0.9),
    "the epsilon of a norm": changed_attribute("model.layers.0.input_layernorm.variance_epsilon", 0.5),
    "the scaling of rotary positions": changed_attribute("model.rotary_emb.attention_scaling", 1.5),
    "a function in a module's place": changed_attribute("model.layers.0.mlp.act_fn", nn.Tanh()),
    "a module of another class": changed_attribute("model.layers.0.mlp", nn.Identity()),
    "a hook": hooked(doubled),
    "a hook before": hooked(lambda module, args: (args[0] * 2,), "register_forward_pre_hook"),
    "a hook of numbers": hooked(scaled_by(1.5)),
    "a partial hook": hooked(partial(doubled)),
    "a patched forward": patched,
    "a new token": lambda model, reader: reader.add_tokens(["a new word"]),
    "a normaliser": lambda model, reader: setattr(reader.backend_tokenizer, "normalizer", normalizers.Lowercase()),
}
SAME: dict[str, Callable[[Any, Any], Any]] = {
    "training": lambda model, reader: model.train(),
    "gradients": lambda model, reader: model.requires_grad_(False),
    "gradient checkpointing": lambda model, reader: model.gradient_checkpointing_enable(),
    "gradients of inputs": lambda model, reader: model.enable_input_require_grads(),
    "a stock attention function": lambda model, reader: model.set_attn_implementation("eager"),
    "a compiled module": lambda model, reader: model.model.layers[0].compile(),
    "a backward hook": lambda model, reader: model.model.layers[0].register_full_backward_hook(lambda *given: None),
    "names": lambda model, reader: model.config.update({"name_or_path": "elsewhere", "transformers_version": "0"}),
    "a cache": lambda model, reader: model.config.update({"use_cache": False}),
    "the last text read": lambda model, reader: reader(["w5", "w6 w7"], padding=True, truncation=True, max_length=3),
}


@pytest.mark.parametrize("what", [*NOTICED, *SAME])
def test_what_computes_differently_is_another(what: str):
    """The model has a buffer that is saved, and a tensor that is neither buffer nor parameter."""
    own: Any = tiny.build("llama")
    own.register_buffer("kept", torch.zeros(3))
    own.model.layers[0].self_attn.scale_of_mine = torch.ones(2)
    reader = tiny.tokenizer()
    before = of(own, reader)
    (NOTICED | SAME)[what](own, reader)
    assert (of(own, reader) == before) == (what in SAME)


def test_a_hook_is_known_by_what_it_does():
    """In another process, the same hook makes the same model; another number in it makes another."""
    prints = []
    for factor in (1.5, 1.5, 2.5, torch.ones(2), torch.zeros(2)):
        own = tiny.build("llama")
        own.model.layers[0].mlp.register_forward_hook(scaled_by(factor))
        prints.append(of(own))
    assert prints[0] == prints[1] and len(set(prints)) == 4


def test_the_scale_of_an_adapter_and_which_is_active_are_part_of_it():
    config = peft.LoraConfig(target_modules=["v_proj"], r=2, init_lora_weights=False)
    adapted: Any = peft.get_peft_model(tiny.build("llama"), config)
    adapted.add_adapter("other", config)
    base = adapted.get_base_model()
    prints = [of(base)]
    for module in base.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 3.0)
    prints.append(of(base))
    adapted.set_adapter("other")
    prints.append(of(base))
    adapted.base_model.disable_adapter_layers()
    assert len({*prints, of(base)}) == 4


def test_readers_of_every_kind_have_a_content():
    bert = tiny.build("bert")
    slow, other = hf.ByT5Tokenizer(), hf.ByT5Tokenizer(extra_ids=10)
    assert of(bert, slow) != of(bert, other) and of(bert, slow) == of(bert, hf.ByT5Tokenizer())
    small, large = (hf.ViTImageProcessorPil(size={"height": n, "width": n}) for n in (16, 32))
    assert identity_of(bert, small).reader != identity_of(bert, large).reader
    assert identity_of(bert, None).reader != identity_of(bert, small).reader


def test_a_random_pooler_is_no_part_of_a_model(tmp_path: Path):
    model: Any = tiny.build("bert-mlm")
    rewritten(saved(tmp_path, "bert-mlm"), lambda config: config.update(architectures=["BertModel"]))
    first, second = ik.load(tmp_path), ik.load(tmp_path)
    assert first.fingerprint == second.fingerprint and first.hf.pooler is None
    without = hf.BertModel(model.config, add_pooling_layer=False)
    without.load_state_dict(model.bert.state_dict())
    assert ik.load(without.eval(), tiny.tokenizer()).fingerprint == first.fingerprint


# What a changed model does to results


@pytest.mark.parametrize("call", [ik.effective_attention, ik.token_attribution, ik.invert])
def test_a_result_has_the_fingerprint_of_what_it_was_computed_with(call: Callable):
    hidden = tiny.build("llama")
    model = ik.load(hidden, tiny.tokenizer())
    before = call(model, "w5 w6").provenance
    hidden.model.layers[1].mlp.up_proj.weight.data.add_(0.1)  # which torch does not count as a change
    model.tokenizer.add_tokens(["a new word"])
    after = call(model, "w5 w6").provenance
    assert before.weights != after.weights == identity_of(hidden, model.tokenizer).model
    assert before.tokenizer_sha256 != after.tokenizer_sha256


def test_a_model_that_changed_is_refused_where_numbers_would_be_of_two():
    hidden = tiny.build("llama")
    model = ik.load(hidden, tiny.tokenizer())
    result = ik.effective_attention(model, TEXT)
    since = model.fingerprint
    model.check_unchanged()
    result.verify()
    hidden.lm_head.weight.data[0, 0] += 1
    for check in (model.check_unchanged, result.verify):
        with pytest.raises(ik.ModelError, match=CHANGED):
            check()
    ik.effective_attention(model, TEXT)  # a new call, a new fingerprint
    model.check_unchanged()
    for check in (lambda: model.check_unchanged(since), result.verify):
        with pytest.raises(ik.ModelError, match=CHANGED):
            check()


@pytest.mark.parametrize("name", ["gpt_oss", "deberta-v2", "xlnet"])
def test_what_a_result_computes_later_is_of_the_weights_it_was_made_with(name: str):
    """Numbers that are computed when they are asked for, from what was captured, do not follow a changed model."""
    hidden = tiny.build(name)
    model = ik.load(hidden, tiny.tokenizer())
    first, later = (ik.effective_attention(model, TEXT, bias=False) for _ in range(2))
    names = [one for one in first.arrays if one != "visible"]
    expected = {one: first.array(one).clone() for one in names}
    for weight in hidden.parameters():
        weight.data.mul_(1.5).add_(0.01)
    for one in names:
        assert torch.allclose(later.array(one).double(), expected[one].double(), equal_nan=True), one


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
