"""Folders of checkpoints in which files are missing, lead elsewhere, belong to another model, or want to run code."""

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.hostile.cases import Case, crossed, proved
from tests.hostile.checkpoints import MODELS, WEIGHTS, prove_loaded
from tests.hostile.made import copied, saved


def cases() -> Iterator[Case]:
    """Yield the cases with folders of checkpoints."""
    for expect, folders in (("refused", FOLDERS), ("right", FINE_FOLDERS)):
        for (what, change), name, slow in crossed(folders.items(), MODELS):
            yield Case(f"{name}: {what}", "checkpoints", _folder(name, change), expect, slow=slow)


class _Evil:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return os.system, (f"touch '{self.mark}'",)


def _pickle_only(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    _pickle_beside(folder)


def _pickle_beside(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Evil(folder / "ran")))


def _code(folder: Path) -> None:
    """Let the configuration ask for code of its own, which leaves a file behind."""
    (folder / "modeling_evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\nraise SystemExit\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoModel": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Evil"}}
    (folder / "config.json").write_text(json.dumps(config))


def _unknown_code(folder: Path) -> None:
    _code(folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "evil"}
    (folder / "config.json").write_text(json.dumps(config))


def _link_weights(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder.parent / "blob")
    (folder / WEIGHTS).symlink_to("../blob")


def _weights_folder(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


def _loop(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(WEIGHTS)


def _other_model(folder: Path) -> None:
    other = "llama" if folder.name != "llama" else "bert"
    shutil.copy(saved(other) / WEIGHTS, folder / WEIGHTS)


FOLDERS: dict[str, Callable[[Path], object]] = {
    "only a pickle": _pickle_only,
    "code for an unknown architecture": _unknown_code,
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "no configuration": lambda folder: (folder / "config.json").unlink(),
    "an empty folder": lambda folder: [path.unlink() for path in folder.iterdir()],
    "a folder for weights": _weights_folder,
    "weights that link to themselves": _loop,
    "weights of another model": _other_model,
}
FINE_FOLDERS: dict[str, Callable[[Path], object]] = {
    "a pickle beside the weights": _pickle_beside,
    "code for a known architecture": _code,
    "weights that are a link": _link_weights,
    "files of the user's": lambda folder: (folder / "thesis.safetensors.bak").write_text("precious"),
}


def _folder(name: str, change: Callable[[Path], object]) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        folder = copied(name, place)
        change(folder)
        try:
            prove_loaded(folder, name)
        finally:
            proved(not (folder / "ran").exists(), "code of the checkpoint ran")

    return run
