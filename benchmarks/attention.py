"""How long effective attention takes, compared with the model's own forward pass and with the SVD that defines it."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import BertConfig, BertModel

from benchmarks.measure import Row, Task, best_seconds, cuda_peak_gib, extra_mib, seconds, time_rows
from benchmarks.shapes import Shape, made_up_llama, shape_of
from identikit.attention.effective import effective_attention
from identikit.attention.result import EffectiveAttention
from identikit.checks import shortened
from identikit.errors import InputError
from identikit.maths import linalg
from identikit.maths.effective import Heads, attention_heads, effective_factors, effective_rows
from identikit.maths.visible import visible_window
from identikit.progress import Progress, silent

LAYERS, HEADS, WIDTH = 12, 12, 64
SVD_HEADS = 3
FORWARD, FACTORS, CAUSAL, MAPS = "forward pass", "factors of all heads", "causal factors of all heads", "all maps"
SVD = f"SVD of every head (from {SVD_HEADS} heads)"
BESIDE = {FACTORS: FORWARD, CAUSAL: FORWARD, MAPS: FORWARD, SVD: MAPS}
SAMPLED = 64
EFFECTIVE, READ = "effective attention of all layers", "its ranks and residual"
FIRST, LATER = "factors of a first layer", "factors of a later layer"
BY_ROW = f"a first layer row by row (from {SAMPLED} rows)"
LLM_BESIDE = {EFFECTIVE: FORWARD, READ: FORWARD, FIRST: LATER, BY_ROW: FIRST}


def run(
    lengths: tuple[int, ...] = (128, 512),
    *,
    memory_tokens: int = 8192,
    repeats: int = 3,
    progress: Progress = silent,
) -> list[Row]:
    """Time BERT-base shapes at each length, and measure memory at another one.

    Values are random, and maps are made one layer at a time without keeping them.
    """
    rows = []
    for done, length in enumerate(lengths):
        progress("attention", done, len(lengths) + 1)
        rows += time_length(length, repeats)
    progress("attention", len(lengths), len(lengths) + 1)
    for what, causal in ((FACTORS, False), (CAUSAL, True)):
        extra = extra_mib(large_layer, memory_tokens, causal)
        rows.append(Row(f"{memory_tokens} tokens", f"{what} of a layer, extra memory", extra, "MiB"))
    progress("attention", len(lengths) + 1, len(lengths) + 1)
    return rows


def time_length(length: int, repeats: int) -> list[Row]:
    """Time everything at one text length."""
    bert = BertModel(BertConfig(max_position_embeddings=max(512, length)), add_pooling_layer=False).eval()
    tokens = torch.randint(1000, 20000, (1, length))
    projection = torch.randn(HEADS, WIDTH, HEADS * WIDTH) / 8
    plain, masked = random_layers(length), random_layers(length, causal=True)
    causal = visible_window(torch.ones(length, dtype=torch.bool), after=0)

    @torch.no_grad()
    def forward() -> None:
        bert(input_ids=tokens)

    def factors() -> None:
        for _, values, output in plain:
            effective_factors(attention_heads(values, output))

    def causal_factors() -> None:
        for _, values, output in masked:
            effective_factors(attention_heads(values, output, causal))

    def maps() -> None:
        for _, values, output in plain:
            effective_rows(effective_factors(attention_heads(values, output)))

    def svd() -> None:
        attention, values, _ = plain[0]
        for head in range(SVD_HEADS):
            by_svd(attention[head], values[head], projection[head])

    tasks = {FORWARD: forward, FACTORS: factors, CAUSAL: causal_factors, MAPS: maps, SVD: svd}
    taken = best_seconds(tasks, repeats=repeats)
    taken[SVD] *= LAYERS * HEADS / SVD_HEADS
    return time_rows(f"{length} tokens", taken, BESIDE)


def random_layers(length: int, causal: bool = False) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Make attention, values and head output of a stack of BERT-base's shape."""
    generator = torch.Generator().manual_seed(0)
    layers = []
    for _ in range(LAYERS):
        scores = 2 * torch.randn(HEADS, length, length, generator=generator)
        if causal:
            scores.masked_fill_(~torch.ones(length, length, dtype=torch.bool).tril(), -torch.inf)
        attention = scores.softmax(-1)
        values = torch.randn(HEADS, length, WIDTH, generator=generator)
        layers.append((attention, values, attention @ values))
    return layers


