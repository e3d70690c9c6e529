"""`identikit` and `python -m identikit`: the command line, loaded where errors and signals are handled."""

import atexit
import gc
from collections.abc import Callable

from identikit.cli.endings import run


def main() -> None:
    """Run the command line."""
    gc.set_threshold(20_000)  # libraries make a million objects that stay: collecting often takes a second in all
    atexit.register(gc.freeze)  # at exit, Python would look through all objects for a second
    run(_load)


def _load() -> Callable[[], object]:
    from identikit.cli.main import app

    return app


if __name__ == "__main__":
    main()
