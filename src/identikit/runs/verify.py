"""Whether the files of a run are as they were written: their seals, their checksums, and the form of their tables."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from identikit.errors import InputError
from identikit.results.folders import read_folder
from identikit.results.result import result_of
from identikit.runs.inspect import State, absent_parts, inputs_of, is_run, listed, open_run, parts_of, state
from identikit.runs.store import CHECKSUMS, COLUMNS, Store, opened

_SUM = re.compile(r"([0-9a-f]{64})  ([^/\0]+)")
_RESULT = "result.json"


@dataclass
class Verified:
    """How many files were checked in which way, and what is wrong with which."""

    seals: int = 0
    checksums: int = 0
    tables: int = 0
    wrong: list[tuple[str, str]] = field(default_factory=list)

    def words(self) -> str:
        """Say what was checked."""
        return (
            f"Checked: {self.seals} sealed files, {self.checksums} files against {CHECKSUMS}, {self.tables} tables "
            f"against {COLUMNS}."
        )


def verify(folder: str) -> Verified:
    """Check every file of a run, of its shards, of a reproduction with its inputs, or of a saved result.

    Nothing is computed again, so it is not checked that the numbers are those that the model gives.
    """
    found, (files, path) = Verified(), opened(folder)
    if not is_run(folder) and files.exists(f"{path}/{_RESULT}"):
        result_of(read_folder(path), str(path))  # it checks the SHA-256 of the arrays
        found.checksums += 1
        return found
    parts = parts_of(folder)
    if is_run(folder) or not parts:
        _check(folder, found)
    found.wrong += [(f"{folder.rstrip('/')}/{name}", "it is missing") for name in absent_parts(parts)]
    figures = f"{folder.rstrip('/')}/figures"
    for nested in (*parts.values(), *inputs_of(folder), *([figures] if is_run(figures) else [])):
        try:
            _check(nested, found)
        except InputError as why:
            found.wrong.append((nested, str(why)))
    return found


def _check(folder: str, found: Verified) -> None:
    one, (store, _) = state(folder), open_run(folder)
    found.seals += one.sealed
    found.wrong += [(f"{folder}/{name}", why) for name, why in one.damaged.items()]
    if one.missing or not (one.complete or one.damaged):
        found.wrong.append((folder, _unfinished(one)))
    for check in (_checksums, _tables):
        for name, why in check(store, found):
            found.wrong.append((f"{folder}/{name}", why))


def _unfinished(one: State) -> str:
    rest = f"{one.unit} {listed(one.missing)} are missing" if one.missing else f"{CHECKSUMS} is missing"
    return f"it is not complete: {rest}; `identikit resume {one.folder}` goes on"


def _checksums(store: Store, found: Verified) -> Iterator[tuple[str, str]]:
    if not store.has(CHECKSUMS):
        return
    for line in store.read(CHECKSUMS).decode(errors="replace").splitlines():
        match = _SUM.fullmatch(line)
        if match is None:
            yield CHECKSUMS, f"it has the line {line[:80]!r}, which is no checksum"
            continue
        found.checksums += 1
        digest, name = match.groups()
        if not store.has(name):
            yield name, f"it is missing, and {CHECKSUMS} lists it"
        elif hashlib.sha256(store.read(name)).hexdigest() != digest:
            yield name, f"its SHA-256 is not the one in {CHECKSUMS}"


def _tables(store: Store, found: Verified) -> Iterator[tuple[str, str]]:
    """Check that tables have the columns that `columns.json` describes, of these types, and no undue gaps."""
    if not store.has(COLUMNS):
        return
    try:
        described = {str(table): dict(columns) for table, columns in json.loads(store.read(COLUMNS)).items()}
    except (ValueError, AttributeError, TypeError):
        yield COLUMNS, "it does not describe tables"
        return
    for table, columns in described.items():
        name = f"{table}.parquet"
        if "/" in table or not store.has(name):
            yield name, f"it is missing, and {COLUMNS} describes it"
            continue
        found.tables += 1
        if why := _table_flaw(store.read(name), columns):
            yield name, why


def _table_flaw(content: bytes, columns: dict[str, Any]) -> str | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(pa.BufferReader(content))
    except (OSError, ValueError, pa.ArrowException):
        return "it is not a Parquet file that can be read"
    if table.column_names != list(columns):
        return f"its columns are not those in {COLUMNS}"
    for column, about in columns.items():
        found = table.column(column)
        if not isinstance(about, dict) or str(found.type).removeprefix("large_") != about.get("type"):
            return f"column {column!r} is of the type {found.type}, which {COLUMNS} does not say"
        gaps = found.null_count or (pa.types.is_floating(found.type) and np.isnan(found.to_numpy()).any())
        if about.get("missing") == "never" and gaps:
            return f"column {column!r} has missing values, and should have none"
    return None
