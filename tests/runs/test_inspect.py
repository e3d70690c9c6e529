"""What is read from a folder: right counts, and every kind of damage found, whoever wrote it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from identikit.errors import InputError
from identikit.results.files import seal_record
from identikit.runs.inspect import (
    Amount,
    input_folders,
    list_briefly,
    missing_portions,
    open_run,
    portion_folders,
    state,
    state_lines,
)
from identikit.runs.lock import NOTE, FolderLock
from identikit.runs.manifest import note_command, noted_command
from identikit.runs.store import PLAN, Store


def shard(store: Store, *numbers: int, **about: Any) -> None:
    noted = {"texts": numbers, "sha256": "hash", "tokens": 30, "seconds": 1.5} | about
    store.write_tensors(f"shard-{min(numbers):06d}.safetensors", {"x": torch.zeros(2)}, noted)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Half a run: texts 0 and 2 of four."""
    store = Store(tmp_path / "run", {"command": "attention"}, {"date": "today"})
    store.write_json(PLAN, {"texts": [0, 1, 2, 3], "tokens": 120})
    shard(store, 0)
    shard(store, 2)
    return store


def test_counts_rate_and_time_left(store: Store):
    found = state(store.folder)
    assert found.done == (0, 2) and found.missing == (1, 3) and found.unit == "texts" and not found.complete
    assert found.tokens == Amount(60, 120) and found.share == 0.5
    assert found.rate == 20 and found.seconds_left == 3 and found.sealed == 3 and found.damaged == {}
    json.dumps(found.to_dict(), allow_nan=False)
    assert "Missing: texts 1, 3." in state_lines(found)


def test_parts_have_names(tmp_path: Path):
    store = Store(tmp_path / "run", {"command": "tokens", "shard": "1/2"})
    store.write_json(PLAN, {"parts": ["naive-0", "naive-1"]})
    store.write_json("part-naive-0.json", [])
    found = state(str(tmp_path / "run"))
    assert found.done == ("naive-0",) and found.missing == ("naive-1",) and found.share == 0.5 and found.rate is None
    store.write_json("part-naive-1.json", [])
    assert state(str(tmp_path / "run")).complete  # a shard has no tables
    store.write_json("part-naive-2.json", [])
    assert state(str(tmp_path / "run")).damaged == {"part-naive-2.json": "naive-2 is not one of the run's parts"}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"numbers": (1, 2)}, "text 2 is also in"),
        ({"numbers": (7,)}, "7 is not one of the run's texts"),
        ({"numbers": (1,), "texts": {"one": "hash"}}, "does not say which texts"),
        ({"numbers": (1,), "tokens": None}, "does not say how much"),
    ],
)
def test_a_sealed_shard_is_not_trusted(store: Store, given: dict[str, Any], why: str):
    shard(store, *given.pop("numbers"), **given)
    damaged = " ".join(state(store.folder).damaged.values())
    assert why in damaged


@pytest.mark.parametrize("plan", [[0, 4], {"texts": [0, "1"]}, {"texts": "many"}, {"texts": 10**30}, {"parts": 3}])
def test_a_plan_that_makes_no_sense_is_damaged(store: Store, plan: Any):
    store.write_json("plan.json", plan)
    found = state(store.folder)
    assert list(found.damaged) == ["plan.json"] and found.missing == () and found.done


def test_a_manifest_that_is_damaged_or_not_sealed_is_refused(tmp_path: Path):
    for content in (b"", b"[]", b'{"run": {}, "recorded": {}}', b"\xff", seal_record({"run": 3, "recorded": {}})):
        (tmp_path / "run.json").write_bytes(content)
        with pytest.raises(InputError, match=r"run.json is damaged"):
            open_run(str(tmp_path))


def test_a_note_of_a_killed_owner_is_not_taken_for_one_that_lives(store: Store):
    """Its process number may be another's by now; the system's lock tells."""
    lock = FolderLock(store.files, store.folder)
    lock.acquire()
    held = Path(store.folder, NOTE).read_text()
    assert state(store.folder).to_dict()["writer"] == json.loads(held)
    lock.release()
    Path(store.folder, NOTE).write_text(held)
    assert state(store.folder).writer is None
    Path(store.folder, NOTE).write_text('{"host": 1, "process": [], "since": 2, "beat": "x"}')
    assert state(store.folder).writer is None


def test_folders_within_folders(tmp_path: Path):
    for name in ("shard-0002-of-0003", "inputs/mrpc/attention", "inputs/mrpc/rates", "other"):
        Store(tmp_path / name, {}).write("x", b"")
    folder = str(tmp_path)
    assert portion_folders(folder) == {(2, 3): f"{folder}/shard-0002-of-0003"}
    assert missing_portions(portion_folders(folder)) == ["shard-0001-of-0003", "shard-0003-of-0003"]
    assert input_folders(folder) == [f"{folder}/inputs/mrpc/attention", f"{folder}/inputs/mrpc/rates"]


def test_lists_are_short():
    assert list_briefly([1, 2, 3, 5]) == "1 to 3, 5" and list_briefly(["a", "b"]) == "a, b"
    assert list_briefly(range(0, 100, 2)) == "0, 2, 4, 6, 8, 10, 12, 14, …"


def test_a_command_is_noted_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    store = Store("run/shard-0001-of-0002", {})
    note_command(store, "attention", {"data": "texts.txt", "out": "run", "shard": "1/2", "as_json": True})
    monkeypatch.chdir(tmp_path / "run" / "shard-0001-of-0002")
    found = noted_command(".")
    assert found.arguments == {"data": "texts.txt", "out": str(tmp_path / "run"), "shard": "1/2"}
    with found.in_working_folder():
        assert Path.cwd() == tmp_path
    with found._replace(working_folder="/no/such/folder").in_working_folder():
        assert Path.cwd() != tmp_path


def test_a_file_is_not_called_a_missing_folder(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for name, why in (("file", "it is a file"), ("nothing", "there is no such folder")):
        with pytest.raises(InputError, match=why):
            open_run(str(tmp_path / name))
