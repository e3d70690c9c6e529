"""Texts as tokens: strings and pairs through the tokenizer, token ids as they are, each aligned with its words."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import Encoding
from transformers import BatchEncoding, PreTrainedTokenizerBase

from identikit.checks import flag, shortened, whole_number
from identikit.errors import InputError, ModelError, TooLongError, reason_of
from identikit.texts.chat import Messages, is_chat, render_chat
from identikit.texts.text import MAX_CHARACTERS, EncodedText, ReadText, is_image, is_text_list

if TYPE_CHECKING:
    from identikit.texts.pictures import ImageTextEncoder

_HEAD = 16  # characters per token that is kept, and a page more: how much of a long text is tokenised at first


def encode(
    tokenizer: PreTrainedTokenizerBase,
    texts: object,
    *,
    limit: int | None = None,
    max_tokens: object = None,
    truncate: bool = False,
    images: "ImageTextEncoder | None" = None,
    what: str = "text",
) -> list[EncodedText]:
    """Turn a text (a string, a pair, token ids or the messages of a chat), or a list of texts, into tokens.

    A text of more tokens than `limit` (the model's) or `max_tokens` (the caller's) is refused. With `truncate` it is
    cut instead: tokens go from the end, of the longer half first, and the special tokens stay. Token ids are taken as
    they are: nothing is added to them, and they are cut at the end. Messages call a text `what` it is.

    Only the start of a long text is tokenised, if that has twice as many tokens as may be kept; a text that needs more
    than that is refused beyond ten million characters.

    `images` reads texts with images in them; None: the model reads none. An encoded text is returned as it is.
    """
    room = token_limit(limit, max_tokens, truncate)
    return [_encode_one(tokenizer, name, text, room, images) for name, text in label_texts(texts, what)]


def label_texts(texts: object, what: str) -> list[tuple[str, Any]]:
    """Return each text (or image, or sound) with what messages call it, such as 'the text' or 'texts[3]'."""
    if not is_text_list(texts):
        return [(f"the {what}", texts)]
    if not texts:
        raise InputError(f"Reading {what}s: the list is empty. Pass at least one {what}.")
    return [(f"{what}s[{index}]", text) for index, text in enumerate(texts)]


def _encode_one(
    tokenizer: PreTrainedTokenizerBase, name: str, text: Any, room: "TokenLimit", images: "ImageTextEncoder | None"
) -> EncodedText:
    if isinstance(text, EncodedText):
        return text
    if images is not None and images.accepts(text):
        return images.encode(name, text, room)
    if images is None and any(map(is_image, text if isinstance(text, tuple) else (text,))):
        raise InputError(
            f"Reading {name}: it is or holds an image, and this model reads only texts. Use a model that reads images "
            "(`identikit models` lists them)."
        )
    if is_chat(text):
        return _encode_chat(tokenizer, name, text, room)
    checked = _checked_text(name, text)
    if isinstance(checked, list):
        return _encode_ids(tokenizer, name, checked, room)
    return _encode_text(tokenizer, name, checked, room)


@dataclass(frozen=True)
class TokenLimit:
    """How many `tokens` a text may have (None: any number), the `reason`, and whether to `truncate` a longer text."""

    tokens: int | None
    reason: str
    truncate: bool

    def exceeded(self, name: str, tokens: int, *, counted: str = "") -> bool:
        """Whether a text has to be cut; refuse a long one that may not be. `counted` goes before the number."""
        if self.tokens is None or tokens <= self.tokens:
            return False
        if not self.truncate:
            raise TooLongError(
                f"Reading {name}: it has {counted}{tokens} tokens and {self.reason}. Shorten it, or cut it with "
                "truncate=True."
            )
        return True


def token_limit(limit: int | None, max_tokens: object, truncate: bool) -> TokenLimit:
    """Return how many tokens a text may have: the fewer of the model's `limit` and the caller's `max_tokens`."""
    truncate = flag("truncate", truncate)
    requested = None if max_tokens is None else whole_number("max_tokens", max_tokens, least=1)
    if requested is None or (limit is not None and limit <= requested):
        return TokenLimit(limit, f"the model reads at most {limit}", truncate)
    return TokenLimit(requested, f"max_tokens allows at most {requested}", truncate)


def tokenize(tokenizer: PreTrainedTokenizerBase, *strings: str, **options: Any) -> BatchEncoding:
    """Tokenise a text or pair, whatever its length; the tokenizer's own errors become one line."""
    try:
        # verbose=False: `encode` checks the length itself, so the tokenizer need not log that the text is long
        return tokenizer(*strings, verbose=False, **options)  # pyright: ignore[reportArgumentType]
    except BaseException as error:  # a panic of tokenizers is no Exception
        if isinstance(error, MemoryError) or not (isinstance(error, Exception) or "Panic" in type(error).__name__):
            raise
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise ModelError(
            f"Reading a text: the tokenizer of {name} cannot tokenise it ({reason_of(error)}). Check the tokenizer's "
            "files."
        ) from None


