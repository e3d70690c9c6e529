"""Adam on a GPU for a stack of members: one pass over memory, where torch's own operations take five."""

from typing import Any, no_type_check

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from identikit.shapes import Float, Tensor

_BLOCK = 1024  # numbers that a block of threads updates


@triton.jit
@no_type_check
def _step(parameters, gradient, first, second, coefficients, members, size, kept, BLOCK: tl.constexpr):
    member = tl.program_id(1)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = number < size
    place = member.to(tl.int64) * size + number
    share = tl.load(coefficients + member)
    decay = tl.load(coefficients + members + member)
    scale = tl.load(coefficients + 2 * members + member)
    shift = tl.load(coefficients + 3 * members + member)
    slope = tl.load(gradient + place, mask=inside, other=0.0)
    moved = tl.load(first + place, mask=inside, other=0.0)
    spread = tl.load(second + place, mask=inside, other=0.0)
    moved += share * (slope - moved)
    spread = spread * decay + kept * slope * slope
    tl.store(first + place, moved, mask=inside)
    tl.store(second + place, spread, mask=inside)
    value = tl.load(parameters + place, mask=inside, other=0.0)
    tl.store(parameters + place, value - moved / (tl.sqrt(spread) * scale + shift), mask=inside)


def adam(
    parameters: Float[Tensor, "member d_in d_out"],
    gradient: Float[Tensor, "member d_in d_out"],
    first: Float[Tensor, "member d_in d_out"],
    second: Float[Tensor, "member d_in d_out"],
    coefficients: Float[Tensor, "4 member 1 1"],
    kept: float,
) -> None:
    """Take one step of Adam in place, as `train._adam` does; `kept` is the share of a squared gradient."""
    members = len(parameters)
    size = parameters[0].numel()
    tensors = (parameters, gradient.contiguous(), first, second, coefficients.contiguous())
    launch: Any = _step[(triton.cdiv(size, _BLOCK), members)]  # pyright: ignore[reportIndexIssue]
    launch(*tensors, members, size, kept, BLOCK=_BLOCK)
