"""Texts, pairs and images as the padded batches that models read.

A *text* is a string or a pair of strings. `encode` turns texts into pieces, `batches` sorts them by length and pads
them, and `in_order` puts the results of the batches back in the caller's order.
"""

import hashlib
import os
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Any, Literal, TypeVar

import torch
from tokenizers import Encoding
from transformers import BatchEncoding, PreTrainedTokenizerBase

from identikit.errors import InputError
from identikit.shapes import Bool, Float, Int, Tensor

Text = str | tuple[str, str]
Side = Literal["right", "left"]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Encoded:
    """One text as pieces, unpadded.

    ``special`` marks what the tokenizer added; a special token that the text itself spells out is part of the text.
    ``words`` is the half-open span of each word over its pieces, in order, and ``characters`` says where that word
    stands in the text: (half, start, stop), half 1 for the second text of a pair and else 0. A tagger's tags, which sit
    on characters, spread to pieces by these two. Punctuation marks are words of their own; special tokens and lone
    white space belong to no word. Tokenizers in pure Python keep no alignment with the text: no words.
    """

    ids: tuple[int, ...]
    segments: tuple[int, ...] | None
    special: tuple[bool, ...]
    tokens: tuple[str, ...]
    words: tuple[tuple[int, int], ...]
    text: Text
    characters: tuple[tuple[int, int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Several texts (or images) padded to one length; masks are True where something is kept.

    ``tokens`` and ``words`` are unpadded: a word's span counts the text's own pieces, whatever the side of the padding.
    ``order`` gives each row's index in the caller's list.
    """

    ids: Int[Tensor, "batch n"] | None
    keep: Bool[Tensor, "batch n"]
    special: Bool[Tensor, "batch n"]
    segments: Int[Tensor, "batch n"] | None
    tokens: tuple[tuple[str, ...], ...]
    words: tuple[tuple[tuple[int, int], ...], ...]
    order: tuple[int, ...]
    pixels: Float[Tensor, "batch channel height width"] | None = None

    def __len__(self) -> int:
        return len(self.order)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of real tokens of each row."""
        return tuple(len(row) for row in self.tokens)

    def to(self, device: torch.device | str) -> "TokenBatch":
        """The same batch with its tensors on another device."""
        fields = ("ids", "keep", "special", "segments", "pixels")
        tensors = {name: getattr(self, name) for name in fields}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None})

    def rows(self, row: int) -> Int[Tensor, " kept"]:
        """Positions of the real tokens of one row: ``result[row, batch.rows(row)]`` is unpadded."""
        return self.keep[row].nonzero().squeeze(-1)


def is_several(texts: object) -> bool:
    """Say whether an argument holds several texts: a list that is not one text's token ids."""
    return isinstance(texts, list) and not all(isinstance(one, int) for one in texts)


def joined_by(tokens: Sequence[str], special: Sequence[bool]) -> tuple[str, ...]:
    """Return the special tokens between the halves of a pair; none where they are simply joined."""
    own = [position for position, added in enumerate(special) if not added]
    return tuple(tokens[position] for position in range(own[0], own[-1]) if special[position])


def shown(token: str) -> str:
    """Return a token as people read it: Ġ and ▁ are spaces."""
    return token.replace("Ġ", " ").replace("▁", " ")


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: object, *, limit: int | None = None, truncate: bool = False
) -> list[Encoded]:
    """Turn a text, a pair or a list of either into pieces.

    A text of more than ``limit`` tokens is refused, unless ``truncate`` asks to cut it: then pieces go from the end of
    the longer half first, and the special tokens stay.
    """
    named = _checked_texts(texts)
    own_words = _separates_words(tokenizer)
    encoded = []
    for name, text in named:
        pieces = _tokenize(tokenizer, text)
        if not _reads_all(pieces, text):
            raise InputError(f"Reading {name}: the tokenizer finds no token in {_shown(text)}; pass another text.")
        if limit is not None and len(pieces["input_ids"]) > limit:
            if not truncate:
                raise InputError(
                    f"Reading {name}: it has {len(pieces['input_ids'])} tokens and the model reads at most {limit}; "
                    "shorten it, or cut it with truncate=True (command line: --truncate)."
                )
            pieces = _tokenize(tokenizer, text, max_length=limit)
            if len(pieces["input_ids"]) > limit or not _reads_all(pieces, text):
                raise InputError(f"Cutting {name}: a limit of {limit} tokens leaves no room for the text; raise it.")
        encoded.append(_encoded(tokenizer, text, pieces, own_words))
    return encoded