def _checked_text(name: str, text: Any) -> str | tuple[str, str] | list[Any]:
    """Return a string or a pair unchanged, and a sequence of numbers, which are token ids, as a list."""
    try:
        listed = text.tolist() if getattr(text, "ndim", None) == 1 else text
        if isinstance(listed, list | tuple | range) and not (listed and is_text_list(list(listed))):
            values: list[Any] = list(listed)
            return [value.item() if getattr(value, "ndim", None) == 0 else value for value in values]
    except RuntimeError as error:  # torch's, of a tensor that is sparse or on the meta device
        reason = reason_of(error, 100).rstrip("!")
        raise InputError(
            f"Reading {name}: the numbers of its tensor cannot be read ({reason}). Pass the token ids as a list."
        ) from None
    halves = text if isinstance(text, tuple) and len(text) == 2 else (text,)
    for half in halves:
        if not isinstance(half, str):
            value = shortened(text)
            kind = type(text).__name__
            described = value if value.endswith(f" {kind}") else f"{kind} {value}"
            raise InputError(
                f"Reading {name}: got {described}, expected a string, a pair (a tuple of two strings), or a flat "
                "sequence of token ids. Pass several texts as a list."
            )
        if not half.strip():
            raise InputError(f"Reading {name}: {shortened(text)} is blank or has a blank half. Pass some words.")
        try:
            half.encode()
        except UnicodeEncodeError:
            raise InputError(
                f"Reading {name}: {shortened(text)} is not valid Unicode. Repair its lone surrogates."
            ) from None
    return text


class _Word(NamedTuple):
    """A word: its half-open `span` of tokens, and its `characters`, as (part, start, stop)."""

    span: tuple[int, int]
    characters: tuple[int, int, int]


def _with_words(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    special: Sequence[bool],
    words: Sequence[_Word],
    *,
    text: ReadText,
    parts: tuple[str, ...],
) -> EncodedText:
    """Return ids, of a single segment if the model asks for segments, with the words that were found in them."""
    return EncodedText(
        ids=tuple(ids),
        segments=(0,) * len(ids) if "token_type_ids" in tokenizer.model_input_names else None,
        special=tuple(special),
        tokens=tuple(tokenizer.convert_ids_to_tokens(list(ids))),
        words=tuple(word.span for word in words),
        text=text,
        characters=tuple(word.characters for word in words),
        parts=parts,
    )


# Strings and pairs


def _encode_text(
    tokenizer: PreTrainedTokenizerBase, name: str, text: str | tuple[str, str], room: TokenLimit
) -> EncodedText:
    parts = (text,) if isinstance(text, str) else text
    read_parts, counted = _parts_to_tokenize(tokenizer, name, parts, room)
    pieces = tokenize(tokenizer, *read_parts, return_special_tokens_mask=True, truncation=False)
    positions = list(range(len(pieces["input_ids"])))
    if not _covers_all_parts(pieces, parts, positions):
        raise InputError(f"Reading {name}: the tokenizer finds no token in {shortened(text)}. Pass another text.")
    if room.exceeded(name, len(positions), counted=counted):
        pieces, positions = _cut(tokenizer, read_parts, pieces, room)
        if room.exceeded(name, len(positions)) or not _covers_all_parts(pieces, parts, positions):
            raise InputError(f"Cutting {name}: {room.reason} tokens, which leaves no room for the text. Allow more.")
    encoded = _with_words(
        tokenizer,
        [pieces["input_ids"][position] for position in positions],
        [bool(pieces["special_tokens_mask"][position]) for position in positions],
        _find_words(tokenizer, pieces.encodings[0], read_parts, positions) if pieces.encodings else [],
        text=text,
        parts=parts,
    )
    segments = pieces.get("token_type_ids")
    if segments is not None:
        segments = tuple(segments[position] for position in positions)
    return replace(encoded, segments=segments)


