"""How each text will be attributed: by the engine of least arithmetic that fits in memory, and what that takes.

Arithmetic is counted from sizes, in operations of a matrix product that would take as long.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from identikit.attribution import passes, sweep
from identikit.attribution.request import FISHER, AttributionOptions, Request, Tick, product_bytes, working_bytes
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


class _Factors(NamedTuple):
    """A sweep's time beside a product of as much arithmetic, as measured.

    `batch` is what its batch of passes has in flight, beside `product_bytes`.
    """

    preparing: float
    pushes: float
    batch: float


_FACTORS = {"cpu": _Factors(1.3, 1.0, 1.0)}
_GPU = _Factors(2.0, 1.2, 0.7)  # an H200, a Llama of 8 billion parameters in bfloat16


@dataclass(frozen=True)
class AttributionPlan:
    """How one text will be done, and what that takes: arithmetic, and bytes beside the model's own.

    - `engine`: "sweep", "generic" or "reverse"; `units`: its inputs, or for "reverse" its targets
    - `once`: operations done once; `prepared`: operations of each round
    - `held`: bytes held throughout
    - `working`: for a batch of passes through a block at most; a sweep's scratch memory takes its place afterwards
    - `tangent`: what each unit of a round holds; `unit`: what one in a chunk adds
    - `causal`: no token sees a later one, so tangents are held only of the tokens from a chunk's first one on
    - `chunk`, `together`: units in a chunk and in a round; see `sweep`
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
    chunk: int = 1
    together: int = 1

    @property
    def operations(self) -> float:
        """The arithmetic that it takes."""
        return self.once + math.ceil(self.units / self.together) * self.prepared

    @property
    def tangents(self) -> float:
        """The bytes of a round's tangents."""
        left_out = 0
        if self.causal and self.engine == "sweep":
            left_out = sum(place // self.chunk * self.chunk for place in range(self.together))
        return (self.together - left_out / self.units) * self.tangent

    @property
    def peak(self) -> int:
        """The bytes that are held at once at most."""
        in_flight = max if self.engine == "sweep" else min
        return int(self.held + self.tangents + in_flight(self.working, self.chunk * self.unit))

    def run(self, texts: Sequence[TextRun], options: Sequence[Request], tick: Tick) -> list[Tensor]:
        """Run the engine on texts; see `sweep` for what their options may differ in."""
        if self.engine == "sweep":
            return sweep.sweep(texts, options, chunk=self.chunk, together=self.together, tick=tick)
        engine = passes.generic if self.engine == "generic" else passes.reverse
        return [engine(text, asked, chunk=self.chunk, tick=tick) for text, asked in zip(texts, options, strict=True)]


def make_plan(model: Model | Sizes, n: int, options: Request) -> AttributionPlan:
    """Choose the engine of least arithmetic that fits in memory for a text of `n` tokens, or say what would fit."""
    free = _USABLE * float(free_bytes(model.device))
    if ways := _ways(model, n, options, free):
        return ways[0]
    what = "exact attribution" if options.exact else f"attribution with probes={options.probes}"
    advice = "Use a smaller model"
    for fewer in _with_fewer_probes(model, options):
        if _ways(model, n, fewer, free):
            advice = f"Use probes={fewer.probes}, an estimate with standard errors"
            break
    needed = min(each.peak for each in _engines(model, n, options))
    raise InputError(
        f"{what.capitalize()} of {n} tokens with {model.name} needs at least {needed / 2**30:.1f} GiB of memory, "
        f"and {free / 2**30:.1f} GiB can be used. {advice}, or a shorter text."
    )


def cheapest_plan(model: Model | Sizes, n: int, options: Request) -> AttributionPlan:
    """Return the way of least arithmetic for a text of `n` tokens, whether or not there is memory for it here."""
    return _ways(model, n, options)[0]


def expected_seconds(model: Model | Sizes, lengths: Sequence[int], options: Request) -> float:
    """Return about how long attributing texts of these lengths takes on this machine, if there is memory."""
    operations = sum(count * _ways(model, n, options)[0].operations for n, count in Counter(lengths).items())
    if operations < 1e10:  # any machine does that in about a second, so its rate is not measured
        return operations / 1e10
    return operations / product_rate(model.device, model.dtype, options.precision)


def cost_warning(model: Model, lengths: Sequence[int], options: Request) -> str:
    """Say how long texts of these lengths take here and how much memory, and what is much faster; "" if it is short."""
    peak = max(make_plan(model, n, options).peak for n in set(lengths))
    seconds = expected_seconds(model, lengths, options)
    limit = LONG_SECONDS.get(model.device.type, 10.0)
    if seconds <= limit:
        return ""
    faster = ""
    for fewer in _with_fewer_probes(model, options):  # the most that are not long, or else the fewest
        taken = expected_seconds(model, lengths, fewer)
        faster = f" With probes={fewer.probes} it takes {format_duration(taken)}." if taken < 0.7 * seconds else ""
        if taken <= limit:
            break
    memory = f"{peak / 2**30:.1f} GiB of memory"
    return f"Attribution takes about {format_duration(seconds)} and {memory} on this machine.{faster}"


def affordable_probes(model: Model | Sizes, n: int) -> int | str:
    """Return from how many directions a text of `n` tokens is attributed in some seconds: "exact", or at least 4.

    Sizes and the kind of device decide, and not how busy the machine is: the same text gives the same answer again.
    """
    exact = AttributionOptions().checked(model)
    for options in (exact, *_with_fewer_probes(model, exact)):
        if is_affordable(model, n, options):
            return options.probes
    return min(FEWEST_PROBES, model.d_input)


def is_affordable(model: Model | Sizes, n: int, options: Request) -> bool:
    """Tell whether a text of `n` tokens takes some seconds at most, by its sizes."""
    return _ways(model, n, options)[0].operations <= AFFORDABLE.get(model.device.type, 1e15)


def _with_fewer_probes(model: Model | Sizes, options: Request) -> list[Request]:
    """Return options that would be less work, the largest number of probes first."""
    if options.norm == "spectral":
        return []
    return [replace(options, probes=probes) for probes in _PROBES if probes < options.count(model.d_input)]


def _ways(model: Model | Sizes, n: int, options: Request, free: float = math.inf) -> list[AttributionPlan]:
    """Return how the engines that fit in `free` bytes do a text of `n` tokens, that of least arithmetic first."""
    device = model.device.type
    ways = []
    for whole in _engines(model, n, options):
        swept = whole.engine == "sweep"
        # Under a causal mask a chunk works on all tokens from its first one on: small chunks waste less.
        most = whole.units // 8 if whole.causal and whole.engine != "reverse" else whole.units
        # On a GPU, passes through whole blocks take a chunk in parts: only its tangents are held throughout.
        held = whole.tangent + (whole.unit if device == "cpu" or swept else 0)
        chunk = max(1, min(most, _CHUNK_BYTES.get(device, 1 << 33) // held))
        together = chunk
        if swept:
            rounds = int(_MORE_WORK * whole.once / whole.prepared) if device == "cpu" else 1
            together = math.ceil(whole.units / max(1, rounds))
        while together:
            way = replace(whole, chunk=min(chunk, together), together=together)
            if way.peak <= free:
                ways.append(way)
                break
            together //= 2
    return sorted(ways, key=lambda way: way.operations)


def side_by_side(
    model: Model, plans: Sequence[AttributionPlan], *, padded: bool
) -> list[tuple[list[int], AttributionPlan]]:
    """Put texts together that are prepared side by side; return each group's places among the plans, and its plan.

    They are short texts of like length that fit in a part of the memory together. On a CPU little is gained, and images
    and sounds, and texts with them, cannot be `padded`: each is a group.
    """
    if model.device.type == "cpu" or not padded:
        return [([place], alone) for place, alone in enumerate(plans)]
    room = _GROUP_SHARE * free_bytes(model.device)
    groups: list[list[int]] = []
    # The longest come first: memory that they leave is used again.
    for place in sorted(range(len(plans)), key=lambda place: -plans[place].units):
        members = [*groups[-1], place] if groups else []
        if members and _fit_together([plans[member] for member in members], room):
            groups[-1] = members
        else:
            groups.append([place])
    return [(group, _joined([plans[member] for member in group])) for group in groups]


def _fit_together(plans: Sequence[AttributionPlan], room: float) -> bool:
    lengths = [each.units for each in plans]
    if any(each.engine != "sweep" or each.together != each.units for each in plans):
        return False
    if max(lengths) > 1.2 * min(lengths) + 2 or sum(lengths) > _GROUP_TOKENS:
        return False
    return _joined(plans).peak <= room


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
        tangent=math.ceil(sum(each.tangents for each in plans) / units),
        causal=False,
        together=units,
    )


def _engines(model: Model | Sizes, n: int, options: Request) -> list[AttributionPlan]:
    """Return what each engine that can do it would take, one unit at a time."""
    blocks = [*model.blocks, *(model.encoder.blocks if isinstance(model, DecoderModel) else ())]
    sizes = sum(math.prod(shape) for block in blocks for shape in matrix_shapes(block))
    one_pass = 2 * n * sizes / model.n_layers
    basis = model.d_model if options.source == "after" else model.d_input
    plans = [_generic(model, n, options, basis, one_pass)]
    if model.family.splits:
        plans.append(_sweep(model, n, options, basis, one_pass))
        # Back go the directions of targets: as many as the inputs have need not be all there, and would not be exact.
        few = options.targets is not None and options.probes != basis and options.count(0) <= model.d_model
        few &= options.norm != FISHER  # its directions differ from target to target
        if options.exact if options.norm == "sum" else few:
            plans.append(_reverse(model, n, options, one_pass))
    targets = n if options.targets is None else len(options.targets)
    answer = 4 * 4 * len(options.layers) * n * targets * options.count(1)  # with what is made of it at the end
    if options.norm == FISHER:
        answer += 8 * targets * model.d_model**2  # the roots
    times = _SPECTRAL if options.norm == "spectral" else 1.0
    return [
        replace(each, once=times * each.once, prepared=times * each.prepared, held=each.held + answer) for each in plans
    ]


def _generic(model: Model | Sizes, n: int, options: Request, basis: int, one_pass: float) -> AttributionPlan:
    splits = model.family.splits
    directions = options.count(basis)
    tangents = directions * model.dtype.itemsize * n * model.d_model
    product = product_bytes(n, model.d_model, model.n_heads, model.dtype.itemsize)
    share = _CAUSAL_SHARE if splits and model.causal else 1.0
    return AttributionPlan(
        "generic",
        units=n,
        once=share * _PASSES * n * directions * (max(options.layers) + 1) * one_pass,
        held=tangents if splits else 0,
        working=max(working_bytes(model.device, whole_blocks=True), product),
        # Block by block, tangents are held once, and those of earlier tokens are left out. Else of all layers, twice.
        tangent=tangents if splits else 2 * len(options.layers) * tangents,
        unit=round(_WHOLE_BLOCK * directions * product),
        causal=model.causal,
    )


def _sweep(model: Model | Sizes, n: int, options: Request, basis: int, one_pass: float) -> AttributionPlan:
    d = model.d_model
    directions = options.count(basis)
    outputs = model.n_heads * model.d_value
    values = model.n_key_value_heads * model.d_value
    depth = max(options.layers) + 1
    folded = is_folding_cheaper(n, d, (model.n_heads, model.d_value), model.n_key_value_heads)
    read = (n * model.n_heads if folded else values) + values
    scores = 0 if folded else n
    factors = _FACTORS.get(model.device.type, _GPU)
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
        working=int(factors.batch * min(max(working_bytes(model.device), product), d * product)),
        tangent=size * n * directions * d,
        unit=size * n * directions * (d + outputs + read + scores),
        causal=model.causal,
    )


def _reverse(model: Model | Sizes, n: int, options: Request, one_pass: float) -> AttributionPlan:
    targets = n if options.targets is None else len(options.targets)
    rows = 1 if options.norm == "sum" else options.count(model.d_model)
    product = product_bytes(n, model.d_model, model.n_heads, model.dtype.itemsize)
    return AttributionPlan(
        "reverse",
        units=targets,
        once=_PASSES * targets * rows * sum(layer + 1 for layer in options.layers) * one_pass,
        held=(max(options.layers) + 1) * product,  # of the way forward, for the way back
        working=max(working_bytes(model.device, whole_blocks=True), product),
        tangent=rows * 2 * model.dtype.itemsize * n * model.d_model,
        unit=rows * product,
        causal=model.causal,
    )
