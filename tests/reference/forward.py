"""Forward passes in plain numpy, one function per family, written from the papers that published them.

They share nothing with transformers but the names of the weights. Each takes weights by name, a configuration and the
token ids of one text, and returns logits and, for each layer, (attention, values, outputs) of all heads. `x @ W.T`
where a linear layer is stored (out, in), `x @ W` where it is stored (in, out), as GPT-2 does.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.special import erf

Weights = Mapping[str, np.ndarray]
Heads = tuple[np.ndarray, np.ndarray, np.ndarray]


def linear(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def layer_norm(w: Weights, name: str, x: np.ndarray, eps: float) -> np.ndarray:
    """Ba, Kiros and Hinton 2016."""
    centred = x - x.mean(-1, keepdims=True)
    spread = np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return w[f"{name}.weight"] * centred / spread + w[f"{name}.bias"]


def rms_norm(weight: np.ndarray, x: np.ndarray, eps: float) -> np.ndarray:
    """Zhang and Sennrich 2019."""
    return weight * x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def gelu(x: np.ndarray) -> np.ndarray:
    """Hendrycks and Gimpel 2016: x Φ(x)."""
    return x * (1 + erf(x / math.sqrt(2))) / 2


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """The approximation of the same paper."""
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def split(x: np.ndarray, heads: int) -> np.ndarray:
    """(token, head · d) to (head, token, d)."""
    return np.stack(np.split(x, heads, axis=-1))


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, visible: np.ndarray, bias: np.ndarray | None = None
) -> Heads:
    """Vaswani et al. 2017, Eq. 1, head by head; with fewer keys than queries, Ainslie et al. 2023."""
    attention = []
    outputs = []
    for head, query in enumerate(q):
        shared = head * len(k) // len(q)
        scores = scale * query @ k[shared].T
        if bias is not None:
            scores = scores + bias[head]
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = weights / weights.sum(-1, keepdims=True)
        attention.append(weights)
        outputs.append(weights @ v[shared])
    return np.stack(attention), v, np.stack(outputs)


def joined(heads: Heads) -> np.ndarray:
    """The outputs of all heads, beside each other."""
    return np.concatenate(list(heads[2]), axis=-1)


def causal(n: int, window: int | None = None) -> np.ndarray:
    """Whether query i sees key j: none that comes later, and with a window only the last so many, itself included."""
    distance = np.arange(n)[:, None] - np.arange(n)
    return (distance >= 0) & (distance < (n if window is None else window))


def rotated(x: np.ndarray, theta: float) -> np.ndarray:
    """Su et al. 2021: turn the pair (i, i + d/2) at position m by m θ^(-2i/d)."""
    n, d = x.shape[-2:]
    angle = np.arange(n)[:, None] * theta ** (-2 * np.arange(d // 2) / d)
    first = x[..., : d // 2]
    second = x[..., d // 2 :]
    turned = [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)]
    return np.concatenate(turned, axis=-1)


# Encoders


def _bert_blocks(w: Weights, config: Any, x: np.ndarray, prefix: str) -> tuple[np.ndarray, list[Heads]]:
    made = []
    eps = config.layer_norm_eps
    everything = np.ones((len(x), len(x)), dtype=bool)
    for layer in range(config.num_hidden_layers):
        name = f"{prefix}encoder.layer.{layer}"
        parts = ("query", "key", "value")
        q, k, v = (split(linear(w, f"{name}.attention.self.{part}", x), config.num_attention_heads) for part in parts)
        heads = attend(q, k, v, 1 / math.sqrt(q.shape[-1]), everything)
        made.append(heads)
        mixed = linear(w, f"{name}.attention.output.dense", joined(heads))
        x = layer_norm(w, f"{name}.attention.output.LayerNorm", x + mixed, eps)
        inner = gelu(linear(w, f"{name}.intermediate.dense", x))
        x = layer_norm(w, f"{name}.output.LayerNorm", x + linear(w, f"{name}.output.dense", inner), eps)
    return x, made


def _bert_embedded(w: Weights, config: Any, ids: np.ndarray, prefix: str, first: int) -> np.ndarray:
    name = f"{prefix}embeddings"
    x = w[f"{name}.word_embeddings.weight"][ids] + w[f"{name}.token_type_embeddings.weight"][0]
    x = x + w[f"{name}.position_embeddings.weight"][first : first + len(ids)]
    return layer_norm(w, f"{name}.LayerNorm", x, config.layer_norm_eps)


def bert(w: Weights, config: Any, ids: np.ndarray) -> tuple[np.ndarray, list[Heads]]:
    """Devlin et al. 2019: an encoder with norms behind its sums, and a head that predicts masked tokens."""
    x, made = _bert_blocks(w, config, _bert_embedded(w, config, ids, "bert.", 0), "bert.")
    x = gelu(linear(w, "cls.predictions.transform.dense", x))
    x = layer_norm(w, "cls.predictions.transform.LayerNorm", x, config.layer_norm_eps)
    return x @ w["bert.embeddings.word_embeddings.weight"].T + w["cls.predictions.bias"], made


def roberta(w: Weights, config: Any, ids: np.ndarray) -> tuple[np.ndarray, list[Heads]]:
    """Liu et al. 2019: BERT, whose positions are counted from behind the padding id's own."""
    embedded = _bert_embedded(w, config, ids, "roberta.", config.pad_token_id + 1)
    x, made = _bert_blocks(w, config, embedded, "roberta.")
    x = layer_norm(w, "lm_head.layer_norm", gelu(linear(w, "lm_head.dense", x)), config.layer_norm_eps)
    return x @ w["roberta.embeddings.word_embeddings.weight"].T + w["lm_head.bias"], made


