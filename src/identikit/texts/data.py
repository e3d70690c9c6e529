"""Files and datasets as streams of texts: `read_texts`, and `read_labelled` for datasets with two classes.

Every source becomes a `_Table` whose rows are read one by one; `KNOWN` lists the datasets known by name.
"""

import csv
import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from itertools import chain
from pathlib import PurePosixPath
from typing import Any

import fsspec

from identikit.checks import is_collection, shortened
from identikit.errors import InputError
from identikit.texts.text import LONGEST, Text

_LONGEST_LINE = 2 * LONGEST + 1  # a pair of texts
_Rows = Iterator[tuple[str, Mapping[str, object]]]
_Cells = Iterator[tuple[int, list[str]]]


def read_texts(
    source: str | os.PathLike[str],
    *,
    columns: str | Sequence[str] | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    split: str | None = None,
) -> Iterator[Text]:
    """Stream the texts of a file, of a known dataset in a folder, or of a Hugging Face dataset.

    `source` is one of

    - a path (any that fsspec reads, such as object storage) ending in .txt (one text per line), .tsv (plain tabs,
      quotes are text), .csv, .jsonl or .parquet; `columns` names one column, or two for pairs, unless there is only one
      text column;
    - 'mrpc', 'cola', 'mnli' or 'wikitext' with `data_dir`, the folder that holds it (a GLUE download, or its files),
      and `split` 'dev' (the default; 'test' for wikitext) or 'train';
    - 'datasets:NAME' or 'datasets:NAME/CONFIG', a hub id or local folder, with `columns` and `split`.

    Wrong arguments raise an error at the call; texts are read while iterating.
    """
    source = _path("source", source, "a file, the name of a dataset, or 'datasets:NAME'")
    if columns is not None:
        _names(columns)
    data_dir = None if data_dir is None else _path("data_dir", data_dir, "a folder")
    if split is not None and not isinstance(split, str):
        raise InputError(f"split={shortened(split)} cannot be used: expected a name, such as 'train'.")
    if source.lower() in KNOWN:
        _refuse(source, "columns", columns, "it knows its own")
        return _known_texts(source.lower(), data_dir, split)
    _refuse(source, "data_dir", data_dir, f"only {', '.join(KNOWN)} take it")
    if source.startswith(_HUB):
        table = _hub_table(source.removeprefix(_HUB), columns, split)
    else:
        _refuse(source, "split", split, "a file has none")
        table = _file_table(source)
    return _texts(table, _chosen_columns(table, columns))


def read_labelled(
    name: str, *, data_dir: str | os.PathLike[str], split: str | None = None
) -> Iterator[tuple[Text, int]]:
    """Stream the texts of 'mrpc' or 'cola', each with its label: 1 for a paraphrase or an acceptable sentence, else 0.

    `data_dir` and `split` are as in `read_texts`. Pairs of MRPC's development set are left out of its training set, by
    their IDs.
    """
    known = KNOWN.get(name.lower()) if isinstance(name, str) else None
    if known is None or not known.labels:
        labelled = ", ".join(other for other in KNOWN if KNOWN[other].labels)
        raise InputError(f"Reading texts with labels: {shortened(name)} is not known. Use one of {labelled}.")
    streams = [
        _labelled(table, _spelled_columns(table, known.columns), _label_column(table, known.labels))
        for table in _split_tables(name.lower(), data_dir, split)
    ]
    return chain.from_iterable(streams)


def sample_texts() -> list[Text]:
    """Return the pairs of texts that come with the package."""
    return list(read_texts(str(files("identikit.texts") / "samples.tsv"), columns=["first", "second"]))


