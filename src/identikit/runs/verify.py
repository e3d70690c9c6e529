"""Whether the files of a run are as they were written: their seals, their checksums, and the form of their tables."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from identikit import proof
from identikit.errors import InputError
from identikit.results.files import ABOUT, Damaged, unseal_record
from identikit.results.result import saved_result
from identikit.runs.inspect import absent_parts, complete_run, inputs_of, is_run, listed, open_run, parts_of, state
from identikit.runs.store import CHECKSUMS, COLUMNS, COMMAND, MANIFEST, PROOF, Store, opened

FIGURES = "figures"  # the folder of the figures of `reproduce`
_SUM = re.compile(r"([0-9a-f]{64})  ([^/\0]+)")


@dataclass
class Verified:
    """How many files were checked in which way, and what is wrong with which."""

    seals: int = 0
    checksums: int = 0
    tables: int = 0
    proofs: int = 0
    wrong: list[tuple[str, str]] = field(default_factory=list)

    def words(self) -> str:
        """Say what was checked."""
        return (
            f"Checked: {self.seals} sealed files, {self.checksums} files against {CHECKSUMS}, {self.tables} tables "
            f"against {COLUMNS}{f', {self.proofs} steps of proofs in rational arithmetic' if self.proofs else ''}."
        )


def verify(folder: str) -> Verified:
    """Check every file of a run, of its shards, of a reproduction with its inputs, or of a saved result.

    Nothing is computed again, so it is not checked that the numbers are those that the model gives.
    """
    report = Verified()
    files, path = opened(folder)
    if not is_run(folder) and files.exists(f"{path}/{ABOUT}"):
        saved_result(path)  # it checks the SHA-256 of the arrays
        report.checksums += 1
        return report
    parts = parts_of(folder)
    if is_run(folder) or not parts:
        _check(folder, report)
    report.wrong += [(f"{folder.rstrip('/')}/{name}", "it is missing") for name in absent_parts(parts)]
    figures = f"{folder.rstrip('/')}/{FIGURES}"
    for place in (*parts.values(), *inputs_of(folder), *([figures] if is_run(figures) else [])):
        try:
            _check(place, report)
        except InputError as why:
            report.wrong.append((place, str(why)))
    return report


def unchanged_run(folder: str, doing: str) -> Store:
    """Return the store of a complete run none of whose files has changed, to one who is `doing` something with it."""
    store = complete_run(folder, doing)
    if wrong := verify(folder).wrong:
        file, why = wrong[0]
        raise InputError(
            f"{doing}: {file} is not as it was written ({why.rstrip('.')}). Run `identikit verify {folder}`."
        )
    return store


def _check(folder: str, report: Verified) -> None:
    store = open_run(folder)
    run = state(folder)
    report.seals += run.sealed
    if run.missing or not (run.complete or run.damaged):
        rest = f"{run.unit} {listed(run.missing)} are missing" if run.missing else f"{CHECKSUMS} is missing"
        report.wrong.append((folder, f"it is not complete: {rest}; continue with `identikit resume {folder}`"))
    checked = (*run.damaged.items(), *_command(store, report), *_checksums(store, report), *_tables(store, report))
    report.wrong += [(f"{folder}/{name}", why) for name, why in (*checked, *_proofs(store, report))]


def _command(store: Store, report: Verified) -> Iterator[tuple[str, str]]:
    """Check what `identikit resume` would run; the inputs of a reproduction have no command of their own."""
    if "command" not in store.settings or store.folder.endswith(f"/{FIGURES}"):
        return
    if not store.has(COMMAND):
        yield COMMAND, "it is missing"
        return
    report.seals += 1
    try:
        command = unseal_record(store.read(COMMAND)).get("command")
    except (Damaged, InputError) as why:
        yield COMMAND, str(why)
        return
    if command != store.settings["command"]:
        yield COMMAND, f"it names the command {command!r:.40}, and {MANIFEST} {store.settings['command']!r:.40}"


def _checksums(store: Store, report: Verified) -> Iterator[tuple[str, str]]:
    if not store.has(CHECKSUMS):
        return
    for line in store.read(CHECKSUMS).decode(errors="replace").splitlines():
        match = _SUM.fullmatch(line)
        if match is None:
            yield CHECKSUMS, f"it has the line {line[:80]!r}, which is not a checksum"
            continue
        report.checksums += 1
        digest, name = match.groups()
        if not store.has(name):
            yield name, f"it is missing, and {CHECKSUMS} lists it"
        elif hashlib.sha256(store.read(name)).hexdigest() != digest:
            yield name, f"its SHA-256 is not the one in {CHECKSUMS}"


def _proofs(store: Store, report: Verified) -> Iterator[tuple[str, str]]:
    """Check every proof that a run kept."""
    start, end = PROOF.split("{}")
    for name in store.names():
        if name.startswith(start) and name.endswith(end):
            try:
                slacks = [slack for *_, slack in proof.check(store.read(name).decode())]
            except (proof.Refused, UnicodeDecodeError) as why:
                yield name, str(why)
                continue
            report.proofs += len(slacks)
            if min(slacks, default=-1) < 0:
                yield name, f"{sum(slack < 0 for slack in slacks)} of its {len(slacks)} steps are not proven"


def _tables(store: Store, report: Verified) -> Iterator[tuple[str, str]]:
    """Check that tables have the columns that `columns.json` describes, of these types, and no undue gaps."""
    try:
        described = json.loads(store.read(COLUMNS)) if store.has(COLUMNS) else {}
        tables = {str(table): dict(columns) for table, columns in described.items()}
    except (ValueError, AttributeError, TypeError):
        yield COLUMNS, "it does not describe tables"
        return
    for table, columns in tables.items():
        name = f"{table}.parquet"
        if "/" in table or not store.has(name):
            yield name, f"it is missing, and {COLUMNS} describes it"
            continue
        report.tables += 1
        if why := _table_flaw(store.read(name), columns):
            yield name, why


def _table_flaw(content: bytes, columns: dict[str, object]) -> str | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(pa.BufferReader(content))
    except (OSError, ValueError, pa.ArrowException):
        return "it is not a Parquet file that can be read"
    if table.column_names != list(columns):
        return f"its columns are not those in {COLUMNS}"
    gaps = table.to_pandas().isna().any()  # missing values, and NaN
    for column, kind in zip(columns, table.schema.types, strict=True):
        about = columns[column]
        if not isinstance(about, dict) or str(kind).removeprefix("large_") != about.get("type"):
            return f"column {column!r} is of the type {kind}, which {COLUMNS} does not say"
        if about.get("missing") == "never" and gaps[column]:
            return f"column {column!r} has missing values, and should have none"
    return None
