"""The command line: parse, call the public API, print."""

import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

import identikit
from identikit.cli import option
from identikit.cli.commands import Commands, WithSampleSizes
from identikit.cli.datasets import COMMANDS, number_or_word
from identikit.cli.endings import REPORT_TO, with_own_options
from identikit.cli.runs import diff, merge, push, report, resume, status, verify
from identikit.maths.polytope.ahead import compile_ahead

if TYPE_CHECKING:
    from identikit.explanation.result import Explanation
    from identikit.results.words import Document


LONG = 15.0  # seconds of work after which a page is worth writing before it is done

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="What a transformer's attention and hidden vectors really say.",
)


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    report_to: Annotated[
        str | None, typer.Option("--report-to", help="Also log progress to an experiment tracker: trackio.")
    ] = None,
) -> None:
    """Say which attention the output determines, which token a hidden vector stands for, and where it came from."""
    REPORT_TO.set(report_to)
    if show:
        typer.echo(f"identikit {identikit.__version__}")
        raise typer.Exit


@app.command()
def explain(
    text: Annotated[
        str | None,
        typer.Argument(help="The text, or the path of an image or sound. Default: the embedded sample."),
    ] = None,
    beside: Annotated[
        str | None, typer.Argument(help="A second text, explained by itself; --html shows it beside the first.")
    ] = None,
    pair: Annotated[str | None, typer.Option("--pair", help="A second text, read together with the first.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Read the text as a user's message, through the model's chat template.")
    ] = False,
    model: option.Model = None,
    tower: option.Tower = None,
    device: option.Device = None,
    dtype: option.Dtype = "float32",
    probes: Annotated[
        str | None,
        typer.Option(
            "--probes",
            help="exact, or the number of random directions to estimate from. Default: exact for a short text, else as "
            "many as take some seconds, at least 4.",
        ),
    ] = None,
    measures: Annotated[
        list[str] | None,
        typer.Option(
            "--measure",
            help="Also read attention by rollout, norm, value norm or another measure, and say how much of it is "
            "determined; roles scores the heads. Repeat for more.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            help="Also say which tokens an output comes from: a next token or a class, or its number, prediction (what "
            "the model gives most), one of these at a position (Paris@7, @7), or similarity with --pair. Measures such "
            "as gradient refer to it.",
        ),
    ] = None,
    against: Annotated[
        str | None, typer.Option("--against", help="With --target: explain its difference from this one.")
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", help="About how long it may take; what does not fit is sampled or left out.")
    ] = 20.0,
    truncate: option.Truncate = False,
    page: Annotated[
        str | None,
        typer.Option("--html", help="Also write a page with views to explore: one file that works without a network."),
    ] = None,
    as_json: option.Json = False,
) -> None:
    """Explain a text: which attention the output determines, which token is which, where it came from."""
    texts = _requested_texts(text, beside, pair, chat)
    if against is not None and target is None:
        raise identikit.InputError("--against needs --target: identikit explain TEXT --target TOKEN --against TOKEN.")
    compile_ahead()
    from identikit.cli.terminal import print_json, step_progress
    from identikit.web.report import checked_target, save_html

    if page is not None:
        checked_target(page)
    targets = tuple(None if name is None else number_or_word(name) for name in (target, against))
    explain_text = partial(
        identikit.explain,
        identikit.load(model, tower=tower, device=device, dtype=dtype),
        probes=None if probes is None else number_or_word(probes),
        measures=measures or (),
        target=targets[0] if against is None else targets,
        seconds=seconds,
        truncate=truncate,
    )
    explanations = _explain_texts(texts, explain_text, page, print_words=not as_json)
    file = None
    if page is not None:
        with step_progress() as progress:
            file = save_html(explanations, page, progress=progress)
    if as_json:
        links = {} if file is None else {"page": str(file)}
        numbers = [explanation.to_dict() | links for explanation in explanations]
        print_json(numbers[0] if beside is None else numbers)
    elif file is not None:
        size = file.stat().st_size / 1e6
        typer.echo(f"\nViews to explore are in {file} ({size:.1f} MB). Open it in a browser; it needs no network.")


def _requested_texts(text: str | None, beside: str | None, pair: str | None, chat: bool) -> list[Any]:
    """Return the texts that `explain` was given, one or two, each as the library reads it."""
    if pair is not None and text is None:
        raise identikit.InputError("--pair needs a first text: identikit explain TEXT --pair TEXT.")
    if chat and (text is None or pair is not None):
        raise identikit.InputError("--chat needs one text, and no --pair: identikit explain TEXT --chat.")
    if beside is not None and pair is not None:
        raise identikit.InputError("explain takes a second text or --pair, which is read together with the first.")
    texts: list[Any] = [text if pair is None else (text, pair)]
    if beside is not None:
        texts.append(beside)
    return [[{"role": "user", "content": message}] for message in texts] if chat else texts


def _explain_texts(
    texts: list[Any], explain_text: Callable[..., "Explanation"], page: str | None, *, print_words: bool
) -> list["Explanation"]:
    """Explain texts one after another, and print the first answers of each as soon as they are known.

    If the other answers take long, the page is written with the first ones meanwhile.
    """
    from identikit.cli.terminal import console, step_progress
    from identikit.explanation.words import opening, rest
    from identikit.models.machine import format_duration
    from identikit.web.report import save_html

    explanations: list[Explanation] = []
    is_opened = False

    def say(document: "Document") -> None:
        if print_words:
            console().print(document.spoken(with_own_options))

    def show_draft(draft: "Explanation", seconds: float) -> None:
        nonlocal is_opened
        is_opened = True
        say(opening(draft))
        if page is not None and seconds > LONG:
            save_html([*explanations, draft], page, progress=progress)
            typer.echo(
                f"identikit: {page} has this already; the rest takes about {format_duration(seconds)}.", err=True
            )

    for text in texts:
        is_opened = False
        with step_progress() as progress:
            explanation = explain_text(text, progress=progress, ready=show_draft)
        if not is_opened:
            say(opening(explanation))
        say(rest(explanation))  # to be read while the page is written
        explanations.append(explanation)
    return explanations


for command in (*COMMANDS.values(), status, resume, verify, merge, diff, report, push):
    app.command()(command)


def _list_figures_and_claims(is_requested: bool) -> bool:
    if not is_requested:
        return False
    from identikit.paper.claims.catalogue import CLAIMS, texts_in_words
    from identikit.paper.figures.catalogue import FIGURES

    for figure in FIGURES.values():
        typer.echo(f"{figure.name}: {figure.caption}")
    for claim in CLAIMS.values():
        typer.echo(f"{claim.name}: {claim.words} ({claim.where}; needs {texts_in_words(claim.texts)})")
    raise typer.Exit


@app.command(cls=WithSampleSizes)
def reproduce(
    context: option.Context,
    out: option.Out,
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
    data_dir: option.DataDir = None,
    columns: option.Column = None,
    first: Annotated[
        int | None,
        typer.Option(
            "--first",
            "--sample",
            min=1,
            help="Read only the first N texts, with 16 random directions, 3 folds and one learning rate. The "
            "number of texts that claims need is listed below.",
        ),
    ] = None,
    finetuned: Annotated[
        list[str] | None,
        typer.Option("--finetuned", help="The folder of a fine-tuned model, or TASK=FOLDER; repeat for more."),
    ] = None,
    model: option.Model = None,
    device: option.Device = None,
    dtype: option.Dtype = "float32",
    precision: Annotated[str, typer.Option("--precision", help="full, or on a GPU tf32 or bfloat16.")] = "full",
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Random seed for folds, initialisation and random directions.")
    ] = 0,
    engine: option.Engine = "local",
    workers: option.Workers = None,
    threads: option.Threads = None,
    address: option.Address = None,
    gpus: option.Gpus = 0.0,
    as_json: option.Json = False,
    listing: Annotated[
        bool,
        typer.Option(
            "--list", is_eager=True, callback=_list_figures_and_claims, help="List all figures and claims, and exit."
        ),
    ] = False,
) -> None:
    """Reproduce the paper on any model: draw its figures and judge its claims."""
    from identikit.cli.terminal import console, print_json, step_progress
    from identikit.paper.claims.report import claims_table, rows
    from identikit.paper.reproduce import Plan
    from identikit.paper.reproduce import reproduce as run_plan
    from identikit.runs.engines import make_engine

    lists = {"data": data, "names": names, "columns": columns, "finetuned": finetuned}
    requested = {name: tuple(values) for name, values in lists.items() if values}
    plan = Plan(**requested, data_dir=data_dir, first=first, precision=precision, seed=seed)
    run_engine = make_engine(out, engine, workers, threads, address, gpus)
    with step_progress() as progress:
        loaded = identikit.load(model, device=device, dtype=dtype)
        report = run_plan(loaded, plan, out, engine=run_engine, arguments=context.params, progress=progress)
    if as_json:
        listed = [{"name": name, "why": reason} for name, reason in report.listed]
        numbers = {"figures": list(report.drawn), "claims": rows(report.claims), "listed": listed}
        print_json(numbers | {"page": f"{out}/index.html"})
        return
    console().print(claims_table(report.claims))
    for name, reason in report.listed:
        typer.echo(f"{name}: {reason}")
    drawn = "1 figure is" if len(report.drawn) == 1 else f"{len(report.drawn)} figures are"
    typer.echo(f"{drawn} in {out}/figures; {out}/index.html shows everything on one page.")


