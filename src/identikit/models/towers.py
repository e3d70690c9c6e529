"""Models of several parts: the part that is read, and the tokenizer or processor that reads for it."""

import inspect
from typing import Any

from transformers import (
    AutoFeatureExtractor,
    AutoTokenizer,
    FeatureExtractionMixin,
    ImageProcessingMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from identikit.errors import InputError
from identikit.models.families import FAMILIES, family_of

TOWERS = ("text", "vision")
# By modality: what it is called, what loads it, and its class. From its own module AutoImageProcessor needs no
# torchvision; the name that transformers 5.17 exports does.
_READERS: dict[str, tuple[str, Any, type]] = {
    "text": ("tokenizer", AutoTokenizer, PreTrainedTokenizerBase),
    "image": ("image processor", AutoImageProcessor, ImageProcessingMixin),
    "sound": ("feature extractor", AutoFeatureExtractor, FeatureExtractionMixin),
}


def part_of(model: PreTrainedModel, tower: str | None) -> PreTrainedModel:
    """Return the part of a model that is asked for: one of its towers, or the whole model."""
    named = type(model).__name__
    towers = {name: getattr(model, f"{name}_model", None) for name in TOWERS}
    towers = {name: part for name, part in towers.items() if isinstance(part, PreTrainedModel)}
    if len(towers) > 1:
        if tower in towers:
            return towers[tower]
        asked = "" if tower is None else f", and tower={tower!r:.60} is neither"
        raise InputError(
            f"Loading {named}: it has a text tower and a vision tower{asked}. Choose one with tower='text' or "
            "tower='vision' (command line: --tower)."
        )
    if tower is not None:
        raise InputError(f"Loading {named}: tower={tower!r:.60}, but it has no towers to choose from. Leave tower out.")
    if model.config.model_type not in FAMILIES and towers:  # a classifier on one tower
        return next(iter(towers.values()))
    return model


def reader_of(model: PreTrainedModel) -> tuple[str, Any, type]:
    """Return what reads for a model: what it is called, the class that loads it, and the class that it has."""
    features = family_of(model).features
    return _READERS["text" if features is None else features.modality]


def fitting_reader(model: PreTrainedModel, given: Any) -> Any:
    """Return the tokenizer, image processor or feature extractor of a model in memory, out of a processor of several.

    One of another kind is refused; a class of the user's own is taken if it has what is asked of it.
    """
    called, _, kind = reader_of(model)
    found = getattr(given, called.replace(" ", "_"), given) if isinstance(given, ProcessorMixin) else given
    others = tuple(other for _, _, other in _READERS.values() if other is not kind)
    asked = ("is_fast", "convert_ids_to_tokens") if kind is PreTrainedTokenizerBase else ()
    other = isinstance(found, (*others, ProcessorMixin)) or inspect.isroutine(found)
    if not isinstance(found, kind) and (other or not all(hasattr(found, name) for name in asked)):
        article = "an" if called[0] in "aeiou" else "a"
        raise InputError(
            f"Loading {type(model).__name__} from memory: it needs {article} {called}, and {type(found).__name__} is "
            f"not one. Use load(model, {called.replace(' ', '_')})."
        )
    return found
