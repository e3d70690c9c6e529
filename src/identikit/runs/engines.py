"""Where the tasks of a run are computed: one after another in this process, in several processes, or on a Ray cluster.

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

from identikit.checks import known_name, whole_number
from identikit.errors import InputError, ModelError
from identikit.maths.threads import useful_thread_count
from identikit.models.load.load import Recipe
from identikit.models.model import Model
from identikit.progress import Progress, silent
from identikit.runs.store import opened, read_manifest

ENGINES = ("local", "processes", "ray")
AHEAD = 2  # tasks that each worker has been given
RETRIES = 3  # how often a task whose worker died is tried again
_THREADS = "OMP_NUM_THREADS"


@runtime_checkable
class RunJob(Protocol):
    """What is computed for each task; it can be pickled, so that it can be sent to other processes."""

    def compute(self, model: Model, task: Any, progress: Progress) -> Any:
        """Return the result of one task; `progress` may be called with how many parts of it are done."""
        ...


@dataclass(frozen=True)
class RunTask:
    """One piece of work: its number, what a job's `compute` is given, and about how long it takes, in any unit."""

    number: int
    given: Any = field(repr=False)
    cost: float = 1.0


Results = Generator[tuple[RunTask, Any], None, None]  # each task with its result
WorkerResult = tuple[Any, list[tuple[str, type[Warning]]]]  # from another process, with the warnings given there
TaskProgress = Callable[[RunTask, int], None]  # called with a task and how many parts of it are done


@runtime_checkable
class Engine(Protocol):
    """Computes tasks, each with `threads` CPU threads, and yields each with its result as it finishes."""

    @property
    def threads(self) -> int:
        """How many threads compute a task."""
        ...

    def run(self, model: Model, job: RunJob, tasks: Sequence[RunTask], told: TaskProgress) -> Results:
        """Compute tasks."""
        ...


def engine_of(
    folder: str,
    engine: str = "local",
    workers: int | None = None,
    threads: int | None = None,
    address: str | None = None,
    gpus: float = 0.0,
) -> Engine:
    """Return the engine of a run in a folder, with `threads` per worker; None: as many as the run was started with.

    A run that starts now gets all threads, or one where other processes keep cores busy, and keeps that number.
    On a Ray cluster, `address` says where it is, and `gpus` how many each worker has.
    """
    known_name("--engine", engine, ENGINES)
    for option, number in (("--workers", workers), ("--threads", threads)):
        if number is not None:
            whole_number(option, number, least=1)
    for option, value, engines in (
        ("--workers", workers, ("processes", "ray")),
        ("--address", address, ("ray",)),
        ("--gpus-per-worker", gpus, ("ray",)),
    ):
        if value and engine not in engines:
            others = " and --engine ".join(engines)
            raise InputError(f"{option} is for --engine {others}. Add it, or leave {option} out.")
    started = read_manifest(*opened(folder)) or {"run": {}}
    each: int = threads or started["run"].get("threads") or useful_thread_count()
    if engine == "ray":
        from identikit.runs.cluster import Cluster

        return Cluster(each, workers, address, gpus)
    return Local(each) if engine == "local" else Processes(each, workers or workers_here(each))


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


@dataclass
class RunWorker:
    """Computes tasks in a separate process with its own copy of the model.

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
        return result, [(str(warning.message), warning.category) for warning in caught]


def by_cost(tasks: Sequence[RunTask]) -> list[RunTask]:
    """Return tasks with the longest first, so that no worker starts a long one when the others are done."""
    return sorted(tasks, key=lambda task: (-task.cost, task.number))


def results_of(
    workers: Sequence[Any], submit: Callable[[Any, RunTask], "Future[WorkerResult]"], tasks: Sequence[RunTask]
) -> Results:
    """Give each worker a few tasks ahead of it, not all of them, and yield each with its result as it finishes."""
    waiting = iter(tasks)
    running: dict[Future[WorkerResult], tuple[RunTask, Any]] = {}
    free = [*workers] * AHEAD
    while True:
        for worker in free:
            if (task := next(waiting, None)) is not None:
                running[submit(worker, task)] = task, worker
        if not running:
            return
        free = []
        done = wait(running, return_when=FIRST_COMPLETED).done
        for future in sorted(done, key=lambda one: one.exception() is not None):  # what was computed beside is not lost
            task, worker = running.pop(future)
            free.append(worker)
            result, caught = future.result()
            for message, category in caught:
                warnings.warn(message, category, stacklevel=2)
            yield task, result


# Processes of this machine

_workers: list[RunWorker] = []  # the one of this process


def _begin(worker: RunWorker) -> None:
    _workers.append(worker)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """End this process when the one that started it ends, even if that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _compute(task: RunTask) -> WorkerResult:
    return _workers[0].compute(task)


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
        number = min(self.workers, len(tasks))
        pool = ProcessPoolExecutor(number, multiprocessing.get_context("spawn"), _begin, (worker,))
        try:
            yield from results_of([pool] * number, self._submit, tasks)
        finally:
            for process in (pool._processes or {}).values():  # do not wait for results that are no longer wanted
                process.terminate()
            pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, pool: ProcessPoolExecutor, task: RunTask) -> "Future[WorkerResult]":
        with _starting(self.threads):  # the first tasks start the processes
            return pool.submit(_compute, task)


@contextmanager
def _starting(threads: int) -> Iterator[None]:
    """Give processes that are started here so many threads from the start, and leave Ctrl-C to this one."""
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = str(threads)
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if hasattr(signal, "pthread_sigmask") else None
    try:
        yield
    finally:
        if masked is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        os.environ.pop(_THREADS)
        if before is not None:
            os.environ[_THREADS] = before
