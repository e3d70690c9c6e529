"""Files that are there whole or not at all, and that notice when a single bit of them changes.

A file or a folder is written under a name that only its writer uses, and renamed when it is complete. A sealed file
holds the SHA-256 of its own content, taken with zeros in the digest's place, so it needs no second file beside it. The
folder of a saved result has a sealed `result.json`, which says what the result is and notes the SHA-256 of every other
file.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from identikit.checks import is_path, shortened
from identikit.errors import InputError
from identikit.shapes import Tensor

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

ABOUT = "result.json"
Files = Mapping[str, bytes]
_KEY = "sealed"
_BLANK = "0" * 64


class Damaged(Exception):  # noqa: N818 - a fact about a file; the caller decides what it means
    """A file does not hold what was written to it."""


# Whole or not at all


def partial_name(name: str) -> str:
    """Return a name for a file while it is being written; no two are equal, and none is too long."""
    return f".{name[:40]}.{uuid4().hex}.partial"


def write_file(path: Path, content: bytes) -> None:
    """Write a local file, whole or not at all."""
    partial = path.with_name(partial_name(path.name))
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    if os.name == "posix":  # let the new name survive a power cut
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_through(files: "AbstractFileSystem", path: str, content: bytes) -> None:
    """Write a file of any file system, whole or not at all."""
    from fsspec.implementations.local import LocalFileSystem

    if isinstance(files, LocalFileSystem):
        write_file(Path(path), content)
        return
    folder, _, name = path.rpartition("/")
    partial = f"{folder}/{partial_name(name)}"
    try:
        files.pipe_file(partial, content)
        files.mv(partial, path)
    except BaseException:
        with suppress(OSError):
            files.rm(partial)
        raise


def read_through(files: "AbstractFileSystem", path: str) -> bytes:
    """Return the content of a file of any file system; refuse a pipe or the like, which would block."""
    if not files.isfile(path) and files.exists(path):
        raise OSError("it is not a file")
    content = files.cat_file(path)
    return content if isinstance(content, bytes) else content.encode()


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to write to. It becomes `target` (new or empty) on success, and is removed on an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(mkdtemp(prefix=f".{target.name}-", suffix=".partial", dir=target.parent))
    try:
        yield partial
        partial.chmod(0o755)  # mkdtemp makes a folder for its owner alone
        if target.is_dir():
            target.rmdir()
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


# What files hold


def plain(value: object) -> Any:
    """Return a value as JSON holds it, with None in place of NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value


def tensor_file(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Return tensors as the content of a safetensors file."""
    # The format refuses tensors that share memory, so each is written from a copy of its own.
    copies = {}
    for name, tensor in tensors.items():
        copies[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return save(copies, metadata)


# Seals


class SealedTensors(NamedTuple):
    """The tensors of a sealed file, and what was noted with them."""

    tensors: dict[str, Tensor]
    about: dict[str, Any]


def seal(tensors: Mapping[str, Tensor], about: Mapping[str, object]) -> bytes:
    """Return tensors as a safetensors file; `about`, which JSON can hold, is noted with them."""
    # One key of metadata: the order of several is not fixed.
    return _stamped(tensor_file(tensors, {_KEY: _BLANK + json.dumps(about, sort_keys=True)}))


def unseal(content: bytes) -> SealedTensors:
    """Return what `seal` was given, or raise `Damaged`."""
    try:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        stamp = header["__metadata__"][_KEY]
        _check(content, stamp[: len(_BLANK)])
        return SealedTensors(load(content), json.loads(stamp[len(_BLANK) :]))
    except (ValueError, KeyError, TypeError, SafetensorError):
        raise Damaged("it is not a sealed safetensors file") from None


def seal_json(value: object) -> bytes:
    """Return a value as a JSON file."""
    return seal_record({"content": value}, indent=None)


def unseal_json(content: bytes) -> Any:
    """Return what `seal_json` was given, or raise `Damaged`."""
    return unseal_record(content).get("content")


def seal_record(record: Mapping[str, object], indent: int | None = 1) -> bytes:
    """Return named values as a JSON file that people read too."""
    stamped = {_KEY: _BLANK, **record}
    return _stamped(json.dumps(stamped, indent=indent, ensure_ascii=False, allow_nan=False).encode())


def unseal_record(content: bytes) -> dict[str, Any]:
    """Return what `seal_record` was given, or raise `Damaged`."""
    try:
        record = json.loads(content)
        _check(content, record.pop(_KEY))
        return record
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Damaged("it is not a sealed JSON file") from None


def _stamped(blank: bytes) -> bytes:
    return blank.replace(_BLANK.encode(), hashlib.sha256(blank).hexdigest().encode(), 1)


def _check(content: bytes, digest: str) -> None:
    blank = content.replace(digest.encode(), _BLANK.encode(), 1)
    if hashlib.sha256(blank).hexdigest() != digest:
        raise Damaged("its content does not have its SHA-256")


# Folders of saved results


def described(about: Mapping[str, object], files: Files) -> dict[str, bytes]:
    """Return files with their description, which notes the SHA-256 of each."""
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return {**files, ABOUT: seal_json({**about, "files": digests})}


def write_folder(folder: str | os.PathLike[str], files: Callable[[], Files]) -> None:
    """Write files to a new or empty folder, all of them or none; `files` is called once the folder is checked."""
    if not is_path(folder):
        raise InputError(f"save({shortened(folder)}): expected a new folder.")
    target = Path(folder)
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise InputError(f"Saving a result to {target}: it is not an empty folder. Choose a new one.")
        with whole_folder(target) as partial:
            for name, content in files().items():
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                (partial / name).write_bytes(content)
    except OSError as error:
        raise InputError(f"Saving a result to {target}: {error.strerror or error}. Choose another folder.") from None


def read_folder(folder: str | os.PathLike[str]) -> Files:
    """Return the files of a folder that `write_folder` wrote."""
    if not is_path(folder):
        raise InputError(f"open_result({shortened(folder)}): expected the folder that a result's save() wrote.")
    files = {ABOUT: _read(Path(folder), ABOUT)}
    names = description_of(files, str(folder)).get("files")
    if not isinstance(names, dict) or not all(map(_is_inside, names)):
        raise InputError(f"Opening {folder}: it is damaged (it names files that are not its own). Save it again.")
    return files | {name: _read(Path(folder), name) for name in names}


def _is_inside(name: str) -> bool:
    return not Path(name).is_absolute() and ".." not in Path(name).parts and "\0" not in name


def _read(folder: Path, name: str) -> bytes:
    try:
        if not (folder / name).is_file():
            raise InputError(f"Opening {folder}: there is no {name}. Give a folder that a result's save() wrote.")
        return (folder / name).read_bytes()
    except OSError as error:
        raise InputError(f"Opening {folder}: {name} cannot be read ({error.strerror or error}).") from None


def description_of(files: Files, where: str) -> dict[str, Any]:
    """Check the files of a result against their SHA-256, and return its description."""
    try:
        about = unseal_json(files[ABOUT])
        digests = about.get("files", {})
        for name, content in files.items():
            if name != ABOUT and hashlib.sha256(content).hexdigest() != digests[name]:
                raise Damaged(f"{name} does not have its SHA-256")
    except (Damaged, AttributeError, KeyError) as error:
        reason = str(error) if isinstance(error, Damaged) else "its files are not those it names"
        raise InputError(f"Opening {where}: it is damaged ({reason}). Save the result again.") from None
    return about
