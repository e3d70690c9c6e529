"""Compile the simplex method in a process of its own, while this one loads libraries and the model.

Compiling takes numba some ten seconds, once on a machine, on one core. It caches the result on disk, where this process
then finds it.
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
    """Start to compile, unless compiled code is cached or there is no core to spare."""
    cache = os.environ.get("NUMBA_CACHE_DIR")
    folder = Path(__file__).parent / "__pycache__" if cache is None else Path(cache)
    if find_spec("numba") is None or (os.cpu_count() or 1) < 2 or any(folder.rglob("simplex.solve_rows-*.nbi")):
        return
    nothing = subprocess.DEVNULL
    _compiling.append(subprocess.Popen([sys.executable, "-c", _COMPILE], stdin=nothing, stdout=nothing, stderr=nothing))


def is_compiling() -> bool:
    """Return whether the compilation that was started ahead is still running."""
    return any(process.poll() is None for process in _compiling)


def wait_for_compiler() -> None:
    """Wait for the compilation that was started ahead; if it failed, this process compiles."""
    while _compiling:
        _compiling.pop().wait()
