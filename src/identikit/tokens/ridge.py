"""The linear map in closed form: ridge regression for all folds from the Gram matrices of 20 blocks of sentences."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from identikit.maths.neighbours import nearest_in_sentences, number_distinct, paired_distance
from identikit.maths.threads import decompose
from identikit.progress import Progress, silent
from identikit.shapes import Float, Int, Tensor
from identikit.tokens.maps import FittedMap
from identikit.tokens.protocol import BLOCKS, Settings, Task, fold_split, sentence_blocks
from identikit.tokens.states import HiddenStates

RELATIVE_STRENGTHS = tuple(10.0**-power for power in range(7))


class Spectrum(NamedTuple):
    r"""Eigenvalues $\Lambda$ and eigenvectors $Q$, as columns, of a Gram matrix."""

    values: Float[Tensor, " d"]
    vectors: Float[Tensor, "d d"]


def spectra(grams: Sequence[Float[Tensor, "d d"]]) -> list[Spectrum]:
    """Decompose Gram matrices, several at a time."""
    values, vectors = decompose(torch.linalg.eigh, torch.stack(list(grams)))
    return list(map(Spectrum, values, vectors))


def ridge_weights(
    spectrum: Spectrum, cross: Float[Tensor, "d d_t"], strengths: Sequence[float]
) -> list[Float[Tensor, "d d_t"]]:
    r"""Solve ridge regression without bias for several strengths from one eigendecomposition.

    $$W_\lambda = (E^\top E + \lambda I)^{-1} E^\top X = Q(\Lambda + \lambda)^{-1} Q^\top E^\top X$$

    $E^\top E = Q\Lambda Q^\top$ is given by its `spectrum` and $E^\top X$ is `cross`. Not in the paper: it is the
    minimum of the squared L2 loss of its linear perceptron, with a penalty in place of early stopping. Where
    $\Lambda + \lambda$ is 0, the inverse is the pseudoinverse: vectors that are all 0 get weights of 0.
    """
    turned = spectrum.vectors.mT @ cross
    weights = []
    for strength in strengths:
        size = (spectrum.values.clamp(min=0) + strength).unsqueeze(1)
        weights.append(spectrum.vectors @ torch.where(size > 0, turned / size, 0.0))
    return weights


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
    device = torch.device(settings.device or states.inputs.device)
    blocks = sentence_blocks(states.n_sentences, seed=settings.seed)
    splits = [fold_split(blocks, fold, data_share=task.data_share) for fold in range(settings.folds)]
    if task.data_share < 1:
        sentence_sets = [split.train for split in splits]
        sets_of_fold = [[fold] for fold in range(settings.folds)]
    else:
        sentence_sets = [(blocks == block).nonzero().squeeze(1) for block in range(BLOCKS)]
        sets_of_fold = [blocks[split.train].unique().tolist() for split in splits]
    row_sets = [states.rows_with_target(sentences, task.offset).to(device) for sentences in sentence_sets]
    maps = []
    for number, layer in enumerate(layers, start=1):
        features = states.layer(layer, device=device)
        targets = states.targets(task, layer, device=device)
        identity = number_distinct(targets)
        grams = []  # of each set of tokens: E^T E
        crosses = []  # and E^T X
        for rows in row_sets:
            vectors = features[rows].double()
            grams.append(vectors.mT @ vectors)
            crosses.append(vectors.mT @ targets[rows + task.offset].double())
        fold_grams = [torch.stack([grams[index] for index in sets]).sum(0) for sets in sets_of_fold]
        for fold, spectrum in enumerate(spectra(fold_grams)):
            cross = torch.stack([crosses[index] for index in sets_of_fold[fold]]).sum(0)
            mean = float(fold_grams[fold].trace()) / len(cross)
            strengths = [relative * mean for relative in RELATIVE_STRENGTHS]
            weights = ridge_weights(spectrum, cross, strengths)
            sentences = splits[fold].validation
            rows = states.rows(sentences).to(device)
            validation = _Validation(
                features[rows], targets[rows], identity[rows], states.lengths.cpu()[sentences], task.offset
            )
            for distance, best in _best_weights(weights, validation, distances).items():
                parameters = {"weight": best.weight.cpu()}
                cell = (distance, layer, fold, task, settings.seed)
                maps.append(FittedMap("ridge", *cell, parameters, strengths[best.strength_index], best.loss))
        progress("fitting ridge maps", number, len(layers))
    return maps


class _Validation(NamedTuple):
    """The validation sentences of one fold and layer."""

    features: Float[Tensor, "row d"]
    targets: Float[Tensor, "row d_t"]
    identity: Int[Tensor, " row"]
    lengths: Int[Tensor, " sentence"]
    offset: int


class _Weights(NamedTuple):
    """The weights of one strength, with its index, and their rate and mean distance in validation."""

    strength_index: int
    weight: Float[Tensor, "d d_t"]
    rate: float
    loss: float


def _best_weights(
    weights: Sequence[Float[Tensor, "d d_t"]], validation: _Validation, distances: Sequence[str]
) -> dict[str, _Weights]:
    """Find for each distance the weights that recover most validation tokens.

    The strengths tried are `RELATIVE_STRENGTHS` times the mean eigenvalue of the Gram matrix, strongest first, so
    that the strongest of equals is kept. Ridge does not minimise the distance that is tested, and choosing by that
    distance cost up to four points of the rate in the last layer of a real model; hence the rate.
    """
    features, targets, identity, lengths, offset = validation
    best: dict[str, _Weights] = {}
    for index, weight in enumerate(weights):
        weight = weight.to(features.dtype)
        predicted = features @ weight
        for distance in distances:
            nearest = nearest_in_sentences(
                predicted, targets, lengths=lengths, identity=identity, distance=distance, offset=offset
            )
            rows = (nearest.winner >= 0).nonzero().squeeze(1)
            rate = float(nearest.hit[rows].double().mean())
            if distance not in best or rate > best[distance].rate:
                loss = paired_distance(predicted[rows], targets[rows + offset], distance).double().mean()
                best[distance] = _Weights(index, weight, rate, float(loss))
    return best
