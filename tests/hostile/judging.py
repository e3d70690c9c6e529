"""How the end of a bad input is judged: refused in one clear line, or given what is right. Nothing else will do."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import identikit as ik

LONGEST = 600  # characters of a message
_UNREADABLE = re.compile(r"Traceback|<[\w.]+ (object )?at 0x|\\x1b|\x1b")


class Refused(Exception):  # noqa: N818 - an end of a command
    """The command line refused, with this message."""


REFUSALS = (ik.IdentikitError, Refused)


@contextmanager
def refused(*names: str) -> Iterator[None]:
    """Expect a refusal in one clear line, which names what matches these patterns."""
    with pytest.raises(REFUSALS) as refusal:
        yield
    assert unclear(str(refusal.value), names) == "", refusal.value


@contextmanager
def refused_or_right() -> Iterator[None]:
    """Expect a refusal in one clear line, or that what is asserted inside holds."""
    try:
        yield
    except REFUSALS as refusal:
        assert unclear(str(refusal)) == "", refusal


def unclear(message: str, names: tuple[str, ...] = ()) -> str:
    """Say why a message does not help its reader; '' if it does."""
    if not message.strip():
        return "it is empty"
    if "\n" in message or "\r" in message:
        return "it has more than one line"
    if len(message) > LONGEST:
        return f"it has {len(message)} characters"
    if not message.endswith((".", "?", ")")):
        return "it does not end as a sentence"
    if shown := _UNREADABLE.search(message):
        return f"it shows {shown[0]!r}"
    missing = [name for name in names if not re.search(name, message)]
    return f"it does not name {missing[0]!r}" if missing else ""
