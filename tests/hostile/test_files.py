"""Data files that are damaged, odd, or no files at all, in every format."""

import csv
import gzip
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

import identikit as ik
from tests.hostile.judging import refused, refused_or_right
from tests.hostile.made import command, saved

ROWS = [("w5 w6 w7", "w8 w9"), ("w10 w11", "w12"), ("w13 ünï 👩", "w14")]
COLUMN = {"txt": None, "tsv": "first", "csv": "first", "jsonl": "first", "parquet": "first"}


def whole(form: str, rows: list[tuple[Any, Any]] | None = None, names: tuple[str, str] = ("first", "second")) -> bytes:
    """Return a file of two columns (of lines: one) in a format."""
    rows = ROWS if rows is None else rows
    if form == "parquet":
        sink = pyarrow.BufferOutputStream()
        columns = [pyarrow.array([row[place] for row in rows]) for place in range(2)]
        pyarrow.parquet.write_table(pyarrow.Table.from_arrays(columns, names=list(names)), sink)
        return sink.getvalue().to_pybytes()
    if form == "jsonl":
        lines = [json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) for row in rows]
    elif form == "txt":
        lines = [str(row[0]) for row in rows]
    else:
        lines = [{"tsv": "\t", "csv": ","}[form].join(map(str, row)) for row in (names, *rows)]
    return ("\n".join(lines) + "\n").encode()


def plain(form: str, content: bytes) -> list[str]:
    """Read a file in the plainest way, which fails on what cannot be read like this."""
    if form == "parquet":
        return pyarrow.parquet.read_table(pyarrow.BufferReader(content)).column("first").to_pylist()
    text = content.decode("utf-8-sig")
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if form == "txt":
        return [line for line in lines if line.strip()]
    if form == "jsonl":
        return [json.loads(line)["first"] for line in lines if line.strip()]
    if form == "tsv":
        return [line.split("\t")[0] for line in lines[1:] if line]
    return [row[0] for row in list(csv.reader(io.StringIO(text, newline="")))[1:] if row]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "of NUL bytes": lambda content: bytes(len(content)),
    "of blank lines": lambda _: b"\n \n\t\n\r\n",
    "of random bytes": lambda _: bytes((7 * place * place + 11 * place) % 256 for place in range(3000)),
    "cut in half": lambda content: content[: len(content) // 2],
    "cut before its last byte": lambda content: content[:-1],
    "cut inside a character": lambda content: content[: content.find("ü".encode()) + 1],
    "with a NUL byte inside": lambda content: content.replace(b"w6", b"w\x006"),
    "with a byte that is no UTF-8": lambda content: content.replace(b"w6", b"w\xff6"),
    "with bytes after its end": lambda content: content + b"\xfe\xfd",
    "in Latin-1": lambda content: content.decode("utf-8", "ignore").encode("latin-1", "replace"),
    "in UTF-16": lambda content: content.decode("utf-8", "ignore").encode("utf-16"),
    "in gzip": gzip.compress,
    "with a lone surrogate": lambda content: content.replace(b"w6", b"\xed\xa0\x80"),
}
HARMLESS: dict[str, Callable[[bytes], bytes]] = {
    "with a byte order mark": lambda content: b"\xef\xbb\xbf" + content,
    "with Windows line ends": lambda content: content.replace(b"\n", b"\r\n"),
    "without its last line end": lambda content: content.removesuffix(b"\n"),
    "with blank lines at its end": lambda content: content + b"\n\n",
}


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.parametrize("form", COLUMN)
def test_a_damaged_file_is_refused_or_read_as_what_its_bytes_say(form: str, what: str, tmp_path: Path):
    content = DAMAGES[what](whole(form))
    path = written(tmp_path / f"texts.{form}", content)
    with refused_or_right():
        assert list(ik.read_texts(path, columns=COLUMN[form])) == plain(form, content)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("form", "content"),
    [
        *((form, whole(form)) for form in COLUMN),
        *((form, change(whole(form))) for change in HARMLESS.values() for form in COLUMN if form != "parquet"),
    ],
)
def test_a_file_as_editors_write_it_is_read(form: str, content: bytes, tmp_path: Path):
    path = written(tmp_path / f"texts.{form}", content)
    assert list(ik.read_texts(path, columns=COLUMN[form])) == [first for first, _ in ROWS]
    if form != "txt":
        assert list(ik.read_texts(path, columns=["first", "second"])) == ROWS


def with_cells(form: str, *cells: Any) -> tuple[str, bytes]:
    """Return a table whose first column holds these cells."""
    return form, whole(form, [(cell, "w6") for cell in cells])


