"""Hidden Token Attribution of texts (section 5 of the paper), exact or estimated."""

import warnings
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, partial

import torch

from identikit.attribution.outputs import attribute_output, fisher_roots
from identikit.attribution.plan import cost_warning, make_plan, side_by_side
from identikit.attribution.request import FISHER, AttributionOptions, Request
from identikit.attribution.result import OutputAttribution, TokenAttribution
from identikit.checks import function, no_effect
from identikit.errors import InputError
from identikit.maths import jacobian
from identikit.maths import mixing as maths
from identikit.maths.mixing import Mixing
from identikit.maths.threads import one_thread_if_busy
from identikit.models.decoder import input_facts, model_and_texts
from identikit.models.isolation import standard_torch_state
from identikit.models.load.weights import dtype_advice
from identikit.models.model import Model
from identikit.models.text_run import TextRun, prepare_texts
from identikit.progress import Progress, Watched, reporting, silent
from identikit.results.axis import Axis, Index
from identikit.results.several import Results, of_texts
from identikit.results.source import StoredArrays
from identikit.shapes import Tensor
from identikit.texts.chat import text_or_messages
from identikit.texts.text import SOURCE, is_text_list

_DIMS = ("layer", "input", "output")
_ONE_GRADIENT = "a target has one gradient, and it is exact"


@of_texts
@reporting
@standard_torch_state()
def token_attribution(
    model: Model,
    text: object = None,
    *,
    messages: object = None,
    target: object = None,
    target_text: object = None,
    generate: int | None = None,
    probes: int | str = "exact",
    norm: str = "frobenius",
    layers: Index = None,
    targets: Index = None,
    source: str = "before",
    precision: str = "full",
    seed: int = 0,
    truncate: bool = False,
    max_tokens: int | None = None,
    progress: Watched = None,
) -> TokenAttribution | OutputAttribution | Results[TokenAttribution | OutputAttribution]:
    """Compute how much each input token contributes to each hidden vector (Eq. 11), or to an output.

    One text gives one Result, a list of texts a list. A text is a string, a pair of strings or token ids (or
    what the model reads instead: an image or its path, a sound file's path or samples).

    - `messages`: in place of a text, a chat as a list of {"role": …, "content": …}, which the tokenizer's template
      writes; what the template adds is marked as special. (Such a list is one text for every other function, too.)
    - `target`: attribute this output instead, exactly, by one backward pass (an `OutputAttribution`): a next token by
      what it spells or its id, a class, "prediction" (what the model itself gives most), any of these at a position
      ("Paris@7", "@7"; a masked model is asked at its mask), "similarity" of the two texts of a pair for a sentence
      encoder, or a function of the last hidden vectors, or of the logits and these. A tuple is one against another; a
      list is several. The options below do not apply then, except `source`, `truncate` and `max_tokens`
    - `target_text`: of a model of two stacks, attribute the hidden vectors of its decoder, for this text (or the token
      ids that the decoder reads; for a list of texts a list), to the tokens of source and target together; or
      `generate`: let the model itself continue, greedily, by at most so many tokens. `target` then is of the decoder
    - `probes`: "exact", or how many orthogonal random directions (from `seed`) to estimate from, with standard errors;
      twice those cover 94 % of the truth with 16 directions, 85 % with 8, and less with fewer
    - `norm`: of the Jacobian blocks: "frobenius", "sum" (the gradient of the sum of the components) or "spectral"; for
      models with a vocabulary also "fisher", of the last layer: how far the probabilities of all tokens move
    - `layers`, `targets`: only these layers, only these output positions or tokens; None is all of them
    - `source`: inputs "before" the embedding's norm (the embedding sum), or "after" it (what enters the first block)
    - `precision`: of the sweep: "full" is the model's own; "tf32" and "bfloat16" are faster, and good to some 0.03 %
      and 0.3 %
    - `truncate`: cut texts that are too long for the model, or than `max_tokens`, instead of refusing them

    A request that does not fit in memory is refused before it starts, with what would fit. One that takes more than a
    minute (ten seconds on a GPU) says beforehand how long and how much memory. In half precision, `underflow` of the
    result says which share of a layer's contributions is too small to be told from 0.
    """
    progress = function("progress", progress)
    text = text_or_messages(text, messages)
    several = is_text_list(text)
    side = None if target_text is None and generate is None else "decoder"
    model, text = model_and_texts(model, text, side, target_text, generate, truncate=truncate, max_tokens=max_tokens)
    request = AttributionOptions(probes, norm, source, precision, seed).checked(model, layers)
    texts = prepare_texts(model, text, truncate=truncate, max_tokens=max_tokens)
    if target is not None:
        for name, value in {"layers": layers, "targets": targets}.items():
            no_effect(name, value, _ONE_GRADIENT)
        outputs = _attribute_outputs(texts, target, request, progress)
        return Results(outputs) if several else outputs[0]
    if targets is None and (warning := cost_warning(model, [_input_count(run) for run in texts], request)):
        warnings.warn(warning, stacklevel=3)
    with one_thread_if_busy():
        results = attribute(texts, request, targets=targets, progress=progress)
    return Results(results) if several else results[0]


