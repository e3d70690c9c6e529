"""Rows of attention for the views: their intervals, of some the vertices, and how far they reach with some slack."""

import math
import time
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from identikit.attention.captured import RowIndex
from identikit.attention.estimate import BoundedRows, certain_rows, mean_by_head, mean_by_token
from identikit.attention.interval_result import AttentionIntervals, strongest_certain
from identikit.attention.intervals import EXACTLY, bounds_of
from identikit.attention.quantities import key_weights
from identikit.attention.result import EffectiveAttention
from identikit.errors import InputError
from identikit.explanation.result import Explanation
from identikit.maths.polytope.certified import certified_bounds
from identikit.maths.polytope.exact import extreme_rows
from identikit.progress import Progress, silent
from identikit.results.words import percent, weight
from identikit.shapes import Float, Tensor
from identikit.web.file import FORMAT, SHORT, File
from identikit.web.images import add_explained_totals, add_totals

EPSILONS = (0.001, 0.01, 0.1)  # by which shares of its norm a head's output may move
LISTED = 96  # of how many rows a file of a short text holds vertices, at most
VERTICES = 12  # of how many edges per row a file holds vertices, the widest first
ALL_VERTICES = 64  # the same for a row that was asked for
GRID_WORK = 4e7  # what the grid of epsilons may cost, as `_grid_rows` counts it: about two seconds
ROW_WORK = 1.5e8  # above, one row would cost too much
ROW_SECONDS = 20.0  # how long to bound a row that was asked for
_VAGUE = 0.2  # a head whose determined share has this error, or one as large as itself, has no place
NARROW = 1e-6  # an interval that is narrower does not move


def add_intervals(file: File, result: AttentionIntervals, progress: Progress) -> None:
    """Add the rows of intervals that were asked for by themselves."""
    if result.axes[-1].name != "key" or list(result.axes[-1].tokens or ()) != list(result.text_of("key")["tokens"]):
        raise InputError("A page shows intervals over all keys: leave out key= and groups=, or use plot().")
    layers, heads, queries = result.axes[:3]
    places = [(i, h, q) for i in range(len(layers)) for h in range(len(heads)) for q in queries.values]
    file.about["attention"] = {
        "layer_numbers": list(layers.values),
        "head_numbers": list(heads.values),
        "layers": [{"form": "none"}] * len(layers),
        "live": False,
    }
    strongest = strongest_certain(result.read("certain_order").flatten())
    flat = {name: result.read(name).flatten(0, 2) for name in ("lower", "upper", "raw")}
    _rows(file, places, flat["lower"], flat["upper"], strongest)
    file.arrays["rows.raw"] = flat["raw"].float()
    file.about["first"] = dict(zip(("layer", "head", "query"), places[0], strict=True))
    add_totals(file, result, flat["lower"])


