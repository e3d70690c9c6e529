"""What `attention_measure`, `head_scores` and `agreement` give back."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from identikit.attention.interval_result import edge_name, strongest_certain
from identikit.attention.proofs import ProvableResult
from identikit.results.facts import Fact
from identikit.results.gathered import largest_entries
from identikit.results.measure import optional_array, stored_array
from identikit.results.result import Result
from identikit.results.words import mean_and_error, percent
from identikit.shapes import Float, Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_EDGE = "layer head query key"
_WORDS = {"query": "mean", "key": "sum", "output": "mean", "input": "sum"}
_HEAD = "score layer head"
_NO_TARGET = "No row of any text has a target for this score."
_LISTED = 3  # heads that are named in words
_SAME = 0.005  # a range that is narrower is said as one number
_EQUAL = 1e-6  # ends that differ by less are the same, but for rounding
_HAS = 0.5  # of its attention, from which on a head is said to have a role


class Survival(NamedTuple):
    """How much of a reading is the same in all alternatives: means over rows, through layers over those of the last.

    - `rows`: how many rows there are
    - `determined`: the share of a row that every alternative gives to the same sources
    - `strongest`: the share of rows whose strongest source is the strongest in every alternative
    - `order`: how many of a row's five strongest sources come in the same order in every alternative
    - `undecided`: rows of which not even the strongest source is known; in these only what is known counts
    - `order_undecided`: rows in which more sources than are counted may be in a determined order
    """

    rows: int
    determined: float
    strongest: float
    order: float
    undecided: int
    order_undecided: int


class AttentionMeasure(ProvableResult):
    """A reading of attention, with its range over all alternatives: other attention with the same head outputs.

    Axes are (layer, head, query, key) for readings of one head, (layer, query, key) for a layer's mean, and (layer,
    output, input) for readings through layers.
    """

    kind = "attention measure"
    same = ("measure",)
    main = ("raw", "effective", "lower", "upper")
    raw = stored_array(_EDGE, "The reading of attention as the model computes it.", words=_WORDS)
    effective = stored_array(_EDGE, "The reading of effective attention.", words=_WORDS)
    lower = stored_array(_EDGE, "The least reading of any alternative.", words=_WORDS)
    upper = stored_array(_EDGE, "The greatest reading of any alternative.", words=_WORDS)
    gap = stored_array(
        _EDGE, "How far the ends can be from the sharp ones; NaN where nothing was bounded.", range="0 or more"
    )
    certain_share = stored_array(
        "layer head query",
        "Share of each row of `raw` that every alternative gives to the same sources.",
        range="0 to 1",
    )
    certain_order = stored_array(
        "layer head query",
        "How many of the strongest sources, up to 5, come in this order in all alternatives; through layers, of the "
        "other tokens. At least so many where `order_is_decided` is false, and -1 where not even the strongest is "
        "decided. It is found when it is asked for: by the range of the difference of two sources, where their ends do "
        "not tell.",
        range="−1 to 5",
        on_request=True,
    )
    order_is_decided = stored_array(
        "layer head query",
        "Whether no more sources than `certain_order` says come in a certain order. False where the ends do not tell "
        "and nothing else compares two sources (norms and outer bounds), and where time ran out.",
        on_request=True,
    )
    measure = Fact("Which reading it is.")
    meaning = Fact("What the reading is, in words.")
    target = Fact("What gradients are of; None where the reading needs none.")
    exact = Fact("Whether the ends are exact: attained by some attention, but for their gap.")

    @property
    def strongest_is_certain(self) -> Float[Tensor, "*row"]:
        """Whether the strongest source of each row is the strongest in every alternative: 1, 0, or NaN if undecided."""
        return strongest_certain(self.certain_order)

    @property
    def through(self) -> bool:
        """Whether it goes through layers."""
        return self.axes[-1].name == "input"

    def words(self) -> "AttentionMeasure":
        """Return the result by words: the ends of a word's pieces are added up, which is valid but not sharp."""
        result = super().words()
        sharp = self.exact and [*map(len, result.axes)] == [*map(len, self.axes)]
        return replace(result, about={**result.about, "exact": sharp})

    def survival(self) -> Survival:
        """Return how much of the reading is determined; this finds `certain_order`."""
        last = slice(-1, None) if self.through else slice(None)
        share, order, decided = (
            self.read(name)[last] for name in ("certain_share", "certain_order", "order_is_decided")
        )
        known = order.clamp(min=0).double()
        determined, strongest, length = (float(part.mean()) for part in (share, (known > 0).double(), known))
        return Survival(order.numel(), determined, strongest, length, int((order < 0).sum()), int((~decided).sum()))

    def describe(self) -> str:
        """Say what the reading is, how much of it is determined, and which entries are largest."""
        words = [f"{self.meaning}"]
        if self.target is not None:
            words.append(f"Target: {self.target}; gradients and norms are held.")
        if "certain_share" in self.source.dims:
            least = "" if self.exact else "At least "
            share = percent(float(self.certain_share.mean()))
            words.append(f"{least}{share} of it is determined by the outputs of the heads.")
        if not self.exact:
            words.append("The ends are outer bounds: no alternative is outside of them, and none need attain them.")
        late = float(self.read("gap").isnan().double().mean()) if "gap" in self.source.dims else 0.0
        if late:
            words.append(f"{percent(late)} of the entries were not bounded in time.")
        sizes = self.array("raw").flatten().abs().nan_to_num(-1)
        places = sizes.topk(min(3, len(sizes))).indices.tolist()
        arrow = "←" if self.through else "→"
        for place, (value, labels) in zip(places, largest_entries(self, "raw", len(places)), strict=True):
            least, most = (float(self.array(name).flatten()[place]) for name in ("lower", "upper"))
            words.append(f"{edge_name(self, labels, arrow)} {value:.3f} in [{least:.3f}, {most:.3f}].")
        return " ".join(words)

    def plot(self, **options: Any) -> Any:
        """Draw one selected row as bars from the least to the greatest, a head or a layer as maps, or a grid of heads.

        Without a head, layers are drawn as maps, the last one if none is selected.
        """
        from identikit import plots

        if all(axis.single for axis in self.axes[:-1]):
            return plots.measure_bars(self, **options)
        if self.axes[1].name == "head" and not (self.axes[0].single and self.axes[1].single):
            return plots.head_grid(self, **{"by": "certain_share", **options})
        return plots.measure_maps(self, **options)


