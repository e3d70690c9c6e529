"""XLNet's own tap: its attention stands outside transformers' attention interface.

XLNet scores a pair by content, relative position and segment, each with its own learned query bias:
(q + r_w)·k + shift((q + r_r)·r) + (q + r_s)·segment. The first is a plain attention score of the query q + r_w; the
other two are handed on as the additive bias of the call. That bias depends on the query, so a block does not split.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from identikit.errors import ModelError
from identikit.models.tap import AttentionCall, hand_over, next_layer
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
    """Stand in for `XLNetRelativeAttention.rel_attn_core`, with the visitor looking on."""
    if output_attentions:
        raise ModelError("reading XLNet: output_attentions=True cannot be combined with the tap; leave it off.")
    bias = torch.einsum("ibnd,jbnd->bnij", q_head + module.r_r_bias, k_head_r)
    bias = module.rel_shift_bnij(bias, klen=k_head_h.shape[0])
    if seg_mat is not None:
        segment = torch.einsum("ibnd,snd->ibns", q_head + module.r_s_bias, module.seg_embed)
        bias = bias + torch.einsum("ijbs,ibns->bnij", seg_mat, segment)
    call = AttentionCall(
        layer=next_layer(),
        query=(q_head + module.r_w_bias).permute(1, 2, 0, 3),
        key=k_head_h.permute(1, 2, 0, 3),
        value=v_head_h.permute(1, 2, 0, 3),
        scaling=module.scale,
        mask=None if attn_mask is None else attn_mask.permute(2, 3, 0, 1) == 0,
        bias=bias * module.scale,
    )
    return hand_over(call).permute(2, 0, 1, 3)


@contextmanager
def switched_core(blocks: list[nn.Module]) -> Iterator[None]:
    """Put the tap in the place of every block's attention core, and take it out again."""
    with ExitStack() as stack:
        for block in blocks:
            attention: Any = block.rel_attn
            attention.rel_attn_core = partial(_core, attention)
            stack.callback(delattr, attention, "rel_attn_core")
        yield
