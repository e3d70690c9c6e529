"""Packed weights, by what their layers answer: the same numbers as with the plain weights that they stand for."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

import identikit as ik
from identikit.models.load.linear import embedding_rows, linear_bias, linear_weight
from identikit.models.load.weights import is_packed
from tests.models import tiny
from tests.models.made import TEXT, answers, rewritten, saved
from tests.models.state import state_of


class Packed(nn.Module):
    """A linear layer in int8 with a scale for each row; like those of bitsandbytes, its derivative is silently zero."""

    def __init__(self, plain: Any):
        super().__init__()
        weight = plain.weight.detach()
        weight = weight.T if isinstance(plain, hf.pytorch_utils.Conv1D) else weight
        self.out_features, self.in_features = weight.shape
        self.scale = nn.Buffer(weight.abs().amax(1, keepdim=True) / 127)
        self.codes = nn.Buffer((weight / self.scale).round().to(torch.int8))
        self.bias = plain.bias
        self.reads = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.taken(x.detach()), (self.codes * self.scale).to(x.dtype), self.bias)

    def taken(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Rounding(Packed):
    """One that rounds what it takes to 8 bits as well."""

    def taken(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        return (x / scale).round() * scale


class Curved(Packed):
    """One that is no linear layer, whatever it says."""

    def taken(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 3


def replaced(model: nn.Module, made: Any, among: str = "") -> Any:
    """Put packed layers in the place of a model's linear ones whose name contains something."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear | hf.pytorch_utils.Conv1D) and among in name and "lm_head" not in name:
            model.set_submodule(name, made(layer))
    return model


def unpacked(model: Any) -> Any:
    """The same model with plain weights: what the packed ones stand for."""
    plain = copy.deepcopy(model)
    state = torch.random.get_rng_state()
    for name, layer in list(plain.named_modules()):
        if isinstance(layer, Packed):
            linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            linear.weight = nn.Parameter((layer.codes * layer.scale).detach())
            linear.bias = layer.bias
            plain.set_submodule(name, linear)
    torch.random.set_rng_state(state)
    return plain


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_packed_weights_give_what_the_plain_ones_do(name: str):
    away = replaced(tiny.build(name, dtype=torch.float64), Packed)
    before = state_of(away)
    ours, theirs = (ik.load(each, tiny.tokenizer()) for each in (away, unpacked(away)))
    assert (ours.packed, theirs.packed) == ("packed weights (Packed)", "")
    for layer in range(ours.n_layers):
        torch.testing.assert_close(ours.projection(layer), theirs.projection(layer), rtol=0, atol=1e-12)
    mine, stock = answers(ours), answers(theirs)
    for what, expected in stock.items():
        assert torch.allclose(mine[what], expected, rtol=1e-9, atol=1e-10), what
    assert mine["attribution"].min() < 0.9 * mine["attribution"].max()
    assert ik.effective_attention(ours, TEXT).verify().hidden < 1e-6
    assert state_of(away) == before


@pytest.mark.parametrize("norm", ["sum", "gradient"])
def test_reverse_mode_goes_through_packed_layers(norm: str):
    away = replaced(tiny.build("llama", dtype=torch.float64), Packed)
    ours, theirs = (ik.load(each, tiny.tokenizer()) for each in (away, unpacked(away)))
    asked: dict[str, Any] = {"norm": "sum", "targets": [6]} if norm == "sum" else {"target": "w5"}
    found = [ik.token_attribution(each, TEXT, **asked).contribution for each in (ours, theirs)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)


def test_layers_that_round_what_they_take_are_read_to_what_they_round():
    away = replaced(tiny.build("llama", dtype=torch.float64), Rounding)
    ours, theirs = (ik.load(each, tiny.tokenizer()) for each in (away, unpacked(away)))
    mine, stock = answers(ours), answers(theirs)
    assert torch.equal(mine["null"], stock["null"])
    assert 1e-6 < (mine["raw"] - stock["raw"]).abs().max() < 0.05
    assert (mine["attribution"] - stock["attribution"]).abs().max() < 0.05


