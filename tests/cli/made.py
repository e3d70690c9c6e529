"""The command line in this process."""

import sys
from contextlib import redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import NamedTuple
from unittest import mock

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


def run(*arguments: str | Path) -> Done:
    """Run a command."""
    out = TextIOWrapper(BytesIO(), encoding="utf-8")
    errors = TextIOWrapper(BytesIO(), encoding="utf-8")
    argv = mock.patch.object(sys, "argv", ["identikit", *map(str, arguments)])
    with argv, redirect_stdout(out), redirect_stderr(errors), pytest.raises(SystemExit) as caught:
        main()
    return Done(int(caught.value.code or 0), text(out), text(errors))


def text(stream: TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()
