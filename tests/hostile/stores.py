"""Folders of runs that were damaged, belong to another run, or cannot hold one."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from identikit.results.files import seal, unseal
from identikit.runs import run as runs
from tests.hostile.cases import Case, Refused, crossed, kept, proved
from tests.hostile.damages import CUTS, DAMAGES, FLIPS, STANDINS, Damage
from tests.hostile.made import Done, command, content, copied, saved, texts_file, workshop

COMMANDS: dict[str, tuple[str, ...]] = {
    "attention": ("attention", "--model", "bert"),
    "attribution": ("attribution", "--model", "bert", "--probes", "4"),
    "tokens": ("tokens", "--model", "bert", "--map", "ridge", "--distance", "cosine", "--folds", "2"),
    "inversion": ("tokens", "--experiment", "inversion", "--model", "llama", "--noise", "0.1"),
}
ROLES: dict[str, tuple[str, int]] = {  # which of the files that a pattern finds
    "the first shard": ("shard-*.safetensors", 0),
    "the last shard": ("shard-*.safetensors", -1),
    "run.json": ("run.json", 0),
    "columns.json": ("columns.json", 0),
    "a table as Parquet": ("*.parquet", 0),
    "a table as CSV": ("*.csv", -1),
    "the list of checksums": ("SHA256SUMS", 0),
    "the command": ("command.json", 0),
}
TABLES = (".parquet", ".csv", "columns.json")


@cache
def data() -> Path:
    """Return the file of texts that the runs read."""
    return texts_file(workshop())


def started(name: str, out: Path, **changes: Path) -> Done:
    """Run a command over the texts; `model` or `data` may be other ones. Shards are written at once."""
    words, model = list(COMMANDS[name]), changes.get("model")
    place = words.index("--model") + 1
    words[place] = str(model or saved(words[place]))
    with mock.patch.object(runs, "SHARD_SECONDS", 0.0):
        return command(*words, "--data", changes.get("data", data()), "--out", out)


@cache
def finished(name: str) -> Path:
    """Return the folder of an undisturbed run."""
    out = workshop() / "runs" / name
    started(name, out)
    proved(len(list(out.glob("shard-*"))) > 1 or name == "tokens", "one shard is not enough to damage one of several")
    return out


def tables(folder: Path) -> Mapping[str, bytes]:
    """Return the tables of a run."""
    return {name: held for name, held in content(folder).items() if name.endswith(TABLES)}


def cases() -> Iterator[Case]:
    """Yield the cases with stores."""
    for role, (what, damage), slow in crossed(ROLES, DAMAGES.items()):
        shard = "shard" in role and what not in STANDINS
        run, expect = _damaged("attention", role, damage, shard), "right" if shard else "either"
        yield Case(f"{role} {what}", "stores", run, expect, slow=slow)
    for name in ("attribution", "inversion"):
        for what, damage in (FLIPS | CUTS).items():
            run, slow = _damaged(name, "the first shard", damage, True), what != "cut in half"
            yield Case(f"{name}: the first shard {what}", "stores", run, "right", slow=slow)
    for place, (what, change) in enumerate(RESEALED.items()):
        yield Case(f"a shard {what} and a right checksum", "stores", _resealed(change), "right", slow=place % 2 == 1)
    for what, model in MODELS.items():
        yield Case(f"an old run and a model with {what}", "stores", _other_model(*model), "refused")
    yield Case("an old run and other texts", "stores", _other_texts, "refused", ("data",))
    for what, change in MANIFESTS.items():
        yield Case(f"a manifest {what}", "stores", _manifest(change), "refused", ("run.json",))
    for what, make in OUTS.items():
        yield Case(f"{what} for --out", "stores", _out(make), "refused")
    for place, (what, make) in enumerate(FINE_OUTS.items()):
        yield Case(f"{what} for --out", "stores", _out(make), "right", slow=place % 3 != 1)
    for place, (what, make) in enumerate(FOREIGN.items()):
        yield Case(f"a folder with {what} for --out", "stores", _foreign(make), "either", slow=place % 2 == 0)


def _damaged(name: str, role: str, damage: Damage, told: bool) -> Callable[[Path], None]:
    """Damage one file of a finished run and run the command again: the tables must be those of the undisturbed run."""

    def run(place: Path) -> None:
        out = Path(shutil.copytree(finished(name), place / "out"))
        pattern, which = ROLES[role]
        file = sorted(out.glob(pattern))[which]
        damage(file)
        others = {path: path.read_bytes() for path in sorted(out.iterdir()) if path.is_file() and path != file}
        try:
            done = started(name, out)
        except Refused:
            gone = [path.name for path, held in others.items() if not path.exists() or path.read_bytes() != held]
            gone = [name for name in gone if name.endswith((*TABLES, ".safetensors", "run.json"))]
            kept(not gone, f"refused, and yet {gone} changed")
            raise
        proved(tables(out) == tables(finished(name)), "the tables differ from those of an undisturbed run")
        proved(not told or file.name in done.stderr, f"nothing was said about the damage: {done.stderr!r}")
        for path, held in others.items():
            if path.name.startswith("shard-"):
                kept(path.exists() and path.read_bytes() == held, f"{path.name} was whole, and was written again")

    return run


# Shards whose checksum is right

Tensors = dict[str, torch.Tensor]
About = dict[str, object]


def _each(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors, About], None]:
    """Return what changes one tensor of floating point after another."""

    def changed(tensors: Tensors, _: About) -> None:
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.ndim:
                tensors[name] = change(tensor)

    return changed


def _with(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def changed(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return changed


def _rename(tensors: Tensors, _: About) -> None:
    name = sorted(tensors)[0]
    tensors[f"{name}_other"] = tensors.pop(name)


RESEALED: dict[str, Callable[[Tensors, About], object]] = {
    "with NaN": _each(_with(float("nan"))),
    "with infinity": _each(_with(float("inf"))),
    "with a row too few": _each(lambda tensor: tensor[:-1]),
    "with a row too many": _each(lambda tensor: torch.cat([tensor, tensor[:1]])),
    "without rows": _each(lambda tensor: tensor[:0]),
    "with a dimension too many": _each(lambda tensor: tensor[None]),
    "with everything in one dimension": _each(torch.flatten),
    "with columns cut off": _each(lambda tensor: tensor[..., :-1].contiguous()),
    "in half precision": _each(torch.Tensor.half),
    "with whole numbers": _each(torch.Tensor.long),
    "without one of its keys": lambda tensors, about: tensors.pop(sorted(tensors)[0]),
    "with a key of another name": _rename,
    "with a key too many": lambda tensors, about: tensors.update({f"{sorted(tensors)[0]}_more": torch.ones(3)}),
    "without tensors": lambda tensors, about: tensors.clear(),
    "without a word about it": lambda tensors, about: about.clear(),
    "with other words about it": lambda tensors, about: about.update(dict.fromkeys(about, "other")),
    "with numbers for words about it": lambda tensors, about: about.update(dict.fromkeys(about, 5)),
    "with lists for words about it": lambda tensors, about: about.update({key: [1] for key in about}),
    "with texts of another hash": lambda tensors, about: about.update(blocks={"0": "0" * 64}),
    "with blocks that there are none of": lambda tensors, about: about.update(blocks={"99": "0" * 64}),
    "with negative blocks": lambda tensors, about: about.update(blocks={"-1": "0" * 64}),
    "with words for blocks": lambda tensors, about: about.update(blocks={"first": "0" * 64}),
}


def _resealed(change: Callable[[Tensors, About], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        tensors, about = unseal(path.read_bytes())
        tensors, about = dict(tensors), dict(about)
        change(tensors, about)
        path.write_bytes(seal(tensors, about))

    return _damaged("attention", "the first shard", damage, True)


# Another run


def _config(**fields: object) -> Damage:
    def changed(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return changed


def _swap_words(folder: Path) -> None:
    made = json.loads((folder / "tokenizer.json").read_text())
    words = made["model"]["vocab"]
    words["w5"], words["w6"] = words["w6"], words["w5"]
    (folder / "tokenizer.json").write_text(json.dumps(made))


def _one_bit(folder: Path) -> None:
    """Flip the last bit of one weight of a block."""
    tensors = load_file(folder / "model.safetensors")
    name = next(key for key in sorted(tensors) if ".1." in key and key.endswith("weight"))
    tensors[name].view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _swapped_rows(folder: Path) -> None:
    """Exchange two rows of a weight: every sum over it stays the same."""
    tensors = load_file(folder / "model.safetensors")
    name = next(key for key in sorted(tensors) if ".1." in key and key.endswith("weight") and tensors[key].ndim == 2)
    tensors[name] = tensors[name].roll(1, 0).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


MODELS: dict[str, tuple[str, Damage]] = {
    "a changed tokenizer": ("attention", _swap_words),
    "another activation": ("attention", _config(hidden_act="relu")),
    "another epsilon": ("attention", _config(layer_norm_eps=1e-3)),
    "one bit of a weight changed": ("attention", _one_bit),
    "two rows of a weight exchanged": ("attention", _swapped_rows),
    "another base of its rotary positions": (
        "inversion", _config(rope_theta=77.0, rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    ),
    "another activation, causal": ("inversion", _config(hidden_act="gelu")),
}  # fmt: skip


def _other_model(name: str, change: Damage) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        out = Path(shutil.copytree(finished(name), place / "out"))
        before = content(out)
        words = COMMANDS[name]
        folder = copied(words[words.index("--model") + 1], place)
        change(folder)
        try:
            started(name, out, model=folder)
        finally:
            same = {key: held for key, held in content(out).items() if key in before}
            kept(
                {key: before[key] for key in same if key not in ("command.json",)}.items() <= same.items(),
                "the old run changed",
            )

    return run


def _other_texts(place: Path) -> None:
    out = Path(shutil.copytree(finished("attention"), place / "out"))
    started("attention", out, data=texts_file(place, ["w5 w6", "w7 w8"]))


MANIFESTS: dict[str, Callable[[dict], object]] = {
    "that is a list": lambda made: [],
    "that is null": lambda made: None,
    "without its run": lambda made: {"recorded": made["recorded"]},
    "whose run is a list": lambda made: made | {"run": []},
    "whose run is a word": lambda made: made | {"run": "attention"},
}


def _manifest(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        out = Path(shutil.copytree(finished("attention"), place / "out"))
        made = json.loads((out / "run.json").read_text())
        (out / "run.json").write_text(json.dumps(change(made)))
        started("attention", out)

    return run


# Places for a run


def made_folder(path: Path) -> Path:
    path.mkdir()
    return path


def made_file(path: Path) -> Path:
    path.write_text("precious")
    return path


def _linked(path: Path, target: str) -> Path:
    path.symlink_to(target)
    return path


OUTS: dict[str, Callable[[Path], object]] = {
    "memory that is gone afterwards": lambda place: "memory://run",
    "data that is gone afterwards": lambda place: "data://run",
    "a scheme that is not known": lambda place: "nowhere://run",
    "a bucket without its package": lambda place: "s3://bucket/run",
    "a web address": lambda place: "http://localhost:1/run",
    "an empty name": lambda place: "",
    "a file": lambda place: made_file(place / "thesis.tex"),
    "a folder under a file": lambda place: made_file(place / "thesis.tex") / "run",
    "a name that is too long": lambda place: place / ("x" * 300),
    "a place where nothing can be made": lambda place: "/proc/identikit/run",
    "a device": lambda place: "/dev/null",
    "a folder under a device": lambda place: "/dev/full/run",
    "a link to itself": lambda place: _linked(place / "loop", "loop"),
    "a named pipe": lambda place: os.mkfifo(place / "pipe") or place / "pipe",
}
FINE_OUTS: dict[str, Callable[[Path], object]] = {
    "a name with spaces": lambda place: place / "a run of mine",
    "a name of other letters": lambda place: place / "прогон 👩",
    "a name with marks": lambda place: place / "a'b\"c#d%20e?f*g[h]",
    "a name with a line end": lambda place: place / "two\nlines",
    "a name with a colon": lambda place: place / "c:d",
    "a name with a leading dash": lambda place: place / "--out",
    "a tilde": lambda place: place / "~run",
    "a folder in folders that are not there": lambda place: place / "a" / "b" / "c",
    "an empty folder": lambda place: made_folder(place / "empty"),
    "a link to a folder": lambda place: made_folder(place / "folder") and _linked(place / "link", "folder"),
    "a path with dots": lambda place: place / "." / "x" / ".." / "run",
    "a trailing slash": lambda place: f"{place}/run/",
}


def _out(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        out = make(place)
        before = content(place)
        try:
            started("attention", out)  # pyright: ignore[reportArgumentType]
        finally:
            kept(before.items() <= content(place).items(), "a file of the user's is gone or changed")
        proved(tables(Path(str(out))) == tables(finished("attention")), "the tables are not there, or differ")

    return run


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a thesis": lambda out: made_file(out / "thesis.tex"),
    "a hidden file": lambda out: made_file(out / ".git"),
    "a folder": lambda out: made_file(made_folder(out / "data") / "numbers.csv"),
    "somebody's partial file": lambda out: made_file(out / "download.partial"),
    "somebody's hidden partial file": lambda out: made_file(out / ".download.partial"),
    "a partial folder": lambda out: made_file(made_folder(out / "model.partial") / "half.bin"),
    "a hidden partial folder": lambda out: made_file(made_folder(out / ".model.partial") / "half.bin"),
    "a shard of nobody's": lambda out: made_file(out / "shard-000000.safetensors"),
    "tables of nobody's": lambda out: made_file(out / "texts.csv"),
    "a lock of nobody's": lambda out: made_file(out / ".lock"),
    "a temporary file": lambda out: made_file(out / "tmp1234"),
}


def _foreign(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Nothing that was in the folder before is ever deleted or changed."""

    def run(place: Path) -> None:
        out = made_folder(place / "out")
        make(out)
        before = content(out)
        try:
            started("attention", out)
        finally:
            kept(before.items() <= content(out).items(), "a file of the user's is gone or changed")
        proved(tables(out) == tables(finished("attention")), "the tables are not there, or differ")

    return run
