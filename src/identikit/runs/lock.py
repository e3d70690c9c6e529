"""One writer per folder: a lock that says who holds it, and that a dead owner does not keep.

On a local disk the system's own lock is used, which ends with the process that holds it, however it ends. Elsewhere
the owner notes the time every minute, and one that has been silent for ten is taken for dead.
"""

import json
import os
import platform
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import IO, Any
from uuid import uuid4

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from identikit.errors import InputError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

LOCK = ".identikit.lock"
_BEAT, _SILENT = 60.0, 600.0  # seconds


class FolderLock:
    """The lock of one folder: `acquire` it, `check` that it is still held, `release` it."""

    def __init__(self, files: AbstractFileSystem, folder: str):
        self.files, self.folder, self.path = files, folder, f"{folder}/{LOCK}"
        self._by_system = fcntl is not None and isinstance(files, LocalFileSystem)
        self._file: IO[bytes] | None = None
        self._owner: dict[str, Any] = {}
        self._ended: threading.Event | None = None  # while a note is kept fresh

    def acquire(self) -> None:
        """Take the lock, or say who holds it."""
        since = datetime.now(UTC).isoformat(timespec="seconds")
        self._owner = {"host": platform.node(), "process": os.getpid(), "since": since, "key": uuid4().hex}
        if self._by_system and self._taken():
            return
        self._by_system = False
        if owner := self.holder():
            raise self._held(owner)
        self._note()
        self.check()  # another may have been as fast
        self._ended = threading.Event()
        threading.Thread(target=self._beat, args=(self._ended,), daemon=True).start()

    def _taken(self) -> bool:
        """Take the system's lock, or say who holds it; False on a file system that has no locks."""
        file = open(self.path, "ab+", buffering=0)  # noqa: SIM115, PTH123 - held until it is released
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # pyright: ignore[reportOptionalMemberAccess]
        except OSError as error:
            file.close()
            if isinstance(error, BlockingIOError):
                raise self._held(self._noted()) from None
            return False
        with suppress(OSError):  # on a full disk the lock holds without the note
            file.truncate(0)
            file.write(self._said())
        self._file = file
        return True

    def _beat(self, ended: threading.Event) -> None:
        """Show, every minute, that the owner lives."""
        while not ended.wait(_BEAT):
            with suppress(Exception):  # a network that is away for a while
                self.check()

    def check(self) -> None:
        """Note the time where the system has no lock of its own, unless another took the folder meanwhile."""
        if self._by_system or not self._owner:
            return
        owner = self._noted()
        if owner is not None and owner.get("key") != self._owner["key"]:
            raise self._held(owner)
        self._note()

    def release(self) -> None:
        """Give the lock back."""
        if self._file is not None:
            with suppress(OSError):
                self._file.truncate(0)
            self._file.close()
            self._file = None
        elif self._ended is not None:
            self._ended.set()
            with suppress(OSError):
                if (self._noted() or {}).get("key") == self._owner["key"]:
                    self.files.rm(self.path)
        self._ended, self._owner = None, {}

    def holder(self) -> dict[str, Any] | None:
        """Return who holds the lock; None if nobody does."""
        owner = self._noted()
        if owner is None or _has_ended(owner):
            return None
        free = self._is_free() if self._by_system else time.time() - owner["beat"] > _SILENT
        return None if free else owner

    def _is_free(self) -> bool:
        """Say whether the system's lock could be taken: the note of a killed owner may name a process that is not."""
        try:
            with open(self.path) as file:  # noqa: PTH123
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # pyright: ignore[reportOptionalMemberAccess]
        except OSError:  # it is held, or the file system has no locks: then the note is all there is
            return False
        return True

    def _noted(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self.files.cat_file(self.path))
            kinds = {"host": str, "process": int, "since": str, "beat": float}
            return found if all(isinstance(found[name], kind) for name, kind in kinds.items()) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _note(self) -> None:
        self.files.makedirs(self.folder, exist_ok=True)
        partial = f"{self.path}.{self._owner['key']}.partial"  # whoever reads meanwhile sees a whole note
        self.files.pipe_file(partial, self._said())
        self.files.mv(partial, self.path)

    def _said(self) -> bytes:
        return json.dumps(self._owner | {"beat": time.time()}).encode()

    def _held(self, owner: dict[str, Any] | None) -> InputError:
        who = "another process" if owner is None else owner_words(owner)
        return InputError(
            f"Cannot write to {self.folder}: {who} is writing to it. Wait until it ends, or stop it; then run the same "
            "command again."
        )


def owner_words(owner: dict[str, Any]) -> str:
    """Say who holds a lock."""
    return f"process {owner['process']} on {owner['host']}, started {owner['since']},"


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
