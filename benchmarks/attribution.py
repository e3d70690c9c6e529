"""How long exact attribution takes, compared with forward mode and with one backward pass per output number.

On a CPU: a model on a text of 24 tokens. On a GPU: an encoder's shape (BERT-base, or MiniLM) in each precision, by
text length and by depth. With texts: how long a whole dataset takes. With an LLM's shape and made-up weights: time and
memory as planned and as measured. The plain ways are timed on a sample and scaled up, since both are sums of
equal parts; half of the sample is timed before the sweep and half after it. Needs only torch, transformers, numpy and
safetensors.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.func import jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measure import Row, best_seconds, cuda_peak_gib, seconds, time_rows
from benchmarks.shapes import BERTS, made_up_bert, made_up_llama
from identikit.attribution import tangents
from identikit.attribution.attribute import token_attribution
from identikit.attribution.derivative import agreeing_rows, block_derivatives
from identikit.attribution.plan import expected_seconds, make_plan
from identikit.attribution.request import AttributionOptions, Request
from identikit.maths.jacobian import contributions, is_folding_cheaper
from identikit.models.load.load import load
from identikit.models.machine import PRECISIONS, product_precision, product_rate
from identikit.models.model import Model
from identikit.models.text_run import TextRun
from identikit.progress import Progress, silent
from identikit.texts.data import read_texts
from identikit.texts.text import TokenBatch, collate

TEXT = (
    "The committee said on Tuesday that it would publish its long report before the end of the year , after many delays"
)
SMALLEST = 1e-4  # contributions below this are left out of relative errors
SWEEP, AT_ONCE, ONE_BY_ONE, BACKWARD = "sweep", "vmap(jvp)", "vmap(jvp), one input at a time", "one backward pass each"


@dataclass(frozen=True)
class Options:
    """What to measure.

    - `device`: cpu, or a GPU such as cuda; `model`: a hub id or a folder, None for the packaged MiniLM
    - `data`, `data_dir`: texts to attribute, all of them, as `read_texts` takes them; None for no dataset
    - `samples`: on a CPU, how many inputs and how many numbers per layer the plain ways are timed on; an even number
    - `tokens`, `depths`: on a GPU, text lengths (the first in each precision) and numbers of layers; None: its own
    - `shape`, `probes`: a shape (see `bench.shapes`); of an LLM, exact or with so many random directions
    - `repeats`: how often each precision is timed
    """

    device: str = "cpu"
    model: str | None = None
    data: str | None = None
    data_dir: str | None = None
    samples: int = 8
    tokens: tuple[int, ...] = (58, 16, 32, 96, 128)
    depths: tuple[int | None, ...] = (None, 3, 6)
    repeats: int = 3
    shape: str | None = None
    probes: int | None = None


def run(options: Options, *, progress: Progress = silent) -> list[Row]:
    """Measure a dataset if there is one, else what fits the device."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Attribution takes")  # how long it will take is what is measured
        if options.shape is not None and options.shape not in BERTS:
            return of_shape(made_up_llama(options.shape, device=options.device), options, progress)
        if options.data is not None:
            return whole_dataset(load(options.model, device=options.device), options, progress)
        if options.device == "cpu" and options.shape is None:
            return against_the_plain_ways(load(options.model), TEXT, options.samples)
        return on_a_gpu(options, progress)


def exactly(model: Model, precision: str = "full") -> Request:
    """Ask for everything: all layers, all pairs, all directions."""
    return AttributionOptions(precision=precision).checked(model)


def contributions_of(model: Model, batch: TokenBatch, precision: str = "full") -> torch.Tensor:
    """Return the exact contributions of one text, planned and swept."""
    request, reading = exactly(model, precision), TextRun(model, batch, "", {}, {}, None)
    (found,) = make_plan(model, batch.keep.shape[1], request).run([reading], [request], lambda count: None)
    return contributions(found)


def error_rows(case: str, found: torch.Tensor, exact: torch.Tensor) -> list[Row]:
    """Return the largest and the median relative error of the contributions that are not tiny."""
    errors = ((found - exact).abs() / exact)[exact >= SMALLEST]
    above = f"relative error above {SMALLEST:g}"
    return [Row(case, f"largest {above}", float(errors.max())), Row(case, f"median {above}", float(errors.median()))]


# On a CPU, compared with the plain ways