@app.command()
def finetune(
    task: Annotated[str, typer.Argument(help="mrpc or cola.")],
    data_dir: Annotated[str, typer.Option("--data-dir", help="The folder with the training and development files.")],
    out: Annotated[str, typer.Option("--out", help="A new or empty folder for the model.")],
    model: option.Model = None,
    device: option.Device = None,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="How many times to read the training texts.")] = 3,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Texts per step.")] = 32,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="The highest learning rate.")] = 5e-5,
    sample: Annotated[int | None, typer.Option("--sample", min=1, help="Train on N texts, drawn at random.")] = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Random seed for the head, the order of texts and dropout.")
    ] = 0,
    as_json: option.Json = False,
) -> None:
    """Fine-tune a model on MRPC or CoLA, to compare it before and after (Figures 12 and 13)."""
    from identikit.cli.terminal import answer, step_progress
    from identikit.paper.finetune import Training
    from identikit.paper.finetune import finetune as train

    training = Training(epochs, batch_size, learning_rate, seed, sample=sample)
    with step_progress() as progress:
        tuned = train(model, task, training, data_dir=data_dir, out=out, device=device, progress=progress)
    answer(tuned.to_dict(), tuned.summary(), as_json=as_json)


@app.command()
def serve(
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="A hub id or a folder; repeat for more. Default: all-MiniLM-L6-v2."),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="The address to serve on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="The port; 0 for any free one.")] = 8765,
    device: option.Device = None,
    dtype: option.Dtype = "float32",
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", help="A name that visitors may reach the server under; repeat for more."),
    ] = None,
    longest: Annotated[
        int, typer.Option("--longest", min=1, max=1_000_000, help="How many characters a text may have.")
    ] = 5000,
    waiting: Annotated[int, typer.Option("--waiting", min=1, help="How many analyses may wait.")] = 8,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds",
            min=0.1,
            help="About how long one analysis may take; what does not fit is sampled or left out.",
        ),
    ] = 20.0,
) -> None:
    """Serve the explorer: type a text, see which attention the output determines, and drag its weights."""
    from identikit.web.server import Limits, ModelSource
    from identikit.web.server import serve as run_server

    sources = tuple(ModelSource(name, device, dtype) for name in model or [None])
    limits = Limits(characters=longest, waiting=waiting, seconds=seconds)
    run_server(sources, host, port, tuple(allow_host or ()), limits)


