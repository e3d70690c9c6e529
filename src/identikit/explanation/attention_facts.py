"""The facts about a text's attention: means by layer, why rows are free, sinks, and the edges worth naming.

Rows are drawn, bounded and averaged by `attention/sample.py`.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from identikit.attention.certainty import value_sizes
from identikit.attention.estimate import Mean, RowSample, mean_by_layer, share_of_rows
from identikit.attention.layer import Layer
from identikit.attention.precision import equal_values
from identikit.attention.quantities import membership
from identikit.attention.result import EffectiveAttention
from identikit.attention.sample import sample_rows
from identikit.attention.yardstick import shuffled_rows
from identikit.explanation.result import Explanation
from identikit.explanation.time_limit import TimeLimit
from identikit.maths.linalg import Resolution, column_scales, matrix_rank, rounding_unit
from identikit.maths.polytope.exact import compile_solver
from identikit.progress import Progress
from identikit.results.pictures import image_regions
from identikit.shapes import Bool, Float, Int, Tensor

SECONDS = 20.0  # how long `explain` may take
EDGES_NAMED = 5  # how many edges a list names, each of another head
VISIBLE = 1e-3  # intervals narrower than this, and weights outside one by less, look the same with three digits
SINK = 0.3  # a layer's mean weight on one token above which the token is a sink: no content word gets that much
SEED = 0
_TIMED = 4  # queries whose rows are timed to estimate how long the reachable dimensions of all take
_EVEN = 2.0  # a sink also gets this many times what equal weights would give it, which in a short text is a lot


def attention_facts(
    attention: EffectiveAttention, limit: TimeLimit, progress: Progress
) -> tuple[dict[str, Tensor], dict[str, object], RowSample]:
    """Return the arrays by layer and the other facts on attention, and the bounded rows that all of them rest on."""
    special = [position for position, is_special in enumerate(attention.about["special"]) if is_special]
    tokens = candidates(attention)
    images = image_regions(attention) if attention.about.get("images") else {}
    groups = [special or [0], *tokens.values(), *images.values()]
    raw, effective, even = group_mass(attention, membership(groups, len(attention.tokens)))
    in_layers = is_sink(raw, even)
    sinks = [group for group in range(1, 1 + len(tokens)) if in_layers[:, group].any()]
    image_groups = range(1 + len(tokens), len(groups))
    bounded_groups = [0, *sinks, *image_groups]
    null_dim = attention.null_dim.double()
    arrays = {
        "special_raw": raw[:, 0],
        "special_effective": effective[:, 0],
        "least_null_dim": null_dim.amin((1, 2)),
        "greatest_null_dim": null_dim.amax((1, 2)),
        "identifiable": (null_dim == 0).double().mean((1, 2)),
        "pearson": attention.pearson("layer"),
        "reachable_dim": _reachable(attention, limit),
    }
    layers = attention.captured().layers
    facts = {
        "causes": causes(attention),
        "learned_sink": attention.sink.double().mean((1, 2)).tolist(),
        "unsure": (~attention.rank_is_sure).double().mean((1, 2)).tolist(),
        "rounded_duplicates": attention.rounded_duplicates.tolist(),
        "shared_outputs": _numbers(attention, (attention.joint_null_dim > attention.null_dim.sum(1)).any(1)),
        "group": "special tokens" if special else "first token",
    }
    with limit.paused():
        compile_solver(layers[0].heads.device)
    sample = sample_rows(
        attention,
        [groups[group] for group in bounded_groups],
        seconds=None if limit.seconds is None else limit.left(),
        seed=SEED,
        progress=progress,
    )
    bounds = {group: group_bounds(sample, index, raw[:, group]) for index, group in enumerate(bounded_groups)}
    weights = {}  # what a group of keys gets in each layer, and could get
    for group, (lower, upper) in bounds.items():
        ends = {"lower": lower.ends()[0].tolist(), "upper": upper.ends()[1].tolist()}
        weights[group] = {"raw": raw[:, group].tolist(), **ends}
    facts["to_images"] = [{"image": name} | weights[group] for name, group in zip(images, image_groups, strict=True)]
    facts["sinks"] = []
    for group in sinks:
        token = [*tokens][group - 1]
        sink = {"token": token, "keys": tokens[token], "layers": _numbers(attention, in_layers[:, group])}
        sink["value_size"] = [float(value_sizes(layer, [tokens[token]]).nanmean()) for layer in layers]
        facts["sinks"].append(sink | weights[group] | {"effective": effective[:, group].tolist()})
    means = certain_means(attention, sample)
    facts["certain"] = _overall(sample, means) | {"seconds": limit.seconds}
    means["special_lower"], means["special_upper"] = bounds[0]
    for name, mean in means.items():
        least, greatest = mean.ends()
        arrays |= {name: mean.mean, f"{name}_stderr": mean.stderr, f"{name}_least": least, f"{name}_most": greatest}
    edges = {"least_certain": least_certain(sample), "outside": outside(sample, attention.pearson("head"))}
    for name, named_edges in edges.items():
        facts[name] = [edge | {"layer": attention.layers[edge["layer"]]} for edge in named_edges]
    facts["shuffled"] = shuffled_rows(attention, sample, seed=SEED)
    return {name: arrays[name].cpu().double() for name in Explanation.main}, facts, sample


def _numbers(attention: EffectiveAttention, marked: Bool[Tensor, "layer"]) -> list[int]:
    """Return the numbers of the marked layers; a model may have layers without attention between them."""
    return [attention.layers[index] for index in marked.nonzero()[:, 0].tolist()]


def certain_means(attention: EffectiveAttention, sample: RowSample) -> dict[str, Mean]:
    """Return the determined share, and in what share of rows the strongest edge is; a learned sink's weight is not."""
    fixed = (attention.null_dim == 0).cpu()
    fixed_mass = ((1 - attention.sink.double().cpu()) * fixed).sum((1, 2)) / fixed.sum((1, 2)).clamp(min=1)
    mass = mean_by_layer(sample, sample.bounded.lower.sum(-1).clamp(max=1.0), fixed_mass.tolist())
    return {"certain_mass": mass, "strongest_certain": share_of_rows(sample, sample.bounded.strongest)}


