"""Training of linear maps and MLPs, many at once: every member of a grid is one slice of the same batched products.

Members differ in layer, fold, learning rate and distance. Their parameters are stacked along a first axis, Adam runs
over the stack with a learning rate and a step count for each member, and members that have stopped are dropped from
the stack. A member's start, batches and steps depend on the seed, its layer and its fold alone, so it ends the same in
any company.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import NamedTuple

import torch

from identikit.maths.neighbours import distance_gradient, paired_distance
from identikit.probes.dataset import HiddenStates
from identikit.probes.maps import FittedMap, apply_map, glorot_start
from identikit.probes.protocol import Progress, Settings, Task, fold_split, sentence_blocks, stream
from identikit.shapes import Bool, Float, Int, Tensor

__all__ = ["Grid", "Member", "Trial", "epoch_order", "train_grid"]

_BETAS = (0.9, 0.999)
_EPSILON = 1e-8
_COPIES_OF_PARAMETERS = 7
_CPU_MEMORY = 2 << 30
_FLOAT = 4
_VALIDATION_BATCHES = 4
_DROP_SHARE = 1 / 8


class Member(NamedTuple):
    """One training of the grid."""

    map: str
    distance: str
    layer: int
    fold: int
    learning_rate: float


class Trial(NamedTuple):
    """How one training went: its best mean distance on the validation sentences, and after how many epochs."""

    member: Member
    validation_loss: float
    best_epoch: int


class Grid(NamedTuple):
    """For each map, distance, layer and fold the trained map of the best learning rate; and all trials."""

    maps: list[FittedMap]
    trials: list[Trial]


def train_grid(
    states: HiddenStates,
    members: Sequence[Member],
    *,
    task: Task,
    settings: Settings,
    progress: Progress | None = None,
) -> Grid:
    """Train all members as Appendix B.1 says, in as few stacks as memory allows, and keep the best learning rates.

    Adam on batches of 256 tokens, shuffled anew in each epoch, minimises the mean of the distance that is tested. A
    member stops after 20 epochs without a lower mean distance on the validation sentences, or at 500 epochs, and its
    best parameters are restored. ``progress`` is called after each epoch, with the most epochs there can be.
    """
    stacks = list(_stacks(states, members, task, settings))
    best: dict[tuple, tuple[Trial, dict[str, Tensor]]] = {}
    trials = []
    for number, together in enumerate(stacks):
        stack = _Stack(together, _Data(states, together, task, settings), settings)
        while stack.members:
            for trial, parameters in stack.run_epoch():
                trials.append(trial)
                key = trial.member[:4]
                if key not in best or trial.validation_loss < best[key][0].validation_loss:
                    best[key] = trial, {name: value.cpu().clone() for name, value in parameters.items()}
            if progress:
                done = stack.epoch if stack.members else settings.epochs
                progress("training maps", number * settings.epochs + done, len(stacks) * settings.epochs)
        del stack
    order = {member: place for place, member in enumerate(members)}
    return Grid(
        maps=[
            FittedMap(
                *trial.member[:4],
                task=task,
                seed=settings.seed,
                parameters=parameters,
                chosen=trial.member.learning_rate,
                validation_loss=trial.validation_loss,
            )
            for trial, parameters in sorted(best.values(), key=lambda kept: order[kept[0].member])
        ],
        trials=sorted(trials, key=lambda trial: order[trial.member]),
    )


def epoch_order(rows: Int[Tensor, " row"], *, seed: int, fold: int, epoch: int) -> Int[Tensor, " row"]:
    """Shuffle a fold's training rows for one epoch; all members of the fold see the same order."""
    return rows[torch.from_numpy(stream("batches", seed, fold, epoch).permutation(len(rows)))]


class _Data:
    """The vectors that a stack reads, on its device, and the rows of each fold."""

    def __init__(self, states: HiddenStates, members: Sequence[Member], task: Task, settings: Settings) -> None:
        self.device = torch.device(settings.device) if settings.device else states.inputs.device
        layers = sorted({member.layer for member in members})
        self.folds = sorted({member.fold for member in members})
        self.features = torch.cat([states.layer(layer, device=self.device) for layer in layers])
        own_targets = layers if task.target == "previous" else layers[:1]
        self.targets = torch.cat([states.targets(task, layer, device=self.device) for layer in own_targets])
        tokens = states.inputs.shape[0]
        self.feature_start = {layer: place * tokens for place, layer in enumerate(layers)}
        self.target_start = {
            layer: task.offset + (place * tokens if len(own_targets) > 1 else 0) for place, layer in enumerate(layers)
        }
        blocks = sentence_blocks(states.n_sentences, seed=settings.seed)
        splits = [fold_split(blocks, fold, data_share=task.data_share) for fold in self.folds]
        self.train = [states.rows_with_target(split.train, task.offset) for split in splits]
        validation = [states.rows_with_target(split.validation, task.offset) for split in splits]
        self.validation = _in_batches(validation, _VALIDATION_BATCHES * settings.batch_size, self.device)
        self.validation_size = torch.tensor([len(rows) for rows in validation], device=self.device)


