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
