from dataclasses import replace
from itertools import chain, product

import pytest
import torch

from identikit.tokens import train
from identikit.tokens.maps import glorot_start
from identikit.tokens.protocol import Settings, Task, fold_split, sentence_blocks
from identikit.tokens.states import HiddenStates
from identikit.tokens.train import Trial, epoch_order, train_maps
from tests.reference import maps as literal
from tests.tokens.constructed import rotated, states

SMALL = Settings(batch_size=16, epochs=3, hidden_size=12, seed=5)
TASKS = (Task(), Task("previous"), Task(offset=-1), Task(offset=2), Task(data_share=0.5), Task("previous", 1, 0.3))


def noisy(inputs, generator):
    return rotated(inputs, generator) + 0.3 * torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype)


def narrow():
    """Hidden vectors wider than the inputs, as in ALBERT."""
    given = states(hidden=noisy, layers=2, width=8, dtype=torch.float64)
    return HiddenStates(given.inputs[:, :4].clone(), given.hidden, given.lengths, "narrow")


def one_rate_each(map_name, *, folds=3, tasks=TASKS[:1]):
    """Trials of some tasks, all distances, two layers and some folds, each with a learning rate of its own."""
    cells = product(("cosine", "l2"), (0, 1), range(folds), tasks)
    return [
        Trial(map_name, *cell, learning_rate=(0.03, 0.001, 0.01, 0.003)[place % 4]) for place, cell in enumerate(cells)
    ]


def trained_by_torch(given, trial, settings):
    """Train one trial with torch's own modules and optimiser: its best parameters, validation loss and epoch."""
    task = trial.task
    split = fold_split(sentence_blocks(given.n_sentences, seed=settings.seed), trial.fold, data_share=task.data_share)
    rows, held_out = (given.rows_with_target(part, task.offset) for part in (split.train, split.validation))
    features = given.layer(trial.layer)
    targets = given.targets(task, trial.layer)

    def batches(epoch):
        order = epoch_order(rows, seed=settings.seed, fold=trial.fold, epoch=epoch)
        return [(features[part], targets[part + task.offset]) for part in order.split(settings.batch_size)]

    widths = (features.shape[1], settings.hidden_size, targets.shape[1])
    start = glorot_start(trial.map, widths, (settings.seed, trial.layer, trial.fold))
    model = literal.build({name: value.to(features.dtype) for name, value in start.items()})
    best, epoch = literal.train(
        model,
        batches,
        (features[held_out], targets[held_out + task.offset]),
        distance=trial.distance,
        learning_rate=trial.learning_rate,
        patience=settings.patience,
        epochs=settings.epochs,
    )
    return model, best, epoch


@pytest.mark.parametrize("map_name", ["linear", "mlp"])
def test_every_trial_of_a_stack_is_trained_as_torch_would(map_name):
    given = states(hidden=noisy, layers=2, dtype=torch.float64)
    trials = one_rate_each(map_name, tasks=TASKS)
    trained = train_maps(given, trials, settings=SMALL)
    assert [result.trial for result in trained.trials] == trials
    for trial, result, fitted in zip(trials, trained.trials, trained.maps, strict=True):
        model, best, epoch = trained_by_torch(given, trial, SMALL)
        assert (result.best_epoch, fitted.chosen, fitted.task) == (epoch, trial.learning_rate, trial.task)
        assert result.validation_loss == fitted.validation_loss == pytest.approx(best, rel=1e-9)
        hidden = given.layer(trial.layer)
        torch.testing.assert_close(fitted(hidden), model(hidden).detach(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("map_name", ["linear", "mlp"])
def test_a_map_trained_alone_equals_its_trial_of_a_stack_of_several_tasks_to_the_last_bit(map_name):
    """All sizes are multiples of four: the last bit of batched products of odd sizes depends on where they lie."""
    given = narrow()
    trials = one_rate_each(map_name, folds=1, tasks=TASKS)
    together = train_maps(given, trials, settings=SMALL)
    for trial, result, expected in zip(trials, together.trials, together.maps, strict=True):
        alone = train_maps(given, [trial], settings=SMALL)
        assert alone.trials == [result]
        for name, value in expected.parameters.items():
            assert torch.equal(alone.maps[0].parameters[name], value)


def counted_steps(monkeypatch, given, trials, settings=SMALL):
    """Train linear maps: how many steps were taken, and the trials."""
    taken = []
    with monkeypatch.context() as patch:
        step = train._adam
        patch.setattr(train, "_adam", lambda *tensors: taken.append(step(*tensors)))
        results = train_maps(given, trials, settings=settings).trials
    return len(taken), results


def test_tasks_that_have_stopped_take_no_steps(monkeypatch):
    """One trial sees all data, diverges and stops; the other sees less of it, so fewer batches, and goes on."""
    given = states(hidden=noisy, dtype=torch.float64)
    fast = Trial("linear", "l2", 0, 0, Task(), 1e6)
    slow = Trial("linear", "l2", 0, 0, Task(data_share=0.3), 1e-4)
    settings = replace(SMALL, patience=2, epochs=12)
    steps, trials = counted_steps(monkeypatch, given, [fast, slow], settings)
    (long, first), (short, second) = (counted_steps(monkeypatch, given, [trial], settings) for trial in (fast, slow))
    assert trials == first + second
    stopped = first[0].best_epoch + settings.patience
    assert stopped < second[0].best_epoch == settings.epochs
    assert steps == long + short * (settings.epochs - stopped) / settings.epochs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(7, 33, 65), (5, 1, 1000)])
