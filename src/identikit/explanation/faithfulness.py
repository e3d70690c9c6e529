"""The tests of explanations on one text: what follows the largest sources, and what forgetting does to a measure."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from identikit.attention.agreement import Given, Ranking
from identikit.attribution.request import AttributionOptions, Request
from identikit.checks import known, known_names, random_seed, whole_number
from identikit.explanation.ranked import BASELINES, DRAWS, TextRankings
from identikit.explanation.replaced import Predicted, ReplacedText, Replacement
from identikit.maths.measures import ordered_share, rank_correlation
from identikit.maths.orders import extremes, ordered, replaced_first
from identikit.models.model import Model
from identikit.models.reading import Reading, readings
from identikit.models.shuffled import forgetting
from identikit.shapes import Bool, Float, Tensor

SHARES = tuple(step / 10 for step in range(11))
"""Of its sources that are replaced, or put back, where a curve is kept."""

BEST = "best found"
WORST = "worst found"
_SOURCES = 3  # fewer sources of an output have no ranking worth a test
_PROBES = 32  # random directions of token attribution, where nothing else is said
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
            known("target", self.target, ("prediction",))
        whole_number("beam", self.beam, least=1)
        self.attribution(model)
        random_seed(self.seed)
        return self

    def attribution(self, model: Model) -> Request:
        """Return what is asked of token attribution, of the last layer."""
        probes = self.probes
        if probes is None:
            probes = _PROBES if model.d_input > _PROBES else "exact"
        return AttributionOptions(probes).checked(model, [model.n_layers - 1])

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
        curves = (self.beam * n + 2 * (len(self.measures) + DRAWS + 1)) * n if "curves" in self.tests else 0
        return curves + n * (1 + len(self.depths(model)))


@dataclass(frozen=True, eq=False)
class TestedText:
    """A text on which measures are tested.

    - `measures`: what is asked for, by name; the baselines are added
    - `truth`: the right source of each output, −1 where none is known
    """

    reading: Reading
    measures: Mapping[str, Given]
    options: EvaluationOptions
    replacement: Replacement
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
            left_out = self._ranked.left_out
            scores["leave one out"] = self._each(lambda ranking: self._correlation(ranking.raw, left_out))
        if "determined" in tests:
            scores["determined"] = self._each(self._determined)
            scores["determined"][-len(BASELINES) :] = torch.nan
        if "randomised" in tests:
            forgotten = self._forgotten()
            scores["randomised"] = forgotten[:, -1]
        if "truth" in tests:
            scores["truth"] = self._each(self._hits)
        stacked = torch.stack([scores[name] for name in self.options.scores], dim=1)
        unknown = [any(self._unknown(ranking.raw) for ranking in several) for several in self._rankings.values()]
        stacked[torch.tensor(unknown)] = torch.nan
        return {"scores": stacked, "forgotten": forgotten, "curves": curves}

    # What is tested

    @cached_property
    def _text(self) -> ReplacedText:
        assert self.reading.batch.ids is not None
        instead = self.replacement.drawn(self.reading.batch.ids[0], self.options.seed)
        target = None if self.options.target is None else Predicted.of(self.reading)
        return ReplacedText(self.reading, instead, target)

    def _ranked_by(self, text: ReplacedText, seed: int, *, bounded: bool = False) -> TextRankings:
        return TextRankings(text, self.measures, seed, self.options.attribution(text.reading.model), bounded)

    @cached_property
    def _ranked(self) -> TextRankings:
        return self._ranked_by(self._text, self.options.seed, bounded="determined" in self.options.tests)

    @cached_property
    def _rankings(self) -> dict[str, list[Ranking]]:
        return self._ranked.every()

    @cached_property
    def _asked(self) -> Bool[Tensor, "output source"]:
        """Which tokens are the sources of each output: others that it can see, and none that the tokenizer added."""
        n = len(self.reading.tokens)
        asked = ~self.reading.batch.special & ~torch.eye(n, dtype=torch.bool)
        if self.reading.model.causal:
            asked = asked.tril()
        if self._text.target is not None:
            asked[torch.arange(n) != self._text.target.place] = False
        return asked & (asked.sum(-1, keepdim=True) >= _SOURCES)

    @cached_property
    def _output(self) -> int:
        """The output whose curves are drawn: the target's, the last one of a causal model, or one that is drawn."""
        if self._text.target is not None:
            return self._text.target.place
        if self.reading.model.causal:
            return len(self.reading.tokens) - 1
        plain = (~self.reading.batch.special[0]).nonzero().squeeze(1)
        seed = zlib.crc32(repr((self.options.seed, self.reading.tokens)).encode())
        return int(plain[torch.randint(len(plain), (), generator=torch.Generator().manual_seed(seed))])

    def _each(self, number: Callable[[Ranking], float]) -> Float[Tensor, "measure"]:
        """Return a number of each measure; of the random baseline the mean over its draws."""
        means = [sum(map(number, several)) / len(several) for several in self._rankings.values()]
        return torch.tensor(means, dtype=torch.float64)

    def _unknown(self, *rankings: Float[Tensor, "output source"]) -> bool:
        """Whether a measure lacks a number (NaN) for some source: then it has no order, and no score."""
        return any(bool(ranking[self._asked].isnan().any()) for ranking in rankings)

    # The tests

    def _curves(self) -> tuple[dict[str, Tensor], Float[Tensor, "curve way share"]]:
        """Return the areas of each measure's curves between the best and the worst found, and all of the curves."""
        sources = self._asked[self._output].nonzero().squeeze(1)
        n = len(sources)
        count = len(self._rankings)
        if not n:
            nothing = torch.full((count + 2, 2, len(SHARES)), torch.nan, dtype=torch.float64)
            return dict.fromkeys(("deletion", "insertion", "curves"), nothing[:count, 0, 0]), nothing

        def change(sets: Tensor) -> Tensor:
            replaced = torch.zeros(len(sets), len(self.reading.tokens), dtype=torch.bool)
            replaced[:, sources] = sets
            return self._text.changes(replaced)[:, self._output]

        found = extremes(change, n, self.options.beam)
        orders = [
            ordered(ranking.raw[self._output, sources]) for rankings in self._rankings.values() for ranking in rankings
        ]
        ways = [replaced_first(order) for order in orders] + [replaced_first(order.flip(0)) for order in orders]
        sets, index = torch.cat(ways).unique(dim=0, return_inverse=True)
        both = change(sets)[index].reshape(2, len(orders), n + 1)
        areas = torch.tensor([[found.normalised(curve) for curve in way] for way in both], dtype=torch.float64)
        areas[1] = 1 - areas[1]
        both[1] = both[1].flip(-1)  # of sources that are put back, the largest first
        groups = [len(rankings) for rankings in self._rankings.values()]
        areas = torch.stack([part.mean(1) for part in areas.split(groups, dim=1)], dim=1)
        means = [part.mean(1) for part in both.split(groups, dim=1)]
        means += [torch.stack([found.best, found.worst.flip(0)]), torch.stack([found.worst, found.best.flip(0)])]
        steps = [round(share * n) for share in SHARES]
        scores = {"deletion": areas[0], "insertion": areas[1], "curves": areas.mean(0)}
        return scores, torch.stack(means)[..., steps]

    def _correlation(self, first: Tensor, second: Tensor) -> float:
        """Return the rank correlation of two rankings of the sources, averaged over outputs."""
        if self._unknown(first, second):
            return torch.nan
        return float(rank_correlation(first, second, self._asked).nanmean())

    def _determined(self, ranking: Ranking) -> float:
        return float(ordered_share(ranking.lower, ranking.upper, self._asked).nanmean())

    def _forgotten(self) -> Float[Tensor, "measure depth"]:
        """Return how far each measure still ranks as before when more and more of the last layers are shuffled."""
        options = self.options
        model = self.reading.model
        depths = options.depths(model)
        found = []
        for depth, forgetful in zip(depths, forgetting(model, depths, seed=options.seed), strict=True):
            (reading,) = readings(
                forgetful,
                self.reading.text,
                layers=model.attention_layers,
                truncate=options.truncate,
                max_tokens=options.max_tokens,
            )
            after = self._ranked_by(replace(self._text, reading=reading), options.seed + depth).every()
            pairs = zip(self._rankings.values(), after.values(), strict=True)
            found.append(
                [[self._correlation(old.raw, new.raw) for old, new in zip(*pair, strict=True)] for pair in pairs]
            )
        means = [[sum(draws) / len(draws) for draws in measures] for measures in found]
        return torch.tensor(means, dtype=torch.float64).mT

    def _hits(self, ranking: Ranking) -> float:
        """Return how often the largest source is the right one; of several that are as large, one counts in part."""
        assert self.truth is not None
        hits = []
        for output, source in enumerate(self.truth):
            asked = self._asked[output]
            if source >= 0 and asked[source]:
                scores = ranking.raw[output].masked_fill(~asked, -torch.inf)
                largest = scores == scores.max()
                hits.append(float(largest[source]) / max(1, int(largest.sum())))
        return sum(hits) / len(hits) if hits else torch.nan
