"""Texts, pairs and token ids (and images and sounds, as features) as the padded batches that models read.

A *text* is a string, a pair of strings, a sequence of token ids, or the messages of a chat; where the model reads
images inside a text, also an image and a question. `encoding.encode` turns texts into tokens, `batches` sorts them by
length and pads them, and `restore_order` puts the results of the batches back in the caller's order.
"""

import numbers
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence

from identikit.shapes import Bool, Float, Int, Tensor

MAX_CHARACTERS = 10_000_000  # tokenising takes a few hundred bytes per character
SOURCE = "source"  # the fact of a Result with the `tokens`, `special` and `words` of its keys or inputs
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False, repr=False)
class TextWithImages:
    """A text with images: the caller's `original`, and a SHA-256 `digest` of what the model reads of it."""

    original: Any
    digest: str

    def __repr__(self) -> str:  # provenance hashes it
        return f"text with images {self.digest}"


class Translation(NamedTuple):
    """A text of two: a `source`, which an encoder reads, and the `target` that a decoder reads with it."""

    source: Any
    target: Any


Text = str | tuple[str, str] | tuple[int, ...] | tuple[dict[str, str], ...] | Translation
ReadText = Text | TextWithImages


@dataclass(frozen=True, eq=False)
class ImageInputs:
    """The images of a text as a model reads them.

    - `arguments`: what the model is given beside the ids; along the first axis they count images, patches or texts
    - `about`: each image's size, a small picture, and where its tokens are on it, as plain JSON values
    """

    arguments: Mapping[str, Tensor]
    about: tuple[dict[str, Any], ...]

    def to(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the arguments on a device, floating-point ones in a dtype."""
        return {
            name: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in self.arguments.items()
        }

    def repeated(self, count: int) -> "ImageInputs":
        """Return the images of `count` copies of the text."""
        arguments = {name: tensor.repeat(count, *[1] * (tensor.ndim - 1)) for name, tensor in self.arguments.items()}
        return replace(self, arguments=arguments)


@dataclass(frozen=True)
class EncodedText:
    """One text as tokens, unpadded.

    - `ids`, `tokens`: their ids, and what they spell
    - `segments`: which half of a pair each token belongs to; None: the model does not ask
    - `special`: which tokens the tokenizer or its chat template added. A special token that the text itself spells out
      is part of the text. Token ids do not say who added them: there, all special tokens but the unknown and the mask
      are marked
    - `words`: each word's half-open span of tokens, in order. Punctuation marks are words of their own; special tokens
      and lone white space belong to no word
    - `characters`: where each word is: (part, start, stop), `part` being an index of `parts`. A tagger's tags, which
      belong to characters, reach tokens through these two
    - `text`: what the caller passed, and `parts` the strings that were read: the text, the halves of a pair, or what
      token ids spell between special tokens. Tokenizers in pure Python cannot be aligned, nor can ids that no string is
      split into: they have no words
    - `features`: an image's pixels, or a sound's samples or spectrogram; these have no ids
    - `images`: those inside a text; their tokens are neither special nor in a word
    - `source`: what an encoder reads, where a decoder reads the text itself
    """

    ids: tuple[int, ...]
    segments: tuple[int, ...] | None
    special: tuple[bool, ...]
    tokens: tuple[str, ...]
    words: tuple[tuple[int, int], ...]
    text: ReadText
    characters: tuple[tuple[int, int, int], ...] = ()
    parts: tuple[str, ...] = ()
    features: Float[Tensor, "*shape"] | None = field(default=None, compare=False)
    images: ImageInputs | None = field(default=None, compare=False)
    source: "EncodedText | None" = None

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self) -> "TokenBatch":
        """Return the text as a batch of its own, which needs no padding."""
        return TokenBatch(
            ids=torch.tensor([self.ids]) if self.features is None else None,
            keep=torch.ones(1, len(self), dtype=torch.bool),
            special=torch.tensor([self.special]),
            segments=None if self.segments is None else torch.tensor([self.segments]),
            tokens=(self.tokens,),
            words=(self.words,),
            order=(0,),
            features=None if self.features is None else self.features[None],
            images=self.images,
            source=None if self.source is None else self.source.batch(),
        )

    @property
    def is_tokens_only(self) -> bool:
        """Whether tokens are all that the model reads: no image or sound, and no second text."""
        return bool(self.ids) and self.images is None and self.source is None


AnyText = Text | EncodedText
"""A text as it was given, or one that was encoded before."""


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Several texts, images or sounds, padded to one length; masks are True where something is kept.

    `keep` is False for padding, `special` True for tokens that the tokenizer added, and `segments` says which half of a
    pair a token belongs to. `tokens` and `words` are unpadded: a word's span counts the text's own pieces, whichever
    side is padded. `order` gives each row's index in the caller's list. Images and sounds have `features` and no `ids`,
    and are never padded. A text with `images` inside is a batch of its own. `source` is the batch that an encoder
    reads, where a decoder reads this one.
    """

    ids: Int[Tensor, "batch n"] | None
    keep: Bool[Tensor, "batch n"]
    special: Bool[Tensor, "batch n"]
    segments: Int[Tensor, "batch n"] | None
    tokens: tuple[tuple[str, ...], ...]
    words: tuple[tuple[tuple[int, int], ...], ...]
    order: tuple[int, ...]
    features: Float[Tensor, "batch *shape"] | None = None
    images: ImageInputs | None = None
    source: "TokenBatch | None" = None

    def __len__(self) -> int:
        return len(self.order)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of real tokens of each row."""
        return tuple(len(row) for row in self.tokens)

    def to(self, device: torch.device | str) -> "TokenBatch":
        """Return the same batch with its tensors on another device."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor | TokenBatch)}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})

    def positions(self, row: int) -> Int[Tensor, " kept"]:
        """Return the positions of one row's real tokens: `result[row, batch.positions(row)]` is unpadded."""
        return self.keep[row].nonzero().squeeze(-1)


def is_text_list(texts: object) -> TypeGuard[list[Any]]:
    """Whether an argument is a list of texts, not a list of one text's token ids or messages."""
    if not isinstance(texts, list) or not texts:
        return isinstance(texts, list)
    first = texts[0]
    is_number = isinstance(first, numbers.Number) or getattr(first, "ndim", None) == 0  # of Python, NumPy or torch
    return not is_number and not isinstance(first, Mapping)


def is_image(value: object) -> bool:
    """Whether a value is an image of Pillow's, which need not be installed."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def pair_separator(tokens: Sequence[str], special: Sequence[bool]) -> tuple[str, ...]:
    """Return the special tokens between the halves of a pair, out of all its tokens; () where nothing is between."""
    spelled = [position for position, added in enumerate(special) if not added]
    return tuple(tokens[position] for position in range(spelled[0], spelled[-1]) if special[position])


def readable_token(token: str) -> str:
    """Return a token as people read it: Ġ and ▁ are spaces, a line end is ↵, bytes that spell a character are joined.

    The mark of a word's end (`</w>`, in CLIP's vocabulary) is left out. A token that could be either bytes or a word
    ('Çı' would spell 'Ǐ') is left as it is, unless it starts with Ġ.
    """
    token = token.removesuffix("</w>") or token
    text = "\n" if token == "<0x0A>" else _decode_bytes(token)
    return text.replace("▁", " ").replace("\n", "↵")


def collate(encoded: Sequence[EncodedText], *, pad_id: int) -> TokenBatch:
    """Pad texts on the right, to the longest; images and sounds are stacked, and must be of one shape."""
    return stack_batches([text.batch() for text in encoded], pad_id)


def stack_batches(batches: Sequence[TokenBatch], pad_id: int) -> TokenBatch:
    """Join batches of one text each into one batch, padded on the right."""

    def pad(name: str, fill: int = 0) -> Any:
        rows = [getattr(batch, name)[0] for batch in batches if getattr(batch, name) is not None]
        return pad_sequence(rows, batch_first=True, padding_value=fill) if rows else None

    sources = [batch.source for batch in batches if batch.source is not None]
    features = [batch.features for batch in batches if batch.features is not None]
    return TokenBatch(
        ids=pad("ids", pad_id),
        keep=pad("keep"),
        special=pad("special"),
        segments=pad("segments"),
        tokens=tuple(batch.tokens[0] for batch in batches),
        words=tuple(batch.words[0] for batch in batches),
        order=tuple(range(len(batches))),
        features=torch.cat(features) if features else None,
        images=batches[0].images,
        source=stack_batches(sources, pad_id) if sources else None,
    )


def repeat_batch(batch: TokenBatch, count: int) -> TokenBatch:
    """Return a batch of `count` copies of the one text in this batch."""
    tensors = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return replace(
        batch,
        **{name: tensor.expand(count, *tensor.shape[1:]) for name, tensor in tensors.items()},
        tokens=batch.tokens * count,
        words=batch.words * count,
        order=tuple(range(count)),
        images=None if batch.images is None else batch.images.repeated(count),
        source=None if batch.source is None else repeat_batch(batch.source, count),
    )


def key_batch(batch: TokenBatch, decoder_attention: str | None) -> TokenBatch:
    """Return the tokens that are attended to: the batch's own, or in "cross" attention those of its source."""
    if decoder_attention != "cross":
        return batch
    assert batch.source is not None
    return batch.source


