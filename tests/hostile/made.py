"""What the tests start from: tiny models on disk, a finished run, and answers computed by other means."""

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as hf

import identikit as ik
from tests.cli.made import Done
from tests.cli.made import run as ended
from tests.hostile.judging import Refused
from tests.models import made as tiny_models

TEXT = "w5 w6 w7 w8 w9 w10 w11 w12 w13"
TEXTS = [f"w{i} w{i + 1} w{i + 2}" for i in range(10, 46)]  # more than a block of a run holds


@cache
def workshop() -> Path:
    """Return a folder that lasts as long as the process."""
    folder = tempfile.mkdtemp(prefix="hostile-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@cache
def saved(name: str) -> Path:
    """Return the folder of the tiny model called `name`, with its tokenizer; copy it before changing anything."""
    folder = workshop() / name
    hf.utils.logging.disable_progress_bar()
    tiny_models.saved(folder, name)
    hf.utils.logging.enable_progress_bar()
    return folder


def copied(name: str, place: Path) -> Path:
    """Return a copy of a tiny model's folder that a test may damage."""
    return Path(shutil.copytree(saved(name), place / name))


def texts_file(place: Path, texts: list[str] | None = None) -> Path:
    """Write texts, one per line."""
    path = place / "texts.txt"
    path.write_text("\n".join(texts or TEXTS) + "\n")
    return path


# The command line


def command(*arguments: str | Path) -> Done:
    """Run the command line in this process; a refusal raises `Refused` with its message."""
    return checked(ended(*arguments))


def process(*arguments: str | Path, first: str = "", **variables: str) -> Done:
    """Run the command line in a process of its own, after the Python statements of `first`."""
    start = f"{first}\nimport sys; sys.argv[0] = 'identikit'\nfrom identikit.__main__ import main\nmain()"
    call = [sys.executable, "-c", start, *map(str, arguments)]
    done = subprocess.run(call, env=environment() | variables, timeout=200, capture_output=True)
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())


def environment() -> dict[str, str]:
    """Return this process's environment, with a cache of the tests' own."""
    return os.environ | {"IDENTIKIT_CACHE": str(workshop() / "cache")}


def checked(done: Done) -> Done:
    """Return a command that went through; raise `Refused` for a refusal in one line. Any other end is a fault."""
    assert "Traceback" not in done.stderr, done.stderr
    if done.status == 0:
        return done
    lines = done.stderr.strip().splitlines()
    if done.status == 2 and lines and lines[-1].startswith("Error: "):
        # How to use the command, and a sentence of the option parser's, which has no full stop.
        raise Refused(f"{lines[-1].removeprefix('Error: ').removesuffix('.')}.")
    assert done.status in (1, 2) and not done.stdout, done
    assert len(lines) == 1 and lines[0].startswith("identikit: "), done
    raise Refused(lines[0].removeprefix("identikit: "))


def strict_json(text: str) -> Any:
    """Read JSON as its standard says: NaN and Infinity are refused."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in JSON")

    return json.loads(text, parse_constant=refuse)


# Right answers


@cache
def right(name: str, text: Any = TEXT) -> Any:
    """Return the effective attention of an undamaged tiny model, computed once."""
    return ik.effective_attention(ik.load(saved(name)), text)


def same(result: Any, expected: Any, *, within: float = 1e-5) -> None:
    """Assert that two results hold the same numbers; NaN is only equal to NaN."""
    assert type(result) is type(expected)
    assert result.tokens == expected.tokens and result.arrays == expected.arrays
    for name in expected.arrays:
        array = torch.as_tensor(result.array(name)).double()
        wanted = torch.as_tensor(expected.array(name)).double()
        assert array.shape == wanted.shape, name
        assert torch.allclose(array, wanted, rtol=within, atol=within, equal_nan=True), name


def stock_attention(model: hf.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Return raw attention (layer, head, query, key) as transformers itself computes it, one text without padding."""
    return torch.cat(tiny_models.stock_attention(model, input_ids=torch.tensor([ids]))).double()


def content(folder: Path) -> dict[str, bytes]:
    """Return every file under a folder, by its path in there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
