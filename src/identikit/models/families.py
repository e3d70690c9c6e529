"""One table of what differs between architectures: where each keeps its blocks and projections, and how it is tapped.

`check.py` proves every row against the module's own output. To support another architecture, add its row
(CONTRIBUTING.md, 'Add a family').
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from identikit.errors import ModelError
from identikit.models import deberta, methods, xlnet
from identikit.models.tap import switched
from identikit.models.weights import linear_bias, linear_weight
from identikit.shapes import Float, Tensor

Watch = Callable[[nn.Module, Callable[[Tensor], None]], list[Any]]
"""Called with a block and what to tell its output to; returns the hooks, to be removed at the end."""


def _table_size(config: Any) -> int:
    return config.max_position_embeddings


def _after_padding(config: Any) -> int:
    return config.max_position_embeddings - config.pad_token_id - 1  # positions count up from the padding index


def _none(config: Any) -> None:
    return None


def _patches(config: Any) -> int:
    return (config.image_size // config.patch_size) ** 2 + 1


@dataclass(frozen=True)
class Family:
    """One architecture: what it calls its parts, and what it does differently.

    - `blocks`: its blocks, from the base model; `*` stands for every entry of a list
    - `output`: the output projection, from the block: a linear layer, or a bare (d, head, d_v) parameter
    - `value`: the layer that makes the values, alone or last of query, key, value; None: bare parameters, no bias
    - `interleaved`: that layer holds, for each key-value head in turn, its queries, its key and its value
    - `embedding`: the module whose input is the embedding sum x; None: the first block
    - `positions`: takes `position_ids`; `limit`: how many tokens it has positions for
    - `splits`: a block is post(x, mix(pre(x))) where mix is only the tap's softmax attention
    - `sequence_first`: its blocks put the sequence before the batch
    - `tap`: switches the tap in, and the model's own attention back at the end
    - `watch_output`: observes what a bare output projection makes; None: `output` is a module and can be watched
    - `model_class`: the transformers class to load; None: the one that the checkpoint names
    - `refusal`: why a model with this configuration cannot be read; None: it can
    """

    blocks: str
    output: str
    value: str | None
    interleaved: bool = False
    embedding: str | None = None
    positions: bool = False
    limit: Callable[[Any], int | None] = _table_size
    splits: bool = True
    sequence_first: bool = False
    tap: Callable[[PreTrainedModel], AbstractContextManager[None]] = switched
    watch_output: Watch | None = None
    model_class: str | None = None
    refusal: Callable[[Any], str | None] = _none


_BERT = Family("encoder.layer.*", "attention.output.dense", "attention.self.value", embedding="embeddings.LayerNorm")
_ROBERTA = Family(_BERT.blocks, _BERT.output, _BERT.value, embedding=_BERT.embedding, limit=_after_padding)
_LLAMA = Family("layers.*", "self_attn.o_proj", "self_attn.v_proj", positions=True)

FAMILIES: dict[str, Family] = {
    "albert": Family(
        "encoder.albert_layer_groups.*.albert_layers.*",
        "attention.dense",
        "attention.value",
        embedding="embeddings.LayerNorm",
    ),
    "bert": _BERT,
    "camembert": _ROBERTA,
    "distilbert": Family(
        "transformer.layer.*", "attention.out_lin", "attention.v_lin", embedding="embeddings.LayerNorm"
    ),
    "electra": _BERT,
    "gemma2": _LLAMA,
    "gemma3_text": _LLAMA,
    "gpt2": Family("h.*", "attn.c_proj", "attn.c_attn", positions=True),
    "gpt_oss": _LLAMA,
    "gpt_neox": Family("layers.*", "attention.dense", "attention.query_key_value", interleaved=True, positions=True),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "modernbert": Family("layers.*", "attn.Wo", "attn.Wqkv", embedding="embeddings.norm"),
    "opt": Family("decoder.layers.*", "self_attn.out_proj", "self_attn.v_proj", positions=True),
    "phi3": Family("layers.*", "self_attn.o_proj", "self_attn.qkv_proj", positions=True),
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "roberta": _ROBERTA,
    "t5": Family(
        "encoder.block.*",
        "layer.0.SelfAttention.o",
        "layer.0.SelfAttention.v",
        limit=_none,
        model_class="T5EncoderModel",
    ),
    "vit": Family("layers.*", "attention.o_proj", "attention.v_proj", limit=_patches),
    "xlm-roberta": _ROBERTA,
    "xlnet": Family(
        "layer.*",
        "rel_attn.o",
        None,
        limit=_none,
        splits=False,
        sequence_first=True,
        tap=xlnet.switched,
        watch_output=xlnet.watch_output,
        refusal=xlnet.refusal,
    ),
    "bloom": Family(
        "h.*",
        "self_attention.dense",
        "self_attention.query_key_value",
        interleaved=True,
        embedding="word_embeddings_layernorm",
        limit=_none,
        tap=methods.bloom,
        refusal=methods.bloom_refusal,
    ),
    "deberta-v2": Family(
        _BERT.blocks,
        _BERT.output,
        "attention.self.value_proj",
        embedding=_BERT.embedding,
        limit=deberta.limit,
        splits=False,
        tap=deberta.switched,
    ),
    "falcon": Family(
        "h.*",
        "self_attention.dense",
        "self_attention.query_key_value",
        interleaved=True,
        positions=True,
        limit=methods.falcon_limit,
        tap=methods.falcon,
        refusal=methods.falcon_refusal,
    ),
    "gptj": Family("h.*", "attn.out_proj", "attn.v_proj", positions=True, tap=methods.gptj),
    "mpnet": Family(
        _BERT.blocks,
        "attention.attn.o",
        "attention.attn.v",
        embedding=_BERT.embedding,
        limit=methods.after_two,
        tap=methods.mpnet,
    ),
}

# Architectures people ask for that compute attention outside transformers' attention interface.
_OWN_ATTENTION = frozenset(["deberta", "gpt_neo", "roformer", "big_bird", "longformer"])


def family_of(model: PreTrainedModel) -> Family:
    """Return a model's row, or say why the model cannot be read."""
    kind, named = model.config.model_type, type(model).__name__
    family = FAMILIES.get(kind)
    if family is None:
        reason = (
            "it computes attention outside transformers' attention interface, so it needs a tap of its own"
            if kind in _OWN_ATTENTION
            else "its blocks and projections are not in the table of families"
        )
        raise ModelError(
            f"Loading {named}: the architecture {kind!r} is not supported: {reason}. "
            f"Supported: {', '.join(FAMILIES)}. To add it, see 'Add a family' in CONTRIBUTING.md."
        )
    reason = family.refusal(model.config) or _refusal(model, family)
    if reason is not None:
        raise ModelError(f"Loading {named}: {reason}")
    return family


