"""Effective attention over a dataset, as tidy tables: correlation, null dimensions, attention by token type."""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from identikit.attention.effective import effective_attention
from identikit.attention.result import EffectiveAttention
from identikit.attention.token_types import TypeAverages
from identikit.errors import InputError
from identikit.models.model import Model
from identikit.progress import Progress
from identikit.runs.local import Count, run_shards
from identikit.runs.store import Store, write_tables
from identikit.shapes import Tensor
from identikit.text import Text

if TYPE_CHECKING:
    from pandas import DataFrame

OPTIONS = ("bias", "mass", "tolerance", "dtype")


def attention_tables(
    model: Model,
    texts: Iterable[Text],
    store: Store,
    *,
    truncate: bool = False,
    progress: Progress = lambda what, done, total: None,
    **options: Any,
) -> dict[str, "DataFrame"]:
    """Compute the tables of a dataset, shard by shard, into a store.

    `options` are those of `effective_attention` that `OPTIONS` names; all layers and all heads are read. `progress` is
    told of tokens.

    - `correlation`: raw with effective attention of each text, overall (layer and head 0), by layer (head 0), by head
    - `null`: by text and layer: least and greatest null dimension, largest residual, and least and greatest slack,
      min(keys that a row sees, d_v) less its rank (Eq. 3 says that none is negative)
    - `types`: average attention from sources to token types, by map, layer and head (Fig. 1b, 1c and 5)
    """
    tables = frames(*attention_statistics(model, texts, store, truncate=truncate, progress=progress, **options))
    write_tables(store, tables)
    return tables


def attention_statistics(
    model: Model,
    texts: Iterable[Text],
    store: Store,
    *,
    truncate: bool = False,
    progress: Progress = lambda what, done, total: None,
    **options: Any,
) -> tuple[dict[str, Tensor], TypeAverages]:
    """Gather the readings of each text, and averages by token type, shard by shard; needs no pandas."""
    if refused := [name for name in options if name not in OPTIONS]:
        raise InputError(
            f"attention_tables: {refused[0]}= cannot be given: use {', '.join(OPTIONS)}. All layers and all heads are "
            "read; for some of them use effective_attention."
        )
    texts = list(texts)

    def compute(shard: list[Text], told: Count) -> dict[str, Tensor]:
        return _shard(effective_attention(model, shard, truncate=truncate, **options), told)

    averages = TypeAverages(tuple(range(model.n_layers)), tuple(range(model.n_heads)))
    parts: list[dict[str, Tensor]] = []
    lengths = _lengths(model, texts, truncate)
    counted = partial(progress, "effective attention, tokens")
    for shard in run_shards(texts, compute, store, lengths=lengths, progress=counted):
        averages.sums += shard.pop("type_sums")
        averages.texts += shard.pop("type_texts")
        parts.append(shard)
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}, averages


def frames(whole: dict[str, Tensor], averages: TypeAverages) -> dict[str, "DataFrame"]:
    """Return what `attention_statistics` gathered as the tables of `attention_tables`."""
    import pandas as pd

    texts, n_layers, n_heads = whole["pearson_head"].shape

    def table(columns: dict[str, Tensor], layer: bool, head: bool) -> "DataFrame":
        shape = (texts, n_layers if layer else 1, n_heads if head else 1)
        axes = {
            "text": torch.arange(texts)[:, None, None],
            "tokens": whole["tokens"][:, None, None],
            "layer": torch.arange(1, shape[1] + 1)[:, None] if layer else torch.zeros(1, 1, dtype=torch.long),
            "head": torch.arange(1, shape[2] + 1) if head else torch.zeros(1, dtype=torch.long),
        }
        filled = axes | {name: column.reshape(shape) for name, column in columns.items()}
        return pd.DataFrame({name: column.expand(shape).flatten().numpy() for name, column in filled.items()})

    correlation = pd.concat(
        [
            table({"pearson": whole["pearson"]}, layer=False, head=False),
            table({"pearson": whole["pearson_layer"]}, layer=True, head=False),
            table({"pearson": whole["pearson_head"]}, layer=True, head=True),
        ],
        ignore_index=True,
    )
    columns = ("least", "greatest", "residual", "slack_least", "slack_greatest")
    null = table({name: whole[name] for name in columns}, layer=True, head=False)
    return {"correlation": correlation, "null": null.drop(columns="head"), "types": averages.to_frame()}


def _lengths(model: Model, texts: list[Text], truncate: bool) -> list[int]:
    if model.vision:  # as many patches in every image
        return [model.limit or 1] * len(texts)
    return [len(one) for one in model.encode(texts, truncate=truncate)]


def _shard(results: list[EffectiveAttention], told: Count) -> dict[str, Tensor]:
    averages = TypeAverages(results[0].layers, results[0].heads)
    tokens = torch.tensor([len(result.tokens) for result in results])
    rows: list[dict[str, Tensor]] = []
    for result, done in zip(results, tokens.cumsum(0).tolist(), strict=True):
        averages.add(result)
        rows.append({name: value.cpu() for name, value in _readings(result).items()})
        told(done, int(tokens.sum()))
    gathered = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {"tokens": tokens, **gathered, "type_sums": averages.sums, "type_texts": averages.texts}


def _readings(result: EffectiveAttention) -> dict[str, Tensor]:
    slack = _slack(result)
    return {
        "pearson": result.pearson(),
        "pearson_layer": result.pearson("layer"),
        "pearson_head": result.pearson("head"),
        "least": result.null_dim.amin((1, 2)),
        "greatest": result.null_dim.amax((1, 2)),
        "residual": result.residual.amax(1),
        "slack_least": slack.amin((1, 2)),
        "slack_greatest": slack.amax((1, 2)),
    }


def _slack(result: EffectiveAttention) -> Tensor:
    """How far the rank of each row's visible values is below its bound, min(visible keys, d_v)."""
    visible = result.rank + result.null_dim
    return visible.clamp(max=result.model.d_value) - result.rank
