"""Images inside a text: an image and a question, or a chat with images, as the tokens of a text decoder.

A family of models says in an `ImagesInText` how one of its images becomes grids of tokens, where these are on the
picture, and what stands for them in the text; `texts/layouts.py` has one for each. All else is the same for all of them
and is here. The image processor makes the pixels; no processor of several is needed, nor torchvision.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from identikit.checks import shortened
from identikit.errors import InputError, TooLongError
from identikit.shapes import Tensor
from identikit.texts.chat import is_chat, render_chat
from identikit.texts.encoding import TokenLimit, encode_prompt
from identikit.texts.features import open_image, small_copy
from identikit.texts.text import EncodedText, ImagesRead, TextWithImages, is_image

if TYPE_CHECKING:
    from PIL.Image import Image

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_SOURCES = ("image", "path", "url")  # where a part of a message has its image, in the spellings of chat templates
_PASS = "Pass (image, question), or messages="


@dataclass(frozen=True)
class ImageView:
    """A part of a picture that becomes a grid of tokens, row by row.

    - `rows`, `columns`: of tokens
    - `box`: what it shows, in pixels of the picture: left, top, right, bottom
    - `tile`: its row and column among the tiles that a large picture is cut into; None: it is not one of them
    """

    rows: int
    columns: int
    box: tuple[float, float, float, float]
    tile: tuple[int, int] | None = None

    @property
    def tokens(self) -> int:
        """How many tokens it becomes."""
        return self.rows * self.columns


class ProcessedImage(NamedTuple):
    """One image of a text: by its `number`, of `width` × `height`, with the model's `config`.

    The image `processor` has `made` the pixels of all of them.
    """

    config: PreTrainedConfig
    processor: Any
    made: Mapping[str, Any]
    number: int
    width: int
    height: int

    @property
    def whole(self) -> tuple[float, float, float, float]:
        """The box of the whole picture."""
        return 0.0, 0.0, float(self.width), float(self.height)


@dataclass(frozen=True)
class ImagesInText:
    """How a model reads images inside a text.

    - `layout`: the views of an image, in the order of their tokens
    - `spelled`: what takes the place of an image's placeholder, from the image token, the tokenizer, the configuration
      and the views
    - `arguments`: what the model takes of what the image processor makes
    - `kinds`: the argument in which 1 marks the tokens of images; None: there is none
    - `options`: what the image processor is called with, as the family's own processor does
    - `placeholder`: the entry of the configuration with the id of what stands for an image in a prompt
    - `bidirectional`: the tokens of an image see one another, also in a causal model
    """

    layout: Callable[[ProcessedImage], tuple[ImageView, ...]]
    spelled: Callable[[str, PreTrainedTokenizerBase, PreTrainedConfig, Sequence[ImageView]], str]
    arguments: tuple[str, ...] = ("pixel_values",)
    kinds: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    placeholder: str = "image_token_id"
    bidirectional: bool = False


class ImageReader(NamedTuple):
    """What a checkpoint brings for images in texts: its image `processor` and `chat_template`; None: it has none.

    `lacking` says why there is no image processor.
    """

    processor: Any = None
    chat_template: str | None = None
    lacking: str = "it was loaded without an image processor"


@dataclass(frozen=True)
class _Prompt:
    """A text before its images are read: the `string` with a placeholder for each, and where the caller's words are.

    `opened`: the tokenizer adds its own special tokens, which the string does not have yet.
    """

    images: tuple["Image", ...]
    string: str
    spans: tuple[tuple[int, int], ...]
    opened: bool


@dataclass(frozen=True)
class PictureSource:
    """What reads the images in the texts of one model.

    - `kind`: how its family does it; `config`: the model's configuration
    - `tokenizer`, `reader`: what reads its texts, and its images
    """

    kind: ImagesInText
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    reader: ImageReader

    def holds(self, text: object) -> bool:
        """Whether a text is to be read here: it has an image in it, or is a chat, whose template is the processor's.

        A pair whose first half is the path of an image file is an image and a question.
        """
        if isinstance(text, TextWithImages):
            return True
        if is_chat(text):
            in_parts = any(not isinstance(message.get("content"), str) for message in text)
            return in_parts or self.reader.processor is not None
        if isinstance(text, tuple) and len(text) == 2:
            first = text[0]
            listed = first if isinstance(first, list | tuple) and first else [first]
            return all(map(_is_picture, listed))
        return _is_picture(text)

    def encode(self, name: str, text: Any, room: TokenLimit) -> EncodedText:
        """Return a text with its images as tokens; each token of an image is named by its row and column in it."""
        given = text.given if isinstance(text, TextWithImages) else text
        self._check(name)
        prompt = self._prompt(name, given)
        made = self._made(name, prompt.images)
        views = [
            self.kind.layout(ProcessedImage(self.config, self.reader.processor, made, number, *image.size))
            for number, image in enumerate(prompt.images)
        ]
        string, spans = self._expanded(prompt, views)
        encoded = encode_prompt(self.tokenizer, string, spans, opened=prompt.opened)
        patches = self._patches(name, encoded.ids, views, room)
        about, names = _placed(prompt.images, views, patches)
        arguments = self._arguments(made, encoded.ids)
        read = ImagesRead(arguments, about) if prompt.images else None
        return replace(
            encoded,
            special=tuple(special and place not in names for place, special in enumerate(encoded.special)),
            tokens=tuple(names.get(place, token) for place, token in enumerate(encoded.tokens)),
            text=TextWithImages(given, _digest(encoded.ids, arguments)) if read else tuple(map(dict, given)),
            images=read,
        )

    def _check(self, name: str) -> None:
        if self.reader.processor is None:
            raise InputError(
                f"Reading {name}: the model reads images, and {self.reader.lacking}. Load the model with its "
                "processor: load((model, processor)), or a folder that has one."
            )
        if not self.tokenizer.is_fast:
            raise InputError(f"Reading {name}: images in a text need a tokenizer that keeps offsets (a fast one).")

    def _patches(
        self, name: str, ids: Sequence[int], views: Sequence[Sequence[ImageView]], room: TokenLimit
    ) -> list[int]:
        """Return where the tokens of images are; refuse too many tokens, or others than the images have."""
        if room.tokens is not None and len(ids) > room.tokens:
            raise TooLongError(
                f"Reading {name}: with its images it has {len(ids)} tokens and {room.reason}. An image cannot be cut: "
                "shorten the text, or pass a smaller image."
            )
        patches = [place for place, index in enumerate(ids) if index == self.config.image_token_id]
        expected = sum(view.tokens for of_image in views for view in of_image)
        if len(patches) != expected:
            raise InputError(
                f"Reading {name}: the tokenizer spells {len(patches)} tokens of images, and the images have "
                f"{expected}. Use the model's own tokenizer."
            )
        return patches

    # From what the caller gives to a prompt

    @property
    def _placeholder(self) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(getattr(self.config, self.kind.placeholder)))

    def _prompt(self, name: str, given: Any) -> _Prompt:
        if not is_chat(given):
            return self._question(name, *_image_and_question(name, given))
        messages, images = _with_images(name, given)
        string, spans = render_chat(self.tokenizer, name, messages, template=self._template, parts=True)
        self._check_count(name, string, len(images))
        bos = self.tokenizer.bos_token
        begun = isinstance(bos, str) and string.startswith(bos)
        return _Prompt(images, string, tuple(spans), opened=not begun)

    def _question(self, name: str, images: tuple["Image", ...], question: str) -> _Prompt:
        """Return an image and a question: through the chat template, or as the prompt that it is written as already."""
        if self._placeholder in question:
            self._check_count(name, question, len(images))
            spans = []
            at = 0
            for part in question.split(self._placeholder):
                spans.append((at, at + len(part)))
                at += len(part) + len(self._placeholder)
            return _Prompt(images, question, tuple(spans), opened=True)
        if self._template is not None:
            parts = [{"type": "image", "image": image} for image in images] + [{"type": "text", "text": question}]
            return self._prompt(name, [{"role": "user", "content": parts}])
        before = f"{self._placeholder * len(images)}\n"
        span = (len(before), len(before) + len(question))
        return _Prompt(images, before + question, (span,), opened=True)

    @property
    def _template(self) -> str | None:
        return self.reader.chat_template or getattr(self.tokenizer, "chat_template", None)

    def _check_count(self, name: str, string: str, images: int) -> None:
        there = string.count(self._placeholder)
        if there != images:
            raise InputError(
                f"Reading {name}: its prompt has {there} placeholder{'' if there == 1 else 's'} "
                f"{self._placeholder!r} for {images} image{'' if images == 1 else 's'}. Write one for each image, or "
                "none and let the chat template do it."
            )

    # From the prompt to what the model reads

    def _made(self, name: str, images: tuple["Image", ...]) -> Mapping[str, Any]:
        if not images:
            return {}
        try:
            return self.reader.processor(list(images), return_tensors="pt", **self.kind.options)
        except Exception as error:  # image processors raise what they like on a picture that they cannot take
            reason = " ".join(str(error).split())[:200].rstrip(".")
            raise InputError(
                f"Reading {name}: {type(self.reader.processor).__name__} cannot read its image ({reason}). Pass "
                "another."
            ) from error

    def _expanded(self, prompt: _Prompt, views: Sequence[Sequence[ImageView]]) -> tuple[str, list[tuple[int, int]]]:
        """Return the prompt with each placeholder as the tokens of its image, and where the caller's words are then."""
        token = str(self.tokenizer.convert_ids_to_tokens(self.config.image_token_id))
        first, *rest = prompt.string.split(self._placeholder)
        string = first
        ends = [len(first)]  # of the text between placeholders, in the prompt
        shifts = [0]
        for part, of_image in zip(rest, views, strict=True):
            string += self.kind.spelled(token, self.tokenizer, self.config, of_image)
            begins = ends[-1] + len(self._placeholder)
            shifts.append(len(string) - begins)
            ends.append(begins + len(part))
            string += part
        spans = []
        for start, stop in prompt.spans:
            shift = next(shift for end, shift in zip(ends, shifts, strict=True) if stop <= end)
            spans.append((start + shift, stop + shift))
        return string, spans

    def _arguments(self, made: Mapping[str, object], ids: Sequence[int]) -> dict[str, Tensor]:
        arguments = {name: torch.as_tensor(made[name]) for name in self.kind.arguments if name in made}
        if self.kind.kinds is not None:
            arguments[self.kind.kinds] = (torch.tensor(ids)[None] == self.config.image_token_id).long()
        return arguments


