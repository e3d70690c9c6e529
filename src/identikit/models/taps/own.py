"""Families that need a tap of their own: their attention is a method of their module, or has something beside it.

Each of the first has a function here that takes the method's place: it makes (or is given) query, key and value, hands
them over with the mask and the bias of the scores, and finishes as the module does. For MPNet, BLOOM, Falcon and GPT-J
transformers makes the masks through its mask interface, and the bias does not depend on the hidden vectors, so their
blocks split. The bias of DeBERTa and XLNet depends on the query, so theirs do not.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from identikit.errors import ModelError
from identikit.models.taps import switch, tap
from identikit.models.taps.switch import HubModule
from identikit.models.taps.tap import AttentionCall, count_call, show_visitor
from identikit.shapes import Float, Int, Tensor

_BIASED = f"{tap.NAME}_biased"


@contextmanager
def _tapped(
    model: PreTrainedModel,
    *,
    blocks: str,
    attention: str,
    function: Callable[..., object],
    method: str = "forward",
    masks: bool = True,
) -> Iterator[None]:
    """Put `function`, called with the module first, in the place of a method of every block's attention.

    With `masks`, transformers makes the tap's masks meanwhile.
    """
    with switch.restored_configs(model, switch.IMPLEMENTATION) as configs, ExitStack() as stack:
        for block in model.base_model.get_submodule(blocks).children():
            module = block.get_submodule(attention)
            switch.set_temporarily(stack, module, method, partial(function, module))
        for config in configs if masks else ():
            config._attn_implementation_internal = tap.NAME
        yield


def _attend(
    module: nn.Module, query_key_value: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, bias: Tensor | None = None
) -> Float[Tensor, "batch head query d_v"]:
    query, key, value = query_key_value
    visible = tap.checked_mask(module, mask, query)
    return show_visitor(AttentionCall(count_call(), query, key, value, query.shape[-1] ** -0.5, visible, bias=bias))


def _heads(module: HubModule, output: Float[Tensor, "*rows n made"]) -> Float[Tensor, "*rows head n d"]:
    return output.unflatten(-1, (module.num_attention_heads, -1)).transpose(-3, -2)


def _merged(output: Float[Tensor, "batch head query d_v"]) -> Float[Tensor, "batch query d"]:
    return output.transpose(1, 2).flatten(2)


# MPNet: BERT's attention, with a bias by relative position that all layers share


def _mpnet(
    module: HubModule,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    query, key, value = (_heads(module, layer(hidden_states)) for layer in (module.q, module.k, module.v))
    bias = None if position_bias is None else position_bias[:1]  # it is the same for every text
    return module.o(_merged(_attend(module, (query, key, value), attention_mask, bias=bias))), None


def mpnet_limit(config: PreTrainedConfig) -> int:
    """Return how many tokens MPNet has positions for: they count up from 2, whatever its padding token."""
    return config.max_position_embeddings - 2


# GPT-J: its own method takes query, key and value, rotary applied


def _gptj(
    module: HubModule, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **_: object
) -> tuple[Tensor, None]:
    return _attend(module, (query, key, value), attention_mask), None


# BLOOM and Falcon: one layer makes query, key and value; the scores may have a bias by position, ALiBi


def _split_heads(
    output: Float[Tensor, "batch n made"], kv_heads: int, d: int
) -> tuple[Float[Tensor, "batch head n d"], Float[Tensor, "batch kv n d"], Float[Tensor, "batch kv n d"]]:
    """Return query, key and value: for each key-value head in turn, its queries, its key and its value."""
    vectors = output.unflatten(-1, (kv_heads, -1, d))
    query = vectors[..., :-2, :].flatten(2, 3)
    return query.transpose(1, 2), vectors[..., -2, :].transpose(1, 2), vectors[..., -1, :].transpose(1, 2)


def _as_bias(alibi: Float[Tensor, "*rows 1 n"], heads: int, factor: float = 1.0) -> Float[Tensor, "batch head query n"]:
    """Return ALiBi as the bias of a call: slope times the key's position, the same for every query."""
    n = alibi.shape[-1]
    return (alibi.reshape(-1, heads, 1, n) * factor).expand(-1, -1, n, -1)


