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
from identikit.errors import InputError, TooLongError, reason_of
from identikit.shapes import Tensor
from identikit.texts.chat import is_chat, render_chat
from identikit.texts.encoding import TokenLimit, encode_prompt
from identikit.texts.features import grid_facts, open_image, small_copy
from identikit.texts.text import EncodedText, ImageInputs, TextWithImages, is_image

if TYPE_CHECKING:
    from PIL.Image import Image

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_IMAGE_KEYS = ("image", "path", "url")  # where a part of a message has its image, in the spellings of chat templates
_PASS = "Pass (image, question), or messages="


@dataclass(frozen=True)
class ImageView:
    """A region of a picture that becomes a grid of tokens, row by row.

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
    """One image of a text: its `number`, `width` and `height`, and the model's `config`.

    `outputs` is what the image `processor` made of all images of the text.
    """

    config: PreTrainedConfig
    processor: Any
    outputs: Mapping[str, Any]
    number: int
    width: int
    height: int

    @property
    def box(self) -> tuple[float, float, float, float]:
        """The box of the whole picture."""
        return 0.0, 0.0, float(self.width), float(self.height)


@dataclass(frozen=True)
class ImagesInText:
    """How a model reads images inside a text.

    - `views`: makes the views of an image, in the order of their tokens
    - `spell`: makes what takes the place of an image's placeholder, from the image token, the tokenizer, the
      configuration and the views
    - `arguments`: what the model takes of the image processor's outputs
    - `type_argument`: the argument in which 1 marks the tokens of images; None: there is none
    - `options`: what the image processor is called with, as the family's own processor does
    - `placeholder`: the entry of the configuration with the id of what stands for an image in a prompt
    - `bidirectional`: the tokens of an image see one another, also in a causal model
    """

    views: Callable[[ProcessedImage], tuple[ImageView, ...]]
    spell: Callable[[str, PreTrainedTokenizerBase, PreTrainedConfig, Sequence[ImageView]], str]
    arguments: tuple[str, ...] = ("pixel_values",)
    type_argument: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    placeholder: str = "image_token_id"
    bidirectional: bool = False


@dataclass(frozen=True)
class _Prompt:
    """A text before its images are read: the `string` with a placeholder for each, and where the caller's words are.

    `add_special_tokens`: the tokenizer adds its own special tokens, which the string does not have yet.
    """

    images: tuple["Image", ...]
    string: str
    spans: tuple[tuple[int, int], ...]
    add_special_tokens: bool = True


@dataclass(frozen=True)
class ImageTextEncoder:
    """Encodes the texts with images of one model.

    - `kind`: how its family reads images; `config`: the model's configuration
    - `tokenizer`, `processor`: what reads its texts, and its images; `lacking` says why there is no `processor`
    - `chat_template`: of the processor; None: the tokenizer's is used, if it has one
    """

    kind: ImagesInText
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    processor: Any = None
    chat_template: str | None = None
    lacking: str = "it was loaded without an image processor"

    def accepts(self, text: object) -> bool:
        """Whether a text is to be encoded here: it has an image, or is a chat, whose template is the processor's.

        A pair whose first half is the path of an image file is an image and a question.
        """
        if isinstance(text, TextWithImages):
            return True
        if is_chat(text):
            has_parts = any(not isinstance(message.get("content"), str) for message in text)
            return has_parts or self.processor is not None
        if isinstance(text, tuple) and len(text) == 2:
            return all(map(_is_picture, _as_list(text[0])))
        return _is_picture(text)

    def encode(self, name: str, text: Any, room: TokenLimit) -> EncodedText:
        """Return a text with its images as tokens; each token of an image is named by its row and column in it."""
        original = text.original if isinstance(text, TextWithImages) else text
        if self.processor is None:
            raise InputError(
                f"Reading {name}: the model reads images, and {self.lacking}. Load the model with its processor: "
                "load((model, processor)), or a folder that has one."
            )
        if not self.tokenizer.is_fast:
            raise InputError(f"Reading {name}: images in a text need a tokenizer that keeps offsets (a fast one).")
        prompt = self._chat_prompt(name, original) if is_chat(original) else self._question_prompt(name, original)
        outputs = self._process(name, prompt.images)
        views = [
            self.kind.views(ProcessedImage(self.config, self.processor, outputs, number, *image.size))
            for number, image in enumerate(prompt.images)
        ]
        string, spans = self._expand(prompt, views)
        encoded = encode_prompt(self.tokenizer, string, spans, add_special_tokens=prompt.add_special_tokens)
        patches = self._patch_positions(name, encoded.ids, views, room)
        about, names = _locate_tokens(prompt.images, views, patches)
        encoded = replace(
            encoded,
            special=tuple(special and at not in names for at, special in enumerate(encoded.special)),
            tokens=tuple(names.get(at, token) for at, token in enumerate(encoded.tokens)),
        )
        if not prompt.images:
            return replace(encoded, text=tuple(map(dict, original)))
        arguments = {name: torch.as_tensor(outputs[name]) for name in self.kind.arguments if name in outputs}
        if self.kind.type_argument is not None:
            is_patch = torch.tensor(encoded.ids)[None] == self.config.image_token_id
            arguments[self.kind.type_argument] = is_patch.long()
        return replace(
            encoded,
            text=TextWithImages(original, _digest(encoded.ids, arguments)),
            images=ImageInputs(arguments, about),
        )

    def _patch_positions(
        self, name: str, ids: Sequence[int], views: Sequence[Sequence[ImageView]], room: TokenLimit
    ) -> list[int]:
        """Return where the tokens of images are; refuse too many tokens, or others than the images have."""
        if room.tokens is not None and len(ids) > room.tokens:
            raise TooLongError(
                f"Reading {name}: with its images it has {len(ids)} tokens and {room.reason}. An image cannot be cut: "
                "shorten the text, or pass a smaller image."
            )
        patches = [position for position, index in enumerate(ids) if index == self.config.image_token_id]
        expected = sum(view.tokens for image_views in views for view in image_views)
        if len(patches) != expected:
            raise InputError(
                f"Reading {name}: the tokenizer spells {len(patches)} tokens of images, and the images have "
                f"{expected}. Use the model's own tokenizer."
            )
        return patches

    # From what the caller passes to a prompt

    @property
    def _placeholder(self) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(getattr(self.config, self.kind.placeholder)))

    @property
    def _template(self) -> str | None:
        return self.chat_template or getattr(self.tokenizer, "chat_template", None)

    def _chat_prompt(self, name: str, messages: Any) -> _Prompt:
        chat, images = _take_images(name, messages)
        string, spans = render_chat(self.tokenizer, name, chat, template=self._template, parts=True)
        self._check_placeholders(name, string, len(images))
        bos = self.tokenizer.bos_token
        begins = isinstance(bos, str) and string.startswith(bos)
        return _Prompt(images, string, tuple(spans), add_special_tokens=not begins)

    def _question_prompt(self, name: str, text: object) -> _Prompt:
        """Return an image and a question: through the chat template, or as the prompt that it is written as already."""
        images, question = _image_and_question(name, text)
        if self._placeholder in question:
            self._check_placeholders(name, question, len(images))
            spans = []
            start = 0
            for words in question.split(self._placeholder):
                spans.append((start, start + len(words)))
                start += len(words) + len(self._placeholder)
            return _Prompt(images, question, tuple(spans))
        if self._template is not None:
            parts = [{"type": "image", "image": image} for image in images] + [{"type": "text", "text": question}]
            return self._chat_prompt(name, [{"role": "user", "content": parts}])
        before = f"{self._placeholder * len(images)}\n"
        return _Prompt(images, before + question, ((len(before), len(before) + len(question)),))

    def _check_placeholders(self, name: str, string: str, images: int) -> None:
        count = string.count(self._placeholder)
        if count != images:
            raise InputError(
                f"Reading {name}: its prompt has {count} placeholder{'' if count == 1 else 's'} "
                f"{self._placeholder!r} for {images} image{'' if images == 1 else 's'}. Write one for each image, or "
                "none and let the chat template do it."
            )

    # From the prompt to what the model reads

    def _process(self, name: str, images: tuple["Image", ...]) -> Mapping[str, Any]:
        if not images:
            return {}
        try:
            return self.processor(list(images), return_tensors="pt", **self.kind.options)
        except Exception as error:  # image processors raise what they like on a picture that they cannot take
            raise InputError(
                f"Reading {name}: {type(self.processor).__name__} cannot read its image ({reason_of(error)}). Pass "
                "another."
            ) from error

    def _expand(self, prompt: _Prompt, views: Sequence[Sequence[ImageView]]) -> tuple[str, list[tuple[int, int]]]:
        """Return the prompt with each placeholder as the tokens of its image, and where the caller's words are then."""
        token = str(self.tokenizer.convert_ids_to_tokens(self.config.image_token_id))
        first, *following = prompt.string.split(self._placeholder)
        string = first
        stop = len(first)
        shifts = [(stop, 0)]  # where a text between placeholders ends in the prompt, and how far it moves
        for text, image_views in zip(following, views, strict=True):
            string += self.kind.spell(token, self.tokenizer, self.config, image_views)
            start = stop + len(self._placeholder)
            stop = start + len(text)
            shifts.append((stop, len(string) - start))
            string += text
        spans = []
        for start, stop in prompt.spans:
            shift = next(shift for end, shift in shifts if stop <= end)
            spans.append((start + shift, stop + shift))
        return string, spans


