"""Distances between vectors, and the nearest-neighbour lookup inside one sentence (section 4 of the paper)."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from identikit.shapes import Bool, Float, Int, Tensor

DISTANCES = ("cosine", "l2")

_MAX_PAIRS = 1 << 17
_MIN_QUERIES = 256


class Nearest(NamedTuple):
    """The result of the lookup for each query; queries without a target hold False, -1, NaN and False."""

    hit: Bool[Tensor, "*batch query"]
    winner: Int[Tensor, "*batch query"]
    margin: Float[Tensor, "*batch query"]
    duplicated: Bool[Tensor, "*batch query"]


def number_distinct(vectors: Float[Tensor, "token d"]) -> Int[Tensor, " token"]:
    """Number the distinct vectors: two tokens get the same number exactly when their vectors are equal.

    Models without positions in x give repeated tokens the same input vector; `nearest` counts either one as right.
    """
    return torch.unique(vectors, dim=0, return_inverse=True)[1]


def nearest(
    predicted: Float[Tensor, "*batch query d"],
    candidates: Float[Tensor, "*batch key d"],
    *,
    target_position: Int[Tensor, "*batch query"],
    identity: Int[Tensor, "*batch key"],
    keep: Bool[Tensor, "*batch key"],
    distance: str,
) -> Nearest:
    r"""Look up the nearest candidate of every predicted vector, and tell whether it is the right one.

    $$\hat c_l(e_i^l) = \mathrm{NN}(\hat g_l(e_i^l)) = x_i \qquad \text{(section 4, unnumbered)}$$

    $\hat g_l(e_i^l)$ is `predicted`, the input vectors of the sentence are `candidates`, and `target_position` is
    that of $x_i$ among them (-1: this query has no target and is left out). `keep` is False for padding, which is never
    a candidate. `distance` is "cosine" or "l2"; the cosine distance to or from a zero vector is 1.

    The margin is the distance to the nearest wrong candidate minus the distance to the target, and a hit is a margin
    above 0. The paper does not cover these cases: candidates whose vectors equal the target's (the same number in
    `identity`) are right too, any other tie is a miss, and with no wrong candidate at all the margin is infinite.
    `winner` is the target for a hit and the nearest wrong candidate (the first of equals) for a miss. `duplicated`
    marks targets that occur more than once. All is computed in float64, so that rounding does not decide between close
    candidates.
    """
    predicted = predicted.double()
    candidates = candidates.double()
    if distance == "l2":
        distances = torch.cdist(predicted, candidates, compute_mode="use_mm_for_euclid_dist")
    else:
        distances = 1 - _unit(predicted) @ _unit(candidates).mT
    has_target = target_position >= 0
    position = target_position.clamp(min=0)
    keep = keep.unsqueeze(-2)
    is_target = _same(identity, position) & keep
    right = distances.masked_fill(~is_target, torch.inf).amin(-1)
    wrong_distances = distances.masked_fill(is_target | ~keep, torch.inf)
    nearest_wrong = wrong_distances.argmin(-1)
    margin = wrong_distances.gather(-1, nearest_wrong.unsqueeze(-1)).squeeze(-1) - right
    hit = (margin > 0) & has_target
    first_alike = (_same(identity, nearest_wrong) & keep).byte().argmax(-1)
    return Nearest(
        hit=hit,
        winner=torch.where(has_target, torch.where(hit, position, first_alike), -1),
        margin=torch.where(has_target, margin, torch.nan),
        duplicated=(is_target.sum(-1) > 1) & has_target,
    )


def nearest_in_sentences(
    predicted: Float[Tensor, "token d"],
    candidates: Float[Tensor, "token d"],
    *,
    lengths: Int[Tensor, " sentence"],
    identity: Int[Tensor, " token"],
    distance: str,
    offset: int = 0,
) -> Nearest:
    """Look up every token of many sentences among the candidates of its own sentence.

    Sentences lie one after another along `token` and have `lengths` tokens. The target of token i is candidate i +
    `offset` (Appendix B.5); tokens without such a neighbour in their sentence have no target. `winner` counts from the
    start of the sentence. Sentences of similar length are padded and looked up together.
    """
    lengths = lengths.to(predicted.device)
    starts = lengths.cumsum(0) - lengths
    tokens = predicted.shape[0]
    results = Nearest(
        hit=torch.zeros(tokens, dtype=torch.bool, device=predicted.device),
        winner=torch.full((tokens,), -1, device=predicted.device),
        margin=torch.full((tokens,), torch.nan, dtype=torch.float64, device=predicted.device),
        duplicated=torch.zeros(tokens, dtype=torch.bool, device=predicted.device),
    )
    for sentences, queries in _padded_batches(lengths):
        length = lengths[sentences].unsqueeze(-1)
        position = torch.arange(int(length.max()), device=predicted.device).unsqueeze(0)
        keep = position < length
        rows = torch.where(keep, starts[sentences].unsqueeze(-1) + position, 0)
        target = position[:, queries] + offset
        target_position = torch.where(keep[:, queries] & (target >= 0) & (target < length), target, -1)
        looked_up = nearest(
            predicted[rows[:, queries]],
            candidates[rows],
            target_position=target_position,
            identity=identity[rows],
            keep=keep,
            distance=distance,
        )
        real = keep[:, queries]
        for result, batch in zip(results, looked_up, strict=True):
            result[rows[:, queries][real]] = batch[real]
    return results


def paired_distance(
    predicted: Float[Tensor, "*batch d"], target: Float[Tensor, "*batch d"], distance: str
) -> Float[Tensor, "*batch"]:
    r"""Measure the distance between each predicted vector and its target.

    Cosine: $1 - p\cdot t/(\|p\|\|t\|)$, which is 1 when either is zero. L2: $\|p-t\|_2$, not squared: the loss of
    Appendix B.1 is the distance that is tested. $p$ is `predicted` and $t$ is `target`.
    """
    if distance == "l2":
        return torch.linalg.vector_norm(predicted - target, dim=-1)
    scale = torch.linalg.vector_norm(predicted, dim=-1) * torch.linalg.vector_norm(target, dim=-1)
    return 1 - _ratio(torch.linalg.vecdot(predicted, target), scale)


def distance_gradient(
    predicted: Float[Tensor, "*batch d"],
    target: Float[Tensor, "*batch d"],
    weight: Float[Tensor, "*batch"],
    distance: str,
) -> Float[Tensor, "*batch d"]:
    r"""Differentiate the weighted sum of the paired distances with respect to the predicted vectors, in closed form.

    Each distance is multiplied by its `weight`. Its gradient is $(\cos\, p/\|p\| - t/\|t\|)/\|p\|$ for cosine and
    $(p-t)/\|p-t\|$ for L2, and 0 where a norm in a denominator is 0. $p$ is `predicted` and $t$ is `target`.
    """
    if distance == "l2":
        difference = predicted - target
        return difference * _ratio(weight, torch.linalg.vector_norm(difference, dim=-1)).unsqueeze(-1)
    length = torch.linalg.vector_norm(predicted, dim=-1)
    scale = length * torch.linalg.vector_norm(target, dim=-1)
    cosine = _ratio(torch.linalg.vecdot(predicted, target), scale)
    along = _ratio(weight * cosine, length.square()).unsqueeze(-1)
    return torch.addcmul(predicted * along, target, _ratio(weight, scale).unsqueeze(-1), value=-1)


def _padded_batches(lengths: Int[Tensor, " sentence"]) -> Iterator[tuple[Int[Tensor, " sentence_"], slice]]:
    """Cut sentences into pieces of bounded size, by length, and very long ones also by query."""
    order = lengths.argsort(descending=True)
    sizes = lengths[order].tolist()
    first = 0
    while first < len(sizes):
        longest = max(1, sizes[first])
        count = max(1, _MAX_PAIRS // longest**2)
        queries = max(_MIN_QUERIES, _MAX_PAIRS // longest)
        for start in range(0, longest, queries):
            yield order[first : first + count], slice(start, min(start + queries, longest))
        first += count


def _same(
    identity: Int[Tensor, "*batch key"], position: Int[Tensor, "*batch query"]
) -> Bool[Tensor, "*batch query key"]:
    """Mark the keys whose vectors equal the one at each position."""
    return identity.gather(-1, position).unsqueeze(-1) == identity.unsqueeze(-2)


def _ratio(numerator: Float[Tensor, "*batch"], denominator: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Divide, with 0 where the denominator is 0."""
    return torch.where(denominator > 0, numerator / denominator, 0)


def _unit(vectors: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Scale vectors to length 1; zero vectors stay zero."""
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return torch.where(length > 0, vectors / length, 0)
