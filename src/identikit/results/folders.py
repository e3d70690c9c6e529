"""Results as folders of files: written whole or not at all, and read back only if every byte is what was written.

`result.json` holds what the result is and the SHA-256 of every other file, and its own.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from identikit.checks import shortened
from identikit.errors import InputError
from identikit.results.sealed import Damaged, seal_json, unseal_json

ABOUT = "result.json"
Files = Mapping[str, bytes]


def described(about: Mapping[str, Any], files: Files) -> dict[str, bytes]:
    """Return files with their description, which notes the SHA-256 of each."""
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return {**files, ABOUT: seal_json({**about, "files": digests})}


def write_folder(folder: Any, files: Callable[[], Files]) -> None:
    """Write files to a new or empty folder, all of them or none; they are made once the folder is known to be fine."""
    target = _path("save", folder, "a new folder")
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise InputError(f"Saving a result to {target}: it is not an empty folder. Choose a new one.")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            for name, content in files().items():
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                (partial / name).write_bytes(content)
            partial.chmod(0o755)
            partial.replace(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise InputError(f"Saving a result to {target}: {error.strerror or error}. Choose another folder.") from None


def read_folder(folder: Any) -> Files:
    """Return the files of a folder that `write_folder` wrote."""
    path = _path("open_result", folder, "the folder that a result's save() wrote")
    description = _read(path, ABOUT)
    names = description_of({ABOUT: description}, str(path)).get("files")
    if not isinstance(names, dict) or not all(_is_inside(name) for name in names):
        raise InputError(f"Opening {path}: it is damaged (it names files that are not its own). Save it again.")
    return {ABOUT: description, **{name: _read(path, name) for name in names}}


def description_of(files: Files, where: str) -> dict[str, Any]:
    """Return what a result says of itself, once its files are known to be those that were written."""
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


def _path(call: str, folder: Any, expected: str) -> Path:
    if not isinstance(folder, str | os.PathLike) or not str(folder) or "\0" in str(folder):
        raise InputError(f"{call}({shortened(folder)}): expected {expected}.")
    return Path(folder)


def _is_inside(name: str) -> bool:
    path = Path(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _read(folder: Path, name: str) -> bytes:
    try:
        if not (folder / name).is_file():
            raise InputError(f"Opening {folder}: there is no {name}. Give a folder that a result's save() wrote.")
        return (folder / name).read_bytes()
    except OSError as error:
        raise InputError(f"Opening {folder}: {name} cannot be read ({error.strerror or error}).") from None
