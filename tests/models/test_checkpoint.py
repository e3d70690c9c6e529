"""Checkpoints whose files say something else than what would be read: each is refused in one line, by name."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as hf
from huggingface_hub.utils import logging as hub_logging
from safetensors.torch import load_file, save_file
from transformers.utils import logging as hf_logging

import identikit as ik
from identikit.models.load.fingerprint import identity_of
from tests.models import tiny
from tests.models.made import rewritten, saved
from tests.models.test_weights import lora


def restored(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Change the weights in a folder's only file."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def refused(folder: Path, words: str, **options) -> None:
    """A folder is refused with these words, in one line that begins with its name; libraries stay as loud as before."""
    before = hf_logging.get_verbosity(), hub_logging.get_verbosity()
    with pytest.raises(ik.ModelError, match=words) as caught:
        ik.load(folder, **options)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(("Loading ", "Reading ")) and message.endswith("."), message
    assert (hf_logging.get_verbosity(), hub_logging.get_verbosity()) == before


# Weights that would be left out


def test_relative_positions_read_as_absolute(tmp_path: Path):
    added = {"encoder.layer.1.attention.self.distance_embedding.weight": torch.randn(127, 6)}
    folder = restored(saved(tmp_path, "bert"), lambda weights: weights.update(added))
    refused(
        folder, r"holds the weight 'encoder\.layer\.1\.attention\.self\.distance_embedding\.weight', which BertModel"
    )
    heads = {f"bert.{name}": weight for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(heads, folder / "model.safetensors", metadata={"format": "pt"})  # as a model with a head spells them
    refused(folder, r"'bert\.encoder\.layer\.1\.attention\.self\.distance_embedding\.weight'")


@pytest.mark.parametrize(
    ("name", "layers"),
    [("bert", "num_hidden_layers"), ("gpt2", "n_layer"), ("t5-both", "num_layers"), ("llava", "text_config")],
)
def test_fewer_layers_than_the_weights_have(tmp_path: Path, name: str, layers: str):
    def fewer(config: dict) -> None:
        where, entry = (config[layers], "num_hidden_layers") if layers == "text_config" else (config, layers)
        where[entry] = 2
        where.pop("layer_types", None)

    folder = saved(tmp_path, name)
    rewritten(folder, fewer)
    refused(folder, r"holds the weight '.*\b2\..*', which \w+ with its config\.json has no place for")


@pytest.mark.parametrize(
    "key",
    ["embeddings.relative.weight", "bert.rel_embeddings.weight", "encoder.norm.bias", "encoder.layer.0.attention.bias"],
)
def test_other_weights_of_the_part_that_is_read(tmp_path: Path, key: str):
    refused(restored(saved(tmp_path, "bert"), lambda weights: weights.update({key: torch.ones(24)})), f"weight '{key}'")


def test_weights_of_heads_and_old_tables_are_let_go(tmp_path: Path):
    folder, own = saved(tmp_path, "bert"), tiny.build("bert")
    added = {
        "classifier.weight": torch.ones(2, 24),
        "cls.seq_relationship.weight": torch.ones(2, 24, dtype=torch.int8),
        "lm_head.bias": torch.ones(60),
        "embeddings.position_ids": torch.arange(64)[None],
        "encoder.layer.0.attention.self.rotary_emb.inv_freq": torch.ones(3),
        "encoder.layer.0.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
    }
    restored(folder, lambda weights: weights.update(added))
    assert ik.load(folder).fingerprint == identity_of(own, tiny.tokenizer()).model


def test_adapters_inside_a_plain_checkpoint(tmp_path: Path):
    folder = saved(tmp_path)
    wrapped = lora(dtype=torch.float32).base_model.model.state_dict()
    weights = {name: weight.clone() for name, weight in wrapped.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, r"'model\.layers\.0\.self_attn\.o_proj\.base_layer\.bias' is a weight of an adapter.*merge")


def test_an_adapter_of_more_layers_than_its_base(tmp_path: Path):
    wrapped = lora(dtype=torch.float32)
    wrapped.peft_config["default"].base_model_name_or_path = str(saved(tmp_path / "base"))
    wrapped.save_pretrained(tmp_path / "adapter")
    rewritten(tmp_path / "base", lambda config: config.update(num_hidden_layers=2))
    shorter = lambda weights: [weights.pop(name) for name in list(weights) if ".layers.2." in name]  # noqa: E731
    restored(tmp_path / "base", shorter)
    refused(
        tmp_path / "adapter", r"the adapter holds the weight '.*layers\.2\..*', which LlamaForCausalLM has no place"
    )


# Weights that would be made up or misread


def test_a_random_pooler_under_a_head_is_refused(tmp_path: Path):
    torch.manual_seed(0)
    hf.BertForSequenceClassification(hf.BertConfig(**tiny._ENCODER)).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    ik.load(tmp_path)
    restored(tmp_path, lambda weights: weights.pop("bert.pooler.dense.weight"))
    refused(tmp_path, r"lacks 1 weights of BertForSequenceClassification \(the first is bert\.pooler\.dense\.weight\)")


def test_shapes_that_do_not_fit(tmp_path: Path):
    folder = saved(tmp_path)
    rewritten(folder, lambda config: config.update(vocab_size=61))
    refused(folder, r"'lm_head\.weight' is of shape \[60, 24\], and with its config\.json it has to be \[61, 24\]")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_numbers_that_are_not_plain(tmp_path: Path, dtype: torch.dtype):
    key = "encoder.layer.2.output.dense.weight"
    folder = restored(saved(tmp_path, "bert"), lambda weights: weights.update({key: weights[key].to(dtype)}))
    refused(folder, rf"the weight '{key}' is stored as \w+, .*its value is unknown")


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e300])
def test_numbers_that_are_not_finite_in_single_precision(tmp_path: Path, value: float):
    key = "model.layers.1.mlp.up_proj.weight"

    def change(weights: dict[str, torch.Tensor]) -> None:
        weights[key] = weights[key].double()
        weights[key][3, 3] = value

    refused(restored(saved(tmp_path), change), rf"the weight '{key}' holds NaN or infinity")


# Files


def sharded(folder: Path) -> tuple[Path, dict]:
    index = saved(folder, max_shard_size="20KB") / "model.safetensors.index.json"
    return index, json.loads(index.read_text())


@pytest.mark.parametrize("where", ["../{}", "{absolute}", "..\\{}"])
def test_an_index_that_leaves_its_folder(tmp_path: Path, where: str):
    index, said = sharded(tmp_path / "model")
    first = sorted(set(said["weight_map"].values()))[0]
    (tmp_path / first).write_bytes((tmp_path / "model" / first).read_bytes())
    named = where.format(first, absolute=tmp_path / first)
    said["weight_map"] = {key: named if file == first else file for key, file in said["weight_map"].items()}
    index.write_text(json.dumps(said))
    refused(tmp_path / "model", r"index\.json names .* as a file of weights, expected a \.safetensors file in the same")


@pytest.mark.parametrize("named", ["../model.safetensors", "pytorch_model.bin", 3])
def test_a_configuration_that_names_other_weights(tmp_path: Path, named: object):
    folder = saved(tmp_path)
    rewritten(folder, lambda config: config.update(transformers_weights=named))
    refused(folder, r"config\.json names .* as a file of weights|transformers_weights")


def test_pickled_shards_and_shards_that_are_not_there(tmp_path: Path):
    index, said = sharded(tmp_path)
    first, second, *_ = sorted(set(said["weight_map"].values()))
    (tmp_path / first).rename(tmp_path / "elsewhere.safetensors")
    refused(tmp_path, rf"names '{first}', and there is no such file")
    torch.save({}, tmp_path / "first.bin")
    renamed = {key: "first.bin" if file == first else file for key, file in said["weight_map"].items()}
    index.write_text(json.dumps(said | {"weight_map": renamed}))
    refused(tmp_path, r"names 'first\.bin' as a file of weights, expected a \.safetensors file")
    (tmp_path / "elsewhere.safetensors").rename(tmp_path / first)
    index.write_text(json.dumps(said))
    ik.load(tmp_path)
    twice = load_file(tmp_path / first) | load_file(tmp_path / second)
    save_file(twice, tmp_path / second, metadata={"format": "pt"})
    refused(tmp_path, rf"the weight '.*' is in both {first} and {second}")


@pytest.mark.parametrize("content", ["{", '{"weight_map": {}}', '{"weight_map": {"a": 3}, "metadata": {}}'])
def test_an_index_that_is_none(tmp_path: Path, content: str):
    index, _ = sharded(tmp_path)
    index.write_text(content)
    refused(tmp_path, r"model\.safetensors\.index\.json")


@pytest.mark.parametrize(
    "damage",
    [lambda content: content[:-100], lambda content: b"", lambda content: struct.pack("<Q", 1 << 60) + content[8:]],
    ids=["cut", "empty", "header too long"],
)
def test_damaged_safetensors(tmp_path: Path, damage: Callable[[bytes], bytes]):
    file = saved(tmp_path) / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    refused(tmp_path, r"model\.safetensors cannot be read \(.+\)\. Download it again")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", r"config\.json cannot be read as JSON"),
        ("[1]", r"config\.json holds a list, expected an object"),
        ('{"model_type": "bert-of-next-year"}', "model_type .*'bert-of-next-year', which transformers"),
        ('{"model_type": "bert", "hidden_size": "wide"}', "hidden_size"),
    ],
)
def test_configurations_that_are_none(tmp_path: Path, content: str, words: str):
    folder = saved(tmp_path, "bert")
    (folder / "config.json").write_text(content, encoding="latin-1")
    refused(folder, words)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"hidden_size": 25}, r"The hidden size \(25\) is not a multiple"),
        ({"hidden_act": "no such"}, r"KeyError: 'no such'\)\. Check its config\.json"),
        ({"model_type": "llama"}, "lacks 29 weights of LlamaModel"),
    ],
)
def test_configurations_that_do_not_fit(tmp_path: Path, entry: dict, words: str):
    folder = saved(tmp_path, "bert")
    rewritten(folder, lambda config: config.update(entry))
    refused(folder, words)


@pytest.mark.parametrize("named", [[3], ["LlamaModel"]])
def test_a_class_that_is_none_is_passed_over(tmp_path: Path, named: object):
    folder = saved(tmp_path, "bert")
    rewritten(folder, lambda config: config.update(architectures=named))
    assert type(ik.load(folder).hf) is hf.BertModel


def test_a_tokenizer_that_is_none(tmp_path: Path):
    folder = saved(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "NoSuch"}')
    assert ik.load(folder).encode("w5 w6")[0].tokens[1:3] == ("w5", "w6")  # what broken settings leave is the tokenizer
    (folder / "tokenizer.json").write_text("[]")
    refused(folder, "tokenizer cannot be read")


def test_special_tokens_beyond_the_embeddings(tmp_path: Path):
    folder = saved(tmp_path, "bert")
    rewritten(folder, lambda config: config.update(vocab_size=2))
    restored(
        folder,
        lambda weights: weights.update(
            {"embeddings.word_embeddings.weight": weights["embeddings.word_embeddings.weight"][:2].clone()}
        ),
    )
    refused(folder, r"its tokenizer puts '</s>' \(id 2\) into every text, and the model has embeddings for only 2 ids")


def test_a_padding_token_beyond_the_embeddings_is_not_used():
    """As where a user has given GPT-2 a padding token and has not resized it."""
    reader = tiny.tokenizer()
    reader.add_special_tokens({"pad_token": "[PAD]"})
    assert reader.pad_token_id == tiny.VOCABULARY
    model = ik.load(tiny.build("gpt2"), reader)
    alone, beside = ik.effective_attention(model, "w5 w6"), ik.effective_attention(model, ["w5 w6", "w5 w6 w7 w8"])[0]
    assert model.pad_id == 0 and torch.allclose(alone.raw, beside.raw, atol=1e-6)


# Every family


def without_pooler(weights: dict[str, torch.Tensor]) -> None:
    for name in [name for name in weights if "pooler." in name]:
        weights.pop(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(tiny.BUILDERS))
def test_every_family_is_read_from_a_folder_as_it_was_saved(tmp_path: Path, name: str):
    """Nothing is refused, and the fingerprint is that of the model in memory."""
    model = tiny.build(name)
    model.save_pretrained(tmp_path)
    tiny.reader(name).save_pretrained(tmp_path)
    loaded = ik.load(tmp_path)
    own = ik.load(model, loaded.tokenizer)  # for some families transformers changes a plain tokenizer as it is read
    assert type(loaded.hf) is type(own.hf)
    if name != "marian":  # it makes its positions itself, and here they are drawn anew
        weights = dict(own.hf.named_parameters())
        assert all(torch.equal(weight, weights[key]) for key, weight in loaded.hf.named_parameters())
        assert loaded.fingerprint == own.fingerprint
    if model.base_model is model and any("pooler." in key for key, _ in model.named_parameters()):
        restored(tmp_path, without_pooler)
        assert ik.load(tmp_path).fingerprint == ik.load(tmp_path).fingerprint
