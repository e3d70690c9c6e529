"""How each text will be attributed: by the engine of least arithmetic that fits in memory, and what that takes.

Arithmetic is counted from sizes alone, in operations of a matrix product that would take as long. So the same text
gives the same plan, and thereby the same bits, however busy the machine is; and `identikit plan` needs no weights.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from identikit.attribution import passes, sweep
from identikit.attribution.memory import product_bytes, working_bytes
from identikit.attribution.request import FISHER, AttributionOptions, Request, Tick
from identikit.errors import InputError
from identikit.maths.jacobian import is_folding_cheaper
from identikit.models.decoder import DecoderModel
from identikit.models.load.linear import matrix_shapes
from identikit.models.load.size import Sizes
from identikit.models.machine import format_duration, free_bytes, product_rate
from identikit.models.model import Model
from identikit.models.text_run import TextRun
from identikit.shapes import Tensor

LONG_SECONDS = {"cpu": 60.0}  # from here on a warning gives the cost beforehand; on a GPU from 10 seconds on
AFFORDABLE = {"cpu": 6e11}  # operations of some seconds on two cores; elsewhere 1e15, of some seconds on a GPU
FEWEST_PROBES = 4
_PROBES = (256, 128, 64, 32, 16, 8)  # with fewer, the standard errors are too rough to go by
_SPECTRAL = 2.5  # what largest singular values cost beside the Jacobians, as measured
_WHOLE_BLOCK = 0.7  # of a product's memory that a pass through a whole block holds at once, as measured
_CAUSAL_SHARE = 0.55  # of the work that is left where no token sees a later one, as measured
_PASSES = 2.0  # time of passes through whole blocks, beside a product of as much arithmetic, as measured
_CHUNK_BYTES = {"cpu": 1 << 28}  # on a CPU larger chunks only leave the cache; elsewhere 8 GiB fill the machine
_MORE_WORK = 1 / 8  # that a CPU may do to save memory: rounds that prepare the same derivatives again
_USABLE = 0.8  # of the memory that is free
_GROUP_SHARE = 0.25  # of the free memory, for texts side by side
_GROUP_TOKENS = 1024  # of texts side by side: more starts no fewer operations


class _SweepFactors(NamedTuple):
    """A sweep's time beside a product of as much arithmetic, as measured.

    `batch` is what its batch of passes has in flight, beside `product_bytes`.
    """

    preparing: float
    pushes: float
    batch: float


_CPU_FACTORS = _SweepFactors(1.3, 1.0, 1.0)
_GPU_FACTORS = _SweepFactors(2.0, 1.2, 0.7)  # an H200, a Llama of 8 billion parameters in bfloat16


@dataclass(frozen=True)
class AttributionPlan:
    """How one text will be attributed, and what that takes: arithmetic, and bytes beside the model's own.

    - `engine`: "sweep", "generic" or "reverse"; `units`: its inputs, or for "reverse" its targets
    - `operations_once`, `operations_per_round`
    - `fixed_bytes`: held throughout; `pass_bytes`: of a batch of passes through a block at most (a sweep's scratch
      memory takes its place afterwards)
    - `tangent_bytes`: what each unit of a round holds; `chunk_bytes`: what each unit of a chunk adds
    - `causal`: no token sees a later one, so tangents are held only of the tokens from a chunk's first one on
    - `chunk`, `round_size`: units in a chunk and in a round; see `sweep`
    """

    engine: str
    units: int
    operations_once: float
    fixed_bytes: int
    pass_bytes: int
    tangent_bytes: int
    chunk_bytes: int
    causal: bool
    operations_per_round: float = 0.0
    chunk: int = 1
    round_size: int = 1

    @property
    def operations(self) -> float:
        """The arithmetic that it takes."""
        return self.operations_once + math.ceil(self.units / self.round_size) * self.operations_per_round

    @property
    def round_bytes(self) -> float:
        """The bytes of a round's tangents."""
        left_out = 0
        if self.causal and self.engine == "sweep":
            left_out = sum(unit // self.chunk * self.chunk for unit in range(self.round_size))
        return (self.round_size - left_out / self.units) * self.tangent_bytes

    @property
    def peak(self) -> int:
        """The most bytes that are held at once."""
        in_flight = max if self.engine == "sweep" else min
        return int(self.fixed_bytes + self.round_bytes + in_flight(self.pass_bytes, self.chunk * self.chunk_bytes))

    def run(self, texts: Sequence[TextRun], requests: Sequence[Request], tick: Tick) -> list[Tensor]:
        """Run the engine on texts; see `sweep` for what their requests may differ in."""
        if self.engine == "sweep":
            return sweep.sweep(texts, requests, chunk=self.chunk, round_size=self.round_size, tick=tick)
        engine = passes.generic if self.engine == "generic" else passes.reverse
        return [engine(text, request, self.chunk, tick) for text, request in zip(texts, requests, strict=True)]


def make_plan(model: Model | Sizes, n: int, request: Request) -> AttributionPlan:
    """Choose the engine of least arithmetic that fits in memory for a text of `n` tokens, or say what would fit."""
    free = _USABLE * float(free_bytes(model.device))
    if plans := _plans(model, n, request, free):
        return plans[0]
    job = "exact attribution" if request.exact else f"attribution with probes={request.probes}"
    advice = "Use a smaller model"
    for cheaper in _with_fewer_probes(model, request):
        if _plans(model, n, cheaper, free):
            advice = f"Use probes={cheaper.probes}, an estimate with standard errors"
            break
    needed = min(engine.peak for engine in _engines(model, n, request))
    raise InputError(
        f"{job.capitalize()} of {n} tokens with {model.name} needs at least {needed / 2**30:.1f} GiB of memory, "
        f"and {free / 2**30:.1f} GiB can be used. {advice}, or a shorter text."
    )


def cheapest_plan(model: Model | Sizes, n: int, request: Request) -> AttributionPlan:
    """Return the plan of least arithmetic for a text of `n` tokens, whether or not there is memory for it here."""
    return _plans(model, n, request)[0]


def expected_seconds(model: Model | Sizes, lengths: Sequence[int], request: Request) -> float:
    """Return about how long attributing texts of these lengths takes on this machine, if there is memory."""
    operations = sum(count * cheapest_plan(model, n, request).operations for n, count in Counter(lengths).items())
    if operations < 1e10:  # any machine does that in about a second, so its rate is not measured
        return operations / 1e10
    return operations / product_rate(model.device, model.dtype, request.precision)


def cost_warning(model: Model, lengths: Sequence[int], request: Request) -> str:
    """Return a warning with the time and memory that texts of these lengths take, and what is faster; "" if short."""
    peak = max(make_plan(model, n, request).peak for n in set(lengths))
    seconds = expected_seconds(model, lengths, request)
    limit = LONG_SECONDS.get(model.device.type, 10.0)
    if seconds <= limit:
        return ""
    faster = ""
    for cheaper in _with_fewer_probes(model, request):  # the most that are not long, or else the fewest
        shorter = expected_seconds(model, lengths, cheaper)
        if shorter < 0.7 * seconds:
            faster = f" With probes={cheaper.probes} it takes {format_duration(shorter)}."
        if shorter <= limit:
            break
    memory = f"{peak / 2**30:.1f} GiB of memory"
    return f"Attribution takes about {format_duration(seconds)} and {memory} on this machine.{faster}"


def affordable_probes(model: Model | Sizes, n: int) -> int | str:
    """Return from how many directions a text of `n` tokens is attributed in some seconds: "exact", or at least 4.

    Sizes and the kind of device decide, and not how busy the machine is: the same text gives the same answer again.
    """
    exact = AttributionOptions().checked(model)
    for request in (exact, *_with_fewer_probes(model, exact)):
        if is_affordable(model, n, request):
            return request.probes
    return min(FEWEST_PROBES, model.d_input)


def is_affordable(model: Model | Sizes, n: int, request: Request) -> bool:
    """Return whether a text of `n` tokens takes some seconds at most, by its sizes."""
    return cheapest_plan(model, n, request).operations <= AFFORDABLE.get(model.device.type, 1e15)


def _with_fewer_probes(model: Model | Sizes, request: Request) -> list[Request]:
    """Return requests that would be less work, the largest number of probes first."""
    if request.norm == "spectral":
        return []
    return [replace(request, probes=probes) for probes in _PROBES if probes < request.count(model.d_input)]


def side_by_side(
    model: Model, plans: Sequence[AttributionPlan], *, padded: bool
) -> list[tuple[list[int], AttributionPlan]]:
    """Group texts that are prepared side by side; return each group's indices among the plans, and its plan.

    These are short texts of like length that fit in a share of the memory together. On a CPU little is gained, and
    images and sounds, and texts with them, cannot be `padded`: each is a group.
    """
    if model.device.type == "cpu" or not padded:
        return [([text], plan) for text, plan in enumerate(plans)]
    room = _GROUP_SHARE * free_bytes(model.device)
    groups: list[list[int]] = []
    # The longest come first: memory that they leave is used again.
    for text in sorted(range(len(plans)), key=lambda text: -plans[text].units):
        members = [*groups[-1], text] if groups else []
        if members and _fit_together([plans[member] for member in members], room):
            groups[-1] = members
        else:
            groups.append([text])
    return [(group, _joint_plan([plans[member] for member in group])) for group in groups]


def _fit_together(plans: Sequence[AttributionPlan], room: float) -> bool:
    if any(plan.engine != "sweep" or plan.round_size != plan.units for plan in plans):
        return False
    lengths = [plan.units for plan in plans]
    if max(lengths) > 1.2 * min(lengths) + 2 or sum(lengths) > _GROUP_TOKENS:
        return False
    return _joint_plan(plans).peak <= room


def _joint_plan(plans: Sequence[AttributionPlan]) -> AttributionPlan:
    """Return the plan of texts that are done together, the longest first; all their tangents are held."""
    if len(plans) == 1:
        return plans[0]
    units = sum(plan.units for plan in plans)
    return replace(
        plans[0],
        units=units,
        operations_once=sum(plan.operations_once for plan in plans),
        operations_per_round=sum(plan.operations_per_round for plan in plans),
        fixed_bytes=sum(plan.fixed_bytes for plan in plans),
        tangent_bytes=math.ceil(sum(plan.round_bytes for plan in plans) / units),
        causal=False,
        round_size=units,
    )


def _plans(model: Model | Sizes, n: int, request: Request, free: float = math.inf) -> list[AttributionPlan]:
    """Return how each engine that fits in `free` bytes does a text of `n` tokens, that of least arithmetic first."""
    device = model.device.type
    plans = []
    for engine in _engines(model, n, request):
        is_sweep = engine.engine == "sweep"
        # Under a causal mask a chunk works on all tokens from its first one on: small chunks waste less.
        longest = engine.units // 8 if engine.causal and engine.engine != "reverse" else engine.units
        # On a GPU, passes through whole blocks take a chunk in parts: only its tangents are held throughout.
        unit_bytes = engine.tangent_bytes + (engine.chunk_bytes if device == "cpu" or is_sweep else 0)
        chunk = max(1, min(longest, _CHUNK_BYTES.get(device, 1 << 33) // unit_bytes))
        round_size = chunk
        if is_sweep:
            rounds = int(_MORE_WORK * engine.operations_once / engine.operations_per_round) if device == "cpu" else 1
            round_size = math.ceil(engine.units / max(1, rounds))
        while round_size:
            plan = replace(engine, chunk=min(chunk, round_size), round_size=round_size)
            if plan.peak <= free:
                plans.append(plan)
                break
            round_size //= 2
    return sorted(plans, key=lambda plan: plan.operations)


def _engines(model: Model | Sizes, n: int, request: Request) -> list[AttributionPlan]:
    """Return what each engine that can do it would take, one unit at a time."""
    blocks = [*model.blocks, *(model.encoder.blocks if isinstance(model, DecoderModel) else ())]
    weights = sum(math.prod(shape) for block in blocks for shape in matrix_shapes(block))
    one_pass = 2 * n * weights / model.n_layers
    basis = model.d_model if request.source == "after" else model.d_input
    engines = [_generic(model, n, request, basis, one_pass)]
    if model.family.splits:
        engines.append(_sweep(model, n, request, basis, one_pass))
        # Back go the directions of targets: as many as the inputs have need not be all there, and would not be exact.
        reversible = request.targets is not None and request.probes != basis and request.count(0) <= model.d_model
        reversible &= request.norm != FISHER  # its directions differ from target to target
        if request.norm == "sum":  # a single direction, which is exact
            reversible = request.exact
        if reversible:
            engines.append(_reverse(model, n, request, one_pass))
    targets = n if request.targets is None else len(request.targets)
    answer = 4 * 4 * len(request.layers) * n * targets * request.count(1)  # with the copies made of it at the end
    if request.norm == FISHER:
        answer += 8 * targets * model.d_model**2  # the roots
    factor = _SPECTRAL if request.norm == "spectral" else 1.0
    return [
        replace(
            engine,
            operations_once=factor * engine.operations_once,
            operations_per_round=factor * engine.operations_per_round,
            fixed_bytes=engine.fixed_bytes + answer,
        )
        for engine in engines
    ]


def _generic(model: Model | Sizes, n: int, request: Request, basis: int, one_pass: float) -> AttributionPlan:
    splits = model.family.splits
    directions = request.count(basis)
    tangents = directions * model.dtype.itemsize * n * model.d_model
    product = product_bytes(n, model.d_model, model.n_heads, model.dtype.itemsize)
    share = _CAUSAL_SHARE if splits and model.causal else 1.0
    return AttributionPlan(
        "generic",
        units=n,
        operations_once=share * _PASSES * n * directions * (max(request.layers) + 1) * one_pass,
        fixed_bytes=tangents if splits else 0,
        pass_bytes=max(working_bytes(model.device, whole_blocks=True), product),
        # Block by block, tangents are held once, and those of earlier tokens are left out. Else of all layers, twice.
        tangent_bytes=tangents if splits else 2 * len(request.layers) * tangents,
        chunk_bytes=round(_WHOLE_BLOCK * directions * product),
        causal=model.causal,
    )


def _sweep(model: Model | Sizes, n: int, request: Request, basis: int, one_pass: float) -> AttributionPlan:
    d = model.d_model
    directions = request.count(basis)
    outputs = model.n_heads * model.d_value
    values = model.n_key_value_heads * model.d_value
    depth = max(request.layers) + 1
    folded = is_folding_cheaper(n, d, (model.n_heads, model.d_value), model.n_key_value_heads)
    read = (n * model.n_heads if folded else values) + values
    scores = 0 if folded else n
    factors = _CPU_FACTORS if model.device.type == "cpu" else _GPU_FACTORS
    pushed = n * n * directions * (d * (read + d + outputs) + 2 * n * outputs)
    model_itemsize = model.dtype.itemsize
    itemsize = 2 if request.precision == "bfloat16" else model_itemsize
    derivative = n * (d * (d + outputs) + d * read + 2 * n * outputs)
    layer_bytes = itemsize * derivative
    if itemsize != model_itemsize:
        layer_bytes += model_itemsize * derivative  # converted as a whole
    product = product_bytes(n, d, 0, model_itemsize)
    return AttributionPlan(
        "sweep",
        units=n,
        operations_once=2 * depth * factors.pushes * (_CAUSAL_SHARE if model.causal else 1.0) * pushed,
        operations_per_round=depth * d * factors.preparing * one_pass,
        fixed_bytes=layer_bytes + model_itemsize * (n * (d * directions + outputs * model.d_value) + d * d),
        pass_bytes=int(factors.batch * min(max(working_bytes(model.device), product), d * product)),
        tangent_bytes=itemsize * n * directions * d,
        chunk_bytes=itemsize * n * directions * (d + outputs + read + scores),
        causal=model.causal,
    )


def _reverse(model: Model | Sizes, n: int, request: Request, one_pass: float) -> AttributionPlan:
    targets = n if request.targets is None else len(request.targets)
    rows = 1 if request.norm == "sum" else request.count(model.d_model)
    product = product_bytes(n, model.d_model, model.n_heads, model.dtype.itemsize)
    return AttributionPlan(
        "reverse",
        units=targets,
        operations_once=_PASSES * targets * rows * sum(layer + 1 for layer in request.layers) * one_pass,
        fixed_bytes=(max(request.layers) + 1) * product,  # of the way forward, for the way back
        pass_bytes=max(working_bytes(model.device, whole_blocks=True), product),
        tangent_bytes=rows * 2 * model.dtype.itemsize * n * model.d_model,
        chunk_bytes=rows * product,
        causal=model.causal,
    )
