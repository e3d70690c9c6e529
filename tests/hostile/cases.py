"""What a hostile case is, how it is run, and how its end is judged.

A case does something to the library that nobody should do, through the public API or the command line. It ends well in
one of two ways: refused in one clear line, or with a result that the case proves right by other means. Everything else
is a fault: a traceback, a message nobody can use, a result that is silently wrong, or something of the user's lost.
"""

import re
import resource
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import identikit as ik

KINDS = ("texts", "files", "checkpoints", "configs", "stores", "arguments", "environments", "models", "numerics")
GOOD = ("refused", "right")
ENDS = (*GOOD, "unclear", "traceback", "wrong", "lost")

LONGEST = 600  # characters of a message
SECONDS = 120  # that a case may take before it counts as hung
MEMORY = 6 << 30  # bytes that a case may take

Row, Column = TypeVar("Row"), TypeVar("Column")

_UNREADABLE = re.compile(r"Traceback|<[\w.]+ (object )?at 0x|\\x1b|\x1b")


class Refused(Exception):  # noqa: N818 - an end of a case
    """The command line refused, with this message."""


class Unclear(Exception):  # noqa: N818 - an end of a case
    """The command line ended in a way that tells a user too little, or too much."""


class Wrong(Exception):  # noqa: N818 - an end of a case
    """A result came out that is not right."""


class Lost(Exception):  # noqa: N818 - an end of a case
    """Something of the user's is gone or was changed."""


class Hung(BaseException):
    """A case did not end in time; nothing in between may catch it."""


@dataclass(frozen=True)
class Case:
    """One hostile thing to do.

    - `run`: does it in an empty folder: raises what the library raises, and `Wrong` or `Lost` where a proof fails
    - `expect`: "refused" (going through is wrong), "right" (a refusal is wrong), or "either"
    - `names`: patterns of what a refusal has to name, so that the user finds it
    - `slow`: `make test` leaves it out
    """

    name: str
    kind: str
    run: Callable[[Path], object]
    expect: str = "either"
    names: tuple[str, ...] = ()
    slow: bool = False


def crossed(rows: Iterable[Row], columns: Iterable[Column]) -> Iterator[tuple[Row, Column, bool]]:
    """Yield every row with every column, and whether the pair is slow.

    Only a diagonal is not, as short as can be while it meets each row and each column.
    """
    rows, columns = list(rows), list(columns)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            yield row, column, i % len(columns) != j % len(rows)


class Outcome(NamedTuple):
    """How a case ended, and what was said or went wrong."""

    case: Case
    end: str
    said: str

    @property
    def good(self) -> bool:
        """Whether a user was served: refused in a clear line, or given what is right."""
        return self.end in GOOD


def outcome(case: Case, place: Path) -> Outcome:
    """Run a case in an empty folder, as a user would meet it: warnings are only warnings."""
    try:
        with warnings.catch_warnings(record=True), _in_time(SECONDS), _in_memory(MEMORY):
            warnings.simplefilter("always")
            case.run(place)
    except (ik.IdentikitError, Refused) as refusal:
        return _refused(case, str(refusal))
    except (Unclear, Wrong, Lost) as fault:
        return Outcome(case, type(fault).__name__.lower(), str(fault))
    except Hung:
        return Outcome(case, "traceback", f"did not end within {SECONDS} seconds")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return Outcome(case, "traceback", f"{type(error).__name__}: {error}")
    if case.expect == "refused":
        return Outcome(case, "wrong", "accepted without a word")
    return Outcome(case, "right", "")


def _refused(case: Case, message: str) -> Outcome:
    if case.expect == "right":
        return Outcome(case, "wrong", f"refused what is right: {message}")
    why = unclear(message, case.names)
    return Outcome(case, "unclear", f"{why}: {message!r}") if why else Outcome(case, "refused", message)


def unclear(message: str, names: tuple[str, ...] = ()) -> str:
    """Say why a message does not help its reader; '' if it does."""
    if not message.strip():
        return "the message is empty"
    if "\n" in message or "\r" in message:
        return "it has more than one line"
    if len(message) > LONGEST:
        return f"it has {len(message)} characters"
    if not message.endswith((".", "?", ")")):
        return "it does not end as a sentence"
    if found := _UNREADABLE.search(message):
        return f"it shows {found[0]!r}"
    missing = [name for name in names if not re.search(name, message)]
    return f"it does not name {missing[0]!r}" if missing else ""


def proved(holds: Any, words: str) -> None:
    """Go on if what was computed is right."""
    if not bool(holds):
        raise Wrong(words)


def kept(holds: Any, words: str) -> None:
    """Go on if everything of the user's is still there."""
    if not bool(holds):
        raise Lost(words)


@contextmanager
def _in_memory(more: int) -> Iterator[None]:
    """Let the process take this many bytes more than it has, so that a greedy case fails instead of the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def _in_time(seconds: int) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hung(*_: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