def sample_text() -> Text:
    """Return the sample pair of median length, about sixty tokens."""
    pairs = sorted(sample_texts(), key=lambda pair: len(" ".join(map(str, pair))))
    return pairs[len(pairs) // 2]


@dataclass(frozen=True)
class _Table:
    """Rows with named cells; `rows(columns)` reads them anew as (place, cells), where place is 'line 3' or the like."""

    name: str
    columns: tuple[str, ...]
    text_columns: tuple[str, ...]
    rows: Callable[[Sequence[str]], _Rows]

    def __post_init__(self) -> None:
        if (repeated := _repeated(self.columns)) is not None:
            raise InputError(f"Reading {self.name}: two columns are called {repeated!r}. Give each a name of its own.")


def _texts(table: _Table, columns: Sequence[str]) -> Iterator[Text]:
    return (_text(table, place, row, columns) for place, row in _some_rows(table, columns))


def _labelled(table: _Table, columns: Sequence[str], label: str) -> Iterator[tuple[Text, int]]:
    for place, row in _some_rows(table, (*columns, label)):
        value = _cell(table, place, row, label)
        if value not in ("0", "1"):
            raise InputError(
                f"Reading {table.name}, {place}: column {label!r} holds {value!r:.40}, expected the label 0 or 1. "
                "Repair the row."
            )
        yield _text(table, place, row, columns), int(value)


def _some_rows(table: _Table, columns: Sequence[str]) -> _Rows:
    empty = True
    for place, row in table.rows(columns):
        yield place, row
        empty = False
    if empty:
        raise InputError(f"Reading {table.name}: it holds no text. Pass a file that does.")


def _text(table: _Table, place: str, row: Mapping[str, object], columns: Sequence[str]) -> Text:
    cells = tuple(_cell(table, place, row, column) for column in columns)
    return cells[0] if len(cells) == 1 else (cells[0], cells[1])


def _cell(table: _Table, place: str, row: Mapping[str, object], column: str) -> str:
    value = row.get(column)
    if isinstance(value, str) and len(value) > LONGEST:
        raise InputError(
            f"Reading {table.name}, {place}: column {column!r} holds {len(value):,} characters, and a text may have at "
            f"most {LONGEST:,}. Shorten it."
        )
    if isinstance(value, str) and value.strip():
        return value
    got = "nothing" if value is None or isinstance(value, str) else f"{type(value).__name__} {value!r:.40}"
    raise InputError(f"Reading {table.name}, {place}: column {column!r} holds {got}, expected a text. Repair the row.")


def _chosen_columns(table: _Table, wanted: str | Sequence[str] | None) -> tuple[str, ...]:
    known = ", ".join(repr(column) for column in table.columns)
    if wanted is None:
        if len(table.text_columns) != 1:
            raise InputError(
                f"Reading {table.name}: name the column of the texts, or two for pairs (command line: --column). It "
                f"has {known}."
            )
        return table.text_columns
    chosen = _names(wanted)
    if len(chosen) not in (1, 2):
        raise InputError(f"Reading {table.name}: got {len(chosen)} columns, expected one for texts or two for pairs.")
    if (repeated := _repeated(chosen)) is not None:
        raise InputError(f"Reading {table.name}: the column {repeated!r} is named twice. Name two different ones.")
    for column in chosen:
        if column not in table.columns:
            raise InputError(f"Reading {table.name}: there is no column {column!r}. It has {known}.")
    return chosen


def _path(name: str, given: Any, expected: str) -> str:
    path = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(path, str) or "\0" in path:
        raise InputError(f"{name}={shortened(given)} cannot be used: expected {expected}.")
    return path


def _names(columns: Any) -> tuple[str, ...]:
    """Return the names of one or two columns."""
    given = (columns,) if isinstance(columns, str) else tuple(columns) if is_collection(columns) else ()
    if not given or not all(isinstance(column, str) for column in given):
        raise InputError(
            f"columns={shortened(columns)} cannot be used: expected the name of a column, or two for pairs."
        )
    return given


def _repeated(names: Sequence[str]) -> str | None:
    return next((name for place, name in enumerate(names) if name in names[:place]), None)


def _refuse(source: str, option: str, value: object, why: str) -> None:
    if value is not None:
        raise InputError(f"Reading {source}: {option}={shortened(value)} has no effect here ({why}). Leave it out.")


# Files


def _file_table(path: str) -> _Table:
    ending = PurePosixPath(path).suffix.lower()
    if ending not in _READERS:
        raise InputError(
            f"Reading {path}: expected a file ending in {', '.join(_READERS)}, one of {', '.join(KNOWN)} with "
            f"data_dir, or '{_HUB}NAME'."
        )
    if not _there(path, "isfile"):
        other = _there(path, "exists")
        what = "it is a folder, or something else that is not a file" if other else "there is no such file"
        raise InputError(f"Reading {path}: {what}. Check the path.")
    return _READERS[ending](path)


def _there(path: str, question: str) -> bool:
    """Whether something is there, in the words of fsspec: "isfile" or "exists"."""
    try:
        filesystem, inside = fsspec.core.url_to_fs(path)
        return getattr(filesystem, question)(inside)
    except Exception as error:  # each kind of storage has errors of its own
        raise InputError(f"Reading {path}: it cannot be reached ({_said(error)}). Check the address.") from error


@contextmanager
def _open(path: str, mode: str = "r", **options: str) -> Iterator[Any]:
    try:
        with fsspec.open(path, mode, **options) as file:
            yield file
    except UnicodeDecodeError as error:
        raise InputError(f"Reading {path}: it is not UTF-8 ({error.reason}). Save it as UTF-8.") from error
    except OSError as error:
        raise InputError(f"Reading {path}: it cannot be read ({_said(error)}). Check the file.") from error


def _said(error: Exception) -> str:
    """Return what an error says, on one line."""
    return f"{' '.join(str(error).split()):.300}" or type(error).__name__


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """Yield numbered lines without their ends. Only \\n and \\r\\n end a line: texts may hold other separators."""
    for number, line in _whole_lines(path):
        yield number, line.removesuffix("\n").removesuffix("\r")


def _whole_lines(path: str) -> Iterator[tuple[int, str]]:
    """Yield numbered lines with their ends; refuse one that no text is as long as, and what is not text at all."""
    with _open(path, encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), ""), 1):
            if len(line) == _LONGEST_LINE and not line.endswith("\n"):
                raise InputError(
                    f"Reading {path}, line {number}: it has more than {_LONGEST_LINE - 1:,} characters. Split it."
                )
            if number == 1 and not line.endswith("\n") and "\r" in line[:-1]:
                raise InputError(f"Reading {path}: its lines end in \\r alone. Save it with \\n at their ends.")
            if "\0" in line:
                raise InputError(f"Reading {path}, line {number}: it holds a NUL character. Save the file as UTF-8.")
            yield number, line


