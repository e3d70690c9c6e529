"""Progress of long work, on the error stream: bars on a terminal, a line now and then elsewhere."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from identikit.progress import Progress
from identikit.results.files import plain

NARROWEST = 40  # columns
QUIET_SECONDS = 30.0  # how long a log stays silent before the next line


def console(*, stderr: bool = False) -> Console:
    """Return a console wide enough for words, whatever width the surroundings claim."""
    made = Console(stderr=stderr)
    if made.width < NARROWEST:
        made.width = 80
    return made


def print_json(value: object) -> None:
    """Print a value as JSON on one line, with null in place of what is not a finite number."""
    print(json.dumps(plain(value), ensure_ascii=False, allow_nan=False))


class _Start(NamedTuple):
    """When work was first reported, and how much of it was done by then: that part took no time here."""

    done: int
    time: float

    def rate(self, done: int, now: float) -> float | None:
        """Return parts per second since the start, or None before there is a pace."""
        return (done - self.done) / (now - self.time) if done > self.done and now > self.time else None


class _TimeLeft(ProgressColumn):
    """Counts down to when a bar is expected to be full."""

    def render(self, task: Task) -> Text:
        ends = task.fields["ends"]
        left = "-:--:--" if ends is None else _duration(ends - task.get_time())
        return Text(f"left: {left}", style="progress.remaining")


@contextmanager
def step_progress() -> Iterator[Progress]:
    """Yield a function that shows progress: what is being done, how many parts of it are done, and of how many.

    On a terminal each piece of work has a bar. Elsewhere a line is printed after 30 seconds of silence, so that the log
    of a long run shows that it moves. Parts per second and the time left leave out what was done before the first
    report.
    """
    errors = console(stderr=True)
    if errors.is_terminal:
        with _bars(errors) as told:
            yield told
    else:
        yield _lines()


@contextmanager
def _bars(console: Console) -> Iterator[Progress]:
    counts = (TextColumn("{task.description}"), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    times = (BarColumn(bar_width=None), TimeElapsedColumn(), _TimeLeft())
    with Bars(*counts, *times, console=console, transient=True) as bars:
        shown: dict[str, tuple[TaskID, _Start]] = {}

        def told(what: str, done: int, total: int) -> None:
            now = bars.get_time()
            if what not in shown:
                bar = bars.add_task(what, total=total, completed=done, rate="", ends=None)
                shown[what] = bar, _Start(done, now)
            bar, start = shown[what]
            if rate := start.rate(done, now):
                bars.update(bar, rate=_per_second(rate), ends=now + (total - done) / rate)
            bars.update(bar, completed=done, total=total)
            if done >= total:  # a later report with this name is about new work
                bars.remove_task(shown.pop(what)[0])

        yield told


def _lines() -> Progress:
    started: dict[str, _Start] = {}
    printed = time.monotonic()

    def told(what: str, done: int, total: int) -> None:
        nonlocal printed
        now = time.monotonic()
        start = started.setdefault(what, _Start(done, now))
        if now - printed >= QUIET_SECONDS:
            printed = now
            rate = start.rate(done, now)
            pace = f" ({_per_second(rate)}, {_duration((total - done) / rate)} left)" if rate else ""
            print(f"identikit: {what}: {done:,} of {total:,}{pace}", file=sys.stderr, flush=True)
        if done >= total:  # a later report with this name is about new work
            del started[what]

    return told


def _per_second(rate: float) -> str:
    return f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=max(round(seconds), 0)))
