"""The errors a user can meet.

Every message says what was being done, with which value, what was expected and what to do. The command line prints
only the message, so it must make sense by itself.
"""

import re
from dataclasses import dataclass

_ENDLESS_NAME = re.compile(r"(\S{60})\S{140,}?(['\"):,.]{0,3})(?!\S)")  # longer than anyone wants to read


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


@dataclass(frozen=True)
class Unavailable:
    """Stands in for something that is not available, and gives the `reason`."""

    reason: str
