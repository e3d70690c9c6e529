"""Training of linear maps and MLPs, many at once: every trial is one slice of the same batched products.

A trial is the training of one map with one learning rate. Parameters are stacked along a first axis, Adam runs over the
stack with a learning rate and a step count for each trial, and trials that have stopped are dropped from the stack. A
trial's start, batches and steps depend only on the seed, its layer, its fold and its task, so it ends the same whatever
trains beside it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from typing import NamedTuple

import torch

from identikit.maths.neighbours import distance_gradient, paired_distance
from identikit.progress import Progress, silent
from identikit.shapes import Bool, Float, Int, Tensor
from identikit.tokens.maps import FittedMap, apply_map, glorot_start
from identikit.tokens.protocol import Settings, Task, fold_split, sentence_blocks, stream
from identikit.tokens.states import HiddenStates

_BETAS = (0.9, 0.999)  # Adam's
_EPSILON = 1e-8  # Adam's
_COPIES_OF_PARAMETERS = 7  # held per trial: parameters, gradients, Adam's two moments, the best, and what a step makes
_CPU_MEMORY = 2 << 30  # bytes that a stack may take
_FLOAT = 4  # bytes
_VALIDATION_BATCHES = 4  # times the batch size: rows that are validated at once
_DROP_SHARE = 1 / 8  # of a stack's trials must have stopped before it is made smaller


class Trial(NamedTuple):
    """The training of one map with one learning rate."""

    map: str
    distance: str
    layer: int
    fold: int
    task: Task
    learning_rate: float


class TrialResult(NamedTuple):
    """How a trial went: its best mean distance on the validation sentences, and after how many epochs."""

    trial: Trial
    validation_loss: float
    best_epoch: int

    def row(self) -> dict[str, str | int | float]:
        """Return it as a row of a table."""
        trial = self.trial._asdict()
        task = asdict(trial.pop("task"))
        return {**trial, **task, "validation_loss": self.validation_loss, "best_epoch": self.best_epoch}


class Fit(NamedTuple):
    """The fitted maps, of the best learning rate each, and the results of all trials."""

    maps: list[FittedMap]
    trials: list[TrialResult]


def train_maps(
    states: HiddenStates, trials: Sequence[Trial], *, settings: Settings, progress: Progress = silent
) -> Fit:
    """Train all trials as Appendix B.1 says, in as few stacks as memory allows, and keep the best learning rates.

    Adam on batches of 256 tokens, reshuffled in each epoch, minimises the mean of the distance that is tested. A trial
    stops after 20 epochs without a lower mean distance on the validation sentences, or at 500 epochs, and its best
    parameters are restored. `progress` is called after each epoch, with the most epochs there can be.
    """
    stacks = list(_stacks(states, trials, settings))
    best: dict[tuple[str, str, int, int, Task], tuple[TrialResult, dict[str, Tensor]]] = {}  # over learning rates
    results = []
    for number, stacked in enumerate(stacks):
        stack = _Stack(states, stacked, settings)
        while stack.trials:
            for result, trained in stack.run_epoch():
                results.append(result)
                cell = result.trial[:-1]
                if cell not in best or result.validation_loss < best[cell][0].validation_loss:
                    best[cell] = result, {name: value.cpu().clone() for name, value in trained.items()}
            epochs = stack.epoch if stack.trials else settings.epochs
            progress("training maps", number * settings.epochs + epochs, len(stacks) * settings.epochs)
        del stack
    order = {trial: number for number, trial in enumerate(trials)}
    maps = [
        FittedMap(*cell, settings.seed, parameters, result.trial.learning_rate, result.validation_loss)
        for cell, (result, parameters) in sorted(best.items(), key=lambda item: order[item[1][0].trial])
    ]
    return Fit(maps, sorted(results, key=lambda result: order[result.trial]))


def epoch_order(rows: Int[Tensor, " row"], *, seed: int, fold: int, epoch: int) -> Int[Tensor, " row"]:
    """Shuffle training rows of a fold for one epoch; all trials of the fold that read them see the same order."""
    return rows[torch.from_numpy(stream("batches", seed, fold, epoch).permutation(len(rows)))]


class _Stack:
    """Trials that train together, and the vectors that they read.

    Every tensor has trials as its first axis; those of one distance lie side by side. A group is a fold and a task: the
    trials of one group read the same rows in the same order.
    """

    def __init__(self, states: HiddenStates, trials: Sequence[Trial], settings: Settings) -> None:
        self.trials = sorted(trials, key=lambda trial: trial.distance)
        self.settings = settings
        self.device = torch.device(settings.device or states.inputs.device)
        self.epoch = 0
        layers = sorted({trial.layer for trial in trials})
        sources = {trial.task.target_layer(trial.layer): (trial.task, trial.layer) for trial in trials}
        self.features = torch.cat([states.layer(layer, device=self.device) for layer in layers])
        self.targets = torch.cat([states.targets(*source, device=self.device) for source in sources.values()])
        tokens = states.inputs.shape[0]
        self.start_of_layer = {layer: index * tokens for index, layer in enumerate(layers)}
        self.start_of_target = {source: index * tokens for index, source in enumerate(sources)}
        blocks = sentence_blocks(states.n_sentences, seed=settings.seed)
        self.training_rows: dict[tuple[int, Task], Tensor] = {}
        self.validation_rows: dict[tuple[int, Task], Tensor] = {}
        for fold, task in {(trial.fold, trial.task) for trial in trials}:
            split = fold_split(blocks, fold, data_share=task.data_share)
            self.training_rows[fold, task] = states.rows_with_target(split.train, task.offset)
            self.validation_rows[fold, task] = states.rows_with_target(split.validation, task.offset)
        self.parameters = self._start()
        self.first = {name: torch.zeros_like(value) for name, value in self.parameters.items()}
        self.second = {name: torch.zeros_like(value) for name, value in self.parameters.items()}
        self.best = {name: value.clone() for name, value in self.parameters.items()}
        self.best_loss = [float("inf")] * len(self.trials)
        self.best_epoch = [0] * len(self.trials)
        self.stopped = [False] * len(self.trials)
        self._index_trials()

    def run_epoch(self) -> list[tuple[TrialResult, dict[str, Tensor]]]:
        """Train and validate once; return the trials that are dropped, with their best parameters."""
        self._take_steps()
        self.epoch += 1
        improved = []
        for index, loss in enumerate(self._validation_losses().tolist()):
            if loss < self.best_loss[index] and not self.stopped[index]:
                self.best_loss[index] = loss
                self.best_epoch[index] = self.epoch
                improved.append(index)
        indices = torch.tensor(improved, dtype=torch.long, device=self.device)
        for name, value in self.parameters.items():
            self.best[name][indices] = value[indices]
        last = self.epoch == self.settings.epochs
        self.stopped = [last or self.epoch - best >= self.settings.patience for best in self.best_epoch]
        return self._drop_stopped() if sum(self.stopped) >= _DROP_SHARE * len(self.stopped) else []

    def _take_steps(self) -> None:
        """Take one Adam step for each batch of each trial's group."""
        orders = []
        for fold, task in self.groups:
            rows = self.training_rows[fold, task]
            orders.append(epoch_order(rows, seed=self.settings.seed, fold=fold, epoch=self.epoch))
        rows, valid = _in_batches(orders, self.settings.batch_size, self.device)
        coefficients = self._adam_coefficients(rows.shape[1])
        adam = _adam_on(self.device)
        for step in range(rows.shape[1]):
            gradients = self._gradients(rows[:, step], valid[:, step])
            for name, gradient in gradients.items():
                adam(self.parameters[name], gradient, self.first[name], self.second[name], coefficients[step])

    def _start(self) -> dict[str, Tensor]:
        starts: dict[tuple[int, int], dict[str, Tensor]] = {}
        widths = (self.features.shape[1], self.settings.hidden_size, self.targets.shape[1])
        for trial in self.trials:
            key = (trial.layer, trial.fold)
            if key not in starts:
                starts[key] = glorot_start(trial.map, widths, (self.settings.seed, *key))
        start_of_trial = [starts[trial.layer, trial.fold] for trial in self.trials]
        names = start_of_trial[0]
        return {name: torch.stack([start[name].to(self.features) for start in start_of_trial]) for name in names}

    def _index_trials(self) -> None:
        """Note which rows each trial reads, and where the trials of each distance lie."""
        group_of_trial = [(trial.fold, trial.task) for trial in self.trials]
        self.groups = list(dict.fromkeys(group_of_trial))
        self.group = torch.tensor([self.groups.index(group) for group in group_of_trial], device=self.device)
        validation = [self.validation_rows[group] for group in self.groups]
        self.validation = _in_batches(validation, _VALIDATION_BATCHES * self.settings.batch_size, self.device)
        self.validation_size = torch.tensor([len(rows) for rows in validation], device=self.device)
        feature_start = []
        target_start = []
        for trial in self.trials:
            feature_start.append(self.start_of_layer[trial.layer])
            target_start.append(self.start_of_target[trial.task.target_layer(trial.layer)] + trial.task.offset)
        self.feature_start = torch.tensor(feature_start, device=self.device)
        self.target_start = torch.tensor(target_start, device=self.device)
        self.learning_rate = torch.tensor([trial.learning_rate for trial in self.trials], dtype=torch.float64)
        distances = [trial.distance for trial in self.trials]
        self.spans = {}
        for distance in sorted(set(distances)):
            start = distances.index(distance)
            self.spans[distance] = slice(start, start + distances.count(distance))

    def _gather(
        self, rows: Int[Tensor, "group batch"]
    ) -> tuple[Float[Tensor, "trial batch d"], Float[Tensor, "trial batch d_t"]]:
        rows = rows[self.group]
        features = self.features.index_select(0, (rows + self.feature_start.unsqueeze(1)).flatten())
        targets = self.targets.index_select(0, (rows + self.target_start.unsqueeze(1)).flatten())
        return features.unflatten(0, rows.shape), targets.unflatten(0, rows.shape)

    @torch.enable_grad()
    def _gradients(self, rows: Int[Tensor, "group batch"], valid: Bool[Tensor, "group batch"]) -> dict[str, Tensor]:
        """Differentiate each trial's mean distance over its batch: closed form at the output, autograd in the map."""
        features, targets = self._gather(rows)
        counted = valid.to(features.dtype)
        weight = (counted / counted.sum(1, keepdim=True).clamp(min=1))[self.group]
        parameters = {name: value.detach().requires_grad_() for name, value in self.parameters.items()}
        predicted = apply_map(parameters, features)
        outer = [
            distance_gradient(predicted.detach()[span], targets[span], weight[span], distance)
            for distance, span in self.spans.items()
        ]
        gradients = torch.autograd.grad(predicted, list(parameters.values()), torch.cat(outer))
        return dict(zip(parameters, gradients, strict=True))

    def _adam_coefficients(self, steps: int) -> Float[Tensor, "step coefficient trial 1 1"]:
        """Prepare an epoch's numbers of Adam for each trial; those of a group that has run out of batches do nothing.

        With bias corrections c1, c2 at step t, Adam's update lr·(m/c1)/(√(v/c2) + ε) is m/(√v·scale + shift) for scale
        = c1/(lr·√c2) and shift = ε·c1/lr: one pass over the stack less.
        """
        batches = [math.ceil(len(self.training_rows[group]) / self.settings.batch_size) for group in self.groups]

        def powers(beta: float, step: int) -> list[float]:
            # In Python, as the last bit of torch's power depends on the place in a tensor.
            return [beta ** (self.epoch * count + step + 1) for count in batches]

        decays = torch.tensor([[powers(beta, step) for step in range(steps)] for beta in _BETAS], dtype=torch.float64)
        group = self.group.cpu()
        first, second = 1 - decays[..., group]
        idle = torch.arange(steps).unsqueeze(1) >= torch.tensor(batches)[group]
        coefficients = [
            torch.full_like(first, 1 - _BETAS[0]).masked_fill(idle, 0),
            torch.full_like(first, _BETAS[1]).masked_fill(idle, 1),
            first / (self.learning_rate * second.sqrt()),
            (_EPSILON * first / self.learning_rate).masked_fill(idle, torch.inf),
        ]
        return torch.stack(coefficients, dim=1).to(self.device, self.features.dtype)[..., None, None]

    def _validation_losses(self) -> Float[Tensor, " trial"]:
        total = torch.zeros(len(self.trials), dtype=torch.float64, device=self.device)
        all_rows, all_valid = self.validation
        for rows, valid in zip(all_rows.unbind(1), all_valid.unbind(1), strict=True):
            features, targets = self._gather(rows)
            predicted = apply_map(self.parameters, features)
            for distance, span in self.spans.items():
                distances = paired_distance(predicted[span], targets[span], distance)
                total[span] += (distances.double() * valid[self.group][span]).sum(1)
        return total / self.validation_size[self.group]

    def _drop_stopped(self) -> list[tuple[TrialResult, dict[str, Tensor]]]:
        dropped = []
        running = []
        for index, trial in enumerate(self.trials):
            if self.stopped[index]:
                result = TrialResult(trial, self.best_loss[index], self.best_epoch[index])
                dropped.append((result, {name: value[index] for name, value in self.best.items()}))
            else:
                running.append(index)
        indices = torch.tensor(running, dtype=torch.long, device=self.device)
        for tensors in (self.parameters, self.first, self.second, self.best):
            tensors.update({name: value[indices] for name, value in tensors.items()})
        self.trials = [self.trials[index] for index in running]
        self.best_loss = [self.best_loss[index] for index in running]
        self.best_epoch = [self.best_epoch[index] for index in running]
        self.stopped = [False] * len(running)
        if running:
            self._index_trials()
        return dropped


