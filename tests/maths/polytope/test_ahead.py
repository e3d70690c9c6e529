"""Compiling ahead leaves what this process then uses, and nothing depends on it."""

import os
import subprocess
import sys

import pytest

from identikit.maths.polytope import ahead

pytestmark = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="compiles ahead where a core is to spare")


def test_nothing_starts_where_compiled_code_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    (tmp_path / "polytope").mkdir()
    (tmp_path / "polytope" / "simplex.solve_rows-1.py311.nbi").touch()
    ahead.compile_ahead()
    assert not ahead.is_compiling()


def test_one_that_fails_is_waited_for_and_forgotten(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    ahead.compile_ahead()
    ahead.wait_for_compiler()
    assert not ahead.is_compiling()


@pytest.mark.slow
def test_what_is_compiled_ahead_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    ahead.compile_ahead()
    assert ahead.is_compiling()
    ahead.wait_for_compiler()
    script = (
        "import torch; from identikit.maths.polytope.exact import compile_solver as go; go(torch.device('cpu'));"
        "from identikit.maths.polytope.simplex import solve_rows; print(sum(solve_rows.stats.cache_hits.values()))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(found.stdout) > 0
