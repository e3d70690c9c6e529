"""What the folder of a run holds: what is done, missing or damaged, and who writes to it. No model is loaded.

The manifest is sealed, so it is as it was written; nothing else is taken for granted.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from fsspec import AbstractFileSystem

from identikit.errors import InputError
from identikit.results.files import Damaged
from identikit.results.words import percent
from identikit.runs.lock import FolderLock, Owner
from identikit.runs.run import PART, part_folder, shard_files, texts_held
from identikit.runs.store import (
    CHECKSUMS,
    COMPUTED,
    ERROR,
    MANIFEST,
    PART_FOLDER,
    PLAN,
    Store,
    leaves,
    opened,
    read_manifest,
)

INPUTS = "inputs"  # the folder of the inputs of `reproduce`
_SEALED = re.compile(r"(shard-.*|passage|sentence)\.safetensors|(part-.*|plan|collapse)\.json")
_NOTED = {"tokens": int, "seconds": float}  # in every shard
_SHOWN = 8  # how many of many are listed


@dataclass(frozen=True)
class Amount:
    """How much is done, and of how much; None if that is not known."""

    done: int
    total: int | None


@dataclass(frozen=True)
class RunState:
    """What the folder of one run holds.

    - `settings`, `recorded`: what identifies the run, and what else was noted when it was started
    - `unit`: what the work consists of, `texts` or `parts`; `done` and `missing` are their numbers or names
    - `seconds`: how long it took to compute the texts that are there
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
    tokens: Amount
    seconds: float
    sealed: int
    damaged: dict[str, str]
    writer: Owner | None
    error: dict[str, str] | None
    complete: bool

    @property
    def share(self) -> float | None:
        """The share of the tokens that is done, or of the parts; None if it is not known."""
        if self.tokens.total:
            return self.tokens.done / self.tokens.total
        pieces = len(self.done) + len(self.missing)
        return len(self.done) / pieces if pieces else None

    @property
    def rate(self) -> float | None:
        """Tokens per second, while texts were computed."""
        return self.tokens.done / self.seconds if self.seconds > 0 and self.tokens.done else None

    @property
    def seconds_left(self) -> float | None:
        """The time that the rest takes at that rate."""
        if not self.rate or self.tokens.total is None:
            return None
        return (self.tokens.total - self.tokens.done) / self.rate

    def to_dict(self) -> dict[str, Any]:
        """Return everything, as JSON can hold it."""
        rates = {"share": self.share, "tokens_per_second": self.rate, "seconds_left": self.seconds_left}
        return asdict(self) | rates


def open_run(folder: str) -> Store:
    """Return the folder of a run, for reading."""
    files, path = opened(folder)
    if not files.isdir(path):
        raise InputError(f"Cannot read {folder}: there is no such folder. Give the folder of a run.")
    if not files.exists(f"{path}/{MANIFEST}"):
        raise InputError(f"Cannot read {folder}: it has no {MANIFEST}. Give the folder of a run, as given with --out.")
    manifest = read_manifest(files, path)
    if manifest is None:
        raise InputError(f"Cannot read {folder}: {MANIFEST} is damaged, so it is not known what was computed there.")
    return Store(folder, manifest["run"], manifest["recorded"])


