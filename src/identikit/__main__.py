"""`identikit` and `python -m identikit`: the command line, loaded where its end is taken care of."""

import atexit
import gc
from collections.abc import Callable

from identikit.cli.endings import run


def main() -> None:
    """Run the command line."""
    atexit.register(gc.freeze)  # memory goes with the process: Python would look through all objects for a second
    run(_load)


def _load() -> Callable[[], object]:
    from identikit.cli.main import app

    return app


if __name__ == "__main__":
    main()
