"""What the folder of a run holds: how far it is, what is missing or damaged, who writes to it. No model is loaded.

Everything here comes from files that anybody may have written, so nothing of it is taken for granted.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from identikit.errors import InputError
from identikit.results.files import Damaged, Sealed
from identikit.runs.lock import FolderLock, Owner
from identikit.runs.run import PART, part_folder, shard_files
from identikit.runs.store import CHECKSUMS, COMPUTED, ERROR, MANIFEST, PART_FOLDER, PLAN, Store, leaves, opened

INPUTS = "inputs"  # the folder of the inputs of `reproduce`
_SEALED = re.compile(r"(shard-.*|passage|sentence)\.safetensors|(part-.*|plan|collapse)\.json")
_MOST = 10_000_000  # blocks that a run can have
_SHOWN = 8  # how many of many are listed


class Amount(NamedTuple):
    """How much is done, and of how much; None if that is not known."""

    done: int
    total: int | None


@dataclass(frozen=True)
class State:
    """What the folder of one run holds.

    - `settings`, `recorded`: what identifies the run, and what else was noted when it was started
    - `unit`: what the work is cut into, `blocks` of texts or `parts`; `done` and `missing` are their numbers or names
    - `seconds`: how long it took to compute the blocks that are there
    - `sealed`, `damaged`: how many files notice when they are damaged, and which are
    - `writer`, `error`: who is writing now, and why the run ended the last time, if it failed
    - `complete`: whether everything is computed and written, the tables too where the run has some
    """

    folder: str
    settings: dict[str, Any]
    recorded: dict[str, Any]
    unit: str
    done: tuple[int | str, ...]
    missing: tuple[int | str, ...]
    texts: Amount
    tokens: Amount
    seconds: float
    sealed: int
    damaged: dict[str, str]
    writer: Owner | None
    error: dict[str, Any] | None
    complete: bool

    @property
    def share(self) -> float | None:
        """The share of the tokens that is done, or of the parts; None if it is not known."""
        if self.tokens.total:
            return self.tokens.done / self.tokens.total
        known = len(self.done) + len(self.missing)
        return len(self.done) / known if known else None

    @property
    def rate(self) -> float | None:
        """Tokens per second, while blocks were computed."""
        return self.tokens.done / self.seconds if self.seconds > 0 and self.tokens.done else None

    @property
    def seconds_left(self) -> float | None:
        """The time that the rest takes at that rate."""
        return (
            None if not self.rate or self.tokens.total is None else (self.tokens.total - self.tokens.done) / self.rate
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything, as JSON can hold it."""
        amounts = {name: getattr(self, name)._asdict() for name in ("texts", "tokens")}
        derived = {"share": self.share, "tokens_per_second": self.rate, "seconds_left": self.seconds_left}
        return asdict(self) | amounts | derived


def open_run(folder: str) -> tuple[Store, dict[str, Any]]:
    """Return the folder of a run, for reading, and what was recorded about the run."""
    files, path = opened(folder)
    if not files.isdir(path):
        raise InputError(f"Cannot read {folder}: there is no such folder. Give the folder of a run.")
    if not files.exists(f"{path}/{MANIFEST}"):
        raise InputError(f"Cannot read {folder}: it has no {MANIFEST}. Give the folder of a run, as --out named it.")
    try:
        found = json.loads(files.cat_file(f"{path}/{MANIFEST}"))
        if isinstance(found["run"], dict):
            recorded = found.get("recorded")
            return Store(folder, found["run"]), recorded if isinstance(recorded, dict) else {}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise InputError(f"Cannot read {folder}: {MANIFEST} is damaged, so it is not known what was computed there.")


@dataclass
class _Found:
    """What the sealed files of a folder hold."""

    blocks: dict[int, str] = field(default_factory=dict)  # the file of each block
    parts: list[str] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("texts", "tokens", "seconds"), 0.0))
    damaged: dict[str, str] = field(default_factory=dict)
    sealed: int = 0  # files that notice damage
    plan: dict[str, Any] = field(default_factory=dict)

    def shard(self, file: str, held: Sealed) -> None:
        """Count the blocks of a shard, or raise `Damaged`."""
        try:
            numbers = [int(key) for key in held.about["blocks"]]
            sums = {name: self.sums[name] + float(held.about[name]) for name in self.sums}
        except (KeyError, TypeError, ValueError):
            raise Damaged("it does not say which blocks it holds") from None
        if {key.partition("/")[0] for key in held.tensors} != {str(number) for number in numbers}:
            raise Damaged("it does not hold the numbers of its blocks")
        for number in numbers:
            if number in self.blocks:
                raise Damaged(f"block {number} is also in {self.blocks[number]}")
        self.blocks |= dict.fromkeys(numbers, file)
        self.sums = sums


