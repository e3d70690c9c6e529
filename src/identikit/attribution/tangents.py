"""Tangents: how they start at the inputs, go forward through a function, and stay in the range of float16."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.autograd import forward_ad
from torch.func import jvp, vmap

from identikit.attribution.memory import products_at_once
from identikit.attribution.request import Request
from identikit.errors import InputError
from identikit.models.isolation import standard_torch_state
from identikit.models.machine import differentiable_attention
from identikit.models.model import Split
from identikit.models.taps.tap import AttentionCall
from identikit.shapes import Float, Int, Tensor

SCALED = (torch.float16,)  # dtypes of so small a range that tangents are scaled
HIGHEST = 5  # binary exponent of a scaled tangent's largest entry: float16 has 11 above it and 29 below


@contextmanager
def forward_mode() -> Iterator[None]:
    """Compute derivatives forward: with the attention kernel that has them."""
    with standard_torch_state(), differentiable_attention():
        if forward_ad._current_level >= 0:
            raise InputError(
                "Attributing a text: forward-mode differentiation (torch.autograd.forward_ad or torch.func.jvp) is "
                "running already, and torch has no second level of it. Call identikit outside of it."
            )
        with warnings.catch_warnings():  # torch compiles some of its own rules on first use, in a way it deprecates
            warnings.filterwarnings("ignore", message=".*torch.jit.script")
            jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))
        yield


def push_forward(
    function: Callable[[Tensor], Tensor], x: Tensor, tangents: Float[Tensor, "tangent batch n d"], heads: int = 0
) -> Tensor:
    """Return a function's derivatives along each tangent; `heads` as in `product_bytes`."""
    chunk = products_at_once(x, heads)
    return vmap(lambda tangent: jvp(function, (x,), (tangent,))[1], chunk_size=chunk)(tangents)


def first_tangents(
    split: Split, requests: Sequence[Request], lengths: Sequence[int], dtype: torch.dtype
) -> list[Float[Tensor, "n d direction"]]:
    """Return how the first block's input at each token of each text moves along each direction of the token's own x."""
    x = split.inputs
    batch, n, d = split.blocks[0].input.shape
    if requests[0].source == "after":
        return [
            request.directions(d, x).T.to(dtype).expand(length, -1, -1)
            for request, length in zip(requests, lengths, strict=True)
        ]
    directions = torch.stack([request.directions(x.shape[-1], x) for request in requests], 1)
    step = products_at_once(x)
    start = x.new_empty(batch, n, d, len(directions), dtype=dtype)
    for first in range(0, len(directions), step):
        tangents = directions[first : first + step].unsqueeze(2).expand(-1, batch, n, -1)
        start[..., first : first + step] = push_forward(split.tail, x, tangents).movedim(0, -1)
    starts = [text_start[:length] for text_start, length in zip(start, lengths, strict=True)]
    # Where nothing follows the sum, all tokens start alike, and one copy is kept.
    alike = torch.stack([(text_start == text_start[:1]).all() for text_start in starts]).tolist()
    for text, text_start in enumerate(starts):
        if alike[text]:
            starts[text] = text_start[:1].clone().expand_as(text_start)
    return starts


def sees_no_later_token(calls: Iterable[AttentionCall]) -> bool:
    """Return whether no token sees a later one in any of these layers: the tangents of earlier tokens then stay 0."""
    return not torch.stack([call.visible().triu(1).any() for call in calls]).any()


def needs_scale(dtype: torch.dtype) -> bool:
    """Return whether a dtype has so small a range that tangents are scaled."""
    return dtype in SCALED


def rescale(tangents: Tensor, dim: int) -> Int[Tensor, "input"]:
    """Scale each input's tangents in place so that their largest entry lies just below 2^`HIGHEST`.

    `dim` is the axis of inputs. The scales are powers of two, so nothing is lost; returns their exponents.
    """
    other_dims = tuple(axis for axis in range(tangents.ndim) if axis != dim)
    largest = torch.linalg.vector_norm(tangents, torch.inf, dim=other_dims, dtype=torch.float32)
    exponent = (torch.frexp(largest).exponent - HIGHEST).clamp(-14, 14)  # float16 has no larger powers of two
    exponent = torch.where((largest > 0) & largest.isfinite(), exponent, 0)
    factor = torch.ldexp(torch.ones_like(largest), -exponent).to(tangents.dtype)
    tangents *= factor.view(-1, *[1] * (tangents.ndim - 1 - dim))
    return exponent
