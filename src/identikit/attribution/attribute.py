"""Where did it come from: Hidden Token Attribution of texts (section 5 of the paper), exact or estimated."""

import operator
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

from identikit.attribution import sweep as engines
from identikit.attribution.sweep import Request
from identikit.errors import InputError
from identikit.machine import PRECISIONS, free_bytes, product_rate
from identikit.maths import jacobian
from identikit.maths import mixing as maths
from identikit.maths.mixing import Mixing
from identikit.models.model import Model
from identikit.models.reading import text_alone
from identikit.provenance import Provenance, provenance
from identikit.shapes import Float, Tensor
from identikit.text import Text, TokenBatch, collate, image_digests

if TYPE_CHECKING:
    from pandas import DataFrame

Progress = Callable[[int, int], None]

SOURCES = ("before", "after")
LONG_SECONDS = 60.0
_PROBES = (256, 128, 64, 32, 16, 8)  # with fewer, the standard errors are too rough to go by
_SPECTRAL = 2.5  # what largest singular values cost beside the Jacobians, as measured
_CHUNK_BYTES = {"cpu": 1 << 28}  # on a CPU larger chunks only leave the cache


class CostWarning(UserWarning):
    """Said before a run that will take more than a minute."""


@dataclass(frozen=True)
class TokenAttribution:
    """How much of each input token is mixed into each hidden vector of one text.

    - `contribution`: (layer, input, output); sums to 1 over inputs (a hidden vector that no input moves has all 0)
    - `stderr`: standard errors of the contributions, None where they are exact
    - `layers`, `targets`: which layers and which output positions the axes hold
    - `norm`: of the Jacobian blocks; `probes`: how many random directions, None: exact; `engine`: what computed it
    - `words`: the span of each word over its tokens; `cls`, `separator`: where [CLS] and the first [SEP] stand, if any
    """

    tokens: tuple[str, ...]
    special: tuple[bool, ...]
    words: tuple[tuple[int, int], ...]
    cls: int | None
    separator: int | None
    layers: tuple[int, ...]
    targets: tuple[int, ...]
    contribution: Float[Tensor, "layer input output"] = field(repr=False)
    stderr: Float[Tensor, "layer input output"] | None = field(repr=False)
    norm: str
    probes: int | None
    engine: str
    causal: bool
    provenance: Provenance = field(repr=False)

    @property
    def by_output(self) -> Float[Tensor, "layer output input"]:
        """The contributions with the hidden vector first: each row sums to 1."""
        return self.contribution.mT

    def to_frame(self) -> "DataFrame":
        """Return a table with a row for each layer, input and output (layers and positions count from 0)."""
        from pandas import DataFrame, MultiIndex

        axes = [self.layers, range(len(self.tokens)), self.targets]
        frame = MultiIndex.from_product(axes, names=["layer", "input", "output"]).to_frame(index=False)
        columns = {"contribution": self.contribution.flatten().numpy()}
        if self.stderr is not None:
            columns["stderr"] = self.stderr.flatten().numpy()
        tokens = {f"{name}_token": [self.tokens[place] for place in frame[name]] for name in ("input", "output")}
        return DataFrame(frame.assign(**tokens, **columns))


def token_attribution(
    model: Model,
    text: Text | list[Text] | Any,
    *,
    probes: SupportsIndex | str = "exact",
    norm: str = "frobenius",
    layers: Iterable[SupportsIndex] | None = None,
    targets: Iterable[SupportsIndex] | None = None,
    source: str = "before",
    precision: str = "full",
    seed: SupportsIndex = 0,
    truncate: bool = False,
    max_tokens: int | None = None,
    progress: Progress | None = None,
) -> list[TokenAttribution]:
    """Compute how much each input token contributes to each hidden vector (Eq. 11), one result per text, in order.

    `text` is a text, a pair, or a list of either (images or their paths for a vision model).

    - `probes`: "exact", or how many orthogonal random directions (from `seed`) to estimate from, with standard errors;
      twice those cover 94 % of the truth with 16 directions, 85 % with 8, and less with fewer
    - `norm`: of the Jacobian blocks: "frobenius", "sum" (the gradient of the sum of the components) or "spectral"
    - `layers`, `targets`: only these layers, only these output positions (both from 0); None is all of them
    - `source`: inputs "before" the embedding's norm (the embedding sum), or "after" it (what enters the first block)
    - `precision`: of the sweep: "full" is the model's own; "tf32" and "bfloat16" are faster, and good to some 0.3 %
    - `progress(done, total)` is called as tokens are done

    A request that does not fit in memory is refused before it starts; one that will take more than a minute says so.
    """
    request = _request(model, probes, norm, layers, targets, source, precision, seed)
    batches = _batches(model, text, truncate, max_tokens)
    lengths = [len(batch.tokens[0]) for batch, _ in batches]
    for n in lengths:
        _within("targets", request.targets, n)
    plans = [plan(model, n, request) for n in lengths]
    _announce(model, lengths, plans, request)
    tick = _counter(progress, sum(one.cost.units for one in plans))
    settings = {"norm": norm, "probes": request.probes or "exact", "source": source, "precision": precision}
    settings |= {"seed": request.seed}
    settings |= {"layers": request.layers, "targets": request.targets}
    return [
        _attribute(model, batch, request, one, tick, provenance(model, source_text, **settings, engine=one.cost.engine))
        for (batch, source_text), one in zip(batches, plans, strict=True)
    ]


