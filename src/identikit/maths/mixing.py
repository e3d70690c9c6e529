"""How tokens mix: measures of contributions (sections 5.2 and 5.3, Appendix C), and their statistics over texts.

Every measure takes the contributions of one text, (layer, input, output), with all outputs present. `Mixing` gathers
those of many texts. It counts and adds in integers, so merging is exact: the same texts give the same
bits, whatever their order and however they were divided.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from identikit.errors import InputError
from identikit.shapes import Bool, Float, Int, Tensor

GROUPS: tuple[tuple[int, int | None], ...] = ((1, 1), (2, 2), (3, 3), (4, 5), (6, 10), (11, None))
"""Distances of the neighbour groups of Fig. 4a, inclusive: 1st, 2nd, 3rd, 4th and 5th, 6th to 10th, the rest."""

BINS = 10_000
_UNIT = 2**36  # sums are in units of 2^-36: they add exactly, with room for 10^8 tokens

Contribution = Float[Tensor, "layer n n"]


def own_contribution(contribution: Float[Tensor, "layer input n"]) -> Float[Tensor, "layer n"]:
    """Return how much of each hidden vector comes from its own token: $c_{jj}$ of Eq. 11 (Fig. 3a).

    Inputs of another text may follow those of the tokens themselves.
    """
    return contribution.diagonal(dim1=1, dim2=2)


def outweighed(contribution: Float[Tensor, "layer input n"]) -> Bool[Tensor, "layer n"]:
    r"""Return which tokens are not the largest contributor to their own hidden vector (Fig. 3b).

    Their share is $\tilde P$. A token that another one equals to the last bit is still the largest.
    """
    return contribution.amax(1) > own_contribution(contribution)


def neighbour_groups(contribution: Contribution, *, causal: bool) -> Float[Tensor, "layer group n"]:
    """Average what a hidden vector's neighbours contribute, at the distances of each of `GROUPS` (Appendix C.2).

    The mean is over the neighbours that exist, left and right together; under a causal mask only to the left. A token
    that has none in a group gets NaN there and is left out of averages.
    """
    distance = _offsets(contribution, causal).abs()
    means = []
    for first, last in GROUPS:
        inside = (distance >= first) & (distance <= (distance.max() if last is None else last))
        means.append((contribution * inside).sum(1) / inside.sum(0))
    return torch.stack(means, dim=1)


def first_middle_last(layers: int) -> tuple[int, int, int]:
    """Return the three layers that Fig. 4b and 18 show, from 0: of twelve, the paper's layers 1, 6 and 12."""
    return 0, (layers - 1) // 2, layers - 1


class Offsets(NamedTuple):
    """Contributions added up by relative position; the middle of the offset axis is 0.

    `sums` is in fixed point, `pairs` counts what was added at each offset.
    """

    sums: Int[Tensor, "layer offset"]
    pairs: Int[Tensor, "offset"]

    @property
    def positions(self) -> Int[Tensor, "offset"]:
        """The offsets, from the furthest left to the furthest right."""
        return torch.arange(len(self.pairs)) - len(self.pairs) // 2

    def share(self) -> Float[Tensor, "layer offset"]:
        """Compute each offset's part of the layer's total, as in Fig. 4b and 18.

        It falls with distance even where contributions do not, because there are fewer pairs.
        """
        return _ratio(self.sums, self.sums.sum(1, keepdim=True))

    def mean(self) -> Float[Tensor, "layer offset"]:
        """Compute the mean contribution over the pairs that exist at each offset; NaN where there are none."""
        return self.sums.double() / _UNIT / self.pairs

    def merge(self, other: "Offsets") -> "Offsets":
        """Combine with the contributions of other texts."""
        reach = max(len(self.pairs), len(other.pairs)) // 2
        first = self._padded(reach)
        second = other._padded(reach)
        return Offsets(first.sums + second.sums, first.pairs + second.pairs)

    def _padded(self, reach: int) -> "Offsets":
        missing = reach - len(self.pairs) // 2
        return Offsets(*(torch.nn.functional.pad(array, (missing, missing)) for array in self))


