"""A folder of results that can be stopped at any moment and resumed.

Files are written under a temporary name and renamed when they are whole, so what is there is complete. `run.json` says
what identifies the run and what else was recorded about it; a folder of another run is never written into. Paths go
through fsspec.
"""

import json
import os
from collections.abc import Iterator, Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from safetensors import SafetensorError
from safetensors.torch import load, save

from identikit.errors import InputError
from identikit.runs.columns import Table, data_dictionary
from identikit.shapes import Tensor

if TYPE_CHECKING:
    from pandas import DataFrame

MANIFEST = "run.json"
COLUMNS = "columns.json"


class Store:
    """The folder of one run.

    `settings` identify the run: a folder with other settings is refused. `recorded` (the date, the machine, …) is
    written once, when the folder is created, and never compared.
    """

    def __init__(
        self, folder: str | os.PathLike[str], settings: Mapping[str, Any], recorded: Mapping[str, Any] | None = None
    ):
        try:
            self.files, self.folder = fsspec.url_to_fs(os.fspath(folder))
        except (ValueError, ImportError) as error:
            raise InputError(f"Cannot write results to {folder}: {error}. Choose another folder with --out.") from None
        self.settings, self.recorded = _plain(settings), _plain(recorded or {})
        if self.files.isfile(self.folder):
            raise InputError(f"Cannot write results to {folder}: it is a file. Choose a folder with --out.")
        if self.has(MANIFEST):
            self._same_run()
        elif self.files.exists(self.folder) and any(
            not _unfinished(path) for path in self.files.ls(self.folder, False)
        ):
            raise InputError(
                f"Cannot write results to {folder}: it holds files but no {MANIFEST}, so it is not the folder of a "
                "run. Choose an empty or new folder with --out."
            )

    def _same_run(self) -> None:
        try:
            before = dict(_leaves(json.loads(self.read(MANIFEST))["run"]))
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"Cannot resume {self.folder}: {MANIFEST} is damaged. Choose another folder with --out."
            ) from None
        now = dict(_leaves(self.settings))
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                raise InputError(
                    f"Cannot resume {self.folder}: it holds another run, whose {key} is {before.get(key)!r}, not "
                    f"{now.get(key)!r}. Use the same settings to resume it, or choose another folder with --out."
                )

    def _path(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def has(self, name: str) -> bool:
        """Say whether a file is there, and so is whole."""
        return self.files.exists(self._path(name))

    def start(self) -> None:
        """Make the folder and its manifest if they are not there."""
        if not self.has(MANIFEST):
            manifest = {"run": self.settings, "recorded": self.recorded}
            self._try_to_write(MANIFEST, json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False).encode())

    def write(self, name: str, content: bytes) -> None:
        """Write a file so that it is there whole or not at all; the first one brings the folder and its manifest."""
        self.start()
        self._try_to_write(name, content)

    def _try_to_write(self, name: str, content: bytes) -> None:
        try:
            self.files.makedirs(self.folder, exist_ok=True)
            self._write(name, content)
        except OSError as error:
            raise InputError(
                f"Cannot write {name} to {self.folder}: {error.strerror or error}. Make room there, or choose another "
                "folder with --out."
            ) from None

    def _write(self, name: str, content: bytes) -> None:
        partial = self._path(f".{name}.partial")
        with self.files.open(partial, "wb") as file:
            file.write(content)
            if isinstance(self.files, LocalFileSystem):
                file.flush()
                os.fsync(file.fileno())
        self.files.mv(partial, self._path(name))

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
        """Write tensors with a few words about them, as safetensors."""
        # The format refuses tensors that share memory, so each is written from a copy of its own.
        copies = {key: tensor.cpu().clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()}
        self.write(name, save(copies, dict(about)))

    def read(self, name: str) -> bytes:
        """Read a file."""
        with self.files.open(self._path(name), "rb") as file:
            return file.read()

    def read_json(self, name: str) -> Any:
        """Read a JSON file."""
        try:
            return json.loads(self.read(name))
        except ValueError:
            raise self._damaged(name) from None

    def _damaged(self, name: str) -> InputError:
        return InputError(
            f"Cannot read {self._path(name)}: the file is damaged. Remove it, and it will be computed again."
        )

    def read_tensors(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Read tensors and the words about them."""
        content = self.read(name)
        try:
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            return load(content), header.get("__metadata__", {})
        except (ValueError, SafetensorError):
            raise self._damaged(name) from None


def _unfinished(path: str) -> bool:
    """Say whether a file is what a killed run was writing."""
    return path.endswith(".partial")


def _plain(settings: Mapping[str, Any]) -> Any:
    """Return settings as JSON gives them back."""
    return json.loads(json.dumps(settings, sort_keys=True, default=str))


def _leaves(settings: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested settings by dotted name, such as `data.columns`."""
    if not isinstance(settings, dict):
        yield name, settings
        return
    for key, value in settings.items():
        yield from _leaves(value, f"{name}.{key}" if name else key)


def write_tables(
    store: Store, tables: "Mapping[str, DataFrame]", dictionary: Mapping[str, Table] | None = None
) -> None:
    """Write tables as Parquet and CSV; with a `dictionary`, also say in `columns.json` what their columns mean.

    A missing value is an empty cell in CSV.
    """
    if dictionary is not None:
        described = data_dictionary({name: dictionary[name] for name in tables})
        store.write(COLUMNS, json.dumps(described, indent=1, ensure_ascii=False).encode())
    for name, frame in tables.items():
        buffer = BytesIO()
        frame.to_parquet(buffer, index=False)
        store.write(f"{name}.parquet", buffer.getvalue())
        store.write(f"{name}.csv", frame.to_csv(index=False).encode())