def _reachable(attention: EffectiveAttention, limit: TimeLimit) -> Float[Tensor, "layer"]:
    """Return the mean reachable dimension of each layer; NaN where a few rows show that time is too short."""
    layers = attention.captured().layers
    _ = layers[0].polytope_dim  # solved once, for all rows
    begun = time.monotonic()
    queries = attention.axis("query").values[-_TIMED:]
    _ = attention.sel(layer=list(attention.layers[:1]), query=list(queries)).reachable_dim
    share = len(queries) / (len(layers) * len(attention.tokens))
    if not limit.allows((time.monotonic() - begun) / share):
        return torch.full((len(layers),), torch.nan, dtype=torch.float64)
    return attention.reachable_dim.double().mean((1, 2))


def _overall(sample: RowSample, certain: Mapping[str, Mean]) -> dict[str, object]:
    """Return how much is determined overall, with standard errors, and how many rows that was read from."""
    facts: dict[str, object] = {}
    for name, by_layer in zip(("mass", "strongest"), certain.values(), strict=True):
        mean = by_layer.overall()
        facts[name], facts[f"{name}_stderr"] = known_numbers([float(mean.mean), float(mean.stderr)])
        facts[f"{name}_range"] = [float(end) for end in mean.ends()]
    return {
        **facts,
        "free_by_layer": sample.free.tolist(),
        "bounded_by_layer": certain["certain_mass"].rows.tolist(),
        "rows": sample.rows * len(sample.free),
        "free_rows": int(sample.free.sum()),
        "bounded_rows": len(sample.bounded.places),
        "bounded_edges": int(sample.bounded.seen.sum()),
    }


