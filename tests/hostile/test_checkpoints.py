"""Folders of checkpoints in which files are missing, lead elsewhere, or want to run code, and weights that are odd.

Damaged files, and weights that do not belong to the model, are in `tests/models/test_checkpoint.py`.
"""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

import identikit as ik
from tests.hostile.judging import refused
from tests.hostile.made import TEXT, command, copied, right, same

WEIGHTS = "model.safetensors"


def test_the_command_line_refuses_damaged_weights_by_their_folder(tmp_path: Path):
    folder = copied("bert", tmp_path)
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-9])
    with refused("bert"):
        command("explain", "w5 w6", "--model", folder)


class Evil:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch '{self.mark}'",)


def add_pickle(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(folder / "ran")))


def add_code(folder: Path, **fields: str) -> None:
    """Let the configuration ask for code of its own, which leaves a file behind."""
    (folder / "modeling_evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\nraise SystemExit\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoModel": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Evil"}} | fields
    (folder / "config.json").write_text(json.dumps(config))


def instead_of_weights(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        make(folder / WEIGHTS)

    return changed


def link_weights(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder.parent / "blob")
    (folder / WEIGHTS).symlink_to("../blob")


FOLDERS: dict[str, Callable[[Path], object]] = {
    "only a pickle": instead_of_weights(lambda path: add_pickle(path.parent)),
    "code for an unknown architecture": lambda folder: add_code(folder, model_type="evil"),
    "a folder for weights": instead_of_weights(Path.mkdir),
    "weights that link to themselves": instead_of_weights(lambda path: path.symlink_to(WEIGHTS)),
    "a pickle called safetensors": instead_of_weights(
        lambda path: path.write_bytes(pickle.dumps(Evil(path.parent / "ran")))
    ),
}
FINE_FOLDERS: dict[str, Callable[[Path], object]] = {
    "a pickle beside the weights": add_pickle,
    "code for a known architecture": add_code,
    "weights that are a link": link_weights,
    "files of the user's": lambda folder: (folder / "thesis.safetensors.bak").write_text("precious"),
}


@pytest.mark.parametrize("what", FOLDERS)
def test_a_folder_that_is_no_checkpoint_is_refused_and_runs_nothing(what: str, tmp_path: Path):
    folder = copied("bert", tmp_path)
    FOLDERS[what](folder)
    with refused():
        ik.load(folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("what", FINE_FOLDERS)
def test_a_folder_that_holds_more_is_read_and_runs_nothing(what: str, tmp_path: Path):
    folder = copied("bert", tmp_path)
    FINE_FOLDERS[what](folder)
    same(ik.effective_attention(ik.load(folder), TEXT), right("bert"))
    assert not (folder / "ran").exists()
