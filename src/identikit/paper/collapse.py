"""Can attention be reduced to two matrices per head? Exactness, cost and time of collapsing W^Q·W^Kᵀ and W^V·H.

The question is not the paper's: it comes from notes on it. What collapses is found by asking the model's own blocks,
not by their names. Whatever stands between the vectors that attention reads and its queries, keys and values is given
zero and every unit vector. It collapses if the affine map found that way explains what the block really made.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from identikit.errors import InputError
from identikit.models import families
from identikit.models.model import Block, Model
from identikit.models.taps.tap import AttentionCall
from identikit.paper import products as maths
from identikit.paper.products import Affine, Sizes
from identikit.shapes import Float, Tensor
from identikit.texts.text import TokenBatch

PRODUCTS = ("query-key", "value")
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


@dataclass(frozen=True)
class _Reading:
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
        asked = torch.zeros(-(-(d + 1) // n) * n, d, dtype=torch.float64, device=self.vectors.device)
        asked[1 : d + 1].fill_diagonal_(1.0)
        answers = [self.made_from(part) for part in asked.split(n)]
        whole = [torch.cat(parts, dim=1) for parts in zip(*answers, strict=True)]
        query, key, value = (Affine(part[:, 1 : d + 1] - part[:, :1], part[:, 0]) for part in whole)
        return query, key, value

    def why_not(self, product: str) -> str:
        """Say why a product does not collapse; an empty string if it does."""
        chosen = (2,) if product == "value" else (0, 1)
        vectors = self.vectors.double()
        explained = {which: vectors @ self.maps[which].weight + self.maps[which].bias[:, None] for which in chosen}
        if all(_error(affine, self.made[which]) < AFFINE_TO for which, affine in explained.items()):
            return ""
        if product == "value":
            return NOT_AFFINE
        everywhere = self.made_from(vectors[:1].expand_as(vectors).contiguous())
        turned = any(_error(everywhere[which][:, :1], everywhere[which]) > AFFINE_TO for which in chosen)
        return ROTARY if turned else NORMED

    def sizes(self, product: str) -> Sizes:
        """The sizes that decide what a product costs."""
        made = self.call.value if product == "value" else self.call.query
        return Sizes(self.vectors.shape[1], self.call.query.shape[1], self.call.key.shape[1], made.shape[-1])


def measure(model: Model, *, lengths: Sequence[int] = (16, 64, 128), seed: int = 0) -> list[dict[str, Any]]:
    """Collapse both products of every layer and measure them on made-up texts of random tokens, one row each.

    Layers count from 1, as in the paper. `product` is "query-key" (the scores before softmax) or "value" (what each
    head writes). The errors are relative, and those of the worst head: `error_float64` is that of the collapsed form
    against the factored one, both in float64; `error_float32` that of the collapsed form in float32 against what the
    model itself computed; `error_model` that of the model itself against float64 (its own rounding). `operations_*`
    are multiply-adds and `parameters_*` numbers in the matrices, both for all heads of the layer. `time_ratio` is
    collapsed over factored, in float32. Where a product does not collapse, `applies` is False, `why` says why and the
    other columns are None.

    A layer's collapsed matrices hold heads·d² numbers, in float64 and in float32. Lengths beyond the model's positions
    are cut to them; a model of images or sounds has only one length.
    """
    if not lengths or min(lengths) < 2:
        raise InputError(f"Collapsing attention: lengths={tuple(lengths)}; expected one or more, each at least 2.")
    texts = [_made_up(model, n, seed) for n in sorted({min(n, model.limit or n) for n in lengths})]
    rows = []
    for text in texts if model.modality == "text" else texts[:1]:
        tokens = text.keep.shape[1]
        if not model.family.splits:
            rows += [_row(layer, name, tokens, why=BEYOND) for layer in range(model.n_layers) for name in PRODUCTS]
            continue
        with model.split(text) as split:
            for layer, block in enumerate(split.blocks):
                rows += _layer_rows(_read(model, layer, block), layer, tokens)
    return rows


def _made_up(model: Model, n: int, seed: int) -> TokenBatch:
    """Make a text of random tokens; a model of images or sounds gets a random one."""
    batch = model.sample((n,))
    if batch.ids is None:
        return batch
    vocabulary = model.hf.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, batch.ids.shape, generator=torch.Generator().manual_seed(seed))
    return replace(batch, ids=torch.where(ids == model.pad_id, (ids + 1) % vocabulary, ids))


def _read(model: Model, layer: int, block: Block) -> _Reading | None:
    """Find the linear layers that make queries, keys and values; None if something else makes them."""
    module = model.blocks[layer]
    inputs: dict[nn.Linear | Conv1D, Tensor] = {}

    def remember(linear: nn.Linear | Conv1D, args: tuple[Any, ...]) -> None:
        inputs[linear] = args[0]

    with ExitStack() as stack:
        for linear in module.modules():
            if isinstance(linear, nn.Linear | Conv1D) and linear.weight.is_floating_point():
                stack.callback(linear.register_forward_pre_hook(remember).remove)
        block.pre(block.input)
    vectors = inputs.get(families.find(module, model.family.value)) if model.family.value else None
    if vectors is None or any(other is not vectors for other in inputs.values()):
        return None
    made_from = partial(_made_from, block, tuple(inputs))
    return _Reading(block.call, vectors[0], model.projection(layer), made_from)


def _made_from(block: Block, readers: tuple[nn.Linear | Conv1D, ...], vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Make queries, keys and values from these vectors, by the block's own linear layers, in float64."""

    def answer(linear: nn.Linear | Conv1D, args: tuple[Any, ...], output: Tensor) -> Tensor:
        weight = linear.weight.double()
        made = vectors @ (weight if isinstance(linear, Conv1D) else weight.mT)
        return (made if linear.bias is None else made + linear.bias.double())[None]

    with ExitStack() as stack:
        for linear in readers:
            stack.callback(linear.register_forward_hook(answer).remove)
        query, key, value = block.pre(block.input)
    return query[0], key[0], value[0]


