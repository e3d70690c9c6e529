"""What `effective_attention`, `attention_intervals` and `alternative_attention` give back."""

import math
from typing import Any, ClassVar

import torch

from identikit.attention.precision import careful_words
from identikit.checks import known
from identikit.errors import InputError
from identikit.maths import measures
from identikit.models.reading import Change
from identikit.models.surroundings import undisturbed
from identikit.results.axis import Index
from identikit.results.result import Array, Fact, Result, strongest
from identikit.shapes import Float, Tensor

_SHARP = 1e-8  # a gap that is not worth a word
UNSURE = 0.01  # share of rows with an unsure rank from which it is said; prose has at most 0.006
_LISTED = 4  # groups that are named in words
_POOLS = ("layer", "head", "visible")


def unsure_words(share: float, duplicates: int, dtype: str) -> list[str]:
    """Say in what share of the rows the rank depends on the resolution, and how many repeated tokens were rounded."""
    told = []
    if share > UNSURE:
        told.append(
            f"In {share:.0%} of the rows, the rank of the values depends on the resolution: some directions are about "
            f"as small as the rounding of {dtype}, so another precision could give another null dimension there."
        )
    if duplicates:
        told.append(
            f"{duplicates:,} repeated tokens (counted in each layer) differ from an earlier one only by the "
            f"rounding of {dtype}; they are treated as different."
        )
    return told


