"""One writer per folder: a lock that says who holds it, and that a dead owner does not keep.

On a local disk the system's own lock is used, which ends with the process that holds it, however it ends. Elsewhere
the owner notes the time every minute, and one that has been silent for ten is taken for dead.
"""

import json
import os
import platform
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import IO, Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from identikit.errors import InputError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

LOCK = ".lock"
_BEAT, _SILENT = 60.0, 600.0  # seconds


class FolderLock:
    """The lock of one folder: `acquire` it, `beat` now and then, `release` it."""

    def __init__(self, files: AbstractFileSystem, folder: str):
        self.files, self.folder, self.path = files, folder, f"{folder}/{LOCK}"
        self._by_system = fcntl is not None and isinstance(files, LocalFileSystem)
        self._file: IO[str] | None = None
        self._beaten = 0.0

    def acquire(self) -> None:
        """Take the lock, or say who holds it."""
        if self._by_system:
            self._file = self._locked("a+")
            self._file.truncate(0)
            self._file.write(json.dumps(_owner()))
            self._file.flush()
        else:
            if owner := self.holder():
                raise self._held(owner)
            self._note()

    def _locked(self, mode: str) -> IO[str]:
        file = open(self.path, mode)  # noqa: SIM115, PTH123 - held until it is released
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # pyright: ignore[reportOptionalMemberAccess]
        except BlockingIOError:
            file.close()
            raise self._held(self._noted()) from None
        except OSError:  # a file system without locks: the note is all there is
            pass
        return file

    def beat(self) -> None:
        """Show that the owner lives."""
        if not self._by_system and time.time() - self._beaten > _BEAT:
            self._note()

    def release(self) -> None:
        """Give the lock back."""
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None
        elif not self._by_system:
            with suppress(OSError):
                self.files.rm(self.path)

    def holder(self) -> dict[str, Any] | None:
        """Return who holds the lock; None if nobody does."""
        owner = self._noted()
        if owner is None or _has_ended(owner) or (not self._by_system and time.time() - owner["beat"] > _SILENT):
            return None
        return owner

    def _noted(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self.files.cat_file(self.path))
            return found if {"host", "process", "since", "beat"} <= found.keys() else None
        except (OSError, ValueError, AttributeError):
            return None

    def _note(self) -> None:
        self.files.makedirs(self.folder, exist_ok=True)
        self.files.pipe_file(self.path, json.dumps(_owner()).encode())
        self._beaten = time.time()

    def _held(self, owner: dict[str, Any] | None) -> InputError:
        who = "another process" if owner is None else owner_words(owner)
        return InputError(
            f"Cannot write to {self.folder}: {who} is writing to it. Wait until it ends, or stop it; then run the same "
            "command again."
        )


def owner_words(owner: dict[str, Any]) -> str:
    """Say who holds a lock."""
    return f"process {owner['process']} on {owner['host']}, started {owner['since']},"


def _owner() -> dict[str, Any]:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return {"host": platform.node(), "process": os.getpid(), "since": since, "beat": time.time()}


def _has_ended(owner: dict[str, Any]) -> bool:
    """Say whether a process of this machine has ended."""
    if owner["host"] != platform.node():
        return False
    try:
        os.kill(int(owner["process"]), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, OverflowError):  # it lives, and is somebody else's
        return False
    return False