@app.command()
def plan(
    model: Annotated[str | None, typer.Argument(help="A hub id or a folder. Default: the packaged model.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="How many tokens the text has.")] = 128,
    device: option.Device = None,
    dtype: Annotated[str, typer.Option("--dtype", help="float32, float64, bfloat16 or float16.")] = "float32",
    revision: Annotated[str | None, typer.Option("--revision", help="The branch, tag or commit of a hub id.")] = None,
    as_json: option.Json = False,
) -> None:
    """Say how much memory and time a model takes before it is loaded; of a hub id, no weights are fetched."""
    from identikit.cli.terminal import answer
    from identikit.explanation.cost import planned

    cost = planned(model, tokens, device=device, dtype=dtype, revision=revision)
    answer(cost.to_dict(), cost.words(), as_json=as_json)


@app.command()
def models(
    as_json: option.Json = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print it as the page docs/models.md.")] = False,
) -> None:
    """List the model architectures that identikit can read, and what works with each."""
    from identikit.models import family_list

    if as_json or as_markdown:
        typer.echo(json.dumps(family_list.list_families()) if as_json else family_list.models_page(), nl=as_json)
        return
    rows = [("model_type", "model", "checkpoint", "attribution; also")]
    rows += map(family_list.summary_row, family_list.list_families())
    for model_type, name, checkpoint, abilities in rows:
        typer.echo(f"{model_type:<22} {name:<48} {checkpoint:<46} {abilities}")
    typer.echo(
        "Attention, intervals and token identifiability work with all of these (attention only in layers that have it)."
    )
    typer.echo("To add another architecture, see 'Add a family' in CONTRIBUTING.md.")


@app.command()
def cite() -> None:
    """Say what to cite, with BibTeX: the paper and this version of identikit."""
    typer.echo(identikit.cite(), nl=False)
