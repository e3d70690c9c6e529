"""Memory in attribution: how much products through a block take, and chunks that halve when it runs out."""

from collections.abc import Callable

import torch

from identikit.errors import InputError
from identikit.shapes import Float, Tensor


def product_bytes(n: int, d: int, heads: int, itemsize: int) -> int:
    """Return the bytes in flight in one product through a block: some 36 vectors per token, and three maps per head.

    Maps are computed in float32 or better. A product that does not go through attention has 0 `heads`.
    """
    return n * (36 * d * itemsize + 3 * heads * n * max(4, itemsize))


def working_bytes(device: torch.device, *, whole_blocks: bool = False) -> int:
    """Return what one batch of Jacobian-vector products may take, through parts of a block or through whole blocks.

    Starting an operation costs time, so batches should be large; but on a CPU large batches leave the cache. On a GPU
    it is a share of the memory.
    """
    if device.type != "cuda":
        return 1 << 28 if whole_blocks else 1 << 26
    total = torch.cuda.get_device_properties(device).total_memory
    return total // 10 if whole_blocks else max(1 << 28, total // 32)


def products_at_once(x: Float[Tensor, "batch n d"], heads: int = 0) -> int:
    """Return how many products through a block may run at once; `heads` as in `product_bytes`."""
    room = working_bytes(x.device, whole_blocks=heads > 0)
    return max(1, room // (len(x) * product_bytes(x.shape[1], x.shape[2], heads, x.dtype.itemsize)))


def in_chunks(total: int, size: int, work: Callable[[int, int], None]) -> None:
    """Call `work(first, last)` over a range, `size` at a time, and halve the size each time memory runs out."""
    first = 0
    while first < total:
        last = min(first + size, total)
        try:
            work(first, last)
            first = last
            continue
        except (MemoryError, RuntimeError) as error:  # torch raises a RuntimeError; on a CPU it has no type of its own
            if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(error):
                raise
        if size == 1:
            raise InputError(
                "Attributing a text: memory ran out even for the tangents of a single token. Use fewer probes "
                "(probes=16, say), or a shorter text."
            )
        size //= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
