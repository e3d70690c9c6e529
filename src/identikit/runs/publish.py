"""The folder of a run on the Hugging Face hub."""

import json
from pathlib import Path

from identikit.errors import InputError
from identikit.results.files import ABOUT
from identikit.results.hub import run_card, upload
from identikit.results.result import saved_result
from identikit.runs.inspect import is_run
from identikit.runs.store import COLUMNS
from identikit.runs.verify import unchanged_run


def publish(folder: str, repo: str, *, public: bool = False) -> str:
    """Upload a complete run, or a saved result, none of whose files has changed; return its address."""
    path = Path(folder)
    doing = f"Pushing {folder}"
    if not is_run(folder) and (path / ABOUT).is_file():
        return saved_result(path).push_to_hub(repo, public=public)
    if "://" in folder:
        raise InputError(f"{doing}: only a local folder can be pushed. Copy the run here first.")
    store = unchanged_run(folder, doing)
    columns = json.loads((path / COLUMNS).read_text(encoding="utf-8"))
    return upload(path, repo, run_card(store.settings, store.recorded, columns), public=public)
