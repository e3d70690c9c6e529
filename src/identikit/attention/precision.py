"""What results rest on: head outputs computed anew, ranks that are sure, and when numbers are not to be trusted.

A model in half precision rounds its head output to two or three digits, and solving for weights magnifies that. So the
output is computed again from the captured queries, keys and values, which are exact as they are.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from identikit.errors import ModelError
from identikit.maths import linalg
from identikit.maths.effective import length_factor
from identikit.models.load.weights import dtype_advice
from identikit.models.taps.tap import AttentionCall
from identikit.results.words import percent
from identikit.shapes import Float, Int, Tensor

if TYPE_CHECKING:
    from identikit.attention.layer import Layer

EXACT_TOKENS = 512  # up to this many, head outputs are computed in float64; above, in float32
LARGEST_RESIDUAL = 1e-5  # what rounding explains of ‖(A⊥V − O)H‖/‖OH‖ in any dtype; measured: at most 7e-7
LARGEST_RATIO = 1.01  # what rounding explains of ‖a⊥‖/‖a‖, at most 1; measured: 1.004 at most, and 1 in float64
SMALLEST = 1e-70  # of a head's largest value: fourth powers of it, and of its inverse, are in float64's range
_EQUAL = 16  # values differ by our own rounding only up to this many units of the largest entry
_NEAR = 4  # values differ by the model's rounding only up to this many times its eps of their largest entry
_NOISE = 0.075  # eps·0.3/4: the noise of rounded values, see `Resolution`, as an eps of its cutoff
UNSURE = 0.01  # a larger share of rows with an unsure rank is mentioned; prose has at most 0.006
_NAMED = 5  # heads that a warning names


class Recomputed(NamedTuple):
    r"""What is computed anew from queries, keys and values.

    - `output`: $O = AV$; `norm`: $\|a_i\|$ of each row; `size`: $\sum_m a_m \|v_m H\|$ of each row
    - `mass`: the sum of each row where a learned sink takes a part of it; None where rows sum to 1
    """

    output: Float[Tensor, "head query d_v"]
    norm: Float[Tensor, "head query"]
    size: Float[Tensor, "head query"]
    mass: Float[Tensor, "head query"] | None


def computed_in(call: AttentionCall) -> torch.dtype:
    """Return the dtype in which a layer's head outputs are computed anew."""
    if call.query.shape[2] <= EXACT_TOKENS:
        return torch.float64
    return torch.promote_types(call.value.dtype, torch.float32)


