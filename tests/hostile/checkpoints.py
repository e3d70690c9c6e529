"""Checkpoints whose files are damaged, hold other weights than the configuration means, or want to run code."""

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import identikit as ik
from tests.hostile.cases import Case, proved
from tests.hostile.made import TEXT, command, copied, right, same, saved

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MODELS = ("bert", "llama", "gpt2")
Tensors = dict[str, torch.Tensor]

# A weight of a block, one of the embeddings, and one of another block, by model
BLOCK = {
    "bert": "encoder.layer.1.attention.self.query.weight",
    "llama": "model.layers.1.self_attn.k_proj.weight",
    "gpt2": "transformer.h.1.mlp.c_fc.weight",
}
EMBEDDING = {
    "bert": "embeddings.word_embeddings.weight",
    "llama": "model.embed_tokens.weight",
    "gpt2": "transformer.wpe.weight",
}
NORM = {
    "bert": "encoder.layer.2.output.LayerNorm.weight",
    "llama": "model.norm.weight",
    "gpt2": "transformer.ln_f.bias",
}


def cases() -> Iterator[Case]:
    """Yield the cases with checkpoints."""
    for name in MODELS:
        for what, change in BYTES.items():
            yield Case(f"{name}: weights {what}", "checkpoints", _bytes(name, change), "refused")
        for key in (BLOCK[name], EMBEDDING[name], NORM[name]):
            for what, change in TENSORS.items():
                yield Case(f"{name}: {key} {what}", "checkpoints", _tensors(name, _one(key, change)), "refused", (key,))
        for what, change in STRANGE_KEYS(name).items():
            yield Case(f"{name}: {what}", "checkpoints", _tensors(name, change[1]), "refused", (change[0],))
        for what, change in HARMLESS.items():
            yield Case(f"{name}: {what}", "checkpoints", _tensors(name, change, exact="half" not in what), "right")
        for what, damage in INDICES.items():
            yield Case(f"{name}: an index {what}", "checkpoints", _index(name, damage), "refused")
        yield Case(f"{name}: weights in two files", "checkpoints", _index(name, lambda index, folder: index), "right")
        for what, change in FOLDERS.items():
            yield Case(f"{name}: {what}", "checkpoints", _folder(name, change), "refused")
        for what, change in FINE_FOLDERS.items():
            yield Case(f"{name}: {what}", "checkpoints", _folder(name, change), "right")
    yield Case(
        "bert: distance_embedding over absolute positions", "checkpoints", _distance, "refused", ("distance_embedding",)
    )
    yield Case("the command line with truncated weights", "checkpoints", _by_command, "refused", ("bert",))


def _header(change: Callable[[dict], object]) -> Callable[[bytes], bytes]:
    """Return what changes the header of a safetensors file and leaves its data as they are."""

    def changed(whole: bytes) -> bytes:
        length = int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8 : 8 + length])
        made = change(header)
        text = (made if isinstance(made, str) else json.dumps(header)).encode()
        return len(text).to_bytes(8, "little") + text + whole[8 + length :]

    return changed


def _first(header: dict) -> dict:
    return next(value for key, value in header.items() if key != "__metadata__")


def _move_offsets(header: dict) -> None:
    """Let the second tensor lie over the first."""
    keys = [key for key in header if key != "__metadata__"]
    start, stop = header[keys[1]]["data_offsets"]
    header[keys[1]]["data_offsets"] = [start - 4, stop - 4]


