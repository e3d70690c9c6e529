"""A hub without a network: a cache laid out as huggingface_hub lays it out, and a process that reads from it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path


def put_in_cache(home: Path, name: str, folder: Path, commit: str) -> None:
    """Put a folder into the cache as the only commit of the repository someone/`name`."""
    repository = home / "hub" / f"models--someone--{name}"
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)


def run_offline(home: Path, script: str) -> str:
    """Run a script in a new process that has only this cache, and return what it prints."""
    environment = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
