"""The Ray engine: tasks on a Ray cluster, an existing one by its address, or one started here.

One actor per worker holds one model; Ray starts an actor that died again, and tries its tasks again.
"""

import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from identikit.errors import IdentikitError, InputError
from identikit.models.model import Model
from identikit.runs import engines
from identikit.runs.engines import RETRIES, Results, RunJob, RunTask, RunWorker, TaskProgress

_ANSWER_SECONDS = 5.0  # in which a cluster has to answer
_RAY_SETTINGS = {  # environment variables, where the user has not set them
    "RAY_USAGE_STATS_ENABLED": "0",  # no telemetry
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the coming default, which it warns about
    "RAY_worker_niceness": "0",  # on a busy machine workers would hardly get anywhere
    "RAY_NUM_REDIS_GET_RETRIES": "3",  # of reaching a cluster: seconds, not minutes
}


@dataclass(frozen=True)
class Cluster:
    """Computes tasks on a Ray cluster."""

    threads: int
    workers: int | None = None
    address: str | None = None
    gpus: float = 0.0

    def run(self, model: Model, job: RunJob, tasks: Sequence[RunTask], report: TaskProgress) -> Results:
        """Compute tasks, the longest first."""
        if not tasks:
            return
        for name, value in _RAY_SETTINGS.items():
            os.environ.setdefault(name, value)
        try:
            import ray
        except ImportError:
            raise InputError(
                "--engine ray needs the package ray. Run `pip install 'identikit[ray]'`, or use --engine processes."
            ) from None
        worker = RunWorker.of(model, job, "ray", self.threads)
        # Ray prints what workers die of, which does not belong among the results.
        with redirect_stdout(sys.stderr), self._connection(ray), _clear_errors(ray):
            # An actor may die often in a long run on machines that come and go; a task may not.
            remote = ray.remote(max_restarts=-1, max_task_retries=RETRIES, num_cpus=self.threads, num_gpus=self.gpus)
            actors: list[Any] = [
                remote(RunWorker).remote(worker.recipe, worker.fingerprint, worker.job, worker.threads)
                for _ in range(min(self._worker_count(ray), len(tasks)))
            ]
            try:
                yield from engines.run_on_workers(actors, _submit, engines.by_cost(tasks))
            finally:
                for actor in actors:
                    with suppress(Exception):
                        ray.kill(actor)

    @contextmanager
    def _connection(self, ray: ModuleType) -> Iterator[None]:
        """Connect to the cluster, or start one that ends with the run."""
        if ray.is_initialized():
            yield
            return
        try:
            self._connect(ray)
            yield
        finally:
            ray.shutdown()

    def _connect(self, ray: ModuleType) -> None:
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            if self.address is None:
                cpus = (self.workers or engines.default_workers(self.threads)) * self.threads
                with _keep_signal_handler():
                    ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
                return
            host, _, port = self.address.rpartition(":")
            if host and port.isdecimal() and "/" not in self.address:  # Ray itself would try for minutes
                socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
            with _keep_signal_handler():
                ray.init(address=self.address, **quiet)
        except (RuntimeError, ValueError, OSError, OverflowError, ray.exceptions.RayError) as error:
            where = f"the Ray cluster at {self.address}" if self.address else "a Ray cluster on this machine"
            raise InputError(
                f"Cannot reach {where}: {_reason(error)}. Check --address, and RAY_AUTH_MODE and RAY_AUTH_TOKEN if the "
                "cluster asks for a token; or leave --address out to start one here."
            ) from None

    def _worker_count(self, ray: ModuleType) -> int:
        """Return how many workers to start: the requested number, or as many as fit into the cluster."""
        resources = ray.cluster_resources()
        cpus = resources.get("CPU", 0)
        gpus = resources.get("GPU", 0)
        fitting = int(cpus // self.threads)
        if self.gpus:
            fitting = min(fitting, int(gpus // self.gpus))
        if fitting < 1:
            raise InputError(
                f"The Ray cluster has {cpus:g} CPUs and {gpus:g} GPUs, and a worker needs {self.threads} and "
                f"{self.gpus:g}. Ask for fewer with --threads and --gpus-per-worker."
            )
        return min(self.workers or fitting, fitting)


@contextmanager
def _keep_signal_handler() -> Iterator[None]:
    """Keep Ray from handling SIGTERM: it would end this process in its own way, even while it still starts."""
    set_handler = signal.signal

    def set_other_handlers(number: int, handler: Any) -> Any:
        return signal.getsignal(number) if number == signal.SIGTERM else set_handler(number, handler)

    signal.signal = set_other_handlers
    try:
        yield
    finally:
        signal.signal = set_handler


def _submit(actor: Any, task: RunTask) -> "Future[engines.WorkerResult]":
    return actor.compute.remote(task).future()


@contextmanager
def _clear_errors(ray: ModuleType) -> Iterator[None]:
    """Turn Ray's errors into the error of the task, or into a sentence."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, IdentikitError):
            raise cause from None
        raise
    except ray.exceptions.RayActorError as error:
        raise InputError(
            f"Ray workers died {RETRIES + 1} times with the same task ({_reason(error)}). There may be too little "
            "memory for so many workers: run the same command again with fewer --workers."
        ) from None
    except ray.exceptions.RayError as error:
        raise InputError(f"The Ray cluster failed: {_reason(error)}. Run the same command again to resume.") from None


def _reason(error: Exception) -> str:
    message = " ".join(str(error).split()) or type(error).__name__
    return message.rstrip(".") if len(message) <= 200 else f"{message[:200]}…"