# What the caller passes


def _is_picture(value: object) -> bool:
    """Whether a value is an image or the path of one; a string is one if it ends like the name of an image file."""
    if isinstance(value, str):
        return value.lower().endswith(_SUFFIXES) and "\n" not in value
    return is_image(value) or isinstance(value, os.PathLike)


def _as_list(images: object) -> Sequence[object]:
    """Return one or several images as a list; an empty one is no image."""
    return images if isinstance(images, list | tuple) and images else [images]


def _image_and_question(name: str, text: object) -> tuple[tuple["Image", ...], str]:
    if not isinstance(text, tuple):
        raise InputError(f"Reading {name}: it is an image without a question. {_PASS}.")
    images, question = text
    if not isinstance(question, str) or not question.strip():
        raise InputError(f"Reading {name}: the question is {shortened(question)}, expected some words. {_PASS}.")
    return tuple(open_image(image, name) for image in _as_list(images)), question


def _take_images(name: str, messages: Sequence[Mapping[str, object]]) -> tuple[list[Any], tuple["Image", ...]]:
    """Return messages whose contents are parts, without their images, and the images in their order."""
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
        bare_parts = []
        for part in parts:
            if part.get("type") != "image":
                bare_parts.append(dict(part))
                continue
            image = next((part[key] for key in _IMAGE_KEYS if key in part), None)
            images.append(open_image(image, name))
            bare_parts.append({"type": "image"})
        chat.append({**message, "content": bare_parts})
    return chat, tuple(images)


