"""What the tap cannot see, as one table: where an architecture keeps its blocks and its projections.

A row says nothing that `check.py` does not prove against the module's own output. To support another architecture, add
its row (CONTRIBUTING.md, 'Add a family').
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from identikit.errors import ModelError
from identikit.shapes import Float, Tensor


def _table_size(config: Any) -> int:
    return config.max_position_embeddings


def _after_padding(config: Any) -> int:
    return config.max_position_embeddings - config.pad_token_id - 1  # positions are counted from the padding index on


def _unlimited(config: Any) -> None:
    return None


def _patches(config: Any) -> int:
    return (config.image_size // config.patch_size) ** 2 + 1


@dataclass(frozen=True)
class Family:
    """One architecture's names.

    - `blocks`: its blocks, from the base model; `*` stands for every entry of a list
    - `output`: the output projection, from the block: a linear layer, or a bare (d, head, d_v) parameter
    - `value`: the layer that makes the values, alone or last of query, key, value; None: bare parameters, no bias
    - `interleaved`: that layer holds query, key and value by turns for each head
    - `embedding`: the module whose input is the embedding sum x; None: the first block
    - `positions`: takes `position_ids`; `limit`: how many tokens it has positions for
    - `splits`: a block is post(x, mix(pre(x))) with mix the softmax attention of the tap alone
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
    "gpt_neox": Family("layers.*", "attention.dense", "attention.query_key_value", interleaved=True, positions=True),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "modernbert": Family("layers.*", "attn.Wo", "attn.Wqkv", embedding="embeddings.norm"),
    "opt": Family("decoder.layers.*", "self_attn.out_proj", "self_attn.v_proj", positions=True),
    "phi3": Family("layers.*", "self_attn.o_proj", "self_attn.qkv_proj", positions=True),
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "roberta": _ROBERTA,
    "t5": Family("encoder.block.*", "layer.0.SelfAttention.o", "layer.0.SelfAttention.v", limit=_unlimited),
    "vit": Family("layers.*", "attention.o_proj", "attention.v_proj", limit=_patches),
    "xlm-roberta": _ROBERTA,
    "xlnet": Family("layer.*", "rel_attn.o", None, limit=_unlimited, splits=False, sequence_first=True),
}

# Architectures people ask for that compute attention outside transformers' attention interface.
_OWN_ATTENTION = frozenset(["bloom", "deberta", "deberta-v2", "gptj", "mpnet"])


def family_of(model: PreTrainedModel) -> Family:
    """Return the row for a model, or say what is missing."""
    kind = model.config.model_type
    family = FAMILIES.get(kind)
    if family is None:
        reason = (
            "it computes attention outside transformers' attention interface, so it needs a tap of its own"
            if kind in _OWN_ATTENTION
            else "its blocks and projections are not in the table of families"
        )
        raise ModelError(
            f"loading {type(model).__name__}: the architecture {kind!r} is not supported: {reason}. "
            f"Supported: {', '.join(FAMILIES)}. To add it, see 'Add a family' in CONTRIBUTING.md."
        )
    if not find_all(model.base_model, family.blocks):
        hint = " Pass its encoder as a T5EncoderModel." if kind == "t5" else ""
        raise ModelError(
            f"loading {type(model).__name__}: no blocks at {family.blocks!r}, where {kind} keeps them; this class is "
            f"laid out in another way.{hint}"
        )
    if getattr(model.config, "is_encoder_decoder", False) and hasattr(model.base_model, "decoder"):
        raise ModelError(
            f"loading {type(model).__name__}: it has an encoder and a decoder, and identikit reads one stack. "
            "Pass its encoder alone (for T5: transformers.T5EncoderModel)."
        )
    return family


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
    """Return what stands at a dotted path: a module or a parameter."""
    for name in path.split("."):
        root = getattr(root, name)
    return root


def output_projection(family: Family, block: nn.Module, heads: int) -> Float[Tensor, "head d_v d"]:
    """Return H of Eq. 2 for every head of a block: its slice of the output projection."""
    projection = find(block, family.output)
    if isinstance(projection, nn.Parameter):
        return projection.detach().permute(1, 2, 0)
    weight = projection.weight.detach()
    weight = weight if isinstance(projection, Conv1D) else weight.T  # GPT-2 stores (in, out), linear layers (out, in)
    return weight.unflatten(0, (heads, -1))


def value_part(
    family: Family, made: Float[Tensor, "*rest made"], kv_heads: int, d_v: int
) -> Float[Tensor, "*rest kv d"]:
    """Return the values of every key-value head out of what the value layer makes."""
    if family.interleaved:
        return made.unflatten(-1, (kv_heads, 3, d_v)).select(-2, 2)
    return made[..., -kv_heads * d_v :].unflatten(-1, (kv_heads, d_v))


def value_bias(family: Family, block: nn.Module, kv_heads: int, d_v: int) -> Float[Tensor, "kv_head d_v"] | None:
    """Return what is added to every value of a head, or None where nothing is."""
    if family.value is None:
        return None
    bias = find(block, family.value).bias
    return None if bias is None else value_part(family, bias.detach(), kv_heads, d_v)
