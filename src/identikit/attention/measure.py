"""What people read from attention, with its exact range over all alternatives."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from identikit.attention.captured import Captured
from identikit.attention.effective import captured_attention, recaptured
from identikit.attention.intervals import Bounding, bounds_of
from identikit.attention.layer import USUAL, Layer
from identikit.attention.proofs import Claims, Provable, chain_claims, reading_claims
from identikit.attention.quantities import TOP, edges_wanted
from identikit.attention.reading_result import AttentionMeasure
from identikit.attention.readings import READINGS, MeasuredLayer, Numbers, ReadingKind
from identikit.attention.result import EffectiveAttention
from identikit.attention.stream import WatchedRun, logit_directions, stream_of, watched_run
from identikit.attention.walk import Walk, walk_of
from identikit.checks import function, known_name
from identikit.errors import InputError
from identikit.maths.boxes import CORNERS
from identikit.maths.chain import Chain, greatest_over_boxes, greatest_through_layers, shares_of, through_layers
from identikit.maths.measures import certain_order
from identikit.maths.polytope.exact import greatest_lead, portions_in_time
from identikit.maths.polytope.rows import Rows
from identikit.models.decoder import input_facts
from identikit.models.isolation import standard_torch_state
from identikit.models.model import Model, checked_model
from identikit.models.target import Target, checked_target
from identikit.models.text_run import run_texts
from identikit.progress import Progress, Watched, reporting, silent
from identikit.results.axis import Axis, Index, selected_indices
from identikit.results.source import StoredArrays
from identikit.shapes import Bool, Float, Int, Tensor
from identikit.texts.text import SOURCE, is_text_list

_ORDER = ("certain_order", "order_is_decided")
_NUMBERS = 2**23  # that are held of each kind while pairs of sources are compared
TimedCompare = Callable[[float, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Compares two sources of rows as `maths.measures.Compare` does, until a time on the monotonic clock."""


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
    """Read attention as people do, with the range of the reading over all alternatives.

    An alternative is other attention with the same head outputs: all else that the model computes is the same too, and
    each row moves in a set of its own. The ends hold for all of these rows together. Where `exact` is true they are
    attained; elsewhere they are outer bounds, which no alternative exceeds and none need attain.

    In the place of a model and a text, it takes an `EffectiveAttention`, of which it reads the selected layers and
    heads: `attention_measure(attention, name="mean")`. One of `attention_from` has what needs no gradient and no norm.

    - `name`: of one head, "attention", "value norm" (‖a v H‖), "output share", "gradient" (gradient × attention) and
      "logit" (direct logit attribution);
      of a layer, "mean" over its heads, "norm" (‖Σ a v H‖), "norm with residual" and "norm after layer norm", `exact`
      up to 12 heads; through layers, "rollout", "rollout without residual" and "relevance" (Chefer), exact, and
      "globenc" and "alti", with outer bounds
    - `target`: what gradients are of, for "gradient" and "relevance": a next token or a class (a string or its number;
      None: what the model itself predicts), or a function of the last hidden vectors, or of the logits and these.
      Gradients are those of the model as it is, and held. For "logit", a token
    - `layers`, `heads`: only these; readings through layers are of all heads
    - `seconds`: stop bounding after this time; what was not reached keeps what holds for any attention, and a `gap` of
      NaN. `certain_order`, when it is asked for, may take as long again; `order_is_decided` says which rows it reached
    """
    kind = READINGS[known_name("name", name, tuple(READINGS))]
    if target is not None and not kind.needs_target:
        raise InputError(f"target= cannot be used with {name!r}, which needs none. Leave it out.")
    progress = function("progress", progress)
    until = Bounding.checked(seconds).until
    order_seconds = math.inf if seconds is None else float(seconds)
    if isinstance(model, EffectiveAttention):
        captured = recaptured(model, "attention_measure", {"text": text, "layers": layers, "heads": heads})
        _check_whole(kind, captured)
        if kind.needs:
            captured.reading.model.check_unchanged(model.provenance.weights)
        return MeasuredText(captured, target, until, progress, order_seconds).measure(kind, model.layers)
    model = checked_model(model)
    if is_text_list(text):
        raise InputError("attention_measure reads one text at a time: pass a text, a pair or token ids.")
    if heads is not None and "head" not in kind.axes:
        raise InputError(f"heads= cannot be used with {name!r}, which is of all heads together. Leave it out.")
    shown = model.select_layers(layers)
    which = selected_indices("head", heads, model.n_heads)
    read = model.select_layers(list(range(max(shown) + 1))) if kind.through else shown
    wanted = model.attention_layers if kind.needs == "direction" else read
    (reading,) = run_texts(model, text, layers=wanted, truncate=truncate)
    attention = captured_attention(reading, layers=read, heads=which)
    return MeasuredText(attention.captured(), target, until, progress, order_seconds).measure(kind, shown)


