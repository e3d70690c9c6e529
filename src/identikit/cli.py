"""The command line: parse, call the public API, print."""

import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console

import identikit
from identikit.errors import IdentikitError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="What a transformer's attention and hidden vectors really say.",
)

bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure speed and memory, as ratios taken side by side in one run.",
)
app.add_typer(bench, name="bench")

INTERRUPTED = 130  # the status that Ctrl-C ends with

ModelOption = Annotated[
    str | None, typer.Option("--model", help="A hub id or a folder; the packaged MiniLM if left out.")
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="Where to compute: cpu, cuda, ….")]
BenchDeviceOption = Annotated[str, typer.Option("--device", help="Where to compute: cpu or cuda.")]
RepeatsOption = Annotated[
    int, typer.Option("--repeats", min=1, help="How often everything is timed; the best time counts.")
]
DataOption = Annotated[
    str, typer.Option("--data", help="A file, a name (mrpc, cola, mnli, wikitext) or datasets:NAME.")
]
OutOption = Annotated[str, typer.Option("--out", help="The folder for the results; a stopped run goes on there.")]
DataDirOption = Annotated[str | None, typer.Option("--data-dir", help="The folder that a named dataset is in.")]
ColumnOption = Annotated[list[str] | None, typer.Option("--column", help="A column to read; twice for pairs.")]
SplitOption = Annotated[str | None, typer.Option("--split", help="The part of the dataset.")]
SampleOption = Annotated[int | None, typer.Option("--sample", min=1, help="Read this many texts alone.")]
TruncateOption = Annotated[bool, typer.Option("--truncate", help="Cut texts at the model's positions.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of words.")]


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Say which attention is real, which token a hidden vector is, and where it came from."""
    if show:
        typer.echo(f"identikit {identikit.__version__}")
        raise typer.Exit


@app.command()
def explain(
    text: Annotated[str | None, typer.Argument(help="The text; the embedded sample if left out.")] = None,
    pair: Annotated[str | None, typer.Option("--pair", help="A second text, read together with the first.")] = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    probes: Annotated[str | None, typer.Option("--probes", help="Directions to attribute from, or exact.")] = None,
    truncate: TruncateOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say what a model's attention and hidden vectors on a text are worth."""
    from identikit import explain as explained
    from identikit.terminal import step_progress
    from identikit.verdict.words import print_verdict

    if pair is not None and text is None:
        raise identikit.InputError("--pair goes with a first text: identikit explain TEXT --pair TEXT.")
    with step_progress() as told:
        explanation = explained(
            identikit.load(model, device=device),
            text if pair is None or text is None else (text, pair),
            probes=_count(probes),
            truncate=truncate,
            progress=told,
        )
    if as_json:
        typer.echo(json.dumps(explanation.to_dict(), ensure_ascii=False, default=str))
    else:
        print_verdict(explanation, Console())


