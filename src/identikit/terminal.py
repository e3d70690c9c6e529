"""Progress of long work, on the terminal's error stream."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text


class _Begun(NamedTuple):
    """A bar, and what was done already when it was first told of: that took no time here."""

    bar: TaskID
    before: int
    time: float


class _TimeLeft(ProgressColumn):
    """Counts down to when a bar is expected to be full."""

    def render(self, task: Task) -> Text:
        ends = task.fields["ends"]
        left = "-:--:--" if ends is None else str(timedelta(seconds=max(round(ends - task.get_time()), 0)))
        return Text(f"left: {left}", style="progress.remaining")


@contextmanager
def step_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar for each thing that is told of: what it is, how many of its parts are done, and of how many.

    Parts a second and the time left are reckoned from when a thing is first told of, without what was done by then.
    Nothing is shown where it is no terminal.
    """
    console = Console(stderr=True)
    counts = (TextColumn("{task.description}"), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    times = (BarColumn(bar_width=None), TimeElapsedColumn(), _TimeLeft())
    with Progress(*counts, *times, console=console, transient=True, disable=not console.is_terminal) as bars:
        shown: dict[str, _Begun] = {}

        def told(what: str, done: int, total: int) -> None:
            now = bars.get_time()
            if what not in shown:
                bar = bars.add_task(what, total=total, completed=done, rate="", ends=None)
                shown[what] = _Begun(bar, done, now)
            bar, before, began = shown[what]
            if done > before and now > began:
                rate = (done - before) / (now - began)
                bars.update(bar, rate=_per_second(rate), ends=now + (total - done) / rate)
            bars.update(bar, completed=done, total=total)
            if done >= total:  # when it is told of again, it is another of its kind
                bars.remove_task(shown.pop(what).bar)

        yield told


def _per_second(rate: float) -> str:
    return f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s"
