"""The main job: answer the three questions for a model on one text."""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import torch

from identikit.attention.effective import attend_while
from identikit.attention.estimate import RowSample
from identikit.attention.intervals import checked_seconds
from identikit.attention.layer import USUAL
from identikit.attention.result import EffectiveAttention
from identikit.attribution.attribute import attribute
from identikit.attribution.outputs import attribute_output
from identikit.attribution.plan import affordable_probes, expected_seconds, is_affordable, warning_ahead
from identikit.attribution.request import AttributionOptions, Request
from identikit.attribution.result import OutputAttribution, TokenAttribution
from identikit.checks import as_whole, function, shortened
from identikit.errors import InputError, Unavailable
from identikit.explanation.attention_facts import SECONDS, Limit, attention_facts, known_numbers
from identikit.explanation.readings import check_target, checked_names, read_measures
from identikit.explanation.result import COMING, NEAR, Explanation
from identikit.maths.mixing import by_offset
from identikit.maths.polytope.ahead import is_compiling
from identikit.maths.threads import calm
from identikit.models.machine import duration
from identikit.models.model import Model, checked_model
from identikit.models.reading import Reading, readings
from identikit.models.surroundings import undisturbed
from identikit.progress import Progress, Watched, reporting
from identikit.results.axis import Axis
from identikit.results.source import StoredArrays
from identikit.shapes import Tensor
from identikit.texts.data import sample_text, sample_texts
from identikit.texts.text import is_several, joined_by
from identikit.tokens.identify import cached_maps, identity_of
from identikit.tokens.maps import FittedMap
from identikit.tokens.result import IdentityMap, TokenIdentifiability

_OFFERED = 16  # directions of the attribution that is offered where all of it takes too long
_FEW_WEIGHTS = 4e6  # in all maps of a text: so few are read whatever the clock says, in a second or two
Ready = Callable[[Explanation, float], None]
_NAMED = 8  # of the tokens that an output comes from
_VERIFYING = 2.0  # how much longer than reading a text it takes to run the model with effective attention


@reporting
@calm()
@undisturbed()
def explain(
    model: Model,
    text: object = None,
    *,
    probes: int | str | None = None,
    maps: TokenIdentifiability | Sequence[FittedMap] | None = None,
    measures: Sequence[str] | str = (),
    target: object = None,
    seconds: float | int | None = SECONDS,
    truncate: bool = False,
    progress: Watched = None,
    ready: Ready | None = None,
) -> Explanation:
    """Answer the three questions for a model on a text; without one, on the sample text that comes with the package.

    - `probes`: how many random directions attribution is estimated from, or "exact"; left out, it is exact
      for a short text, and for a longer one estimated from as many as take some seconds, by the sizes of text and model
    - `maps`: what tokens are recovered with: the result of `token_identifiability` on texts of your own; left out,
      ridge maps fitted once to the sample texts
    - `measures`: also read attention in these ways, and say how much of each is determined: names that
      `attention_measure` knows (through layers, of the last), and "roles" for `head_scores`. They are in `readings`
    - `target`: also say which tokens an output comes from: a next token, a class, "prediction", a pair of these that is
      one against another, or any other target of `token_attribution`, whose result has every token. Measures such as
      "gradient", "relevance" and "logit" are of it
    - `seconds`: about how long the whole call may take, but for what is done once for a model (fitting maps) or on a
      machine (compiling). Of a long text as many layers are read as fit, spread evenly; attribution that would take
      longer is left out, or given up at twice the limit; and rows of attention are bounded, in random order, in what is
      left of it, or in half of it.
      The verdict says what was left out. None: all of it
    - `ready`: called once with what is known before attribution, and in about how many seconds the rest will be
    """
    model = checked_model(model)
    progress = function("progress", progress)
    ready = None if ready is None else function("ready", ready)
    seconds = checked_seconds(seconds)
    if text is None and model.modality != "text":
        raise InputError(
            f"explain without a text reads a packaged sample, and {model.name} reads {model.modality}s. Pass one."
        )
    text = sample_text() if text is None else text
    if is_several(text):
        raise InputError("explain reads one text at a time: pass a string, a pair of strings, or token ids.")
    if probes is not None:
        AttributionOptions(probes=probes).checked(model)  # refuses a wrong number before anything is computed
    fitted = maps.maps if isinstance(maps, TokenIdentifiability) else maps
    listed = isinstance(fitted, list | tuple) and bool(fitted) and all(isinstance(one, FittedMap) for one in fitted)
    if fitted is not None and not listed:
        raise InputError(
            f"maps={shortened(maps)} cannot be used: expected the result of token_identifiability(model, texts)."
        )
    names = checked_names(measures)
    limit = Limit(None if seconds == math.inf else seconds, time.monotonic())
    (reading,) = readings(model, text, layers=model.attention_layers, truncate=truncate)
    check_target(reading, names, target)
    running = time.monotonic() - limit.started
    output = {} if target is None else _output_facts(attribute_output(reading, target), target)
    identity, limit = limit.without(lambda: _identity(reading, fitted, progress))
    attention = _attention(reading, limit, progress)
    change = attention.verify() if limit.allows(_VERIFYING * running) else None
    attribution, limit_of_rows = _asked(reading, probes, limit)
    if names:
        limit_of_rows = limit_of_rows.keeping(limit_of_rows.left() / 2)  # the other half is for measures
    told = progress if probes is not None else _until(limit, progress)
    if is_compiling():  # what bounds rows: another process needs some seconds yet
        attribution = _attributed(reading, attribution, told)
    arrays, facts, bounded = attention_facts(attention, limit_of_rows, progress)
    facts |= {"output_change": None if change is None else change._asdict(), "readings": {}}
    if ready is not None and isinstance(attribution, Request):
        draft = _explanation(reading, (attention, identity, COMING), dict(arrays), facts | output, bounded)
        ready(draft, expected_seconds(model, [len(reading.tokens)], attribution))
    attribution = _attributed(reading, attribution, told)
    found, facts["readings"] = read_measures(attention, names, target, limit, progress)
    explained = _explanation(reading, (attention, identity, attribution), arrays, facts | output, bounded)
    return replace(explained, readings=found)


