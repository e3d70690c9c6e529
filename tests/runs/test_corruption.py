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
from identikit.paper.inputs import INPUTS
from identikit.paper.work import Effort, Work
from identikit.runs import run as runs
from identikit.runs.run import Run
from identikit.runs.store import MANIFEST, Store
from identikit.tokens.dataset import IdentifiabilityOptions, identifiability_tables
from tests.models import tiny
from tests.runs.made import made_texts, shards, tables

SETTINGS = {"seed": 1}
RECORDED = {"date": "today", "machine": "one"}


def turned(content: bytes, chance: random.Random) -> bytes:
    """Return the content with one bit turned."""
    place = chance.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]


DAMAGE: dict[str, Callable[[bytes, random.Random], bytes]] = {  # `test_store.py` tries every byte of a seal
    "a bit": turned,
    "cut": lambda content, chance: content[: chance.randrange(1, len(content))],
}


def computed_again(folder: Path, compute: Callable[[], Any]) -> list[str]:
    """Compute once more into a folder, and return what was said."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compute()
    return [str(one.message) for one in said]


def check(files: list[Path], compute: Callable[[], Any], folder: Path) -> None:
    """Damage each file in every way; each time one line is said, and all bytes come out as before."""
    chance = random.Random(0)
    before = tables(folder)
    whole = {path: path.read_bytes() for path in files}
    for path, content in whole.items():
        for name, damage in DAMAGE.items():
            path.write_bytes(damage(content, chance))
            said = computed_again(folder, compute)
            assert len(said) == 1, (path, name, said)
            assert said[0].startswith(f"Cannot use {path}: ") and said[0].endswith(" will be computed again."), said
            assert path.read_bytes() == content or path.name.startswith(("shard-", "collapse"))  # these note times
            path.write_bytes(content)
    assert tables(folder) == before and not computed_again(folder, compute)


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


def test_parts(tmp_path: Path):
    texts = made_texts(30)
    options = IdentifiabilityOptions(maps=("naive",), folds=1)

    def compute() -> None:
        run = Run(Store(tmp_path / "run", SETTINGS))
        identifiability_tables(tiny.shared("bert"), texts, run, options)

    compute()
    files = sorted((tmp_path / "run").glob("part-*.json"))
    assert len(files) == 3
    check(files[:1], compute, tmp_path / "run")


@pytest.mark.parametrize("name", ["sentence", "collapse"])
def test_inputs_of_the_paper(name: str, tmp_path: Path):
    work = Work(
        tiny.shared("bert"), "made", made_texts(30), Effort(probes=2, folds=1, learning_rates=(0.001,), epochs=1)
    )
    store = INPUTS[name].store(work, str(tmp_path))

    def compute() -> Any:
        return INPUTS[name].gathered(work, INPUTS[name].store(work, str(tmp_path)))

    compute()
    files = [path for path in Path(store.folder).iterdir() if path.name.startswith((name, "part-"))]
    assert len(files) == 1
    check(files, compute, tmp_path)


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
