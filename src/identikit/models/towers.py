"""Models of several parts: the part that is read, and the tokenizer or processor that reads for it."""

import inspect
import json
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
from identikit.models.families import FAMILIES, family_of, has_decoder
from identikit.models.load.checkpoint import Checkpoint, read_object
from identikit.texts.encoding import tokenize
from identikit.texts.pictures import ImageReader, PictureSource

TOWERS = ("text", "vision")


class ReaderKind(NamedTuple):
    """A kind of what reads for a model: what it is called, the class that loads it, and the class that it has."""

    name: str
    auto: type[AutoTokenizer | AutoImageProcessor | AutoFeatureExtractor]
    base: type


# By modality. The AutoImageProcessor of this module needs no torchvision; the one that transformers 5.17 exports does.
_READERS = {
    "text": ReaderKind("tokenizer", AutoTokenizer, PreTrainedTokenizerBase),
    "image": ReaderKind("image processor", AutoImageProcessor, ImageProcessingMixin),
    "sound": ReaderKind("feature extractor", AutoFeatureExtractor, FeatureExtractionMixin),
}


def select_tower(model: PreTrainedModel, tower: str | None) -> PreTrainedModel:
    """Return the part of a model that is asked for: one of its towers, or the whole model."""
    named = type(model).__name__
    towers = {}
    for name in TOWERS:
        module = getattr(model, f"{name}_model", None)
        if isinstance(module, PreTrainedModel):
            towers[name] = module
    if len(towers) > 1:
        if tower in towers:
            return towers[tower]
        asked = "" if tower is None else f", and tower={tower!r:.60} is neither"
        raise InputError(
            f"Loading {named}: it has a text tower and a vision tower{asked}. Choose one with tower='text' or "
            "tower='vision'."
        )
    if tower is not None:
        raise InputError(f"Loading {named}: tower={tower!r:.60}, but it has no towers to choose from. Leave tower out.")
    if model.config.model_type not in FAMILIES and towers:  # a classifier on one tower
        return next(iter(towers.values()))
    return model


def _reader_kind(model: PreTrainedModel) -> ReaderKind:
    features = family_of(model).features
    return _READERS["text" if features is None else features.modality]


class Readers(NamedTuple):
    """What reads for a model: `texts` (or images, or sounds); None where there is none:

    - `targets`: the tokenizer of a decoder's texts, where its encoder reads something else
    - `images`: what reads images inside texts
    """

    texts: Any
    targets: Any
    images: PictureSource | None


def stored_readers(checkpoint: Checkpoint, model: PreTrainedModel) -> Readers:
    """Return what a checkpoint brings to read for a model."""
    reader = _stored_reader(checkpoint, model)
    targets = None
    if _writes(model) and checkpoint.file("tokenizer_config.json") is not None:
        targets = AutoTokenizer.from_pretrained(checkpoint.place, **checkpoint.options)
    return Readers(reader, targets, _picture_source(model, reader, checkpoint))


def given_readers(model: PreTrainedModel, given: object) -> Readers:
    """Return what reads for a model in memory, out of a tokenizer, or of a processor of several."""
    reader = _fitting_reader(model, given)
    several = _writes(model) and isinstance(given, ProcessorMixin)
    targets = getattr(given, "tokenizer", None) if several else None
    return Readers(reader, targets, _picture_source(model, reader, given))


def _stored_reader(checkpoint: Checkpoint, model: PreTrainedModel) -> Any:
    """Return the tokenizer, image processor or feature extractor that a checkpoint brings for a model."""
    kind = _reader_kind(model)
    try:
        return kind.auto.from_pretrained(checkpoint.place, **checkpoint.options)
    except ImportError as error:  # its first sentence names what is missing
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise ModelError(
            f"Loading {checkpoint.source}: its {kind.name} cannot be read: {reason}. Install it."
        ) from None
    except Exception as error:  # tokenizers, sentencepiece and json raise what they like on a damaged file
        reason = next(iter(str(error).strip().splitlines()), "").rstrip(".")
        if not isinstance(error, OSError | ValueError):
            reason = f"{type(error).__name__}: {reason}"
        raise ModelError(
            f"Loading {checkpoint.source}: its {kind.name} cannot be read ({reason}). Check its files."
        ) from None


def _writes(model: PreTrainedModel) -> bool:
    family = family_of(model)
    return family.features is not None and has_decoder(family, model)


def _fitting_reader(model: PreTrainedModel, reader: object) -> Any:
    """Return the tokenizer, image processor or feature extractor of a model in memory, out of a processor of several.

    One of another kind is refused; a class of the user's own is taken if it has what is asked of it.
    """
    kind = _reader_kind(model)
    attribute = kind.name.replace(" ", "_")
    if isinstance(reader, ProcessorMixin):
        reader = getattr(reader, attribute, reader)
    others = tuple(other.base for other in _READERS.values() if other is not kind)
    asked = ("is_fast", "convert_ids_to_tokens") if kind.base is PreTrainedTokenizerBase else ()
    is_other = isinstance(reader, (*others, ProcessorMixin)) or inspect.isroutine(reader)
    if not isinstance(reader, kind.base) and (is_other or not all(hasattr(reader, name) for name in asked)):
        article = "an" if kind.name[0] in "aeiou" else "a"
        raise InputError(
            f"Loading {type(model).__name__} from memory: it needs {article} {kind.name}, and {type(reader).__name__} "
            f"is not one. Use load(model, {attribute})."
        )
    return reader


def _picture_source(model: PreTrainedModel, tokenizer: Any, origin: Any) -> PictureSource | None:
    """Return what reads images in the texts of a model; None: it reads none.

    `origin` is the checkpoint, or the processor of several that came with a model in memory. Where it brings no image
    processor that can be read, texts without images still can.
    """
    kind = family_of(model).images
    if kind is None:
        return None
    reader = ImageReader()
    if isinstance(origin, Checkpoint):
        reader = _stored(origin)
    elif isinstance(origin, ProcessorMixin):
        reader = ImageReader(getattr(origin, "image_processor", None), getattr(origin, "chat_template", None))
    return PictureSource(kind, model.config, tokenizer, reader)


def _stored(checkpoint: Checkpoint) -> ImageReader:
    template = None
    file = checkpoint.file("chat_template.json")  # where processors had it before there were chat_template.jinja
    if file is not None:
        template = read_object(file, checkpoint.source).get("chat_template")
    try:
        processor = AutoImageProcessor.from_pretrained(checkpoint.source, **checkpoint.options)
    except Exception as error:  # transformers raises what it likes on a damaged file, and on one that is not there
        reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
        return ImageReader(None, template, f"its image processor cannot be read ({shortened(reason)})")
    return ImageReader(processor, template)


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
