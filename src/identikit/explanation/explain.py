"""The main job: answer the three questions for a model on one text."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch

from identikit.attention.effective import attend_while
from identikit.attention.estimate import RowSample
from identikit.attention.intervals import checked_seconds
from identikit.attention.layer import USUAL
from identikit.attention.result import EffectiveAttention
from identikit.attribution.outputs import attribute_output
from identikit.attribution.request import AttributionOptions
from identikit.attribution.result import OutputAttribution, TokenAttribution
from identikit.checks import as_integer, function, shortened
from identikit.errors import InputError, Unavailable
from identikit.explanation.attention_facts import SECONDS, attention_facts, known_numbers
from identikit.explanation.readings import check_target, checked_names, read_measures
from identikit.explanation.result import COMING, NEAR, Explanation
from identikit.explanation.time_limit import TimeLimit, plan_attribution
from identikit.maths.mixing import by_offset
from identikit.maths.polytope.ahead import is_compiling
from identikit.maths.threads import one_thread_if_busy
from identikit.models.isolation import standard_torch_state
from identikit.models.model import Model, checked_model
from identikit.models.text_run import TextRun, run_texts
from identikit.progress import Progress, Watched, reporting
from identikit.results.axis import Axis
from identikit.results.source import StoredArrays
from identikit.shapes import Tensor
from identikit.texts.data import sample_text, sample_texts
from identikit.texts.text import is_text_list, pair_separator
from identikit.tokens.identify import cached_maps, identity_of
from identikit.tokens.maps import FittedMap
from identikit.tokens.result import IdentityMap, TokenIdentifiability

_FEW_WEIGHTS = 4e6  # in all maps of a text: so few are read whatever the clock says, in a second or two
_SOURCES_LISTED = 8  # of the tokens that an output comes from
_VERIFYING = 2.0  # how much longer than reading a text it takes to run the model with effective attention
Ready = Callable[[Explanation, float], None]


@reporting
@one_thread_if_busy()
@standard_torch_state()
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
    """Answer the three questions for a model on a text; without a text, on the sample that comes with the package.

    - `probes`: how many random directions attribution is estimated from, or "exact"; by default it is exact for a short
      text, and for a longer one estimated from as many directions as take some seconds
    - `maps`: the maps that tokens are recovered with: the result of `token_identifiability` on texts of your own; by
      default ridge maps, fitted once to the sample texts
    - `measures`: further readings of attention, each with how much of it is determined: names that `attention_measure`
      knows (through layers, of the last), and "roles" for `head_scores`. They are in `readings`
    - `target`: also explain which tokens an output comes from: a next token, a class, "prediction", a pair of these
      (one against the other), or any other target of `token_attribution`, whose result has every token. Measures such
      as "gradient", "relevance" and "logit" need it
    - `seconds`: about how long the call may take, without what happens once per model (fitting maps) or per machine
      (compiling). Of a long text only as many layers are read as fit, spread evenly. Attribution that would take longer
      is left out, or stopped at twice the limit. Rows of attention are bounded in random order in the time that is
      left, or in half of it. The verdict says what was left out. None: no limit
    - `ready`: called once with the answers that come before attribution, and in about how many seconds the rest follows
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
    if is_text_list(text):
        raise InputError("explain reads one text at a time: pass a string, a pair of strings, or token ids.")
    if probes is not None:
        AttributionOptions(probes=probes).checked(model)  # refuses a wrong number before anything is computed
    fitted_maps = _checked_maps(maps)
    names = checked_names(measures)
    limit = TimeLimit(None if seconds == math.inf else seconds)
    (reading,) = run_texts(model, text, layers=model.attention_layers, truncate=truncate)
    check_target(reading, names, target)
    reading_seconds = time.monotonic() - limit.started
    output = {} if target is None else _output_facts(attribute_output(reading, target), target)
    with limit.paused():
        identity = _identity(reading, fitted_maps, progress)
    attention = _attention(reading, limit, progress)
    change = attention.verify() if limit.allows(_VERIFYING * reading_seconds) else None
    attribution = plan_attribution(reading, probes, limit)
    if is_compiling():  # what bounds rows: another process needs some seconds yet
        attribution.compute(progress)
    rows_limit = limit.reserving(attribution.reserved_seconds)
    if names:
        rows_limit = rows_limit.reserving(rows_limit.left() / 2)  # for the measures
    arrays, facts, bounded = attention_facts(attention, rows_limit, progress)
    facts |= {"output_change": None if change is None else change._asdict(), "readings": {}} | output
    explained = partial(_explanation, reading, attention, identity, arrays, facts, bounded)
    if ready is not None and attribution.answer is None:
        ready(explained(COMING), attribution.expected_seconds())
    attribution.compute(progress)
    measured, facts["readings"] = read_measures(attention, names, target, limit, progress)
    return replace(explained(attribution.compute(progress)), readings=measured)