class EffectiveAttention(Result):
    """Raw, effective and null attention of one text; maps are (layer, head, query, key) and made when asked for.

    Effective attention is the set of weights of least norm that gives the same output. It can be negative and need not
    sum to 1: it says what the output depends on, not what the attention could have been. For that, see `intervals`.
    """

    kind = "effective attention"
    main = ("raw", "effective", "null")
    missing: ClassVar = {
        "pearson": "It is undefined where all raw weights, or all effective ones, are equal.",
        "reachable_condition": "It is undefined where no query moves the output.",
    }
    by_word: ClassVar = {name: {"query": "mean", "key": "sum"} for name in ("raw", "effective", "null")}

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers, counted from 0."""
        return self._axis("layer").values

    @property
    def heads(self) -> tuple[int, ...]:
        """The heads, counted from 0."""
        return self._axis("head").values

    raw = Array("Attention as the model computes it.")
    effective = Array("The part of attention that the output depends on (Eq. 9).")
    null = Array("The part of attention that the output does not depend on: raw minus effective.")

    @property
    def simplex(self) -> Float[Tensor, "*axis"]:
        """The attention of least norm that gives the same output: weights of at least 0 that sum to 1.

        One quadratic program per selected row, all rows of a layer at once; select heads or rows of a long text first.
        """
        from identikit.attention.effective import simplex_rows

        self._live("simplex")
        single = [axis.single for axis in self.axes]
        return simplex_rows(self)[tuple(0 if one else slice(None) for one in single)]

    rank = Array("Rank of the values that each row sees: (layer, head, query).")
    null_dim = Array(
        "Dimension of each row's null space (Eq. 6, over the keys that the row sees): (layer, head, query)."
    )
    polytope_dim = Array(
        "Dimension of the set of attention with the same output, visible keys − rank([T, 1]): (layer, head, query). An "
        "upper bound where weights are exactly 0."
    )
    reachable_dim = Array(
        "Dimension of the attention with the same output that the head's own queries can reach near this one, its keys "
        "given: (layer, head, query). An upper bound where the model normalises its queries. Never above "
        "`polytope_dim`, which is never above `null_dim`."
    )
    nearly_reachable_dim = Array(
        "As `reachable_dim`, where output changes below 0.001 of the largest count as none: (layer, head, query)."
    )
    reachable_condition = Array(
        "How unevenly a row's query moves its output: the largest singular value of the output's derivative by the "
        "query, divided by the smallest that is not 0; NaN where no query moves it: (layer, head, query)."
    )
    joint_null_dim = Array("Dimension of the null space of a layer's heads together: (layer, query).")
    residual = Array("The certificate ‖(A⊥V − O)H‖/‖OH‖ of each head: (layer, head).")
    row_residual = Array(
        "The certificate of each row, ‖(a⊥V − o)H‖ against the sum of the lengths that it adds up, Σ a‖vH‖: (layer, "
        "head, query)."
    )
    norm_ratio = Array("Length of each effective row against the raw one, ‖a⊥‖/‖a‖, at most 1: (layer, head, query).")
    rank_is_sure = Array(
        "Whether each row's rank stays the same at a coarser resolution: 10 times that of float32 (or float64), or the "
        "rounding noise of half precision: (layer, head, query)."
    )
    sink = Array(
        "What a learned sink takes of each row, as an extra key of value 0 would: (layer, head, query). Rows of `raw` "
        "sum to the rest; 0 where the model has no such sink."
    )
    rounded_duplicates = Array(
        "How many repeated tokens have the values of an earlier one but for the rounding of the model's dtype: (layer)."
    )

    @undisturbed()
    def pearson(self, by: str | None = None) -> Tensor:
        """Return the correlation of raw and effective attention over the visible entries of the selected rows.

        Overall it is one number over all layers and heads. `by="layer"` and `by="head"` give one for each layer or
        head; `by="visible"` gives entry c over the rows that see c keys, NaN where no row does (rows without a null
        space correlate perfectly, and inflate the pool).
        """
        if by is not None:
            known("pearson(by", by, _POOLS)
        sums = measures.PearsonSums(*(self._rows(f"_{name}") for name in measures.PearsonSums._fields))
        if by is None:
            return measures.pearson(sums.pooled())
        if by == "visible":
            seen = sums.entries.long()
            groups = [measures.PearsonSums(*(part[seen == n] for part in sums)) for n in range(len(self.tokens) + 1)]
            return torch.stack([measures.pearson(group.pooled()) for group in groups])
        heads = sums.pooled(-1)
        found = measures.pearson(heads if by == "head" else heads.pooled(-1))
        single = [self._axis(name).single for name in ("layer", "head")[: found.ndim]]
        return found[tuple(0 if one else slice(None) for one in single)]

    def _rows(self, name: str) -> Tensor:
        """Return sums over keys of every selected row, all axes kept."""
        if name not in self.source.dims:
            raise InputError("The correlation exists for pieces, not for words or differences: use the whole result.")
        return self._read(name)

    def verify(self) -> Change:
        """Run the model with effective attention in place of raw attention in the selected rows.

        Returns how much the final hidden states and logits changed.
        """
        source: Any = self._live("verify()")
        source.reading.model.check_unchanged(self.provenance.weights)
        layers, heads, queries, keys = (self._axis(name) for name in ("layer", "head", "query", "key"))
        if keys.tokens != self.tokens:
            raise InputError("verify() replaces whole rows: select layers, heads and queries, but not keys.")
        return source.change(layers.places, heads.places, queries.places)

    def intervals(
        self,
        *,
        key: Index = None,
        groups: Any = None,
        method: str = "auto",
        epsilon: float = 0.0,
        seconds: float | int | None = None,
        **wanted: Index,
    ) -> "AttentionIntervals":
        """Return the sharp range of each selected weight over all attention with the same output.

        As `attention_intervals`, on what was captured already: `layer`, `head` and `query` select further.
        """
        from identikit.attention.intervals import Bounding, intervals_of

        self._live("intervals()")
        bounding = Bounding(method, epsilon, seconds)
        return intervals_of(self.sel(**wanted), key=key, groups=groups, bounding=bounding)

    def _live(self, wanted: str) -> Any:
        """Return the captured run; a result that was opened, gathered or subtracted has none."""
        if not hasattr(self.source, "reading"):
            raise InputError(
                f"{wanted} needs the model, and this result holds only numbers: it was opened from a folder, "
                "gathered into words or subtracted. Compute it again with effective_attention(model, text)."
            )
        return self.source

    def said(self) -> str:
        """Say how much of the attention is fixed by the output, and how closely effective attention follows it."""
        if "rank" not in self.source.dims:
            return self._edges()
        null, beside = self.null_dim, "".join(f" {one}" for one in self._beside())
        free = float((null > 0).double().mean())
        if free == 0:
            return f"Every selected row is identifiable: only its own attention gives its output.{beside}"
        dims = f"{int(null.min())} to {int(null.max())}" if null.min() < null.max() else f"{int(null.max())}"
        rows = f"{free:.0%} of the rows have" if null.numel() > 1 else "The row has"
        pearson = float(self.pearson())
        correlation = f" Raw and effective attention correlate at {pearson:.2f}."
        if math.isnan(pearson):
            correlation = " Raw or effective attention is constant, so their correlation is not defined."
        told = (
            f"{rows} a null space ({dims} dimensions).{correlation} Effective attention reproduces the head outputs to "
            f"within {float(self.residual.max()):.1g} (relative).{beside}"
        )
        return f"{told}\n{self._edges()}" if self._axis("head").single else told

    def _beside(self) -> list[str]:
        """Say what a learned sink takes, and where ranks are not sure."""
        told, sink = [], float(self.sink.mean())
        if sink:
            told.append(f"A learned sink takes {sink:.2f} of a row's weight on average; rows sum to the rest.")
        if not self.provenance.settings["tolerance"]:
            told += careful_words(float(self.row_residual.max()), self.provenance.dtype)
        unsure = float((~self.rank_is_sure).double().mean())
        return [*told, *unsure_words(unsure, int(self.rounded_duplicates.sum()), self.provenance.dtype)]

    def _edges(self) -> str:
        found = strongest(self, "raw", 5)
        return f"Largest raw weights: {', '.join(f'{_edge(self, labels)} {weight:.2f}' for weight, labels in found)}."

    def plot(self, by: str = "pearson", **options: Any) -> Any:
        """Draw the maps of one selected head, or a grid of heads coloured `by` an array over heads or rows."""
        from identikit import plots

        if self._axis("layer").single and self._axis("head").single:
            return plots.head_maps(self, **options)
        return plots.head_grid(self, by=by, **options)


def _edge(result: Result, labels: dict[str, str]) -> str:
    """Return an edge as `L4H5 foot → her`, without the layer or head that was selected."""
    head = "".join(f"{letter}{labels[name]}" for name, letter in (("layer", "L"), ("head", "H")) if name in labels)
    key_axis = result.axes[-1].name
    query, key = (labels.get(name, result._axis(name).label) for name in ("query", key_axis))
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
    missing: ClassVar = {"gap": "The edge was not bounded in time."}
    by_word: ClassVar = {name: {"query": "mean", "key": "sum"} for name in ("raw", "lower", "upper")}

    raw = Array("Attention as the model computes it.")
    lower = Array("The least weight that any attention with the same output gives to each edge.")
    upper = Array("The greatest weight that any attention with the same output gives to each edge.")
    gap = Array("How far the ends can be from the sharp ones: 0 where they are exact, NaN where nothing is known.")
    certain_mass = Array("The sum of each row's lower bounds.")
    certain_order = Array("How many of the strongest edges have the same order in all attention; -1: not decided.")
    method = Fact("How the ends were found.")
    rounded_lower = Array("The least weight when the output may move by half precision's rounding.")
    rounded_upper = Array("The greatest weight when the output may move by half precision's rounding.")
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
            edge = _edge(self, labels) if width.numel() == 1 else f"The widest interval is {_edge(self, labels)}"
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
        mass = float(self._read("rounded_lower").sum(-1).mean())
        kept = f"the lower ends sum to {mass:.2f}{' on average' if self.rounded_lower.ndim > 1 else ''}"
        return f"If the output is taken to half precision's rounding ({self.rounding:.1g} of its norm), {kept}."

    def _masses(self) -> str:
        """Say what each group receives, on average over the rows."""
        axis, parts = self._axis("group"), [self._read(name).flatten(0, -2).mean(0) for name in self.main]
        named = [
            f"{axis.name_of(at)} {raw:.3f} in [{lower:.3f}, {upper:.3f}]"
            for at, (raw, lower, upper) in enumerate(zip(*(part.tolist() for part in parts), strict=True))
        ]
        more = f" and {len(named) - _LISTED} more groups" if len(named) > _LISTED else ""
        return f"Mean weight, and what it could have been: {', '.join(named[:_LISTED])}{more}."

    def plot(self, by: str = "certain_mass", **options: Any) -> Any:
        """Draw the intervals of one selected row as bars, of one head as maps, or a grid of heads `by` an array."""
        from identikit import plots

        single = [self._axis(name).single for name in ("layer", "head", "query")]
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
    by_word: ClassVar = {name: {"key": "sum"} for name in ("raw", "attention", "direction")}

    raw = Array("Attention as the model computes it.")
    attention = Array("The other attention.")
    direction = Array("The direction from the raw row to the other one, of length 1.")
    step = Fact("How far the other row is from the raw one.")
    row_residual = Fact("How far the head's own output is from the same, relative to the lengths that it adds up.")

    @property
    def output_change(self) -> Change:
        """How much the final hidden states and logits changed."""
        return Change(*self.about["output_change"])

    def said(self) -> str:
        """Say how far the weight went that was asked for, or the one that moved most, and what it did to the output."""
        key, place = self._axis("key"), int((self.attention - self.raw).abs().argmax())
        change, dtype = self.output_change, self.provenance.dtype
        moved = f"{change.words()}{change.beyond(dtype)}."
        moved = " ".join([moved, *careful_words(self.row_residual, dtype)])
        asked = self.about.get("toward")
        if asked and set(asked) <= set(key.values) and len(key) > 1:
            at = [key.values.index(one) for one in asked]
            raw, other = (float(part.reshape(-1)[at].sum()) for part in (self.raw, self.attention))
            names = ", ".join(map(key.name_of, at[:_LISTED])) + (" …" if len(at) > _LISTED else "")
            return (
                f"{self._axis('query').label} → {names} goes from {raw:.3f} to {other:.3f}. Putting the row into the "
                f"model {moved}"
            )
        raw, other = (float(part.reshape(-1)[place]) for part in (self.raw, self.attention))
        largest = ", the largest change" if len(key) == len(self.tokens) else ""
        return (
            f"{self._axis('query').label} → {key.name_of(place)} goes from {raw:.3f} to {other:.3f}{largest}. Putting "
            f"the row into the model {moved}"
        )

    def plot(self, **options: Any) -> Any:
        """Draw the raw and the other attention side by side."""
        from identikit import plots

        return plots.alternative_bars(self, **options)
