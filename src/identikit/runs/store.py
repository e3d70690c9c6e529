"""A folder of results that can be stopped at any moment and gone on with.

Files are written under a temporary name and renamed when they are whole, so what is there is complete. `run.json` says
what the folder was computed with; a folder of other settings is never written into. Paths go through fsspec.
"""

import json
import os
from collections.abc import Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from safetensors import SafetensorError
from safetensors.torch import load, save

from identikit.errors import InputError
from identikit.shapes import Tensor

if TYPE_CHECKING:
    from pandas import DataFrame

MANIFEST = "run.json"


class Store:
    """One run's folder: `settings` are what its results depend on."""

    def __init__(self, folder: str | os.PathLike[str], settings: Mapping[str, Any]):
        try:
            self.files, self.folder = fsspec.url_to_fs(os.fspath(folder))
        except (ValueError, ImportError) as error:
            raise InputError(f"writing results to {folder}: {error}. Choose another place with --out.") from None
        self.settings = json.loads(json.dumps(settings, sort_keys=True, default=str))
        if self.files.isfile(self.folder):
            raise InputError(f"writing results: {folder} is a file, and a folder is needed. Choose another --out.")
        if self.has(MANIFEST):
            self._same_run()
        elif self.files.exists(self.folder) and any(
            not _unfinished(path) for path in self.files.ls(self.folder, False)
        ):
            raise InputError(
                f"writing results: {folder} holds files but no {MANIFEST}, so it is not a run's folder. Choose an "
                "empty or a new one with --out."
            )

    def _same_run(self) -> None:
        try:
            with self.files.open(self._path(MANIFEST), "rb") as file:
                before = json.load(file)
        except ValueError:
            raise InputError(f"going on with {self.folder}: its {MANIFEST} is damaged. Choose another --out.") from None
        differing = sorted(
            key for key in before.keys() | self.settings.keys() if before.get(key) != self.settings.get(key)
        )
        if differing:
            key = differing[0]
            raise InputError(
                f"writing results: {self.folder} holds another run: its {key} is {before.get(key)!r}, not "
                f"{self.settings.get(key)!r}. Choose another folder with --out, or give the same settings to go on."
            )

    def _path(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def has(self, name: str) -> bool:
        """Say whether a file is there, and so is whole."""
        return self.files.exists(self._path(name))

    def start(self) -> None:
        """Make the folder and its manifest, if they are not there."""
        if not self.has(MANIFEST):
            self._tried(MANIFEST, json.dumps(self.settings, indent=1, sort_keys=True).encode())

    def write(self, name: str, content: bytes) -> None:
        """Write a file so that it is there whole or not at all; the first one brings the folder and its manifest."""
        self.start()
        self._tried(name, content)

    def _tried(self, name: str, content: bytes) -> None:
        try:
            self.files.makedirs(self.folder, exist_ok=True)
            self._write(name, content)
        except OSError as error:
            raise InputError(
                f"writing {name} to {self.folder}: {error.strerror or error}. Make room there, or choose another --out."
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
        alone = {key: tensor.cpu().clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()}
        self.write(name, save(alone, dict(about)))

    def read(self, name: str) -> bytes:
        """Read a file."""
        with self.files.open(self._path(name), "rb") as file:
            return file.read()

    def read_json(self, name: str) -> Any:
        """Read a file of JSON."""
        try:
            return json.loads(self.read(name))
        except ValueError:
            raise self._damaged(name) from None

    def _damaged(self, name: str) -> InputError:
        return InputError(f"reading {self._path(name)}: it is damaged. Remove it; it is then computed again.")

    def read_tensors(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Read tensors and the words about them."""
        content = self.read(name)
        try:
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            return load(content), header.get("__metadata__", {})
        except (ValueError, SafetensorError):
            raise self._damaged(name) from None


def _unfinished(path: str) -> bool:
    """Whether a file is what a killed run was writing."""
    return path.endswith(".partial")


def write_tables(store: Store, tables: "Mapping[str, DataFrame]") -> None:
    """Write tables as Parquet and as CSV."""
    for name, frame in tables.items():
        buffer = BytesIO()
        frame.to_parquet(buffer, index=False)
        store.write(f"{name}.parquet", buffer.getvalue())
        store.write(f"{name}.csv", frame.to_csv(index=False).encode())
