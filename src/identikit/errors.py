"""The errors a user can meet.

Every message says what was being done, with which value, what was expected and what to do. The command line prints the
message alone, so a message must stand on its own.
"""

from dataclasses import dataclass


class IdentikitError(Exception):
    """Base of every error that identikit raises on purpose."""


class InputError(IdentikitError, ValueError):
    """A text, file, option or index that cannot be used as given."""


class ModelError(IdentikitError):
    """A model that cannot be loaded, is not supported, or fails its proof."""


@dataclass(frozen=True)
class Unavailable:
    """Something that cannot be had, and why: returned where that is one of the expected outcomes, not an error."""

    reason: str
