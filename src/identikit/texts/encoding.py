"""Texts as pieces: strings and pairs through the tokenizer, token ids as they are, each aligned with its words."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any

from tokenizers import Encoding
from transformers import BatchEncoding, PreTrainedTokenizerBase

from identikit.checks import flag, shortened, whole_number
from identikit.errors import InputError, ModelError, TooLongError
from identikit.texts.chat import Messages, is_chat, render_chat
from identikit.texts.text import LONGEST, EncodedText, is_image, is_text_list

if TYPE_CHECKING:
    from identikit.texts.pictures import PictureSource

_HEAD = 16  # characters per token that is kept, and a page more: how much of a long text is tokenised at first
_Word = tuple[tuple[int, int], tuple[int, int, int]]  # a span over pieces, and (part, start, stop) over characters


def encode(
    tokenizer: PreTrainedTokenizerBase,
    texts: object,
    *,
    limit: int | None = None,
    max_tokens: object = None,
    truncate: bool = False,
    images: "PictureSource | None" = None,
    what: str = "text",
) -> list[EncodedText]:
    """Turn a text (a string, a pair, token ids or the messages of a chat), or a list of texts, into pieces.

    A text of more tokens than `limit` (the model's) or `max_tokens` (the caller's) is refused. With `truncate` it is
    cut instead: pieces go from the end, of the longer half first, and the special tokens stay. Token ids are taken as
    they are: nothing is added to them, and they are cut at the end. Messages call a text `what` it is.

    Only the start of a long text is tokenised, if that has twice as many tokens as may be kept; a text that needs more
    than that is refused beyond ten million characters.

    `images` reads texts with images in them; None: the model reads none.
    """
    given = label_texts(texts, what)
    room = token_limit(limit, max_tokens, truncate)
    return [_encode_one(tokenizer, name, text, room, images) for name, text in given]


def label_texts(texts: object, what: str) -> list[tuple[str, Any]]:
    """Return each of the texts (or images, or sounds) that were given, with what messages call it: `what` it is."""
    if not is_text_list(texts):
        return [(f"the {what}", texts)]
    if not texts:
        raise InputError(f"Reading {what}s: the list is empty. Pass at least one {what}.")
    return [(f"{what}s[{index}]", text) for index, text in enumerate(texts)]


def _encode_one(
    tokenizer: PreTrainedTokenizerBase, name: str, given: Any, room: "TokenLimit", images: "PictureSource | None"
) -> EncodedText:
    if images is None:
        _refuse_images(name, given)
    elif images.holds(given):
        return images.encode(name, given, room)
    if is_chat(given):
        return _encode_chat(tokenizer, name, given, room)
    text = _checked(name, given)
    if isinstance(text, list):
        return _encode_ids(tokenizer, name, text, room)
    return _encode_text(tokenizer, name, text, room)


def _refuse_images(name: str, text: object) -> None:
    halves = text if isinstance(text, tuple) else (text,)
    if any(map(is_image, halves)):
        raise InputError(
            f"Reading {name}: it is or holds an image, and this model reads only texts. Use a model that reads images "
            "(`identikit models` lists them)."
        )


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
    most = None if max_tokens is None else whole_number("max_tokens", max_tokens, least=1)
    if most is None or (limit is not None and limit <= most):
        return TokenLimit(limit, f"the model reads at most {limit}", truncate)
    return TokenLimit(most, f"max_tokens allows at most {most}", truncate)


def tokenize(tokenizer: PreTrainedTokenizerBase, *parts: str, **options: Any) -> BatchEncoding:
    """Return what a tokenizer makes of a text or pair, whatever its length; its own errors become one line."""
    try:
        # verbose=False: `encode` checks the length itself, so the tokenizer need not log that the text is long
        return tokenizer(*parts, verbose=False, **options)  # pyright: ignore[reportArgumentType]
    except BaseException as error:  # a panic of tokenizers is no Exception
        if isinstance(error, MemoryError) or not (isinstance(error, Exception) or "Panic" in type(error).__name__):
            raise
        reason = " ".join(str(error).split())[:200].rstrip(".")
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise ModelError(
            f"Reading a text: the tokenizer of {name} cannot tokenise it ({reason}). Check the tokenizer's files."
        ) from None


def _checked(name: str, text: Any) -> str | tuple[str, str] | list[Any]:
    """Return a string or a pair unchanged, and a sequence of numbers, which are token ids, as a list."""
    try:
        listed = text.tolist() if getattr(text, "ndim", None) == 1 else text
        if isinstance(listed, list | tuple | range) and not (listed and is_text_list(list(listed))):
            values: list[Any] = list(listed)
            return [value.item() if getattr(value, "ndim", None) == 0 else value for value in values]
    except RuntimeError as error:  # torch's, of a tensor that is sparse or on the meta device
        reason = " ".join(str(error).split())[:100].rstrip(".!")
        raise InputError(
            f"Reading {name}: the numbers of its tensor cannot be read ({reason}). Pass the token ids as a list."
        ) from None
    halves = text if isinstance(text, tuple) and len(text) == 2 else (text,)
    for half in halves:
        if not isinstance(half, str):
            words = shortened(text)
            kind = type(text).__name__
            shown = words if words.endswith(f" {kind}") else f"{kind} {words}"
            raise InputError(
                f"Reading {name}: got {shown}, expected a string, a pair (a tuple of two strings), or a flat sequence "
                "of token ids. Pass several texts as a list."
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


# Strings and pairs


def _encode_text(
    tokenizer: PreTrainedTokenizerBase, name: str, text: str | tuple[str, str], room: TokenLimit
) -> EncodedText:
    parts = (text,) if isinstance(text, str) else text
    read, counted = _start(tokenizer, name, parts, room)
    pieces = _tokenize(tokenizer, read)
    kept = list(range(len(pieces["input_ids"])))
    if not _reads_all(pieces, parts, kept):
        raise InputError(f"Reading {name}: the tokenizer finds no token in {shortened(text)}. Pass another text.")
    if room.exceeded(name, len(kept), counted=counted):
        pieces, kept = _cut(tokenizer, read, pieces, room)
        if room.exceeded(name, len(kept)) or not _reads_all(pieces, parts, kept):
            raise InputError(f"Cutting {name}: {room.reason} tokens, which leaves no room for the text. Allow more.")
    ids = [pieces["input_ids"][place] for place in kept]
    segments = pieces.get("token_type_ids")
    words = _word_spans(tokenizer, pieces.encodings[0], read, kept) if pieces.encodings else []
    return EncodedText(
        ids=tuple(ids),
        segments=None if segments is None else tuple(segments[place] for place in kept),
        special=tuple(bool(pieces["special_tokens_mask"][place]) for place in kept),
        tokens=tuple(tokenizer.convert_ids_to_tokens(ids)),
        words=tuple(span for span, _ in words),
        text=text,
        characters=tuple(place for _, place in words),
        parts=parts,
    )


def _cut(
    tokenizer: PreTrainedTokenizerBase, parts: tuple[str, ...], pieces: BatchEncoding, room: TokenLimit
) -> tuple[BatchEncoding, list[int]]:
    """Return pieces and the places of those that are kept, as the tokenizer's own "longest_first" keeps them.

    A fast tokenizer would also pair every rest of one half with every rest of the other: for two long halves that takes
    more memory than there is. What it adds does not depend on the text, so places can be left out of the whole.
    """
    assert room.tokens is not None
    if not pieces.is_fast:
        shorter = _tokenize(tokenizer, parts, max_length=room.tokens)
        return shorter, list(range(len(shorter["input_ids"])))
    sources = pieces.sequence_ids()
    own = [[place for place, source in enumerate(sources) if source == part] for part in range(len(parts))]
    left = max(room.tokens - sources.count(None), 0)
    sizes = [min(len(own[0]), left)]
    if len(own) == 2:  # the longer half goes first, and an odd piece is the longer half's
        counts = [len(places) for places in own]
        shorter = min(*counts, left // 2)
        longer = min(max(counts), left - shorter)
        sizes = [longer, shorter] if counts[0] > counts[1] else [shorter, longer]
    from_left = getattr(tokenizer, "truncation_side", "right") == "left"
    dropped = set()
    for places, size in zip(own, sizes, strict=True):
        dropped.update(places[: len(places) - size] if from_left else places[size:])
    return pieces, [place for place in range(len(sources)) if place not in dropped]


def _start(
    tokenizer: PreTrainedTokenizerBase, name: str, parts: tuple[str, ...], room: TokenLimit
) -> tuple[tuple[str, ...], str]:
    """Return as much of a text as has to be tokenised, and "at least " where that is not all of it.

    A start of twice the tokens that may be kept decides which are kept: no tokenizer looks so far ahead. (Those that
    split at words look one word ahead; for those that take a text as one word this is a margin, not a proof.) In a
    pair, the other half must be short, so that it is known which half is cut.
    """
    if room.tokens is not None and getattr(tokenizer, "truncation_side", "right") == "right":
        heads = tuple(part[: _HEAD * room.tokens + 4096] for part in parts)
        long = [head != part for head, part in zip(heads, parts, strict=True)]
        if sum(long) == 1:
            counts = [len(tokenize(tokenizer, head, add_special_tokens=False)["input_ids"]) for head in heads]
            others = [count for count, cut in zip(counts, long, strict=True) if not cut]
            if counts[long.index(True)] >= 2 * room.tokens and all(count < room.tokens for count in others):
                return heads, "at least "
    for part in parts:
        if len(part) > LONGEST:
            raise TooLongError(
                f"Reading {name}: it has {len(part):,} characters, and a text may have at most {LONGEST:,}. Shorten it."
            )
    return parts, ""


def _tokenize(
    tokenizer: PreTrainedTokenizerBase, parts: tuple[str, ...], max_length: int | None = None
) -> BatchEncoding:
    cut = {"truncation": "longest_first" if max_length else False, "max_length": max_length}
    return tokenize(tokenizer, *parts, **cut, return_special_tokens_mask=True)


def _reads_all(pieces: BatchEncoding, parts: tuple[str, ...], kept: list[int]) -> bool:
    """Whether the text, and each half of a pair, has at least one piece of its own among those that are kept."""
    if not pieces.is_fast:
        return not all(pieces["special_tokens_mask"])
    sources = pieces.sequence_ids()
    return len({sources[place] for place in kept} - {None}) == len(parts)


def _encode_chat(tokenizer: PreTrainedTokenizerBase, name: str, messages: Messages, room: TokenLimit) -> EncodedText:
    """Encode a chat as its template writes it; the tokens that the template adds are marked as special."""
    string, spans = render_chat(tokenizer, name, messages)
    if not tokenizer.is_fast:
        raise InputError(f"Reading {name}: messages need a tokenizer that keeps offsets (a fast one). Pass token ids.")
    if len(string) > LONGEST:
        raise TooLongError(f"Reading {name}: it has {len(string):,} characters, of at most {LONGEST:,}. Shorten it.")
    encoded = encode_prompt(tokenizer, string, spans)
    if room.exceeded(name, len(encoded)):
        raise TooLongError(f"Reading {name}: {room.reason} tokens, and a chat cannot be cut. Shorten its messages.")
    return replace(encoded, text=tuple(dict(message) for message in messages))


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, string: str, spans: Sequence[tuple[int, int]], *, opened: bool = False
) -> EncodedText:
    """Return a prompt as pieces; those outside the caller's words, which are at the `spans` of characters, are special.

    With `opened`, the tokenizer adds its own special tokens too. The tokenizer must be a fast one.
    """
    pieces = tokenize(tokenizer, string, add_special_tokens=opened)
    ids = pieces["input_ids"]
    encoding = pieces.encodings[0]  # pyright: ignore[reportOptionalSubscript]
    special = tuple(not any(first < stop and start < last for first, last in spans) for start, stop in encoding.offsets)
    words = [(span, place) for span, place in _word_spans(tokenizer, encoding, (string,)) if not special[span[0]]]
    return EncodedText(
        ids=tuple(ids),
        segments=(0,) * len(ids) if "token_type_ids" in tokenizer.model_input_names else None,
        special=special,
        tokens=tuple(tokenizer.convert_ids_to_tokens(ids)),
        words=tuple(span for span, _ in words),
        text=string,
        characters=tuple(place for _, place in words),
        parts=(string,),
    )


# Token ids


def _encode_ids(tokenizer: PreTrainedTokenizerBase, name: str, listed: list[Any], room: TokenLimit) -> EncodedText:
    if not listed:
        raise InputError(f"Reading {name}: the sequence is empty. Pass at least one token id.")
    highest = 2**32 if tokenizer.is_fast else len(tokenizer)  # a fast tokenizer may have ids beyond its length
    tokens = []
    for place, index in enumerate(listed):
        whole = isinstance(index, int) and not isinstance(index, bool) and 0 <= index < highest
        token = tokenizer.convert_ids_to_tokens([index])[0] if whole else None
        if token is None:
            raise InputError(
                f"Reading {name}: the token id at position {place} is {shortened(index)}, expected one of the "
                f"tokenizer's {len(tokenizer)} ids. Pass ids that this tokenizer made."
            )
        tokens.append(token)
    ids = listed[: room.tokens] if room.exceeded(name, len(listed)) else listed
    of_the_text = (tokenizer.unk_token_id, tokenizer.mask_token_id)
    added = [index for index in tokenizer.all_special_ids if index not in of_the_text]
    special = tuple(index in added for index in ids)
    words, parts = _words_of_ids(tokenizer, ids, special)
    return EncodedText(
        ids=tuple(ids),
        segments=(0,) * len(ids) if "token_type_ids" in tokenizer.model_input_names else None,
        special=special,
        tokens=tuple(tokens[: len(ids)]),
        words=tuple(span for span, _ in words),
        text=tuple(listed),
        characters=tuple(place for _, place in words),
        parts=parts,
    )


def _words_of_ids(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], special: tuple[bool, ...]
) -> tuple[list[_Word], tuple[str, ...]]:
    """Return the words between special tokens, if the tokenizer splits what the ids spell into the same ids."""
    words: list[_Word] = []
    parts: list[str] = []
    for marked, group in groupby(range(len(ids)), key=special.__getitem__):
        positions = list(group)
        if marked:
            continue
        run = ids[positions[0] : positions[-1] + 1]
        string = str(tokenizer.decode(run, clean_up_tokenization_spaces=False))
        pieces = tokenize(tokenizer, string, add_special_tokens=False)
        if not pieces.encodings or pieces["input_ids"] != run:
            return [], ()
        for (first, last), (_, start, stop) in _word_spans(tokenizer, pieces.encodings[0], (string,)):
            words.append(((positions[0] + first, positions[0] + last), (len(parts), start, stop)))
        parts.append(string)
    return words, tuple(parts)


# Words


def _word_spans(
    tokenizer: PreTrainedTokenizerBase, encoding: Encoding, parts: tuple[str, ...], kept: list[int] | None = None
) -> list[_Word]:
    """Return each word's span over the pieces `kept` (None: all) and its place in the parts.

    A piece belongs to the word where it begins. The tokenizer's own words count where it separates them, and otherwise
    those of the characters.
    """
    aligns = _separates_words(tokenizer)
    by_character = [_character_words(string) for string in parts]
    pieces = []
    aligned = list(zip(encoding.sequence_ids, encoding.word_ids, encoding.offsets, strict=True))
    for position, place in enumerate(range(len(aligned)) if kept is None else kept):
        index, word, (start, stop) = aligned[place]
        if index is None:
            continue
        if not aligns:
            touched = (number for number in by_character[index][start:stop] if number is not None)
            word = next(touched, None)
        pieces.append(((index, word), position, start, stop))
    words = []
    for (index, _), group in groupby(pieces, key=lambda piece: piece[0]):
        _, positions, starts, stops = zip(*group, strict=True)
        covered = parts[index][starts[0] : stops[-1]]
        if covered.strip():
            place = (index, stops[-1] - len(covered.lstrip()), starts[0] + len(covered.rstrip()))
            words.append(((positions[0], positions[-1] + 1), place))
    return words


def _separates_words(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer's own words end at white space and at punctuation.

    WordPiece and byte-level BPE split like this; SentencePiece-style tokenizers keep punctuation with its neighbour
    (T5) or take a whole text as one word (Llama).
    """
    return bool(tokenizer.is_fast) and len(set(tokenize(tokenizer, "a, b", add_special_tokens=False).word_ids())) >= 3


def _character_words(text: str) -> list[int | None]:
    """Return the number of each character's word: None for white space; punctuation marks and symbols stand alone."""
    inside = [not character.isspace() and unicodedata.category(character)[0] not in "PS" for character in text]
    numbers = accumulate(not (before and here) for before, here in pairwise([False, *inside]))
    return [None if character.isspace() else number for character, number in zip(text, numbers, strict=True)]