def _cut(
    tokenizer: PreTrainedTokenizerBase, parts: tuple[str, ...], pieces: BatchEncoding, room: TokenLimit
) -> tuple[BatchEncoding, list[int]]:
    """Return pieces and the positions of those to keep, which are those that "longest_first" keeps.

    A fast tokenizer would also pair every rest of one half with every rest of the other: for two long halves that takes
    more memory than there is. What it adds does not depend on the text, so positions can be left out of the whole.
    """
    assert room.tokens is not None
    if not pieces.is_fast:
        cut = {"truncation": "longest_first", "max_length": room.tokens}
        shorter = tokenize(tokenizer, *parts, return_special_tokens_mask=True, **cut)
        return shorter, list(range(len(shorter["input_ids"])))
    part_indices = pieces.sequence_ids()
    halves = [[at for at, part in enumerate(part_indices) if part == index] for index in range(len(parts))]
    available = max(room.tokens - part_indices.count(None), 0)
    sizes = [min(len(halves[0]), available)]
    if len(halves) == 2:  # the longer half goes first, and an odd piece is the longer half's
        counts = [len(half) for half in halves]
        shorter = min(*counts, available // 2)
        longer = min(max(counts), available - shorter)
        sizes = [longer, shorter] if counts[0] > counts[1] else [shorter, longer]
    from_left = getattr(tokenizer, "truncation_side", "right") == "left"
    dropped = set()
    for half, size in zip(halves, sizes, strict=True):
        dropped.update(half[: len(half) - size] if from_left else half[size:])
    return pieces, [position for position in range(len(part_indices)) if position not in dropped]


def _parts_to_tokenize(
    tokenizer: PreTrainedTokenizerBase, name: str, parts: tuple[str, ...], room: TokenLimit
) -> tuple[tuple[str, ...], str]:
    """Return as much of a text as has to be tokenised, and "at least " where that is not all of it.

    A start of twice the tokens that may be kept decides which are kept: no tokenizer looks so far ahead. (Those that
    split at words look one word ahead; for those that take a text as one word this is a margin, not a proof.) In a
    pair, the other half must be short, so that it is known which half is cut.
    """
    if room.tokens is not None and getattr(tokenizer, "truncation_side", "right") == "right":
        heads = tuple(part[: _HEAD * room.tokens + 4096] for part in parts)
        long = [index for index, part in enumerate(parts) if heads[index] != part]
        if len(long) == 1:
            counts = [len(tokenize(tokenizer, head, add_special_tokens=False)["input_ids"]) for head in heads]
            long_count = counts.pop(long[0])
            if long_count >= 2 * room.tokens and all(count < room.tokens for count in counts):
                return heads, "at least "
    for part in parts:
        _check_characters(name, part)
    return parts, ""


def _check_characters(name: str, string: str) -> None:
    if len(string) > MAX_CHARACTERS:
        raise TooLongError(
            f"Reading {name}: it has {len(string):,} characters, and a text may have at most {MAX_CHARACTERS:,}. "
            "Shorten it."
        )


def _covers_all_parts(pieces: BatchEncoding, parts: tuple[str, ...], positions: list[int]) -> bool:
    """Whether the text, and each half of a pair, has at least one piece of its own at these positions."""
    if not pieces.is_fast:
        return not all(pieces["special_tokens_mask"])
    part_indices = pieces.sequence_ids()
    return len({part_indices[position] for position in positions} - {None}) == len(parts)


def _encode_chat(tokenizer: PreTrainedTokenizerBase, name: str, messages: Messages, room: TokenLimit) -> EncodedText:
    """Encode a chat as its template writes it; the tokens that the template adds are marked as special."""
    string, spans = render_chat(tokenizer, name, messages)
    if not tokenizer.is_fast:
        raise InputError(f"Reading {name}: messages need a tokenizer that keeps offsets (a fast one). Pass token ids.")
    _check_characters(name, string)
    encoded = encode_prompt(tokenizer, string, spans)
    if room.exceeded(name, len(encoded)):
        raise TooLongError(f"Reading {name}: {room.reason} tokens, and a chat cannot be cut. Shorten its messages.")
    return replace(encoded, text=tuple(dict(message) for message in messages))


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    string: str,
    spans: Sequence[tuple[int, int]],
    *,
    add_special_tokens: bool = False,
) -> EncodedText:
    """Return a prompt as tokens; those outside the caller's words, which are at these `spans` of it, are special.

    The tokenizer must be a fast one.
    """
    pieces = tokenize(tokenizer, string, add_special_tokens=add_special_tokens)
    encoding = pieces.encodings[0]  # pyright: ignore[reportOptionalSubscript]
    special = [not any(first < stop and start < last for first, last in spans) for start, stop in encoding.offsets]
    words = [word for word in _find_words(tokenizer, encoding, (string,)) if not special[word.span[0]]]
    return _with_words(tokenizer, pieces["input_ids"], special, words, text=string, parts=(string,))


