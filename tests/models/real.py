"""Real pretrained models: the packaged MiniLM, and a small causal model where the machine has one."""

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[3] / "shared"
STORIES = SHARED / "models" / "stories15m"

needs_stories = pytest.mark.skipif(not STORIES.is_dir(), reason="no causal model at ../shared/models/stories15m")
needs_data = pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="no data at ../shared/data")
