"""What attribution is asked for, what it will take, and how a text will be done."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from identikit.attribution import sweep as engines
from identikit.attribution.sweep import Request
from identikit.errors import InputError
from identikit.indexing import Index, chosen, known, whole_number
from identikit.machine import PRECISIONS, duration, free_bytes, product_rate
from identikit.maths import jacobian
from identikit.models.model import Model
from identikit.models.reading import Reading
from identikit.shapes import Tensor

SOURCES = ("before", "after")
LONG_SECONDS = 60.0
_PROBES = (256, 128, 64, 32, 16, 8)  # with fewer, the standard errors are too rough to go by
_SPECTRAL = 2.5  # what largest singular values cost beside the Jacobians, as measured
_CHUNK_BYTES = {"cpu": 1 << 28}  # on a CPU larger chunks only leave the cache


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
            seed=whole_number("seed", self.seed),
            after=after,
            precision=self.precision,
        )

    def _probes(self, most: int) -> int | None:
        """Return how many random directions are asked for; None: exact."""
        if isinstance(self.probes, str) and self.probes == "exact":
            return None
        if isinstance(self.probes, str):
            raise InputError(
                f"probes={self.probes!r:.60} cannot be used: expected 'exact' or a number from 2 to {most}."
            )
        count = whole_number("probes", self.probes, least=2, most=most)
        if self.norm == "spectral":
            raise InputError(
                f"probes={count} with norm='spectral': the largest singular value cannot be estimated from a few "
                "directions. Use probes='exact', or norm='frobenius'."
            )
        return count


class Estimate(NamedTuple):
    """About how long attribution will take here, and a faster way if it will take long.

    `probes` is a number of random directions that takes `probes_seconds`; None where it is short or nothing is faster.
    """

    seconds: float
    probes: int | None = None
    probes_seconds: float = 0.0

    @property
    def long(self) -> bool:
        """Whether it will take more than a minute."""
        return self.seconds > LONG_SECONDS

    def words(self) -> str:
        """Say how long it takes here, and what is much faster."""
        much = self.probes is not None and self.probes_seconds < 0.7 * self.seconds
        faster = f" With probes={self.probes} it takes {duration(self.probes_seconds)}." if much else ""
        return f"Attribution takes about {duration(self.seconds)} on this machine.{faster}"


def estimate(model: Model, lengths: Sequence[int], request: Request) -> Estimate:
    """Return about how long attributing texts of these lengths will take on this machine."""
    operations = sum(plan(model, n, request).cost.operations for n in lengths)
    if operations < LONG_SECONDS * 1e9:  # any machine does that in time
        return Estimate(operations / 1e9)
    rate = product_rate(model.device, model.dtype, request.precision)
    seconds = operations / rate
    if seconds <= LONG_SECONDS:
        return Estimate(seconds)

    def taking(probes: int) -> float:
        found = [_cheapest(_costs(model, n, replace(request, probes=probes))) for n in lengths]
        return sum(cost.operations for cost in found if cost is not None) / rate

    fewer = [k for k in _fewer_probes(model, request) if taking(k) < seconds]
    better = next((k for k in fewer if taking(k) <= LONG_SECONDS), fewer[-1] if fewer else None)
    return Estimate(seconds) if better is None else Estimate(seconds, better, taking(better))


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

    def run(self, reading: Reading, request: Request, tick: engines.Tick) -> Tensor:
        """Run the engine on a text."""
        if self.cost.engine == "sweep":
            return engines.sweep(reading, request, chunk=self.chunk, keep=self.keep, tick=tick)
        engine = engines.generic if self.cost.engine == "generic" else engines.reverse
        return engine(reading, request, chunk=self.chunk, tick=tick)


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
            f"{what.capitalize()} of {n} tokens with {model.name} needs at least {least / 2**30:.1f} GiB of memory, "
            f"and {free / 2**30:.1f} GiB can be used. {advice}, or a shorter text."
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
