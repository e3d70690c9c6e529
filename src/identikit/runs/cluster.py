"""The Ray engine: tasks on a Ray cluster, an existing one by its address, or one started here.

One actor per worker holds one model. Each has a few tasks ahead of it, not all of them; Ray starts an actor that died
again, and tries its tasks again.
"""

import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from typing import Any

from identikit.errors import IdentikitError, InputError
from identikit.models.model import Model
from identikit.runs.engines import AHEAD, RETRIES, Job, Results, Task, Told, Worker, by_cost, sendable

_REACH = 5.0  # seconds in which a cluster has to answer
_SETTINGS = {  # of Ray, where the user has not set them
    "RAY_USAGE_STATS_ENABLED": "0",  # no telemetry
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what it will do by itself, and warns about
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

    def run(self, model: Model, job: Job, tasks: Sequence[Task], told: Told) -> Results:
        """Compute tasks, the longest first."""
        if not tasks:
            return
        ray = _ray()
        given = sendable(model, "ray"), model.fingerprint, job, self.threads
        ours = not ray.is_initialized()
        # Ray prints what workers die of; what is printed for the user stays apart.
        with redirect_stdout(sys.stderr), self._connected(ray), _in_one_line(ray):
            # An actor may die often in a long run on machines that come and go; a task may not.
            kind = ray.remote(max_restarts=-1, max_task_retries=RETRIES, num_cpus=self.threads, num_gpus=self.gpus)
            actors = [kind(Worker).remote(*given) for _ in range(min(self._count(ray), len(tasks)))]
            try:
                yield from _results(ray, actors, by_cost(tasks))
            finally:
                for actor in () if ours else actors:  # they end with our connection
                    with suppress(Exception):
                        ray.kill(actor)

    @contextmanager
    def _connected(self, ray: Any) -> Iterator[None]:
        """Connect to the cluster, or start one that ends with the run."""
        if ray.is_initialized():
            yield
            return
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            try:
                with _own_signals():
                    if self.address is None:
                        here = (self.workers or max(1, (os.cpu_count() or 1) // self.threads)) * self.threads
                        ray.init(address="local", num_cpus=here, include_dashboard=False, **quiet)
                    else:
                        _reach(self.address)
                        ray.init(address=self.address, **quiet)
            except (
                ConnectionError,
                RuntimeError,
                ValueError,
                OSError,
                OverflowError,
                ray.exceptions.RayError,
            ) as error:
                where = f"the Ray cluster at {self.address}" if self.address else "a Ray cluster on this machine"
                raise InputError(
                    f"Cannot reach {where}: {_short(error)}. Check --address, and RAY_AUTH_MODE and RAY_AUTH_TOKEN if "
                    "the cluster asks for a token; or leave --address out to start one here."
                ) from None
            yield
        finally:
            ray.shutdown()

    def _count(self, ray: Any) -> int:
        """Return how many workers there are: as many as asked for, or as fit into the cluster."""
        has = ray.cluster_resources()
        fits = [int(has.get("CPU", 0) // self.threads)]
        if self.gpus:
            fits.append(int(has.get("GPU", 0) // self.gpus))
        if min(fits) < 1:
            raise InputError(
                f"The Ray cluster has {has.get('CPU', 0):g} CPUs and {has.get('GPU', 0):g} GPUs, and a worker needs "
                f"{self.threads} and {self.gpus:g}. Ask for fewer with --threads and --gpus-per-worker."
            )
        return min(self.workers or min(fits), min(fits))


def _results(ray: Any, actors: Sequence[Any], tasks: Sequence[Task]) -> Results:
    waiting = iter(tasks)
    running: dict[Any, tuple[Task, Any]] = {}

    def give(actor: Any) -> None:
        if (task := next(waiting, None)) is not None:
            running[actor.compute.remote(task)] = task, actor

    for _ in range(AHEAD):
        for actor in actors:
            give(actor)
    while running:
        (done, *_), _ = ray.wait(list(running))
        task, actor = running.pop(done)
        found = ray.get(done)
        give(actor)
        yield task, found.told()


@contextmanager
def _in_one_line(ray: Any) -> Iterator[None]:
    """Turn what Ray raises into the error of the task, or into a sentence."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, IdentikitError):
            raise cause from None
        raise
    except ray.exceptions.RayActorError as error:
        raise InputError(
            f"Ray workers died {RETRIES + 1} times with the same task ({_short(error)}). There may be too little "
            "memory for so many workers: run the same command again with fewer --workers."
        ) from None
    except ray.exceptions.RayError as error:
        raise InputError(f"The Ray cluster failed: {_short(error)}. Run the same command again to resume.") from None


def _ray() -> Any:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise InputError(
            "--engine ray needs the package ray. Run `pip install 'identikit[ray]'`, or use --engine processes."
        ) from None
    return ray


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep what this process does on SIGTERM: Ray would end it in its own way."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        with suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, before)


def _reach(address: str) -> None:
    """Find out whether anything listens at an address; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in address:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH).close()


def _short(error: Exception) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return words.rstrip(".") if len(words) <= 200 else f"{words[:200]}…"
