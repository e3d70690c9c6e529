"""Rows of attention for the views: their intervals, and for some the vertices and the intervals with some slack."""

import math
import time
from collections.abc import Mapping, Sequence
from itertools import product

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

EPSILONS = (0.001, 0.01, 0.1)  # shares of its norm by which a head's output may move
LISTED = 96  # rows of a short text whose vertices a file holds at most
VERTICES = 12  # edges per row whose vertices a file holds, the widest first
ALL_VERTICES = 64  # the same for a row that a visitor opens
GRID_WORK = 4e7  # cost of the grid of epsilons, as `_grid_rows` counts it: about two seconds
ROW_WORK = 1.5e8  # above, one row would cost too much
ROW_SECONDS = 20.0  # for bounding a row that a visitor opens
_VAGUE = 0.2  # a head whose determined share has this error, or one as large as itself, is not drawn
NARROW = 1e-6  # an interval that is narrower does not move


def add_intervals(file: File, result: AttentionIntervals, progress: Progress) -> None:
    """Add the rows of a result that holds only intervals."""
    if result.axes[-1].name != "key" or list(result.axes[-1].tokens or ()) != list(result.text_of("key")["tokens"]):
        raise InputError("A page shows intervals over all keys: leave out key= and groups=, or use plot().")
    layers, heads, queries = result.axes[:3]
    indices = list(product(range(len(layers)), range(len(heads)), queries.values))
    file.about["attention"] = {
        "layer_numbers": list(layers.values),
        "head_numbers": list(heads.values),
        "layers": [{"form": "none"}] * len(layers),
        "live": False,
    }
    strongest = strongest_certain(result.read("certain_order").flatten())
    flat = {name: result.read(name).flatten(0, 2) for name in ("lower", "upper", "raw")}
    _add_rows(file, indices, flat["lower"], flat["upper"], strongest)
    file.arrays["rows.raw"] = flat["raw"].float()
    _open_with(file, indices[0])
    add_totals(file, result, flat["lower"])


def _add_rows(
    file: File,
    indices: Sequence[RowIndex],
    lower: Float[Tensor, "row key"],
    upper: Tensor,
    strongest: Float[Tensor, "row"],
) -> None:
    file.arrays |= {
        "rows.place": torch.tensor(indices, dtype=torch.int32).reshape(-1, 3),
        "rows.lower": lower.float(),
        "rows.upper": upper.float(),
        "rows.strongest": strongest.float(),
    }
    file.about["rows"] = {"epsilons": []}


def _open_with(file: File, index: RowIndex) -> None:
    file.about["first"] = dict(zip(("layer", "head", "query"), index, strict=True))


def add_bounded(file: File, result: Explanation, progress: Progress) -> None:
    """Add the rows that an explanation bounded, and for some of them the vertices and the grid of epsilons."""
    attention = result.attention
    if result.bounded is None or not isinstance(attention, EffectiveAttention):
        return
    bounded = result.bounded.bounded
    indices = [(layer, head, query) for layer, head, query in bounded.places.tolist()]
    _add_rows(file, indices, bounded.lower, bounded.upper, bounded.strongest)
    add_explained_totals(file, result, bounded.lower)
    _add_certain(file, attention, bounded)
    ranked = _ranked_rows(result, bounded)
    if not ranked:
        return
    opening = _opening_row(result, {indices[row]: row for row in ranked}, file.about["tokens"])
    _open_with(file, indices[opening])
    if attention.is_live:
        with_grid = list(dict.fromkeys([opening, *ranked]))[: _grid_rows(attention, indices[opening])]
        file.about["rows"]["epsilons"] = list(EPSILONS)
        _add_vertices(file, attention, indices, sorted(ranked, key=indices.__getitem__), VERTICES)
        _add_grid(file, attention, indices, sorted(with_grid, key=indices.__getitem__), progress)


