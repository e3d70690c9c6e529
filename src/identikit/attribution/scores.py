"""Anybody's scores of tokens as a Result, and the attributions of Captum on our reading of a text."""

from collections.abc import Mapping, Set
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch

from identikit.attribution.outputs import checked_targets, joint_facts
from identikit.attribution.result import Scores
from identikit.checks import function, is_collection, is_unicode, known_name, shortened, whole_number
from identikit.errors import InputError
from identikit.models.isolation import standard_torch_state
from identikit.models.machine import differentiable_attention
from identikit.models.model import Model, checked_model
from identikit.models.partial_run import FIRST_BLOCK
from identikit.models.target import PREDICTION, Target
from identikit.models.text_run import prepare_texts
from identikit.progress import Watched, reporting
from identikit.results.axis import Axis
from identikit.results.provenance import Provenance, package_versions, text_hash
from identikit.results.result import Result
from identikit.results.several import Results, of_texts
from identikit.results.source import StoredArrays
from identikit.shapes import Float, Tensor
from identikit.texts.text import is_text_list

AXES = ("layer", "output", "input")
METHODS = ("integrated gradients", "gradient x input", "occlusion")
BASELINES = ("zero", "mask", "pad")
_TOKENS_AT_ONCE = 4096  # of the copies of a text that Captum runs together


def scores(tokens: object, array: object, *, name: str) -> Scores:
    """Wrap any array of scores as a Result, so that it is selected from, drawn, saved and compared like all others.

    - `tokens`: the tokens of the text; or another Result of the same text, which also gives its words and its model
    - `array`: a number for each token, (input,); for each pair, (output, input); or that for several layers, (layer,
      output, input). NaN where there is none
    - `name`: what the scores are called
    """
    if not is_unicode(name) or not name.strip():
        raise InputError(f"name={shortened(name)} cannot be used: expected a name for the scores.")
    numbers = _numbers(array)
    if isinstance(tokens, Result):
        about = {key: tokens.about.get(key) for key in ("tokens", "special", "words")}
        provenance = replace(tokens.provenance, settings={"name": name})
    else:
        if not is_collection(tokens) or isinstance(tokens, Set) or not all(map(is_unicode, tokens)):
            raise InputError(f"tokens={shortened(tokens)} cannot be used: expected several strings, or a Result.")
        about = {"tokens": list(tokens), "special": [False] * len(tokens), "words": []}
        dtype = str(numbers.dtype).removeprefix("torch.")
        text = text_hash([str(token) for token in tokens])
        provenance = Provenance("no model", None, "", "", "", text, dtype, "cpu", {"name": name}, package_versions())
    return _scores(numbers, about | {"name": name, "target": None, "details": {}}, provenance)


def _numbers(array: object) -> Tensor:
    try:
        numbers = torch.as_tensor(array).detach().cpu().clone()
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.zeros(0, dtype=torch.bool)
    if not (numbers.is_floating_point() or numbers.dtype in (torch.int32, torch.int64)) or not 1 <= numbers.ndim <= 3:
        raise InputError(
            f"array={shortened(array)} cannot be used: expected numbers, (input,), (output, input) or (layer, output, "
            "input)."
        )
    numbers = numbers if numbers.dtype == torch.float64 else numbers.float()
    if numbers.isinf().any():
        raise InputError("array= holds infinity. Give finite numbers, or NaN where there is none.")
    return numbers


def _scores(numbers: Tensor, about: Mapping[str, Any], provenance: Provenance) -> Scores:
    tokens = tuple(about["tokens"])
    dims = AXES[-numbers.ndim :]
    axes = []
    for dim, size in zip(dims, numbers.shape, strict=True):
        if size == 0 or (dim != "layer" and size != len(tokens)):
            raise InputError(f"array= has {size} along its axis of {dim}s, and there are {len(tokens)} tokens.")
        axes.append(Axis(dim, tuple(range(size)), None if dim == "layer" else tokens))
    return Scores(tuple(axes), StoredArrays({"score": numbers}, {"score": dims}), provenance, about)


# Captum


