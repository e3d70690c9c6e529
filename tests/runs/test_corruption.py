"""Whatever happens to a file of a run is noticed and said, and the tables come out the same."""

import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from identikit.attention.dataset import AttentionOptions, attention_tables
from identikit.errors import InputError
from identikit.runs import run as runs
from identikit.runs.run import Run
from identikit.runs.store import MANIFEST, Store
from tests.models import tiny
from tests.runs.made import made_texts, shards, tables

SETTINGS = {"seed": 1}
RECORDED = {"date": "today", "machine": "one"}


def turned(content: bytes, chance: random.Random) -> bytes:
    """Return the content with one bit turned."""
    place = chance.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]


def computed_again(folder: Path, compute: Callable[[], Any]) -> list[str]:
    """Compute once more into a folder, and return what was said."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compute()
    return [str(one.message) for one in said]


@pytest.fixture
def attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    monkeypatch.setattr(runs, "SHARD_SECONDS", 0.0)
    texts = made_texts(10)

    def compute() -> None:
        store = Store(tmp_path / "run", SETTINGS, RECORDED)
        attention_tables(tiny.shared("bert"), texts, Run(store), AttentionOptions())

    compute()
    return compute


def test_shards_that_changed_places(attention: Callable[[], Any], tmp_path: Path):
    before = tables(tmp_path / "run")
    first, second, *_ = shards(tmp_path / "run")
    one = first.read_bytes()
    other = second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    said = computed_again(tmp_path, attention)
    assert len(said) == 2 and all("its texts are not those that its name says" in line for line in said)
    first.write_bytes(other)  # a copy of another
    assert len(computed_again(tmp_path, attention)) == 1
    (tmp_path / "run" / "shard-notes.safetensors").write_bytes(one)
    assert len(computed_again(tmp_path, attention)) == 1
    assert tables(tmp_path / "run") == before and not computed_again(tmp_path, attention)


def test_the_manifest(attention: Callable[[], Any], tmp_path: Path):
    path = tmp_path / "run" / MANIFEST
    chance = random.Random(0)
    content = path.read_bytes()
    for damaged in (turned(content, chance), b"", b"[]", b'{"run": 1}'):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=rf"^Cannot resume .*: {MANIFEST} is damaged\."):
            attention()
    path.unlink()
    with pytest.raises(InputError, match=f"holds files but no {MANIFEST}"):
        attention()
    path.write_bytes(content)
    assert not computed_again(tmp_path, attention)
    assert json.loads(content) == {"sealed": json.loads(content)["sealed"], "run": SETTINGS, "recorded": RECORDED}
