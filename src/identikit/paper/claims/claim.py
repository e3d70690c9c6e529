"""What a claim and a finding are, numbers with their standard errors, and how claims are decided from them.

A claim is one function: it takes the evidence and returns a finding. Its docstring has the words, and after "Holds
if:" its rule.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import permutation_test, rankdata, spearmanr

from identikit.paper.evidence import Evidence

ONE_LAYER = "the model has only one layer"
BESIDE = "Beside the paper"  # the section of our own claims
NOTHING = "–"  # written where there is no measurement
EXACT = 1
AVERAGED = 20
RARE = 100
LEARNED = 200
WHOLE = 0
CLEAR = 2.0  # standard errors by which a number must differ from what it is compared with
TEXTS = {
    EXACT: "what is proved, and the paper's own examples",
    AVERAGED: "averages over tokens",
    RARE: "what [CLS] gathers, and what never happens",
    LEARNED: "learned maps",
    WHOLE: "the datasets themselves",
}
"""Numbers of texts that claims take, and the claims that take them; `WHOLE` stands for a whole dataset."""
MANY = 5  # folds whose spread says how uncertain their mean is; of fewer folds it does not
OVERLAP = 3 / 14  # test over training texts: folds share their training texts (Nadeau and Bengio 2003)
FEW = 30  # numbers; of no more than these, p-values come from permutations
PERMUTATIONS = 50_000  # every permutation of up to 8 numbers
CLUSTERED = 1.25  # factor on errors because the tokens of a text are alike: 0.9 to 1.3 for naive rates on MRPC


class Verdict(StrEnum):
    """How a claim came out, with its symbol, terminal style, class on the page, and the words that count it."""

    symbol: str
    style: str
    kind: str
    counted: tuple[str, str]

    def __new__(cls, words: str, symbol: str, style: str, kind: str, counted: tuple[str, str]) -> "Verdict":
        """Make a verdict of its words, with the rest as attributes."""
        verdict = str.__new__(cls, words)
        verdict._value_ = words
        verdict.symbol = symbol
        verdict.style = style
        verdict.kind = kind
        verdict.counted = counted
        return verdict

    HOLDS = "holds", "✓", "bold green", "holds", ("holds", "hold")
    FAILS = "does not hold", "✗", "bold red", "fails", ("does not hold", "do not hold")
    MIXED = "depends on the norm", "±", "bold magenta", "mixed", ("depends on the norm", "depend on the norm")
    UNDECIDED = "undecided", "?", "bold yellow", "undecided", ("is undecided", "are undecided")
    NOT_APPLICABLE = (
        "not applicable",
        "–",
        "bold",
        "none",
        ("is not applicable to this model", "are not applicable to this model"),
    )


@dataclass(frozen=True)
class Finding:
    """The result of judging a claim.

    `measured` is what was measured, written as the paper writes it, and `why` a clause that explains it. If `certain`,
    no further text can change the verdict, as after a counterexample.
    """

    verdict: Verdict
    measured: str
    why: str = ""
    certain: bool = False


Judge = Callable[[Evidence], Finding]


@dataclass(frozen=True)
class Claim:
    """A claim of the paper.

    - `where`: the place in the paper, to the figure
    - `words`: the claim; `paper`: what the paper reports; `rule`: when it holds
    - `needs`: names of tables, "own {norm}" where there is one for each norm
    - `data`: the paper's dataset, "" where the texts are the paper's own; `only`: whether no other dataset will do
    - `texts`: how many texts it takes (a key of `TEXTS`); with fewer a claim is undecided
    - `judge`: takes the evidence; call it through `catalogue.judge`
    """

    name: str
    where: str
    words: str
    paper: str
    rule: str
    needs: tuple[str, ...]
    data: str
    texts: int
    only: bool
    judge: Judge

    @property
    def section(self) -> str:
        """The section of the paper, under which it stands in the table of claims."""
        return self.where.split(",")[0].split(".")[0]

    @property
    def by_norm(self) -> bool:
        """Whether it is about contributions, which depend on the norm."""
        return any("{norm}" in need for need in self.needs)


class Claims(dict[str, Claim]):
    """The claims of a module by name, in order; `claims.on(table, …)` is a decorator that adds them."""

    def on(
        self, *needs: str, texts: int, data: str = "mrpc", only: bool = False
    ) -> Callable[..., Callable[[Judge], Judge]]:
        """Return the decorator for claims that need these tables; the options are fields of `Claim`.

        A claim has the name of its function, and the words and the rule of its docstring. A function that judges
        several claims has them in the decorator instead.
        """

        def claim(
            where: str, *, paper: str, name: str = "", words: str = "", rule: str = ""
        ) -> Callable[[Judge], Judge]:
            def add(judge: Judge) -> Judge:
                paragraphs = [" ".join(paragraph.split()) for paragraph in (judge.__doc__ or "").split("\n\n")]
                claim_name = name or judge.__name__.replace("_", "-")
                claim_words = words or paragraphs[0].removesuffix(".")
                claim_rule = rule or paragraphs[1].removeprefix("Holds if: ").removesuffix(".")
                self[claim_name] = Claim(
                    claim_name, where, claim_words, paper, claim_rule, needs, data, texts, only, judge
                )
                return judge

            return add

        return claim


class NotApplicableError(Exception):
    """The model or its texts cannot have what a claim is about; the message says why."""


def require(condition: object, why: str = ONE_LAYER) -> None:
    """Raise an error that says why a claim does not apply, unless a condition is met."""
    if not condition:
        raise NotApplicableError(why)


# Numbers that were measured on a sample


@dataclass(frozen=True, eq=False)
class Measurement:
    """A number measured on a sample, with the variance of its mean over tokens.

    `folds` has its value in each fold, or the one value there is. It can be added, subtracted and multiplied like a
    number. That is done fold by fold, so what folds have in common cancels.
    """

    folds: NDArray[np.float64]
    variance: float

    @property
    def value(self) -> float:
        """The mean over folds."""
        return float(np.mean(self.folds))

    def __str__(self) -> str:
        """The number as the paper prints shares: 30.6 %."""
        return percent(self.value)

    @property
    def error(self) -> float:
        """The standard error: from the spread over folds where there are many, else at least that of the tokens."""
        count = len(self.folds)
        spread = float(np.var(self.folds, ddof=1)) * (1 / count + OVERLAP) if count > 1 else 0.0
        return (spread if count >= MANY else max(spread, self.variance)) ** 0.5

    def __add__(self, other: "Measurement | float") -> "Measurement":
        if not isinstance(other, Measurement):
            return Measurement(self.folds + other, self.variance)
        if len(self.folds) == len(other.folds):
            return Measurement(self.folds + other.folds, self.variance + other.variance)
        return Measurement(np.array([self.value + other.value]), self.error**2 + other.error**2)

    def __mul__(self, factor: float) -> "Measurement":
        return Measurement(factor * self.folds, factor**2 * self.variance)

    __rmul__ = __mul__

    def __sub__(self, other: "Measurement | float") -> "Measurement":
        return self + -1.0 * other

    def __rsub__(self, other: float) -> "Measurement":
        return -1.0 * self + other

    def within(self, reach: float, target: float) -> "Measurement":
        """Return by how much it is nearer to a target than `reach`."""
        above_lower_end = self - (target - reach)
        below_upper_end = (target + reach) - self
        return min(above_lower_end, below_upper_end, key=lambda margin: margin.value)


def average(numbers: Iterable[Measurement]) -> Measurement:
    """The mean of numbers that were measured on the same tokens: it is no more certain than they are."""
    numbers = list(numbers)
    error = float(np.mean([number.variance**0.5 for number in numbers]))
    return Measurement(np.mean([number.folds for number in numbers], axis=0), error**2)


def measured_share(share: float, tokens: float) -> Measurement:
    """A share of `tokens` tokens with its binomial variance, which is small but not 0 for a share of 0 or 1."""
    smoothed = (share * tokens + 1) / (tokens + 2)
    return Measurement(np.array([share]), CLUSTERED**2 * smoothed * (1 - smoothed) / tokens)


def measured_median(box: Mapping[str, float], tokens: float) -> Measurement:
    """The median over `tokens` tokens from a row of quartiles, with the variance of a normal distribution."""
    deviation = (box["upper"] - box["lower"]) / 1.349
    return Measurement(np.array([box["median"]]), CLUSTERED**2 * np.pi / 2 * deviation**2 / tokens)


def rank_trend(x: ArrayLike, y: ArrayLike) -> tuple[float, float]:
    """Spearman's rank correlation and its two-sided p-value.

    The usual approximation gives a p-value of 0 to any perfect order, also of six numbers, where one order in 360 is
    perfect. So the p-value of few numbers is found by permuting them, and none is below that of a perfect order.
    """
    x_ranks = rankdata(x)
    y_ranks = rankdata(y)
    trend: Any = spearmanr(x_ranks, y_ranks)
    if len(x_ranks) > FEW:
        perfect = math.exp(math.log(2) - math.lgamma(len(x_ranks) + 1))
        return float(trend.statistic), max(float(trend.pvalue), perfect)
    centred = y_ranks - y_ranks.mean()
    permuted = permutation_test(
        (x_ranks,), lambda order, axis: (order * centred).sum(axis), permutation_type="pairings", vectorized=True,
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

    @property
    def widest(self) -> int:
        """The layer at which the number is furthest from 0."""
        return max(self, key=lambda layer: abs(self[layer].value))

    def __sub__(self, other: "Curve") -> "Curve":
        return Curve({layer: number - other[layer] for layer, number in self.items()})

    def between(self, first: int = 0, last: float = math.inf) -> "Curve":
        """Return the layers from `first` up to and including `last`."""
        return Curve({layer: number for layer, number in self.items() if first <= layer <= last})

    def in_words(self, *layers: int) -> str:
        """Return the shares at these layers in words."""
        return ", ".join(f"{self[layer]} at layer {layer}" for layer in layers)

    def rises(self) -> dict[int, Measurement]:
        """Return how far the number is above that of the layer before, from the second layer on."""
        return {layer: self[layer] - self[before] for before, layer in pairwise(self.layers)}

    def fall_margins(self, slack: float = 0.0) -> list[Measurement]:
        """Return the margins by which it ends lower than it starts, and rises nowhere by more than `slack`.

        Single steps are small, so they count only where they go the wrong way.
        """
        steps = [slack - rise for rise in self.rises().values()]
        return [self.first - self.last, *(step for step in steps if step.value <= 0)]


# Deciding


def finding(holds: object, measured: str, why: str = "", *, certain: bool = False) -> Finding:
    """The finding of a claim whose tables do not say how uncertain they are."""
    return Finding(Verdict.HOLDS if holds else Verdict.FAILS, measured, why, certain)


def join_clauses(*clauses: str) -> str:
    """Join the clauses that are not empty."""
    return "; ".join(filter(None, clauses))


def decide(evidence: Evidence, margins: Sequence[Measurement], measured: str, why: str = "") -> Finding:
    """Judge a rule of several comparisons, each given as the margin by which it is met.

    It holds where every margin is clearly above 0, and fails where one is clearly below: by `CLEAR` standard errors. In
    between the texts cannot decide it.
    """
    if any(margin.value <= -CLEAR * margin.error for margin in margins):
        return Finding(Verdict.FAILS, measured, why)
    unclear = [margin for margin in margins if margin.value <= CLEAR * margin.error]
    if not unclear:
        return Finding(Verdict.HOLDS, measured, why)
    worst = min(unclear, key=lambda margin: abs(margin.value) / margin.error)
    doubt = (
        f"{evidence.texts:,} texts: {100 * abs(worst.value):.2g} points from the rule's limit, less than two standard "
        f"errors of {100 * worst.error:.2g} points"
    )
    return Finding(Verdict.UNDECIDED, measured, join_clauses(why, doubt))


def decide_fall(evidence: Evidence, values: Curve, slack: float = 0.0, why: str = "") -> Finding:
    """Judge that a curve over layers falls with depth: at every layer unless there is a slack."""
    require(len(values) > 1)
    risen = [str(layer) for layer, rise in values.rises().items() if rise.value > slack]
    measured = values.in_words(values.layers[0], values.layers[-1])
    if risen:
        measured += f"; higher than before at {', '.join(risen)}"
    return decide(evidence, values.fall_margins(slack), measured, why)