# Where the tokens are


def _locate_tokens(
    images: Sequence["Image"], views: Sequence[Sequence[ImageView]], patches: Sequence[int]
) -> tuple[tuple[dict[str, object], ...], dict[int, str]]:
    """Return what is kept of each image, and the name of each of its tokens by its position in the text."""
    names: dict[int, str] = {}
    about = []
    remaining = iter(patches)
    for number, (image, image_views) in enumerate(zip(images, views, strict=True)):
        tiled = any(view.tile is not None for view in image_views)
        grids = []
        for view in image_views:
            positions = [next(remaining) for _ in range(view.tokens)]
            is_overview = tiled and view.tile is None
            origin = (0, 0) if view.tile is None else (view.tile[0] * view.rows, view.tile[1] * view.columns)
            for index, position in enumerate(positions):
                row, column = divmod(index, view.columns)
                label = f"{number} overview" if is_overview else str(number)
                names[position] = f"<image {label}:{origin[0] + row},{origin[1] + column}>"
            grids.append(grid_facts(view.rows, view.columns, view.box, positions, is_overview, origin))
        about.append({"size": list(image.size), "picture": small_copy(image), "views": grids})
    return tuple(about), names


def _digest(ids: Sequence[int], arguments: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(repr(list(ids)).encode())
    for name, tensor in sorted(arguments.items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
