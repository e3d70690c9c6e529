"""The paper's experiments on token identifiability, each giving one tidy table of rates.

All take the hidden states of a dataset. Tables of several models or datasets are put side by side with
`pandas.concat`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from identikit.progress import Progress, silent
from identikit.tokens.evaluate import Rate, measure
from identikit.tokens.fit import fit_maps
from identikit.tokens.maps import FittedMap
from identikit.tokens.protocol import MapChoice, Settings, Task
from identikit.tokens.states import HiddenStates
from identikit.tokens.train import Trial

if TYPE_CHECKING:
    from pandas import DataFrame

_PER_FOLD = ("fold", "rate", "unique_rate", "duplicates", "n_tokens")
_TEST_OVER_TRAIN = 3 / 14


class Experiment(NamedTuple):
    """What maps are fitted for, and where they are tested: on their own layer or on all, on which parts of the data."""

    tasks: tuple[Task, ...] = (Task(),)
    on_all_layers: bool = False
    splits: tuple[str, ...] = ("test",)


EXPERIMENTS = {
    "same layer": Experiment(),
    "across layers": Experiment(on_all_layers=True),
    "generalisation": Experiment(
        tuple(Task(data_share=share) for share in (0.5, 0.8, 0.9, 1.0)), splits=("train", "test")
    ),
    "previous layer": Experiment((Task(target="previous"),)),
    "neighbours": Experiment(tuple(Task(offset=offset) for offset in (-3, -2, -1, 1, 2, 3))),
}
"""Every experiment by the name that users call it; `token_identifiability` says what each is for."""


class Measured(NamedTuple):
    """What an experiment gives: rates, the trials of learning rates, and the fitted maps."""

    rates: list[Rate]
    trials: list[Trial]
    maps: tuple[FittedMap, ...]


def run_experiment(
    experiment: Experiment, states: HiddenStates, choice: MapChoice, settings: Settings, progress: Progress = silent
) -> Measured:
    """Fit maps, and count the tokens that they recover."""
    tasks = experiment.tasks
    grid = fit_maps(states, choice, tasks=tasks, settings=settings, progress=progress)
    layers = range(states.n_layers) if experiment.on_all_layers else None
    rates = measure(
        states, grid.maps, test_layers=layers, splits=experiment.splits, device=settings.device, progress=progress
    )
    rates.sort(key=lambda rate: tasks.index(Task(rate.target, rate.offset, rate.data_share)))
    return Measured(rates, grid.trials, tuple(grid.maps))


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