# What the caller gives


def _is_picture(value: object) -> bool:
    """Whether a value is an image or the path of one; a string is one if it ends like the name of an image file."""
    if isinstance(value, str):
        return value.lower().endswith(_SUFFIXES) and "\n" not in value
    return is_image(value) or isinstance(value, os.PathLike)


def _image_and_question(name: str, given: object) -> tuple[tuple["Image", ...], str]:
    if not isinstance(given, tuple):
        raise InputError(f"Reading {name}: it is an image without a question. {_PASS}.")
    first, question = given
    if not isinstance(question, str) or not question.strip():
        raise InputError(f"Reading {name}: the question is {shortened(question)}, expected some words. {_PASS}.")
    listed = first if isinstance(first, list | tuple) else [first]
    return tuple(open_image(image, name) for image in listed), question


def _with_images(name: str, messages: Sequence[Mapping[str, object]]) -> tuple[list[Any], tuple["Image", ...]]:
    """Return messages whose contents are parts, those of images bare, and the images in their order."""
    images = []
    chat = []
    for message in messages:
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list | tuple) or not all(isinstance(part, Mapping) for part in parts):
            raise InputError(
                f"Reading {name}: the content of a message is {shortened(content)}, expected a string, or a list of "
                "{'type': 'image', 'image': …} and {'type': 'text', 'text': …}."
            )
        kept = []
        for part in parts:
            if part.get("type") == "image":
                given = next((part[key] for key in _SOURCES if key in part), None)
                images.append(open_image(given, name))
                kept.append({"type": "image"})
            else:
                kept.append(dict(part))
        chat.append({**message, "content": kept})
    return chat, tuple(images)