def _bloom(
    module: HubModule, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Tensor, **_: object
) -> tuple[Tensor, None]:
    query_key_value = _split_heads(module.query_key_value(hidden_states), module.num_heads, module.head_dim)
    alibi = alibi[..., : hidden_states.shape[1]]  # a block run on fewer tokens is still given the ALiBi of all
    output = _attend(module, query_key_value, attention_mask, bias=_as_bias(alibi, module.num_heads))
    return residual + module.dense(_merged(output)), None


def _bloom_gelu(module: nn.Module, hidden: Tensor) -> Tensor:
    return F.gelu(hidden, approximate="tanh")  # its own has a derivative by hand, which forward mode cannot use


@contextmanager
def bloom(model: PreTrainedModel) -> Iterator[None]:
    """Put the tap in the place of every block's attention, and take it out again."""
    activation = _tapped(model, blocks="h", attention="mlp.gelu_impl", function=_bloom_gelu, masks=False)
    with _tapped(model, blocks="h", attention="self_attention", function=_bloom), activation:
        yield


def bloom_refusal(config: PreTrainedConfig) -> str | None:
    """Refuse slices of the projections: they are added up without the projections' bias."""
    if not (config.slow_but_exact and config.pretraining_tp > 1):
        return None
    return (
        f"its config says slow_but_exact=True with pretraining_tp={config.pretraining_tp}, and then transformers "
        "leaves out the bias of its projections. Load it with slow_but_exact=False."
    )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of entries (i, i + d/2) by its angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _falcon(
    module: HubModule,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    kv_heads = 1 if module.multi_query else module.num_heads
    kv_heads = module.num_kv_heads if module.new_decoder_architecture else kv_heads
    query, key, value = _split_heads(module.query_key_value(hidden_states), kv_heads, module.head_dim)
    bias = None
    if alibi is None:
        assert position_embeddings is not None
        cos, sin = (angles.unsqueeze(1) for angles in position_embeddings)
        query = _rotated(query, cos, sin)
        key = _rotated(key, cos, sin)
    else:  # the model has added ALiBi to the mask; what it cannot see has the least number there is
        attention_mask = attention_mask[:, :1] > torch.finfo(attention_mask.dtype).min
        bias = _as_bias(alibi[..., : hidden_states.shape[1]], module.num_heads, module.head_dim**-0.5)
    return module.dense(_merged(_attend(module, (query, key, value), attention_mask, bias=bias))), None


def falcon_limit(config: PreTrainedConfig) -> int:
    """Return how many tokens Falcon can be read with; it adds ALiBi to a mask that is held whole."""
    longest = config.max_position_embeddings
    return min(longest, tap.LONGEST_MASK) if config.alibi else longest


def falcon_refusal(config: PreTrainedConfig) -> str | None:
    """Refuse ALiBi with eager attention: transformers adds it twice there, which is not the model that was trained."""
    if not (config.alibi and config._attn_implementation == "eager"):
        return None
    return (
        "with attn_implementation='eager', transformers adds its ALiBi bias twice. Load it with "
        "attn_implementation='sdpa'."
    )


# DeBERTa-v2 and v3: scores by content and by relative position, each seen from both sides. With the relative position
# δ(i, j) of a pair, which picks a learned position key r and position query p: q_i·k_j + q_i·r_δ (content to position,
# 'c2p') + p_δ·k_j ('p2c'), all divided by the root of d_k times the number of terms. The first is a plain attention
# score; the other two become the additive bias of the call.


def _deberta(
    module: HubModule,
    hidden_states: Float[Tensor, "batch n d"],
    attention_mask: Tensor,
    output_attentions: bool = False,
    query_states: Tensor | None = None,
    relative_pos: Int[Tensor, "*one query key"] | None = None,
    rel_embeddings: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Stand in for `DisentangledSelfAttention.forward`, and show the visitor the call."""
    query = _heads(module, module.query_proj(hidden_states if query_states is None else query_states))
    key = _heads(module, module.key_proj(hidden_states))
    value = _heads(module, module.value_proj(hidden_states))
    terms = 1 + sum(kind in module.pos_att_type for kind in ("c2p", "p2c"))
    scaling = (query.shape[-1] * terms) ** -0.5
    bias = None
    bias_keys = None
    if module.relative_attention and terms > 1:
        assert relative_pos is not None and rel_embeddings is not None
        span = module.pos_ebd_size  # δ is from -span up to span - 1
        table = rel_embeddings[: 2 * span]
        offsets = (relative_pos.reshape(relative_pos.shape[-2:]).long() + span).clamp(0, 2 * span - 1)
        scores = []
        if "c2p" in module.pos_att_type:
            layer = module.key_proj if module.share_att_key else module.pos_key_proj
            position_keys = _heads(module, layer(table))
            scores.append(_by_offset(query, position_keys, offsets))
            bias_keys = partial(_deberta_bias_keys, position_keys, offsets)
        if "p2c" in module.pos_att_type:
            layer = module.query_proj if module.share_att_key else module.pos_query_proj
            scores.append(_by_offset(key, _heads(module, layer(table)), offsets.T).mT)
        bias = scaling * sum(scores)
    visible = attention_mask.bool().expand(-1, -1, query.shape[2], -1)
    call = AttentionCall(count_call(), query, key, value, scaling, mask=visible, bias=bias, bias_keys=bias_keys)
    return _merged(show_visitor(call)), None


def _by_offset(
    vectors: Float[Tensor, "batch head n d_k"], table: Float[Tensor, "head offset d_k"], offsets: Int[Tensor, "n m"]
) -> Float[Tensor, "batch head n m"]:
    """Return each vector's product with the entry of the table at the offset of every pair."""
    products = vectors @ table.mT
    return products.gather(-1, offsets.expand(*products.shape[:2], -1, -1))


def _deberta_bias_keys(
    position_keys: Float[Tensor, "all_heads offset d_k"],
    offsets: Int[Tensor, "query key"],
    row: int,
    heads: Tensor,
    queries: Tensor,
) -> Float[Tensor, "head row key d_k"]:
    """Return what the query is multiplied with in the bias: the position key of each pair, the same for every text."""
    return position_keys[heads][:, offsets[queries]]


def deberta_limit(config: PreTrainedConfig) -> int | None:
    """Return how many tokens it has positions for; relative positions have no end."""
    return config.max_position_embeddings if config.position_biased_input else None


# XLNet scores a pair by content, relative position and segment, each with its own learned query bias:
# (q + r_w)·k + shift((q + r_r)·r) + (q + r_s)·segment. The first is a plain attention score of the query q + r_w; the
# other two become the additive bias of the call.


def _xlnet(
    module: HubModule,
    q_head: Float[Tensor, "query batch head d_k"],
    k_head_h: Float[Tensor, "key batch head d_k"],
    v_head_h: Float[Tensor, "key batch head d_v"],
    k_head_r: Float[Tensor, "position _ head d_k"],
    seg_mat: Tensor | None = None,
    attn_mask: Tensor | None = None,
    output_attentions: bool = False,
) -> Float[Tensor, "query batch head d_v"]:
    """Stand in for `XLNetRelativeAttention.rel_attn_core`, and show the visitor the call."""
    if output_attentions:
        raise ModelError("Reading XLNet: output_attentions=True does not work with the tap. Leave it out.")
    bias = torch.einsum("ibnd,jbnd->bnij", q_head + module.r_r_bias, k_head_r)
    bias = module.rel_shift_bnij(bias, klen=k_head_h.shape[0])
    segments = None
    if seg_mat is not None:
        segment = torch.einsum("ibnd,snd->ibns", q_head + module.r_s_bias, module.seg_embed)
        bias = bias + torch.einsum("ijbs,ibns->bnij", seg_mat, segment)
        segments = (seg_mat, module.seg_embed.detach().clone())  # of the weights as they are
    call = AttentionCall(
        layer=count_call(),
        query=(q_head + module.r_w_bias).permute(1, 2, 0, 3),
        key=k_head_h.permute(1, 2, 0, 3),
        value=v_head_h.permute(1, 2, 0, 3),
        scaling=module.scale,
        mask=None if attn_mask is None else attn_mask.permute(2, 3, 0, 1) == 0,
        bias=bias * module.scale,
        bias_keys=partial(_xlnet_bias_keys, module.rel_shift_bnij, k_head_r, segments),
    )
    return show_visitor(call).permute(2, 0, 1, 3)


def _xlnet_bias_keys(
    shift: Callable[..., Tensor],
    by_position: Float[Tensor, "position _ all_heads d_k"],
    segments: tuple[Tensor, Tensor] | None,
    row: int,
    heads: Tensor,
    queries: Tensor,
) -> Float[Tensor, "head row key d_k"]:
    """Return what the query is multiplied with in the bias: the keys of the relative position and the segment."""
    positions = len(by_position)
    n = positions // 2  # from n before a query to n - 1 after it
    offsets = torch.arange(positions, device=by_position.device).expand(1, 1, n, positions)
    offsets = shift(offsets, klen=n)[0, 0, queries]
    keys = by_position[:, min(row, by_position.shape[1] - 1), heads][offsets]
    if segments is not None:
        matrix, embedding = segments
        keys = keys + torch.einsum("ijs,snd->ijnd", matrix[queries, :, row], embedding[:, heads])
    return keys.permute(2, 0, 1, 3)


def xlnet_output(block: HubModule, record: Callable[[Tensor], None]) -> list[RemovableHandle]:
    """Record what the output projection makes: what enters the norm after it, less the residual."""
    residual: list[Tensor] = []

    def enter(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        residual[:] = [args[0]]

    def projected(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        record((args[0] - residual[0]).transpose(0, 1))

    attention = block.rel_attn
    return [
        attention.register_forward_pre_hook(enter),
        attention.layer_norm.register_forward_pre_hook(projected),
    ]


def xlnet_refusal(config: PreTrainedConfig) -> str | None:
    """Refuse attn_type='uni': transformers cannot run it on a padded batch, so it cannot be proved."""
    if config.attn_type == "bi":
        return None
    return (
        f"its attention is attn_type={config.attn_type!r}, which transformers cannot run on a padded batch; only 'bi' "
        "is supported. Load an XLNet whose config says attn_type='bi'."
    )


# Qwen3-Next and Qwen 3.5 have a gate after attention: their query layer also makes a gate for each head and query. Its
# sigmoid multiplies the head output before the output projection, so a row's output projection is diag(gate)·H.


@contextmanager
def text_model_only(model: PreTrainedModel) -> Iterator[None]:
    """Switch the tap in for the text model inside a model; what reads its images keeps its own attention.

    The whole model makes masks by the text model's configuration, which is the same object.
    """
    text = model.config.get_text_config()
    models = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    with switch.use_attention(next((module for module in models if module.config is text), model)):
        yield


@contextmanager
def gated(model: PreTrainedModel) -> Iterator[None]:
    """Switch the tap in, and have every attention module pass its gate to the call."""
    with switch.use_attention(model), ExitStack() as stack:
        for module in model.modules():
            query = getattr(module, "q_proj", None)
            output = getattr(module, "o_proj", None)
            if not isinstance(query, nn.Linear) or not isinstance(output, nn.Linear):
                continue
            if query.out_features == 2 * output.in_features:
                stack.callback(query.register_forward_hook(partial(_keep_gate, module)).remove)
                stack.callback(module.__dict__.pop, tap.GATE, None)
        yield


def _keep_gate(attention: HubModule, query: nn.Module, args: object, output: Float[Tensor, "batch n made"]) -> None:
    """Keep the gate of what the query layer makes: the second half of each head."""
    halves = output.unflatten(-1, (-1, 2 * attention.head_dim))
    setattr(attention, tap.GATE, torch.sigmoid(halves[..., attention.head_dim :]).transpose(1, 2))


# BEiT adds its relative position bias to the mask, and hands the sum over as the mask. Images are never padded, so the
# mask is empty and the sum is the bias alone: here it becomes the call's bias.


def _beit(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, **terms: Any
) -> tuple[Tensor, None]:
    return tap.attention(module, query, key, value, None, position_bias=bias, **terms)


AttentionInterface.register(_BIASED, _beit)
AttentionMaskInterface.register(_BIASED, lambda *sizes, **others: None)  # every patch sees every patch

# What switches the tap in for each of the others, and takes it out again
mpnet = partial(_tapped, blocks="encoder.layer", attention="attention.attn", function=_mpnet)
gptj = partial(_tapped, blocks="h", attention="attn", function=_gptj, method="_attn")
falcon = partial(_tapped, blocks="h", attention="self_attention", function=_falcon)
deberta = partial(_tapped, blocks="encoder.layer", attention="attention.self", function=_deberta, masks=False)
xlnet = partial(_tapped, blocks="layer", attention="rel_attn", function=_xlnet, method="rel_attn_core", masks=False)
beit = partial(switch.use_attention, implementation=_BIASED)
