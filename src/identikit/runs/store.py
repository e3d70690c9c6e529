"""A folder of results that can be stopped at any moment and resumed.

Files are written under a temporary name that only their writer uses, synced, and renamed, so what is there is complete;
each notices when a bit of it changes. `run.json` says what identifies the run and what else was recorded about it; a
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

Kept = TypeVar("Kept")

MANIFEST = "run.json"
COMMAND = "command.json"  # the command and its arguments, for `identikit resume`
ERROR = "error.json"  # why the run ended the last time, if it failed
PLAN = "plan.json"  # how much there is to do, for those who read the folder without the data
COLUMNS = "columns.json"
PROOF = "proof-{}.json"  # of rows of a text, by its number
CHECKSUMS = "SHA256SUMS"
COMPUTED = "computed.json"  # where and with what an input of `reproduce` was computed
PART_FOLDER = re.compile(r"shard-(\d{4,})-of-(\d{4,})")  # of a run that is spread over several folders
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{32}\.partial")  # what a writer has not finished
_KEEPS_NOTHING = {"memory", "data"}  # schemes whose files are gone when the process is


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
        self.files, self.folder = opened(folder)
        self.settings = _as_json(settings)
        self.recorded = _as_json(recorded or {})
        self._lock = FolderLock(self.files, self.folder)
        self._is_held = False
        self._is_new = False  # this process made the folder,
        self._is_taken = False  # and wrote what the folder is
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
        """Say whether nothing was computed yet; the folders of shards are runs of their own."""
        return all(_is_ours(name) or PART_FOLDER.fullmatch(name) for name in self.names())

    def _check_same_run(self) -> None:
        if self._is_unused():
            return  # nothing was computed yet: another run may take the folder
        manifest = read_manifest(self.files, self.folder)
        if manifest is None:
            raise InputError(f"Cannot resume {self.folder}: {MANIFEST} is damaged. Choose another folder with --out.")
        for key, (then, now) in unequal(manifest["run"], self.settings).items():
            raise InputError(
                f"Cannot resume {self.folder}: it holds another run, whose {key} is {then!r}, not {now!r}. Use the "
                "same settings to resume it, or choose another folder with --out."
            )

    @contextmanager
    def held(self) -> Iterator["Store"]:
        """Hold the folder's lock, and make the folder and its manifest if they are not there; it may be nested.

        After an error the folder notes it, or nothing is left if nothing was computed. Only the outermost level keeps
        anything in mind, so a signal that comes between two levels changes nothing. One that comes before it has
        taken the folder or while it leaves it does neither: the command line makes up for it.
        """
        if self._is_held:
            yield self
            return
        UNFINISHED.append(self._end)
        try:
            self._take()
            yield self
        except BaseException as error:
            self._end(error)
            raise
        self._end()

    def _take(self) -> None:
        """Take the lock, remove what a killed writer left, check the settings once more, and write the manifest."""
        self._is_held = True
        self._is_taken = False
        self._is_new = not self.files.exists(self.folder)
        with self._explained(MANIFEST):
            self.files.makedirs(self.folder, exist_ok=True)
            self._lock.acquire()
        for name in self.names():
            if name == ERROR or _PARTIAL.fullmatch(name):  # only the lock's owner writes
                self.remove(name)
        self._check_same_run()  # again: another process may have started meanwhile
        self._is_taken = True
        if self._is_unused():
            self.write(MANIFEST, seal_record({"run": self.settings, "recorded": self.recorded}))

    def _end(self, error: BaseException | None = None) -> None:
        """Leave the folder, after an error or without one; what a signal cut short is done when it is called again."""
        if self._end not in UNFINISHED:
            return
        if error is not None:
            self._leave(error)
        self._is_held = False
        self._lock.release()
        UNFINISHED.remove(self._end)

    def _leave(self, error: BaseException) -> None:
        """Note an error, or leave nothing if nothing was computed; a folder that another process holds stays."""
        error.add_note(self._left())
        if self._is_new and all(map(_is_ours, self.names())):
            for name in self.names() if self._lock.is_held else ():  # while no other process can write
                self.remove(name)
            with suppress(OSError):
                self.files.rmdir(self.folder)
        elif self._is_taken and isinstance(error, Exception):
            with suppress(InputError):  # a folder that cannot be written to
                note = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "error": str(error)}
                self.write(ERROR, json.dumps(note, indent=1, ensure_ascii=False).encode())

    def _left(self) -> str:
        """Say whether the folder, or one under it, holds anything that was computed."""
        with suppress(OSError):
            if not all(_is_ours(path.rpartition("/")[2]) for path in self.files.find(self.folder)):
                return f"What was computed is kept in {self.folder}. Run the same command again to continue."
        return "Nothing had been computed yet."

    def _path(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def names(self, under: str = "") -> list[str]:
        """Return the names of the files in the folder, or in a folder under it."""
        if not self.has(under):
            return []
        paths = self.files.ls(self._path(under).rstrip("/"), False)
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def has(self, name: str) -> bool:
        """Say whether a file is there, and so is whole."""
        return self.files.exists(self._path(name))

    def write(self, name: str, content: bytes) -> None:
        """Write a file so that it is there whole or not at all; the first one creates the folder and its manifest."""
        with self.held(), self._explained(name):
            self._lock.check()
            if self.files.isdir(self._path(name)):
                raise IsADirectoryError(f"{name} is a folder there")
            write_through(self.files, self._path(name), content)

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
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
        """Write tensors with a few words about them."""
        self.write(name, seal(tensors, about))

    def write_json(self, name: str, value: object) -> None:
        """Write a value."""
        self.write(name, seal_json(value))

    def read(self, name: str) -> bytes:
        """Read a file."""
        try:
            return read_through(self.files, self._path(name))
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"Cannot read {self._path(name)}: {reason}. Make it readable.") from None

    def read_json(self, name: str) -> Any:
        """Read a value, or raise `Damaged`."""
        return unseal_json(self.read(name))

    def read_tensors(self, name: str) -> SealedTensors:
        """Read tensors and the words about them, or raise `Damaged`."""
        return unseal(self.read(name))

    def usable(self, name: str, read: Callable[[str], Kept]) -> Kept | None:
        """Return what `read` makes of a file, or None if there is none; a damaged one is removed with a warning."""
        if not self.has(name):
            return None
        try:
            return read(name)
        except Damaged as why:
            warnings.warn(f"Cannot use {self.folder}/{name}: {why}. Its contents will be computed again.", stacklevel=3)
            self.remove(name)
            return None

    def remove(self, name: str) -> None:
        """Remove a file, if it is there and can be."""
        with suppress(OSError):
            self.files.rm(self._path(name))

    def finish(self) -> None:
        """List the checksums of all files, as `sha256sum --check` reads them: the run is complete."""
        apart = (CHECKSUMS, LOCK, NOTE, COMMAND, ERROR)  # they say how the run went, and change when it is run again
        named = [name for name in self.names() if name not in apart and not self.files.isdir(self._path(name))]
        lines = [f"{hashlib.sha256(self.read(name)).hexdigest()}  {name}\n" for name in named]
        self.write(CHECKSUMS, "".join(lines).encode())


def opened(folder: str | os.PathLike[str]) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a folder, and its path there."""
    try:
        files, path = file_system(os.fspath(folder))
    except (ValueError, ImportError, TypeError) as error:
        raise InputError(f"Cannot write results to {folder}: {error}. Choose another folder with --out.") from None
    kinds = {files.protocol} if isinstance(files.protocol, str) else set(files.protocol)
    if kinds & _KEEPS_NOTHING:
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


def _is_ours(name: str) -> bool:
    """Whether a file belongs to a run that has no result yet."""
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


def unequal(one: Mapping[str, object], other: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Return the values in which nested settings differ, by dotted name; None for one that is not there."""
    first = dict(leaves(one))
    second = dict(leaves(other))
    names = sorted(first.keys() | second.keys())
    return {name: (first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)}


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