def _tab_cells(path: str) -> _Cells:
    return ((number, line.split("\t")) for number, line in _lines(path) if line)


def _comma_cells(path: str) -> _Cells:
    reader = csv.reader((line for _, line in _whole_lines(path)), strict=True)
    try:
        yield from ((reader.line_num, cells) for cells in reader if cells)
    except csv.Error as error:
        raise InputError(f"Reading {path}, line {reader.line_num}: not valid CSV ({error}). Repair it.") from error


def _delimited_table(
    path: str, *, cells: Callable[[str], _Cells] = _tab_cells, header: tuple[str, ...] | None = None
) -> _Table:
    """Return a table of delimited cells whose first line names the columns, unless `header` does."""
    columns = tuple(_first(path, cells(path))) if header is None else header

    def rows(_: Sequence[str]) -> _Rows:
        lines = cells(path)
        if header is None:
            next(lines)
        for number, row in lines:
            if len(row) != len(columns):
                count = f"{len(row)} cells where {len(columns)} were expected ({', '.join(columns)})"
                raise InputError(f"Reading {path}, line {number}: it has {count}. Repair the line.")
            yield f"line {number}", dict(zip(columns, row, strict=True))

    return _Table(path, columns, columns, rows)


def _records(path: str) -> Iterator[tuple[int, dict[str, object]]]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            record = json.loads(line, object_pairs_hook=_object, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"Reading {path}, line {number}: not valid JSON ({_said(error)}). Repair the line."
            ) from error
        if not isinstance(record, dict):
            raise InputError(f"Reading {path}, line {number}: expected a JSON object, got {type(record).__name__}.")
        yield number, record


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if (repeated := _repeated([key for key, _ in pairs])) is not None:
        raise ValueError(f"the key {repeated!r} occurs twice")
    return dict(pairs)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _jsonl_table(path: str) -> _Table:
    first = _first(path, _records(path))
    text_columns = tuple(column for column, value in first.items() if isinstance(value, str))
    return _Table(path, tuple(first), text_columns, lambda _: ((f"line {n}", record) for n, record in _records(path)))


