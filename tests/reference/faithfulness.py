"""Tests of explanations, literally: one text at a time, every order of the sources, scipy's correlation."""

from collections.abc import Callable
from itertools import permutations

import numpy as np
import torch
from scipy.stats import spearmanr

from identikit.models.model import Model


def last_hidden(model: Model, ids: list[int]) -> torch.Tensor:
    """Return the last block's output for one text, from a plain run of the model without a tap."""
    kept = []
    hook = model.blocks[-1].register_forward_hook(
        lambda module, args, output: kept.append(output[0] if isinstance(output, tuple) else output)
    )
    try:
        with torch.no_grad():
            model.hf(input_ids=torch.tensor([ids]))
    finally:
        hook.remove()
    return kept[0][0]


def change(model: Model, ids: list[int], instead: list[int], replaced: frozenset[int], output: int) -> float:
    """Return how far an output's hidden vector moves when these tokens are replaced, by its own length."""
    before = last_hidden(model, ids)[output]
    after = last_hidden(model, [instead[at] if at in replaced else token for at, token in enumerate(ids)])[output]
    return float((after - before).norm() / before.norm())


def drop(model: Model, ids: list[int], instead: list[int], replaced: frozenset[int]) -> float:
    """Return how much of the probability of its own next token a causal model loses when these tokens are replaced."""
    texts = [ids, [instead[at] if at in replaced else token for at, token in enumerate(ids)]]
    with torch.no_grad():
        before, after = (model.hf(input_ids=torch.tensor([each])).logits[0, -1].softmax(-1) for each in texts)
    return float(before.max() - after[before.argmax()])


def curve(changed: Callable[[frozenset[int]], float], order: list[int]) -> list[float]:
    """Return the change of the first source of an order, of the first two, and so on."""
    return [changed(frozenset(order[: k + 1])) for k in range(len(order))]


def best_and_worst(changed: Callable[[frozenset[int]], float], sources: list[int]) -> tuple[float, float]:
    """Return the greatest and the least mean of a curve over all orders there are."""
    areas = [np.mean(curve(changed, list(order))) for order in permutations(sources)]
    return float(max(areas)), float(min(areas))


def deletion(changed: Callable[[frozenset[int]], float], scores: dict[int, float]) -> float:
    """Return the mean of the curve from the largest score on, between the best and the worst."""
    best, worst = best_and_worst(changed, list(scores))
    order = sorted(scores, key=lambda source: (-scores[source], source))
    return (float(np.mean(curve(changed, order))) - worst) / (best - worst)


def insertion(changed: Callable[[frozenset[int]], float], scores: dict[int, float]) -> float:
    """Return how much of the change is undone by putting back the largest sources first, between best and worst.

    The change that is left is averaged over 0, 1, … and all but one source put back.
    """
    best, worst = best_and_worst(changed, list(scores))
    order = sorted(scores, key=lambda source: (-scores[source], source))
    left = [changed(frozenset(order[k:])) for k in range(len(order))]
    return (best - float(np.mean(left))) / (best - worst)


def correlation(first: dict[int, float], second: dict[int, float]) -> float:
    """Return Spearman's rank correlation of two scores of the same sources."""
    return float(spearmanr(list(first.values()), [second[source] for source in first]).statistic)
