"""Training of linear maps and MLPs, many at once: every member of a grid is one slice of the same batched products.

Members differ in layer, fold, task, learning rate and distance. Their parameters are stacked along a first axis, Adam
runs over the stack with a learning rate and a step count for each member, and members that have stopped are dropped
from the stack. A member's start, batches and steps depend only on the seed, its layer, its fold and its task, so it
ends the same in any company.
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
_COPIES_OF_PARAMETERS = 7  # held per member: parameters, gradients, Adam's two moments, the best, and what a step makes
_CPU_MEMORY = 2 << 30  # bytes that a stack may take
_FLOAT = 4  # bytes
_VALIDATION_BATCHES = 4  # times the batch size: rows that are validated at once
_DROP_SHARE = 1 / 8  # of a stack's members must have stopped before it is made smaller


class Member(NamedTuple):
    """One training of the grid."""

    map: str
    distance: str
    layer: int
    fold: int
    task: Task
    learning_rate: float

    @property
    def group(self) -> "_Group":
        """The members that it shares its batches with."""
        return _Group(self.fold, self.task.offset, self.task.data_share)


class Trial(NamedTuple):
    """How one training went: its best mean distance on the validation sentences, and after how many epochs."""

    member: Member
    validation_loss: float
    best_epoch: int

    def row(self) -> dict[str, str | int | float]:
        """Return it as a row of a table."""
        member = self.member._asdict()
        task = asdict(member.pop("task"))
        return {**member, **task, "validation_loss": self.validation_loss, "best_epoch": self.best_epoch}


class Grid(NamedTuple):
    """For each map, distance, layer, fold and task the trained map of the best learning rate; and all trials."""

    maps: list[FittedMap]
    trials: list[Trial]


def train_grid(
    states: HiddenStates, members: Sequence[Member], *, settings: Settings, progress: Progress = silent
) -> Grid:
    """Train all members as Appendix B.1 says, in as few stacks as memory allows, and keep the best learning rates.

    Adam on batches of 256 tokens, reshuffled in each epoch, minimises the mean of the distance that is tested. A
    member stops after 20 epochs without a lower mean distance on the validation sentences, or at 500 epochs, and its
    best parameters are restored. `progress` is called after each epoch, with the most epochs there can be.
    """
    stacks = list(_stacks(states, members, settings))
    best: dict[tuple[str, str, int, int, Task], tuple[Trial, dict[str, Tensor]]] = {}  # without the learning rate
    trials = []
    for number, together in enumerate(stacks):
        stack = _Stack(states, together, settings)
        while stack.members:
            for trial, trained in stack.run_epoch():
                trials.append(trial)
                cell = trial.member[:-1]
                if cell not in best or trial.validation_loss < best[cell][0].validation_loss:
                    best[cell] = trial, {name: value.cpu().clone() for name, value in trained.items()}
            done = stack.epoch if stack.members else settings.epochs
            progress("training maps", number * settings.epochs + done, len(stacks) * settings.epochs)
        del stack
    order = {member: place for place, member in enumerate(members)}
    maps = [
        FittedMap(*cell, settings.seed, parameters, trial.member.learning_rate, trial.validation_loss)
        for cell, (trial, parameters) in sorted(best.items(), key=lambda item: order[item[1][0].member])
    ]
    return Grid(maps, sorted(trials, key=lambda trial: order[trial.member]))


def epoch_order(rows: Int[Tensor, " row"], *, seed: int, fold: int, epoch: int) -> Int[Tensor, " row"]:
    """Shuffle training rows of a fold for one epoch; all members of the fold that read them see the same order."""
    return rows[torch.from_numpy(stream("batches", seed, fold, epoch).permutation(len(rows)))]


class _Group(NamedTuple):
    """What decides which rows members read and in which order: those of one group share their batches."""

    fold: int
    offset: int
    data_share: float


class _Stack:
    """Members that train together, and the vectors that they read.

    Every tensor has members as its first axis; those of one distance lie side by side.
    """

    def __init__(self, states: HiddenStates, members: Sequence[Member], settings: Settings) -> None:
        self.members = sorted(members, key=lambda member: member.distance)
        self.settings = settings
        self.device = torch.device(settings.device) if settings.device else states.inputs.device
        self.epoch = 0
        layers = sorted({member.layer for member in members})
        sources = {member.task.target_layer(member.layer): (member.task, member.layer) for member in members}
        self.features = torch.cat([states.layer(layer, device=self.device) for layer in layers])
        self.targets = torch.cat([states.targets(*source, device=self.device) for source in sources.values()])
        tokens = states.inputs.shape[0]
        self.start_of_layer = {layer: place * tokens for place, layer in enumerate(layers)}
        self.start_of_target = {source: place * tokens for place, source in enumerate(sources)}
        blocks = sentence_blocks(states.n_sentences, seed=settings.seed)
        self.rows: dict[_Group, tuple[Tensor, Tensor]] = {}  # of training and of validation
        for group in {member.group for member in members}:
            split = fold_split(blocks, group.fold, data_share=group.data_share)
            train = states.rows_with_target(split.train, group.offset)
            self.rows[group] = train, states.rows_with_target(split.validation, group.offset)
        self.parameters = self._start()
        self.first = {name: torch.zeros_like(value) for name, value in self.parameters.items()}
        self.second = {name: torch.zeros_like(value) for name, value in self.parameters.items()}
        self.best = {name: value.clone() for name, value in self.parameters.items()}
        self.best_loss = [float("inf")] * len(self.members)
        self.best_epoch = [0] * len(self.members)
        self.stopped = [False] * len(self.members)
        self._index_members()

    def run_epoch(self) -> list[tuple[Trial, dict[str, Tensor]]]:
        """Train and validate once; return the members that are dropped, with their best parameters."""
        self._take_steps()
        self.epoch += 1
        losses = self._validation_losses().tolist()
        improved = [
            place for place, loss in enumerate(losses) if loss < self.best_loss[place] and not self.stopped[place]
        ]
        for place in improved:
            self.best_loss[place] = losses[place]
            self.best_epoch[place] = self.epoch
        chosen = torch.tensor(improved, dtype=torch.long, device=self.device)
        for name, value in self.parameters.items():
            self.best[name][chosen] = value[chosen]
        last = self.epoch == self.settings.epochs
        self.stopped = [last or self.epoch - best >= self.settings.patience for best in self.best_epoch]
        return self._drop_stopped() if sum(self.stopped) >= _DROP_SHARE * len(self.stopped) else []

    def _take_steps(self) -> None:
        """Take one Adam step for each batch of each member's group."""
        orders = []
        for group in self.groups:
            rows = self.rows[group][0]
            orders.append(epoch_order(rows, seed=self.settings.seed, fold=group.fold, epoch=self.epoch))
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
        for member in self.members:
            key = (member.layer, member.fold)
            if key not in starts:
                starts[key] = glorot_start(member.map, widths, (self.settings.seed, *key))
        each = [starts[member.layer, member.fold] for member in self.members]
        return {name: torch.stack([start[name].to(self.features) for start in each]) for name in each[0]}

    def _index_members(self) -> None:
        groups = [member.group for member in self.members]
        self.groups = sorted(set(groups))
        self.group = torch.tensor([self.groups.index(group) for group in groups], device=self.device)
        validation = [self.rows[group][1] for group in self.groups]
        self.validation = _in_batches(validation, _VALIDATION_BATCHES * self.settings.batch_size, self.device)
        self.validation_size = torch.tensor([len(rows) for rows in validation], device=self.device)
        feature_start = []
        target_start = []
        for member in self.members:
            feature_start.append(self.start_of_layer[member.layer])
            target_start.append(self.start_of_target[member.task.target_layer(member.layer)] + member.task.offset)
        self.feature_start = torch.tensor(feature_start, device=self.device)
        self.target_start = torch.tensor(target_start, device=self.device)
        self.learning_rate = torch.tensor([member.learning_rate for member in self.members], dtype=torch.float64)
        names = [member.distance for member in self.members]
        self.spans = {
            name: slice(names.index(name), names.index(name) + names.count(name)) for name in sorted(set(names))
        }

    def _gather(
        self, rows: Int[Tensor, "group batch"]
    ) -> tuple[Float[Tensor, "member batch d"], Float[Tensor, "member batch d_t"]]:
        rows = rows[self.group]
        features = self.features.index_select(0, (rows + self.feature_start.unsqueeze(1)).flatten())
        targets = self.targets.index_select(0, (rows + self.target_start.unsqueeze(1)).flatten())
        return features.unflatten(0, rows.shape), targets.unflatten(0, rows.shape)

    @torch.enable_grad()
    def _gradients(self, rows: Int[Tensor, "group batch"], valid: Bool[Tensor, "group batch"]) -> dict[str, Tensor]:
        """Differentiate each member's mean distance over its batch: closed form at the output, autograd in the map."""
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

    def _adam_coefficients(self, steps: int) -> Float[Tensor, "step coefficient member 1 1"]:
        """Prepare an epoch's numbers of Adam for each member; those of a group that has run out of batches do nothing.

        With bias corrections c1, c2 at step t, Adam's update lr·(m/c1)/(√(v/c2) + ε) is m/(√v·scale + shift) for scale
        = c1/(lr·√c2) and shift = ε·c1/lr: one pass over the stack less.
        """
        batches = [math.ceil(len(self.rows[group][0]) / self.settings.batch_size) for group in self.groups]

        def powers(beta: float, step: int) -> list[float]:
            # In Python, as the last bit of torch's power depends on the place in a tensor.
            return [beta ** (self.epoch * count + step + 1) for count in batches]

        decays = torch.tensor([[powers(beta, step) for step in range(steps)] for beta in _BETAS], dtype=torch.float64)
        group = self.group.cpu()
        first, second = 1 - decays[..., group]
        idle = torch.arange(steps).unsqueeze(1) >= torch.tensor(batches)[group]
        ones = torch.ones_like(first)
        together = torch.stack(
            [
                ((1 - _BETAS[0]) * ones).masked_fill(idle, 0),
                (_BETAS[1] * ones).masked_fill(idle, 1),
                first / (self.learning_rate * second.sqrt()),
                (_EPSILON * first / self.learning_rate).masked_fill(idle, torch.inf),
            ],
            dim=1,
        )
        return together.to(self.device, self.features.dtype)[..., None, None]

    def _validation_losses(self) -> Float[Tensor, " member"]:
        total = torch.zeros(len(self.members), dtype=torch.float64, device=self.device)
        all_rows, all_valid = self.validation
        for rows, valid in zip(all_rows.unbind(1), all_valid.unbind(1), strict=True):
            features, targets = self._gather(rows)
            predicted = apply_map(self.parameters, features)
            for distance, span in self.spans.items():
                distances = paired_distance(predicted[span], targets[span], distance)
                total[span] += (distances.double() * valid[self.group][span]).sum(1)
        return total / self.validation_size[self.group]

    def _drop_stopped(self) -> list[tuple[Trial, dict[str, Tensor]]]:
        done = []
        stay = []
        for place, member in enumerate(self.members):
            if self.stopped[place]:
                trial = Trial(member, self.best_loss[place], self.best_epoch[place])
                done.append((trial, {name: value[place] for name, value in self.best.items()}))
            else:
                stay.append(place)
        index = torch.tensor(stay, dtype=torch.long, device=self.device)
        for tensors in (self.parameters, self.first, self.second, self.best):
            tensors.update({name: value[index] for name, value in tensors.items()})
        self.members = [self.members[place] for place in stay]
        self.best_loss = [self.best_loss[place] for place in stay]
        self.best_epoch = [self.best_epoch[place] for place in stay]
        self.stopped = [False] * len(stay)
        if stay:
            self._index_members()
        return done


