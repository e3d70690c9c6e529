"""Configurations and tokenizer files that are damaged, or say other things than the weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import identikit as ik
from tests.hostile.judging import refused, refused_or_right
from tests.hostile.made import TEXT, copied, right, same, stock_attention


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "content", [b"null", b'{"a": "\xff\xfe"}', bytes(100), b"[" * 100_000], ids=lambda held: held[:9]
)
def test_a_damaged_file_is_refused_or_not_needed(file: str, content: bytes, tmp_path: Path):
    folder = copied("bert", tmp_path)
    (folder / file).write_bytes(content)
    with refused_or_right():
        same(ik.effective_attention(ik.load(folder), TEXT), right("bert"))


def change_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def read_as_transformers_reads(folder: Path) -> None:
    """Load a folder; compare attention with transformers' own model and tokenizer, which load it beside ours.

    What transformers itself would fill with random numbers or leave out is never right.
    """
    model = ik.load(folder)
    attention = ik.effective_attention(model, TEXT)
    stock, report = type(model.hf).from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    missing = [key for key in report["missing_keys"] if "pooler" not in key]
    assert not missing and not report["unexpected_keys"] and not report["mismatched_keys"]
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT)["input_ids"]
    assert tokenizer.convert_tokens_to_ids(list(attention.tokens)) == ids
    assert torch.allclose(attention.raw.double(), stock_attention(stock.eval(), ids), atol=1e-5)
    assert attention.residual.max() < 1e-3


SIZES = [  # fields that sizes of weights follow from, each with another value that does not fit
    ("bert", "hidden_size", "many"),
    ("bert", "hidden_size", 10**9),
    ("bert", "num_attention_heads", 0),
    ("bert", "intermediate_size", -1),
    ("bert", "vocab_size", 7),
    ("bert", "max_position_embeddings", None),
    ("bert", "type_vocab_size", 1.5),
    ("bert", "num_hidden_layers", 2),
    ("bert", "num_hidden_layers", 4),
    ("llama", "hidden_size", [24]),
    ("llama", "num_attention_heads", 7),
    ("llama", "num_key_value_heads", 0),
    ("llama", "intermediate_size", 1000),
    ("llama", "vocab_size", "many"),
    ("llama", "num_hidden_layers", 2),
]


@pytest.mark.parametrize(("name", "field", "value"), SIZES)
def test_a_size_that_does_not_fit_the_weights_is_refused(name: str, field: str, value: Any, tmp_path: Path):
    folder = copied(name, tmp_path)
    change_json(folder / "config.json", **{field: value})
    with refused():
        ik.load(folder)


MEANINGS = [  # another model, or none
    ("bert", "hidden_act", ["relu", "nonsense", 5]),
    ("bert", "layer_norm_eps", [1e-3, 0, float("nan"), "small"]),
    ("bert", "position_embedding_type", ["relative_key"]),
    ("bert", "is_decoder", [True, "yes"]),
    ("bert", "chunk_size_feed_forward", [2]),
    ("bert", "add_cross_attention", [True]),
    ("bert", "architectures", [["NoSuchModel"], "BertModel", ["os.system"]]),
    ("bert", "model_type", ["nonsense", None, "roberta", "llama", "mamba"]),
    ("bert", "dtype", ["bfloat16", "nonsense"]),
    ("bert", "quantization_config", [{"quant_method": "nonsense"}, "int8"]),
    ("bert", "_attn_implementation", ["sdpa", "nonsense"]),
    ("bert", "transformers_version", ["99.0.0"]),
    ("bert", "pad_token_id", [99, "no"]),
    ("bert", "pruned_heads", [{"0": [1]}]),
    ("bert", "output_attentions", [True]),
    ("bert", "return_dict", [False]),
    ("bert", "an_unknown_field", [{"deep": [1, 2]}]),
    ("llama", "rms_norm_eps", [1e-2, "x"]),
    ("llama", "rope_theta", [50.0, 0]),
    ("llama", "rope_scaling", [{"rope_type": "linear", "factor": 4.0}, {"rope_type": "nonsense"}]),
    ("llama", "rope_parameters", [{"rope_type": "default", "rope_theta": 77.0}, []]),
    ("llama", "head_dim", [8, "x"]),
    ("llama", "attention_bias", ["yes"]),
    ("llama", "mlp_bias", [True]),
    ("llama", "tie_word_embeddings", [True]),
    ("llama", "max_position_embeddings", [8, "x"]),
    ("llama", "sliding_window", [4]),
    ("llama", "attention_dropout", [0.5]),
]


@pytest.mark.parametrize(
    ("name", "field", "value"), [(n, field, value) for n, field, values in MEANINGS for value in values]
)
def test_another_meaning_is_read_as_transformers_reads_it(name: str, field: str, value: Any, tmp_path: Path):
    folder = copied(name, tmp_path)
    change_json(folder / "config.json", **{field: value})
    with refused_or_right():
        read_as_transformers_reads(folder)


def vocabulary(**words: Any) -> Callable[[dict], object]:
    return lambda tokenizer: tokenizer["model"]["vocab"].update(words)


SILENT_CUT = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
SILENT_PAD = {
    "strategy": {"Fixed": 20},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "<pad>",
}
TOKENIZERS: dict[str, Callable[[dict], object]] = {
    "without a vocabulary": lambda made: made["model"].pop("vocab"),
    "with an empty vocabulary": lambda made: made["model"]["vocab"].clear(),
    "with an id beyond the embeddings": vocabulary(w5=60),
    "with a negative id": vocabulary(w5=-1),
    "with one id twice": vocabulary(w5=6),
    "of an unknown kind": lambda made: made["model"].update(type="Nonsense"),
    "without an unknown token": lambda made: made["model"].update(unk_token="gone"),
    "that adds a token beyond the embeddings": lambda made: made["post_processor"]["special_tokens"]["</s>"].update(
        ids=[4000]
    ),
    "that adds a token without an id": lambda made: made["post_processor"].update(special_tokens={}),
    "that drops every word": lambda made: made.update(
        normalizer={"type": "Replace", "pattern": {"Regex": "."}, "content": ""}
    ),
    "that cuts texts silently": lambda made: made.update(truncation=SILENT_CUT),
    "that pads texts silently": lambda made: made.update(padding=SILENT_PAD),
}


@pytest.mark.parametrize("what", TOKENIZERS)
def test_an_odd_tokenizer_is_refused_or_read_as_transformers_reads_it(what: str, tmp_path: Path):
    folder = copied("bert", tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    TOKENIZERS[what](tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with refused_or_right():
        read_as_transformers_reads(folder)


SETTINGS = [
    ("tokenizer_class", "NoSuchTokenizer"),
    ("tokenizer_class", 5),
    ("model_max_length", -1),
    ("model_max_length", 3),
    ("padding_side", "left"),
    ("truncation_side", "up"),
    ("pad_token", "<gone>"),
    ("unk_token", 5),
    ("extra_special_tokens", ["<new>"]),
    ("added_tokens_decoder", {"99": {"content": "<far>", "special": True}}),
    ("auto_map", {"AutoTokenizer": ["evil.Evil", None]}),
    ("model_input_names", ["nonsense"]),
]


@pytest.mark.parametrize(("field", "value"), SETTINGS)
def test_an_odd_setting_of_a_tokenizer_is_refused_or_changes_nothing(field: str, value: Any, tmp_path: Path):
    folder = copied("bert", tmp_path)
    change_json(folder / "tokenizer_config.json", **{field: value})
    with refused_or_right():
        same(ik.effective_attention(ik.load(folder), TEXT), right("bert"))