def _layer_rows(reading: _Reading | None, layer: int, tokens: int) -> list[dict[str, Any]]:
    if reading is None:
        return [_row(layer, product, tokens, why=OWN_LAYERS) for product in PRODUCTS]
    rows = []
    for product, measured in zip(PRODUCTS, (_scores, _values), strict=True):
        why = reading.why_not(product)
        if why:
            rows.append(_row(layer, product, tokens, why=why))
            continue
        sizes = reading.sizes(product)
        factored = maths.factored_cost(sizes, tokens)
        collapsed = maths.collapsed_cost(sizes, tokens)
        numbers = measured(reading) | {
            "operations_factored": factored.operations,
            "operations_collapsed": collapsed.operations,
            "parameters_factored": factored.weights,
            "parameters_collapsed": collapsed.weights,
        }
        rows.append(_row(layer, product, tokens, numbers=numbers))
    return rows


def _row(
    layer: int, product: str, tokens: int, *, why: str = "", numbers: dict[str, float] | None = None
) -> dict[str, Any]:
    columns = dict.fromkeys(NUMBERS) | (numbers or {})
    return {"layer": layer + 1, "product": product, "tokens": tokens, **columns, "applies": not why, "why": why}


def _scores(reading: _Reading) -> dict[str, float]:
    call = reading.call
    query_map, key_map, _ = reading.maps
    collapsed = maths.collapse_scores(query_map, key_map, scaling=call.scaling)
    vectors = reading.vectors.float()
    small = collapsed.to(torch.float32)
    small_query = query_map.to(torch.float32)
    small_key = key_map.to(torch.float32)

    def product(query: Tensor, key: Tensor) -> Tensor:
        return query @ key.repeat_interleave(call.groups, 0).mT * call.scaling

    exact = product(*reading.made[:2])
    made = product(call.query[0], call.key[0])
    return {
        "error_float64": _error(maths.collapsed_scores(reading.vectors.double(), collapsed), exact),
        "error_float32": _error(maths.collapsed_scores(vectors, small), made),
        "error_model": _error(made, exact),
        "time_ratio": _time_ratio(
            lambda: maths.collapsed_scores(vectors, small),
            lambda: maths.factored_scores(vectors, small_query, small_key, scaling=call.scaling),
        ),
    }


def _values(reading: _Reading) -> dict[str, float]:
    call = reading.call
    projection = reading.projection.double()
    attention = call.weights()[0].double()
    collapsed = maths.collapse_values(reading.maps[2], projection)
    vectors = reading.vectors.float()
    weights = attention.float()
    small = collapsed.to(torch.float32)
    small_map = reading.maps[2].to(torch.float32)
    small_projection = projection.float()

    def by_head(weights: Tensor, vectors: Tensor, collapsed: maths.CollapsedValues) -> Tensor:
        heads = zip(weights.split(1), collapsed.matrix.split(1), collapsed.bias.split(1), strict=True)
        return torch.stack([maths.collapsed_output(A, vectors, maths.CollapsedValues(*parts)) for A, *parts in heads])

    exact = attention @ reading.made[2].repeat_interleave(call.groups, 0) @ projection
    made = call.output[0] @ reading.projection
    return {
        "error_float64": _error(by_head(attention, reading.vectors.double(), collapsed), exact),
        "error_float32": _error(by_head(weights, vectors, small), made),
        "error_model": _error(made, exact),
        "time_ratio": _time_ratio(
            lambda: maths.collapsed_output(weights, vectors, small),
            lambda: maths.factored_output(weights, vectors, small_map, small_projection),
        ),
    }


def _error(computed: Tensor, expected: Tensor) -> float:
    """Return the relative error of the worst head; heads come first. A head that is zero in both has none."""
    expected = expected.double()
    difference = torch.linalg.vector_norm(computed.double().expand_as(expected) - expected, dim=(1, 2))
    size = torch.linalg.vector_norm(expected, dim=(1, 2)).clamp(min=torch.finfo(torch.float64).tiny)
    return float((difference / size).max())


def _time_ratio(collapsed: Callable[[], Tensor], factored: Callable[[], Tensor]) -> float:
    """The shortest time of the one over that of the other, both taken in turn after a round that does not count."""
    shortest = [float("inf"), float("inf")]
    for round_ in range(ROUNDS + 1):
        for which, task in enumerate((collapsed, factored)):
            start = time.perf_counter()
            done = task()
            if done.is_cuda:
                torch.cuda.synchronize(done.device)
            if round_:
                shortest[which] = min(shortest[which], time.perf_counter() - start)
    return shortest[0] / shortest[1]
