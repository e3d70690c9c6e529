"""What attribution is asked for, and what all engines share: chunks that fit in memory, and derivatives in bulk."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.func import jvp, vmap

from identikit.checks import known_name, random_seed, shortened, whole_number
from identikit.errors import InputError
from identikit.maths import jacobian
from identikit.models.isolation import standard_torch_state
from identikit.models.load.size import Sizes
from identikit.models.machine import PRECISIONS, differentiable_attention
from identikit.models.model import Model, Split
from identikit.models.taps.tap import AttentionCall
from identikit.results.axis import Index, selected_indices
from identikit.shapes import Float, Int, Tensor

SOURCES = ("before", "after")
FISHER = "fisher"
Tick = Callable[[float | int], None]
SCALED = (torch.float16,)  # dtypes of so small a range that tangents are scaled
HIGHEST = 5  # as binary exponent, of a scaled tangent's largest entry: float16 has 11 above it and 29 below


@dataclass(frozen=True)
class AttributionOptions:
    """How texts are attributed, as it was asked for; see `token_attribution`."""

    probes: object = "exact"
    norm: str = "frobenius"
    source: str = "before"
    precision: str = "full"
    seed: object = 0
    truncate: bool = False
    max_tokens: int | None = None

    def checked(self, model: Model | Sizes, layers: Index = None) -> "Request":
        """Return what engines are asked for; raises an InputError for what they cannot be asked."""
        known_name("norm", self.norm, (*jacobian.NORMS, FISHER))
        if self.norm == FISHER and isinstance(model, Model):
            layers = _last_layer(model, layers)
        known_name("source", self.source, SOURCES)
        known_name("precision", self.precision, PRECISIONS)
        most = model.d_model if self.source == "after" else model.d_input
        probes = self.probes
        if isinstance(probes, str) and probes != "exact":
            raise InputError(
                f"probes={shortened(probes)} cannot be used: expected 'exact' or a number from 2 to {most}."
            )
        if not isinstance(probes, str):
            probes = whole_number("probes", probes, least=2, most=most)
        if probes != "exact" and self.norm == "spectral":
            raise InputError(
                f"probes={probes} with norm='spectral': the largest singular value cannot be estimated from a few "
                "directions. Use probes='exact', or norm='frobenius'."
            )
        given = vars(self) | {"probes": probes, "seed": random_seed(self.seed)}
        return Request(**given, layers=selected_indices("layer", layers, model.n_layers))


@dataclass(frozen=True)
class Request(AttributionOptions):
    """Options that were checked against a model, with the layers and output positions (`targets` None: all).

    `roots` are what the derivatives of each output are multiplied by before their norm is taken; None: nothing.
    """

    probes: int | str = "exact"
    seed: int = 0
    layers: tuple[int, ...] = ()
    targets: tuple[int, ...] | None = None
    roots: Float[Tensor, "output d d"] | None = field(default=None, compare=False, repr=False)

    @property
    def exact(self) -> bool:
        """Whether the directions are a whole basis."""
        return self.probes == "exact"

    def count(self, d: int) -> int:
        """Return how many directions of R^d to go along."""
        return d if isinstance(self.probes, str) else self.probes

    def directions(self, d: int, like: Tensor) -> Float[Tensor, "direction d"]:
        """Return the directions of R^d to go along, in the dtype and at the place of `like`."""
        if self.exact:
            return torch.eye(d, dtype=like.dtype, device=like.device)
        return jacobian.orthogonal_probes(d, self.count(d), seed=self.seed).to(like)

    def nothing(self, n: int, like: Tensor, *, outputs: int | None = None) -> Tensor:
        """Return the answer of a model in which none of n inputs moves anything: (layer, input, output, …)."""
        if self.targets is not None:
            outputs = len(self.targets)
        outputs = n if outputs is None else outputs
        directions = [] if self.exact else [self.count(0)]
        dtype = torch.promote_types(like.dtype, torch.float32)
        return torch.zeros(len(self.layers), n, outputs, *directions, dtype=dtype, device=like.device)

    def measure(
        self,
        tangents: Float[Tensor, "output feature input direction"],
        exponent: Int[Tensor, "input"] | None = None,
        *,
        felt: Any = slice(None),
    ) -> Tensor:
        """Return the blocks' norms, or with probes the squares along each direction: (input, output, …).

        Tangents of each input that were scaled by 2^-`exponent` are measured as they were, exactly. They are of the
        outputs `felt`, a selection of all that are asked for.
        """
        measure = jacobian.block_norms if self.exact else jacobian.direction_squares
        norm = self.norm
        if self.roots is not None:
            norm = "frobenius"
            wide = torch.promote_types(tangents.dtype, torch.float32)
            roots = self.roots.to(tangents.device)[felt].to(wide)
            tangents = (roots @ tangents.flatten(2).to(wide)).view_as(tangents)
        output_bytes = max(1, tangents[:1].numel() * 4)  # in half precision they may be copied to float32 for it
        step = max(1, working_bytes(tangents.device) // output_bytes)
        measured = torch.cat([measure(some, norm) for some in tangents.split(step)]).transpose(0, 1)
        if exponent is None:
            return measured
        power = exponent if self.exact else 2 * exponent
        return torch.ldexp(measured, power.view(-1, *[1] * (measured.ndim - 1)))


def _last_layer(model: Model, layers: Index) -> list[int]:
    """Return the last layer, the only one that Fisher's norm is of; refuse others, and a model without a vocabulary."""
    last = model.n_layers - 1
    if model.modality != "text" or model.hf.get_output_embeddings() is None:
        raise InputError(
            f"norm='fisher' is of the probabilities of tokens, and {model.name} gives none. Use norm='frobenius', or a "
            "model with a language-model head."
        )
    if layers is not None and selected_indices("layer", layers, model.n_layers) != (last,):
        raise InputError(
            f"norm='fisher' is of the last layer, {last}, from which the probabilities of tokens are made. Leave "
            "layers= out."
        )
    return [last]


