"""What is special about XLNet: its attention is outside transformers' attention interface, so it has a tap of its own.

XLNet scores a pair by content, relative position and segment, each with its own learned query bias:
(q + r_w)·k + shift((q + r_r)·r) + (q + r_s)·segment. The first is a plain attention score of the query q + r_w; the
other two become the additive bias of the call. That bias depends on the query, so a block does not split.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from identikit.errors import ModelError
from identikit.models.taps.methods import instead
from identikit.models.taps.tap import AttentionCall, hand_over, next_layer
from identikit.shapes import Float, Tensor


def _core(
    module: Any,
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
    if seg_mat is not None:
        segment = torch.einsum("ibnd,snd->ibns", q_head + module.r_s_bias, module.seg_embed)
        bias = bias + torch.einsum("ijbs,ibns->bnij", seg_mat, segment)
    segments = None if seg_mat is None else (seg_mat, module.seg_embed.detach().clone())  # of the weights as they are
    call = AttentionCall(
        layer=next_layer(),
        query=(q_head + module.r_w_bias).permute(1, 2, 0, 3),
        key=k_head_h.permute(1, 2, 0, 3),
        value=v_head_h.permute(1, 2, 0, 3),
        scaling=module.scale,
        mask=None if attn_mask is None else attn_mask.permute(2, 3, 0, 1) == 0,
        bias=bias * module.scale,
        bias_keys=partial(_bias_keys, module.rel_shift_bnij, k_head_r, segments),
    )
    return hand_over(call).permute(2, 0, 1, 3)


def _bias_keys(
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
    place = torch.arange(positions, device=by_position.device).expand(1, 1, n, positions)
    place = shift(place, klen=n)[0, 0, queries]
    keys = by_position[:, min(row, by_position.shape[1] - 1), heads][place]
    if segments is not None:
        matrix, embedding = segments
        keys = keys + torch.einsum("ijs,snd->ijnd", matrix[queries, :, row], embedding[:, heads])
    return keys.permute(2, 0, 1, 3)


def switched(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Put the tap in the place of every block's attention core, and take it out again."""
    blocks: Any = model.base_model.layer
    return instead([block.rel_attn for block in blocks], "rel_attn_core", _core)


def watch_output(block: Any, record: Callable[[Tensor], None]) -> list[RemovableHandle]:
    """Record what the output projection makes: what enters the norm after it, less the residual."""
    residual: list[Tensor] = []

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        residual[:] = [args[0]]

    def projected(module: nn.Module, args: tuple[Any, ...]) -> None:
        record((args[0] - residual[0]).transpose(0, 1))

    attention = block.rel_attn
    return [
        attention.register_forward_pre_hook(enter),
        attention.layer_norm.register_forward_pre_hook(projected),
    ]


def refusal(config: PreTrainedConfig) -> str | None:
    """Refuse attn_type='uni': transformers cannot run it on a padded batch, so it cannot be proved."""
    if config.attn_type == "bi":
        return None
    return (
        f"its attention is attn_type={config.attn_type!r}, which transformers cannot run on a padded batch; only 'bi' "
        "is supported. Load an XLNet whose config says attn_type='bi'."
    )
