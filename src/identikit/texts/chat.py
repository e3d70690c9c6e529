"""A chat as one string: messages through the tokenizer's template, and where in it each message stands."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from transformers import PreTrainedTokenizerBase

from identikit.checks import shortened
from identikit.errors import InputError

Messages = Sequence[Mapping[str, str]]
_MARK = "\ue000{}\ue001"  # private characters, which no template writes


def is_chat(text: object) -> TypeGuard[Messages]:
    """Whether a text is a chat: a list or tuple of messages, each a mapping such as {"role": …, "content": …}."""
    return isinstance(text, list | tuple) and bool(text) and all(isinstance(message, Mapping) for message in text)


def text_or_messages(text: Any, messages: Any) -> Any:
    """Return a text, or the messages that were given in its place."""
    if messages is None:
        return text
    if text is not None:
        raise InputError("Both a text and messages= were given. Pass one of them.")
    if not is_chat(messages):
        raise InputError(f"messages={shortened(messages)} cannot be used: {_EXPECTED}.")
    return list(messages)


_EXPECTED = "expected a list of {'role': …, 'content': …}, with strings in both"


def written(tokenizer: PreTrainedTokenizerBase, name: str, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
    """Return a chat as its template writes it, and the characters (start, stop) of each message in it.

    Unless the last message is the assistant's, the template opens the assistant's turn. What the template writes itself
    is found by writing marks in the place of messages; white space around a message may be left out, nothing else.
    """
    contents = []
    for message in messages:
        if set(message) != {"role", "content"} or not all(isinstance(part, str) for part in message.values()):
            raise InputError(f"Reading {name}: {shortened(dict(message))} is no message: {_EXPECTED}.")
        if not message["content"].strip():
            raise InputError(f"Reading {name}: the message of {message['role']!r} is blank. Pass some words.")
        contents.append(message["content"])
    whole = _rendered(tokenizer, name, messages, contents)
    frame = _rendered(tokenizer, name, messages, [_MARK.format(place) for place in range(len(contents))])
    parts = []
    for place in range(len(contents)):
        before, _, frame = frame.partition(_MARK.format(place))
        parts.append(before)
    spans = []
    at = len(parts[0]) if whole.startswith(parts[0]) else 0
    for content, following in zip(contents, [*parts[1:], frame], strict=True):
        for kept in dict.fromkeys((content, content.strip())):
            if whole.startswith(kept + following, at):
                spans.append((at, at + len(kept)))
                at += len(kept + following)
                break
    if at != len(whole) or len(spans) < len(contents):
        raise InputError(
            f"Reading {name}: the chat template does not write each message once, as it is and in order, so its own "
            "tokens cannot be told apart. Apply the template yourself, and pass the text or its token ids."
        )
    return whole, spans


def _rendered(tokenizer: PreTrainedTokenizerBase, name: str, messages: Messages, contents: Sequence[str]) -> str:
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError(f"Reading {name}: the tokenizer has no chat template. Pass a text instead of messages.")
    chat = [{"role": message["role"], "content": content} for message, content in zip(messages, contents, strict=True)]
    opens = messages[-1]["role"] != "assistant"
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=opens))
    except Exception as error:  # a template is a program, and may raise anything
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise InputError(f"Reading {name}: the chat template refuses these messages ({reason}).") from None
