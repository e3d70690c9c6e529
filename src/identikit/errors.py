"""The errors a user can meet, and how other places say what a message says.

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


UNFINISHED: list[Callable[[BaseException], None]] = []
"""What has to be left in order and is not yet, the innermost last: called with the error if a signal ends a command."""


@dataclass(frozen=True)
class Unavailable:
    """Stands in for something that is not available, and gives the `reason`."""

    reason: str


# What Python says, said elsewhere


def for_command_line(words: str, options: Mapping[str, str]) -> str:
    """Return words with the options of a command, by their names in Python; calls are said to be Python's."""

    def named(found: re.Match[str]) -> str:
        name, value = found.groups()
        if name not in options or value in ("False", "None"):
            return found[0]
        if value in (None, "True"):
            return options[name]
        return f"{options[name]} {value.strip(_QUOTES) or value}"

    parts = _CODE.split(words.replace(_ALL_NUMBERS, "--json"))
    for place, part in enumerate(parts):
        if place % 2 == 0:
            parts[place] = _OPTION.sub(named, part)
        elif _CALL.match(part):
            parts[place] = f"{part} in Python"
    return "".join(parts)


def for_page(words: str) -> str:
    """Return words without what offers an option or a call of Python: an aside, an alternative, or a whole sentence."""
    first, *others = re.split(r"(?<=[.!?]) (?=[A-Z`])", words.replace(_ALL_NUMBERS, "Provenance"))
    kept = [_without_offers(sentence) for sentence in others]
    return " ".join([_without_offers(first), *(sentence for sentence in kept if not _offers(sentence))])


def _without_offers(sentence: str) -> str:
    """Return a sentence without asides in brackets, and without a last alternative, that offer something."""
    sentence = re.sub(r" \([^()]*\)", lambda aside: "" if _offers(aside[0]) else aside[0], sentence)
    body, comma, last = sentence.rpartition(", or ")
    return f"{body}." if comma and _offers(last) and not _offers(body) else sentence


def _offers(words: str) -> bool:
    return bool(_OPTION.search(words) or _CALL.search(words))