def _adam(
    parameters: Tensor, gradient: Tensor, first: Tensor, second: Tensor, coefficients: Float[Tensor, "4 trial 1 1"]
) -> None:
    """Take one step of Adam in place, with the numbers of `_Stack._adam_coefficients`."""
    share, decay, scale, shift = coefficients
    first.lerp_(gradient, share)
    second.mul_(decay).addcmul_(gradient, gradient, value=1 - _BETAS[1])
    parameters.addcdiv_(first, torch.addcmul(shift, second.sqrt(), scale), value=-1)


def _adam_on(device: torch.device) -> Callable[..., None]:
    """Return the function that takes a step of Adam: on a GPU with Triton, a kernel that passes over memory once."""
    if device.type != "cuda" or find_spec("triton") is None:
        return _adam
    from identikit.tokens.adam_cuda import adam

    return partial(adam, share=1 - _BETAS[1])


def _in_batches(
    rows: list[Tensor], size: int, device: torch.device
) -> tuple[Int[Tensor, "group step batch"], Bool[Tensor, "group step batch"]]:
    """Cut each group's rows into batches of one size, and pad all groups to one length with invalid rows."""
    lengths = [len(group) for group in rows]
    steps = math.ceil(max(lengths) / size)
    padded = torch.stack([torch.cat([group, group[:1].expand(steps * size - len(group))]) for group in rows])
    valid = torch.arange(steps * size) < torch.tensor(lengths).unsqueeze(1)
    return padded.unflatten(1, (steps, size)).to(device), valid.unflatten(1, (steps, size)).to(device)


