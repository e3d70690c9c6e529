"""A command that is killed at any moment and run again ends with the same tables, byte for byte."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.runs.made import ended, forked, killed, save_model, save_texts, shards, tables, wait_for

KILLS = 3


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("kill")
    save_model(place / "model")
    save_texts(place / "texts.txt", 60)
    return place


def command(place: Path, out: Path) -> list[str]:
    given = {"--model": place / "model", "--data": place / "texts.txt", "--out": out, "--threads": 1}
    return ["attention", *(str(part) for pair in given.items() for part in pair)]


def test_killed_at_random_moments(place: Path, tmp_path: Path):
    assert ended(forked(command(place, tmp_path / "whole"))) == 0
    chance = random.Random(0)
    out = tmp_path / "out"
    kills = 0
    for _ in range(KILLS):
        done = len(shards(out))
        process = forked(command(place, out))
        wait_for(lambda done=done: len(shards(out)) > done)
        time.sleep(chance.uniform(0, 0.05))
        kills += killed(process)
    assert kills == KILLS and not (out / "SHA256SUMS").exists()
    before = {path.name: path.stat().st_mtime_ns for path in shards(out)}
    assert len(before) >= KILLS
    assert ended(forked(command(place, out))) == 0
    assert tables(out) == tables(tmp_path / "whole") and (out / "SHA256SUMS").exists()
    assert {path.name: path.stat().st_mtime_ns for path in shards(out)}.items() >= before.items()  # not computed again
    assert not [path for path in out.iterdir() if path.name.endswith(".partial")]


def test_ctrl_c_is_one_line_and_keeps_what_is_done(place: Path, tmp_path: Path):
    out = tmp_path / "out"
    errors = tmp_path / "errors"
    process = forked(command(place, out), errors)
    wait_for(lambda: len(shards(out)) > 1)
    os.killpg(process, signal.SIGINT)
    assert ended(process) == 130
    assert errors.read_text() == (
        "identikit: Interrupted. Run the same command again: what its folder holds is not computed again.\n"
    )
    done = len(shards(out))
    assert ended(forked(command(place, out))) == 0 and len(shards(out)) > done > 1


def test_another_process_is_told_who_writes(place: Path, tmp_path: Path):
    out = tmp_path / "out"
    errors = tmp_path / "errors"
    first = forked(command(place, out))
    wait_for(lambda: shards(out))
    os.kill(first, signal.SIGSTOP)  # it lives, and does not end meanwhile
    assert ended(forked(command(place, out), errors)) == 1
    said = errors.read_text()
    assert said.startswith(f"identikit: Cannot write to {out}: process {first} on ") and said.count("\n") == 1
    assert not (out / "error.json").exists()  # the one that works has not failed
    assert killed(first)
    assert ended(forked(command(place, out), errors)) == 0
    assert errors.read_text() == said


def test_a_full_disk_is_said_and_the_run_goes_on_when_there_is_room(place: Path, tmp_path: Path):
    resource = pytest.importorskip("resource")
    assert ended(forked(command(place, tmp_path / "whole"))) == 0
    out = tmp_path / "out"
    errors = tmp_path / "errors"
    sizes = sorted(path.stat().st_size for path in shards(tmp_path / "whole"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[len(sizes) // 2], before[1]))  # half of the shards fit
    try:
        process = forked(command(place, out), errors)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert ended(process) == 1
    said = errors.read_text()
    assert f" to {out}: File too large. Make room there" in said and said.count("\n") == 1, said
    assert json.loads((out / "error.json").read_text())["error"] in said
    assert not [path for path in out.iterdir() if path.name.endswith(".partial")]
    assert ended(forked(command(place, out), errors)) == 0 and errors.read_text() == said
    assert tables(out) == tables(tmp_path / "whole") and not (out / "error.json").exists()
