"""Files and Hugging Face datasets as tables of texts: rows with named cells, read one by one.

pyarrow reads Parquet. Lines, CSV and JSON are read by the standard library, which names the line of a mistake and
refuses what pyarrow would accept or misread (docs/adr/0020-readers.md).
"""

import csv
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, Literal

import fsspec
from fsspec.implementations.local import LocalFileSystem

from identikit.errors import InputError, reason_of
from identikit.texts.text import MAX_CHARACTERS

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

HUB = "datasets:"
Row = Mapping[str, object]
Rows = Iterator[tuple[str, Row]]
_LONGEST_LINE = 2 * MAX_CHARACTERS + 1  # a pair of texts
_HUB_ERRORS = (OSError, ValueError, RuntimeError)
_Numbered = Generator[tuple[int, list[str]]]


@dataclass(frozen=True)
class TextTable:
    """Rows with named cells; `rows(columns)` reads them again as (place, cells), where place is, for example, 'line 3'.

    `text_columns` are the columns that may hold texts, as far as can be seen before reading.
    """

    name: str
    columns: tuple[str, ...]
    text_columns: tuple[str, ...]
    rows: Callable[[Sequence[str]], Rows]

    def __post_init__(self) -> None:
        repeated = _first_repeated(self.columns)
        if repeated is not None:
            raise InputError(f"Reading {self.name}: two columns are called {repeated!r}. Rename one of them.")


def _first_repeated(names: Sequence[str]) -> str | None:
    return next((name for index, name in enumerate(names) if name in names[:index]), None)


