"""Files and datasets as streams of texts: `read_texts`, and `read_labelled` for datasets with two classes.

`KNOWN` says where the files and columns of the datasets known by name are, in a folder that holds a download of them.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from itertools import chain
from pathlib import PurePosixPath

from identikit.checks import is_collection, is_path, no_effect, shortened
from identikit.errors import InputError
from identikit.texts.tables import HUB, READERS, Row, Rows, TextTable, delimited_table, hub_table, kind_at, line_table
from identikit.texts.text import MAX_CHARACTERS, Text


@dataclass(frozen=True)
class KnownDataset:
    """Where a dataset's files and columns are.

    `layouts` gives, for each split (the default first), the sets of files to look for in turn; the files of a set are
    read one after another. `columns` are the spellings of the text columns, `labels` those of the column of labels 0
    and 1. Rows of 'dev' are left out of 'train' by their `ids`.
    """

    layouts: Mapping[str, tuple[tuple[str, ...], ...]]
    columns: tuple[tuple[str, ...], ...]
    read: Callable[[str], TextTable]
    hub: str
    ids: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    def columns_of(self, table: TextTable) -> tuple[str, ...]:
        """Return the text columns as this table spells them, or the first spelling if none is there."""
        fitting = (columns for columns in self.columns if set(columns) <= set(table.columns))
        return _chosen_columns(table, next(fitting, self.columns[0]))

    def tables(self, folder: str | os.PathLike[str], split: str) -> list[TextTable]:
        """Return the tables of the first layout whose files all exist; none if there is no such layout."""
        for layout in self.layouts[split]:
            paths = [f"{os.fspath(folder).rstrip('/')}/{file}" for file in layout]
            if all(kind_at(path) == "file" for path in paths):
                return [self.read(path) for path in paths]
        return []


def _paragraph(line: str) -> str:
    """Return the paragraph on a line of WikiText, or nothing if it is a heading between = signs."""
    text = line.strip()
    return "" if text.startswith("= ") and text.endswith(" =") else text


def _layouts(folder: str, file: str, *flat: str) -> tuple[tuple[str, ...], ...]:
    """Return the layouts to look for: a download's folder, only its file, and files named after the dataset."""
    return ((f"{folder}/{file}",), (file,), *((flat,) if flat else ()))


KNOWN: Mapping[str, KnownDataset] = {
    "mrpc": KnownDataset(
        layouts={
            "dev": _layouts("MRPC", "dev.tsv", "mrpc_dev.tsv"),
            "train": _layouts("MRPC", "msr_paraphrase_train.txt") + _layouts("MRPC", "train.tsv"),
        },
        columns=(("#1 String", "#2 String"), ("sentence1", "sentence2")),
        read=delimited_table,
        hub="nyu-mll/glue/mrpc",
        ids=("#1 ID", "#2 ID"),
        labels=("Quality", "label"),
    ),
    "cola": KnownDataset(
        layouts={
            "dev": _layouts("CoLA", "dev.tsv", "cola_in_domain_dev.tsv", "cola_out_of_domain_dev.tsv"),
            "train": _layouts("CoLA", "train.tsv", "cola_in_domain_train.tsv"),
        },
        columns=(("sentence",),),
        read=partial(delimited_table, header=("source", "label", "mark", "sentence")),
        hub="nyu-mll/glue/cola",
        labels=("label",),
    ),
    "mnli": KnownDataset(
        layouts={
            "dev": _layouts("MNLI", "dev_matched.tsv", "mnli_dev_matched.tsv"),
            "train": _layouts("MNLI", "train.tsv"),
        },
        columns=(("sentence1", "sentence2"), ("premise", "hypothesis")),
        read=delimited_table,
        hub="nyu-mll/glue/mnli",
    ),
    "wikitext": KnownDataset(
        layouts={"test": _layouts("wikitext-2-raw", "wiki.test.raw", "wikitext2_raw_test.txt")},
        columns=(("text",),),
        read=partial(line_table, text_of=_paragraph),
        hub="Salesforce/wikitext/wikitext-2-raw-v1",
    ),
}


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
    listed = list(columns) if is_collection(columns) else [columns]
    names = tuple(name for name in listed if isinstance(name, str))
    if columns is not None and (not names or len(names) < len(listed)):
        raise InputError(
            f"columns={shortened(columns)} cannot be used: expected the name of a column, or two for pairs."
        )
    data_dir = None if data_dir is None else _path("data_dir", data_dir, "a folder")
    if split is not None and not isinstance(split, str):
        raise InputError(f"split={shortened(split)} cannot be used: expected a name, such as 'train'.")
    if source.lower() in KNOWN:
        no_effect("columns", columns, f"{source} knows its own")
        dataset = KNOWN[source.lower()]
        tables = _split_tables(source.lower(), data_dir, split)
        return chain.from_iterable([_texts(table, dataset.columns_of(table)) for table in tables])
    no_effect("data_dir", data_dir, f"only {', '.join(KNOWN)} take it")
    if source.startswith(HUB):
        table = hub_table(source.removeprefix(HUB), columns, split)
    else:
        no_effect("split", split, "a file has none")
        table = _file_table(source)
    return _texts(table, _chosen_columns(table, names or None))