def collate(
    encoded: Sequence[Encoded], *, pad_id: int, side: Side = "right", order: Sequence[int] | None = None
) -> TokenBatch:
    """Pad texts to the longest; ``order`` is each one's index in the caller's list (default 0, 1, ...)."""
    width = max(len(text) for text in encoded)
    ids = torch.full((len(encoded), width), pad_id, dtype=torch.long)
    keep = torch.zeros(ids.shape, dtype=torch.bool)
    special = torch.zeros(ids.shape, dtype=torch.bool)
    segments = torch.zeros_like(ids)
    for row, text in enumerate(encoded):
        at = slice(0, len(text)) if side == "right" else slice(width - len(text), width)
        ids[row, at] = torch.tensor(text.ids)
        keep[row, at] = True
        special[row, at] = torch.tensor(text.special)
        if text.segments is not None:
            segments[row, at] = torch.tensor(text.segments)
    return TokenBatch(
        ids=ids,
        keep=keep,
        special=special,
        segments=segments if encoded[0].segments is not None else None,
        tokens=tuple(text.tokens for text in encoded),
        words=tuple(text.words for text in encoded),
        order=tuple(range(len(encoded)) if order is None else order),
    )


def batches(
    encoded: Sequence[Encoded], *, pad_id: int, batch_tokens: int = 4096, side: Side = "right"
) -> Iterator[TokenBatch]:
    """Padded batches, longest texts first, of at most ``batch_tokens`` positions; a longer text has its own batch."""
    order = sorted(range(len(encoded)), key=lambda index: -len(encoded[index]))
    start = 0
    while start < len(order):
        stop = start + max(1, batch_tokens // len(encoded[order[start]]))
        rows = order[start:stop]
        yield collate([encoded[index] for index in rows], pad_id=pad_id, side=side, order=rows)
        start = stop


def in_order(results: Iterable[tuple[Sequence[int], Sequence[Result]]], n: int) -> list[Result]:
    """Put the results of batches, given as (``batch.order``, one result a row), back in the order of the n texts."""
    by_index = {index: result for order, rows in results for index, result in zip(order, rows, strict=True)}
    return [by_index[index] for index in range(n)]


def encode_images(
    processor: Callable[..., Mapping[str, Any]],
    images: object,
    *,
    grid: tuple[int, int],
    prefix: tuple[str, ...] = ("[CLS]",),
) -> TokenBatch:
    """Turn one or several images (PIL images or paths) into a batch whose tokens are a grid of patches.

    ``grid`` is the number of (rows, columns) of patches; the patch in row 0 and column 1 is the token 'r0c1', and
    ``prefix`` names the model's own tokens before the patches.
    """
    listed = images if isinstance(images, list) else [images]
    if not listed:
        raise InputError("Reading images: the list is empty; pass at least one image.")
    opened = [_open_image(image, f"images[{index}]") for index, image in enumerate(listed)]
    pixels = processor(images=opened, return_tensors="pt")["pixel_values"]
    tokens = (*prefix, *(f"r{row}c{column}" for row in range(grid[0]) for column in range(grid[1])))
    special = torch.arange(len(tokens)) < len(prefix)
    return TokenBatch(
        ids=None,
        keep=torch.ones(len(opened), len(tokens), dtype=torch.bool),
        special=special.repeat(len(opened), 1),
        segments=None,
        tokens=(tokens,) * len(opened),
        words=((),) * len(opened),
        order=tuple(range(len(opened))),
        pixels=pixels,
    )


def image_digests(batch: TokenBatch) -> list[Text]:
    """Return what stands for each image of a batch where texts are named: a digest of its pixels."""
    rows = () if batch.pixels is None else batch.pixels.float().cpu()
    return [f"image {hashlib.sha256(row.numpy().tobytes()).hexdigest()}" for row in rows]


def _checked_texts(texts: object) -> list[tuple[str, Any]]:
    """Each text with the name that messages give it."""
    if isinstance(texts, list):
        named = [(f"texts[{index}]", text) for index, text in enumerate(texts)]
    else:
        named = [("the text", texts)]
    if not named:
        raise InputError("Reading texts: the list is empty; pass at least one text.")
    for name, text in named:
        halves = text if isinstance(text, tuple) and len(text) == 2 else (text,)
        for half in halves:
            if not isinstance(half, str):
                got = f"{type(text).__name__} {_shown(text)}"
                raise InputError(f"Reading {name}: got {got}, expected a string or a pair (a tuple of two strings).")
            if not half.strip():
                raise InputError(f"Reading {name}: {_shown(text)} is blank or has a blank half; pass some words.")
            if any("\ud800" <= character <= "\udfff" for character in half):
                raise InputError(f"Reading {name}: {_shown(text)} is not valid Unicode; repair its lone surrogates.")
    return named


def _shown(text: object) -> str:
    return f"{text!r:.60}"


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: Text, max_length: int | None = None) -> BatchEncoding:
    first, second = (text, None) if isinstance(text, str) else text
    # verbose=False: the length is checked by encode, so the tokenizer need not log that the text is long
    return tokenizer(
        first,
        second,
        truncation="longest_first" if max_length else False,
        max_length=max_length,
        return_special_tokens_mask=True,
        verbose=False,
    )


