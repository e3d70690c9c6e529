"""A signal that comes at any line from the taking of a run's folder to its leaving is answered in full."""

import contextlib
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from identikit.cli import endings
from identikit.errors import UNFINISHED
from identikit.results import files
from identikit.runs import engines, lock, run, store
from identikit.runs.run import Numbers, Run
from identikit.runs.store import Store
from tests.models import tiny
from tests.runs.test_store import COUNT, ENCODED, TEXTS

WATCHED = {module.__file__ for module in (contextlib, engines, files, lock, run, store)}
FEW = 3  # texts of the run


class Stopped:
    """A short run of the command line that gets SIGINT at a line of what takes, writes and leaves its folder."""

    def __init__(self, out: Path, at: int | None):
        self.out = out
        self.at = at
        self.lines = 0
        self.taken = False  # when the signal came
        self.numbers: Numbers = {}

    def command(self) -> None:
        sys.settrace(self.enter)
        try:
            taking = Store(self.out, {"seed": 1})
            with taking.held():
                taking.write_json("command.json", {})
                self.numbers = Run(taking).texts(tiny.shared("bert"), COUNT, TEXTS[:FEW], ENCODED[:FEW])
                taking.finish()
                sys.settrace(self.enter)
        finally:
            sys.settrace(None)

    def enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self.line if frame.f_code.co_filename in WATCHED and not self.in_a_destructor(frame) else None

    def in_a_destructor(self, frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code.co_name != "__del__":
            frame = frame.f_back
        return frame is not None

    def line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and UNFINISHED:
            if self.lines == self.at:
                sys.settrace(None)
                self.taken = True
                signal.raise_signal(signal.SIGINT)
            self.lines += 1
        return self.line

    def ended(self) -> object:
        """Run it in an empty place, and return the status."""
        shutil.rmtree(self.out, ignore_errors=True)
        with pytest.raises(SystemExit) as end:
            endings.run(lambda: self.command)
        return end.value.code


@pytest.fixture(autouse=True)
def every_text_is_a_shard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(run, "SHARD_SECONDS", 0.0)
    yield
    assert not UNFINISHED


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_a_signal_at_any_line_is_answered_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int):
    out = tmp_path / "out"
    undisturbed = Stopped(out, None)
    assert undisturbed.ended() == 0
    kept: set[int] = set()
    at = 0
    while (stopped := Stopped(out, at)).ended() == 130:
        shards = list(out.glob("shard-*"))
        words = f"What was computed is kept in {out}. Run the same command again to continue."
        if not shards:
            assert not out.exists() or {path.name for path in out.iterdir()} <= {lock.LOCK}
            words = "Nothing had been computed yet."
        assert capsys.readouterr().err == f"identikit: Interrupted. {words}\n", at
        resumed = Stopped(out, None)
        resumed.command()
        assert all(torch.equal(resumed.numbers[name], whole) for name, whole in undisturbed.numbers.items()), at
        kept.add(len(shards))
        at += step
    assert not stopped.taken and at > 1000  # the run has no more lines
    assert kept == {*range(FEW + 1)}