def _adam(
    parameters: Tensor, gradient: Tensor, first: Tensor, second: Tensor, coefficients: Float[Tensor, "4 member 1 1"]
) -> None:
    """Take one step of Adam in place, with the numbers of `_Stack._adam_coefficients`."""
    share, decay, scale, shift = coefficients
    first.lerp_(gradient, share)
    second.mul_(decay).addcmul_(gradient, gradient, value=1 - _BETAS[1])
    parameters.addcdiv_(first, torch.addcmul(shift, second.sqrt(), scale), value=-1)


def _adam_on(device: torch.device) -> Callable[..., None]:
    """Return what takes a step of Adam there: on a GPU with Triton, a kernel that passes over memory once."""
    if device.type != "cuda" or find_spec("triton") is None:
        return _adam
    from identikit.tokens.adam_cuda import adam

    return partial(adam, kept=1 - _BETAS[1])


def _in_batches(
    rows: list[Tensor], size: int, device: torch.device
) -> tuple[Int[Tensor, "group step batch"], Bool[Tensor, "group step batch"]]:
    """Cut each group's rows into batches of one size, and fill all groups up to one length with invalid rows."""
    lengths = [len(of_group) for of_group in rows]
    steps = math.ceil(max(lengths) / size)
    filled = [torch.cat([of_group, of_group[:1].expand(steps * size - len(of_group))]) for of_group in rows]
    valid = torch.arange(steps * size) < torch.tensor(lengths).unsqueeze(1)
    return torch.stack(filled).unflatten(1, (steps, size)).to(device), valid.unflatten(1, (steps, size)).to(device)


