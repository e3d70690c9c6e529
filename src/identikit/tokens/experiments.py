"""The paper's experiments on token identifiability: maps are fitted, and the tokens that they recover are counted."""

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch

from identikit.errors import InputError
from identikit.maths.neighbours import Nearest, nearest_in_sentences, number_distinct
from identikit.progress import Progress, silent
from identikit.shapes import Float, Int, Tensor
from identikit.tokens.maps import FittedMap
from identikit.tokens.protocol import MapChoice, Settings, Task, fold_split, sentence_blocks
from identikit.tokens.ridge import fit_ridge
from identikit.tokens.states import HiddenStates
from identikit.tokens.train import Fit, Trial, train_maps

if TYPE_CHECKING:
    from pandas import DataFrame

_PER_FOLD = ("fold", "rate", "unique_rate", "duplicates", "n_tokens")
_TEST_OVER_TRAIN = 3 / 14  # blocks of sentences; see `fold_split`
SHARES = (0.5, 0.8, 0.9, 1.0)  # of the training data (Appendix B.2)


class Experiment(NamedTuple):
    """What maps are fitted for, and where they are tested.

    - `tasks`: what they are fitted for; `splits`: the parts of the data on which they are tested
    - `on_all_layers`: test them on every layer, on others than their own only on the test sentences
    """

    tasks: tuple[Task, ...] = (Task(),)
    on_all_layers: bool = False
    splits: tuple[str, ...] = ("test",)


EXPERIMENTS = {
    "same layer": Experiment(),
    "across layers": Experiment(on_all_layers=True),
    "generalisation": Experiment(tuple(Task(data_share=share) for share in SHARES), splits=("train", "test")),
    "previous layer": Experiment((Task(target="previous"),)),
    "neighbours": Experiment(tuple(Task(offset=offset) for offset in (-3, -2, -1, 1, 2, 3))),
}
"""The experiments by their public names; `token_identifiability` says what each is for."""


class Rate(NamedTuple):
    """One row of the table of rates.

    `rate` is the share of tokens recovered, `unique_rate` the same over tokens whose target occurs once in its
    sentence (NaN without any), `duplicates` the share of the others, `chance` 1 over the mean sentence length of
    the dataset, and `n_tokens` the number of tokens looked up. Layers count from 0.
    """

    model: str
    map: str
    distance: str
    layer: int
    test_layer: int
    target: str
    offset: int
    data_share: float
    fold: int
    split: str
    rate: float
    unique_rate: float
    duplicates: float
    chance: float
    n_tokens: int


def run_experiment(
    experiment: Experiment, states: HiddenStates, choice: MapChoice, settings: Settings, progress: Progress = silent
) -> tuple[list[Rate], Fit]:
    """Fit maps, and count the tokens that they recover; return the rates and the fit."""
    tasks = experiment.tasks
    fit = fit_maps(states, choice, tasks=tasks, settings=settings, progress=progress)
    layers = range(states.n_layers) if experiment.on_all_layers else None
    rates = measure(
        states, fit.maps, test_layers=layers, splits=experiment.splits, device=settings.device, progress=progress
    )
    rates.sort(key=lambda rate: tasks.index(Task(rate.target, rate.offset, rate.data_share)))
    rates.sort(key=lambda rate: experiment.splits.index(rate.split))
    return rates, fit