def against_the_plain_ways(model: Model, text: str, samples: int = 8) -> list[Row]:
    """Time the sweep, forward mode for some inputs, and backward passes for a few output numbers of each layer."""
    batch = collate(model.encode(text), pad_id=model.pad_id)
    n, d = batch.keep.shape[1], model.d_model
    inputs, step = min(samples, n), 2 * n * d // samples
    hidden, x = hidden_states(model, batch)
    forward_mode(hidden, x, range(1))  # the first call is slower
    one_backward_each(hidden, x, range(1))
    exact = contributions_of(model, batch)

    halves = [_plain_seconds(hidden, x, 0, step)]
    swept = seconds(lambda: contributions_of(model, batch))[0]
    halves.append(_plain_seconds(hidden, x, 1, step))
    low, rounded = seconds(lambda: contributions_of(model, batch, "bfloat16"))
    at_once = seconds(lambda: forward_mode(hidden, x, range(inputs)))[0]
    case, half = f"{model.name}, {n} tokens", "sweep in bfloat16"
    taken = {
        SWEEP: swept,
        half: low,
        AT_ONCE: at_once * n / inputs,
        ONE_BY_ONE: sum(forward for forward, _ in halves) * n / 2,
        BACKWARD: sum(backward for _, backward in halves) * n * d / samples,
    }
    rows = time_rows(case, taken, dict.fromkeys((half, AT_ONCE, ONE_BY_ONE, BACKWARD), SWEEP))
    return rows + error_rows(f"{case}, bfloat16", rounded, exact)


def _plain_seconds(hidden: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, first: int, step: int) -> Any:
    """Time one input in forward mode, and every `step`-th number of each layer backward, both from `first` on."""
    numbers = range(first, x.shape[1] * x.shape[2], step)
    forward = seconds(lambda: forward_mode(hidden, x, range(first, first + 1)))[0]
    return forward, seconds(lambda: one_backward_each(hidden, x, numbers))[0]


def hidden_states(model: Model, batch: TokenBatch) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    """Return the stock model as a function from the embedding sum x to hidden states (layer, token, feature), and x."""
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
    """Run a backward pass from each of some numbers of every layer's output."""
    leaf = x.clone().requires_grad_()
    for layer in hidden(leaf):
        for number in numbers:
            torch.autograd.grad(layer.flatten()[number], leaf, retain_graph=True)


# On a GPU, compared with its own matrix rate


def on_a_gpu(options: Options, progress: Progress) -> list[Row]:
    """Time an encoder's shape in every precision at one length and depth, and the others in bfloat16."""
    made = partial(made_up_bert, options.shape or "bert-base", device=options.device)
    length, depth = options.tokens[0], options.depths[0]
    others = [(n, depth) for n in options.tokens[1:]] + [(length, layers) for layers in options.depths[1:]]
    progress("attribution", 0, 1 + len(others))
    rows = precisions(made(layers=depth), length, options.repeats)
    for done, (n, layers) in enumerate(others, start=1):
        progress("attribution", done, 1 + len(others))
        model = made(layers=layers)
        rows += in_precision(model, model.sample((n,)), "bfloat16", options.repeats)
    progress("attribution", 1 + len(others), 1 + len(others))
    return rows


def precisions(model: Model, n: int, repeats: int) -> list[Row]:
    """Time each precision, and compare its contributions with those in full precision."""
    batch = model.sample((n,))
    exact, rows = contributions_of(model, batch), []
    for precision in PRECISIONS:
        rows += in_precision(model, batch, precision, repeats)
        if precision != "full":
            rows += error_rows(rows[-1].case, contributions_of(model, batch, precision), exact)
    return rows


def in_precision(model: Model, batch: TokenBatch, precision: str, repeats: int) -> list[Row]:
    """Time one precision: the whole, its preparation, and the share of the machine's matrix rate that it reaches."""
    n = batch.keep.shape[1]
    case = f"{model.name}, {model.n_layers} layers, {n} tokens, {precision}"
    planned = make_plan(model, n, exactly(model, precision)).peak / 2**30
    before = torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    peak = cuda_peak_gib(lambda: contributions_of(model, batch, precision)) - before
    tasks = {
        "attribution": lambda: contributions_of(model, batch, precision),
        "preparation": lambda: prepare(model, batch, precision),
    }
    taken = best_seconds(tasks, repeats=repeats)
    rate, reached = product_rate(model.device, model.dtype, precision), operations(model, n) / taken["attribution"]
    rows = [
        *time_rows(case, taken, {"preparation": "attribution"}),
        Row(case, "matrix rate", rate / 1e12, "TFLOP/s"),
        Row(case, "attribution's rate", reached / 1e12, "TFLOP/s", reached / rate, "matrix rate"),
        Row(case, "planned memory", planned, "GiB"),
    ]
    if model.device.type == "cuda":
        rows.append(Row(case, "peak GPU memory", peak, "GiB", peak / planned, "planned memory"))
    return rows