def _reads_all(pieces: BatchEncoding, text: Text) -> bool:
    """Whether the text, and each half of a pair, has at least one piece of its own."""
    if not pieces.is_fast:
        return not all(pieces["special_tokens_mask"])
    halves = 1 if isinstance(text, str) else 2
    return len(set(pieces.sequence_ids()) - {None}) == halves


def _encoded(tokenizer: PreTrainedTokenizerBase, text: Text, pieces: BatchEncoding, own_words: bool) -> Encoded:
    ids = pieces["input_ids"]
    words = _words(pieces.encodings[0], text, own_words) if pieces.encodings else []
    return Encoded(
        ids=tuple(ids),
        segments=tuple(pieces["token_type_ids"]) if "token_type_ids" in pieces else None,
        special=tuple(bool(mark) for mark in pieces["special_tokens_mask"]),
        tokens=tuple(tokenizer.convert_ids_to_tokens(ids)),
        words=tuple(span for span, _ in words),
        text=text,
        characters=tuple(place for _, place in words),
    )


def _separates_words(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer's own words end at white space and at punctuation.

    WordPiece and byte-level BPE split so; SentencePiece-style tokenizers keep punctuation with its neighbour (T5) or
    see a whole text as one word (Llama).
    """
    return bool(tokenizer.is_fast) and len(set(tokenizer("a, b", add_special_tokens=False).word_ids())) >= 3


def _words(encoding: Encoding, text: Text, own_words: bool) -> list[tuple[tuple[int, int], tuple[int, int, int]]]:
    """Span over pieces and place in the text of each word; a piece belongs to the word in which it begins."""
    halves = (text,) if isinstance(text, str) else text
    by_character = [_character_words(half) for half in halves]
    pieces = []
    aligned = zip(encoding.sequence_ids, encoding.word_ids, encoding.offsets, strict=True)
    for position, (half, own_word, (start, stop)) in enumerate(aligned):
        if half is not None:
            touched = (word for word in by_character[half][start:stop] if word is not None)
            word = own_word if own_words else next(touched, None)
            pieces.append(((half, word), position, start, stop))
    words = []
    for (half, _), group in groupby(pieces, key=lambda piece: piece[0]):
        _, positions, starts, stops = zip(*group, strict=True)
        covered = halves[half][starts[0] : stops[-1]]
        if covered.strip():
            place = (half, stops[-1] - len(covered.lstrip()), starts[0] + len(covered.rstrip()))
            words.append(((positions[0], positions[-1] + 1), place))
    return words


def _character_words(text: str) -> list[int | None]:
    """Number the word of each character: none for white space; punctuation marks and symbols stand alone."""
    inside = [not character.isspace() and unicodedata.category(character)[0] not in "PS" for character in text]
    numbers = accumulate(not (before and here) for before, here in pairwise([False, *inside]))
    return [None if character.isspace() else number for character, number in zip(text, numbers, strict=True)]


def _open_image(image: object, name: str) -> Any:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise InputError("Reading images needs Pillow; install it with: pip install 'identikit[vision]'") from error
    try:
        if isinstance(image, Image.Image):
            return ImageOps.exif_transpose(image).convert("RGB")
        if isinstance(image, str | os.PathLike):
            with Image.open(image) as opened:
                return ImageOps.exif_transpose(opened).convert("RGB")
    except FileNotFoundError as error:
        raise InputError(f"Reading {name}: there is no file {str(image)!r}; check the path.") from error
    except OSError as error:
        raise InputError(f"Reading {name}: {str(image)!r} cannot be read as an image; pass a PNG or JPEG.") from error
    raise InputError(f"Reading {name}: got {type(image).__name__}, expected a PIL image or the path of one.")
