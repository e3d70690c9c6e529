"""The errors a user can meet, and their messages reworded for the command line and for pages.

Every message says what was being done, with which value, what was expected and what to do. The command line prints
only the message, so it must make sense by itself.

A message names an option as Python does, such as `seconds=20` or `layer=`, and a call in backticks, such as
`explain(model, text)`. The command line names its own options instead; on a page, where none of this can be set, what
offers it is left out.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_ENDLESS_NAME = re.compile(r"(\S{60})\S{140,}?(['\"):,.]{0,3})(?!\S)")  # longer than anyone wants to read
_VALUE = r"'[^']*'|'\S*…|\"[^\"]*\"|\[[^\]]*\]|[\w…/-]+(?:\.\w+)*"
_OPTION = re.compile(rf"(?<![\w.'\"/=-])([a-z][a-z_]*)=({_VALUE})?(?![\w=])")
_CODE = re.compile(r"(`[^`]+`)")
_QUOTES = "'\""
_CALL = re.compile(r"`[a-z_.]+\(")
_ALL_NUMBERS = "`to_dict()`"  # in Python; on the command line --json has all numbers, on a page Provenance


class IdentikitError(Exception):
    """Base of every error that identikit raises on purpose.

    Its message is one line; only the start of a very long name is shown.
    """

    def __init__(self, message: str = ""):
        line = " ".join(str(message).splitlines())
        super().__init__(_ENDLESS_NAME.sub(r"\1…\2", line))


class InputError(IdentikitError, ValueError):
    """A text, file, option or index that cannot be used as given."""


class TooLongError(InputError):
    """A text that is too long for a model, or for what the caller allows."""


class ModelError(IdentikitError):
    """A model that cannot be loaded, is not supported, or fails its proof."""


def reason_of(error: BaseException, length: int = 200) -> str:
    """Return what another library's error says: one line of at most this length, without a full stop."""
    return " ".join(str(error).split())[:length].rstrip(".") or type(error).__name__


UNFINISHED: list[Callable[[BaseException], None]] = []
"""Called with the error, the last first, if a signal ends a command: they leave unfinished work in order."""


@dataclass(frozen=True)
class Unavailable:
    """Stands in for something that is not available, and gives the `reason`."""

    reason: str


# Messages outside Python


def for_command_line(words: str, options: Mapping[str, str]) -> str:
    """Return a message with a command's options in place of Python's; `options` maps names in Python to them."""

    def command_option(match: re.Match[str]) -> str:
        name, value = match.groups()
        if name not in options or value in ("False", "None"):
            return match[0]
        if value in (None, "True"):
            return options[name]
        return f"{options[name]} {value.strip(_QUOTES) or value}"

    pieces = _CODE.split(words.replace(_ALL_NUMBERS, "--json"))
    for index, piece in enumerate(pieces):
        if index % 2 == 0:  # outside backticks
            pieces[index] = _OPTION.sub(command_option, piece)
        elif _CALL.match(piece):
            pieces[index] = f"{piece} in Python"
    return "".join(pieces)


def for_page(words: str) -> str:
    """Return a message without advice to set an option or make a call: asides, alternatives and whole sentences."""
    first, *following = re.split(r"(?<=[.!?]) (?=[A-Z`])", words.replace(_ALL_NUMBERS, "Provenance"))
    sentences = [_remove_offers(sentence) for sentence in following]
    return " ".join([_remove_offers(first), *(sentence for sentence in sentences if not _offers(sentence))])


def _remove_offers(sentence: str) -> str:
    """Remove asides in brackets, and a last alternative, that offer an option or a call."""
    sentence = re.sub(r" \([^()]*\)", lambda aside: "" if _offers(aside[0]) else aside[0], sentence)
    body, comma, last = sentence.rpartition(", or ")
    return f"{body}." if comma and _offers(last) and not _offers(body) else sentence


def _offers(words: str) -> bool:
    return bool(_OPTION.search(words) or _CALL.search(words))
