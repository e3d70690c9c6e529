"""The commands over the folder of a run: status, resume, verify, merge and diff."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from identikit.cli.options import AddressOption, GpusOption, JsonOption, WorkersOption
from identikit.errors import IdentikitError, InputError

if TYPE_CHECKING:
    from typer import Context
else:
    Context = typer.Context.__base__  # what typer really hands over, where types are checked at run time

FolderArgument = Annotated[str, typer.Argument(metavar="DIR", help="The folder of the run, as --out named it.")]
_RESUMED = ("attention", "attribution", "tokens", "reproduce")
_DIFFERENT, _TROUBLE = 1, 2  # exit statuses of diff


def status(folder: FolderArgument, as_json: JsonOption = False) -> None:
    """Say how far a run is: what is done and missing, how fast it goes, who writes to it, and what is damaged."""
    from identikit.runs.inspect import (
        absent_parts,
        inputs_of,
        is_run,
        open_run,
        parts_of,
        state,
        state_line,
        state_words,
    )

    parts = parts_of(folder)
    whole = state(folder) if is_run(folder) else None
    if whole is None and not parts:
        open_run(folder)  # it says why it is none
    nested: dict[str, Any] = {}
    for place in (*parts.values(), *inputs_of(folder)):
        name = place.removeprefix(f"{folder.rstrip('/')}/")
        try:
            nested[name] = state(place)
        except InputError as why:
            nested[name] = str(why)
    nested |= dict.fromkeys(absent_parts(parts), "not there")
    if as_json:
        told = {name: one if isinstance(one, str) else one.to_dict() for name, one in sorted(nested.items())}
        typer.echo(json.dumps({"run": whole and whole.to_dict(), "parts": told}, ensure_ascii=False, default=str))
        return
    for line in state_words(whole) if whole is not None else [f"{folder}: a run in {len(nested)} shards."]:
        typer.echo(line)
    for name, one in sorted(nested.items()):
        typer.echo(f"{name}: {one if isinstance(one, str) else state_line(one)}")


def resume(
    context: Context,
    folder: FolderArgument,
    engine: Annotated[
        str | None, typer.Option("--engine", help="local, processes or ray. Default: what the run was started with.")
    ] = None,
    workers: WorkersOption = None,
    address: AddressOption = None,
    gpus: GpusOption = 0.0,
    as_json: JsonOption = False,
) -> None:
    """Go on with a run: run the command that it was started with again, from its folder alone."""
    from identikit.runs.command import noted
    from identikit.runs.inspect import is_run, parts_of

    if not is_run(folder) and (parts := parts_of(folder)):
        raise InputError(
            f"Cannot resume {folder}: it holds shards of a run. Resume each that is not complete, such as with "
            f"`identikit resume {next(iter(parts.values()))}`, and then run `identikit merge {folder}`."
        )
    kept = noted(folder)
    chosen: dict[str, Any] = {"engine": engine, "workers": workers, "address": address, "gpus": gpus or None}
    changes = chosen if engine else {name: value for name, value in chosen.items() if value is not None}
    if kept.arguments.get("address") and "address" not in changes:
        raise InputError(
            f"Cannot resume {folder}: it was computed on the Ray cluster at {kept.arguments['address']}. Give "
            "--address again if that is still the right one, or choose another --engine."
        )
    _run_again(context, folder, kept, changes | {"as_json": as_json})


def _run_again(context: Context, folder: str, kept: Any, changes: Mapping[str, Any]) -> None:
    """Run a noted command, with some arguments changed, through the parser that checks what users type."""
    commands: Any = getattr(context.parent and context.parent.command, "commands", {})
    if kept.command not in _RESUMED:
        raise InputError(
            f"Cannot resume {folder}: command.json names the command {kept.command[:40]!r}, which is none of "
            f"{', '.join(_RESUMED)}. Run the right command again."
        )
    command = commands[kept.command]
    try:
        line = _command_line(command, kept.arguments | changes)
        with kept.there():
            inner = command.make_context(kept.command, line, parent=context.parent)
    except (typer.BadParameter, ValueError) as error:
        why = error.message if isinstance(error, typer.BadParameter) else str(error)
        raise InputError(
            f"Cannot resume {folder}: command.json does not hold a command that can be run ({why.rstrip('.')}). Run "
            "the right command again."
        ) from None
    with kept.there(), inner:
        command.invoke(inner)


def _command_line(command: Any, arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments as they would be typed; those that the command does not have are refused."""
    known = {one.name: one for one in command.params}
    line: list[str] = []
    for name, value in arguments.items():
        if name not in known:
            raise ValueError(f"{name!r} is no argument of {command.name}")
        line += _typed(known[name], value)
    positions = [str(value) for name, value in arguments.items() for value in _positional(known[name], value)]
    return [*line, "--", *positions]