def read_labelled(
    name: str, *, data_dir: str | os.PathLike[str], split: str | None = None
) -> Iterator[tuple[Text, int]]:
    """Stream the texts of 'mrpc' or 'cola', each with its label: 1 for a paraphrase or an acceptable sentence, else 0.

    `data_dir` and `split` are as in `read_texts`. Pairs of MRPC's development set are left out of its training set, by
    their IDs.
    """
    dataset = KNOWN.get(name.lower()) if isinstance(name, str) else None
    if dataset is None or not dataset.labels:
        labelled = ", ".join(known for known in KNOWN if KNOWN[known].labels)
        raise InputError(f"Reading texts with labels: {shortened(name)} is not known. Use one of {labelled}.")
    streams = []
    for table in _split_tables(name.lower(), data_dir, split):
        spelled = [column for column in dataset.labels if column in table.columns]
        if not spelled:
            expected = " or ".join(map(repr, dataset.labels))
            present = ", ".join(map(repr, table.columns))
            raise InputError(f"Reading {table.name}: it has no labels. Expected a column {expected}; it has {present}.")
        streams.append(_labelled(table, dataset.columns_of(table), spelled[0]))
    return chain.from_iterable(streams)


def sample_texts() -> list[Text]:
    """Return the pairs of texts that come with the package."""
    return list(read_texts(str(files("identikit.texts") / "samples.tsv"), columns=["first", "second"]))


