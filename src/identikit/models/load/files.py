"""The files of a checkpoint, in a folder or on a hub: its configuration, and where its weights are.

transformers reads whatever file an index names, pickled ones too. Here a file is read only if it is inside the
checkpoint's own folder, is whole, and holds what its name promises.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.hub import cached_file

from identikit.errors import ModelError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTED = ("lora_", "base_layer", "ia3_l")  # how the names of an adapter's weights begin


@dataclass(frozen=True)
class Checkpoint:
    """Where a checkpoint is: the `source`, a folder or hub id, at a revision, and whether its own code may run."""

    source: str
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The arguments with which transformers reads it, beside the source."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    def file(self, name: str) -> Path | None:
        """Return where one of its files is; None if it has no such file or cannot be reached."""
        try:
            path = cached_file(self.source, name, revision=self.revision)
        except OSError:
            return None
        return None if path is None else Path(path)


class StoredWeight(NamedTuple):
    """A weight in a file: its file, number format and shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def read_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return the configuration of a checkpoint; one that is no configuration of a known model is refused."""
    file = checkpoint.file("config.json")
    if file is not None:
        settings = read_object(file, checkpoint.source)
        kind = settings.get("model_type")
        if "auto_map" not in settings and (not isinstance(kind, str) or kind not in CONFIG_MAPPING):
            raise ModelError(
                f"Loading {checkpoint.source}: the model_type in its config.json is {kind!r:.60}, which transformers "
                f"{transformers.__version__} does not know. Check config.json, or install a newer transformers."
            )
    return AutoConfig.from_pretrained(checkpoint.source, **checkpoint.options)


def read_object(file: Path, source: str) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"Loading {source}: its {file.name} cannot be read as JSON ({reason}). Download it again."
        ) from None
    if not isinstance(content, dict):
        raise ModelError(
            f"Loading {source}: its {file.name} holds a {type(content).__name__}, expected an object ({{…}}). "
            "Download it again."
        )
    return content


def weight_files(checkpoint: Checkpoint, config: PreTrainedConfig) -> list[Path]:
    """Return the files that a checkpoint's weights are read from, each of them there and in its folder."""
    named = getattr(config, "transformers_weights", None)
    names = (_SINGLE, _INDEX) if named is None else (_own_file(named, "config.json", checkpoint.source),)
    for name in names:
        file = checkpoint.file(name)
        if file is not None:
            return _shards(file, checkpoint) if name.endswith(".json") else [file]
    wanted = f"{_SINGLE} or {_INDEX}" if named is None else str(named)
    raise ModelError(
        f"Loading {checkpoint.source}: it has no {wanted}, and no other format is read (pickled weights can run code). "
        "Save the model with model.save_pretrained(folder), and name that folder."
    )


def _shards(index: Path, checkpoint: Checkpoint) -> list[Path]:
    """Return the files that an index of weights names."""
    content = read_object(index, checkpoint.source)
    names = content.get("weight_map")
    if not isinstance(names, dict) or not names or not isinstance(content.get("metadata"), dict):
        raise ModelError(
            f"Loading {checkpoint.source}: its {index.name} has no 'weight_map' and 'metadata' that are objects, so it "
            "does not say where the weights are. Download it again."
        )
    shards = []
    for name in sorted({_own_file(name, index.name, checkpoint.source) for name in names.values()}):
        file = checkpoint.file(name)
        if file is None:
            raise ModelError(
                f"Loading {checkpoint.source}: its {index.name} names {name!r:.120}, and there is no such file. "
                "Download it again."
            )
        shards.append(file)
    return shards


def _own_file(name: object, named_in: str, source: str) -> str:
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


def stored_weights(files: Iterable[Path], source: str) -> dict[str, StoredWeight]:
    """Return what files of weights hold, by name; damaged files and names in two of them are refused."""
    weights: dict[str, StoredWeight] = {}
    for file in files:
        for name, stored in _file_weights(file, source).items():
            if name in weights:
                raise ModelError(
                    f"Loading {source}: the weight {name!r} is in both {weights[name].file.name} and {file.name}, and "
                    "which one is meant is unknown. Save the checkpoint again."
                )
            weights[name] = stored
    _refuse_adapters(weights, source)
    return weights


def _file_weights(file: Path, source: str) -> dict[str, StoredWeight]:
    weights = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                entry = opened.get_slice(name)
                weights[name] = StoredWeight(file, entry.get_dtype(), tuple(entry.get_shape()))
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ModelError(f"Loading {source}: {file.name} cannot be read ({reason}). Download it again.") from None
    return weights


def _refuse_adapters(stored: Iterable[str], source: str) -> None:
    for name in sorted(stored):
        if any(part.startswith(_ADAPTED) for part in name.split(".")):
            raise ModelError(
                f"Loading {source}: {name!r} is a weight of an adapter, which transformers would silently drop. Save "
                "the adapter by itself (peft's save_pretrained), or merge it first: model.merge_and_unload()."
            )