@of_texts
@reporting
@standard_torch_state()
def captum_attribution(
    model: Model,
    text: object,
    method: str = "integrated gradients",
    *,
    target: object = PREDICTION,
    baseline: str = "zero",
    steps: int = 50,
    truncate: bool = False,
    max_tokens: int | None = None,
    progress: Watched = None,
) -> Scores | Results[Scores]:
    """Attribute an output of a text to its tokens by a method of Captum (extra `captum`), on our reading of the text.

    Captum computes it, on the vectors that enter the first block; what its method gives for the entries of a token's
    vector is added up. (The embedding sums of BERT go through a norm first, so that scaling one changes nothing: zero
    would be no baseline there, and a gradient along the sum is 0.) Returns `Scores`, with a sign; a list of texts gives
    a list. A text may be the messages of a chat.

    - `method`: "integrated gradients", "gradient x input" or "occlusion" (each token's vector replaced in turn)
    - `target`: the output, as `token_attribution` takes it; by default the token or class that the model gives most
    - `baseline`: what integrated gradients start from and occlusion puts in: "zero" vectors, as Captum does, or those
      of the text with all of its tokens but special ones replaced by the tokenizer's "mask" or "pad" token
    - `steps`: of integrated gradients. `details` of the result has the numbers at the text and at the baseline, and the
      `gap` between their difference and the sum of all scores, which is 0 where there are enough steps
    - `truncate`: cut texts that are too long for the model, or than `max_tokens`, instead of refusing them
    """
    model = checked_model(model)
    progress = function("progress", progress)
    known_name("method", method, METHODS)
    known_name("baseline", baseline, BASELINES)
    steps = whole_number("steps", steps, least=1)
    if isinstance(target, list):
        raise InputError("captum_attribution takes one target: a list of several cannot be used.")
    _captum()
    results = []
    texts = prepare_texts(model, text, truncate=truncate, max_tokens=max_tokens)
    for text_run in texts:
        (output,) = checked_targets(text_run, target)
        start = _baseline(output, baseline)
        with model.tapped(), differentiable_attention():
            numbers = _by_captum(method, output, start, steps)
        ends = torch.stack([output.inputs(FIRST_BLOCK), start])
        value, at_baseline = output.of_inputs(ends, FIRST_BLOCK).tolist()
        details = {"value": value, "baseline": baseline, "baseline_value": at_baseline}
        if method == "integrated gradients":
            details |= {"steps": steps, "gap": float(numbers.double().sum()) - (value - at_baseline)}
        settings = {"method": method, "target": output.label, "baseline": baseline, "steps": steps}
        about = joint_facts(output.runs) | {"name": method, "target": output.label, "details": details}
        provenance = model.provenance(text_run.text, **settings, captum=_captum().__version__)
        results.append(_scores(numbers.cpu(), about, provenance))
        progress("attribution by Captum, texts", len(results), len(texts))
    return Results(results) if is_text_list(text) else results[0]


def _captum() -> ModuleType:
    try:
        import captum
        import captum.attr
    except ImportError:
        raise InputError(
            "captum_attribution needs Captum, which is not installed. Install it with: pip install 'identikit[captum]'."
        ) from None
    return captum


def _baseline(target: Target, name: str) -> Float[Tensor, "n d_x"]:
    """Return the vectors that integrated gradients start from and occlusion puts in."""
    inputs = target.inputs(FIRST_BLOCK)
    if name == "zero":
        return torch.zeros_like(inputs)
    replaced = []
    for run in target.runs:
        model = run.model
        token = getattr(model.tokenizer, f"{name}_token_id", None)
        if run.batch.images is not None:
            raise InputError(f"baseline={name!r} replaces tokens, and images cannot be. Use baseline='zero'.")
        if run.batch.ids is None or token is None or token >= model.vocabulary:
            raise InputError(f"baseline={name!r}: {model.name} has no such token. Use baseline='zero'.")
        ids = torch.where(run.batch.special, run.batch.ids, token)
        replaced.append(replace(run, trace=model.trace(replace(run.batch, ids=ids))))
    return replace(target, runs=tuple(replaced)).inputs(FIRST_BLOCK)


def _by_captum(method: str, target: Target, start: Float[Tensor, "n d_x"], steps: int) -> Float[Tensor, "n"]:
    """Return what a method of Captum gives to each token; `start` is what its vectors are compared with."""
    captum = _captum().attr
    number = partial(target.of_inputs, after=FIRST_BLOCK)
    inputs = target.inputs(FIRST_BLOCK)[None]
    if method == "integrated gradients":
        at_once = max(1, _TOKENS_AT_ONCE // len(start))
        by_entry = captum.IntegratedGradients(number).attribute(
            inputs, baselines=start[None], n_steps=steps, internal_batch_size=at_once
        )
    elif method == "gradient x input":
        by_entry = captum.InputXGradient(number).attribute(inputs.requires_grad_())
    else:  # what a window changes is given for each of its entries
        window = (1, start.shape[1])
        by_entry = captum.Occlusion(number).attribute(inputs, sliding_window_shapes=window, baselines=start[None])
        return by_entry[0].detach()[:, 0]
    return by_entry[0].detach().sum(-1)
