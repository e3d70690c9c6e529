"""Tests of explanations over a dataset, as tidy tables."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from identikit.attention.agreement import named_measures
from identikit.explanation.evaluate import say_beforehand, tested
from identikit.explanation.evaluation_result import explained, score_table, summary, unchanged
from identikit.explanation.faithfulness import BEST, SHARES, WORST, EvaluationOptions
from identikit.explanation.ranked import BASELINES, NAMES
from identikit.explanation.replaced import Replacement
from identikit.explanation.tables import EVALUATION
from identikit.maths.measures import mean_over_texts
from identikit.models.model import Model
from identikit.progress import Progress
from identikit.results.table import texts_table
from identikit.results.words import counted, means_of
from identikit.runs.run import Numbers, Run, Stored
from identikit.runs.store import write_tables
from identikit.shapes import Tensor
from identikit.texts.text import Text

if TYPE_CHECKING:
    from pandas import DataFrame

_PARTS: tuple[str, ...] = ("scores", "forgotten", "curves")


@dataclass(frozen=True)
class EvaluationJob:
    """Tests measures on texts, each by itself."""

    options: EvaluationOptions
    replacement: Replacement
    what = "evaluation, tokens"
    stored = {name: Stored("text", real=True, undefined=True) for name in _PARTS}  # noqa: RUF012

    def cost(self, length: int) -> float:
        """Return about how many tokens are run."""
        return float(length) ** 3

    def compute(self, model: Model, task: list[Text], told: Progress) -> dict[str, Tensor]:
        """Return the numbers of each text."""
        named = named_measures(self.options.measures, NAMES)
        parts = [tested(model, text, named, self.options, self.replacement) for text in task]
        return {name: torch.stack([part[name] for part in parts]) for name in _PARTS}

    def merged(self, parts: Sequence[Numbers]) -> Numbers:
        """Return what is summed over texts, which is nothing."""
        return {}


def evaluation_statistics(model: Model, texts: list[Text], run: Run, options: EvaluationOptions) -> Numbers:
    """Gather the numbers of each text; this needs no pandas."""
    named_measures(options.measures, NAMES)
    options.checked(model)
    encoded = model.encode(texts, truncate=options.truncate, max_tokens=options.max_tokens, features=False)
    replacement = Replacement.of(model, options.replacement, encoded, options.seed)

    def before(missing: list[int]) -> None:
        say_beforehand(model, missing, options)

    return run.texts(model, EvaluationJob(options, replacement), texts, encoded, before=before)


def evaluation_tables(
    model: Model, texts: Iterable[Text], run: Run, options: EvaluationOptions
) -> dict[str, "DataFrame"]:
    """Compute the tables of a dataset into a run's folder; `tables.EVALUATION` describes them."""
    from pandas import DataFrame, MultiIndex, concat

    texts = list(texts)
    numbers = evaluation_statistics(model, texts, run, options)
    measures = (*options.measures, *BASELINES)

    def frame(arrays: Mapping[str, Tensor], **places: Sequence[object]) -> DataFrame:
        index = MultiIndex.from_product(list(places.values()), names=list(places)).to_frame(index=False)
        return DataFrame(index.assign(**{name: array.flatten().numpy() for name, array in arrays.items()}))

    scores = numbers["scores"]
    known = {"texts": (~scores.isnan()).sum(0)}
    left, error = mean_over_texts(numbers["forgotten"])
    changes = numbers["curves"].nanmean(0)
    curves = (*measures, BEST, WORST) if len(changes) else ()
    ways = [
        frame({"change": changes[:, at]}, curve=curves, share=SHARES).assign(way=way)
        for at, way in enumerate(("deletion", "insertion"))
    ]
    encoded = model.encode(texts, truncate=options.truncate, max_tokens=options.max_tokens, features=False)
    tables = {
        "texts": texts_table(texts, [len(text) for text in encoded]),
        "scores": frame({"value": scores}, text=range(len(texts)), measure=measures, score=options.scores),
        "summary": frame(known | summary(scores, options.seed), measure=measures, score=options.scores),
        "shuffled": frame({"correlation": left, "error": error}, measure=measures, layers=options.depths(model)),
        "curves": concat(ways)[["curve", "way", "share", "change"]].reset_index(drop=True),
    }
    tables["summary"] = tables["summary"].rename(columns={"stderr": "error"})
    write_tables(run.store, tables, EVALUATION)
    return tables


def evaluation_report(options: EvaluationOptions, tables: Mapping[str, "DataFrame"]) -> tuple[str, dict[str, object]]:
    """Say how each measure fares, as means over texts with their standard errors; and as numbers."""
    rows = tables["summary"].set_index(["measure", "score"])
    pairs = {
        name: [tuple(rows.loc[(name, score), ["mean", "error"]]) for score in options.scores]
        for name in (*options.measures, *BASELINES)
    }
    shuffled = tables["shuffled"]
    last = shuffled[shuffled["layers"] == shuffled["layers"].max()]
    still = unchanged(dict(zip(last["measure"], last["correlation"], strict=True)))
    words = (
        f"Explanations of {explained(options)} on {counted(len(tables['texts']), 'text')}.\n"
        f"{means_of(len(tables['texts']))}\n\n{score_table(pairs, options.scores).to_text()}\n{still}"
    )
    return words, {"texts": len(tables["texts"]), "summary": tables["summary"].to_dict("records")}