# Decoders


def gpt2(w: Weights, config: Any, ids: np.ndarray) -> tuple[np.ndarray, list[Heads]]:
    """Radford et al. 2019: norms before the sums, one more at the end, and the embedding as the output layer."""
    eps = config.layer_norm_epsilon
    n = len(ids)
    x = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][:n]
    made = []
    for layer in range(config.n_layer):
        name = f"transformer.h.{layer}"
        normed = layer_norm(w, f"{name}.ln_1", x, eps)
        mixed = normed @ w[f"{name}.attn.c_attn.weight"] + w[f"{name}.attn.c_attn.bias"]
        q, k, v = (split(part, config.n_head) for part in np.split(mixed, 3, axis=-1))
        heads = attend(q, k, v, 1 / math.sqrt(q.shape[-1]), causal(n))
        made.append(heads)
        x = x + joined(heads) @ w[f"{name}.attn.c_proj.weight"] + w[f"{name}.attn.c_proj.bias"]
        normed = layer_norm(w, f"{name}.ln_2", x, eps)
        inner = gelu_tanh(normed @ w[f"{name}.mlp.c_fc.weight"] + w[f"{name}.mlp.c_fc.bias"])
        x = x + inner @ w[f"{name}.mlp.c_proj.weight"] + w[f"{name}.mlp.c_proj.bias"]
    return layer_norm(w, "transformer.ln_f", x, eps) @ w["transformer.wte.weight"].T, made


def _queries_keys_values(w: Weights, config: Any, name: str, x: np.ndarray) -> list[np.ndarray]:
    counts = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
    return [split(linear(w, f"{name}.self_attn.{part}_proj", x), count) for part, count in counts.items()]


def _gated(w: Weights, name: str, x: np.ndarray, activation: Any) -> np.ndarray:
    """Shazeer 2020: a feed-forward layer with a gate."""
    gate = activation(linear(w, f"{name}.mlp.gate_proj", x))
    return linear(w, f"{name}.mlp.down_proj", gate * linear(w, f"{name}.mlp.up_proj", x))


def llama(w: Weights, config: Any, ids: np.ndarray, window: int | None = None) -> tuple[np.ndarray, list[Heads]]:
    """Touvron et al. 2023: root-mean-square norms before the sums, rotary positions, gates."""
    eps = config.rms_norm_eps
    x = w["model.embed_tokens.weight"][ids]
    made = []
    for layer in range(config.num_hidden_layers):
        name = f"model.layers.{layer}"
        normed = rms_norm(w[f"{name}.input_layernorm.weight"], x, eps)
        q, k, v = _queries_keys_values(w, config, name, normed)
        if f"{name}.self_attn.q_norm.weight" in w:  # Qwen3
            q = rms_norm(w[f"{name}.self_attn.q_norm.weight"], q, eps)
            k = rms_norm(w[f"{name}.self_attn.k_norm.weight"], k, eps)
        theta = config.rope_parameters["rope_theta"]
        scale = 1 / math.sqrt(q.shape[-1])
        heads = attend(rotated(q, theta), rotated(k, theta), v, scale, causal(len(ids), window))
        made.append(heads)
        x = x + linear(w, f"{name}.self_attn.o_proj", joined(heads))
        x = x + _gated(w, name, rms_norm(w[f"{name}.post_attention_layernorm.weight"], x, eps), silu)
    return linear(w, "lm_head", rms_norm(w["model.norm.weight"], x, eps)), made


def mistral(w: Weights, config: Any, ids: np.ndarray) -> tuple[np.ndarray, list[Heads]]:
    """Jiang et al. 2023: Llama, with a sliding window in every layer."""
    return llama(w, config, ids, config.sliding_window)


def qwen3(w: Weights, config: Any, ids: np.ndarray) -> tuple[np.ndarray, list[Heads]]:
    """Yang et al. 2025: Llama, with queries and keys normed head by head."""
    assert "model.layers.0.self_attn.q_norm.weight" in w
    return llama(w, config, ids)


