"""Engines, which compute the tasks of a run: in this process, in several processes, or on a Ray cluster.

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
from identikit.runs.store import open_folder, read_manifest

ENGINES = ("local", "processes", "ray")
AHEAD = 2  # tasks queued for each worker
RETRIES = 3  # how often a task whose worker died is tried again
_THREADS = "OMP_NUM_THREADS"


@runtime_checkable
class RunJob(Protocol):
    """What is computed for each task; it can be pickled, so that it can be sent to other processes."""

    def compute(self, model: Model, content: Any, report: Progress, /) -> Any:
        """Return the result for a task's content; `report` may be called with how many parts of it are done."""
        ...


@dataclass(frozen=True)
class RunTask:
    """One piece of work: its number, the content that a job computes on, and about how long it takes, in any unit."""

    number: int
    content: Any = field(repr=False)
    cost: float = 1.0


Results = Generator[tuple[RunTask, Any], None, None]  # each task with its result
WorkerResult = tuple[Any, list[tuple[str, type[Warning]]]]  # from another process, with the warnings given there
TaskProgress = Callable[[RunTask, int], None]  # called with a task and how many parts of it are done


@runtime_checkable
class Engine(Protocol):
    """Computes tasks, each with `threads` CPU threads."""

    @property
    def threads(self) -> int:
        """How many threads compute a task."""
        ...

    def run(self, model: Model, job: RunJob, tasks: Sequence[RunTask], report: TaskProgress) -> Results:
        """Yield each task with its result as it finishes."""
        ...


def make_engine(
    folder: str,
    engine: str = "local",
    workers: int | None = None,
    threads: int | None = None,
    address: str | None = None,
    gpus: float = 0.0,
) -> Engine:
    """Return the engine of a run in a folder, with `threads` per worker; None: as many as the run was started with.

    A new run gets all threads, or one where other processes keep cores busy, and keeps that number. `address` is that
    of a Ray cluster, and `gpus` how many each worker has there.
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
            allowed = " and --engine ".join(engines)
            raise InputError(f"{option} is for --engine {allowed}. Add it, or leave {option} out.")
    manifest = read_manifest(*open_folder(folder)) or {"run": {}}
    worker_threads: int = threads or manifest["run"].get("threads") or useful_thread_count()
    if engine == "ray":
        from identikit.runs.cluster import Cluster

        return Cluster(worker_threads, workers, address, gpus)
    if engine == "local":
        return Local(worker_threads)
    return Processes(worker_threads, workers or default_workers(worker_threads))


def default_workers(threads: int) -> int:
    """Return how many workers with this number of threads this machine has cores for."""
    return max(1, (os.cpu_count() or 1) // threads)


@contextmanager
def with_threads(threads: int) -> Iterator[None]:
    """Compute with this number of CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Local:
    """Computes tasks in this process, one after another."""

    threads: int = field(default_factory=torch.get_num_threads)

    def run(self, model: Model, job: RunJob, tasks: Sequence[RunTask], report: TaskProgress) -> Results:
        """Compute tasks in their order."""
        for task in tasks:
            with with_threads(self.threads):
                result = job.compute(model, task.content, lambda what, done, total, task=task: report(task, done))
            yield task, result


# Workers in other processes


@dataclass
class RunWorker:
    """Computes tasks in a separate process with its own copy of the model.

    The model is loaded with the first task, so that an error in loading is raised like one in the task.
    """

    recipe: Recipe
    fingerprint: str
    job: RunJob
    threads: int

    @classmethod
    def of(cls, model: Model, job: RunJob, engine: str, threads: int) -> "RunWorker":
        """Return a worker that can be pickled and sent to other processes."""
        if model.recipe is None:
            raise InputError(
                f"--engine {engine} loads {model.name} once per worker, and a model in memory cannot be loaded again. "
                "Save it with save_pretrained(folder), and name that folder."
            )
        return cls(model.recipe, model.fingerprint, job, threads)

    @cached_property
    def model(self) -> Model:
        """The model, which must be the one that the run was started with."""
        model = self.recipe.load()
        if model.fingerprint != self.fingerprint:
            raise ModelError(
                f"Loading {model.name} in another process: its weights, configuration or tokenizer are not those that "
                "the run was started with. Start it again, with the same files on every machine."
            )
        return model

    def compute(self, task: RunTask) -> WorkerResult:
        """Compute one task."""
        with with_threads(self.threads), warnings.catch_warnings(record=True) as caught_warnings:
            result = self.job.compute(self.model, task.content, silent)
        return result, [(str(warning.message), warning.category) for warning in caught_warnings]


def by_cost(tasks: Sequence[RunTask]) -> list[RunTask]:
    """Return tasks with the longest first, so that no worker starts a long one when all others have finished."""
    return sorted(tasks, key=lambda task: (-task.cost, task.number))


def run_on_workers(
    workers: Sequence[Any], submit: Callable[[Any, RunTask], "Future[WorkerResult]"], tasks: Sequence[RunTask]
) -> Results:
    """Keep a few tasks queued for each worker, and yield each task with its result as it finishes."""
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
        for future in sorted(done, key=lambda future: future.exception() is not None):  # errors last: nothing is lost
            task, worker = running.pop(future)
            free.append(worker)
            result, caught_warnings = future.result()
            for message, category in caught_warnings:
                warnings.warn(message, category, stacklevel=2)
            yield task, result


# Processes of this machine

_workers: list[RunWorker] = []  # in a worker process, its only worker


def _start_worker(worker: RunWorker) -> None:
    _workers.append(worker)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """End this process when its parent ends, even if that was killed."""
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

    def run(self, model: Model, job: RunJob, tasks: Sequence[RunTask], report: TaskProgress) -> Results:
        """Compute tasks, the longest first; when a worker dies, all workers start again with the remaining tasks."""
        worker = RunWorker.of(model, job, "processes", self.threads)
        remaining = by_cost(tasks)
        deaths = 0  # in a row
        while remaining:
            finished: set[int] = set()
            try:
                for task, result in self._run_pool(worker, remaining):
                    finished.add(task.number)
                    yield task, result
            except BrokenExecutor:
                deaths = 1 if finished else deaths + 1
                if deaths > RETRIES:
                    raise InputError(
                        f"A worker process died {deaths} times in a row. There may be too little memory for "
                        f"{self.workers} workers: run the same command again with fewer --workers."
                    ) from None
            remaining = [task for task in remaining if task.number not in finished]

    def _run_pool(self, worker: RunWorker, tasks: Sequence[RunTask]) -> Results:
        count = min(self.workers, len(tasks))
        pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _start_worker, (worker,))
        try:
            yield from run_on_workers([pool] * count, self._submit, tasks)
        finally:
            for process in (pool._processes or {}).values():  # nobody waits for their results
                process.terminate()
            pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, pool: ProcessPoolExecutor, task: RunTask) -> "Future[WorkerResult]":
        with _worker_environment(self.threads):  # the first tasks start the processes
            return pool.submit(_compute, task)


@contextmanager
def _worker_environment(threads: int) -> Iterator[None]:
    """Give processes that are started inside this number of threads, and have them ignore Ctrl-C."""
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