def _add_certain(file: File, attention: EffectiveAttention, bounded: BoundedRows) -> None:
    """Add how much of each row is certain, NaN where it was not bounded, and the means by head and by token.

    Means that are not exact, because free rows of the head or the token were not bounded, come with words that say so.
    """
    certain = certain_rows(attention, bounded)
    free = attention.null_dim.cpu() > 0
    heads = mean_by_head(certain, free)
    tokens = mean_by_token(certain, free)
    least, greatest = heads.ends()
    middle = ((least + greatest) / 2).masked_fill((greatest - least > _VAGUE) | (least <= 0), torch.nan)
    is_precise = heads.stderr < heads.mean.clamp(min=NARROW, max=_VAGUE)  # not where it is NaN
    file.arrays |= {
        "certain": certain.float(),
        "heads.certain_mass": torch.where(is_precise, heads.mean, middle).float(),
        "tokens.certain": torch.stack([tokens.least, tokens.most]).float(),
    }
    is_sampled = (heads.rows < heads.free).flatten().tolist()
    file.about["sampled"] = {"certain_mass": {"said": heads.words(weight), "sampled": is_sampled}}
    counts = {"bounded": len(bounded.places), "free": int(free.sum())}
    file.about["certain"] = {"tokens": tokens.words(percent), **counts}


def _ranked_rows(result: Explanation, bounded: BoundedRows) -> list[int]:
    """Rank rows that can move: those that the verdict names, then the widest of each head, then the widest."""
    width = (bounded.upper - bounded.lower).amax(-1)
    row_of = {tuple(index): row for row, index in enumerate(bounded.places.tolist())}
    in_verdict = [row_of[index] for index in _verdict_rows(result) if index in row_of]
    by_width = width.argsort(descending=True).tolist()
    widest = {tuple(bounded.places[row, :2].tolist()): row for row in reversed(by_width)}
    widest_by_head = sorted(widest.values(), key=lambda row: -float(width[row]))
    ranked = dict.fromkeys([*in_verdict, *widest_by_head, *by_width])
    count = LISTED * SHORT // max(SHORT, bounded.lower.shape[1])  # the vertices of a row grow with the text
    return [row for row in ranked if float(width[row]) > NARROW][:count]


def _opening_row(result: Explanation, row_of: Mapping[RowIndex, int], tokens: Sequence[str]) -> int:
    """Choose the row that the page opens with: one that the verdict names if possible, and of a word if possible."""
    candidates = [index for index in _verdict_rows(result) if index in row_of] or list(row_of)
    words = [index for index in candidates if tokens[index[2]].strip().isalpha()]
    return row_of[(words or candidates)[0]]


def _verdict_rows(result: Explanation) -> list[RowIndex]:
    """Return the rows of the edges that the verdict names."""
    layers = result.axis("layer").values
    edges = (*result.about["least_certain"], *result.about["outside"])
    return [(layers.index(edge["layer"]), edge["head"], edge["query"]) for edge in edges]


def _captured_indices(attention: EffectiveAttention, indices: Sequence[RowIndex]) -> list[RowIndex]:
    """Return rows of selected layers and heads by their indices in what was captured."""
    layers = attention.axis("layer").source_indices
    heads = attention.axis("head").source_indices
    return [(layers[layer], heads[head], query) for layer, head, query in indices]


def _add_vertices(
    file: File, attention: EffectiveAttention, indices: Sequence[RowIndex], rows: list[int], edges: int
) -> None:
    """Add, for the widest edges of some rows, the rows with the same output at both ends of their intervals."""
    n = len(attention.tokens)
    width = (file.arrays["rows.upper"] - file.arrays["rows.lower"])[rows]
    widest = width.topk(min(edges, n))
    polytopes = attention.captured().rows(_captured_indices(attention, [indices[row] for row in rows]))
    row_of_edge = torch.arange(len(rows)).repeat_interleave(widest.indices.shape[1])
    keys = widest.indices.flatten()
    objectives = torch.eye(polytopes.attention.shape[1])[keys].to(polytopes.attention)
    # One by one, as `alternative_attention` does.
    ends, lost = extreme_rows(polytopes.select(row_of_edge.to(polytopes.group.device)), objectives[:, None])
    movable = (widest.values.flatten() > NARROW) & ~lost.cpu()
    vertices = ends[:, 0, :, :n].cpu()[movable].flatten(0, 1)  # of each edge first the lower end, then the upper
    used = vertices != 0
    file.arrays |= {
        "vertex.row": torch.tensor(rows)[row_of_edge[movable]].repeat_interleave(2).int(),
        "vertex.key": keys[movable].repeat_interleave(2).int(),
        "vertex.end": torch.tensor([0, 1]).repeat(int(movable.sum())).int(),
        "vertex.start": F.pad(used.sum(-1).cumsum(0), (1, 0)).int(),
        "vertex.keys": used.nonzero()[:, 1].int(),
        "vertex.weights": vertices[used].float(),
    }


