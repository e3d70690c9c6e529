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
    device = torch.device(settings.device) if settings.device else states.inputs.device
    blocks = sentence_blocks(states.n_sentences, seed=settings.seed)
    splits = [fold_split(blocks, fold, data_share=task.data_share) for fold in range(settings.folds)]
    if task.data_share < 1:
        summed = [split.train for split in splits]
        used = [[fold] for fold in range(settings.folds)]
    else:
        summed = [(blocks == block).nonzero().squeeze(1) for block in range(BLOCKS)]
        used = [blocks[split.train].unique().tolist() for split in splits]
    summed_rows = [states.rows_with_target(sentences, task.offset).to(device) for sentences in summed]
    maps = []
    for done, layer in enumerate(layers, start=1):
        features = states.layer(layer, device=device)
        targets = states.targets(task, layer, device=device)
        identity = number_distinct(targets)
        grams = []  # of each set of tokens: E^T E
        crosses = []  # and E^T X
        for rows in summed_rows:
            some = features[rows].double()
            grams.append(some.mT @ some)
            crosses.append(some.mT @ targets[rows + task.offset].double())
        fold_grams = [torch.stack([grams[place] for place in places]).sum(0) for places in used]
        for fold, spectrum in enumerate(spectra(fold_grams)):
            cross = torch.stack([crosses[place] for place in used[fold]]).sum(0)
            mean = float(fold_grams[fold].trace()) / len(cross)
            strengths = [relative * mean for relative in RELATIVE_STRENGTHS]
            weights = ridge_weights(spectrum, cross, strengths)
            sentences = splits[fold].validation
            rows = states.rows(sentences).to(device)
            validation = _Validation(
                features[rows], targets[rows], identity[rows], states.lengths.cpu()[sentences], task.offset
            )
            for distance, (place, weight, _, loss) in _chosen(weights, validation, distances).items():
                about = (distance, layer, fold, task, settings.seed)
                maps.append(FittedMap("ridge", *about, {"weight": weight.cpu()}, strengths[place], loss))
        progress("fitting ridge maps", done, len(layers))
    return maps


class _Validation(NamedTuple):
    """The validation sentences of one fold and layer."""

    features: Float[Tensor, "row d"]
    targets: Float[Tensor, "row d_t"]
    identity: Int[Tensor, " row"]
    lengths: Int[Tensor, " sentence"]
    offset: int


def _chosen(
    weights: Sequence[Float[Tensor, "d d_t"]], validation: _Validation, distances: Sequence[str]
) -> dict[str, tuple[int, Float[Tensor, "d d_t"], float, float]]:
    """Find for each distance the weights that recover most validation tokens: their place, they, rate and distance.

    The strengths tried are `RELATIVE_STRENGTHS` times the mean eigenvalue of the Gram matrix, strongest first, so
    that the strongest of equals is kept. Ridge does not minimise the distance that is tested, and choosing by that
    distance cost up to four points of the rate in the last layer of a real model; hence the rate.
    """
    features, targets, identity, lengths, offset = validation
    best: dict[str, tuple[int, Tensor, float, float]] = {}
    for place, weight in enumerate(weights):
        weight = weight.to(features.dtype)
        predicted = features @ weight
        for distance in distances:
            nearest = nearest_in_sentences(
                predicted, targets, lengths=lengths, identity=identity, distance=distance, offset=offset
            )
            rows = (nearest.winner >= 0).nonzero().squeeze(1)
            rate = float(nearest.hit[rows].double().mean())
            if distance not in best or rate > best[distance][2]:
                loss = paired_distance(predicted[rows], targets[rows + offset], distance).double().mean()
                best[distance] = place, weight, rate, float(loss)
    return best