def fit_maps(
    states: HiddenStates, choice: MapChoice, *, tasks: Sequence[Task], settings: Settings, progress: Progress = silent
) -> Fit:
    """Fit the maps for all tasks, layers, folds and distances.

    Linear maps and MLPs all train together, which is faster than one task after another and gives the same maps. Ridge
    maps are solved; naive maps have nothing to fit. Maps and trials come in the order of the tasks.
    """
    tasks = tuple(dict.fromkeys(tasks))
    layers = tuple(range(states.n_layers)) if choice.layers is None else choice.layers
    for task in tasks:
        _refuse_impossible_fits(states, task, layers if "naive" in choice.maps else (), settings)
    folds = range(settings.folds)
    fitted: list[FittedMap] = []
    if "naive" in choice.maps:
        for cell in product(choice.distances, layers, folds, tasks):
            fitted.append(FittedMap("naive", *cell, settings.seed, {}))
    learned = [name for name in ("linear", "mlp") if name in choice.maps]
    cells = product(tasks, learned, choice.distances, layers, folds, settings.learning_rates)
    trials = [Trial(name, distance, layer, fold, task, rate) for task, name, distance, layer, fold, rate in cells]
    trained = train_maps(states, trials, settings=settings, progress=progress)
    fitted += trained.maps
    if "ridge" in choice.maps:
        for task in tasks:
            fitted += fit_ridge(states, layers, choice.distances, task=task, settings=settings, progress=progress)
    return Fit(sorted(fitted, key=lambda fitted_map: tasks.index(fitted_map.task)), trained.trials)


def _refuse_impossible_fits(states: HiddenStates, task: Task, naive_layers: Sequence[int], settings: Settings) -> None:
    """Refuse texts too short to have neighbours, and the naive map between vectors of different widths."""
    blocks = sentence_blocks(states.n_sentences, seed=settings.seed)
    lengths = states.lengths.cpu()
    for fold in range(settings.folds):
        for name, sentences in fold_split(blocks, fold, data_share=task.data_share)._asdict().items():
            if int(lengths[sentences].max()) <= abs(task.offset):
                raise InputError(
                    f"Recovering neighbours at offset {task.offset}: no {name} text of fold {fold} has more than "
                    f"{abs(task.offset)} tokens. Give longer texts or a smaller offset."
                )
    width = states.hidden.shape[2]
    for layer in naive_layers:
        target = states.width(task, layer)
        if target != width:
            raise InputError(
                f"Fitting the naive map to layer {layer} of {states.model}: hidden vectors have {width} numbers and "
                f"their targets {target}, so one cannot be looked up among the others. Choose maps without 'naive'."
            )


def measure(
    states: HiddenStates,
    maps: Sequence[FittedMap],
    *,
    test_layers: Sequence[int] | None = None,
    splits: Sequence[str] = ("test",),
    device: str | None = None,
    progress: Progress = silent,
) -> list[Rate]:
    """Look up the tokens of each map's fold and count those recovered.

    Each map is tested on the layer it was fitted to, or on all `test_layers` (Fig. 2b). `splits` are any of "train",
    "validation" and "test"; on other layers than a map's own only the last.
    """
    test_device = torch.device(device or states.inputs.device)
    layers = sorted({fitted.layer for fitted in maps}) if test_layers is None else list(test_layers)
    rates = []
    for number, layer in enumerate(layers, start=1):
        hidden = states.layer(layer, device=test_device)
        candidates: dict[str, tuple[Tensor, Tensor]] = {}  # by target: vectors, and which of them are equal
        for fitted in maps:
            if test_layers is None and fitted.layer != layer:
                continue
            target = fitted.task.target
            if target not in candidates:
                vectors = states.targets(fitted.task, layer, device=test_device)
                candidates[target] = vectors, number_distinct(vectors)
            for split in splits:
                if split != "test" and layer != fitted.layer:
                    continue
                rate = _rate(states, fitted, split, hidden, *candidates[target])
                rates.append(rate._replace(test_layer=layer))
        progress("looking tokens up", number, len(layers))
    return rates


