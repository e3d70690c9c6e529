"""`identikit` and `python -m identikit`: the command line, loaded where its end is taken care of."""

from collections.abc import Callable

from identikit.cli.endings import run


def main() -> None:
    """Run the command line."""
    run(_load)


def _load() -> Callable[[], object]:
    from identikit.cli.main import app

    return app


if __name__ == "__main__":
    main()
