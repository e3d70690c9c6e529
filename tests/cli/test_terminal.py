"""Progress: a bar for each piece of work on a terminal, a line now and then elsewhere, pace and time left."""

import json
import sqlite3
from contextlib import closing
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from identikit.cli import terminal as progress
from identikit.errors import InputError
from tests.cli.made import run


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> StringIO:
    """What a terminal is sent; the last frame is always among it."""
    file = StringIO()
    console = Console(force_terminal=True, width=100, file=file, get_time=clock)
    monkeypatch.setattr(progress, "Console", lambda **given: console)
    return file


def test_long_work_prints_a_line_now_and_then_off_a_terminal(
    capsys: pytest.CaptureFixture[str], clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(progress.time, "monotonic", clock)
    with progress.step_progress() as told:
        told("reading", 1, 2)  # short work prints nothing
        told("attribution, tokens", 600, 5000)
        for done in range(610, 1610, 10):  # 10 tokens per second, for 100 seconds
            clock.now += 1
            told("attribution, tokens", done, 5000)
        clock.now += 40
        told("training maps", 0, 8)
    assert capsys.readouterr() == (
        "",
        "identikit: attribution, tokens: 900 of 5,000 (10/s, 0:06:50 left)\n"
        "identikit: attribution, tokens: 1,200 of 5,000 (10/s, 0:06:20 left)\n"
        "identikit: attribution, tokens: 1,500 of 5,000 (10/s, 0:05:50 left)\n"
        "identikit: training maps: 0 of 8\n",
    )


def test_work_of_the_same_name_starts_anew(
    capsys: pytest.CaptureFixture[str], clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(progress.time, "monotonic", clock)
    with progress.step_progress() as told:
        told("training maps", 0, 100)
        clock.now += 20
        told("training maps", 100, 100)
        told("training maps", 0, 100)
        clock.now += 20
        told("training maps", 40, 100)
    assert capsys.readouterr().err == "identikit: training maps: 40 of 100 (2/s, 0:00:30 left)\n"


def test_a_bar_for_each_thing(screen: StringIO):
    with progress.step_progress() as told:
        told("reading", 1, 2)
        told("training maps", 3, 7)
        told("training maps", 7, 7)
        told("training maps", 1, 5)
    shown = screen.getvalue()
    assert "reading" in shown and "1/5" in shown


def test_pace_and_time_left(screen: StringIO, clock: Clock):
    """Of 1,000 tokens 600 were kept by an earlier run: 88 in two seconds are 44 per second, and 312 take 7 more."""
    with progress.step_progress() as told:
        told("attribution, tokens", 600, 1000)
        assert "left: -:--:--" in screen.getvalue() and "/s" not in screen.getvalue()
        clock.now += 2
        told("attribution, tokens", 688, 1000)
    shown = screen.getvalue()
    assert "688/1000" in shown and "44/s" in shown and "left: 0:00:07" in shown


def test_the_time_left_counts_down_between_reports(screen: StringIO, clock: Clock):
    with progress.step_progress() as told:
        told("training maps", 0, 11)
        clock.now += 8
        told("training maps", 1, 11)
        clock.now += 20
    shown = screen.getvalue()
    assert "0.12/s" in shown and "left: 0:01:00" in shown


@pytest.mark.parametrize(("columns", "width"), [("0", 80), ("39", 80), ("40", 40)])
def test_words_have_room_whatever_the_surroundings_claim(monkeypatch: pytest.MonkeyPatch, columns: str, width: int):
    monkeypatch.setenv("COLUMNS", columns)
    assert progress.console().width == width


def test_an_experiment_tracker_is_told_how_far_each_step_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # which is read on import
    pytest.importorskip("trackio", reason="trackio is not installed")
    told = []
    with progress.with_tracker("trackio", lambda *each: told.append(each), project="tried") as also:
        for done in range(3):
            also("texts", done, 2)
    assert told == [("texts", 0, 2), ("texts", 1, 2), ("texts", 2, 2)]
    with closing(sqlite3.connect(tmp_path / "tried.db")) as kept:
        logged = [json.loads(metrics) for (metrics,) in kept.execute("SELECT metrics FROM metrics")]
    assert logged[-1] == {"texts/done": 2, "texts/of": 2}


@pytest.mark.parametrize("tracker", ["wandb", "trackio", ""])
def test_a_tracker_that_is_not_there_is_refused_before_anything_is_read(tracker: str, tmp_path: Path):
    if tracker == "trackio" and find_spec("trackio"):
        pytest.skip("trackio is installed")
    expected = "Run `pip install trackio`." if tracker == "trackio" else f"Progress cannot be reported to {tracker!r}."
    done = run("--report-to", tracker, "explain", "a b c", "--html", tmp_path / "page.html")
    assert done.refused(expected)
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="reported to 'wandb'"), progress.with_tracker("wandb", print):
        pass
