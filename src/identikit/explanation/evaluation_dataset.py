"""Tests of explanations over a dataset, as tidy tables."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from identikit.attention.agreement import named_measures
from identikit.explanation.evaluate import stacked, text_numbers, warn_if_long
from identikit.explanation.evaluation_result import explained, gathered, score_table, unchanged
from identikit.explanation.faithfulness import BASELINES, NAMES, EvaluationOptions
from identikit.explanation.replaced import Replacement
from identikit.explanation.tables import EVALUATION
from identikit.models.model import Model
from identikit.progress import Progress
from identikit.results.table import texts_table
from identikit.results.words import counted, means_of
from identikit.runs.run import Numbers, Run, Stored
from identikit.runs.store import write_tables
from identikit.shapes import Tensor
from identikit.texts.text import AnyText

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class EvaluationJob:
    """Tests measures on texts, each by itself."""

    options: EvaluationOptions
    replacement: Replacement
    what = "evaluation, tokens"
    stored = {name: Stored("text", real=True, undefined=True) for name in ("scores", "forgotten", "curves")}  # noqa: RUF012

    def cost(self, length: int) -> float:
        """Return about how many tokens are run."""
        return float(length) ** 3

    def compute(self, model: Model, task: list[AnyText], progress: Progress) -> dict[str, Tensor]:
        """Return the numbers of each text."""
        measures = named_measures(self.options.measures, NAMES)
        return stacked([text_numbers(model, text, measures, self.options, self.replacement) for text in task])

    def merged(self, parts: Sequence[Numbers]) -> Numbers:
        """Return what is summed over texts, which is nothing."""
        return {}


def evaluation_statistics(model: Model, texts: Sequence[AnyText], run: Run, options: EvaluationOptions) -> Numbers:
    """Gather the numbers of each text; this needs no pandas."""
    named_measures(options.measures, NAMES)
    options.checked(model)
    encoded = model.encode(texts, truncate=options.truncate, max_tokens=options.max_tokens, features=False)
    replacement = Replacement.of(model, options.replacement, encoded, options.seed)

    job = EvaluationJob(options, replacement)
    return run.texts(model, job, texts, encoded, prepare=lambda lengths: warn_if_long(model, lengths, options))


def evaluation_tables(
    model: Model, texts: Iterable[AnyText], run: Run, options: EvaluationOptions
) -> dict[str, "DataFrame"]:
    """Compute the tables of a dataset into a run's folder; `tables.EVALUATION` describes them."""
    from pandas import DataFrame, MultiIndex

    texts = list(texts)
    numbers = evaluation_statistics(model, texts, run, options)
    encoded = model.encode(texts, truncate=options.truncate, max_tokens=options.max_tokens, features=False)
    evaluation = gathered(model, [text.text for text in encoded], numbers, options)

    def frame(table: str, *arrays: str, **renamed: str) -> DataFrame:
        """Return arrays of the evaluation as a table, which is empty where they were not tested."""
        if arrays[0] not in evaluation.arrays:
            return DataFrame(columns=[*EVALUATION[table].columns])
        return evaluation.to_frame(*arrays).rename(columns=renamed)

    scores = numbers["scores"]
    keys = {"text": range(len(texts)), "measure": evaluation.axes[0].values, "score": evaluation.axes[1].values}
    by_text = MultiIndex.from_product(list(keys.values()), names=list(keys)).to_frame(index=False)
    summary = frame("summary", *evaluation.main, stderr="error")
    summary.insert(2, "texts", (~scores.isnan()).sum(0).flatten().numpy())
    curves = frame(
        "curves", "deletion_curve", "insertion_curve", deletion_curve="deletion", insertion_curve="insertion"
    )
    if len(curves):
        curves = curves.melt(["curve", "share"], var_name="way", value_name="change")
    tables = {
        "texts": texts_table(texts, [len(text) for text in encoded]),
        "scores": by_text.assign(value=scores.flatten().numpy()),
        "summary": summary,
        "shuffled": frame("shuffled", "left", "left_stderr", depth="layers", left="correlation", left_stderr="error"),
        "curves": curves[["curve", "way", "share", "change"]],
    }
    write_tables(run.store, tables, EVALUATION)
    return tables


def evaluation_report(options: EvaluationOptions, tables: Mapping[str, "DataFrame"]) -> tuple[str, dict[str, object]]:
    """Return how each measure fares in words, as means over texts with their standard errors; and as numbers."""
    rows = tables["summary"].set_index(["measure", "score"])
    pairs = {}
    for measure in (*options.measures, *BASELINES):
        pairs[measure] = [tuple(rows.loc[(measure, score), ["mean", "error"]]) for score in options.scores]
    shuffled = tables["shuffled"]
    all_layers = shuffled[shuffled["layers"] == shuffled["layers"].max()]
    texts = len(tables["texts"])
    words = (
        f"Explanations of {explained(options)} on {counted(texts, 'text')}.\n{means_of(texts)}\n\n"
        f"{score_table(pairs, options.scores).to_text()}\n"
        f"{unchanged(dict(zip(all_layers['measure'], all_layers['correlation'], strict=True)))}"
    )
    return words, {"texts": texts, "summary": tables["summary"].to_dict("records")}