def _positional(parameter: Any, value: Any) -> list[Any]:
    return (_values(parameter, value) if value is not None else []) if parameter.param_type_name == "argument" else []


def _typed(parameter: Any, value: Any) -> list[str]:
    if value is None or parameter.param_type_name == "argument":
        return []
    if parameter.is_flag:
        if not isinstance(value, bool):
            raise ValueError(f"{parameter.name} is {value!r:.40}, expected true or false")
        return [parameter.opts[0]] if value else parameter.secondary_opts[:1]
    return [f"{parameter.opts[0]}={one}" for one in _values(parameter, value)]


def _values(parameter: Any, value: Any) -> list[Any]:
    """Return the values of an argument, each a word or a number."""
    several = parameter.nargs == -1 or getattr(parameter, "multiple", False)
    values = value if several and isinstance(value, list) else [value]
    for one in values:
        if isinstance(one, bool) or not isinstance(one, str | int | float) or "\0" in str(one):
            raise ValueError(f"{parameter.name} has the value {one!r:.40}")
    return values


def verify(folder: FolderArgument, as_json: JsonOption = False) -> None:
    """Check that the files of a run or of a saved result are as they were written. Nothing is computed again."""
    from identikit.runs.verify import verify as verified

    found = verified(folder)
    if as_json:
        wrong = [{"file": file, "why": why} for file, why in found.wrong]
        counts = {"sealed": found.seals, "checksums": found.checksums, "tables": found.tables}
        typer.echo(json.dumps({"right": not wrong, "wrong": wrong, "checked": counts}, ensure_ascii=False))
    else:
        typer.echo(found.words())
        for file, why in found.wrong:
            typer.echo(f"Wrong: {file}: {why.rstrip('.')}.")
        typer.echo("Nothing is wrong." if not found.wrong else f"{len(found.wrong)} wrong.")
    if found.wrong:
        raise typer.Exit(1)


def merge(context: Context, folder: FolderArgument, as_json: JsonOption = False) -> None:
    """Put the shards of a run together (see --shard), and make its tables, as if it had been computed in one."""
    from identikit.runs.merge import merge as merged

    _run_again(context, folder, merged(folder), {"as_json": as_json})


def diff(
    one: Annotated[str, typer.Argument(metavar="A", help="The folder of a run, or of a saved result.")],
    other: Annotated[str, typer.Argument(metavar="B", help="The folder of another.")],
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance", min=0.0, help="How far numbers may be apart, relative to the largest of 1 and them."
        ),
    ] = 1e-6,
    as_json: JsonOption = False,
) -> None:
    """Compare two runs: settings, versions, and all numbers of their tables.

    Ends with status 0 if the tables agree, 1 if they differ, and 2 if they cannot be compared.
    """
    from identikit.runs.compare import compare

    try:
        found = compare(one, other, tolerance)
    except IdentikitError as error:
        typer.echo(f"identikit: {error}", err=True)
        raise typer.Exit(_TROUBLE) from None
    for line in [json.dumps(found.to_dict(), ensure_ascii=False, default=str)] if as_json else found.words():
        typer.echo(line)
    if not found.equal:
        raise typer.Exit(_DIFFERENT)
