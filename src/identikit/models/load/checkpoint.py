"""The files of a checkpoint, in a folder or on a hub, and whether transformers read them as they were meant.

transformers reads whatever file an index names, pickled ones too, drops weights that a model has no place for, makes up
those that are missing, and casts integers. Here a file is read only if it is inside the checkpoint's own folder, is
whole, and holds what its name promises; anything dropped, made up or miscast is an error that names the first weight.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.hub import cached_file

from identikit.errors import ModelError, reason_of
from identikit.models.families import find_all, stack_of
from identikit.models.load.weights import unpacking_errors, unwrap_adapter
from identikit.models.table import FAMILIES

FOLDER = "Name a folder with config.json, model.safetensors and its tokenizer"
GGUF = ".gguf"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_ADAPTER_PREFIXES = ("lora_", "base_layer", "ia3_l")  # how the names of an adapter's weights begin
_PLAIN = ("F32", "F64", "F16", "BF16")
# Tables that older versions saved and newer ones make from the configuration.
_TABLES = ("position_ids", "token_type_ids", "inv_freq", "masked_bias", "relative_position_index", "version")
_UNUSED = ("pooler", "mtp")  # parts of a stack that nothing read here goes through
_TIMEOUT = 5  # seconds that a hub may take for its first answer


@dataclass(frozen=True)
class Checkpoint:
    """Where a checkpoint is: the `source`, a folder, hub id or GGUF file, at a revision; whether its code may run."""

    source: str
    revision: str | None = None
    trust_remote_code: bool = False

    @cached_property
    def unreachable(self) -> bool:
        """Whether it is on a hub that does not answer; huggingface_hub would ask six times for each of its files."""
        if Path(self.source).exists():
            return False
        try:
            get_hf_file_metadata(hf_hub_url(self.source, "config.json", revision=self.revision), timeout=_TIMEOUT)
        except (HfHubHTTPError, ValueError):  # an answer: there is no such file, or there can be none of that name
            return False
        except Exception:  # of the library for HTTP that this version of huggingface_hub uses
            return True
        return False

    @property
    def gguf(self) -> Path | None:
        """The GGUF file that it is; None: it is a folder or on a hub."""
        file = Path(self.source)
        return file if file.suffix == GGUF and file.is_file() else None

    @property
    def place(self) -> str:
        """What transformers reads it from: the source, or the folder of a GGUF file."""
        return self.source if self.gguf is None else str(self.gguf.parent)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments with which transformers reads it, beside the place."""
        options: dict[str, Any] = {"revision": self.revision, "trust_remote_code": self.trust_remote_code}
        if self.gguf is not None:
            options["gguf_file"] = self.gguf.name
        return options | {"local_files_only": self.unreachable}

    def file(self, name: str) -> Path | None:
        """Return where one of its files is; None if it has no such file or cannot be reached."""
        if self.gguf is not None:
            return None
        try:
            path = cached_file(self.source, name, revision=self.revision, local_files_only=self.unreachable)
        except OSError:
            return None
        return None if path is None else Path(path)


class StoredWeight(NamedTuple):
    """A weight in a file: its file, number format and shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


# Files


def read_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return the configuration of a checkpoint; one that is no configuration of a known model is refused."""
    file = checkpoint.file("config.json")
    if file is None and checkpoint.unreachable:
        silence = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} does not answer"
        raise ModelError(
            f"Loading {checkpoint.source}: there is no such folder, and no such model in the local hub cache, and "
            f"{silence}. {FOLDER}, or check the id and the network."
        )
    if file is not None:
        settings = read_object(file, checkpoint.source)
        kind = settings.get("model_type")
        if "auto_map" not in settings and (not isinstance(kind, str) or kind not in CONFIG_MAPPING):
            raise ModelError(
                f"Loading {checkpoint.source}: the model_type in its config.json is {kind!r:.60}, which transformers "
                f"{transformers.__version__} does not know. Check config.json, or install a newer transformers."
            )
    return AutoConfig.from_pretrained(checkpoint.place, **checkpoint.options)


def read_gguf(checkpoint: Checkpoint, dtype: torch.dtype | str) -> PreTrainedModel:
    """Return the model of a GGUF file, its packed weights as the numbers that they stand for."""
    with unpacking_errors("GGUF", checkpoint.source):
        config = read_config(checkpoint)
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
        kind = getattr(transformers, name) if isinstance(name, str) else AutoModel
        model, report = kind.from_pretrained(
            checkpoint.place, dtype=dtype, output_loading_info=True, **checkpoint.options
        )
    check_report(model, report, {}, checkpoint.source, plain=False)
    return model


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
    configured = getattr(config, "transformers_weights", None)
    names = (_SINGLE, _INDEX)
    if configured is not None:
        names = (_checked_file_name(configured, "config.json", checkpoint.source),)
    index = next(filter(None, map(checkpoint.file, names)), None)
    if index is None:
        raise ModelError(
            f"Loading {checkpoint.source}: it has no {' or '.join(names)}, and no other format is read (pickled "
            "weights can run code). Save the model with model.save_pretrained(folder), and name that folder."
        )
    if index.suffix != ".json":
        return [index]
    content = read_object(index, checkpoint.source)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(content.get("metadata"), dict):
        raise ModelError(
            f"Loading {checkpoint.source}: its {index.name} has no 'weight_map' and 'metadata' that are objects, so it "
            "does not say where the weights are. Download it again."
        )
    shards = []
    for name in sorted({_checked_file_name(name, index.name, checkpoint.source) for name in weight_map.values()}):
        file = checkpoint.file(name)
        if file is None:
            raise ModelError(
                f"Loading {checkpoint.source}: its {index.name} names {name!r:.120}, and there is no such file. "
                "Download it again."
            )
        shards.append(file)
    return shards