def _between(lower: Tensor, upper: Tensor) -> str:
    """Say between which ends a score is; nothing where they are the same."""
    return f"between {lower:.2f} and {upper:.2f}" if upper - lower > _SAME else ""


class HeadScores(ProvableResult):
    """How far each head has each role: raw, effective, and the range over all alternatives.

    A score is the mean over the rows with a target in each text, then over texts. An alternative is other attention
    with the same outputs; a score that is the same in all of them is determined by the outputs.
    """

    kind = "head scores"
    main = ("raw", "effective", "lower", "upper")
    raw = stored_array(_HEAD, "The score of attention as the model computes it.", missing=_NO_TARGET)
    effective = stored_array(_HEAD, "The score of effective attention.", missing=_NO_TARGET)
    lower = stored_array(_HEAD, "The least score of any alternative.", missing=_NO_TARGET)
    upper = stored_array(_HEAD, "The greatest score of any alternative.", missing=_NO_TARGET)
    gap = stored_array(
        _HEAD, "How far the ends can be from the sharp ones; NaN where rows are not bounded.", missing=_NO_TARGET
    )
    scored_texts = stored_array("score", "In how many texts some row has a target.", range="0 or more")
    raw_stderr = optional_array(_HEAD, "Standard error of `raw` over texts; None for one text.")
    effective_stderr = optional_array(_HEAD, "Standard error of `effective` over texts; None for one text.")
    lower_stderr = optional_array(_HEAD, "Standard error of `lower` over texts; None for one text.")
    upper_stderr = optional_array(_HEAD, "Standard error of `upper` over texts; None for one text.")
    meanings = Fact("What each score is.")
    texts = Fact("How many texts were scored.")
    sink = Fact("From which weight on the first token on a head counts as a sink.")

    @property
    def scores(self) -> tuple[str, ...]:
        """The names of the scores."""
        return self.axis("score").values

    def describe(self) -> str:
        """Say for each score which heads have most of it, between which ends, and which head certainly has the role."""
        layers, heads = (self.axis(name).values for name in ("layer", "head"))
        names = [f"L{layer}H{head}" for layer in layers for head in heads]
        lines = []
        for at, role in enumerate(self.scores):
            raw, effective, lower, upper, gap = (self.read(name)[at].flatten() for name in (*self.main, "gap"))
            if raw.isnan().all():
                lines.append(f"{role}: {_NO_TARGET}")
                continue
            shown = []
            for place in raw.nan_to_num(-1).topk(min(_LISTED, len(raw))).indices.tolist():
                ends = _between(lower[place], upper[place])
                if not ends:
                    ends = "the same" if upper[place] - lower[place] <= _EQUAL else f"within {_SAME} of it"
                effectively = f"effective {effective[place]:.2f}"
                shown.append(f"{names[place]} {raw[place]:.2f}, {ends} in all alternatives ({effectively})")
            words = [f"{role}: {'; '.join(shown)}."]
            noun = self.about.get("nouns", {}).get(role)
            place = int(lower.nan_to_num(-1).argmax())
            if noun is not None and lower[place] >= _HAS:
                score = ", ".join(filter(None, (f"{raw[place]:.2f}", _between(lower[place], upper[place]))))
                words.append(f"{names[place]} is {noun} in every attention with this output: score {score}.")
            if gap.isnan().any():
                words.append(f"{int(gap.isnan().sum())} heads were not bounded in time: their ends are wide.")
            lines.append(" ".join(words))
        return "\n".join(lines)

    def plot(self, **options: Any) -> "Axes":
        """Draw one score of all heads, the first if none is selected, each with its range and its effective score."""
        from identikit import plots

        return plots.role_bars(self if self.axis("score").single else self.sel(score=self.scores[0]), **options)


