"""Progress bars: silent where there is no terminal, one bar for each thing that is told of."""

from io import StringIO

from rich.console import Console

from identikit.render import progress


def test_bars_are_silent_where_there_is_no_terminal(capsys):
    with progress.step_progress() as told:
        for done in (1, 2, 1, 2):
            told("training maps", done, 2)
    assert capsys.readouterr() == ("", "")


def test_a_bar_for_each_thing(monkeypatch):
    console = Console(force_terminal=True, width=100, file=StringIO())
    monkeypatch.setattr(progress, "Console", lambda **given: console)
    with progress.step_progress() as told:
        told("reading", 1, 2)
        told("training maps", 3, 7)
        told("training maps", 7, 7)
        told("training maps", 1, 5)
    shown = console.file.getvalue()
    assert "reading" in shown and "1/5" in shown
