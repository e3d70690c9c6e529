"""The command line: parse, call the public API, print."""

import inspect
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial, wraps
from itertools import islice
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

import identikit
from identikit.cli_bench import bench
from identikit.errors import IdentikitError
from identikit.options import (
    ColumnOption,
    DataDirOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    OutOption,
    TowerOption,
    TruncateOption,
)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="What a transformer's attention and hidden vectors really say.",
)

app.add_typer(bench, name="bench")

INTERRUPTED = 130  # the status that Ctrl-C ends with


@dataclass(frozen=True)
class DatasetRun:
    """What the commands over a dataset share: their options, and the way from texts to a folder of tables."""

    data: Annotated[str, typer.Option("--data", help="A file, a name (mrpc, cola, mnli, wikitext) or datasets:NAME.")]
    out: OutOption
    data_dir: DataDirOption = None
    columns: ColumnOption = None
    split: Annotated[str | None, typer.Option("--split", help="Which split of the dataset to read.")] = None
    sample: Annotated[int | None, typer.Option("--sample", min=1, help="Read only the first N texts.")] = None
    model: ModelOption = None
    tower: TowerOption = None
    device: DeviceOption = None
    dtype: DtypeOption = "float32"
    truncate: TruncateOption = False
    as_json: JsonOption = False

    def tables(
        self, command: str, compute: Callable[..., dict[str, Any]], options: Any, also: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Compute the tables into the folder, with progress; `also` are settings that are not among the options."""
        from identikit.runs.manifest import manifest
        from identikit.runs.store import Store
        from identikit.terminal import step_progress

        data = {"source": self.data, "columns": self.columns, "split": self.split, "sample": self.sample}
        found = identikit.read_texts(self.data, columns=self.columns, data_dir=self.data_dir, split=self.split)
        texts = list(islice(found, self.sample))
        model = identikit.load(self.model, tower=self.tower, device=self.device, dtype=self.dtype)
        settings = asdict(options) | (also or {})
        store = Store(self.out, *manifest(command, model, texts, data=data, options=settings))
        with step_progress() as told:
            return compute(model, texts, store, options, progress=told)

    def report(self, words: str, numbers: dict[str, Any], tables: dict[str, Any]) -> None:
        """Print the main numbers, and where the tables are."""
        if self.as_json:
            typer.echo(json.dumps(numbers | {"tables": [f"{self.out}/{name}.parquet" for name in tables]}))
            return
        typer.echo(words)
        typer.echo(f"The tables are in {self.out}, as .parquet and .csv: {', '.join(tables)}.")
        typer.echo(f"{self.out}/columns.json says what their columns mean.")


def over_a_dataset(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `DatasetRun` before its own; it gets them as its first argument."""
    names = [field.name for field in fields(DatasetRun)]

    @wraps(command)
    def called(**given: Any) -> None:
        command(DatasetRun(**{name: given.pop(name) for name in names}), **given)

    shared, (_, *own) = (inspect.signature(one).parameters.values() for one in (DatasetRun, command))
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*shared, *own)]
    called.__dict__["__signature__"] = inspect.Signature(parameters)  # what typer reads the options from
    return called


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Say which attention is real, which token a hidden vector stands for, and where it came from."""
    if show:
        typer.echo(f"identikit {identikit.__version__}")
        raise typer.Exit


@app.command()
def explain(
    text: Annotated[
        str | None,
        typer.Argument(help="The text, or the path of an image or sound. Default: the embedded sample."),
    ] = None,
    pair: Annotated[str | None, typer.Option("--pair", help="A second text, read together with the first.")] = None,
    model: ModelOption = None,
    tower: TowerOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = "float32",
    probes: Annotated[
        str | None,
        typer.Option("--probes", help="exact, or the number of random directions to estimate from. Default: 16."),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", help="About how long to bound rows of attention, drawn at random.")
    ] = 20.0,
    truncate: TruncateOption = False,
    as_json: JsonOption = False,
) -> None:
    """Explain a text: which attention is real, which token is which, where it came from."""
    from identikit import explain as explained
    from identikit.terminal import step_progress
    from identikit.verdict.words import print_verdict

    if pair is not None and text is None:
        raise identikit.InputError("--pair needs a first text: identikit explain TEXT --pair TEXT.")
    with step_progress() as told:
        explanation = explained(
            identikit.load(model, tower=tower, device=device, dtype=dtype),
            text if pair is None or text is None else (text, pair),
            probes=_count(probes),
            seconds=seconds,
            truncate=truncate,
            progress=told,
        )
    if as_json:
        typer.echo(json.dumps(explanation.to_dict(), ensure_ascii=False, default=str))
    else:
        print_verdict(explanation, Console())


@app.command()
@over_a_dataset
def attention(
    run: DatasetRun,
    bias: Annotated[
        bool, typer.Option("--bias/--no-bias", help="Keep the bias of the values, or leave it out as the paper does.")
    ] = True,
    mass: Annotated[bool, typer.Option("--mass", help="Let effective attention keep the sum of every row.")] = False,
    intervals: Annotated[
        str | None,
        typer.Option(
            "--intervals",
            help="Also compute intervals for N random rows of attention per text, or for 'all': the range of each "
            "weight over every attention with the same output.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Random seed for the rows of --intervals.")] = 0,
) -> None:
    """Compute attention over a dataset: correlation by length, null dimensions, attention by token type, intervals."""
    from identikit.attention.certainty import length_words
    from identikit.attention.dataset import AttentionOptions, attention_tables

    rows: Any = _count(intervals) or 0
    options = AttentionOptions(bias=bias, mass=mass, truncate=run.truncate, intervals=rows, seed=seed)
    tables = run.tables("attention", attention_tables, options)
    overall = tables["correlation"]["pearson"]
    null = tables["null_dimension"]
    numbers = {
        "texts": len(overall),
        "correlation": float(overall.mean()),
        "null_dim": int(null["greatest"].max()),
        "residual": float(null["residual"].max()),
    }
    texts = "1 text" if len(overall) == 1 else f"{len(overall)} texts"
    words = (
        f"In {texts}, raw and effective attention correlate at {numbers['correlation']:.3f} on "
        f"average. The largest null space has {numbers['null_dim']} dimensions. Effective attention gives the same "
        f"output to within {numbers['residual']:.1g}."
    )
    if options.intervals:
        by_length = tables["intervals_by_length"]
        numbers["intervals_by_length"] = json.loads(by_length.to_json(orient="records", double_precision=15))
        words += (
            f"\n\nIntervals of {by_length['rows'].sum() / len(overall):,.0f} rows per text: what each weight can be in "
            "any attention with the same output.\nFree rows see linearly dependent values; all others are certain. "
            "Means over texts ± standard errors:\n\n"
            f"{length_words(by_length)}\n"
        )
    run.report(words, numbers, tables)


@app.command()
@over_a_dataset
def attribution(
    run: DatasetRun,
    probes: Annotated[
        str, typer.Option("--probes", help="exact, or the number of random directions to estimate from.")
    ] = "exact",
    norm: Annotated[str, typer.Option("--norm", help="frobenius, sum or spectral.")] = "frobenius",
    precision: Annotated[str, typer.Option("--precision", help="full, or on a GPU tf32 or bfloat16.")] = "full",
    tags: Annotated[
        bool, typer.Option("--tags", help="Also give own contributions by part of speech (needs the extra [pos]).")
    ] = False,
) -> None:
    """Compute Hidden Token Attribution over a dataset: own contribution, neighbours, relative position."""
    from identikit.attribution.dataset import AttributionOptions, attribution_tables
    from identikit.tags import penn_tags

    asked = _count(probes)
    options = AttributionOptions(probes=asked, norm=norm, precision=precision, truncate=run.truncate)
    compute = partial(attribution_tables, tagger=penn_tags if tags else None)
    tables = run.tables("attribution", compute, options, {"tags": tags})
    own = tables["own"]
    first, last = own.iloc[0], own.iloc[-1]
    how = "exact" if asked == "exact" else f"estimated from {asked} random directions"
    final = f"layer {len(own) - 1}"
    run.report(
        f"A token's own contribution is {first['median']:.2f} in layer 0 and {last['median']:.2f} in {final} "
        f"(medians; {norm} norm, {how}). In {final}, {last['outweighed']:.0%} of tokens are outweighed by another.",
        {"own": own["median"].tolist(), "outweighed": own["outweighed"].tolist(), "probes": asked, "norm": norm},
        tables,
    )


@app.command()
@over_a_dataset
def tokens(
    run: DatasetRun,
    experiment: Annotated[
        str,
        typer.Option(
            "--experiment",
            help="same layer, across layers, generalisation, previous layer or neighbours; or inversion, which learns "
            "no maps but tries the whole vocabulary (causal models).",
        ),
    ] = "same layer",
    maps: Annotated[
        list[str] | None, typer.Option("--map", help="naive, linear, mlp or ridge; repeat for several.")
    ] = None,
    distances: Annotated[list[str] | None, typer.Option("--distance", help="cosine or l2; repeat for both.")] = None,
    folds: Annotated[int, typer.Option("--folds", min=1, max=10, help="How many of the ten folds to run.")] = 10,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Random seed for folds, initialisation, batch order and noise.")
    ] = 0,
    noises: Annotated[
        list[float] | None,
        typer.Option(
            "--noise",
            min=0.0,
            help="Noise on the hidden vectors for the inversion, relative to their norm; repeat for several. Default: "
            "0, 0.1, 0.3, 1 and 3.",
        ),
    ] = None,
    prefix: Annotated[
        str,
        typer.Option(
            "--prefix",
            help="For inversion, which tokens come before each position: given (the true ones) or recovered (the "
            "winners).",
        ),
    ] = "given",
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=1, help="Refuse texts of more than N tokens, or cut them with --truncate."),
    ] = None,
) -> None:
    """Learn to recover tokens from hidden vectors over a dataset, and say how often it works."""
    from identikit.tokens.dataset import IdentifiabilityOptions, identifiability_tables
    from identikit.tokens.experiments import EXPERIMENTS

    if experiment not in (*EXPERIMENTS, "inversion"):
        raise identikit.InputError(
            f"--experiment {experiment!r} is not known. Use one of: {', '.join((*EXPERIMENTS, 'inversion'))}."
        )
    if experiment == "inversion":
        _inversion(run, maps, distances or ["l2"], noises=noises, prefix=prefix, seed=seed, max_tokens=max_tokens)
        return
    if noises or prefix != "given":
        raise identikit.InputError("--noise and --prefix are for --experiment inversion. Leave them out.")
    options = IdentifiabilityOptions(
        experiment=experiment,
        maps=tuple(maps or ("naive", "ridge")),
        distances=tuple(distances or ("cosine", "l2")),
        folds=folds,
        seed=seed,
        truncate=run.truncate,
        max_tokens=max_tokens,
    )
    tables = run.tables("tokens", identifiability_tables, options)
    summary = tables["summary"]
    final = summary["layer"].max()
    last = summary[(summary["layer"] == final) & (summary["test_layer"] == final)]
    told = "; ".join(f"{row['map']} {row['distance']} {row['rate']:.3f}" for _, row in last.iterrows())
    rates = summary.to_json(orient="records", double_precision=15)  # with null for what is missing
    run.report(f"Recovered from layer {final}: {told}.", {"rates": json.loads(rates)}, tables)


def _inversion(run: DatasetRun, maps: list[str] | None, distances: list[str], **given: Any) -> None:
    from identikit.tokens.dataset import NOISES, InversionOptions, inversion_tables

    if maps or len(distances) > 1:
        raise identikit.InputError(
            "--experiment inversion uses no maps and one distance. Leave out --map, and give --distance once."
        )
    given["noises"] = tuple(given["noises"] or NOISES)
    options = InversionOptions(distance=distances[0], truncate=run.truncate, **given)
    tables = run.tables("tokens", inversion_tables, options, {"experiment": "inversion"})
    found = tables["inversion"]
    final = found[found["layer"] == found["layer"].max()]
    told = "; ".join(
        f"noise {row['noise']:g}: {row['rate']:.1%}, smallest margin {row['margin_least']:.2g}"
        for _, row in final.iterrows()
    )
    rows = json.loads(found.to_json(orient="records", double_precision=15))
    run.report(f"Recovered from layer {found['layer'].max()}: {told}.", {"inversion": rows}, tables)


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
        list[str] | None,
        typer.Argument(help="Figures (fig1a to fig43, our own), claims, or all; --list names them."),
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
            help="Read only the first N texts, with 16 random directions, 3 folds and one learning rate. How many "
            "texts claims need is listed below.",
        ),
    ] = None,
    finetuned: Annotated[
        list[str] | None,
        typer.Option("--finetuned", help="The folder of a fine-tuned model, or TASK=FOLDER; repeat for more."),
    ] = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = "float32",
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
        report = reproduced(identikit.load(model, device=device, dtype=dtype), plan, out, progress=told)
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


@app.command()
def models(
    as_json: JsonOption = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print it as the page docs/models.md.")] = False,
) -> None:
    """List the model architectures that identikit can read, and what works with each."""
    from identikit.models import page

    if as_json or as_markdown:
        typer.echo(json.dumps(page.listed()) if as_json else page.markdown(), nl=as_json)
        return
    rows = [("model_type", "model", "checkpoint", "attribution; also"), *map(page.in_short, page.listed())]
    for kind, name, checkpoint, works in rows:
        typer.echo(f"{kind:<22} {name:<48} {checkpoint:<46} {works}")
    typer.echo(
        "Attention, intervals and token identifiability work with all of these (attention only in layers that have it)."
    )
    typer.echo("To add another architecture, see 'Add a family' in CONTRIBUTING.md.")


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
            kept = " Run the same command again: what its --out folder holds is not computed again."
            has_folder = any(given.split("=")[0] == "--out" for given in sys.argv)
            print(f"identikit: Interrupted.{kept if has_folder else ''}", file=sys.stderr)
        raise