def _found(store: Store) -> _Found:
    found = _Found()
    for name in filter(_SEALED.fullmatch, store.names()):
        found.sealed += 1
        try:
            if name.endswith(".safetensors"):
                held = store.read_tensors(name)
                if shard_files([name]):
                    found.shard(name, held)
                continue
            value = store.read_json(name)
            if name == PLAN:
                found.plan = dict(value)
            elif name.startswith(PART):
                found.parts.append(name.removeprefix(PART).removesuffix(".json"))
        except (Damaged, InputError, ValueError, TypeError) as why:
            found.damaged[name] = str(why).rstrip(".")
    return found


def state(folder: str) -> State:
    """Return what the folder of a run holds."""
    store, recorded = open_run(folder)
    found = _found(store)
    unit, planned = _planned(found)
    done: Sequence[Any] = sorted(found.blocks) if unit == "blocks" else sorted(found.parts)
    missing = tuple(one for one in planned if one not in set(done))
    for number in set(done) - set(planned) if planned else ():
        file = found.blocks[number] if unit == "blocks" else f"{PART}{number}.json"
        found.damaged[file] = f"{number} is none of the run's {unit}"
    return State(
        folder=folder,
        settings=store.settings,
        recorded=recorded,
        unit=unit,
        done=tuple(done),
        missing=missing,
        texts=Amount(int(found.sums["texts"]), _whole(found.plan.get("texts"))),
        tokens=Amount(int(found.sums["tokens"]), _whole(found.plan.get("tokens"))),
        seconds=round(found.sums["seconds"], 3),
        sealed=found.sealed,
        damaged=found.damaged,
        writer=FolderLock(store.files, store.folder).holder(),
        error=_error(store),
        complete=not missing and not found.damaged and _is_written(store, bool(planned)),
    )


def _planned(found: _Found) -> tuple[str, Sequence[Any]]:
    """Return what the work is cut into, and the numbers or names of all pieces; none where no plan can be read."""
    try:
        if "parts" in found.plan:
            return "parts", [str(name) for name in found.plan["parts"]]
        if "blocks" in found.plan:
            planned = range(*map(int, found.plan["blocks"]))
            if len(planned) <= _MOST:
                return "blocks", planned
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        found.damaged[PLAN] = "it does not say what there is to do"
    return ("parts" if found.parts else "blocks"), ()


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _error(store: Store) -> dict[str, Any] | None:
    try:
        found = json.loads(store.read(ERROR)) if store.has(ERROR) else None
        return {"date": str(found["date"]), "error": str(found["error"])} if found is not None else None
    except (InputError, ValueError, KeyError, TypeError):
        return {"date": "unknown", "error": f"{ERROR} cannot be read"}


def _is_written(store: Store, planned: bool) -> bool:
    """Say whether all was written; of a shard that is its blocks: tables are made when the shards are merged."""
    if "shard" in store.settings:
        return planned
    return store.has(CHECKSUMS) or ("command" not in store.settings and store.has(COMPUTED))


def parts_of(folder: str) -> dict[tuple[int, int], str]:
    """Return the folders of the shards of a run that are there, by number and how many there are."""
    files, path = opened(folder)
    matches = [PART_FOLDER.fullmatch(name) for name in _folders(files, path)]
    found = {(int(one[1]), int(one[2])): f"{folder.rstrip('/')}/{one[0]}" for one in matches if one is not None}
    return dict(sorted(found.items()))


def inputs_of(folder: str) -> list[str]:
    """Return the folders of the inputs of `reproduce`."""
    files, path = opened(folder)
    return [
        f"{folder.rstrip('/')}/{INPUTS}/{data}/{name}"
        for data in _folders(files, f"{path}/{INPUTS}")
        for name in _folders(files, f"{path}/{INPUTS}/{data}")
    ]


def _folders(files: Any, path: str) -> list[str]:
    if not files.isdir(path):
        return []
    listing = files.ls(path, True)
    return sorted(one["name"].rstrip("/").rpartition("/")[2] for one in listing if one["type"] == "directory")