@dataclass
class _Holdings:
    """What the sealed files of a folder hold; `pieces` are texts or parts, each with its file."""

    pieces: dict[int | str, str] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    sums: Counter[str] = field(default_factory=Counter)  # of what shards note
    damaged: dict[str, str] = field(default_factory=dict)

    def add(self, store: Store, name: str) -> None:
        """Count what a sealed file holds; one that is damaged is noted."""
        try:
            if name.endswith(".safetensors"):
                about = store.read_tensors(name).about
                if shard_files([name]):
                    self._add_shard(name, about)
                return
            value = store.read_json(name)
            if name == PLAN:
                self.plan = dict(value)
            elif name.startswith(PART):
                self.pieces[name.removeprefix(PART).removesuffix(".json")] = name
        except (Damaged, InputError, ValueError, TypeError) as why:
            self.damaged[name] = str(why).rstrip(".")

    def _add_shard(self, file: str, about: dict[str, Any]) -> None:
        numbers = texts_held(about)
        try:
            noted = {name: kind(about[name]) for name, kind in _NOTED.items()}
        except (KeyError, TypeError, ValueError, OverflowError):
            raise Damaged("it does not say how much it holds") from None
        for number in numbers:
            if number in self.pieces:
                raise Damaged(f"text {number} is also in {self.pieces[number]}")
        self.pieces |= dict.fromkeys(numbers, file)
        self.sums.update(noted)

    def tokens(self) -> Amount:
        """Return how many tokens are done, and of how many."""
        total = self.plan.get("tokens")
        return Amount(self.sums["tokens"], total if isinstance(total, int) else None)

    def planned(self) -> tuple[str, Sequence[int | str]]:
        """Return what the work consists of, and the numbers or names of all pieces; none where no plan can be read."""
        try:
            if "parts" in self.plan:
                return "parts", [str(name) for name in self.plan["parts"]]
            if "texts" in self.plan:
                return "texts", texts_held(self.plan)
        except (TypeError, Damaged):
            self.damaged[PLAN] = "it does not say what there is to do"
        return ("parts" if any(isinstance(piece, str) for piece in self.pieces) else "texts"), ()


def state(folder: str) -> RunState:
    """Return what the folder of a run holds."""
    store = open_run(folder)
    sealed = [name for name in store.names() if _SEALED.fullmatch(name)]
    holdings = _Holdings()
    for name in sealed:
        holdings.add(store, name)
    unit, planned = holdings.planned()
    pieces = holdings.pieces
    missing = tuple(piece for piece in planned if piece not in pieces)
    for piece in pieces.keys() - set(planned) if planned else ():
        holdings.damaged[pieces[piece]] = f"{piece} is not one of the run's {unit}"
    return RunState(
        folder=folder,
        settings=store.settings,
        recorded=store.recorded,
        unit=unit,
        done=tuple(sorted(piece for piece in pieces if isinstance(piece, str) == (unit == "parts"))),
        missing=missing,
        tokens=holdings.tokens(),
        seconds=round(float(holdings.sums["seconds"]), 3),
        sealed=len(sealed),
        damaged=holdings.damaged,
        writer=FolderLock(store.files, store.folder).holder(),
        error=_error(store),
        complete=not missing and not holdings.damaged and _is_written(store, bool(planned)),
    )


def _error(store: Store) -> dict[str, str] | None:
    if not store.has(ERROR):
        return None
    try:
        note = json.loads(store.read(ERROR))
        return {"date": str(note["date"]), "error": str(note["error"])}
    except (InputError, ValueError, KeyError, TypeError):
        return {"date": "unknown", "error": f"{ERROR} cannot be read"}


def _is_written(store: Store, planned: bool) -> bool:
    """Say whether all was written; of a shard that is its texts: tables are made when the shards are merged."""
    if "shard" in store.settings:
        return planned
    return store.has(CHECKSUMS) or ("command" not in store.settings and store.has(COMPUTED))


def parts_of(folder: str) -> dict[tuple[int, int], str]:
    """Return the folders of the shards of a run that are there, by number and how many there are."""
    files, path = opened(folder)
    parts = {}
    for name in _folders(files, path):
        if match := PART_FOLDER.fullmatch(name):
            parts[int(match[1]), int(match[2])] = f"{folder.rstrip('/')}/{name}"
    return dict(sorted(parts.items()))


def inputs_of(folder: str) -> list[str]:
    """Return the folders of the inputs of `reproduce`."""
    files, path = opened(folder)
    return [
        f"{folder.rstrip('/')}/{INPUTS}/{data}/{name}"
        for data in _folders(files, f"{path}/{INPUTS}")
        for name in _folders(files, f"{path}/{INPUTS}/{data}")
    ]


def _folders(files: AbstractFileSystem, path: str) -> list[str]:
    if not files.isdir(path):
        return []
    entries = files.ls(path, True)
    return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory")


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


