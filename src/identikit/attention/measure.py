"""Attention measures, such as rollout, with their exact ranges over all alternatives."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch

from identikit.attention.captured import Captured, capture
from identikit.attention.effective import selected_capture
from identikit.attention.intervals import Bounding, bounds_of
from identikit.attention.layer import USUAL, Layer
from identikit.attention.measure_kinds import MEASURE_KINDS, MeasureKind, MeasureValues
from identikit.attention.measure_result import AttentionMeasure
from identikit.attention.proofs import Claims, Provable, chain_claims, scaled_claims
from identikit.attention.quantities import key_weights
from identikit.attention.result import EffectiveAttention
from identikit.attention.source_order import (
    ORDER_ARRAYS,
    TimedCompare,
    compare_edges,
    compare_through,
    order_of_sources,
)
from identikit.attention.stream import WatchedRun, logit_directions, stream_of, watched_run
from identikit.attention.walk import walk_of
from identikit.checks import function, known_name
from identikit.errors import InputError
from identikit.maths.boxes import CORNERS
from identikit.maths.chain import Chain, greatest_over_boxes, greatest_through_layers, shares_of, through_layers
from identikit.maths.polytope.rows import Rows
from identikit.models.decoder import input_facts
from identikit.models.isolation import standard_torch_state
from identikit.models.model import Model, checked_model
from identikit.models.target import Target, checked_target
from identikit.models.text_run import run_texts
from identikit.progress import Progress, Watched, reporting, silent
from identikit.results.axis import Axis, Index, selected_indices
from identikit.results.source import StoredArrays
from identikit.shapes import Tensor
from identikit.texts.text import SOURCE, is_text_list


@reporting
@standard_torch_state()
def attention_measure(
    model: Model | EffectiveAttention,
    text: object = None,
    name: str = "rollout",
    *,
    target: object = None,
    layers: Index = None,
    heads: Index = None,
    seconds: float | int | None = None,
    truncate: bool = False,
    progress: Watched = None,
) -> AttentionMeasure:
    """Compute a measure that people read from attention, with its range over all alternatives.

    An alternative is other attention with the same head outputs: all else that the model computes is the same too, and
    each row moves in a set of its own. The ends hold for all of these rows together. Where `exact` is true they are
    attained; elsewhere they are outer bounds, which no alternative exceeds and none need attain.

    Instead of a model and a text it takes an `EffectiveAttention`, of which it reads the selected layers and
    heads: `attention_measure(attention, name="mean")`. One of `attention_from` has what needs no gradient and no norm.

    - `name`: of one head, "attention", "value norm" (‖a v H‖), "output share", "gradient" (gradient × attention) and
      "logit" (direct logit attribution);
      of a layer, "mean" over its heads, "norm" (‖Σ a v H‖), "norm with residual" and "norm after layer norm", `exact`
      up to 12 heads; through layers, "rollout", "rollout without residual" and "relevance" (Chefer), exact, and
      "globenc" and "alti", with outer bounds
    - `target`: what gradients are of, for "gradient" and "relevance": a next token or a class (a string or its number;
      None: what the model itself predicts), or a function of the last hidden vectors, or of the logits and these.
      Gradients are those of the model as it is, and held fixed. For "logit", a token
    - `layers`, `heads`: only these; measures through layers are of all heads
    - `seconds`: stop bounding after this time; what was not reached keeps what holds for any attention, and a `gap` of
      NaN. `certain_order`, when it is first read, may take as long again; `order_is_decided` says which rows it reached
    """
    kind = MEASURE_KINDS[known_name("name", name, tuple(MEASURE_KINDS))]
    if target is not None and not kind.needs_target:
        raise InputError(f"target= cannot be used with {name!r}, which needs none. Leave it out.")
    progress = function("progress", progress)
    until = Bounding.checked(seconds).until
    order_seconds = math.inf if seconds is None else float(seconds)
    if isinstance(model, EffectiveAttention):
        captured = selected_capture(model, "attention_measure", {"text": text, "layers": layers, "heads": heads})
        _check_complete(kind, captured)
        if kind.needs:
            captured.text_run.model.check_unchanged(model.provenance.weights)
        measured_layers = model.layers
    else:
        model = checked_model(model)
        if is_text_list(text):
            raise InputError("attention_measure reads one text at a time: pass a text, a pair or token ids.")
        if heads is not None and "head" not in kind.axes:
            raise InputError(f"heads= cannot be used with {name!r}, which is of all heads together. Leave it out.")
        measured_layers = model.select_layers(layers)
        head_numbers = selected_indices("head", heads, model.n_heads)
        layers_below = model.select_layers(list(range(max(measured_layers) + 1))) if kind.through else measured_layers
        layers_read = model.attention_layers if kind.needs == "direction" else layers_below
        (text_run,) = run_texts(model, text, layers=layers_read, truncate=truncate)
        captured = capture(text_run, layers=layers_below, heads=head_numbers)
    return MeasuredText(captured, target, until, progress, order_seconds).measure(kind, measured_layers)


def _check_complete(kind: MeasureKind, captured: Captured) -> None:
    """Refuse attention of the wrong kind, or without some of the layers or heads that a measure is made from."""
    model = captured.text_run.model
    of_decoder = kind.through and model.decoder_attention is not None and bool(kind.factor or kind.joint)
    if of_decoder or (model.decoder_attention == "cross" and kind.needs in ("stream", "direction")):
        raise InputError(
            f"{kind.name!r} follows what one stack adds to its own tokens, so it cannot be read from this attention "
            "of a decoder. Use a measure of single edges, such as 'value norm'."
        )
    if "head" not in kind.axes and len(captured.head_numbers) < model.n_heads:
        raise InputError(f"{kind.name!r} is of all heads together, and this attention is of some. Do not select heads.")
    lacks_below = kind.through and captured.layer_numbers != model.attention_layers[: len(captured.layers)]
    if lacks_below or (kind.needs == "direction" and len(captured.text_run.calls) < len(model.attention_layers)):
        raise InputError(f"{kind.name!r} needs other layers too. Read the attention of all layers, and select none.")


class _LazyArrays(dict[str, Tensor]):
    """Arrays, some of which are computed when one of them is first read."""

    def __init__(self, arrays: Mapping[str, Tensor], compute_missing: Callable[[], Mapping[str, Tensor]]):
        super().__init__(arrays)
        self.compute_missing = compute_missing

    def __missing__(self, name: str) -> Tensor:
        self.update(self.compute_missing())
        return self[name]


@dataclass(eq=False)
class MeasuredText:
    """The captured attention of a text, to be measured in several ways; what they share is computed once.

    `target` is what gradients and logits are of. Bounding stops at `until`, on the monotonic clock; None: there is
    no limit, and what would take long is refused. Finding an order may take `order_seconds`; None: until then as well.
    """

    captured: Captured
    target: Any = None
    until: float | None = math.inf
    progress: Progress = silent
    order_seconds: float | None = None

    def measure_all(self, kind: MeasureKind) -> AttentionMeasure:
        """Measure all layers that were captured; through layers, what arrives after the last."""
        layers = self.captured.layer_numbers
        return self.measure(kind, layers[-1:] if kind.through else layers)

    def measure(self, kind: MeasureKind, layers: Sequence[int]) -> AttentionMeasure:
        """Measure the text in one way, and return the measure in these of the captured layers."""
        if kind.joint is not None:
            values, compare = self._joint(kind)
            claims = None
        elif kind.through:
            values, compare, claims = self._through(kind)
        else:
            values, compare, claims = self._edges(kind)
        values = values.apply(torch.Tensor.cpu)
        layer_indices = [self.captured.layer_numbers.index(layer) for layer in layers]
        compute_order = partial(
            order_of_sources, (self.until, self.order_seconds), values, kind.through, compare, layer_indices
        )
        values = values.apply(lambda array: array[layer_indices])
        certain = values.lower.clamp(min=0) + (-values.upper).clamp(min=0)
        total = values.raw.abs().sum(-1)
        share = torch.where(total > 0, certain.sum(-1) / total, 1.0).clamp(max=1.0)
        arrays = _LazyArrays(values._asdict() | {"certain_share": share}, compute_order)
        dims = dict.fromkeys(values._fields, kind.axes)
        dims |= dict.fromkeys(("certain_share", *ORDER_ARRAYS), kind.axes[:-1])
        source = StoredArrays(arrays, dims) if claims is None else Provable(arrays, dims, claims)
        return self._result(kind, layers, source)

    def _result(self, kind: MeasureKind, layers: Sequence[int], source: StoredArrays) -> AttentionMeasure:
        text_run = self.captured.text_run
        model = text_run.model
        heads = self.captured.head_numbers
        inputs = input_facts(text_run)
        axes = {"layer": Axis("layer", tuple(layers)), "head": Axis("head", heads)}
        positions = {
            "query": text_run.tokens,
            "key": text_run.keys,
            "output": text_run.tokens,
            "input": inputs["tokens"],
        }
        axes |= {name: Axis(name, tuple(range(len(tokens))), tuple(tokens)) for name, tokens in positions.items()}
        target = self.target_checked.label if kind.needs_target else None
        about = dict(text_run.about)
        if kind.through and model.decoder_attention is not None:
            about[SOURCE] = inputs
        about |= {"measure": kind.name, "meaning": kind.meaning, "target": target}
        about["exact"] = kind.joint is None or (not kind.through and model.n_heads <= CORNERS)
        provenance = model.provenance(text_run.text, measure=kind.name, target=target, layers=layers, heads=heads)
        return AttentionMeasure(tuple(axes[name] for name in kind.axes), source, provenance, about)

    # What measures are made from

    @cached_property
    def target_checked(self) -> Target:
        """What gradients and logits are of."""
        text_run = self.captured.text_run
        target = checked_target(text_run.model, text_run, self.target)
        if len(target.runs) > 1:
            raise InputError(f"The {target.label} compares two texts that are read apart, and attention is of one.")
        return target

    @cached_property
    def _watched_run(self) -> WatchedRun:
        return watched_run(self.captured.text_run)

    def _inputs(self, kind: MeasureKind) -> list[tuple[Any, ...]]:
        """Return the arguments of a measure's function for each layer: the layer, and what the measure `needs`."""
        layers = self.captured.layers
        text_run = self.captured.text_run
        if kind.needs == "gradient":
            gradients = text_run.model.gradients(text_run.batch, self.target_checked.number)
            return [(layer, gradients[layer.call.layer][0, layer.heads]) for layer in layers]
        if kind.needs == "direction":
            kind.check_target(self.target_checked)
            assert self.target_checked.token is not None
            heads = range(text_run.model.n_heads)
            all_layers = [Layer.of(text_run, layer, heads, USUAL) for layer in sorted(text_run.calls)]
            direction = logit_directions(self._watched_run, all_layers, self.target_checked.token)
            return [(layer, direction) for layer in layers]
        if kind.needs == "stream":
            return [(layer, stream_of(self._watched_run, layer)) for layer in layers]
        return [(layer,) for layer in layers]

    @cached_property
    def _weights(self) -> tuple[Rows, MeasureValues]:
        """All rows, and every weight with its ends: (layer, head, query, key)."""
        captured = self.captured
        n = len(captured.text_run.keys)
        shape = (len(captured.layers), len(captured.head_numbers), len(captured.text_run.tokens), n)
        row_indices = list(product(range(shape[0]), range(shape[1]), range(shape[2])))
        bounding = Bounding(until=self.until)
        rows, bounds = bounds_of(
            captured, row_indices, key_weights(n, top=0), bounding=bounding, progress=self.progress
        )
        effective = captured.effective_rows(row_indices)
        values = MeasureValues(rows.attention[:, :n], effective, bounds.lower, bounds.upper, bounds.gap)
        return rows, values.apply(lambda array: array.reshape(shape))

    # The three ways to measure

    def _edges(self, kind: MeasureKind) -> tuple[MeasureValues, TimedCompare, Claims]:
        """Measure single heads, or their mean: the ends of every weight, scaled."""
        rows, weights = self._weights
        factor = torch.ones_like(weights.raw)
        if kind.factor is not None:
            factor = torch.stack([kind.factor(*inputs).expand(factor.shape[1:]) for inputs in self._inputs(kind)])
        ends = factor * weights.lower, factor * weights.upper  # the other way round under a negative factor
        lower = torch.minimum(*ends)
        upper = torch.maximum(*ends)
        gap = factor.abs() * weights.gap
        values = MeasureValues(factor * weights.raw, factor * weights.effective, lower, upper, gap)
        mean = "head" not in kind.axes
        if mean:
            values = values.apply(lambda array: array.mean(1))
        return values, partial(compare_edges, rows, factor, mean), scaled_claims(self.captured, factor, mean)

    def _joint(self, kind: MeasureKind) -> tuple[MeasureValues, None]:
        """Measure all heads together, from the weights and their ends; through layers, with outer bounds of shares."""
        assert kind.joint is not None
        _, weights = self._weights
        of_layers = []
        for index, (layer, *needed) in enumerate(self._inputs(kind)):
            of_layers.append(kind.joint(layer, MeasureValues(*(array[index] for array in weights)), *needed))
        values = MeasureValues(*(torch.stack(arrays) for arrays in zip(*of_layers, strict=True)))
        if not kind.through:
            return values, None
        start = torch.eye(values.raw.shape[-1]).to(values.raw)
        boxes = list(zip(*shares_of(values.lower, values.upper), strict=True))
        chain = Chain(0.0, 1.0)
        shares = [(array / array.sum(-1, keepdim=True)).nan_to_num(0.0) for array in values[:2]]  # a row of 0 stays 0
        raw, effective = (torch.stack(list(through_layers(list(maps[:, None]), chain, start))).mT for maps in shares)
        upper = torch.stack(list(greatest_over_boxes(boxes, start))).mT.maximum(raw)
        lower = -torch.stack(list(greatest_over_boxes(boxes, -start))).mT.maximum(-raw)
        gap = torch.maximum(upper - raw, raw - lower)  # the raw value lies between the sharp ends
        if bool(values.gap.isnan().any()):
            gap = gap * torch.nan
        return MeasureValues(raw, effective, lower, upper, gap), None

    def _through(self, kind: MeasureKind) -> tuple[MeasureValues, TimedCompare, Claims]:
        """Measure through layers: from each input token to each output token of each layer."""
        until = math.inf if self.until is None else self.until
        n = len(self.captured.text_run.tokens)
        walk = walk_of(self.captured)
        factors = None
        if kind.factor is not None:
            factors = [kind.factor(*inputs).expand(-1, n, -1) for inputs in self._inputs(kind)]
        chain = Chain(kind.keep, kind.give, factors, walk.spans)
        start = torch.eye(walk.inputs, dtype=torch.float64, device=walk.layers[0].heads.device)
        raw_maps, effective_maps, rows = walk.maps()
        sides = []
        for side, sign in enumerate((1.0, -1.0)):
            extremes = []
            for extreme in greatest_through_layers(rows, chain, sign * start, until=until):
                extremes.append((sign * extreme.value, extreme.gap))
                done = side * len(rows) + len(extremes)
                self.progress("attention measure, layers", done, 2 * len(rows))
            sides.append([walk.after_blocks(arrays) for arrays in zip(*extremes, strict=True)])
        (upper, upper_gap), (lower, lower_gap) = sides
        raw, effective = (
            walk.after_blocks(list(through_layers(maps, chain, start))) for maps in (raw_maps, effective_maps)
        )
        values = MeasureValues(raw, effective, lower, upper, torch.maximum(upper_gap, lower_gap))
        return values, partial(compare_through, rows, chain, walk), chain_claims(self.captured, walk, chain)
