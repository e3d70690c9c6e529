"""Models whose numbers are at the edge of what floating point holds: each is read right, or refused by its layer."""

from collections.abc import Iterator

from tests.hostile.cases import Case


def cases() -> Iterator[Case]:
    """Yield the cases with numbers at the edge."""
    yield from ()
