"""Data files that are damaged, odd, or no files at all, in every format."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

import identikit as ik
from tests.hostile.cases import Case, crossed, kept, proved
from tests.hostile.made import command, saved

ROWS = [("w5 w6 w7", "w8 w9"), ("w10 w11", "w12"), ("w13 ünï 👩", "w14")]
FORMATS = ("txt", "tsv", "csv", "jsonl", "parquet")
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
        made = [json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) for row in rows]
    elif form == "txt":
        made = [str(row[0]) for row in rows]
    else:
        made = [("\t" if form == "tsv" else ",").join(map(str, row)) for row in (names, *rows)]
    return ("\n".join(made) + "\n").encode()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "of one NUL byte": lambda _: b"\0",
    "of a thousand NUL bytes": lambda _: b"\0" * 1000,
    "of blank lines": lambda _: b"\n \n\t\n\r\n",
    "of random bytes": lambda _: bytes((7 * place * place + 11 * place) % 256 for place in range(3000)),
    "cut in half": lambda whole: whole[: len(whole) // 2],
    "cut before its last byte": lambda whole: whole[:-1],
    "cut inside a character": lambda whole: (
        whole[: whole.rindex("ü".encode()) + 1] if "ü".encode() in whole else whole[:9]
    ),
    "with a NUL byte inside": lambda whole: whole.replace(b"w6", b"w\x006"),
    "with a byte that is no UTF-8": lambda whole: whole.replace(b"w6", b"w\xff6"),
    "with bytes after its end": lambda whole: whole + b"\xfe\xfd",
    "in Latin-1": lambda whole: whole.decode("utf-8", "ignore").replace("👩", "").encode("latin-1", "replace"),
    "in UTF-16": lambda whole: whole.decode("utf-8", "ignore").encode("utf-16"),
    "in UTF-32": lambda whole: whole.decode("utf-8", "ignore").encode("utf-32-le"),
    "in gzip": lambda whole: __import__("gzip").compress(whole, mtime=0),
    "with a lone surrogate": lambda whole: whole.replace(b"w6", b"\xed\xa0\x80"),
}
HARMLESS: dict[str, Callable[[bytes], bytes]] = {
    "with a byte order mark": lambda whole: b"\xef\xbb\xbf" + whole,
    "with Windows line ends": lambda whole: whole.replace(b"\n", b"\r\n"),
    "without its last line end": lambda whole: whole.removesuffix(b"\n"),
    "with blank lines at its end": lambda whole: whole + b"\n\n",
    "as it should be": lambda whole: whole,
}

# Contents that only one format can have: (format, content), all to be refused.
REFUSED: dict[str, tuple[str, bytes]] = {
    **{
        f"two columns of one name in {form}": (form, whole(form, names=("first", "first")))
        for form in ("tsv", "csv", "parquet")
    },
    **{f"a missing cell in {form}": (form, whole(form) + b"w5\n") for form in ("tsv", "csv")},
    **{
        f"a cell too many in {form}": (form, whole(form) + between.join([b"w5"] * 3) + b"\n")
        for form, between in (("tsv", b"\t"), ("csv", b","))
    },
    **{f"an empty cell in {form}": (form, whole(form, [("w5", "w6"), ("", "w6")])) for form in FORMATS[1:]},
    **{f"a cell of spaces in {form}": (form, whole(form, [("w5", "w6"), ("  ", "w6")])) for form in FORMATS[1:]},
    **{
        f"{value!r} for a text in {form}": (form, whole(form, [("w5", "w6"), (value, "w6")]))
        for form, value in [("jsonl", v) for v in (5, 1.5, None, True, ["w5"], {"w": 5}, float("nan"), float("inf"))]
    },
    **{
        f"a column of {what} in parquet": ("parquet", whole("parquet", [(value, "w6")]))
        for what, value in {"numbers": 5, "fractions": 1.5, "nulls": None, "lists": ["w5"], "bytes": b"w5"}.items()
    },
    "no rows in tsv": ("tsv", b"first\tsecond\n"),
    "no rows in csv": ("csv", b"first,second\n"),
    "no rows in parquet": ("parquet", whole("parquet", [])),
    "an open quote in csv": ("csv", b'first,second\n"w5,w6\n'),
    "a quote inside a quoted cell in csv": ("csv", b'first,second\n"w5"x,w6\n'),
    "a list for a line in jsonl": ("jsonl", b'["w5", "w6"]\n'),
    "a word for a line in jsonl": ("jsonl", b'"w5"\n'),
    "a number for a line in jsonl": ("jsonl", b"5\n"),
    "NaN for a line in jsonl": ("jsonl", b"NaN\n"),
    "single quotes in jsonl": ("jsonl", b"{'first': 'w5'}\n"),
    "a comma too many in jsonl": ("jsonl", b'{"first": "w5",}\n'),
    "one key twice in jsonl": ("jsonl", b'{"first": "w5", "first": "w6"}\n'),
    "a line without the column in jsonl": ("jsonl", b'{"first": "w5"}\n{"second": "w6"}\n'),
    "brackets nested 100,000 deep in jsonl": ("jsonl", b"[" * 100_000 + b"\n"),
    "a number of 10,000 digits in jsonl": ("jsonl", b'{"first": ' + b"9" * 10_000 + b"}\n"),
    "a column of white space for a name in tsv": ("tsv", b" \t\nw5\tw6\n"),
}

PLACES: dict[str, Callable[[Path], Any]] = {
    "a file that is not there": lambda place: place / "nothing.txt",
    "a folder": lambda place: _made_folder(place / "folder.txt"),
    "a named pipe": lambda place: os.mkfifo(place / "pipe.txt") or place / "pipe.txt",
    "a link to an endless device": lambda place: _linked(place / "zero.txt", "/dev/zero"),
    "a link to itself": lambda place: _linked(place / "loop.txt", "loop.txt"),
    "a link to nowhere": lambda place: _linked(place / "gone.txt", "nowhere"),
    "an ending that is not known": lambda place: _written(place / "texts.docx", b"w5\n"),
    "no ending": lambda place: _written(place / "texts", b"w5\n"),
    "a name that is too long": lambda place: str(place / ("x" * 5000)) + ".txt",
    "a NUL byte in a name": lambda place: f"{place}/te\0xt.txt",
    "an empty name": lambda _: "",
    "a scheme that is not known": lambda _: "nowhere://texts.txt",
    "a bucket without its package": lambda _: "s3://bucket/texts.txt",
    "memory that holds nothing": lambda _: "memory://texts.txt",
    "a number": lambda _: 5,
    "nothing": lambda _: None,
    "a list": lambda _: ["texts.txt"],
    "bytes": lambda _: b"texts.txt",
    "a dataset that is not known": lambda _: "datasets:nobody/nothing",
    "a dataset without a name": lambda _: "datasets:",
}

OPTIONS: dict[str, dict[str, Any]] = {
    "a column that is not there": {"columns": "third"},
    "no columns": {"columns": []},
    "three columns": {"columns": ["first", "second", "first"]},
    "one column twice": {"columns": ["first", "first"]},
    "a number for a column": {"columns": 1},
    "nothing in a list of columns": {"columns": [None]},
    "an empty column": {"columns": ""},
    "a list in a list of columns": {"columns": [["first"]]},
    "a split of a file": {"columns": "first", "split": "dev"},
    "a data folder for a file": {"columns": "first", "data_dir": "."},
    "two columns and none named": {},
}


def _made_folder(path: Path) -> Path:
    path.mkdir()
    return path


def _linked(path: Path, target: str) -> Path:
    path.symlink_to(target)
    return path


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def cases() -> Iterator[Case]:
    """Yield the cases with data files."""
    for (what, damage), form, slow in crossed(DAMAGES.items(), FORMATS):
        yield Case(f"a {form} {what}", "files", _damaged(form, damage), "either", slow=slow)
    for (what, change), form, slow in crossed(HARMLESS.items(), FORMATS[:-1]):
        yield Case(f"a {form} {what}", "files", _harmless(form, change), "right", slow=slow)
    yield Case("a parquet as it should be", "files", _harmless("parquet", HARMLESS["as it should be"]), "right")
    for what, (form, content) in REFUSED.items():
        yield Case(what, "files", _content(form, content), "refused", (f"texts.{form}",))
    for what, made in PLACES.items():
        yield Case(f"{what} for a file", "files", _place(made), "refused")
    for what, options in OPTIONS.items():
        yield Case(what, "files", _options(options), "refused" if what != "one column twice" else "either")
    ways = {"no folder": {}, "an empty folder": {"data_dir": ""}, "a strange split": {"split": "x"}}
    for name, (what, options), slow in crossed(("mrpc", "cola", "mnli", "wikitext"), ways.items()):
        yield Case(f"{name} with {what}", "files", _known(name, options), "refused", slow=slow)
    for what, (form, content) in REFUSED.items():
        if what.startswith(("two columns", "an empty cell", "one key twice")):
            yield Case(f"{what}, over a dataset", "files", _over(form, content), "refused", (f"texts.{form}",))


def _damaged(form: str, damage: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Refused, or read as what the bytes say: the texts must be cells that a plain reader of the format finds."""

    def run(place: Path) -> None:
        content = damage(whole(form))
        path = _written(place / f"texts.{form}", content)
        found = list(ik.read_texts(path, columns=COLUMN[form]))
        kept(path.read_bytes() == content, "the file was changed")
        proved(found == _plain(form, content), f"read {found!r:.200}")

    return run