def gemma3(w: Weights, config: Any, ids: np.ndarray) -> tuple[np.ndarray, list[Heads]]:
    """Gemma team 2025: norms before and behind, weights counted from 1, local layers with a frequency of their own."""
    eps = config.rms_norm_eps
    x = w["model.embed_tokens.weight"][ids] * math.sqrt(config.hidden_size)
    made = []

    def norm(name: str, numbers: np.ndarray) -> np.ndarray:
        return rms_norm(1 + w[f"{name}.weight"], numbers, eps)

    for layer, kind in enumerate(config.layer_types):
        name = f"model.layers.{layer}"
        local = kind == "sliding_attention"
        q, k, v = _queries_keys_values(w, config, name, norm(f"{name}.input_layernorm", x))
        theta = 10_000.0 if local else 1_000_000.0
        q = rotated(norm(f"{name}.self_attn.q_norm", q), theta)
        k = rotated(norm(f"{name}.self_attn.k_norm", k), theta)
        visible = causal(len(ids), config.sliding_window if local else None)
        heads = attend(q, k, v, 1 / math.sqrt(config.query_pre_attn_scalar), visible)
        made.append(heads)
        mixed = linear(w, f"{name}.self_attn.o_proj", joined(heads))
        x = x + norm(f"{name}.post_attention_layernorm", mixed)
        inner = _gated(w, name, norm(f"{name}.pre_feedforward_layernorm", x), gelu_tanh)
        x = x + norm(f"{name}.post_feedforward_layernorm", inner)
    return norm("model.norm", x) @ w["model.embed_tokens.weight"].T, made


# Encoder and decoder


def _bucket(distance: int, both: bool, buckets: int, furthest: int) -> int:
    """Raffel et al. 2020, Section 2.1: one bucket per small distance, and ever wider ones up to the furthest."""
    start = 0
    if both:
        buckets //= 2
        start = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return start + distance
    wider = exact + int(math.log(distance / exact) / math.log(furthest / exact) * (buckets - exact))
    return start + min(wider, buckets - 1)


def _t5_stack(
    w: Weights, config: Any, stack: str, ids: np.ndarray, encoded: np.ndarray | None = None
) -> tuple[np.ndarray, list[Heads]]:
    eps = config.layer_norm_epsilon
    n = len(ids)
    x = w["shared.weight"][ids]
    table = w[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    sizes = (config.relative_attention_num_buckets, config.relative_attention_max_distance)
    places = [[_bucket(key - query, encoded is None, *sizes) for key in range(n)] for query in range(n)]
    bias = table[np.array(places)].transpose(2, 0, 1)
    visible = np.ones((n, n), dtype=bool) if encoded is None else causal(n)
    made = []
    for layer in range(config.num_layers):
        name = f"{stack}.block.{layer}.layer"
        normed = rms_norm(w[f"{name}.0.layer_norm.weight"], x, eps)
        q, k, v = (split(linear(w, f"{name}.0.SelfAttention.{part}", normed), config.num_heads) for part in "qkv")
        heads = attend(q, k, v, 1.0, visible, bias)
        made.append(heads)
        x = x + linear(w, f"{name}.0.SelfAttention.o", joined(heads))
        last = 1
        if encoded is not None:
            normed = rms_norm(w[f"{name}.1.layer_norm.weight"], x, eps)
            q = split(linear(w, f"{name}.1.EncDecAttention.q", normed), config.num_heads)
            k, v = (split(linear(w, f"{name}.1.EncDecAttention.{part}", encoded), config.num_heads) for part in "kv")
            crossed = attend(q, k, v, 1.0, np.ones((n, len(encoded)), dtype=bool))
            x = x + linear(w, f"{name}.1.EncDecAttention.o", joined(crossed))
            last = 2
        normed = rms_norm(w[f"{name}.{last}.layer_norm.weight"], x, eps)
        inner = np.maximum(linear(w, f"{name}.{last}.DenseReluDense.wi", normed), 0)
        x = x + linear(w, f"{name}.{last}.DenseReluDense.wo", inner)
    return rms_norm(w[f"{stack}.final_layer_norm.weight"], x, eps), made


def t5(w: Weights, config: Any, ids: np.ndarray) -> tuple[np.ndarray, list[Heads]]:
    """Raffel et al. 2020: positions as biases of scores, which are not scaled; heads are the encoder's.

    The decoder reads the same ids.
    """
    encoded, made = _t5_stack(w, config, "encoder", ids)
    decoded, _ = _t5_stack(w, config, "decoder", ids, encoded)
    return (decoded / math.sqrt(config.d_model)) @ w["shared.weight"].T, made
