"""The reference of the command line, from the command line itself."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from typer.main import get_command

from identikit.cli.main import app


@dataclass(frozen=True)
class Command:
    """A command, or a group of commands."""

    context: Any

    @property
    def path(self) -> str:
        """All of its words, such as `identikit bench page`."""
        return self.context.command_path

    @property
    def page(self) -> str:
        """The name of its page."""
        return "-".join(self.path.split()[1:])

    @property
    def doc(self) -> str:
        """What it does."""
        return inspect.cleandoc(self.context.command.help or "")

    @property
    def parameters(self) -> list[tuple[str, str]]:
        """Its options and arguments as its help shows them, each with its words; but `--help`, which all have."""
        return [one.get_help_record(self.context) for one in self.context.command.params if one.name != "help"]

    @property
    def epilog(self) -> str:
        """What its help says below the options."""
        formatter = self.context.make_formatter()
        self.context.command.format_epilog(self.context, formatter)
        return formatter.getvalue().strip()


@cache
def commands() -> list[Command]:
    """Every command, groups before their own."""
    root = get_command(app)
    return list(_below(root, root.make_context("identikit", [], resilient_parsing=True)))


def _below(command: Any, context: Any) -> Iterator[Command]:
    yield Command(context)
    for name in getattr(command, "commands", ()):
        inner = command.commands[name]
        made = inner.make_context(name, [], parent=context, resilient_parsing=True)
        yield from _below(inner, made)


def undocumented() -> list[str]:
    """Commands, options and arguments without help."""
    found = [command.path for command in commands() if not command.doc]
    for command in commands():
        found += [f"{command.path} {written}" for written, words in command.parameters if not words.strip(" []")]
    return found


def page(command: Command) -> str:
    """The page of one command."""
    usage = " ".join([command.path, *command.context.command.collect_usage_pieces(command.context)])
    lines = [f"# {command.path}", "", command.doc, "", "```text", usage, "```", ""]
    lines += _table([one for one in commands() if one.path.startswith(f"{command.path} ")], "")
    lines += [f"```{{program}} {command.path}", "```"]
    for written, words in command.parameters:
        kind = "option" if written.startswith("-") else "describe"
        lines += ["", f":::{{{kind}}} {written}", words, ":::"]
    return "\n".join(lines + (["", "```text", command.epilog, "```"] if command.epilog else [])) + "\n"


def _table(listed: list[Command], folder: str) -> list[str]:
    rows = [f"| [`{one.path}`]({folder}{one.page}.md) | {one.doc.split(chr(10))[0]} |" for one in listed]
    return ["| command | |", "|---|---|", *rows, ""] if rows else []


def pages() -> dict[str, str]:
    """The pages of the reference, by their paths: one of each command, and the list of all."""
    listed = [command for command in commands() if command.page]
    found = {f"commands/{command.page}.md": page(command) for command in listed}
    lines = ["# Command line", "", *_table(listed, "commands/")]
    lines += ["`--help` after any of them prints what its page says, and `identikit --version` the version."]
    toctree = [f"{one.path.partition(' ')[2]} <commands/{one.page}>" for one in listed]
    lines += ["", "```{toctree}", ":hidden:", "", *toctree, "```"]
    return found | {"commands.md": "\n".join(lines) + "\n"}