def file_system(path: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of a path or address, and the path there."""
    if "::" in path and "://" not in path:  # fsspec would take such a name for a chain of addresses
        return LocalFileSystem(), str(Path(path).absolute())
    return fsspec.url_to_fs(path)


def kind_at(path: str) -> Literal["file", "other", "nothing"]:
    """Return what is at a path or address."""
    try:
        filesystem, inside = file_system(path)
        if filesystem.isfile(inside):
            return "file"
        return "other" if filesystem.exists(inside) else "nothing"
    except Exception as error:  # each kind of storage has errors of its own
        raise InputError(
            f"Reading {path}: it cannot be reached ({reason_of(error, 300)}). Check the address."
        ) from error


@contextmanager
def _opened(path: str, mode: str = "r", **options: str) -> Iterator[IO[Any]]:
    try:
        filesystem, inside = file_system(path)
        with filesystem.open(inside, mode, **options) as file:
            yield file  # pyright: ignore[reportReturnType]
    except UnicodeDecodeError as error:
        raise InputError(f"Reading {path}: it is not UTF-8 ({error.reason}). Save it as UTF-8.") from error
    except OSError as error:
        raise InputError(f"Reading {path}: it cannot be read ({reason_of(error, 300)}). Check the file.") from error


# Lines. Only \n and \r\n end one: texts may hold other separators


def _lines(path: str, *, ends: bool = False) -> Generator[tuple[int, str]]:
    """Yield numbered lines, with their ends or without; refuse lines longer than any text, and what is not text."""
    with _opened(path, encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), ""), 1):
            if len(line) == _LONGEST_LINE and not line.endswith("\n"):
                raise InputError(
                    f"Reading {path}, line {number}: it has more than {_LONGEST_LINE - 1:,} characters. Split it."
                )
            if number == 1 and not line.endswith("\n") and "\r" in line[:-1]:
                raise InputError(f"Reading {path}: its lines end in \\r alone. Save it with \\n at their ends.")
            if "\0" in line:
                raise InputError(f"Reading {path}, line {number}: it holds a NUL character. Save the file as UTF-8.")
            yield number, line if ends else line.removesuffix("\n").removesuffix("\r")


def line_table(path: str, *, text_of: Callable[[str], str] = str) -> TextTable:
    """Return a table of one column, 'text', with one row per line.

    `text_of` returns the text of a line; lines whose text is blank are left out.
    """

    def rows(_: Sequence[str]) -> Rows:
        for number, line in _lines(path):
            text = text_of(line)
            if text.strip():
                yield f"line {number}", {"text": text}

    return TextTable(path, ("text",), ("text",), rows)


def _first(path: str, numbered: Generator[tuple[int, object]]) -> Any:
    """Return the content of the first line that is not blank."""
    with closing(numbered):
        for _, content in numbered:
            return content
    raise InputError(f"Reading {path}: the file is empty. Pass a file that holds texts.")


# Cells between tabs or commas


def _tab_cells(path: str) -> _Numbered:
    for number, line in _lines(path):
        if line:
            yield number, line.split("\t")


def _comma_cells(path: str) -> _Numbered:
    reader = csv.reader((line for _, line in _lines(path, ends=True)), strict=True)
    cells: list[str] | None = []
    while cells is not None:
        before = csv.field_size_limit(MAX_CHARACTERS)  # a cell may be as long as a text; unless told, Python takes less
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise InputError(f"Reading {path}, line {reader.line_num}: not valid CSV ({error}). Repair it.") from error
        finally:
            csv.field_size_limit(before)
        if cells:
            yield reader.line_num, cells


def delimited_table(
    path: str, *, cells: Callable[[str], _Numbered] = _tab_cells, header: tuple[str, ...] | None = None
) -> TextTable:
    """Return a table of delimited cells whose first line names the columns, unless `header` does."""
    columns = tuple(_first(path, cells(path))) if header is None else header

    def rows(_: Sequence[str]) -> Rows:
        lines = cells(path)
        if header is None:
            next(lines)
        for number, row in lines:
            if len(row) != len(columns):
                count = f"{len(row)} cells where {len(columns)} were expected ({', '.join(columns)})"
                raise InputError(f"Reading {path}, line {number}: it has {count}. Repair the line.")
            yield f"line {number}", dict(zip(columns, row, strict=True))

    return TextTable(path, columns, columns, rows)


# JSON lines


def _jsonl_table(path: str) -> TextTable:
    first = _first(path, _records(path))
    text_columns = tuple(column for column, value in first.items() if isinstance(value, str))

    def rows(_: Sequence[str]) -> Rows:
        for number, record in _records(path):
            yield f"line {number}", record

    return TextTable(path, tuple(first), text_columns, rows)


def _records(path: str) -> Generator[tuple[int, dict[str, object]]]:
    def mapping(pairs: list[tuple[str, object]]) -> dict[str, object]:
        repeated = _first_repeated([key for key, _ in pairs])
        if repeated is not None:
            raise ValueError(f"the key {repeated!r} occurs twice")
        return dict(pairs)

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            record = json.loads(line, object_pairs_hook=mapping, parse_constant=refuse)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"Reading {path}, line {number}: not valid JSON ({reason_of(error, 300)}). Repair the line."
            ) from error
        if not isinstance(record, dict):
            raise InputError(f"Reading {path}, line {number}: expected a JSON object, got {type(record).__name__}.")
        yield number, record


# Parquet; pyarrow is imported here, so that bare GPU images do without it


@contextmanager
def _parquet_file(path: str) -> Iterator["ParquetFile"]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with _opened(path, "rb") as file:
            yield ParquetFile(file)
    except pyarrow.ArrowException as error:
        raise InputError(
            f"Reading {path}: not valid Parquet ({reason_of(error, 300)}). Write the file again."
        ) from error


def _parquet_table(path: str) -> TextTable:
    with _parquet_file(path) as file:
        schema = file.schema_arrow
    text_columns = tuple(field.name for field in schema if str(field.type) in ("string", "large_string"))

    def rows(columns: Sequence[str]) -> Rows:
        numbers = count(1)
        with _parquet_file(path) as file:
            for batch in file.iter_batches(1024, columns=list(columns)):
                for record in batch.to_pylist():
                    yield f"row {next(numbers)}", record

    return TextTable(path, tuple(schema.names), text_columns, rows)


READERS: Mapping[str, Callable[[str], TextTable]] = {
    ".txt": line_table,
    ".tsv": delimited_table,
    ".csv": partial(delimited_table, cells=_comma_cells),
    ".jsonl": _jsonl_table,
    ".parquet": _parquet_table,
}


# Hugging Face datasets


def hub_table(name: str, columns: object, split: str | None) -> TextTable:
    """Return a dataset of the hub or a local folder as a table; `columns` and `split` must be named."""
    if not name.strip("/ "):
        raise InputError(f"Reading '{HUB}{name}': the name of the dataset is missing. Use '{HUB}NAME'.")
    if columns is None or split is None:
        raise InputError(f"Reading {HUB}{name}: pass columns and split, such as columns='text', split='train'.")
    try:
        import datasets  # pyright: ignore[reportMissingImports] - an extra
    except ImportError as error:
        raise InputError(f"Reading {HUB}{name} needs datasets. Run `pip install 'identikit[data]'`.") from error
    try:
        stream = _load_stream(datasets, name, split)
        first = next(iter(stream), None)
    except _HUB_ERRORS as error:
        raise InputError(
            f"Reading {HUB}{name}, split {split!r}: datasets cannot load it ({reason_of(error, 300)})."
        ) from error
    if first is None:
        raise InputError(f"Reading {HUB}{name}: split {split!r} is empty. Choose another.")

    def rows(_: Sequence[str]) -> Rows:
        try:
            for number, row in enumerate(stream, 1):
                yield f"row {number}", row
        except _HUB_ERRORS as error:
            raise InputError(f"Reading {HUB}{name}: datasets cannot read on ({reason_of(error, 300)}).") from error

    return TextTable(f"{HUB}{name}", tuple(first), (), rows)


def _load_stream(datasets: ModuleType, name: str, split: str) -> Any:
    """Load by the whole name; if there is no such dataset, what follows the last slash may be a configuration."""
    try:
        return datasets.load_dataset(name, split=split, streaming=True)
    except FileNotFoundError as missing:
        repository, _, configuration = name.rpartition("/")
        if not repository:
            raise
        try:
            return datasets.load_dataset(repository, configuration, split=split, streaming=True)
        except FileNotFoundError:
            raise missing from None