def by_offset(contribution: Contribution, *, causal: bool) -> Offsets:
    """Add up contributions by the input's position relative to the output, without a token's own (Fig. 4b)."""
    n = contribution.shape[1]
    offsets = _offsets(contribution, causal)
    return _gather(contribution.flatten(1), offsets.flatten(), keep=(offsets != 0).flatten(), reach=n - 1)


def to_token(contribution: Contribution, token: int, *, centre: int) -> Offsets:
    """Add up contributions to one token's hidden vector by the inputs' position relative to `centre`, without its own.

    With `token` that of [CLS], Fig. 18a has `centre` there too, and Fig. 18b at the first [SEP].
    """
    n = contribution.shape[1]
    positions = torch.arange(n, device=contribution.device)
    reach = max(centre, n - 1 - centre)
    return _gather(contribution[:, :, token], positions - centre, keep=positions != token, reach=reach)


class Mixing(NamedTuple):
    """How tokens of any number of texts mix with others; `merge` adds the texts of another.

    - `group_sums`, `group_tokens`: sums of `neighbour_groups`, in fixed point, and how many tokens have such neighbours
    - `offsets`, `to_cls`, `around_separator`: contributions by relative position: overall, to [CLS], and to [CLS] from
      around the first [SEP]; empty where a text has no such tokens
    """

    group_sums: Int[Tensor, "layer group"]
    group_tokens: Int[Tensor, "group"]
    offsets: Offsets
    to_cls: Offsets
    around_separator: Offsets

    def merge(self, other: "Mixing") -> "Mixing":
        """Combine with the statistics of other texts."""
        layers = len(self.group_sums), len(other.group_sums)
        if layers[0] != layers[1]:
            raise InputError(
                f"Merging statistics of {layers[0]} and of {layers[1]} layers: the layers must be the same. Merge only "
                "texts that one model read, at the same layers."
            )
        return Mixing(
            group_sums=self.group_sums + other.group_sums,
            group_tokens=self.group_tokens + other.group_tokens,
            offsets=self.offsets.merge(other.offsets),
            to_cls=self.to_cls.merge(other.to_cls),
            around_separator=self.around_separator.merge(other.around_separator),
        )

    def group_shares(self) -> Float[Tensor, "layer group"]:
        """Compute in which layer each neighbour group contributes most (Fig. 4a).

        These are its means over tokens, scaled to sum to 1 over layers.
        """
        means = self.group_sums.double() / _UNIT / self.group_tokens
        return torch.where(self.group_tokens > 0, _ratio(means, means.sum(0)), torch.nan)


