"""How long intervals take: of one row, and of every edge of a text, beside one `scipy.optimize.linprog` per end."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch
from scipy.optimize import linprog

from benchmarks.measure import Row, best_seconds, seconds, time_rows
from identikit.attention.captured import Captured
from identikit.attention.effective import effective_attention
from identikit.attention.result import EffectiveAttention
from identikit.maths.polytope.bounds import Bounds, Question, proven_bounds
from identikit.maths.polytope.certified import certified_bounds
from identikit.maths.polytope.cpu import propose_plainly
from identikit.maths.polytope.exact import exact_bounds
from identikit.maths.polytope.rows import Polytopes, Rows, decompose_values
from identikit.maths.visible import visible_from_mask
from identikit.models.load.load import load
from identikit.models.model import Model
from identikit.progress import Progress, silent
from identikit.texts.data import sample_texts

IDENTIKIT = "exact, one row"
LINPROG = "linprog per end"
EXACT = "exact, every edge"
CERTIFIED = "certified, every edge"
BY_ROW = "linprog row by row, from a sample"
TOLERANCES = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
SAMPLE = 24  # rows that stand for all in what is too slow to do for all
LARGER = 512  # the same for certified ends, on a CPU
TOP = 5


@dataclass(frozen=True)
class Options:
    """What is measured.

    - `shapes`: keys and value dimensions of random rows; `tokens`: lengths of a text, all of whose edges are bounded
    - `model`: whose attention that is, and a row of its longest text beside the random ones
    """

    shapes: tuple[tuple[int, int], ...] = ((130, 32), (128, 64))
    tokens: tuple[int, ...] = (64, 128)
    model: str | None = None
    device: str = "cpu"
    repeats: int = 3


def run(options: Options, *, progress: Progress = silent) -> list[Row]:
    """Time single rows (where scipy is installed), then whole texts."""
    model = load(options.model, device=options.device)
    tasks: list[Callable[[], list[Row]]] = []
    if find_spec("scipy") is not None:
        cases = [(f"random, {n} keys, d_v = {d_v}", random_row(n, d_v)) for n, d_v in options.shapes]
        cases.append(model_row(model, options.tokens[-1]))
        tasks += [partial(compare, name, row, options.repeats) for name, row in cases]
    tasks += [partial(whole_text, model, tokens) for tokens in options.tokens]
    rows = []
    for done, task in enumerate(tasks):
        progress("intervals", done, len(tasks))
        rows += task()
    progress("intervals", len(tasks), len(tasks))
    return rows


def compare(case: str, row: tuple[torch.Tensor, torch.Tensor], repeats: int) -> list[Row]:
    """Time one row both ways, and compare their answers."""
    attention, values = row
    bounds = row_intervals(attention, values)
    expected = linprog_intervals(attention, values)
    tasks = {
        IDENTIKIT: lambda: row_intervals(attention, values),
        LINPROG: lambda: linprog_intervals(attention, values),
    }
    taken = best_seconds(tasks, repeats=repeats, warm_up=0)
    ends = (bounds.lower[0], bounds.upper[0])
    differences = (np.abs(end.cpu().numpy() - other).max() for end, other in zip(ends, expected, strict=True))
    return [
        *time_rows(case, taken, {LINPROG: IDENTIKIT}),
        Row(case, "largest difference of an end", float(max(differences))),
        Row(case, "determined share", float(bounds.lower.sum())),
    ]


def whole_text(model: Model, tokens: int) -> list[Row]:
    """Time every edge of all heads of a text, exactly and certified; plain linear programs are timed on a sample."""
    rows = text_rows(model, tokens)
    wanted = every_key(rows, top=TOP)
    some = torch.linspace(0, len(rows.group) - 1, SAMPLE, device=rows.group.device).long()
    exact_bounds(rows.select(some), wanted)  # compile first
    certified_bounds(rows.select(some), every_key(rows))
    taken, exact = seconds(lambda: exact_bounds(rows, wanted))
    part = rows if rows.group.is_cuda else rows.select(torch.arange(0, len(rows.group), 1 + len(rows.group) // LARGER))
    slower, certified = seconds(lambda: certified_bounds(part, every_key(rows)))
    times = {EXACT: taken, CERTIFIED: slower * len(rows.group) / len(part.group)}
    case = f"{model.name}, {tokens} tokens, {int(rows.free.sum()):,} rows"
    figures = [
        Row(case, "largest gap, exact", float(exact.gap.max())),
        Row(case, "rows that were certified", len(part.group)),
        Row(case, "median gap, certified", float(certified.gap[part.visible].median())),
        Row(case, "largest gap, certified", float(certified.gap.max())),
        Row(case, "determined share", float(exact.lower.sum(-1).mean())),
    ]
    if find_spec("scipy") is not None:
        plainly, known = seconds(lambda: bounds_plainly(rows.select(some)))
        times[BY_ROW] = plainly * len(rows.group) / SAMPLE
        off = torch.maximum((exact.lower[some] - known.lower).abs(), (exact.upper[some] - known.upper).abs())
        figures.append(Row(case, "largest difference from linprog", float(off.max())))
    return [*time_rows(case, times, {CERTIFIED: EXACT, BY_ROW: EXACT}), *figures]


def every_key(rows: Rows, *, top: int = 0) -> Question:
    """Ask for the weight of every key."""
    return Question(torch.ones(rows.attention.shape[1], dtype=torch.bool), top=top)


def row_intervals(attention: torch.Tensor, values: torch.Tensor) -> Bounds:
    """Compute both ends of every key's interval of one row that sees all keys."""
    weights = attention.double()
    visible = visible_from_mask(torch.ones(1, len(values), dtype=torch.bool, device=values.device), 1)
    rank = decompose_values(values[None]).rank.to(values.device)
    polytopes = Polytopes.of(values[None], visible, rank[None])
    rows = polytopes.rows([0], torch.zeros_like(rank), (weights / weights.sum())[None])
    return exact_bounds(rows, every_key(rows))


