"""What the folder of a run holds: what is done, missing or damaged, and who writes to it. No model is loaded.

The manifest is sealed, so it can be trusted; nothing else is.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
    COLUMNS,
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


def complete_run(folder: str, doing: str) -> Store:
    """Return the store of a run whose tables are there, or say what is missing to one who is `doing` something."""
    store = open_run(folder)
    if not state(folder).complete or not store.has(COLUMNS):
        raise InputError(
            f"{doing}: the run is not complete, or has no tables. Finish it with `identikit resume {folder}`."
        )
    return store


def state(folder: str) -> RunState:
    """Return what the folder of a run holds."""
    store = open_run(folder)
    sealed = [name for name in store.names() if _SEALED.fullmatch(name)]
    pieces: dict[int | str, str] = {}  # texts or parts, each with its file
    plan: dict[str, Any] = {}
    sums: Counter[str] = Counter()
    damaged: dict[str, str] = {}
    for name in sealed:
        try:
            held = store.read_tensors(name).about if name.endswith(".safetensors") else store.read_json(name)
            if name == PLAN:
                plan = dict(held)
            elif name.startswith(PART):
                pieces[name.removeprefix(PART).removesuffix(".json")] = name
            elif shard_files([name]):
                numbers = texts_held(held)
                amounts = _amounts(held)
                if twice := [number for number in numbers if number in pieces]:
                    raise Damaged(f"text {twice[0]} is also in {pieces[twice[0]]}")
                pieces |= dict.fromkeys(numbers, name)
                sums.update(amounts)
        except (Damaged, InputError, ValueError, TypeError) as why:
            damaged[name] = str(why).rstrip(".")
    planned: tuple[int | str, ...] = ()
    try:
        if "parts" in plan:
            planned = tuple(str(name) for name in plan["parts"])
        elif "texts" in plan:
            planned = texts_held(plan)
    except (TypeError, Damaged):
        damaged[PLAN] = "it does not say what there is to do"
    unit = "parts" if any(isinstance(piece, str) for piece in (*planned, *pieces)) else "texts"
    for piece in pieces.keys() - set(planned) if planned else ():
        damaged[pieces[piece]] = f"{piece} is not one of the run's {unit}"
    missing = tuple(piece for piece in planned if piece not in pieces)
    total = plan.get("tokens")
    # A shard is written when its texts are: tables are made when the shards are merged.
    tables = store.has(CHECKSUMS) or ("command" not in store.settings and store.has(COMPUTED))
    return RunState(
        folder=folder,
        settings=store.settings,
        recorded=store.recorded,
        unit=unit,
        done=tuple(sorted(piece for piece in pieces if isinstance(piece, str) == (unit == "parts"))),
        missing=missing,
        tokens=Amount(sums["tokens"], total if isinstance(total, int) else None),
        seconds=round(float(sums["seconds"]), 3),
        sealed=len(sealed),
        damaged=damaged,
        writer=FolderLock(store.files, store.folder).holder(),
        error=_error(store),
        complete=not missing and not damaged and (bool(planned) if "shard" in store.settings else tables),
    )


def _amounts(about: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"tokens": int(about["tokens"]), "seconds": float(about["seconds"])}
    except (KeyError, TypeError, ValueError, OverflowError):
        raise Damaged("it does not say how much it holds") from None


def _error(store: Store) -> dict[str, str] | None:
    if not store.has(ERROR):
        return None
    try:
        note = json.loads(store.read(ERROR))
        return {"date": str(note["date"]), "error": str(note["error"])}
    except (InputError, ValueError, KeyError, TypeError):
        return {"date": "unknown", "error": f"{ERROR} cannot be read"}


# Folders within folders


def parts_of(folder: str) -> dict[tuple[int, int], str]:
    """Return the folders of the shards of a run that are there, by number and how many there are."""
    files, path = opened(folder)
    parts = {}
    for name in _folders(files, path):
        if match := PART_FOLDER.fullmatch(name):
            parts[int(match[1]), int(match[2])] = f"{folder.rstrip('/')}/{name}"
    return dict(sorted(parts.items()))


def absent_parts(parts: Iterable[tuple[int, int]]) -> list[str]:
    """Return the folders of the shards that are not there."""
    there = set(parts)
    counts = {count for _, count in there}
    return [part_folder(i, count) for count in counts for i in range(1, count + 1) if (i, count) not in there]


def inputs_of(folder: str) -> list[str]:
    """Return the folders of the inputs of `reproduce`."""
    files, path = opened(folder)
    places = []
    for data in _folders(files, f"{path}/{INPUTS}"):
        for name in _folders(files, f"{path}/{INPUTS}/{data}"):
            places.append(f"{folder.rstrip('/')}/{INPUTS}/{data}/{name}")
    return places


def _folders(files: AbstractFileSystem, path: str) -> list[str]:
    if not files.isdir(path):
        return []
    entries = files.ls(path, True)
    return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory")


def is_run(folder: str) -> bool:
    """Say whether a folder is that of a run."""
    files, path = opened(folder)
    return files.exists(f"{path}/{MANIFEST}")


# In words


def state_words(run: RunState) -> list[str]:
    """Say what a folder holds, in a few lines."""
    noted = dict(leaves(run.recorded))
    about = [run.settings.get("command", "an input of reproduce")]
    if "shard" in run.settings:
        about.append(f"shard {run.settings['shard']}")
    number_format = f" in {run.settings['dtype']}" if "dtype" in run.settings else ""
    about.append(f"model {noted.get('model.name')}{number_format}")
    if "data.source" in noted:
        texts = dict(leaves(run.settings)).get("data.texts")
        about.append(f"data {noted['data.source']}" + (f" ({texts:,} texts)" if isinstance(texts, int) else ""))
    told_above = {"command", "data", "model", "dtype", "options", "shard", "texts", "weights"}
    others = {name: value for name, value in run.settings.items() if name not in told_above}
    chosen = leaves({"": run.settings.get("options", {})} | others)
    lines = [f"{run.folder}: {', '.join(about)}."]
    lines.append(f"Settings: {', '.join(f'{name} {value}' for name, value in chosen if value is not None)}.")
    if started := [f"{name} {noted[name]}" for name in ("date", "device", "machine") if name in noted]:
        lines.append(f"Started: {', '.join(started)}.")
    lines += _progress(run)
    for file, why in run.damaged.items():
        lines.append(f"Damaged: {file} ({why}). Its contents will be computed again when the run is resumed.")
    if run.error is not None:
        lines.append(f"The last run ended with an error ({run.error['date']}): {run.error['error']}")
    if run.writer is not None:
        lines.append(f"Now: {run.writer.words()} is writing to it.")
    elif not run.complete:
        lines.append(f"Nobody is writing to it. Continue with `identikit resume {run.folder}`.")
    else:
        lines.append(
            f"Complete: {'nothing is left to compute' if 'shard' in run.settings else 'all results are written'}."
        )
    return lines


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


def _progress(run: RunState) -> list[str]:
    if not run.done and not run.missing:
        has_tables = run.settings.get("command", "reproduce") != "reproduce"
        return ["Nothing has been computed yet."] if has_tables and not run.complete else []
    lines = [f"Done: {_amount(run)}."]
    if run.missing:
        lines.append(f"Missing: {run.unit} {listed(run.missing)}.")
    if run.rate is not None:
        rate = f"Rate: {run.rate:,.0f} tokens/s while computing"
        if run.missing and run.seconds_left is not None:
            rate += f"; {timedelta(seconds=round(run.seconds_left))} left at that rate"
        lines.append(f"{rate}.")
    return lines


def _amount(run: RunState) -> str:
    words = f"{len(run.done):,} of {len(run.done) + len(run.missing):,} {run.unit}"
    if run.tokens.total is not None:
        words += f", {run.tokens.done:,} of {run.tokens.total:,} tokens"
    return words if run.share is None else f"{words} ({percent(run.share)})"


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
