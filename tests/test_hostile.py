"""Wrong arguments of every public function, as a user without shape checks meets them."""

import os
import subprocess
import sys
from pathlib import Path


def test_wrong_arguments_are_refused_in_words(tmp_path: Path):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "IDENTIKIT_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.hostile"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[1])
    assert done.returncode == 0 and done.stdout == "", done.stdout + done.stderr
