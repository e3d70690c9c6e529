"""Folders of runs that were damaged, belong to another run, or cannot hold one, met by the command line.

Every other damage to shards and to the manifest is in `tests/runs`, and what `status`, `resume`, `verify`, `merge` and
`diff` refuse in `tests/cli/test_runs.py`.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from identikit.runs import run as runs
from tests.hostile.damages import DAMAGES, STANDINS, Damage
from tests.hostile.judging import refused, refused_or_right
from tests.hostile.made import Done, checked, command, content, copied, ended, environment, saved, texts_file, workshop

TABLES = (".parquet", ".csv", "columns.json")


@cache
def data() -> Path:
    """Return the file of texts that the runs read."""
    return texts_file(workshop())


def started(out: Path | str, model: Path | None = None, texts: Path | None = None) -> Done:
    """Run a command over the texts. Shards are written at once."""
    with mock.patch.object(runs, "SHARD_SECONDS", 0.0):
        return command("attention", "--model", model or saved("bert"), "--data", texts or data(), "--out", out)


@cache
def finished() -> Path:
    """Return the folder of an undisturbed run."""
    out = workshop() / "run"
    started(out)
    assert len(list(out.glob("shard-*"))) > 1, "one shard is not enough to damage one of several"
    return out


def finished_copy(place: Path) -> Path:
    return Path(shutil.copytree(finished(), place / "out"))


def tables(folder: Path) -> dict[str, bytes]:
    """Return the tables of a run."""
    return {name: held for name, held in content(folder).items() if name.endswith(TABLES)}


# Damaged files


def test_a_damaged_shard_alone_is_computed_again(tmp_path: Path):
    out = finished_copy(tmp_path)
    first, *others = sorted(out.glob("shard-*.safetensors"))
    before = {path: path.stat().st_mtime_ns for path in others}
    DAMAGES["with a bit flipped"](first)
    done = started(out)
    assert tables(out) == tables(finished())
    assert first.name in done.stderr
    assert {path: path.stat().st_mtime_ns for path in others} == before


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        *(("shard-*.safetensors", what) for what in STANDINS),
        *(("run.json", what) for what in STANDINS),
        ("columns.json", "cut in half"),
        ("*.parquet", "with a bit flipped"),
        ("*.csv", "gone"),
        ("SHA256SUMS", "of another kind"),
        ("command.json", "empty"),
    ],
)
def test_another_damaged_file_is_refused_or_written_again(pattern: str, what: str, tmp_path: Path):
    out = finished_copy(tmp_path)
    DAMAGES[what](sorted(out.glob(pattern))[0])
    shards = {name: held for name, held in content(out).items() if name.startswith("shard-")}
    with refused_or_right():
        started(out)
        assert tables(out) == tables(finished())
    assert shards.items() <= content(out).items()


# Another run


def swap_words(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {"w5": 6, "w6": 5}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def change_last_bit(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["encoder.layer.1.attention.output.dense.weight"].view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("change", [swap_words, change_last_bit])
def test_an_old_run_is_not_continued_with_another_model(change: Damage, tmp_path: Path):
    out = finished_copy(tmp_path)
    before = content(out)
    folder = copied("bert", tmp_path)
    change(folder)
    with refused():
        started(out, model=folder)
    assert content(out) == before


def test_an_old_run_is_not_continued_with_other_texts(tmp_path: Path):
    out = finished_copy(tmp_path)
    with refused("data"):
        started(out, texts=texts_file(tmp_path, ["w5 w6", "w7 w8"]))


# Places for a run


def made_folder(path: Path) -> Path:
    path.mkdir()
    return path


def made_file(path: Path) -> Path:
    path.write_text("precious")
    return path


def made_link(path: Path, target: str) -> Path:
    path.symlink_to(target)
    return path


OUTS: dict[str, Callable[[Path], Path | str]] = {
    "memory that is gone afterwards": lambda place: "memory://run",
    "a scheme that is not known": lambda place: "nowhere://run",
    "a bucket without its package": lambda place: "s3://bucket/run",
    "an empty name": lambda place: "",
    "a folder under a file": lambda place: made_file(place / "thesis.tex") / "run",
    "a name that is too long": lambda place: place / ("x" * 300),
    "a place where nothing can be made": lambda place: "/proc/identikit/run",
    "a device": lambda place: "/dev/null",
    "a link to itself": lambda place: made_link(place / "loop", "loop"),
    "a named pipe": lambda place: os.mkfifo(place / "pipe") or place / "pipe",
}
FINE_OUTS: dict[str, Callable[[Path], Path | str]] = {
    "a name with marks": lambda place: place / "a'b\"c#d%20e?f*g[h]::i:j",
    "a folder in folders that are not there": lambda place: place / "--a" / "two\nlines" / "~c" / "прогон 👩",
    "a link to a folder": lambda place: made_link(place / "link", made_folder(place / "folder").name),
    "a path with dots and a trailing slash": lambda place: f"{place}/./x/../run/",
}


@pytest.mark.parametrize("what", OUTS)
def test_a_place_that_cannot_hold_a_run_is_refused(what: str, tmp_path: Path):
    out = OUTS[what](tmp_path)
    before = content(tmp_path)
    with refused():
        started(out)
    assert content(tmp_path) == before


@pytest.mark.parametrize("what", FINE_OUTS)
def test_a_place_of_any_name_can_hold_a_run(what: str, tmp_path: Path):
    out = FINE_OUTS[what](tmp_path)
    started(out)
    assert tables(Path(out)) == tables(finished())


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a thesis": lambda out: made_file(out / "thesis.tex"),
    "somebody's hidden partial file": lambda out: made_file(out / ".download.partial"),
    "a partial folder": lambda out: made_file(made_folder(out / "model.partial") / "half.bin"),
    "a shard of nobody's": lambda out: made_file(out / "shard-000000.safetensors"),
    "tables of nobody's": lambda out: made_file(out / "texts.csv"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_nothing_that_was_in_the_folder_before_is_deleted_or_changed(what: str, tmp_path: Path):
    out = made_folder(tmp_path / "out")
    FOREIGN[what](out)
    before = content(out)
    with refused_or_right():
        started(out)
        assert tables(out) == tables(finished())
    assert before.items() <= content(out).items()


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_a_lock_that_stands_for_another_file_is_refused(link: Callable[[Path, Path], None], tmp_path: Path):
    """Older versions of filelock empty what they lock, and follow links."""
    thesis = made_file(tmp_path / "thesis.tex")
    out = made_folder(tmp_path / "out")
    link(out / ".identikit.lock", thesis)
    with refused("identikit.lock"), mock.patch("identikit.runs.lock.FileLock", side_effect=AssertionError):
        started(out)
    assert thesis.read_text() == "precious"


WRITTEN = (".identikit.owner", "run.json", "command.json", "error.json", "plan.json", "shard-*.safetensors", "*.csv")


@pytest.mark.parametrize("pattern", WRITTEN)
def test_what_a_link_in_the_folder_points_to_stays(pattern: str, tmp_path: Path):
    out = finished_copy(tmp_path)
    path = next(iter(sorted(out.glob(pattern))), out / pattern)
    kept = tmp_path / "kept"
    kept.write_bytes(path.read_bytes() if path.exists() else b"precious")
    before = kept.read_bytes()
    path.unlink(missing_ok=True)
    path.symlink_to(kept)
    with refused_or_right():
        started(out)
        assert tables(out) == tables(finished())
    assert kept.read_bytes() == before


@pytest.mark.parametrize("pattern", (".identikit.lock", *WRITTEN))
def test_a_named_pipe_in_the_folder_keeps_nobody_waiting(pattern: str, tmp_path: Path):
    out = finished_copy(tmp_path)
    path = next(iter(sorted(out.glob(pattern))), out / pattern)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    signal.alarm(100)  # a read of the pipe would never end
    try:
        for words in (["status", out], ["verify", out], ["resume", out]):
            done = ended(*words)
            if path.name == "command.json" and words[0] == "verify":  # it tells what it found on the output
                assert done.status == 1 and "it is not a file" in done.stdout
                continue
            with refused_or_right():
                checked(done)
    finally:
        signal.alarm(0)


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("unshare") or bool(subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode),
    reason="no disk can be mounted here",
)
def test_a_read_only_disk_is_refused(tmp_path: Path):
    made_folder(tmp_path / "disk")
    words = ["attention", "--model", saved("bert"), "--data", data(), "--out", tmp_path / "disk" / "run"]
    call = [sys.executable, "-m", "identikit", *map(str, words)]
    shell = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o ro tmpfs disk || exit 99; "$@"', "sh", *call]
    done = subprocess.run(shell, capture_output=True, text=True, env=environment(), cwd=tmp_path)
    with refused():
        checked(Done(done.returncode, done.stdout, done.stderr))
