r"""Can attention be reduced to two matrices per head? Exactness, cost and time of collapsing W^Q·W^Kᵀ and W^V·H.

The question is not the paper's: it comes from notes on it. A head is
$\mathrm{softmax}(s\,E W^Q {W^K}^\top E^\top)\,E W^V H$ (Eq. 1 and 2, with the scaling $s$ instead of $1/\sqrt{d_q}$).
Two products of weights stand between the tokens' vectors $E$. Both can be computed in advance:

$$M_{QK} = s\,W^Q {W^K}^\top, \qquad M_V = W^V H, \qquad \mathrm{softmax}(E M_{QK} E^\top)\,E M_V$$

What collapses is found by asking the model's own blocks, not by their names. Whatever stands between the vectors that
attention reads and its queries, keys and values is given zero and every unit vector. It collapses if the affine map
found that way explains what the block really made.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple, TypeVar

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from identikit.models import families
from identikit.models.model import Block, Model
from identikit.models.taps.tap import AttentionCall
from identikit.shapes import Float, Tensor

NUMBERS = (
    "error_float32",
    "error_float64",
    "error_model",
    "operations_factored",
    "operations_collapsed",
    "parameters_factored",
    "parameters_collapsed",
    "time_ratio",
)
AFFINE_TO = 1e-9  # relative; in float64 an affine map is found to 1e-15
ROUNDS = 21

BEYOND = "its attention has terms beyond softmax(QK)V, so the matrices on either side do not meet"
OWN_LAYERS = "its queries, keys and values are not made by plain linear layers that read the same vectors"
ROTARY = (
    "a rotation that depends on the position stands between W^Q and W^K (rotary embedding): one matrix is not enough"
)
NORMED = "queries and keys are not an affine map of the vectors (they are normed): W^Q and W^K do not meet"
NOT_AFFINE = "values are not an affine map of the vectors: W^V and H do not meet"


# The two forms


class Affine(NamedTuple):
    """The map from a token's vector $e$ to the queries, keys or values of every head: $e$·`weight` + `bias`."""

    weight: Float[Tensor, "head d d_head"]
    bias: Float[Tensor, "head d_head"]


class CollapsedScores(NamedTuple):
    """The scores of every head as a bilinear form of two tokens' vectors; see `collapse_scores`."""

    matrix: Float[Tensor, "head d d"]
    of_query: Float[Tensor, "head d"]
    of_key: Float[Tensor, "head d"]
    constant: Float[Tensor, "head"]


Matrices = TypeVar("Matrices", Affine, CollapsedScores)


def collapse_scores(query: Affine, key: Affine, *, scaling: float) -> CollapsedScores:
    r"""Collapse what stands between two tokens' vectors in the scores, biases included.

    $$s\,(e_i W^Q + b^Q)(e_j W^K + b^K)^\top = e_i M_{QK} e_j^\top + e_i u + e_j w + c$$

    `matrix` is $M_{QK} = s\,W^Q {W^K}^\top$, `of_query` is $u = s\,W^Q b^K$, `of_key` is $w = s\,W^K b^Q$ and
    `constant` is $c = s\,b^Q \cdot b^K$. The paper has no biases. $u$ and $c$ move all scores of a query equally and
    softmax cancels them; they are kept so that the scores are the same too. Heads may share keys.
    """
    groups = len(query.weight) // len(key.weight)
    key_weight = key.weight.repeat_interleave(groups, 0)
    key_bias = key.bias.repeat_interleave(groups, 0)
    query_weight = query.weight * scaling
    query_bias = query.bias * scaling
    return CollapsedScores(
        matrix=query_weight @ key_weight.mT,
        of_query=(query_weight @ key_bias[..., None]).squeeze(-1),
        of_key=(key_weight @ query_bias[..., None]).squeeze(-1),
        constant=(query_bias * key_bias).sum(-1),
    )


def collapse_values(value: Affine, projection: Float[Tensor, "head d_v d"]) -> Affine:
    r"""Collapse values and output projection $H$ into $M_V = W^V H$ of Eq. 2 and the bias $b^V H$.

    Heads may share values. The paper leaves the bias out.
    """
    groups = len(projection) // len(value.weight)
    weight = value.weight.repeat_interleave(groups, 0)
    bias = value.bias.repeat_interleave(groups, 0)
    return Affine(weight @ projection, (bias[:, None] @ projection).squeeze(1))