def _grid_rows(attention: EffectiveAttention, index: RowIndex) -> int:
    """Return for how many rows a file holds the grid of epsilons: at least one, but none in a very long text."""
    basis = attention.captured().rows(_captured_indices(attention, [index])).basis
    work = (basis.shape[1] * basis.shape[2]) ** 2  # a program per key, with a system of equations in each step
    return max(1, int(GRID_WORK / work)) if work <= ROW_WORK else 0


def _add_grid(
    file: File,
    attention: EffectiveAttention,
    indices: Sequence[RowIndex],
    rows: list[int],
    progress: Progress,
    until: float = math.inf,
) -> None:
    """Add the ends of some rows for each epsilon of the file; NaN for rows that are not bounded in time."""
    if not rows:
        return
    n = len(attention.tokens)
    epsilons = file.about["rows"]["epsilons"]
    polytopes = attention.captured().rows(_captured_indices(attention, [indices[row] for row in rows]), moving=True)
    lower = torch.full((len(rows), len(epsilons), n), torch.nan)
    upper = lower.clone()
    all_edges = key_weights(polytopes.attention.shape[1], top=0)._replace(until=until)
    for number, epsilon in enumerate(epsilons):
        progress("page, grid of epsilons", number, len(epsilons))
        bounds = certified_bounds(polytopes, all_edges, epsilon=epsilon)
        is_bounded = ~bounds.gap.isnan().any(-1).cpu()
        lower[is_bounded, number] = bounds.lower.cpu()[is_bounded, :n].float()
        upper[is_bounded, number] = bounds.upper.cpu()[is_bounded, :n].float()
    progress("page, grid of epsilons", len(epsilons), len(epsilons))
    file.arrays |= {"grid.row": torch.tensor(rows, dtype=torch.int32), "grid.lower": lower, "grid.upper": upper}


def packed_rows(attention: EffectiveAttention, indices: Sequence[RowIndex], *, epsilon: float = 0.0) -> bytes:
    """Return the intervals of some rows (the numbers of layer, head and query) with all of their vertices.

    With `epsilon`, return their ends when the output may move by this share of its norm instead.
    """
    axes = [attention.axis(name) for name in ("layer", "head", "query")]
    layers, heads, _ = axes
    captured: set[RowIndex] = set()
    for index in indices:
        layer, head, query = (axis.sel(number).source_indices[0] for axis, number in zip(axes, index, strict=True))
        captured.add((layer, head, query))
    n = len(attention.tokens)
    _, bounds = bounds_of(attention.captured(), sorted(captured), key_weights(n), bounding=EXACTLY)
    selected = []
    for layer, head, query in sorted(captured):
        selected.append((layers.source_indices.index(layer), heads.source_indices.index(head), query))
    file = File(about={"format": FORMAT, "kind": "rows"})
    _add_rows(file, selected, bounds.lower.cpu(), bounds.upper.cpu(), strongest_certain(bounds.order))
    all_rows = list(range(len(selected)))
    if epsilon:
        file.about["rows"]["epsilons"] = [epsilon]
        _add_grid(file, attention, selected, all_rows, silent, until=time.monotonic() + ROW_SECONDS)
    else:
        _add_vertices(file, attention, selected, all_rows, ALL_VERTICES)
    return file.bytes()
