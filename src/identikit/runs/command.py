"""The command that a run was started with, kept in its folder so that the run can be resumed from it alone."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, chdir, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from identikit.errors import InputError
from identikit.runs.store import COMMAND, Store, opened

_OWN = ("out", "as_json")  # arguments that whoever resumes a run gives anew


class Noted(NamedTuple):
    """A command with its arguments, and the folder that it was run in. It comes from a file: nothing of it is sure."""

    command: str
    arguments: dict[str, Any]
    place: str

    def there(self) -> AbstractContextManager[None]:
        """Go to the folder that relative paths start from; where it is gone, stay: a run's data are told by hash."""
        return chdir(self.place) if Path(self.place).is_dir() else nullcontext()


def note(store: Store, command: str, arguments: Mapping[str, Any]) -> None:
    """Keep a command and its arguments as they were given, and the folder that paths among them start from."""
    kept = {name: value for name, value in arguments.items() if name not in _OWN}
    noted = {"command": command, "arguments": kept, "place": str(Path.cwd())}
    store.write(COMMAND, json.dumps(noted, indent=1, sort_keys=True).encode())


def noted(folder: str) -> Noted:
    """Return the command that a folder's run was started with, the run's folder among its arguments."""
    local = "://" not in folder
    whole = str(Path(folder).resolve()) if local else folder.rstrip("/")
    try:
        files, path = opened(folder)
        kept = json.loads(files.cat_file(f"{path}/{COMMAND}"))
        arguments = dict(kept["arguments"])
        if arguments.get("shard"):
            whole = str(Path(whole).parent) if local else whole.rpartition("/")[0]
        return Noted(str(kept["command"]), arguments | {"out": whole}, str(kept.get("place", "")))
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"Cannot resume {folder}: it has no {COMMAND} that can be read, so it is not known which command was run. "
            "Run that command again."
        ) from None
