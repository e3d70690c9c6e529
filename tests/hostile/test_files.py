"""Data files that are damaged or as editors write them, in every format.

Tables that are none, and what is no file, are in `tests/texts/test_data.py`.
"""

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import identikit as ik
from tests.hostile.judging import refused, refused_or_right
from tests.hostile.made import command, saved

ROWS = [("w5 w6 w7", "w8 w9"), ("w10 w11", "w12"), ("w13 ünï 👩", "w14")]
COLUMN = {"txt": None, "tsv": "first", "csv": "first", "jsonl": "first", "parquet": "first"}


def whole(form: str) -> bytes:
    """Return a file of two columns (of lines: one) in a format."""
    names = ("first", "second")
    if form == "parquet":
        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(pyarrow.table(list(zip(*ROWS, strict=True)), names=names), sink)
        return sink.getvalue().to_pybytes()
    if form == "jsonl":
        lines = [json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) for row in ROWS]
    elif form == "txt":
        lines = [first for first, _ in ROWS]
    else:
        lines = [{"tsv": "\t", "csv": ","}[form].join(row) for row in (names, *ROWS)]
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


def test_a_run_over_a_bad_row_leaves_nothing_behind(tmp_path: Path):
    path = written(tmp_path / "texts.tsv", whole("tsv") + b"\tw6\n")
    with refused(path.name):
        command("attention", "--model", saved("bert"), "--data", path, "--column", "first", "--out", tmp_path / "out")
    assert list(tmp_path.iterdir()) == [path]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300), form=st.sampled_from(list(COLUMN)))
def test_any_bytes_are_a_file_or_none(content: bytes, form: str, tmp_path: Path):
    path = written(tmp_path / f"texts.{form}", content)
    with refused_or_right():
        texts = list(ik.read_texts(path))
        assert texts and all(text.strip() for text in texts)
        if form in ("txt", "tsv"):  # what was read stands in the file
            assert all(text in content.decode("utf-8-sig") for text in texts)
    assert path.read_bytes() == content