def _stacks(states: HiddenStates, trials: Sequence[Trial], settings: Settings) -> Iterator[list[Trial]]:
    """Group trials with parameters of one shape, of like steps and layers, into stacks that fit in memory."""
    device = torch.device(settings.device or states.inputs.device)
    free = int(0.8 * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else _CPU_MEMORY
    memory = settings.memory or free
    tokens, source = states.hidden.shape[1:]

    def shape(trial: Trial) -> tuple[str, int]:
        return trial.map, states.width(trial.task, trial.layer)

    def order(trial: Trial) -> tuple[tuple[str, int], float, int, int, float]:
        return shape(trial), trial.task.data_share, trial.layer, trial.fold, trial.learning_rate

    for (name, width), alike in groupby(sorted(trials, key=order), key=shape):
        inner = settings.hidden_size if name == "mlp" else 0
        parameters = (source + width) * inner or source * width
        activations = _VALIDATION_BATCHES * settings.batch_size * (source + 3 * (inner + width))
        numbers_per_trial = _COPIES_OF_PARAMETERS * parameters + activations
        stack: list[Trial] = []
        widths: dict[tuple[str, int | None], int] = {}  # of the vectors of each layer that the stack reads
        for trial in alike:
            read = {("features", trial.layer): source, ("targets", trial.task.target_layer(trial.layer)): width}
            widths |= read
            numbers = numbers_per_trial * (len(stack) + 1) + tokens * sum(widths.values())
            if stack and _FLOAT * numbers > memory:
                yield stack
                stack = []
                widths = read
            stack.append(trial)
        yield stack
