"""What readings of attention, head scores and tests of explanations take, beside one forward pass where that helps."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.measure import Row, Task, cuda_peak_gib, seconds
from identikit.attention.measure import attention_measure
from identikit.attention.scores import head_scores, repeated_tokens
from identikit.explanation.evaluate import evaluate
from identikit.explanation.explain import explain
from identikit.models.load.load import load
from identikit.models.model import Model
from identikit.progress import Progress, silent
from identikit.texts.data import sample_texts

FORWARD = "forward pass"
_MEASURES = ("token attribution", "mean", "norm", "rollout")
_TESTS = ("curves", "determined", "randomised")  # beside "leave one out", which times the measures


@dataclass(frozen=True)
class ReadingOptions:
    """What to measure.

    - `parts`: some of `PARTS`; `model`: a folder or hub id, None: the packaged one; `device`: where
    - `tokens`: lengths of made-up texts that are rolled out, all pairs with both ends
    - `repeated`: how many random tokens are repeated once for the role of heads; `scores`: which roles, None: all
    - `tested`: the length of the text on which explanations are tested
    """

    parts: tuple[str, ...] = ("rollout", "roles", "explain", "evaluate")
    model: str | None = None
    device: str = "cpu"
    tokens: tuple[int, ...] = (64, 128)
    repeated: int = 150
    scores: tuple[str, ...] | None = None
    tested: int = 26


def run(options: ReadingOptions, *, progress: Progress = silent) -> list[Row]:
    """Measure each part; everything that is compiled is compiled before."""
    model = load(options.model, device=options.device)
    attention_measure(model, repeated_tokens(model, 20))
    rows = []
    for place, part in enumerate(options.parts):
        rows += PARTS[part](model, options)
        progress("parts of the benchmark", place + 1, len(options.parts))
    return rows


def _timed(case: str, what: str, task: Task, forward: float | None = None) -> Iterator[Row]:
    """Yield the time on the clock and the processor time of all threads; beside a forward pass where that is given."""
    if torch.cuda.is_available():
        task()  # kernels are compiled, and loaded for each new shape, the first time
    before = time.process_time()
    clock, _ = seconds(task)
    used = time.process_time() - before
    yield Row(case, what, clock, "s", None if forward is None else clock / forward, FORWARD if forward else "")
    yield Row(case, f"{what}, processor time", used, "s")


def rollout(model: Model, options: ReadingOptions) -> Iterator[Row]:
    """Rollout of all pairs, with both ends."""
    drawn = repeated_tokens(model, max(options.tokens))
    for n in options.tokens:
        ids = [*drawn[: n - 1], drawn[-1]]
        yield from _timed(f"{model.name}, {n} tokens", "rollout of all pairs", partial(attention_measure, model, ids))


def roles(model: Model, options: ReadingOptions) -> Iterator[Row]:
    """Scores of all heads, on random tokens that are repeated once."""
    ids = repeated_tokens(model, options.repeated)
    case = f"{model.name}, {len(ids)} tokens"
    for name in options.scores or (None,):
        what = "all head scores" if name is None else f"head scores, {name}"
        yield from _timed(case, what, partial(head_scores, model, ids, scores=name))


def explained(model: Model, options: ReadingOptions) -> Iterator[Row]:
    """What `explain` takes, and what it takes more for measures that are asked for."""
    (text,) = sample_texts()[30:31]
    case = f"{model.name}, the sample text"
    explain(model, text, probes=8)  # maps are fitted
    for measures in ((), ("rollout",), ("rollout", "value norm", "roles")):
        what = ", ".join(("explain", *measures))
        yield from _timed(case, what, partial(explain, model, text, probes=8, measures=measures))


def evaluated(model: Model, options: ReadingOptions) -> Iterator[Row]:
    """Each test of explanations alone, beside one forward pass of the text."""
    text = tuple(repeated_tokens(model, options.tested)[: options.tested])
    case = f"{model.name}, {len(text)} tokens"
    batch = next(model.batches(model.encode([text])))
    model.trace(batch)
    forward, _ = seconds(lambda: [model.trace(batch) for _ in range(10)])
    yield Row(case, FORWARD, forward / 10, "s")
    tried: dict[str, Callable[[], object]] = {}
    for name in _MEASURES:
        tried[f"{name}, with leave one out"] = partial(evaluate, model, [text], [name], tests="leave one out")
    tried["leave one out alone"] = partial(evaluate, model, [text], ["leave one out"], tests="leave one out")
    for test in _TESTS:
        tried[f"{test}, with mean"] = partial(evaluate, model, [text], ["mean"], tests=test)
    for what, task in tried.items():
        yield from _timed(case, what, task, forward / 10)
        if torch.cuda.is_available():
            yield Row(case, f"{what}, peak memory", 1024 * cuda_peak_gib(task), "MiB")


PARTS: dict[str, Callable[[Model, ReadingOptions], Iterator[Row]]] = {
    "rollout": rollout,
    "roles": roles,
    "explain": explained,
    "evaluate": evaluated,
}
