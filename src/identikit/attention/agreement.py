"""Whether measures of attention rank sources alike, and how much of each ranking the outputs determine."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import combinations
from typing import NamedTuple

import torch

from identikit.attention.captured import capture
from identikit.attention.intervals import Bounding
from identikit.attention.measure import MeasuredText
from identikit.attention.measure_kinds import MEASURE_KINDS
from identikit.attention.measure_result import Agreement, AttentionMeasure
from identikit.checks import call_user_function, function, is_collection, known_name, shortened
from identikit.errors import InputError
from identikit.maths.measures import mean_over_texts, ordered_share, rank_correlation
from identikit.models.isolation import standard_torch_state
from identikit.models.model import Model, checked_model
from identikit.models.text_run import TextRun, run_texts
from identikit.progress import Watched, reporting
from identikit.results.axis import Axis
from identikit.results.result import Result
from identikit.results.source import StoredArrays
from identikit.shapes import Bool, Float, Tensor
from identikit.texts.text import is_text_list

_FEWEST_SOURCES = 3  # fewer sources of a token have no ranking worth a correlation
MeasureOrFunction = str | Callable[[Model, object], object]


@reporting
@standard_torch_state()
def agreement(
    model: Model,
    texts: object,
    measures: Sequence[MeasureOrFunction] = ("mean", "norm", "rollout"),
    *,
    target: object = None,
    seconds: float | int | None = None,
    truncate: bool = False,
    progress: Watched = None,
) -> Agreement:
    """Compare measures of attention on a text or a list of texts: do they rank the sources of a token alike?

    For each token, each measure ranks the other tokens as its sources. Measures of heads and layers are averaged over
    all of them; those through layers are taken after the last. Returns an `Agreement`: the rank correlation of each
    pair, (measure, other), and for each measure how much of its own ranking is the same in all alternatives, over texts
    with standard errors.

    - `measures`: names that `attention_measure` knows, or functions of the model and a text that return a number for
      each output and input token: a tensor, or a Result such as that of `token_attribution`, which no alternative
      moves
    - `target`: what gradients and logits are of; see `attention_measure`
    - `seconds`: stop bounding after this time, for all texts together; a text in which a measure was not bounded in
      time does not count for what is `determined` of it. Correlations need no bounds, and functions are not stopped
    """
    bounding = Bounding.checked(math.inf if seconds is None else seconds)
    progress = function("progress", progress)
    requested = named_measures(measures, tuple(MEASURE_KINDS))
    if target is not None and not any(name in MEASURE_KINDS and MEASURE_KINDS[name].needs_target for name in requested):
        raise InputError("target= cannot be used here: none of these measures needs one. Leave it out.")
    model = checked_model(model)
    text_runs = run_texts(model, texts, layers=model.attention_layers, truncate=truncate)
    comparisons = []
    for index, text_run in enumerate(text_runs):
        share = bounding.shared(len(text_runs) - index)
        measured = MeasuredText(capture(text_run), target, share.until)
        rankings = []
        for name, measure in requested.items():
            if isinstance(measure, str):
                rankings.append(ranking_of(measured.measure_all(MEASURE_KINDS[measure])))
            else:
                rankings.append(ranking_of_function(name, measure, text_run))
        comparisons.append(_compare(rankings))
        progress("agreement, texts", index + 1, len(text_runs))
    correlations, shares, bounded = (torch.stack(arrays) for arrays in zip(*comparisons, strict=True))
    arrays: dict[str, Tensor] = {}
    for name, numbers in (("correlation", correlations), ("determined", shares)):
        arrays[name], error = mean_over_texts(numbers)
        if len(text_runs) > 1:
            arrays[f"{name}_stderr"] = error
    arrays["bounded_texts"] = bounded.sum(0)
    dims = {name: ("measure", "other")[: array.ndim] for name, array in arrays.items()}
    text = [text_run.text for text_run in text_runs] if is_text_list(texts) else text_runs[0].text
    names = tuple(requested)
    provenance = model.provenance(text, measures=names, target=None if target is None else shortened(target))
    axes = (Axis("measure", names), Axis("other", names))
    return Agreement(axes, StoredArrays(arrays, dims), provenance, {"texts": len(text_runs)})


class Ranking(NamedTuple):
    """A measure of one text, by output and input token, with its ends over all alternatives."""

    raw: Float[Tensor, "output input"]
    lower: Float[Tensor, "output input"]
    upper: Float[Tensor, "output input"]
    bounded: bool = True


def ranking_of(measure: AttentionMeasure) -> Ranking:
    """Return a measure of one text as (output, input): the mean over heads and layers, or that after the last layer."""
    arrays = [measure.read(name) for name in ("raw", "lower", "upper")]
    bounded = not bool(measure.read("gap").isnan().any())
    if measure.through:
        return Ranking(*(array[-1] for array in arrays), bounded=bounded)
    return Ranking(*(array.flatten(0, -3).mean(0) for array in arrays), bounded=bounded)


def named_measures(
    measures: object, names: Sequence[str], reserved: Sequence[str] = ()
) -> dict[str, MeasureOrFunction]:
    """Return the requested measures, names or functions, by name; refuse two of the same name."""
    several = [measures] if isinstance(measures, str) or callable(measures) else measures
    if not is_collection(several) or not len(several):
        raise InputError(f"measures={shortened(measures)} cannot be used: expected several names or functions.")
    requested: dict[str, MeasureOrFunction] = {}
    for measure in several:
        if not callable(measure):
            name = known_name("measures", measure, names)
            requested[name] = name
            continue
        name = getattr(measure, "__name__", "function")
        if name in (*names, *reserved) or requested.get(name, measure) is not measure:
            raise InputError(f"measures=: a function is called {name!r}, as another measure is. Rename it.")
        requested[name] = measure
    return requested


def ranking_of_function(name: str, function: Callable[[Model, object], object], text_run: TextRun) -> Ranking:
    """Return what a function makes of a text; its range is unknown, so it counts as the same in all alternatives."""
    returned = call_user_function(f"measures=: {name}", function, text_run.model, text_run.text)
    scores = _result_scores(name, returned) if isinstance(returned, Result) else _real_scores(name, returned)
    if isinstance(returned, Result) and returned.tokens != text_run.tokens:
        raise InputError(f"{name} gave a result of another text, or of its words: its tokens differ.")
    n = len(text_run.tokens)
    if scores.shape != (n, n):
        raise InputError(f"{name} gave numbers of the shape {tuple(scores.shape)}, and ({n}, {n}) is expected.")
    numbers = scores.double().cpu()
    return Ranking(numbers, numbers, numbers)


def _result_scores(name: str, result: Result) -> Tensor:
    """Return the first of a Result's main arrays as (output, input), of the last layer."""
    array = result.main[0]
    dims = result.source.dims[array]
    scores = result.read(array)
    for dim, size in zip(dims[:-2], scores.shape, strict=False):
        if dim != "layer" and size > 1:
            raise InputError(f"{name} gave a result of {size} {dim}s. Select one of them, or return their mean.")
    if dims[-2:] == ("input", "output"):
        scores = scores.mT
    return scores[(-1,) * (scores.ndim - 2)]


