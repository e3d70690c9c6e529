"""How long exact attribution takes, beside plain forward mode and one backward pass per output number.

    identikit bench attribution                      CPU: MiniLM, 24 tokens, ratios to the two plain ways
    identikit bench attribution --device cuda        GPU: BERT-base shapes, 58 tokens, precisions, growth
    identikit bench attribution --device cuda --mrpc mrpc_dev.tsv [--model FOLDER]    a whole dataset

The plain ways are timed on a sample and multiplied up (both are sums of equal parts); a half of the sample is timed
before the sweep and a half after it. Needs torch, transformers, numpy and safetensors alone.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.func import jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import BertConfig, BertModel

from identikit.attribution import sweep
from identikit.attribution.attribute import mixing, plan, token_attribution
from identikit.attribution.sweep import Request
from identikit.machine import PRECISIONS, product_rate
from identikit.maths.jacobian import contributions
from identikit.models.load import load
from identikit.models.model import Model
from identikit.text import TokenBatch, collate

TEXT = (
    "The committee said on Tuesday that it would publish its long report before the end of the year , after many delays"
)
SMALLEST = 1e-4  # contributions below this are left out of relative errors


def run(device: str = "cpu", *, mrpc: str | None = None, model: str | None = None) -> dict[str, Any]:
    """Run what fits the device, and give the figures, ready for JSON."""
    warnings.filterwarnings("ignore", message="token_attribution")
    about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "device": device}
    if device != "cpu":
        about["device"] = torch.cuda.get_device_name()
    if mrpc is not None:
        read = load(model, device=device)
        return about | {"mrpc": {each: whole_dataset(read, Path(mrpc), each) for each in ("bfloat16", "tf32")}}
    if device == "cpu":
        return about | {"minilm": against_the_plain_ways(load(model))}
    return about | {
        "bert_base_58": precisions(bert_base(device), 58),
        "by_tokens": [growth(bert_base(device), n) for n in (16, 32, 58, 96, 128)],
        "by_layers": [growth(bert_base(device, layers), 58) for layers in (3, 6, 12)],
    }


def bert_base(device: str, layers: int = 12) -> Model:
    """Return BERT-base with random weights: times do not depend on them."""
    torch.manual_seed(0)
    model = BertModel(BertConfig(num_hidden_layers=layers)).eval()
    return Model(model.to(torch.device(device)), None, name="bert-base shapes")  # pyright: ignore[reportArgumentType]


def exactly(model: Model, precision: str = "full") -> Request:
    """Ask for everything: all layers, all pairs, all directions."""
    return Request(tuple(range(model.n_layers)), None, "frobenius", None, 0, False, precision)


def contributions_of(model: Model, batch: TokenBatch, precision: str = "full") -> torch.Tensor:
    """Return the exact contributions of one text, planned and swept."""
    request = exactly(model, precision)
    return contributions(plan(model, batch.keep.shape[1], request).run(model, batch, request, lambda count: None))


def relative_errors(found: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Return the largest and the median relative error, of contributions that are not tiny."""
    errors = ((found - exact).abs() / exact)[exact >= SMALLEST]
    return float(errors.max()), float(errors.median())


def seconds(task: Callable[[], Any]) -> float:
    """Return how long a task takes, until the device has done it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    task()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


# On a CPU, against the plain ways


def against_the_plain_ways(model: Model, inputs: int = 8, outputs: int = 8) -> dict[str, Any]:
    """Time the sweep, forward mode for some inputs, and a backward pass for a few output numbers of each layer."""
    batch = collate(model.encode(TEXT), pad_id=model.pad_id)
    n, d = batch.keep.shape[1], model.d_model
    hidden, x = hidden_states(model, batch)
    forward_mode(hidden, x, range(1))  # torch prepares itself
    one_backward_each(hidden, x, range(1))
    step = 2 * n * d // outputs

    chunked = [seconds(lambda: forward_mode(hidden, x, range(1)))]
    backward = [seconds(lambda: one_backward_each(hidden, x, range(0, n * d, step)))]
    exact = contributions_of(model, batch)
    sweep_s = seconds(lambda: contributions_of(model, batch))
    chunked.append(seconds(lambda: forward_mode(hidden, x, range(1, 2))))
    backward.append(seconds(lambda: one_backward_each(hidden, x, range(1, n * d, step))))
    low_s = seconds(lambda: contributions_of(model, batch, "bfloat16"))
    at_once = seconds(lambda: forward_mode(hidden, x, range(inputs)))
    found = {
        "vmap_jvp": at_once * n / inputs,
        "vmap_jvp_in_chunks": sum(chunked) * n / 2,
        "one_backward_each": sum(backward) * n * d / outputs,
    }
    return {
        "model": model.name,
        "tokens": n,
        "sweep_s": sweep_s,
        "sweep_in_bfloat16_s": low_s,
        "bfloat16_largest_relative_error": relative_errors(contributions_of(model, batch, "bfloat16"), exact)[0],
        **{f"{name}_s": taken for name, taken in found.items()},
        **{f"faster_than_{name}": taken / sweep_s for name, taken in found.items()},
        "sampled": {
            "vmap_jvp": f"{inputs} of {n} inputs, all their tangents in one call, as jacfwd does it",
            "vmap_jvp_in_chunks": f"2 of {n} inputs, one in each call",
            "one_backward_each": f"{outputs} of {n * d} numbers of each layer",
        },
    }


def hidden_states(model: Model, batch: TokenBatch) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    """Return the stock model as a function from the embedding sum to hidden states (layer, token, feature), and x."""
    x = model.trace(batch).inputs
    norm: Any = model.hf.base_model.embeddings.LayerNorm  # pyright: ignore[reportAttributeAccessIssue]
    arguments = model.arguments(batch)

    def hidden(vectors: torch.Tensor) -> torch.Tensor:
        hook = norm.register_forward_pre_hook(lambda module, args: (vectors,))
        try:
            return torch.cat(model.hf(**arguments, output_hidden_states=True).hidden_states[1:])
        finally:
            hook.remove()

    return hidden, x


def forward_mode(hidden: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, places: range) -> None:
    """Push all tangents of some inputs through the whole model in one call."""
    _, n, d = x.shape
    tangents = torch.eye(n * d).view(n, d, 1, n, d)[list(places)].flatten(0, 1)
    with warnings.catch_warnings(), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        warnings.simplefilter("ignore", DeprecationWarning)
        vmap(lambda tangent: jvp(hidden, (x,), (tangent,))[1])(tangents)


def one_backward_each(hidden: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, numbers: range) -> None:
    """Go backward from each of some numbers of every layer's output."""
    leaf = x.clone().requires_grad_()
    for layer in hidden(leaf):
        for number in numbers:
            torch.autograd.grad(layer.flatten()[number], leaf, retain_graph=True)


