"""Progress of long work: one signature for every `progress` argument, and the bars.

A public function that can take long has the decorator `reporting`, and passes its `progress` on to all that it calls.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import wraps
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many parts of it are done, and how many there are."""

Watched = Progress | bool | None
"""A `Progress`, or whether to show bars; None: only where a person can see them, on a terminal or in a notebook."""

PATIENCE = 1.0  # seconds that a call may take before its bars are shown

Options = ParamSpec("Options")
Answer = TypeVar("Answer")


def silent(what: str, done: int, total: int) -> None:
    """Report nothing."""


def reporting(function: Callable[Options, Answer]) -> Callable[Options, Answer]:
    """Turn a function's option `progress` into a `Progress`: the caller's own function, bars, or nothing.

    Bars are drawn on the error stream, unless that is a file or a pipe, and in notebooks.
    """

    @wraps(function)
    def call(*arguments: Options.args, **options: Options.kwargs) -> Answer:
        with _progress_context(options.get("progress")) as progress:
            return function(*arguments, **{**options, "progress": progress})  # pyright: ignore[reportCallIssue]

    return call


def _progress_context(progress: Any) -> AbstractContextManager[Progress]:
    if progress is False or (progress is None and not _is_watched()):
        return nullcontext(silent)
    return bars(patience=PATIENCE) if progress is None or progress is True else nullcontext(progress)


def _is_watched() -> bool:
    """Whether bars can be seen: on a terminal, or in a notebook that has widgets."""
    if "ipykernel" in sys.modules:
        return find_spec("ipywidgets") is not None
    return sys.stderr is not None and sys.stderr.isatty()


class Pace(NamedTuple):
    """When work was first reported, and how much of it was done by then, which does not count for the rate."""

    done: int
    time: float

    def rate(self, done: int, now: float) -> float | None:
        """Return parts per second since the first report; None if nothing was done since."""
        return (done - self.done) / (now - self.time) if done > self.done and now > self.time else None


@contextmanager
def bars(console: "Console | None" = None, *, patience: float = 0.0) -> Iterator[Progress]:
    """Yield a function that shows a bar for each piece of work longer than `patience` seconds, and removes it."""
    from rich import progress as rich
    from rich.console import Console
    from rich.text import Text

    class TimeLeft(rich.ProgressColumn):
        """Counts down to when a bar is expected to be full."""

        def render(self, task: rich.Task) -> Text:
            ends = task.fields["ends"]
            duration = "-:--:--" if ends is None else whole_seconds(ends - task.get_time())
            return Text(f"left: {duration}", style="progress.remaining")

    counts = (rich.TextColumn("{task.description}"), rich.MofNCompleteColumn(), rich.TextColumn("{task.fields[rate]}"))
    times = (rich.BarColumn(bar_width=None), rich.TimeElapsedColumn(), TimeLeft())
    paces: dict[str, tuple[rich.TaskID, Pace]] = {}
    with rich.Progress(*counts, *times, console=console or Console(stderr=True), transient=True) as display:
        start = display.get_time()

        def report(what: str, done: int, total: int) -> None:
            now = display.get_time()
            if now - start < patience:
                return
            if what not in paces:
                bar = display.add_task(what, total=total, completed=done, rate="", ends=None)
                paces[what] = bar, Pace(done, now)
            bar, pace = paces[what]
            if rate := pace.rate(done, now):
                display.update(bar, rate=per_second(rate), ends=now + (total - done) / rate)
            display.update(bar, completed=done, total=total)
            if done >= total:  # a later report with this name is about new work
                display.remove_task(paces.pop(what)[0])

        yield report


def per_second(rate: float) -> str:
    """Write parts per second."""
    return f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s"


def whole_seconds(seconds: float) -> str:
    """Write a duration as hours, minutes and seconds."""
    return str(timedelta(seconds=max(round(seconds), 0)))
