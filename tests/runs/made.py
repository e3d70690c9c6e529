"""A tiny model and texts on disk, jobs for engines, and the command line in a process of its own."""

import hashlib
import math
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from identikit.__main__ import main
from identikit.cli import terminal
from identikit.errors import InputError
from identikit.models.model import Model
from identikit.progress import Progress
from identikit.runs import run as runs
from tests.models.made import saved

WORDS = [f"w{i}" for i in range(4, 30)]
COMMANDS = {
    "attention": ["attention", "--intervals", "2"],
    "attribution": ["attribution", "--probes", "2"],
    "tokens": ["tokens", "--map", "naive", "--map", "ridge", "--folds", "2"],
    "measures": ["measures", "--measure", "mean", "--measure", "rollout"],
    "evaluate": ["evaluate", "--measure", "mean", "--measure", "token attribution", "--beam", "1", "--probes", "2"],
    "inversion": ["tokens", "--experiment", "inversion", "--noise", "0", "--noise", "1"],
    "reproduce": ["reproduce", "fig1a", "fig3a", "fig2b", "--first", "30"],
}


def save_model(folder: Path, name: str = "bert") -> str:
    return str(saved(folder, name))


def made_texts(number: int, seed: int = 0, longest: int = 12) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=chance.randint(2, longest))) for _ in range(number)]


def save_texts(path: Path, number: int, longest: int = 12) -> str:
    path.write_text("".join(f"{text}\n" for text in made_texts(number, longest=longest)))
    return str(path)


def tables(folder: str | Path) -> dict[str, str]:
    """Return the SHA-256 of every table in a folder and those under it."""
    found = sorted(path for kind in ("*.parquet", "*.csv") for path in Path(folder).rglob(kind))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def forked(arguments: Sequence[str], errors: Path | None = None, seconds: float = 0.0) -> int:
    """Run the command line in a process of its own, forked so that nothing is imported again; return its number.

    What is done is written after so many seconds at most: with 0, each text by itself.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that other threads may hold locks
        process = os.fork()
    if process:
        return process
    status = 70
    try:
        os.setsid()  # a group of its own, which Ctrl-C would reach as a whole
        os.dup2(os.open(errors or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stdout, sys.stderr = (os.fdopen(one, "w", closefd=False) for one in (1, 2))
        warnings.resetwarnings()
        torch.set_num_threads(1)
        runs.SHARD_SECONDS = seconds
        terminal.QUIET_SECONDS = math.inf  # no progress among the errors, however slow the machine
        sys.argv = ["identikit", *arguments]
        main()
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    finally:
        sys.stderr.flush()
        os._exit(status)


def ended(process: int) -> int:
    """Wait for a process, and return its status; negative is the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def killed(process: int) -> bool:
    """Kill a process, and say whether it was still running."""
    os.kill(process, signal.SIGKILL)
    return ended(process) == -signal.SIGKILL


def wait_for(reached: Callable[[], Any], seconds: float = 240.0) -> None:
    until = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.005)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


@dataclass(frozen=True)
class Squares:
    """Squares numbers. One kills its process the first time, one warns, and one may be refused."""

    marker: str = ""
    deadly: int | None = None
    warns: int | None = None
    refused: int | None = None

    def compute(self, model: Model, task: int, progress: Progress) -> dict[str, int]:
        if task == self.deadly and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if task == self.warns:
            warnings.warn(f"{task} is odd.", stacklevel=2)
        if task == self.refused:
            raise InputError(f"Computing {task}: it is refused.")
        return {"square": task * task, "process": os.getpid(), "threads": torch.get_num_threads()}