# On a GPU, against its own matrix rate


def precisions(model: Model, n: int) -> dict[str, Any]:
    """Time each precision after a warm-up, and compare its contributions with float32's."""
    batch = model.sample((n,))
    exact = contributions_of(model, batch)
    return {precision: in_precision(model, batch, precision, exact) for precision in PRECISIONS}


def in_precision(model: Model, batch: TokenBatch, precision: str, exact: torch.Tensor) -> dict[str, float]:
    """Time one precision, with and without the sweep itself."""
    torch.cuda.reset_peak_memory_stats()
    largest, median = relative_errors(contributions_of(model, batch, precision), exact)
    taken = min(seconds(lambda: contributions_of(model, batch, precision)) for _ in range(3))
    rate = product_rate(model.device, model.dtype, precision)
    return {
        "seconds": taken,
        "of_which_preparation": min(seconds(lambda: prepare(model, batch, precision)) for _ in range(3)),
        "of_matrix_rate": operations(model, batch.keep.shape[1]) / taken / rate,
        "matrix_tflops": rate / 1e12,
        "largest_relative_error": largest,
        "median_relative_error": median,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def prepare(model: Model, batch: TokenBatch, precision: str) -> None:
    """Compute every layer's derivative, as the sweep does first."""
    with model.split(batch) as split, sweep.forward_mode(), sweep.products(precision):
        for block in split.blocks:
            sweep.block_derivative(block)


def operations(model: Model, n: int) -> float:
    """Count the arithmetic of the sweep's large products; in the first layer tangents live at their own token alone."""
    d, heads, d_v = model.d_model, model.n_heads, model.d_value
    folded = n * heads * (d - d_v) < d * d
    read = d * (n * heads if folded else d) + (0 if folded else n * heads * d_v) + d * d
    mixed, written = 2 * n * d, d * d
    per_tangent = (model.n_layers - 1) * (read + mixed + 2 * written) + written
    return 2.0 * n * (n * d) * per_tangent


def growth(model: Model, n: int) -> dict[str, float]:
    """Time one text length and depth, in TF32."""
    batch = model.sample((n,))
    contributions_of(model, batch, "tf32")
    taken = min(seconds(lambda: contributions_of(model, batch, "tf32")) for _ in range(2))
    rate = product_rate(model.device, model.dtype, "tf32")
    share = operations(model, n) / taken / rate
    return {"tokens": n, "layers": model.n_layers, "seconds": taken, "of_matrix_rate": share}


def whole_dataset(model: Model, file: Path, precision: str) -> dict[str, Any]:
    """Attribute every pair of MRPC's development set; give the time, and own contribution and P̃ by layer."""
    lines = file.read_text(encoding="utf-8-sig").splitlines()[1:]
    pairs = [(cells[3], cells[4]) for cells in (line.split("\t") for line in lines)]
    token_attribution(model, pairs[0], precision=precision)
    started = time.perf_counter()
    results = token_attribution(model, pairs, precision=precision)
    taken = time.perf_counter() - started
    statistics = mixing(results)
    return {
        "model": model.name,
        "pairs": len(pairs),
        "tokens": statistics.tokens,
        "seconds": taken,
        "own_quartiles": statistics.own_quartiles().tolist(),
        "outweighed_share": statistics.outweighed_share().tolist(),
    }


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mrpc", help="MRPC's development file: attribute all of it")
    parser.add_argument("--model", help="a folder, where the packaged MiniLM is not installed")
    given = parser.parse_args()
    print(json.dumps(run(given.device, mrpc=given.mrpc, model=given.model), indent=2))


if __name__ == "__main__":
    main()