def test_what_has_no_derivative_is_refused_in_words_and_the_rest_is_read():
    away = replaced(tiny.build("llama", dtype=torch.float64), Curved, "gate_proj")
    model = ik.load(away, tiny.tokenizer())
    assert ik.effective_attention(model, TEXT).verify().hidden < 1e-6
    with pytest.raises(ik.ModelError, match=r"mlp\.gate_proj' \(Curved\) is not linear"):
        ik.token_attribution(model, TEXT)
    for block in away.model.layers:
        del block.mlp.gate_proj.in_features
        block.mlp.gate_proj.kept = nn.Parameter(torch.ones(3, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ik.ModelError, match=r"is packed and is no linear layer"):
        ik.token_attribution(ik.load(away, tiny.tokenizer()), TEXT)


def test_a_packed_projection_that_is_not_linear_is_refused():
    away = replaced(tiny.build("llama", dtype=torch.float64), Curved, "o_proj")
    with pytest.raises(ik.ModelError, match="head outputs times H is the module's output"):
        ik.load(away, tiny.tokenizer())


def test_codes_and_scales_are_in_the_fingerprint():
    away = replaced(tiny.build("llama"), Packed)
    seen = {ik.load(away, tiny.tokenizer()).fingerprint, ik.load(unpacked(away), tiny.tokenizer()).fingerprint}
    away.model.layers[1].mlp.up_proj.codes[0, 0] += 1
    seen.add(ik.load(away, tiny.tokenizer()).fingerprint)
    away.model.layers[1].mlp.up_proj.scale[0] *= 1.01
    seen.add(ik.load(away, tiny.tokenizer()).fingerprint)
    assert len(seen) == 4


def test_provenance_says_how_weights_are_packed(tmp_path: Path):
    model = ik.load(replaced(tiny.build("llama"), Packed), tiny.tokenizer())
    result = ik.effective_attention(model, TEXT)
    result.save(tmp_path / "result")
    assert ik.open_result(tmp_path / "result").provenance.packed == "packed weights (Packed)"
    assert ik.effective_attention(ik.load(), "A text.").provenance.packed == ""


def test_weights_that_are_packed_cannot_be_shuffled():
    model = ik.load(replaced(tiny.build("bert"), Packed), tiny.tokenizer())
    with pytest.raises(ik.ModelError, match="offloaded or packed"):
        ik.evaluate(model, ["w5 w6 w7", "w8 w9 w5"], ["mean"], tests="randomised")


def test_codes_without_a_layer_that_reads_them_are_refused():
    model = tiny.build("llama")
    codes = nn.Parameter(torch.ones(40, 24, dtype=torch.uint8), requires_grad=False)
    model.model.layers[1].mlp.up_proj.weight = codes
    with pytest.raises(ik.ModelError, match=r"layers\.1\.mlp\.up_proj\.weight' is quantised \(uint8\), and Linear has"):
        ik.load(model, tiny.tokenizer())


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("gptq", r"transformers cannot read them here \(.*Install the package"),
        ("of next year", "transformers reads none of them so"),
    ],
)
def test_what_cannot_be_unpacked_is_refused_in_a_line(tmp_path: Path, method: str, why: str):
    settings = {"quant_method": method, "bits": 4}
    rewritten(saved(tmp_path), lambda config: config.update(quantization_config=settings))
    with pytest.raises(ik.ModelError, match=rf"weights are packed \({method}\), and {why}") as caught:
        ik.load(tmp_path)
    assert "\n" not in str(caught.value)


# Packages