def foresee(
    model: Model,
    lengths: list[int],
    *,
    probes: SupportsIndex | str = "exact",
    norm: str = "frobenius",
    source: str = "before",
    precision: str = "full",
    seed: SupportsIndex = 0,
) -> None:
    """Warn if attributing texts of these lengths will take more than a minute, with the probes that would make it fit.

    `token_attribution` does the same for the texts it is given; this is for those that will be given to it in parts.
    """
    request = _request(model, probes, norm, None, None, source, precision, seed)
    _announce(model, lengths, [plan(model, n, request) for n in lengths], request)


def _request(
    model: Model,
    probes: Any,
    norm: str,
    layers: Any,
    targets: Any,
    source: str,
    precision: str,
    seed: Any,
) -> Request:
    for name, value, allowed in (
        ("norm", norm, jacobian.NORMS),
        ("source", source, SOURCES),
        ("precision", precision, PRECISIONS),
    ):
        if value not in allowed:
            raise InputError(f"token_attribution: {name}={value!r} is not known: use one of {', '.join(allowed)}.")
    wanted = _whole_numbers("layers", layers)
    _within("layers", wanted, model.n_layers)
    return Request(
        layers=tuple(range(model.n_layers)) if wanted is None else wanted,
        targets=_whole_numbers("targets", targets),
        norm=norm,
        probes=_probes(probes, norm, model.d_model if source == "after" else model.d_input),
        seed=_whole_number("seed", seed),
        after=source == "after",
        precision=precision,
    )


def mixing(results: Iterable[TokenAttribution], tags: Iterable[Sequence[str]] | None = None) -> Mixing:
    """Gather the readings of section 5 and Appendix C over texts; `tags` has one tag per token for each text.

    Results with fewer targets than tokens are refused: what moves the others is not known.
    """
    total: Mixing | None = None
    layers: tuple[int, ...] | None = None
    for result, own_tags in zip(results, repeat(()) if tags is None else tags, strict=tags is not None):
        if result.targets != tuple(range(len(result.tokens))):
            raise InputError("mixing: a result holds some of its text's targets only; compute it without targets=.")
        if layers not in (None, result.layers):
            raise InputError(f"mixing: results hold different layers, {list(layers)} and {list(result.layers)}.")
        layers = result.layers
        found = maths.mixing(
            result.contribution, causal=result.causal, cls=result.cls, separator=result.separator, tags=own_tags
        )
        total = found if total is None else total.merge(found)
    if total is None:
        raise InputError("mixing: there are no results to read; pass at least one.")
    return total


def _whole_numbers(name: str, wanted: Any) -> tuple[int, ...] | None:
    """Return the asked-for layers or positions, each once; None is all of them."""
    if wanted is None:
        return None
    if isinstance(wanted, str) or not isinstance(wanted, Iterable):
        raise InputError(f"token_attribution: {name}={wanted!r}: expected a list of whole numbers, such as [0, 2].")
    return tuple(dict.fromkeys(_whole_number(name, one) for one in wanted))


def _whole_number(name: str, given: Any) -> int:
    """Return a whole number of any library as Python's own."""
    with suppress(TypeError):
        if not isinstance(given, bool):
            return operator.index(given)
    raise InputError(f"token_attribution: {name}: {given!r} is no whole number.")


def _within(name: str, chosen: tuple[int, ...] | None, count: int) -> None:
    """Refuse layers or positions that are not there."""
    if chosen is not None and not (chosen and all(0 <= index < count for index in chosen)):
        raise InputError(
            f"token_attribution: {name}={list(chosen)}: expected some of 0 to {count - 1}, counted from 0."
        )


