"""Models of several parts: the tower that is read, and the tokenizers and processors that make its inputs."""

import inspect
import json
from dataclasses import replace
from typing import Any, NamedTuple

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

from identikit.checks import shortened
from identikit.errors import InputError, ModelError
from identikit.models.families import FAMILIES, has_decoder
from identikit.models.load.checkpoint import Checkpoint, read_object
from identikit.models.table import Family
from identikit.texts.encoding import tokenize
from identikit.texts.pictures import ImageTextEncoder

TOWERS = ("text", "vision")


class ReaderKind(NamedTuple):
    """A kind of tokenizer or processor: its name, the class that loads it, and its base class."""

    name: str
    auto: type[AutoTokenizer | AutoImageProcessor | AutoFeatureExtractor]
    base: type


# By modality. The AutoImageProcessor of this module needs no torchvision; the one that transformers 5.17 exports does.
_READERS = {
    "text": ReaderKind("tokenizer", AutoTokenizer, PreTrainedTokenizerBase),
    "image": ReaderKind("image processor", AutoImageProcessor, ImageProcessingMixin),
    "sound": ReaderKind("feature extractor", AutoFeatureExtractor, FeatureExtractionMixin),
}


class Readers(NamedTuple):
    """What makes a model's inputs; None where there is none.

    - `reader`: its tokenizer, image processor or feature extractor
    - `target_tokenizer`: of a decoder's texts, where its encoder reads something else
    - `images`: encodes texts with images
    """

    reader: Any
    target_tokenizer: Any
    images: ImageTextEncoder | None


def select_tower(model: PreTrainedModel, tower: str | None) -> PreTrainedModel:
    """Return one of a model's towers, or the whole model if it has none."""
    kind = type(model).__name__
    towers = {}
    for name in TOWERS:
        module = getattr(model, f"{name}_model", None)
        if isinstance(module, PreTrainedModel):
            towers[name] = module
    if len(towers) > 1:
        if tower in towers:
            return towers[tower]
        wrong = "" if tower is None else f", and tower={tower!r:.60} is neither"
        raise InputError(
            f"Loading {kind}: it has a text tower and a vision tower{wrong}. Choose one with tower='text' or "
            "tower='vision'."
        )
    if tower is not None:
        raise InputError(f"Loading {kind}: tower={tower!r:.60}, but it has no towers to choose from. Leave tower out.")
    if model.config.model_type not in FAMILIES and towers:  # a classifier on one tower
        return next(iter(towers.values()))
    return model


def stored_readers(checkpoint: Checkpoint, model: PreTrainedModel, family: Family) -> Readers:
    """Return the tokenizers and processors that a checkpoint has for a model."""
    reader = _stored_reader(checkpoint, _reader_kind(family))
    target_tokenizer = None
    if _needs_target_tokenizer(model, family) and checkpoint.file("tokenizer_config.json") is not None:
        target_tokenizer = AutoTokenizer.from_pretrained(checkpoint.place, **checkpoint.options)
    if family.images is None:
        return Readers(reader, target_tokenizer, None)
    images = ImageTextEncoder(family.images, model.config, reader)
    file = checkpoint.file("chat_template.json")  # where processors kept it before chat_template.jinja
    if file is not None:
        images = replace(images, chat_template=read_object(file, checkpoint.source).get("chat_template"))
    try:
        processor = AutoImageProcessor.from_pretrained(checkpoint.source, **checkpoint.options)
        images = replace(images, processor=processor)
    except Exception as error:  # transformers raises what it likes on a damaged file, and on one that is not there
        reason = shortened(_first_sentence(error).rstrip("."))
        images = replace(images, lacking=f"its image processor cannot be read ({reason})")
    return Readers(reader, target_tokenizer, images)