class Agreement(Result):
    """How far measures rank the sources of a token alike, and how much of each ranking the outputs determine.

    Correlations are means over texts, each of which is the mean over its tokens. A measure that no alternative moves is
    determined as a whole.
    """

    kind = "agreement"
    main = ("correlation", "correlation_stderr")
    correlation = stored_array(
        "measure other",
        "Spearman's rank correlation of two measures over the other tokens that are a token's sources.",
        range="−1 to 1",
        missing="No token of any text has several sources that differ.",
    )
    correlation_stderr = optional_array("measure other", "Standard error over texts; None for one text.")
    determined = stored_array(
        "measure",
        "Share of the pairs of sources that are in the same order in all alternatives, as far as the ends of the two "
        "tell: at least this share is.",
        range="0 to 1",
        missing="No token of any text has several sources, or no text was bounded in time.",
    )
    bounded_texts = stored_array("measure", "In how many texts all its ends were found in time.", range="0 or more")
    determined_stderr = optional_array("measure", "Standard error over texts; None for one text.")
    texts = Fact("How many texts were read.")

    def describe(self) -> str:
        """Say how far each pair of measures agrees, and how much of each ranking is determined."""
        written = {}
        for name in ("correlation", "determined"):
            means = self.read(name)
            known = f"{name}_stderr" in self.source.dims
            errors = self.read(f"{name}_stderr") if known else torch.full_like(means, torch.nan)
            pairs = zip(means.flatten().tolist(), errors.flatten().tolist(), strict=True)
            written[name] = [mean_and_error(2)(pair) for pair in pairs]
        lines = []
        others = self.axis("other").values
        for row, measure in enumerate(self.axis("measure").values):
            bounded = int(self.read("bounded_texts")[row])
            some = (
                "" if bounded == self.texts else f", in the {bounded} of {self.texts} texts that were bounded in time"
            )
            line = (
                f"{measure}: at least {written['determined'][row]} of the ranking is determined by the outputs{some}."
            )
            if not bounded:
                line = f"{measure}: no text was bounded in time, so that it is not known how much is determined."
            ranks = written["correlation"][row * len(others) : (row + 1) * len(others)]
            pairs = [f"{other} {rank}" for other, rank in zip(others, ranks, strict=True) if other != measure]
            lines.append(f"{line} Rank correlation: {', '.join(pairs)}." if pairs else line)
        return "\n".join(lines)

    def plot(self, **options: Any) -> "Axes":
        """Draw the rank correlation of each pair of measures as a map."""
        from identikit import plots

        return plots.agreement_map(self, **options)
