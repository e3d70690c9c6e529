"""Where the tasks of a run are computed: here in turn, in processes of this machine, or on a Ray cluster.

A *job* says what is computed, a *task* on what. Every engine gives the same numbers: a task's result depends on nothing
but the model, the job, the task, and how many threads compute it, which is why `threads` is a setting of a run.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from identikit.errors import InputError, ModelError
from identikit.indexing import known, whole_number
from identikit.models.load import Recipe
from identikit.models.model import Model
from identikit.progress import Progress, silent
from identikit.runs.store import settings_in

ENGINES = ("local", "processes", "ray")
AHEAD = 2  # tasks that each worker has been given
RETRIES = 3  # how often a task whose worker died is tried again


@runtime_checkable
class Job(Protocol):
    """What is computed for each task; it can be pickled, so that it can be sent to other processes."""

    def compute(self, model: Model, task: Any, told: Progress) -> Any:
        """Return the result of one task; `told` may be called with how many parts of it are done."""
        ...


@dataclass(frozen=True)
class Task:
    """One piece of work: its number, what a job's `compute` is given, and about how long it takes, in any unit."""

    number: int
    given: Any = field(repr=False)
    cost: float = 1.0


Result = tuple[Task, Any]
Told = Callable[[Task, int], None]  # called with a task and how many parts of it are done


@runtime_checkable
class Engine(Protocol):
    """Computes tasks, each with so many CPU threads, and yields each with its result as it is done."""

    @property
    def threads(self) -> int:
        """How many threads compute a task."""
        ...

    def run(self, model: Model, job: Job, tasks: Sequence[Task], told: Told) -> Iterator[Result]:
        """Compute tasks."""
        ...


@dataclass(frozen=True)
class Workers:
    """How many workers there are, and what each has: CPU threads, and on a cluster GPUs; `address` is the cluster's."""

    engine: str = "local"
    workers: int | None = None
    threads: int | None = None
    address: str | None = None
    gpus: float = 0.0

    def __post_init__(self) -> None:
        known("--engine", self.engine, ENGINES)
        for name, given in (("--workers", self.workers), ("--threads", self.threads)):
            if given is not None:
                whole_number(name, given, least=1)
        for name, given, engines in (
            ("--workers", self.workers, ENGINES[1:]),
            ("--address", self.address, ENGINES[2:]),
            ("--gpus-per-worker", self.gpus, ENGINES[2:]),
        ):
            if given and self.engine not in engines:
                raise InputError(
                    f"{name} is for --engine {' and --engine '.join(engines)}. Add it, or leave {name} out."
                )

    def start(self, folder: str) -> Engine:
        """Return the engine; if nobody says how many threads, those that a run in the folder was started with."""
        threads = self.threads or settings_in(folder).get("threads") or torch.get_num_threads()
        if self.engine == "local":
            return Local(threads)
        if self.engine == "processes":
            return Processes(threads, self.workers or max(1, (os.cpu_count() or 1) // threads))
        from identikit.runs.cluster import Cluster

        return Cluster(threads, self.workers, self.address, self.gpus)


@contextmanager
def with_threads(threads: int) -> Iterator[None]:
    """Compute with so many CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Local:
    """Computes tasks here, one after another."""

    threads: int = field(default_factory=torch.get_num_threads)

    def run(self, model: Model, job: Job, tasks: Sequence[Task], told: Told) -> Iterator[Result]:
        """Compute tasks in their order."""
        for task in tasks:
            with with_threads(self.threads):
                found = job.compute(model, task.given, lambda _, done, __, task=task: told(task, done))
            yield task, found


class Worker:
    """Computes tasks in a process of its own, with a model of its own."""

    def __init__(self, recipe: Recipe, fingerprint: str, job: Job, threads: int):
        torch.set_num_threads(threads)
        self.model, self.job = recipe.load(), job
        if self.model.fingerprint != fingerprint:
            raise ModelError(
                f"Loading {recipe.source} in another process: its weights, configuration or tokenizer are not those "
                "that the run was started with. Start it again, with the same files on every machine."
            )

    def compute(self, task: Task) -> Any:
        """Compute one task."""
        return self.job.compute(self.model, task.given, silent)


def sendable(model: Model, engine: str) -> Recipe:
    """Return how other processes load the same model."""
    if model.recipe is None:
        raise InputError(
            f"--engine {engine} loads {model.name} once per worker, and a model in memory cannot be loaded again. Save "
            "it with save_pretrained(folder), and name that folder."
        )
    return model.recipe


def by_cost(tasks: Sequence[Task]) -> list[Task]:
    """Return tasks with the longest first, so that no worker starts a long one when the others are done."""
    return sorted(tasks, key=lambda task: (-task.cost, task.number))


_worker: Worker | None = None


def _begin(*given: Any) -> None:
    global _worker
    _worker = Worker(*given)


def _compute(task: Task) -> Any:
    assert _worker is not None
    return _worker.compute(task)


@dataclass(frozen=True)
class Processes:
    """Computes tasks in processes of this machine."""

    threads: int
    workers: int

    def run(self, model: Model, job: Job, tasks: Sequence[Task], told: Told) -> Iterator[Result]:
        """Compute tasks, the longest first; when a worker dies, all start again with what is left."""
        given = sendable(model, "processes"), model.fingerprint, job, self.threads
        left, tries = by_cost(tasks), 0
        while left:
            done: set[int] = set()
            try:
                for task, found in self._pooled(given, left):
                    done.add(task.number)
                    yield task, found
            except BrokenExecutor:
                tries = 1 if done else tries + 1
                if tries > RETRIES:
                    raise InputError(
                        f"A worker process died {tries} times in a row. There may be too little memory for "
                        f"{self.workers} workers: run the same command again with fewer --workers."
                    ) from None
            left = [task for task in left if task.number not in done]

    def _pooled(self, given: tuple[Any, ...], tasks: Sequence[Task]) -> Iterator[Result]:
        context = multiprocessing.get_context("spawn")
        with _environment(OMP_NUM_THREADS=str(self.threads)):
            pool = ProcessPoolExecutor(min(self.workers, len(tasks)), context, _begin, given)
            running: dict[Future[Any], Task] = {}
            waiting = iter(tasks)
            try:
                while True:
                    while len(running) < AHEAD * self.workers and (task := next(waiting, None)) is not None:
                        running[pool.submit(_compute, task)] = task
                    if not running:
                        return
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        task = running.pop(future)
                        yield task, future.result()
            finally:
                for process in (pool._processes or {}).values():  # not to wait for what nobody wants any more
                    process.terminate()
                pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