def first_tangents(
    split: Split, options: Sequence[Request], lengths: Sequence[int], dtype: torch.dtype
) -> list[Float[Tensor, "n d direction"]]:
    """Return how the first block's input at each token of each text moves along each direction of the token's own x."""
    x = split.inputs
    batch, n, d = split.blocks[0].input.shape
    if options[0].source == "after":
        pairs = zip(options, lengths, strict=True)
        return [each.directions(d, x).T.to(dtype).expand(length, -1, -1) for each, length in pairs]
    directions = torch.stack([each.directions(x.shape[-1], x) for each in options], 1)
    step = at_once(x)
    start = x.new_empty(batch, n, d, len(directions), dtype=dtype)
    for first in range(0, len(directions), step):
        some = directions[first : first + step].unsqueeze(2).expand(-1, batch, n, -1)
        start[..., first : first + step] = forward(split.tail, x, some).movedim(0, -1)
    starts = [of_text[:length] for of_text, length in zip(start, lengths, strict=True)]
    # Where nothing follows the sum, all tokens are alike, and it is held once.
    alike = torch.stack([(of_text == of_text[:1]).all() for of_text in starts]).tolist()
    for place, of_text in enumerate(starts):
        if alike[place]:
            starts[place] = of_text[:1].clone().expand_as(of_text)
    return starts


def sees_no_later_token(calls: Iterable[AttentionCall]) -> bool:
    """Tell whether no token sees a later one in any of these layers: the tangents of earlier tokens then stay 0."""
    return not torch.stack([call.visible().triu(1).any() for call in calls]).any()


def needs_scale(dtype: torch.dtype) -> bool:
    """Tell whether a dtype has so small a range that tangents are scaled."""
    return dtype in SCALED


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
    function: Callable[[Tensor], Tensor], x: Tensor, tangents: Float[Tensor, "tangent batch n d"], heads: int = 0
) -> Tensor:
    """Return a function's derivatives along each tangent; `heads` as in `product_bytes`."""
    return vmap(lambda tangent: jvp(function, (x,), (tangent,))[1], chunk_size=at_once(x, heads))(tangents)


def at_once(x: Float[Tensor, "batch n d"], heads: int = 0) -> int:
    """Return how many products through a block may run at once; `heads` as in `product_bytes`."""
    room = working_bytes(x.device, whole_blocks=heads > 0)
    return max(1, room // (len(x) * product_bytes(x.shape[1], x.shape[2], heads, x.dtype.itemsize)))


def product_bytes(n: int, d: int, heads: int, itemsize: int) -> int:
    """Return what one product through a block has in flight: some 36 vectors per token, and three maps of each head.

    Maps are computed in float32 or better. Where the product does not go through attention, there are no `heads`.
    """
    return n * (36 * d * itemsize + 3 * heads * n * max(4, itemsize))


def working_bytes(device: torch.device, *, whole_blocks: bool = False) -> int:
    """Return what one batch of Jacobian-vector products may take, through parts of a block or through whole blocks.

    Each operation costs its start, so there should be few; but on a CPU large batches leave the cache. On a GPU it is
    a share of the memory.
    """
    if device.type != "cuda":
        return 1 << 28 if whole_blocks else 1 << 26
    total = torch.cuda.get_device_properties(device).total_memory
    return total // 10 if whole_blocks else max(1 << 28, total // 32)


def in_chunks(total: int, size: int, work: Callable[[int, int], None]) -> None:
    """Do `work(first, last)` over a range, `size` at a time, and half as many each time memory runs out."""
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


@contextmanager
def forward_mode() -> Iterator[None]:
    """Compute derivatives forward: attention by the kernel that has them."""
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
