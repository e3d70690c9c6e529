"""How each text will be attributed: by the engine of least arithmetic that fits in memory, and what that takes.

Arithmetic is counted from sizes, in operations of a matrix product that would take as long.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from identikit.attribution import passes, sweep
from identikit.attribution.request import AttributionOptions, Request, Tick, product_bytes, working_bytes
from identikit.errors import InputError
from identikit.maths.jacobian import folds
from identikit.models.machine import duration, free_bytes, product_rate
from identikit.models.model import Model
from identikit.models.reading import Reading
from identikit.shapes import Tensor

LONG_SECONDS = {"cpu": 60.0}  # from here on a warning gives the cost beforehand; on a GPU from 10 seconds on
AFFORDABLE = {"cpu": 6e11}  # operations of some seconds on two cores; elsewhere 1e15, of some seconds on a GPU
FEWEST_PROBES = 4
_PROBES = (256, 128, 64, 32, 16, 8)  # with fewer, the standard errors are too rough to go by
_SPECTRAL = 2.5  # what largest singular values cost beside the Jacobians, as measured
_WHOLE_BLOCK = 0.7  # of a product's memory that a pass through a whole block holds at once, as measured
_CAUSAL_SHARE = 0.55  # of the work that is left where no token sees a later one, as measured
_CHUNK_BYTES = {"cpu": 1 << 28}  # on a CPU larger chunks only leave the cache; elsewhere 8 GiB fill the machine
_USABLE = 0.8  # of the memory that is free
_GROUP_SHARE = 0.25  # of the free memory, for texts side by side
_GROUP_TOKENS = 1024  # of texts side by side: more starts no fewer operations


class _Factors(NamedTuple):
    """Time beside a product of as much arithmetic, as measured: of passes through whole blocks, and in a sweep.

    `batch` is what a sweep's batch of passes has in flight, beside `product_bytes`.
    """

    passes: float
    preparing: float
    pushes: float
    batch: float


_FACTORS = {"cpu": _Factors(2.0, 1.3, 1.0, 1.0)}
_GPU = _Factors(2.0, 2.0, 1.2, 0.7)  # an H200, a Llama of 8 billion parameters in bfloat16


@dataclass(frozen=True)
class AttributionPlan:
    """How one text will be done, and what that takes: arithmetic, and bytes beside the model's own.

    - `engine`: "sweep", "generic" or "reverse"; `units`: its inputs, or for "reverse" its targets
    - `once`: operations done once; `prepared`: operations of each round, or done once where derivatives are kept
    - `held`: bytes held throughout; `kept`: to keep every layer's derivative, 0 where there are none
    - `working`: for a batch of passes through a block at most; a sweep's scratch memory takes its place afterwards
    - `tangent`: what each unit of a round holds; `unit`: what one in a chunk adds
    - `causal`: no token sees a later one, so tangents are held only of the tokens from a chunk's first one on
    - `chunk`, `together`, `keep`: units in a chunk and in a round, and whether derivatives are kept; see `sweep`
    """

    engine: str
    units: int
    once: float
    held: int
    working: int
    tangent: int
    unit: int
    causal: bool
    prepared: float = 0.0
    kept: int = 0
    chunk: int = 1
    together: int = 1
    keep: bool = False

    @property
    def operations(self) -> float:
        """The arithmetic that it takes."""
        rounds = 1 if self.keep else math.ceil(self.units / self.together)
        return self.once + rounds * self.prepared

    @property
    def peak(self) -> int:
        """The bytes that are held at once at most."""
        tangents = self.together
        passing = min(self.working, self.chunk * self.unit)
        if self.engine == "sweep":
            passing = max(self.working, self.chunk * self.unit)
            if self.causal:
                left_out = sum(place // self.chunk * self.chunk for place in range(self.together))
                tangents -= left_out / self.units
        return int(self.held + self.keep * self.kept + tangents * self.tangent + passing)

    def run(self, texts: Sequence[Reading], options: Sequence[Request], tick: Tick) -> list[Tensor]:
        """Run the engine on texts; see `sweep` for what their options may differ in."""
        if self.engine == "sweep":
            return sweep.sweep(texts, options, chunk=self.chunk, together=self.together, keep=self.keep, tick=tick)
        engine = passes.generic if self.engine == "generic" else passes.reverse
        return [engine(text, asked, chunk=self.chunk, tick=tick) for text, asked in zip(texts, options, strict=True)]


def plan(model: Model, n: int, options: Request) -> AttributionPlan:
    """Choose the engine of least arithmetic that fits in memory for a text of `n` tokens, or say what would fit."""
    free = _USABLE * float(free_bytes(model.device))
    least = _least(model, n, options, free)
    if least is not None:
        return least
    what = "exact attribution" if options.exact else f"attribution with probes={options.probes}"
    advice = "Use a smaller model"
    for fewer in _with_fewer_probes(model, options):
        if _least(model, n, fewer, free):
            advice = f"Use probes={fewer.probes}, an estimate with standard errors"
            break
    needed = min(each.peak for each in _engines(model, n, options))
    raise InputError(
        f"{what.capitalize()} of {n} tokens with {model.name} needs at least {needed / 2**30:.1f} GiB of memory, "
        f"and {free / 2**30:.1f} GiB can be used. {advice}, or a shorter text."
    )


def expected_seconds(model: Model, lengths: Sequence[int], options: Request) -> float:
    """Return about how long attributing texts of these lengths takes on this machine, if there is memory."""
    operations = sum(count * _arithmetic(model, n, options) for n, count in Counter(lengths).items())
    if operations < 1e10:  # any machine does that in time
        return operations / 1e9
    return operations / product_rate(model.device, model.dtype, options.precision)


def warning_ahead(model: Model, lengths: Sequence[int], options: Request) -> str:
    """Say how long texts of these lengths take here and how much memory, and what is much faster; "" if it is short."""
    peak = max(plan(model, n, options).peak for n in set(lengths))
    seconds = expected_seconds(model, lengths, options)
    limit = LONG_SECONDS.get(model.device.type, 10.0)
    if seconds <= limit:
        return ""
    words = f"Attribution takes about {duration(seconds)} and {_size(peak)} of memory on this machine."
    faster = ""
    for fewer in _with_fewer_probes(model, options):  # the most that are not long, or else the fewest
        taken = expected_seconds(model, lengths, fewer)
        faster = f" With probes={fewer.probes} it takes {duration(taken)}." if taken < 0.7 * seconds else ""
        if taken <= limit:
            break
    return words + faster


def _size(size: int) -> str:
    if size < 2**27:
        return f"{max(1, size >> 20)} MiB"
    return f"{size / 2**30:.0f} GiB" if size >= 10 * 2**30 else f"{size / 2**30:.1f} GiB"


def affordable_probes(model: Model, n: int) -> int | str:
    """Return from how many directions a text of `n` tokens is attributed in some seconds: "exact", or at least 4.

    Sizes and the kind of device decide, and not how busy the machine is: the same text gives the same answer again.
    """
    exact = AttributionOptions().checked(model)
    for options in (exact, *_with_fewer_probes(model, exact)):
        if is_affordable(model, n, options):
            return options.probes
    return min(FEWEST_PROBES, model.d_input)


def is_affordable(model: Model, n: int, options: Request) -> bool:
    """Tell whether a text of `n` tokens takes some seconds at most, by its sizes."""
    return _arithmetic(model, n, options) <= AFFORDABLE.get(model.device.type, 1e15)


def _with_fewer_probes(model: Model, options: Request) -> list[Request]:
    """Return options that would be less work, the largest number of probes first."""
    if options.norm == "spectral":
        return []
    return [replace(options, probes=probes) for probes in _PROBES if probes < options.count(model.d_input)]


def _arithmetic(model: Model, n: int, options: Request) -> float:
    """Return the least operations that a text of `n` tokens takes, where memory is no matter."""
    least = _least(model, n, options, math.inf)
    assert least is not None
    return least.operations


def _least(model: Model, n: int, options: Request, free: float) -> AttributionPlan | None:
    """Return the plan of least arithmetic that fits in `free` bytes."""
    ways = [_fitting(engine, model.device.type, free) for engine in _engines(model, n, options)]
    return min((way for way in ways if way is not None), key=lambda way: way.operations, default=None)


def _fitting(whole: AttributionPlan, device: str, free: float) -> AttributionPlan | None:
    """Return how an engine fits in memory: preparing once if it can, with the largest chunks that are of use."""
    # Under a causal mask a chunk works on all tokens from its first one on: small chunks waste less.
    most = whole.units // 8 if whole.causal and whole.engine != "reverse" else whole.units
    # On a GPU, passes through whole blocks take a chunk in parts: only its tangents are held throughout.
    held = whole.tangent + (whole.unit if device == "cpu" or whole.engine == "sweep" else 0)
    chunk = max(1, min(most, _CHUNK_BYTES.get(device, 1 << 33) // held))
    while chunk:
        ways = [replace(whole, chunk=chunk, together=chunk, keep=whole.kept > 0)]
        if whole.kept:
            ways.insert(0, replace(whole, chunk=chunk, together=whole.units))
        fitting = [way for way in ways if way.peak <= free]
        if fitting:  # on a GPU, the next layer is prepared while all inputs are pushed through one
            return min(fitting, key=lambda way: way.peak) if device == "cpu" else fitting[0]
        chunk //= 2
    together = whole.units
    while together:
        way = replace(whole, together=together)
        if way.peak <= free:
            return way
        together //= 2
    return None


def side_by_side(model: Model, plans: Sequence[AttributionPlan]) -> Iterator[tuple[list[int], AttributionPlan]]:
    """Put texts together that are prepared side by side, and yield each group's places among the plans, and its plan.

    They are short texts of like length that fit in a part of the memory together. On a CPU little is gained, and images
    and sounds cannot be padded: each is a group.
    """
    if model.device.type == "cpu" or model.modality != "text":
        for place, alone in enumerate(plans):
            yield [place], alone
        return
    group: list[int] = []
    # The longest come first: memory that they leave is used again.
    for place in sorted(range(len(plans)), key=lambda place: -plans[place].units):
        if group and not _fit_together(model, [plans[member] for member in (*group, place)]):
            yield group, _joined([plans[member] for member in group])
            group = []
        group.append(place)
    yield group, _joined([plans[member] for member in group])


def _fit_together(model: Model, plans: Sequence[AttributionPlan]) -> bool:
    lengths = [each.units for each in plans]
    if any(each.engine != "sweep" or each.together != each.units or each.keep for each in plans):
        return False
    if max(lengths) > 1.2 * min(lengths) + 2 or sum(lengths) > _GROUP_TOKENS:
        return False
    return _joined(plans).peak <= _GROUP_SHARE * free_bytes(model.device)


def _joined(plans: Sequence[AttributionPlan]) -> AttributionPlan:
    """Return the plan of texts that are done together, the longest first; all their tangents are held."""
    if len(plans) == 1:
        return plans[0]
    units = sum(each.units for each in plans)
    return replace(
        plans[0],
        units=units,
        once=sum(each.once for each in plans),
        prepared=sum(each.prepared for each in plans),
        held=sum(each.held for each in plans),
        tangent=math.ceil(sum(each.units * each.tangent for each in plans) / units),
        causal=False,
        together=units,
    )


def _engines(model: Model, n: int, options: Request) -> list[AttributionPlan]:
    """Return what each engine that can do it would take, one unit at a time."""
    sizes = sum(p.numel() for block in model.blocks for p in block.parameters() if p.ndim > 1)
    one_pass = 2 * n * sizes / model.n_layers
    basis = model.d_model if options.source == "after" else model.d_input
    plans = [_generic(model, n, options, basis, one_pass)]
    if model.family.splits:
        plans.append(_sweep(model, n, options, basis, one_pass))
        # Back go the directions of targets: as many as the inputs have need not be all there, and would not be exact.
        few = options.targets is not None and options.probes != basis and options.count(0) <= model.d_model
        if options.exact if options.norm == "sum" else few:
            plans.append(_reverse(model, n, options, one_pass))
    targets = n if options.targets is None else len(options.targets)
    answer = 4 * 4 * len(options.layers) * n * targets * options.count(1)  # with what is made of it at the end
    times = _SPECTRAL if options.norm == "spectral" else 1.0
    return [
        replace(each, once=times * each.once, prepared=times * each.prepared, held=each.held + answer) for each in plans
    ]


def _generic(model: Model, n: int, options: Request, basis: int, one_pass: float) -> AttributionPlan:
    splits = model.family.splits
    directions = options.count(basis)
    tangents = directions * model.dtype.itemsize * n * model.d_model
    product = product_bytes(n, model.d_model, model.n_heads, model.dtype.itemsize)
    share = _CAUSAL_SHARE if splits and model.causal else 1.0
    passes = n * directions * (max(options.layers) + 1)
    return AttributionPlan(
        "generic",
        units=n,
        once=share * _factors(model).passes * passes * one_pass,
        held=tangents if splits else 0,
        working=max(working_bytes(model.device, whole_blocks=True), product),
        # Block by block, tangents are held once, and those of earlier tokens are left out. Else of all layers, twice.
        tangent=tangents if splits else 2 * len(options.layers) * tangents,
        unit=round(_WHOLE_BLOCK * directions * product),
        causal=model.causal,
    )


def _sweep(model: Model, n: int, options: Request, basis: int, one_pass: float) -> AttributionPlan:
    d = model.d_model
    directions = options.count(basis)
    outputs = model.n_heads * model.d_value
    values = model.n_key_value_heads * model.d_value
    depth = max(options.layers) + 1
    folded = folds(n, d, (model.n_heads, model.d_value), model.n_key_value_heads)
    read = (n * model.n_heads if folded else values) + values
    scores = 0 if folded else n
    factors = _factors(model)
    pushed = n * n * directions * (d * (read + d + outputs) + 2 * n * outputs)
    bytes_of_model = model.dtype.itemsize
    size = 2 if options.precision == "bfloat16" else bytes_of_model
    derivative = n * (d * (d + outputs) + d * read + 2 * n * outputs)
    layer = size * derivative + (bytes_of_model * derivative if size != bytes_of_model else 0)  # converted as a whole
    product = product_bytes(n, d, 0, bytes_of_model)
    return AttributionPlan(
        "sweep",
        units=n,
        once=2 * depth * factors.pushes * (_CAUSAL_SHARE if model.causal else 1.0) * pushed,
        prepared=depth * d * factors.preparing * one_pass,
        held=layer + bytes_of_model * (n * (d * directions + outputs * model.d_value) + d * d),
        kept=(depth - 1) * size * derivative,
        working=int(factors.batch * min(max(working_bytes(model.device), product), d * product)),
        tangent=size * n * directions * d,
        unit=size * n * directions * (d + outputs + read + scores),
        causal=model.causal,
    )


def _reverse(model: Model, n: int, options: Request, one_pass: float) -> AttributionPlan:
    targets = n if options.targets is None else len(options.targets)
    rows = 1 if options.norm == "sum" else options.count(model.d_model)
    product = product_bytes(n, model.d_model, model.n_heads, model.dtype.itemsize)
    passes = targets * rows * sum(layer + 1 for layer in options.layers)
    return AttributionPlan(
        "reverse",
        units=targets,
        once=_factors(model).passes * passes * one_pass,
        held=(max(options.layers) + 1) * product,  # of the way forward, for the way back
        working=max(working_bytes(model.device, whole_blocks=True), product),
        tangent=rows * 2 * model.dtype.itemsize * n * model.d_model,
        unit=rows * product,
        causal=model.causal,
    )


def _factors(model: Model) -> _Factors:
    return _FACTORS.get(model.device.type, _GPU)
