"""Effective attention over a dataset, as tidy tables: correlation, null dimensions, attention by token type."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from identikit.attention.effective import EffectiveAttention, effective_attention
from identikit.attention.token_types import TypeAverages
from identikit.models.model import Model
from identikit.progress import Progress, silent
from identikit.runs.local import Count, run_shards
from identikit.runs.store import Store, write_tables
from identikit.shapes import Tensor
from identikit.text import Text

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class AttentionOptions:
    """How the effective attention of a dataset is computed, and what becomes of long texts."""

    bias: bool = True
    mass: bool = False
    truncate: bool = False
    max_tokens: int | None = None


def attention_tables(
    model: Model,
    texts: Iterable[Text],
    store: Store,
    options: AttentionOptions = AttentionOptions(),  # noqa: B008 - frozen
    *,
    progress: Progress = silent,
) -> dict[str, "DataFrame"]:
    """Compute the tables of a dataset, shard by shard, into a store; layers, heads and texts count from 0."""
    tables = frames(*attention_statistics(model, list(texts), store, options, progress=progress))
    write_tables(store, tables)
    return tables


def attention_statistics(
    model: Model, texts: list[Text], store: Store, options: AttentionOptions, *, progress: Progress = silent
) -> tuple[dict[str, Tensor], TypeAverages]:
    """Gather the readings of each text, and averages by token type, shard by shard; this needs no pandas."""

    def compute(shard: list[Text], told: Count) -> dict[str, Tensor]:
        return _shard(effective_attention(model, shard, **asdict(options)), told)

    averages = TypeAverages(tuple(range(model.n_layers)), tuple(range(model.n_heads)))
    parts: list[dict[str, Tensor]] = []
    lengths = _lengths(model, texts, options)
    counted = partial(progress, "effective attention, tokens")
    for shard in run_shards(texts, compute, store, lengths=lengths, progress=counted):
        averages.sums += shard.pop("type_sums")
        averages.texts += shard.pop("type_texts")
        parts.append(shard)
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}, averages


def frames(readings: dict[str, Tensor], averages: TypeAverages) -> dict[str, "DataFrame"]:
    """Return what `attention_statistics` gathered as tables."""
    from pandas import MultiIndex

    def table(columns: dict[str, Tensor]) -> "DataFrame":
        shape = next(iter(columns.values())).shape
        axes = MultiIndex.from_product([range(size) for size in shape], names=("text", "layer", "head")[: len(shape)])
        frame = axes.to_frame(index=False)
        frame.insert(1, "tokens", readings["tokens"].numpy()[frame["text"]])
        return frame.assign(**{name: column.flatten().numpy() for name, column in columns.items()})

    null = ("least", "greatest", "residual", "slack_least", "slack_greatest")
    return {
        "correlation": table({"pearson": readings["pearson"]}),
        "correlation_by_layer": table({"pearson": readings["pearson_layer"]}),
        "correlation_by_head": table({"pearson": readings["pearson_head"]}),
        "null_dimension": table({name: readings[name] for name in null}),
        "types": averages.to_frame(),
    }


def _lengths(model: Model, texts: list[Text], options: AttentionOptions) -> list[int]:
    if model.vision:  # every image has the same number of patches
        return [model.limit or 1] * len(texts)
    return [len(one) for one in model.encode(texts, truncate=options.truncate, max_tokens=options.max_tokens)]


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
