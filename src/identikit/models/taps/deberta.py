"""What is special about DeBERTa-v2 and v3: scores by content and by relative position, each seen from both sides.

With the relative position δ(i, j) of a pair, which picks a learned position key r and position query p:
q_i·k_j + q_i·r_δ (content to position) + p_δ·k_j (position to content), all divided by the root of d_k times the number
of terms. The first is a plain attention score; the other two become the additive bias of the call. That bias depends on
the query and on the key, so a block does not split.
"""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from identikit.models.taps.methods import instead
from identikit.models.taps.tap import AttentionCall, hand_over, next_layer
from identikit.shapes import Float, Int, Tensor


def _heads(module: Any, made: Tensor) -> Tensor:
    return made.unflatten(-1, (module.num_attention_heads, -1)).transpose(-3, -2)


def _places(module: Any, relative: Int[Tensor, "*one query key"]) -> Int[Tensor, "query key"]:
    """Return the row of each pair in the table of positions: δ(i, j), from -span up to span - 1."""
    span = module.pos_ebd_size
    return (relative.reshape(relative.shape[-2:]).long() + span).clamp(0, 2 * span - 1)


def _position_parts(module: Any, table: Tensor) -> dict[str, Float[Tensor, "head place d_k"]]:
    """Return the position keys ('c2p') and position queries ('p2c') that the module has."""
    layers: dict[str, Any] = {
        "c2p": module.key_proj if module.share_att_key else getattr(module, "pos_key_proj", None),
        "p2c": module.query_proj if module.share_att_key else getattr(module, "pos_query_proj", None),
    }
    table = table[: 2 * module.pos_ebd_size]
    return {kind: _heads(module, layers[kind](table)) for kind in layers if kind in module.pos_att_type}


def _attend(
    module: Any,
    hidden_states: Float[Tensor, "batch n d"],
    attention_mask: Tensor,
    output_attentions: bool = False,
    query_states: Tensor | None = None,
    relative_pos: Tensor | None = None,
    rel_embeddings: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Stand in for `DisentangledSelfAttention.forward`, and show the visitor the call."""
    asking = hidden_states if query_states is None else query_states
    query = _heads(module, module.query_proj(asking))
    key = _heads(module, module.key_proj(hidden_states))
    value = _heads(module, module.value_proj(hidden_states))
    terms = 1 + sum(kind in module.pos_att_type for kind in ("c2p", "p2c"))
    scaling = (query.shape[-1] * terms) ** -0.5
    bias = None
    bias_keys = None
    if module.relative_attention and terms > 1:
        assert relative_pos is not None and rel_embeddings is not None
        parts = _position_parts(module, rel_embeddings)
        places = _places(module, relative_pos)
        bias = scaling * sum(_scores(kind, query, key, table, places) for kind, table in parts.items())
        bias_keys = partial(_bias_keys, parts["c2p"], places) if "c2p" in parts else None
    seen = attention_mask.bool().expand(-1, -1, query.shape[2], -1)
    call = AttentionCall(next_layer(), query, key, value, scaling, mask=seen, bias=bias, bias_keys=bias_keys)
    return hand_over(call).transpose(1, 2).flatten(2), None


def _bias_keys(
    position_keys: Float[Tensor, "all_heads place d_k"],
    places: Int[Tensor, "query key"],
    row: int,
    heads: Tensor,
    queries: Tensor,
) -> Float[Tensor, "head row key d_k"]:
    """Return what the query is multiplied with in the bias: the position key of each pair, the same for every text."""
    return position_keys[heads][:, places[queries]]


def _scores(
    kind: str,
    query: Float[Tensor, "batch head query d_k"],
    key: Float[Tensor, "batch head key d_k"],
    table: Float[Tensor, "head place d_k"],
    places: Int[Tensor, "query key"],
) -> Float[Tensor, "batch head query key"]:
    """Return q_i·r_δ ('c2p') or p_δ·k_j ('p2c') for every pair."""
    if kind == "p2c":
        return _scores("c2p", key, query, table, places.T).mT
    by_place = query @ table.mT
    return by_place.gather(-1, places.expand(*by_place.shape[:2], -1, -1))


def switched(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Put the tap in the place of every block's attention, and take it out again."""
    encoder: Any = model.base_model.encoder
    return instead([block.attention.self for block in encoder.layer], "forward", _attend)


def limit(config: PreTrainedConfig) -> int | None:
    """Return how many tokens it has positions for; relative positions have no end."""
    return config.max_position_embeddings if config.position_biased_input else None
