"""The command that a run was started with, kept in its folder so that the run can be resumed from it alone."""

import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, chdir, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from identikit.errors import InputError
from identikit.runs.store import COMMAND, Store, opened

_GIVEN_ANEW = ("out", "as_json")  # by whoever resumes a run


class NotedCommand(NamedTuple):
    """A command with its arguments, and the folder that it was run in. It comes from a file: nothing of it is sure."""

    command: str
    arguments: dict[str, Any]
    place: str

    def there(self) -> AbstractContextManager[None]:
        """Go to the folder that relative paths start from; where it is gone, stay: data are checked by their hash."""
        if self.place and Path(self.place).is_dir() and os.access(self.place, os.X_OK):
            return chdir(self.place)
        return nullcontext()


def note(store: Store, command: str, arguments: Mapping[str, Any]) -> None:
    """Keep a command and its arguments as they were given, and the folder that paths among them start from."""
    kept = {name: value for name, value in arguments.items() if name not in _GIVEN_ANEW}
    content = {"command": command, "arguments": kept, "place": str(Path.cwd())}
    store.write(COMMAND, json.dumps(content, indent=1, sort_keys=True).encode())


def noted_command(folder: str) -> NotedCommand:
    """Return the command that a folder's run was started with, the run's folder among its arguments."""
    is_local = "://" not in folder
    out = str(Path(folder).resolve()) if is_local else folder.rstrip("/")
    try:
        files, path = opened(folder)
        content = json.loads(files.cat_file(f"{path}/{COMMAND}"))
        arguments = dict(content["arguments"])
        if arguments.get("shard"):
            out = str(Path(out).parent) if is_local else out.rpartition("/")[0]
        return NotedCommand(str(content["command"]), arguments | {"out": out}, str(content.get("place", "")))
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"Cannot resume {folder}: it has no {COMMAND} that can be read, so it is not known which command was run. "
            "Run that command again."
        ) from None