def _output_facts(outputs: OutputAttribution, target: object) -> dict[str, object]:
    """Return the facts about each output: its value, and the tokens that contribute most, with their signs.

    `target` is the one that was asked for, or None if that is not a word or a number.
    """
    axis = outputs.axis("input")
    rows = zip(outputs.read("contribution"), outputs.read("gradient_x_input"), strict=True)
    facts = []
    for place, (shares, signed) in enumerate(rows):
        strongest = shares.topk(min(_NAMED, len(shares))).indices.tolist()
        facts.append(
            {
                "target": outputs.target[place],
                "value": outputs.value[place],
                "probability": outputs.probability[place],
                "sources": [[axis.name_of(token), float(shares[token]), float(signed[token])] for token in strongest],
            }
        )
    return {"output": facts, "target": target if isinstance(target, str) else as_whole(target)}


def _identity(reading: Reading, maps: Sequence[FittedMap] | None, progress: Progress) -> IdentityMap | Unavailable:
    """Read the text with these maps, or with ridge maps that are fitted once to the sample texts."""
    reads = reading.model.modality
    about = {"fitted_to": "your texts", "unknown": 0.0}
    if maps is None and reads != "text":
        return Unavailable(
            f"The sample texts do not fit a model that reads {reads}s. Fit maps to {reads}s of your own: "
            f"`explain(model, {reads}, maps=token_identifiability(model, {reads}s))`."
        )
    try:
        if maps is None:
            maps, unknown = cached_maps(reading.model, sample_texts(), progress=progress)
            about = {"fitted_to": "the sample texts", "unknown": unknown}
        identity = identity_of(reading, maps)
    except InputError as reason:  # a tokenizer that knows none of the sample texts' words, or a text of one token
        return Unavailable(str(reason))
    return replace(identity, about={**identity.about, **about})


def _attention(reading: Reading, limit: Limit, progress: Progress) -> EffectiveAttention:
    """Read all layers of a text, or of a long one as many as fit in a good half of the time, spread evenly."""
    model = reading.model
    layers = model.attention_layers
    unlimited = len(layers) * model.n_heads * len(reading.tokens) ** 2 <= _FEW_WEIGHTS

    def going(done: int) -> bool:
        progress("effective attention, layers", done, len(layers))
        return unlimited or not limit.passed(0.6)

    return attend_while(going, reading, USUAL, layers=[layers[at] for at in spread(len(layers))])