# Where the tokens are


def _placed(
    images: Sequence["Image"], views: Sequence[Sequence[ImageView]], patches: Sequence[int]
) -> tuple[tuple[dict[str, object], ...], dict[int, str]]:
    """Return what is kept of each image, and the name of each of its tokens by its position in the text."""
    names: dict[int, str] = {}
    about = []
    at = 0
    for number, (image, of_image) in enumerate(zip(images, views, strict=True)):
        tiled = any(view.tile is not None for view in of_image)
        kept = []
        for view in of_image:
            places = patches[at : at + view.tokens]
            at += view.tokens
            overview = tiled and view.tile is None
            down, across = (0, 0) if view.tile is None else (view.tile[0] * view.rows, view.tile[1] * view.columns)
            for order, place in enumerate(places):
                row, column = divmod(order, view.columns)
                which = f"{number} overview" if overview else str(number)
                names[place] = f"<image {which}:{down + row},{across + column}>"
            grid = {"rows": view.rows, "columns": view.columns, "box": list(view.box), "tokens": list(places)}
            kept.append(grid | {"overview": overview, "from": [down, across]})
        about.append({"size": list(image.size), "picture": small_copy(image), "views": kept})
    return tuple(about), names


def _digest(ids: Sequence[int], arguments: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(repr(list(ids)).encode())
    for name, tensor in sorted(arguments.items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
