"""Effective attention over a dataset, as tidy tables: correlation, null dimensions, attention by token type."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from identikit.analyses.attention import EffectiveAttention, effective_attention
from identikit.analyses.token_types import TypeAverages
from identikit.engine.local import Progress, run_shards
from identikit.models.model import Model
from identikit.shapes import Tensor
from identikit.store import Store, write_tables
from identikit.text import Text

if TYPE_CHECKING:
    from pandas import DataFrame


def attention_tables(
    model: Model,
    texts: Iterable[Text],
    store: Store,
    *,
    truncate: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> dict[str, "DataFrame"]:
    """Compute the tables of a dataset, shard by shard, into a store; `options` are those of `effective_attention`.

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
    progress: Progress | None = None,
    **options: Any,
) -> tuple[dict[str, Tensor], TypeAverages]:
    """Gather the readings of each text, and averages by token type, shard by shard; needs no pandas."""

    def compute(shard: list[Text]) -> dict[str, Tensor]:
        return _shard(effective_attention(model, shard, truncate=truncate, **options))

    averages = TypeAverages(tuple(range(model.n_layers)), tuple(range(model.n_heads)))
    parts: list[dict[str, Tensor]] = []
    for shard in run_shards(texts, compute, store, progress=progress):
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


def _shard(results: list[EffectiveAttention]) -> dict[str, Tensor]:
    averages = TypeAverages(results[0].layers, results[0].heads)
    for result in results:
        averages.add(result)

    def gathered(read: Callable[[EffectiveAttention], Tensor]) -> Tensor:
        return torch.stack([read(result).cpu() for result in results])

    return {
        "tokens": torch.tensor([len(result.tokens) for result in results]),
        "pearson": gathered(lambda result: result.pearson()),
        "pearson_layer": gathered(lambda result: result.pearson("layer")),
        "pearson_head": gathered(lambda result: result.pearson("head")),
        "least": gathered(lambda result: result.null_dim.amin((1, 2))),
        "greatest": gathered(lambda result: result.null_dim.amax((1, 2))),
        "residual": gathered(lambda result: result.residual.amax(1)),
        "slack_least": gathered(lambda result: _slack(result).amin((1, 2))),
        "slack_greatest": gathered(lambda result: _slack(result).amax((1, 2))),
        "type_sums": averages.sums,
        "type_texts": averages.texts,
    }


def _slack(result: EffectiveAttention) -> Tensor:
    """How far the rank of each row's visible values is below its bound, min(visible keys, d_v)."""
    visible = result.rank + result.null_dim
    return visible.clamp(max=result.model.d_value) - result.rank
