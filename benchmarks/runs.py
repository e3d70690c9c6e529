"""What a run over a dataset costs beside its numbers: with more texts, and on other engines.

With more texts, each text should take as long as before, and memory should grow by no more than what is kept of each
text. Every size is measured in a process of its own, on the same texts repeated. Engines are compared on empty tasks,
and on attention with one and two workers; the time that workers take to start is left out. CPU time is noted beside
the time on the clock, since it says more on a busy machine.
"""

import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, NamedTuple

from benchmarks.measure import Row
from identikit.attention.dataset import AttentionJob, AttentionOptions, attention_statistics
from identikit.attribution.dataset import AttributionOptions, attribution_statistics
from identikit.checks import shortened
from identikit.errors import InputError
from identikit.models.load.load import load
from identikit.models.model import Model
from identikit.progress import Progress, silent
from identikit.runs.cluster import Cluster
from identikit.runs.engines import Engine, Local, Processes, RunJob, RunTask
from identikit.runs.run import Run
from identikit.runs.store import Store
from identikit.texts.data import read_texts, sample_texts
from identikit.texts.text import Text

COUNTS = (100, 200, 500, 1000, 2000)
COMMANDS = ("attention", "attribution")
ENGINES = ("local", "processes", "ray")
PARTS = ("texts", "engines")
WARM_UP = 32  # texts that are read before anything is measured


@dataclass(frozen=True)
class Options:
    """What to measure: `parts`, on how many texts (`counts`), with which of `COMMANDS`, and on which of `ENGINES`.

    `data` and `data_dir` are as `read_texts` takes them, None for the embedded texts; `probes` are those of
    attribution; `tasks` is how many empty tasks engines get.
    """

    model: str | None = None
    data: str | None = None
    data_dir: str | None = None
    counts: tuple[int, ...] = COUNTS
    commands: tuple[str, ...] = COMMANDS
    engines: tuple[str, ...] = ENGINES
    parts: tuple[str, ...] = PARTS
    probes: int = 2
    tasks: int = 200

    def __post_init__(self) -> None:
        for given, known in ((self.parts, PARTS), (self.commands, COMMANDS), (self.engines, ENGINES)):
            wrong = [one for one in given if one not in known]
            if wrong:
                raise InputError(
                    f"Benchmarking runs: {shortened(wrong[0])} is not known. Use some of {', '.join(known)}."
                )

    def texts(self, count: int) -> list[Text]:
        """Return so many texts, the same ones again and again."""
        found = sample_texts() if self.data is None else read_texts(self.data, data_dir=self.data_dir)
        return list(islice(cycle(list(found)), count))


class Used(NamedTuple):
    """What a run took: seconds on the clock, of CPUs, and the most memory, in MiB."""

    seconds: float
    cpu: float
    mib: float


@dataclass(frozen=True)
class Nothing:
    """A job that computes nothing."""

    def compute(self, model: Model, task: Any, progress: Progress) -> int:
        """Return the task."""
        return task


def run(options: Options, *, progress: Progress = silent) -> list[Row]:
    """Measure the parts asked for."""
    rows: list[Row] = []
    if "texts" in options.parts:
        for command in options.commands:
            rows += by_texts(options, command, progress)
    if "engines" in options.parts:
        rows += by_engine(options, progress)
    return rows


# More texts


def by_texts(options: Options, command: str, progress: Progress) -> list[Row]:
    """Measure time per text and memory for each number of texts, compared with the smallest number."""
    figures: dict[str, dict[str, float]] = {"time per text": {}, "CPU time per text": {}, "peak memory": {}}
    for done, count in enumerate(sorted(options.counts)):
        progress(f"{command}, sizes", done, len(options.counts))
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            used = pool.apply(used_by, (options, command, count))
        per_text = 1000 / count
        for taken, figure in zip(
            figures.values(), (used.seconds * per_text, used.cpu * per_text, used.mib), strict=True
        ):
            taken[f"{count} texts"] = figure
    progress(f"{command}, sizes", len(options.counts), len(options.counts))
    rows = []
    for (what, taken), unit in zip(figures.items(), ("ms", "ms", "MiB"), strict=True):
        (first, least), *others = taken.items()
        rows.append(Row(f"{command}, {what}", first, least, unit))
        rows += [Row(f"{command}, {what}", name, figure, unit, figure / least, first) for name, figure in others]
    return rows


def used_by(options: Options, command: str, count: int) -> Used:
    """Run a command over so many texts in a folder that is gone afterwards, and return what it used."""
    model = load(options.model)
    gather: Callable[..., Any] = attention_statistics
    how: Any = AttentionOptions(truncate=True)
    if command == "attribution":
        gather, how = attribution_statistics, AttributionOptions(probes=options.probes, truncate=True)
    with tempfile.TemporaryDirectory() as folder:
        gather(model, options.texts(WARM_UP), Run(Store(f"{folder}/warm-up", {}), Local()), how)
        texts = options.texts(count)
        started, cpu = time.perf_counter(), sum(os.times()[:2])
        gather(model, texts, Run(Store(f"{folder}/run", {}), Local()), how)
        return Used(time.perf_counter() - started, sum(os.times()[:2]) - cpu, _peak_mib())


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


# Other engines


def by_engine(options: Options, progress: Progress) -> list[Row]:
    """Measure what engines add to each task, and attention with one and two workers."""
    model, rows = load(options.model), []
    empty = [RunTask(number, number) for number in range(options.tasks)]
    for done, name in enumerate(options.engines):
        progress("engines", done, len(options.engines))
        taken = between(engine(name, 1), model, Nothing(), empty)
        rows.append(Row(f"{options.tasks} empty tasks, 1 worker", name, taken * 1000, "ms per task"))
        if name != "local":
            rows += _scaling(options, name, model)
    progress("engines", len(options.engines), len(options.engines))
    return rows


def _scaling(options: Options, name: str, model: Model) -> list[Row]:
    job, size = AttentionJob(AttentionOptions(truncate=True)), 16
    texts = options.texts(min(options.counts))
    tasks = [RunTask(place, texts[place : place + size]) for place in range(0, len(texts), size)]
    one, two = (between(engine(name, workers), model, job, tasks) for workers in (1, 2))
    case = f"attention, {size} texts per task, {name}"
    return [
        Row(case, "1 worker", one * 1000, "ms per task"),
        Row(case, "2 workers", two * 1000, "ms per task", two / one, "1 worker"),
    ]


def engine(name: str, workers: int) -> Engine:
    """Return an engine whose workers have one thread each."""
    return {"local": Local(1), "processes": Processes(1, workers), "ray": Cluster(1, workers)}[name]


def between(engine: Engine, model: Model, job: RunJob, tasks: Sequence[RunTask]) -> float:
    """Return the seconds per task after the first results, one per worker, have come: workers have started then."""
    workers, times = getattr(engine, "workers", 1), []
    for _ in engine.run(model, job, tasks, lambda task, done: None):
        times.append(time.perf_counter())
    return (times[-1] - times[workers - 1]) / (len(times) - workers)
