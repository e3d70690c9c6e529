"""Progress of long work, on the error stream: bars on a terminal, a line now and then elsewhere."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout

import typer
from rich.console import Console

from identikit.cli.endings import REPORT_TO
from identikit.errors import InputError
from identikit.progress import Pace, Progress, bars, per_second, whole_seconds
from identikit.results.files import plain

NARROWEST = 40  # columns
TRACKERS = ("trackio",)  # that progress can be reported to
QUIET_SECONDS = 30.0  # how long a log stays silent before the next line


def console(*, stderr: bool = False) -> Console:
    """Return a console of the terminal's width, or of 80 columns where a width too small for words is reported."""
    result = Console(stderr=stderr)
    if result.width < NARROWEST:
        result.width = 80
    return result


def print_json(value: object) -> None:
    """Print a value as JSON on one line, with null in place of NaN and infinity."""
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    print(json.dumps(plain(value), ensure_ascii=not is_unicode, allow_nan=False))


def answer(numbers: object, words: str, *, as_json: bool) -> None:
    """Print the result of a command: its numbers as JSON, or words."""
    if as_json:
        print_json(numbers)
    else:
        typer.echo(words)


@contextmanager
def step_progress() -> Iterator[Progress]:
    """Yield a function that shows progress: what is being done, how many parts of it are done, and of how many.

    On a terminal each piece of work has a bar. Elsewhere a line is printed after 30 seconds of silence, so that the log
    of a long run shows that it moves. Rates and the time left do not count what was done before the first report.
    `--report-to` also logs progress to an experiment tracker.
    """
    errors = console(stderr=True)
    display = bars(errors) if errors.is_terminal else nullcontext(_print_lines())
    with display as report, with_tracker(REPORT_TO.get(), report) as report_to_both:
        yield report_to_both


def _print_lines() -> Progress:
    """Return a function that prints a line of progress after `QUIET_SECONDS` of silence."""
    paces: dict[str, Pace] = {}
    last_print = time.monotonic()

    def report(what: str, done: int, total: int) -> None:
        nonlocal last_print
        now = time.monotonic()
        pace = paces.setdefault(what, Pace(done, now))
        if now - last_print >= QUIET_SECONDS:
            last_print = now
            rate = pace.rate(done, now)
            speed = f" ({per_second(rate)}, {whole_seconds((total - done) / rate)} left)" if rate else ""
            print(f"identikit: {what}: {done:,} of {total:,}{speed}", file=sys.stderr, flush=True)
        if done >= total:  # a later report with this name is about new work
            del paces[what]

    return report


@contextmanager
def with_tracker(tracker: str | None, report: Progress, *, project: str = "identikit") -> Iterator[Progress]:
    """Yield a function that calls `report` and, once a second per step, logs progress to an experiment tracker.

    Without a tracker, yield `report`. What a tracker prints goes to the error stream.
    """
    if tracker is None:
        yield report
        return
    if tracker not in TRACKERS:
        raise InputError(f"Progress cannot be reported to {tracker!r}. Use {' or '.join(TRACKERS)}.")
    try:
        import trackio  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise InputError("Reporting to trackio needs the package trackio. Run `pip install trackio`.") from error
    last_logged: dict[str, float] = {}

    def report_and_log(what: str, done: int, total: int) -> None:
        report(what, done, total)
        now = time.monotonic()
        if done >= total or now - last_logged.get(what, 0.0) >= 1.0:
            last_logged[what] = now
            trackio.log({f"{what}/done": done, f"{what}/of": total})

    with redirect_stdout(sys.stderr):
        trackio.init(project=project)
    try:
        yield report_and_log
    finally:
        with redirect_stdout(sys.stderr):
            trackio.finish()
