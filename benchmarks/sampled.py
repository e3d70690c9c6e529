"""How often what is said of drawn rows holds: every sampled number of verdict and page, against all rows bounded.

All free rows of a text are bounded once. Then a share of them is drawn again and again with other seeds, by the code
that `explain` draws with, and every number that it estimates is held against the truth. `run(Options(…))` returns rows.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.measure import Row
from identikit.attention import sample as sampling
from identikit.attention.captured import Place
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
from identikit.errors import InputError
from identikit.explanation.attention_facts import candidates, certain_means, group_bounds, group_mass
from identikit.models.load.load import load
from identikit.models.model import Model
from identikit.progress import Progress, silent
from identikit.texts.data import read_texts, sample_texts

Numbers = dict[str, Mean]
_ROUNDING = 1e-9


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
    tokens: int = 60
    draws: int = 200
    shares: tuple[float, ...] = (0.05, 0.25)


@dataclass(frozen=True)
class SolvedText:
    """A text with all of its free rows bounded; rows are drawn from it at no cost."""

    attention: EffectiveAttention
    groups: list[list[int]]
    whole: RowSample
    place: dict[Place, int] = field(init=False, repr=False)

    @classmethod
    def of(cls, attention: EffectiveAttention, progress: Progress) -> "SolvedText":
        """Bound all free rows of a text."""
        special = [place for place, is_special in enumerate(attention.about["special"]) if is_special]
        groups = [special or [0], *candidates(attention).values()]
        return cls(attention, groups, sample_rows(attention, groups, seconds=None, seed=0, progress=progress))

    def __post_init__(self):
        places = map(tuple, self.whole.bounded.places.tolist())
        object.__setattr__(self, "place", {place: row for row, place in enumerate(places)})

    def drawn(self, share: float, seed: int) -> RowSample:
        """Draw rows as `explain` does, on a clock on which each takes a second."""
        seconds = 0.0

        def looked_up(_: Any, places: Sequence[Place], *others: Any, **limits: Any) -> BoundedRows:
            nonlocal seconds
            seconds += len(places)
            return self.whole.bounded.some(torch.tensor([self.place[place] for place in places]))

        clock = SimpleNamespace(monotonic=lambda: seconds)
        with patch.object(sampling, "bound_rows", looked_up), patch.object(sampling, "time", clock):
            budget = max(1.0, share * len(self.place))
            return sample_rows(self.attention, self.groups, seconds=budget, seed=seed)

    def numbers(self, sample: RowSample) -> Numbers:
        """Return all that verdict and page say of a text from its bounded rows."""
        raw, _, _ = group_mass(self.attention, membership(self.groups, len(self.attention.tokens)))
        said: Numbers = {}
        for name, mean in certain_means(self.attention, sample).items():
            said[f"{name}, by layer"] = mean
            said[f"{name}, of the text"] = mean.overall()
        for at in range(len(self.groups)):
            lower, upper = group_bounds(sample, at, raw[:, at])
            said[f"least weight, by layer, {at}"] = lower
            said[f"greatest weight, by layer, {at}"] = upper
        certain = certain_rows(self.attention, sample.bounded)
        free = self.attention.null_dim.cpu() > 0
        said["certain_mass, by head"] = mean_by_head(certain, free)
        said["certain_mass, by token"] = mean_by_token(certain, free)
        return said


def run(options: Options, *, progress: Progress = silent) -> list[Row]:
    """Return in what share of draws each kind of number holds the truth: over all, and of the one that does least."""
    model = load(options.model)
    texts = _texts(model, options)
    holds: dict[tuple[float, str], list[float]] = defaultdict(list)
    alone = 0
    lengths = []
    free = 0
    for number, text in enumerate(texts):
        attention = effective_attention(model, text)
        solved = SolvedText.of(attention, progress)
        lengths.append(len(attention.tokens))
        free += len(solved.place)
        truth = solved.numbers(solved.whole)
        for share in options.shares:
            for name, shares in _held(solved, truth, share, options.draws).items():
                holds[share, name.partition(" layer, ")[0]] += shares
            alone += _without_count(solved.numbers(solved.drawn(share, 0)))
        progress("texts", number + 1, len(texts))
    case = f"{model.name}, {len(texts)} texts of {min(lengths)} to {max(lengths)} tokens, {free:,} free rows"
    rows = [Row(case, "numbers shown without their number of rows", alone)]
    for (share, name), shares in sorted(holds.items()):
        kind = f"{name} ({len(shares):,} numbers, {options.draws} draws of {100 * share:g} % of the rows)"
        rows.append(Row(case, f"{kind}: holds the truth", 100 * sum(shares) / len(shares), "%"))
        rows.append(Row(case, f"{kind}: the least", 100 * min(shares), "%"))
    return rows


def _held(solved: SolvedText, truth: Numbers, share: float, draws: int) -> dict[str, list[float]]:
    """Return in what share of draws each number that is not known anyway holds the truth, by name."""
    counts = {name: torch.zeros(mean.mean.numel()) for name, mean in truth.items()}
    open_ = {name: torch.zeros(mean.mean.numel()) for name, mean in truth.items()}
    for seed in range(draws):
        for name, mean in solved.numbers(solved.drawn(share, seed)).items():
            least, most = (end.flatten() for end in mean.ends())
            true = truth[name].mean.flatten()
            counts[name] += (least <= true + _ROUNDING) & (true <= most + _ROUNDING)
            open_[name] += (mean.rows < mean.free).flatten()
    return {name: (counts[name] / draws)[open_[name] > 0].tolist() for name in truth}


def _without_count(said: Mapping[str, Mean]) -> int:
    """Count numbers of heads and tokens that rest on some of the free rows and do not say on how many."""
    alone = 0
    for name in ("certain_mass, by head", "certain_mass, by token"):
        mean = said[name]
        partial = (mean.rows < mean.free).flatten().tolist()
        words = mean.words(lambda number: f"{number:.2f}")
        alone += sum(some and "bounded)" not in word for some, word in zip(partial, words, strict=True))
    return alone


def _texts(model: Model, options: Options) -> list[Any]:
    """Return the longest texts that have at most so many tokens."""
    every = sample_texts() if options.data is None else read_texts(options.data, data_dir=options.data_dir)
    fitting = sorted(_measured(model, every, options.tokens), key=lambda text: -text[0])
    if len(fitting) < options.texts:
        raise InputError(
            f"Only {len(fitting)} texts have at most {options.tokens} tokens. Allow more with --tokens, or ask for fewer "
            "with --texts."
        )
    return [text for _, text in fitting[: options.texts]]


def _measured(model: Model, texts: Sequence[Any], most: int) -> Iterator[tuple[int, Any]]:
    for given in texts:
        text = " ".join(given) if isinstance(given, tuple) and model.causal else given
        length = len(model.encode(text)[0])
        if length <= most:
            yield length, text
