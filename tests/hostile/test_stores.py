"""Folders of runs that were damaged, belong to another run, or cannot hold one, met by the command line.

Every other damage to shards and to the manifest is in `tests/runs/test_corruption.py`.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from identikit.results.files import seal, unseal
from identikit.runs import run as runs
from tests.hostile.damages import DAMAGES, STANDINS, Damage, link
from tests.hostile.judging import refused, refused_or_right
from tests.hostile.made import Done, checked, command, content, copied, ended, environment, saved, texts_file, workshop

COMMANDS: dict[str, tuple[str, ...]] = {
    "attention": ("attention", "--model", "bert"),
    "attribution": ("attribution", "--model", "bert", "--probes", "4"),
    "inversion": ("tokens", "--experiment", "inversion", "--model", "llama", "--noise", "0.1"),
}
TABLES = (".parquet", ".csv", "columns.json")


@cache
def data() -> Path:
    """Return the file of texts that the runs read."""
    return texts_file(workshop())


def started(name: str, out: Path | str, model: Path | None = None, texts: Path | None = None) -> Done:
    """Run a command over the texts. Shards are written at once."""
    words = list(COMMANDS[name])
    place = words.index("--model") + 1
    words[place] = str(model or saved(words[place]))
    with mock.patch.object(runs, "SHARD_SECONDS", 0.0):
        return command(*words, "--data", texts or data(), "--out", out)


@cache
def finished(name: str) -> Path:
    """Return the folder of an undisturbed run."""
    out = workshop() / "runs" / name
    started(name, out)
    assert len(list(out.glob("shard-*"))) > 1, "one shard is not enough to damage one of several"
    return out


def finished_copy(name: str, place: Path) -> Path:
    return Path(shutil.copytree(finished(name), place / "out"))


def tables(folder: Path) -> dict[str, bytes]:
    """Return the tables of a run."""
    return {name: held for name, held in content(folder).items() if name.endswith(TABLES)}


# Damaged files


def check_repaired(name: str, out: Path, damage: Damage) -> None:
    """Damage the first shard of a finished run and run it again: it is told, and that shard alone is computed again."""
    first, *others = sorted(out.glob("shard-*.safetensors"))
    before = {path: path.stat().st_mtime_ns for path in others}
    damage(first)
    done = started(name, out)
    assert tables(out) == tables(finished(name))
    assert first.name in done.stderr
    assert {path: path.stat().st_mtime_ns for path in others} == before


@pytest.mark.parametrize(
    "name", ["attention", *(pytest.param(name, marks=pytest.mark.slow) for name in ("attribution", "inversion"))]
)
def test_a_damaged_shard_is_computed_again(name: str, tmp_path: Path):
    check_repaired(name, finished_copy(name, tmp_path), DAMAGES["with a bit flipped in the middle"])


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        *(("shard-*.safetensors", what) for what in STANDINS),
        *(("run.json", what) for what in STANDINS),
        ("columns.json", "cut in half"),
        ("*.parquet", "with a bit flipped in the middle"),
        ("*.csv", "gone"),
        ("SHA256SUMS", "of another kind"),
        ("command.json", "empty"),
    ],
)
def test_another_damaged_file_is_refused_or_written_again(pattern: str, what: str, tmp_path: Path):
    out = finished_copy("attention", tmp_path)
    DAMAGES[what](sorted(out.glob(pattern))[0])
    shards = {name: held for name, held in content(out).items() if name.startswith("shard-")}
    with refused_or_right():
        started("attention", out)
        assert tables(out) == tables(finished("attention"))
    assert shards.items() <= content(out).items()


Tensors = dict[str, torch.Tensor]
About = dict[str, object]


def each(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors, About], None]:
    """Return what changes every tensor of floating point."""

    def changed(tensors: Tensors, _: About) -> None:
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.ndim:
                tensors[name] = change(tensor)

    return changed


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[0] = torch.nan
    return tensor


def rename(tensors: Tensors, _: About) -> None:
    name = min(tensors)
    tensors[f"{name}_other"] = tensors.pop(name)


RESEALED: dict[str, Callable[[Tensors, About], object]] = {
    "with NaN": each(with_nan),
    "with a row too few": each(lambda tensor: tensor[:-1]),
    "with a dimension too many": each(lambda tensor: tensor[None]),
    "with columns cut off": each(lambda tensor: tensor[..., :-1].contiguous()),
    "in half precision": each(torch.Tensor.half),
    "without one of its keys": lambda tensors, about: tensors.pop(min(tensors)),
    "with a key of another name": rename,
    "without a word about it": lambda tensors, about: about.clear(),
    "with lists for words about it": lambda tensors, about: about.update({key: [1] for key in about}),
    "with texts of another hash": lambda tensors, about: about.update(blocks={"0": "0" * 64}),
    "with blocks that there are none of": lambda tensors, about: about.update(blocks={"99": "0" * 64}),
    "with words for blocks": lambda tensors, about: about.update(blocks={"first": "0" * 64}),
}


@pytest.mark.parametrize("what", RESEALED)
def test_a_shard_whose_checksum_is_right_is_still_read_with_care(what: str, tmp_path: Path):
    def reseal(path: Path) -> None:
        tensors, about = map(dict, unseal(path.read_bytes()))
        RESEALED[what](tensors, about)
        path.write_bytes(seal(tensors, about))

    check_repaired("attention", finished_copy("attention", tmp_path), reseal)


# Another run


def config(**fields: object) -> Damage:
    def changed(folder: Path) -> None:
        held = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(held | fields))

    return changed


def swap_words(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {"w5": 6, "w6": 5}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def weight(change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    def changed(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        name = "encoder.layer.1.attention.output.dense.weight"
        tensors[name] = change(tensors[name]).contiguous()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return changed


def last_bit(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
    return tensor


ROTARY = config(rope_theta=77.0, rope_parameters={"rope_type": "default", "rope_theta": 77.0})
MODELS: dict[str, tuple[str, Damage]] = {
    "a changed tokenizer": ("attention", swap_words),
    "another activation": ("attention", config(hidden_act="relu")),
    "one bit of a weight changed": ("attention", weight(last_bit)),
    "two rows of a weight exchanged": ("attention", weight(lambda tensor: tensor.roll(1, 0))),  # sums stay
    "another base of its rotary positions": ("inversion", ROTARY),
}


@pytest.mark.parametrize("what", MODELS)
def test_an_old_run_is_not_continued_with_another_model(what: str, tmp_path: Path):
    name, change = MODELS[what]
    out = finished_copy(name, tmp_path)
    before = content(out)
    words = COMMANDS[name]
    folder = copied(words[words.index("--model") + 1], tmp_path)
    change(folder)
    with refused():
        started(name, out, model=folder)
    assert content(out) == before


def test_an_old_run_is_not_continued_with_other_texts(tmp_path: Path):
    out = finished_copy("attention", tmp_path)
    with refused("data"):
        started("attention", out, texts=texts_file(tmp_path, ["w5 w6", "w7 w8"]))


@pytest.mark.parametrize("manifest", ["[]", "null", '{"recorded": {}}', '{"run": []}', '{"run": "attention"}'])
def test_a_manifest_that_is_none_is_refused(manifest: str, tmp_path: Path):
    out = finished_copy("attention", tmp_path)
    (out / "run.json").write_text(manifest)
    with refused("run.json"):
        started("attention", out)


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
    "a file": lambda place: made_file(place / "thesis.tex"),
    "a folder under a file": lambda place: made_file(place / "thesis.tex") / "run",
    "a name that is too long": lambda place: place / ("x" * 300),
    "a place where nothing can be made": lambda place: "/proc/identikit/run",
    "a device": lambda place: "/dev/null",
    "a link to itself": lambda place: made_link(place / "loop", "loop"),
    "a named pipe": lambda place: os.mkfifo(place / "pipe") or place / "pipe",
}
FINE_OUTS: dict[str, Callable[[Path], Path | str]] = {
    "a name of other letters": lambda place: place / "прогон 👩",
    "a name with marks": lambda place: place / "a'b\"c#d%20e?f*g[h]",
    "a name with a colon": lambda place: place / "c:d",
    "a folder in folders that are not there": lambda place: place / "--a" / "two\nlines" / "~c",
    "a link to a folder": lambda place: made_link(place / "link", made_folder(place / "folder").name),
    "a path with dots and a trailing slash": lambda place: f"{place}/./x/../run/",
}


@pytest.mark.parametrize("what", OUTS)
def test_a_place_that_cannot_hold_a_run_is_refused(what: str, tmp_path: Path):
    out = OUTS[what](tmp_path)
    before = content(tmp_path)
    with refused():
        started("attention", out)
    assert content(tmp_path) == before


@pytest.mark.parametrize("what", FINE_OUTS)
def test_a_place_of_any_name_can_hold_a_run(what: str, tmp_path: Path):
    out = FINE_OUTS[what](tmp_path)
    started("attention", out)
    assert tables(Path(out)) == tables(finished("attention"))


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a thesis": lambda out: made_file(out / "thesis.tex"),
    "a hidden file": lambda out: made_file(out / ".git"),
    "somebody's hidden partial file": lambda out: made_file(out / ".download.partial"),
    "a partial folder": lambda out: made_file(made_folder(out / "model.partial") / "half.bin"),
    "a shard of nobody's": lambda out: made_file(out / "shard-000000.safetensors"),
    "tables of nobody's": lambda out: made_file(out / "texts.csv"),
    "a lock of nobody's": lambda out: made_file(out / ".lock"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_nothing_that_was_in_the_folder_before_is_deleted_or_changed(what: str, tmp_path: Path):
    out = made_folder(tmp_path / "out")
    FOREIGN[what](out)
    before = content(out)
    with refused_or_right():
        started("attention", out)
        assert tables(out) == tables(finished("attention"))
    assert before.items() <= content(out).items()


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


# Commands that read runs

NO_RUNS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda place: place / "nothing",
    "an empty folder": lambda place: made_folder(place / "empty"),
    "a file": lambda place: made_file(place / "file"),
    "a folder of something else": lambda place: made_file(made_folder(place / "folder") / "thesis.tex").parent,
    "a damaged manifest": lambda place: made_file(made_folder(place / "damaged") / "run.json").parent,
    "memory": lambda place: "memory://run",
    "an empty name": lambda place: "",
}


@pytest.mark.parametrize("word", ["status", "resume", "verify", "merge", "diff"])
@pytest.mark.parametrize("what", NO_RUNS)
def test_a_command_that_reads_runs_refuses_what_is_none(word: str, what: str, tmp_path: Path):
    words = [word, str(NO_RUNS[what](tmp_path))]
    if word == "diff":
        words.append(str(finished("attention")))
    before = content(tmp_path)
    with refused():
        command(*words)
    assert content(tmp_path) == before


@pytest.mark.parametrize("pattern", ["shard-*.safetensors", "*.csv"])
@pytest.mark.parametrize("what", ["cut in half", *STANDINS, "replaced by an endless device"])
def test_verify_names_a_damaged_file_and_changes_nothing(pattern: str, what: str, tmp_path: Path):
    out = finished_copy("attention", tmp_path)
    file = sorted(out.glob(pattern))[0]
    (DAMAGES | {"replaced by an endless device": link("/dev/zero")})[what](file)
    before = sorted(out.iterdir())
    done = ended("verify", out)
    lines = (done.stdout + done.stderr).splitlines()
    assert done.status == 1
    assert any(file.name in line for line in lines if line.startswith(("Wrong: ", "identikit: ")))
    assert sorted(out.iterdir()) == before
