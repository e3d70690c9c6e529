"""Rows of attention for the views: their intervals, of some the vertices, and how far they reach with some slack."""

from collections.abc import Sequence
from typing import Any

import torch

from identikit.attention.intervals import Bounding, bounds_of
from identikit.attention.result import AttentionIntervals, EffectiveAttention
from identikit.errors import InputError
from identikit.explanation.certainty import Sample
from identikit.explanation.result import Explanation
from identikit.maths.polytope.one_row import witnesses
from identikit.progress import Progress, silent
from identikit.shapes import Float, Tensor
from identikit.web.file import FORMAT, SHORT, File

EPSILONS = (0.001, 0.003, 0.01, 0.03, 0.1)  # by which shares of its norm a head's output may move
LISTED = 96  # of how many rows a file of a short text holds vertices and the grid of epsilons, at most
VERTICES = 12  # of how many edges per row a file holds vertices, the widest first
ALL_VERTICES = 64  # the same for a row that was asked for
GRID_SECONDS = 5.0  # about how long to bound rows for the grid of epsilons
ROW_SECONDS = 20.0  # the same for a row that was asked for
NARROW = 1e-6  # an interval that is narrower does not move

Place = tuple[int, int, int]


def add_intervals(file: File, result: AttentionIntervals, progress: Progress) -> None:
    """Add the rows of intervals that were asked for by themselves."""
    if result.axes[-1].name != "key" or result.axes[-1].tokens != result.tokens:
        raise InputError("A page shows intervals over all keys: leave out key= and groups=, or use plot().")
    layers, heads, queries = result.axes[:3]
    places = [(i, h, q) for i in range(len(layers)) for h in range(len(heads)) for q in queries.values]
    file.about["attention"] = {
        "layer_numbers": list(layers.values),
        "head_numbers": list(heads.values),
        "layers": [{"form": "none"}] * len(layers),
        "live": False,
    }
    order = result._read("certain_order").flatten()
    strongest = torch.where(order < 0, torch.nan, (order > 0).double())
    flat = {name: result._read(name).flatten(0, 2) for name in ("lower", "upper", "raw")}
    _rows(file, places, flat["lower"], flat["upper"], strongest)
    file.arrays["rows.raw"] = flat["raw"].float()


def _rows(
    file: File,
    places: Sequence[Place],
    lower: Float[Tensor, "row key"],
    upper: Tensor,
    strongest: Float[Tensor, "row"],
) -> None:
    file.arrays |= {
        "rows.place": torch.tensor(places, dtype=torch.int32).reshape(-1, 3),
        "rows.lower": lower.float(),
        "rows.upper": upper.float(),
        "rows.strongest": strongest.float(),
    }
    file.about["rows"] = {"epsilons": []}


def add_bounded(file: File, result: Explanation, progress: Progress) -> None:
    """Add the rows that an explanation bounded, and of some the vertices and the grid of epsilons."""
    attention, sample = result.attention, result.bounded
    if sample is None or not isinstance(attention, EffectiveAttention):
        return
    places = [(layer, head, query) for layer, head, query in sample.places.tolist()]
    _rows(file, places, sample.lower, sample.upper, sample.strongest)
    free = attention.null_dim.cpu() > 0
    certain = torch.where(free, torch.nan, 1 - attention.sink.double().cpu())
    fixed = torch.where(free, 0.0, certain)
    certain[tuple(sample.places.mT)] = sample.lower.sum(-1).clamp(max=1.0)
    drawn = torch.where(free, certain, torch.nan).nanmean(-1)  # free rows were drawn at random
    share = free.double().mean(-1)
    mass = torch.where(share > 0, share * drawn.nan_to_num() + fixed.mean(-1), fixed.mean(-1))
    file.arrays["certain"] = certain.float()
    file.arrays["heads.certain_mass"] = mass.masked_fill((share > 0) & drawn.isnan(), torch.nan).float()
    chosen = _listed(result, sample)
    if chosen:
        listed = [places[row] for row in chosen]
        named = [place for place in _named_rows(result) if place in listed] or listed
        first = next((place for place in named if file.about["tokens"][place[2]].strip().isalpha()), named[0])
        file.about["first"] = dict(zip(("layer", "head", "query"), first, strict=True))
    if hasattr(attention.source, "reading"):
        _vertices(file, attention, places, chosen, VERTICES, progress)
        _grid(file, attention, [places[row] for row in chosen], chosen, progress)


def _listed(result: Explanation, sample: Sample) -> list[int]:
    """Choose rows: those that the verdict names, then the widest of each head, then the widest; ordered by place."""
    width = (sample.upper - sample.lower).amax(-1)
    where = {tuple(place): row for row, place in enumerate(sample.places.tolist())}
    wanted = [where[place] for place in _named_rows(result) if place in where]
    order = width.argsort(descending=True).tolist()
    heads = {tuple(sample.places[row, :2].tolist()): row for row in reversed(order)}
    ranked = dict.fromkeys([*wanted, *sorted(heads.values(), key=lambda row: -float(width[row])), *order])
    most = LISTED * SHORT // max(SHORT, sample.lower.shape[1])  # the grid of a row grows with the text
    chosen = [row for row in ranked if float(width[row]) > NARROW][:most]
    return sorted(chosen, key=lambda row: sample.places[row].tolist())


