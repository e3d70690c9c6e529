"""The tests of explanations on one text: what follows the largest sources, and what forgetting does to a measure."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from identikit.attention.agreement import MeasureOrFunction, Ranking, ranking_of, ranking_of_function
from identikit.attention.captured import capture
from identikit.attention.measure import MeasuredText
from identikit.attention.measure_kinds import MEASURE_KINDS
from identikit.attribution.attribute import attribute
from identikit.attribution.request import AttributionOptions, Request
from identikit.attribution.result import TokenAttribution
from identikit.checks import known_name, known_names, random_seed, whole_number
from identikit.explanation.replaced import ReplacedText, seeded_by
from identikit.maths.measures import ordered_share, rank_correlation
from identikit.maths.orders import extremes, ordered, replaced_first
from identikit.models.model import Model
from identikit.models.shuffling import shuffled_copies
from identikit.models.text_run import TextRun, run_texts
from identikit.shapes import Bool, Float, Int, Tensor

LEAVE_ONE_OUT = "leave one out"
NAMES = (TokenAttribution.kind, *MEASURE_KINDS, LEAVE_ONE_OUT)
"""The measures that have a name: the one under which each is declared."""

BASELINES = ("random", "reversed")
"""What every measure is compared with: random orders, and leave one out from its weakest source on."""

SHARES = tuple(step / 10 for step in range(11))
"""The shares of replaced sources, or of those put back, at which a curve is kept."""

BEST = "best found"
WORST = "worst found"
_DRAWS = 5  # of the random baseline in each text
_SOURCES = 3  # fewer sources of an output have no ranking worth a test
_PROBES = 32  # random directions of token attribution by default
_DEPTHS = 6  # numbers of shuffled layers, at most


class Score(NamedTuple):
    """A score of a measure: the test it comes from, its meaning, and its value by chance where that is known."""

    test: str
    meaning: str
    chance: float | None = None


SCORES: Mapping[str, Score] = {
    "deletion": Score(
        "curves",
        "Area under the change as sources are replaced, the measure's largest first; 1 is the best order that a search "
        "found, and 0 the worst.",
    ),
    "insertion": Score(
        "curves",
        "The same as sources are put back, the largest first, into a text in which all are replaced. The reversed "
        "order's deletion is 1 minus this.",
    ),
    "curves": Score("curves", "Mean of deletion and insertion. Any order and its reverse add up to 1.", 0.5),
    "leave one out": Score(
        "leave one out",
        "Spearman's rank correlation of the measure with how far an output moves when one source is replaced.",
        0.0,
    ),
    "determined": Score(
        "determined",
        "Share of pairs of sources that no attention with the same head outputs can put in another order, as far as "
        "the ends of the two tell.",
    ),
    "randomised": Score(
        "randomised",
        "Spearman's rank correlation of the measure with itself on a copy of the model with all layers shuffled. A "
        "measure that explains the model's weights forgets: it is near 0.",
        0.0,
    ),
    "truth": Score(
        "truth", "How often the measure's largest source is the one that is known to be right; ties count in part."
    ),
}
TESTS = tuple(dict.fromkeys(score.test for score in SCORES.values() if score.test != "truth"))


@dataclass(frozen=True)
class EvaluationOptions:
    """How explanations are tested; see `evaluate`."""

    measures: tuple[str, ...] = ("token attribution", "mean", "norm", "rollout")
    tests: tuple[str, ...] = TESTS
    target: str | None = None
    replacement: str | None = None
    beam: int = 5
    probes: int | str | None = None
    seed: int = 0
    truncate: bool = False
    max_tokens: int | None = None

    def checked(self, model: Model) -> "EvaluationOptions":
        """Return the same options, or refuse a wrong one."""
        known_names("tests", self.tests, (*TESTS, "truth"))
        if self.target is not None:
            known_name("target", self.target, ("prediction",))
        whole_number("beam", self.beam, least=1)
        self.attribution(model)
        random_seed(self.seed)
        return self

    def attribution(self, model: Model) -> Request:
        """Return the request for token attribution of the last layer."""
        probes = self.probes
        if probes is None:
            probes = _PROBES if model.d_input > _PROBES else "exact"
        return AttributionOptions(probes).checked(model, [model.n_layers - 1])

    def read(self, model: Model, text: object) -> TextRun:
        """Read a text with a model."""
        layers = model.attention_layers
        (reading,) = run_texts(model, text, layers=layers, truncate=self.truncate, max_tokens=self.max_tokens)
        return reading

    @property
    def scores(self) -> tuple[str, ...]:
        """The scores that the tests give."""
        return tuple(name for name, score in SCORES.items() if score.test in self.tests)

    def depths(self, model: Model) -> tuple[int, ...]:
        """Return how many of the last layers are shuffled, step by step; none where that is not tested."""
        if "randomised" not in self.tests:
            return ()
        steps = min(_DEPTHS, model.n_layers)
        return tuple(round((step + 1) * model.n_layers / steps) for step in range(steps))

    def passes(self, model: Model, n: int) -> int:
        """Return about how often a text of n tokens is run at most, beside what the measures themselves run."""
        searched = min(self.beam * n**2, 2**n)  # a wide beam meets every set of sources once
        curves = searched + 2 * (len(self.measures) + _DRAWS + 1) * n if "curves" in self.tests else 0
        return curves + n * (1 + len(self.depths(model)))


@dataclass(frozen=True, eq=False)
class TestedText:
    """A text on which measures are tested.

    - `measures`: the measures that are tested, by name; the baselines are added
    - `truth`: the right source of each output, −1 where none is known
    """

    text: ReplacedText
    measures: Mapping[str, MeasureOrFunction]
    options: EvaluationOptions
    truth: Sequence[int] | None = None

    def numbers(self) -> dict[str, Tensor]:
        """Return the scores of each measure, what shuffling leaves of it, and its curves; (measure, …)."""
        tests = self.options.tests
        scores: dict[str, Tensor] = {}
        curves = torch.zeros(0, 2, len(SHARES), dtype=torch.float64)
        forgotten = torch.zeros(len(self._rankings), 0, dtype=torch.float64)
        if "curves" in tests:
            scores, curves = self._curves()
        if "leave one out" in tests:
            scores["leave one out"] = self._by_measure(lambda ranking: self._correlation(ranking.raw, self._moved))
        if "determined" in tests:
            scores["determined"] = self._by_measure(self._determined)
            scores["determined"][-len(BASELINES) :] = torch.nan
        if "randomised" in tests:
            forgotten = self._forgotten()
            scores["randomised"] = forgotten[:, -1]
        if "truth" in tests:
            scores["truth"] = self._by_measure(self._hit_rate)
        table = torch.stack([scores[name] for name in self.options.scores], dim=1)
        for row, draws in enumerate(self._rankings.values()):
            if any(self._lacks_numbers(ranking.raw) for ranking in draws):
                table[row] = torch.nan
        return {"scores": table, "forgotten": forgotten, "curves": curves}

    # What is tested

    @property
    def _reading(self) -> TextRun:
        return self.text.reading

    @cached_property
    def _rankings(self) -> dict[str, list[Ranking]]:
        """The ranking of each measure; of the random baseline, several draws."""
        rankings = {name: [self._ranking(name, measure)] for name, measure in self.measures.items()}
        n = len(self._reading.tokens)
        generator = seeded_by(self.options.seed, self._reading.batch.tokens)
        random = torch.rand(_DRAWS, n, n, dtype=torch.float64, generator=generator)
        rankings["random"] = [_fixed_ranking(scores) for scores in random]
        rankings["reversed"] = [_fixed_ranking(-self._moved)]
        return rankings

    def _ranking(self, name: str, measure: MeasureOrFunction) -> Ranking:
        """Return how much every output token takes from every input token, by a measure."""
        if callable(measure):
            return ranking_of_function(name, measure, self._reading)
        if name == LEAVE_ONE_OUT:
            return _fixed_ranking(self._moved)
        if name == TokenAttribution.kind:
            request = self.options.attribution(self._reading.model)
            return _fixed_ranking(attribute([self._reading], request)[0].whole()[-1].mT)
        return ranking_of(self._attention.measure(MEASURE_KINDS[name], self._reading.model.attention_layers))

    @cached_property
    def _moved(self) -> Float[Tensor, "output input"]:
        """How far each output moves when one token is replaced; special tokens never are, and have 0."""
        n = len(self._reading.tokens)
        replaceable = self._replaceable
        moved = torch.zeros(n, n, dtype=torch.float64)
        moved[:, replaceable] = self.text.changes(torch.eye(n, dtype=torch.bool)[replaceable]).mT
        return moved

    @property
    def _replaceable(self) -> Int[Tensor, "position"]:
        """The positions of tokens that are not special."""
        return (~self._reading.batch.special[0]).nonzero().squeeze(1)

    @cached_property
    def _attention(self) -> MeasuredText:
        """The text's attention, read with ranges only where a test asks for them."""
        return MeasuredText(capture(self._reading), None, math.inf if "determined" in self.options.tests else 0.0)

    @cached_property
    def _sources(self) -> Bool[Tensor, "output source"]:
        """Which tokens are the sources of each output: others that it can see, and none that the tokenizer added."""
        n = len(self._reading.tokens)
        sources = ~self._reading.batch.special & ~torch.eye(n, dtype=torch.bool)
        if self._reading.model.causal:
            sources = sources.tril()
        if self.text.target is not None:
            sources[torch.arange(n) != self.text.target.position] = False
        return sources & (sources.sum(-1, keepdim=True) >= _SOURCES)

    @cached_property
    def _output(self) -> int:
        """The output whose curves are drawn: the target's, the last one of a causal model, or one drawn at random."""
        if self.text.target is not None:
            return self.text.target.position
        if self._reading.model.causal:
            return len(self._reading.tokens) - 1
        positions = self._replaceable
        generator = seeded_by(self.options.seed, self._reading.tokens)
        return int(positions[torch.randint(len(positions), (), generator=generator)])

    def _by_measure(self, score: Callable[[Ranking], float]) -> Float[Tensor, "measure"]:
        """Return the score of each measure; of the random baseline the mean over its draws."""
        means = [_mean(list(map(score, draws))) for draws in self._rankings.values()]
        return torch.tensor(means, dtype=torch.float64)

    def _mean_over_draws(self, numbers: Float[Tensor, "way ranking *step"]) -> Float[Tensor, "way measure *step"]:
        counts = [len(draws) for draws in self._rankings.values()]
        return torch.stack([draws.mean(1) for draws in numbers.split(counts, dim=1)], dim=1)

    def _lacks_numbers(self, *rankings: Float[Tensor, "output source"]) -> bool:
        """Whether a measure is NaN for some source: then it has no order, and no score."""
        return any(bool(ranking[self._sources].isnan().any()) for ranking in rankings)

    # The tests

    def _curves(self) -> tuple[dict[str, Tensor], Float[Tensor, "curve way share"]]:
        """Return the areas of each measure's curves between the best and the worst found, and all of the curves."""
        sources = self._sources[self._output].nonzero().squeeze(1)
        n = len(sources)
        if not n:
            curves = torch.full((len(self._rankings) + 2, 2, len(SHARES)), torch.nan, dtype=torch.float64)
            return dict.fromkeys(("deletion", "insertion", "curves"), curves[2:, 0, 0]), curves

        def change(sets: Tensor) -> Tensor:
            replaced = torch.zeros(len(sets), len(self._reading.tokens), dtype=torch.bool)
            replaced[:, sources] = sets
            return self.text.changes(replaced)[:, self._output]

        found = extremes(change, n, self.options.beam)
        rankings = [ranking for draws in self._rankings.values() for ranking in draws]
        orders = [ordered(ranking.raw[self._output, sources]) for ranking in rankings]
        largest_first = [replaced_first(order) for order in orders]
        smallest_first = [replaced_first(order.flip(0)) for order in orders]
        sets, index = torch.cat(largest_first + smallest_first).unique(dim=0, return_inverse=True)
        curves = change(sets)[index].reshape(2, len(orders), n + 1)
        areas = torch.tensor([[found.normalised(curve) for curve in way] for way in curves], dtype=torch.float64)
        areas[1] = 1 - areas[1]
        areas = self._mean_over_draws(areas)
        curves[1] = curves[1].flip(-1)  # of sources that are put back, the largest first
        curves = self._mean_over_draws(curves)
        best = torch.stack([found.best, found.worst.flip(0)])
        worst = torch.stack([found.worst, found.best.flip(0)])
        curves = torch.cat([curves, best[:, None], worst[:, None]], dim=1).transpose(0, 1)
        scores = {"deletion": areas[0], "insertion": areas[1], "curves": areas.mean(0)}
        return scores, curves[..., [round(share * n) for share in SHARES]]

    def _correlation(self, first: Tensor, second: Tensor) -> float:
        """Return the rank correlation of two rankings of the sources, averaged over outputs."""
        if self._lacks_numbers(first, second):
            return torch.nan
        return float(rank_correlation(first, second, self._sources).nanmean())

    def _determined(self, ranking: Ranking) -> float:
        return float(ordered_share(ranking.lower, ranking.upper, self._sources).nanmean())

    def _forgotten(self) -> Float[Tensor, "measure depth"]:
        """Return how far each measure still ranks as before when more and more of the last layers are shuffled."""
        options = self.options
        model = self._reading.model
        depths = options.depths(model)
        by_depth = []
        for depth, shuffled_model in zip(depths, shuffled_copies(model, depths, seed=options.seed), strict=True):
            text = replace(self.text, reading=options.read(shuffled_model, self._reading.text))
            shuffled = TestedText(text, self.measures, replace(options, seed=options.seed + depth, tests=()))
            means = []
            for name, draws in self._rankings.items():
                pairs = zip(draws, shuffled._rankings[name], strict=True)
                means.append(_mean([self._correlation(before.raw, after.raw) for before, after in pairs]))
            by_depth.append(means)
        return torch.tensor(by_depth, dtype=torch.float64).mT

    def _hit_rate(self, ranking: Ranking) -> float:
        """Return how often the largest source is the right one; of several that are as large, one counts in part."""
        assert self.truth is not None
        hits = []
        for output, source in enumerate(self.truth):
            sources = self._sources[output]
            if source >= 0 and sources[source]:
                scores = ranking.raw[output].masked_fill(~sources, -torch.inf)
                largest = scores == scores.max()
                hits.append(float(largest[source]) / max(1, int(largest.sum())))
        return _mean(hits) if hits else torch.nan


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _fixed_ranking(scores: Tensor) -> Ranking:
    """Return scores that no alternative attention moves."""
    scores = scores.double().cpu()
    return Ranking(scores, scores, scores)
