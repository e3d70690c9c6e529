"""How a command ends: normally, with one line that says what is wrong, or silently if its output is closed.

The exit status is 0, 1 for what the user can fix, 2 for wrong options, 70 for an internal error, 130 after Ctrl-C and
143 after SIGTERM. This module is loaded before anything slow, so that Ctrl-C also ends the start-up cleanly.
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
_STOP_WORDS = {INTERRUPTED: "Interrupted", 143: "Terminated"}
_ENDING_SECONDS = 5.0  # for writing what was computed, during which another signal is ignored
_RESEND_SECONDS = 0.05  # until a signal that came in a destructor is sent again
_QUIET = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
_MEMORY = ("out of memory", "allocate memory", "not enough memory")
OPTIONS: ContextVar[Mapping[str, str] | None] = ContextVar("OPTIONS", default=None)
"""The options of the running command, by their names in Python; None before it runs."""
REPORT_TO: ContextVar[str | None] = ContextVar("REPORT_TO", default=None)  # the experiment tracker of this command


@dataclass
class _Signals:
    """The statuses of the signals so far, the time of the last, and whether the command runs, so that it can unwind."""

    statuses: list[int] = field(default_factory=list)
    last: float = -math.inf
    running: bool = False

    def end(self, number: int, _: object) -> None:
        """Note a signal and raise the exception that ends a command.

        Before and after the command, the process ends at once: an exception inside the C++ of libraries that are being
        loaded would abort it with messages of theirs. A signal soon after another is ignored: it would stop the writing
        of what was computed.
        """
        status = 128 + number
        self.statuses.append(status)
        is_repeated = time.monotonic() - self.last < _ENDING_SECONDS
        self.last = time.monotonic()
        if is_repeated:
            return
        if not self.running:
            _print_error(f"{_STOP_WORDS[status]}.")
            os._exit(status)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(status)

    def resend_swallowed(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """Send a signal again if a destructor swallowed its exception; show any other exception."""
        if not (self.statuses and isinstance(unraisable.exc_value, KeyboardInterrupt | SystemExit)):
            sys.__unraisablehook__(unraisable)
            return
        self.last = -math.inf
        timer = threading.Timer(_RESEND_SECONDS, self._send, (self.statuses.pop() - 128,))
        timer.daemon = True
        timer.start()

    def _send(self, number: int) -> None:
        if self.running:
            os.kill(os.getpid(), number)


def run(load: Callable[[], Callable[[], object]]) -> None:
    """Load a command, run it, and exit with its status; no exception becomes a traceback.

    Warnings are printed as lines whatever filters are set, characters that an encoding lacks are escaped, and SIGTERM
    is handled like Ctrl-C.
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
        warnings.showwarning = lambda message, *_, **__: _print_error(with_own_options(str(message)))
        try:
            sys.unraisablehook = signals.resend_swallowed
            with suppress(ValueError):  # not in the main thread
                for number in (signal.SIGINT, signal.SIGTERM):
                    handlers[number] = signal.signal(number, signals.end)
            status = _flush(_run_command(load, signals))
        finally:
            sys.unraisablehook = hook
            for number, handler in handlers.items():
                signal.signal(number, handler)
    sys.exit(status)


def _run_command(load: Callable[[], Callable[[], object]], signals: _Signals) -> int:
    """Run a command and return its status, after printing a line on what ended it early."""
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
        if status in _STOP_WORDS:
            _print_error(_stop_message(status, error))
            return status
        if not isinstance(error, SystemExit):
            return _print_explanation(error)
        if status is None:
            return 0
        return status if isinstance(status, int) else FAILED


def _stop_message(status: int, error: BaseException) -> str:
    """Return that a command was stopped, and the note of the outermost folder that it wrote to."""
    words = f"{_STOP_WORDS[status]}."
    for finish in reversed(UNFINISHED.copy()):  # a signal may come while a folder is taken or left
        finish(error)
    cause: BaseException | None = error
    while cause is not None:  # typer turns one error into another
        if notes := getattr(cause, "__notes__", ()):
            return f"{words} {notes[-1]}"
        cause = cause.__cause__ or cause.__context__
    return words


def _check_folder() -> None:
    """Refuse to start in a folder that was removed, where torch's libraries would end the process."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise InputError(
            "The working folder no longer exists. Change to another one and run the command again."
        ) from None


def _print_explanation(error: BaseException) -> int:
    """Print what went wrong, and return the status."""
    words = " ".join(str(error).split())
    if isinstance(error, IdentikitError):
        _print_error(with_own_options(words))
    elif isinstance(error, OSError):
        if error.errno != errno.EPIPE:
            file = f" ({error.filename})" if error.filename else ""
            _print_error(f"{error.strerror or words}{file}. Fix this and run the command again.")
    elif isinstance(error, ModuleNotFoundError) and error.name:
        requirement = _requirement(error.name)
        _print_error(f"This needs the package {error.name}, which is not installed. Run `pip install {requirement}`.")
    elif isinstance(error, MemoryError) or any(phrase in words.lower() for phrase in _MEMORY):
        memory = "the GPU's memory" if "cuda" in words.lower() else "memory"
        _print_error(f"This needs more than {memory}. Pass a shorter text or a smaller model, or use a larger machine.")
    else:
        _print_error(
            f"An internal error, which is not your fault: {type(error).__name__}: {words:.200}. Please report it to "
            f"the authors of identikit{_save_traceback()}."
        )
        return INTERNAL
    return FAILED


def _requirement(package: str) -> str:
    """Return what to install for a package: the extra that has it, or the package itself."""
    from importlib.metadata import requires

    for requirement in requires("identikit") or ():
        name, _, extra = requirement.partition("; extra == ")
        extra = extra.strip("'\"")
        if re.split(r"[^\w.-]", name)[0] == package and extra not in ("", "dev"):
            return f"'identikit[{extra}]'"
    return package


def _save_traceback() -> str:
    """Write the traceback of the error being handled to a file, and return words that name it."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="identikit-error-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(f"{sys.argv}\n{sys.version}\n\n{traceback.format_exc()}")
        return f", with the file {file.name}"
    except OSError:
        return ""


def with_own_options(words: str) -> str:
    """Return a message of the library with the options of the running command in place of Python's."""
    return for_command_line(words, OPTIONS.get() or {})


def _print_error(message: str) -> None:
    with suppress(OSError, ValueError):  # the error stream is closed
        print(f"identikit: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _open_streams() -> None:
    """Open closed standard streams on the null device, so that no file opened later takes their place."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            with suppress(OSError):
                os.fstat(number)
                continue
            descriptor = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8"))


def _flush(status: int) -> int:
    """Flush the streams; return the status, or that of a failure, which is printed if nothing failed before."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            with suppress(OSError, ValueError):  # so that Python's own last flush does not end in a traceback
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if not status and stream is sys.stdout and getattr(error, "errno", None) != errno.EPIPE:
                _print_error(f"Cannot write the output: {getattr(error, 'strerror', None) or error}.")
            status = status or FAILED
    return status
