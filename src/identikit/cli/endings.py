"""How a command ends: normally, with one line that says what is wrong, or silently if its output is closed.

The statuses are 0, 1 for what the user can fix, 2 for wrong options, 70 for an error of ours, 130 after
Ctrl-C and 143 after SIGTERM. This module is loaded before anything slow, so that starting up ends as well.
"""

import errno
import math
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from identikit.errors import UNFINISHED, IdentikitError, InputError, for_command_line

FAILED = 1
INTERNAL = 70
INTERRUPTED = 130
_STOPPED = {INTERRUPTED: "Interrupted", 143: "Terminated"}
_ENDING_SECONDS = 5.0  # in which what was computed is written, and another signal changes nothing
_AGAIN_SECONDS = 0.05  # until a signal that came in a destructor is sent again
_QUIET = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
_MEMORY = ("out of memory", "allocate memory", "not enough memory")
OPTIONS: ContextVar[Mapping[str, str] | None] = ContextVar("OPTIONS", default=None)
"""The options of the command that runs, by their names in Python; None before one does."""
REPORT_TO: ContextVar[str | None] = ContextVar("REPORT_TO", default=None)  # the experiment tracker of this command


@dataclass
class _Signals:
    """The statuses of the signals that came, when the last did, and whether the command runs: it can be unwound."""

    statuses: list[int] = field(default_factory=list)
    last: float = -math.inf
    running: bool = False

    def end(self, number: int, _: object) -> None:
        """Note a signal and raise what ends a command.

        Before and after the command, the process ends at once: what is raised inside the C++ of libraries that are
        being loaded aborts it with lines of their own. A signal soon after another changes nothing: it would stop the
        writing of what was computed.
        """
        status = 128 + number
        self.statuses.append(status)
        is_another = time.monotonic() - self.last < _ENDING_SECONDS
        self.last = time.monotonic()
        if is_another:
            return
        if not self.running:
            _tell(f"{_STOPPED[status]}.")
            os._exit(status)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(status)

    def swallowed(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """Send a signal once more if a destructor swallowed what it raised; show anything else."""
        if not (self.statuses and isinstance(unraisable.exc_value, KeyboardInterrupt | SystemExit)):
            sys.__unraisablehook__(unraisable)
            return
        self.last = -math.inf
        again = threading.Timer(_AGAIN_SECONDS, self._again, (self.statuses.pop() - 128,))
        again.daemon = True
        again.start()

    def _again(self, number: int) -> None:
        if self.running:
            os.kill(os.getpid(), number)


def run(load: Callable[[], Callable[[], object]]) -> None:
    """Load a command, run it, and leave the program with its status; nothing it raises becomes a traceback.

    Warnings are shown as lines whatever filters are set, what an encoding lacks is escaped, and SIGTERM is like Ctrl-C.
    """
    _open_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    signals = _Signals()
    handlers: dict[int, Any] = {}
    hook = sys.unraisablehook
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for category in _QUIET:
            warnings.simplefilter("ignore", category)
        warnings.showwarning = lambda message, *about, **others: _tell(own_words(str(message)))
        try:
            sys.unraisablehook = signals.swallowed
            with suppress(ValueError):  # not in the main thread
                for number in (signal.SIGINT, signal.SIGTERM):
                    handlers[number] = signal.signal(number, signals.end)
            status = _flushed(_status(load, signals))
        finally:
            sys.unraisablehook = hook
            for number, handler in handlers.items():
                signal.signal(number, handler)
    sys.exit(status)


def _status(load: Callable[[], Callable[[], object]], signals: _Signals) -> int:
    try:
        _check_folder()
        command = load()
        signals.running = True
        command()
        signals.running = False
        return 0
    except BaseException as error:
        signals.running = False
        status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else getattr(error, "code", None)
        if signals.statuses:  # what a signal raises may be turned into anything on its way
            status = signals.statuses[0]
        if status in _STOPPED:
            _tell(_stopped(status, error))
            return status
        if not isinstance(error, SystemExit):
            return _explained(error)
        if status is None:
            return 0
        return status if isinstance(status, int) else FAILED


def _stopped(status: int, error: BaseException) -> str:
    """Say that a command was stopped, and what the outermost folder that it wrote to noted about itself."""
    words = f"{_STOPPED[status]}."
    for finish in reversed(UNFINISHED.copy()):  # a signal may come while a folder is taken or left
        finish(error)
    cause: BaseException | None = error
    while cause is not None:  # typer turns one error into another
        if notes := getattr(cause, "__notes__", ()):
            return f"{words} {notes[-1]}"
        cause = cause.__cause__ or cause.__context__
    return words


def _check_folder() -> None:
    """Refuse to start in a folder that was removed: torch's libraries would end the process with a line of theirs."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise InputError(
            "The working folder no longer exists. Change to another one and run the command again."
        ) from None


def _explained(error: BaseException) -> int:
    """Say what went wrong, and return the status."""
    words = " ".join(str(error).split())
    if isinstance(error, IdentikitError):
        _tell(own_words(words))
    elif isinstance(error, OSError):
        if error.errno != errno.EPIPE:
            where = f" ({error.filename})" if error.filename else ""
            _tell(f"{error.strerror or words}{where}. Fix this and run the command again.")
    elif isinstance(error, ModuleNotFoundError) and error.name:
        _tell(f"This needs the package {error.name}, which is not installed. Run `pip install {_with(error.name)}`.")
    elif isinstance(error, MemoryError) or any(phrase in words.lower() for phrase in _MEMORY):
        where = "the GPU's memory" if "cuda" in words.lower() else "memory"
        _tell(f"This needs more than {where}. Pass a shorter text or a smaller model, or use a larger machine.")
    else:
        _tell(
            f"An internal error, which is not your fault: {type(error).__name__}: {words:.200}. Please report it to "
            f"the authors of identikit{_report()}."
        )
        return INTERNAL
    return FAILED


def _with(package: str) -> str:
    """Return what to install for a package: the extra that has it and all that goes with it, or the package itself."""
    from importlib.metadata import requires

    for requirement in requires("identikit") or ():
        needed, _, extra = requirement.partition("; extra == ")
        extra = extra.strip("'\"")
        if re.split(r"[^\w.-]", needed)[0] == package and extra not in ("", "dev"):
            return f"'identikit[{extra}]'"
    return package


def _report() -> str:
    """Write the traceback of the error being handled to a file, and say where it is."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="identikit-error-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(f"{sys.argv}\n{sys.version}\n\n{traceback.format_exc()}")
        return f", with the file {file.name}"
    except OSError:
        return ""


def own_words(words: str) -> str:
    """Return what the library says with the options of the command that runs."""
    return for_command_line(words, OPTIONS.get() or {})


def _tell(message: str) -> None:
    with suppress(OSError, ValueError):  # the error stream is closed
        print(f"identikit: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _open_streams() -> None:
    """Redirect closed standard streams to the null device, so that no file opened later takes their place."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            with suppress(OSError):
                os.fstat(number)
                continue
            opened = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(opened, mode, encoding="utf-8"))


def _flushed(status: int) -> int:
    """Write out what is still held; return the status, or that of a failure, which is explained if it is the first."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            with suppress(OSError, ValueError):  # Python's own last flush, which would end in a traceback, goes nowhere
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if not status and stream is sys.stdout and getattr(error, "errno", None) != errno.EPIPE:
                _tell(f"Cannot write the output: {getattr(error, 'strerror', None) or error}.")
            status = status or FAILED
    return status
