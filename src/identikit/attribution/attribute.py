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
    options = AttributionOptions(probes, norm, source, precision, seed).checked(model, layers)
    texts = prepare_texts(model, text, truncate=truncate, max_tokens=max_tokens)
    if target is not None:
        for name, value in {"layers": layers, "targets": targets}.items():
            no_effect(name, value, _ONE_GRADIENT)
        outputs = _outputs(texts, target, options, progress)
        return Results(outputs) if several else outputs[0]
    if targets is None and (ahead := cost_warning(model, [_inputs(reading) for reading in texts], options)):
        warnings.warn(ahead, stacklevel=3)
    with one_thread_if_busy():
        results = attribute(texts, options, targets=targets, progress=progress)
    return Results(results) if several else results[0]


def _inputs(reading: TextRun) -> int:
    """Return how many tokens are inputs."""
    return len(input_facts(reading)["tokens"])


def _outputs(texts: Sequence[TextRun], target: object, options: Request, progress: Progress) -> list[OutputAttribution]:
    for name in ("probes", "norm", "precision", "seed"):
        value = getattr(options, name)
        no_effect(name, None if value == getattr(AttributionOptions, name) else value, _ONE_GRADIENT)
    outputs = []
    for done, reading in enumerate(texts):
        outputs.append(attribute_output(reading, target, source=options.source))
        progress("attribution of outputs, texts", done + 1, len(texts))
    return outputs


def attribute(
    texts: Sequence[TextRun], options: Request, *, targets: Index = None, progress: Progress = silent
) -> list[TokenAttribution]:
    """Attribute texts of one model that are encoded already, and perhaps run; `options` were checked."""
    model = texts[0].model
    asked = [options] * len(texts)
    if targets is not None:
        asked = [replace(options, targets=_positions(texts, place, targets)) for place in range(len(texts))]
    if options.norm == FISHER:
        pairs = zip(texts, asked, strict=True)
        asked = [replace(of_text, roots=fisher_roots(text, of_text.targets)) for text, of_text in pairs]
    planned = cache(partial(make_plan, model))  # texts of one length are planned once
    plans = [planned(_inputs(text), of_text) for text, of_text in zip(texts, asked, strict=True)]
    total = sum(each.units for each in plans)
    done = 0.0

    def tick(count: float | int) -> None:
        nonlocal done
        done = min(done + count, total)  # where memory ran out, work is repeated
        progress("attribution, tokens", int(done + 1e-6), total)

    results: dict[int, TokenAttribution] = {}
    padded = model.modality == "text" and all(text.batch.images is None for text in texts)
    for group, group_plan in side_by_side(model, plans, padded=padded):
        seeds = [options.seed + zlib.crc32(repr(texts[place].tokens).encode()) for place in group]  # texts differ
        seeded = [replace(asked[place], seed=seed) for place, seed in zip(group, seeds, strict=True)]
        answers = group_plan.run([texts[place] for place in group], seeded, tick)
        for place, measured in zip(group, answers, strict=True):
            results[place] = _attributed(texts[place], asked[place], measured, group_plan.engine)
    return [results[place] for place in range(len(texts))]


def _positions(texts: Sequence[TextRun], place: int, targets: Index) -> tuple[int, ...]:
    """Return the positions of the targets in one of the texts."""
    tokens = texts[place].tokens
    try:
        return tuple(Axis("target", tuple(range(len(tokens))), tokens).indices_of(targets))
    except InputError as error:
        if len(texts) == 1:
            raise
        message = str(error)
        raise InputError(f"In texts[{place}], {message[0].lower()}{message[1:]}") from None


