"""Models of known shapes with made-up weights, for timing what no checkpoint is needed for."""

from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.initialization import no_init_weights

from identikit.checks import shortened
from identikit.errors import InputError
from identikit.models.model import Model


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama-like model."""

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    d_value: int
    d_ff: int
    vocabulary: int
    tied: bool = True
    """Whether the language-model head is the embedding itself."""


SHAPES = {
    "1b": Shape(16, 2048, 32, 8, 64, 8192, 128256),
    "8b": Shape(32, 4096, 32, 8, 128, 14336, 128256, tied=False),
    "gemma-2b": Shape(18, 2048, 8, 1, 256, 16384, 256000),
    "smollm2-135m": Shape(30, 576, 9, 3, 64, 1536, 49152),
    "tiny": Shape(2, 32, 4, 2, 8, 64, 60),
}


BERTS = {
    "minilm": BertConfig(num_hidden_layers=6, hidden_size=384, intermediate_size=1536),
    "bert-base": BertConfig(),
}


def made_up_bert(shape: str, *, device: str | torch.device = "cpu", layers: int | None = None) -> Model:
    """Return an encoder of this shape with random weights; `layers` is how many of its layers to make."""
    torch.manual_seed(0)
    config = copy(BERTS[shape])
    config.num_hidden_layers = layers or config.num_hidden_layers
    hf: Any = BertModel(config).eval()
    return Model(hf.to(device), None, name=f"made-up {shape}")


def shape_of(name: str) -> Shape:
    """Return the sizes that go by this name; "llama-8b" is "8b"."""
    sizes = SHAPES.get(name.removeprefix("llama-"))
    if sizes is None:
        raise InputError(
            f"Making up a model: the shape {shortened(name)} is not known. Use one of {', '.join(SHAPES)}. "
            f"To time attribution, also {' or '.join(BERTS)}."
        )
    return sizes


@torch.no_grad()
def made_up_llama(
    shape: str = "8b",
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    layers: int | None = None,
) -> Model:
    """Return a Llama of this shape with weights drawn on the device (standard deviation 0.02), and a made-up tokenizer.

    `layers` is how many of its layers to make; None makes all. Texts are words w0, w1, … or token ids.
    """
    sizes = shape_of(shape)
    config = LlamaConfig(
        num_hidden_layers=sizes.layers if layers is None else layers,
        hidden_size=sizes.d_model,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.d_value,
        intermediate_size=sizes.d_ff,
        vocab_size=sizes.vocabulary,
        max_position_embeddings=131072,
        tie_word_embeddings=sizes.tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    with no_init_weights(), torch.device(device):
        hf = LlamaForCausalLM._from_config(config, dtype=dtype).eval()
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in hf.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
    return Model(hf, word_tokenizer(sizes.vocabulary), name=f"made-up {shape}")


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words w0, w1, …, whose ids are their numbers."""
    backend = Tokenizer(models.WordLevel({f"w{number}": number for number in range(vocabulary)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0")