def by_svd(attention: torch.Tensor, values: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """Compute Eq. 9 for one head as it is written: project out the left singular vectors of T in its null space."""
    T = values.double() @ projection.double()
    null = torch.linalg.svd(T, full_matrices=True).U[:, min(T.shape[0], WIDTH) :]
    A = attention.double()
    return A - A @ null @ null.mT


def large_layer(length: int, causal: bool) -> Task:
    """Make the values and head outputs of a layer, and return the task that computes their factors."""
    values, output = torch.randn(HEADS, length, WIDTH), torch.randn(HEADS, length, WIDTH)
    visible = visible_window(torch.ones(length, dtype=torch.bool), after=0 if causal else None)
    effective_factors(attention_heads(values[:, :128], output[:, :128]))
    return partial(effective_factors, attention_heads(values, output, visible))


# LLM shapes


@dataclass(frozen=True)
class Llm:
    """Which LLM's shape to measure, at which lengths, in which number format, where, and how much of it."""

    shape: str = "8b"
    tokens: tuple[int, ...] = (512, 2048)
    dtype: str = "bfloat16"
    device: str = "cpu"
    layers: int | None = None
    repeats: int = 3

    @property
    def format(self) -> torch.dtype:
        """The number format itself."""
        known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
        if self.dtype not in known:
            raise InputError(
                f"Measuring attention: the dtype {shortened(self.dtype)} is not known. Use {', '.join(known)}."
            )
        return known[self.dtype]


def run_llm(options: Llm, *, progress: Progress = silent) -> list[Row]:
    """Time effective attention of a made-up LLM, and the factors of layers whose values have an LLM's spectrum.

    Values of random weights are well conditioned, and those of real models are not: so layers are made up too.
    """
    sizes, rows = shape_of(options.shape), []
    progress("attention", 0, 2 * len(options.tokens))
    model = made_up_llama(options.shape, dtype=options.format, device=options.device, layers=options.layers)
    name = f"{options.shape}, {model.n_layers} layers, {options.dtype}"
    for done, length in enumerate(options.tokens):
        case = f"{name}, {length} tokens"
        batch = model.sample((length,))
        ids = torch.randint(sizes.vocabulary, (length,), generator=torch.Generator().manual_seed(0)).tolist()
        tasks: dict[str, Task] = {
            FORWARD: partial(model.trace, batch),
            EFFECTIVE: partial(effective_attention, model, ids),
        }
        taken = best_seconds(tasks, repeats=options.repeats)
        taken[READ] = seconds(partial(read, effective_attention(model, ids)))[0]
        progress("attention", 2 * done + 1, 2 * len(options.tokens))
        taken |= best_seconds(layer_tasks(sizes, length, options), repeats=options.repeats)
        taken[BY_ROW] *= length / min(length, SAMPLED)
        rows += time_rows(case, taken, LLM_BESIDE)
        if options.device != "cpu":
            rows.append(Row(case, "peak GPU memory", cuda_peak_gib(tasks[EFFECTIVE]), "GiB"))
        progress("attention", 2 * done + 2, 2 * len(options.tokens))
    return rows


def read(found: EffectiveAttention) -> tuple[torch.Tensor, torch.Tensor]:
    """Read what has no map in it."""
    return found.null_dim, found.residual


def layer_tasks(sizes: Shape, length: int, options: Llm) -> dict[str, Task]:
    """Return the tasks that compute the factors of a first and of a later layer, and some rows of the first alone."""
    first, later = (made_up_layer(sizes, length, options, repeated) for repeated in (True, False))
    some = torch.linspace(0, length - 1, min(length, SAMPLED)).long().to(first.values.device)

    def by_row() -> None:
        V, right = first.values.double(), first.output.double().unflatten(0, (len(first.values), -1))
        seen = first.visible.block(some, first.visible.keys)
        linalg.rowwise_solve(V, right[:, :, some], seen, linalg.Resolution(first.eps))

    return {LATER: partial(effective_factors, later), FIRST: partial(effective_factors, first), BY_ROW: by_row}


def made_up_layer(sizes: Shape, length: int, options: Llm, repeated: bool) -> Heads:
    """Make values and causal head outputs of a layer whose singular values fall as those of trained models do.

    Tokens are drawn by Zipf's law. `repeated`: equal tokens have equal values, as in a first layer without positions in
    its inputs; otherwise a third of each value is its own. A head's attention is a random weight per key, normalised.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.multinomial(1 / torch.arange(1, 5001), length, replacement=True, generator=generator)
    values = torch.randn(5000, sizes.kv_heads, sizes.d_value, generator=generator)[tokens].transpose(0, 1)
    if not repeated:
        values = values + torch.randn(values.shape, generator=generator) / 3
    falling = torch.arange(1, sizes.d_value + 1) ** -0.6
    values = (values * falling).to(options.device, options.format)
    weights = torch.rand(sizes.heads, length, 1, generator=generator).to(options.device).square()
    wide = values.float().repeat_interleave(sizes.heads // sizes.kv_heads, 0)
    output = (weights * wide).cumsum(1) / weights.cumsum(1)
    causal = visible_window(torch.ones(length, dtype=torch.bool, device=options.device), after=0)
    return replace(attention_heads(values, output, causal), eps=torch.finfo(torch.float32).eps)