def _stacks(states: HiddenStates, members: Sequence[Member], settings: Settings) -> Iterator[list[Member]]:
    """Group members with parameters of one shape, of like steps and layers, into stacks that fit in memory."""
    device = torch.device(settings.device or states.inputs.device)
    free = int(0.8 * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else _CPU_MEMORY
    memory = settings.memory or free
    tokens, source = states.hidden.shape[1:]

    def shape(member: Member) -> tuple[str, int]:
        return member.map, states.width(member.task, member.layer)

    def order(member: Member) -> tuple[tuple[str, int], float, int, int, float]:
        return shape(member), member.task.data_share, member.layer, member.fold, member.learning_rate

    for (name, width), alike in groupby(sorted(members, key=order), key=shape):
        inner = settings.hidden_size if name == "mlp" else 0
        parameters = (source + width) * inner or source * width
        activations = _VALIDATION_BATCHES * settings.batch_size * (source + 3 * (inner + width))
        each = _COPIES_OF_PARAMETERS * parameters + activations
        together: list[Member] = []
        widths: dict[tuple[str, int | None], int] = {}  # of the vectors of each layer that the stack reads
        for member in alike:
            needed = {("features", member.layer): source, ("targets", member.task.target_layer(member.layer)): width}
            widths |= needed
            if together and _FLOAT * (each * (len(together) + 1) + tokens * sum(widths.values())) > memory:
                yield together
                together = []
                widths = needed
            together.append(member)
        yield together