def test_a_step_on_a_gpu_is_the_same(shape):
    """The first trial is idle: nothing of it moves."""
    from identikit.tokens.adam_cuda import adam

    numbers = torch.Generator().manual_seed(0)
    tensors = [torch.rand(shape, generator=numbers) for _ in range(4)]
    coefficients = torch.rand(4, shape[0], 1, 1, generator=numbers)
    coefficients[:, 0, 0, 0] = torch.tensor([0, 1, 1, torch.inf])
    tensors[1][0] = 0
    here = [tensor.double() for tensor in tensors]
    there = [tensor.cuda() for tensor in tensors]
    train._adam(*here, coefficients.double())
    adam(*there, coefficients.cuda(), share=1 - train._BETAS[1])
    assert torch.equal(there[0][0].cpu(), tensors[0][0])
    for stepped, expected in zip(there, here, strict=True):
        torch.testing.assert_close(stepped.cpu().double(), expected, rtol=1e-6, atol=5e-7)  # some nearly cancel


def test_training_is_repeatable_and_depends_on_the_seed():
    given = states(hidden=noisy, layers=2)
    first, again, other = (
        train_maps(given, one_rate_each("linear"), settings=replace(SMALL, seed=seed)).trials for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


def test_little_memory_means_more_stacks_and_the_same_maps():
    given = states(hidden=noisy, layers=2)
    trials = one_rate_each("linear", folds=1) + one_rate_each("mlp", folds=1)
    ample = list(train._stacks(given, trials, SMALL))
    scarce = list(train._stacks(given, trials, replace(SMALL, memory=1)))
    assert [len(stack) for stack in ample] == [4, 4]
    assert [len(stack) for stack in scarce] == [1] * 8
    assert set(chain(*ample)) == set(chain(*scarce)) == set(trials)
    calls = []
    results = [
        train_maps(given, trials, settings=settings, progress=lambda *call: calls.append(call))
        for settings in (SMALL, replace(SMALL, memory=1))
    ]
    for first, second in zip(*(result.trials for result in results), strict=True):
        assert first.trial == second.trial
        assert first.validation_loss == pytest.approx(second.validation_loss, abs=1e-5)
    assert calls[2] == ("training maps", 3, 6) and calls[-1] == ("training maps", 24, 24)


@pytest.mark.parametrize("map_name", ["linear", "mlp"])
def test_stacks_of_several_tasks_count_each_vector_they_hold_once(map_name):
    """A trial takes seven copies of its parameters and the activations of four batches, beside what all read."""
    given = states(hidden=noisy, layers=2)
    trials = one_rate_each(map_name, tasks=TASKS)
    inner = SMALL.hidden_size if map_name == "mlp" else 0
    each = 4 * (7 * (12 * inner or 36) + 4 * 16 * (6 + 3 * (inner + 6)))
    data = train._Stack(given, trials, SMALL)
    assert (len(data.features), len(data.targets)) == (2 * len(given.inputs), 2 * len(given.inputs))
    whole = each * len(trials) + data.features.nbytes + data.targets.nbytes
    assert len(list(train._stacks(given, trials, replace(SMALL, memory=whole)))) == 1
    first, second = train._stacks(given, trials, replace(SMALL, memory=whole - 1))
    assert len(first) == len(trials) - 1 and len(second) == 1


def test_trials_of_one_shape_share_a_stack_whatever_their_task():
    """Where inputs are narrower than hidden vectors, the first layer's own input is an x like any other."""
    trials = one_rate_each("linear", tasks=TASKS)
    wide, slim = sorted(train._stacks(narrow(), trials, SMALL), key=len)
    assert {(trial.layer, trial.task.target) for trial in wide} == {(1, "previous")}
    assert len(wide) + len(slim) == len(trials)


def test_trials_stop_on_their_own_and_keep_their_best():
    """With patience 2, fast trials overfit and stop while slow ones go on; the order of stopping changes nothing."""
    given = states(hidden=noisy, layers=2, dtype=torch.float64)
    settings = replace(SMALL, patience=2, epochs=20)
    trials = one_rate_each("linear")
    trained = train_maps(given, trials, settings=settings)
    stopped = {result.best_epoch for result in trained.trials}
    assert len(stopped) > 2 and min(stopped) < 18
    for trial, result in zip(trials, trained.trials, strict=True):
        _, best, epoch = trained_by_torch(given, trial, settings)
        assert (result.best_epoch, result.validation_loss) == (epoch, pytest.approx(best, rel=1e-9))


def test_the_learning_rate_of_least_validation_loss_is_kept():
    given = states(hidden=noisy)
    trials = [Trial("linear", "cosine", 0, 0, Task(), rate) for rate in (1e-6, 0.03, 1e-5)]
    trained = train_maps(given, trials, settings=SMALL)
    losses = {result.trial.learning_rate: result.validation_loss for result in trained.trials}
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
