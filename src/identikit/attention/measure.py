"""What people read from attention, with its exact range over all alternatives."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from identikit.attention.captured import Captured
from identikit.attention.effective import captured_attention
from identikit.attention.intervals import Bounding, bounds_of
from identikit.attention.layer import EffectiveOptions
from identikit.attention.measure_result import AttentionMeasure
from identikit.attention.measured import READINGS, MeasuredLayer, ReadingKind
from identikit.attention.quantities import TOP, edges_wanted
from identikit.attention.targets import Target, target_of
from identikit.checks import function, known
from identikit.errors import InputError
from identikit.maths.boxes import CORNERS, norm_ends, norm_of
from identikit.maths.chain import Chain, greatest_through_layers, through_layers
from identikit.models.model import Model, checked_model
from identikit.models.reading import readings
from identikit.models.surroundings import undisturbed
from identikit.progress import Progress, Watched, reporting
from identikit.results.axis import Axis, Index, chosen
from identikit.results.source import Held
from identikit.shapes import Int, Tensor
from identikit.texts.text import is_several


class _Numbers(NamedTuple):
    """What a reading is: of raw attention, of effective attention, its ends, and how far these are from sharp ones."""

    raw: Tensor
    effective: Tensor
    lower: Tensor
    upper: Tensor
    gap: Tensor


@reporting
@undisturbed()
def attention_measure(
    model: Model,
    text: Any,
    name: str = "rollout",
    *,
    target: Any = None,
    layers: Index = None,
    heads: Index = None,
    seconds: float | int | None = None,
    truncate: bool = False,
    progress: Watched = None,
) -> AttentionMeasure:
    """Read attention as people do, with the exact range of the reading over all alternatives.

    An alternative is other attention with the same head outputs: all else that the model computes is the same too, and
    each row moves in a set of its own. The ends hold for all of these rows together, and are attained.

    - `name`: of one head, "attention", "value norm" (‖a v H‖), "output share" and "gradient" (gradient × attention);
      of a layer, "mean" over its heads and "norm" (‖Σ a v H‖, `exact` up to 12 heads); through layers, "rollout",
      "rollout without residual" and "relevance" (Chefer)
    - `target`: what gradients are of, for "gradient" and "relevance": a next token or a class (a string or its number;
      None: what the model itself predicts), or a function of the logits and the last hidden vectors. Gradients are
      those of the model as it is, and held
    - `layers`, `heads`: only these; readings through layers are of all heads
    - `seconds`: stop bounding after this time; what was not reached keeps what holds for any attention, and a `gap` of
      NaN
    """
    kind = READINGS[known("name", name, tuple(READINGS))]
    progress = function("progress", progress)
    limit = Bounding.checked("exact", 0.0, seconds).seconds
    until = math.inf if limit is None else time.monotonic() + limit
    model = checked_model(model)
    if is_several(text):
        raise InputError("attention_measure reads one text at a time: pass a text, a pair or token ids.")
    if target is not None and not kind.needs_target:
        raise InputError(f"target= cannot be used with {name!r}, which needs no gradient. Leave it out.")
    shown = model.attending(layers)
    which = _heads(model, kind, heads)
    read = _layers_below(model, shown) if kind.through else shown
    (reading,) = readings(model, text, layers=read, truncate=truncate)
    result = captured_attention(reading, EffectiveOptions(), layers=read, heads=which)
    captured = result.captured()
    aim: Target | None = None
    measured = [MeasuredLayer(layer) for layer in captured.layers]
    if kind.needs_target:
        aim = target_of(model, reading, target)
        gradients = model.gradients(reading.batch, aim.number)
        measured = [MeasuredLayer(layer, gradients[layer.call.layer][0, layer.heads]) for layer in captured.layers]
    if kind.through:
        numbers = _through(captured, kind, measured, until, progress)
        numbers = _Numbers(*(part[[read.index(layer) for layer in shown]] for part in numbers))
    else:
        numbers = _edges(captured, kind, measured, until, progress)
    tokens = reading.tokens
    ends = [Axis(axis, tuple(range(len(tokens))), tokens) for axis in kind.axes[-2:]]
    head = [Axis("head", which)] if "head" in kind.axes else []
    arrays = numbers._asdict() | {"certain_order": certain_order(numbers, others_only=kind.through)}
    dims = dict.fromkeys(numbers._fields, kind.axes) | {"certain_order": kind.axes[:-1]}
    about = {"measure": name, "meaning": kind.meaning, "target": None if aim is None else aim.name}
    about["exact"] = not kind.joint or model.n_heads <= CORNERS
    provenance = model.provenance(reading.text, measure=name, target=about["target"], layers=shown, heads=which)
    axes = (Axis("layer", shown), *head, *ends)
    return AttentionMeasure(axes, Held(arrays, dims), provenance, reading.about | about)


def _heads(model: Model, kind: ReadingKind, heads: Index) -> tuple[int, ...]:
    if heads is not None and "head" not in kind.axes:
        raise InputError(f"heads= cannot be used with {kind.name!r}, which is of all heads together. Leave it out.")
    return chosen("head", heads, model.n_heads)


def _layers_below(model: Model, layers: Sequence[int]) -> tuple[int, ...]:
    """Return all layers up to the last one that is asked for; each of them must have attention."""
    return model.attending(list(range(max(layers) + 1)))


def _edges(
    captured: Captured, kind: ReadingKind, measured: Sequence[MeasuredLayer], until: float, progress: Progress
) -> _Numbers:
    """Read single heads, or their mean: the ends of every weight, scaled."""
    n = len(captured.reading.tokens)
    heads = len(captured.layers[0].heads)
    places = [(layer, head, query) for layer in range(len(measured)) for head in range(heads) for query in range(n)]
    left = None if until == math.inf else max(until - time.monotonic(), 1e-9)
    rows, bounds = bounds_of(
        captured, places, edges_wanted(n, top=0), bounding=Bounding("exact", 0.0, left), progress=progress
    )
    shape = (len(measured), heads, n, n)
    raw = rows.attention[:, :n].reshape(shape)
    effective = captured.effective_rows(places).reshape(shape)
    lower, upper, gap = (part.reshape(shape) for part in bounds[:3])
    if kind.joint:
        return _norms(measured, _Numbers(raw, effective, lower, upper, gap))
    assert kind.factor is not None
    factor = torch.stack([kind.factor(layer).expand(heads, n, n) for layer in measured])
    ends = factor * lower, factor * upper
    numbers = _Numbers(factor * raw, factor * effective, torch.minimum(*ends), torch.maximum(*ends), factor.abs() * gap)
    if "head" not in kind.axes:
        numbers = _Numbers(*(part.mean(1) for part in numbers))
    return _Numbers(*(part.cpu() for part in numbers))


def _norms(measured: Sequence[MeasuredLayer], weights: _Numbers) -> _Numbers:
    """Read the length of what each key adds to a layer's output, all heads together."""
    layers = []
    for at, layer in enumerate(measured):
        if layer.layer.gate is not None:
            raise InputError("'norm' cannot be read where a gate multiplies the head outputs: what a key adds varies.")
        vectors = (layer.values @ layer.layer.projection.double()).transpose(0, 1)  # key, head, d
        n = len(vectors)
        products = (vectors @ vectors.mT).repeat(n, 1, 1)  # an edge after the other, by query
        raw, effective, lower, upper, gap = (part[at].flatten(1).mT for part in weights)
        ends = norm_ends(products, lower, upper)
        off = (gap * products.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()).sum(-1)
        found = norm_of(products, raw), norm_of(products, effective), ends.least, ends.greatest, ends.gap + off
        layers.append([part.reshape(n, n) for part in found])
    return _Numbers(*(torch.stack(part).cpu() for part in zip(*layers, strict=True)))


