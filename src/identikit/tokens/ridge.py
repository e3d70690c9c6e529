"""The linear map in closed form: ridge regression for all folds from the Gram matrices of 20 blocks of sentences."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from identikit.maths.neighbours import distinct, nearest_in_sentences, paired_distance
from identikit.progress import Progress, silent
from identikit.shapes import Float, Int, Tensor
from identikit.tokens.maps import FittedMap
from identikit.tokens.protocol import BLOCKS, Settings, Task, fold_split, sentence_blocks
from identikit.tokens.states import HiddenStates

RELATIVE_STRENGTHS = tuple(10.0**-power for power in range(7))


def ridge_weights(
    gram: Float[Tensor, "d d"], cross: Float[Tensor, "d d_t"], strengths: Sequence[float]
) -> list[Float[Tensor, "d d_t"]]:
    r"""Solve ridge regression without bias for several strengths from one eigendecomposition.

    $$W_\lambda = (E^\top E + \lambda I)^{-1} E^\top X = Q(\Lambda + \lambda)^{-1} Q^\top E^\top X$$

    $E^\top E = Q\Lambda Q^\top$ is `gram` and $E^\top X$ is `cross`. Not in the paper: it is the minimum of the squared
    L2 loss of its linear perceptron, with a penalty in place of early stopping. Where $\Lambda + \lambda$ is 0, the
    inverse is the pseudoinverse: vectors that are all 0 get weights of 0.
    """
    values, vectors = torch.linalg.eigh(gram)
    turned = vectors.mT @ cross
    sizes = [(values.clamp(min=0) + strength).unsqueeze(1) for strength in strengths]
    return [vectors @ torch.where(size > 0, turned / size, 0.0) for size in sizes]


def fit_ridge(
    states: HiddenStates,
    layers: Sequence[int],
    distances: Sequence[str],
    *,
    task: Task,
    settings: Settings,
    progress: Progress = silent,
) -> list[FittedMap]:
    """Fit ridge maps for all layers and folds; for each distance the validation sentences choose the strength.

    Gram matrices of disjoint sets of tokens add up, so those of the 20 blocks serve all folds and the data is read
    once. (With a smaller `data_share` each fold sums its own.) `progress` is called after each layer.
    """
    device = torch.device(settings.device) if settings.device else states.inputs.device
    blocks = sentence_blocks(states.n_sentences, seed=settings.seed)
    splits = [fold_split(blocks, fold, data_share=task.data_share) for fold in range(settings.folds)]
    if task.data_share < 1:
        parts, used = [split.train for split in splits], [[fold] for fold in range(settings.folds)]
    else:
        parts = [(blocks == block).nonzero().squeeze(1) for block in range(BLOCKS)]
        used = [blocks[split.train].unique().tolist() for split in splits]
    part_rows = [states.rows_with_target(part, task.offset).to(device) for part in parts]
    maps = []
    for place, layer in enumerate(layers):
        features, targets = states.layer(layer, device=device), states.targets(task, layer, device=device)
        identity = distinct(targets)
        sums = [_moments(features[rows], targets[rows + task.offset]) for rows in part_rows]
        for fold, split in enumerate(splits):
            rows = states.rows(split.validation).to(device)
            validation = _Validation(
                features[rows], targets[rows], identity[rows], states.lengths.cpu()[split.validation], task.offset
            )
            gram, cross = (torch.stack(some).sum(0) for some in zip(*(sums[part] for part in used[fold]), strict=True))
            maps += [
                FittedMap("ridge", distance, layer, fold, task, settings.seed, {"weight": weight}, strength, loss)
                for distance, (weight, strength, loss) in _choose(gram, cross, validation, distances).items()
            ]
        progress("fitting ridge maps", place + 1, len(layers))
    return maps


class _Validation(NamedTuple):
    """The validation sentences of one fold and layer."""

    features: Float[Tensor, "row d"]
    targets: Float[Tensor, "row d_t"]
    identity: Int[Tensor, " row"]
    lengths: Int[Tensor, " sentence"]
    offset: int

    def judge(self, predicted: Float[Tensor, "row d_t"], distance: str) -> tuple[float, float]:
        """Measure the rate of tokens recovered and their mean distance to the target."""
        found = nearest_in_sentences(
            predicted,
            self.targets,
            lengths=self.lengths,
            identity=self.identity,
            distance=distance,
            offset=self.offset,
        )
        rows = (found.winner >= 0).nonzero().squeeze(1)
        away = paired_distance(predicted[rows], self.targets[rows + self.offset], distance)
        return float(found.hit[rows].double().mean()), float(away.double().mean())


def _moments(
    features: Float[Tensor, "row d"], targets: Float[Tensor, "row d_t"]
) -> tuple[Float[Tensor, "d d"], Float[Tensor, "d d_t"]]:
    features = features.double()
    return features.mT @ features, features.mT @ targets.double()


def _choose(
    gram: Float[Tensor, "d d"], cross: Float[Tensor, "d d_t"], validation: _Validation, distances: Sequence[str]
) -> dict[str, tuple[Tensor, float, float]]:
    """Find for each distance the strength that recovers most validation tokens: weights, strength and mean distance.

    The strengths tried are `RELATIVE_STRENGTHS` times the mean eigenvalue of the Gram matrix, strongest first, so
    that the strongest of equals is kept. Ridge does not minimise the distance that is tested, and choosing by that
    distance cost up to four points of the rate in the last layer of a real model; hence the rate.
    """
    strengths = [relative * float(gram.trace()) / len(gram) for relative in RELATIVE_STRENGTHS]
    weights = [weight.to(validation.features.dtype) for weight in ridge_weights(gram, cross, strengths)]
    judged: dict[str, list[tuple[float, float]]] = {distance: [] for distance in distances}
    for weight in weights:
        predicted = validation.features @ weight
        for distance in distances:
            judged[distance].append(validation.judge(predicted, distance))
    best = {distance: max(range(len(found)), key=lambda place: found[place][0]) for distance, found in judged.items()}
    return {
        distance: (weights[place].cpu(), strengths[place], judged[distance][place][1])
        for distance, place in best.items()
    }
