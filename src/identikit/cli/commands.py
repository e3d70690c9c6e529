"""The commands as typer finds them, and what their help says."""

from typing import Any

from typer.core import TyperCommand, TyperGroup

from identikit.cli.endings import OPTIONS

_WHOLE = 1000  # letters that a command's line in the help may have: more than any sentence


class Commands(TyperGroup):
    """The commands; what the library says while one runs is said with its own options."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Find a command, and note the names of its options for what is said while it runs."""
        name, command, rest = super().resolve_command(ctx, args)
        OPTIONS.set({one.name: one.opts[0] for one in command.params} if command else {})
        return name, command, rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Say of each command the whole first sentence of its help; a line would cut it."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(_WHOLE)) for name, one in self.commands.items()])


class WithSampleSizes(TyperCommand):
    """A command whose help ends with how many texts the paper's claims need; they are only read for that."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Add the numbers of texts."""
        from identikit.paper.claims.catalogue import sample_sizes

        with formatter.section("How many texts the claims need; with fewer, they are undecided"):
            for line in sample_sizes():
                formatter.write_text(line)
