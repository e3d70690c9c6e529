"""Attention over a dataset, as tidy tables: correlation, null dimensions, attention by token type, intervals."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from identikit.attention import certainty
from identikit.attention.effective import attend
from identikit.attention.layer import EffectiveOptions
from identikit.attention.result import EffectiveAttention
from identikit.attention.tables import ATTENTION, OF_HEADS
from identikit.attention.token_types import TypeAverages, type_sums
from identikit.checks import random_seed
from identikit.models.model import Model
from identikit.models.reading import readings
from identikit.progress import Progress
from identikit.results.table import texts_table
from identikit.runs.run import Run, Stored, TextBlock, blocks_of
from identikit.runs.store import write_tables
from identikit.shapes import Tensor
from identikit.texts.text import Text

if TYPE_CHECKING:
    from pandas import DataFrame

_CORRELATION = Stored("text", real=True, undefined=True)  # where a map is constant
_READINGS = {
    "pearson": _CORRELATION,
    "pearson_layer": _CORRELATION,
    "pearson_head": _CORRELATION,
    "least": Stored("text"),
    "greatest": Stored("text"),
    "residual": Stored("text", real=True),
    "slack_least": Stored("text"),
    "slack_greatest": Stored("text"),
}
_READINGS |= {f"head {measure.name}": _CORRELATION for measure in OF_HEADS}
_BOUNDED = {  # what `certainty` returns
    "row_sums": Stored("text", real=True),
    "group_sums": Stored("text", real=True),
    "value_size": Stored("text", real=True, undefined=True),  # of groups that a text does not have
    "group_keys": Stored("text"),
}
_SUMMED = {"type_sums": Stored(real=True), "type_texts": Stored(real=True)}  # over the texts of a block


@dataclass(frozen=True)
class AttentionOptions(EffectiveOptions):
    """How the attention of a dataset is computed, what becomes of long texts, and which rows are bounded.

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
        random_seed(self.seed)


@dataclass(frozen=True)
class AttentionJob:
    """Reads the attention of a block of texts: everything, or with `only_intervals` what rows are bounded by."""

    options: AttentionOptions
    only_intervals: bool = False

    @property
    def what(self) -> str:
        """What is counted."""
        return f"{'attention intervals' if self.only_intervals else 'effective attention'}, tokens"

    @property
    def stored(self) -> dict[str, Stored]:
        """What is kept of each text, and what is summed over texts."""
        stored = {"tokens": Stored("text")}
        if not self.only_intervals:
            stored |= _READINGS | _SUMMED
        if self.options.intervals:
            stored |= _BOUNDED
        return stored

    def cost(self, length: int) -> float:
        """Return a sum of products that grow with the length and with its square."""
        return length * (length + 256.0)

    def compute(self, model: Model, task: list[Text], told: Progress) -> dict[str, Tensor]:
        """Return what is read from each text."""
        options, layers, heads = self.options, model.attention_layers, tuple(range(model.n_heads))
        found = readings(model, task, layers=layers, truncate=options.truncate, max_tokens=options.max_tokens)
        tokens = torch.tensor([len(one.tokens) for one in found])
        rows: list[dict[str, Tensor]] = []
        for one, done in zip(found, tokens.cumsum(0).tolist(), strict=True):
            numbers = self._read(attend(one, options, layers=layers, heads=heads))
            rows.append({name: part.cpu() for name, part in numbers.items()})
            told(self.what, done, int(tokens.sum()))
        gathered = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        summed = {name: gathered[name].sum(0) for name in _SUMMED if name in gathered}
        return {"tokens": tokens, **gathered, **summed}

    def _read(self, result: EffectiveAttention) -> dict[str, Tensor]:
        options = self.options
        bounded = certainty.certainty(result, options.intervals, options.seed) if options.intervals else {}
        if self.only_intervals:
            return bounded
        sums, number = type_sums(result)
        return {**_readings(result, options.mass), **bounded, "type_sums": sums, "type_texts": (number > 0).double()}


def attention_blocks(model: Model, texts: list[Text], options: AttentionOptions) -> list[TextBlock]:
    """Return texts as the blocks that are read together."""
    read = model.encode(texts, truncate=options.truncate, max_tokens=options.max_tokens, features=False)
    return blocks_of(texts, [len(one) for one in read])


def attention_tables(
    model: Model, texts: Iterable[Text], run: Run, options: AttentionOptions
) -> dict[str, "DataFrame"]:
    """Compute the tables of a dataset into a run's folder; `tables.ATTENTION` describes them.

    All layers and heads are read; layers, heads and texts count from 0.
    """
    texts = list(texts)
    numbers, averages = attention_statistics(model, texts, run, options)
    tables = {"texts": texts_table(texts, numbers["tokens"].tolist()), **frames(numbers, averages)}
    if options.intervals:
        tables |= certainty.frames(numbers)
    for frame in tables.values():
        if "layer" in frame and frame is not tables["types"]:  # found by place among the layers that attend
            frame["layer"] = [model.attention_layers[place] for place in frame["layer"]]
    write_tables(run.store, tables, ATTENTION)
    return tables


def attention_statistics(
    model: Model, texts: list[Text], run: Run, options: AttentionOptions
) -> tuple[dict[str, Tensor], TypeAverages]:
    """Gather the readings of each text, and averages by token type; this needs no pandas."""
    parts = run.blocks(model, AttentionJob(options), attention_blocks(model, texts, options))
    averages = TypeAverages(model.attention_layers, tuple(range(model.n_heads)))
    for part in parts:
        averages.sums += part.pop("type_sums")
        averages.texts += part.pop("type_texts")
    return _joined(parts), averages


def certainty_statistics(model: Model, texts: list[Text], run: Run, options: AttentionOptions) -> dict[str, Tensor]:
    """Gather only the intervals of each text, for `certainty.frames`; this needs no pandas."""
    job = AttentionJob(options, only_intervals=True)
    return _joined(run.blocks(model, job, attention_blocks(model, texts, options)))


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
        "heads": table({measure.name: numbers[f"head {measure.name}"] for measure in OF_HEADS}),
        "null_dimension": table({name: numbers[name] for name in null}),
        "types": averages.to_frame(),
    }


def _joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _readings(result: EffectiveAttention, mass: bool) -> dict[str, Tensor]:
    slack = _slack(result, mass)
    of_heads = {}
    for measure in OF_HEADS:
        array = result.read(measure.name).double()
        of_heads[f"head {measure.name}"] = array.mean(-1) if "query" in measure.axes else array
    return {
        **of_heads,
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
