"""How long the exact intervals of one attention row take, compared with `scipy.optimize.linprog` for each end."""

import numpy as np
import torch
from scipy.optimize import linprog

from identikit.bench.measure import Row, best_seconds, time_rows
from identikit.data import sample_texts
from identikit.maths import intervals as polytope
from identikit.models.load import load
from identikit.progress import Progress, silent
from identikit.text import collate

IDENTIKIT, LINPROG, PREDICTED = "identikit", "linprog per end", "identikit, predicted"
TOLERANCES = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
LAYER, HEAD, QUERY = 3, 0, 20


def run(
    shapes: tuple[tuple[int, int], ...] = ((130, 32), (128, 64)),
    *,
    model: str | None = None,
    repeats: int = 3,
    progress: Progress = silent,
) -> list[Row]:
    """Time random rows of these numbers of keys and value dimensions, and one row of a model."""
    cases = [(f"random, {n} keys, d_v = {d_v}", *random_row(n, d_v)) for n, d_v in shapes]
    cases.append(model_row(model))
    rows = []
    for done, case in enumerate(cases):
        progress("intervals", done, len(cases))
        rows += compare(*case, repeats)
    progress("intervals", len(cases), len(cases))
    return rows


def compare(case: str, attention: torch.Tensor, values: torch.Tensor, repeats: int) -> list[Row]:
    """Time both ways on one row, and compare their answers."""
    found, expected = polytope.intervals(attention, values), linprog_intervals(attention, values)
    tasks = {
        IDENTIKIT: lambda: polytope.intervals(attention, values),
        LINPROG: lambda: linprog_intervals(attention, values),
    }
    taken = best_seconds(tasks, repeats=repeats, warm_up=0)
    taken[PREDICTED] = polytope.predicted_seconds(1, *values.shape)
    differences = (np.abs(end.numpy() - other).max() for end, other in zip(found, expected, strict=True))
    return [
        *time_rows(case, taken, {LINPROG: IDENTIKIT, PREDICTED: IDENTIKIT}),
        Row(case, "largest difference of an end", float(max(differences))),
        Row(case, "certain mass", found.certain_mass),
    ]


def linprog_intervals(attention: torch.Tensor, values: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Compute both ends of every key's interval, each by a linear program of its own."""
    weights = attention.double().numpy()
    weights = weights / weights.sum()
    matrix = np.concatenate([values.double().numpy(), np.ones((len(weights), 1))], axis=1).T
    ends = np.empty((2, len(weights)))
    for key in range(len(weights)):
        for end, sense in enumerate((1.0, -1.0)):
            cost = np.zeros(len(weights))
            cost[key] = sense
            found = linprog(cost, A_eq=matrix, b_eq=matrix @ weights, method="highs", options=TOLERANCES)
            ends[end, key] = found.x[key]
    return ends[0], ends[1]


def random_row(n: int, d_v: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a row of attention and its values."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, generator=generator).mul(2).softmax(dim=0), torch.randn(n, d_v, generator=generator)


def model_row(name: str | None) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Read a row of a model on the longest sample text: what it is, its attention and its values."""
    model = load(name)
    text = max(sample_texts(), key=lambda pair: len(" ".join(map(str, pair))))
    batch = collate(model.encode(text, truncate=True), pad_id=model.pad_id)
    layer = min(LAYER, model.n_layers - 1)
    with torch.no_grad(), model.split(batch) as split:
        call = split.blocks[layer].call
        visible = slice(QUERY + 1) if model.causal else slice(None)
        attention, values = call.weights()[0, HEAD, QUERY, visible], call.value[0, HEAD, visible]
    case = f"{model.name} L{layer}H{HEAD}, {len(attention)} keys, d_v = {model.d_value}"
    return case, attention, values