def _input_count(text: TextRun) -> int:
    return len(input_facts(text)["tokens"])


def _attribute_outputs(
    texts: Sequence[TextRun], target: object, request: Request, progress: Progress
) -> list[OutputAttribution]:
    for name in ("probes", "norm", "precision", "seed"):
        value = getattr(request, name)
        no_effect(name, None if value == getattr(AttributionOptions, name) else value, _ONE_GRADIENT)
    results = []
    for text in texts:
        results.append(attribute_output(text, target, source=request.source))
        progress("attribution of outputs, texts", len(results), len(texts))
    return results


def attribute(
    texts: Sequence[TextRun], request: Request, *, targets: Index = None, progress: Progress = silent
) -> list[TokenAttribution]:
    """Attribute texts of one model that are encoded already, and perhaps run."""
    model = texts[0].model
    requests = [request] * len(texts)
    if targets is not None:
        requests = [replace(request, targets=_target_positions(texts, index, targets)) for index in range(len(texts))]
    if request.norm == FISHER:
        pairs = zip(texts, requests, strict=True)
        requests = [replace(one_request, roots=fisher_roots(text, one_request.targets)) for text, one_request in pairs]
    cached_plan = cache(partial(make_plan, model))  # texts of one length are planned once
    plans = [cached_plan(_input_count(text), one_request) for text, one_request in zip(texts, requests, strict=True)]
    total = sum(plan.units for plan in plans)
    finished = 0.0

    def tick(count: float | int) -> None:
        nonlocal finished
        finished = min(finished + count, total)  # where memory ran out, work is repeated
        progress("attribution, tokens", int(finished + 1e-6), total)

    results: dict[int, TokenAttribution] = {}
    padded = model.modality == "text" and all(text.batch.images is None for text in texts)
    for group, plan in side_by_side(model, plans, padded=padded):
        seeds = [request.seed + zlib.crc32(repr(texts[index].tokens).encode()) for index in group]  # texts differ
        seeded = [replace(requests[index], seed=seed) for index, seed in zip(group, seeds, strict=True)]
        answers = plan.run([texts[index] for index in group], seeded, tick)
        for index, measured in zip(group, answers, strict=True):
            results[index] = _result(texts[index], requests[index], measured, plan.engine)
    return [results[index] for index in range(len(texts))]


def _target_positions(texts: Sequence[TextRun], index: int, targets: Index) -> tuple[int, ...]:
    """Return the positions of the targets in one of the texts."""
    tokens = texts[index].tokens
    try:
        return tuple(Axis("target", tuple(range(len(tokens))), tokens).indices_of(targets))
    except InputError as error:
        if len(texts) == 1:
            raise
        message = str(error)
        raise InputError(f"In texts[{index}], {message[0].lower()}{message[1:]}") from None


