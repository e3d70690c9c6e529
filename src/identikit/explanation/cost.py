"""The memory, and as far as it is known the time, that reading a text takes: estimated before a model is loaded."""

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from identikit.attribution.plan import cheapest_plan, expected_seconds
from identikit.attribution.request import AttributionOptions
from identikit.checks import whole_number
from identikit.errors import InputError
from identikit.models.load.load import DTYPES, checked_device
from identikit.models.load.size import Sizes, sizes_of
from identikit.models.machine import format_duration, free_bytes

_LOADING = 60 << 20  # what loading and running any model adds to the process on a CPU, as measured
_SOLVER = 105 << 20  # the compiled solver of intervals, as measured
_ROWS = 68  # maps, of all layers and heads, that intervals hold while all rows are solved at once, as measured
_PORTION = 330 << 20  # what rows that are solved at once hold at most, as measured
_ENDS = 9  # maps that intervals hold of all rows, as measured
_VECTORS = 40  # vectors per token and layer that a run and its captured attention hold, as measured
_MAPS = 5  # of the vocabulary's vectors in float64, that learned maps compare with, as measured
_GIB = 2**30


@dataclass(frozen=True)
class AnalysisCost:
    """The bytes that an analysis takes beside the model, and its seconds on this machine (None: not known before)."""

    name: str
    bytes: int
    seconds: float | None = None


@dataclass(frozen=True)
class Planned:
    """The bytes that a model and a text of `tokens` tokens take: weights by format, the process, and each analysis."""

    model: str
    tokens: int
    dtype: str
    device: str
    parameters: int
    stored: dict[str, int]
    weights: int
    process: int
    analyses: tuple[AnalysisCost, ...]
    free: dict[str, int]

    def peak(self, analysis: str) -> int:
        """Return the most bytes held at once in an analysis; on a CPU, of the whole process."""
        return self.process + self.weights + next(cost.bytes for cost in self.analyses if cost.name == analysis)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, with the peak of each analysis."""
        return asdict(self) | {"peak": {cost.name: self.peak(cost.name) for cost in self.analyses}}

    def words(self) -> str:
        """Return the plan as lines of text."""
        formats = ", ".join(f"{_size(size)} of {name}" for name, size in self.stored.items())
        lines = [
            f"{self.model}: {self.parameters / 1e6:,.1f} million parameters; on disk {formats}.",
            f"In {self.dtype} on {self.device} its weights take {_size(self.weights)}.",
            f"A text of {self.tokens} tokens, at its peak and with everything that is in memory then:",
        ]
        for cost in self.analyses:
            time = "" if cost.seconds is None else f", about {format_duration(cost.seconds)}"
            lines.append(f"  {cost.name:<18} {_size(self.peak(cost.name)):>10}{time}")
        largest = max(self.peak(cost.name) for cost in self.analyses)
        for device, size in self.free.items():
            verdict = "weights fit" if self.weights <= size else "too small"
            if largest <= size:
                verdict = "all of it fits"
            lines.append(f"{device} has {_size(size)} free: {verdict}.")
        if self.weights > max(self.free.values()):
            lines.append("The weights fit nowhere here as a whole: use --dtype bfloat16, or another machine.")
        return "\n".join(lines)


def planned(
    model: object = None, tokens: int = 128, *, device: str | None = None, dtype: str = "float32",
    revision: str | None = None,
) -> Planned:  # fmt: skip
    """Estimate costs from config.json and the headers of the weights; on a CPU, those of the whole process."""
    tokens = whole_number("tokens", tokens, least=1)
    number = DTYPES.get(str(dtype))
    if not isinstance(number, torch.dtype):
        raise InputError(f"dtype={dtype!r} cannot be planned: expected float32, float64, bfloat16 or float16.")
    where = checked_device(device)
    sizes = sizes_of(model, dtype=number, device=where, revision=revision)
    if sizes.limit is not None and tokens > sizes.limit:
        raise InputError(
            f"tokens={tokens} cannot be planned: {sizes.name} reads at most {sizes.limit} tokens. Pass a smaller "
            "number."
        )
    process = _LOADING + _resident() if where.type == "cpu" else 0
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
    return Planned(
        model=sizes.name,
        tokens=tokens,
        dtype=str(dtype),
        device=str(where),
        parameters=sizes.parameters,
        stored=sizes.stored,
        weights=sizes.weights,
        process=process,
        analyses=tuple(_analyses(sizes, tokens)),
        free={str(device): free_bytes(device) for device in devices},
    )


def _analyses(sizes: Sizes, n: int) -> list[AnalysisCost]:
    item = sizes.dtype.itemsize
    maps = sizes.n_layers * sizes.n_heads * n * n * 8  # in float64
    logits = 2 * n * sizes.vocabulary * item
    run = sizes.n_layers * n * sizes.d_model * item * _VECTORS // 4 + logits
    options = AttributionOptions().checked(sizes)
    exact = cheapest_plan(sizes, n, options)
    return [
        AnalysisCost("attention", run + maps),
        AnalysisCost("intervals", run + _SOLVER + min(_ROWS * maps, _PORTION + _ENDS * maps)),
        AnalysisCost("exact attribution", run + exact.peak, expected_seconds(sizes, [n], options)),
        AnalysisCost("learned maps", _MAPS * 8 * sizes.vocabulary * sizes.d_model),
    ]


def _resident() -> int:
    """Return the peak memory of this process, which any process that computes with identikit starts from."""
    with suppress(OSError, StopIteration):  # Linux; its getrusage may count the process that started this one
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    return 400 << 20


def _size(size: int) -> str:
    if size < 2**20:
        return f"{size / 2**10:.1f} KiB"
    return f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / 2**20:.1f} MiB"
