"""The command that a run was started with, kept in its folder so that the run can be resumed from it alone."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from identikit.errors import InputError
from identikit.runs.store import COMMAND, Store

_PATHS = ("data", "data_dir", "model", "finetuned")  # arguments that may be paths
_FOLDER = "out"
_LEFT_OUT = (_FOLDER, "as_json")


def note(store: Store, command: str, arguments: Mapping[str, Any]) -> None:
    """Keep a command and its arguments; paths are made absolute, so that it can be resumed from anywhere."""
    kept = {name: _absolute(value) if name in _PATHS else value for name, value in arguments.items()}
    kept = {name: value for name, value in kept.items() if name not in _LEFT_OUT}
    store.write(COMMAND, json.dumps({"command": command, "arguments": kept}, indent=1, sort_keys=True).encode())


def _absolute(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_absolute(one) for one in value]
    with suppress(OSError):  # such as a name that is too long for one
        return str(Path(value).resolve()) if isinstance(value, str) and Path(value).exists() else value
    return value


def noted(folder: str) -> tuple[str, dict[str, Any]]:
    """Return the command that a folder's run was started with, and its arguments; its folder is among them."""
    try:
        kept = json.loads(Path(folder, COMMAND).read_text())
        whole = Path(folder).parent if kept["arguments"].get("shard") else folder
        return kept["command"], kept["arguments"] | {_FOLDER: str(whole)}
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"Cannot resume {folder}: it has no {COMMAND} that can be read, so it is not known which command was run. "
            "Run that command again."
        ) from None
