"""A folder of results that survives a stop at any moment and can be resumed.

Files are written under a temporary name that only their writer uses, synced, and renamed, so every file is complete;
each has a checksum that shows damage. `run.json` says what identifies the run and what else was recorded about it; a
folder of another run is never written into, and a lock keeps a second writer out. Paths go through fsspec.
"""

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from io import BytesIO
from typing import TYPE_CHECKING, Any, TypeVar

from fsspec import AbstractFileSystem

from identikit.errors import UNFINISHED, InputError
from identikit.results.files import (
    Damaged,
    SealedTensors,
    read_through,
    seal,
    seal_json,
    seal_record,
    unseal,
    unseal_json,
    unseal_record,
    write_through,
)
from identikit.results.table import DataTable
from identikit.runs.lock import LOCK, NOTE, FolderLock
from identikit.shapes import Tensor
from identikit.texts.tables import file_system

if TYPE_CHECKING:
    from pandas import DataFrame

Value = TypeVar("Value")

MANIFEST = "run.json"
COMMAND = "command.json"  # the command and its arguments, for `identikit resume`
ERROR = "error.json"  # why the run ended the last time, if it failed
PLAN = "plan.json"  # how much there is to do, for those who read the folder without the data
COLUMNS = "columns.json"
PROOF = "proof-{}.json"  # of rows of a text, by its number
CHECKSUMS = "SHA256SUMS"
COMPUTED = "computed.json"  # where and with what an input of `reproduce` was computed
PORTION_FOLDER = re.compile(r"shard-(\d{4,})-of-(\d{4,})")  # of a run that is spread over several folders
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{32}\.partial")  # a file whose writer did not finish
_VOLATILE_SCHEMES = {"memory", "data"}  # their files end with the process