def bounds_plainly(rows: Rows) -> Bounds:
    """Bound every key of rows with one linear program per end."""
    wanted = every_key(rows)
    return proven_bounds(rows, wanted, propose_plainly(rows, wanted))


def linprog_intervals(attention: torch.Tensor, values: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Compute both ends of every key's interval, each by a linear program of its own."""
    weights = attention.double().cpu().numpy()
    weights = weights / weights.sum()
    matrix = np.concatenate([values.double().cpu().numpy(), np.ones((len(weights), 1))], axis=1).T
    ends = np.empty((2, len(weights)))
    for key in range(len(weights)):
        for end, sense in enumerate((1.0, -1.0)):
            cost = np.zeros(len(weights))
            cost[key] = sense
            solved = linprog(cost, A_eq=matrix, b_eq=matrix @ weights, method="highs", options=TOLERANCES)
            ends[end, key] = solved.x[key]
    return ends[0], ends[1]


def random_row(n: int, d_v: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a row of attention and its values."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, generator=generator).mul(2).softmax(dim=0), torch.randn(n, d_v, generator=generator)


def model_row(model: Model, tokens: int) -> tuple[str, tuple[torch.Tensor, torch.Tensor]]:
    """Read a row of a middle layer on a text of this length: what it is, its attention and its values."""
    captured = _captured(model, tokens)
    layer = model.n_layers // 2
    rows = captured.rows([(layer, 0, tokens - 1)])
    seen = rows.visible[0, :tokens].nonzero()[:, 0]
    case = f"{model.name} L{layer}H0, {len(seen)} keys, d_v = {model.d_value}"
    return case, (rows.attention[0, seen], captured.layers[layer].polytopes.values[0, seen])


def text_rows(model: Model, tokens: int) -> Rows:
    """Read all rows of all heads on a text of this length."""
    places = [(i, h, q) for i in range(model.n_layers) for h in range(model.n_heads) for q in range(tokens)]
    return _captured(model, tokens).rows(places)


def _captured(model: Model, tokens: int) -> Captured:
    """Read the sample texts, one after another as one text, cut to this length."""
    together = " ".join(str(part) for pair in sample_texts() for part in pair)
    (encoded,) = model.encode([together], truncate=True, max_tokens=tokens)
    result = effective_attention(model, encoded.ids)
    assert isinstance(result, EffectiveAttention)
    return result.captured()