def is_run(folder: str) -> bool:
    """Say whether a folder is that of a run."""
    files, path = opened(folder)
    return files.exists(f"{path}/{MANIFEST}")


def absent_parts(parts: Iterable[tuple[int, int]]) -> list[str]:
    """Return the folders of the shards that are not there."""
    there = set(parts)
    counts = {count for _, count in there}
    return [part_folder(i, count) for count in counts for i in range(1, count + 1) if (i, count) not in there]


# In words


def state_words(one: State) -> list[str]:
    """Say what a folder holds, in a few lines."""
    return [f"{one.folder}: {_about(one)}.", *_options(one), *_progress(one), *_trouble(one), _ending(one)]


def state_line(one: State) -> str:
    """Say how far a run is, in one line."""
    told = "complete" if one.complete else "not complete"
    amount = "" if not one.done and not one.missing else f", {_amount(one)}"
    wrong = "".join(f"; {file} is damaged" for file in one.damaged)
    writing = "" if one.writer is None else f"; {one.writer.words()} is writing to it"
    failed = "" if one.error is None else f"; ended with an error: {one.error['error']}"
    return f"{told}{amount}{wrong}{writing}{failed}"


def _about(one: State) -> str:
    settings = one.settings
    command, model, data = settings.get("command", "an input of reproduce"), settings.get("model"), settings.get("data")
    if isinstance(model, dict):
        model = model.get("name")
    texts = f" ({data['texts']:,} texts)" if isinstance(data, dict) and isinstance(data.get("texts"), int) else ""
    if isinstance(data, dict):
        data = data.get("source")
    kind = f" in {settings['dtype']}" if "dtype" in settings else ""
    told = [f"{command}", f"model {model}{kind}", *([f"data {data}{texts}"] if data else [])]
    if "shard" in settings:
        told.insert(1, f"shard {settings['shard']}")
    return ", ".join(told)


def _options(one: State) -> Iterator[str]:
    known = {"command", "data", "model", "dtype", "options", "shard"}
    rest = {name: value for name, value in one.settings.items() if name not in known}
    chosen = leaves({"": one.settings.get("options", {})} | rest)
    yield f"Settings: {', '.join(f'{name} {value}' for name, value in chosen if value is not None)}."
    noted = [f"{name} {one.recorded[name]}" for name in ("date", "device", "machine") if one.recorded.get(name)]
    if noted:
        yield f"Started: {', '.join(noted)}."


def _amount(one: State) -> str:
    total = len(one.done) + len(one.missing)
    told = [f"{len(one.done):,} of {total:,} {one.unit}"]
    for name in ("texts", "tokens"):
        done, of = getattr(one, name)
        if of is not None:
            told.append(f"{done:,} of {of:,} {name}")
    return ", ".join(told) + ("" if one.share is None else f" ({one.share:.0%})")


def _progress(one: State) -> Iterator[str]:
    if not one.done and not one.missing:
        if not one.complete and "command" in one.settings and one.settings["command"] != "reproduce":
            yield "Nothing is computed yet."
        return
    yield f"Done: {_amount(one)}."
    if one.missing:
        yield f"Missing: {one.unit} {listed(one.missing)}."
    if one.rate is not None:
        left = one.seconds_left
        ahead = f"; {timedelta(seconds=round(left))} left at that rate" if one.missing and left is not None else ""
        yield f"Rate: {one.rate:,.0f} tokens/s while it was computed{ahead}."


def _trouble(one: State) -> Iterator[str]:
    for file, why in one.damaged.items():
        yield f"Damaged: {file} ({why}). What it held is computed again when the run is resumed."
    if one.error is not None:
        yield f"The last run ended with an error ({one.error['date']}): {one.error['error']}"


def _ending(one: State) -> str:
    if one.writer is not None:
        return f"Now: {one.writer.words()} is writing to it."
    if one.complete:
        return (
            "Complete: nothing is left to compute." if "shard" in one.settings else "Complete: all results are written."
        )
    return f"Nobody is writing to it. `identikit resume {one.folder}` goes on."


def listed(pieces: Sequence[int | str]) -> str:
    """List numbers as ranges, and names; only the first of many."""
    runs: list[list[Any]] = []
    for one in pieces:
        if runs and isinstance(one, int) and one == runs[-1][-1] + 1:
            runs[-1][1:] = [one]
        else:
            runs.append([one])
    told = [" to ".join(map(str, run)) for run in runs[:_SHOWN]]
    return ", ".join(told) + (", …" if len(runs) > _SHOWN else "")
