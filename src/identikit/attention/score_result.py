"""What `head_scores` gives back."""

from typing import Any

from identikit.results.measure import held, sometimes_held
from identikit.results.result import Fact, Result

_HEAD = "score layer head"
_NO_TARGET = "No row of any text has a target for this score."
_LISTED = 3  # heads that are named in words
_SAME = 0.005  # a range that is narrower is said as one number


class HeadScores(Result):
    """How far each head has each role: raw, effective, and the range over all alternatives.

    A score is the mean over the rows with a target in each text, then over texts. An alternative is other attention
    with the same outputs; a score that is the same in all of them is determined by the outputs.
    """

    kind = "head scores"
    main = ("raw", "effective", "lower", "upper")
    raw = held(_HEAD, "The score of attention as the model computes it.", missing=_NO_TARGET)
    effective = held(_HEAD, "The score of effective attention.", missing=_NO_TARGET)
    lower = held(_HEAD, "The least score of any alternative.", missing=_NO_TARGET)
    upper = held(_HEAD, "The greatest score of any alternative.", missing=_NO_TARGET)
    gap = held(
        _HEAD, "How far the ends can be from the sharp ones; NaN where rows are not bounded.", missing=_NO_TARGET
    )
    scored_texts = held("score", "In how many texts some row has a target.", range="0 or more")
    raw_stderr = sometimes_held(_HEAD, "Standard error of `raw` over texts; None for one text.")
    effective_stderr = sometimes_held(_HEAD, "Standard error of `effective` over texts; None for one text.")
    lower_stderr = sometimes_held(_HEAD, "Standard error of `lower` over texts; None for one text.")
    upper_stderr = sometimes_held(_HEAD, "Standard error of `upper` over texts; None for one text.")
    meanings = Fact("What each score is.")
    texts = Fact("How many texts were scored.")
    sink = Fact("From which weight on the first token on a head counts as a sink.")

    @property
    def scores(self) -> tuple[str, ...]:
        """The names of the scores."""
        return self.axis("score").values

    def said(self) -> str:
        """Say for each score which heads have most of it, and between which ends."""
        return "\n".join(self._role(at, name) for at, name in enumerate(self.scores))

    def _role(self, at: int, name: str) -> str:
        raw = self.read("raw")[at]
        if raw.isnan().all():
            return f"{name}: {_NO_TARGET}"
        strongest = raw.flatten().nan_to_num(-1).topk(min(_LISTED, raw.numel())).indices.tolist()
        heads = [self._head(at, place // raw.shape[1], place % raw.shape[1]) for place in strongest]
        unknown = int(self.read("gap")[at].isnan().sum())
        late = f" {unknown} heads were not bounded in time: their ends are wide." if unknown else ""
        return f"{name}: {'; '.join(heads)}.{late}"

    def _head(self, at: int, layer: int, head: int) -> str:
        raw, effective, lower, upper = (float(self.read(name)[at, layer, head]) for name in self.main)
        where = f"L{self.axis('layer').values[layer]}H{self.axis('head').values[head]}"
        ends = f"between {lower:.2f} and {upper:.2f}"
        fixed = f"{ends} in all alternatives" if upper - lower > _SAME else "determined by the outputs"
        return f"{where} {raw:.2f}, {fixed} (effective {effective:.2f})"

    def plot(self, **options: Any) -> Any:
        """Draw one score of all heads, the first if none is selected, each with its range and its effective score."""
        from identikit import plots

        return plots.role_bars(self if self.axis("score").single else self.sel(score=self.scores[0]), **options)
