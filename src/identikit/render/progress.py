"""Progress of long work, on the terminal's error stream."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@contextmanager
def step_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar for each thing that is told of: what it is, how many of its parts are done, and of how many."""
    console = Console(stderr=True)
    pace = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), *pace)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        shown: dict[str, TaskID] = {}

        def told(what: str, done: int, total: int) -> None:
            if what not in shown:
                shown[what] = bar.add_task(what, total=total)
            bar.update(shown[what], completed=done, total=total)
            if done >= total:  # when it is told of again, it is another of its kind
                bar.remove_task(shown.pop(what))

        yield told


@contextmanager
def text_progress(what: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """Show how many texts are done, tokens a second and the time left; nothing where it is no terminal."""
    console = Console(stderr=True)
    texts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("texts"))
    pace = (TextColumn("{task.fields[rate]}"), TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    with Progress(*texts, *pace, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total, rate="")
        tokens = 0

        def advance(done: int, more: int) -> None:
            nonlocal tokens
            tokens += more
            bar.advance(task, done)
            elapsed = bar.tasks[task].elapsed
            bar.update(task, rate=f"{tokens / elapsed:.0f} tokens/s" if elapsed and tokens else "")

        yield advance