BYTES: dict[str, Callable[[bytes], bytes]] = {
    "that are empty": lambda _: b"",
    "of four bytes": lambda whole: whole[:4],
    "cut inside the header": lambda whole: whole[:100],
    "cut in half": lambda whole: whole[: len(whole) // 2],
    "cut before the last byte": lambda whole: whole[:-1],
    "with a byte too many": lambda whole: whole + b"\0",
    "of NUL bytes": lambda whole: bytes(len(whole)),
    "of a pickle": lambda _: pickle.dumps({"weight": 1}),
    "of a Git LFS pointer": lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
    "of a web page": lambda _: b"<!DOCTYPE html><html>Not found</html>",
    "with a header of 2**63 bytes": lambda whole: (2**63).to_bytes(8, "little") + whole[8:],
    "with a header of 0 bytes": lambda whole: bytes(8) + whole[8:],
    "with a header that is no JSON": _header(lambda _: "{" * 20),
    "with a list for a header": _header(lambda _: "[]"),
    "with an empty header": _header(lambda _: "{}"),
    "with offsets that overlap": _header(_move_offsets),
    "with offsets beyond the end": _header(lambda header: _first(header).update(data_offsets=[0, 2**40])),
    "with negative offsets": _header(lambda header: _first(header).update(data_offsets=[-8, 8])),
    "with offsets that run backwards": _header(lambda header: _first(header)["data_offsets"].reverse()),
    "with a dtype that is not known": _header(lambda header: _first(header).update(dtype="F7")),
    "with a negative shape": _header(lambda header: _first(header).update(shape=[-1, 24])),
    "with a shape of other size": _header(lambda header: _first(header)["shape"].append(2)),
    "with a huge shape": _header(lambda header: _first(header).update(shape=[2**40, 2**40])),
}

TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "missing": lambda _: None,
    "with a row too few": lambda weight: weight[:-1],
    "with a row too many": lambda weight: torch.cat([weight, weight[:1]]),
    "with a dimension too many": lambda weight: weight[None],
    "without a dimension": lambda weight: weight.flatten()[0],
    "empty": lambda weight: weight[:0],
    "of int8": lambda weight: (weight * 50).round().to(torch.int8),
    "of uint8": lambda weight: (weight * 50).round().to(torch.uint8),
    "of int64": lambda weight: weight.long(),
    "of truths": lambda weight: weight > 0,
    "with a NaN": lambda weight: _with(weight, float("nan")),
    "with infinity": lambda weight: _with(weight, float("inf")),
    "beyond float32": lambda weight: _with(weight.double(), 1e300),
}


def _with(weight: torch.Tensor, value: float) -> torch.Tensor:
    changed = weight.clone()
    changed.view(-1)[-1] = value
    return changed


def _one(key: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Tensors], None]:
    def changed(tensors: Tensors) -> None:
        made = change(tensors.pop(key))
        if made is not None:
            tensors[key] = made.contiguous()

    return changed


def STRANGE_KEYS(name: str) -> dict[str, tuple[str, Callable[[Tensors], None]]]:  # noqa: N802
    """Return changes that add weights which the model would leave out, each with the first key to be named."""
    key = BLOCK[name]
    stem, module = key.removesuffix(".weight"), key.rsplit(".", 3)[0]
    inside = f"{module}.extra_scale"
    after = key.replace(".1.", ".3.")
    fourth = {k: k.replace(".2.", ".3.") for k in load_file(saved(name) / WEIGHTS) if ".2." in k}
    int8 = f"{stem}.SCB"
    return {
        "a weight that its blocks do not have": (inside, lambda t: t.update({inside: torch.ones(24)})),
        "a weight that its embeddings do not have": (
            extra := EMBEDDING[name].rsplit(".", 2)[0] + ".extra_embeddings.weight",
            lambda t: t.update({extra: torch.ones(4, 24)}),
        ),
        "one weight of a block too many": (after, lambda t: t.update({after: t[key].clone()})),
        "a whole block too many": (
            ".3.",
            lambda t: t.update({new: t[old].clone() for old, new in fourth.items()}),
        ),
        "LoRA weights without an adapter's configuration": (
            "lora_A",
            lambda t: t.update(
                {f"{stem}.lora_A.weight": torch.ones(2, 24), f"{stem}.lora_B.weight": torch.ones(24, 2)}
            ),
        ),
        "LoRA weights over a base layer": (
            "base_layer",
            lambda t: t.update({f"{stem}.base_layer.weight": t[key].clone()}),
        ),
        "int8 matrices with their scales": (
            stem,
            lambda t: t.update({key: (t[key] * 50).to(torch.int8), int8: torch.ones(24)}),
        ),
    }


HARMLESS: dict[str, Callable[[Tensors], None]] = {
    "a classifier that nobody reads": lambda t: t.update({"classifier.weight": torch.ones(2, 24)}),
    "weights of float64": lambda t: t.update({key: weight.double() for key, weight in t.items()}),
    "weights of half precision": lambda t: t.update({key: weight.half() for key, weight in t.items()}),
}


