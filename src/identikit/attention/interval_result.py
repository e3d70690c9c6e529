"""What `attention_intervals` and `alternative_attention` give back."""

from typing import Any

import torch

from identikit.attention.precision import careful_words
from identikit.errors import InputError
from identikit.models.reading import Change
from identikit.results.gathered import strongest
from identikit.results.measure import held
from identikit.results.result import Fact, Result

_SHARP = 1e-8  # a gap that is not worth a word
_LISTED = 4  # groups that are named in words
_MAP_WORDS = {"query": "mean", "key": "sum"}
_KEY_WORDS = {"key": "sum"}


def edge_name(result: Result, labels: dict[str, str]) -> str:
    """Return an edge as `L4H5 foot → her`, without the layer or head that was selected."""
    head = "".join(f"{letter}{labels[name]}" for name, letter in (("layer", "L"), ("head", "H")) if name in labels)
    key_axis = result.axes[-1].name
    query, key = (labels.get(name, result.axis(name).label) for name in ("query", key_axis))
    return f"{head} {query} → {key}".strip()


class AttentionIntervals(Result):
    """The sharp range of every edge over all attention with the same output: arrays are (layer, head, query, key).

    - `lower`, `upper`: the least and the greatest weight; `raw`: what the model computed
    - `gap`: how far the proven ends can be from the true ones; 0 where they are exact, NaN where nothing is known
    - `certain_mass`: the sum of a row's lower bounds, (layer, head, query): weight that every such attention agrees on
    - `certain_order`: how many of a row's strongest edges have the same order in every such attention, up to 5; -1
      where it is not decided

    For groups of keys, the last axis is `group`, and the row's own readings are left out. Of a model in half precision,
    `rounded_lower` and `rounded_upper` are the ends when its output may move by `rounding`, the dtype's, of its norm.
    """

    kind = "attention intervals"
    main = ("raw", "lower", "upper")
    raw = held("layer head query key", "Attention as the model computes it.", range="0 to 1", words=_MAP_WORDS)
    lower = held(
        "layer head query key",
        "The least weight that any attention with the same output gives to each edge.",
        range="0 to 1",
        words=_MAP_WORDS,
    )
    upper = held(
        "layer head query key",
        "The greatest weight that any attention with the same output gives to each edge.",
        range="0 to 1",
        words=_MAP_WORDS,
    )
    gap = held(
        "layer head query key",
        "How far the ends can be from the sharp ones: about 0 where they are exact, NaN where nothing is known.",
        range="0 to 1",
        missing="The edge was not bounded in time.",
    )
    certain_mass = held(
        "layer head query",
        "Weight that every attention with the same output gives to the same keys: the sum of a row's lower bounds.",
        range="0 to 1",
    )
    certain_order = held(
        "layer head query",
        "How many of the strongest edges have the same order in all attention; -1: not decided.",
        range="−1 to 5",
    )
    method = Fact("How the ends were found.")
    rounded_lower = held(
        "layer head query key",
        "The least weight when the output may move by half precision's rounding.",
        range="0 to 1",
    )
    rounded_upper = held(
        "layer head query key",
        "The greatest weight when the output may move by half precision's rounding.",
        range="0 to 1",
    )
    rounding = Fact("The rounding of half precision, relative; 0 for a model in float32 or float64.")
    epsilon = Fact("By which share of its norm the head's output may move.")

    @property
    def strongest_is_certain(self) -> Any:
        """Whether the row's strongest edge is the strongest in every attention with the same output.

        True, False, or None where it is not decided. For several rows, a tensor with 1, 0 and NaN.
        """
        order = self.array("certain_order")
        if order.ndim:
            return torch.where(order < 0, torch.nan, (order > 0).double())
        return None if int(order) < 0 else int(order) > 0

    def words(self) -> "AttentionIntervals":
        """Return the result by words: the ends of a word's pieces are added up, which is valid but not sharp.

        Sharp ends for words come from `groups="words"`.
        """
        if "groups" in self.about:
            raise InputError('These intervals are of groups of keys. For sharp ends of words, use groups="words".')
        return super().words()

    def said(self) -> str:
        """Say how much of the attention is certain, and which edges are least so."""
        width = self.upper - self.lower
        unknown = self.gap.isnan() if "gap" in self.source.dims else torch.zeros_like(width, dtype=torch.bool)
        late = int(unknown.sum())
        told = []
        if "certain_mass" in self.source.dims:
            mass, bound = self.certain_mass, "at least " if late else ""
            told.append(f"Certain mass {bound}{float(mass.mean()):.2f}{' on average' if mass.numel() > 1 else ''}.")
            told += self._strongest()
        if "groups" in self.about:
            told.append(self._masses())
        if late:
            told.append(f"{late:,} of {width.numel():,} weights were not bounded in time.")
        if "rounded_lower" in self.source.dims and "certain_mass" in self.source.dims:
            told.append(self._rounded())
        if self.about.get("epsilon"):
            told.append(f"The head's output may move by {self.epsilon:g} of its norm.")
        largest = float(self.gap.nan_to_num(0.0).max()) if "gap" in self.source.dims else 0.0
        if largest > _SHARP:
            told.append(f"The ends are proven, and at most {largest:.1g} from the sharp ones.")
        ((widest, labels),) = strongest(self, "raw", 1, width.masked_fill(unknown, 0.0))
        if widest > 0:
            at = int(width.masked_fill(unknown, 0.0).argmax())
            raw, lower, upper = (float(part.flatten()[at]) for part in (self.raw, self.lower, self.upper))
            edge = (
                edge_name(self, labels) if width.numel() == 1 else f"The widest interval is {edge_name(self, labels)}"
            )
            told.append(
                f"{edge}: raw {raw:.3f}, between {lower:.3f} and {upper:.3f} in every attention with "
                f"{'such an' if self.about.get('epsilon') else 'the same'} output."
            )
        elif late < width.numel():
            told.append(f"Every {'other ' if late else ''}weight is fixed by the output.")
        return " ".join([*told, *careful_words(self.about["row_residual"], self.provenance.dtype)])

    def _strongest(self) -> list[str]:
        """Say of one row how many of its strongest edges are in a certain order; of several, in what share they are."""
        certain = self.strongest_is_certain
        if not isinstance(certain, torch.Tensor):
            order = int(self.certain_order)
            if certain is None:
                return ["Whether its strongest edge is certainly the strongest is not decided."]
            if not certain:
                return ["Another edge could have been the strongest."]
            return [
                f"The order of its {order} strongest edges is certain."
                if order > 1
                else "Its strongest edge is certain."
            ]
        known = certain[~certain.isnan()]
        if not len(known):
            return []
        some = f"{len(known):,} rows of {certain.numel():,} for which this is decided"
        rows = "rows" if len(known) == certain.numel() else some
        return [f"The strongest edge is certainly the strongest in {float(known.mean()):.0%} of the {rows}."]

    def _rounded(self) -> str:
        """Say how much stays certain when the output is only known to half precision."""
        mass = float(self.read("rounded_lower").sum(-1).mean())
        kept = f"the lower ends sum to {mass:.2f}{' on average' if self.rounded_lower.ndim > 1 else ''}"
        return f"If the output is taken to half precision's rounding ({self.rounding:.1g} of its norm), {kept}."

    def _masses(self) -> str:
        """Say what each group receives, on average over the rows."""
        axis, parts = self.axis("group"), [self.read(name).flatten(0, -2).mean(0) for name in self.main]
        named = [
            f"{axis.name_of(at)} {raw:.3f} in [{lower:.3f}, {upper:.3f}]"
            for at, (raw, lower, upper) in enumerate(zip(*(part.tolist() for part in parts), strict=True))
        ]
        more = f" and {len(named) - _LISTED} more groups" if len(named) > _LISTED else ""
        return f"Mean weight, and what it could have been: {', '.join(named[:_LISTED])}{more}."

    def plot(self, by: str = "certain_mass", **options: Any) -> Any:
        """Draw the intervals of one selected row as bars, of one head as maps, or a grid of heads `by` an array."""
        from identikit import plots

        single = [self.axis(name).single for name in ("layer", "head", "query")]
        if all(single) or "groups" in self.about:
            return plots.interval_bars(self, **options)
        if all(single[:2]):
            return plots.interval_maps(self, **options)
        return plots.head_grid(self, by=by, **options)