def state_words(run: RunState) -> list[str]:
    """Say what a folder holds, in a few lines."""
    lines = [f"{run.folder}: {_about(run)}.", *_options(run), *_progress(run)]
    for file, why in run.damaged.items():
        lines.append(f"Damaged: {file} ({why}). Its contents will be computed again when the run is resumed.")
    if run.error is not None:
        lines.append(f"The last run ended with an error ({run.error['date']}): {run.error['error']}")
    return [*lines, _ending(run)]


def state_line(run: RunState) -> str:
    """Describe the progress of a run, in one line."""
    line = "complete" if run.complete else "not complete"
    if run.done or run.missing:
        line += f", {_amount(run)}"
    for file in run.damaged:
        line += f"; {file} is damaged"
    if run.writer is not None:
        line += f"; {run.writer.words()} is writing to it"
    if run.error is not None:
        line += f"; ended with an error: {run.error['error']}"
    return line


def _about(run: RunState) -> str:
    settings = run.settings
    words = [settings.get("command", "an input of reproduce")]
    if "shard" in settings:
        words.append(f"shard {settings['shard']}")
    noted = dict(leaves(run.recorded))
    model = f"model {noted.get('model.name')}"
    words.append(f"{model} in {settings['dtype']}" if "dtype" in settings else model)
    if "data.source" in noted:
        texts = dict(leaves(settings)).get("data.texts")
        words.append(f"data {noted['data.source']}" + (f" ({texts:,} texts)" if isinstance(texts, int) else ""))
    return ", ".join(words)


def _options(run: RunState) -> Iterator[str]:
    told_above = {"command", "data", "model", "dtype", "options", "shard", "texts", "weights"}
    others = {name: value for name, value in run.settings.items() if name not in told_above}
    chosen = leaves({"": run.settings.get("options", {})} | others)
    yield f"Settings: {', '.join(f'{name} {value}' for name, value in chosen if value is not None)}."
    noted = [f"{name} {run.recorded[name]}" for name in ("date", "device", "machine") if name in run.recorded]
    if noted:
        yield f"Started: {', '.join(noted)}."


def _amount(run: RunState) -> str:
    words = f"{len(run.done):,} of {len(run.done) + len(run.missing):,} {run.unit}"
    if run.tokens.total is not None:
        words += f", {run.tokens.done:,} of {run.tokens.total:,} tokens"
    return words if run.share is None else f"{words} ({percent(run.share)})"


def _progress(run: RunState) -> Iterator[str]:
    if not run.done and not run.missing:
        if not run.complete and run.settings.get("command", "reproduce") != "reproduce":
            yield "Nothing has been computed yet."
        return
    yield f"Done: {_amount(run)}."
    if run.missing:
        yield f"Missing: {run.unit} {listed(run.missing)}."
    if run.rate is not None:
        rate = f"Rate: {run.rate:,.0f} tokens/s while computing"
        if run.missing and run.seconds_left is not None:
            rate += f"; {timedelta(seconds=round(run.seconds_left))} left at that rate"
        yield f"{rate}."


def _ending(run: RunState) -> str:
    if run.writer is not None:
        return f"Now: {run.writer.words()} is writing to it."
    if not run.complete:
        return f"Nobody is writing to it. Continue with `identikit resume {run.folder}`."
    if "shard" in run.settings:
        return "Complete: nothing is left to compute."
    return "Complete: all results are written."


def listed(pieces: Sequence[int | str]) -> str:
    """List numbers as ranges, and names; only the first of many."""
    ranges: list[list[Any]] = []  # the first and the last of each, or a single one
    for piece in pieces:
        if ranges and isinstance(piece, int) and piece == ranges[-1][-1] + 1:
            ranges[-1][1:] = [piece]
        else:
            ranges.append([piece])
    words = ", ".join(" to ".join(map(str, ends)) for ends in ranges[:_SHOWN])
    return f"{words}, …" if len(ranges) > _SHOWN else words