def scores_of(
    query: Float[Tensor, "head n d_k"], key: Float[Tensor, "kv_head n d_k"], scaling: float
) -> Float[Tensor, "head n n"]:
    r"""Compute the scores as models do, $s\,Q K^\top$ (Eq. 1, before softmax)."""
    return query @ key.repeat_interleave(len(query) // len(key), 0).mT * scaling


def collapsed_scores(tokens: Float[Tensor, "n d"], collapsed: CollapsedScores) -> Float[Tensor, "head n n"]:
    r"""Compute the scores from the collapsed matrix, $E M_{QK} E^\top$ and its bias terms; `tokens` is $E$."""
    products = by_head(tokens, Affine(collapsed.matrix, collapsed.of_key)) @ tokens.mT
    return products + (tokens @ collapsed.of_query.mT + collapsed.constant).mT[..., None]


def factored_output(
    weights: Float[Tensor, "head query n"],
    tokens: Float[Tensor, "n d"],
    value: Affine,
    projection: Float[Tensor, "head d_v d"],
) -> Float[Tensor, "query d"]:
    r"""Compute what the given heads write together, as models do: $\sum_h A_h V_h H_h$ (Eq. 2); `weights` is $A$."""
    V = by_head(tokens, value).repeat_interleave(len(weights) // len(value.weight), 0)
    return (weights @ V).transpose(0, 1).flatten(1) @ projection.flatten(0, 1)


def collapsed_output(
    weights: Float[Tensor, "head query n"], tokens: Float[Tensor, "n d"], collapsed: Affine
) -> Float[Tensor, "query d"]:
    r"""Compute what the given heads write together from the collapsed matrix: $\sum_h (A_h E) M_V + (A_h 1)\,b^V H$.

    `weights` is $A$, `tokens` is $E$. $E$ is mixed first: it is the same for all heads.
    """
    mixed = (weights @ tokens).transpose(0, 1).flatten(1) @ collapsed.weight.flatten(0, 1)
    return mixed + weights.sum(-1).mT @ collapsed.bias


def by_head(tokens: Float[Tensor, "n d"], affine: Affine) -> Float[Tensor, "head n d_head"]:
    """Apply the affine maps of all heads in one product; no copy is made where `_side_by_side` has laid them out."""
    heads, _, width = affine.weight.shape
    joined = affine.weight.transpose(0, 1).flatten(1)
    return (tokens @ joined + affine.bias.flatten()).unflatten(1, (heads, width)).transpose(0, 1)


def costs(d: int, heads: int, kv_heads: int, width: int, tokens: int) -> dict[str, int]:
    r"""Count multiply-adds of one product over a text, and numbers in its matrices, per layer and without biases.

    Scores take $n d (h+g) d_k$ for $Q$ and $K$, and $n^2 h d_k$ for $Q K^\top$, where $g$ of $h$ heads have keys and
    values of their own. Values and output take as much with $d_v$: $V$ and $H$ replace $Q$ and $K$, and $A V$ replaces
    $Q K^\top$. With one $d×d$ matrix per head, both take $n h d^2 + n^2 h d$. `width` is $d_k$ or $d_v$.
    """
    factored = d * (heads + kv_heads) * width
    collapsed = heads * d * d
    return {
        "operations_factored": tokens * factored + tokens * tokens * heads * width,
        "operations_collapsed": tokens * collapsed + tokens * tokens * heads * d,
        "parameters_factored": factored,
        "parameters_collapsed": collapsed,
    }


# Models


def measure(model: Model, *, lengths: Sequence[int] = (16, 64, 128), seed: int = 0) -> list[dict[str, object]]:
    """Collapse both products of every layer and measure them on made-up texts of random tokens, one row each.

    Layers count from 1, as in the paper. `product` is "query-key" (the scores before softmax) or "value" (what each
    head writes). The errors are relative, and those of the worst head: `error_float64` is that of the collapsed form
    against the factored one, both in float64; `error_float32` that of the collapsed form in float32 against what the
    model itself computed; `error_model` that of the model itself against float64 (its own rounding). `operations_*`
    are multiply-adds and `parameters_*` numbers in the matrices, both for all heads of the layer. `time_ratio` is
    collapsed over factored, in float32. Where a product does not collapse, `applies` is False, `why` says why and the
    other columns are None.

    A layer's collapsed matrices hold heads·d² numbers, in float64 and in float32. Lengths beyond the model's positions
    are cut to them. The model has to read text.
    """
    rows = []
    vocabulary = model.hf.config.get_text_config().vocab_size
    for tokens in sorted({min(n, model.limit or n) for n in lengths}):
        ids = torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(seed))
        text = replace(model.sample((tokens,)), ids=torch.where(ids == model.pad_id, (ids + 1) % vocabulary, ids))
        if not model.family.splits:
            for layer in range(model.n_layers):
                rows += [_row(layer, product, tokens, BEYOND) for product in _MEASURES]
            continue
        with model.split(text) as split:
            for layer, block in enumerate(split.blocks):
                vectors = read_layer(model, layer, block)
                for product, measure_product in _MEASURES.items():
                    why = OWN_LAYERS if vectors is None else vectors.why_not(product)
                    numbers = {} if vectors is None or why else measure_product(vectors)
                    rows.append(_row(layer, product, tokens, why) | numbers)
    return rows


def _row(layer: int, product: str, tokens: int, why: str) -> dict[str, object]:
    columns = dict.fromkeys(NUMBERS)
    return {"layer": layer + 1, "product": product, "tokens": tokens, **columns, "applies": not why, "why": why}


@dataclass(frozen=True)
class LayerVectors:
    """One layer's attention on one text, and a way to make it read other vectors.

    `vectors` are those that the layer's projections read, after any norm. `made_from` returns the queries, keys and
    values that the block makes from other vectors, in float64.
    """

    call: AttentionCall
    vectors: Float[Tensor, "n d"]
    projection: Float[Tensor, "head d_v d"]
    made_from: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]

    @cached_property
    def made(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values made from the text's own vectors, in float64."""
        return self.made_from(self.vectors.double())

    @cached_property
    def maps(self) -> tuple[Affine, Affine, Affine]:
        """The affine maps from vectors to queries, keys and values, from zero and the unit vectors."""
        n, d = self.vectors.shape
        probes = torch.zeros(-(-(d + 1) // n) * n, d, dtype=torch.float64, device=self.vectors.device)
        probes[1 : d + 1].fill_diagonal_(1.0)
        chunks = [self.made_from(chunk) for chunk in probes.split(n)]
        outputs = [torch.cat(pieces, dim=1) for pieces in zip(*chunks, strict=True)]
        query, key, value = (Affine(output[:, 1 : d + 1] - output[:, :1], output[:, 0]) for output in outputs)
        return query, key, value

    def why_not(self, product: str) -> str:
        """Return why a product does not collapse; an empty string if it does."""
        indices = (2,) if product == "value" else (0, 1)
        vectors = self.vectors.double()
        explained = {index: vectors @ self.maps[index].weight + self.maps[index].bias[:, None] for index in indices}
        if all(_error(affine, self.made[index]) < AFFINE_TO for index, affine in explained.items()):
            return ""
        if product == "value":
            return NOT_AFFINE
        same_vector = self.made_from(vectors[:1].expand_as(vectors).contiguous())
        turned = any(_error(same_vector[index][:, :1], same_vector[index]) > AFFINE_TO for index in indices)
        return ROTARY if turned else NORMED

    def costs(self, width: int) -> dict[str, int]:
        """Return what a product costs whose heads have this width."""
        n, d = self.vectors.shape
        return costs(d, self.call.query.shape[1], self.call.key.shape[1], width, n)


def read_layer(model: Model, layer: int, block: Block) -> LayerVectors | None:
    """Find the linear layers that make queries, keys and values; None if something else makes them."""
    module = model.blocks[layer]
    inputs: dict[nn.Linear | Conv1D, Tensor] = {}

    def remember(linear: nn.Linear | Conv1D, args: tuple[Tensor, ...]) -> None:
        inputs[linear] = args[0]

    with ExitStack() as stack:
        for linear in module.modules():
            if isinstance(linear, nn.Linear | Conv1D) and linear.weight.is_floating_point():
                stack.callback(linear.register_forward_pre_hook(remember).remove)
        block.pre(block.input)
    vectors = inputs.get(families.find(module, model.family.value)) if model.family.value else None
    if vectors is None or any(tensor is not vectors for tensor in inputs.values()):
        return None
    made_from = partial(_made_from, block, tuple(inputs))
    return LayerVectors(block.call, vectors[0], model.projection(layer), made_from)


def _made_from(block: Block, readers: tuple[nn.Linear | Conv1D, ...], vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Make queries, keys and values from these vectors, by the block's own linear layers, in float64."""

    def answer(linear: nn.Linear | Conv1D, args: tuple[object, ...], output: Tensor) -> Tensor:
        weight = linear.weight.double()
        product = vectors @ (weight if isinstance(linear, Conv1D) else weight.mT)
        return (product if linear.bias is None else product + linear.bias.double())[None]

    with ExitStack() as stack:
        for linear in readers:
            stack.callback(linear.register_forward_hook(answer).remove)
        query, key, value = block.pre(block.input)
    return query[0], key[0], value[0]


def _measure_scores(layer: LayerVectors) -> dict[str, object]:
    scaling = layer.call.scaling
    query, key, _ = layer.maps
    collapsed = collapse_scores(query, key, scaling=scaling)
    vectors = layer.vectors.float()
    collapsed_float32 = _side_by_side(collapsed)
    query_float32 = _side_by_side(query)
    key_float32 = _side_by_side(key)
    exact = scores_of(*layer.made[:2], scaling)
    model_scores = scores_of(layer.call.query[0], layer.call.key[0], scaling)
    return {
        **layer.costs(layer.call.query.shape[-1]),
        "error_float64": _error(collapsed_scores(layer.vectors.double(), collapsed), exact),
        "error_float32": _error(collapsed_scores(vectors, collapsed_float32), model_scores),
        "error_model": _error(model_scores, exact),
        "time_ratio": _time_ratio(
            lambda: collapsed_scores(vectors, collapsed_float32),
            lambda: scores_of(by_head(vectors, query_float32), by_head(vectors, key_float32), scaling),
        ),
    }


def _measure_values(layer: LayerVectors) -> dict[str, object]:
    projection = layer.projection.double()
    attention = layer.call.weights()[0].double()
    collapsed = collapse_values(layer.maps[2], projection)
    vectors = layer.vectors.float()
    weights = attention.float()
    collapsed_float32 = Affine(collapsed.weight.float(), collapsed.bias.float())
    map_float32 = _side_by_side(layer.maps[2])
    projection_float32 = projection.float()

    def output_by_head(weights: Tensor, vectors: Tensor, collapsed: Affine) -> Tensor:
        heads = zip(weights.split(1), collapsed.weight.split(1), collapsed.bias.split(1), strict=True)
        return torch.stack([collapsed_output(A, vectors, Affine(weight, bias)) for A, weight, bias in heads])

    exact = attention @ layer.made[2].repeat_interleave(layer.call.groups, 0) @ projection
    model_output = layer.call.output[0] @ layer.projection
    return {
        **layer.costs(layer.call.value.shape[-1]),
        "error_float64": _error(output_by_head(attention, layer.vectors.double(), collapsed), exact),
        "error_float32": _error(output_by_head(weights, vectors, collapsed_float32), model_output),
        "error_model": _error(model_output, exact),
        "time_ratio": _time_ratio(
            lambda: collapsed_output(weights, vectors, collapsed_float32),
            lambda: factored_output(weights, vectors, map_float32, projection_float32),
        ),
    }


_MEASURES = {"query-key": _measure_scores, "value": _measure_values}


def _side_by_side(matrices: Matrices) -> Matrices:
    """Convert to float32, with the matrices side by side in memory, so that all heads are one product."""
    weight, *biases = (tensor.float() for tensor in matrices)
    return type(matrices)(weight.transpose(0, 1).contiguous().transpose(0, 1), *biases)


def _error(computed: Tensor, expected: Tensor) -> float:
    """Return the relative error of the worst head; heads come first. A head that is zero in both has none."""
    expected = expected.double()
    difference = torch.linalg.vector_norm(computed.double().expand_as(expected) - expected, dim=(1, 2))
    size = torch.linalg.vector_norm(expected, dim=(1, 2)).clamp(min=torch.finfo(torch.float64).tiny)
    return float((difference / size).max())


def _time_ratio(collapsed: Callable[[], Tensor], factored: Callable[[], Tensor]) -> float:
    """Return the shortest time of one over that of the other, timed alternately after a warm-up round."""
    shortest = [float("inf"), float("inf")]
    for round_number in range(ROUNDS + 1):
        for index, compute in enumerate((collapsed, factored)):
            start = time.perf_counter()
            result = compute()
            if result.is_cuda:
                torch.cuda.synchronize(result.device)
            if round_number:
                shortest[index] = min(shortest[index], time.perf_counter() - start)
    return shortest[0] / shortest[1]
