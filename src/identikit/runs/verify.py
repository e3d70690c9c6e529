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
from identikit.runs.inspect import (
    complete_run,
    input_folders,
    is_run,
    list_briefly,
    missing_portions,
    open_run,
    portion_folders,
    state,
)
from identikit.runs.store import CHECKSUMS, COLUMNS, COMMAND, MANIFEST, PROOF, Store, open_folder

FIGURES = "figures"  # the folder of the figures of `reproduce`
_SUM = re.compile(r"([0-9a-f]{64})  ([^/\0]+)")


Problems = Iterator[tuple[str, str]]
"""Pairs of a file name and what is wrong with that file."""


@dataclass
class VerificationReport:
    """How many files were checked in which way, and what is `wrong` with which."""

    seals: int = 0
    checksums: int = 0
    tables: int = 0
    proofs: int = 0
    wrong: list[tuple[str, str]] = field(default_factory=list)

    def words(self) -> str:
        """Return a sentence on what was checked."""
        proofs = f", {self.proofs} steps of proofs in rational arithmetic" if self.proofs else ""
        return (
            f"Checked: {self.seals} sealed files, {self.checksums} files against {CHECKSUMS}, {self.tables} tables "
            f"against {COLUMNS}{proofs}."
        )


def verify(folder: str) -> VerificationReport:
    """Check every file of a run, of its shards, of a reproduction with its inputs, or of a saved result.

    Nothing is computed again, so it is not checked that the numbers are those that the model gives.
    """
    report = VerificationReport()
    files, path = open_folder(folder)
    if not is_run(folder) and files.exists(f"{path}/{ABOUT}"):
        saved_result(path)  # it checks the SHA-256 of the arrays
        report.checksums += 1
        return report
    portions = portion_folders(folder)
    if is_run(folder) or not portions:
        _check_run(folder, report)
    report.wrong += [(f"{folder.rstrip('/')}/{name}", "it is missing") for name in missing_portions(portions)]
    nested = [*portions.values(), *input_folders(folder)]
    figures = f"{folder.rstrip('/')}/{FIGURES}"
    if is_run(figures):
        nested.append(figures)
    for run_folder in nested:
        try:
            _check_run(run_folder, report)
        except InputError as error:
            report.wrong.append((run_folder, str(error)))
    return report


def unchanged_run(folder: str, doing: str) -> Store:
    """Return the store of a complete run none of whose files has changed; errors begin with what one was `doing`."""
    store = complete_run(folder, doing)
    if wrong := verify(folder).wrong:
        file, problem = wrong[0]
        raise InputError(
            f"{doing}: {file} is not as it was written ({problem.rstrip('.')}). Run `identikit verify {folder}`."
        )
    return store


def _check_run(folder: str, report: VerificationReport) -> None:
    store = open_run(folder)
    run = state(folder)
    report.seals += run.sealed
    if run.missing or not (run.complete or run.damaged):
        missing = f"{run.unit} {list_briefly(run.missing)} are" if run.missing else f"{CHECKSUMS} is"
        problem = f"it is not complete: {missing} missing; continue with `identikit resume {folder}`"
        report.wrong.append((folder, problem))
    problems = list(run.damaged.items())
    for check in (_check_command, _check_checksums, _check_tables, _check_proofs):
        problems += check(store, report)
    report.wrong += [(f"{folder}/{name}", problem) for name, problem in problems]


def _check_command(store: Store, report: VerificationReport) -> Problems:
    """Check the command that `identikit resume` would run; the inputs of a reproduction have none."""
    if "command" not in store.settings or store.folder.endswith(f"/{FIGURES}"):
        return
    if not store.has(COMMAND):
        yield COMMAND, "it is missing"
        return
    report.seals += 1
    try:
        command = unseal_record(store.read(COMMAND)).get("command")
    except (Damaged, InputError) as error:
        yield COMMAND, str(error)
        return
    if command != store.settings["command"]:
        yield COMMAND, f"it names the command {command!r:.40}, and {MANIFEST} {store.settings['command']!r:.40}"


def _check_checksums(store: Store, report: VerificationReport) -> Problems:
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


def _check_proofs(store: Store, report: VerificationReport) -> Problems:
    """Check every proof that the run wrote down."""
    start, end = PROOF.split("{}")
    for name in store.names():
        if name.startswith(start) and name.endswith(end):
            try:
                slacks = [slack for *_, slack in proof.check(store.read(name).decode())]
            except (proof.Refused, UnicodeDecodeError) as error:
                yield name, str(error)
                continue
            report.proofs += len(slacks)
            if min(slacks, default=-1) < 0:
                yield name, f"{sum(slack < 0 for slack in slacks)} of its {len(slacks)} steps are not proven"


def _check_tables(store: Store, report: VerificationReport) -> Problems:
    """Check that tables have the columns and types of `columns.json`, and no unexpected missing values."""
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
        if flaw := _table_flaw(store.read(name), columns):
            yield name, flaw


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
