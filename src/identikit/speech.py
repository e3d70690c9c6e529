"""Each place speaks its own language: words are written as Python says them, and put otherwise where they are shown.

A message names an option as Python does, such as `seconds=20` or `layer=`, and a call in backticks, such as
`explain(model, text)`. The command line names its own options instead; on a page, where none of this can be set, what
offers it is left out.
"""

import re
from collections.abc import Mapping

_VALUE = r"'[^']*'|'\S*…|\"[^\"]*\"|\[[^\]]*\]|[\w…/-]+(?:\.\w+)*"
_OPTION = re.compile(rf"(?<![\w.'\"/=-])([a-z][a-z_]*)=({_VALUE})?(?![\w=])")
_QUOTES = "'\""
_CODE = re.compile(r"(`[^`]+`)")
_CALL = re.compile(r"`[a-z_.]+\(")
_ALL_SOURCES = {"`to_dict()`": ("--json", "Provenance")}  # what has all numbers: on the command line, and on a page


def for_command_line(words: str, options: Mapping[str, str]) -> str:
    """Return words with the options of a command, by their names in Python; calls are said to be Python's."""

    def named(found: re.Match[str]) -> str:
        name, value = found.groups()
        if name not in options or value in ("False", "None"):
            return found[0]
        if value in (None, "True"):
            return options[name]
        return f"{options[name]} {value.strip(_QUOTES) or value}"

    parts = _CODE.split(words)
    for place, part in enumerate(parts):
        if part in _ALL_SOURCES:
            parts[place] = _ALL_SOURCES[part][0]
        elif place % 2:
            parts[place] = f"{part} in Python" if _CALL.match(part) else part
        else:
            parts[place] = _OPTION.sub(named, part)
    return "".join(parts)


def for_page(words: str) -> str:
    """Return words without what offers an option or a call of Python: an aside, an alternative, or a whole sentence."""
    for code, (_, view) in _ALL_SOURCES.items():
        words = words.replace(code, view)
    first, *others = re.split(r"(?<=[.!?]) (?=[A-Z`])", words)
    kept = [_without_offers(sentence) for sentence in others]
    return " ".join([_without_offers(first), *(sentence for sentence in kept if not _offers(sentence))])


def _without_offers(sentence: str) -> str:
    """Return a sentence without asides in brackets, and without a last alternative, that offer something."""
    sentence = re.sub(r" \([^()]*\)", lambda aside: "" if _offers(aside[0]) else aside[0], sentence)
    body, comma, last = sentence.rpartition(", or ")
    return f"{body}." if comma and _offers(last) and not _offers(body) else sentence


def _offers(words: str) -> bool:
    return bool(_OPTION.search(words) or _CALL.search(words))
