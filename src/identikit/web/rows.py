"""Rows of attention for the views: their intervals, of some the vertices, and how far they reach with some slack."""

from collections.abc import Sequence

import torch

from identikit.attention.captured import Place
from identikit.attention.interval_result import AttentionIntervals
from identikit.attention.intervals import EXACTLY, TOP, Bounding, bounds_of, edges_wanted
from identikit.attention.result import EffectiveAttention
from identikit.attention.sample import BoundedRows
from identikit.errors import InputError
from identikit.explanation.result import Explanation
from identikit.maths.polytope.exact import extreme_rows
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
    order = result.read("certain_order").flatten()
    strongest = torch.where(order < 0, torch.nan, (order > 0).double())
    flat = {name: result.read(name).flatten(0, 2) for name in ("lower", "upper", "raw")}
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
    attention = result.attention
    if result.bounded is None or not isinstance(attention, EffectiveAttention):
        return
    bounded = result.bounded.bounded
    places = [(layer, head, query) for layer, head, query in bounded.places.tolist()]
    _rows(file, places, bounded.lower, bounded.upper, bounded.strongest)
    _add_certain(file, attention, bounded)
    chosen = _listed(result, bounded)
    if chosen:
        listed = [places[row] for row in chosen]
        named = [place for place in _named_rows(result) if place in listed] or listed
        first = next((place for place in named if file.about["tokens"][place[2]].strip().isalpha()), named[0])
        file.about["first"] = dict(zip(("layer", "head", "query"), first, strict=True))
    if attention.is_live:
        _vertices(file, attention, places, chosen, VERTICES)
        _grid(file, attention, [places[row] for row in chosen], chosen, progress)


def _add_certain(file: File, attention: EffectiveAttention, bounded: BoundedRows) -> None:
    """Add how much of each row is certain, NaN where it was not bounded, and its mean over each head's rows."""
    free = attention.null_dim.cpu() > 0
    kept = 1 - attention.sink.double().cpu()
    certain = torch.where(free, torch.nan, kept)
    fixed = torch.where(free, 0.0, kept).mean(-1)
    certain[tuple(bounded.places.mT)] = bounded.lower.sum(-1).clamp(max=1.0)
    drawn = torch.where(free, certain, torch.nan).nanmean(-1)  # free rows were drawn at random
    share = free.double().mean(-1)
    mass = torch.where(share > 0, share * drawn, 0.0) + fixed
    file.arrays["certain"] = certain.float()
    file.arrays["heads.certain_mass"] = mass.float()


def _listed(result: Explanation, bounded: BoundedRows) -> list[int]:
    """Choose rows: those that the verdict names, then the widest of each head, then the widest; ordered by place."""
    width = (bounded.upper - bounded.lower).amax(-1)
    where = {tuple(place): row for row, place in enumerate(bounded.places.tolist())}
    wanted = [where[place] for place in _named_rows(result) if place in where]
    order = width.argsort(descending=True).tolist()
    heads = {tuple(bounded.places[row, :2].tolist()): row for row in reversed(order)}
    widest = sorted(heads.values(), key=lambda row: -float(width[row]))
    ranked = dict.fromkeys([*wanted, *widest, *order])
    most = LISTED * SHORT // max(SHORT, bounded.lower.shape[1])  # the grid of a row grows with the text
    chosen = [row for row in ranked if float(width[row]) > NARROW][:most]
    return sorted(chosen, key=lambda row: bounded.places[row].tolist())


def _named_rows(result: Explanation) -> list[Place]:
    """Return the rows of the edges that the verdict names, as places."""
    numbers = result.axis("layer").values
    edges = (*result.about["least_certain"], *result.about["outside"])
    return [(numbers.index(edge["layer"]), edge["head"], edge["query"]) for edge in edges]


def _own_places(attention: EffectiveAttention, places: Sequence[Place]) -> list[Place]:
    """Return places among selected layers and heads as places in what was captured."""
    layers = attention.axis("layer").places
    heads = attention.axis("head").places
    return [(layers[layer], heads[head], query) for layer, head, query in places]