def _loaded(folder: Path, name: str, exact: bool = True) -> None:
    """Load a folder, and prove that the model read is the undamaged one."""
    same(
        ik.effective_attention(ik.load(folder), TEXT), right(name), within=1e-5 if exact else 2e-2
    ) if exact else _near(folder, name)


def _near(folder: Path, name: str) -> None:
    found = ik.effective_attention(ik.load(folder), TEXT)
    off = (found.raw - right(name).raw).abs().max()
    proved(off < 2e-2, f"raw attention is off by {off:.1e}")


def _bytes(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        folder = copied(name, place)
        (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))
        ik.load(folder)

    return run


def _tensors(name: str, change: Callable[[Tensors], None], exact: bool = True) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        folder = copied(name, place)
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
        _loaded(folder, name, exact)

    return run


# Weights in several files

Index = dict[str, dict[str, str]]


def _without_map(index: Index, _: Path) -> Index:
    del index["weight_map"]
    return index


def _outside(name: str) -> Callable[[Index, Path], Index]:
    def changed(index: Index, folder: Path) -> Index:
        elsewhere = folder.parent / "elsewhere.safetensors"
        shutil.copy(folder / "second.safetensors", elsewhere)
        target = str(elsewhere) if name == "absolute" else f"../{elsewhere.name}"
        index["weight_map"] = {k: target if v == "second.safetensors" else v for k, v in index["weight_map"].items()}
        return index

    return changed


def _moved(index: Index, _: Path) -> Index:
    """Say that every weight lies in the first file."""
    index["weight_map"] = dict.fromkeys(index["weight_map"], "first.safetensors")
    return index


def _gone(index: Index, folder: Path) -> Index:
    (folder / "second.safetensors").unlink()
    return index


def _twice(index: Index, folder: Path) -> Index:
    """Let both files hold one weight, with other numbers."""
    first, second = (load_file(folder / f"{part}.safetensors") for part in ("first", "second"))
    key = next(iter(first))
    save_file(second | {key: first[key] + 1}, folder / "second.safetensors", {"format": "pt"})
    return index


INDICES: dict[str, Callable[[Index, Path], object]] = {
    "that is no JSON": lambda index, folder: "{not json",
    "that is a list": lambda index, folder: [],
    "that is empty": lambda index, folder: {},
    "without a map": _without_map,
    "that maps to numbers": lambda index, folder: {"metadata": {}, "weight_map": dict.fromkeys(index["weight_map"], 5)},
    "that names weights above the folder": _outside("relative"),
    "that names weights by an absolute path": _outside("absolute"),
    "that names another file for each weight": _moved,
    "that names a file which is not there": _gone,
    "over files that both hold a weight": _twice,
    "that names a pickle": lambda index, folder: {
        "metadata": {}, "weight_map": dict.fromkeys(index["weight_map"], "pytorch_model.bin")
    },
}  # fmt: skip


def _index(name: str, damage: Callable[[Index, Path], object]) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        folder = copied(name, place)
        tensors = load_file(folder / WEIGHTS)
        keys = sorted(tensors)
        parts = {"first.safetensors": keys[: len(keys) // 2], "second.safetensors": keys[len(keys) // 2 :]}
        for file, held in parts.items():
            save_file({key: tensors[key] for key in held}, folder / file, {"format": "pt"})
        (folder / WEIGHTS).unlink()
        index: Index = {"metadata": {}, "weight_map": {key: file for file, held in parts.items() for key in held}}
        made = damage(index, folder)
        (folder / INDEX).write_text(made if isinstance(made, str) else json.dumps(made))
        _loaded(folder, name)

    return run


# Folders


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
            _loaded(folder, name)
        finally:
            proved(not (folder / "ran").exists(), "code of the checkpoint ran")

    return run


def _distance(place: Path) -> None:
    """Relative positions that transformers no longer reads: the model would be read as one of absolute positions."""
    folder = copied("bert", place)
    tensors = load_file(folder / WEIGHTS)
    for layer in range(3):
        tensors[f"encoder.layer.{layer}.attention.self.distance_embedding.weight"] = torch.randn(127, 6)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"position_embedding_type": "relative_key"}
    (folder / "config.json").write_text(json.dumps(config))
    ik.load(folder)


def _by_command(place: Path) -> None:
    folder = copied("bert", place)
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-9])
    command("explain", "w5 w6", "--model", folder)
