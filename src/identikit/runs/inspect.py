"""Inspect the folder of a run: what is done, missing or damaged, and who writes to it. No model is loaded.

The manifest is sealed and was checked; everything else may be damaged.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from fsspec import AbstractFileSystem

from identikit.errors import InputError
from identikit.results.files import Damaged
from identikit.results.words import percent
from identikit.runs.lock import FolderLock, Owner
from identikit.runs.run import PART, shard_files, texts_held
from identikit.runs.store import (
    CHECKSUMS,
    COLUMNS,
    COMPUTED,
    ERROR,
    MANIFEST,
    PLAN,
    PORTION_FOLDER,
    Store,
    leaves,
    open_folder,
    portion_folder,
    read_manifest,
)

INPUTS = "inputs"  # the folder of the inputs of `reproduce`
_SEALED = re.compile(r"(shard-.*|passage|sentence)\.safetensors|(part-.*|plan|collapse)\.json")
_MOST_LISTED = 8  # ranges or names


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
    - `seconds`: how long it took to compute the texts that are done
    - `sealed`, `damaged`: how many files have a checksum of their own, and which of them are damaged, with the reason
    - `writer`, `error`: who is writing now, and why the run ended the last time, if it failed
    - `complete`: whether everything is computed and written, including the tables if the run has any
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
        """The share of the tokens, or of the parts, that is done; None if it is not known."""
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
        """The time that the missing texts take at that rate."""
        if not self.rate or self.tokens.total is None:
            return None
        return (self.tokens.total - self.tokens.done) / self.rate

    def to_dict(self) -> dict[str, Any]:
        """Return everything, as JSON can hold it."""
        rates = {"share": self.share, "tokens_per_second": self.rate, "seconds_left": self.seconds_left}
        return asdict(self) | rates


def open_run(folder: str) -> Store:
    """Return the folder of a run, for reading."""
    files, path = open_folder(folder)
    if not files.isdir(path):
        reason = "it is a file" if files.isfile(path) else "there is no such folder"
        raise InputError(f"Cannot read {folder}: {reason}. Give the folder of a run.")
    if not files.exists(f"{path}/{MANIFEST}"):
        raise InputError(f"Cannot read {folder}: it has no {MANIFEST}. Give the folder of a run, as given with --out.")
    manifest = read_manifest(files, path)
    if manifest is None:
        raise InputError(f"Cannot read {folder}: {MANIFEST} is damaged, so it is not known what was computed there.")
    return Store(folder, manifest["run"], manifest["recorded"])


def complete_run(folder: str, doing: str) -> Store:
    """Return the store of a run that has its tables; errors begin with what one was `doing`."""
    store = open_run(folder)
    if not state(folder).complete or not store.has(COLUMNS):
        raise InputError(
            f"{doing}: the run is not complete, or has no tables. Finish it with `identikit resume {folder}`."
        )
    return store


@dataclass
class _Contents:
    """What the sealed files of a folder hold: texts or parts, each with its file, the plan, and sums over shards."""

    file_of: dict[int | str, str] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    sums: Counter[str] = field(default_factory=Counter)
    damaged: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, content: Any) -> None:
        """Add what a sealed file holds, or raise `Damaged`."""
        if name == PLAN:
            self.plan = dict(content)
        elif name.startswith(PART):
            self.file_of[name.removeprefix(PART).removesuffix(".json")] = name
        elif shard_files([name]):
            texts = texts_held(content)
            amounts = _amounts(content)
            for text in texts:
                if text in self.file_of:
                    raise Damaged(f"text {text} is also in {self.file_of[text]}")
            self.file_of |= dict.fromkeys(texts, name)
            self.sums.update(amounts)

    def planned(self) -> tuple[int | str, ...]:
        """Return the texts or parts that are to be computed; nothing where that is not known."""
        try:
            if "parts" in self.plan:
                return tuple(str(name) for name in self.plan["parts"])
            if "texts" in self.plan:
                return texts_held(self.plan)
        except (TypeError, Damaged):
            self.damaged[PLAN] = "it does not say what there is to do"
        return ()


def state(folder: str) -> RunState:
    """Return what the folder of a run holds."""
    store = open_run(folder)
    sealed = [name for name in store.names() if _SEALED.fullmatch(name)]
    contents = _Contents()
    for name in sealed:
        try:
            is_tensors = name.endswith(".safetensors")
            contents.add(name, store.read_tensors(name).about if is_tensors else store.read_json(name))
        except (Damaged, InputError, ValueError, TypeError) as error:
            contents.damaged[name] = str(error).rstrip(".")
    planned = contents.planned()
    file_of = contents.file_of
    unit = "parts" if any(isinstance(piece, str) for piece in (*planned, *file_of)) else "texts"
    for piece in file_of.keys() - set(planned) if planned else ():
        contents.damaged[file_of[piece]] = f"{piece} is not one of the run's {unit}"
    missing = tuple(piece for piece in planned if piece not in file_of)
    total = contents.plan.get("tokens")
    # A portion has no tables: they are made when the portions are merged.
    has_tables = store.has(CHECKSUMS) or ("command" not in store.settings and store.has(COMPUTED))
    is_written = bool(planned) if "shard" in store.settings else has_tables
    return RunState(
        folder=folder,
        settings=store.settings,
        recorded=store.recorded,
        unit=unit,
        done=tuple(sorted(piece for piece in file_of if isinstance(piece, str) == (unit == "parts"))),
        missing=missing,
        tokens=Amount(contents.sums["tokens"], total if isinstance(total, int) else None),
        seconds=round(float(contents.sums["seconds"]), 3),
        sealed=len(sealed),
        damaged=contents.damaged,
        writer=FolderLock(store.files, store.folder).holder(),
        error=_read_error(store),
        complete=is_written and not missing and not contents.damaged,
    )


def _amounts(about: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"tokens": int(about["tokens"]), "seconds": float(about["seconds"])}
    except (KeyError, TypeError, ValueError, OverflowError):
        raise Damaged("it does not say how much it holds") from None


def _read_error(store: Store) -> dict[str, str] | None:
    if not store.has(ERROR):
        return None
    try:
        note = json.loads(store.read(ERROR))
        return {"date": str(note["date"]), "error": str(note["error"])}
    except (InputError, ValueError, KeyError, TypeError):
        return {"date": "unknown", "error": f"{ERROR} cannot be read"}


# Folders within folders


def portion_folders(folder: str) -> dict[tuple[int, int], str]:
    """Return the existing folders of a run's portions, by index and count."""
    files, path = open_folder(folder)
    portions = {}
    for name in _subfolders(files, path):
        if match := PORTION_FOLDER.fullmatch(name):
            portions[int(match[1]), int(match[2])] = f"{folder.rstrip('/')}/{name}"
    return dict(sorted(portions.items()))