def _parquet_table(path: str) -> _Table:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    @contextmanager
    def opened() -> Iterator[ParquetFile]:
        try:
            with _open(path, "rb") as file:
                yield ParquetFile(file)
        except pyarrow.ArrowException as error:
            raise InputError(f"Reading {path}: not valid Parquet ({_said(error)}). Write the file again.") from error

    def rows(columns: Sequence[str]) -> _Rows:
        with opened() as file:
            records = (row for batch in file.iter_batches(1024, columns=list(columns)) for row in batch.to_pylist())
            for number, record in enumerate(records, 1):
                yield f"row {number}", record

    with opened() as file:
        schema = file.schema_arrow
    text_types = (pyarrow.string(), pyarrow.large_string())
    return _Table(path, tuple(schema.names), tuple(field.name for field in schema if field.type in text_types), rows)


def _line_table(path: str, *, text_of: Callable[[str], str] = str) -> _Table:
    """Return a table of one column, 'text', with one row per line; `text_of` makes the text, blank if it has none."""

    def rows(_: Sequence[str]) -> _Rows:
        for number, line in _lines(path):
            text = text_of(line)
            if text.strip():
                yield f"line {number}", {"text": text}

    return _Table(path, ("text",), ("text",), rows)


def _first(path: str, numbered: Any) -> Any:
    """Return the content of the first line that is not blank."""
    with closing(numbered):
        for _, content in numbered:
            return content
    raise InputError(f"Reading {path}: the file is empty. Pass a file that holds texts.")


_READERS: Mapping[str, Callable[[str], _Table]] = {
    ".txt": _line_table,
    ".tsv": _delimited_table,
    ".csv": partial(_delimited_table, cells=_comma_cells),
    ".jsonl": _jsonl_table,
    ".parquet": _parquet_table,
}


# Hugging Face datasets

_HUB = "datasets:"


def _hub_table(name: str, columns: str | Sequence[str] | None, split: str | None) -> _Table:
    if not name.strip("/ "):
        raise InputError(f"Reading '{_HUB}{name}': the name of the dataset is missing. Use '{_HUB}NAME'.")
    if columns is None or split is None:
        raise InputError(f"Reading {_HUB}{name}: pass columns and split, such as columns='text', split='train'.")
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise InputError(f"Reading {_HUB}{name} needs datasets. Run `pip install 'identikit[data]'`.") from error
    try:
        stream = _load_stream(datasets, name, split)
        first = next(iter(stream), None)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"Reading {_HUB}{name}, split {split!r}: datasets cannot load it ({_said(error)}).") from error
    if first is None:
        raise InputError(f"Reading {_HUB}{name}: split {split!r} is empty. Choose another.")

    def rows(_: Sequence[str]) -> _Rows:
        try:
            for number, row in enumerate(stream, 1):
                yield f"row {number}", row
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(f"Reading {_HUB}{name}: datasets cannot read on ({_said(error)}).") from error

    return _Table(f"{_HUB}{name}", tuple(first), (), rows)


def _load_stream(datasets: Any, name: str, split: str) -> Any:
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


# Known datasets


@dataclass(frozen=True)
class _Known:
    """Where a dataset's files and columns are.

    `layouts` gives, for each split (the default first), the sets of files to look for in turn; the files of a set are
    read one after another. `columns` are the spellings of the text columns, `labels` those of the column of labels 0
    and 1. Rows of 'dev' are left out of 'train' by their `ids`.
    """

    layouts: Mapping[str, tuple[tuple[str, ...], ...]]
    columns: tuple[tuple[str, ...], ...]
    read: Callable[[str], _Table]
    hub: str
    ids: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()


def _known_texts(name: str, data_dir: str | os.PathLike[str] | None, split: str | None) -> Iterator[Text]:
    columns = KNOWN[name].columns
    streams = [_texts(table, _spelled_columns(table, columns)) for table in _split_tables(name, data_dir, split)]
    return chain.from_iterable(streams)


def _split_tables(name: str, data_dir: str | os.PathLike[str] | None, split: str | None) -> list[_Table]:
    """Return the tables of a split, the default one if none is named; 'train' without the rows of 'dev'."""
    known = KNOWN[name]
    split = next(iter(known.layouts)) if split is None else split
    if split not in known.layouts:
        raise InputError(f"Reading {name}: there is no split {split!r}. It has {', '.join(known.layouts)}.")
    if data_dir is None:
        raise InputError(
            f"Reading {name}: say which folder holds it with data_dir (command line: --data-dir), or read "
            f"'{_HUB}{known.hub}' with columns and split."
        )
    tables = _known_tables(known, data_dir, split)
    if not tables:
        files = ", ".join(" + ".join(layout) for layout in known.layouts[split])
        raise InputError(f"Reading {name}: {os.fspath(data_dir)} holds none of {files}. Pass the folder that does.")
    if split == "train" and known.ids:
        held_out = _known_tables(known, data_dir, "dev")
        tables = [_without(table, held_out, known.ids) for table in tables]
    return tables


