"""Checkpoints whose files are damaged, hold other weights than the configuration means, or want to run code."""

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import identikit as ik
from tests.hostile.cases import Case, crossed, proved
from tests.hostile.made import TEXT, command, copied, right, same

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MODELS = ("bert", "llama", "gpt2")
Tensors = dict[str, torch.Tensor]
Strange = tuple[str, Callable[[Tensors], None]]

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
    for (what, change), name, slow in crossed(BYTES.items(), MODELS):
        yield Case(f"{name}: weights {what}", "checkpoints", _bytes(name, change), "refused", slow=slow)
    keys = [(name, keys[name]) for keys in (BLOCK, EMBEDDING, NORM) for name in MODELS]
    for (what, change), (name, key), slow in crossed(TENSORS.items(), keys):
        run = _tensors(name, _one(key, change))
        yield Case(f"{name}: {key} {what}", "checkpoints", run, "refused", (key,), slow=slow)
    for (what, strange), name, slow in crossed(STRANGE.items(), MODELS):
        key, change = strange(name)
        yield Case(f"{name}: {what}", "checkpoints", _tensors(name, change), "refused", (key,), slow=slow)
    for (what, change), name, slow in crossed(HARMLESS.items(), MODELS):
        run = _tensors(name, change, exact="half" not in what)
        yield Case(f"{name}: {what}", "checkpoints", run, "right", slow=slow)
    for (what, damage), name, slow in crossed(INDICES.items(), MODELS):
        yield Case(f"{name}: an index {what}", "checkpoints", _index(name, damage), "refused", slow=slow)
    for name in MODELS:
        yield Case(f"{name}: weights in two files", "checkpoints", _index(name, lambda index, folder: index), "right")
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


def _added(key: Callable[[str], str], *shape: int) -> Callable[[str], Strange]:
    """Return what adds a weight of ones under a name that follows from the model's."""

    def strange(name: str) -> Strange:
        return key(name), lambda tensors: tensors.update({key(name): torch.ones(*shape)})

    return strange


def _stem(name: str) -> str:
    return BLOCK[name].removesuffix(".weight")


def _fourth(name: str) -> Strange:
    """Give the model a whole block too many."""
    return ".3.", lambda tensors: tensors.update(
        {key.replace(".2.", ".3."): tensors[key].clone() for key in list(tensors) if ".2." in key}
    )


def _copied_weight(key: Callable[[str], str]) -> Callable[[str], Strange]:
    def strange(name: str) -> Strange:
        return key(name), lambda tensors: tensors.update({key(name): tensors[BLOCK[name]].clone()})

    return strange


def _adapted(name: str) -> Strange:
    down, up = f"{_stem(name)}.lora_A.weight", f"{_stem(name)}.lora_B.weight"
    return "lora_A", lambda tensors: tensors.update({down: torch.ones(2, 24), up: torch.ones(24, 2)})


def _quantised(name: str) -> Strange:
    key = BLOCK[name]
    return _stem(name), lambda tensors: tensors.update(
        {key: (tensors[key] * 50).to(torch.int8), f"{_stem(name)}.SCB": torch.ones(24)}
    )


# Weights which the model would leave out: for a model's name, the key that a refusal names, and the change.
STRANGE: dict[str, Callable[[str], Strange]] = {
    "a weight that its blocks do not have": _added(lambda name: f"{BLOCK[name].rsplit('.', 3)[0]}.extra_scale", 24),
    "a weight that its embeddings do not have": _added(
        lambda name: f"{EMBEDDING[name].rsplit('.', 2)[0]}.extra_embeddings.weight", 4, 24
    ),
    "one weight of a block too many": _copied_weight(lambda name: BLOCK[name].replace(".1.", ".3.")),
    "a whole block too many": _fourth,
    "LoRA weights without an adapter's configuration": _adapted,
    "LoRA weights over a base layer": _copied_weight(lambda name: f"{_stem(name)}.base_layer.weight"),
    "int8 matrices with their scales": _quantised,
}

HARMLESS: dict[str, Callable[[Tensors], None]] = {
    "a classifier that nobody reads": lambda t: t.update({"classifier.weight": torch.ones(2, 24)}),
    "weights of float64": lambda t: t.update({key: weight.double() for key, weight in t.items()}),
    "weights of half precision": lambda t: t.update({key: weight.half() for key, weight in t.items()}),
}


def prove_loaded(folder: Path, name: str, exact: bool = True) -> None:
    """Load a folder, and prove that the model read is the undamaged one."""
    found = ik.effective_attention(ik.load(folder), TEXT)
    if exact:
        same(found, right(name))
    else:
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
        prove_loaded(folder, name, exact)

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
        prove_loaded(folder, name)

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
