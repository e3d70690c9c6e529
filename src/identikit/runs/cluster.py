"""The Ray engine: tasks on a Ray cluster, an existing one by its address, or one started here.

One actor per worker holds one model. Each has a few tasks ahead of it, not all of them; Ray starts an actor that died
again, and tries its tasks again.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from identikit.errors import IdentikitError, InputError
from identikit.models.model import Model
from identikit.runs.engines import AHEAD, RETRIES, Job, Result, Task, Told, Worker, by_cost, sendable


@dataclass(frozen=True)
class Cluster:
    """Computes tasks on a Ray cluster."""

    threads: int
    workers: int | None = None
    address: str | None = None
    gpus: float = 0.0

    def run(self, model: Model, job: Job, tasks: Sequence[Task], told: Told) -> Iterator[Result]:
        """Compute tasks, the longest first."""
        if not tasks:
            return
        ray = _ray()
        recipe = sendable(model, "ray")
        started = self._connect(ray)
        actors: list[Any] = []
        try:
            options = {"num_cpus": self.threads, "num_gpus": self.gpus}
            options |= {"max_restarts": RETRIES, "max_task_retries": RETRIES}
            remote = ray.remote(Worker).options(**options)
            given = ray.put((recipe, model.fingerprint, job, self.threads))
            actors += [remote.remote(*ray.get(given)) for _ in range(min(self._count(ray), len(tasks)))]
            yield from _results(ray, actors, by_cost(tasks))
        except ray.exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, IdentikitError):
                raise cause from None
            raise
        except ray.exceptions.RayActorError as error:
            raise InputError(
                f"A Ray worker died {RETRIES + 1} times ({_first_line(error)}). There may be too little memory for so "
                "many workers: run the same command again with fewer --workers."
            ) from None
        finally:
            for actor in actors:
                with suppress(Exception):
                    ray.kill(actor)
            if started:
                ray.shutdown()

    def _connect(self, ray: Any) -> bool:
        """Connect to the cluster, and say whether it was started here."""
        if ray.is_initialized():
            return False
        quiet = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
        try:
            if self.address is not None:
                ray.init(address=self.address, **quiet)
            else:
                here = self._here() * self.threads
                ray.init(num_cpus=here, include_dashboard=False, **quiet)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            where = f"the Ray cluster at {self.address}" if self.address else "a Ray cluster on this machine"
            raise InputError(
                f"Cannot reach {where}: {_first_line(error)}. Check --address, or leave it out to start one here."
            ) from None
        return True

    def _here(self) -> int:
        return self.workers or max(1, (os.cpu_count() or 1) // self.threads)

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


def _results(ray: Any, actors: Sequence[Any], tasks: Sequence[Task]) -> Iterator[Result]:
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
        yield task, found


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise InputError(
            "--engine ray needs the package ray. Run `pip install 'identikit[ray]'`, or use --engine processes."
        ) from None
    return ray


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
