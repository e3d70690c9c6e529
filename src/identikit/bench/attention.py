"""How long effective attention takes, beside the model's own forward pass and beside the SVD that defines it.

All times of a row are taken in turn in one process, and the shortest of a few rounds counts. Run it with
``identikit bench attention``.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import BertConfig, BertModel

from identikit.maths.effective import attention_heads, effective_factors, effective_rows
from identikit.maths.visible import visible_window

LAYERS, HEADS, WIDTH = 12, 12, 64
SVD_HEADS = 3


def random_layers(length: int, causal: bool = False) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Attention, values and head output of a BERT-base-shaped stack."""
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
    """Eq. 9 for one head as it is written: all left singular vectors of T, those of the null space projected out."""
    T = values.double() @ projection.double()
    null = torch.linalg.svd(T, full_matrices=True).U[:, min(T.shape[0], WIDTH) :]
    A = attention.double()
    return A - A @ null @ null.mT


def shortest(tasks: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Seconds of each task, all taken in turn, the shortest of some rounds."""
    seconds = dict.fromkeys(tasks, float("inf"))
    for _ in range(rounds):
        for name, task in tasks.items():
            start = time.perf_counter()
            task()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def time_length(length: int, rounds: int = 3) -> dict[str, float]:
    """One row of the table: seconds and ratios at one text length."""
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

    def maps() -> None:  # all of them, one layer at a time
        for _, values, output in plain:
            effective_rows(effective_factors(attention_heads(values, output)))

    def svd() -> None:
        attention, values, _ = plain[0]
        for head in range(SVD_HEADS):
            by_svd(attention[head], values[head], projection[head])

    tasks = {"forward": forward, "factors": factors, "causal_factors": causal_factors, "maps": maps, "svd": svd}
    seconds = shortest(tasks, rounds)
    seconds["svd"] *= LAYERS * HEADS / SVD_HEADS
    return {
        "tokens": length,
        **{f"{name}_s": value for name, value in seconds.items()},
        "factors_of_forward": seconds["factors"] / seconds["forward"],
        "causal_factors_of_forward": seconds["causal_factors"] / seconds["forward"],
        "maps_of_forward": seconds["maps"] / seconds["forward"],
        "maps_faster_than_svd": seconds["svd"] / seconds["maps"],
    }


def peak_memory() -> int:
    """The most memory this process has held, in bytes (Linux)."""
    with Path("/proc/self/status").open() as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def extra_memory(length: int, causal: bool) -> float:
    """MiB that the factors of 12 heads take beyond their inputs, at most."""
    values, output = torch.randn(HEADS, length, WIDTH), torch.randn(HEADS, length, WIDTH)
    visible = visible_window(torch.ones(length, dtype=torch.bool), after=0 if causal else None)
    effective_factors(attention_heads(values[:, :128], output[:, :128]))
    before = peak_memory()
    effective_factors(attention_heads(values, output, visible))
    return (peak_memory() - before) / 2**20


def run(lengths: tuple[int, ...] = (128, 512)) -> list[dict[str, float]]:
    """Time every length, and measure memory at 8,192 tokens in processes of their own."""
    rows = [time_length(length) for length in lengths]
    for causal in (False, True):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            extra = pool.apply(extra_memory, (8192, causal))
        rows.append({"tokens": 8192, f"{'causal_' if causal else ''}factors_extra_mib": extra})
    return rows


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(f"{LAYERS} layers of {HEADS} heads of {WIDTH}, float32 values, {torch.get_num_threads()} threads")
    print(f"svd_s is the literal SVD in float64 of {SVD_HEADS} heads, times {LAYERS * HEADS // SVD_HEADS}")
    for row in run():
        print(f"\n{int(row['tokens'])} tokens")
        for name, value in row.items():
            if name != "tokens":
                print(f"  {name:28s}{value:12.3f}")


if __name__ == "__main__":
    main()
