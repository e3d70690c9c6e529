"""Attention over a dataset, as tidy tables: correlation, null dimensions, attention by token type, intervals."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch

from identikit.attention import certainty
from identikit.attention.effective import checked_attention
from identikit.attention.layer import EffectiveOptions
from identikit.attention.proofs import ProofDraft, RowStep
from identikit.attention.result import EffectiveAttention
from identikit.attention.sample import drawn_rows
from identikit.attention.tables import ATTENTION, OF_HEADS
from identikit.attention.token_types import type_sums, types_table
from identikit.checks import random_seed, whole_number
from identikit.models.model import Model
from identikit.models.text_run import run_texts
from identikit.progress import Progress
from identikit.results.measure import Measure
from identikit.results.table import texts_table, tidy_frame
from identikit.runs.run import Numbers, Run, Stored, texts_per_group
from identikit.runs.store import PROOF, write_tables
from identikit.shapes import Tensor
from identikit.texts.text import AnyText

if TYPE_CHECKING:
    from pandas import DataFrame


class _Column(NamedTuple):
    """A column of a table: its numbers by text, layer or head, how they are computed, and how they are stored."""

    table: str
    name: str
    read: Callable[[EffectiveAttention], Tensor]
    stored: Stored


def _by_head(measure: Measure, result: EffectiveAttention) -> Tensor:
    array = result.read(measure.name).double()
    return array.mean(-1) if "query" in measure.axes else array


def _slack(result: EffectiveAttention) -> Tensor:
    """Return how far the rank of each row's visible values is below its bound, min(visible keys, d_v).

    To keep the mass of a row is one more condition, so the bound is then d_v + 1.
    """
    visible = result.rank + result.null_dim
    return visible.clamp(max=result.about["d_value"] + result.provenance.settings["mass"]) - result.rank


_COUNT = Stored("text")
_REAL = Stored("text", real=True)
_CORRELATION = Stored("text", real=True, undefined=True)  # where a map is constant
_COLUMNS = {
    "pearson": _Column("correlation", "pearson", lambda result: result.pearson(), _CORRELATION),
    "pearson_layer": _Column("correlation_by_layer", "pearson", lambda result: result.pearson("layer"), _CORRELATION),
    "pearson_head": _Column("correlation_by_head", "pearson", lambda result: result.pearson("head"), _CORRELATION),
    **{
        f"head {measure.name}": _Column("heads", measure.name, partial(_by_head, measure), _CORRELATION)
        for measure in OF_HEADS
    },
    "least": _Column("null_dimension", "least", lambda result: result.null_dim.amin((1, 2)), _COUNT),
    "greatest": _Column("null_dimension", "greatest", lambda result: result.null_dim.amax((1, 2)), _COUNT),
    "residual": _Column("null_dimension", "residual", lambda result: result.residual.amax(1), _REAL),
    "slack_least": _Column("null_dimension", "slack_least", lambda result: _slack(result).amin((1, 2)), _COUNT),
    "slack_greatest": _Column("null_dimension", "slack_greatest", lambda result: _slack(result).amax((1, 2)), _COUNT),
}
_BOUNDED = {  # what `certainty` returns
    "row_sums": _REAL,
    "group_sums": _REAL,
    "value_size": _CORRELATION,  # undefined for groups that a text does not have
    "group_keys": _COUNT,
}
_SUMMED = {"type_sums": Stored(), "type_texts": Stored()}  # over texts
_UNIT = 2.0**40  # sums are in units of 2^-40: they add exactly, in whatever order, with room for some 10^6 texts


@dataclass(frozen=True)
class AttentionOptions(EffectiveOptions):
    """How the attention of a dataset is computed, what becomes of long texts, and which rows are bounded.

    - `intervals`: how many rows per text are bounded, drawn with `seed` over all layers, heads and queries; 0 is none
      and "all" is all
    - `proofs`: for how many rows per text, drawn in the same way, a proof of every edge is written
    """

    truncate: bool = False
    max_tokens: int | None = None
    intervals: int | str = 0
    proofs: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        certainty.checked_rows(self.intervals)
        whole_number("proofs", self.proofs)
        random_seed(self.seed)


@dataclass(frozen=True)
class AttentionJob:
    """Computes the attention of texts: everything, or with `only_intervals` only the bounds of rows."""

    options: AttentionOptions
    only_intervals: bool = False

    @property
    def what(self) -> str:
        """What the progress display counts."""
        return f"{'attention intervals' if self.only_intervals else 'effective attention'}, tokens"

    @property
    def stored(self) -> dict[str, Stored]:
        """The tensors that are stored for each text, and those that are summed over texts."""
        stored = {"tokens": _COUNT}
        if not self.only_intervals:
            stored |= {name: column.stored for name, column in _COLUMNS.items()} | _SUMMED
        if self.options.intervals:
            stored |= _BOUNDED
        return stored

    def cost(self, length: int) -> float:
        """Return a number in proportion to the time: a part grows with the length and a part with its square."""
        return length * (length + 256.0)

    def compute(self, model: Model, task: list[AnyText], progress: Progress) -> dict[str, Tensor]:
        """Return the numbers of each text, and the sums over texts."""
        options = self.options
        layers = model.attention_layers
        text_runs = run_texts(model, task, layers=layers, truncate=options.truncate, max_tokens=options.max_tokens)
        tokens = torch.tensor([len(text_run.tokens) for text_run in text_runs])
        rows: list[dict[str, Tensor]] = []
        for text_run, done in zip(text_runs, tokens.cumsum(0).tolist(), strict=True):
            numbers = self._numbers_of(checked_attention(text_run, options))
            rows.append({name: array.cpu() for name, array in numbers.items()})
            progress(self.what, done, int(tokens.sum()))
        by_text = {name: torch.stack([row[name] for row in rows]) for name in rows[0] if name not in _SUMMED}
        return {"tokens": tokens, **by_text, **self.merged(rows)}

    def merged(self, parts: Sequence[Numbers]) -> Numbers:
        """Return the sums over texts."""
        return {name: torch.stack([part[name] for part in parts]).sum(0) for name in _SUMMED if name in parts[0]}

    def _numbers_of(self, attention: EffectiveAttention) -> dict[str, Tensor]:
        numbers: dict[str, Tensor] = {}
        if self.options.intervals:
            numbers |= certainty.certainty(attention, self.options.intervals, self.options.seed)
        if not self.only_intervals:
            numbers |= {name: column.read(attention) for name, column in _COLUMNS.items()}
            sums, queries = type_sums(attention)
            numbers |= {"type_sums": (sums * _UNIT).round().long(), "type_texts": (queries > 0).long()}
        return numbers


def attention_tables(
    model: Model, texts: Iterable[AnyText], run: Run, options: AttentionOptions
) -> dict[str, "DataFrame"]:
    """Compute the tables of a dataset into a run's folder; `tables.ATTENTION` describes them.

    All layers and heads are read; layers, heads and texts count from 0.
    """
    texts = list(texts)
    numbers = attention_statistics(model, texts, run, options)
    tables = {"texts": texts_table(texts, numbers["tokens"].tolist()), **frames(numbers)}
    if options.intervals:
        tables |= certainty.frames(numbers)
    write_tables(run.store, tables, ATTENTION)
    if options.proofs:
        _write_proofs(model, texts, run, options)
    return tables


def _write_proofs(model: Model, texts: Sequence[AnyText], run: Run, options: AttentionOptions) -> None:
    """Write a proof for each text that has none yet; `identikit verify` checks them."""
    layers = model.attention_layers
    for number, text in enumerate(texts):
        name = PROOF.format(number)
        if not run.store.has(name):
            (text_run,) = run_texts(
                model, [text], layers=layers, truncate=options.truncate, max_tokens=options.max_tokens
            )
            proof = _rows_proof(checked_attention(text_run, options), options.proofs, options.seed)
            run.store.write(name, proof)


def _rows_proof(attention: EffectiveAttention, rows: int, seed: int) -> bytes:
    """Return a file that proves every edge of some rows of a text, drawn at random."""
    layers, heads, queries, keys = attention.axes
    shape = (len(layers), len(heads), len(queries))
    draft = ProofDraft()
    for layer, head, query in drawn_rows(attention.provenance.text, shape, rows, seed):
        row = f"L{layers.values[layer]}H{heads.values[head]} {queries.name_of(query)}"
        edges = [
            RowStep((layer, head, query), [(key, 1.0)], f"{row} → {keys.name_of(key)}") for key in range(len(keys))
        ]
        draft.bound(attention.captured(), edges)
    return draft.content(asdict(attention.provenance))


def attention_statistics(
    model: Model, texts: Sequence[AnyText], run: Run, options: AttentionOptions, *, only_intervals: bool = False
) -> dict[str, Tensor]:
    """Gather the numbers of each text, for `frames` and `certainty.frames`; this needs no pandas.

    `layers` are the numbers of the layers that attend.
    """
    encoded = model.encode(texts, truncate=options.truncate, max_tokens=options.max_tokens, features=False)
    group_size = 1 if options.intervals else texts_per_group(model)  # rows are bounded on the CPU, which takes longest
    numbers = run.texts(model, AttentionJob(options, only_intervals), texts, encoded, group_size=group_size)
    return {"layers": torch.tensor(model.attention_layers), **numbers}


def frames(numbers: dict[str, Tensor]) -> dict[str, "DataFrame"]:
    """Return what `attention_statistics` gathered as tables."""
    by_table: dict[str, dict[str, Tensor]] = {}
    for name, column in _COLUMNS.items():
        by_table.setdefault(column.table, {})[column.name] = numbers[name]
    layers = numbers["layers"].tolist()
    tables = {}
    for table, columns in by_table.items():
        shape = next(iter(columns.values())).shape
        axes = {"text": range(shape[0]), "layer": layers, "head": range(shape[-1])}
        tables[table] = tidy_frame(dict(islice(axes.items(), len(shape))), columns, numbers["tokens"])
    return tables | {"types": types_table(numbers["type_sums"] / _UNIT, numbers["type_texts"].double(), layers)}
