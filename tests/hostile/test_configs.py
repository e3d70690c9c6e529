"""Configurations and tokenizer files that say other things than the weights.

Those that are none are in `tests/models/test_checkpoint.py` and `test_load.py`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import identikit as ik
from tests.hostile.judging import refused_or_right
from tests.hostile.made import TEXT, copied, right, same, stock_attention


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


MEANINGS = [  # another model, or none
    ("bert", "hidden_act", "relu"),
    ("bert", "layer_norm_eps", 1e-3),
    ("bert", "layer_norm_eps", float("nan")),
    ("bert", "position_embedding_type", "relative_key"),
    ("bert", "is_decoder", True),
    ("bert", "chunk_size_feed_forward", 2),
    ("bert", "max_position_embeddings", None),
    ("bert", "model_type", "roberta"),
    ("bert", "model_type", "mamba"),
    ("bert", "dtype", "bfloat16"),
    ("bert", "quantization_config", {"quant_method": "nonsense"}),
    ("bert", "_attn_implementation", "nonsense"),
    ("bert", "output_attentions", True),
    ("bert", "return_dict", False),
    ("bert", "an_unknown_field", {"deep": [1, 2]}),
    ("llama", "hidden_size", 10**9),
    ("llama", "num_key_value_heads", 0),
    ("llama", "rope_theta", 50.0),
    ("llama", "rope_theta", 0),
    ("llama", "rope_scaling", {"rope_type": "linear", "factor": 4.0}),
    ("llama", "rope_scaling", {"rope_type": "nonsense"}),
    ("llama", "head_dim", 8),
    ("llama", "mlp_bias", True),
    ("llama", "tie_word_embeddings", True),
    ("llama", "max_position_embeddings", 8),
    ("llama", "sliding_window", 4),
    ("llama", "attention_dropout", 0.5),
]


@pytest.mark.parametrize(("name", "field", "value"), MEANINGS)
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
    "with an id beyond the embeddings": vocabulary(w5=60),
    "with a negative id": vocabulary(w5=-1),
    "with one id twice": vocabulary(w5=6),
    "of an unknown kind": lambda made: made["model"].update(type="Nonsense"),
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
    ("model_max_length", 3),
    ("padding_side", "left"),
    ("truncation_side", "up"),
    ("pad_token", "<gone>"),
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
