"""Compile the simplex method in a process of its own, while this one loads libraries and the model.

Compiling takes numba some ten seconds, once on a machine, on one core. It keeps what it made on disk, where this
process then finds it.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

_COMPILE = (
    "import torch; from identikit.maths.polytope.exact import compile_solver; compile_solver(torch.device('cpu'))"
)
_compiling: list[subprocess.Popen[bytes]] = []


def compile_ahead() -> None:
    """Start to compile, where nothing that was compiled is kept and there is a core to spare."""
    kept = os.environ.get("NUMBA_CACHE_DIR")
    folder = Path(__file__).parent / "__pycache__" if kept is None else Path(kept)
    if find_spec("numba") is None or (os.cpu_count() or 1) < 2 or any(folder.rglob("simplex.solve_rows-*.nbi")):
        return
    nothing = subprocess.DEVNULL
    _compiling.append(subprocess.Popen([sys.executable, "-c", _COMPILE], stdin=nothing, stdout=nothing, stderr=nothing))


def is_compiling() -> bool:
    """Say whether the compilation that was started ahead is still running."""
    return any(process.poll() is None for process in _compiling)


def wait_for_compiler() -> None:
    """Wait until what was started ahead is there; if it failed, this process compiles."""
    while _compiling:
        _compiling.pop().wait()