def _result(text: TextRun, request: Request, measured: Tensor, engine: str) -> TokenAttribution:
    """Make a Result of what an engine measured of a text."""
    model = text.model
    tokens = text.tokens
    _check_overflow(measured, request, model)
    if request.exact:
        arrays = {"contribution": jacobian.contributions(measured)}
    else:
        size = model.d_model if request.source == "after" or engine == "reverse" else model.d_input
        contribution, stderr = jacobian.estimated_contributions(measured, population=size)
        arrays = {"contribution": contribution, "stderr": stderr}
    targets = tuple(range(len(tokens))) if request.targets is None else request.targets
    about = text.about
    inputs = input_facts(text)
    if len(inputs["tokens"]) > len(tokens):
        about[SOURCE] = inputs
    axes = (
        Axis("layer", request.layers),
        Axis("input", tuple(range(len(inputs["tokens"]))), tuple(inputs["tokens"])),
        Axis("output", targets, tuple(tokens[target] for target in targets)),
    )
    about |= {
        "norm": request.norm,
        "probes": None if request.exact else request.probes,
        "engine": engine,
        "causal": text.causal,
        "underflow": _underflow(measured, text, request),
        "cls": _special_position(text, "cls"),
        "separator": _special_position(text, "sep"),
    }
    provenance = model.provenance(
        text.text,
        norm=request.norm,
        probes=request.probes,
        source=request.source,
        precision=request.precision,
        seed=request.seed,
        engine=engine,
        layers=request.layers,
        targets=request.targets,
        **({} if model.decoder_attention is None else {"attention": model.decoder_attention}),
    )
    return TokenAttribution(axes, StoredArrays(arrays, dict.fromkeys(arrays, _DIMS)), provenance, about)


def _check_overflow(measured: Tensor, request: Request, model: Model) -> None:
    """Refuse derivatives that are too large for their number format, and name the layer from which on they are."""
    lost = (~measured.isfinite()).flatten(1).double().mean(1).tolist()
    if not any(lost):
        return
    shares = dict(zip(request.layers, lost, strict=True))
    layer = min(layer for layer, share in shares.items() if share)
    before = f" Or ask only for layers before {layer}." if layer else ""
    raise InputError(
        f"Derivatives of {model.name} overflow in {str(model.dtype).removeprefix('torch.')} from layer {layer} on: "
        f"{shares[layer]:.0%} of that layer are not finite. {dtype_advice(model.dtype)}{before}"
    )


def _underflow(measured: Tensor, text: TextRun, request: Request) -> list[float] | None:
    """Return, by layer, which share of the pairs of tokens that attention connects came out as exactly 0.

    Attention connects two tokens where its weights lead from one to the other through the layers. None where this is
    unknown: the model does not split, or the norm may be 0 by itself.
    """
    if request.norm == "sum" or not text.model.family.splits:
        return None
    moved = (measured if request.exact else measured.sum(-1)).double() > 0
    if moved.all():
        return [0.0] * len(request.layers)
    targets = slice(None) if request.targets is None else list(request.targets)
    connected = torch.eye(moved.shape[1], dtype=torch.float32)
    connected_at = {}
    with text.split() as split:
        for layer, block in enumerate(split.blocks[: max(request.layers) + 1]):
            call = block.call
            weights = torch.cat([call.weights(rows, dtype=torch.float32)[0] for rows in call.row_chunks()], 1)
            sees = (weights > 0).any(0).float().cpu()
            connected = ((connected + connected @ sees.T) > 0).float()  # (input, output)
            connected_at[layer] = connected[:, targets] > 0
    shares = []
    for layer, layer_moved in zip(request.layers, moved, strict=True):
        pairs = connected_at[layer]
        shares.append(float((pairs & ~layer_moved).sum() / pairs.sum().clamp(min=1)))
    return shares


def _special_position(text: TextRun, name: str) -> int | None:
    """Return the position of the first [CLS] or [SEP], by the tokenizer's own name for it."""
    spelling = getattr(text.model.tokenizer, f"{name}_token", None) or f"[{name.upper()}]"
    special = text.batch.special[0].tolist()
    positions = (i for i, token in enumerate(text.tokens) if special[i] and token == spelling)
    return next(positions, None)


def mixing(results: Iterable[TokenAttribution]) -> Mixing:
    """Gather over texts which other tokens contribute (section 5.3 and Appendix C).

    Results that hold only some of their text's targets are refused: what moves the others is not known.
    """
    total: Mixing | None = None
    layers: tuple[int, ...] | None = None
    for result in results:
        if layers not in (None, result.layers):
            raise InputError(f"Gathering attribution: results hold different layers, {layers} and {result.layers}.")
        layers = result.layers
        of_text = maths.mixing(result.whole(), causal=result.causal, cls=result.cls, separator=result.separator)
        total = of_text if total is None else total.merge(of_text)
    if total is None:
        raise InputError("Gathering attribution: there are no results. Pass at least one.")
    return total