def known_numbers(numbers: Sequence[float]) -> list[float | None]:
    """Return numbers with None in place of NaN, as JSON holds them."""
    return [None if number != number else number for number in numbers]


# Why rows are free


def causes(attention: EffectiveAttention) -> dict[str, Any]:
    """Return why rows are free: which of these hold, and in which layers or heads.

    - `keys`: layers where a query sees more keys than values have dimensions; `most_keys`: at most how many
    - `repeated`: layers where repeated tokens have equal values, with how many tokens repeat the value of an earlier
      one, and two of them as an example: the earlier and the later
    - `projections`: heads whose output projection passes on only `rank` dimensions, where that frees a row
    - `dependent`: layers where a row has a larger null space than all of these explain
    """
    facts: dict[str, Any] = {"keys": [], "most_keys": 0, "repeated": [], "projections": [], "dependent": []}
    for number, layer in zip(attention.layers, attention.captured().layers, strict=True):
        width = layer.projection.shape[1]
        most_keys = int(layer.seen.count.max())
        if most_keys > width:
            facts["keys"].append(number)
            facts["most_keys"] = max(facts["most_keys"], most_keys)
        first_equal, _ = equal_values(layer.call, attention.tokens)
        pairs = _pairs_seen_together(layer, first_equal)
        if pairs:
            facts["repeated"].append({"layer": number, "tokens": len(pairs), "example": pairs[0]})
        ranks = _projection_ranks(layer)
        for head, rank in zip(attention.heads, ranks.tolist(), strict=True):
            if rank < min(width, most_keys):
                facts["projections"].append({"layer": number, "head": head, "rank": rank})
        if bool((layer.factors.rank < _expected_rank(layer, first_equal, ranks)).any()):
            facts["dependent"].append(number)
    return facts


def _pairs_seen_together(layer: Layer, first_equal: Int[Tensor, "n"]) -> list[list[int]]:
    """Return each position whose value equals that of an earlier one, after the first such one, if a query sees both.

    `first_equal` has for each position the first one with an equal value.
    """
    queries = torch.arange(len(first_equal), device=layer.heads.device)
    pairs = []
    for position, first in enumerate(first_equal.tolist()):
        pair = torch.tensor([first, position], device=queries.device)
        if first < position and bool(layer.seen.block(queries, pair).all(1).any()):
            pairs.append([first, position])
    return pairs


def _projection_ranks(layer: Layer) -> Int[Tensor, "head"]:
    """Return the rank of each head's output projection."""
    if layer.factors.values is layer.plain.values:  # of full rank: values need no projecting
        return torch.full((len(layer.projection),), layer.projection.shape[1])
    resolution = Resolution(rounding_unit(layer.projection.dtype))
    H = layer.projection.double()
    return torch.tensor([matrix_rank(head, resolution) for head in H * column_scales(H.mT).mT])


def _expected_rank(
    layer: Layer, first_equal: Int[Tensor, "n"], ranks: Int[Tensor, "head"]
) -> Int[Tensor, "head query"]:
    """Return the rank of each row if only counting, equal values and the output projection limited it."""
    count = layer.seen.count
    limit = torch.minimum(ranks.to(count)[:, None], count)
    queries = (layer.factors.rank < limit).any(0).nonzero()[:, 0]
    if len(queries) and bool((first_equal < torch.arange(len(first_equal))).any()):
        seen = layer.seen.block(queries, torch.arange(len(first_equal), device=queries.device))
        distinct = [first_equal.to(queries)[row].unique().numel() for row in seen]
        limit[:, queries] = torch.minimum(limit[:, queries], torch.tensor(distinct).to(limit))
    return limit


# Sinks


