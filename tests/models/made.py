"""Folders of tiny models, and what a model says of a text: its own attention, and its answers to every question."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

import identikit as ik
from tests.models import tiny

TEXT = "w5 w6 w7 w8 w9 w10 w11"


def saved(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Write a tiny model to a folder, with the tokenizer of all of them, and return the folder."""
    tiny.build(name, dtype=dtype).save_pretrained(folder, **options)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def rewritten(folder: Path, change: Callable[[dict], object], name: str = "config.json") -> Path:
    """Change what a JSON file in a folder says, and return the folder."""
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))
    return folder


def stock_attention(model: hf.PreTrainedModel, **arguments: Any) -> tuple[torch.Tensor, ...]:
    """Return each layer's raw attention as transformers itself computes it, eagerly."""
    implementation = model.config._attn_implementation
    model.config._attn_implementation_internal = "eager"
    try:
        with torch.no_grad():
            return model(**arguments, output_attentions=True, return_dict=True).attentions
    finally:
        model.config._attn_implementation_internal = implementation


def answers(model: ik.Model) -> dict[str, torch.Tensor]:
    """Ask a model each question, and return its numbers."""
    attention = ik.effective_attention(model, TEXT)
    intervals = ik.attention_intervals(model, TEXT, layer=1)
    found = {
        "raw": attention.raw,
        "effective": attention.effective,
        "null": attention.null_dim.double(),
        "lower": intervals.lower,
        "upper": intervals.upper,
        "attribution": ik.token_attribution(model, TEXT).contribution,
        "probes": ik.token_attribution(model, TEXT, probes=8, norm="frobenius").contribution,
    }
    if model.causal:
        found["inverted"] = ik.invert(model, TEXT, positions=[2, 4]).margin
    return {name: array.cpu() for name, array in found.items()}
