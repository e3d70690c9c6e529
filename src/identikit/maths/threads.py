"""Decompositions on one thread each, many of them side by side.

LAPACK's threads wait for each other by spinning, thousands of times per decomposition. Where another process is busy,
each wait lasts until the scheduler's next turn: `eigh` of six 384 × 384 matrices takes 0.1 s on one thread and 20 to
30 s on two. Its results also depend, in their last bits, on the number of threads and on where a matrix starts in
memory. So decompositions go through `decompose`:

    eigenvalues, vectors = decompose(torch.linalg.eigh, gram)              # (..., d, d), any batch axes
    triangle = decompose(lambda matrices: torch.linalg.qr(matrices, mode="r").R, values)
    inverse = decompose(lambda factor: solve_triangular(factor, identity, upper=False), factor)

Products of large matrices keep all threads: they wait once per product, not once per column.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import TypeVar, cast

import torch

from identikit.shapes import Tensor

WORK = 2**24  # n·d·min(n, d) of the matrices that a worker takes at a time: 64 of 64 × 64, some 20 ms of `eigh`

Answer = TypeVar("Answer", bound=Tensor | tuple[Tensor, ...])

_starting = threading.Lock()
_independent: ContextVar[int] = ContextVar("independent", default=0)
_SIDE = 192  # of the products that tell whether threads contend
_PRODUCTS = 20


def decompose(function: Callable[..., Answer], *matrices: Tensor) -> Answer:
    """Apply a function of single matrices to batches of them, on one thread per matrix.

    `function` receives some matrices of each batch, with one batch axis (none if there was none), and treats each on
    its own. It returns a tensor, or a tuple of tensors (PyTorch's named ones too), all with the same batch axis. All
    `matrices` have equal batch axes.

    On the CPU, as many matrices are decomposed at a time as the calling thread may use threads. The result has the same
    bits for every number of threads, because batches are always cut at the same places. The number of threads of the
    caller, or of any other thread, is never changed. On other devices, the function is called directly.
    """
    if matrices[0].device.type != "cpu":
        return function(*matrices)
    batch = matrices[0].shape[:-2]
    pieces = [matrices]
    if batch:
        rows, columns = matrices[0].shape[-2:]
        length = max(1, WORK // max(1, rows * columns * min(rows, columns)))
        pieces = list(zip(*(matrix.flatten(0, -3).split(length) for matrix in matrices), strict=True))
    threads = torch.get_num_threads()
    inference = torch.is_inference_mode_enabled()
    gradients = torch.is_grad_enabled()

    def call(piece: tuple[Tensor, ...]) -> Answer:
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients):  # PyTorch keeps both per thread
            return function(*piece)

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        tensor = tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors))
        return tensor.unflatten(0, batch) if len(batch) > 1 else tensor

    if threads == 1:
        answers = [function(*piece) for piece in pieces]
    else:
        answers = list(_workers(os.getpid(), threads).map(call, pieces))
    first = answers[0]
    if isinstance(first, Tensor):
        return cast("Answer", joined(cast("Sequence[Tensor]", answers)))
    return cast("Answer", type(first)([joined(tensors) for tensors in zip(*answers, strict=True)]))


@cache
def _workers(process: int, threads: int) -> ThreadPoolExecutor:
    """Start the worker threads of this process; a forked process does not inherit its parent's and starts its own."""
    return ThreadPoolExecutor(threads, thread_name_prefix="decomposition", initializer=_use_one_thread)


def _use_one_thread() -> None:
    """Let PyTorch use one thread in this worker.

    PyTorch keeps the number per thread, but a thread starts with the number that was set last, in whichever thread. So
    a thread that ends right away sets it back. (A thread whose first call of PyTorch falls just between would keep one
    thread: it is slower then, and not wrong.)
    """
    with _starting:
        usual = torch.get_num_threads()
        torch.set_num_threads(1)
        restoring = threading.Thread(target=torch.set_num_threads, args=(usual,))
        restoring.start()
        restoring.join()


@contextmanager
def one_thread_if_busy() -> Iterator[None]:
    """Let PyTorch use one thread in this context where several are slower, because other processes keep cores busy.

    Threads of one product wait for each other, and where one of them waits for a core, all do. What runs in a pool of
    its own (`worker_count`) keeps its threads: they wait for nobody.
    """
    with one_thread() if useful_thread_count() < torch.get_num_threads() else nullcontext():
        yield


def useful_thread_count() -> int:
    """Return how many threads PyTorch should use now: all, or one where other processes keep cores busy."""
    usual = torch.get_num_threads()
    return 1 if usual > 1 and _threads_contend(usual) else usual


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch use one thread in this context, for many small operations in sequence.

    Threads gain little on each, and lose much where a core is busy: least-norm maps of 72 heads of 55 tokens took 4 s
    with one thread and 26 s with two, beside one busy process on two cores. Pools (`worker_count`) keep their threads.
    """
    usual = torch.get_num_threads()
    before = _independent.set(worker_count())
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
        _independent.reset(before)


def worker_count() -> int:
    """Return how many threads may work beside each other on tasks of their own."""
    return _independent.get() or torch.get_num_threads()


def _threads_contend(threads: int) -> bool:
    """Return whether small products take longer with all threads than with one, in two looks of at most three.

    One look can be wrong: on free cores too, waking the threads once in a while takes longer than the products.
    """
    looks = [_all_are_slower(threads) for _ in range(2)]
    return all(looks) or (any(looks) and _all_are_slower(threads))


def _all_are_slower(threads: int) -> bool:
    """Return whether all threads take longer than one; they are stopped once they do."""
    factor = torch.ones(_SIDE, _SIDE)
    try:
        torch.set_num_threads(1)
        started = time.perf_counter()
        for _ in range(_PRODUCTS):
            _ = factor @ factor
        alone = time.perf_counter() - started
        torch.set_num_threads(threads)
        _ = factor @ factor  # starts the threads
        deadline = time.perf_counter() + alone
        for _ in range(_PRODUCTS):
            _ = factor @ factor
            if time.perf_counter() > deadline:
                return True
    finally:
        torch.set_num_threads(threads)
    return False
