"""The one timer and the one memory meter of the benchmarks, and the rows that they return."""

import multiprocessing
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from identikit.models.machine import device_name

if TYPE_CHECKING:
    from rich.table import Table

Task = Callable[[], Any]


class Row(NamedTuple):
    """One figure of a benchmark.

    - `case`: what was given, such as a text's length; `what`: what was measured
    - `figure`: in `unit`; where the unit is empty, a plain number
    - `ratio`: this figure over that of `to` in the same case; None where it is compared with nothing
    """

    case: str
    what: str
    figure: float
    unit: str = ""
    ratio: float | None = None
    to: str = ""


def seconds(task: Task) -> tuple[float, Any]:
    """Time a task once, until the GPU has finished it too; return the seconds and what the task returned."""
    _synchronise()
    started = time.perf_counter()
    result = task()
    _synchronise()
    return time.perf_counter() - started, result


def best_seconds(tasks: Mapping[str, Task], *, repeats: int, warm_up: int = 1) -> dict[str, float]:
    """Time tasks in turn, so that a busy machine slows all of them, and return the shortest time of each.

    The first `warm_up` rounds do not count.
    """
    taken: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(warm_up + repeats):
        for name, task in tasks.items():
            taken[name].append(seconds(task)[0])
    return {name: min(rounds[warm_up:]) for name, rounds in taken.items()}


def time_rows(case: str, taken: Mapping[str, float], beside: Mapping[str, str]) -> list[Row]:
    """Make a row of each time; `beside` names, for those that are compared, what each is compared with."""
    rows = []
    for what, figure in taken.items():
        to = beside.get(what, "")
        rows.append(Row(case, what, figure, "s", figure / taken[to] if to else None, to))
    return rows


def table(rows: list[Row]) -> "Table":
    """Lay rows out as a table, each case named once."""
    from rich import box
    from rich.table import Table

    laid = Table("case", "what", box=box.SIMPLE)
    laid.add_column("figure", justify="right")
    laid.add_column("compared", justify="right")
    before = None
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3g} × {row.to}"
        figure = f"{row.figure:.3g} {row.unit}".strip()
        laid.add_row("" if row.case == before else row.case, row.what, figure, ratio)
        before = row.case
    return laid


def extra_mib(prepare: Callable[..., Task], *arguments: Any) -> float:
    """Return how much memory a CPU task takes beyond its inputs, at most, in MiB (Linux only).

    `prepare(*arguments)` makes the inputs, warms up and returns the task. It runs in a process of its own, whose peak
    nothing else has raised, so it must be a function of a module.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_extra_mib, (prepare, arguments))


def _extra_mib(prepare: Callable[..., Task], arguments: tuple[Any, ...]) -> float:
    task = prepare(*arguments)
    before = _peak_kib()
    task()
    return (_peak_kib() - before) / 2**10


def _peak_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def cuda_peak_gib(task: Task) -> float:
    """Return the most GPU memory that is allocated while a task runs, in GiB; 0 without a GPU."""
    if not torch.cuda.is_available():
        task()
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    task()
    return torch.cuda.max_memory_allocated() / 2**30


def about(device: str) -> dict[str, str | int]:
    """Say what the figures were measured on."""
    return {"device": device_name(torch.device(device)), "threads": torch.get_num_threads(), "torch": torch.__version__}


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