def single_text(batch: TokenBatch, row: int) -> TokenBatch:
    """Return one text of a batch as a batch of its own, without its padding."""
    positions = batch.positions(row)
    tensors = {name: getattr(batch, name) for name in ("ids", "keep", "special", "segments")}
    return replace(
        batch,
        **{name: tensor[row, positions][None] for name, tensor in tensors.items() if tensor is not None},
        tokens=(batch.tokens[row],),
        words=(batch.words[row],),
        order=(0,),
        features=None if batch.features is None else batch.features[row : row + 1],
        source=None if batch.source is None else single_text(batch.source, row),
    )


def batches(encoded: Sequence[EncodedText], *, pad_id: int, batch_tokens: int = 4096) -> Iterator[TokenBatch]:
    """Yield padded batches of at most `batch_tokens` positions, longest texts first; a longer text is on its own.

    Images and sounds share a batch only where their features have one shape: none is padded. A text with images in it
    is on its own.
    """
    lengths = []
    shapes: list[tuple[int, ...]] = []  # only texts of equal shapes share a batch
    for index, text in enumerate(encoded):
        source = text if text.source is None else text.source
        lengths.append(max(len(text), len(source)))
        shapes.append(() if source.features is None else tuple(source.features.shape))
        if text.images is not None:
            shapes[index] = (-1, index)
    order = sorted(range(len(encoded)), key=lambda index: (-lengths[index], shapes[index]))
    while order:
        first = order[0]
        fitting = order[: max(1, batch_tokens // lengths[first])]
        rows = [index for index in fitting if shapes[index] == shapes[first]]
        yield replace(collate([encoded[index] for index in rows], pad_id=pad_id), order=tuple(rows))
        order = order[len(rows) :]


def restore_order(batch_results: Iterable[tuple[Sequence[int], Sequence[Result]]], n: int) -> list[Result]:
    """Put the results of batches, given as (`batch.order`, one result per row), in the order of the n texts."""
    by_index: dict[int, Result] = {}
    for order, results in batch_results:
        by_index |= zip(order, results, strict=True)
    return [by_index[index] for index in range(n)]


# Byte-level tokenizers write each byte as a character: those that print as themselves, the others from U+0100 on.
_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_HIDDEN = tuple(byte for byte in range(0x100) if byte not in _PRINTED)
_BYTES = {chr(byte): byte for byte in _PRINTED} | {chr(0x100 + index): byte for index, byte in enumerate(_HIDDEN)}


def _decode_bytes(token: str) -> str:
    """Return a byte-level token as the text of its bytes, if it surely is one; else only the spaces it starts with."""
    body = token.lstrip("ĠĊ")
    start = token[: len(token) - len(body)].replace("Ġ", " ").replace("Ċ", "\n")
    try:
        text = bytes(_BYTES[character] for character in body).decode().replace("\r\n", "\n")
    except (KeyError, UnicodeDecodeError):
        return start + body
    has_controls = any(ord(character) < 32 for character in text.replace("\n", ""))
    could_be_a_word = not start and any("Â" <= a <= "ß" and "Ģ" <= b <= "Ń" for a, b in pairwise(body))
    return start + (body if has_controls or could_be_a_word else text)
