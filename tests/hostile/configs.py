"""Configurations and tokenizer files that are damaged, or say other things than the weights."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as hf

import identikit as ik
from tests.hostile.cases import Case, crossed, proved
from tests.hostile.made import TEXT, copied, right, same, stock_attention

JUNK: dict[str, Callable[[bytes], bytes] | None] = {
    "missing": None,
    "empty": lambda _: b"",
    "cut in half": lambda whole: whole[: len(whole) // 2],
    "a list": lambda _: b"[]",
    "a number": lambda _: b"5",
    "null": lambda _: b"null",
    "an empty object": lambda _: b"{}",
    "no UTF-8": lambda _: b'{"a": "\xff\xfe"}',
    "NUL bytes": lambda whole: bytes(len(whole)),
    "a web page": lambda _: b"<!DOCTYPE html>",
    "nested 100,000 deep": lambda _: b"[" * 100_000,
}
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")

NUMBERS: dict[str, tuple[str, ...]] = {  # fields that sizes of weights follow from
    "bert": ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
             "max_position_embeddings", "type_vocab_size"),
    "llama": ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
              "vocab_size"),
}  # fmt: skip
WRONG: dict[str, Any] = {
    "nothing": None, "0": 0, "-1": -1, "7": 7, "a fraction": 1.5, "a word": "many", "a digit as a word": "24",
    "a list": [24], "1,000": 1000,
}  # fmt: skip

# Changes that give another model, or none: read as transformers itself reads the folder, or refused.
MEANINGS: dict[str, dict[str, Any]] = {
    "bert": {
        "hidden_act": ["relu", "nonsense", 5, None],
        "layer_norm_eps": [1e-3, 0, -1, float("nan"), "small"],
        "position_embedding_type": ["relative_key", "relative_key_query", "nonsense"],
        "is_decoder": [True, "yes"],
        "chunk_size_feed_forward": [2],
        "add_cross_attention": [True],
        "architectures": [["NoSuchModel"], [], "BertModel", ["BertForQuestionAnswering"], [5], ["os.system"]],
        "model_type": ["nonsense", "", None, 5, "roberta", "llama", "fnet", "mamba"],
        "torch_dtype": ["float16", "nonsense", "int8"],
        "dtype": ["bfloat16", "nonsense", 5],
        "quantization_config": [{}, {"quant_method": "nonsense"}, {"quant_method": "bitsandbytes"}, "int8"],
        "attn_implementation": ["flash_attention_2", "nonsense"],
        "_attn_implementation": ["sdpa", "nonsense"],
        "transformers_version": ["99.0.0", 5],
        "pad_token_id": [99, -1, "no"],
        "id2label": [{"a": 1}, 5],
        "pruned_heads": [{"0": [1]}],
        "output_attentions": [True],
        "use_cache": [True, "no"],
        "return_dict": [False],
        "an_unknown_field": [{"deep": [1, 2]}],
    },
    "llama": {
        "hidden_act": ["gelu", "nonsense"],
        "rms_norm_eps": [1e-2, 0, -1, "x"],
        "rope_theta": [50.0, 0, -1, "x"],
        "rope_scaling": [{"rope_type": "linear", "factor": 4.0}, {"rope_type": "nonsense"}, {"factor": -1}, 5],
        "rope_parameters": [{"rope_type": "default", "rope_theta": 77.0}, {"rope_type": "linear"}, []],
        "head_dim": [8, 0, -6, "x"],
        "attention_bias": [False, "yes"],
        "mlp_bias": [True],
        "tie_word_embeddings": [True],
        "pretraining_tp": [2],
        "max_position_embeddings": [8, 0, -1, "x"],
        "sliding_window": [4],
        "attention_dropout": [0.5, 2.0],
    },
}

TOKENIZERS: dict[str, Callable[[dict], object]] = {
    "without a vocabulary": lambda made: made["model"].pop("vocab"),
    "with an empty vocabulary": lambda made: made["model"]["vocab"].clear(),
    "with an id beyond the embeddings": lambda made: made["model"]["vocab"].update({"w5": 60}),
    "with a negative id": lambda made: made["model"]["vocab"].update({"w5": -1}),
    "with one id twice": lambda made: made["model"]["vocab"].update({"w5": 6}),
    "with a fraction for an id": lambda made: made["model"]["vocab"].update({"w5": 1.5}),
    "of an unknown kind": lambda made: made["model"].update({"type": "Nonsense"}),
    "without an unknown token": lambda made: made["model"].update({"unk_token": "gone"}),
    "that adds a token beyond the embeddings": lambda made: _template(made, "</s>", 4000),
    "that adds a token without an id": lambda made: made["post_processor"].update(special_tokens={}),
    "that splits in no known way": lambda made: made.update(pre_tokenizer={"type": "Nonsense"}),
    "that drops every word": lambda made: made.update(
        normalizer={"type": "Replace", "pattern": {"Regex": "."}, "content": ""}
    ),
    "that cuts texts silently": lambda made: made.update(
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    ),
    "that pads texts silently": lambda made: made.update(
        padding={"strategy": {"Fixed": 20}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                 "pad_type_id": 0, "pad_token": "<pad>"}
    ),
    "of a later version": lambda made: made.update(version="9.0"),
}  # fmt: skip
SETTINGS: dict[str, list[Any]] = {  # of tokenizer_config.json
    "tokenizer_class": ["NoSuchTokenizer", 5, None, "BertTokenizer"],
    "model_max_length": [0, -1, "many", 3, 10**40, None],
    "padding_side": ["left", "up"],
    "truncation_side": ["left", "up"],
    "pad_token": [None, "<gone>", 5],
    "unk_token": [None, 5],
    "extra_special_tokens": [["<new>"], 5],
    "added_tokens_decoder": [{"99": {"content": "<far>", "special": True}}, {"x": 5}],
    "auto_map": [{"AutoTokenizer": ["evil.Evil", None]}],
    "chat_template": ["{{ 1/0 }}"],
    "model_input_names": [[], ["nonsense"], 5],
}


def _template(made: dict, token: str, index: int) -> None:
    made["post_processor"]["special_tokens"][token]["ids"] = [index]


def cases() -> Iterator[Case]:
    """Yield the cases with configurations and tokenizers."""
    for (what, junk), file, slow in crossed(JUNK.items(), FILES):
        yield Case(f"{file} that is {what}", "configs", _file(file, junk), "either", slow=slow)
    numbers = [(name, field) for name, fields in NUMBERS.items() for field in fields]
    for (name, field), (what, value), slow in crossed(numbers, WRONG.items()):
        yield Case(f"{name}: {field} is {what}", "configs", _field(name, field, value), "either", slow=slow)
    for name in NUMBERS:
        for field in ("hidden_size", "vocab_size", "num_hidden_layers"):
            run = _field(name, field, 10**9)
            yield Case(f"{name}: {field} is a billion", "configs", run, "refused", slow=True)
        for layers in (2, 4, 6):
            run = _field(name, "num_hidden_layers", layers)
            yield Case(f"{name}: a configuration of {layers} layers over weights of 3", "configs", run, "refused")
    for name, fields in MEANINGS.items():
        for number, (field, values) in enumerate(fields.items()):
            for place, value in enumerate(values):
                run, slow = _field(name, field, value), place != number % len(values)
                yield Case(f"{name}: {field} is {value!r}", "configs", run, "either", slow=slow)
    for what, change in TOKENIZERS.items():
        yield Case(f"a tokenizer {what}", "configs", _tokenizer(change), "either")
    for number, (field, values) in enumerate(SETTINGS.items()):
        for place, value in enumerate(values):
            run, slow = _setting(field, value), place != number % len(values)
            yield Case(f"a tokenizer whose {field} is {value!r}", "configs", run, "either", slow=slow)


def _as_transformers_reads(folder: Path) -> None:
    """Load a folder; prove attention against transformers' own model and tokenizer, which load it beside ours.

    What transformers itself would fill with random numbers or leave out is never right.
    """
    model = ik.load(folder)
    found = ik.effective_attention(model, TEXT)
    stock, report = type(model.hf).from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    left_out = [*report["unexpected_keys"], *(key for key in report["missing_keys"] if "pooler" not in key)]
    proved(not left_out and not report["mismatched_keys"], f"weights do not fit and were left out: {left_out[:3]}")
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT)["input_ids"]
    proved(tokenizer.convert_tokens_to_ids(list(found.tokens)) == ids, f"the tokens {found.tokens} are not {ids}")
    raw = stock_attention(stock.eval(), ids)
    proved(torch.allclose(found.raw.double(), raw, atol=1e-5), "raw attention is not transformers' own")
    proved(found.residual.max() < 1e-3, f"the output changes by {found.residual.max():.1e}")


def _file(file: str, junk: Callable[[bytes], bytes] | None) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        folder = copied("bert", place)
        if junk is None:
            (folder / file).unlink()
        else:
            (folder / file).write_bytes(junk((folder / file).read_bytes()))
        same(ik.effective_attention(ik.load(folder), TEXT), right("bert"))

    return run


def _field(name: str, field: str, value: Any) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        folder = copied(name, place)
        config = json.loads((folder / "config.json").read_text()) | {field: value}
        (folder / "config.json").write_text(json.dumps(config))
        _as_transformers_reads(folder)

    return run


def _tokenizer(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        folder = copied("bert", place)
        made = json.loads((folder / "tokenizer.json").read_text())
        change(made)
        (folder / "tokenizer.json").write_text(json.dumps(made))
        _as_transformers_reads(folder)

    return run


def _setting(field: str, value: Any) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        folder = copied("bert", place)
        settings = json.loads((folder / "tokenizer_config.json").read_text()) | {field: value}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        same(ik.effective_attention(ik.load(folder), TEXT), right("bert"))

    return run