def given_readers(model: PreTrainedModel, family: Family, given: object) -> Readers:
    """Return the readers of a model in memory, from a tokenizer or from a processor that holds several."""
    reader = _fitting_reader(model, _reader_kind(family), given)
    processor = given if isinstance(given, ProcessorMixin) else None
    target_tokenizer = getattr(processor, "tokenizer", None) if _needs_target_tokenizer(model, family) else None
    if family.images is None:
        return Readers(reader, target_tokenizer, None)
    image_processor = getattr(processor, "image_processor", None)
    template = getattr(processor, "chat_template", None)
    return Readers(
        reader, target_tokenizer, ImageTextEncoder(family.images, model.config, reader, image_processor, template)
    )


def _reader_kind(family: Family) -> ReaderKind:
    return _READERS["text" if family.features is None else family.features.modality]


def _needs_target_tokenizer(model: PreTrainedModel, family: Family) -> bool:
    return family.features is not None and has_decoder(family, model)


def _first_sentence(error: Exception) -> str:
    return " ".join(str(error).split()).partition(". ")[0]


def _stored_reader(checkpoint: Checkpoint, kind: ReaderKind) -> Any:
    """Return the tokenizer, image processor or feature extractor of a checkpoint."""
    try:
        return kind.auto.from_pretrained(checkpoint.place, **checkpoint.options)
    except ImportError as error:  # its first sentence names what is missing
        raise ModelError(
            f"Loading {checkpoint.source}: its {kind.name} cannot be read: {_first_sentence(error)}. Install it."
        ) from None
    except Exception as error:  # tokenizers, sentencepiece and json raise what they like on a damaged file
        reason = next(iter(str(error).strip().splitlines()), "").rstrip(".")
        if not isinstance(error, OSError | ValueError):
            reason = f"{type(error).__name__}: {reason}"
        raise ModelError(
            f"Loading {checkpoint.source}: its {kind.name} cannot be read ({reason}). Check its files."
        ) from None


def _fitting_reader(model: PreTrainedModel, kind: ReaderKind, reader: object) -> Any:
    """Return a reader of the kind that a model in memory needs, taken out of a processor if that is what was passed.

    A reader of another kind is refused; a class of the user's own passes if it has the attributes that are used.
    """
    attribute = kind.name.replace(" ", "_")
    if isinstance(reader, ProcessorMixin):
        reader = getattr(reader, attribute, reader)
    other_bases = tuple(other.base for other in _READERS.values() if other is not kind)
    required = ("is_fast", "convert_ids_to_tokens") if kind.base is PreTrainedTokenizerBase else ()
    is_wrong = isinstance(reader, (*other_bases, ProcessorMixin)) or inspect.isroutine(reader)
    if not isinstance(reader, kind.base) and (is_wrong or not all(hasattr(reader, name) for name in required)):
        article = "an" if kind.name[0] in "aeiou" else "a"
        raise InputError(
            f"Loading {type(model).__name__} from memory: it needs {article} {kind.name}, and {type(reader).__name__} "
            f"is not one. Use load(model, {attribute})."
        )
    return reader


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocabulary: int, name: str) -> None:
    """Refuse a tokenizer whose special tokens, which are in every text, the model called `name` does not know."""
    processor = getattr(getattr(tokenizer, "backend_tokenizer", None), "post_processor", None)
    state = {} if processor is None else json.loads(processor.__getstate__())
    for template in state.get("processors", [state]):
        pieces = [*(template.get("single") or ()), *(template.get("pair") or ())]
        for token in [piece["SpecialToken"]["id"] for piece in pieces if piece.get("SpecialToken") is not None]:
            if token not in template.get("special_tokens", {}):  # tokenizers would panic at every text
                raise ModelError(
                    f"Loading {name}: its tokenizer adds {shortened(token)} to every text, and does not say which id "
                    "that has. Check its tokenizer.json."
                )
    tokenize(tokenizer, "a, b \N{SNOWMAN}")  # words that it may not know
    for index in tokenize(tokenizer, "")["input_ids"]:
        if index >= vocabulary:
            token = tokenizer.convert_ids_to_tokens(index)
            raise ModelError(
                f"Loading {name}: its tokenizer puts {token!r} (id {index}) into every text, and the model has "
                f"embeddings for only {vocabulary} ids. Use the model's own tokenizer."
            )
