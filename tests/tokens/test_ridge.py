import numpy as np
import pytest
import torch

from identikit.tokens.protocol import Settings, Task, fold_split, sentence_blocks
from identikit.tokens.ridge import RELATIVE_STRENGTHS, fit_ridge, ridge_weights, spectra
from tests.reference import maps as literal
from tests.reference import neighbours
from tests.tokens.constructed import rotated, states

TASKS = pytest.mark.parametrize(
    "task", [Task(), Task(target="previous"), Task(offset=-2), Task(offset=1), Task(data_share=0.5)], ids=str
)


def noisy(inputs, generator):
    return rotated(inputs, generator) + 0.5 * torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype)


def test_weights_of_every_strength_solve_the_augmented_least_squares_problem():
    generator = np.random.default_rng(0)
    features = generator.normal(size=(50, 7))
    targets = generator.normal(size=(50, 3))
    (spectrum,) = spectra([torch.from_numpy(features.T @ features)])
    strengths = (0.01, 1.0, 30.0)
    weights = ridge_weights(spectrum, torch.from_numpy(features.T @ targets), strengths)
    for strength, weight in zip(strengths, weights, strict=True):
        np.testing.assert_allclose(weight, literal.ridge(features, targets, strength), rtol=1e-9, atol=1e-11)


@TASKS
def test_every_fold_is_the_ridge_regression_of_its_training_sentences(task):
    given = states(hidden=noisy, layers=2, dtype=torch.float64)
    maps = fit_ridge(given, (0, 1), ("cosine", "l2"), task=task, settings=Settings(seed=2))
    assert len(maps) == 2 * 2 * 10
    for fitted in maps:
        features, targets = training_pairs(given, fitted)
        expected = literal.ridge(features, targets, fitted.chosen)
        np.testing.assert_allclose(fitted.parameters["weight"], expected, rtol=1e-7, atol=1e-9)


def test_the_strongest_penalty_that_recovers_most_validation_tokens_is_chosen():
    given = states(hidden=noisy, layers=2, dtype=torch.float64, sentences=60)
    task = Task(offset=1, target="previous")
    for fitted in fit_ridge(given, (0, 1), ("cosine", "l2"), task=task, settings=Settings(folds=2)):
        features, targets = training_pairs(given, fitted)
        strengths = [relative * np.mean(np.sum(features**2, 0)) for relative in RELATIVE_STRENGTHS]
        rates = [validation_rate(given, fitted, literal.ridge(features, targets, each)) for each in strengths]
        assert fitted.chosen == pytest.approx(strengths[rates.index(max(rates))])


def training_pairs(given, fitted):
    blocks = sentence_blocks(given.n_sentences, seed=fitted.seed)
    split = fold_split(blocks, fitted.fold, data_share=fitted.task.data_share)
    rows = given.rows_with_target(split.train, fitted.task.offset)
    targets = given.targets(fitted.task, fitted.layer)
    return given.layer(fitted.layer)[rows].numpy(), targets[rows + fitted.task.offset].numpy()


def validation_rate(given, fitted, weight):
    hits = []
    split = fold_split(sentence_blocks(given.n_sentences, seed=fitted.seed), fitted.fold)
    for sentence in split.validation.tolist():
        rows = given.rows(torch.tensor([sentence]))
        predicted = given.layer(fitted.layer)[rows].numpy() @ weight
        candidates = given.targets(fitted.task, fitted.layer)[rows].numpy()
        found = neighbours.nearest(predicted, candidates, fitted.distance, fitted.task.offset)
        hits += [each[0] for each in found if each is not None]
    return sum(hits) / len(hits)


def test_singular_features_are_no_trouble():
    """Two equal columns: the Gram matrix has a null direction."""
    given = states(hidden=lambda inputs, _: inputs[:, [0, 0, 1, 2, 3, 4]], dtype=torch.float64)
    for fitted in fit_ridge(given, (0,), ("l2",), task=Task(), settings=Settings(folds=2)):
        assert fitted.parameters["weight"].isfinite().all()
        torch.testing.assert_close(fitted.parameters["weight"][0], fitted.parameters["weight"][1], atol=1e-6, rtol=1e-6)
