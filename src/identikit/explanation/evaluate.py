"""Put explanations to the test: which measure's largest sources really move the model?"""

import math
import time
import warnings
from collections.abc import Mapping, Sequence

import torch

from identikit.attention.agreement import MeasureOrFunction, named_measures
from identikit.checks import as_integer, function, is_collection, known_names, real_number, shortened
from identikit.errors import InputError
from identikit.explanation.evaluation_result import Evaluation, gathered
from identikit.explanation.faithfulness import BASELINES, NAMES, TESTS, EvaluationOptions, TestedText
from identikit.explanation.replaced import BATCH_TOKENS, Predicted, ReplacedText, Replacement
from identikit.maths.threads import one_thread_if_busy
from identikit.models.isolation import standard_torch_state
from identikit.models.machine import format_duration
from identikit.models.model import Model, checked_model
from identikit.progress import Watched, reporting
from identikit.shapes import Tensor
from identikit.texts.text import EncodedText, ReadText, is_text_list

_LONG = 60.0  # seconds: a longer evaluation is warned of


@reporting
@one_thread_if_busy()
@standard_torch_state()
def evaluate(
    model: Model,
    texts: object,
    measures: Sequence[MeasureOrFunction] = EvaluationOptions.measures,
    *,
    tests: Sequence[str] | str = TESTS,
    target: str | None = None,
    truth: Sequence[Sequence[int]] | None = None,
    replacement: str | None = None,
    beam: int = EvaluationOptions.beam,
    probes: int | str | None = None,
    seed: int = 0,
    seconds: float | int | None = None,
    truncate: bool = False,
    max_tokens: int | None = None,
    progress: Watched = None,
) -> Evaluation:
    """Test measures on texts: do the sources that a measure ranks highest move the model most?

    Returns an `Evaluation`: scores of each measure, (measure, score), as means over texts with standard errors and
    bootstrap intervals. Two baselines stand beside the measures: "random" orders, and "reversed", which takes the
    sources that move the output least first.

    - `measures`: "token attribution", names that `attention_measure` knows, "leave one out" (what the tests themselves
      measure), or functions of the model and a text that return a number for each output and input token: a tensor, or
      a Result. Measures of heads and layers are averaged; those through layers are taken after the last
    - `tests`: "curves" (deletion and insertion, between the best and the worst order that a beam search of this width
      finds), "leave one out", "determined" (which pairs of sources no alternative attention can put in another order)
      and "randomised" (what is left of a measure when the layers of a copy of the model are shuffled, from the last
      one down)
    - `target`: what is to be explained. None: the last hidden vectors, each by its own sources. "prediction": the
      probability of the next token or the class that the model itself predicts, by the sources of the last token, or of
      the first one of an encoder
    - `truth`: for each text the position of the right source of each token, −1 where none is known; it adds a score
    - `replacement`: what takes the place of a token: "mask", "pad", or "draw", another token of the texts; None: the
      mask where the tokenizer has one, and else a draw. Special tokens are never replaced, nor is the output's own
    - `probes`: how many random directions token attribution is estimated from, or "exact"; None: 32
    - `seconds`: stop after about this time; texts that were not reached are left out, and counted. The first one is
      always tested as a whole
    """
    model = checked_model(model)
    progress = function("progress", progress)
    measures_by_name = named_measures(measures, NAMES, BASELINES)
    test_names = known_names("tests", tests, TESTS)
    limit = None if seconds is None else real_number("seconds", seconds, above=0.0, most=float("inf"))
    options = EvaluationOptions(
        measures=tuple(measures_by_name),
        tests=test_names if truth is None else (*test_names, "truth"),
        target=target,
        replacement=replacement,
        beam=beam,
        probes=probes,
        seed=seed,
        truncate=truncate,
        max_tokens=max_tokens,
    ).checked(model)
    several = texts if is_text_list(texts) else [texts]
    encoded = model.encode(several, truncate=truncate, max_tokens=max_tokens)
    if not encoded:
        raise InputError("evaluate was given no texts. Pass at least one.")
    right_sources = None if truth is None else checked_truth(truth, encoded)
    substitute = Replacement.of(model, replacement, encoded, options.seed)
    if limit is None:
        warn_if_long(model, [len(text) for text in encoded], options)
    until = math.inf if limit is None else time.monotonic() + limit
    numbers: list[Mapping[str, Tensor]] = []
    for index, text in enumerate(several):
        if numbers and time.monotonic() > until:
            break
        text_truth = None if right_sources is None else right_sources[index]
        numbers.append(text_numbers(model, text, measures_by_name, options, substitute, text_truth))
        progress("evaluation, texts", index + 1, len(encoded))
    tested_texts: list[ReadText] = [text.text for text in encoded[: len(numbers)]]
    left_out = len(encoded) - len(numbers)
    return gathered(model, tested_texts, stacked(numbers), options, replacement=substitute.name, left_out=left_out)


def text_numbers(
    model: Model,
    text: object,
    measures: Mapping[str, MeasureOrFunction],
    options: EvaluationOptions,
    substitute: Replacement,
    truth: Sequence[int] | None = None,
) -> dict[str, Tensor]:
    """Test measures on one text; see `TestedText.numbers`."""
    reading = options.read(model, text)
    assert reading.batch.ids is not None
    substitutes = substitute.draw(reading.batch.ids[0], options.seed)
    target = None if options.target is None else Predicted.of(reading)
    return TestedText(ReplacedText(reading, substitutes, target), measures, options, truth).numbers()


def stacked(numbers: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the numbers of several texts, (text, …)."""
    return {name: torch.stack([of_text[name] for of_text in numbers]) for name in numbers[0]}


def checked_truth(truth: object, encoded: Sequence[EncodedText]) -> list[list[int]]:
    """Return the right sources of each text's tokens."""
    expected = "for each text a list with the position of each token's right source, or -1"
    if not is_collection(truth) or len(truth) != len(encoded):
        raise InputError(f"truth={shortened(truth)} cannot be used: expected {expected}.")
    checked = []
    for index, (sources, text) in enumerate(zip(truth, encoded, strict=True)):
        numbers = [as_integer(source) for source in sources] if is_collection(sources) else []
        right = [source for source in numbers if source is not None and -1 <= source < len(text)]
        if len(right) != len(text):
            raise InputError(f"truth[{index}]={shortened(sources)} cannot be used: expected {expected}.")
        checked.append(right)
    return checked


def warn_if_long(model: Model, lengths: Sequence[int], options: EvaluationOptions) -> None:
    """Warn where the runs of the tests will take long, by the time of a few; what measures take comes on top."""
    longest = max(lengths)
    batch = model.sample((longest,) * max(1, BATCH_TOKENS // longest))
    start = time.monotonic()
    model.trace(batch)
    seconds_per_token = (time.monotonic() - start) / len(batch) / longest
    runs = [options.passes(model, n) for n in lengths]
    seconds = seconds_per_token * sum(n * count for n, count in zip(lengths, runs, strict=True))
    if seconds > _LONG:
        warnings.warn(
            f"Testing takes up to {format_duration(seconds)} beside what the measures themselves take: "
            f"{sum(runs):,.0f} runs of the model. Fewer or shorter texts, a narrower beam= or fewer tests= take less.",
            stacklevel=6,
        )
