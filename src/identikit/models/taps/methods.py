"""Families whose attention is a method of their own module: MPNet, BLOOM, Falcon and GPT-J.

transformers makes their masks through its mask interface, but their attention does not go through its attention
interface. So each has a function here that takes the method's place: it makes (or is given) query, key and value, hands
them over with the mask and the fixed bias of the scores, and finishes as the module does. Their biases do not depend on
the hidden vectors, so their blocks split.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from identikit.models.taps.tap import LONGEST_MASK, NAME, AttentionCall, hand_over, next_layer, restored, understood
from identikit.shapes import Float, Tensor


@contextmanager
def instead(modules: Iterable[nn.Module], method: str, function: Callable[..., Any]) -> Iterator[None]:
    """Put `function`, called with the module first, in the place of a method of every module, and take it out again."""
    with ExitStack() as stack:
        for module in modules:
            stack.callback(_put_back, module, method, vars(module).get(method))
            setattr(module, method, partial(function, module))
        yield


def _put_back(module: nn.Module, method: str, before: object) -> None:
    if before is None:
        delattr(module, method)
    else:  # such as the forward that accelerate's hooks have put there
        setattr(module, method, before)


@contextmanager
def _tapped(
    model: PreTrainedModel, modules: Iterable[nn.Module], function: Callable[..., Any], method: str = "forward"
) -> Iterator[None]:
    """Put `function` in the place of each module's method, and have transformers make the tap's masks."""
    with restored(model) as configs, instead(modules, method, function):
        for config in configs:
            config._attn_implementation_internal = NAME
        yield


def _attend(
    module: nn.Module, parts: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, bias: Tensor | None = None
) -> Tensor:
    query, key, value = parts
    seen = understood(module, mask, query)
    return hand_over(AttentionCall(next_layer(), query, key, value, query.shape[-1] ** -0.5, seen, bias=bias))


def _merged(output: Float[Tensor, "batch head query d_v"]) -> Float[Tensor, "batch query d"]:
    return output.transpose(1, 2).flatten(2)


# MPNet: BERT's attention, with a bias by relative position that all layers share


def _mpnet(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    layers = (module.q, module.k, module.v)
    made = (layer(hidden_states).unflatten(-1, (module.num_attention_heads, -1)) for layer in layers)
    query, key, value = (tensor.transpose(1, 2) for tensor in made)
    bias = None if position_bias is None else position_bias[:1]  # it is the same for every text
    return module.o(_merged(_attend(module, (query, key, value), attention_mask, bias=bias))), None


def mpnet(model: Any) -> AbstractContextManager[None]:
    """Put the tap in the place of every block's attention, and take it out again."""
    return _tapped(model, [block.attention.attn for block in model.base_model.encoder.layer], _mpnet)


def after_two(config: PreTrainedConfig) -> int:
    """Return how many tokens MPNet has positions for: they count up from 2, whatever its padding token."""
    return config.max_position_embeddings - 2


# GPT-J: its own method takes query, key and value, rotary applied


def _gptj(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **_: Any
) -> tuple[Tensor, None]:
    return _attend(module, (query, key, value), attention_mask), None


def gptj(model: Any) -> AbstractContextManager[None]:
    """Put the tap in the place of every block's attention, and take it out again."""
    return _tapped(model, [block.attn for block in model.base_model.h], _gptj, "_attn")


# BLOOM and Falcon: one layer makes query, key and value; the scores may have a bias by position, ALiBi


def _apart(
    made: Float[Tensor, "batch n made"], kv_heads: int, d: int
) -> tuple[Float[Tensor, "batch head n d"], Float[Tensor, "batch kv n d"], Float[Tensor, "batch kv n d"]]:
    """Return query, key and value: for each key-value head in turn, its queries, its key and its value."""
    parts = made.unflatten(-1, (kv_heads, -1, d))
    query = parts[..., :-2, :].flatten(2, 3)
    return query.transpose(1, 2), parts[..., -2, :].transpose(1, 2), parts[..., -1, :].transpose(1, 2)


def _by_key(alibi: Float[Tensor, "*rows 1 n"], heads: int, factor: float = 1.0) -> Float[Tensor, "batch head query n"]:
    """Return ALiBi as the bias of a call: slope times the key's position, the same for every query."""
    n = alibi.shape[-1]
    return (alibi.reshape(-1, heads, 1, n) * factor).expand(-1, -1, n, -1)


def _bloom(
    module: Any, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Tensor, **_: Any
) -> tuple[Tensor, None]:
    parts = _apart(module.query_key_value(hidden_states), module.num_heads, module.head_dim)
    output = _attend(module, parts, attention_mask, bias=_by_key(alibi, module.num_heads))
    return residual + module.dense(_merged(output)), None


def _gelu(module: Any, hidden: Tensor) -> Tensor:
    return F.gelu(hidden, approximate="tanh")  # its own has a derivative by hand, which forward mode cannot use


@contextmanager
def bloom(model: Any) -> Iterator[None]:
    """Put the tap in the place of every block's attention, and take it out again."""
    blocks = model.base_model.h
    activations = [block.mlp.gelu_impl for block in blocks]
    with _tapped(model, [block.self_attention for block in blocks], _bloom), instead(activations, "forward", _gelu):
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
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    kv_heads = 1 if module.multi_query else module.num_heads
    kv_heads = module.num_kv_heads if module.new_decoder_architecture else kv_heads
    query, key, value = _apart(module.query_key_value(hidden_states), kv_heads, module.head_dim)
    bias = None
    if alibi is None:
        assert position_embeddings is not None
        cos, sin = (angles.unsqueeze(1) for angles in position_embeddings)
        query = _rotated(query, cos, sin)
        key = _rotated(key, cos, sin)
    else:  # the model has added ALiBi to the mask; what it cannot see has the least number there is
        attention_mask = attention_mask[:, :1] > torch.finfo(attention_mask.dtype).min
        bias = _by_key(alibi, module.num_heads, module.head_dim**-0.5)
    return module.dense(_merged(_attend(module, (query, key, value), attention_mask, bias=bias))), None


def falcon(model: Any) -> AbstractContextManager[None]:
    """Put the tap in the place of every block's attention, and take it out again."""
    return _tapped(model, [block.self_attention for block in model.base_model.h], _falcon)


def falcon_limit(config: PreTrainedConfig) -> int:
    """Return how many tokens Falcon can be read with; it adds ALiBi to a mask that is held whole."""
    longest = config.max_position_embeddings
    return min(longest, LONGEST_MASK) if config.alibi else longest


def falcon_refusal(config: PreTrainedConfig) -> str | None:
    """Refuse ALiBi with eager attention: transformers adds it twice there, which is not the model that was trained."""
    if not (config.alibi and config._attn_implementation == "eager"):
        return None
    return (
        "with attn_implementation='eager', transformers adds its ALiBi bias twice. Load it with "
        "attn_implementation='sdpa'."
    )
