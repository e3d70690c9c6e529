"""What `evaluate` returns: how measures fare in each test, beside baselines."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from identikit.explanation.faithfulness import BASELINES, BEST, SCORES, SHARES, WORST, EvaluationOptions
from identikit.explanation.replaced import REPLACEMENTS
from identikit.maths.measures import bootstrap_ends, mean_over_texts
from identikit.models.model import Model
from identikit.results.axis import Axis
from identikit.results.facts import Fact
from identikit.results.measure import optional_array, stored_array
from identikit.results.result import Result
from identikit.results.source import StoredArrays
from identikit.results.words import Column, Table, counted, mean_and_error, means_of
from identikit.shapes import Tensor
from identikit.texts.text import ReadText

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_UNCHANGED = 0.9  # rank correlation with itself, from which on a measure has not changed
_SCORE = "measure score"
_NO_SCORE = "No text gives this score: it has too few sources, or the score is not of baselines."
_ONE_TEXT = f"{_NO_SCORE} Or there is only one text."


class Evaluation(Result):
    """How measures fare in each test, as means over texts; "random" and "reversed" are the baselines.

    `scores` says what each score is. A mean has its standard error and the ends of a 95% bootstrap interval, both over
    texts.
    """

    kind = "evaluation"
    main = ("mean", "stderr", "low", "high")
    mean = stored_array(_SCORE, "Mean of the score over texts.", missing=_NO_SCORE)
    stderr = stored_array(_SCORE, "Standard error of the mean over texts.", range="0 or more", missing=_ONE_TEXT)
    low = stored_array(_SCORE, "Lower end of a 95% bootstrap interval of the mean over texts.", missing=_ONE_TEXT)
    high = stored_array(_SCORE, "Upper end of a 95% bootstrap interval of the mean over texts.", missing=_ONE_TEXT)
    left = optional_array(
        "measure depth",
        "Rank correlation of a measure with itself once so many of the last layers are shuffled; None if not tested.",
        range="−1 to 1",
        missing=_NO_SCORE,
    )
    left_stderr = optional_array(
        "measure depth", "Standard error of `left` over texts; None if not tested.", missing=_ONE_TEXT
    )
    deletion_curve = optional_array(
        "curve share",
        "Mean change when this share of the sources is replaced, a measure's largest first; None if not tested.",
        missing=_NO_SCORE,
    )
    insertion_curve = optional_array(
        "curve share",
        "Mean change that is left when this share of the sources is put back, the largest first; None if not tested.",
        missing=_NO_SCORE,
    )
    scores = Fact("What each score is.")
    chance = Fact("What orders that say nothing score on average; None where that is not known beforehand.")
    texts = Fact("How many texts were tested.")
    left_out = Fact("How many texts were not reached in time.")
    replacement = Fact("What took the place of tokens: mask, pad or draw.")
    explained = Fact("What the measures are tested as explanations of.")

    def _table(self) -> Table:
        pairs = torch.stack([self.read("mean"), self.read("stderr")], -1).tolist()
        return score_table(dict(zip(self.axis("measure").values, pairs, strict=True)), self.axis("score").values)

    def describe(self) -> str:
        """Return what was tested, the scores of each measure, and which measures do not change with the weights."""
        were = "was" if self.left_out == 1 else "were"
        late = f" {counted(self.left_out, 'text')} {were} not reached in time." if self.left_out else ""
        words = [
            f"Explanations of {self.explained} on {counted(self.texts, 'text')}; tokens are replaced by "
            f"{REPLACEMENTS[self.replacement]}.{late} {means_of(self.texts)}",
            self._table().to_text(),
        ]
        if "left" in self.source.dims:
            all_layers = self.read("left")[:, -1].tolist()
            words.append(unchanged(dict(zip(self.axis("measure").values, all_layers, strict=True))))
        return "\n".join(words).rstrip()

    def to_latex(self) -> str:
        """Return the scores of each measure as a LaTeX table, which needs the package booktabs."""
        return self._table().to_latex()

    def plot(self, **options: Any) -> "Axes":
        """Draw one score of all measures with its interval, the first if none is selected."""
        from identikit import plots

        score = self.axis("score")
        return plots.score_bars(self if score.single else self.sel(score=score.values[0]), **options)


def score_table(rows: Mapping[str, Sequence[Sequence[float]]], scores: Sequence[str]) -> Table:
    """Return the scores of measures, each a mean and its standard error, as a table."""
    columns = (Column("measure"), *(Column(score, mean_and_error(2), "right") for score in scores))
    return Table(columns, tuple((name, *row) for name, row in rows.items()))


def unchanged(correlations: Mapping[str, float]) -> str:
    """Return which measures rank as before although all layers were shuffled: these do not explain the weights."""
    names = [name for name, rank in correlations.items() if rank > _UNCHANGED and name not in BASELINES]
    return f"Unchanged when all layers are shuffled: {', '.join(names)}." if names else ""


def explained(options: EvaluationOptions) -> str:
    """Return in words what the measures are tested as explanations of."""
    return "the last hidden vectors" if options.target is None else "the probability of the model's own prediction"


def gathered(
    model: Model, texts: list[ReadText], numbers: Mapping[str, Tensor], options: EvaluationOptions, **about: object
) -> Evaluation:
    """Return the result of texts from the numbers of all of them, (text, …)."""
    measures = (*options.measures, *BASELINES)
    arrays: dict[str, Tensor] = {}
    arrays["mean"], arrays["stderr"] = mean_over_texts(numbers["scores"])
    arrays["low"], arrays["high"] = bootstrap_ends(numbers["scores"], seed=options.seed)
    axes = [Axis("measure", measures), Axis("score", options.scores)]
    if depths := options.depths(model):
        arrays["left"], arrays["left_stderr"] = mean_over_texts(numbers["forgotten"])
        axes.append(Axis("depth", depths))
    if "curves" in options.tests:
        arrays["deletion_curve"], arrays["insertion_curve"] = numbers["curves"].nanmean(0).unbind(1)
        axes += [Axis("curve", (*measures, BEST, WORST)), Axis("share", SHARES)]
    facts = {
        "scores": {name: SCORES[name].meaning for name in options.scores},
        "chance": {name: SCORES[name].chance for name in options.scores},
        "texts": len(numbers["scores"]),
        "explained": explained(options),
        **about,
    }
    dims = {name: Evaluation.measures[name].axes for name in arrays}
    provenance = model.provenance(texts, **asdict(options))
    return Evaluation(tuple(axes), StoredArrays(arrays, dims), provenance, facts)
