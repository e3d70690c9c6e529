"""The datasets known by name: MRPC, CoLA, MNLI and WikiText, in a folder that holds a download of them.

`KNOWN` says where the files and columns of each are.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from identikit.errors import InputError
from identikit.texts.tables import HUB, Rows, TextTable, delimited_table, kind_at, line_table


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
        """Return the text columns as this table spells them, or the first spelling if it has none of them."""
        fitting = (columns for columns in self.columns if set(columns) <= set(table.columns))
        return next(fitting, self.columns[0])

    def label_column_of(self, table: TextTable) -> str:
        """Return the column of labels as this table spells it."""
        for column in self.labels:
            if column in table.columns:
                return column
        expected = " or ".join(map(repr, self.labels))
        present = ", ".join(map(repr, table.columns))
        raise InputError(f"Reading {table.name}: it has no labels. Expected a column {expected}; it has {present}.")

    def tables(self, folder: str | os.PathLike[str], split: str) -> list[TextTable]:
        """Return the tables of the first layout whose files all exist; none if there is no such layout."""
        for layout in self.layouts[split]:
            paths = [f"{os.fspath(folder).rstrip('/')}/{file}" for file in layout]
            if all(kind_at(path) == "file" for path in paths):
                return [self.read(path) for path in paths]
        return []


def split_tables(name: str, data_dir: str | os.PathLike[str] | None, split: str | None) -> list[TextTable]:
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
        return [_without(table, held_out, dataset.ids) for table in tables]
    return tables


def _without(table: TextTable, others: list[TextTable], ids: tuple[str, ...]) -> TextTable:
    """Return the table without the rows whose ids are in other tables, if it has ids."""
    if not set(ids) <= set(table.columns):
        return table

    def rows(columns: Sequence[str]) -> Rows:
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
