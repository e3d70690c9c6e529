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
_HEADS_NAMED = 3  # in words
_NARROW = 0.005  # a narrower range is written as one number
_ROUNDING = 1e-6  # ends that differ by less are the same
_HAS_ROLE = 0.5  # the least share of a head's attention for which it is said to have a role


class Survival(NamedTuple):
    """How much of a measure is the same in all alternatives: means over rows, through layers over those of the last.

    - `rows`: how many rows there are
    - `determined`: the share of a row that every alternative gives to the same sources
    - `strongest`: the share of rows whose strongest source is the strongest in every alternative
    - `order`: how many of a row's five strongest sources come in the same order in every alternative
    - `undecided`: rows whose strongest source is not known to be certain or not; they count as not determined
    - `order_undecided`: rows in which more sources than are counted may be in a determined order
    """

    rows: int
    determined: float
    strongest: float
    order: float
    undecided: int
    order_undecided: int


class AttentionMeasure(ProvableResult):
    """An attention measure, with its range over all alternatives: other attention with the same head outputs.

    Axes are (layer, head, query, key) for measures of one head, (layer, query, key) for those of a layer, and (layer,
    output, input) for those through layers.
    """

    kind = "attention measure"
    same = ("measure",)
    main = ("raw", "effective", "lower", "upper")
    raw = stored_array(_EDGE, "The measure of attention as the model computes it.", words=_WORDS)
    effective = stored_array(_EDGE, "The measure of effective attention.", words=_WORDS)
    lower = stored_array(_EDGE, "The least value in any alternative.", words=_WORDS)
    upper = stored_array(_EDGE, "The greatest value in any alternative.", words=_WORDS)
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
        "decided. It is computed when it is first read: where the ends of two sources overlap, from the range of their "
        "difference.",
        range="−1 to 5",
        on_request=True,
    )
    order_is_decided = stored_array(
        "layer head query",
        "Whether no more sources than `certain_order` says come in a certain order. False where ends overlap and "
        "nothing else compares two sources (norms and outer bounds), and where time ran out.",
        on_request=True,
    )
    measure = Fact("Which measure it is.")
    meaning = Fact("What the measure is, in words.")
    target = Fact("What gradients are of; None where the measure needs none.")
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
        """Return how much of the measure is determined; this computes `certain_order`."""
        rows = slice(-1, None) if self.through else slice(None)
        share = self.read("certain_share")[rows]
        order = self.read("certain_order")[rows]
        decided = self.read("order_is_decided")[rows]
        length = order.clamp(min=0).double()
        return Survival(
            rows=order.numel(),
            determined=float(share.mean()),
            strongest=float((length > 0).double().mean()),
            order=float(length.mean()),
            undecided=int((order < 0).sum()),
            order_undecided=int((~decided).sum()),
        )

    def describe(self) -> str:
        """Return what the measure is, how much of it is determined, and which entries are largest."""
        words = [f"{self.meaning}"]
        if self.target is not None:
            words.append(f"Target: {self.target}; gradients and norms are held.")
        if "certain_share" in self.source.dims:
            at_least = "" if self.exact else "At least "
            share = percent(float(self.certain_share.mean()))
            words.append(f"{at_least}{share} of it is determined by the outputs of the heads.")
        if not self.exact:
            words.append("The ends are outer bounds: no alternative is outside of them, and none need attain them.")
        unbounded = float(self.read("gap").isnan().double().mean()) if "gap" in self.source.dims else 0.0
        if unbounded:
            words.append(f"{percent(unbounded)} of the entries were not bounded in time.")
        sizes = self.array("raw").flatten().abs().nan_to_num(-1)
        largest = sizes.topk(min(3, len(sizes))).indices.tolist()
        lower, upper = (self.array(name).flatten()[largest].tolist() for name in ("lower", "upper"))
        arrow = "←" if self.through else "→"
        entries = largest_entries(self, "raw", len(largest))
        for (value, labels), least, greatest in zip(entries, lower, upper, strict=True):
            words.append(f"{edge_name(self, labels, arrow)} {value:.3f} in [{least:.3f}, {greatest:.3f}].")
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
    sink = Fact("A head counts as a sink where the first token receives more than this weight.")

    @property
    def scores(self) -> tuple[str, ...]:
        """The names of the scores."""
        return self.axis("score").values

    def describe(self) -> str:
        """Return for each score its strongest heads with their ranges, and a head that certainly has the role."""
        return "\n".join(self._role_words(index, role) for index, role in enumerate(self.scores))

    def _role_words(self, index: int, role: str) -> str:
        raw, effective, lower, upper, gap = (self.read(name)[index].flatten() for name in (*self.main, "gap"))
        if raw.isnan().all():
            return f"{role}: {_NO_TARGET}"
        heads = [f"L{layer}H{head}" for layer in self.axis("layer").values for head in self.axis("head").values]
        ends = [f"between {low:.2f} and {high:.2f}" for low, high in zip(lower.tolist(), upper.tolist(), strict=True)]
        widths = upper - lower
        strongest = []
        for head in raw.nan_to_num(-1).topk(min(_HEADS_NAMED, len(raw))).indices.tolist():
            span = ends[head]
            if not widths[head] > _NARROW:
                span = "the same" if widths[head] <= _ROUNDING else f"within {_NARROW} of it"
            scores = f"{raw[head]:.2f}, {span} in all alternatives (effective {effective[head]:.2f})"
            strongest.append(f"{heads[head]} {scores}")
        words = [f"{role}: {'; '.join(strongest)}."]
        noun = self.about.get("nouns", {}).get(role)
        surest = int(lower.nan_to_num(-1).argmax())
        if noun is not None and lower[surest] >= _HAS_ROLE:
            span = f", {ends[surest]}" if widths[surest] > _NARROW else ""
            words.append(
                f"{heads[surest]} is {noun} in every attention with this output: score {raw[surest]:.2f}{span}."
            )
        if gap.isnan().any():
            words.append(f"{int(gap.isnan().sum())} heads were not bounded in time: their ends are wide.")
        return " ".join(words)

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
        """Return how closely each pair of measures agrees, and how much of each ranking is determined."""
        determined = self._with_errors("determined")
        correlations = self._with_errors("correlation")
        names = self.axis("other").values
        lines = []
        for row, measure in enumerate(self.axis("measure").values):
            bounded = int(self.read("bounded_texts")[row])
            texts = (
                "" if bounded == self.texts else f", in the {bounded} of {self.texts} texts that were bounded in time"
            )
            line = f"{measure}: at least {determined[row]} of the ranking is determined by the outputs{texts}."
            if not bounded:
                line = f"{measure}: no text was bounded in time, so that it is not known how much is determined."
            ranks = zip(names, correlations[row * len(names) :], strict=False)
            pairs = [f"{name} {rank}" for name, rank in ranks if name != measure]
            lines.append(f"{line} Rank correlation: {', '.join(pairs)}." if pairs else line)
        return "\n".join(lines)

    def _with_errors(self, name: str) -> list[str]:
        """Format each mean of an array with its standard error, if there is one."""
        means = self.read(name).flatten()
        errors = torch.full_like(means, torch.nan)
        if f"{name}_stderr" in self.source.dims:
            errors = self.read(f"{name}_stderr").flatten()
        return [mean_and_error(2)(pair) for pair in zip(means.tolist(), errors.tolist(), strict=True)]

    def plot(self, **options: Any) -> "Axes":
        """Draw the rank correlation of each pair of measures as a map."""
        from identikit import plots

        return plots.agreement_map(self, **options)
