"""How each text will be attributed: the cheapest engine that fits in memory, and what that takes."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from identikit.attribution import passes, sweep
from identikit.attribution.request import Request, Tick, passing_bytes, product_bytes, working_bytes
from identikit.errors import InputError
from identikit.maths.jacobian import folds
from identikit.models.machine import duration, free_bytes, product_rate
from identikit.models.model import Model
from identikit.models.reading import Reading
from identikit.shapes import Tensor

LONG_SECONDS = 60.0
WARNED_SECONDS = {"cpu": LONG_SECONDS}  # from here on a warning gives the cost beforehand; on a GPU from 10 seconds on
_PROBES = (256, 128, 64, 32, 16, 8)  # with fewer, the standard errors are too rough to go by
_SPECTRAL = 2.5  # what largest singular values cost beside the Jacobians, as measured
_CAUSAL_SHARE = 0.55  # of the work that is left where no token sees a later one, as measured
_CHUNK_BYTES = {"cpu": 1 << 28}  # on a CPU larger chunks only leave the cache; elsewhere 8 GiB fill the machine
_USABLE = 0.8  # of the memory that is free
_GROUP_SHARE = 0.25  # of the free memory, for texts side by side
_GROUP_TOKENS = 1024  # of texts side by side: more starts no fewer operations


class _Factors(NamedTuple):
    """What was measured beside what is counted.

    - `passes`, `pushes`: time of a pass through a block, and of a sweep's products, beside a product of as much
      arithmetic; `preparing`: bytes that a sweep's batch of passes has in flight, beside `product_bytes`
    """

    passes: float
    pushes: float
    preparing: float


_FACTORS = {"cpu": _Factors(3.0, 1.0, 1.0)}
_GPU = _Factors(2.0, 1.2, 0.7)  # an H200, a Llama of 8 billion parameters in bfloat16


@dataclass(frozen=True)
class Plan:
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
    prepared: float
    held: int
    kept: int
    working: int
    tangent: int
    unit: int
    causal: bool
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

    def run(self, texts: Sequence[Reading], requests: Sequence[Request], tick: Tick) -> list[Tensor]:
        """Run the engine on texts; see `sweep` for what requests may differ in."""
        if self.engine == "sweep":
            return sweep.sweep(texts, requests, chunk=self.chunk, together=self.together, keep=self.keep, tick=tick)
        engine = passes.generic if self.engine == "generic" else passes.reverse
        pairs = zip(texts, requests, strict=True)
        return [engine(text, request, chunk=self.chunk, tick=tick) for text, request in pairs]


class Estimate(NamedTuple):
    """About how long attribution will take here and how much memory, and a faster way if it will take long.

    `probes` is a number of random directions that takes `probes_seconds`; None where it is short or nothing is faster.
    """

    seconds: float
    peak: int
    device: str
    probes: int | None = None
    probes_seconds: float = 0.0

    @property
    def long(self) -> bool:
        """Whether it will take more than a minute."""
        return self.seconds > LONG_SECONDS

    @property
    def said(self) -> bool:
        """Whether to warn beforehand: if it will take more than a minute, or on a GPU more than ten seconds."""
        return self.seconds > WARNED_SECONDS.get(self.device, 10.0)

    def words(self) -> str:
        """Say how long it takes here and how much memory, and what is much faster."""
        words = f"Attribution takes about {duration(self.seconds)} and {_size(self.peak)} of memory on this machine."
        if self.probes is not None and self.probes_seconds < 0.7 * self.seconds:
            words += f" With probes={self.probes} it takes {duration(self.probes_seconds)}."
        return words


def _size(size: int) -> str:
    if size < 2**27:
        return f"{max(1, size >> 20)} MiB"
    return f"{size / 2**30:.0f} GiB" if size >= 10 * 2**30 else f"{size / 2**30:.1f} GiB"


def estimate(model: Model, lengths: Sequence[int], request: Request) -> Estimate:
    """Return about how long attributing texts of these lengths will take on this machine, and how much memory."""
    counts = Counter(lengths)
    plans = {n: plan(model, n, request) for n in counts}
    operations = sum(count * plans[n].operations for n, count in counts.items())
    peak = max(each.peak for each in plans.values())
    device = model.device.type
    if operations < 10.0 * 1e9:  # any machine does that in time
        return Estimate(operations / 1e9, peak, device)
    rate = product_rate(model.device, model.dtype, request.precision)
    seconds = operations / rate
    if seconds <= LONG_SECONDS:
        return Estimate(seconds, peak, device)
    best = Estimate(seconds, peak, device)
    for probes in _fewer_probes(model, request):  # the most that take under a minute, or else the fewest
        fewer = replace(request, probes=probes)
        taken = sum(count * _cheapest(model, n, fewer)[0].operations for n, count in counts.items()) / rate
        if taken < seconds:
            best = Estimate(seconds, peak, device, probes, taken)
            if taken <= LONG_SECONDS:
                break
    return best


def plan(model: Model, n: int, request: Request) -> Plan:
    """Choose the cheapest engine that fits in memory for a text of `n` tokens, or say what would fit."""
    free = _USABLE * float(free_bytes(model.device))
    fitting = _cheapest(model, n, request, free)
    if fitting:
        return fitting[0]
    what = "exact attribution" if request.probes is None else f"attribution with probes={request.probes}"
    advice = "Use a smaller model"
    for probes in _fewer_probes(model, request):
        if _cheapest(model, n, replace(request, probes=probes), free):
            advice = f"Use probes={probes}, an estimate with standard errors"
            break
    least = min(each.peak for each in _engines(model, n, request))
    raise InputError(
        f"{what.capitalize()} of {n} tokens with {model.name} needs at least {least / 2**30:.1f} GiB of memory, "
        f"and {free / 2**30:.1f} GiB can be used. {advice}, or a shorter text."
    )


def _cheapest(model: Model, n: int, request: Request, free: float = math.inf) -> list[Plan]:
    """Return plans that fit in `free` bytes, one per engine, that of least arithmetic first."""
    fitting = [_fitting(each, model.device.type, free) for each in _engines(model, n, request)]
    return sorted((each for each in fitting if each is not None), key=lambda each: each.operations)


def _fitting(whole: Plan, device: str, free: float) -> Plan | None:
    """Return how an engine fits in memory: preparing once if it can, with the largest chunks that are of use."""
    for chunk in _halving(_useful_chunk(whole, device)):
        ways = [replace(whole, chunk=chunk, together=chunk, keep=whole.kept > 0)]
        if whole.kept:
            ways.insert(0, replace(whole, chunk=chunk, together=whole.units))
        fitting = [way for way in ways if way.peak <= free]
        if fitting and device != "cpu":
            return fitting[0]  # while it pushes all inputs through a layer, the next is prepared
        if fitting:
            return min(fitting, key=lambda way: way.peak)
    for together in _halving(whole.units):
        way = replace(whole, together=together)
        if way.peak <= free:
            return way
    return None


def _useful_chunk(whole: Plan, device: str) -> int:
    # Under a causal mask a chunk works on all tokens from its first one on: small chunks waste less.
    most = whole.units // 8 if whole.causal and whole.engine != "reverse" else whole.units
    # On a GPU, passes through whole blocks take a chunk in parts: only its tangents are held throughout.
    held = whole.tangent + (whole.unit if device == "cpu" or whole.engine == "sweep" else 0)
    return max(1, min(most, _CHUNK_BYTES.get(device, 1 << 33) // held))


def _halving(size: int) -> Iterator[int]:
    while size:
        yield size
        size //= 2


def _fewer_probes(model: Model, request: Request) -> list[int]:
    """Return numbers of probes that would be less work than the request, the largest first."""
    return [k for k in _PROBES if k < (request.probes or model.d_input) and request.norm != "spectral"]


def side_by_side(model: Model, plans: Sequence[Plan]) -> Iterator[tuple[list[int], Plan]]:
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


def _fit_together(model: Model, plans: Sequence[Plan]) -> bool:
    lengths = [each.units for each in plans]
    if any(each.engine != "sweep" or each.together != each.units or each.keep for each in plans):
        return False
    if max(lengths) > 1.2 * min(lengths) + 2 or sum(lengths) > _GROUP_TOKENS:
        return False
    return _joined(plans).peak <= _GROUP_SHARE * free_bytes(model.device)


def _joined(plans: Sequence[Plan]) -> Plan:
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


def _engines(model: Model, n: int, request: Request) -> list[Plan]:
    """Return what each engine that can do it would take, one unit at a time."""
    basis = model.d_model if request.after else model.d_input
    plans = [_generic(model, n, request, request.probes or basis)]
    if model.family.splits:
        plans.append(_sweep(model, n, request, request.probes or basis))
        if _reversible(model, request, basis):
            plans.append(_reverse(model, n, request))
    targets = n if request.targets is None else len(request.targets)
    answer = 4 * 4 * len(request.layers) * n * targets * (request.probes or 1)  # with what is made of it at the end
    times = _SPECTRAL if request.norm == "spectral" else 1.0
    return [
        replace(each, once=times * each.once, prepared=times * each.prepared, held=each.held + answer) for each in plans
    ]


def _generic(model: Model, n: int, request: Request, directions: int) -> Plan:
    splits = model.family.splits
    tangents = directions * model.dtype.itemsize * n * model.d_model
    product = product_bytes(n, model.d_model, model.n_heads, model.dtype.itemsize)
    share = _CAUSAL_SHARE if splits and model.causal else 1.0
    return Plan(
        "generic",
        units=n,
        once=share * n * directions * (max(request.layers) + 1) * _pass_operations(model, n),
        prepared=0.0,
        held=tangents if splits else 0,
        kept=0,
        working=max(passing_bytes(model.device), product),
        # Block by block, tangents are held once, and those of earlier tokens are left out. Else of all layers, twice.
        tangent=tangents if splits else 2 * len(request.layers) * tangents,
        unit=directions * product,
        causal=model.causal,
    )


def _sweep(model: Model, n: int, request: Request, directions: int) -> Plan:
    d = model.d_model
    outputs = model.n_heads * model.d_value
    values = model.n_key_value_heads * model.d_value
    depth = max(request.layers) + 1
    folded = folds(n, d, (model.n_heads, model.d_value), model.n_key_value_heads)
    read = (n * model.n_heads if folded else values) + values
    scores = 0 if folded else n
    factors = _FACTORS.get(model.device.type, _GPU)
    pushed = n * n * directions * (d * (read + d + outputs) + 2 * n * outputs)
    pushed *= factors.pushes * (_CAUSAL_SHARE if model.causal else 1.0)
    bytes_of_model = model.dtype.itemsize
    size = 2 if request.precision == "bfloat16" else bytes_of_model
    derivative = n * (d * (d + outputs) + d * read + 2 * n * outputs)
    layer = size * derivative + (bytes_of_model * derivative if size != bytes_of_model else 0)  # converted as a whole
    product = product_bytes(n, d, 0, bytes_of_model)
    return Plan(
        "sweep",
        units=n,
        once=2 * depth * pushed,
        prepared=depth * d * _pass_operations(model, n),
        held=layer + bytes_of_model * (n * (d * directions + outputs * model.d_value) + d * d),
        kept=(depth - 1) * size * derivative,
        working=int(factors.preparing * min(max(working_bytes(model.device), product), d * product)),
        tangent=size * n * directions * d,
        unit=size * n * directions * (d + outputs + read + scores),
        causal=model.causal,
    )


def _reversible(model: Model, request: Request, basis: int) -> bool:
    """Tell whether going backward answers the request, and may be less work than going forward."""
    if request.norm == "sum":
        return request.probes is None
    # Probes go over the targets' directions there: as many as the inputs have need not be all, and would not be exact.
    few = request.probes != basis and (request.probes or model.d_model) <= model.d_model
    return request.targets is not None and few


def _reverse(model: Model, n: int, request: Request) -> Plan:
    targets = n if request.targets is None else len(request.targets)
    rows = 1 if request.norm == "sum" else request.probes or model.d_model
    product = product_bytes(n, model.d_model, model.n_heads, model.dtype.itemsize)
    return Plan(
        "reverse",
        units=targets,
        once=targets * rows * sum(layer + 1 for layer in request.layers) * _pass_operations(model, n),
        prepared=0.0,
        held=(max(request.layers) + 1) * product,  # of the way forward, for the way back
        kept=0,
        working=max(passing_bytes(model.device), product),
        tangent=rows * 2 * model.dtype.itemsize * n * model.d_model,
        unit=rows * product,
        causal=model.causal,
    )


def _pass_operations(model: Model, n: int) -> float:
    """Return what one pass of a tangent through a block takes, in operations of a product that would take as long."""
    sizes = sum(p.numel() for block in model.blocks for p in block.parameters() if p.ndim > 1)
    return _FACTORS.get(model.device.type, _GPU).passes * 2 * n * sizes / model.n_layers