def recompute(call: AttentionCall, heads: Int[Tensor, "head"], projection: Float[Tensor, "head d_v d"]) -> Recomputed:
    """Compute the chosen heads' outputs, and the norm, size and sum of their rows, some rows at a time."""
    dtype = computed_in(call)
    values = call.value[0, heads // call.groups].to(dtype)
    lengths = (values.double() @ length_factor(projection)).norm(dim=-1, keepdim=True)
    step = max(1, linalg.BYTES // (dtype.itemsize * len(heads) * call.key.shape[2]))
    all_heads = torch.arange(call.query.shape[1], device=heads.device)
    selected = slice(None) if torch.equal(heads, all_heads) else heads  # all of them need no copy
    blocks = []
    for start in range(0, call.query.shape[2], step):
        weights = call.weights(slice(start, start + step), heads=selected, dtype=dtype)[0]
        size = (weights @ lengths.to(dtype))[..., 0]
        blocks.append((weights @ values, weights.norm(dim=-1), size, weights.sum(-1)))
    output, norm, size, mass = (torch.cat(arrays, dim=1) for arrays in zip(*blocks, strict=True))
    if not bool(torch.isfinite(output).all()):
        raise ModelError(
            f"Reading the attention of layer {call.layer}: its head outputs hold NaN or infinity in "
            f"{str(call.value.dtype).removeprefix('torch.')}, so no result can be computed from them. "
            f"{dtype_advice(call.value.dtype)}"
        )
    return Recomputed(output, norm, size, None if call.sink is None else mass)


def check_range(
    numbers: Mapping[str, Float[Tensor, "head row column"]], layer: int, heads: Int[Tensor, "head"]
) -> None:
    """Refuse float64 numbers of a head so large or so small that their squares leave float64's range; 0 is fine."""
    for name, matrices in numbers.items():
        size = matrices.detach().abs().amax((1, 2)).double()
        lost = (size > 0) & ((size < SMALLEST) | (size > 1 / SMALLEST))
        if bool(lost.any()):
            first = int(lost.nonzero()[0])
            raise ModelError(
                f"Reading the attention of L{layer}H{int(heads[first])}: the largest entry of its {name} is "
                f"{float(size[first]):.1g}, and squares of such numbers leave the range of float64. Scale keys against "
                "queries, or values against the output projection."
            )


def coarser_unit(dtype: torch.dtype, width: int) -> float:
    r"""Return the unit up to which a rank must stay the same to be sure: 10 times finer digits than this are noise.

    It is 10 times the unit that decides ranks, or, in half precision, the noise that rounding adds to values of `width`
    dimensions. Rounding moves entries by about $0.2\,\mathrm{eps}$, and so singular values by about
    $0.3\,\mathrm{eps}\,(1+\sqrt{d/n})\,\sigma_{max}/\sqrt d$.
    """
    return max(10 * linalg.rounding_unit(dtype), _NOISE * torch.finfo(dtype).eps / width**0.5)


def equal_values(call: AttentionCall, tokens: Sequence[str]) -> tuple[Int[Tensor, "key"], int]:
    """Return, for each position, the first position with the same token and, in all heads, the same values.

    Also returns how many more tokens repeat an earlier one's values but for the rounding of the model's dtype.
    """
    V = call.value[0].transpose(0, 1).flatten(1).double().cpu()
    V = V * linalg.column_scales(V)
    dtype = call.value.dtype
    size = V.abs().amax(-1)
    close = _EQUAL * linalg.rounding_unit(dtype) * float(size.max())
    first = torch.arange(len(tokens))
    rounded = 0
    positions: dict[str, list[int]] = {}
    for position, token in enumerate(tokens):
        before = positions.setdefault(token, [])
        apart = (V[before] - V[position]).abs().amax(-1)
        if len(before) and float(apart.min()) <= close:
            first[position] = before[int((apart <= close).byte().argmax())]
            continue
        near = _NEAR * torch.finfo(dtype).eps * float(size[position])
        rounded += bool(len(before)) and float(apart.min()) <= near
        before.append(position)
    return first, rounded


def rounding_of(dtype: torch.dtype) -> float:
    """Return what rounding explains of a row's error, relative to the lengths that its output adds up."""
    return max(LARGEST_RESIDUAL, torch.finfo(dtype).eps)


def careful_words(residual: float, dtype: str) -> list[str]:
    """Return a warning if rows taken to have the same output differ in it by more than rounding; see `row_residual`.

    Values too small beside the largest count as 0, and may be all that a row has if it gives the largest no weight.
    """
    explained = rounding_of(getattr(torch, dtype))
    if residual <= explained:
        return []
    return [
        f"Careful: some values are so small beside others that they count as 0, and weights that are taken to have the "
        f"same output miss it by up to {residual:.1g} (relative; the rounding of {dtype} explains {explained:.1g}). "
        "Where they do, an edge that is said to be free may be determined."
    ]


def unresolved_words(rows: int, dtype: str) -> list[str]:
    """Return a sentence on the bounded rows in which directions of the values are about as small as rounding."""
    if not rows:
        return []
    return [
        f"In {rows:,} of the rows, some directions of the values are about as small as the rounding of {dtype}. What "
        "is below it counts as free, so the ends hold there, but can be wider than those of all digits of the values."
    ]


def unsure_words(share: float, duplicates: int, dtype: str) -> list[str]:
    """Return sentences on the share of rows whose rank depends on the resolution, and on rounded repeated tokens."""
    words = []
    if share > UNSURE:
        words.append(
            f"In {percent(share)} of the rows, the rank of the values depends on the resolution: some directions are "
            f"about as small as the rounding of {dtype}, so another precision could give another null dimension there."
        )
    if duplicates:
        words.append(
            f"{duplicates:,} repeated tokens (counted in each layer) differ from an earlier one only by the "
            f"rounding of {dtype}; they are treated as different."
        )
    return words


def warn_of(layers: Sequence["Layer"], *, tolerance: float, stacklevel: int) -> None:
    """Warn of heads whose effective attention fails its checks; refuse any that is NaN or infinite.

    It must give the head's output, in all rows and in each (unchecked with a tolerance), and its rows cannot be longer
    than the raw ones, because it is a projection of them.
    """
    allowed = torch.inf if tolerance else LARGEST_RESIDUAL
    dtype = layers[0].call.value.dtype
    row_allowed = max(allowed, rounding_of(dtype))
    wrong: dict[str, float] = {}
    wrong_rows: dict[str, float] = {}
    long: dict[str, float] = {}
    for layer in layers:
        wrong |= _above(layer, layer.residual, allowed)
        wrong_rows |= _above(layer, layer.row_residual.amax(-1), row_allowed)
        long |= _above(layer, layer.norm_ratio.amax(-1), LARGEST_RATIO)
    wrong_rows = {head: size for head, size in wrong_rows.items() if head not in wrong}
    warnings_of = {
        "effective attention reproduces head outputs only to within {:.1g} (relative; rounding explains "
        f"{LARGEST_RESIDUAL:g})": wrong,
        "effective attention reproduces some rows of head outputs only to within {:.1g} (relative; rounding explains "
        f"{row_allowed:.1g})": wrong_rows,
        "rows of effective attention are up to {:.3g} times as long as the raw ones (they are projections of them; "
        f"rounding explains {LARGEST_RATIO:g})": long,
    }
    for words, sizes in warnings_of.items():
        if sizes:
            heads = ", ".join([*sizes][:_NAMED])
            if len(sizes) > _NAMED:
                heads += f" and {len(sizes) - _NAMED} more heads"
            reason = words.format(max(sizes.values()))
            warnings.warn(
                f"Do not trust {heads}: {reason}. {dtype_advice(dtype)} Or leave these heads out.",
                stacklevel=stacklevel,
            )


def _above(layer: "Layer", sizes: Float[Tensor, "head"], allowed: float) -> dict[str, float]:
    """Return the sizes above what is allowed, by the name of the head; refuse NaN and infinity."""
    names = [f"L{layer.call.layer}H{head}" for head in layer.heads.tolist()]
    for name, finite in zip(names, torch.isfinite(sizes).tolist(), strict=True):
        if not finite:
            raise ModelError(
                f"Reading the attention of {name}: its effective attention is NaN or infinite. "
                f"{dtype_advice(layer.call.value.dtype)}"
            )
    return {name: size for name, size in zip(names, sizes.tolist(), strict=True) if size > allowed}