def _checked_file_name(name: object, named_in: str, source: str) -> str:
    """Return the name of a weight file if it is one, inside the checkpoint's folder."""
    text = str(name)
    folders = {*PurePosixPath(text).parts, *PureWindowsPath(text).parts}
    is_outside = PurePosixPath(text).is_absolute() or PureWindowsPath(text).anchor or ".." in folders
    suffixes = (".safetensors", ".safetensors.index.json") if named_in == "config.json" else ".safetensors"
    if not isinstance(name, str) or is_outside or not text.endswith(suffixes):
        raise ModelError(
            f"Loading {source}: its {named_in} names {name!r:.120} as a file of weights, expected a .safetensors file "
            "in the same folder. Nothing was read; do not trust this checkpoint."
        )
    return name


def stored_weights(files: Iterable[Path], source: str) -> dict[str, StoredWeight]:
    """Return what files of weights hold, by name; damaged files, names in two files, and adapters are refused."""
    weights: dict[str, StoredWeight] = {}
    for file in files:
        stored = {}
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    entry = opened.get_slice(name)
                    stored[name] = StoredWeight(file, entry.get_dtype(), tuple(entry.get_shape()))
        except (SafetensorError, OSError) as error:
            reason = reason_of(error, 1000)
            raise ModelError(f"Loading {source}: {file.name} cannot be read ({reason}). Download it again.") from None
        for name in sorted(stored.keys() & weights.keys()):
            raise ModelError(
                f"Loading {source}: the weight {name!r} is in both {weights[name].file.name} and {file.name}, and "
                "which one is meant is unknown. Save the checkpoint again."
            )
        weights |= stored
    for name in sorted(weights):
        if any(part.startswith(_ADAPTER_PREFIXES) for part in name.split(".")):
            raise ModelError(
                f"Loading {source}: {name!r} is a weight of an adapter, which transformers would silently drop. Save "
                "the adapter by itself (peft's save_pretrained), or merge it first: model.merge_and_unload()."
            )
    return weights


def check_depth(config: PreTrainedConfig, stored: Collection[str], source: str) -> None:
    """Refuse a configuration with far more layers than weights, before so many modules are built: that may never end.

    Albert and others give one weight to many layers, so there may be fewer weights than layers.
    """
    for name in ("num_hidden_layers", "decoder_layers", "num_decoder_layers"):
        layers = getattr(config.get_text_config(), name, 0)
        if isinstance(layers, int) and layers > 100 + len(stored):
            raise ModelError(
                f"Loading {source}: config.json says {layers} layers, and the checkpoint has only {len(stored)} "
                "weights. Repair config.json."
            )


# What was read


def check_report(
    model: PreTrainedModel, report: Mapping[str, Any], stored: Mapping[str, StoredWeight], source: str, *, plain: bool
) -> None:
    """Refuse a checkpoint of which a part was left out, made up or misread; `plain`: its weights are not quantised."""
    unused = report["unexpected_keys"]
    for key, shape, expected in sorted(report["mismatched_keys"]):
        raise ModelError(
            f"Loading {source}: the weight {key!r} is of shape {list(shape)}, and with its config.json it has to be "
            f"{list(expected)}. Load the checkpoint with the config.json it was saved with."
        )
    missing = []
    for key in sorted(report["missing_keys"]):
        path, pooler, _ = key.partition("pooler.")
        if pooler and model.base_model is model:  # nothing goes through it, so it is taken off
            model.get_submodule(path.rstrip(".")).register_module("pooler", None)
        else:
            missing.append(key)
    if missing:
        raise ModelError(
            f"Loading {source}: the checkpoint lacks {len(missing)} weights of {type(model).__name__} (the first is "
            f"{missing[0]}); they would be random. Load a complete checkpoint."
        )
    integer_buffers = tuple(name for name, buffer in model.named_buffers() if not buffer.is_floating_point())
    for name, entry in sorted(stored.items()):
        is_expected = not plain or name in unused or _is_table(name, entry) or name.endswith(integer_buffers)
        if entry.dtype not in _PLAIN and not is_expected:  # it would be cast without its scales
            raise ModelError(
                f"Loading {source}: the weight {name!r} is stored as {entry.dtype}, and its config.json does not say "
                "how it was quantised, so its value is unknown. Name the checkpoint it was made from."
            )
    for key in _keys_of_read_part(model, sorted(unused)):
        if not _is_table(key, stored.get(key)):
            raise ModelError(
                f"Loading {source}: the checkpoint holds the weight {key!r}, which {type(model).__name__} with its "
                "config.json has no place for. Left out, it would make this another model, so it is refused; load it "
                "with the config.json (and the code) it was saved with."
            )