# Token ids


def _encode_ids(tokenizer: PreTrainedTokenizerBase, name: str, listed: list[Any], room: TokenLimit) -> EncodedText:
    if not listed:
        raise InputError(f"Reading {name}: the sequence is empty. Pass at least one token id.")
    size = 2**32 if tokenizer.is_fast else len(tokenizer)  # a fast tokenizer may have ids beyond its length
    for position, index in enumerate(listed):
        is_id = isinstance(index, int) and not isinstance(index, bool) and 0 <= index < size
        if not is_id or tokenizer.convert_ids_to_tokens([index])[0] is None:
            raise InputError(
                f"Reading {name}: the token id at position {position} is {shortened(index)}, expected one of the "
                f"tokenizer's {len(tokenizer)} ids. Pass ids that this tokenizer made."
            )
    ids = listed[: room.tokens] if room.exceeded(name, len(listed)) else listed
    in_texts = (tokenizer.unk_token_id, tokenizer.mask_token_id)
    special_ids = set(tokenizer.all_special_ids).difference(in_texts)
    special = [index in special_ids for index in ids]
    words, parts = _find_words_of_ids(tokenizer, ids, special)
    return _with_words(tokenizer, ids, special, words, text=tuple(listed), parts=parts)


def _find_words_of_ids(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], special: list[bool]
) -> tuple[list[_Word], tuple[str, ...]]:
    """Return the words between special tokens, if the tokenizer splits what the ids spell into the same ids."""
    words: list[_Word] = []
    parts: list[str] = []
    for is_special, group in groupby(range(len(ids)), key=special.__getitem__):
        positions = list(group)
        if is_special:
            continue
        offset = positions[0]
        run = ids[offset : positions[-1] + 1]
        string = str(tokenizer.decode(run, clean_up_tokenization_spaces=False))
        pieces = tokenize(tokenizer, string, add_special_tokens=False)
        if not pieces.encodings or pieces["input_ids"] != run:
            return [], ()
        for (first, last), (_, start, stop) in _find_words(tokenizer, pieces.encodings[0], (string,)):
            words.append(_Word((offset + first, offset + last), (len(parts), start, stop)))
        parts.append(string)
    return words, tuple(parts)


# Words


def _find_words(
    tokenizer: PreTrainedTokenizerBase, encoding: Encoding, parts: tuple[str, ...], kept: list[int] | None = None
) -> list[_Word]:
    """Return the words of the pieces at the `kept` positions (None: all).

    A piece belongs to the word where it begins. The tokenizer's own words count where it separates them, and otherwise
    those of the characters.
    """
    separates_words = _separates_words(tokenizer)
    words_by_character = [_number_words(string) for string in parts]
    aligned = list(zip(encoding.sequence_ids, encoding.word_ids, encoding.offsets, strict=True))
    pieces = []
    for position, piece in enumerate(range(len(aligned)) if kept is None else kept):
        part, word, (start, stop) = aligned[piece]
        if part is None:
            continue
        if not separates_words:
            touched = (number for number in words_by_character[part][start:stop] if number is not None)
            word = next(touched, None)
        pieces.append(((part, word), position, start, stop))
    words = []
    for (part, _), group in groupby(pieces, key=lambda piece: piece[0]):
        _, positions, starts, stops = zip(*group, strict=True)
        covered = parts[part][starts[0] : stops[-1]]
        if covered.strip():
            characters = (part, stops[-1] - len(covered.lstrip()), starts[0] + len(covered.rstrip()))
            words.append(_Word((positions[0], positions[-1] + 1), characters))
    return words


def _separates_words(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer's own words end at white space and at punctuation.

    WordPiece and byte-level BPE split like this; SentencePiece-style tokenizers keep punctuation with its neighbour
    (T5) or take a whole text as one word (Llama).
    """
    return bool(tokenizer.is_fast) and len(set(tokenize(tokenizer, "a, b", add_special_tokens=False).word_ids())) >= 3


def _number_words(text: str) -> list[int | None]:
    """Return the number of each character's word: None for white space; punctuation marks and symbols stand alone."""
    inside = [not character.isspace() and unicodedata.category(character)[0] not in "PS" for character in text]
    numbers = accumulate(not (before and after) for before, after in pairwise([False, *inside]))
    return [None if character.isspace() else number for character, number in zip(text, numbers, strict=True)]