def packed_by_transformers(folder: Path, settings: Any, dtype: torch.dtype = torch.float32) -> Path:
    """Save a model that transformers packed."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = hf.LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes)
    torch.manual_seed(0)
    hf.LlamaForCausalLM(config).save_pretrained(folder / "plain")
    options: dict[str, Any] = {"quantization_config": settings, "dtype": dtype, "device_map": {"": "cpu"}}
    hf.LlamaForCausalLM.from_pretrained(folder / "plain", **options).save_pretrained(folder / "packed")
    tiny.tokenizer().save_pretrained(folder / "packed")
    return folder / "packed"


def as_plain(model: ik.Model) -> ik.Model:
    """The same model with plain weights: what its packed layers answer to unit vectors, or their own say."""
    settings = {key: value for key, value in model.hf.config.to_dict().items() if key != "quantization_config"}
    plain = hf.LlamaForCausalLM(hf.LlamaConfig.from_dict(settings)).to(model.dtype).eval()
    weights = plain.state_dict()
    for name, layer in model.hf.named_modules():
        if is_packed(layer):
            weights[f"{name}.weight"].copy_(linear_weight(layer, model.dtype).T)
        else:
            for key, weight in layer.named_parameters(recurse=False):
                weights[f"{name}.{key}"].copy_(weight)
    return ik.load(plain, model.tokenizer)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["int8", "nf4", "fp4 twice"])
def test_bitsandbytes_is_read(tmp_path: Path, kind: str, dtype: str):
    pytest.importorskip("bitsandbytes", reason="packed weights of bitsandbytes need it (pip install bitsandbytes)")
    how: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": kind[:3]}
    how |= {"bnb_4bit_use_double_quant": True} if kind == "fp4 twice" else {}
    folder = packed_by_transformers(
        tmp_path, hf.BitsAndBytesConfig(**{"load_in_8bit": True} if kind == "int8" else how)
    )
    model = ik.load(folder, dtype=dtype)
    words = "8-bit weights (bitsandbytes)" if kind == "int8" else f"4-bit weights (bitsandbytes {kind[:3]}, computed in"
    about = ik.effective_attention(model, TEXT).provenance
    assert (about.packed.startswith(words), about.dtype) == (True, dtype)
    assert ik.load(folder, dtype=dtype).fingerprint == model.fingerprint
    mine, stock = answers(model), answers(as_plain(model))
    assert torch.equal(mine["null"], stock["null"])
    for what in ("raw", "effective", "lower", "upper", "attribution"):
        assert (mine[what] - stock[what]).abs().max() < 2e-3, what


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["int8", "int4", "int8 of activations too"])
def test_torchao_is_read(tmp_path: Path, kind: str):
    torchao = pytest.importorskip("torchao", reason="packed weights of torchao need it (pip install torchao)")
    from torchao import quantization

    made = {
        "int8": lambda: quantization.Int8WeightOnlyConfig(),
        "int4": lambda: quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4),
        "int8 of activations too": lambda: quantization.Int8DynamicActivationInt8WeightConfig(),
    }
    model = ik.load(packed_by_transformers(tmp_path, hf.TorchAoConfig(made[kind]())))
    assert torchao and model.packed.startswith("packed weights (torchao Int")
    theirs = as_plain(model)
    mine, stock = answers(model), answers(theirs)
    weight = model.blocks[0].self_attn.o_proj.weight.dequantize()
    near = 1e-3 if "too" in kind else 1e-6
    assert torch.allclose(model.projection(0).flatten(0, 1), weight.T, rtol=0, atol=near)
    assert torch.equal(mine["null"], stock["null"])
    for what in ("raw", "effective", "lower", "upper", "attribution"):
        assert (mine[what] - stock[what]).abs().max() < (2e-3 if "too" in kind else 1e-6), what


def written_gguf(file: Path, kind: str) -> hf.PreTrainedModel:
    """Write a tiny Llama as a GGUF file; return it with the weights that the file stands for."""
    gguf = pytest.importorskip("gguf", reason="GGUF files need it (pip install gguf)")
    vocabulary = ["<unk>", "<s>", "</s>", "\u0120", *"abcdefghijklmnopqrstuvwxyz", "ab"]
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = hf.LlamaConfig(vocab_size=len(vocabulary), num_attention_heads=4, max_position_embeddings=64, **sizes)
    model = hf.LlamaForCausalLM(config).eval()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(vocabulary)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    packing = gguf.GGMLQuantizationType[kind]
    for name, weight in model.state_dict().items():
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2], 0)
        rows = weight.numpy()
        if heads:  # GGUF pairs the halves of rotary dimensions
            rows = rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
        place = names.get_name(name, try_suffixes=(".weight",))
        if rows.ndim == 1:
            writer.add_tensor(place, rows)
            continue
        codes = gguf.quants.quantize(rows, packing)
        writer.add_tensor(place, codes, raw_dtype=packing)
        read = gguf.quants.dequantize(codes, packing)
        if heads:
            read = read.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
        weight.copy_(torch.from_numpy(read))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_a_gguf_file_is_read_as_the_numbers_that_it_stands_for(tmp_path: Path, kind: str):
    file = tmp_path / f"tiny.{kind}.gguf"
    meant = written_gguf(file, kind)
    read = ik.load(file)
    assert (read.name, read.n_layers, read.dtype) == (file.name, 2, torch.float32)
    assert all(torch.equal(weight, meant.get_parameter(name)) for name, weight in read.hf.named_parameters())
    text = "a dog sat"
    plain = ik.load(meant, read.tokenizer)
    mine, stock = (ik.effective_attention(each, text) for each in (read, plain))
    assert len(mine.tokens) >= 7
    assert torch.equal(mine.effective, stock.effective)
    assert mine.verify().logits is not None
    assert read.recipe is not None
    assert read.recipe.load().fingerprint == read.fingerprint


def test_gguf_files_that_cannot_be_read_are_refused_in_a_line(tmp_path: Path):
    file = tmp_path / "damaged.gguf"
    file.write_bytes(b"GGUF")
    for given, why in ((file, "transformers cannot"), (tmp_path, "Name the file itself")):
        with pytest.raises(ik.ModelError, match=why) as caught:
            ik.load(given)
        assert "\n" not in str(caught.value)


def test_embeddings_and_biases_of_packed_layers():
    class Rows(nn.Module):
        num_embeddings = 5

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.arange(10).view(5, 2).to(torch.int8), requires_grad=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.weight[ids].float() / 2

    assert torch.equal(embedding_rows(Rows()), torch.arange(10).view(5, 2) / 2)
    plain = nn.Linear(3, 4)
    assert torch.equal(linear_bias(Packed(plain)), plain.bias)