def _known_tables(known: _Known, data_dir: str | os.PathLike[str], split: str) -> list[_Table]:
    """Return the tables of the first layout whose files all exist."""
    folder = os.fspath(data_dir).rstrip("/")
    for layout in known.layouts[split]:
        paths = [f"{folder}/{file}" for file in layout]
        if all(_there(path, "isfile") for path in paths):
            return [known.read(path) for path in paths]
    return []


def _spelled_columns(table: _Table, spellings: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    fitting = (columns for columns in spellings if set(columns) <= set(table.columns))
    return _chosen_columns(table, next(fitting, spellings[0]))


def _label_column(table: _Table, spellings: tuple[str, ...]) -> str:
    for column in spellings:
        if column in table.columns:
            return column
    wanted, found = " or ".join(map(repr, spellings)), ", ".join(map(repr, table.columns))
    raise InputError(f"Reading {table.name}: it has no labels. Expected a column {wanted}; it has {found}.")


def _without(table: _Table, others: list[_Table], ids: tuple[str, ...]) -> _Table:
    """Return the table without the rows whose ids are in other tables, if it has ids."""
    if not set(ids) <= set(table.columns):
        return table

    def rows(columns: Sequence[str]) -> _Rows:
        left_out = {tuple(row.get(name) for name in ids) for other in others for _, row in other.rows(ids)}
        for place, row in table.rows((*columns, *ids)):
            if tuple(row[name] for name in ids) not in left_out:
                yield place, row

    return replace(table, rows=rows)


def _paragraph(line: str) -> str:
    """Return the paragraph on a line of WikiText, or nothing if it is a heading between = signs."""
    text = line.strip()
    return "" if text.startswith("= ") and text.endswith(" =") else text


def _layouts(folder: str, file: str, *flat: str) -> tuple[tuple[str, ...], ...]:
    """Return the layouts to look for: a download's folder, only its file, and files named after the dataset."""
    return ((f"{folder}/{file}",), (file,), *((flat,) if flat else ()))


KNOWN: Mapping[str, _Known] = {
    "mrpc": _Known(
        layouts={
            "dev": _layouts("MRPC", "dev.tsv", "mrpc_dev.tsv"),
            "train": _layouts("MRPC", "msr_paraphrase_train.txt") + _layouts("MRPC", "train.tsv"),
        },
        columns=(("#1 String", "#2 String"), ("sentence1", "sentence2")),
        read=_delimited_table,
        hub="nyu-mll/glue/mrpc",
        ids=("#1 ID", "#2 ID"),
        labels=("Quality", "label"),
    ),
    "cola": _Known(
        layouts={
            "dev": _layouts("CoLA", "dev.tsv", "cola_in_domain_dev.tsv", "cola_out_of_domain_dev.tsv"),
            "train": _layouts("CoLA", "train.tsv", "cola_in_domain_train.tsv"),
        },
        columns=(("sentence",),),
        read=partial(_delimited_table, header=("source", "label", "mark", "sentence")),
        hub="nyu-mll/glue/cola",
        labels=("label",),
    ),
    "mnli": _Known(
        layouts={
            "dev": _layouts("MNLI", "dev_matched.tsv", "mnli_dev_matched.tsv"),
            "train": _layouts("MNLI", "train.tsv"),
        },
        columns=(("sentence1", "sentence2"), ("premise", "hypothesis")),
        read=_delimited_table,
        hub="nyu-mll/glue/mnli",
    ),
    "wikitext": _Known(
        layouts={"test": _layouts("wikitext-2-raw", "wiki.test.raw", "wikitext2_raw_test.txt")},
        columns=(("text",),),
        read=partial(_line_table, text_of=_paragraph),
        hub="Salesforce/wikitext/wikitext-2-raw-v1",
    ),
}
