"""Facts about the machine: how much memory is free, how fast it multiplies matrices, what a device is called."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

PRECISIONS = ("full", "tf32", "bfloat16")
"""How products are computed: in the dtype of their factors, with float32 rounded to TF32, or in bfloat16."""


def device_name(device: torch.device) -> str:
    """Return the name of a device, such as that of its GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def free_bytes(device: torch.device) -> int:
    """Return how much memory can still be allocated on a device."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError):  # only Linux says what is available
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        limits.append(1024 * int(fields["MemAvailable"].split()[0]))
    with suppress(OSError, ValueError):  # a container may have a limit of its own
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        limits.append(limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return min(limits)


@cache
def product_rate(device: torch.device, dtype: torch.dtype, precision: str) -> float:
    """Measure how many operations per second a large matrix product reaches."""
    side = 512 if device.type == "cpu" else 8192
    factor = torch.randn(side, side, device=device).to(torch.bfloat16 if precision == "bfloat16" else dtype)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        with product_precision(precision):
            (factor @ factor)[0, 0].item()
        best = min(best, time.perf_counter() - started)
    return 2 * side**3 / best


def format_duration(seconds: float) -> str:
    """Return a time in words, such as '5 minutes'."""
    if seconds < 1.5:
        return "a second"
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


class SharedSetting:
    """A setting of the whole process that several threads need at once: the first makes it, the last takes it back."""

    def __init__(self, setting: Callable[[], AbstractContextManager[object]]):
        self._setting = setting
        self._lock = threading.Lock()
        self._holders = 0
        self._stack = ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Hold the setting."""
        with self._lock:
            if self._holders == 0:
                self._stack.enter_context(self._setting())
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if self._holders == 0:
                    self._stack.close()


@contextmanager
def _float32_rounding(precision: str) -> Iterator[None]:
    """Set how float32 products round, and restore what was set: for all backends at once, or each (since torch 2.9)."""
    backends: Any = torch.backends
    owners = (backends, backends.cuda.matmul, backends.mkldnn.matmul)
    before = [(owner, owner.fp32_precision) for owner in owners if hasattr(owner, "fp32_precision")]
    shared_precision = None
    with suppress(RuntimeError):  # torch raises it where backends differ
        shared_precision = torch.get_float32_matmul_precision()
    if shared_precision == precision and all(setting in ("none", "ieee") for _, setting in before):
        yield
        return
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        if shared_precision is not None:
            torch.set_float32_matmul_precision(shared_precision)
        for owner, setting in before:
            owner.fp32_precision = setting


@contextmanager
def _full_precision() -> Iterator[None]:
    """Compute products in full precision, with the one attention kernel that takes every input enabled."""
    with _float32_rounding("highest"), ExitStack() as stack:
        if not torch.backends.cuda.math_sdp_enabled():  # on any device
            stack.callback(torch.backends.cuda.enable_math_sdp, False)
            torch.backends.cuda.enable_math_sdp(True)
        with suppress(RuntimeError):  # torch raises it where its old switch and its new ones are mixed
            if torch.backends.cudnn.allow_tf32:  # in convolutions, such as those that cut an image into patches
                torch.backends.cudnn.allow_tf32 = False
                stack.callback(setattr, torch.backends.cudnn, "allow_tf32", True)
        yield


_full = SharedSetting(_full_precision)
_tf32 = SharedSetting(lambda: _float32_rounding("high"))
_derivative_lock = threading.RLock()


@contextmanager
def product_precision(precision: str) -> Iterator[None]:
    """Compute float32 products in float32 inside this context, or rounded to TF32 if that is the precision asked for.

    torch has one switch for the whole process: while one thread asks for TF32, products of other threads round too.
    """
    with _full(), _tf32() if precision == "tf32" else nullcontext():
        yield


@contextmanager
def differentiable_attention() -> Iterator[None]:
    """Attend by the kernel that has derivatives, one thread at a time: torch counts forward mode by process."""
    with _derivative_lock, sdpa_kernel(SDPBackend.MATH):
        yield