def candidates(attention: EffectiveAttention) -> dict[str, list[int]]:
    """Return the tokens that may be sinks, with their positions: each kind of special token, and the first token."""
    keys = attention.axes[-1]
    special = attention.about["special"]
    positions_of: dict[str, list[int]] = {}
    for position, is_special in enumerate(special):
        if is_special:
            positions_of.setdefault(attention.tokens[position], []).append(position)
    tokens = {} if special[0] else {keys.name_of(0): [0]}
    for token, positions in positions_of.items():
        tokens[keys.name_of(positions[0]) if len(positions) == 1 else token] = positions
    return tokens


def group_mass(
    attention: EffectiveAttention, groups: Float[Tensor, "group key"]
) -> tuple[Float[Tensor, "layer group"], Float[Tensor, "layer group"], Float[Tensor, "layer group"]]:
    """Return the mean weight of all rows of each layer on groups of keys: raw, effective, and with equal weights."""
    received = torch.stack([layer.received.cpu() for layer in attention.captured().layers], dim=1)
    raw, effective, even = received @ groups.mT
    return raw, effective, even


def is_sink(raw: Float[Tensor, "*layers"], even: Float[Tensor, "*layers"]) -> Bool[Tensor, "*layers"]:
    """Return where a token's mean attention makes it a sink, compared with what equal weights would give it."""
    return (raw > SINK) & (raw > _EVEN * even)


# What bounded rows say


def group_bounds(sample: RowSample, group: int, raw: Float[Tensor, "layer"]) -> tuple[Mean, Mean]:
    """Return the least and the greatest mean weight that each layer's rows can give to a group of keys.

    `raw` is the mean over all rows. How far below and above it the ends are is what is estimated from the rows that
    were bounded, so the ends always enclose it.
    """
    weight, lower, upper = sample.bounded.groups[:, :, group].unbind(1)
    below = mean_by_layer(sample, weight - lower, 0.0)
    above = mean_by_layer(sample, upper - weight, 0.0)
    lowest = below._replace(
        mean=(raw - below.mean).clamp(min=0),
        least=(raw - below.most).clamp(min=0),  # what is farthest below is least
        most=(raw - below.least).clamp(min=0),
    )
    highest = above._replace(
        mean=(raw + above.mean).clamp(max=1),
        least=(raw + above.least).clamp(max=1),
        most=(raw + above.most).clamp(max=1),
    )
    return lowest, highest


def least_certain(sample: RowSample) -> list[dict[str, Any]]:
    """Return the edges with the widest intervals, one per head."""
    return _largest(sample, sample.bounded.upper - sample.bounded.lower)


def outside(sample: RowSample, pearson: Float[Tensor, "layer head"]) -> list[dict[str, Any]]:
    """Return the edges whose effective weight is farthest outside the interval, one per head.

    A head whose raw and effective attention correlate at 1.00 is left out.
    """
    rows = sample.bounded
    beyond = torch.maximum(rows.lower - rows.effective, rows.effective - rows.upper)
    correlated = ~(pearson.cpu() < 0.995)[rows.places[:, 0], rows.places[:, 1]]
    return _largest(sample, beyond.masked_fill(correlated[:, None], 0.0))


def _largest(sample: RowSample, sizes: Float[Tensor, "row key"]) -> list[dict[str, object]]:
    rows = sample.bounded
    edges: dict[tuple[int, int], dict[str, object]] = {}
    largest, keys = sizes.max(1)
    for row in largest.argsort(descending=True, stable=True).tolist():
        if float(largest[row]) < VISIBLE or len(edges) == EDGES_NAMED:
            break
        layer, head, query = rows.places[row].tolist()
        key = int(keys[row])
        edge = {"layer": layer, "head": head, "query": query, "key": key, "raw": float(rows.attention[row, key])}
        edge |= {name: float(getattr(rows, name)[row, key]) for name in ("effective", "lower", "upper")}
        edges.setdefault((layer, head), edge)
    return list(edges.values())