def _rate(
    states: HiddenStates,
    fitted: FittedMap,
    split: str,
    hidden: Float[Tensor, "token d"],
    candidates: Float[Tensor, "token d_t"],
    identity: Int[Tensor, " token"],
) -> Rate:
    """Return how often a map recovers the tokens of a part of its fold from hidden vectors."""
    task = fitted.task
    blocks = sentence_blocks(states.n_sentences, seed=fitted.seed)
    sentences = getattr(fold_split(blocks, fitted.fold, data_share=task.data_share), split)
    rows = states.rows(sentences).to(hidden.device)
    nearest = nearest_in_sentences(
        fitted(hidden[rows]),
        candidates[rows],
        lengths=states.lengths.cpu()[sentences],
        identity=identity[rows],
        distance=fitted.distance,
        offset=task.offset,
    )
    looked_up = nearest.winner >= 0
    hit = nearest.hit[looked_up].double()
    duplicated = nearest.duplicated[looked_up]
    return Rate(
        model=states.model,
        map=fitted.map,
        distance=fitted.distance,
        layer=fitted.layer,
        test_layer=fitted.layer,
        target=task.target,
        offset=task.offset,
        data_share=task.data_share,
        fold=fitted.fold,
        split=split,
        rate=float(hit.mean()),
        unique_rate=float(hit[~duplicated].mean()),
        duplicates=float(duplicated.double().mean()),
        chance=states.chance,
        n_tokens=len(hit),
    )


def recover(states: HiddenStates, maps: Sequence[FittedMap], *, map: str, distance: str) -> dict[int, Nearest]:
    """Return for each layer what is nearest to each mapped token of one sentence, with maps of the first fold.

    `states` holds only that sentence. One that the maps were trained on looks better than a new one would.
    """
    own_input = [fitted for fitted in maps if fitted.task == Task()]
    nearest = {}
    for fitted in sorted(own_input, key=lambda fitted: fitted.layer):
        if (fitted.map, fitted.distance, fitted.fold) == (map, distance, 0):
            nearest[fitted.layer] = nearest_in_sentences(
                fitted(states.layer(fitted.layer)),
                states.targets(Task(), fitted.layer),
                lengths=states.lengths,
                identity=states.identity,
                distance=distance,
            )
    if not nearest:
        pairs = sorted({f"{fitted.map} {fitted.distance}" for fitted in own_input})
        raise InputError(
            f"Reading the identity map of a text: no {map} map for {distance} distance and fold 0 was fitted. Use "
            f"one of those that were: {', '.join(pairs) or 'none'}."
        )
    return nearest


def summary(rates: "DataFrame") -> "DataFrame":
    """Average rates over folds, with their standard deviation and a 95 % confidence interval of the mean.

    Folds share training sentences, so their rates are not independent: the interval is Student's with the variance of
    Nadeau and Bengio (2003), s²·(1/folds + test tokens/training tokens), cut at 0 and 1. It is NaN for a single fold.
    """
    from scipy.stats import t as student

    by = [name for name in rates.columns if name not in _PER_FOLD]
    grouped = rates.groupby(by, sort=False, dropna=False)
    table = grouped.agg(
        folds=("rate", "size"),
        rate=("rate", "mean"),
        deviation=("rate", "std"),
        unique_rate=("unique_rate", "mean"),
        duplicates=("duplicates", "mean"),
    ).reset_index()
    spread = (1 / table["folds"] + _TEST_OVER_TRAIN / table["data_share"]) ** 0.5
    half = student.ppf(0.975, table["folds"].clip(lower=2) - 1) * table["deviation"] * spread
    return table.assign(low=(table["rate"] - half).clip(lower=0.0), high=(table["rate"] + half).clip(upper=1.0))


def mean_rates(rates: "DataFrame", by: Sequence[str]) -> "DataFrame":
    """Average rates over folds: rate, low and high (95 % confidence, NaN for one fold), folds, tokens of a fold."""
    means = summary(rates.filter([*by, "data_share", "fold", "rate", "unique_rate", "duplicates"]))
    tokens = rates.groupby(list(by)).agg(tokens=("n_tokens", "mean")).reset_index()
    return means.filter([*by, "rate", "low", "high", "folds"]).merge(tokens, on=list(by))
