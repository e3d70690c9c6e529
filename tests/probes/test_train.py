from dataclasses import replace
from itertools import chain, product

import pytest
import torch

from identikit.probes import Settings, Task, train
from identikit.probes.maps import glorot_start
from identikit.probes.protocol import fold_split, sentence_blocks
from identikit.probes.train import Member, epoch_order, train_grid
from tests.probes.constructed import rotated, states
from tests.reference import probes as literal

SMALL = Settings(batch_size=16, epochs=3, hidden_size=11, seed=5)


def noisy(inputs, generator):
    return rotated(inputs, generator) + 0.3 * torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype)


def one_rate_each(map_name, *, folds=3):
    """Members of all distances, two layers and some folds, each with a learning rate of its own."""
    cells = product(("cosine", "l2"), (0, 1), range(folds))
    return [
        Member(map_name, *cell, learning_rate=(0.03, 0.001, 0.01, 0.003)[place % 4]) for place, cell in enumerate(cells)
    ]


def trained_by_torch(given, member, task, settings):
    """Train one member with torch's own modules and optimiser: its best parameters, validation loss and epoch."""
    split = fold_split(sentence_blocks(given.n_sentences, seed=settings.seed), member.fold, data_share=task.data_share)
    rows, held_out = (given.rows_with_target(part, task.offset) for part in (split.train, split.validation))
    features, targets = given.layer(member.layer), given.targets(task, member.layer)

    def batches(epoch):
        order = epoch_order(rows, seed=settings.seed, fold=member.fold, epoch=epoch)
        return [(features[part], targets[part + task.offset]) for part in order.split(settings.batch_size)]

    widths = (features.shape[1], settings.hidden_size, targets.shape[1])
    start = glorot_start(member.map, widths, (settings.seed, member.layer, member.fold))
    model = literal.build({name: value.to(features.dtype) for name, value in start.items()})
    best, epoch = literal.train(
        model,
        batches,
        (features[held_out], targets[held_out + task.offset]),
        distance=member.distance,
        learning_rate=member.learning_rate,
        patience=settings.patience,
        epochs=settings.epochs,
    )
    return model, best, epoch


@pytest.mark.parametrize("map_name", ["linear", "mlp"])
@pytest.mark.parametrize(
    "task", [Task(), Task(target="previous"), Task(offset=-1), Task(offset=2), Task(data_share=0.5)], ids=str
)
def test_every_member_of_a_stack_is_trained_as_torch_would(map_name, task):
    given = states(hidden=noisy, layers=2, dtype=torch.float64)
    members = one_rate_each(map_name)
    trained = train_grid(given, members, task=task, settings=SMALL)
    assert [trial.member for trial in trained.trials] == members
    for member, trial, fitted in zip(members, trained.trials, trained.maps, strict=True):
        model, best, epoch = trained_by_torch(given, member, task, SMALL)
        assert (trial.best_epoch, fitted.chosen, fitted.task) == (epoch, member.learning_rate, task)
        assert trial.validation_loss == fitted.validation_loss == pytest.approx(best, rel=1e-9)
        hidden = given.layer(member.layer)
        torch.testing.assert_close(fitted(hidden), model(hidden).detach(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("map_name", ["linear", "mlp"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_map_trained_alone_equals_its_member_of_a_stack(map_name, dropout):
    given = states(hidden=noisy, layers=2)
    settings = replace(SMALL, dropout=dropout)
    members = one_rate_each(map_name)
    together = train_grid(given, members, task=Task(), settings=settings)
    for member, expected in zip(members, together.maps, strict=True):
        (alone,) = train_grid(given, [member], task=Task(), settings=settings).maps
        for name, value in expected.parameters.items():
            torch.testing.assert_close(alone.parameters[name], value, rtol=0, atol=1e-5)


def test_dropout_changes_mlps_and_leaves_linear_maps():
    given = states(hidden=noisy, layers=2)
    for map_name, changes in (("linear", False), ("mlp", True)):
        plain, dropped = (
            train_grid(given, one_rate_each(map_name), task=Task(), settings=replace(SMALL, dropout=dropout)).trials
            for dropout in (0.0, 0.5)
        )
        assert (plain != dropped) is changes


def test_training_is_repeatable_and_depends_on_the_seed():
    given = states(hidden=noisy, layers=2)
    first, again, other = (
        train_grid(given, one_rate_each("linear"), task=Task(), settings=replace(SMALL, seed=seed)).trials
        for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


def test_little_memory_means_more_stacks_and_the_same_maps():
    given = states(hidden=noisy, layers=2)
    members = one_rate_each("linear") + one_rate_each("mlp")
    ample = list(train._stacks(given, members, Task(), SMALL))
    scarce = list(train._stacks(given, members, Task(), replace(SMALL, memory=1)))
    assert [len(stack) for stack in ample] == [12, 12]
    assert [len(stack) for stack in scarce] == [1] * 24
    assert sorted(chain(*ample)) == sorted(chain(*scarce)) == sorted(members)
    calls = []
    results = [
        train_grid(given, members, task=Task(), settings=settings, progress=lambda *call: calls.append(call))
        for settings in (SMALL, replace(SMALL, memory=1))
    ]
    for first, second in zip(*(result.trials for result in results), strict=True):
        assert first.member == second.member
        assert first.validation_loss == pytest.approx(second.validation_loss, abs=1e-5)
    assert calls[2] == ("training maps", 3, 6) and calls[-1] == ("training maps", 72, 72)


def test_members_stop_on_their_own_and_keep_their_best():
    """With patience 2, fast members overfit and stop while slow ones go on; the order of stopping changes nothing."""
    given = states(hidden=noisy, layers=2, dtype=torch.float64)
    settings = replace(SMALL, patience=2, epochs=20)
    members = one_rate_each("linear")
    trained = train_grid(given, members, task=Task(), settings=settings)
    stopped = {trial.best_epoch for trial in trained.trials}
    assert len(stopped) > 2 and min(stopped) < 18
    for member, trial in zip(members, trained.trials, strict=True):
        _, best, epoch = trained_by_torch(given, member, Task(), settings)
        assert (trial.best_epoch, trial.validation_loss) == (epoch, pytest.approx(best, rel=1e-9))


def test_the_learning_rate_of_least_validation_loss_is_kept():
    given = states(hidden=noisy)
    members = [Member("linear", "cosine", 0, 0, rate) for rate in (1e-6, 0.03, 1e-5)]
    trained = train_grid(given, members, task=Task(), settings=SMALL)
    losses = {trial.member.learning_rate: trial.validation_loss for trial in trained.trials}
    (kept,) = trained.maps
    assert kept.chosen == 0.03 and kept.validation_loss == losses[0.03] == min(losses.values())


def test_the_start_is_glorot_uniform_with_zero_biases():
    start = glorot_start("mlp", (300, 200, 100), (0, 0, 0))
    for name, (fan_in, fan_out) in {"weight_in": (300, 200), "weight_out": (200, 100)}.items():
        bound = (6 / (fan_in + fan_out)) ** 0.5
        assert start[name].shape == (fan_in, fan_out)
        assert 0.99 * bound < start[name].abs().max() <= bound
        assert start[name].var().item() == pytest.approx(bound**2 / 3, rel=0.05)
    assert not start["bias_in"].any() and not start["bias_out"].any()