def _probes(probes: Any, norm: str, most: int) -> int | None:
    """Return how many random directions are asked for; None: exact."""
    if probes == "exact":
        return None
    count = None if isinstance(probes, str) else _whole_number("probes", probes)
    if count is None or not 2 <= count <= most:
        raise InputError(
            f"token_attribution: probes={probes!r}: expected 'exact' or a number from 2 to {most}, the size of the "
            "input vectors (with which it is exact)."
        )
    if norm == "spectral":
        raise InputError(
            f"token_attribution: norm='spectral' with probes={probes}: the largest singular value cannot be estimated "
            "from a few directions. Leave probes out, or use norm='frobenius'."
        )
    return count


def _batches(model: Model, text: Any, truncate: bool, max_tokens: int | None) -> list[tuple[TokenBatch, Text]]:
    """Return each text (or image) as a batch of its own: nothing is padded, so nothing has to be taken out again."""
    if model.vision:
        images = model.images(text)
        return [(text_alone(images, row), digest) for row, digest in enumerate(image_digests(images))]
    encoded = model.encode(text, truncate=truncate, max_tokens=max_tokens)
    return [(collate([one], pad_id=model.pad_id), one.text) for one in encoded]


def _attribute(
    model: Model, batch: TokenBatch, request: Request, way: "Plan", tick: engines.Tick, source: Provenance
) -> TokenAttribution:
    tokens, special = batch.tokens[0], tuple(batch.special[0].tolist())
    own = replace(request, seed=request.seed + zlib.crc32(repr(tokens).encode()))  # texts differ in their directions
    measured = way.run(model, batch, own, tick)
    if not measured.isfinite().all():
        raise InputError(
            f"token_attribution: derivatives of {model.name} overflow in {model.dtype}. Load it in another "
            'number format: identikit.load(…, dtype="float32").'
        )
    stderr = None
    if request.probes is None:
        contribution = jacobian.contributions(measured)
    else:
        size = model.d_model if request.after or way.cost.engine == "reverse" else model.d_input
        contribution, stderr = jacobian.estimated_contributions(measured, population=size)
    return TokenAttribution(
        tokens=tokens,
        special=special,
        words=batch.words[0],
        cls=_position(model, "cls", tokens, special),
        separator=_position(model, "sep", tokens, special),
        layers=request.layers,
        targets=tuple(range(len(tokens))) if request.targets is None else request.targets,
        contribution=contribution,
        stderr=stderr,
        norm=request.norm,
        probes=request.probes,
        engine=way.cost.engine,
        causal=model.causal,
        provenance=source,
    )


def _position(model: Model, name: str, tokens: tuple[str, ...], special: tuple[bool, ...]) -> int | None:
    """Return where the first [CLS] or [SEP] stands, by the tokenizer's own name for it."""
    wanted = getattr(model.tokenizer, f"{name}_token", None) or f"[{name.upper()}]"
    return next((place for place, token in enumerate(tokens) if special[place] and token == wanted), None)