def _checked_maps(maps: object) -> Sequence[FittedMap] | None:
    fitted = maps.maps if isinstance(maps, TokenIdentifiability) else maps
    if fitted is None:
        return None
    if not isinstance(fitted, list | tuple) or not fitted or not all(isinstance(each, FittedMap) for each in fitted):
        raise InputError(
            f"maps={shortened(maps)} cannot be used: expected the result of token_identifiability(model, texts)."
        )
    return fitted


def _output_facts(outputs: OutputAttribution, target: object) -> dict[str, object]:
    """Return the facts about each output: its value, and the tokens that contribute most, with their signs.

    `target` is what the caller named, or None where that is neither a word nor a number.
    """
    inputs = outputs.axis("input")
    facts = []
    for index, label in enumerate(outputs.target):
        shares = outputs.read("contribution")[index]
        signed = outputs.read("gradient_x_input")[index]
        strongest = shares.topk(min(_SOURCES_LISTED, len(shares))).indices.tolist()
        facts.append(
            {
                "target": label,
                "value": outputs.value[index],
                "probability": outputs.probability[index],
                "sources": [[inputs.name_of(token), float(shares[token]), float(signed[token])] for token in strongest],
            }
        )
    return {"output": facts, "target": target if isinstance(target, str) else as_integer(target)}


def _identity(reading: TextRun, maps: Sequence[FittedMap] | None, progress: Progress) -> IdentityMap | Unavailable:
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


def _attention(reading: TextRun, limit: TimeLimit, progress: Progress) -> EffectiveAttention:
    """Read all layers of a text, or of a long one as many as fit in a good half of the time, spread evenly."""
    model = reading.model
    layers = model.attention_layers
    is_short = len(layers) * model.n_heads * len(reading.tokens) ** 2 <= _FEW_WEIGHTS

    def keep_reading(done: int) -> bool:
        progress("effective attention, layers", done, len(layers))
        return is_short or not limit.passed(0.6)

    return attend_while(keep_reading, reading, USUAL, layers=[layers[index] for index in spread_order(len(layers))])


def spread_order(count: int) -> list[int]:
    """Return 0 to `count` − 1 so that those up to any point lie far apart: last, first, middle and so on."""
    order = [count - 1, 0][:count]
    while len(order) < count:
        before, after = max(pairwise(sorted(order)), key=lambda ends: ends[1] - ends[0])
        order.append((before + after) // 2)
    return order


def _explanation(
    reading: TextRun,
    attention: EffectiveAttention,
    identity: IdentityMap | Unavailable,
    attention_arrays: Mapping[str, Tensor],
    facts: Mapping[str, object],
    bounded: RowSample,
    attribution: TokenAttribution | Unavailable,
) -> Explanation:
    model = reading.model
    layers = list(attention.layers)
    arrays = dict(attention_arrays)
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
        about["joined_by"] = list(pair_separator(reading.tokens, reading.batch.special[0].tolist()))
    if isinstance(identity, IdentityMap):
        recovered = torch.full((model.n_layers, len(reading.tokens)), torch.nan, dtype=torch.float64)
        recovered[list(identity.axis("layer").values)] = identity.recovered.double()
        arrays["recovered"] = recovered[layers]
    if isinstance(attribution, TokenAttribution):
        arrays |= {"own": attribution.own[layers], "outweighed": attribution.outweighed[layers]}
        by_distance = by_offset(attribution.contribution, causal=attribution.causal)
        near = by_distance.share()[:, by_distance.positions.abs() <= NEAR].sum(1)
        about |= {
            "near": near.tolist() if by_distance.sums.any() else None,
            "probes": attribution.probes,
            "largest_stderr": None if attribution.stderr is None else float(attribution.stderr.max()),
        }
    dims = {name: Explanation.measures[name].axes for name in arrays}
    axes = (Axis("layer", tuple(layers)), Axis("token", tuple(range(len(reading.tokens))), reading.tokens))
    source = StoredArrays(arrays, dims)
    return Explanation(axes, source, attention.provenance, about, attention, identity, attribution, bounded)