def _check_whole(kind: ReadingKind, captured: Captured) -> None:
    """Refuse attention of which layers or heads are missing that a reading is made from, or another attention."""
    reading = captured.reading
    of_decoder = kind.through and reading.model.decoder_attention is not None and bool(kind.factor or kind.joint)
    if of_decoder or (reading.model.decoder_attention == "cross" and kind.needs in ("stream", "direction")):
        raise InputError(
            f"{kind.name!r} follows what one stack adds to its own tokens, so it cannot be read from this attention "
            "of a decoder. Use a measure of single edges, such as 'value norm'."
        )
    every = reading.model.attention_layers
    layers = tuple(layer.call.layer for layer in captured.layers)
    if "head" not in kind.axes and len(captured.layers[0].heads) < reading.model.n_heads:
        raise InputError(f"{kind.name!r} is of all heads together, and this attention is of some. Do not select heads.")
    beneath = kind.through and layers != every[: len(layers)]
    if beneath or (kind.needs == "direction" and len(reading.calls) < len(every)):
        raise InputError(f"{kind.name!r} needs other layers too. Read the attention of all layers, and select none.")


class _Found(dict[str, Tensor]):
    """Arrays, of which those that are missing are found when one of them is first asked for."""

    def __init__(self, arrays: Mapping[str, Tensor], find: Callable[[], Mapping[str, Tensor]]):
        super().__init__(arrays)
        self.find = find

    def __missing__(self, name: str) -> Tensor:
        self.update(self.find())
        return self[name]