def _through(
    captured: Captured, kind: ReadingKind, measured: Sequence[MeasuredLayer], until: float, progress: Progress
) -> _Numbers:
    """Read through layers: from each input token to each output token of each layer."""
    n = len(captured.reading.tokens)
    assert kind.factor is not None
    factors = [kind.factor(layer).expand(-1, n, -1) for layer in measured] if kind.needs_target else None
    chain = Chain(kind.keep, kind.give, factors)
    device = captured.layers[0].heads.device
    start = torch.eye(n, dtype=torch.float64, device=device)
    every = torch.arange(n, device=device)
    heads = torch.arange(len(captured.layers[0].heads), device=device)
    raw = [layer.call.weights(every, heads=layer.heads, dtype=torch.float64)[0] for layer in captured.layers]
    effective = [layer.effective(heads, every, slice(None)).double() for layer in captured.layers]
    places = [(head, query) for head in heads.tolist() for query in range(n)]
    rows = [layer.rows(places) for layer in captured.layers]
    late = _clock(until)
    sides = []
    for side, sign in enumerate((1.0, -1.0)):
        reached = []
        for done, extreme in enumerate(greatest_through_layers(rows, chain, sign * start, late=late)):
            reached.append((sign * extreme.value, extreme.gap))
            progress("attention measure, layers", side * len(rows) + done + 1, 2 * len(rows))
        sides.append([torch.stack(part).mT.cpu() for part in zip(*reached, strict=True)])
    (upper, over), (lower, under) = sides
    return _Numbers(
        torch.stack(list(through_layers(raw, chain, start))).mT.cpu(),
        torch.stack(list(through_layers(effective, chain, start))).mT.cpu(),
        lower,
        upper,
        torch.maximum(over, under),
    )


def _clock(until: float) -> Callable[[], bool]:
    return lambda: time.monotonic() > until


def certain_order(numbers: Any, *, others_only: bool) -> Int[Tensor, "*row"]:
    """Count the strongest sources, up to `TOP`, whose ends show that their order is the same in all alternatives.

    With `others_only`, a token is not a source of itself.
    """
    raw, lower, upper = numbers.raw, numbers.lower, numbers.upper
    n = raw.shape[-1]
    if others_only:
        own = torch.eye(n, dtype=torch.bool)
        raw = raw.masked_fill(own, -torch.inf)
        upper = upper.masked_fill(own, -torch.inf)
    place = raw.argsort(dim=-1, descending=True, stable=True)
    lower = lower.gather(-1, place)
    upper = upper.gather(-1, place)
    rest = upper.flip(-1).cummax(-1).values.flip(-1)  # the greatest that any later one can be
    above = lower[..., :-1] >= rest[..., 1:]
    return above[..., : min(TOP, n - 1)].long().cumprod(-1).sum(-1)
