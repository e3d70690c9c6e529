"""How long effective attention takes, compared with the model's own forward pass and with the SVD that defines it."""

from functools import partial

import torch
from transformers import BertConfig, BertModel

from identikit.bench.measure import Row, Task, best_seconds, extra_mib, time_rows
from identikit.maths.effective import attention_heads, effective_factors, effective_rows
from identikit.maths.visible import visible_window
from identikit.progress import Progress, silent

LAYERS, HEADS, WIDTH = 12, 12, 64
SVD_HEADS = 3
FORWARD, FACTORS, CAUSAL, MAPS = "forward pass", "factors of all heads", "causal factors of all heads", "all maps"
SVD = f"SVD of every head (from {SVD_HEADS} heads)"
BESIDE = {FACTORS: FORWARD, CAUSAL: FORWARD, MAPS: FORWARD, SVD: MAPS}


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