@dataclass(eq=False)
class MeasuredText:
    """A text whose attention was captured, to be read in several ways: what these share is computed once.

    `target` is what gradients and logits are of; bounding stops at `until`, on the monotonic clock. None: it does not
    stop, and is refused where it would take long. Finding an order may take `order_seconds`; None: until then as well.
    """

    captured: Captured
    target: Any = None
    until: float | None = math.inf
    progress: Progress = silent
    order_seconds: float | None = None

    def overall(self, kind: ReadingKind) -> AttentionMeasure:
        """Read all layers that were captured; through layers, what arrives after the last."""
        layers = [layer.call.layer for layer in self.captured.layers]
        return self.measure(kind, layers[-1:] if kind.through else layers)

    def measure(self, kind: ReadingKind, shown: Sequence[int]) -> AttentionMeasure:
        """Read the text in one way; `shown` are the layers that are kept, of those that were captured."""
        reading = self.captured.reading
        model = reading.model
        if kind.joint is not None:
            numbers, compare = self._joint(kind)
            claims = None
        elif kind.through:
            numbers, compare, claims = self._through(kind)
        else:
            numbers, compare, claims = self._edges(kind)
        numbers = Numbers(*(part.cpu() for part in numbers))
        places = [[layer.call.layer for layer in self.captured.layers].index(layer) for layer in shown]
        possible = (numbers.upper != 0) | (numbers.lower != 0)
        if kind.through:
            possible &= ~torch.eye(*possible.shape[-2:], dtype=torch.bool)
        find = partial(_order, (self.until, self.order_seconds), numbers, possible, compare, places)
        numbers = Numbers(*(part[places] for part in numbers))
        certain = numbers.lower.clamp(min=0) + (-numbers.upper).clamp(min=0)
        total = numbers.raw.abs().sum(-1)
        share = torch.where(total > 0, certain.sum(-1) / total, 1.0).clamp(max=1.0)
        arrays = numbers._asdict() | {"certain_share": share}
        dims = dict.fromkeys(numbers._fields, kind.axes)
        dims |= dict.fromkeys(("certain_share", *_ORDER), kind.axes[:-1])
        which = tuple(self.captured.layers[0].heads.tolist())
        every = {"layer": Axis("layer", tuple(shown)), "head": Axis("head", which)}
        inputs = input_facts(reading)
        for axis, named in (("input", inputs["tokens"]), ("key", reading.keys), ("query", reading.tokens)):
            every[axis] = Axis(axis, tuple(range(len(named))), tuple(named))
        every["output"] = replace(every["query"], name="output")
        axes = tuple(every[axis] for axis in kind.axes)
        aim = self.aim.label if kind.needs_target else None
        source = {SOURCE: inputs} if kind.through and model.decoder_attention is not None else {}
        about = reading.about | source | {"measure": kind.name, "meaning": kind.meaning, "target": aim}
        about["exact"] = kind.joint is None or (not kind.through and model.n_heads <= CORNERS)
        provenance = model.provenance(reading.text, measure=kind.name, target=aim, layers=shown, heads=which)
        held = StoredArrays(_Found(arrays, find), dims)
        if claims is not None:
            held = Provable(held.arrays, dims, claims)
        return AttentionMeasure(axes, held, provenance, about)

    # What readings are made from

    @cached_property
    def aim(self) -> Target:
        """What gradients and logits are of."""
        reading = self.captured.reading
        target = checked_target(reading.model, reading, self.target)
        if target.parts != (reading,):
            raise InputError(f"The {target.label} compares two texts that are read apart, and attention is of one.")
        return target

    @cached_property
    def _run(self) -> WatchedRun:
        return watched_run(self.captured.reading)

    def _measured(self, kind: ReadingKind) -> list[MeasuredLayer]:
        """Return the layers with what the reading needs beside them."""
        layers = self.captured.layers
        reading = self.captured.reading
        if kind.needs == "gradient":
            gradients = reading.model.gradients(reading.batch, self.aim.number)
            return [MeasuredLayer(layer, gradients[layer.call.layer][0, layer.heads]) for layer in layers]
        if kind.needs == "direction":
            kind.check_aim(self.aim)
            assert self.aim.token is not None
            heads = range(reading.model.n_heads)
            every = [Layer.of(reading, layer, heads, USUAL) for layer in sorted(reading.calls)]
            direction = logit_directions(self._run, every, self.aim.token)
            return [MeasuredLayer(layer, direction=direction) for layer in layers]
        if kind.needs == "stream":
            return [MeasuredLayer(layer, stream=stream_of(self._run, layer)) for layer in layers]
        return [MeasuredLayer(layer) for layer in layers]

    @cached_property
    def _weights(self) -> tuple[Rows, Numbers]:
        """All rows, and every weight with its ends: (layer, head, query, key)."""
        n = len(self.captured.reading.keys)
        shape = (len(self.captured.layers), len(self.captured.layers[0].heads), len(self.captured.reading.tokens), n)
        places = list(product(range(shape[0]), range(shape[1]), range(shape[2])))
        bounding = Bounding(until=self.until)
        rows, bounds = bounds_of(
            self.captured, places, edges_wanted(n, top=0), bounding=bounding, progress=self.progress
        )
        effective = self.captured.effective_rows(places)
        numbers = rows.attention[:, :n], effective, bounds.lower, bounds.upper, bounds.gap
        return rows, Numbers(*(part.reshape(shape) for part in numbers))

    # The readings

    def _edges(self, kind: ReadingKind) -> tuple[Numbers, TimedCompare, Claims]:
        """Read single heads, or their mean: the ends of every weight, scaled."""
        rows, weights = self._weights
        factor = torch.ones_like(weights.raw)
        if kind.factor is not None:
            factor = torch.stack([kind.factor(layer).expand(factor.shape[1:]) for layer in self._measured(kind)])
        ends = factor * weights.lower, factor * weights.upper  # the other way round under a negative factor
        low = torch.minimum(*ends)
        high = torch.maximum(*ends)
        numbers = Numbers(factor * weights.raw, factor * weights.effective, low, high, factor.abs() * weights.gap)
        mean = "head" not in kind.axes
        if mean:
            numbers = Numbers(*(part.mean(1) for part in numbers))
        return numbers, partial(_compare_edges, rows, factor, mean), reading_claims(self.captured, factor, mean)

    def _joint(self, kind: ReadingKind) -> tuple[Numbers, None]:
        """Read all heads together, from the weights and their ends; through layers, with outer bounds of the shares."""
        assert kind.joint is not None
        _, weights = self._weights
        layers = [
            kind.joint(layer, Numbers(*(part[at] for part in weights))) for at, layer in enumerate(self._measured(kind))
        ]
        numbers = Numbers(*(torch.stack(part) for part in zip(*layers, strict=True)))
        if not kind.through:
            return numbers, None
        late = bool(numbers.gap.isnan().any())
        boxes = list(zip(*shares_of(numbers.lower, numbers.upper), strict=True))
        start = torch.eye(numbers.raw.shape[-1]).to(numbers.raw)
        shares = [(part / part.sum(-1, keepdim=True)).nan_to_num(0.0) for part in numbers[:2]]  # a row of 0 stays 0
        raw, effective = (
            torch.stack(list(through_layers(list(part[:, None]), Chain(0.0, 1.0), start))).mT for part in shares
        )
        upper = torch.stack(list(greatest_over_boxes(boxes, start))).mT.maximum(raw)
        lower = -torch.stack(list(greatest_over_boxes(boxes, -start))).mT.maximum(-raw)
        gap = torch.maximum(upper - raw, raw - lower)  # a sharp end is nowhere beyond what the model itself does
        return Numbers(raw, effective, lower, upper, gap * torch.nan if late else gap), None

    def _through(self, kind: ReadingKind) -> tuple[Numbers, TimedCompare, Claims]:
        """Read through layers: from each input token to each output token of each layer."""
        until = math.inf if self.until is None else self.until
        n = len(self.captured.reading.tokens)
        walk = walk_of(self.captured)
        factors = None
        if kind.factor is not None:
            factors = [kind.factor(layer).expand(-1, n, -1) for layer in self._measured(kind)]
        chain = Chain(kind.keep, kind.give, factors, walk.spans)
        start = torch.eye(walk.inputs, dtype=torch.float64, device=walk.layers[0].heads.device)
        raw, effective, rows = walk.maps()
        sides = []
        for side, sign in enumerate((1.0, -1.0)):
            reached = []
            extremes = greatest_through_layers(rows, chain, sign * start, until=until)
            for done, extreme in enumerate(extremes):
                reached.append((sign * extreme.value, extreme.gap))
                self.progress("attention measure, layers", side * len(rows) + done + 1, 2 * len(rows))
            sides.append([walk.arrived(part) for part in zip(*reached, strict=True)])
        (upper, over), (lower, under) = sides
        maps = [walk.arrived(list(through_layers(part, chain, start))) for part in (raw, effective)]
        numbers = Numbers(maps[0], maps[1], lower, upper, torch.maximum(over, under))
        return numbers, partial(_compare_through, rows, chain, walk), chain_claims(self.captured, walk, chain)


