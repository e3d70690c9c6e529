"""`identikit` and `python -m identikit`: the command line, loaded where its end is taken care of."""

from identikit.cli.endings import run


def main() -> None:
    """Run the command line."""

    def command() -> None:
        from identikit.cli.main import app

        app()

    run(command)


if __name__ == "__main__":
    main()
