"""Who sees progress: a caller's own function always, bars only where somebody can watch."""

import sys
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

import identikit as ik
from identikit import progress
from identikit.progress import Watched, bars, reporting, silent
from tests.models import tiny


@reporting
def received(*, progress: Watched = None) -> Any:
    return progress


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_nothing_and_a_function_gets_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stderr", StringIO())
    assert received() is received(progress=False) is silent
    assert received(progress=print) is print


@pytest.mark.parametrize(("where", "widgets", "shown"), [("terminal", False, True), ("notebook", True, True),
                                                         ("notebook", False, False)])  # fmt: skip
def test_bars_are_shown_on_a_terminal_and_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch, where: str, widgets: bool, shown: bool
):
    monkeypatch.setattr(sys, "stderr", Terminal() if where == "terminal" else StringIO())
    monkeypatch.setattr(progress, "find_spec", lambda name: widgets or None)
    if where == "notebook":
        monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert (received() is not silent) == shown
    assert received(progress=False) is silent


@pytest.mark.parametrize("patience", [0.0, 1000.0])
def test_a_short_call_shows_no_bar(patience: float):
    screen = StringIO()
    with bars(Console(force_terminal=True, width=100, file=screen), patience=patience) as told:
        told("rows", 3, 390)
        told("rows", 60, 390)
    assert ("60/390" in screen.getvalue()) == (patience == 0) and "390/390" not in screen.getvalue()


def test_long_functions_report():
    model = tiny.loaded("gpt2")
    seen: dict[str, tuple[int, int]] = {}

    def told(what: str, done: int, total: int) -> None:
        seen[what] = done, total

    ik.effective_attention(model, ["w5 w6", "w7 w8"], progress=told).pop().intervals(progress=told)
    ik.attention_intervals(model, "w5 w6 w7", progress=told)
    ik.token_attribution(model, "w5 w6 w7", progress=told)
    ik.invert(model, "w5 w6 w7", layer=0, progress=told)
    assert seen["effective attention, texts"] == (2, 2)
    assert {"attention intervals, rows", "attribution, tokens"} <= {*seen}
