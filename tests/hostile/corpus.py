"""All the cases, in one list."""

from functools import cache

from tests.hostile import arguments, checkpoints, configs, environments, files, models, numerics, stores, texts
from tests.hostile.cases import Case


@cache
def corpus() -> tuple[Case, ...]:
    """Return every case; no two of one kind share a name."""
    rooms = (texts, files, checkpoints, configs, stores, arguments, environments, models, numerics)
    return tuple(case for room in rooms for case in room.cases())