def _vertices(file: File, attention: EffectiveAttention, places: Sequence[Place], chosen: list[int], most: int) -> None:
    """Add, for the widest edges of the chosen rows, the rows with the same output at both ends of their intervals."""
    n = len(attention.tokens)
    width = (file.arrays["rows.upper"] - file.arrays["rows.lower"])[chosen]
    widest = width.topk(min(most, n)) if chosen else None
    found: list[tuple[int, int, int, Tensor]] = []
    if widest is not None:
        rows = attention.captured().rows(_own_places(attention, [places[row] for row in chosen]))
        keys = widest.indices.to(rows.group.device)
        each = torch.arange(len(chosen), device=keys.device).repeat_interleave(keys.shape[1])
        objectives = torch.eye(rows.attention.shape[1]).to(rows.attention)[keys.flatten()]
        ends, lost = extreme_rows(rows.some(each), objectives[:, None])  # one by one, as `alternative_attention` does
        vertices = ends[:, 0].unflatten(0, keys.shape)
        failed = lost.unflatten(0, keys.shape)
        movable = (widest.values > NARROW) & ~failed.cpu()
        for at, which in movable.nonzero().tolist():
            key = int(keys[at, which])
            found += [(chosen[at], key, end, vertices[at, which, end, :n].cpu()) for end in (0, 1)]
    kept = [weights.nonzero()[:, 0] for *_, weights in found]
    starts = torch.tensor([0, *(len(keys) for keys in kept)]).cumsum(0)
    nothing = torch.zeros(0, dtype=torch.long)
    for at, name in enumerate(("row", "key", "end")):
        file.arrays[f"vertex.{name}"] = torch.tensor([vertex[at] for vertex in found]).int().reshape(-1)
    file.arrays["vertex.start"] = starts.int()
    file.arrays["vertex.keys"] = torch.cat([nothing, *kept]).int()
    weights = [vertex[-1][keys] for vertex, keys in zip(found, kept, strict=True)]
    file.arrays["vertex.weights"] = torch.cat([nothing.double(), *weights]).float()


def _grid(
    file: File,
    attention: EffectiveAttention,
    places: Sequence[Place],
    rows: list[int],
    progress: Progress,
    epsilons: Sequence[float] = EPSILONS,
    seconds: float = GRID_SECONDS,
) -> None:
    """Add the ends of rows when the head's output may move; NaN for what the time did not allow."""
    if not places:
        return
    captured = attention.captured()
    own = _own_places(attention, places)
    n = len(attention.tokens)
    lower = []
    upper = []
    for done, epsilon in enumerate(epsilons):
        progress("page, grid of epsilons", done, len(epsilons))
        bounding = Bounding("certified", epsilon, seconds / len(epsilons))
        _, bounds = bounds_of(captured, own, edges_wanted(n, range(n)), bounding=bounding)
        unknown = bounds.gap.isnan()
        lower.append(bounds.lower.masked_fill(unknown, torch.nan))
        upper.append(bounds.upper.masked_fill(unknown, torch.nan))
    progress("page, grid of epsilons", len(epsilons), len(epsilons))
    file.arrays["grid.row"] = torch.tensor(rows, dtype=torch.int32)
    file.arrays["grid.lower"] = torch.stack(lower, 1).float()
    file.arrays["grid.upper"] = torch.stack(upper, 1).float()
    file.about["rows"]["epsilons"] = list(epsilons)


def packed_rows(attention: EffectiveAttention, rows: Sequence[Place], *, epsilon: float = 0.0) -> bytes:
    """Return the intervals of some rows (the numbers of layer, head and query) with all of their vertices.

    With `epsilon`, return their ends when the output may move by this share of its norm instead.
    """
    layers, heads, queries = (attention.axis(name) for name in ("layer", "head", "query"))
    places = sorted(
        {
            (layers.sel(layer).places[0], heads.sel(head).places[0], queries.sel(query).places[0])
            for layer, head, query in rows
        }
    )
    n = len(attention.tokens)
    wanted = edges_wanted(n, range(n), top=TOP)
    _, bounds = bounds_of(attention.captured(), places, wanted, bounding=EXACTLY)
    inside = [(layers.places.index(layer), heads.places.index(head), query) for layer, head, query in places]
    strongest = torch.where(bounds.order < 0, torch.nan, (bounds.order > 0).double())
    file = File(about={"format": FORMAT, "kind": "rows"})
    _rows(file, inside, bounds.lower.cpu(), bounds.upper.cpu(), strongest)
    everyone = list(range(len(inside)))
    if epsilon:
        _grid(file, attention, inside, everyone, silent, (epsilon,), ROW_SECONDS)
    else:
        _vertices(file, attention, inside, everyone, ALL_VERTICES)
    return file.bytes()
