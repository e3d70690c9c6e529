"""The command line: parse, call the public API, print."""

import json
import sys
from typing import Annotated

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

ModelOption = Annotated[
    str | None, typer.Option("--model", help="A hub id or a folder; the packaged MiniLM if left out.")
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="Where to compute: cpu, cuda, ….")]
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
    truncate: TruncateOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say how far a model's attention on a text can be trusted."""
    from identikit.explain import explain as explained
    from identikit.render.verdict import print_verdict

    if pair is not None and text is None:
        raise identikit.InputError("--pair goes with a first text: identikit explain TEXT --pair TEXT.")
    explanation = explained(
        identikit.load(model, device=device), text if pair is None or text is None else (text, pair), truncate=truncate
    )
    if as_json:
        typer.echo(json.dumps(explanation.to_dict(), ensure_ascii=False, default=str))
    else:
        print_verdict(explanation, Console())


@app.command()
def attention(
    data: Annotated[str, typer.Option("--data", help="A file, a name (mrpc, cola, mnli, wikitext) or datasets:NAME.")],
    out: Annotated[str, typer.Option("--out", help="The folder for the results; a stopped run goes on there.")],
    data_dir: Annotated[str | None, typer.Option("--data-dir", help="The folder that a named dataset is in.")] = None,
    columns: Annotated[list[str] | None, typer.Option("--column", help="A column to read; twice for pairs.")] = None,
    split: Annotated[str | None, typer.Option("--split", help="The part of the dataset.")] = None,
    sample: Annotated[int | None, typer.Option("--sample", min=1, help="Read this many texts alone.")] = None,
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
    from itertools import islice

    from identikit.analyses.attention_tables import attention_tables
    from identikit.render.progress import text_progress
    from identikit.store import Store

    texts = islice(identikit.read_texts(data, columns=columns, data_dir=data_dir, split=split), sample)
    loaded = identikit.load(model, device=device)
    options = {"bias": bias, "mass": mass}
    settings = options | {"command": "attention", "data": data, "columns": columns, "split": split, "sample": sample}
    settings |= {"truncate": truncate, "model": loaded.name, "weights": loaded.fingerprint, "dtype": str(loaded.dtype)}
    with text_progress("effective attention") as progress:
        tables = attention_tables(loaded, texts, Store(out, settings), truncate=truncate, progress=progress, **options)
    overall = tables["correlation"].query("layer == 0")
    summary = {
        "texts": len(overall),
        "correlation": float(overall["pearson"].to_numpy().mean()),
        "residual": float(tables["null"]["residual"].to_numpy().max()),
        "tables": [f"{out}/{name}.parquet" for name in tables],
    }
    if as_json:
        typer.echo(json.dumps(summary))
        return
    typer.echo(
        f"{summary['texts']} texts; raw and effective attention correlate at {summary['correlation']:.3f} on average; "
        f"largest residual {summary['residual']:.1g}."
    )
    typer.echo(f"Tables (.parquet and .csv) in {out}: {', '.join(tables)}")


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
    try:
        app()
    except IdentikitError as error:
        print(f"identikit: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("identikit: interrupted", file=sys.stderr)
        sys.exit(130)
