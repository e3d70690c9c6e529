"""How typer finds the commands and writes their help."""

from typing import Any

from typer.core import TyperCommand, TyperGroup

from identikit.cli.endings import OPTIONS

_HELP_LETTERS = 1000  # of a command in the list of commands: more than any sentence has


class Commands(TyperGroup):
    """The commands; while one runs, messages name its own options."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Find a command, and note the names of its options for the messages."""
        name, command, arguments = super().resolve_command(ctx, args)
        OPTIONS.set({parameter.name: parameter.opts[0] for parameter in command.params} if command else {})
        return name, command, arguments

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands with the first sentence of their help, which typer would cut."""
        sentences = [(name, command.get_short_help_str(_HELP_LETTERS)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(sentences)


class WithSampleSizes(TyperCommand):
    """A command whose help ends with how many texts the paper's claims need; claims are imported only for that."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Add the numbers of texts."""
        from identikit.paper.claims.catalogue import sample_sizes

        with formatter.section("How many texts the claims need; with fewer, they are undecided"):
            for line in sample_sizes():
                formatter.write_text(line)