def missing_portions(existing: Collection[tuple[int, int]]) -> list[str]:
    """Return the names of the portions' folders that do not exist."""
    missing = []
    for count in {count for _, count in existing}:
        missing += [portion_folder(i, count) for i in range(1, count + 1) if (i, count) not in existing]
    return missing


def input_folders(folder: str) -> list[str]:
    """Return the folders of the inputs of `reproduce`."""
    files, path = open_folder(folder)
    folders = []
    for data in _subfolders(files, f"{path}/{INPUTS}"):
        for name in _subfolders(files, f"{path}/{INPUTS}/{data}"):
            folders.append(f"{folder.rstrip('/')}/{INPUTS}/{data}/{name}")
    return folders


def _subfolders(files: AbstractFileSystem, path: str) -> list[str]:
    if not files.isdir(path):
        return []
    entries = files.ls(path, True)
    return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory")


def is_run(folder: str) -> bool:
    """Whether a folder is that of a run."""
    files, path = open_folder(folder)
    return files.exists(f"{path}/{MANIFEST}")


# In words


def state_lines(run: RunState) -> list[str]:
    """Describe what a folder holds, in a few lines."""
    noted = dict(leaves(run.recorded))
    about = [run.settings.get("command", "an input of reproduce")]
    if "shard" in run.settings:
        about.append(f"shard {run.settings['shard']}")
    number_format = f" in {run.settings['dtype']}" if "dtype" in run.settings else ""
    about.append(f"model {noted.get('model.name')}{number_format}")
    if "data.source" in noted:
        texts = dict(leaves(run.settings)).get("data.texts")
        about.append(f"data {noted['data.source']}" + (f" ({texts:,} texts)" if isinstance(texts, int) else ""))
    in_first_line = {"command", "data", "model", "dtype", "options", "shard", "texts", "weights"}
    other_settings = {name: value for name, value in run.settings.items() if name not in in_first_line}
    options = leaves({"": run.settings.get("options", {})} | other_settings)
    lines = [f"{run.folder}: {', '.join(about)}."]
    lines.append(f"Settings: {', '.join(f'{name} {value}' for name, value in options if value is not None)}.")
    if started := [f"{name} {noted[name]}" for name in ("date", "device", "machine") if name in noted]:
        lines.append(f"Started: {', '.join(started)}.")
    lines += _progress_lines(run)
    for file, reason in run.damaged.items():
        lines.append(f"Damaged: {file} ({reason}). Its contents will be computed again when the run is resumed.")
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
        line += f", {_format_amount(run)}"
    for file in run.damaged:
        line += f"; {file} is damaged"
    if run.writer is not None:
        line += f"; {run.writer.words()} is writing to it"
    if run.error is not None:
        line += f"; ended with an error: {run.error['error']}"
    return line


def _progress_lines(run: RunState) -> list[str]:
    if not run.done and not run.missing:
        has_tables = run.settings.get("command", "reproduce") != "reproduce"
        return ["Nothing has been computed yet."] if has_tables and not run.complete else []
    lines = [f"Done: {_format_amount(run)}."]
    if run.missing:
        lines.append(f"Missing: {run.unit} {list_briefly(run.missing)}.")
    if run.rate is not None:
        rate = f"Rate: {run.rate:,.0f} tokens/s while computing"
        if run.missing and run.seconds_left is not None:
            rate += f"; {timedelta(seconds=round(run.seconds_left))} left at that rate"
        lines.append(f"{rate}.")
    return lines


def _format_amount(run: RunState) -> str:
    words = f"{len(run.done):,} of {len(run.done) + len(run.missing):,} {run.unit}"
    if run.tokens.total is not None:
        words += f", {run.tokens.done:,} of {run.tokens.total:,} tokens"
    return words if run.share is None else f"{words} ({percent(run.share)})"


def list_briefly(pieces: Sequence[int | str]) -> str:
    """List numbers as ranges, or names, and only the first of many."""
    ranges: list[list[Any]] = []  # the first and the last of each, or a single one
    for piece in pieces:
        if ranges and isinstance(piece, int) and piece == ranges[-1][-1] + 1:
            ranges[-1][1:] = [piece]
        else:
            ranges.append([piece])
    words = ", ".join(" to ".join(map(str, ends)) for ends in ranges[:_MOST_LISTED])
    return f"{words}, …" if len(ranges) > _MOST_LISTED else words