def _named_rows(result: Explanation) -> list[Place]:
    """Return the rows of the edges that the verdict names, as places."""
    numbers = result._axis("layer").values
    edges = (*result.about["least_certain"], *result.about["outside"])
    return [(numbers.index(edge["layer"]), edge["head"], edge["query"]) for edge in edges]


def _vertices(
    file: File,
    attention: EffectiveAttention,
    places: Sequence[Place],
    chosen: list[int],
    most: int,
    progress: Progress,
) -> None:
    """Add, for the widest edges of the chosen rows, the rows with the same output at both ends of their intervals."""
    source: Any = attention.source
    layers, heads = attention._axis("layer").places, attention._axis("head").places
    found: list[tuple[int, int, int, Tensor]] = []
    for done, row in enumerate(chosen):
        progress("page, rows that can be moved", done, len(chosen))
        layer, head, query = places[row]
        one = source.row(layers[layer], heads[head], query)
        width = file.arrays["rows.upper"][row] - file.arrays["rows.lower"][row]
        for key in width.topk(min(most, len(width))).indices.tolist():
            if float(width[key]) > NARROW:
                at = (one.keys == key).nonzero()[0].tolist()
                for end, weights in enumerate(witnesses(one.attention, one.values, at)):
                    found.append((row, key, end, one.over_all_keys(weights).cpu()))
    progress("page, rows that can be moved", len(chosen), len(chosen))
    kept = [weights.nonzero()[:, 0] for *_, weights in found]
    starts = torch.tensor([0, *(len(keys) for keys in kept)]).cumsum(0)
    numbers = {name: torch.tensor([one[at] for one in found]) for at, name in enumerate(("row", "key", "end"))}
    file.arrays |= {f"vertex.{name}": values.int().reshape(-1) for name, values in numbers.items()}
    nothing = torch.zeros(0, dtype=torch.long)
    file.arrays["vertex.start"] = starts.int()
    file.arrays["vertex.keys"] = torch.cat([nothing, *kept]).int()
    weights = [one[-1][keys] for one, keys in zip(found, kept, strict=True)]
    file.arrays["vertex.weights"] = torch.cat([nothing.double(), *weights]).float()


def _grid(
    file: File,
    attention: EffectiveAttention,
    places: Sequence[Place],
    rows: list[int],
    progress: Progress,
    epsilons: Sequence[float] = EPSILONS,
    seconds: float | None = None,
) -> None:
    """Add the ends of rows when the head's output may move; NaN for what the time did not allow."""
    layers, heads = attention._axis("layer").places, attention._axis("head").places
    own = [(layers[layer], heads[head], query) for layer, head, query in places]
    lower, upper = [], []
    for done, epsilon in enumerate(epsilons):
        progress("page, grid of epsilons", done, len(epsilons))
        bounding = Bounding("certified", epsilon, (seconds or GRID_SECONDS) / len(epsilons))
        ends = bounds_of(attention, own, bounding=bounding)[1] if own else None
        if ends is not None:
            unknown = ends.gap.isnan()
            lower.append(ends.lower.masked_fill(unknown, torch.nan))
            upper.append(ends.upper.masked_fill(unknown, torch.nan))
    progress("page, grid of epsilons", len(epsilons), len(epsilons))
    if lower:
        file.arrays["grid.row"] = torch.tensor(rows, dtype=torch.int32)
        file.arrays |= {"grid.lower": torch.stack(lower, 1).float(), "grid.upper": torch.stack(upper, 1).float()}
        file.about["rows"]["epsilons"] = list(epsilons)


def packed_rows(attention: EffectiveAttention, rows: Sequence[Place], *, epsilon: float = 0.0) -> bytes:
    """Return the intervals of some rows (the numbers of layer, head and query) with all of their vertices.

    With `epsilon`, return their ends when the output may move by this share of its norm instead.
    """
    layers, heads, queries = (attention._axis(name) for name in ("layer", "head", "query"))
    places = sorted({(layers.sel(layer).places[0], heads.sel(head).places[0], queries.sel(query).places[0])
                     for layer, head, query in rows})  # fmt: skip
    _, ends = bounds_of(attention, places, bounding=Bounding("exact"))
    inside = [(layers.places.index(layer), heads.places.index(head), query) for layer, head, query in places]
    file = File(about={"format": FORMAT, "kind": "rows"})
    _rows(
        file,
        inside,
        ends.lower.cpu(),
        ends.upper.cpu(),
        torch.where(ends.order < 0, torch.nan, (ends.order > 0).double()),
    )
    everyone = list(range(len(inside)))
    if epsilon:
        _grid(file, attention, inside, everyone, silent, (epsilon,), ROW_SECONDS)
    else:
        _vertices(file, attention, inside, everyone, ALL_VERTICES, silent)
    return file.bytes()
