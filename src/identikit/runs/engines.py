"""Where the tasks of a run are computed: here in turn, in processes of this machine, or on a Ray cluster.

A *job* says what is computed, a *task* on what. Every engine gives the same numbers: a task's result depends on nothing
but the model, the job, the task, and how many threads compute it, which is why `threads` is a setting of a run.
"""

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch

from identikit.checks import known, whole_number
from identikit.errors import InputError, ModelError
from identikit.models.load.load import Recipe
from identikit.models.model import Model
from identikit.progress import Progress, silent
from identikit.runs.store import settings_in

ENGINES = ("local", "processes", "ray")
AHEAD = 2  # tasks that each worker has been given
RETRIES = 3  # how often a task whose worker died is tried again


@runtime_checkable
class RunJob(Protocol):
    """What is computed for each task; it can be pickled, so that it can be sent to other processes."""

    def compute(self, model: Model, task: Any, told: Progress) -> Any:
        """Return the result of one task; `told` may be called with how many parts of it are done."""
        ...


@dataclass(frozen=True)
class RunTask:
    """One piece of work: its number, what a job's `compute` is given, and about how long it takes, in any unit."""

    number: int
    given: Any = field(repr=False)
    cost: float = 1.0


Results = Generator[tuple[RunTask, Any], None, None]  # each task with its result
TaskProgress = Callable[[RunTask, int], None]  # called with a task and how many parts of it are done


@runtime_checkable
class Engine(Protocol):
    """Computes tasks, each with so many CPU threads, and yields each with its result as it is done."""

    @property
    def threads(self) -> int:
        """How many threads compute a task."""
        ...

    def run(self, model: Model, job: RunJob, tasks: Sequence[RunTask], told: TaskProgress) -> Results:
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
        if self.workers is not None:
            whole_number("--workers", self.workers, least=1)
        if self.threads is not None:
            whole_number("--threads", self.threads, least=1)
        self._refuse("--workers", self.workers, "processes", "ray")
        self._refuse("--address", self.address, "ray")
        self._refuse("--gpus-per-worker", self.gpus, "ray")

    def _refuse(self, option: str, value: object, *engines: str) -> None:
        """Refuse an option that the chosen engine does not have."""
        if value and self.engine not in engines:
            raise InputError(
                f"{option} is for --engine {' and --engine '.join(engines)}. Add it, or leave {option} out."
            )

    def start(self, folder: str) -> Engine:
        """Return the engine; if nobody says how many threads, with those that a run in the folder was started with."""
        threads = self.threads or settings_in(folder).get("threads") or torch.get_num_threads()
        if self.engine == "local":
            return Local(threads)
        if self.engine == "processes":
            return Processes(threads, self.workers or workers_here(threads))
        from identikit.runs.cluster import Cluster

        return Cluster(threads, self.workers, self.address, self.gpus)


def workers_here(threads: int) -> int:
    """Return how many workers of so many threads this machine has cores for."""
    return max(1, (os.cpu_count() or 1) // threads)


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

    def run(self, model: Model, job: RunJob, tasks: Sequence[RunTask], told: TaskProgress) -> Results:
        """Compute tasks in their order."""
        for task in tasks:
            with with_threads(self.threads):
                result = job.compute(model, task.given, lambda _, done, __, task=task: told(task, done))
            yield task, result


# Workers in other processes


@dataclass(frozen=True)
class WorkerResult:
    """The result of a task that was computed in another process, and the warnings given there."""

    result: Any
    warnings: tuple[tuple[str, type[Warning]], ...] = ()

    def unpacked(self) -> Any:
        """Return the result, and give the warnings here."""
        for message, category in self.warnings:
            warnings.warn(message, category, stacklevel=3)
        return self.result


@dataclass
class RunWorker:
    """Computes tasks in a process of its own, with a model of its own.

    The model is loaded with the first task, so that an error in it comes out like one in the task.
    """

    recipe: Recipe
    fingerprint: str
    job: RunJob
    threads: int

    @classmethod
    def of(cls, model: Model, job: RunJob, engine: str, threads: int) -> "RunWorker":
        """Return a worker that can be sent to other processes."""
        if model.recipe is None:
            raise InputError(
                f"--engine {engine} loads {model.name} once per worker, and a model in memory cannot be loaded again. "
                "Save it with save_pretrained(folder), and name that folder."
            )
        return cls(model.recipe, model.fingerprint, job, threads)

    @cached_property
    def model(self) -> Model:
        """The model, checked to be the one that the run was started with."""
        model = self.recipe.load()
        if model.fingerprint != self.fingerprint:
            raise ModelError(
                f"Loading {model.name} in another process: its weights, configuration or tokenizer are not those that "
                "the run was started with. Start it again, with the same files on every machine."
            )
        return model

    def compute(self, task: RunTask) -> WorkerResult:
        """Compute one task."""
        with with_threads(self.threads), warnings.catch_warnings(record=True) as caught:
            result = self.job.compute(self.model, task.given, silent)
        return WorkerResult(result, tuple((str(warning.message), warning.category) for warning in caught))


def by_cost(tasks: Sequence[RunTask]) -> list[RunTask]:
    """Return tasks with the longest first, so that no worker starts a long one when the others are done."""
    return sorted(tasks, key=lambda task: (-task.cost, task.number))


# Processes of this machine

_worker: RunWorker | None = None


def _begin(worker: RunWorker) -> None:
    global _worker
    _worker = worker
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """End this process when the one that started it ends, even if that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _compute(task: RunTask) -> WorkerResult:
    assert _worker is not None
    return _worker.compute(task)


@dataclass(frozen=True)
class Processes:
    """Computes tasks in processes of this machine."""

    threads: int
    workers: int

    def run(self, model: Model, job: RunJob, tasks: Sequence[RunTask], told: TaskProgress) -> Results:
        """Compute tasks, the longest first; when a worker dies, all start again with what is left."""
        worker = RunWorker.of(model, job, "processes", self.threads)
        left = by_cost(tasks)
        deaths = 0  # in a row
        while left:
            done: set[int] = set()
            try:
                for task, result in self._pooled(worker, left):
                    done.add(task.number)
                    yield task, result
            except BrokenExecutor:
                deaths = 1 if done else deaths + 1
                if deaths > RETRIES:
                    raise InputError(
                        f"A worker process died {deaths} times in a row. There may be too little memory for "
                        f"{self.workers} workers: run the same command again with fewer --workers."
                    ) from None
            left = [task for task in left if task.number not in done]

    def _pooled(self, worker: RunWorker, tasks: Sequence[RunTask]) -> Results:
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(min(self.workers, len(tasks)), context, _begin, (worker,))
        running: dict[Future[WorkerResult], RunTask] = {}
        waiting = iter(tasks)
        try:
            while True:
                with _starting(self.threads):  # the first task starts the processes
                    while len(running) < AHEAD * self.workers and (task := next(waiting, None)) is not None:
                        running[pool.submit(_compute, task)] = task
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    task = running.pop(future)
                    yield task, future.result().unpacked()
        finally:
            for process in (pool._processes or {}).values():  # not to wait for what nobody wants any more
                process.terminate()
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _starting(threads: int) -> Iterator[None]:
    """Give processes that are started here so many threads from the start, and leave Ctrl-C to this one."""
    name = "OMP_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = str(threads)
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if hasattr(signal, "pthread_sigmask") else None
    try:
        yield
    finally:
        if masked is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
