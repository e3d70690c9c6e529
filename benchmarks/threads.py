"""What decompositions cost on several threads, on one thread each, and beside busy processes."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch.linalg import cholesky_ex, eigh, qr, svdvals

from benchmarks.measure import Row, Task, best_seconds, time_rows
from identikit.maths.threads import decompose
from identikit.progress import Progress, silent

DIRECT = "all threads"
DECOMPOSED = "one thread each"
FUNCTIONS = {"eigh": eigh, "svdvals": svdvals, "qr": qr, "cholesky": cholesky_ex}


@dataclass(frozen=True)
class ThreadsOptions:
    """What to decompose: `count` matrices of each of these widths, beside this many busy processes."""

    widths: tuple[int, ...] = (64, 384)
    count: int = 6
    busy: tuple[int, ...] = (0, 1)
    repeats: int = 3


def run(options: ThreadsOptions, *, progress: Progress = silent) -> list[Row]:
    """Time each decomposition both ways, with every number of busy processes."""
    rows = []
    total = len(options.busy) * len(options.widths)
    for busy in options.busy:
        with busy_processes(busy):
            for width in options.widths:
                rows += _compare(options, width, busy)
                progress("decompositions", len(rows) // (2 * len(FUNCTIONS)), total)
    return rows


def _compare(options: ThreadsOptions, width: int, busy: int) -> list[Row]:
    drawn = torch.randn(options.count, width, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gram = drawn @ drawn.mT
    rows = []
    for name, function in FUNCTIONS.items():
        tasks: dict[str, Task] = {DIRECT: partial(function, gram), DECOMPOSED: partial(decompose, function, gram)}
        case = f"{name} of {options.count} matrices of {width} × {width}, beside {busy} busy processes"
        taken = best_seconds(tasks, repeats=options.repeats)
        rows += time_rows(case, taken, {DECOMPOSED: DIRECT})
    return rows


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep this many processes computing."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_compute, args=(os.getpid(),), daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _compute(parent: int) -> None:
    while os.getppid() == parent:
        sum(range(100_000))
