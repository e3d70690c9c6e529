"""Fitting maps of every kind for some tasks, with what cannot work refused beforehand."""

from collections.abc import Sequence
from itertools import product

from identikit.errors import InputError
from identikit.progress import Progress, silent
from identikit.tokens.maps import FittedMap
from identikit.tokens.protocol import MapChoice, Settings, Task, fold_split, sentence_blocks
from identikit.tokens.ridge import fit_ridge
from identikit.tokens.states import HiddenStates
from identikit.tokens.train import Grid, Member, train_grid


def fit_maps(
    states: HiddenStates,
    choice: MapChoice,
    *,
    tasks: Sequence[Task],
    settings: Settings,
    progress: Progress = silent,
) -> Grid:
    """Fit the maps for all tasks, layers, folds and distances, and list how each training went.

    Linear maps and MLPs of all tasks, layers, folds, learning rates and distances train together: several tasks at once
    are faster than one after another, and give the same maps. Ridge maps are solved; naive maps have nothing to fit.
    Maps and trials come in the order of the tasks.
    """
    tasks = tuple(dict.fromkeys(tasks))
    layers = tuple(range(states.n_layers)) if choice.layers is None else choice.layers
    for task in tasks:
        _refuse_missing_neighbours(states, task, settings)
        if "naive" in choice.maps:
            _refuse_naive_between_widths(states, task, layers)
    folds = range(settings.folds)
    fitted: list[FittedMap] = []
    if "naive" in choice.maps:
        fitted += [
            FittedMap("naive", *cell, settings.seed, {}) for cell in product(choice.distances, layers, folds, tasks)
        ]
    trained = [name for name in ("linear", "mlp") if name in choice.maps]
    members = [
        Member(name, distance, layer, fold, task, rate)
        for task, name, distance, layer, fold, rate in product(
            tasks, trained, choice.distances, layers, folds, settings.learning_rates
        )
    ]
    grid = train_grid(states, members, settings=settings, progress=progress)
    fitted += grid.maps
    if "ridge" in choice.maps:
        for task in tasks:
            fitted += fit_ridge(states, layers, choice.distances, task=task, settings=settings, progress=progress)
    return Grid(maps=sorted(fitted, key=lambda each: tasks.index(each.task)), trials=grid.trials)


def _refuse_naive_between_widths(states: HiddenStates, task: Task, layers: tuple[int, ...]) -> None:
    width = states.hidden.shape[2]
    for layer in layers:
        target = states.width(task, layer)
        if target != width:
            raise InputError(
                f"Fitting the naive map to layer {layer} of {states.model}: hidden vectors have {width} numbers and "
                f"their targets {target}, so one cannot be looked up among the others. Choose maps without 'naive'."
            )


def _refuse_missing_neighbours(states: HiddenStates, task: Task, settings: Settings) -> None:
    blocks = sentence_blocks(states.n_sentences, seed=settings.seed)
    longest = states.lengths.cpu()
    for fold in range(settings.folds):
        for name, part in fold_split(blocks, fold, data_share=task.data_share)._asdict().items():
            if int(longest[part].max()) <= abs(task.offset):
                raise InputError(
                    f"Recovering neighbours at offset {task.offset}: no {name} text of fold {fold} has more than "
                    f"{abs(task.offset)} tokens. Give longer texts or a smaller offset."
                )