def prepare(model: Model, batch: TokenBatch, precision: str) -> None:
    """Compute every layer's derivative, as the sweep does first."""
    dtype = torch.bfloat16 if precision == "bfloat16" else model.dtype
    rounded = "full" if precision == "full" else "tf32"
    with model.split(batch) as split, tangents.forward_mode(), product_precision(rounded):
        for block, agree in zip(split.blocks, agreeing_rows(split.blocks), strict=True):
            block_derivatives(block, [batch.keep.shape[1]], agree=agree, dtype=dtype)


def operations(model: Model, n: int) -> float:
    """Count the arithmetic of the sweep's large products; in the first layer a tangent lives only at its own token."""
    d, heads, kv_heads, d_v = model.d_model, model.n_heads, model.n_key_value_heads, model.d_value
    outputs, folded = heads * d_v, is_folding_cheaper(n, d, (heads, d_v), kv_heads)
    read = d * (n * heads if folded else kv_heads * d_v) + (0 if folded else n * outputs) + d * kv_heads * d_v
    mixed, pairs = 2 * n * outputs, n * (n + 1) / 2 if model.causal else n * n
    per_pair = (model.n_layers - 1) * (read + mixed + d * outputs + d * d) + mixed + d * outputs
    return 2.0 * pairs * d * per_pair


# An LLM of a given shape


def of_shape(model: Model, options: Options, progress: Progress) -> list[Row]:
    """Attribute texts of each length once: time and peak memory beside the model's own, planned and measured."""
    request = exactly(model)
    how = "exact"
    if options.probes is not None:
        request = replace(request, probes=options.probes)
        how = f"{options.probes} probes"
    rows: list[Row] = []
    for done, n in enumerate(options.tokens):
        progress("attribution", done, len(options.tokens))
        _attribute_once(model, n, request)  # the first time loads the products of this size
        ahead = expected_seconds(model, [n], request)
        way = make_plan(model, n, request)
        case = f"{model.name}, {model.n_layers} layers, {n} tokens, {how}"
        before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        taken, peak = seconds(partial(cuda_peak_gib, partial(_attribute_once, model, n, request)))
        rows += time_rows(case, {"planned": ahead, way.engine: taken}, {way.engine: "planned"})
        rows.append(Row(case, "planned memory", way.peak / 2**30, "GiB"))
        if torch.cuda.is_available():
            rate, reached = product_rate(model.device, model.dtype, "full"), operations(model, n) / taken
            rows.append(Row(case, "matrix rate", rate / 1e12, "TFLOP/s"))
            if request.exact:
                rows.append(Row(case, "attribution's rate", reached / 1e12, "TFLOP/s", reached / rate, "matrix rate"))
            found = peak - before / 2**30
            rows.append(Row(case, "peak GPU memory", found, "GiB", found / (way.peak / 2**30), "planned memory"))
    progress("attribution", len(options.tokens), len(options.tokens))
    return rows


def _attribute_once(model: Model, n: int, request: Request) -> None:
    reading = TextRun(model, model.sample((n,)), "", {}, {}, None)
    make_plan(model, n, request).run([reading], [request], lambda count: None)


# A whole dataset


def whole_dataset(model: Model, options: Options, progress: Progress) -> list[Row]:
    """Time the attribution of every text, on a GPU in both reduced precisions."""
    texts = list(read_texts(options.data or "", data_dir=options.data_dir))
    tokens, taken = sum(len(one) for one in model.encode(texts)), {}
    for precision in ("full",) if model.device.type == "cpu" else ("bfloat16", "tf32"):
        told = f"attribution in {precision}"
        attribute = partial(
            token_attribution,
            model,
            precision=precision,
            progress=lambda *counted, told=told: progress(told, *counted[-2:]),
        )
        attribute(texts[0])  # warm up
        taken[told] = seconds(partial(attribute, texts))[0]
    return time_rows(f"{model.name}, {len(texts)} texts, {tokens} tokens", taken, {})
