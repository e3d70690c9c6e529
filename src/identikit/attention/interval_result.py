"""What `attention_intervals` and `alternative_attention` give back."""

from typing import TYPE_CHECKING, Any, Unpack

import torch

from identikit.attention.precision import careful_words, unresolved_words
from identikit.attention.proofs import ProvableResult
from identikit.checks import no_effect
from identikit.errors import InputError
from identikit.models.text_run import Change
from identikit.results.facts import Fact
from identikit.results.gathered import largest_entries
from identikit.results.measure import Attribute, Declared, stored_array
from identikit.results.pictures import pictures
from identikit.results.result import Result
from identikit.results.words import percent
from identikit.shapes import Bool, Float, Int, Tensor
from identikit.texts.text import SOURCE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHARP = 1e-8  # a gap up to this is not mentioned
_MOST_NAMED = 4  # groups, keys or pairs that are named in words
_ROW = "layer head query"
_MAP_WORDS = {"query": "mean", "key": "sum"}
_KEY_WORDS = {"key": "sum"}
_IN_ALL = "in all alternatives, which are attention with the same output"


def edge_name(result: Result, labels: dict[str, str], arrow: str = "→") -> str:
    """Return an edge as `L4H5 foot → her`, without the layer or head that was selected."""
    head = "".join(f"{letter}{labels[name]}" for name, letter in (("layer", "L"), ("head", "H")) if name in labels)
    query, key = (labels.get(axis.name, axis.label) for axis in result.axes[-2:])
    return f"{head} {query} {arrow} {key}".strip()


def strongest_certain(order: Int[Tensor, "*row"]) -> Float[Tensor, "*row"]:
    """Return, from a `certain_order`, whether a row's strongest edge is determined: 1 or 0, NaN where undecided."""
    return torch.where(order < 0, torch.nan, (order > 0).double())


