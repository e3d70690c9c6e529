"""Chats as strings: messages rendered by the tokenizer's template, and where each message is in the string."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from transformers import PreTrainedTokenizerBase

from identikit.checks import shortened
from identikit.errors import InputError, reason_of

Messages = Sequence[Mapping[str, Any]]
_MARK = "\ue000{}\ue001"  # private characters, which no template writes


def is_chat(text: object) -> TypeGuard[Messages]:
    """Whether a text is a chat: a list or tuple of messages, each a mapping such as {"role": …, "content": …}."""
    return isinstance(text, list | tuple) and bool(text) and all(isinstance(message, Mapping) for message in text)


_EXPECTED = "expected a list of {'role': …, 'content': …}, with strings in both"
_PARTS = "expected a list of {'role': …, 'content': …}, with strings or parts of the type 'text' or 'image' as content"


def text_or_messages(text: object, messages: object) -> Any:
    """Return a text, or the messages that were given in its place."""
    if messages is None:
        return text
    if text is not None:
        raise InputError("Both a text and messages= were given. Pass one of them.")
    if not is_chat(messages):
        raise InputError(f"messages={shortened(messages)} cannot be used: {_EXPECTED}.")
    return list(messages)


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    messages: Messages,
    *,
    template: str | None = None,
    parts: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """Return a chat as its template writes it, and the characters (start, stop) of the caller's words in it.

    Unless the last message is the assistant's, the template opens the assistant's turn. To find what the template adds,
    it is rendered again with marks in place of the words; it may strip white space around a message, nothing else.
    `template` is for tokenizers without one of their own. With `parts`, contents are lists of parts, and only those of
    text hold words.
    """
    strings: list[str] = []
    for message in messages:
        message_strings = _strings_of(name, message, parts=parts)
        if not any(string.strip() for string in message_strings):
            raise InputError(f"Reading {name}: the message of {message['role']!r} is blank. Pass some words.")
        strings += message_strings
    rendered = _render(tokenizer, name, messages, template, strings)
    marks = [_MARK.format(index) for index in range(len(strings))]
    frame = _render(tokenizer, name, messages, template, marks)
    before, *between = re.split("|".join(marks), frame)
    spans = []
    position = len(before) if rendered.startswith(before) else 0
    for string, following in zip(strings, between, strict=False):
        for content in (string, string.strip()):
            if rendered.startswith(content + following, position):
                spans.append((position, position + len(content)))
                position += len(content + following)
                break
    if position != len(rendered) or not len(spans) == len(between) == len(strings):
        raise InputError(
            f"Reading {name}: the chat template does not write each message once, as it is and in order, so its own "
            "tokens cannot be told apart. Apply the template yourself, and pass the text or its token ids."
        )
    return rendered, spans


def _strings_of(name: str, message: Mapping[str, Any], *, parts: bool) -> list[str]:
    """Return the strings in a message's content; refuse anything that is no message."""
    content = message.get("content")
    content_parts = content if parts else [{"type": "text", "text": content}]
    strings: list[Any] = [part.get("text") for part in content_parts or () if part.get("type") == "text"]
    is_message = (
        set(message) == {"role", "content"}
        and all(part.get("type") in ("text", "image") for part in content_parts or ())
        and all(isinstance(string, str) for string in (*strings, message["role"]))
    )
    if not is_message:
        expected = _PARTS if parts else _EXPECTED
        raise InputError(f"Reading {name}: {shortened(dict(message))} is no message: {expected}.")
    return strings


def _render(
    tokenizer: PreTrainedTokenizerBase, name: str, messages: Messages, template: str | None, strings: Sequence[str]
) -> str:
    """Return what the template writes of messages with these strings in place of their own."""
    if template is None and getattr(tokenizer, "chat_template", None) is None:
        raise InputError(f"Reading {name}: the tokenizer has no chat template. Pass a text instead of messages.")
    remaining = iter(strings)
    chat = [{"role": message["role"], "content": _fill(message["content"], remaining)} for message in messages]
    opens = messages[-1]["role"] != "assistant"
    try:
        return str(
            tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False, add_generation_prompt=opens)
        )
    except Exception as error:  # a template is a program, and may raise anything
        reason = reason_of(error)
        raise InputError(f"Reading {name}: the chat template refuses these messages ({reason}).") from None


def _fill(content: Any, strings: Iterator[str]) -> Any:
    """Return a message's content with the next of the strings in place of its own."""
    if isinstance(content, str):
        return next(strings)
    return [{"type": "text", "text": next(strings)} if part["type"] == "text" else part for part in content]
