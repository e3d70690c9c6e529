"""The commands over the folder of a run: status, resume, verify, merge and diff."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from identikit.cli import evaluation as evaluation  # whose command is among COMMANDS
from identikit.cli import option
from identikit.cli.datasets import COMMANDS
from identikit.errors import IdentikitError, InputError

if TYPE_CHECKING:
    from identikit.runs.manifest import NotedCommand

FolderArgument = Annotated[str, typer.Argument(metavar="DIR", help="The folder of the run, as given with --out.")]
_RESUMED = (*COMMANDS, "reproduce")
_DIFFERENT = 1  # exit statuses of diff
_INCOMPARABLE = 2


def status(folder: FolderArgument, as_json: option.Json = False) -> None:
    """Show the progress of a run: what is done and what is missing, its speed, who is writing to it, and any damage."""
    from identikit.cli.terminal import answer
    from identikit.runs import inspect

    portions = inspect.portion_folders(folder)
    run = None if portions and not inspect.is_run(folder) else inspect.state(folder)
    nested: dict[str, inspect.RunState | str] = {}  # the state of each folder, or why it is not known
    for path in (*portions.values(), *inspect.input_folders(folder)):
        name = path.removeprefix(f"{folder.rstrip('/')}/")
        try:
            nested[name] = inspect.state(path)
        except InputError as error:
            nested[name] = str(error)
    nested |= dict.fromkeys(inspect.missing_portions(portions), "missing")
    lines = [f"{folder}: a run in {len(nested)} shards."] if run is None else inspect.state_lines(run)
    reports: dict[str, object] = {}
    for name, state in sorted(nested.items()):
        reports[name] = state if isinstance(state, str) else state.to_dict()
        lines.append(f"{name}: {state if isinstance(state, str) else inspect.state_line(state)}")
    answer({"run": run and run.to_dict(), "parts": reports}, "\n".join(lines), as_json=as_json)


def resume(
    context: option.Context,
    folder: FolderArgument,
    engine: Annotated[
        str | None,
        typer.Option("--engine", help="local, processes or ray. Default: the one used so far."),
    ] = None,
    workers: option.Workers = None,
    address: option.Address = None,
    gpus: option.Gpus = 0.0,
    as_json: option.Json = False,
) -> None:
    """Resume a run from its folder, with the command that it was started with."""
    from identikit.runs.inspect import is_run, portion_folders
    from identikit.runs.manifest import noted_command

    if not is_run(folder) and (portions := portion_folders(folder)):
        raise InputError(
            f"Cannot resume {folder}: it holds the shards of a run. Resume each that is not complete, for example with "
            f"`identikit resume {next(iter(portions.values()))}`, and then run `identikit merge {folder}`."
        )
    noted = noted_command(folder)
    changes: dict[str, object] = {"engine": engine, "workers": workers, "address": address, "gpus": gpus or None}
    if not engine:
        changes = {name: value for name, value in changes.items() if value is not None}
    if noted.arguments.get("address") and "address" not in changes:
        raise InputError(
            f"Cannot resume {folder}: it was computed on the Ray cluster at {noted.arguments['address']}. Give "
            "--address again if that is still the right one, or choose another --engine."
        )
    _run_again(context, folder, noted, changes | {"as_json": as_json})


def _run_again(context: option.Context, folder: str, noted: "NotedCommand", changes: Mapping[str, Any]) -> None:
    """Run a noted command with some arguments changed; the parser checks them as if they were typed."""
    if noted.command not in _RESUMED:
        raise InputError(
            f"Cannot resume {folder}: command.json names the command {noted.command[:40]!r}, which cannot be "
            f"resumed ({', '.join(_RESUMED)} can). Run the right command again."
        )
    commands: Any = getattr(context.parent and context.parent.command, "commands", {})
    command = commands[noted.command]
    names = {parameter.name for parameter in command.params}
    arguments = {**noted.arguments, **changes}
    with noted.in_working_folder():
        try:
            for name, value in arguments.items():  # refuse what could not have been typed
                if name not in names:
                    raise typer.BadParameter(f"{name!r} is not an argument of {command.name}")
                for entry in value if isinstance(value, list) else [value]:
                    if not isinstance(entry, str | int | float | None) or "\0" in str(entry):
                        raise typer.BadParameter(f"{name} has the value {entry!r:.40}")
            inner = command.make_context(noted.command, [], parent=context.parent, default_map=arguments)
        except (typer.BadParameter, ValueError) as error:
            reason = error.message if isinstance(error, typer.BadParameter) else str(error)
            raise InputError(
                f"Cannot resume {folder}: command.json does not hold a command that can be run ({reason.rstrip('.')}). "
                "Run the right command again."
            ) from None
        with inner:
            command.invoke(inner)


def verify(folder: FolderArgument, as_json: option.Json = False) -> None:
    """Check that no file of a run or saved result has changed since it was written, and its proofs. No model is run."""
    from identikit.cli.terminal import answer
    from identikit.explanation import result  # noqa: F401 - a folder may hold a result of any kind
    from identikit.runs.verify import verify as verify_run

    report = verify_run(folder)
    counts = {"sealed": report.seals, "checksums": report.checksums, "tables": report.tables, "proofs": report.proofs}
    wrong = [{"file": file, "why": problem} for file, problem in report.wrong]
    lines = [report.words(), *(f"Wrong: {file}: {problem.rstrip('.')}." for file, problem in report.wrong)]
    lines.append(f"Problems found: {len(wrong)}." if wrong else "No problems found.")
    answer({"right": not wrong, "wrong": wrong, "checked": counts}, "\n".join(lines), as_json=as_json)
    if report.wrong:
        raise typer.Exit(1)


def merge(context: option.Context, folder: FolderArgument, as_json: option.Json = False) -> None:
    """Merge the shards of a run (see --shard) and make its tables, as if it had been computed in one piece."""
    from identikit.runs.merge import merge as merge_portions

    _run_again(context, folder, merge_portions(folder), {"as_json": as_json})


def report(
    folder: FolderArgument,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Where the page goes. Default: DIR/report.html.")
    ] = None,
    as_json: option.Json = False,
) -> None:
    """Draw a complete run on one page: its numbers by head, layer and length, and the texts that stand out."""
    from identikit.cli.terminal import answer
    from identikit.web.run_page import save_run_page

    page = str(save_run_page(folder, html))
    answer({"page": page}, f"The page is {page}.", as_json=as_json)


def push(
    folder: FolderArgument,
    repo: Annotated[str, typer.Argument(metavar="REPO", help="The id of a dataset on the hub, such as name/dataset.")],
    public: Annotated[
        bool, typer.Option("--public", help="Let everybody see the dataset if it is new. Default: private.")
    ] = False,
    as_json: option.Json = False,
) -> None:
    """Upload a complete run, or a saved result, to the Hugging Face hub: all its files, and a card that explains them.

    The texts are among them, and so is the command with its paths.
    """
    from identikit.cli.terminal import answer
    from identikit.explanation import result  # noqa: F401 - a folder may hold a result of any kind
    from identikit.runs.publish import publish

    address = publish(folder, repo, public=public)
    answer({"address": address}, f"The results are at {address}.", as_json=as_json)


def diff(
    one: Annotated[str, typer.Argument(metavar="A", help="The folder of a run, or of a saved result.")],
    other: Annotated[str, typer.Argument(metavar="B", help="The folder to compare it with.")],
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance", min=0.0, help="How far apart two numbers may be, relative to the larger one or to 1."
        ),
    ] = 1e-6,
    as_json: option.Json = False,
) -> None:
    """Compare two runs: settings, versions, and all numbers of their tables.

    Ends with status 0 if the tables agree, 1 if they differ, and 2 if they cannot be compared.
    """
    from identikit.cli.terminal import answer
    from identikit.explanation import result  # noqa: F401 - folders may hold results of any kind
    from identikit.runs.compare import compare

    try:
        comparison = compare(one, other, tolerance)
    except IdentikitError as error:
        typer.echo(f"identikit: {error}", err=True)
        raise typer.Exit(_INCOMPARABLE) from None
    answer(comparison.to_dict(), "\n".join(comparison.words()), as_json=as_json)
    if not comparison.equal:
        raise typer.Exit(_DIFFERENT)
