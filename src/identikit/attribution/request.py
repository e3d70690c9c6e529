"""What an engine is asked for, and what all engines share: chunks that fit in memory, and derivatives in bulk."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.func import jvp, vmap

from identikit.errors import InputError
from identikit.maths import jacobian
from identikit.models.machine import derivatives
from identikit.models.model import Split
from identikit.models.taps.tap import AttentionCall
from identikit.shapes import Float, Int, Tensor

Tick = Callable[[int], None]
SCALED = (torch.float16,)  # dtypes of so small a range that tangents are scaled
HIGHEST = 5  # as binary exponent, of a scaled tangent's largest entry: float16 has 11 above it and 29 below


@dataclass(frozen=True)
class Request:
    """What an engine is asked for.

    - `layers`, `targets`: layers and output positions; `targets` None: all
    - `norm`: of the Jacobian blocks; `probes`: how many random directions (from `seed`), None: the whole basis
    - `after`: x is what enters the first block, not the embedding sum
    - `precision`: "full" computes in the model's dtype, "tf32" lets float32 products round so, "bfloat16" holds
      tangents and derivatives in it
    """

    layers: tuple[int, ...]
    targets: tuple[int, ...] | None
    norm: str
    probes: int | None
    seed: int
    after: bool
    precision: str

    def measure(self, tangents: Float[Tensor, "output feature input direction"]) -> Tensor:
        """Return the blocks' norms, or with probes the squares along each direction: (input, output, …)."""
        measure = jacobian.block_norms if self.probes is None else jacobian.direction_squares
        one = max(1, tangents[:1].numel() * 4)  # in half precision they may be copied to float32 for it
        parts = [measure(part, self.norm) for part in tangents.split(max(1, working_bytes(tangents.device) // one))]
        return torch.cat(parts).transpose(0, 1)

    def unscaled(self, measured: Tensor, exponent: Int[Tensor, "input"]) -> Tensor:
        """Undo a scale of 2^-`exponent` of each input's tangents, exactly; with probes, squares were measured."""
        exponent = exponent if self.probes is None else 2 * exponent
        return torch.ldexp(measured, exponent.view(-1, *[1] * (measured.ndim - 1)))

    def directions(self, d: int, like: Tensor) -> Float[Tensor, "direction d"]:
        """Return the directions of R^d to go along, in the dtype and at the place of `like`."""
        if self.probes is None:
            return torch.eye(d, dtype=like.dtype, device=like.device)
        return jacobian.orthogonal_probes(d, self.probes, seed=self.seed).to(like)

    def nothing(self, n: int, like: Tensor) -> Tensor:
        """Return the answer of a model in which no input moves anything."""
        outputs = n if self.targets is None else len(self.targets)
        shape = (len(self.layers), n, outputs, *(() if self.probes is None else (self.probes,)))
        return torch.zeros(shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


def first_tangents(
    split: Split, requests: Sequence[Request], lengths: Sequence[int], dtype: torch.dtype
) -> list[Float[Tensor, "n d direction"]]:
    """Return how the first block's input at each token of each text moves along each direction of the token's own x."""
    x, (batch, n, d) = split.inputs, split.blocks[0].input.shape
    if requests[0].after:
        both = zip(requests, lengths, strict=True)
        return [request.directions(d, x).T.to(dtype).expand(length, -1, -1) for request, length in both]
    directions, step = torch.stack([request.directions(x.shape[-1], x) for request in requests], 1), at_once(x)
    start = x.new_empty(batch, n, d, len(directions), dtype=dtype)
    for first in range(0, len(directions), step):
        some = directions[first : first + step].unsqueeze(2).expand(-1, batch, n, -1)
        start[..., first : first + step] = forward(split.tail, x, some).movedim(0, -1)
    starts = [own[:length] for own, length in zip(start, lengths, strict=True)]
    # Where nothing follows the sum, all tokens are alike, and it is held once.
    alike = torch.stack([(own == own[:1]).all() for own in starts]).tolist()
    return [own[:1].clone().expand_as(own) if same else own for own, same in zip(starts, alike, strict=True)]


def sees_no_later_token(calls: Iterable[AttentionCall]) -> bool:
    """Say whether no token sees a later one in any of these layers: the tangents of earlier tokens then stay 0."""
    return not torch.stack([call.visible().triu(1).any() for call in calls]).any()


def scaled(tangents: Tensor, dim: int) -> Int[Tensor, "input"]:
    """Scale each input's tangents in place so that their largest entry lies just below 2^`HIGHEST`.

    `dim` is the axis of inputs. The scale is a power of two, so nothing is lost; returns its exponents, to be undone.
    """
    others = tuple(axis for axis in range(tangents.ndim) if axis != dim)
    largest = torch.linalg.vector_norm(tangents, torch.inf, dim=others, dtype=torch.float32)
    exponent = (torch.frexp(largest).exponent - HIGHEST).clamp(-14, 14)  # float16 has no larger powers of two
    exponent = torch.where((largest > 0) & largest.isfinite(), exponent, 0)
    factor = torch.ldexp(torch.ones_like(largest), -exponent).to(tangents.dtype)
    tangents *= factor.view(-1, *[1] * (tangents.ndim - 1 - dim))
    return exponent


def forward(
    function: Callable[[Tensor], Any], x: Tensor, tangents: Float[Tensor, "tangent batch n d"], heads: int = 0
) -> Any:
    """Return a function's derivatives along each tangent; `heads` as in `product_bytes`."""
    return vmap(lambda tangent: jvp(function, (x,), (tangent,))[1], chunk_size=at_once(x, heads))(tangents)


def at_once(x: Float[Tensor, "batch n d"], heads: int = 0) -> int:
    """Return how many products through a block may run at once."""
    room = passing_bytes(x.device) if heads else working_bytes(x.device)
    return max(1, room // (len(x) * product_bytes(x.shape[1], x.shape[2], heads, x.dtype.itemsize)))


def product_bytes(n: int, d: int, heads: int, itemsize: int) -> int:
    """Return what one product through a block has in flight: some 36 vectors per token, and three maps of each head.

    Maps are computed in float32 or better. Where the product does not go through attention, there are no `heads`.
    """
    return n * (36 * d * itemsize + 3 * heads * n * max(4, itemsize))


def working_bytes(device: torch.device) -> int:
    """Return what one batch of Jacobian-vector products may take.

    On a CPU more only leaves the cache. On a GPU each operation costs its launch, so there it is a share of the memory.
    """
    return 1 << 26 if device.type != "cuda" else max(1 << 28, _memory(device) // 64)


def passing_bytes(device: torch.device) -> int:
    """Return what one batch of products through whole blocks may take.

    On a GPU a tenth of the memory is filled.
    """
    return working_bytes(device) if device.type != "cuda" else _memory(device) // 10


def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def in_chunks(total: int, size: int, work: Callable[[int, int], None], tick: Tick) -> None:
    """Do `work(first, last)` over a range, `size` at a time, and half as many each time memory runs out."""
    first = 0
    while first < total:
        last = min(first + size, total)
        if _fits(work, first, last):
            tick(last - first)
            first = last
        elif size > 1:
            size //= 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        else:
            raise InputError(
                "Attributing a text: memory ran out even for the tangents of a single token. Use fewer probes "
                "(probes=16, say), or a shorter text."
            )


def _fits(work: Callable[[int, int], None], first: int, last: int) -> bool:
    """Do the work and say whether there was memory for it."""
    try:
        work(first, last)
    except (MemoryError, RuntimeError) as error:  # torch raises a RuntimeError; on a CPU it has no type of its own
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error):
            return False
        raise
    return True


@contextmanager
def forward_mode() -> Iterator[None]:
    """Compute derivatives forward: attention by the kernel that has them."""
    with derivatives():
        if forward_ad._current_level >= 0:
            raise InputError(
                "Attributing a text: forward-mode differentiation (torch.autograd.forward_ad or torch.func.jvp) is "
                "running already, and torch has no second level of it. Call identikit outside of it."
            )
        with warnings.catch_warnings():  # torch compiles some of its own rules on first use, in a way it deprecates
            warnings.filterwarnings("ignore", message=".*torch.jit.script")
            jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))
        yield
