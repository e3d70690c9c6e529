"""One writer per folder: a lock that names its owner and is freed when the owner dies.

On a local disk the system's lock is used, which ends with the process that holds it, however that ends. A note says
who holds the lock; where the system has no locks, such as on remote storage, the note is the lock. The owner renews it
every minute, and counts as dead after ten minutes of silence.
"""

import json
import os
import platform
import stat
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from filelock import BaseFileLock, FileLock, Timeout
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from identikit.errors import InputError
from identikit.results.files import read_through, write_through

LOCK = ".identikit.lock"
NOTE = ".identikit.owner"
BEAT_SECONDS = 60.0
SILENT_SECONDS = 600.0


@dataclass(frozen=True)
class Owner:
    """The process that holds a folder, since when, and when it last renewed its note (`beat`).

    `key` is drawn anew whenever a lock is taken, and tells this owner from any other.
    """

    host: str
    process: int
    since: str
    key: str
    beat: float

    def words(self) -> str:
        """Describe the process."""
        return f"process {self.process} on {self.host}, started {self.since},"

    @property
    def is_gone(self) -> bool:
        """Whether the process ran on this machine and has ended, or has been silent for long."""
        if os.name == "posix" and self.host == platform.node():
            try:
                os.kill(self.process, 0)
            except ProcessLookupError:
                return True
            except (OSError, OverflowError):  # it is alive and belongs to another user
                pass
        return time.time() - self.beat > SILENT_SECONDS


class FolderLock:
    """The lock of one folder: `acquire` it, `check` that it is still held, `release` it."""

    def __init__(self, files: AbstractFileSystem, folder: str):
        self.files = files
        self.folder = folder
        self._owner: Owner | None = None  # while it is held
        self._system: BaseFileLock | None = None  # while the system's lock is held
        self._released = threading.Event()

    def acquire(self) -> None:
        """Take the lock, or raise an error that names its holder."""
        self._take_system_lock()
        if self._system is None and (owner := self.holder()):
            raise self._refusal(owner)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        self._owner = Owner(platform.node(), os.getpid(), since, uuid4().hex, time.time())
        try:
            self._write_note()
            self.check()  # another process may have been as fast
        except OSError:
            if self._system is None:  # on a full disk the system's lock holds without the note
                raise
        self._released = threading.Event()
        threading.Thread(target=self._keep_renewing, args=(self._released,), daemon=True).start()

    @property
    def is_held(self) -> bool:
        """Whether this lock holds the folder, however far `acquire` or `release` got."""
        return (self._system is not None and self._system.is_locked) or self._is_own(self._read_note())

    def _take_system_lock(self) -> None:
        """Take the system's lock if it has one, or raise an error that names its holder.

        A lock file that is a link, or a second name of another file, is refused: taking it could empty that file.
        """
        if not isinstance(self.files, LocalFileSystem):
            return
        path = Path(self.folder, LOCK)
        with suppress(FileNotFoundError):
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                raise InputError(
                    f"Cannot write to {self.folder}: {LOCK} there is a link or otherwise not a plain file of "
                    "its own. Remove it, or choose another folder with --out."
                )
        system = FileLock(path, blocking=False, thread_local=False)
        self._system = system  # before it is taken: a signal may come at any time
        try:
            system.acquire()
        except Timeout:
            self._system = None
            raise self._refusal(self._read_note()) from None
        except (OSError, NotImplementedError):
            self._system = None

    def _keep_renewing(self, released: threading.Event) -> None:
        while not released.wait(BEAT_SECONDS):
            with suppress(Exception):  # a network that is away for a while
                self._renew()

    def check(self) -> None:
        """Renew the note where the system has no locks, and raise an error if another process took the folder."""
        if self._owner is not None and self._system is None:
            self._renew()

    def _renew(self) -> None:
        owner = self._read_note()
        if owner is not None and not self._is_own(owner):
            raise self._refusal(owner)
        self._write_note()

    def _write_note(self) -> None:
        if self._owner is not None:
            note = asdict(self._owner) | {"beat": time.time()}
            write_through(self.files, f"{self.folder}/{NOTE}", json.dumps(note).encode())

    def release(self) -> None:
        """Release the lock."""
        self._released.set()
        if self._is_own(self._read_note()):
            with suppress(OSError):
                self.files.rm(f"{self.folder}/{NOTE}")
        self._owner = None
        if self._system is not None:
            self._system.release()
            self._system = None

    def holder(self) -> Owner | None:
        """Return the process that holds the lock, or None; the note of a killed process does not count."""
        owner = self._read_note()
        if owner is None or owner.is_gone:
            return None
        if self._system is None and Path(self.folder, LOCK).exists():
            with suppress(InputError):
                self._take_system_lock()
            if self._system is not None:
                self._system.release()
                self._system = None
                return None
        return owner

    def _read_note(self) -> Owner | None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            note = json.loads(read_through(self.files, f"{self.folder}/{NOTE}"))
            if all(isinstance(note[name], kind) for name, kind in Owner.__annotations__.items()):
                return Owner(**note)
        return None

    def _is_own(self, owner: Owner | None) -> bool:
        return owner is not None and self._owner is not None and owner.key == self._owner.key

    def _refusal(self, owner: Owner | None) -> InputError:
        holder = "another process" if owner is None else owner.words()
        return InputError(
            f"Cannot write to {self.folder}: {holder} is writing to it. Wait until it ends, or stop it; then run the "
            "same command again."
        )
