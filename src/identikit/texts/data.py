"""Files and datasets as streams of texts: `read_texts`, and `read_labelled` for datasets with two classes."""

import os
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import chain
from pathlib import PurePosixPath

from identikit.checks import is_collection, is_path, shortened
from identikit.errors import InputError
from identikit.texts.known import KNOWN, split_tables
from identikit.texts.tables import HUB, READERS, Row, Rows, TextTable, first_repeated, hub_table, kind_at
from identikit.texts.text import LONGEST, Text


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
    names = None if columns is None else _names(columns)
    data_dir = None if data_dir is None else _path("data_dir", data_dir, "a folder")
    if split is not None and not isinstance(split, str):
        raise InputError(f"split={shortened(split)} cannot be used: expected a name, such as 'train'.")
    if source.lower() in KNOWN:
        _refuse(source, "columns", columns, "it knows its own")
        dataset = KNOWN[source.lower()]
        tables = split_tables(source.lower(), data_dir, split)
        streams = [_texts(table, _chosen_columns(table, dataset.columns_of(table))) for table in tables]
        return chain.from_iterable(streams)
    _refuse(source, "data_dir", data_dir, f"only {', '.join(KNOWN)} take it")
    if source.startswith(HUB):
        table = hub_table(source.removeprefix(HUB), names, split)
    else:
        _refuse(source, "split", split, "a file has none")
        table = _file_table(source)
    return _texts(table, _chosen_columns(table, names))


def read_labelled(
    name: str, *, data_dir: str | os.PathLike[str], split: str | None = None
) -> Iterator[tuple[Text, int]]:
    """Stream the texts of 'mrpc' or 'cola', each with its label: 1 for a paraphrase or an acceptable sentence, else 0.

    `data_dir` and `split` are as in `read_texts`. Pairs of MRPC's development set are left out of its training set, by
    their IDs.
    """
    dataset = KNOWN.get(name.lower()) if isinstance(name, str) else None
    if dataset is None or not dataset.labels:
        labelled = ", ".join(other for other in KNOWN if KNOWN[other].labels)
        raise InputError(f"Reading texts with labels: {shortened(name)} is not known. Use one of {labelled}.")
    streams = []
    for table in split_tables(name.lower(), data_dir, split):
        columns = _chosen_columns(table, dataset.columns_of(table))
        streams.append(_labelled(table, columns, dataset.label_column_of(table)))
    return chain.from_iterable(streams)


def sample_texts() -> list[Text]:
    """Return the pairs of texts that come with the package."""
    return list(read_texts(str(files("identikit.texts") / "samples.tsv"), columns=["first", "second"]))


def sample_text() -> Text:
    """Return the sample pair of median length, about sixty tokens."""
    pairs = sorted(sample_texts(), key=lambda pair: len(" ".join(map(str, pair))))
    return pairs[len(pairs) // 2]


def _file_table(path: str) -> TextTable:
    """Return the table in a file, by the ending of its name."""
    ending = PurePosixPath(path).suffix.lower()
    if ending not in READERS:
        raise InputError(
            f"Reading {path}: expected a file ending in {', '.join(READERS)}, one of {', '.join(KNOWN)} with "
            f"data_dir, or '{HUB}NAME'."
        )
    kind = kind_at(path)
    if kind == "other":
        raise InputError(f"Reading {path}: it is a folder, or something else that is not a file. Check the path.")
    if kind == "nothing":
        raise InputError(f"Reading {path}: there is no such file. Check the path.")
    return READERS[ending](path)


# Rows and cells


def _texts(table: TextTable, columns: Sequence[str]) -> Iterator[Text]:
    return (_text(table, place, row, columns) for place, row in _some_rows(table, columns))


def _labelled(table: TextTable, columns: Sequence[str], label: str) -> Iterator[tuple[Text, int]]:
    for place, row in _some_rows(table, (*columns, label)):
        value = _cell(table, place, row, label)
        if value not in ("0", "1"):
            raise InputError(
                f"Reading {table.name}, {place}: column {label!r} holds {value!r:.40}, expected the label 0 or 1. "
                "Repair the row."
            )
        yield _text(table, place, row, columns), int(value)


def _some_rows(table: TextTable, columns: Sequence[str]) -> Rows:
    """Yield the rows of a table; refuse one that has none."""
    empty = True
    for place, row in table.rows(columns):
        yield place, row
        empty = False
    if empty:
        raise InputError(f"Reading {table.name}: it holds no text. Pass a file that does.")


def _text(table: TextTable, place: str, row: Row, columns: Sequence[str]) -> Text:
    cells = [_cell(table, place, row, column) for column in columns]
    return cells[0] if len(cells) == 1 else (cells[0], cells[1])


def _cell(table: TextTable, place: str, row: Row, column: str) -> str:
    value = row.get(column)
    if isinstance(value, str) and len(value) > LONGEST:
        raise InputError(
            f"Reading {table.name}, {place}: column {column!r} holds {len(value):,} characters, and a text may have at "
            f"most {LONGEST:,}. Shorten it."
        )
    if isinstance(value, str) and value.strip():
        return value
    content = "nothing" if value is None or isinstance(value, str) else f"{type(value).__name__} {value!r:.40}"
    raise InputError(
        f"Reading {table.name}, {place}: column {column!r} holds {content}, expected a text. Repair the row."
    )


# Arguments


def _chosen_columns(table: TextTable, names: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the columns that are read: those named, or the only one that holds texts."""
    present = ", ".join(map(repr, table.columns))
    if names is None:
        if len(table.text_columns) != 1:
            raise InputError(
                f"Reading {table.name}: name the column of the texts with columns=, or two for pairs. It has {present}."
            )
        return table.text_columns
    if len(names) > 2:
        raise InputError(f"Reading {table.name}: got {len(names)} columns, expected one for texts or two for pairs.")
    repeated = first_repeated(names)
    if repeated is not None:
        raise InputError(f"Reading {table.name}: the column {repeated!r} is named twice. Name two different ones.")
    for column in names:
        if column not in table.columns:
            raise InputError(f"Reading {table.name}: there is no column {column!r}. It has {present}.")
    return names


def _path(name: str, value: object, expected: str) -> str:
    if not is_path(value):
        raise InputError(f"{name}={shortened(value)} cannot be used: expected {expected}.")
    return os.fspath(value)


def _names(columns: object) -> tuple[str, ...]:
    """Return the names of columns, given as one name or several."""
    listed = list(columns) if is_collection(columns) else [columns]
    names = tuple(name for name in listed if isinstance(name, str))
    if not names or len(names) < len(listed):
        raise InputError(
            f"columns={shortened(columns)} cannot be used: expected the name of a column, or two for pairs."
        )
    return names


def _refuse(source: str, option: str, value: object, reason: str) -> None:
    if value is not None:
        raise InputError(f"Reading {source}: {option}={shortened(value)} has no effect here ({reason}). Leave it out.")