def _refusal(model: PreTrainedModel, family: Family) -> str | None:
    """Say why a class of a supported architecture cannot be read; None if it can."""
    instead = f" Pass a transformers.{family.model_class}." if family.model_class else ""
    if any(base.__name__.endswith("ForMultipleChoice") for base in type(model).__mro__):
        return (
            "it reads several choices at once (inputs of three dimensions), and identikit reads one text at a time. "
            "Pass its encoder: load(model.base_model, tokenizer)."
        )
    if not find_all(model.base_model, family.blocks):
        return f"it has no blocks at {family.blocks!r}, where {model.config.model_type} keeps them.{instead}"
    if getattr(model.config, "is_encoder_decoder", False) and hasattr(model.base_model, "decoder"):
        return f"it has an encoder and a decoder, and identikit reads one stack.{instead}"
    return None


def find_all(root: nn.Module, path: str) -> list[nn.Module]:
    """Return the modules at a dotted path in which `*` stands for every entry of a list."""
    found: list[nn.Module] = [root]
    for name in path.split("."):
        if name == "*":
            found = [child for module in found for child in module.children()]
        else:
            found = [getattr(module, name) for module in found if hasattr(module, name)]
    return found


def find(root: nn.Module, path: str) -> Any:
    """Return the module or parameter at a dotted path."""
    for name in path.split("."):
        root = getattr(root, name)
    return root


def output_projection(family: Family, block: nn.Module, heads: int) -> Float[Tensor, "head d_v d"]:
    """Return H of Eq. 2 for every head of a block: its slice of the output projection."""
    projection = find(block, family.output)
    if isinstance(projection, nn.Parameter):
        return projection.detach().permute(1, 2, 0)
    return linear_weight(projection).unflatten(0, (heads, -1))


def value_part(
    family: Family, made: Float[Tensor, "*rest made"], kv_heads: int, d_v: int
) -> Float[Tensor, "*rest kv d"]:
    """Return the values of every key-value head from what the value layer makes."""
    if family.interleaved:
        return made.unflatten(-1, (kv_heads, -1, d_v)).select(-2, -1)
    return made[..., -kv_heads * d_v :].unflatten(-1, (kv_heads, d_v))


def value_bias(family: Family, block: nn.Module, kv_heads: int, d_v: int) -> Float[Tensor, "kv_head d_v"] | None:
    """Return the bias that is in every value of a head, or None if there is none."""
    if family.value is None:
        return None
    bias = linear_bias(find(block, family.value))
    return None if bias is None else value_part(family, bias, kv_heads, d_v)
