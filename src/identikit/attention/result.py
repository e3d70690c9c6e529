"""What `effective_attention` gives back: its measures, each declared once, and what can be done with them."""

import math
from typing import Any

import torch

from identikit.attention.captured import Captured
from identikit.attention.interval_result import AttentionIntervals, edge_name
from identikit.attention.layer import At, Layer
from identikit.attention.pearson import Pearson
from identikit.attention.precision import careful_words, equal_values, unsure_words
from identikit.checks import function, no_effect, real_numbers
from identikit.errors import InputError
from identikit.maths import measures as correlation
from identikit.maths.polytope.least_norm import least_norm
from identikit.models.text_run import Change
from identikit.progress import Watched, reporting
from identikit.results.axis import Index
from identikit.results.gathered import largest_entries
from identikit.results.measure import measure
from identikit.results.result import Result
from identikit.results.words import percent
from identikit.shapes import Bool, Float, Int, Tensor

_MAP_WORDS = {"query": "mean", "key": "sum"}


class EffectiveAttention(Result):
    """Raw, effective and null attention of one text; maps are (layer, head, query, key) and computed when read.

    Effective attention is the set of weights of least norm that gives the same output. It can be negative and need not
    sum to 1: it says what the output depends on, not what the attention could have been. For that, see `intervals`.
    """

    kind = "effective attention"
    main = ("raw", "effective", "null")

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers, counted from 0."""
        return self.axis("layer").values

    @property
    def heads(self) -> tuple[int, ...]:
        """The heads, counted from 0."""
        return self.axis("head").values

    @property
    def keys(self) -> tuple[str, ...]:
        """The tokens that are keys: those of the text, or in cross-attention those of the source."""
        return tuple(self.text_of("key").get("tokens", ()))

    # The maps

    @measure("layer head query key", range="0 to 1", words=_MAP_WORDS)
    @staticmethod
    def raw(layer: Layer, at: At) -> Float[Tensor, "head_ query_ key_"]:
        """Attention as the model computes it."""
        return layer.raw(at.heads, at.queries)[:, :, at.keys]

    @measure("layer head query key", words=_MAP_WORDS)
    @staticmethod
    def effective(layer: Layer, at: At) -> Float[Tensor, "head_ query_ key_"]:
        """The part of attention that the output depends on (Eq. 9)."""
        return layer.effective(*at).to(layer.dtype)

    @measure("layer head query key", words=_MAP_WORDS)
    @staticmethod
    def null(layer: Layer, at: At) -> Float[Tensor, "head_ query_ key_"]:
        """The part of attention that the output does not depend on: raw minus effective."""
        return layer.raw(at.heads, at.queries)[:, :, at.keys] - layer.effective(*at).to(layer.dtype)

    @measure("layer head query key", range="0 to 1", on_request=True)
    @staticmethod
    def simplex(layer: Layer, at: At) -> Float[Tensor, "head_ query_ key_"]:
        """The attention of least norm that gives the same output: weights of at least 0 that sum to 1.

        One quadratic program per selected row, all rows of a layer at once; select heads or rows of a long text first.
        """
        head_rows = [(head, query) for head in at.heads.tolist() for query in at.queries.tolist()]
        weights = least_norm(layer.rows(head_rows))  # a learned sink's column is not among the keys
        return weights[:, at.keys].unflatten(0, (len(at.heads), len(at.queries)))

    @measure("layer query key", range="true or false")
    @staticmethod
    def visible(layer: Layer, at: At) -> Bool[Tensor, "query_ key_"]:
        """Whether the query sees the key."""
        return layer.seen.block(at.queries, at.keys)

    # What attention is made from, and what it makes

    @measure("layer head query dimension", on_request=True)
    @staticmethod
    def q(layer: Layer, at: At) -> Float[Tensor, "head_ query_ d_k"]:
        """Queries as they enter the product with keys: rotary positions applied."""
        return at.take(layer.call.query[0, layer.heads])

    @measure("layer head key dimension", on_request=True)
    @staticmethod
    def k(layer: Layer, at: At) -> Float[Tensor, "head_ key_ d_k"]:
        """Keys, as `q`; query heads that share a key-value head have the same."""
        return layer.call.key[0, layer.heads[at.heads] // layer.call.groups][:, at.keys]

    @measure("layer head key dimension", on_request=True)
    @staticmethod
    def v(layer: Layer, at: At) -> Float[Tensor, "head_ key_ d_v"]:
        """Values, with their bias; query heads that share a key-value head have the same."""
        return layer.call.value[0, layer.heads[at.heads] // layer.call.groups][:, at.keys]

    @measure("layer head query dimension", on_request=True)
    @staticmethod
    def z(layer: Layer, at: At) -> Float[Tensor, "head_ query_ d_v"]:
        """Head outputs, $z = AV$, before the output projection; computed anew from q, k and v."""
        return at.take(layer.recomputed.output)

    @measure("layer query feature", on_request=True)
    @staticmethod
    def hidden(layer: Layer, at: At) -> Float[Tensor, "query_ d"]:
        """Hidden vectors after the layer, before any final norm: what the block returns."""
        if layer.hidden is None:
            raise InputError("The hidden vectors of several texts are not kept. Read this text alone.")
        return layer.hidden[at.queries]

    # Rows

    @measure("layer head query", range="0 to d_v")
    @staticmethod
    def rank(layer: Layer, at: At) -> Int[Tensor, "head_ query_"]:
        """Rank of the values that each row sees."""
        return at.take(layer.factors.rank)

    @measure("layer head query", label="null dimension", range="0 to tokens", over_texts="mean")
    @staticmethod
    def null_dim(layer: Layer, at: At) -> Int[Tensor, "head_ query_"]:
        """Dimension of each row's null space (Eq. 6, over the keys that the row sees)."""
        return at.take(layer.factors.null_dim)

    @measure("layer head query", label="polytope dimension", range="0 to tokens", over_texts="mean")
    @staticmethod
    def polytope_dim(layer: Layer, at: At) -> Int[Tensor, "head_ query_"]:
        """Dimension of the set of alternatives (attention with the same output), visible keys − rank([T, 1]).

        An upper bound where weights are exactly 0.
        """
        return at.take(layer.polytope_dim)

    @measure("layer head query", label="reachable dimension", range="0 to tokens")
    @staticmethod
    def reachable_dim(layer: Layer, at: At) -> Int[Tensor, "head_ query_"]:
        """Dimension of the alternatives that the head's own queries can reach near this one.

        The head's keys are given. An upper bound where the model normalises its queries. Never above `polytope_dim`,
        which is never above `null_dim`.
        """
        return layer.reach(at).dim

    @measure("layer head query", range="1 or more", missing="It is undefined where no query moves the output.")
    @staticmethod
    def reachable_condition(layer: Layer, at: At) -> Float[Tensor, "head_ query_"]:
        """How unevenly a row's query moves its output.

        The largest singular value of the output's derivative by the query, divided by the smallest that is not 0.
        """
        return layer.reach(at).condition

    @measure("layer head query", label="entropy (nats)", range="0 to log(tokens)", over_texts="mean")
    @staticmethod
    def entropy(layer: Layer, at: At) -> Float[Tensor, "head_ query_"]:
        """How spread out a row of raw attention is, in nats; a learned sink's share is not counted."""
        weights = layer.raw(at.heads, at.queries).double()
        return torch.special.entr(weights).sum(-1)

    @measure("layer head query", label="learned sink", range="0 to 1")
    @staticmethod
    def sink(layer: Layer, at: At) -> Float[Tensor, "head_ query_"]:
        """What a learned sink takes of each row, as an extra key of value 0 would.

        Rows of `raw` sum to the rest; 0 where the model has no such sink.
        """
        mass = layer.recomputed.mass
        return at.take(torch.zeros_like(layer.recomputed.norm) if mass is None else 1 - mass)

    # The certificate

    @measure("layer head query", range="0 or more")
    @staticmethod
    def row_residual(layer: Layer, at: At) -> Float[Tensor, "head_ query_"]:
        """The certificate of each row, ‖(a⊥V − o)H‖ against the sum of the lengths that it adds up, Σ a‖vH‖."""
        return at.take(layer.row_residual)

    @measure("layer head query", range="0 to 1")
    @staticmethod
    def norm_ratio(layer: Layer, at: At) -> Float[Tensor, "head_ query_"]:
        """Length of each effective row against the raw one, ‖a⊥‖/‖a‖."""
        return at.take(layer.norm_ratio)

    @measure("layer head query", range="true or false")
    @staticmethod
    def rank_is_sure(layer: Layer, at: At) -> Bool[Tensor, "head_ query_"]:
        """Whether each row's rank stays the same at a coarser resolution.

        That is 10 times that of float32 (or float64), or the rounding noise of half precision.
        """
        return at.take(layer.rank_is_sure)

    @measure("layer head", range="0 or more")
    @staticmethod
    def residual(layer: Layer, at: At) -> Float[Tensor, "head_"]:
        """The certificate ‖(A⊥V − O)H‖/‖OH‖ of each head."""
        return layer.residual[at.heads]

    @measure("layer query", range="0 or more")
    @staticmethod
    def joint_null_dim(layer: Layer, at: At) -> Int[Tensor, "query_"]:
        """Dimension of the null space of a layer's heads together."""
        return layer.joint_null_dim[at.queries]

    @measure("layer", range="0 or more")
    @staticmethod
    def rounded_duplicates(layer: Layer, at: At) -> Int[Tensor, ""]:
        """How many repeated tokens have the values of an earlier one but for the rounding of the model's dtype."""
        return torch.tensor(equal_values(layer.call, layer.tokens)[1])

    # The correlation of raw and effective attention

    @measure(
        "layer head",
        name="pearson",
        label="correlation",
        range="−1 to 1",
        missing="It is undefined where all raw weights, or all effective ones, are equal.",
        over_texts="mean",
    )
    @staticmethod
    def _pearson(layer: Layer, at: At) -> Float[Tensor, "head_"]:
        """How closely effective attention follows raw attention: their correlation over all weights of the head."""
        return correlation.pearson(layer.pearson_sums.pooled(-1))[at.heads]

    @measure("layer head query sum")
    @staticmethod
    def _pearson_sums(layer: Layer, at: At) -> Float[Tensor, "head_ query_ sum"]:
        """Sums over keys that the correlation is made from."""
        return at.take(torch.stack(layer.pearson_sums, dim=-1))

    @property
    def pearson(self) -> Pearson:
        """The correlation of raw and effective attention: call it, `pearson()` or `pearson(by="layer")`.

        Overall it is one number; `by` "layer", "head" or "visible" (number of keys that a row sees) gives several.
        """
        return Pearson(self)

    def verify(self) -> Change:
        """Run the model with effective attention in place of raw attention in the selected rows.

        Returns how much the final hidden states and logits changed.
        """
        captured = self.captured("verify()")
        captured.text_run.model.check_unchanged(self.provenance.weights)
        if self.axis("key").tokens != self.keys:
            raise InputError("verify() replaces whole rows: select layers, heads and queries, but not keys.")
        return captured.change({axis.name: axis.source_indices for axis in self.axes})

    def run_with(self, weights: object) -> Change:
        """Run the model with other weights in place of the selected raw ones; return how much its output changed.

        `weights` has the shape of the selected part of `raw`, or is one number for all of it:
        `attention.sel(layer=4, head=5).run_with(0)` switches a head off, and with a query and a key one edge. Other
        weights stay, and nothing is normalised.
        """
        captured = self.captured("run_with()")
        captured.text_run.model.check_unchanged(self.provenance.weights)
        shape = [len(axis) for axis in self.axes]
        numbers = real_numbers("weights", weights, [len(axis) for axis in self.axes if not axis.single])
        visible = self.read("visible")[:, None]
        replaced = numbers.to(visible.device).reshape(shape if numbers.ndim else [1] * len(shape)).expand(shape)
        if (numbers.ndim or not visible.any()) and bool((replaced.masked_fill(visible, 0.0) != 0).any()):
            raise InputError("run_with(): weights must be 0 where a query does not see the key (the mask hides it).")
        return captured.change(
            {axis.name: axis.source_indices for axis in self.axes}, replaced.masked_fill(~visible, 0.0)
        )

    @reporting
    def intervals(
        self,
        *,
        key: Index = None,
        groups: object = None,
        weights: object = None,
        method: str = "auto",
        epsilon: float = 0.0,
        seconds: float | int | None = None,
        progress: Watched = None,
        **selection: Index,
    ) -> AttentionIntervals:
        """Return the sharp range of each selected weight over all alternatives (attention with the same output).

        As `attention_intervals`, on what was captured already: `layer`, `head` and `query` select further.
        """
        from identikit.attention.intervals import Bounding, intervals_of

        self.captured("intervals()")
        bounding = Bounding.checked(seconds, method, epsilon)
        progress = function("progress", progress)
        selected = self.sel(**selection)
        return intervals_of(selected, key=key, groups=groups, weights=weights, bounding=bounding, progress=progress)

    @property
    def is_live(self) -> bool:
        """Whether the result still has its model; one that was opened, gathered or subtracted has not."""
        return isinstance(self.source, Captured)

    def captured(self, caller: str = "This") -> Captured:
        """Return the captured run, or say what cannot be done without it."""
        if self.about.get("words", ()) is None:
            raise InputError(
                f"{caller} needs the model's own tokens, and this result was gathered into words. Call it before "
                'words(); for intervals of words, intervals(groups="words").'
            )
        if not isinstance(self.source, Captured):
            raise InputError(
                f"{caller} needs the model, and this result holds only numbers: it was opened from a folder or "
                "subtracted. Compute it again with effective_attention(model, text)."
            )
        return self.source

    def describe(self) -> str:
        """Return how much of the attention is determined by the output, and how closely effective attention follows."""
        if "rank" not in self.source.dims:
            return self._edges()
        null = self.null_dim
        free = float((null > 0).double().mean())
        if free == 0:
            fixed = "Every selected row is determined by the output: no other attention gives the same."
            return " ".join([fixed, *self._reservations()])
        dims = f"{int(null.min())} to {int(null.max())}" if null.min() < null.max() else f"{int(null.max())}"
        rows = f"{percent(free)} of the rows are" if null.numel() > 1 else "The row is"
        pearson = float(self.pearson())
        alike = f"Raw and effective attention correlate at {pearson:.2f}."
        if math.isnan(pearson):
            alike = "Raw or effective attention is constant, so their correlation is not defined."
        residual = float(self.residual.max())
        certificate = f"Effective attention reproduces the head outputs to within {residual:.1g} (relative)."
        freedom = f"{rows} free (null space of {dims} dimensions)."
        words = " ".join([freedom, alike, certificate, *self._reservations()])
        return f"{words}\n{self._edges()}" if self.axis("head").single else words

    def _reservations(self) -> list[str]:
        """Return sentences on what a learned sink takes, and on where ranks are not sure."""
        words = []
        sink = float(self.sink.mean())
        if sink:
            words.append(f"A learned sink takes {sink:.2f} of a row's weight on average; rows sum to the rest.")
        if not self.provenance.settings["tolerance"]:
            words += careful_words(float(self.row_residual.max()), self.provenance.dtype)
        unsure = float((~self.rank_is_sure).double().mean())
        return [*words, *unsure_words(unsure, int(self.rounded_duplicates.sum()), self.provenance.dtype)]

    def _edges(self) -> str:
        edges = [f"{edge_name(self, labels)} {weight:.2f}" for weight, labels in largest_entries(self, "raw", 5)]
        return f"Largest raw weights: {', '.join(edges)}."

    def plot(self, by: str | None = None, **options: Any) -> Any:
        """Draw the maps of one selected head, or all heads: as a grid coloured `by` an array over heads or rows.

        With `by` "raw", "effective" or "null", heads are small maps. With "image", one selected row is drawn on the
        image in its text.
        """
        from identikit import plots

        if by == "image":
            return plots.image_overlay(self, **options)
        if self.axis("layer").single and self.axis("head").single:
            no_effect("by", by, "a head is selected")
            return plots.head_maps(self, **options)
        if by in self.main:
            return plots.thumbnails(self, by, **options)
        return plots.head_grid(self, by=by or "pearson", **options)