def _rows(
    file: File,
    places: Sequence[RowIndex],
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
    add_explained_totals(file, result, bounded.lower)
    _add_certain(file, attention, bounded)
    ranked = _ranked(result, bounded)
    if not ranked:
        return
    opening = _opening(result, {places[row]: row for row in ranked}, file.about["tokens"])
    file.about["first"] = dict(zip(("layer", "head", "query"), places[opening], strict=True))
    if attention.is_live:
        with_grid = list(dict.fromkeys([opening, *ranked]))[: _grid_rows(attention, places[opening])]
        file.about["rows"]["epsilons"] = list(EPSILONS)
        _vertices(file, attention, places, sorted(ranked, key=places.__getitem__), VERTICES)
        _grid(file, attention, places, sorted(with_grid, key=places.__getitem__), progress)


def _add_certain(file: File, attention: EffectiveAttention, bounded: BoundedRows) -> None:
    """Add how much of each row is certain, NaN where it was not bounded, and what is known of heads and tokens.

    Means that are not exact, because free rows of the head or the token were not bounded, come with words that say so.
    """
    certain = certain_rows(attention, bounded)
    free = attention.null_dim.cpu() > 0
    heads = mean_by_head(certain, free)
    tokens = mean_by_token(certain, free)
    least, most = heads.ends()
    middle = ((least + most) / 2).masked_fill((most - least > _VAGUE) | (least <= 0), torch.nan)
    known = heads.stderr < heads.mean.clamp(min=NARROW, max=_VAGUE)  # not where it is NaN
    file.arrays |= {
        "certain": certain.float(),
        "heads.certain_mass": torch.where(known, heads.mean, middle).float(),
        "tokens.certain": torch.stack([tokens.least, tokens.most]).float(),
    }
    drawn = (heads.rows < heads.free).flatten().tolist()
    file.about["sampled"] = {"certain_mass": {"said": heads.words(weight), "sampled": drawn}}
    counts = {"bounded": len(bounded.places), "free": int(free.sum())}
    file.about["certain"] = {"tokens": tokens.words(percent), **counts}


def _ranked(result: Explanation, bounded: BoundedRows) -> list[int]:
    """Rank rows that can move: those that the verdict names, then the widest of each head, then the widest."""
    width = (bounded.upper - bounded.lower).amax(-1)
    where = {tuple(place): row for row, place in enumerate(bounded.places.tolist())}
    named = [where[place] for place in _named_rows(result) if place in where]
    order = width.argsort(descending=True).tolist()
    widest = {tuple(bounded.places[row, :2].tolist()): row for row in reversed(order)}
    widest_by_head = sorted(widest.values(), key=lambda row: -float(width[row]))
    ranked = dict.fromkeys([*named, *widest_by_head, *order])
    most = LISTED * SHORT // max(SHORT, bounded.lower.shape[1])  # the vertices of a row grow with the text
    return [row for row in ranked if float(width[row]) > NARROW][:most]


def _opening(result: Explanation, rows: Mapping[RowIndex, int], tokens: Sequence[str]) -> int:
    """Choose the row that the page opens with: one that the verdict names, and of a word where there is one."""
    places = [place for place in _named_rows(result) if place in rows] or list(rows)
    return rows[next((place for place in places if tokens[place[2]].strip().isalpha()), places[0])]


def _named_rows(result: Explanation) -> list[RowIndex]:
    """Return the rows of the edges that the verdict names, as places."""
    numbers = result.axis("layer").values
    edges = (*result.about["least_certain"], *result.about["outside"])
    return [(numbers.index(edge["layer"]), edge["head"], edge["query"]) for edge in edges]


def _own_places(attention: EffectiveAttention, places: Sequence[RowIndex]) -> list[RowIndex]:
    """Return places among selected layers and heads as places in what was captured."""
    layers = attention.axis("layer").source_indices
    heads = attention.axis("head").source_indices
    return [(layers[layer], heads[head], query) for layer, head, query in places]


def _vertices(
    file: File, attention: EffectiveAttention, places: Sequence[RowIndex], chosen: list[int], most: int
) -> None:
    """Add, for the widest edges of the chosen rows, the rows with the same output at both ends of their intervals."""
    n = len(attention.tokens)
    width = (file.arrays["rows.upper"] - file.arrays["rows.lower"])[chosen]
    widest = width.topk(min(most, n))
    rows = attention.captured().rows(_own_places(attention, [places[row] for row in chosen]))
    each = torch.arange(len(chosen)).repeat_interleave(widest.indices.shape[1])
    keys = widest.indices.flatten()
    objectives = torch.eye(rows.attention.shape[1])[keys].to(rows.attention)
    # One by one, as `alternative_attention` does.
    ends, lost = extreme_rows(rows.select(each.to(rows.group.device)), objectives[:, None])
    movable = (widest.values.flatten() > NARROW) & ~lost.cpu()
    vertices = ends[:, 0, :, :n].cpu()[movable].flatten(0, 1)  # of each edge first the lower end, then the upper
    used = vertices != 0
    file.arrays |= {
        "vertex.row": torch.tensor(chosen)[each[movable]].repeat_interleave(2).int(),
        "vertex.key": keys[movable].repeat_interleave(2).int(),
        "vertex.end": torch.tensor([0, 1]).repeat(int(movable.sum())).int(),
        "vertex.start": F.pad(used.sum(-1).cumsum(0), (1, 0)).int(),
        "vertex.keys": used.nonzero()[:, 1].int(),
        "vertex.weights": vertices[used].float(),
    }


def _grid_rows(attention: EffectiveAttention, place: RowIndex) -> int:
    """Return for how many rows a file holds the grid of epsilons: at least one, but none in a very long text."""
    basis = attention.captured().rows(_own_places(attention, [place])).basis
    work = (basis.shape[1] * basis.shape[2]) ** 2  # a program per key, with a system of equations in each step
    return max(1, int(GRID_WORK / work)) if work <= ROW_WORK else 0


def _grid(
    file: File,
    attention: EffectiveAttention,
    places: Sequence[RowIndex],
    chosen: list[int],
    progress: Progress,
    until: float = math.inf,
) -> None:
    """Add the ends of chosen rows for each epsilon of the file; NaN for rows that are not reached `until` then."""
    if not chosen:
        return
    n = len(attention.tokens)
    epsilons = file.about["rows"]["epsilons"]
    rows = attention.captured().rows(_own_places(attention, [places[row] for row in chosen]), moving=True)
    shape = len(chosen), len(epsilons), n
    lower = torch.full(shape, torch.nan)
    upper = torch.full(shape, torch.nan)
    every = key_weights(rows.attention.shape[1], top=0)._replace(until=until)
    for at, epsilon in enumerate(epsilons):
        progress("page, grid of epsilons", at, len(epsilons))
        bounds = certified_bounds(rows, every, epsilon=epsilon)
        known = ~bounds.gap.isnan().any(-1).cpu()
        lower[known, at] = bounds.lower.cpu()[known, :n].float()
        upper[known, at] = bounds.upper.cpu()[known, :n].float()
    progress("page, grid of epsilons", len(epsilons), len(epsilons))
    file.arrays |= {"grid.row": torch.tensor(chosen, dtype=torch.int32), "grid.lower": lower, "grid.upper": upper}


def packed_rows(attention: EffectiveAttention, rows: Sequence[RowIndex], *, epsilon: float = 0.0) -> bytes:
    """Return the intervals of some rows (the numbers of layer, head and query) with all of their vertices.

    With `epsilon`, return their ends when the output may move by this share of its norm instead.
    """
    layers, heads, queries = (attention.axis(name) for name in ("layer", "head", "query"))
    places = sorted(
        {
            (
                layers.sel(layer).source_indices[0],
                heads.sel(head).source_indices[0],
                queries.sel(query).source_indices[0],
            )
            for layer, head, query in rows
        }
    )
    n = len(attention.tokens)
    _, bounds = bounds_of(attention.captured(), places, key_weights(n), bounding=EXACTLY)
    inside = [
        (layers.source_indices.index(layer), heads.source_indices.index(head), query) for layer, head, query in places
    ]
    file = File(about={"format": FORMAT, "kind": "rows"})
    _rows(file, inside, bounds.lower.cpu(), bounds.upper.cpu(), strongest_certain(bounds.order))
    everyone = list(range(len(inside)))
    if epsilon:
        file.about["rows"]["epsilons"] = [epsilon]
        _grid(file, attention, inside, everyone, silent, until=time.monotonic() + ROW_SECONDS)
    else:
        _vertices(file, attention, inside, everyone, ALL_VERTICES)
    return file.bytes()
