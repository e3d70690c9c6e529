"""Numbers that were measured on a sample: each with its standard error, alone and by layer."""

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import permutation_test, rankdata, spearmanr

MANY = 5  # from so many folds on, their spread says how uncertain their mean is
OVERLAP = 3 / 14  # test over training texts: folds share their training texts (Nadeau and Bengio 2003)
FEW = 30  # up to so many numbers, p-values come from permutations
PERMUTATIONS = 50_000  # all there are of 8 numbers or fewer
CLUSTERED = 1.25  # how much larger errors are because tokens of a text are alike: 0.9 to 1.3 for naive rates on MRPC


class Measurement(NamedTuple):
    """A number measured on a sample, with the variance of its mean over tokens.

    `folds` has its value in each fold, or the one value there is. Differences and averages are taken fold by fold, so
    that what folds have in common cancels.
    """

    folds: NDArray[np.float64]
    variance: float

    @property
    def value(self) -> float:
        """The mean over folds."""
        return float(np.mean(self.folds))

    @property
    def error(self) -> float:
        """The standard error: from the spread over folds where there are many, else at least that of the tokens."""
        count = len(self.folds)
        spread = float(np.var(self.folds, ddof=1)) * (1 / count + OVERLAP) if count > 1 else 0.0
        return (spread if count >= MANY else max(spread, self.variance)) ** 0.5

    def plus(self, other: "Measurement", times: float = 1.0) -> "Measurement":
        """Add a multiple of another number."""
        if len(self.folds) == len(other.folds):
            return Measurement(self.folds + times * other.folds, self.variance + times**2 * other.variance)
        return Measurement(np.array([self.value + times * other.value]), self.error**2 + (times * other.error) ** 2)

    def over(self, limit: "float | Measurement") -> "Measurement":
        """By how much it is above a limit."""
        return (
            self.plus(limit, -1.0) if isinstance(limit, Measurement) else Measurement(self.folds - limit, self.variance)
        )

    def under(self, limit: "float | Measurement") -> "Measurement":
        """By how much it is below a limit."""
        return self.over(limit).times(-1.0)

    def within(self, reach: float, target: float) -> "Measurement":
        """By how much it is nearer to a target than `reach`."""
        below = self.over(target - reach)
        above = self.under(target + reach)
        return min(below, above, key=lambda margin: margin.value)

    def times(self, factor: float) -> "Measurement":
        """Multiply by a number."""
        return Measurement(factor * self.folds, factor**2 * self.variance)


def average(estimates: Iterable[Measurement]) -> Measurement:
    """The mean of numbers that were measured on the same tokens: it is no more certain than they are."""
    estimates = list(estimates)
    error = float(np.mean([estimate.variance**0.5 for estimate in estimates]))
    return Measurement(np.mean([estimate.folds for estimate in estimates], axis=0), error**2)


def share_of(share: float, tokens: float) -> Measurement:
    """A share of so many tokens, with its binomial variance; that of a share of 0 or 1 is small, but not 0."""
    smoothed = (share * tokens + 1) / (tokens + 2)
    return Measurement(np.array([share]), CLUSTERED**2 * smoothed * (1 - smoothed) / tokens)


def median_of(box: Mapping[Any, Any], tokens: float) -> Measurement:
    """The median of so many tokens from a row of quartiles, with the variance that a normal distribution would give."""
    deviation = (box["upper"] - box["lower"]) / 1.349
    return Measurement(np.array([box["median"]]), CLUSTERED**2 * np.pi / 2 * deviation**2 / tokens)


def near(estimate: Measurement, paper: float) -> Measurement:
    """By how much a number is within 10 % of the paper's."""
    return estimate.within(0.1 * paper, paper)


def rank_trend(x: ArrayLike, y: ArrayLike) -> tuple[float, float]:
    """Spearman's rank correlation and its two-sided p-value.

    The usual approximation gives a p-value of 0 to any perfect order, also of six numbers, where one order in 360 is
    perfect. So the p-value of few numbers is found by permuting them, and none is below that of a perfect order.
    """
    ranks = rankdata(x)
    others = rankdata(y)
    trend: Any = spearmanr(ranks, others)
    if len(ranks) > FEW:
        perfect = math.exp(math.log(2) - math.lgamma(len(ranks) + 1))
        return float(trend.statistic), max(float(trend.pvalue), perfect)
    centred = others - others.mean()
    permuted = permutation_test(
        (ranks,), lambda order, axis: (order * centred).sum(axis), permutation_type="pairings", vectorized=True,
        n_resamples=PERMUTATIONS, rng=np.random.default_rng(0),
    )  # fmt: skip
    return float(trend.statistic), float(permuted.pvalue)


def percent(share: float, digits: int = 1) -> str:
    """A share as the paper prints it: 30.6 %."""
    return f"{100 * share:.{digits}f} %"


class Curve(dict[int, Measurement]):
    """A number at each layer, in order of layers."""

    @property
    def layers(self) -> list[int]:
        """The layers, from the first."""
        return list(self)

    @property
    def first(self) -> Measurement:
        """The number at the first layer."""
        return self[self.layers[0]]

    @property
    def last(self) -> Measurement:
        """The number at the last layer."""
        return self[self.layers[-1]]

    @property
    def mean(self) -> Measurement:
        """The mean over layers."""
        return average(self.values())

    def part(self, first: int = 0, last: int | None = None) -> "Curve":
        """The layers from `first` up to and including `last`."""
        return Curve({n: number for n, number in self.items() if n >= first and (last is None or n <= last)})

    def over(self, other: "Curve") -> "Curve":
        """By how much it is above another curve at each layer."""
        return Curve({layer: number.over(other[layer]) for layer, number in self.items()})

    @property
    def widest(self) -> int:
        """The layer at which the number is furthest from 0."""
        return max(self, key=lambda layer: abs(self[layer].value))

    def at(self, *layers: int) -> str:
        """The shares at some layers, in words."""
        return ", ".join(f"{percent(self[layer].value)} at layer {layer}" for layer in layers)

    def rises(self) -> dict[int, Measurement]:
        """By how much the number is above that of the layer before, from the second layer on."""
        return {here: self[here].over(self[before]) for before, here in pairwise(self.layers)}

    def falling(self, slack: float = 0.0) -> list[Measurement]:
        """The margins by which it ends lower than it starts, and rises nowhere by more than `slack` on the way.

        Single steps are small, so they count only where they go the wrong way.
        """
        steps = [rise.under(slack) for rise in self.rises().values()]
        return [self.last.under(self.first), *(step for step in steps if step.value <= 0)]

    def course(self, slack: float = 0.0) -> str:
        """A falling curve in words: where it starts and ends, and at which layers it rises by more than `slack`."""
        risen = [str(layer) for layer, rise in self.rises().items() if rise.value > slack]
        return self.at(self.layers[0], self.layers[-1]) + (
            f"; higher than before at {', '.join(risen)}" if risen else ""
        )
