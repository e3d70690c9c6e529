"""The paper's experiments on token identifiability, each giving one tidy table of rates.

All take the hidden states of a dataset. Tables of several models or datasets are put side by side with
`pandas.concat`.
"""

from collections.abc import Callable, Sequence
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
    """What an experiment gives: rates, the trials of learning rates, and the fitted maps."""

    rates: list[Rate]
    trials: list[Trial]
    maps: tuple[FittedMap, ...]


def same_layer(
    states: HiddenStates, choice: MapChoice, settings: Settings, *, progress: Progress = silent
) -> Experiment:
    """Train and test on the same layer (Figures 2a, 38 and 39)."""
    return _run(states, choice, settings, _Plan([Task()]), progress)


def across_layers(
    states: HiddenStates, choice: MapChoice, settings: Settings, *, progress: Progress = silent
) -> Experiment:
    """Train on each of the layers and test on all of them (Figures 2b, 8, 9 and 10)."""
    return _run(states, choice, settings, _Plan([Task()], test_layers=range(states.n_layers)), progress)


def generalisation(
    states: HiddenStates,
    choice: MapChoice,
    settings: Settings,
    *,
    shares: Sequence[float] = (0.5, 0.8, 0.9, 1.0),
    progress: Progress = silent,
) -> Experiment:
    """Compare rates on training and test sentences, for shares of the training data (Figure 7, Appendix B.2)."""
    tasks = [Task(data_share=share) for share in shares]
    return _run(states, choice, settings, _Plan(tasks, splits=("train", "test")), progress)


def previous_layer(
    states: HiddenStates, choice: MapChoice, settings: Settings, *, progress: Progress = silent
) -> Experiment:
    """Recover each layer's own input: e_i^(l-1) from e_i^l, and x_i from e_i^1 (Figures 11 to 13)."""
    return _run(states, choice, settings, _Plan([Task(target="previous")]), progress)


def neighbouring_tokens(
    states: HiddenStates,
    choice: MapChoice,
    settings: Settings,
    *,
    offsets: Sequence[int] = (-3, -2, -1, 1, 2, 3),
    progress: Progress = silent,
) -> Experiment:
    """Recover the input x_(i+k) of a neighbour from e_i^l (Figures 14 to 17); tokens without it are left out."""
    return _run(states, choice, settings, _Plan([Task(offset=offset) for offset in offsets]), progress)


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


class _Plan(NamedTuple):
    """What an experiment fits and where it tests."""

    tasks: Sequence[Task]
    test_layers: Sequence[int] | None = None
    splits: Sequence[str] = ("test",)


def _run(states: HiddenStates, choice: MapChoice, settings: Settings, plan: _Plan, progress: Progress) -> Experiment:
    grid = fit_maps(states, choice, tasks=plan.tasks, settings=settings, progress=progress)
    rates = measure(
        states, grid.maps, test_layers=plan.test_layers, splits=plan.splits, device=settings.device, progress=progress
    )
    rates.sort(key=lambda rate: plan.tasks.index(Task(rate.target, rate.offset, rate.data_share)))
    return Experiment(rates, grid.trials, tuple(grid.maps))


EXPERIMENTS: dict[str, Callable[..., Experiment]] = {
    "same layer": same_layer,
    "across layers": across_layers,
    "generalisation": generalisation,
    "previous layer": previous_layer,
    "neighbours": neighbouring_tokens,
}
"""Every experiment by the name that users call it."""
