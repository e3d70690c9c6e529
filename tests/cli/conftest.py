"""The command line in this process."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from identikit.__main__ import main


class Done(NamedTuple):
    status: int
    stdout: str
    stderr: str

    def refused(self, words: str, status: int = 1) -> bool:
        """Say whether the command ended in one line with these words, and printed nothing else."""
        in_one_line = self.stderr.startswith("identikit: ") and self.stderr.count("\n") == 1
        return self.status == status and self.stdout == "" and in_one_line and words in self.stderr


Command = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that runs a command."""

    def run(*arguments: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["identikit", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return Done(int(caught.value.code or 0), *capsys.readouterr())

    return run
