"""The search behind inversion: every token of the vocabulary at a position, and which one is nearest.

Candidates come in chunks that fit in memory. Of each chunk only the two nearest remain, so the whole vocabulary is
searched exactly and nothing of its size is kept.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from identikit.maths.neighbours import paired_distance
from identikit.models.machine import free_bytes, product_rate
from identikit.models.model import Model
from identikit.shapes import Float, Int, Tensor
from identikit.tokens.continuation import Position

LONG_SECONDS = 60.0
_CHUNK_BYTES = {"cpu": 1 << 27, "cuda": 1 << 33}  # at most; on a CPU larger chunks only leave the cache
_ROWS = 1 << 24  # entries of the embedding that are hashed at once
Tick = Callable[[float | int], None]


class Vocabulary(NamedTuple):
    """The candidates: one id for each distinct embedding. `of[id]` is the place among them of any id."""

    ids: Int[Tensor, " candidate"]
    of: Int[Tensor, " token"]


class Aims(NamedTuple):
    """What is looked for at one position: hidden vectors, each of a layer."""

    layers: tuple[int, ...]
    vectors: Float[Tensor, "aim d"]


class Found(NamedTuple):
    """What the search found for each aim: token ids, and distances relative to the norm of what was looked for.

    - `winner`, `runner_up`: the nearest token and the second, with their distances
    - `own_distance`: that of the true token; NaN where it is not known
    """

    winner: Int[Tensor, "*aim"]
    runner_up: Int[Tensor, "*aim"]
    winner_distance: Float[Tensor, "*aim"]
    runner_up_distance: Float[Tensor, "*aim"]
    own_distance: Float[Tensor, "*aim"]

    def of(self, aim: int) -> "Found":
        """Return what was found for one aim."""
        return Found(*(field[aim] for field in self))

    @classmethod
    def beside(cls, several: Sequence["Found"]) -> "Found":
        """Put several together along a new last axis."""
        return cls(*(torch.stack(field, -1) for field in zip(*several, strict=True)))


def vocabulary(model: Model) -> Vocabulary:
    """Return the model's tokens as candidates; tokens whose embeddings are equal are one candidate, the first id.

    Rows are compared by a 64-bit hash of their bits: a product with odd random numbers, added up modulo 2^64.
    """
    weight: Tensor = model.hf.get_input_embeddings().weight  # pyright: ignore[reportAssignmentType, reportAttributeAccessIssue]
    weight = weight.detach()
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, weight.shape[1:], generator=generator).to(weight.device) * 2 + 1
    chunks = weight.split(max(1, _ROWS // weight.shape[1]))
    hashes = torch.cat([((rows + 0.0).view(bits).long() * factors).sum(-1) for rows in chunks]).cpu()
    _, kind = torch.unique(hashes, return_inverse=True)
    first = torch.full((int(kind.max()) + 1,), len(kind)).scatter_reduce(0, kind, torch.arange(len(kind)), "amin")
    ids = first.sort().values
    place = torch.empty_like(first)
    place[kind[ids]] = torch.arange(len(ids))
    return Vocabulary(ids, place[kind])


def search(
    position: Position,
    aims: Aims,
    candidates: Vocabulary,
    *,
    token: int | None,
    distance: str,
    tick: Tick,
) -> Found:
    """Find the two candidates nearest to each aim, and how far the true `token` is."""
    device = aims.vectors.device
    norms = torch.linalg.vector_norm(aims.vectors, dim=-1).clamp(min=1e-30)
    scale = norms if distance == "l2" else torch.ones_like(norms)  # the cosine distance has no scale
    near = torch.full((len(aims.layers), 2), torch.inf, dtype=aims.vectors.dtype, device=device)
    places = torch.zeros(near.shape, dtype=torch.long, device=device)
    true = torch.full((len(near),), torch.nan, dtype=near.dtype, device=device)
    target = None if token is None else int(candidates.of[token])
    step = chunk_size(position.text.model, position.position, position.depth)
    for start in range(0, len(candidates.ids), step):
        ids = candidates.ids[start : start + step].to(device)
        hidden = position.hidden(ids)
        measured = _distances(hidden, aims, distance) / scale[:, None]
        if target is not None and start <= target < start + len(ids):
            true = measured[:, target - start]
        here = torch.arange(start, start + len(ids), device=device).expand(measured.shape)
        near, order = torch.cat([near, measured], 1).topk(2, largest=False)
        places = torch.cat([places, here], 1).gather(1, order)
        tick(len(ids))
    ids = candidates.ids.to(device)[places].cpu()
    near = near.cpu()
    return Found(ids[:, 0], ids[:, 1], near[:, 0], near[:, 1], true.cpu())


def _distances(
    hidden: tuple[Float[Tensor, "candidate d"], ...], aims: Aims, distance: str
) -> Float[Tensor, "aim candidate"]:
    """Return how far each candidate is from each aim, in float32 or wider whatever the model computes in."""
    distances = []
    wide: dict[int, Tensor] = {}
    for layer, vector in zip(aims.layers, aims.vectors, strict=True):
        if layer not in wide:
            wide = {layer: hidden[layer].to(vector.dtype)}  # aims of one layer come together
        distances.append(paired_distance(wide[layer], vector.expand_as(wide[layer]), distance))
    return torch.stack(distances)


def chunk_size(model: Model, before: int, depth: int) -> int:
    """Return how many candidates to try at once: as many as fit in part of the memory that is free."""
    block = [parameter for parameter in model.blocks[0].parameters() if parameter.ndim > 1]
    widest = max(max(parameter.shape[-2:]) for parameter in block)
    numbers = (depth + 12) * model.d_model + 4 * widest + 8 * model.n_heads * (before + 1)
    each = numbers * max(4, model.dtype.itemsize)
    room = min(free_bytes(model.device) // 4, _CHUNK_BYTES.get(model.device.type, 1 << 28))
    return max(1, room // each)


def expected_seconds(model: Model, candidates: int, positions: int, depth: int) -> float:
    """Return about how long a search takes here."""
    blocks = model.blocks[:depth]
    weights = sum(parameter.numel() for block in blocks for parameter in block.parameters() if parameter.ndim > 1)
    operations = 2.0 * 2 * weights * candidates * positions
    if operations < LONG_SECONDS * 1e9:  # any machine does that in time
        return operations / 1e9
    return operations / product_rate(model.device, model.dtype, "full")