class _Stack:
    """Members that train together. Every tensor has them as its first axis; those of one distance lie side by side."""

    def __init__(self, members: Sequence[Member], data: _Data, settings: Settings) -> None:
        self.members = sorted(members, key=lambda member: member.distance)
        self.data = data
        self.settings = settings
        self.epoch = 0
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
            self.best_loss[place], self.best_epoch[place] = losses[place], self.epoch
        chosen = torch.tensor(improved, dtype=torch.long, device=self.data.device)
        for name, value in self.parameters.items():
            self.best[name][chosen] = value[chosen]
        last = self.epoch == self.settings.epochs
        self.stopped = [last or self.epoch - best >= self.settings.patience for best in self.best_epoch]
        return self._drop_stopped() if sum(self.stopped) >= _DROP_SHARE * len(self.stopped) else []

    def _take_steps(self) -> None:
        """Take one Adam step for each batch of each member's fold."""
        orders = [
            epoch_order(rows, seed=self.settings.seed, fold=fold, epoch=self.epoch)
            for fold, rows in zip(self.data.folds, self.data.train, strict=True)
        ]
        rows, valid = _in_batches(orders, self.settings.batch_size, self.data.device)
        coefficients = self._adam_coefficients(rows.shape[1])
        generators = self._dropout_generators()
        adam = _fused_adam() if self.data.device.type == "cuda" else _adam
        for step in range(rows.shape[1]):
            gradients = self._gradients(rows[:, step], valid[:, step], generators)
            for name, gradient in gradients.items():
                adam(self.parameters[name], gradient, self.first[name], self.second[name], coefficients[step])

    def _start(self) -> dict[str, Tensor]:
        starts: dict[tuple[int, int], dict[str, Tensor]] = {}
        widths = (self.data.features.shape[1], self.settings.hidden_size, self.data.targets.shape[1])
        for member in self.members:
            key = (member.layer, member.fold)
            if key not in starts:
                starts[key] = glorot_start(member.map, widths, (self.settings.seed, *key))
        each = [starts[member.layer, member.fold] for member in self.members]
        return {
            name: torch.stack([start[name].to(self.data.features.dtype) for start in each]).to(self.data.device)
            for name in each[0]
        }

    def _index_members(self) -> None:
        device, data = self.data.device, self.data
        self.fold = torch.tensor([data.folds.index(member.fold) for member in self.members], device=device)
        self.feature_start = torch.tensor([data.feature_start[member.layer] for member in self.members], device=device)
        self.target_start = torch.tensor([data.target_start[member.layer] for member in self.members], device=device)
        self.learning_rate = torch.tensor([member.learning_rate for member in self.members], dtype=torch.float64)
        names = [member.distance for member in self.members]
        self.spans = {
            name: slice(names.index(name), names.index(name) + names.count(name)) for name in sorted(set(names))
        }

    def _gather(
        self, rows: Int[Tensor, "fold batch"]
    ) -> tuple[Float[Tensor, "member batch d"], Float[Tensor, "member batch d_t"]]:
        rows = rows[self.fold]
        features = self.data.features.index_select(0, (rows + self.feature_start.unsqueeze(1)).flatten())
        targets = self.data.targets.index_select(0, (rows + self.target_start.unsqueeze(1)).flatten())
        return features.unflatten(0, rows.shape), targets.unflatten(0, rows.shape)

    def _gradients(
        self, rows: Int[Tensor, "fold batch"], valid: Bool[Tensor, "fold batch"], generators: list[torch.Generator]
    ) -> dict[str, Tensor]:
        """Differentiate each member's mean distance over its batch: closed form at the output, autograd in the map."""
        features, targets = self._gather(rows)
        counted = valid.to(features.dtype)
        weight = (counted / counted.sum(1, keepdim=True).clamp(min=1))[self.fold]
        parameters = {name: value.detach().requires_grad_() for name, value in self.parameters.items()}
        predicted = apply_map(parameters, features, kept=self._dropout(generators, features.dtype))
        outer = [
            distance_gradient(predicted.detach()[span], targets[span], weight[span], distance)
            for distance, span in self.spans.items()
        ]
        gradients = torch.autograd.grad(
            predicted, list(parameters.values()), outer[0] if len(outer) == 1 else torch.cat(outer)
        )
        return dict(zip(parameters, gradients, strict=True))

    def _adam_coefficients(self, steps: int) -> Float[Tensor, "step coefficient member 1 1"]:
        """Prepare an epoch's numbers of Adam for each member; those of a fold that has run out of batches do nothing.

        With bias corrections c1, c2 at step t, Adam's update lr·(m/c1)/(√(v/c2) + ε) is m/(√v·scale + shift) for scale
        = c1/(lr·√c2) and shift = ε·c1/lr: one pass over the stack less.
        """
        batches = torch.tensor([-(-len(rows) // self.settings.batch_size) for rows in self.data.train])[self.fold.cpu()]
        step = torch.arange(steps).unsqueeze(1)
        count = (self.epoch * batches + step + 1).double()
        first, second = 1 - _BETAS[0] ** count, 1 - _BETAS[1] ** count
        idle = step >= batches
        ones = torch.ones_like(count)
        together = torch.stack(
            [
                ((1 - _BETAS[0]) * ones).masked_fill(idle, 0),
                (_BETAS[1] * ones).masked_fill(idle, 1),
                first / (self.learning_rate * second.sqrt()),
                (_EPSILON * first / self.learning_rate).masked_fill(idle, torch.inf),
            ],
            dim=1,
        )
        return together.to(self.data.device, self.data.features.dtype)[..., None, None]

    def _dropout_generators(self) -> list[torch.Generator]:
        if self.settings.dropout == 0 or "weight" in self.parameters:
            return []
        seeds = [stream("dropout", self.settings.seed, fold, self.epoch).integers(2**62) for fold in self.data.folds]
        return [torch.Generator(self.data.device).manual_seed(int(seed)) for seed in seeds]

    def _dropout(
        self, generators: list[torch.Generator], dtype: torch.dtype
    ) -> Float[Tensor, "member batch d_h"] | None:
        """Draw which units of the MLPs' hidden layer stay, the same for all members of a fold."""
        if not generators:
            return None
        shape = (self.settings.batch_size, self.settings.hidden_size)
        drawn = [torch.rand(shape, generator=generator, device=self.data.device) for generator in generators]
        kept = torch.stack(drawn) >= self.settings.dropout
        return (kept.to(dtype) / (1 - self.settings.dropout))[self.fold]

    def _validation_losses(self) -> Float[Tensor, " member"]:
        total = torch.zeros(len(self.members), dtype=torch.float64, device=self.data.device)
        for rows, valid in zip(*(part.unbind(1) for part in self.data.validation), strict=True):
            features, targets = self._gather(rows)
            predicted = apply_map(self.parameters, features)
            for distance, span in self.spans.items():
                away = paired_distance(predicted[span], targets[span], distance)
                total[span] += (away.double() * valid[self.fold][span]).sum(1)
        return total / self.data.validation_size[self.fold]

    def _drop_stopped(self) -> list[tuple[Trial, dict[str, Tensor]]]:
        done = [
            (
                Trial(member, self.best_loss[place], self.best_epoch[place]),
                {name: value[place] for name, value in self.best.items()},
            )
            for place, member in enumerate(self.members)
            if self.stopped[place]
        ]
        stay = [place for place, stopped in enumerate(self.stopped) if not stopped]
        index = torch.tensor(stay, dtype=torch.long, device=self.data.device)
        for tensors in (self.parameters, self.first, self.second, self.best):
            tensors.update({name: value[index] for name, value in tensors.items()})
        self.members = [self.members[place] for place in stay]
        self.best_loss = [self.best_loss[place] for place in stay]
        self.best_epoch = [self.best_epoch[place] for place in stay]
        self.stopped = [False] * len(stay)
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


@cache
def _fused_adam() -> Callable[..., None]:
    """Return the same compiled: one pass over memory, where eager takes five."""
    return torch.compile(_adam, dynamic=True)


def _in_batches(
    rows: list[Tensor], size: int, device: torch.device
) -> tuple[Int[Tensor, "fold step batch"], Bool[Tensor, "fold step batch"]]:
    """Cut each fold's rows into batches; the last is filled up, and short folds with whole batches, by invalid rows."""
    steps = max(-(-len(some) // size) for some in rows)
    filled = torch.stack([torch.cat([some, some[:1].expand(steps * size - len(some))]) for some in rows])
    valid = torch.arange(steps * size) < torch.tensor([len(some) for some in rows]).unsqueeze(1)
    return filled.unflatten(1, (steps, size)).to(device), valid.unflatten(1, (steps, size)).to(device)


def _stacks(states: HiddenStates, members: Sequence[Member], task: Task, settings: Settings) -> Iterator[list[Member]]:
    """Group members with parameters of one shape, layer by layer, into stacks that fit in memory."""
    memory = settings.memory or _free_memory(torch.device(settings.device or states.inputs.device))
    tokens, source = states.hidden.shape[1:]

    def shape(member: Member) -> tuple[str, int]:
        return member.map, states.width(task, member.layer)

    for (name, width), alike in groupby(sorted(members, key=lambda member: (shape(member), member[2:])), key=shape):
        inner = settings.hidden_size if name == "mlp" else 0
        parameters = (source + width) * inner or source * width
        activations = _VALIDATION_BATCHES * settings.batch_size * (source + 3 * (inner + width))
        each = _FLOAT * (_COPIES_OF_PARAMETERS * parameters + activations)
        data = _FLOAT * tokens * (source + width)
        together: list[Member] = []
        for member in alike:
            layers = {other.layer for other in together} | {member.layer}
            if together and each * (len(together) + 1) + data * len(layers) > memory:
                yield together
                together = []
            together.append(member)
        yield together


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(0.8 * torch.cuda.mem_get_info(device)[0])
    return _CPU_MEMORY
