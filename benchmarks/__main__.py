"""The benchmarks: `python -m benchmarks NAME`; `make bench` runs those that a CPU can."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from identikit.cli import option
from identikit.cli.endings import run as run_command
from identikit.errors import InputError

bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure speed and memory, as ratios taken side by side in one run.",
)

ShapeOption = Annotated[
    str | None,
    typer.Option(
        "--shape",
        help="Measure an LLM of this shape with random weights instead: 8b, 1b, gemma-2b, smollm2-135m or tiny.",
    ),
]
BenchDeviceOption = Annotated[str, typer.Option("--device", help="Where to compute: cpu or cuda.")]
RepeatsOption = Annotated[
    int, typer.Option("--repeats", min=1, help="How often to time everything; the best time counts.")
]


@bench.command("attention")
def bench_attention(
    tokens: Annotated[
        list[int] | None, typer.Option("--tokens", min=2, help="A text length; repeat for more. Default: 128 and 512.")
    ] = None,
    memory_tokens: Annotated[
        int, typer.Option("--memory-tokens", min=128, help="The text length to measure memory with.")
    ] = 8192,
    shape: ShapeOption = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="The LLM's number format: bfloat16, float16 or float32.")
    ] = "bfloat16",
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, help="How many of the LLM's layers to make. Default: all.")
    ] = None,
    device: BenchDeviceOption = "cpu",
    repeats: RepeatsOption = 3,
    as_json: option.Json = False,
) -> None:
    """Time effective attention, and measure its memory.

    BERT-base shapes on a CPU, compared with a forward pass and with the SVD that defines effective attention. With
    --shape, an LLM with made-up weights, and made-up layers compared with rows solved one by one.
    """
    from benchmarks.attention import Llm, run, run_llm

    if shape is not None:
        options = Llm(shape, tuple(tokens or (512, 2048)), dtype, device, layers, repeats)
        _measure("attention", partial(run_llm, options), as_json, device)
        return
    lengths = tuple(tokens or (128, 512))
    _measure("attention", partial(run, lengths, memory_tokens=memory_tokens, repeats=repeats), as_json)


@bench.command("intervals")
def bench_intervals(
    tokens: Annotated[
        list[int] | None, typer.Option("--tokens", min=2, help="A text length; repeat for more. Default: 64 and 128.")
    ] = None,
    model: option.Model = None,
    device: BenchDeviceOption = "cpu",
    repeats: RepeatsOption = 3,
    as_json: option.Json = False,
) -> None:
    """Time intervals.

    Three rows, compared with one linear program of scipy per end; then every edge of texts, exact and certified,
    compared with linear programs row by row.
    """
    from benchmarks.intervals import Options, run

    options = Options(tokens=tuple(tokens or (64, 128)), model=model, device=device, repeats=repeats)
    _measure("intervals", partial(run, options), as_json, device)


@bench.command("attribution")
def bench_attribution(
    device: BenchDeviceOption = "cpu",
    model: option.Model = None,
    data: Annotated[str | None, typer.Option("--data", help="Time all texts of a file or dataset instead.")] = None,
    data_dir: option.DataDir = None,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            help="Measure a model of this shape with random weights instead: minilm, bert-base, or of LLMs 8b, 1b, "
            "gemma-2b, smollm2-135m or tiny.",
        ),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option("--tokens", min=2, help="With --shape, a text length; repeat for more. Default: 32 and 16."),
    ] = None,
    probes: Annotated[
        int | None,
        typer.Option(
            "--probes", min=2, help="With an LLM's --shape, estimate from N random directions. Default: exact."
        ),
    ] = None,
    repeats: RepeatsOption = 3,
    as_json: option.Json = False,
) -> None:
    """Time attribution.

    On a CPU, a model on 24 tokens, compared with vmap(jvp) and with backward passes. On a GPU, the shape bert-base
    (or minilm), compared with the GPU's matrix rate. With an LLM's --shape, time and memory as planned and as measured.
    """
    from benchmarks.attribution import BERTS, Options, run

    if shape is None and tokens:
        raise InputError("Timing attribution: --tokens is for made-up models. Give --shape as well, or leave it out.")
    if probes is not None and (shape is None or shape in BERTS):
        raise InputError("Timing attribution: --probes is for made-up LLMs. Give the --shape of one, or leave it out.")
    if shape is not None and (model is not None or data is not None):
        raise InputError("Timing attribution: --shape makes up a model and its texts. Leave out --model and --data.")
    of_shape = {"shape": shape, "probes": probes, "tokens": tuple(tokens or (32, 16))} if shape else {}
    options = Options(device, model, data, data_dir, repeats=repeats, **of_shape)
    _measure("attribution", partial(run, options), as_json, device)


@bench.command("tokens")
def bench_tokens(
    parts: Annotated[
        list[str] | None,
        typer.Option("--part", help="together, ridge or grid, by default all three; or inversion."),
    ] = None,
    states: Annotated[
        str | None,
        typer.Option("--states", help="A safetensors file of hidden states. Default: those of the sample texts."),
    ] = None,
    model: option.Model = None,
    device: BenchDeviceOption = "cpu",
    tf32: Annotated[bool, typer.Option("--tf32", help="Allow TF32 products on a GPU.")] = False,
    folds: Annotated[int, typer.Option("--folds", min=1, max=10, help="How many of the ten folds to run.")] = 10,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="How many epochs 'together' trains for.")] = 3,
    maps: Annotated[
        list[str] | None, typer.Option("--map", help="A map of 'grid'; repeat for more. Default: linear.")
    ] = None,
    distances: Annotated[
        list[str] | None, typer.Option("--distance", help="A distance of 'grid'; repeat for both. Default: cosine.")
    ] = None,
    texts: Annotated[int, typer.Option("--texts", min=1, help="How many texts 'inversion' inverts.")] = 10,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="How many tokens each of these has.")] = 20,
    noises: Annotated[
        list[float] | None, typer.Option("--noise", min=0.0, help="A noise of 'inversion'; repeat for several.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="The number format of 'inversion'. Default: float32; made-up: bfloat16."),
    ] = None,
    as_json: option.Json = False,
) -> None:
    """Time the training of maps, or inversion.

    Linear maps trained together, compared with one after another; ridge for all folds; a full grid of maps.
    With `--part inversion`: how often tokens of a causal model are recovered by trying the whole vocabulary, by layer
    and noise, and how long it takes. `--model` may also be made-up:8b, a model of that shape with random weights.
    """
    from benchmarks import inversion
    from benchmarks.tokens import INVERSION, Options, run

    if parts == [INVERSION]:
        asked = inversion.Options(model, device, texts, tokens, tuple(noises or inversion.NOISES), dtype)
        _measure("inversion", partial(inversion.run, asked), as_json, device)
        return
    given = {"parts": parts, "maps": maps, "distances": distances}
    chosen = {name: tuple(value) for name, value in given.items() if value}
    options = Options(states, model, device, tf32, folds=folds, epochs=epochs, **chosen)
    _measure("tokens", partial(run, options), as_json, device)


@bench.command("runs")
def bench_runs(
    parts: Annotated[list[str] | None, typer.Option("--part", help="texts or engines, by default both.")] = None,
    counts: Annotated[
        list[int] | None,
        typer.Option("--texts", min=1, help="A number of texts; repeat for more. Default: 100, 200, 500, 1000, 2000."),
    ] = None,
    commands: Annotated[
        list[str] | None, typer.Option("--command", help="attention or attribution, by default both.")
    ] = None,
    engines: Annotated[
        list[str] | None, typer.Option("--engine", help="local, processes or ray, by default all three.")
    ] = None,
    data: Annotated[str | None, typer.Option("--data", help="A file or dataset. Default: the embedded texts.")] = None,
    data_dir: option.DataDir = None,
    model: option.Model = None,
    probes: Annotated[int, typer.Option("--probes", min=1, help="Random directions of attribution.")] = 2,
    as_json: option.Json = False,
) -> None:
    """Measure what a run costs beside its numbers.

    Time per text and memory with more and more texts; what engines add to each task, and how they scale.
    """
    from benchmarks.runs import Options, run

    given = {"parts": parts, "counts": counts, "commands": commands, "engines": engines}
    chosen: dict[str, Any] = {name: tuple(value) for name, value in given.items() if value}
    _measure("runs", partial(run, Options(model, data, data_dir, probes=probes, **chosen)), as_json)


@bench.command("sampled")
def bench_sampled(
    model: option.Model = None,
    data: Annotated[str | None, typer.Option("--data", help="A file or dataset. Default: the embedded texts.")] = None,
    data_dir: option.DataDir = None,
    texts: Annotated[int, typer.Option("--texts", min=1, help="How many texts: the longest that fit.")] = 10,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="How many tokens a text has at most.")] = 45,
    draws: Annotated[int, typer.Option("--draws", min=1, help="How often rows are drawn from each text.")] = 200,
    shares: Annotated[
        list[float] | None,
        typer.Option("--share", min=0.0, max=1.0, help="Of the free rows; repeat for more. Default: 0.05 and 0.25."),
    ] = None,
    as_json: option.Json = False,
) -> None:
    """Count how often sampled numbers hold the truth.

    All rows of each text are bounded; then rows are drawn from these again and again, and what verdict and page say of
    them is compared with what is true.
    """
    from benchmarks.sampled import SHARES, Options, run

    asked = Options(model, data, data_dir, texts, tokens, draws, tuple(shares or SHARES))
    _measure("sampled", partial(run, asked), as_json)


@bench.command("readings")
def bench_readings(
    parts: Annotated[
        list[str] | None, typer.Option("--part", help="rollout, roles, explain or evaluate, by default all.")
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option("--tokens", min=4, help="A text length of 'rollout'. Default: 64 and 128.")
    ] = None,
    repeated: Annotated[
        int, typer.Option("--repeated", min=2, help="How many random tokens 'roles' repeats once.")
    ] = 150,
    scores: Annotated[
        list[str] | None, typer.Option("--score", help="A score of 'roles'; repeat for more. Default: all together.")
    ] = None,
    model: option.Model = None,
    device: BenchDeviceOption = "cpu",
    as_json: option.Json = False,
) -> None:
    """Time what people read from attention: rollout, roles of heads, explain with measures, tests of explanations.

    Processor time, which other work on the machine hardly changes, stands beside the time on the clock.
    """
    from benchmarks.readings import PARTS, ReadingOptions, run
    from identikit.checks import known_names

    chosen = tuple(PARTS) if parts is None else known_names("--part", parts, tuple(PARTS))
    options = ReadingOptions(
        chosen, model, device, tuple(tokens or (64, 128)), repeated, None if scores is None else tuple(scores)
    )
    _measure("readings", partial(run, options), as_json, device)


@bench.command("threads")
def bench_threads(
    widths: Annotated[
        list[int] | None, typer.Option("--width", min=1, help="A matrix's width; repeat for more. Default: 64 and 384.")
    ] = None,
    count: Annotated[int, typer.Option("--count", min=1, help="How many matrices to decompose.")] = 6,
    busy: Annotated[
        list[int] | None,
        typer.Option("--busy", min=0, help="A number of busy processes; repeat for more. Default: 0 and 1."),
    ] = None,
    repeats: RepeatsOption = 3,
    as_json: option.Json = False,
) -> None:
    """Time decompositions with all threads on one matrix, and with one thread on each; alone and beside busy processes.

    With all threads, a single one beside a busy process may take half a minute.
    """
    from benchmarks.threads import ThreadsOptions, run

    options = ThreadsOptions(tuple(widths or (64, 384)), count, tuple(busy or (0, 1)), repeats)
    _measure("threads", partial(run, options), as_json)


@bench.command("page")
def bench_page(
    lengths: Annotated[
        list[int] | None,
        typer.Option("--tokens", min=4, help="How long a text is; repeat for more. Default: 64, 128, 512."),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="About how long to bound rows.")] = 20.0,
    model: option.Model = None,
    as_json: option.Json = False,
) -> None:
    """Measure the page of an explanation: its size, how long it takes, and how long a frame takes while hovering.

    Frames need Playwright and Chromium; without them, they are left out.
    """
    from benchmarks.page import LENGTHS, Options, run

    _measure("page", partial(run, Options(model, tuple(lengths or LENGTHS), seconds)), as_json)


def _measure(name: str, run: Callable[..., list[Any]], as_json: bool, device: str = "cpu") -> None:
    from benchmarks.measure import about, table
    from identikit.cli.terminal import console, print_json, step_progress
    from identikit.models.load.load import checked_device

    checked_device(device)
    with step_progress() as told:
        rows = run(progress=told)
    if as_json:
        print_json({"benchmark": name, **about(device), "rows": [row._asdict() for row in rows]})
        return
    console().print(table(rows))
    typer.echo("Measured on {device}, {threads} CPU threads, torch {torch}.".format(**about(device)))


if __name__ == "__main__":
    run_command(lambda: bench)
