"""How long-running work reports its progress: one signature for everything that takes a `progress` argument."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many parts of it are done, and how many there are."""


def silent(what: str, done: int, total: int) -> None:
    """Report nothing."""
