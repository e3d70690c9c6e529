"""Effective attention of every layer and head of a text, in factors, with its certificate."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from identikit.attention.captured import Captured
from identikit.attention.layer import USUAL, EffectiveOptions, Layer
from identikit.attention.precision import computed_in, warn_of
from identikit.attention.result import EffectiveAttention
from identikit.checks import function
from identikit.errors import InputError
from identikit.models.decoder import model_and_texts
from identikit.models.isolation import standard_torch_state
from identikit.models.model import Model
from identikit.models.text_run import TextRun, run_texts
from identikit.progress import Watched, reporting
from identikit.results.axis import Axis, Index, selected_indices
from identikit.results.several import Results, of_texts
from identikit.texts.text import is_text_list


@of_texts
@reporting
@standard_torch_state()
def effective_attention(
    model: Model,
    text: object,
    *,
    target: object = None,
    generate: int | None = None,
    attention: str | None = None,
    layers: Index = None,
    heads: Index = None,
    bias: bool = True,
    mass: bool = False,
    tolerance: float = 0.0,
    truncate: bool = False,
    max_tokens: int | None = None,
    progress: Watched = None,
) -> EffectiveAttention | Results[EffectiveAttention]:
    """Compute the effective attention of a text (Eq. 9): an `EffectiveAttention`, or a list for a list of texts.

    `text` is a string, a pair of strings, token ids, or a list of these. Where the model reads images or sounds, it is
    an image or its path, or a sound file's path or samples; where it reads images inside a text, it may be a pair of an
    image and a question, or messages with images.

    - `attention`: of a model of two stacks, which attention is read: the "encoder" (that is the default), the
      "decoder", whose tokens see those before them, or "cross", where queries are target tokens and keys source tokens
    - `target`: what the decoder reads, as a text, or as the token ids that it reads, its start token included; for a
      list of texts, a list. Or `generate`: let the model itself continue, greedily, by at most so many tokens
    - `layers`, `heads`: only these, counted from 0
    - `bias`: keep the values' bias, so that the real model's output is kept; without it, T = E·W^V·H is the paper's
      letter
    - `mass`: keep the sum of every row (null space LN([T, 1]))
    - `tolerance`: also take singular values below this share of the largest as null
    - `truncate`: cut texts that are too long for the model, or than `max_tokens`, instead of refusing them
    """
    options = EffectiveOptions(bias, mass, tolerance)
    progress = function("progress", progress)
    several = is_text_list(text)
    model, text = model_and_texts(model, text, attention, target, generate, truncate=truncate, max_tokens=max_tokens)
    wanted_layers = model.select_layers(layers)
    wanted_heads = selected_indices("head", heads, model.n_heads)
    results = []
    texts = run_texts(model, text, layers=wanted_layers, truncate=truncate, max_tokens=max_tokens)
    for reading in texts:
        results.append(attend(reading, options, layers=wanted_layers, heads=wanted_heads))
        progress("effective attention, texts", len(results), len(texts))
    return Results(results) if several else results[0]


def attend(
    reading: TextRun,
    options: EffectiveOptions = USUAL,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> EffectiveAttention:
    """Compute the effective attention of a text that was read, as `captured_attention` does; warn of what is wrong."""
    result = captured_attention(reading, options, layers=layers, heads=heads)
    warn_of(result.captured().layers, tolerance=options.tolerance, stacklevel=3)
    return result


def attend_while(
    going: Callable[[int], bool], reading: TextRun, options: EffectiveOptions, *, layers: Sequence[int]
) -> EffectiveAttention:
    """Compute the effective attention of layers in this order, all heads and whole maps, for as long as `going`.

    `going` is asked after each layer, with how many are done. Layers that are not reached are left out.
    """
    heads = tuple(range(reading.model.n_heads))
    taken: dict[int, Layer] = {}
    for layer in layers:
        taken[layer] = Layer.of(reading, layer, heads, options)
        warn_of([taken[layer]], tolerance=options.tolerance, stacklevel=3)
        _ = taken[layer].received
        if not going(len(taken)):
            break
    return _captured(reading, options, dict(sorted(taken.items())), heads)


def captured_attention(
    reading: TextRun,
    options: EffectiveOptions = USUAL,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> EffectiveAttention:
    """Return the attention of a text that was read, of all layers that were read and all heads unless some are named.

    Nothing is solved before it is asked for.
    """
    layers = tuple(reading.calls) if layers is None else layers
    heads = tuple(range(reading.model.n_heads)) if heads is None else heads
    return _captured(reading, options, {at: Layer.of(reading, at, heads, options) for at in layers}, heads)


def recaptured(attention: EffectiveAttention, wanted: str, given: Mapping[str, Any]) -> Captured:
    """Return what was captured of the selected layers and heads; `wanted` names the call, which takes nothing else."""
    captured = attention.captured(wanted)
    for name, value in given.items():
        if value is not None:
            raise InputError(
                f"{wanted}: {name}= does not go with attention in the model's place, which is of one text already. "
                "Select its layers and heads with sel()."
            )
    layer, head, query, key = attention.axes
    if query.tokens != captured.reading.tokens or key.tokens != captured.reading.keys:
        raise InputError(f"{wanted} reads whole rows: select layers and heads of the attention, not queries or keys.")
    layers = [captured.layers[place] for place in layer.source_indices]
    if len(head) < len(layers[0].heads):
        layers = [Layer.of(captured.reading, each.call.layer, head.values, each.options) for each in layers]
    return replace(captured, layers=tuple(layers))


def _captured(
    reading: TextRun, options: EffectiveOptions, of_layers: Mapping[int, Layer], heads: Sequence[int]
) -> EffectiveAttention:
    layers = tuple(of_layers)
    taken = tuple(of_layers.values())
    captured = Captured(reading, taken, EffectiveAttention.measures)
    provenance = reading.model.provenance(
        reading.text,
        bias=options.bias,
        mass=options.mass,
        tolerance=options.tolerance,
        outputs_computed_in=str(computed_in(taken[0].call)).removeprefix("torch."),
        layers=layers,
        heads=heads,
        **({} if reading.model.decoder_attention is None else {"attention": reading.model.decoder_attention}),
    )
    axes = (
        Axis("layer", tuple(layers)),
        Axis("head", tuple(heads)),
        Axis("query", tuple(range(len(reading.tokens))), reading.tokens),
        Axis("key", tuple(range(len(reading.keys))), reading.keys),
    )
    about = reading.about | {"d_value": reading.model.d_value, "causal": reading.causal}
    return EffectiveAttention(axes, captured, provenance, about)