def _real_scores(name: str, returned: object) -> Tensor:
    with suppress(TypeError, ValueError, RuntimeError):
        scores = torch.as_tensor(returned).detach().to_dense().cpu()
        if not scores.is_complex():
            return scores
    raise InputError(f"{name} gave {shortened(returned)}: expected real numbers, or a Result.")


def _compare(
    rankings: Sequence[Ranking],
) -> tuple[Float[Tensor, "measure other"], Float[Tensor, "measure"], Bool[Tensor, "measure"]]:
    """Return the correlation of each pair of rankings of a text, the determined share of each, and which are bounded.

    A ranking that was not bounded in time has no determined share: NaN.
    """
    sources = ~torch.eye(len(rankings[0].raw), dtype=torch.bool)
    for ranking in rankings:
        sources &= (ranking.upper != 0) | (ranking.lower != 0)  # what no measure rules out
        sources &= ~ranking.raw.isnan()  # and what each has a number for
    sources[sources.sum(-1) < _FEWEST_SOURCES] = False
    correlation = torch.eye(len(rankings), dtype=torch.float64)
    for row, column in combinations(range(len(rankings)), 2):
        mean = rank_correlation(rankings[row].raw, rankings[column].raw, sources).nanmean()
        correlation[row, column] = correlation[column, row] = mean
    shares = [ordered_share(ranking.lower, ranking.upper, sources).nanmean() for ranking in rankings]
    bounded = torch.tensor([ranking.bounded for ranking in rankings])
    return correlation, torch.stack(shares).masked_fill(~bounded, torch.nan), bounded
