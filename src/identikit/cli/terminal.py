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
    """Return a console wide enough for words, whatever width the surroundings claim."""
    made = Console(stderr=stderr)
    if made.width < NARROWEST:
        made.width = 80
    return made


def print_json(value: object) -> None:
    """Print a value as JSON on one line, with null in place of what is not a finite number."""
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    print(json.dumps(plain(value), ensure_ascii=not is_unicode, allow_nan=False))


def answer(numbers: object, words: str, *, as_json: bool) -> None:
    """Print what a command found: its numbers as JSON, or in words."""
    if as_json:
        print_json(numbers)
    else:
        typer.echo(words)


@contextmanager
def step_progress() -> Iterator[Progress]:
    """Yield a function that shows progress: what is being done, how many parts of it are done, and of how many.

    On a terminal each piece of work has a bar. Elsewhere a line is printed after 30 seconds of silence, so that the log
    of a long run shows that it moves. Parts per second and the time left leave out what was done before the first
    report. `--report-to` also logs it to an experiment tracker.
    """
    errors = console(stderr=True)
    shown = bars(errors) if errors.is_terminal else nullcontext(_lines())
    with shown as told, reported_to(REPORT_TO.get(), told) as both:
        yield both


def _lines() -> Progress:
    started: dict[str, Pace] = {}
    printed = time.monotonic()

    def told(what: str, done: int, total: int) -> None:
        nonlocal printed
        now = time.monotonic()
        start = started.setdefault(what, Pace(done, now))
        if now - printed >= QUIET_SECONDS:
            printed = now
            rate = start.rate(done, now)
            pace = f" ({per_second(rate)}, {whole_seconds((total - done) / rate)} left)" if rate else ""
            print(f"identikit: {what}: {done:,} of {total:,}{pace}", file=sys.stderr, flush=True)
        if done >= total:  # a later report with this name is about new work
            del started[what]

    return told


@contextmanager
def reported_to(tracker: str | None, told: Progress, *, project: str = "identikit") -> Iterator[Progress]:
    """Yield a function that calls `told` and, once a second, logs how far each step is to an experiment tracker.

    Without a tracker it only calls `told`. What a tracker prints goes to the error stream.
    """
    if tracker is None:
        yield told
        return
    if tracker not in TRACKERS:
        raise InputError(f"Progress cannot be reported to {tracker!r}. Use {' or '.join(TRACKERS)}.")
    try:
        import trackio  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise InputError("Reporting to trackio needs the package trackio. Run `pip install trackio`.") from error
    logged: dict[str, float] = {}

    def also_logged(what: str, done: int, total: int) -> None:
        told(what, done, total)
        now = time.monotonic()
        if done >= total or now - logged.get(what, 0.0) >= 1.0:
            logged[what] = now
            trackio.log({f"{what}/done": done, f"{what}/of": total})

    with redirect_stdout(sys.stderr):
        trackio.init(project=project)
    try:
        yield also_logged
    finally:
        with redirect_stdout(sys.stderr):
            trackio.finish()
