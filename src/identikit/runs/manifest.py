"""What a folder says about its run: `run.json` identifies it, and `command.json` has the command that resumes it."""

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from contextlib import AbstractContextManager, chdir, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from identikit.errors import InputError
from identikit.models.machine import device_name
from identikit.models.model import Model
from identikit.results.files import Damaged, read_through, seal_record, unseal_record
from identikit.results.provenance import text_hash
from identikit.runs.store import COMMAND, Store, open_folder
from identikit.texts.text import Text

_COMPUTING = ("identikit", "tokenizers", "torch", "transformers")  # whose versions can change numbers
_WRITING = ("pandas", "pyarrow", "safetensors")  # whose versions change no number
_NOT_NOTED = ("out", "as_json")  # arguments that the resuming command gives itself


def manifest(
    command: str, model: Model, texts: list[Text], *, data: Mapping[str, Any], options: Mapping[str, Any], threads: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what identifies a run, which is compared when it is resumed, and what else is recorded about it.

    Texts and models are identified by their hashes. The source of the texts (`data`), the model's name, the date, the
    device and the versions of packages that only write files are recorded: they do not make it another run. `threads`
    do, as they affect the last digits.
    """
    source = model.provenance("")
    run = {
        "command": command,
        "data": {"texts": len(texts), "sha256": text_hash(model.provenance_texts(texts))},
        "model": {"weights": source.weights, "tokenizer": source.tokenizer},
        "dtype": source.dtype,
        "options": dict(options),
        "threads": threads,
        "versions": {name: source.versions[name] for name in _COMPUTING},
    }
    versions = source.versions | {name: importlib.metadata.version(name) for name in _WRITING}
    recorded = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "data": dict(data),
        "model": {"name": source.model, "revision": source.revision},
        "device": device_name(model.device),
        "machine": platform.platform(),
        "versions": versions | {"python": platform.python_version()},
    }
    return run, recorded


class NotedCommand(NamedTuple):
    """A command with its arguments and the folder that it was run in, from a file that anyone may have edited."""

    command: str
    arguments: dict[str, Any]
    working_folder: str

    def in_working_folder(self) -> AbstractContextManager[None]:
        """Change to the folder that relative paths start from; if it is gone, stay: data are checked by their hash."""
        folder = self.working_folder
        can_enter = folder and Path(folder).is_dir() and os.access(folder, os.X_OK)
        return chdir(folder) if can_enter else nullcontext()


def note_command(store: Store, command: str, arguments: Mapping[str, object]) -> None:
    """Write down a command, its arguments, and the folder that paths among them start from."""
    noted = {name: value for name, value in arguments.items() if name not in _NOT_NOTED}
    store.write(COMMAND, seal_record({"command": command, "arguments": noted, "place": str(Path.cwd())}))


def noted_command(folder: str) -> NotedCommand:
    """Return the command that a folder's run was started with, with the run's folder among its arguments."""
    is_local = "://" not in folder
    out = str(Path(folder).resolve()) if is_local else folder.rstrip("/")
    try:
        files, path = open_folder(folder)
        content = unseal_record(read_through(files, f"{path}/{COMMAND}"))
        arguments = dict(content["arguments"])
        if arguments.get("shard"):
            out = str(Path(out).parent) if is_local else out.rpartition("/")[0]
        return NotedCommand(str(content["command"]), arguments | {"out": out}, str(content.get("place", "")))
    except (OSError, Damaged, ValueError, KeyError, TypeError):
        raise InputError(
            f"Cannot resume {folder}: {COMMAND} there is missing or damaged, so it is not known which command was run. "
            "Run that command again."
        ) from None
