"""Weights of every kind that a model may have: number formats, adapters, quantised, damaged, offloaded, spread."""

import json
import shutil
import socket
import sys
from pathlib import Path

import accelerate
import peft
import pytest
import torch
import transformers as hf
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import identikit as ik
from identikit.models.load.check import prove
from identikit.models.load.linear import linear_bias, linear_weight
from identikit.models.load.load import Recipe
from tests.models import tiny
from tests.models.made import TEXT, rewritten, saved
from tests.models.state import state_of

# Number formats


@pytest.mark.parametrize(
    ("dtype", "named", "shard"),
    [(torch.float16, True, "5GB"), (torch.bfloat16, False, "20KB"), (torch.float64, False, "5GB")],
)
def test_auto_keeps_the_checkpoints_own_format(tmp_path: Path, dtype: torch.dtype, named: bool, shard: str):
    folder = saved(tmp_path, dtype=dtype, max_shard_size=shard)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard == "20KB")
    if not named:
        rewritten(folder, lambda config: config.pop("dtype"))
    model = ik.load(folder, dtype="auto")
    assert {weight.dtype for weight in model.hf.parameters()} == {dtype}
    own = dict(tiny.build("llama", dtype=dtype).named_parameters())
    assert all(torch.equal(weight, own[name]) for name, weight in model.hf.named_parameters())
    single = ik.load(folder)
    assert single.dtype == torch.float32
    attention = ik.effective_attention(model, TEXT)
    assert attention.provenance.dtype == str(dtype).removeprefix("torch.")
    within = 1e-5 if dtype == torch.float64 else 2e-2
    assert (attention.raw - ik.effective_attention(single, TEXT).raw).abs().max() < within


# Adapters


def lora(name: str = "llama", *, dtype: torch.dtype = torch.float64, count: int = 1, **options) -> peft.PeftModel:
    """A tiny model under `count` LoRA adapters, drawn anew and all active."""
    targets = {"llama": ["q_proj", "v_proj", "o_proj"], "gpt2": ["c_attn", "c_proj"], "bert": ["value", "dense"]}
    layout = {"fan_in_fan_out": True} if name == "gpt2" else {}
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets[name], **layout, **options)
    model = peft.get_peft_model(tiny.build(name, dtype=dtype), config)
    for number in range(1, count):
        model.add_adapter(f"other{number}", config)
    generator = torch.Generator().manual_seed(0)
    for key, weight in model.named_parameters():
        if "lora" in key:
            weight.data = torch.randn(weight.shape, generator=generator).to(weight) * 0.3
    model.base_model.set_adapter(["default", *(f"other{number}" for number in range(1, count))])
    return model.eval()


def effective(layer: peft.tuners.lora.Linear) -> torch.Tensor:
    """W + Σ (alpha / r) B·A over the adapters, (in, out), number formats aside."""
    weight = layer.base_layer.weight.double()
    weight = weight.T if isinstance(layer.base_layer, torch.nn.Linear) else weight
    for name in layer.active_adapters:
        weight = weight + 5 / 3 * (layer.lora_B[name].weight @ layer.lora_A[name].weight).T.double()
    return weight


@pytest.mark.parametrize(("name", "count"), [("llama", 2), ("gpt2", 1), ("bert", 1)])
def test_lora_is_in_the_projection_and_the_proof_holds(name: str, count: int):
    wrapped = lora(name, count=count)
    before = state_of(wrapped)
    model = ik.load(wrapped, tiny.tokenizer())
    assert prove(model) == 3 and state_of(wrapped) == before
    layer = {"llama": "self_attn.o_proj", "gpt2": "attn.c_proj", "bert": "attention.output.dense"}[name]
    for index, block in enumerate(model.blocks):
        expected = effective(block.get_submodule(layer))
        assert torch.allclose(model.projection(index).flatten(0, 1), expected, atol=1e-12)
    batch = next(model.batches(model.encode(TEXT)))
    with torch.no_grad():
        own = wrapped(input_ids=batch.ids)[0]
    trace = model.trace(batch)
    assert torch.allclose(trace.hidden[-1] if trace.logits is None else trace.logits, own, atol=1e-6)
    assert ik.effective_attention(model, TEXT).verify().hidden < 1e-6


def test_attribution_goes_through_adapters():
    wrapped = lora(count=2)
    through = ik.token_attribution(ik.load(wrapped, tiny.tokenizer()), TEXT).contribution
    merged = ik.token_attribution(ik.load(wrapped.merge_and_unload(), tiny.tokenizer()), TEXT).contribution
    assert torch.allclose(through, merged, atol=1e-12)