@app.command()
def attention(
    data: DataOption,
    out: OutOption,
    data_dir: DataDirOption = None,
    columns: ColumnOption = None,
    split: SplitOption = None,
    sample: SampleOption = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    truncate: TruncateOption = False,
    bias: Annotated[
        bool, typer.Option("--bias/--no-bias", help="Keep the value bias in, or the paper's letter.")
    ] = True,
    mass: Annotated[bool, typer.Option("--mass", help="Keep the sum of every row.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compute effective attention over a dataset: correlation by length, null dimensions, attention by token type."""
    from identikit.attention.dataset import attention_tables

    run = _Run("attention", data, data_dir, columns, split, sample, model, device, truncate)
    tables = run.tables(attention_tables, out, {"bias": bias, "mass": mass})
    overall = tables["correlation"].query("layer == 0")["pearson"].to_numpy()
    residual = float(tables["null"]["residual"].to_numpy().max())
    _report(
        f"{len(overall)} texts; raw and effective attention correlate at {overall.mean():.3f} on average; "
        f"largest residual {residual:.1g}.",
        {"texts": len(overall), "correlation": float(overall.mean()), "residual": residual},
        (out, tables, as_json),
    )


@app.command()
def attribution(
    data: DataOption,
    out: OutOption,
    data_dir: DataDirOption = None,
    columns: ColumnOption = None,
    split: SplitOption = None,
    sample: SampleOption = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    truncate: TruncateOption = False,
    probes: Annotated[
        str, typer.Option("--probes", help="exact, or how many random directions to estimate from.")
    ] = "exact",
    norm: Annotated[str, typer.Option("--norm", help="frobenius, sum or spectral.")] = "frobenius",
    precision: Annotated[str, typer.Option("--precision", help="full, or on a GPU tf32 or bfloat16.")] = "full",
    tags: Annotated[bool, typer.Option("--tags", help="Also by part of speech (extra [pos]).")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compute Hidden Token Attribution over a dataset: own contribution, neighbours, relative position."""
    from identikit.attribution.dataset import attribution_tables
    from identikit.tags import penn_tags

    run = _Run("attribution", data, data_dir, columns, split, sample, model, device, truncate)
    options = {"probes": _count(probes), "norm": norm, "precision": precision}
    tables = run.tables(attribution_tables, out, options, tagger=penn_tags if tags else None)
    own = tables["own"].set_index("layer")
    first, last = own.iloc[0], own.iloc[-1]
    how = "exact" if options["probes"] == "exact" else f"estimated from {options['probes']} directions"
    _report(
        f"A token's own contribution is {first['median']:.2f} in layer 1 and {last['median']:.2f} in the last "
        f"(medians; {norm} norm, {how}); {last['outweighed']:.0%} of the tokens are outweighed by another in the last.",
        {"own": own["median"].tolist(), "outweighed": own["outweighed"].tolist()} | options,
        (out, tables, as_json),
    )


@app.command()
def tokens(
    data: DataOption,
    out: OutOption,
    data_dir: DataDirOption = None,
    columns: ColumnOption = None,
    split: SplitOption = None,
    sample: SampleOption = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    truncate: TruncateOption = False,
    experiment: Annotated[
        str,
        typer.Option("--experiment", help="same layer, across layers, generalisation, previous layer or neighbours."),
    ] = "same layer",
    maps: Annotated[list[str] | None, typer.Option("--map", help="naive, linear, mlp, ridge; again for more.")] = None,
    distances: Annotated[list[str] | None, typer.Option("--distance", help="cosine or l2; again for both.")] = None,
    folds: Annotated[int, typer.Option("--folds", min=1, max=10, help="How many of the ten folds.")] = 10,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of folds, starts and batches.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Learn to recover tokens from hidden vectors over a dataset, and say how often it works."""
    from identikit.tokens.dataset import identifiability_tables

    run = _Run("tokens", data, data_dir, columns, split, sample, model, device, truncate)
    options = {"experiment": experiment, "maps": maps or ["naive", "ridge"], "distances": distances or ["cosine", "l2"]}
    tables = run.tables(identifiability_tables, out, options | {"folds": folds, "seed": seed})
    summary = tables["summary"]
    last = summary[(summary["layer"] == summary["layer"].max()) & (summary["layer"] == summary["test_layer"])]
    told = "; ".join(f"{row['map']} {row['distance']} {row['rate']:.3f}" for _, row in last.iterrows())
    _report(f"Rates in the last layer: {told}.", {"rates": summary.to_dict("records")}, (out, tables, as_json))


def _list_the_paper(wanted: bool) -> bool:
    if not wanted:
        return wanted
    from identikit.paper.claims.catalogue import CLAIMS
    from identikit.paper.figures.catalogue import FIGURES

    for figure in FIGURES.values():
        typer.echo(f"{figure.name}: {figure.caption}")
    for claim in CLAIMS:
        typer.echo(f"{claim.name}: {claim.words} ({claim.where})")
    raise typer.Exit


@app.command()
def reproduce(
    out: OutOption,
    names: Annotated[list[str] | None, typer.Argument(help="fig1a … fig43, claims by name, or all.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", help="mrpc, cola, mnli, wikitext or a file; again for more; the embedded texts if left out."
        ),
    ] = None,
    data_dir: DataDirOption = None,
    columns: ColumnOption = None,
    sample: Annotated[
        int | None,
        typer.Option("--sample", min=1, help="Take this many texts, 16 directions, 3 folds and one learning rate."),
    ] = None,
    finetuned: Annotated[
        list[str] | None, typer.Option("--finetuned", help="A fine-tuned model's folder, or TASK=FOLDER.")
    ] = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    precision: Annotated[str, typer.Option("--precision", help="full, or on a GPU tf32 or bfloat16.")] = "full",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of folds, starts and random directions.")] = 0,
    as_json: JsonOption = False,
    _: Annotated[
        bool, typer.Option("--list", is_eager=True, callback=_list_the_paper, help="List figures and claims, and end.")
    ] = False,
) -> None:
    """Reproduce the paper: its figures, and its claims judged, for any model."""
    from identikit.paper.claims.report import claims_table
    from identikit.paper.reproduce import Plan
    from identikit.paper.reproduce import reproduce as reproduced
    from identikit.terminal import step_progress

    given = {"data": data, "names": names, "columns": columns, "finetuned": finetuned}
    chosen = {name: tuple(value) for name, value in given.items() if value}
    plan = Plan(**chosen, data_dir=data_dir, sample=sample, precision=precision, seed=seed)
    with step_progress() as told:
        report = reproduced(identikit.load(model, device=device), plan, out, told=told)
    if as_json:
        listed = [{"name": name, "why": why} for name, why in report.listed]
        found = {"figures": list(report.drawn), "claims": report.findings.to_dict("records"), "listed": listed}
        typer.echo(json.dumps(found | {"page": f"{out}/index.html"}, ensure_ascii=False))
        return
    Console().print(claims_table(report.findings))
    for name, why in report.listed:
        typer.echo(f"{name}: {why}")
    typer.echo(f"Figures drawn: {len(report.drawn)}, in {out}/figures; all on one page: {out}/index.html")


@app.command()
def finetune(
    task: Annotated[str, typer.Argument(help="mrpc or cola.")],
    data_dir: Annotated[str, typer.Option("--data-dir", help="The folder with its training and development files.")],
    out: Annotated[str, typer.Option("--out", help="A new or empty folder for the model.")],
    model: ModelOption = None,
    device: DeviceOption = None,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="How often the training texts are read.")] = 3,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Texts a step.")] = 32,
    learning_rate: Annotated[float | None, typer.Option("--learning-rate", help="The highest; default 5e-5.")] = None,
    sample: Annotated[
        int | None, typer.Option("--sample", min=1, help="Train on this many, drawn by the seed.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the head, the batches and dropout.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune a model on MRPC or CoLA, to compare it with itself before (Fig. 12 and 13)."""
    from identikit.paper.finetune import finetune as finetuned
    from identikit.terminal import step_progress

    options = {"epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate, "sample": sample}
    with step_progress() as told:
        tuned = finetuned(
            model,
            task,
            data_dir=data_dir,
            out=out,
            seed=seed,
            device=device,
            progress=lambda done, total, loss: told(f"fine-tuning on {task}", done, total),
            **options,
        )
    typer.echo(json.dumps(tuned.to_dict()) if as_json else tuned.summary())


def _count(probes: str | None) -> int | str | None:
    return int(probes) if probes is not None and probes.isdecimal() else probes


class _Run:
    """What the commands over a dataset share: the texts, the model, and the settings that results depend on."""

    def __init__(self, command: str, data: str, data_dir: Any, columns: Any, split: Any, sample: Any, *loading: Any):
        from itertools import islice

        self.texts = list(islice(identikit.read_texts(data, columns=columns, data_dir=data_dir, split=split), sample))
        model, device, self.truncate = loading
        self.model = identikit.load(model, device=device)
        self.settings = {"command": command, "data": data, "columns": columns, "split": split, "sample": sample}
        self.settings |= {"truncate": self.truncate, "model": self.model.name, "weights": self.model.fingerprint}
        self.settings |= {"dtype": str(self.model.dtype), "version": identikit.__version__}

    def tables(self, compute: Any, out: str, options: dict[str, Any], **others: Any) -> dict[str, Any]:
        """Compute the tables into a folder, with progress."""
        from identikit.runs.store import Store
        from identikit.terminal import step_progress

        store = Store(out, self.settings | options | {name: bool(value) for name, value in others.items()})
        with step_progress() as told:
            return compute(self.model, self.texts, store, truncate=self.truncate, progress=told, **options, **others)


def _report(words: str, numbers: dict[str, Any], where: tuple[str, dict[str, Any], bool]) -> None:
    out, tables, as_json = where
    if as_json:
        typer.echo(json.dumps(numbers | {"tables": [f"{out}/{name}.parquet" for name in tables]}))
        return
    typer.echo(words)
    typer.echo(f"Tables (.parquet and .csv) in {out}: {', '.join(tables)}")


@bench.command("attention")
def bench_attention(
    tokens: Annotated[
        list[int] | None, typer.Option("--tokens", min=2, help="A text length; repeatable; 128 and 512 if left out.")
    ] = None,
    memory_tokens: Annotated[int, typer.Option("--memory-tokens", min=128, help="Text length for memory.")] = 8192,
    repeats: RepeatsOption = 3,
    as_json: JsonOption = False,
) -> None:
    """Time effective attention, and measure its memory.

    BERT-base shapes, compared with a forward pass and with the SVD that defines effective attention.
    """
    from identikit.bench.attention import run

    lengths = tuple(tokens or (128, 512))
    _measure("attention", partial(run, lengths, memory_tokens=memory_tokens, repeats=repeats), as_json)


@bench.command("intervals")
def bench_intervals(
    model: ModelOption = None,
    repeats: RepeatsOption = 3,
    as_json: JsonOption = False,
) -> None:
    """Time the exact intervals of a row.

    Two random rows and one of the model, compared with one linear program of scipy per end.
    """
    from identikit.bench.intervals import run

    _measure("intervals", partial(run, model=model, repeats=repeats), as_json)


@bench.command("attribution")
def bench_attribution(
    device: BenchDeviceOption = "cpu",
    model: ModelOption = None,
    data: Annotated[str | None, typer.Option("--data", help="Instead, time all texts of a file or dataset.")] = None,
    data_dir: DataDirOption = None,
    repeats: RepeatsOption = 3,
    as_json: JsonOption = False,
) -> None:
    """Time exact attribution.

    On a CPU, a model on 24 tokens, compared with vmap(jvp) and with backward passes. On a GPU, BERT-base shapes,
    compared with the GPU's matrix rate.
    """
    from identikit.bench.attribution import Options, run

    options = Options(device, model, data, data_dir, repeats=repeats)
    _measure("attribution", partial(run, options), as_json, device)


@bench.command("tokens")
def bench_tokens(
    parts: Annotated[
        list[str] | None,
        typer.Option("--part", help="together, ridge or grid; repeatable; all of them if left out."),
    ] = None,
    states: Annotated[
        str | None, typer.Option("--states", help="A safetensors file of hidden states; the sample texts' if left out.")
    ] = None,
    model: ModelOption = None,
    device: BenchDeviceOption = "cpu",
    tf32: Annotated[bool, typer.Option("--tf32", help="Allow TF32 products on a GPU.")] = False,
    folds: Annotated[int, typer.Option("--folds", min=1, max=10, help="How many of the ten folds.")] = 10,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="How long 'together' trains.")] = 3,
    maps: Annotated[
        list[str] | None, typer.Option("--map", help="A map of 'grid'; repeatable; linear if left out.")
    ] = None,
    distances: Annotated[
        list[str] | None, typer.Option("--distance", help="A distance of 'grid'; repeatable; cosine if left out.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time the training of maps.

    Linear maps trained together, compared with one after another; ridge for all folds; a full grid of maps.
    """
    from identikit.bench.tokens import Options, run

    given = {"parts": parts, "maps": maps, "distances": distances}
    chosen = {name: tuple(value) for name, value in given.items() if value}
    options = Options(states, model, device, tf32, folds=folds, epochs=epochs, **chosen)
    _measure("tokens", partial(run, options), as_json, device)


def _measure(name: str, run: Callable[..., list[Any]], as_json: bool, device: str = "cpu") -> None:
    from identikit.bench.measure import about, table
    from identikit.terminal import step_progress

    with step_progress() as told:
        rows = run(progress=told)
    if as_json:
        typer.echo(json.dumps({"benchmark": name, **about(device), "rows": [row._asdict() for row in rows]}))
        return
    Console().print(table(rows))
    typer.echo("Measured on {device}, {threads} CPU threads, torch {torch}.".format(**about(device)))


@app.command()
def models(as_json: JsonOption = False) -> None:
    """List the model architectures that identikit can read."""
    from identikit.models.families import FAMILIES

    if as_json:
        typer.echo(json.dumps([{"family": name, "splits": family.splits} for name, family in FAMILIES.items()]))
        return
    typer.echo("Any checkpoint of these architectures can be read, by hub id or folder (--model):")
    typer.echo(f"  {', '.join(FAMILIES)}.")
    typer.echo("To add another, see 'Add a family' in CONTRIBUTING.md.")


def main() -> None:
    """Run the command line; a user's mistake is one line and exit status 1, never a traceback."""
    warnings.showwarning = lambda message, *about, **others: print(f"identikit: {message}", file=sys.stderr)
    try:
        app()
    except IdentikitError as error:
        print(f"identikit: {error}", file=sys.stderr)
        sys.exit(1)
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            kept = "what --out holds is kept, and the same command goes on from there"
            print(f"identikit: interrupted: {kept}", file=sys.stderr)
        raise
