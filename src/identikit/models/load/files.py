"""The files of a checkpoint, in a folder or on a hub: its configuration, and where its weights are.

transformers reads whatever file an index names, pickled ones too. Here a file is read only if it is inside the
checkpoint's own folder, is whole, and holds what its name promises.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.hub import cached_file

from identikit.errors import ModelError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ADAPTED = ("lora_", "base_layer", "ia3_l")  # how the names of an adapter's weights begin


class Stored(NamedTuple):
    """A weight in a file: its file, number format and shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def has_file(source: str, name: str, options: Mapping[str, Any]) -> str | None:
    """Return where a file of a folder or hub id is; None if it has no such file or cannot be reached."""
    try:
        return cached_file(source, name, revision=options["revision"])
    except OSError:
        return None


def read_config(source: str, options: dict[str, Any]) -> Any:
    """Return the configuration of a checkpoint; one that is no configuration of a known model is refused."""
    file = has_file(source, "config.json", options)
    given = {} if file is None else read_object(Path(file), source)
    kind = given.get("model_type")
    if file is not None and "auto_map" not in given and (not isinstance(kind, str) or kind not in CONFIG_MAPPING):
        raise ModelError(
            f"Loading {source}: the model_type in its config.json is {kind!r:.60}, which transformers "
            f"{transformers.__version__} does not know. Check config.json, or install a newer transformers."
        )
    return AutoConfig.from_pretrained(source, **options)


def read_object(file: Path, source: str) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"Loading {source}: its {file.name} cannot be read as JSON ({reason}). Download it again."
        ) from None
    if not isinstance(found, dict):
        raise ModelError(
            f"Loading {source}: its {file.name} holds a {type(found).__name__}, expected an object ({{…}}). "
            "Download it again."
        )
    return found


def weight_files(source: str, config: Any, options: Mapping[str, Any]) -> list[Path]:
    """Return the files that a checkpoint's weights are read from, each of them there and in its folder."""
    named = getattr(config, "transformers_weights", None)
    for name in (_SINGLE, _INDEX) if named is None else (_own_file(named, "config.json", source),):
        file = has_file(source, name, options)
        if file is not None:
            return _shards(Path(file), source, options) if name.endswith(".json") else [Path(file)]
    wanted = f"{_SINGLE} or {_INDEX}" if named is None else str(named)
    raise ModelError(
        f"Loading {source}: it has no {wanted}, and no other format is read (pickled weights can run code). Save the "
        "model with model.save_pretrained(folder), and name that folder."
    )


def _shards(index: Path, source: str, options: Mapping[str, Any]) -> list[Path]:
    said = read_object(index, source)
    names = said.get("weight_map")
    if not isinstance(names, dict) or not names or not isinstance(said.get("metadata"), dict):
        raise ModelError(
            f"Loading {source}: its {index.name} has no 'weight_map' and 'metadata' that are objects, so it does not "
            "say where the weights are. Download it again."
        )
    found = []
    for name in sorted({_own_file(name, index.name, source) for name in names.values()}):
        file = has_file(source, name, options)
        if file is None:
            raise ModelError(
                f"Loading {source}: its {index.name} names {name!r:.120}, and there is no such file. Download it again."
            )
        found.append(Path(file))
    return found


def _own_file(name: Any, named_in: str, source: str) -> str:
    """Return the name of a weight file if it is one, inside the checkpoint's folder."""
    text = str(name)
    parts = {*PurePosixPath(text).parts, *PureWindowsPath(text).parts}
    outside = PurePosixPath(text).is_absolute() or PureWindowsPath(text).anchor or ".." in parts
    weights = text.endswith(".safetensors") or (named_in == "config.json" and text.endswith(".safetensors.index.json"))
    if not isinstance(name, str) or outside or not weights:
        raise ModelError(
            f"Loading {source}: its {named_in} names {name!r:.120} as a file of weights, expected a .safetensors file "
            "in the same folder. Nothing was read; do not trust this checkpoint."
        )
    return name


def stored_weights(files: Iterable[Path], source: str) -> dict[str, Stored]:
    """Return what files of weights hold, by name; damaged files and names in two of them are refused."""
    found: dict[str, Stored] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
                own = {name: Stored(file, one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
        except (SafetensorError, OSError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ModelError(f"Loading {source}: {file.name} cannot be read ({reason}). Download it again.") from None
        for name in found.keys() & own.keys():
            raise ModelError(
                f"Loading {source}: the weight {name!r} is in both {found[name].file.name} and {file.name}, and which "
                "one is meant is unknown. Save the checkpoint again."
            )
        found |= own
    _refuse_adapters(found, source)
    return found


def _refuse_adapters(stored: Iterable[str], source: str) -> None:
    for name in sorted(stored):
        if any(part.startswith(_ADAPTED) for part in name.split(".")):
            raise ModelError(
                f"Loading {source}: {name!r} is a weight of an adapter, which would be left out without a word. Save "
                "the adapter by itself (peft's save_pretrained), or merge it first: model.merge_and_unload()."
            )
