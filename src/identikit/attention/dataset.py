"""Attention over a dataset, as tidy tables: correlation, null dimensions, attention by token type, intervals."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from identikit.attention import certainty
from identikit.attention.effective import Options, attend
from identikit.attention.result import EffectiveAttention
from identikit.attention.token_types import TypeAverages, type_sums
from identikit.models.model import Model
from identikit.models.reading import readings
from identikit.progress import Progress, silent
from identikit.runs.columns import ATTENTION, texts_table
from identikit.runs.local import run_shards
from identikit.runs.store import Store, write_tables
from identikit.shapes import Tensor
from identikit.text import Text

if TYPE_CHECKING:
    from pandas import DataFrame

WHAT = "effective attention, tokens"
BOUNDED = "attention intervals, tokens"
_SUMMED = {"type_sums", "type_texts"}

Read = Callable[[EffectiveAttention], dict[str, Tensor]]
"""Returns what is kept of one text."""


@dataclass(frozen=True)
class AttentionOptions(Options):
    """How the attention of a dataset is computed: `Options`, what becomes of long texts, and which rows are bounded.

    - `intervals`: how many rows per text are bounded, drawn with `seed` over all layers, heads and queries; 0 is none
      and "all" is all
    """

    truncate: bool = False
    max_tokens: int | None = None
    intervals: int | str = 0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        certainty.checked_rows(self.intervals)


def attention_tables(
    model: Model, texts: Iterable[Text], store: Store, options: AttentionOptions, *, progress: Progress = silent
) -> dict[str, "DataFrame"]:
    """Compute the tables of a dataset, shard by shard, into a store; `runs.columns.ATTENTION` describes them.

    All layers and heads are read; layers, heads and texts count from 0. `progress` counts tokens.
    """
    texts = list(texts)
    numbers, averages = attention_statistics(model, texts, store, options, progress=progress)
    tables = {"texts": texts_table(texts, numbers["tokens"].tolist()), **frames(numbers, averages)}
    if options.intervals:
        tables |= certainty.frames(numbers)
    write_tables(store, tables, ATTENTION)
    return tables


def attention_statistics(
    model: Model, texts: list[Text], store: Store, options: AttentionOptions, *, progress: Progress = silent
) -> tuple[dict[str, Tensor], TypeAverages]:
    """Gather the readings of each text, and averages by token type, shard by shard; this needs no pandas."""

    def read(result: EffectiveAttention) -> dict[str, Tensor]:
        sums, number = type_sums(result)
        bounded = certainty.certainty(result, options.intervals, options.seed) if options.intervals else {}
        return {**_readings(result, options.mass), **bounded, "type_sums": sums, "type_texts": (number > 0).double()}

    averages = TypeAverages(model.attention_layers, tuple(range(model.n_heads)))
    parts: list[dict[str, Tensor]] = []
    for shard in _shards(model, texts, store, options, read, WHAT, progress):
        averages.sums += shard.pop("type_sums")
        averages.texts += shard.pop("type_texts")
        parts.append(shard)
    return _joined(parts), averages


def certainty_statistics(
    model: Model, texts: list[Text], store: Store, options: AttentionOptions, *, progress: Progress = silent
) -> dict[str, Tensor]:
    """Gather only the intervals of each text, shard by shard, for `certainty.frames`; this needs no pandas."""

    def read(result: EffectiveAttention) -> dict[str, Tensor]:
        return certainty.certainty(result, options.intervals, options.seed)

    return _joined(_shards(model, texts, store, options, read, BOUNDED, progress))


def frames(numbers: dict[str, Tensor], averages: TypeAverages) -> dict[str, "DataFrame"]:
    """Return what `attention_statistics` gathered as tables."""
    from pandas import MultiIndex

    def table(columns: dict[str, Tensor]) -> "DataFrame":
        """Return readings by text, by text and layer, or by text, layer and head as a tidy table."""
        shape = next(iter(columns.values())).shape
        axes = MultiIndex.from_product([range(size) for size in shape], names=("text", "layer", "head")[: len(shape)])
        frame = axes.to_frame(index=False)
        frame.insert(1, "tokens", numbers["tokens"].numpy()[frame["text"]])
        return frame.assign(**{name: column.flatten().numpy() for name, column in columns.items()})

    null = ("least", "greatest", "residual", "slack_least", "slack_greatest")
    return {
        "correlation": table({"pearson": numbers["pearson"]}),
        "correlation_by_layer": table({"pearson": numbers["pearson_layer"]}),
        "correlation_by_head": table({"pearson": numbers["pearson_head"]}),
        "null_dimension": table({name: numbers[name] for name in null}),
        "types": averages.to_frame(),
    }


def _shards(
    model: Model,
    texts: list[Text],
    store: Store,
    options: AttentionOptions,
    read: Read,
    what: str,
    progress: Progress,
) -> Iterator[dict[str, Tensor]]:
    """Yield what is read from the texts of each shard, one after another; what is summed over texts is added up."""
    layers, heads = model.attention_layers, tuple(range(model.n_heads))

    def compute(shard: list[Text], told: Progress) -> dict[str, Tensor]:
        found = readings(model, shard, layers=layers, truncate=options.truncate, max_tokens=options.max_tokens)
        tokens = torch.tensor([len(one.tokens) for one in found])
        rows: list[dict[str, Tensor]] = []
        for one, done in zip(found, tokens.cumsum(0).tolist(), strict=True):
            rows.append(
                {name: part.cpu() for name, part in read(attend(one, options, layers=layers, heads=heads)).items()}
            )
            told(what, done, int(tokens.sum()))
        gathered = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        return {"tokens": tokens, **gathered, **{name: gathered[name].sum(0) for name in _SUMMED & gathered.keys()}}

    lengths = _lengths(model, texts, options)
    return run_shards(texts, compute, store, lengths=lengths, what=what, progress=progress)


def _joined(shards: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    parts = list(shards)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _lengths(model: Model, texts: list[Text], options: AttentionOptions) -> list[int]:
    read = model.encode(texts, truncate=options.truncate, max_tokens=options.max_tokens, features=False)
    return [len(one) for one in read]


def _readings(result: EffectiveAttention, mass: bool) -> dict[str, Tensor]:
    slack = _slack(result, mass)
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


def _slack(result: EffectiveAttention, mass: bool) -> Tensor:
    """Return how far the rank of each row's visible values is below its bound, min(visible keys, d_v).

    To keep the mass of a row is one more condition, so the bound is then d_v + 1.
    """
    visible = result.rank + result.null_dim
    return visible.clamp(max=result.about["d_value"] + mass) - result.rank