# The order of sources


@standard_torch_state()
def _order(
    limits: tuple[float | None, float | None],
    numbers: Numbers,
    asked: Bool[Tensor, "layer *row source"],
    compare: TimedCompare | None,
    places: Sequence[int],
) -> dict[str, Tensor]:
    """Count the strongest sources that are in this order in all alternatives, in the layers at these places.

    `limits` are until when it may take, and for how long instead; see `MeasuredText`.
    """
    until, seconds = limits
    until = math.inf if until is None else until
    if seconds is not None:
        until = time.monotonic() + seconds
    shape = numbers.raw.shape
    wanted = torch.zeros_like(asked)
    wanted[places] = asked[places]
    flat = [part.reshape(-1, shape[-1]) for part in (numbers.raw, numbers.lower, numbers.upper, wanted)]
    timely = None if compare is None else partial(compare, until)
    order = certain_order(flat[0], (flat[1], flat[2]), flat[3], timely, TOP, scale=flat[0].abs().amax(-1))
    return dict(zip(_ORDER, (part.reshape(shape[:-1])[places] for part in order), strict=True))


def _compare_edges(
    rows: Rows,
    factor: Float[Tensor, "layer head query key"],
    mean: bool,
    until: float,
    row: Int[Tensor, "pair"],
    first: Int[Tensor, "pair"],
    second: Int[Tensor, "pair"],
) -> tuple[Float[Tensor, "pair"], Float[Tensor, "pair"]]:
    """Solve one program per pair and row; where rows are means over heads, one per head."""
    ahead = factor.new_full(row.shape, torch.nan, device="cpu")
    gap = ahead.clone()
    heads, n, keys = factor.shape[1:]
    scales = factor.flatten(0, 2)
    for some in portions_in_time(torch.arange(len(row)), until, most=_NUMBERS // (keys * (heads if mean else 1)) + 1):
        place = row[some][None]
        if mean:  # rows of a head stand together
            place = place // n * heads * n + torch.arange(heads)[:, None] * n + place % n
        pair = some.repeat(len(place))
        chosen = place.flatten().to(factor.device)
        sources = first[pair].to(factor.device), second[pair].to(factor.device)
        found = greatest_lead(rows, chosen, *sources, scales=scales[chosen])
        ahead[some], gap[some] = (part.reshape(place.shape).mean(0).cpu() for part in found)
    return ahead, gap


def _compare_through(
    rows: Sequence[Rows],
    chain: Chain,
    walk: Walk,
    until: float,
    row: Int[Tensor, "pair"],
    first: Int[Tensor, "pair"],
    second: Int[Tensor, "pair"],
) -> tuple[Float[Tensor, "pair"], Float[Tensor, "pair"]]:
    """Send the difference of two sources through the layers, each distinct pair once for all rows that ask for it."""
    pairs, index = torch.stack([first, second]).unique(dim=1, return_inverse=True)
    ahead = torch.full(row.shape, torch.nan, dtype=torch.float64)
    gap = ahead.clone()
    for some in portions_in_time(torch.arange(pairs.shape[1]), until, most=_NUMBERS // len(rows[0].group) + 1):
        start = F.one_hot(pairs[1, some], walk.inputs).double() - F.one_hot(pairs[0, some], walk.inputs).double()
        here = ((index >= some[0]) & (index <= some[-1])).nonzero()[:, 0]
        deepest = int(row[here].max()) // walk.outputs
        layers = rows[: walk.ends[deepest] + 1]
        reached = greatest_through_layers(layers, chain, start.to(rows[0].attention), until=until)
        values, gaps = (torch.stack(part)[walk.ends[: deepest + 1]].cpu() for part in zip(*reached, strict=True))
        place = row[here] // walk.outputs, index[here] - some[0], row[here] % walk.outputs
        ahead[here] = values[place]
        gap[here] = gaps[place]
    return ahead, gap
