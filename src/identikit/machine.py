"""Facts about the machine: how much memory is free, how fast it multiplies matrices, what a device is called."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

PRECISIONS = ("full", "tf32", "bfloat16")
"""How products are computed: in the dtype of their factors, with float32 rounded to TF32, or in bfloat16."""


def device_name(device: torch.device) -> str:
    """Return what a device is called."""
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
        limit, used = (Path("/sys/fs/cgroup", name).read_text() for name in ("memory.max", "memory.current"))
        limits.append(int(limit) - int(used))
    return min(limits)


@cache
def product_rate(device: torch.device, dtype: torch.dtype, precision: str) -> float:
    """Measure how many operations per second a large matrix product reaches."""
    side = 512 if device.type == "cpu" else 8192
    factor = torch.randn(side, side, device=device).to(torch.bfloat16 if precision == "bfloat16" else dtype)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        with products(precision):
            (factor @ factor)[0, 0].item()
        best = min(best, time.perf_counter() - started)
    return 2 * side**3 / best


def duration(seconds: float) -> str:
    """Return a time in words, such as '5 minutes'."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


@contextmanager
def products(precision: str) -> Iterator[None]:
    """Let float32 products round to TF32 inside this context, if that is the precision asked for."""
    if precision != "tf32":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
