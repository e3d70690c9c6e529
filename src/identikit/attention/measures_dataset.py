"""Measures of attention and roles of heads over a dataset, as tidy tables."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from identikit.attention.captured import capture
from identikit.attention.measure import MeasuredText
from identikit.attention.measure_kinds import MEASURE_KINDS
from identikit.attention.measure_result import Survival
from identikit.attention.scores import ROLES, over_texts, text_scores
from identikit.attention.tables import MEASURES
from identikit.checks import known_names
from identikit.models.model import Model
from identikit.models.text_run import run_texts
from identikit.progress import Progress
from identikit.results.table import texts_table, tidy_frame
from identikit.results.words import Column, Paragraph, Table, mean_and_error, means_of, percent
from identikit.runs.run import Numbers, Run, Stored
from identikit.runs.store import write_tables
from identikit.shapes import Tensor
from identikit.texts.text import AnyText

if TYPE_CHECKING:
    from pandas import DataFrame

_UNDECIDED = ("undecided", "order_undecided")
_ENDS = ("raw", "effective", "lower", "upper")


@dataclass(frozen=True)
class MeasuresOptions:
    """Which measures and roles of heads are read over a dataset, and what becomes of long texts."""

    measures: tuple[str, ...] = ("attention", "value norm", "mean", "norm", "rollout")
    scores: tuple[str, ...] = tuple(name for name, role in ROLES.items() if role.above is None)
    truncate: bool = False
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        known_names("measures", self.measures, tuple(MEASURE_KINDS))
        known_names("scores", self.scores, tuple(ROLES))


@dataclass(frozen=True)
class MeasuresJob:
    """Measures the attention of texts, and the roles of their heads."""

    options: MeasuresOptions
    what = "attention measures, tokens"

    @property
    def stored(self) -> dict[str, Stored]:
        """What is stored of each text."""
        undefined = Stored("text", real=True, undefined=True)
        return {"tokens": Stored("text"), "measures": undefined, "scores": undefined}

    def cost(self, length: int) -> float:
        """Return a number in proportion to the time: a text has about length² programs over length keys."""
        return float(length) ** 3

    def compute(self, model: Model, task: list[AnyText], progress: Progress) -> dict[str, Tensor]:
        """Return the numbers of each text."""
        options = self.options
        layers = model.attention_layers
        text_runs = run_texts(model, task, layers=layers, truncate=options.truncate, max_tokens=options.max_tokens)
        tokens = torch.tensor([len(text_run.tokens) for text_run in text_runs])
        measures = []
        scores = []
        for text_run, done in zip(text_runs, tokens.cumsum(0).tolist(), strict=True):
            text = MeasuredText(capture(text_run))
            survivals = [text.measure_all(MEASURE_KINDS[name]).survival() for name in options.measures]
            measures.append(torch.tensor(survivals, dtype=torch.float64))
            scores.append(text_scores(text.captured, [ROLES[name] for name in options.scores]))
            progress(self.what, done, int(tokens.sum()))
        return {"tokens": tokens, "measures": torch.stack(measures), "scores": torch.stack(scores)}

    def merged(self, parts: Sequence[Numbers]) -> Numbers:
        """Return the sums over texts: there are none."""
        return {}


def measures_tables(
    model: Model, texts: Iterable[AnyText], run: Run, options: MeasuresOptions
) -> dict[str, "DataFrame"]:
    """Compute the tables of a dataset into a run's folder; `tables.MEASURES` describes them."""
    texts = list(texts)
    numbers = measures_statistics(model, texts, run, options)
    columns = dict(zip(Survival._fields, numbers["measures"].unbind(-1), strict=True))
    columns |= {name: columns[name].long() for name in ("rows", *_UNDECIDED)}
    measures = tidy_frame({"text": range(len(texts)), "measure": options.measures}, columns, numbers["tokens"])
    means = over_texts(numbers["scores"], [ROLES[name] for name in options.scores])
    columns = {"texts": means["scored_texts"][:, None, None].expand(means["raw"].shape)}
    for name in _ENDS:
        columns[name] = means[name]
        columns[f"{name}_error"] = means.get(f"{name}_stderr", torch.full_like(means[name], torch.nan))
    axes = {"score": options.scores, "layer": model.attention_layers, "head": range(model.n_heads)}
    roles = tidy_frame(axes, columns)
    tables = {"texts": texts_table(texts, numbers["tokens"].tolist()), "measures": measures, "roles": roles}
    write_tables(run.store, tables, MEASURES)
    return tables


def measures_report(tables: Mapping[str, "DataFrame"]) -> tuple[str, dict[str, object]]:
    """Return how much of each measure is determined, in words and as numbers: means over texts, with their errors."""
    headings = {"determined": "determined share", "strongest": "strongest determined", "order": "certain order"}
    by_measure: Any = tables["measures"].groupby("measure", sort=False)
    means = by_measure[[*headings]].mean()
    errors = by_measure[[*headings]].sem()
    undecided = by_measure[[*_UNDECIDED]].sum().div(by_measure["rows"].sum(), axis=0)
    rows = [(name, *zip(means.loc[name], errors.loc[name], strict=True), *undecided.loc[name]) for name in means.index]
    columns = [Column("measure"), *(Column(heading, mean_and_error(2)) for heading in headings.values())]
    columns += [Column(heading, percent) for heading in ("strongest undecided", "order undecided")]
    note = Paragraph("In an undecided row only what is known counts, so that at least so much is determined.")
    table = Table(tuple(columns), tuple(rows), notes=(note,))
    words = (
        "How much of each measure is the same in all alternatives, that is, in any attention with the same head "
        f"outputs.\n{means_of(len(tables['texts']))}\n\n{table.to_text()}\n"
    )
    return words, {"texts": len(tables["texts"]), "measures": means.reset_index().to_dict("records")}


def measures_statistics(
    model: Model, texts: Sequence[AnyText], run: Run, options: MeasuresOptions
) -> dict[str, Tensor]:
    """Gather the numbers of each text; this needs no pandas."""
    encoded = model.encode(texts, truncate=options.truncate, max_tokens=options.max_tokens, features=False)
    return run.texts(model, MeasuresJob(options), texts, encoded)
