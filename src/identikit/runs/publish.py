"""The folder of a run on the Hugging Face hub."""

import json
from pathlib import Path

from identikit.errors import InputError
from identikit.results.files import ABOUT
from identikit.results.hub import run_card, upload
from identikit.results.result import saved_result
from identikit.runs.inspect import complete_run, is_run
from identikit.runs.store import COLUMNS
from identikit.runs.verify import verify


def publish(folder: str, repo: str, *, public: bool = False) -> str:
    """Upload a complete run, or a saved result, none of whose files has changed; return its address."""
    place = Path(folder)
    doing = f"Pushing {folder}"
    if not is_run(folder) and (place / ABOUT).is_file():
        return saved_result(place).push_to_hub(repo, public=public)
    if "://" in folder:
        raise InputError(f"{doing}: only a local folder can be pushed. Copy the run here first.")
    store = complete_run(folder, doing)
    if wrong := verify(folder).wrong:
        file, why = wrong[0]
        raise InputError(
            f"{doing}: {file} is not as it was written ({why.rstrip('.')}). Run `identikit verify {folder}`."
        )
    columns = json.loads((place / COLUMNS).read_text(encoding="utf-8"))
    return upload(place, repo, run_card(store.settings, store.recorded, columns), public=public)