def _is_table(name: str, stored: StoredWeight | None) -> bool:
    """Whether a weight is a table that newer versions of transformers make themselves, such as a causal mask."""
    mask = name.endswith((".attn.bias", ".attention.bias")) and stored is not None and len(stored.shape) == 4
    return mask or name.rpartition(".")[2] in _TABLES


def _keys_of_read_part(model: PreTrainedModel, keys: Iterable[str]) -> Iterator[str]:
    """Yield those unused weights that belong to the part that is read: the smallest with all blocks and embeddings.

    Weights of a bare model, and those of heads, lack the base model's prefix: of these, only names that begin like a
    module or parameter of the part count.
    """
    read_modules: list[nn.Module] = []
    family = FAMILIES.get(model.config.model_type)
    if family is not None:
        stack = stack_of(family, model)
        blocks = find_all(stack.base_model, family.blocks)
        if family.features is not None:
            read_modules = [stack.base_model]
        elif blocks:
            read_modules = [*blocks, stack.get_input_embeddings()]
    ids = set(map(id, read_modules))
    paths = [name.split(".") for name, module in model.named_modules() if name and id(module) in ids]
    root_path = [names[0] for names in takewhile(lambda names: len({*names}) == 1, zip(*paths, strict=False))]
    root = model.get_submodule(".".join(root_path))
    children = dict([*root.named_children(), *root.named_parameters(recurse=False)])
    if root_path[:1] == [model.base_model_prefix]:
        root_path = root_path[1:]
    depth = len(root_path)
    prefix = f"{model.base_model_prefix}."
    for key in keys:
        path = key.removeprefix(prefix).split(".")
        if path[:depth] != root_path or len(path) == depth or path[depth].startswith(_UNUSED):
            continue
        if key.startswith(prefix) or path[depth] in children:
            yield key


# Adapters (PEFT)


def adapter_base(checkpoint: Checkpoint) -> Checkpoint | None:
    """Return the base model of an adapter; None if the checkpoint is not an adapter."""
    source = checkpoint.source
    file = checkpoint.file(_ADAPTER)
    if file is None:
        return None
    settings = read_object(file, source)
    name = settings.get("base_model_name_or_path")
    if not name or not isinstance(name, str):
        raise ModelError(
            f"Loading {source}: it is an adapter, and its {_ADAPTER} does not name its base model. Load the base with "
            "transformers, put the adapter on with peft, and pass both: load(model, tokenizer)."
        )
    base = replace(checkpoint, source=name, revision=settings.get("revision"))
    if base.file(_ADAPTER):  # transformers would put that one on too, unasked
        raise ModelError(
            f"Loading {source}: it is an adapter, and its base model {name} has an {_ADAPTER} too. Merge that one into "
            "its base and save it (model.merge_and_unload()), or keep the adapter in a folder of its own."
        )
    return base


def with_adapter(model: PreTrainedModel, checkpoint: Checkpoint) -> PreTrainedModel:
    """Put a saved adapter on its base model, complete and from safetensors, in the base's dtype."""
    source = checkpoint.source
    try:
        from peft import PeftConfig, PeftModel
    except ImportError:
        raise ModelError(
            f"Loading {source}: it is an adapter, and the package peft is not installed. Run "
            "`pip install 'identikit[peft]'`."
        ) from None
    weights = checkpoint.file(_ADAPTER_WEIGHTS)
    if weights is None:
        raise ModelError(
            f"Loading {source}: the adapter has no {_ADAPTER_WEIGHTS}, and no other format is read (pickled weights "
            "can run code). Save it again with model.save_pretrained(folder)."
        )
    folder = str(weights.parent)  # also of what came from a hub, so that peft asks none
    adapted = PeftModel(model, PeftConfig.from_pretrained(folder), autocast_adapter_dtype=False)
    plain = unwrap_adapter(adapted)
    report = adapted.load_adapter(
        folder, "default", autocast_adapter_dtype=False, torch_device="cpu", use_safetensors=True
    )
    if report.missing_keys:
        raise ModelError(
            f"Loading {source}: the adapter lacks {len(report.missing_keys)} weights for {type(model).__name__} (the "
            f"first is {sorted(report.missing_keys)[0]}); they would be random. Load a complete adapter."
        )
    if report.unexpected_keys:
        raise ModelError(
            f"Loading {source}: the adapter holds the weight {sorted(report.unexpected_keys)[0]!r}, which "
            f"{type(model).__name__} has no place for. Load it with the base model it was trained on."
        )
    return plain.eval()