class AlternativeAttention(Result):
    """Another attention row with the same output, put into the model; arrays are over all keys, invisible ones 0.

    - `attention` = `raw` + `step` · `direction`, the direction of length 1
    - `output_change`: how much the model's output changed when the row was put in
    - `row_residual`: how far the head's own output is from the same, relative to the lengths that it adds up
    """

    kind = "alternative attention"
    main = ("raw", "attention", "direction")

    raw = held("layer head query key", "Attention as the model computes it.", range="0 to 1", words=_KEY_WORDS)
    attention = held("layer head query key", "The other attention.", range="0 to 1", words=_KEY_WORDS)
    direction = held(
        "layer head query key", "The direction from the raw row to the other one, of length 1.", words=_KEY_WORDS
    )
    step = Fact("How far the other row is from the raw one.")
    row_residual = Fact("How far the head's own output is from the same, relative to the lengths that it adds up.")

    @property
    def output_change(self) -> Change:
        """How much the final hidden states and logits changed."""
        return Change(*self.about["output_change"])

    def said(self) -> str:
        """Say how far the weight went that was asked for, or the one that moved most, and what it did to the output."""
        key, place = self.axis("key"), int((self.attention - self.raw).abs().argmax())
        change, dtype = self.output_change, self.provenance.dtype
        moved = f"{change.words()}{change.beyond(dtype)}."
        moved = " ".join([moved, *careful_words(self.row_residual, dtype)])
        asked = self.about.get("toward")
        if asked and set(asked) <= set(key.values) and len(key) > 1:
            at = [key.values.index(one) for one in asked]
            raw, other = (float(part.reshape(-1)[at].sum()) for part in (self.raw, self.attention))
            names = ", ".join(map(key.name_of, at[:_LISTED])) + (" …" if len(at) > _LISTED else "")
            return (
                f"{self.axis('query').label} → {names} goes from {raw:.3f} to {other:.3f}. Putting the row into the "
                f"model {moved}"
            )
        raw, other = (float(part.reshape(-1)[place]) for part in (self.raw, self.attention))
        largest = ", the largest change" if len(key) == len(self.tokens) else ""
        return (
            f"{self.axis('query').label} → {key.name_of(place)} goes from {raw:.3f} to {other:.3f}{largest}. Putting "
            f"the row into the model {moved}"
        )

    def plot(self, **options: Any) -> Any:
        """Draw the raw and the other attention side by side."""
        from identikit import plots

        return plots.alternative_bars(self, **options)