class Store:
    """The folder of one run; `with store.held():` holds its lock.

    `settings` identify the run: a folder with other settings is refused. `recorded` (the date, the machine, …) is
    written once, when the folder is created, and never compared.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        settings: Mapping[str, Any],
        recorded: Mapping[str, object] | None = None,
    ):
        self.files, self.folder = open_folder(folder)
        self.settings = _as_json(settings)
        self.recorded = _as_json(recorded or {})
        self._lock = FolderLock(self.files, self.folder)
        self._is_held = False
        self._is_new = False  # whether this process made the folder
        self._has_manifest = False  # whether this process checked or wrote its manifest
        if self.files.isfile(self.folder):
            raise InputError(f"Cannot write results to {folder}: it is a file. Choose a folder with --out.")
        if self.has(MANIFEST):
            self._check_same_run()
        elif not self._is_unused():
            raise InputError(
                f"Cannot write results to {folder}: it holds files but no {MANIFEST}, so it is not the folder of a "
                "run. Choose an empty or new folder with --out."
            )

    def _is_unused(self) -> bool:
        """Whether nothing was computed yet; the folders of shards are runs of their own."""
        return all(_is_bookkeeping(name) or PORTION_FOLDER.fullmatch(name) for name in self.names())

    def _check_same_run(self) -> None:
        if self._is_unused():
            return  # nothing was computed yet: another run may take the folder
        manifest = read_manifest(self.files, self.folder)
        if manifest is None:
            raise InputError(f"Cannot resume {self.folder}: {MANIFEST} is damaged. Choose another folder with --out.")
        for key, (old, new) in differing(manifest["run"], self.settings).items():
            raise InputError(
                f"Cannot resume {self.folder}: it holds another run, whose {key} is {old!r}, not {new!r}. Use the same "
                "settings to resume it, or choose another folder with --out."
            )

    @contextmanager
    def held(self) -> Iterator["Store"]:
        """Hold the folder's lock, and make the folder and its manifest if they do not exist; calls may be nested.

        After an error the folder notes it, or is removed if nothing was computed. Only the outermost call keeps state,
        so a signal between two levels changes nothing. After one that comes while the lock is taken or released, the
        command line calls `_release` again.
        """
        if self._is_held:
            yield self
            return
        UNFINISHED.append(self._release)
        try:
            self._acquire()
            yield self
        except BaseException as error:
            self._release(error)
            raise
        self._release()

    def _acquire(self) -> None:
        """Take the lock, remove what a killed writer left, check the settings once more, and write the manifest."""
        self._is_held = True
        self._has_manifest = False
        self._is_new = not self.files.exists(self.folder)
        with self._clear_errors(MANIFEST):
            self.files.makedirs(self.folder, exist_ok=True)
            self._lock.acquire()
        for name in self.names():
            if name == ERROR or _PARTIAL.fullmatch(name):  # only the lock's owner writes
                self.remove(name)
        self._check_same_run()  # again: another process may have started meanwhile
        self._has_manifest = True
        if self._is_unused():
            self.write(MANIFEST, seal_record({"run": self.settings, "recorded": self.recorded}))

    def _release(self, error: BaseException | None = None) -> None:
        """Give the folder back, after an error or without one; a call that a signal cut short can be repeated."""
        if self._release not in UNFINISHED:
            return
        if error is not None:
            self._note_error(error)
        self._is_held = False
        self._lock.release()
        UNFINISHED.remove(self._release)

    def _note_error(self, error: BaseException) -> None:
        """Write an error down, or remove the folder if nothing was computed and no other process holds it."""
        error.add_note(self._progress_note())
        if self._is_new and all(map(_is_bookkeeping, self.names())):
            for name in self.names() if self._lock.is_held else ():  # while no other process can write
                self.remove(name)
            with suppress(OSError):
                self.files.rmdir(self.folder)
        elif self._has_manifest and isinstance(error, Exception):
            with suppress(InputError):  # a folder that cannot be written to
                note = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "error": str(error)}
                self.write(ERROR, json.dumps(note, indent=1, ensure_ascii=False).encode())

    def _progress_note(self) -> str:
        """Return a sentence on whether the folder, or one under it, holds anything that was computed."""
        with suppress(OSError):
            if not all(_is_bookkeeping(path.rpartition("/")[2]) for path in self.files.find(self.folder)):
                return f"What was computed is kept in {self.folder}. Run the same command again to continue."
        return "Nothing had been computed yet."

    def names(self, under: str = "") -> list[str]:
        """Return the names of the files in the folder, or in a folder under it."""
        if not self.has(under):
            return []
        paths = self.files.ls(f"{self.folder}/{under}".rstrip("/"), False)
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def has(self, name: str) -> bool:
        """Whether a file exists; if it does, it is complete."""
        return self.files.exists(f"{self.folder}/{name}")

    def write(self, name: str, content: bytes) -> None:
        """Write a file completely or not at all; the first one creates the folder and its manifest."""
        with self.held(), self._clear_errors(name):
            self._lock.check()
            if self.files.isdir(f"{self.folder}/{name}"):
                raise IsADirectoryError(f"{name} is a folder there")
            write_through(self.files, f"{self.folder}/{name}", content)

    @contextmanager
    def _clear_errors(self, name: str) -> Iterator[None]:
        """Turn an error of the file system into a sentence."""
        try:
            yield
        except (OSError, NotImplementedError) as error:
            reason = getattr(error, "strerror", None) or error or "it is not supported there"
            raise InputError(
                f"Cannot write {name} to {self.folder}: {str(reason).rstrip('.')}. Make room there, or choose another "
                "folder with --out. What was finished is kept, and will be used when the run is resumed."
            ) from None

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor], about: Mapping[str, object]) -> None:
        """Write tensors with JSON about them."""
        self.write(name, seal(tensors, about))

    def write_json(self, name: str, value: object) -> None:
        """Write a value as JSON."""
        self.write(name, seal_json(value))

    def read(self, name: str) -> bytes:
        """Read a file."""
        try:
            return read_through(self.files, f"{self.folder}/{name}")
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"Cannot read {self.folder}/{name}: {reason}. Make it readable.") from None

    def read_json(self, name: str) -> Any:
        """Read a JSON value, or raise `Damaged`."""
        return unseal_json(self.read(name))

    def read_tensors(self, name: str) -> SealedTensors:
        """Read tensors and the JSON about them, or raise `Damaged`."""
        return unseal(self.read(name))

    def usable(self, name: str, read: Callable[[str], Value]) -> Value | None:
        """Return what `read` makes of a file, or None if it does not exist; a damaged one is removed with a warning."""
        if not self.has(name):
            return None
        try:
            return read(name)
        except Damaged as error:
            warnings.warn(
                f"Cannot use {self.folder}/{name}: {error}. Its contents will be computed again.", stacklevel=3
            )
            self.remove(name)
            return None

    def remove(self, name: str) -> None:
        """Remove a file if that is possible."""
        with suppress(OSError):
            self.files.rm(f"{self.folder}/{name}")

    def finish(self) -> None:
        """List the checksums of all files, as `sha256sum --check` reads them: the run is complete."""
        lines = []
        for name in self.names():
            # Files that say how the run went change when it is run again.
            is_result = name not in (CHECKSUMS, LOCK, NOTE, COMMAND, ERROR)
            if is_result and not self.files.isdir(f"{self.folder}/{name}"):
                lines.append(f"{hashlib.sha256(self.read(name)).hexdigest()}  {name}\n")
        self.write(CHECKSUMS, "".join(lines).encode())


def open_folder(folder: str | os.PathLike[str]) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a folder, and its path there."""
    try:
        files, path = file_system(os.fspath(folder))
    except (ValueError, ImportError, TypeError) as error:
        raise InputError(f"Cannot write results to {folder}: {error}. Choose another folder with --out.") from None
    protocols = {files.protocol} if isinstance(files.protocol, str) else set(files.protocol)
    if protocols & _VOLATILE_SCHEMES:
        raise InputError(
            f"Cannot write results to {folder}: what is written there is gone when the command ends. Choose a folder "
            "on a disk, or an address that keeps files, with --out."
        )
    return files, path