def sample_text() -> Text:
    """Return the sample pair of median length, about sixty tokens."""
    pairs = sorted(sample_texts(), key=lambda pair: len(" ".join(map(str, pair))))
    return pairs[len(pairs) // 2]


# Tables


def _file_table(path: str) -> TextTable:
    """Return the table in a file, by the ending of its name."""
    ending = PurePosixPath(path).suffix.lower()
    if ending not in READERS:
        raise InputError(
            f"Reading {path}: expected a file ending in {', '.join(READERS)}, one of {', '.join(KNOWN)} with "
            f"data_dir, or '{HUB}NAME'."
        )
    kind = kind_at(path)
    if kind != "file":
        wrong = "there is no such file" if kind == "nothing" else "it is a folder, or something else that is not a file"
        raise InputError(f"Reading {path}: {wrong}. Check the path.")
    return READERS[ending](path)


def _split_tables(name: str, data_dir: str | os.PathLike[str] | None, split: str | None) -> list[TextTable]:
    """Return the tables of a split, the default one if none is named; 'train' without the rows of 'dev'."""
    dataset = KNOWN[name]
    split = next(iter(dataset.layouts)) if split is None else split
    if split not in dataset.layouts:
        raise InputError(f"Reading {name}: there is no split {split!r}. It has {', '.join(dataset.layouts)}.")
    if data_dir is None:
        raise InputError(
            f"Reading {name}: say which folder holds it with data_dir=, or read "
            f"'{HUB}{dataset.hub}' with columns and split."
        )
    tables = dataset.tables(data_dir, split)
    if not tables:
        files = ", ".join(" + ".join(layout) for layout in dataset.layouts[split])
        raise InputError(f"Reading {name}: {os.fspath(data_dir)} holds none of {files}. Pass the folder that does.")
    if split == "train" and dataset.ids:
        held_out = dataset.tables(data_dir, "dev")
        return [_exclude_rows(table, held_out, dataset.ids) for table in tables]
    return tables


def _exclude_rows(table: TextTable, held_out: list[TextTable], ids: tuple[str, ...]) -> TextTable:
    """Return the table without the rows whose ids are in the held-out tables, if it has ids."""
    if not set(ids) <= set(table.columns):
        return table

    def rows(columns: Sequence[str]) -> Rows:
        excluded = set()
        for held_out_table in held_out:
            excluded |= {tuple(row.get(name) for name in ids) for _, row in held_out_table.rows(ids)}
        for row_name, row in table.rows((*columns, *ids)):
            if tuple(row[name] for name in ids) not in excluded:
                yield row_name, row

    return replace(table, rows=rows)


def _texts(table: TextTable, columns: Sequence[str]) -> Iterator[Text]:
    return (_text(table, row_name, row, columns) for row_name, row in _checked_rows(table, columns))


def _labelled(table: TextTable, columns: Sequence[str], label: str) -> Iterator[tuple[Text, int]]:
    for row_name, row in _checked_rows(table, (*columns, label)):
        value = _cell(table, row_name, row, label)
        if value not in ("0", "1"):
            raise InputError(
                f"Reading {table.name}, {row_name}: column {label!r} holds {value!r:.40}, expected the label 0 or 1. "
                "Repair the row."
            )
        yield _text(table, row_name, row, columns), int(value)


def _checked_rows(table: TextTable, columns: Sequence[str]) -> Rows:
    """Yield the rows of a table; refuse one that has none."""
    empty = True
    for row_name, row in table.rows(columns):
        yield row_name, row
        empty = False
    if empty:
        raise InputError(f"Reading {table.name}: it holds no text. Pass a file that does.")


def _text(table: TextTable, row_name: str, row: Row, columns: Sequence[str]) -> Text:
    cells = [_cell(table, row_name, row, column) for column in columns]
    return cells[0] if len(cells) == 1 else (cells[0], cells[1])


def _cell(table: TextTable, row_name: str, row: Row, column: str) -> str:
    value = row.get(column)
    if isinstance(value, str) and value.strip() and len(value) <= MAX_CHARACTERS:
        return value
    content = f"{type(value).__name__} {value!r:.40}, expected a text. Repair the row"
    if value is None or isinstance(value, str):
        content = "nothing, expected a text. Repair the row"
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        content = f"{len(value):,} characters, and a text may have at most {MAX_CHARACTERS:,}. Shorten it"
    raise InputError(f"Reading {table.name}, {row_name}: column {column!r} holds {content}.")


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
    if len(names) == 2 and names[0] == names[1]:
        raise InputError(f"Reading {table.name}: the column {names[0]!r} is named twice. Name two different ones.")
    for column in names:
        if column not in table.columns:
            raise InputError(f"Reading {table.name}: there is no column {column!r}. It has {present}.")
    return names


def _path(name: str, value: object, expected: str) -> str:
    if not is_path(value):
        raise InputError(f"{name}={shortened(value)} cannot be used: expected {expected}.")
    return os.fspath(value)