def _first_named(names: list[str], plural: str = "") -> str:
    """Return the first of some names, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMED} more{plural}" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{more}"


def _weight(meaning: str, **declared: Unpack[Declared]) -> Attribute:
    """Declare a weight of every edge."""
    weight: Declared = {"range": "0 to 1", **declared}
    return stored_array(f"{_ROW} key", meaning, **weight)


class AttentionIntervals(ProvableResult):
    """The sharp range of every edge over all alternatives: all attention with the same output.

    What all alternatives share is determined by the output, and the rest is free. The last axis is `group` for groups
    of keys and `quantity` for sums with weights of one's own; arrays over whole rows are then left out. Of a model in
    half precision, `rounded_lower` and `rounded_upper` are the ends when its output may move by `rounding`, the
    dtype's, of its norm.
    """

    kind = "attention intervals"
    main = ("raw", "lower", "upper")
    raw = _weight("Attention as the model computes it, in float64 and with a sum of 1.", words=_MAP_WORDS)
    lower = _weight("The least weight that any alternative gives to each edge.", words=_MAP_WORDS)
    upper = _weight("The greatest weight that any alternative gives to each edge.", words=_MAP_WORDS)
    gap = _weight(
        "How far the ends can be from the sharp ones: about 0 where they are exact, NaN where nothing is known.",
        missing="The edge was not bounded in time.",
    )
    certain_mass = stored_array(
        _ROW,
        "Share of a row's weight that is determined by the output: the sum of its lower ends.",
        label="determined share",
        range="0 to 1",
    )
    certain_order = stored_array(
        _ROW,
        "How many of the strongest edges have the same order in all alternatives; -1: not decided.",
        range="−1 to 5",
    )
    image_raw = stored_array(_ROW, "What the images of a text get together, of raw attention.", range="0 to 1")
    image_lower = stored_array(_ROW, "The least that any alternative gives to the images together.", range="0 to 1")
    image_upper = stored_array(_ROW, "The greatest that any alternative gives to the images together.", range="0 to 1")
    rounded_lower = _weight("The least weight when the output may move by half precision's rounding.")
    rounded_upper = _weight("The greatest weight when the output may move by half precision's rounding.")
    method = Fact("How the ends were found.")
    rounding = Fact("The rounding of half precision, relative; 0 for a model in float32 or float64.")
    epsilon = Fact("By which share of its norm the head's output may move.")

    @property
    def strongest_is_certain(self) -> Float[Tensor, "*row"] | bool | None:
        """Whether the row's strongest edge is the strongest in every alternative.

        True, False, or None where it is not decided. For several rows, a tensor with 1, 0 and NaN.
        """
        order = self.array("certain_order")
        if order.ndim:
            return strongest_certain(order)
        return None if int(order) < 0 else int(order) > 0

    @property
    def aligned(self) -> Int[Tensor, "*row"]:
        """Which key each row is aligned to in every alternative, as its index on the last axis.

        It is -1 where in some alternative another key has more weight, or where that is not decided. Of groups (source
        words, say) it also is -1 where the ends overlap, though each end may belong to another alternative.
        """
        raw, lower, upper = (self.array(name) for name in self.main)
        best = raw.argmax(-1, keepdim=True)
        if "certain_order" in self.source.dims:
            certain = torch.as_tensor(self.array("certain_order")) > 0
        else:
            largest_other = upper.scatter(-1, best, -torch.inf).amax(-1)
            certain = lower.gather(-1, best)[..., 0] > largest_other
        return torch.where(certain, best[..., 0], -1)

    def words(self) -> "AttentionIntervals":
        """Return the result by words: the ends of a word's pieces are added up, which is valid but not sharp.

        Sharp ends for words come from `groups="words"`.
        """
        if self._sums:
            raise InputError(f'These intervals are of {self._sums}. For sharp ends of words, use groups="words".')
        return super().words()

    def describe(self) -> str:
        """Return how much of the attention is determined by the output, and which edge is most free."""
        available = self.source.dims
        gap = self.gap if "gap" in available else torch.zeros_like(self.raw)
        unbounded = int(gap.isnan().sum())
        words = []
        if "certain_mass" in available:
            mean = float(self.certain_mass.mean())
            of_rows = "a row on average" if self.certain_mass.numel() > 1 else "the row"
            at_least = "At least " if unbounded else ""
            words += [f"{at_least}{percent(mean)} of {of_rows} is determined by the output."]
            words += self._alignment() if SOURCE in self.about else self._strongest()
            words += self._of_images()
        if self._sums:
            words.append(self._of_sums())
        if unbounded:
            words.append(f"{unbounded:,} of {gap.numel():,} weights were not bounded in time.")
        if "rounded_lower" in available and "certain_mass" in available:
            mass = float(self.read("rounded_lower").sum(-1).mean())
            average = " on average" if self.rounded_lower.ndim > 1 else ""
            words.append(
                f"If the output is taken to half precision's rounding ({self.rounding:.1g} of its norm), the lower "
                f"ends sum to {mass:.2f}{average}."
            )
        if self.about.get("epsilon"):
            words.append(f"The head's output may move by {self.epsilon:g} of its norm.")
        largest = float(gap.nan_to_num(0.0).max())
        if largest > _SHARP:
            words.append(f"The ends are proven, and at most {largest:.1g} from the sharp ones.")
        dtype = self.provenance.dtype
        words += [*self._widest(gap.isnan()), *careful_words(self.about["row_residual"], dtype)]
        words += unresolved_words(self.about.get("unresolved", 0), dtype)
        return " ".join(words)

    def _of_images(self) -> list[str]:
        """Return a sentence on how much of the attention to images is determined, together and patch by patch."""
        if "image_raw" not in self.source.dims or self.about.get("words", ()) is None:
            return []
        raw, lower, upper = (float(self.array(f"image_{name}").mean()) for name in self.main)
        positions = {patch.position for picture in pictures(self) for patch in picture.patches}
        keys = [index for index, position in enumerate(self.axis("key").values) if position in positions]
        if len(keys) < len(positions):
            return []
        patch_by_patch = float(self.read("lower")[..., keys].sum(-1).mean())
        images, get = ("image", "gets") if len(self.about["images"]) == 1 else ("images", "get")
        average = ", on average" if self.image_raw.numel() > 1 else ""
        share = f"Patch by patch, {percent(patch_by_patch / raw)} of that is determined." if raw else ""
        return [
            f"The {images} {get} {percent(raw)} of the attention{average}, and between {percent(lower)} and "
            f"{percent(upper)} in every alternative. {share}".strip()
        ]

    def _widest(self, unknown: Bool[Tensor, "*edge"]) -> list[str]:
        """Return a sentence on the widest interval, or that all weights are determined."""
        width = (self.upper - self.lower).masked_fill(unknown, 0.0)
        ((widest, labels),) = largest_entries(self, "raw", 1, width)
        if widest > 0:
            index = int(width.argmax())
            raw, lower, upper = (float(self.array(name).flatten()[index]) for name in self.main)
            subject = "The widest interval is " if width.numel() > 1 else ""
            return [
                f"{subject}{edge_name(self, labels)}: raw {raw:.3f}, between {lower:.3f} and {upper:.3f} {_IN_ALL}."
            ]
        if bool(unknown.all()):
            return []
        return [f"Every {'other ' if bool(unknown.any()) else ''}weight is determined by the output."]

    def _strongest(self) -> list[str]:
        """Return how many strongest edges of one row are in a determined order, or the share of rows where one is."""
        certain = self.strongest_is_certain
        if certain is None:
            return ["Whether its strongest edge is determined is not decided."]
        if certain is False:
            return ["In some alternative another edge is the strongest."]
        if certain is True:
            order = int(self.certain_order)
            if order == 1:
                return ["Its strongest edge is determined."]
            return [f"The order of its {order} strongest edges is determined."]
        decided = certain[~certain.isnan()]
        if not len(decided):
            return []
        rows = "rows"
        if len(decided) < certain.numel():
            rows = f"{len(decided):,} rows of {certain.numel():,} for which this is decided"
        return [f"The strongest edge is determined in {percent(float(decided.mean()))} of the {rows}."]

    def _alignment(self) -> list[str]:
        """Return a sentence on the target tokens that are aligned to the same source token in every alternative."""
        aligned = self.aligned.reshape(-1)
        count = int((aligned >= 0).sum())
        undecided = bool((self.read("certain_order") < 0).any())
        at_least = "at least " if undecided else ""
        predicate = "aligned to the same source token in every attention with this output"
        if self.aligned.ndim == 0:
            if undecided:
                return ["Whether the target token is always aligned to the same source token is not decided."]
            return [f"The target token {'is' if count else 'is not'} {predicate}."]
        if not self.axis("layer").single or not self.axis("head").single:
            return [f"In {at_least}{percent(count / len(aligned))} of the rows, the target token is {predicate}."]
        queries, keys = self.axes[-2:]
        pairs = []
        for query, key in enumerate(aligned.tolist()):
            if key >= 0:
                pairs.append(f"{queries.name_of(query)} → {keys.name_of(key)}")
        listed = f": {_first_named(pairs)}" if pairs else ""
        verb = "is" if count == 1 else "are"
        sentence = f"{at_least}{count} of {len(aligned)} target tokens {verb} {predicate}{listed}."
        return [sentence[0].upper() + sentence[1:]]

    @property
    def _sums(self) -> str | None:
        """Whether groups or quantities are bounded, as a plural; None: the weights of keys."""
        return None if self.axes[-1].name == "key" else self.axes[-1].plural

    def _of_sums(self) -> str:
        """Return a sentence on what each group receives, or what each quantity is, on average over the rows."""
        axis = self.axes[-1]
        raw, lower, upper = (self.read(name).flatten(0, -2).mean(0).tolist() for name in self.main)
        sums = [
            f"{axis.name_of(index)} {raw[index]:.3f} in [{lower[index]:.3f}, {upper[index]:.3f}]"
            for index in range(len(axis))
        ]
        kind = "weight" if self._sums == "groups" else "value"
        return f"Mean {kind}, and its range over all alternatives: {_first_named(sums, f' {self._sums}')}."

    def plot(self, by: str | None = None, **options: Any) -> Any:
        """Draw the intervals of one selected row as bars, of one head as maps, or a grid of heads `by` an array.

        With `by` "image", one selected row is drawn on the image in its text.
        """
        from identikit import plots

        if by == "image":
            return plots.image_overlay(self, **options)
        single = [self.axis(name).single for name in ("layer", "head", "query")]
        if all(single[:2]) or self._sums:
            no_effect("by", by, "no grid of heads is drawn")
        if all(single) or self._sums:
            return plots.interval_bars(self, **options)
        if all(single[:2]):
            return plots.interval_maps(self, **options)
        return plots.head_grid(self, by=by or "certain_mass", **options)


class AlternativeAttention(Result):
    """An alternative of a row: another attention row with the same output, put into the model.

    Arrays are over all keys, invisible ones 0. `attention` = `raw` + `step` · `direction`. `output_change` is measured,
    with the row put in.
    """

    kind = "alternative attention"
    main = ("raw", "attention", "direction")

    raw = _weight("Attention as the model computes it.", words=_KEY_WORDS)
    attention = _weight("The other attention.", words=_KEY_WORDS)
    direction = stored_array(
        f"{_ROW} key", "The direction from the raw row to the other one, of length 1.", words=_KEY_WORDS
    )
    step = Fact("How far the other row is from the raw one.")
    row_residual = Fact("How far the head's own output is from the same, relative to the lengths that it adds up.")

    @property
    def output_change(self) -> Change:
        """How much the final hidden states and logits changed."""
        return Change(*self.about["output_change"])

    def describe(self) -> str:
        """Return how far the requested weight went, or the one that moved most, and what that did to the output."""
        key = self.axis("key")
        dtype = self.provenance.dtype
        toward = self.about.get("toward")
        keys = [int((self.attention - self.raw).abs().argmax())]
        largest = ", the largest change" if len(key) == len(self.text_of("key")["tokens"]) else ""
        if toward and set(toward) <= set(key.values) and len(key) > 1:
            keys = [key.values.index(value) for value in toward]
            largest = ""
        names = ", ".join(map(key.name_of, keys[:_MOST_NAMED])) + (" …" if len(keys) > _MOST_NAMED else "")
        raw, alternative = (float(array.reshape(-1)[keys].sum()) for array in (self.raw, self.attention))
        change = self.output_change
        words = (
            f"{self.axis('query').label} → {names} goes from {raw:.3f} to {alternative:.3f}{largest}. Putting the row "
            f"into the model {change.words()}{change.beyond(dtype)}."
        )
        return " ".join([words, *careful_words(self.row_residual, dtype)])

    def plot(self, **options: Any) -> "Axes":
        """Draw the raw and the other attention side by side."""
        from identikit import plots

        return plots.alternative_bars(self, **options)