def test_disabled_merged_and_other_adapters_are_other_models():
    wrapped = lora(count=2)
    base = ik.load(tiny.build("llama", dtype=torch.float64), tiny.tokenizer())
    both = ik.load(wrapped, tiny.tokenizer())
    fingerprints = {both.fingerprint}
    with wrapped.disable_adapter():
        disabled = ik.load(wrapped, tiny.tokenizer())
        assert torch.equal(disabled.projection(0), base.projection(0))
        fingerprints.add(disabled.fingerprint)
    wrapped.set_adapter("other1")
    one = ik.load(wrapped, tiny.tokenizer())
    assert not torch.allclose(one.projection(0), base.projection(0), atol=1e-3)
    fingerprints.add(one.fingerprint)
    wrapped.merge_adapter()
    merged = ik.load((wrapped, tiny.tokenizer()))
    assert torch.allclose(merged.projection(0), one.projection(0), atol=1e-12)
    assert len({*fingerprints, merged.fingerprint}) == 4
    wrapped.unmerge_adapter()
    plain = ik.load(wrapped.merge_and_unload(), tiny.tokenizer())
    assert torch.allclose(plain.projection(1), merged.projection(1), atol=1e-12)


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(r=2, target_modules=["value", "dense"], use_dora=True),
        peft.LoraConfig(r=2, target_modules=["value", "dense"], lora_bias=True),
        peft.IA3Config(target_modules=["value", "dense"], feedforward_modules=["dense"]),
    ],
    ids=["dora", "lora_bias", "ia3"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_adapters_are_read_as_they_compute(config: peft.PeftConfig, dtype: torch.dtype):
    wrapped = peft.get_peft_model(tiny.build("bert", dtype=dtype), config)
    for key, weight in wrapped.named_parameters():
        if "lora" in key or "ia3" in key:
            weight.data = weight.data + torch.rand_like(weight)
    model = ik.load(wrapped, tiny.tokenizer())  # which proves it
    layer = model.blocks[0].get_submodule("attention.self.value")
    x = torch.randn(4, 24, dtype=torch.float64).to(dtype)
    expected = x.double() @ linear_weight(layer, dtype).double() + linear_bias(layer).double()
    with torch.no_grad():
        off = (layer(x).double() - expected).abs().max() / expected.abs().max()
    assert off < (1e-12 if dtype == torch.float64 else 2e-2)


def test_learned_prompts_are_refused_in_words():
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    wrapped = peft.get_peft_model(tiny.build("gpt2"), config)
    with pytest.raises(ik.ModelError, match=r"its adapter 'default' \(PREFIX_TUNING\) puts learned vectors before"):
        ik.load(wrapped, tiny.tokenizer())


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """The folder of an adapter, whose base is a folder beside it."""
    base = saved(tmp_path / "base")
    wrapped = lora(dtype=torch.float32)
    wrapped.peft_config["default"].base_model_name_or_path = str(base)
    wrapped.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_of_an_adapter_is_read_with_its_base(adapter: Path, dtype: str):
    model = ik.load(adapter, dtype=dtype)
    assert model.name == "adapter" and {weight.dtype for weight in model.hf.parameters()} == {getattr(torch, dtype)}
    expected = ik.load(lora(dtype=torch.float32), tiny.tokenizer())
    assert torch.allclose(
        model.projection(2).float(), expected.projection(2), atol=1e-2 if dtype == "bfloat16" else 1e-6
    )
    tiny.tokenizer().save_pretrained(adapter)
    assert ik.load(adapter).tokenizer.name_or_path == str(adapter)


@pytest.mark.parametrize("offline", [True, False])
def test_hub_ids_are_read_from_a_local_cache(adapter: Path, monkeypatch: pytest.MonkeyPatch, offline: bool):
    """Where the hub does not answer it is asked once for each model; an adapter's tokenizer comes with its base."""
    asked = []
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(adapter.parent / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_: asked.append(host) or unknown_host())
    rewritten(adapter, lambda config: config.update(base_model_name_or_path="someone/base"), "adapter_config.json")
    for folder, commit in ((adapter, "a" * 40), (adapter.parent / "base", "b" * 40)):  # as huggingface_hub lays it out
        repository = adapter.parent / "hub" / f"models--someone--{folder.name}"
        shutil.copytree(folder, repository / "snapshots" / commit)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
    base = ik.load("someone/base")
    assert (base.name, base.revision) == ("someone/base", "b" * 40)
    assert base.recipe == Recipe("someone/base", revision="b" * 40)
    adapted = ik.load("someone/adapter")
    assert (adapted.name, adapted.revision) == ("someone/adapter", "a" * 40) and "default" in adapted.hf.peft_config
    silence = "HF_HUB_OFFLINE is set" if offline else "huggingface.co does not answer"
    with pytest.raises(
        ik.ModelError, match=rf"Loading nowhere: there is no such folder, and no such model .*{silence}"
    ):
        ik.load("nowhere")
    assert len(asked) == (0 if offline else 4)  # an adapter and its base are two


def unknown_host() -> None:
    raise socket.gaierror(-2, "Name or service not known")


def test_adapters_that_cannot_be_read_are_refused_in_words(adapter: Path, monkeypatch: pytest.MonkeyPatch):
    weights = load_file(adapter / "adapter_model.safetensors")
    first = sorted(weights)[0]
    save_file(
        {name: weight for name, weight in weights.items() if name != first}, adapter / "adapter_model.safetensors"
    )
    with pytest.raises(ik.ModelError, match="the adapter lacks 1 weights for LlamaForCausalLM"):
        ik.load(adapter)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ik.ModelError, match=r"the adapter has no adapter_model\.safetensors"):
        ik.load(adapter)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "peft", None)
        with pytest.raises(ik.ModelError, match=r"the package peft is not installed.*identikit\[peft\]"):
            ik.load(adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    wrong = {None: "does not name its base model", "no/such-model": "Loading no/such-model: there is no"}
    for base, words in wrong.items():
        (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
        with pytest.raises(ik.ModelError, match=words) as caught:
            ik.load(adapter)
        assert "\n" not in str(caught.value)


# Quantised weights


def in_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight in float8 with a scale for each quarter, and what the two stand for."""
    parts = weight.unflatten(0, (2, -1)).unflatten(2, (2, -1))
    scales = parts.abs().amax((1, 3)) / 448
    quantised = (parts / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    plain = quantised.float() * scales[:, None, :, None]
    return quantised.reshape(weight.shape), scales, plain.reshape(weight.shape)


def test_fp8_is_read_with_its_scales_or_not_at_all(tmp_path: Path):
    folder, expected, stored = saved(tmp_path), {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        stored[name] = expected[name] = weight
        if "proj.weight" in name:
            stored[name], stored[f"{name}_scale_inv"], expected[name] = in_fp8(weight)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ik.ModelError, match=r"proj\.weight' is stored as F8_E4M3, .* its value is unknown"):
        ik.load(folder)
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    rewritten(folder, lambda config: config.update(quantization_config=settings))
    own = dict(ik.load(folder).hf.named_parameters())
    assert all(torch.equal(own[name], weight) for name, weight in expected.items() if name in own)


def test_mxfp4_is_read_as_the_numbers_that_it_stands_for(tmp_path: Path):
    """Four bits per number, a power of two per 32: as gpt-oss ships its experts."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_local_experts": 2, "num_experts_per_tok": 1}
    config = tiny.BUILDERS["gpt_oss"].config().to_dict() | sizes
    torch.manual_seed(0)
    model = hf.GptOssForCausalLM(hf.GptOssConfig(**config))
    model.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    stored, expected = load_file(tmp_path / "model.safetensors"), {}
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = stored.pop(name).shape
        codes, scales = torch.randint(16, (experts, columns, 1, rows)), torch.randint(118, 122, (experts, columns, 1))
        stored[f"{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        stored[f"{name}_scales"] = scales.to(torch.uint8)
        expected[name] = (values[codes] * 2.0 ** (scales - 127)[..., None]).flatten(2).transpose(1, 2)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    rewritten(tmp_path, lambda config: config.update(quantization_config={"quant_method": "mxfp4"}))
    own = dict(ik.load(tmp_path).hf.named_parameters())
    assert len(expected) == 6
    assert all(torch.equal(own[name], weight) for name, weight in expected.items())


# Devices


@pytest.mark.parametrize("name", ["llama", "bloom", "xlnet"])
def test_a_model_that_accelerate_has_dispatched_works_and_keeps_its_hooks(name: str):
    model = accelerate.dispatch_model(tiny.build(name), {"": "cpu"}, force_hooks=True)
    accelerate.hooks.add_hook_to_module(list(model.modules())[-3], accelerate.hooks.ModelHook())
    for block in model.base_model.modules():
        if type(block).__name__.endswith("Attention"):
            accelerate.hooks.add_hook_to_module(block, accelerate.hooks.AlignDevicesHook("cpu"))
    before, forwards = state_of(model), [vars(module).get("forward") for module in model.modules()]
    loaded = ik.load(model, tiny.tokenizer())
    plain = ik.load(tiny.build(name), tiny.tokenizer())
    assert torch.equal(ik.effective_attention(loaded, TEXT).effective, ik.effective_attention(plain, TEXT).effective)
    assert state_of(model) == before
    assert all(a is b for a, b in zip(forwards, [vars(m).get("forward") for m in model.modules()], strict=True))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_what_a_model_hands_out_is_a_copy(name: str):
    model = tiny.loaded(name)
    before = model.fingerprint
    model.projection(0).zero_()
    bias = model.value_bias(0)
    if bias is not None:
        bias.zero_()
    model.check_unchanged(before)
