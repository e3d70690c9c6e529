"""How often the whole vocabulary tells a hidden vector's token, by layer and noise, and how long that takes.

Needs torch and transformers only: `run(Options(…))` returns rows.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from benchmarks.measure import Row
from benchmarks.shapes import made_up_llama
from identikit.errors import InputError
from identikit.models.load.load import load
from identikit.models.model import Model
from identikit.models.text_run import TextRun, prepare_texts
from identikit.progress import Progress, silent
from identikit.shapes import Tensor
from identikit.texts.data import sample_texts
from identikit.tokens.continuation import check_continues
from identikit.tokens.invert import NOISES, Inversion, InversionOptions

MADE_UP = "made-up:"
APPENDED = 10  # texts that are also inverted with each winner appended


@dataclass(frozen=True)
class Options:
    """What to measure.

    - `model`: a folder, a hub id, or `made-up:` and a shape of `bench.shapes`; `device`, `dtype`: where and in what
    - `texts`, `tokens`: how many texts, of the embedded samples and cut to this length; made-up models read random ids
    - `noises`: on the hidden vectors; `layers`: how many of a made-up model's layers to make, None for all
    """

    model: str | None = None
    device: str = "cpu"
    texts: int = 10
    tokens: int = 20
    noises: tuple[float, ...] = NOISES
    dtype: str | None = None
    layers: int | None = None


def run(options: Options, *, progress: Progress = silent) -> list[Row]:
    """Invert texts with the true prefix given, then up to ten of them with each winner appended."""
    model = _model(options)
    check_continues(model)
    texts = _texts(model, options)
    case = f"{model.name}, {str(model.dtype).removeprefix('torch.')}, {len(texts)} texts of {options.tokens} tokens"
    rows = []
    for prefix, some in (("given", texts), ("recovered", texts[:APPENDED])):
        asked = InversionOptions(prefix=prefix, noises=options.noises)
        rows += _measured(model, some, asked, f"{case}, prefix {prefix}", progress)
    return rows


def _model(options: Options) -> Model:
    if options.model is not None and options.model.startswith(MADE_UP):
        shape = options.model.removeprefix(MADE_UP)
        return made_up_llama(
            shape, dtype=getattr(torch, options.dtype or "bfloat16"), device=options.device, layers=options.layers
        )
    return load(options.model, device=options.device, dtype=options.dtype)


def _texts(model: Model, options: Options) -> list[TextRun]:
    """Return texts of just as many tokens as were asked for: samples, one after another, or random ids."""
    if options.model is not None and options.model.startswith(MADE_UP):
        generator, size = torch.Generator().manual_seed(0), len(model.tokenizer)
        ids = torch.randint(size, (options.texts, options.tokens), generator=generator)
        return prepare_texts(model, [tuple(row) for row in ids.tolist()])
    found = list(islice(_cut(model, options.tokens), options.texts))
    if len(found) < options.texts:
        raise InputError(
            f"Benchmarking inversion: the samples make only {len(found)} texts of {options.tokens} tokens, and "
            f"{options.texts} were asked for. Use fewer texts or tokens."
        )
    return prepare_texts(model, found)


def _cut(model: Model, tokens: int) -> Iterator[tuple[int, ...]]:
    """Yield the samples in pieces of this many tokens, each after the special tokens that a text starts with."""
    for text in sample_texts():
        for half in (text,) if isinstance(text, str) else text:
            (encoded,) = model.encode(half, truncate=True)
            start = next((place for place, added in enumerate(encoded.special) if not added), 0)
            first, rest = encoded.ids[:start], encoded.ids[start:]
            size = tokens - len(first)
            for place in range(0, len(rest) - size + 1, max(1, size)):
                yield (*first, *rest[place : place + size])


def _measured(model: Model, texts: list[TextRun], asked: InversionOptions, case: str, progress: Progress) -> list[Row]:
    layers, n = tuple(range(model.n_layers)), len(texts[0].tokens)
    inversion = Inversion.of(model, asked, progress, steps=len(texts) * n, depth=model.n_layers)
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    started, found, taken = time.perf_counter(), [], []
    for text in texts:
        found.append(inversion.arrays(inversion.sought(text, layers, tuple(range(n)))))
        taken.append(time.perf_counter())
    rows = list(_rates(found, asked, layers, case))
    rows.append(Row(case, "time per token", (taken[-1] - started) / (len(texts) * n), "s"))
    if cuda:
        rows.append(Row(case, "peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB"))
    return rows


def _rates(
    found: list[dict[str, Tensor]], asked: InversionOptions, layers: tuple[int, ...], case: str
) -> Iterator[Row]:
    """Yield the share recovered and the margins, for each noise over all layers and layer by layer."""
    whole = {name: torch.stack([one[name] for one in found], 1).double() for name in found[0]}
    by_noise = {name: array.unflatten(0, (len(layers), -1)) for name, array in whole.items()}  # layer noise text n
    readings: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
        "recovered": ("recovered", torch.mean),
        "smallest margin": ("margin", torch.min),
        "median margin": ("margin", torch.median),
        "largest own distance": ("own_distance", torch.max),
        "smallest runner-up distance": ("runner_up_distance", torch.min),
    }
    for place, noise in enumerate(asked.noises):
        for what, (name, reading) in readings.items():
            part = by_noise[name][:, place]
            yield Row(case, f"noise {noise:g}, all layers: {what}", float(reading(part)))
            for layer, own in zip(layers, part, strict=True):
                yield Row(case, f"noise {noise:g}, layer {layer}: {what}", float(reading(own)))