def _counter(progress: Progress | None, total: int) -> engines.Tick:
    done = 0

    def tick(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    return tick


class Cost(NamedTuple):
    """What an engine takes for one text: arithmetic, and bytes.

    `held` is the least it holds throughout, `kept` what it holds to compute nothing twice, `unit` what each of the
    `units` inputs (or targets) in a chunk adds. Passes through the model run at about a third of a product's rate.
    """

    engine: str
    operations: float
    held: int
    kept: int
    unit: int
    units: int


class Plan(NamedTuple):
    """How one text will be done: what it takes, how many inputs at a time, and whether derivatives are kept."""

    cost: Cost
    chunk: int
    keep: bool

    def run(self, model: Model, batch: TokenBatch, request: Request, tick: engines.Tick) -> Tensor:
        """Run the engine."""
        if self.cost.engine == "sweep":
            return engines.sweep(model, batch, request, chunk=self.chunk, keep=self.keep, tick=tick)
        engine = engines.generic if self.cost.engine == "generic" else engines.reverse
        return engine(model, batch, request, chunk=self.chunk, tick=tick)


def plan(model: Model, n: int, request: Request) -> Plan:
    """Choose the cheapest engine that fits in memory for a text of `n` tokens, or say what would fit."""
    free = int(0.8 * free_bytes(model.device))
    costs = _costs(model, n, request)
    cost = _cheapest(costs, free)
    if cost is None:
        what = "exact attribution" if request.probes is None else f"attribution with probes={request.probes}"
        fewer = (
            k for k in _fewer_probes(model, request) if _cheapest(_costs(model, n, replace(request, probes=k)), free)
        )
        probes = next(fewer, None)
        advice = "Use a smaller model" if probes is None else f"Use probes={probes}, an estimate with standard errors"
        least = min(cost.held + cost.unit for cost in costs)
        raise InputError(
            f"token_attribution: {what} of {n} tokens with {model.name} needs at least {least / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB of memory can be used. {advice}, or a shorter text."
        )
    keep = cost.kept + cost.unit <= free
    room = free - (cost.kept if keep else cost.held)
    # Under a causal mask a chunk works on all tokens from its first one on: small chunks waste less.
    most = n // 8 if model.causal and cost.engine == "sweep" else cost.units
    fitting = min(room, _CHUNK_BYTES.get(model.device.type, room)) // cost.unit
    return Plan(cost, max(1, min(most, fitting)), keep)


def _cheapest(costs: list[Cost], free: int | None = None) -> Cost | None:
    fitting = [cost for cost in costs if free is None or cost.held + cost.unit <= free]
    return min(fitting, key=lambda cost: cost.operations, default=None)


def _fewer_probes(model: Model, request: Request) -> list[int]:
    """Return numbers of probes that would be less work than the request, the largest first."""
    return [k for k in _PROBES if k < (request.probes or model.d_input) and request.norm != "spectral"]


def _costs(model: Model, n: int, request: Request) -> list[Cost]:
    """Return what each engine that can do it would take."""
    d, depth = model.d_model, max(request.layers) + 1
    targets = n if request.targets is None else len(request.targets)
    product = engines.product_bytes(n, d, model.n_heads, model.dtype.itemsize)
    working = max(engines.working_bytes(model.device), product)
    basis = d if request.after else model.d_input
    directions = request.probes or basis
    vectors = 2 * model.dtype.itemsize * n * d
    one_pass = 3 * 2 * n * _block_parameters(model)
    forward = n * directions * depth * one_pass
    costs = [Cost("generic", forward, working, working, len(request.layers) * directions * vectors, n)]
    costs += [_sweep_cost(model, n, depth, directions)] if model.family.splits else []
    summed = request.norm == "sum"
    # Probes go over the targets' directions there: as many as the inputs have need not be all, and would not be exact.
    few = request.targets is not None and request.probes != basis and (request.probes or d) <= d
    if model.family.splits and (request.probes is None if summed else few):
        rows = 1 if summed else request.probes or d
        backward = targets * rows * sum(layer + 1 for layer in request.layers) * one_pass
        saved = depth * product  # of the way forward, for the way back
        costs.append(Cost("reverse", backward, working + saved, working + saved, rows * vectors, targets))
    answer = 4 * 4 * len(request.layers) * n * targets * (request.probes or 1)  # with what is made of it at the end
    times = _SPECTRAL if request.norm == "spectral" else 1.0
    return [
        cost._replace(operations=times * cost.operations, held=cost.held + answer, kept=cost.kept + answer)
        for cost in costs
    ]


def _sweep_cost(model: Model, n: int, depth: int, directions: int) -> Cost:
    d, outputs, values = model.d_model, model.n_heads * model.d_value, model.n_key_value_heads * model.d_value
    read = min(n * model.n_heads, values) + values
    pushed = n * n * directions * (d * (read + d + outputs) + 2 * n * outputs) * (0.5 if model.causal else 1.0)
    prepared = n * d * 2 * _block_parameters(model)
    layer = model.dtype.itemsize * n * (d * (d + outputs) + d * read + n * outputs)
    unit = model.dtype.itemsize * n * directions * (2 * d + outputs + read + n)
    held = 2 * layer + engines.working_bytes(model.device)
    return Cost("sweep", 2 * depth * (pushed + prepared), held, held + (depth - 1) * layer, unit, n)


def _block_parameters(model: Model) -> float:
    return sum(p.numel() for block in model.blocks for p in block.parameters() if p.ndim > 1) / model.n_layers


def _announce(model: Model, lengths: list[int], plans: list[Plan], request: Request) -> None:
    """Warn of a run that will take long, with the probes that would make it short."""
    operations = sum(one.cost.operations for one in plans)
    if operations < LONG_SECONDS * 1e9:  # any machine does that in time
        return
    rate = product_rate(model.device, model.dtype, request.precision)
    if operations / rate <= LONG_SECONDS:
        return

    def taking(probes: int) -> float:
        found = [_cheapest(_costs(model, n, replace(request, probes=probes))) for n in lengths]
        return sum(cost.operations for cost in found if cost is not None) / rate

    fewer = [k for k in _fewer_probes(model, request) if taking(k) < operations / rate]
    better = next((k for k in fewer if taking(k) <= LONG_SECONDS), fewer[-1] if fewer else None)
    advice = "" if better is None else f" With probes={better} it would take about {_duration(taking(better))}."
    how = "exactly" if request.probes is None else f"with probes={request.probes}"
    warnings.warn(
        f"token_attribution: {len(plans)} text(s) of {sum(lengths)} tokens, {how}, will take about "
        f"{_duration(operations / rate)} here.{advice}",
        CostWarning,
        stacklevel=3,
    )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
