"""Whether measures of attention rank sources alike, and how much of each ranking the outputs determine."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from identikit.attention.effective import captured_attention
from identikit.attention.intervals import Bounding
from identikit.attention.measure import MeasuredText
from identikit.attention.reading_result import Agreement, AttentionMeasure
from identikit.attention.readings import READINGS
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

_SOURCES = 3  # fewer sources of a token have no ranking worth a correlation
Given = str | Callable[[Model, object], object]


@reporting
@standard_torch_state()
def agreement(
    model: Model,
    texts: object,
    measures: Sequence[Given] = ("mean", "norm", "rollout"),
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
    named = named_measures(measures, tuple(READINGS))
    model = checked_model(model)
    read = run_texts(model, texts, layers=model.attention_layers, truncate=truncate)
    parts = []
    for place, reading in enumerate(read):
        captured = captured_attention(reading).captured()
        text = MeasuredText(captured, target, bounding.shared(len(read) - place).until)
        rankings = []
        for name, given in named.items():
            if isinstance(given, str):
                rankings.append(ranking_of(text.overall(READINGS[given])))
            else:
                rankings.append(of_function(name, given, reading))
        parts.append(_compared(rankings))
        progress("agreement, texts", place + 1, len(read))
    names = tuple(named)
    arrays: dict[str, Tensor] = {}
    correlations, shares, bounded = (torch.stack(values) for values in zip(*parts, strict=True))
    for array, values in (("correlation", correlations), ("determined", shares)):
        arrays[array], error = mean_over_texts(values)
        if len(read) > 1:
            arrays[f"{array}_stderr"] = error
    arrays["bounded_texts"] = bounded.sum(0)
    dims = {array: ("measure", "other")[: part.ndim] for array, part in arrays.items()}
    of = [reading.text for reading in read] if is_text_list(texts) else read[0].text
    provenance = model.provenance(of, measures=names, target=None if target is None else shortened(target))
    return Agreement(
        (Axis("measure", names), Axis("other", names)), StoredArrays(arrays, dims), provenance, {"texts": len(read)}
    )


class Ranking(NamedTuple):
    """What a measure gives to each output token from each input token, and between which ends."""

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


def named_measures(measures: object, names: Sequence[str], taken: Sequence[str] = ()) -> dict[str, Given]:
    """Return the measures that were asked for by name or as functions, each under its name; no two share one."""
    several = [measures] if isinstance(measures, str) or callable(measures) else measures
    if not is_collection(several) or not len(several):
        raise InputError(f"measures={shortened(measures)} cannot be used: expected several names or functions.")
    named: dict[str, Given] = {}
    for given in several:
        if not callable(given):
            name = known_name("measures", given, names)
            named[name] = name
            continue
        name = getattr(given, "__name__", "function")
        if name in (*names, *taken) or named.get(name, given) is not given:
            raise InputError(f"measures=: a function is called {name!r}, as another measure is. Rename it.")
        named[name] = given
    return named


def of_function(name: str, function: Callable[[Model, object], object], reading: TextRun) -> Ranking:
    """Return what a function makes of a text, of which no range is known because no alternative moves it."""
    found = call_user_function(f"measures=: {name}", function, reading.model, reading.text)
    n = len(reading.tokens)
    scores = _of_result(name, found) if isinstance(found, Result) else _real(name, found)
    if scores.shape != (n, n):
        raise InputError(f"{name} gave numbers of the shape {tuple(scores.shape)}, and ({n}, {n}) is expected.")
    numbers = scores.double().cpu()
    return Ranking(numbers, numbers, numbers)


def _of_result(name: str, result: Result) -> Tensor:
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


def _real(name: str, found: object) -> Tensor:
    with suppress(TypeError, ValueError, RuntimeError):
        scores = torch.as_tensor(found).detach().to_dense().cpu()
        if not scores.is_complex():
            return scores
    raise InputError(f"{name} gave {shortened(found)}: expected real numbers, or a Result.")


def _compared(
    rankings: Sequence[Ranking],
) -> tuple[Float[Tensor, "measure other"], Float[Tensor, "measure"], Bool[Tensor, "measure"]]:
    """Return the correlation of each pair of rankings of a text, the determined share of each, and which are bounded.

    A ranking that was not bounded in time has no determined share: NaN.
    """
    n = len(rankings[0].raw)
    asked = ~torch.eye(n, dtype=torch.bool)
    for ranking in rankings:
        asked &= (ranking.upper != 0) | (ranking.lower != 0)  # what no measure rules out
        asked &= ~ranking.raw.isnan()  # and what each has a number for
    asked[asked.sum(-1) < _SOURCES] = False
    count = len(rankings)
    correlation = torch.eye(count, dtype=torch.float64)
    for one in range(count):
        for other in range(one):
            value = rank_correlation(rankings[one].raw, rankings[other].raw, asked).nanmean()
            correlation[one, other] = correlation[other, one] = value
    shares = [ordered_share(ranking.lower, ranking.upper, asked).nanmean() for ranking in rankings]
    bounded = torch.tensor([ranking.bounded for ranking in rankings])
    return correlation, torch.stack(shares).masked_fill(~bounded, torch.nan), bounded
