"""One writer per folder, on a local disk and elsewhere; a dead owner does not keep it."""

import fcntl
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from identikit.attention.dataset import AttentionOptions, attention_tables
from identikit.errors import InputError
from identikit.runs import lock
from identikit.runs.lock import LOCK, NOTE, FolderLock
from identikit.runs.run import Run
from identikit.runs.store import Store
from tests.models import tiny
from tests.runs.made import made_texts, tables

HELD = r"Cannot write to .*: process \d+ on .*, started 20.*, is writing to it\. Wait until it ends, or stop it; then"


class Elsewhere(DirFileSystem):
    """A folder of this disk that looks like storage that has no locks."""

    protocol = "elsewhere"
    root = ""

    def __init__(self, **options):
        super().__init__(Elsewhere.root, LocalFileSystem(), **options)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[str]:
    Elsewhere.root = str(tmp_path)
    Elsewhere.clear_instance_cache()
    fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)
    yield "elsewhere://run"
    Elsewhere.clear_instance_cache()


def refused(folder: Path) -> bool:
    with pytest.raises(InputError, match=HELD), Store(folder, {}).held():
        pass
    return True


def test_two_stores_of_one_process(tmp_path: Path):
    with Store(tmp_path / "run", {}).held() as first:
        assert refused(tmp_path / "run")
        with ThreadPoolExecutor() as threads:
            assert threads.submit(refused, tmp_path / "run").result()
        first.write("one", b"1")
        with first.held():  # the owner may enter again
            first.write("two", b"2")
    with Store(tmp_path / "run", {}).held() as third:
        third.write("three", b"3")


def test_a_file_system_without_locks_is_locked_by_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def none(*given: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with Store(tmp_path / "run", {}).held(), pytest.raises(InputError, match=HELD), Store(tmp_path / "run", {}).held():
        pass
    with Store(tmp_path / "run", {}).held() as again:
        again.write("one", b"1")


def test_a_note_that_cannot_be_written_does_not_keep_the_lock(tmp_path: Path):
    (tmp_path / "run" / NOTE).mkdir(parents=True)
    for number in (b"1", b"2"):
        with Store(tmp_path / "run", {}).held() as store:
            store.write(f"file {number}", number)


def test_a_whole_run_elsewhere(elsewhere: str, tmp_path: Path):
    model = tiny.shared("bert")
    texts = made_texts(5)
    for out in (elsewhere, tmp_path / "here"):
        attention_tables(model, texts, Run(Store(out, {})), AttentionOptions())
    assert tables(tmp_path / "run") == tables(tmp_path / "here") != {}
    assert not {LOCK, NOTE} & {path.name for path in (tmp_path / "run").iterdir()}


def test_an_owner_elsewhere_is_noticed_until_it_is_silent(elsewhere: str, tmp_path: Path):
    owner = {"host": "far away", "process": 7, "since": "2026-01-01T00:00:00+00:00", "key": "k", "beat": time.time()}
    note = tmp_path / "run" / NOTE
    note.parent.mkdir()
    note.write_text(json.dumps(owner))
    with pytest.raises(InputError, match=r"process 7 on far away, started 2026-01-01"), Store(elsewhere, {}).held():
        pass
    note.write_text(json.dumps(owner | {"beat": time.time() - lock.SILENT_SECONDS - 1}))
    with Store(elsewhere, {}).held() as store:
        store.write("one", b"1")
        note.write_text(json.dumps(owner | {"beat": time.time()}))  # it wakes up, and takes the folder for its own
        with pytest.raises(InputError, match=r"process 7 on far away"):
            store.write("two", b"2")
    assert note.exists() and not (tmp_path / "run" / "two").exists()


def test_a_live_owner_is_never_silent(elsewhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.02)
    with Store(elsewhere, {}).held(), pytest.raises(InputError, match=HELD):
        first = json.loads((tmp_path / "run" / NOTE).read_text())
        time.sleep(0.2)
        later = json.loads((tmp_path / "run" / NOTE).read_text())
        assert later["beat"] > first["beat"] + 0.1 and later["since"] == first["since"]
        with Store(elsewhere, {}).held():
            pass


def test_a_damaged_note_is_nobodys(elsewhere: str, tmp_path: Path):
    (tmp_path / "run").mkdir()
    for damaged in (b"", b"{", b"[]", b'{"host": 1}', b"\xff"):
        (tmp_path / "run" / NOTE).write_bytes(damaged)
        found = FolderLock(fsspec.filesystem("elsewhere"), "run")
        assert found.holder() is None
        found.acquire()
        found.release()


def test_a_signal_between_two_levels_loses_neither_the_words_nor_the_lock(tmp_path: Path):
    with pytest.raises(SystemExit) as stopped, Store(tmp_path / "run", {}).held() as store:
        store.write("part-a.json", b"1")
        store.held().__enter__()  # the signal comes before this level is left
        raise SystemExit(143)
    assert "What was computed is kept in" in stopped.value.__notes__[-1]
    with Store(tmp_path / "run", {}).held():
        pass


def test_a_signal_while_a_folder_is_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def stopped(store: Store, name: str, content: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "write", stopped)
    with pytest.raises(KeyboardInterrupt) as error, Store(tmp_path / "run", {}).held():
        pass
    assert error.value.__notes__ == ["Nothing had been computed yet."]
    assert not (tmp_path / "run").exists()