def _plain(form: str, content: bytes) -> list[str]:
    """Read a file in the plainest way; for what cannot be read like this, an impossible answer."""
    import csv
    import io

    if form == "parquet":
        table = pyarrow.parquet.read_table(pyarrow.BufferReader(content))
        return table.column("first").to_pylist()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return ["not to be read"]
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if form == "txt":
        return [line for line in lines if line.strip()]
    if form == "jsonl":
        return [json.loads(line)["first"] for line in lines if line.strip()]
    if form == "tsv":
        return [line.split("\t")[0] for line in lines[1:] if line]
    return [row[0] for row in list(csv.reader(io.StringIO(text, newline="")))[1:] if row]


def _harmless(form: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        path = _written(place / f"texts.{form}", change(whole(form)))
        expected: list[Any] = [row[0] for row in ROWS]
        proved(list(ik.read_texts(path, columns=COLUMN[form])) == expected, "the texts differ")
        if form != "txt":
            proved(list(ik.read_texts(path, columns=["first", "second"])) == ROWS, "the pairs differ")

    return run


def _content(form: str, content: bytes) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        list(ik.read_texts(_written(place / f"texts.{form}", content), columns=COLUMN[form]))

    return run


def _place(made: Callable[[Path], Any]) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        source = made(place)
        columns = {"columns": "text", "split": "train"} if str(source).startswith("datasets:") else {}
        list(ik.read_texts(source, **columns))

    return run


def _options(options: dict[str, Any]) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        found = list(ik.read_texts(_written(place / "texts.tsv", whole("tsv")), **options))
        proved(found == [(row[0], row[0]) for row in ROWS], "the texts are not those of the columns")

    return run


def _known(name: str, options: dict[str, Any]) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        given = options | ({"data_dir": place} if "data_dir" in options or "split" in options else {})
        list(ik.read_texts(name, **given))

    return run


def _over(form: str, content: bytes) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        path, out = _written(place / f"texts.{form}", content), place / "out"
        try:
            command("attention", "--model", saved("bert"), "--data", path, "--column", "first", "--out", out)
        finally:
            kept(path.read_bytes() == content, "the file was changed")
            proved(not out.exists(), "a folder was made for texts that cannot be read")

    return run