def spread(count: int) -> list[int]:
    """Return the places 0 to `count` − 1 so that those up to any point lie far apart: last, first, middle and so on."""
    order = [count - 1, 0][:count]
    while len(order) < count:
        before, after = max(pairwise(sorted(order)), key=lambda ends: ends[1] - ends[0])
        order.append((before + after) // 2)
    return order


def _asked(reading: Reading, probes: int | str | None, limit: Limit) -> tuple[Request | Unavailable, Limit]:
    """Return what is asked of attribution, or why it is left out, and the limit for what is done before it.

    What takes some seconds by its sizes is done whatever the clock says; more than that is kept free for it.
    """
    model = reading.model
    n = len(reading.tokens)
    try:
        options = AttributionOptions(affordable_probes(model, n) if probes is None else probes).checked(model)
        if not is_affordable(model, n, options):
            seconds = expected_seconds(model, [n], options)
            if probes is None and seconds > limit.left():
                left = f"more than is left of the time limit (seconds={limit.seconds:g})"
                taken = f"Attribution takes about {duration(seconds)}, {left}."
                return Unavailable(f"{taken} {_offer(reading)}".strip()), limit
            limit = limit.keeping(seconds)
        if ahead := warning_ahead(model, [n], options):
            warnings.warn(ahead, stacklevel=4)
    except InputError as refusal:
        return Unavailable(f"{refusal} {_offer(reading)}".strip()), limit
    return options, limit


class _Late(Exception):  # noqa: N818 - not an error: it ends what takes longer than it was expected to
    """Raised when the time limit is exceeded by so much that the current work is abandoned."""


def _until(limit: Limit, progress: Progress) -> Progress:
    """Report progress until twice the time limit has passed, and then end what reports it."""

    def report(what: str, done: int, total: int) -> None:
        if limit.passed(2.0):
            raise _Late
        progress(what, done, total)

    return report


def _attributed(
    reading: Reading, options: Request | TokenAttribution | Unavailable, progress: Progress
) -> TokenAttribution | Unavailable:
    """Attribute what was asked for; return anything else unchanged."""
    if not isinstance(options, Request):
        return options
    try:
        with calm():  # cores may be busy by now
            return attribute([reading], options, progress=progress)[0]
    except _Late:
        late = "Attribution was stopped: it takes longer than expected, and twice the time limit has passed."
        return Unavailable(f"{late} {_offer(reading)}".strip())
    except InputError as refusal:
        return Unavailable(str(refusal))


def _offer(reading: Reading) -> str:
    """Say what of a text's attribution takes less time and memory, and how long: the last token, and fewer layers."""
    model = reading.model
    n = len(reading.tokens)
    probes = min(_OFFERED, model.d_input)
    offers = []
    for layers in dict.fromkeys((model.n_layers, max(1, model.n_layers // 4))):
        with suppress(InputError):
            options = AttributionOptions(probes=probes).checked(model, list(range(layers)))
            seconds = expected_seconds(model, [n], replace(options, targets=(n - 1,)))
            some = f", layers=range({layers})" if layers < model.n_layers else ""
            asked = f"`token_attribution(model, text, targets=[{n - 1}], probes={probes}{some})`"
            offers.append(f"{asked} takes about {duration(seconds)}")
    return f"Of the last token alone, {'; '.join(offers)}." if offers else ""


def _explanation(
    reading: Reading,
    answers: tuple[EffectiveAttention, IdentityMap | Unavailable, TokenAttribution | Unavailable],
    arrays: dict[str, Tensor],
    facts: Mapping[str, object],
    bounded: RowSample,
) -> Explanation:
    model = reading.model
    attention, identity, attribution = answers
    layers = list(attention.layers)
    about = reading.about | {
        "n_layers": model.n_layers,
        "n_heads": model.n_heads,
        "d_value": model.d_value,
        "causal": reading.causal,
        "pearson_overall": known_numbers([float(attention.pearson())])[0],
        "largest_residual": float(attention.residual.max()),
        "largest_row_residual": float(attention.row_residual.max()),
        "layers_left_out": len(model.attention_layers) - len(layers),
        "joined_by": None,
        **facts,
    }
    if isinstance(reading.text, tuple) and isinstance(reading.text[0], str):  # a pair: what stands between its halves
        about["joined_by"] = list(joined_by(reading.tokens, reading.batch.special[0].tolist()))
    if isinstance(identity, IdentityMap):
        recovered = torch.full((model.n_layers, len(reading.tokens)), torch.nan, dtype=torch.float64)
        recovered[list(identity.axis("layer").values)] = identity.recovered.double()
        arrays["recovered"] = recovered[layers]
    if isinstance(attribution, TokenAttribution):
        arrays |= {"own": attribution.own[layers], "outweighed": attribution.outweighed[layers]}
        others = by_offset(attribution.contribution, causal=attribution.causal)
        near = others.share()[:, others.positions.abs() <= NEAR].sum(1)
        about |= {
            "near": near.tolist() if others.sums.any() else None,
            "probes": attribution.probes,
            "largest_stderr": None if attribution.stderr is None else float(attribution.stderr.max()),
        }
    dims = {name: Explanation.measures[name].axes for name in arrays}
    axes = (Axis("layer", tuple(layers)), Axis("token", tuple(range(len(reading.tokens))), reading.tokens))
    return Explanation(axes, StoredArrays(arrays, dims), attention.provenance, about, *answers, bounded)