TABLES = ("tsv", "csv", "jsonl", "parquet")
REFUSED: dict[str, tuple[str, bytes]] = {
    "two columns of one name in tsv": ("tsv", whole("tsv", names=("first", "first"))),
    "two columns of one name in csv": ("csv", whole("csv", names=("first", "first"))),
    "two columns of one name in parquet": ("parquet", whole("parquet", names=("first", "first"))),
    **{f"an empty cell in {form}": with_cells(form, "w5", "") for form in TABLES},
    **{f"a cell of spaces in {form}": with_cells(form, "w5", "  ") for form in TABLES},
    **{f"{cell!r} for a text in jsonl": with_cells("jsonl", cell) for cell in (5, None, True, ["w5"])},
    **{f"{cell!r} for a text in parquet": with_cells("parquet", cell) for cell in (5, None, ["w5"], b"w5")},
    "a missing cell in tsv": ("tsv", whole("tsv") + b"w5\n"),
    "a missing cell in csv": ("csv", whole("csv") + b"w5\n"),
    "a cell too many in tsv": ("tsv", whole("tsv") + b"w5\tw5\tw5\n"),
    "a cell too many in csv": ("csv", whole("csv") + b"w5,w5,w5\n"),
    "no rows in tsv": ("tsv", b"first\tsecond\n"),
    "no rows in parquet": ("parquet", whole("parquet", [])),
    "an open quote in csv": ("csv", b'first,second\n"w5,w6\n'),
    "a quote inside a quoted cell in csv": ("csv", b'first,second\n"w5"x,w6\n'),
    "a list for a line in jsonl": ("jsonl", b'["w5", "w6"]\n'),
    "NaN for a line in jsonl": ("jsonl", b"NaN\n"),
    "a comma too many in jsonl": ("jsonl", b'{"first": "w5",}\n'),
    "one key twice in jsonl": ("jsonl", b'{"first": "w5", "first": "w6"}\n'),
    "a line without the column in jsonl": ("jsonl", b'{"first": "w5"}\n{"second": "w6"}\n'),
    "brackets nested 100,000 deep in jsonl": ("jsonl", b"[" * 100_000 + b"\n"),
    "a number of 10,000 digits in jsonl": ("jsonl", b'{"first": ' + b"9" * 10_000 + b"}\n"),
    "a column of white space for a name in tsv": ("tsv", b" \t\nw5\tw6\n"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_content_that_is_no_table_of_texts_is_refused_by_its_file(what: str, tmp_path: Path):
    form, content = REFUSED[what]
    path = written(tmp_path / f"texts.{form}", content)
    with refused(path.name):
        list(ik.read_texts(path, columns=COLUMN[form]))


@pytest.mark.parametrize("what", ["two columns of one name in csv", "an empty cell in tsv", "one key twice in jsonl"])
def test_a_run_over_such_a_file_leaves_nothing_behind(what: str, tmp_path: Path):
    form, content = REFUSED[what]
    path = written(tmp_path / f"texts.{form}", content)
    out = tmp_path / "out"
    with refused(path.name):
        command("attention", "--model", saved("bert"), "--data", path, "--column", "first", "--out", out)
    assert path.read_bytes() == content and not out.exists()


def linked(path: Path, target: str) -> Path:
    path.symlink_to(target)
    return path


def folder(path: Path) -> Path:
    path.mkdir()
    return path


SOURCES: dict[str, Callable[[Path], Any]] = {
    "a file that is not there": lambda place: place / "nothing.txt",
    "a folder": lambda place: folder(place / "folder.txt"),
    "a named pipe": lambda place: os.mkfifo(place / "pipe.txt") or place / "pipe.txt",
    "a link to an endless device": lambda place: linked(place / "zero.txt", "/dev/zero"),
    "a link to itself": lambda place: linked(place / "loop.txt", "loop.txt"),
    "an ending that is not known": lambda place: written(place / "texts.docx", b"w5\n"),
    "no ending": lambda place: written(place / "texts", b"w5\n"),
    "a name that is too long": lambda place: str(place / ("x" * 5000)) + ".txt",
    "a NUL byte in a name": lambda place: f"{place}/te\0xt.txt",
    "an empty name": lambda _: "",
    "a scheme that is not known": lambda _: "nowhere://texts.txt",
    "a bucket without its package": lambda _: "s3://bucket/texts.txt",
    "memory that holds nothing": lambda _: "memory://texts.txt",
    "a number": lambda _: 5,
    "nothing": lambda _: None,
    "a list": lambda _: ["texts.txt"],
}


@pytest.mark.parametrize("what", SOURCES)
def test_what_is_no_file_is_refused(what: str, tmp_path: Path):
    with refused():
        list(ik.read_texts(SOURCES[what](tmp_path)))


@pytest.mark.parametrize("name", ["datasets:nobody/nothing", "datasets:", "mrpc", "wikitext"])
@pytest.mark.parametrize("split", ["train", "x"])
def test_a_dataset_that_is_not_there_is_refused(name: str, split: str, tmp_path: Path):
    with refused():
        list(ik.read_texts(name, columns="text", split=split))
    with refused():
        list(ik.read_texts(name, data_dir=tmp_path, split=split))


@pytest.mark.parametrize(
    "options",
    [
        {},  # two columns and none named
        {"columns": "third"},
        {"columns": ""},
        {"columns": 1},
        {"columns": []},
        {"columns": [None]},
        {"columns": [["first"]]},
        {"columns": ["first", "second", "first"]},
        {"columns": "first", "split": "dev"},
        {"columns": "first", "data_dir": "."},
    ],
    ids=str,
)
def test_options_that_do_not_fit_the_file_are_refused(options: dict[str, Any], tmp_path: Path):
    with refused():
        list(ik.read_texts(written(tmp_path / "texts.tsv", whole("tsv")), **options))