def mixing(
    contribution: Contribution,
    *,
    causal: bool,
    cls: int | None = None,
    separator: int | None = None,
) -> Mixing:
    """Return the statistics of one text, ready to be merged.

    `cls` and `separator` are the positions of [CLS] and of the first [SEP], if any.
    """
    contribution = contribution.double().cpu()
    groups = neighbour_groups(contribution, causal=causal)
    nothing = Offsets(torch.zeros(len(contribution), 1, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    return Mixing(
        group_sums=_fixed_point(groups.nan_to_num(0.0)).sum(2),
        group_tokens=(~groups[0].isnan()).sum(1),
        offsets=by_offset(contribution, causal=causal),
        to_cls=nothing if cls is None else to_token(contribution, cls, centre=cls),
        around_separator=(
            nothing if cls is None or separator is None else to_token(contribution, cls, centre=separator)
        ),
    )


def own_boxes(own: Float[Tensor, "layer n"]) -> Float[Tensor, "layer 5"]:
    """Compute the box plot of own contributions in each layer (Fig. 3a), to the middles of `BINS` bins of [0, 1]."""
    bins = (own.double() * BINS).long().clamp(0, BINS - 1)
    return boxes(torch.zeros(len(own), BINS, dtype=torch.long).scatter_add_(1, bins, torch.ones_like(bins)))


def tag_boxes(own: Float[Tensor, "layer n"], tags: Sequence[str]) -> dict[str, Float[Tensor, "layer 5"]]:
    """Compute boxes of own contributions by tag, the largest median of the last layer first (Fig. 26 to 37).

    `tags` has one entry per token, such as its part of speech.
    """
    if len(tags) != own.shape[1]:
        raise InputError(f"Reading {own.shape[1]} tokens by tag: got {len(tags)} tags. Give one tag per token.")
    positions: dict[str, list[int]] = {tag: [] for tag in sorted(set(tags))}
    for position, tag in enumerate(tags):
        positions[tag].append(position)
    by_tag = {tag: own_boxes(own[:, tag_positions]) for tag, tag_positions in positions.items()}
    return dict(sorted(by_tag.items(), key=lambda item: -float(item[1][-1, 2])))


def quantiles(counts: Int[Tensor, "*axis bin"], levels: Sequence[float]) -> Float[Tensor, "*axis level"]:
    """Compute quantiles of binned numbers, each taken as the middle of its bin; NaN where there are none."""
    running = counts.cumsum(-1)
    total = running[..., -1:]
    rank = torch.tensor(levels, dtype=torch.float64) * (total - 1).clamp(min=0)
    lower, upper = (torch.searchsorted(running, end.long(), right=True) for end in (rank.floor(), rank.ceil()))
    bins = torch.lerp(lower.double(), upper.double(), rank - rank.floor())
    return torch.where(total > 0, (bins + 0.5) / counts.shape[-1], torch.nan)


def boxes(counts: Int[Tensor, "*axis bin"]) -> Float[Tensor, "*axis 5"]:
    """Compute a box plot's five numbers: lower whisker, quartiles, upper whisker; NaN where there are no numbers.

    `counts` are binned numbers. Whiskers are Tukey's: the furthest numbers within one and a half times the box's height
    from it, if any lie beyond.
    """
    lower, _, upper = quartiles = quantiles(counts, (0.25, 0.5, 0.75)).unbind(-1)
    reach = 1.5 * (upper - lower)
    centres = (torch.arange(counts.shape[-1], dtype=torch.float64) + 0.5) / counts.shape[-1]
    inside = (centres >= (lower - reach)[..., None]) & (centres <= (upper + reach)[..., None]) & (counts > 0)
    low = torch.where(inside, centres, torch.inf).amin(-1).minimum(lower)
    high = torch.where(inside, centres, -torch.inf).amax(-1).maximum(upper)
    return torch.stack([low, *quartiles, high], dim=-1)


def _offsets(contribution: Contribution, causal: bool) -> Int[Tensor, "n n"]:
    """Return the input's position minus the output's; 0, as for the token itself, where a causal mask bars it."""
    positions = torch.arange(contribution.shape[1], device=contribution.device)
    offsets = positions[:, None] - positions
    return offsets.clamp(max=0) if causal else offsets


def _gather(
    values: Float[Tensor, "layer pair"], offsets: Int[Tensor, "pair"], *, keep: Bool[Tensor, "pair"], reach: int
) -> Offsets:
    """Add values up by offset."""
    indices = offsets[keep] + reach
    pairs = torch.bincount(indices, minlength=2 * reach + 1)
    sums = torch.zeros_like(pairs).repeat(len(values), 1)
    return Offsets(sums.index_add_(1, indices, _fixed_point(values[:, keep])), pairs)


def _fixed_point(values: Float[Tensor, "*any"]) -> Int[Tensor, "*any"]:
    return (values.double() * _UNIT).round().long()


def _ratio(numerator: Tensor, denominator: Tensor) -> Float[Tensor, "*any"]:
    return torch.where(denominator > 0, numerator.double() / denominator, 0.0)
