"""Effective attention of every layer and head of a text, in factors, with its certificate."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from identikit.attention.captured import Captured, capture
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

    - `attention`: for a model with two stacks, which attention is read: the "encoder" (the default), the
      "decoder", whose tokens see those before them, or "cross", where queries are target tokens and keys source tokens
    - `target`: what the decoder reads, as a text, or as the token ids that it reads, its start token included; for a
      list of texts, a list. Or `generate`: let the model itself continue, greedily, by at most so many tokens
    - `layers`, `heads`: only these, counted from 0
    - `bias`: keep the values' bias, so that the real model's output is kept; without it, T = E·W^V·H as the paper
      writes it
    - `mass`: keep the sum of every row (null space LN([T, 1]))
    - `tolerance`: also take singular values below this share of the largest as null
    - `truncate`: cut texts that are too long for the model, or than `max_tokens`, instead of refusing them
    """
    options = EffectiveOptions(bias, mass, tolerance)
    progress = function("progress", progress)
    several = is_text_list(text)
    model, text = model_and_texts(model, text, attention, target, generate, truncate=truncate, max_tokens=max_tokens)
    layers = model.select_layers(layers)
    heads = selected_indices("head", heads, model.n_heads)
    results = []
    text_runs = run_texts(model, text, layers=layers, truncate=truncate, max_tokens=max_tokens)
    for text_run in text_runs:
        results.append(checked_attention(text_run, options, layers=layers, heads=heads))
        progress("effective attention, texts", len(results), len(text_runs))
    return Results(results) if several else results[0]


def attention_of(captured: Captured) -> EffectiveAttention:
    """Return captured attention as a Result; its arrays are computed when they are read."""
    text_run = captured.text_run
    model = text_run.model
    first = captured.layers[0]
    options = first.options
    side = {} if model.decoder_attention is None else {"attention": model.decoder_attention}
    provenance = model.provenance(
        text_run.text,
        bias=options.bias,
        mass=options.mass,
        tolerance=options.tolerance,
        outputs_computed_in=str(computed_in(first.call)).removeprefix("torch."),
        layers=captured.layer_numbers,
        heads=captured.head_numbers,
        **side,
    )
    axes = (
        Axis("layer", captured.layer_numbers),
        Axis("head", captured.head_numbers),
        Axis("query", tuple(range(len(text_run.tokens))), text_run.tokens),
        Axis("key", tuple(range(len(text_run.keys))), text_run.keys),
    )
    about = text_run.about | {"d_value": model.d_value, "causal": text_run.causal}
    source = replace(captured, measures=EffectiveAttention.measures)
    return EffectiveAttention(axes, source, provenance, about)


def checked_attention(
    text_run: TextRun,
    options: EffectiveOptions = USUAL,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> EffectiveAttention:
    """Return the attention of a text as `capture` takes it, and warn where not to trust effective attention."""
    captured = capture(text_run, options, layers=layers, heads=heads)
    warn_of(captured.layers, tolerance=options.tolerance, stacklevel=3)
    return attention_of(captured)


def attend_while(
    keep_going: Callable[[int], bool], text_run: TextRun, options: EffectiveOptions, *, layers: Sequence[int]
) -> EffectiveAttention:
    """Compute effective attention layer by layer, all heads and whole maps, until `keep_going` returns False.

    It is called after each layer, with how many are done. Layers that are not reached are left out.
    """
    computed: list[Layer] = []
    for number in layers:
        layer = Layer.of(text_run, number, range(text_run.model.n_heads), options)
        computed.append(layer)
        warn_of([layer], tolerance=options.tolerance, stacklevel=3)
        _ = layer.received  # solves the layer and reads its maps now, so that `keep_going` sees how long that takes
        if not keep_going(len(computed)):
            break
    computed.sort(key=lambda layer: layer.call.layer)
    return attention_of(Captured(text_run, tuple(computed)))


def selected_capture(attention: EffectiveAttention, caller: str, other_arguments: Mapping[str, Any]) -> Captured:
    """Return the capture of the selected layers and heads; errors name the `caller`.

    Other arguments must be None, because the attention already decides them.
    """
    captured = attention.captured(caller)
    for name, value in other_arguments.items():
        if value is not None:
            raise InputError(
                f"{caller}: {name}= does not go with attention in the model's place, which is of one text already. "
                "Select its layers and heads with sel()."
            )
    layer_axis, head_axis, query_axis, key_axis = attention.axes
    if query_axis.tokens != captured.text_run.tokens or key_axis.tokens != captured.text_run.keys:
        raise InputError(f"{caller} reads whole rows: select layers and heads of the attention, not queries or keys.")
    layers = [captured.layers[index] for index in layer_axis.source_indices]
    if len(head_axis) < len(captured.head_numbers):
        layers = [Layer.of(captured.text_run, layer.call.layer, head_axis.values, layer.options) for layer in layers]
    return replace(captured, layers=tuple(layers))
