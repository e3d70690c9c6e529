"""A chat as one string: messages through the tokenizer's template, and where in it each message stands."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard

from transformers import PreTrainedTokenizerBase

from identikit.checks import shortened
from identikit.errors import InputError

Messages = Sequence[Mapping[str, Any]]
_MARK = "\ue000{}\ue001"  # private characters, which no template writes


def is_chat(text: object) -> TypeGuard[Messages]:
    """Whether a text is a chat: a list or tuple of messages, each a mapping such as {"role": …, "content": …}."""
    return isinstance(text, list | tuple) and bool(text) and all(isinstance(message, Mapping) for message in text)


def text_or_messages(text: object, messages: object) -> Any:
    """Return a text, or the messages that were given in its place."""
    if messages is None:
        return text
    if text is not None:
        raise InputError("Both a text and messages= were given. Pass one of them.")
    if not is_chat(messages):
        raise InputError(f"messages={shortened(messages)} cannot be used: {_EXPECTED}.")
    return list(messages)


_EXPECTED = "expected a list of {'role': …, 'content': …}, with strings in both"
_PARTS = "expected a list of {'role': …, 'content': …}, with strings or parts of the type 'text' or 'image' as content"


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    messages: Messages,
    *,
    template: str | None = None,
    parts: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """Return a chat as its template writes it, and the characters (start, stop) of the caller's words in it.

    Unless the last message is the assistant's, the template opens the assistant's turn. What the template writes itself
    is found by writing marks in the place of messages; white space around a message may be left out, nothing else.
    `template` is one that the tokenizer does not have itself. With `parts`, contents are lists of parts, of which only
    those of text hold words.
    """
    contents = []
    for message in messages:
        words = _words_of(name, message, parts=parts)
        if not any(text.strip() for text in words):
            raise InputError(f"Reading {name}: the message of {message['role']!r} is blank. Pass some words.")
        contents.append(words)
    render = partial(_rendered, tokenizer, name, messages, template)
    flat = [text for words in contents for text in words]
    whole = render(contents)
    marks = (_MARK.format(place) for place in range(len(flat)))
    frame = render([[next(marks) for _ in words] for words in contents])
    around = []
    for place in range(len(flat)):
        before, _, frame = frame.partition(_MARK.format(place))
        around.append(before)
    spans = []
    at = len(around[0]) if whole.startswith(around[0]) else 0
    for content, following in zip(flat, [*around[1:], frame], strict=True):
        for kept in dict.fromkeys((content, content.strip())):
            if whole.startswith(kept + following, at):
                spans.append((at, at + len(kept)))
                at += len(kept + following)
                break
    if at != len(whole) or len(spans) < len(flat):
        raise InputError(
            f"Reading {name}: the chat template does not write each message once, as it is and in order, so its own "
            "tokens cannot be told apart. Apply the template yourself, and pass the text or its token ids."
        )
    return whole, spans


def _words_of(name: str, message: Mapping[str, Any], *, parts: bool) -> list[str]:
    """Return the strings of a message; refuse what is no message."""
    content = message.get("content")
    listed = [{"type": "text", "text": content}] if not parts else content
    texts = [part.get("text") for part in listed or () if part.get("type") == "text"]
    known = all(part.get("type") in ("text", "image") for part in listed or ())
    strings = [text for text in (*texts, message.get("role")) if isinstance(text, str)]
    if set(message) != {"role", "content"} or not known or len(strings) != len(texts) + 1:
        expected = _PARTS if parts else _EXPECTED
        raise InputError(f"Reading {name}: {shortened(dict(message))} is no message: {expected}.")
    return strings[:-1]


def _rendered(
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    messages: Messages,
    template: str | None,
    contents: Sequence[Sequence[str]],
) -> str:
    """Return what the template writes of messages with these strings in the place of their own."""
    if template is None and getattr(tokenizer, "chat_template", None) is None:
        raise InputError(f"Reading {name}: the tokenizer has no chat template. Pass a text instead of messages.")
    chat = [
        {"role": message["role"], "content": _with_words(message["content"], words)}
        for message, words in zip(messages, contents, strict=True)
    ]
    opens = messages[-1]["role"] != "assistant"
    try:
        return str(
            tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False, add_generation_prompt=opens)
        )
    except Exception as error:  # a template is a program, and may raise anything
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise InputError(f"Reading {name}: the chat template refuses these messages ({reason}).") from None


def _with_words(content: Any, words: Sequence[str]) -> Any:
    if isinstance(content, str):
        return words[0]
    left = iter(words)
    return [{"type": "text", "text": next(left)} if part["type"] == "text" else part for part in content]
