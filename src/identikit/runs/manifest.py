"""What `run.json` says: what identifies a run, and what is only recorded about it."""

import importlib.metadata
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from identikit.models.machine import device_name
from identikit.models.model import Model
from identikit.results.provenance import text_hash
from identikit.texts.text import Text

_COMPUTE = ("identikit", "tokenizers", "torch", "transformers")  # whose versions can change numbers
_WRITERS = ("pandas", "pyarrow", "safetensors")


def manifest(
    command: str, model: Model, texts: list[Text], *, data: Mapping[str, Any], options: Mapping[str, Any], threads: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what identifies a run, which is compared when it is resumed, and what is recorded about it.

    `data` says where the texts were read from; their own hash is added. `threads` affect the last digits. The date, the
    device and the versions of packages that only write are recorded: they do not make it another run.
    """
    source = model.provenance("")
    read = {"name": source.model, "revision": source.revision, "weights": source.weights, "tokenizer": source.tokenizer}
    run = {
        "command": command,
        "data": {**data, "texts": len(texts), "sha256": text_hash(model.names(texts))},
        "model": read,
        "dtype": source.dtype,
        "options": dict(options),
        "threads": threads,
        "versions": {name: source.versions[name] for name in _COMPUTE},
    }
    versions = source.versions | {name: importlib.metadata.version(name) for name in _WRITERS}
    recorded = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(model.device),
        "machine": platform.platform(),
        "versions": versions | {"python": platform.python_version()},
    }
    return run, recorded
