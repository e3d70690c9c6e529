"""How often what is said of drawn rows holds: every sampled number of verdict and page, against all rows bounded.

All free rows of a text are bounded once. Then a share of them is drawn again and again with other seeds, by the code
that `explain` draws with, and every number that it estimates is held against the truth. `run(Options(…))` returns rows.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.measure import Row
from identikit.attention import sample as sampling
from identikit.attention.captured import RowIndex
from identikit.attention.effective import effective_attention
from identikit.attention.estimate import (
    BoundedRows,
    Mean,
    RowSample,
    certain_rows,
    mean_by_head,
    mean_by_token,
)
from identikit.attention.quantities import membership
from identikit.attention.result import EffectiveAttention
from identikit.attention.sample import sample_rows
from identikit.errors import InputError, TooLongError
from identikit.explanation.attention_facts import candidates, certain_means, group_bounds, group_mass
from identikit.models.load.load import load
from identikit.models.model import Model
from identikit.progress import Progress, silent
from identikit.shapes import Tensor
from identikit.texts.data import read_texts, sample_texts

SHARES = (0.05, 0.25)
_ROUNDING = 1e-9
_KINDS = {
    "certain_mass": "determined share",
    "strongest_certain": "rows whose strongest edge is determined",
}


@dataclass(frozen=True)
class Options:
    """What to draw from.

    - `model`: a folder or a hub id; `data`, `data_dir`: what texts are taken from, by default the embedded samples
    - `texts`: how many, the longest of at most `tokens` tokens; a pair is joined for a model that reads no pairs
    - `draws`: how often each of these `shares` of the free rows is drawn
    """

    model: str | None = None
    data: str | None = None
    data_dir: str | None = None
    texts: int = 10
    tokens: int = 45
    draws: int = 200
    shares: tuple[float, ...] = SHARES


@dataclass(frozen=True)
class SolvedText:
    """A text with all of its free rows bounded, and which of them is where; rows are drawn from it at no cost."""

    attention: EffectiveAttention
    groups: list[list[int]]
    whole: RowSample
    place: dict[RowIndex, int] = field(repr=False)

    @classmethod
    def of(cls, attention: EffectiveAttention, progress: Progress) -> "SolvedText":
        """Bound all free rows of a text."""
        special = [place for place, is_special in enumerate(attention.about["special"]) if is_special]
        groups = [special or [0], *candidates(attention).values()]
        whole = sample_rows(attention, groups, seconds=None, seed=0, progress=progress)
        place = {(layer, head, query): row for row, (layer, head, query) in enumerate(whole.bounded.places.tolist())}
        return cls(attention, groups, whole, place)

    def drawn(self, share: float, seed: int) -> RowSample:
        """Draw rows as `explain` does, on a clock on which each takes a second."""
        seconds = 0.0

        def looked_up(_: Any, places: Sequence[RowIndex], *others: Any, **limits: Any) -> BoundedRows:
            nonlocal seconds
            seconds += len(places)
            return self.whole.bounded.select(torch.tensor([self.place[place] for place in places]))

        clock = SimpleNamespace(monotonic=lambda: seconds)
        with patch.object(sampling, "bound_rows", looked_up), patch.object(sampling, "time", clock):
            budget = max(1.0, share * len(self.place))
            return sample_rows(self.attention, self.groups, seconds=budget, seed=seed)

    def numbers(self, sample: RowSample) -> dict[str, list[Mean]]:
        """Return all that verdict and page say of a text from its bounded rows, by kind."""
        raw, _, _ = group_mass(self.attention, membership(self.groups, len(self.attention.tokens)))
        ends = [group_bounds(sample, at, raw[:, at]) for at in range(len(self.groups))]
        certain = certain_rows(self.attention, sample.bounded)
        free = self.attention.null_dim.cpu() > 0
        said = {
            "weight on special tokens or a sink, by layer": [end for both in ends for end in both],
            "determined share, by head": [mean_by_head(certain, free)],
            "determined share, by token": [mean_by_token(certain, free)],
        }
        for name, mean in certain_means(self.attention, sample).items():
            said[f"{_KINDS[name]}, by layer"] = [mean]
            said[f"{_KINDS[name]}, of the text"] = [mean.overall()]
        return said


def run(options: Options, *, progress: Progress = silent) -> list[Row]:
    """Return in what share of draws each kind of number holds the truth: over all, and of the one that does least."""
    model = load(options.model)
    texts = _texts(model, options)
    holds: dict[tuple[str, float], list[float]] = defaultdict(list)
    uncounted = 0
    free = 0
    for number, text in enumerate(texts):
        solved = SolvedText.of(effective_attention(model, text), progress)
        free += len(solved.place)
        for share in options.shares:
            for kind, shares in _held(solved, share, options.draws).items():
                holds[kind, share] += shares
            uncounted += _without_count(solved.numbers(solved.drawn(share, 0)))
        progress("texts", number + 1, len(texts))
    case = f"{model.name}, {len(texts)} texts of at most {options.tokens} tokens, {free:,} free rows"
    rows = [Row(case, "numbers without the number of rows that they rest on", uncounted)]
    for (kind, share), shares in sorted(holds.items()):
        if shares:
            drawn = f"{kind}, {100 * share:g} % of the rows"
            mean = sum(shares) / len(shares)
            rows.append(Row(case, f"{drawn}: {len(shares):,} numbers hold the truth", 100 * mean, "%"))
            rows.append(Row(case, f"{drawn}: the one that does least", 100 * min(shares), "%"))
    return rows


def _held(solved: SolvedText, share: float, draws: int) -> dict[str, list[float]]:
    """Return in what share of draws each number holds the truth, by kind; those that are known anyway are left out."""
    truth = {kind: _joined(means, "mean") for kind, means in solved.numbers(solved.whole).items()}
    counts = {kind: torch.zeros(len(true)) for kind, true in truth.items()}
    partial = {kind: torch.zeros(len(true), dtype=torch.bool) for kind, true in truth.items()}
    for seed in range(draws):
        for kind, means in solved.numbers(solved.drawn(share, seed)).items():
            least = torch.cat([mean.ends()[0].flatten() for mean in means])
            most = torch.cat([mean.ends()[1].flatten() for mean in means])
            true = truth[kind]
            counts[kind] += (least <= true + _ROUNDING) & (true <= most + _ROUNDING)
            partial[kind] |= _joined(means, "rows") < _joined(means, "free")
    return {kind: (count / draws)[partial[kind]].tolist() for kind, count in counts.items()}


def _joined(means: Sequence[Mean], part: str) -> Tensor:
    return torch.cat([getattr(mean, part).flatten() for mean in means])


def _without_count(said: Mapping[str, Sequence[Mean]]) -> int:
    """Count the numbers of heads and tokens that rest on some of the free rows and do not say on how many."""
    uncounted = 0
    for mean in (*said["determined share, by head"], *said["determined share, by token"]):
        partial = (mean.rows < mean.free).flatten().tolist()
        words = mean.words(lambda number: f"{number:.2f}")
        uncounted += sum(some and "bounded)" not in word for some, word in zip(partial, words, strict=True))
    return uncounted


def _texts(model: Model, options: Options) -> list[Any]:
    """Return the longest texts that have at most so many tokens."""
    every = sample_texts() if options.data is None else read_texts(options.data, data_dir=options.data_dir)
    fitting = sorted(_measured(model, every, options.tokens), key=lambda text: -text[0])
    if len(fitting) < options.texts:
        raise InputError(
            f"Only {len(fitting)} texts have at most {options.tokens} tokens. Allow more with --tokens, or ask for "
            "fewer with --texts."
        )
    return [text for _, text in fitting[: options.texts]]


def _measured(model: Model, texts: Iterable[Any], most: int) -> Iterator[tuple[int, Any]]:
    for given in texts:
        text = " ".join(given) if isinstance(given, tuple) and model.causal else given
        with suppress(TooLongError):
            yield len(model.encode(text, max_tokens=most)[0]), text