def _attributed(reading: TextRun, options: Request, measured: Tensor, engine: str) -> TokenAttribution:
    model = reading.model
    tokens = reading.tokens
    _check_overflow(measured, options, model)
    if options.exact:
        arrays = {"contribution": jacobian.contributions(measured)}
    else:
        size = model.d_model if options.source == "after" or engine == "reverse" else model.d_input
        contribution, stderr = jacobian.estimated_contributions(measured, population=size)
        arrays = {"contribution": contribution, "stderr": stderr}
    targets = tuple(range(len(tokens))) if options.targets is None else options.targets
    facts = reading.about
    inputs = input_facts(reading)
    if len(inputs["tokens"]) > len(tokens):
        facts[SOURCE] = inputs
    axes = (
        Axis("layer", options.layers),
        Axis("input", tuple(range(len(inputs["tokens"]))), tuple(inputs["tokens"])),
        Axis("output", targets, tuple(tokens[place] for place in targets)),
    )
    about = facts | {
        "norm": options.norm,
        "probes": None if options.exact else options.probes,
        "engine": engine,
        "causal": reading.causal,
        "underflow": _underflow(measured, reading, options),
        "cls": _position(reading, "cls"),
        "separator": _position(reading, "sep"),
    }
    provenance = model.provenance(
        reading.text,
        norm=options.norm,
        probes=options.probes,
        source=options.source,
        precision=options.precision,
        seed=options.seed,
        engine=engine,
        layers=options.layers,
        targets=options.targets,
        **({} if model.decoder_attention is None else {"attention": model.decoder_attention}),
    )
    return TokenAttribution(axes, StoredArrays(arrays, dict.fromkeys(arrays, _DIMS)), provenance, about)


def _check_overflow(measured: Tensor, options: Request, model: Model) -> None:
    """Refuse derivatives that are too large for their number format, and say from which layer on."""
    lost = (~measured.isfinite()).flatten(1).double().mean(1).tolist()
    if not any(lost):
        return
    shares = dict(zip(options.layers, lost, strict=True))
    layer = min(layer for layer, share in shares.items() if share)
    before = f" Or ask only for layers before {layer}." if layer else ""
    raise InputError(
        f"Derivatives of {model.name} overflow in {str(model.dtype).removeprefix('torch.')} from layer {layer} on: "
        f"{shares[layer]:.0%} of that layer are not finite. {dtype_advice(model.dtype)}{before}"
    )


def _underflow(measured: Tensor, reading: TextRun, options: Request) -> list[float] | None:
    """Return, by layer, which share of the pairs of tokens that attention connects came out as exactly 0.

    Attention connects two tokens where its weights lead from one to the other through the layers. None where it cannot
    be said: the model does not split, or the norm may be 0 by itself.
    """
    if options.norm == "sum" or not reading.model.family.splits:
        return None
    moved = (measured if options.exact else measured.sum(-1)).double() > 0
    if moved.all():
        return [0.0] * len(options.layers)
    n = moved.shape[1]
    targets = slice(None) if options.targets is None else list(options.targets)
    connected = torch.eye(n, dtype=torch.float32)
    reached = {}
    with reading.split() as split:
        for layer, block in enumerate(split.blocks[: max(options.layers) + 1]):
            weights = torch.cat(
                [block.call.weights(rows, dtype=torch.float32)[0] for rows in block.call.row_chunks()], 1
            )
            sees = (weights > 0).any(0).float().cpu()
            connected = ((connected + connected @ sees.T) > 0).float()  # (input, output)
            reached[layer] = connected[:, targets] > 0
    return [
        float((reached[layer] & ~of_layer).sum() / reached[layer].sum().clamp(min=1))
        for layer, of_layer in zip(options.layers, moved, strict=True)
    ]


def _position(reading: TextRun, name: str) -> int | None:
    """Return where the first [CLS] or [SEP] stands, by the tokenizer's own name for it."""
    wanted = getattr(reading.model.tokenizer, f"{name}_token", None) or f"[{name.upper()}]"
    special = reading.batch.special[0].tolist()
    return next((place for place, token in enumerate(reading.tokens) if special[place] and token == wanted), None)


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
