"""The command line: parse, call the public API, print."""

import json
import sys
import warnings
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

import identikit
from identikit.errors import IdentikitError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="What a transformer's attention and hidden vectors really say.",
)

INTERRUPTED = 130  # the status that Ctrl-C ends with
BENCHMARKS = ("attention", "intervals", "attribution", "tokens")

ModelOption = Annotated[
    str | None, typer.Option("--model", help="A hub id or a folder; the packaged MiniLM if left out.")
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="Where to compute: cpu, cuda, ….")]
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
    from identikit.terminal import step_progress
    from identikit.verdict.numbers import explain as explained
    from identikit.verdict.words import print_verdict

    if pair is not None and text is None:
        raise identikit.InputError("--pair goes with a first text: identikit explain TEXT --pair TEXT.")
    with step_progress() as told:
        explanation = explained(
            identikit.load(model, device=device),
            text if pair is None or text is None else (text, pair),
            probes=_count(probes),
            truncate=truncate,
            progress=lambda done, total: told("attribution, tokens", done, total),
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
    from identikit.attention.dataset import AttentionOptions, attention_tables

    run = _Run("attention", data, data_dir, columns, split, sample, model, device, truncate)
    tables = run.tables(attention_tables, out, AttentionOptions, {"bias": bias, "mass": mass})
    overall = tables["correlation"]["pearson"].to_numpy()
    residual = float(tables["null_dimension"]["residual"].to_numpy().max())
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
    from identikit.attribution.dataset import AttributionOptions, attribution_tables
    from identikit.tags import penn_tags

    run = _Run("attribution", data, data_dir, columns, split, sample, model, device, truncate)
    options = {"probes": _count(probes), "norm": norm, "precision": precision}
    tables = run.tables(attribution_tables, out, AttributionOptions, options, tagger=penn_tags if tags else None)
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
    from identikit.tokens.identify import identifiability_tables

    run = _Run("tokens", data, data_dir, columns, split, sample, model, device, truncate)
    options = {"experiment": experiment, "maps": maps or ["naive", "ridge"], "distances": distances or ["cosine", "l2"]}
    tables = run.tables(identifiability_tables, out, None, options | {"folds": folds, "seed": seed})
    summary = tables["summary"]
    last = summary[(summary["layer"] == summary["layer"].max()) & (summary["layer"] == summary["test_layer"])]
    told = "; ".join(f"{row['map']} {row['distance']} {row['rate']:.3f}" for _, row in last.iterrows())
    _report(f"Rates in the last layer: {told}.", {"rates": summary.to_dict("records")}, (out, tables, as_json))


def _list_the_paper(wanted: bool) -> bool:
    if not wanted:
        return wanted
    from identikit.paper.claims.catalogue import CLAIMS, needed
    from identikit.paper.figures.catalogue import FIGURES

    for figure in FIGURES.values():
        typer.echo(f"{figure.name}: {figure.caption}")
    for claim in CLAIMS.values():
        typer.echo(f"{claim.name}: {claim.words} ({claim.where}; needs {needed(claim.texts)})")
    raise typer.Exit


class _WithSampleSizes(TyperCommand):
    """A command whose help ends with how many texts the paper's claims need; they are only read for that."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from identikit.paper.claims.catalogue import sample_sizes

        with formatter.section("How many texts claims need; with fewer they are undecided"):
            for line in sample_sizes():
                formatter.write_text(line)


@app.command(cls=_WithSampleSizes)
def reproduce(
    out: OutOption,
    names: Annotated[
        list[str] | None, typer.Argument(help="fig1a to fig43, collapse, names of claims, or all.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", help="mrpc, cola, mnli, wikitext or a file; repeat for more. Default: the embedded texts."
        ),
    ] = None,
    data_dir: DataDirOption = None,
    columns: ColumnOption = None,
    sample: Annotated[
        int | None,
        typer.Option(
            "--sample",
            min=1,
            help="Read only the first N texts, with 16 directions, 3 folds and one learning rate; see the end for the "
            "number of texts that claims need.",
        ),
    ] = None,
    finetuned: Annotated[
        list[str] | None,
        typer.Option("--finetuned", help="The folder of a fine-tuned model, or TASK=FOLDER; repeat for more."),
    ] = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    precision: Annotated[str, typer.Option("--precision", help="full, or on a GPU tf32 or bfloat16.")] = "full",
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Random seed for folds, initialisation and random directions.")
    ] = 0,
    as_json: JsonOption = False,
    _: Annotated[
        bool,
        typer.Option("--list", is_eager=True, callback=_list_the_paper, help="List all figures and claims, and exit."),
    ] = False,
) -> None:
    """Reproduce the paper on any model: draw its figures and judge its claims."""
    from identikit.paper.claims.report import claims_table, rows
    from identikit.paper.reproduce import Plan
    from identikit.paper.reproduce import reproduce as reproduced
    from identikit.terminal import step_progress

    given = {"data": data, "names": names, "columns": columns, "finetuned": finetuned}
    chosen = {name: tuple(value) for name, value in given.items() if value}
    plan = Plan(**chosen, data_dir=data_dir, sample=sample, precision=precision, seed=seed)
    with step_progress() as told:
        report = reproduced(identikit.load(model, device=device), plan, out, progress=told)
    if as_json:
        listed = [{"name": name, "why": why} for name, why in report.listed]
        found = {"figures": list(report.drawn), "claims": rows(report.claims), "listed": listed}
        typer.echo(json.dumps(found | {"page": f"{out}/index.html"}, ensure_ascii=False))
        return
    Console().print(claims_table(report.claims))
    for name, why in report.listed:
        typer.echo(f"{name}: {why}")
    drawn = "1 figure is" if len(report.drawn) == 1 else f"{len(report.drawn)} figures are"
    typer.echo(f"{drawn} in {out}/figures; {out}/index.html shows everything on one page.")


@app.command()
def finetune(
    task: Annotated[str, typer.Argument(help="mrpc or cola.")],
    data_dir: Annotated[str, typer.Option("--data-dir", help="The folder with the training and development files.")],
    out: Annotated[str, typer.Option("--out", help="A new or empty folder for the model.")],
    model: ModelOption = None,
    device: DeviceOption = None,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="How many times to read the training texts.")] = 3,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Texts per step.")] = 32,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="The highest learning rate.")] = 5e-5,
    sample: Annotated[int | None, typer.Option("--sample", min=1, help="Train on N texts, drawn at random.")] = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Random seed for the head, the order of texts and dropout.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune a model on MRPC or CoLA, to compare it before and after (Fig. 12 and 13)."""
    from identikit.paper.finetune import Training
    from identikit.paper.finetune import finetune as finetuned
    from identikit.terminal import step_progress

    training = Training(epochs, batch_size, learning_rate, seed, sample=sample)
    with step_progress() as told:
        tuned = finetuned(model, task, training, data_dir=data_dir, out=out, device=device, progress=told)
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

    def tables(self, compute: Any, out: str, kind: Any, options: dict[str, Any], **others: Any) -> dict[str, Any]:
        """Compute the tables into a folder, with progress."""
        from identikit.runs.store import Store
        from identikit.terminal import step_progress

        store = Store(out, self.settings | options | {name: bool(value) for name, value in others.items()})
        with step_progress() as told:
            if kind is None:
                return compute(self.model, self.texts, store, truncate=self.truncate, progress=told, **options)
            given = kind(truncate=self.truncate, **options)
            return compute(self.model, self.texts, store, given, progress=told, **others)


def _report(words: str, numbers: dict[str, Any], where: tuple[str, dict[str, Any], bool]) -> None:
    out, tables, as_json = where
    if as_json:
        typer.echo(json.dumps(numbers | {"tables": [f"{out}/{name}.parquet" for name in tables]}))
        return
    typer.echo(words)
    typer.echo(f"Tables (.parquet and .csv) in {out}: {', '.join(tables)}")


@app.command(context_settings={"ignore_unknown_options": True})
def bench(
    name: Annotated[str, typer.Argument(help="attention, intervals, attribution or tokens.")],
    options: Annotated[list[str] | None, typer.Argument(help="The benchmark's own options.")] = None,
) -> None:
    """Measure speed and memory, as ratios taken side by side in one run."""
    from importlib import import_module

    if name not in BENCHMARKS:
        raise identikit.InputError(f"bench {name!r} is not known: use one of {', '.join(BENCHMARKS)}.")
    sys.argv = [f"identikit bench {name}", *(options or ())]
    import_module(f"identikit.bench.{name}").main()


@app.command()
def models(as_json: JsonOption = False) -> None:
    """List the architectures that can be read."""
    from identikit.models.families import FAMILIES

    if as_json:
        typer.echo(json.dumps([{"family": name, "splits": family.splits} for name, family in FAMILIES.items()]))
        return
    typer.echo("Any checkpoint of these architectures, by hub id or folder (--model):")
    typer.echo(f"  {', '.join(FAMILIES)}")
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