def read_manifest(files: AbstractFileSystem, folder: str) -> dict[str, Any] | None:
    """Return what `run.json` in a folder says: the settings (`run`) and what is `recorded`; None if it is damaged."""
    with suppress(OSError, Damaged):
        manifest = unseal_record(read_through(files, f"{folder}/{MANIFEST}"))
        if isinstance(manifest.get("run"), dict) and isinstance(manifest.get("recorded"), dict):
            return manifest
    return None


def _is_bookkeeping(name: str) -> bool:
    """Whether a file is one that a run has before it has any result."""
    return name in (LOCK, NOTE, MANIFEST, COMMAND, ERROR, PLAN) or _PARTIAL.fullmatch(name) is not None


def _as_json(settings: Mapping[str, object]) -> dict[str, Any]:
    """Return settings as JSON gives them back."""
    return json.loads(json.dumps(settings, sort_keys=True, default=str))


def leaves(settings: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield the values of nested settings by dotted name, such as `data.columns`."""
    if not isinstance(settings, dict):
        yield name, settings
        return
    for key, value in settings.items():
        yield from leaves(value, f"{name}.{key}" if name else key)


def differing(first: Mapping[str, object], second: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Return the values in which nested settings differ, by dotted name; None for one that is missing."""
    values = dict(leaves(first))
    other_values = dict(leaves(second))
    differences = {}
    for name in sorted(values.keys() | other_values.keys()):
        pair = (values.get(name), other_values.get(name))
        if pair[0] != pair[1]:
            differences[name] = pair
    return differences


def portion_folder(index: int, count: int) -> str:
    """Return the folder of the `index`-th of `count` portions of a run, within the run's own."""
    return f"shard-{index:04d}-of-{count:04d}"


def write_tables(
    store: Store, tables: "Mapping[str, DataFrame]", dictionary: Mapping[str, DataTable] | None = None
) -> None:
    """Write tables as Parquet and CSV; with a `dictionary`, also say in `columns.json` what their columns mean.

    A missing value is an empty cell in CSV.
    """
    if dictionary is not None:
        described = {}
        for name in tables:
            described[name] = {column: about._asdict() for column, about in dictionary[name].columns.items()}
        store.write(COLUMNS, json.dumps(described, indent=1, ensure_ascii=False).encode())
    import pyarrow  # noqa: F401  (pandas would not name it if it were missing)

    for name, frame in tables.items():
        if dictionary is not None and frame.empty:  # nothing in a column says what its type is
            frame = frame.astype({column: about.type for column, about in dictionary[name].columns.items()})
        buffer = BytesIO()
        frame.to_parquet(buffer, index=False)
        store.write(f"{name}.parquet", buffer.getvalue())
        store.write(f"{name}.csv", frame.to_csv(index=False).encode())
