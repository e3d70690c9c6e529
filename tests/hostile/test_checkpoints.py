"""Checkpoints whose files are damaged, hold other weights than the configuration means, or want to run code."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import identikit as ik
from tests.hostile.judging import refused
from tests.hostile.made import TEXT, command, copied, right, same, saved

WEIGHTS = "model.safetensors"
Tensors = dict[str, torch.Tensor]


def loads_right(folder: Path, name: str) -> None:
    """Load a folder, and prove that the model read is the undamaged one."""
    same(ik.effective_attention(ik.load(folder), TEXT), right(name))


# The bytes of a file


def header(change: Callable[[dict], object]) -> Callable[[bytes], bytes]:
    """Return what changes the header of a safetensors file and leaves its data as they are."""

    def changed(content: bytes) -> bytes:
        length = int.from_bytes(content[:8], "little")
        held = json.loads(content[8 : 8 + length])
        change(held)
        text = json.dumps(held).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + length :]

    return changed


def first(held: dict) -> dict:
    return next(value for key, value in held.items() if key != "__metadata__")


BYTES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut inside the header": lambda content: content[:100],
    "cut before the last byte": lambda content: content[:-1],
    "with a byte too many": lambda content: content + b"\0",
    "of NUL bytes": lambda content: bytes(len(content)),
    "of a pickle": lambda _: pickle.dumps({"weight": 1}),
    "of a Git LFS pointer": lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
    "with a header of 2**63 bytes": lambda content: (2**63).to_bytes(8, "little") + content[8:],
    "with an empty header": header(dict.clear),
    "with offsets beyond the end": header(lambda held: first(held).update(data_offsets=[0, 2**40])),
    "with offsets that run backwards": header(lambda held: first(held)["data_offsets"].reverse()),
    "with a dtype that is not known": header(lambda held: first(held).update(dtype="F7")),
    "with a huge shape": header(lambda held: first(held).update(shape=[2**40, 2**40])),
}


@pytest.mark.parametrize("what", BYTES)
def test_damaged_weights_are_refused(what: str, tmp_path: Path):
    folder = copied("bert", tmp_path)
    (folder / WEIGHTS).write_bytes(BYTES[what]((folder / WEIGHTS).read_bytes()))
    with refused():
        ik.load(folder)


def test_the_command_line_refuses_damaged_weights_by_their_folder(tmp_path: Path):
    folder = copied("bert", tmp_path)
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-9])
    with refused("bert"):
        command("explain", "w5 w6", "--model", folder)


# Tensors

QUERY = "encoder.layer.1.attention.self.query"
LAST = "encoder.layer.2.output.LayerNorm.weight"


def with_last(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def changed(weight: torch.Tensor) -> torch.Tensor:
        weight = weight.clone()
        weight.view(-1)[-1] = value
        return weight

    return changed


def replaced(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({key: change(tensors[key]).contiguous()})


def added(key: str, *shape: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({key: torch.ones(*shape)})


def block_too_many(tensors: Tensors) -> None:
    tensors.update({key.replace(".2.", ".3."): weight.clone() for key, weight in tensors.items() if ".2." in key})


def quantised(tensors: Tensors) -> None:
    tensors[f"{QUERY}.weight"] = (tensors[f"{QUERY}.weight"] * 50).to(torch.int8)
    tensors[f"{QUERY}.SCB"] = torch.ones(24)


STRANGE: list[tuple[str, str, Callable[[Tensors], object]]] = [  # a model, what a refusal names, and the change
    ("bert", f"{QUERY}.weight", lambda tensors: tensors.pop(f"{QUERY}.weight")),
    ("bert", f"{QUERY}.weight", replaced(f"{QUERY}.weight", lambda weight: weight[:-1])),
    ("bert", f"{QUERY}.weight", replaced(f"{QUERY}.weight", lambda weight: weight[None])),
    ("bert", f"{QUERY}.weight", replaced(f"{QUERY}.weight", lambda weight: (weight * 50).to(torch.int8))),
    ("bert", f"{QUERY}.weight", replaced(f"{QUERY}.weight", lambda weight: weight > 0)),
    ("bert", f"{QUERY}.weight", replaced(f"{QUERY}.weight", with_last(torch.nan))),
    ("bert", LAST, replaced(LAST, with_last(torch.inf))),
    ("bert", LAST, replaced(LAST, lambda weight: with_last(1e300)(weight.double()))),
    ("bert", "word_embeddings", lambda tensors: tensors.pop("embeddings.word_embeddings.weight")),
    ("bert", "extra_scale", added("encoder.layer.1.extra_scale", 24)),
    ("bert", "extra_embeddings", added("embeddings.extra_embeddings.weight", 4, 24)),
    ("bert", r"\.3\.", block_too_many),
    ("bert", "lora_A", added(f"{QUERY}.lora_A.weight", 2, 24)),
    ("bert", "base_layer", added(f"{QUERY}.base_layer.weight", 24, 24)),
    ("bert", QUERY, quantised),
    ("llama", "k_proj", lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight")),
    ("llama", r"\.3\.", block_too_many),
    ("gpt2", "c_fc", replaced("transformer.h.1.mlp.c_fc.weight", lambda weight: weight[:-1])),
    ("gpt2", r"\.3\.", block_too_many),
]


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize(("name", "key", "change"), STRANGE)
def test_weights_that_are_not_the_models_are_refused_by_name(
    name: str, key: str, change: Callable[[Tensors], object], tmp_path: Path
):
    folder = copied(name, tmp_path)
    change_tensors(folder, change)
    with refused(key):
        ik.load(folder)


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize(
    "change",
    [added("classifier.weight", 2, 24), lambda tensors: tensors.update({k: v.double() for k, v in tensors.items()})],
    ids=["a classifier that nobody reads", "float64"],
)
def test_harmless_weights_are_read(name: str, change: Callable[[Tensors], object], tmp_path: Path):
    folder = copied(name, tmp_path)
    change_tensors(folder, change)
    loads_right(folder, name)


def test_weights_in_half_precision_are_read(tmp_path: Path):
    folder = copied("bert", tmp_path)
    change_tensors(folder, lambda tensors: tensors.update({k: v.half() for k, v in tensors.items()}))
    assert (ik.effective_attention(ik.load(folder), TEXT).raw - right("bert").raw).abs().max() < 2e-2


def test_relative_positions_that_transformers_no_longer_reads_are_refused(tmp_path: Path):
    """The model would be read as one of absolute positions."""
    folder = copied("bert", tmp_path)
    key = "encoder.layer.0.attention.self.distance_embedding.weight"
    change_tensors(folder, added(key, 127, 6))
    config = json.loads((folder / "config.json").read_text()) | {"position_embedding_type": "relative_key"}
    (folder / "config.json").write_text(json.dumps(config))
    with refused("distance_embedding"):
        ik.load(folder)


# Weights in several files

Index = dict[str, dict[str, str]]


def split(name: str, place: Path) -> tuple[Path, Index]:
    """Return a folder whose weights lie in two files, and their index, which is still to be written."""
    folder = copied(name, place)
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    half = len(tensors) // 2
    weight_map = {}
    for file, keys in (("first.safetensors", sorted(tensors)[:half]), ("second.safetensors", sorted(tensors)[half:])):
        save_file({key: tensors[key] for key in keys}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(keys, file)
    return folder, {"metadata": {}, "weight_map": weight_map}


def moved_to(file: str) -> Callable[[Index, Path], object]:
    """Say that every weight lies in one file."""
    return lambda index, folder: {"metadata": {}, "weight_map": dict.fromkeys(index["weight_map"], file)}


def outside(absolute: bool) -> Callable[[Index, Path], object]:
    def changed(index: Index, folder: Path) -> Index:
        elsewhere = folder.parent / "elsewhere.safetensors"
        shutil.move(folder / "second.safetensors", elsewhere)
        target = str(elsewhere) if absolute else "../elsewhere.safetensors"
        files = {"first.safetensors": "first.safetensors", "second.safetensors": target}
        return {"metadata": {}, "weight_map": {key: files[file] for key, file in index["weight_map"].items()}}

    return changed


def without_second(index: Index, folder: Path) -> Index:
    (folder / "second.safetensors").unlink()
    return index


def one_weight_twice(index: Index, folder: Path) -> Index:
    """Let both files hold one weight, with other numbers."""
    held = load_file(folder / "first.safetensors")
    key = next(iter(held))
    second = load_file(folder / "second.safetensors")
    save_file(second | {key: held[key] + 1}, folder / "second.safetensors", {"format": "pt"})
    return index


INDICES: dict[str, Callable[[Index, Path], object]] = {
    "that is a list": lambda index, folder: [],
    "without a map": lambda index, folder: {"metadata": {}},
    "that maps to numbers": lambda index, folder: {"metadata": {}, "weight_map": dict.fromkeys(index["weight_map"], 5)},
    "that names weights above the folder": outside(absolute=False),
    "that names weights by an absolute path": outside(absolute=True),
    "that names another file for each weight": moved_to("first.safetensors"),
    "that names a file which is not there": without_second,
    "over files that both hold a weight": one_weight_twice,
    "that names a pickle": moved_to("pytorch_model.bin"),
}


@pytest.mark.parametrize("what", INDICES)
def test_an_index_that_does_not_fit_is_refused(what: str, tmp_path: Path):
    folder, index = split("bert", tmp_path)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(INDICES[what](index, folder)))
    with refused():
        ik.load(folder)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_weights_in_two_files_are_read(name: str, tmp_path: Path):
    folder, index = split(name, tmp_path)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    loads_right(folder, name)


# Folders


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
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "no configuration": lambda folder: (folder / "config.json").unlink(),
    "a folder for weights": instead_of_weights(Path.mkdir),
    "weights that link to themselves": instead_of_weights(lambda path: path.symlink_to(WEIGHTS)),
    "weights of another model": lambda folder: shutil.copy(saved("llama") / WEIGHTS, folder / WEIGHTS),
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
    loads_right(folder, "bert")
    assert not (folder / "ran").exists()
