"""The errors a user can meet.

Every message says what was being done, with which value, what was expected and what to do. The command line prints
only the message, so it must make sense by itself.
"""

from dataclasses import dataclass


class IdentikitError(Exception):
    """Base of every error that identikit raises on purpose."""


class InputError(IdentikitError, ValueError):
    """A text, file, option or index that cannot be used as given."""


class TooLongError(InputError):
    """A text that is too long for a model, or for what the caller allows."""


class ModelError(IdentikitError):
    """A model that cannot be loaded, is not supported, or fails its proof."""


@dataclass(frozen=True)
class Unavailable:
    """Stands in the place of something that cannot be had, and says why."""

    reason: str
