"""Adam on a GPU for a stack of trials: one pass over memory, where torch's own operations take five."""

from typing import Any, no_type_check

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from identikit.shapes import Float, Tensor

_BLOCK = 1024  # numbers that a block of threads updates


@triton.jit
@no_type_check
def _step(parameters, gradient, first, second, coefficients, trials, size, share, BLOCK: tl.constexpr):
    trial = tl.program_id(1)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = number < size
    offset = trial.to(tl.int64) * size + number
    rate = tl.load(coefficients + trial)
    decay = tl.load(coefficients + trials + trial)
    scale = tl.load(coefficients + 2 * trials + trial)
    shift = tl.load(coefficients + 3 * trials + trial)
    slope = tl.load(gradient + offset, mask=inside, other=0.0)
    mean = tl.load(first + offset, mask=inside, other=0.0)
    square = tl.load(second + offset, mask=inside, other=0.0)
    mean += rate * (slope - mean)
    square = square * decay + share * slope * slope
    tl.store(first + offset, mean, mask=inside)
    tl.store(second + offset, square, mask=inside)
    value = tl.load(parameters + offset, mask=inside, other=0.0)
    tl.store(parameters + offset, value - mean / (tl.sqrt(square) * scale + shift), mask=inside)


def adam(
    parameters: Float[Tensor, "trial d_in d_out"],
    gradient: Float[Tensor, "trial d_in d_out"],
    first: Float[Tensor, "trial d_in d_out"],
    second: Float[Tensor, "trial d_in d_out"],
    coefficients: Float[Tensor, "4 trial 1 1"],
    share: float,
) -> None:
    """Take one step of Adam in place, as `train._adam` does; `share` is that of a squared gradient."""
    trials = len(parameters)
    size = parameters[0].numel()
    tensors = (parameters, gradient.contiguous(), first, second, coefficients.contiguous())
    launch: Any = _step[(triton.cdiv(size, _BLOCK), trials)]  # pyright: ignore[reportIndexIssue]
    launch(*tensors, trials, size, share, BLOCK=_BLOCK)
