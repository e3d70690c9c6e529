"""What attribution is asked for, what it will take, and how a text will be done."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from identikit.attribution import passes, sweep
from identikit.attribution.request import Request, Tick, passing_bytes, product_bytes, working_bytes
from identikit.checks import known, random_seed, shortened, whole_number
from identikit.errors import InputError
from identikit.maths import jacobian
from identikit.maths.jacobian import folds
from identikit.models.machine import PRECISIONS, duration, free_bytes, product_rate
from identikit.models.model import Model
from identikit.models.reading import Reading
from identikit.results.axis import Index, chosen
from identikit.shapes import Tensor

SOURCES = ("before", "after")
LONG_SECONDS = 60.0
SAID_SECONDS = {"cpu": LONG_SECONDS}  # the cost is said beforehand from here on; elsewhere from 10 seconds on
_PROBES = (256, 128, 64, 32, 16, 8)  # with fewer, the standard errors are too rough to go by
_SPECTRAL = 2.5  # what largest singular values cost beside the Jacobians, as measured
_CHUNK_BYTES = {"cpu": 1 << 28}  # on a CPU larger chunks only leave the cache; elsewhere 8 GiB fill the machine
_USABLE = 0.8  # of the memory that is free
_GROUP_SHARE, _GROUP_TOKENS = 0.25, 1024  # of texts side by side: more starts no fewer operations


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


def _factors(model: Model) -> _Factors:
    return _FACTORS.get(model.device.type, _GPU)


@dataclass(frozen=True)
class Options:
    """How attribution is computed; see `token_attribution`."""

    probes: Any = "exact"
    norm: str = "frobenius"
    source: str = "before"
    precision: str = "full"
    seed: Any = 0

    def request(self, model: Model, layers: Index = None) -> Request:
        """Return what an engine is asked for; raises an InputError for what it cannot be asked."""
        known("norm", self.norm, tuple(jacobian.NORMS))
        known("source", self.source, SOURCES)
        known("precision", self.precision, PRECISIONS)
        after = self.source == "after"
        return Request(
            layers=chosen("layer", layers, model.n_layers),
            targets=None,
            norm=self.norm,
            probes=self._probes(model.d_model if after else model.d_input),
            seed=random_seed(self.seed),
            after=after,
            precision=self.precision,
        )

    def _probes(self, most: int) -> int | None:
        """Return how many random directions are asked for; None: exact."""
        if isinstance(self.probes, str) and self.probes == "exact":
            return None
        if isinstance(self.probes, str):
            raise InputError(
                f"probes={shortened(self.probes)} cannot be used: expected 'exact' or a number from 2 to {most}."
            )
        count = whole_number("probes", self.probes, least=2, most=most)
        if self.norm == "spectral":
            raise InputError(
                f"probes={count} with norm='spectral': the largest singular value cannot be estimated from a few "
                "directions. Use probes='exact', or norm='frobenius'."
            )
        return count


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
        """Whether it is said beforehand: if it will take more than a minute, or on a GPU more than ten seconds."""
        return self.seconds > SAID_SECONDS.get(self.device, 10.0)

    def words(self) -> str:
        """Say how long it takes here and how much memory, and what is much faster."""
        much = self.probes is not None and self.probes_seconds < 0.7 * self.seconds
        faster = f" With probes={self.probes} it takes {duration(self.probes_seconds)}." if much else ""
        cost = f"about {duration(self.seconds)} and {_gibibytes(self.peak)}"
        return f"Attribution takes {cost} of memory on this machine.{faster}"


def estimate(model: Model, lengths: Sequence[int], request: Request) -> Estimate:
    """Return about how long attributing texts of these lengths will take on this machine, and how much memory."""
    texts = Counter(lengths)
    ways = {n: plan(model, n, request) for n in texts}
    operations, peak = sum(texts[n] * way.operations for n, way in ways.items()), max(way.peak for way in ways.values())
    device = model.device.type
    if operations < 10.0 * 1e9:  # any machine does that in time
        return Estimate(operations / 1e9, peak, device)
    rate = product_rate(model.device, model.dtype, request.precision)
    seconds = operations / rate
    if seconds <= LONG_SECONDS:
        return Estimate(seconds, peak, device)

    def taking(probes: int) -> float:
        found = {n: _cheapest(model, n, replace(request, probes=probes)) for n in texts}
        return sum(texts[n] * way.operations for n, way in found.items() if way is not None) / rate

    fewer = [k for k in _fewer_probes(model, request) if taking(k) < seconds]
    better = next((k for k in fewer if taking(k) <= LONG_SECONDS), fewer[-1] if fewer else None)
    return Estimate(seconds, peak, device, better, 0.0 if better is None else taking(better))


def _gibibytes(size: int) -> str:
    if size < 2**27:
        return f"{max(1, size >> 20)} MiB"
    return f"{size / 2**30:.0f} GiB" if size >= 10 * 2**30 else f"{size / 2**30:.1f} GiB"


class Cost(NamedTuple):
    """What an engine takes for one text: arithmetic, and bytes beside the model's own.

    - `operations`: done once; `prepared`: done once per round, or once where derivatives are kept
    - `held`: bytes held throughout; `kept`: to keep every layer's derivative, 0 where there are none
    - `working`: for a batch of passes through a block at most; a sweep's scratch memory takes its place afterwards
    - `tangent`: what each of the `units` inputs (or targets) of a round holds; `unit`: what one in a chunk adds
    """

    engine: str
    operations: float
    prepared: float
    held: int
    kept: int
    working: int
    tangent: int
    unit: int
    units: int

    def peak(self, chunk: int, together: int, *, keep: bool, causal: bool) -> int:
        """Return the bytes that are held at once at most.

        Where no token sees a later one, tangents are held only of the tokens from a chunk's first one on.
        """
        inputs = together
        if causal and self.engine == "sweep":
            inputs = sum(self.units - place // chunk * chunk for place in range(together)) / self.units
        passing = (max if self.engine == "sweep" else min)(self.working, chunk * self.unit)
        return int(self.held + keep * self.kept + inputs * self.tangent + passing)


class Plan(NamedTuple):
    """How one text will be done: so many inputs together and in a chunk, and whether derivatives are kept; see `sweep`.

    `operations` and `peak` are what it takes: arithmetic, and bytes beside the model's own.
    """

    cost: Cost
    chunk: int
    together: int
    keep: bool
    operations: float
    peak: int

    def run(self, texts: Sequence[Reading], requests: Sequence[Request], tick: Tick) -> list[Tensor]:
        """Run the engine on texts; see `sweep` for what requests may differ in."""
        if self.cost.engine == "sweep":
            how = {"chunk": self.chunk, "together": self.together, "keep": self.keep}
            return sweep.sweep(texts, requests, **how, tick=tick)
        engine = passes.generic if self.cost.engine == "generic" else passes.reverse
        both = zip(texts, requests, strict=True)
        return [engine(text, request, chunk=self.chunk, tick=tick) for text, request in both]


def side_by_side(model: Model, plans: Sequence[Plan]) -> Iterator[tuple[list[int], Plan]]:
    """Put texts together that are prepared side by side, and yield each group's places among the plans, and its plan.

    They are short texts of like length that fit in a part of the memory together. On a CPU little is gained, and images
    and sounds cannot be padded: each is a group.
    """
    if model.device.type == "cpu" or model.modality != "text":
        yield from (([place], one) for place, one in enumerate(plans))
        return
    group: list[int] = []
    # The longest come first: memory that they leave is used again.
    for place in sorted(range(len(plans)), key=lambda place: -plans[place].cost.units):
        if group and not _fit_together(model, [plans[one] for one in (*group, place)]):
            yield group, _joined([plans[one] for one in group])
            group = []
        group.append(place)
    yield group, _joined([plans[one] for one in group])


def _fit_together(model: Model, plans: Sequence[Plan]) -> bool:
    lengths = [one.cost.units for one in plans]
    whole = all(one.cost.engine == "sweep" and one.together == one.cost.units and not one.keep for one in plans)
    if not whole or max(lengths) > 1.2 * min(lengths) + 2 or sum(lengths) > _GROUP_TOKENS:
        return False
    return _joined(plans).peak <= _GROUP_SHARE * free_bytes(model.device)


def _joined(plans: Sequence[Plan]) -> Plan:
    """Return the plan of texts that are done together."""
    if len(plans) == 1:
        return plans[0]
    longest = plans[0]
    passing = max(longest.cost.working, longest.chunk * longest.cost.unit)
    peak = sum(one.cost.held + one.cost.units * one.cost.tangent for one in plans) + passing
    together, operations = sum(one.together for one in plans), sum(one.operations for one in plans)
    return longest._replace(together=together, operations=operations, peak=peak)


def plan(model: Model, n: int, request: Request) -> Plan:
    """Choose the cheapest engine that fits in memory for a text of `n` tokens, or say what would fit."""
    free = int(_USABLE * free_bytes(model.device))
    way = _cheapest(model, n, request, free)
    if way is not None:
        return way
    what = "exact attribution" if request.probes is None else f"attribution with probes={request.probes}"
    fewer = (k for k in _fewer_probes(model, request) if _cheapest(model, n, replace(request, probes=k), free))
    probes = next(fewer, None)
    advice = "Use a smaller model" if probes is None else f"Use probes={probes}, an estimate with standard errors"
    least = min(cost.peak(1, 1, keep=False, causal=model.causal) for cost in _costs(model, n, request))
    raise InputError(
        f"{what.capitalize()} of {n} tokens with {model.name} needs at least {least / 2**30:.1f} GiB of memory, "
        f"and {free / 2**30:.1f} GiB can be used. {advice}, or a shorter text."
    )


def _cheapest(model: Model, n: int, request: Request, free: int | None = None) -> Plan | None:
    """Return the way of least arithmetic, and of least memory among equals; `free` None: whether it fits or not."""
    found = (_fitting(model, cost, free) for cost in _costs(model, n, request))
    return min((way for way in found if way is not None), key=lambda way: way.operations, default=None)


def _fitting(model: Model, cost: Cost, free: int | None) -> Plan | None:
    """Return how an engine fits in memory: preparing once if it can, with the largest chunks that are of use."""

    def way(chunk: int, together: int, keep: bool) -> Plan:
        rounds = 1 if keep else -(-cost.units // together)
        peak = cost.peak(chunk, together, keep=keep, causal=model.causal)
        return Plan(cost, chunk, together, keep, cost.operations + rounds * cost.prepared, peak)

    for chunk in _halving(_useful_chunk(model, cost)):
        once = [way(chunk, cost.units, False), way(chunk, chunk, True)] if cost.kept else [way(chunk, chunk, False)]
        fitting = [one for one in once if free is None or one.peak <= free]
        if fitting and model.device.type != "cpu":
            return fitting[0]  # while it pushes all inputs through a layer, the next is prepared
        if fitting:
            return min(fitting, key=lambda one: one.peak)
    several = (way(1, together, False) for together in _halving(cost.units))
    return next((one for one in several if free is None or one.peak <= free), None)


def _useful_chunk(model: Model, cost: Cost) -> int:
    # Under a causal mask a chunk works on all tokens from its first one on: small chunks waste less.
    most = cost.units // 8 if model.causal and cost.engine != "reverse" else cost.units
    # On a GPU, passes through whole blocks take a chunk in parts: only its tangents are held throughout.
    held = cost.tangent + (cost.unit if model.device.type == "cpu" or cost.engine == "sweep" else 0)
    return max(1, min(most, _CHUNK_BYTES.get(model.device.type, 1 << 33) // held))


def _halving(size: int) -> Iterator[int]:
    while size:
        yield size
        size //= 2


def _fewer_probes(model: Model, request: Request) -> list[int]:
    """Return numbers of probes that would be less work than the request, the largest first."""
    return [k for k in _PROBES if k < (request.probes or model.d_input) and request.norm != "spectral"]


def _costs(model: Model, n: int, request: Request) -> list[Cost]:
    """Return what each engine that can do it would take."""
    depth = max(request.layers) + 1
    targets = n if request.targets is None else len(request.targets)
    basis = model.d_model if request.after else model.d_input
    costs = [_forward_cost(model, n, request, request.probes or basis)]
    costs += [_sweep_cost(model, n, request, request.probes or basis)] if model.family.splits else []
    summed = request.norm == "sum"
    # Probes go over the targets' directions there: as many as the inputs have need not be all, and would not be exact.
    few = request.targets is not None and request.probes != basis and (request.probes or model.d_model) <= model.d_model
    if model.family.splits and (request.probes is None if summed else few):
        rows = 1 if summed else request.probes or model.d_model
        backward = targets * rows * sum(layer + 1 for layer in request.layers) * _pass_operations(model, n)
        product = product_bytes(n, model.d_model, model.n_heads, model.dtype.itemsize)
        saved = depth * product  # of the way forward, for the way back
        vectors = 2 * model.dtype.itemsize * n * model.d_model
        working = max(passing_bytes(model.device), product)
        costs.append(Cost("reverse", backward, 0.0, saved, 0, working, rows * vectors, rows * product, targets))
    answer = 4 * 4 * len(request.layers) * n * targets * (request.probes or 1)  # with what is made of it at the end
    times = _SPECTRAL if request.norm == "spectral" else 1.0
    return [
        cost._replace(operations=times * cost.operations, prepared=times * cost.prepared, held=cost.held + answer)
        for cost in costs
    ]


def _forward_cost(model: Model, n: int, request: Request, directions: int) -> Cost:
    vector, splits = model.dtype.itemsize * n * model.d_model, model.family.splits
    product = product_bytes(n, model.d_model, model.n_heads, model.dtype.itemsize)
    working = max(passing_bytes(model.device), product)
    # Block by block, tangents are held once, and those of earlier tokens are left out. Else of all layers, twice.
    tangent = directions * vector * (1 if splits else 2 * len(request.layers))
    share = 0.55 if splits and model.causal else 1.0
    operations = share * n * directions * (max(request.layers) + 1) * _pass_operations(model, n)
    start = directions * vector if splits else 0
    return Cost("generic", operations, 0.0, start, 0, working, tangent, directions * product, n)


def _sweep_cost(model: Model, n: int, request: Request, directions: int) -> Cost:
    d, outputs, values = model.d_model, model.n_heads * model.d_value, model.n_key_value_heads * model.d_value
    depth = max(request.layers) + 1
    folded = folds(n, d, (model.n_heads, model.d_value), model.n_key_value_heads)
    read = (n * model.n_heads if folded else values) + values
    scores = 0 if folded else n
    pushed = n * n * directions * (d * (read + d + outputs) + 2 * n * outputs) * (0.55 if model.causal else 1.0)
    prepared = depth * d * _pass_operations(model, n)
    own, size = model.dtype.itemsize, 2 if request.precision == "bfloat16" else model.dtype.itemsize
    derivative = n * (d * (d + outputs) + d * read + 2 * n * outputs)
    layer = size * derivative + (own * derivative if size != own else 0)  # converted as a whole
    held = layer + own * n * (d * directions + outputs * model.d_value) + own * d * d
    unit = size * n * directions * (d + outputs + read + scores)
    product = product_bytes(n, d, 0, own)
    working = int(_factors(model).preparing * min(max(working_bytes(model.device), product), d * product))
    pushed *= _factors(model).pushes
    kept = (depth - 1) * size * derivative
    return Cost("sweep", 2 * depth * pushed, prepared, held, kept, working, size * n * directions * d, unit, n)


def _pass_operations(model: Model, n: int) -> float:
    """Return what one pass of a tangent through a block takes, in operations of a product that would take as long."""
    sizes = (p.numel() for block in model.blocks for p in block.parameters() if p.ndim > 1)
    return _factors(model).passes * 2 * n * sum(sizes) / model.n_layers
