import csv
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from identikit.errors import InputError
from identikit.texts.data import read_labelled, read_texts
from identikit.texts.encoding import encode
from tests.models.real import SHARED
from tests.texts.test_text import minilm

MRPC_HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"

one_line = st.text(st.characters(codec="utf-8", exclude_characters="\t\n\0"), min_size=1).filter(
    lambda text: text.strip() and not text.endswith("\r")
)


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(encoding))
    return path


def write_parquet(path: Path, **columns) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


in_one_folder = settings(
    max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@in_one_folder
@given(st.lists(one_line, min_size=1), st.sampled_from(["\n", "\r\n"]), st.sampled_from(["utf-8", "utf-8-sig"]))
def test_a_text_file_has_a_text_a_line(tmp_path, texts, end, encoding):
    texts = [text for text in texts if not text.startswith("\ufeff")] or ["text"]
    path = write(tmp_path / "texts.txt", end.join([*texts, "", "  ", ""]), encoding)
    assert list(read_texts(path)) == texts


@in_one_folder
@given(st.lists(st.tuples(one_line, one_line), min_size=1))
def test_every_format_gives_back_what_was_written(tmp_path, pairs):
    """Tabs are plain: quotes between them are text."""
    lines = ["left\tnumber\tright", *(f"{left}\t7\t{right}" for left, right in pairs)]
    path = write(tmp_path / "pairs.tsv", "\n".join(lines) + "\n", "utf-8-sig")
    assert list(read_texts(path, columns=("left", "right"))) == pairs
    with (tmp_path / "pairs.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("left", "right"), *((left + "\n", right) for left, right in pairs)])
    records = [json.dumps({"left": left, "number": 3, "right": right}) for left, right in pairs]
    write(tmp_path / "pairs.jsonl", "\n\n".join(records))
    left, right = zip(*pairs, strict=True)
    write_parquet(tmp_path / "pairs.parquet", number=range(len(pairs)), left=left, right=right)
    columns = ["left", "right"]
    assert list(read_texts(tmp_path / "pairs.csv", columns=columns)) == [(a + "\n", b) for a, b in pairs]
    assert list(read_texts(tmp_path / "pairs.jsonl", columns=columns)) == pairs
    assert list(read_texts(tmp_path / "pairs.parquet", columns=columns)) == pairs


def test_the_only_text_column_needs_no_name(tmp_path):
    assert list(read_texts(write(tmp_path / "a.tsv", 'only\n"one\ntwo\n'))) == ['"one', "two"]
    assert list(read_texts(write(tmp_path / "a.csv", 'only\n"one"\ntwo\n'))) == ["one", "two"]
    assert list(read_texts(write(tmp_path / "a.jsonl", '{"n": 1, "t": "one"}\n{"n": 2, "t": "two"}'))) == ["one", "two"]
    assert list(read_texts(write_parquet(tmp_path / "a.parquet", n=[1, 2, 3], t=["a", "b", "c"]))) == ["a", "b", "c"]


def test_texts_are_read_one_by_one(tmp_path):
    fsspec.filesystem("memory").pipe_file("/folder/texts.txt", b"one\ntwo\n")
    assert list(read_texts("memory://folder/texts.txt")) == ["one", "two"]
    path = tmp_path / "broken.txt"
    path.write_bytes(b"one\n" * 10_000 + b"\xff\n")
    texts = read_texts(path)
    assert next(texts) == "one"
    with pytest.raises(InputError, match=r"broken\.txt: it is not UTF-8"):
        list(texts)


TWO_COLUMNS = "one\ttwo\na\tb\n"


@pytest.mark.parametrize(
    ("name", "content", "columns", "message"),
    [
        ("a.tsv", TWO_COLUMNS, None, "name the column.*It has 'one', 'two'"),
        ("a.tsv", TWO_COLUMNS, "three", "no column 'three'. It has 'one', 'two'"),
        ("a.tsv", TWO_COLUMNS, ("one", "two", "one"), "got 3 columns, expected one for texts or two for pairs"),
        ("a.tsv", TWO_COLUMNS, ["one", "one"], "the column 'one' is named twice"),
        ("a.tsv", TWO_COLUMNS, [], r"columns=\[\] cannot be used: expected the name of a column"),
        ("a.csv", 'text,"text"\na,b\n', None, "two columns are called 'text'"),
        ("a.tsv", "", "one", "is empty"),
        ("a.jsonl", "\n", None, "is empty"),
        ("a.jsonl", "{'a': 1}\n", None, "line 1: not valid JSON"),
        ("a.jsonl", "[1]\n", None, "line 1: expected a JSON object, got list"),
        ("a.jsonl", '{"text": "a", "text": "b"}\n', None, r"not valid JSON \(the key 'text' occurs twice\)"),
        ("a.jsonl", '{"text": 7}\n', None, "name the column of the texts"),
        ("a.parquet", "PAR?", None, "not valid Parquet"),
        ("a.json", "{}", None, r"ending in \.txt, \.tsv, \.csv, \.jsonl, \.parquet.*mrpc.*datasets:"),
        ("a.txt", "one", "line", "no column 'line'. It has 'text'"),
    ],
)
def test_mistakes_surface_at_the_call(tmp_path, name, content, columns, message):
    path = write(tmp_path / name, content)
    with pytest.raises(InputError, match=message) as refused:
        read_texts(path, columns=columns)
    assert len(str(refused.value).splitlines()) == 1 and len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("name", "content", "columns", "message"),
    [
        ("a.tsv", TWO_COLUMNS + "a\n", "one", r"line 3: it has 1 cells where 2 were expected \(one, two\)"),
        ("a.tsv", TWO_COLUMNS + "\na\t \n", "two", "line 4: column 'two' holds nothing"),
        ("a.tsv", "text\n", None, "it holds no text"),
        ("a.csv", 'one,two\n"a\nb",c\na,\n', "two", "line 4: column 'two' holds nothing"),
        ("a.csv", 'one,two\na,"b\n', "two", "line 2: not valid CSV"),
        ("a.csv", 'text\n"' + "x" * 10_000_001, None, r"line 2: not valid CSV \(field larger than field limit"),
        ("a.jsonl", '{"t": "a"}\n\n{"u": "a"}', "t", "line 3: column 't' holds nothing"),
        ("a.jsonl", '{"t": "a"}\n{"t": 3}', "t", "line 2: column 't' holds int 3, expected a text"),
        ("a.jsonl", '{"t": "a"}\n{"t": "a", "n": NaN}\n', "t", r"line 2: not valid JSON \(NaN is not JSON\)"),
        ("a.txt", " \n\n", None, "holds no text"),
        ("a.txt", "one\0two\n", None, "line 1: it holds a NUL character"),
        ("a.txt", "one\rtwo\rthree", None, r"its lines end in \\r alone"),
        ("a.txt", "x" * 20_000_001, None, "line 1: it has more than 20,000,000 characters"),
        ("a.txt", "ok\n" + "x" * 10_000_001, None, "line 2: column 'text' holds 10,000,001 characters"),
    ],
)
def test_a_bad_line_is_named(tmp_path, name, content, columns, message):
    texts = read_texts(write(tmp_path / name, content), columns=columns)
    with pytest.raises(InputError, match=message) as refused:
        list(texts)
    assert len(str(refused.value).splitlines()) == 1 and len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["a", "b", None], "row 3: column 't' holds nothing"),
        ([5], "row 1: column 't' holds int 5"),
        (pyarrow.array([], pyarrow.string()), "holds no text"),
    ],
)
def test_a_parquet_cell_that_is_no_text_is_named(tmp_path, cells, message):
    path = write_parquet(tmp_path / "a.parquet", t=cells)
    with pytest.raises(InputError, match=message):
        list(read_texts(path, columns="t"))


def test_only_files_are_read(tmp_path):
    (tmp_path / "folder.txt").mkdir()
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    for name in ("folder", "pipe", "zero", "loop", "missing", "x" * 5000):
        with pytest.raises(InputError, match=r"not a file|no such file") as refused:
            read_texts(tmp_path / f"{name}.txt")
        assert len(str(refused.value)) < 300
    for wrong in ("a\0.txt", "", "nothing://a.txt", "s3://bucket/a.txt", "memory://nothing.txt"):
        with pytest.raises(InputError, match=r"cannot be (used|reached)|expected a file|no such file"):
            read_texts(wrong)
    for nothing in ("datasets:", "datasets:/"):
        with pytest.raises(InputError, match="the name of the dataset is missing"):
            read_texts(nothing, columns="text", split="train")
    pyarrow.parquet.write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="two columns are called 'text'"):
        read_texts(tmp_path / "a.parquet")


def test_options_without_effect_are_refused(tmp_path):
    path = write(tmp_path / "a.txt", "one")
    with pytest.raises(InputError, match="split='dev' has no effect here"):
        read_texts(path, split="dev")
    with pytest.raises(InputError, match="data_dir='x' has no effect here"):
        read_texts(path, data_dir="x")
    with pytest.raises(InputError, match="columns='x' has no effect here"):
        read_texts("mrpc", columns="x", data_dir=tmp_path)


MRPC_PAIR = 'He said "no.\tThe "other", said yes.'
COLA = 'gj04\t1\t\tThe sailors "rode.\ngj04\t0\t*\tBad the.\n'
MNLI = "index\tgenre\tsentence1\tsentence2\tgold_label\n0\tfiction\tA premise.\tA hypothesis.\tneutral\n"


@pytest.mark.parametrize(
    ("name", "files", "texts"),
    [
        ("mrpc", {"MRPC/dev.tsv": f"\ufeff{MRPC_HEADER}\n1\t2\t3\t{MRPC_PAIR}\n"}, [tuple(MRPC_PAIR.split("\t"))]),
        ("MRPC", {"dev.tsv": f"{MRPC_HEADER}\r\n1\t2\t3\t{MRPC_PAIR}\r\n"}, [tuple(MRPC_PAIR.split("\t"))]),
        ("mrpc", {"mrpc_dev.tsv": "sentence1\tsentence2\na\tb"}, [("a", "b")]),
        ("cola", {"dev.tsv": COLA}, ['The sailors "rode.', "Bad the."]),
        (
            "cola",
            {"cola_in_domain_dev.tsv": COLA, "cola_out_of_domain_dev.tsv": "x\t1\t\tLast."},
            ['The sailors "rode.', "Bad the.", "Last."],
        ),
        ("mnli", {"MNLI/dev_matched.tsv": MNLI}, [("A premise.", "A hypothesis.")]),
        ("mnli", {"mnli_dev_matched.tsv": "premise\thypothesis\tlabel\na\tb\tc"}, [("a", "b")]),
        (
            "wikitext",
            {"wikitext-2-raw/wiki.test.raw": " \n = Head = \n \n A line = 1 . \n = = Sub = = \n"},
            ["A line = 1 ."],
        ),
        ("wikitext", {"wiki.test.raw": "one\r\n \r\ntwo"}, ["one", "two"]),
        ("cola", {"CoLA/dev.tsv": "x\t1\t\tglue", "dev.tsv": "x\t1\t\tloose"}, ["glue"]),
    ],
)
def test_known_datasets_in_each_layout(tmp_path, name, files, texts):
    for file, content in files.items():
        write(tmp_path / file, content)
    assert list(read_texts(name, data_dir=tmp_path)) == texts


def test_training_pairs_without_ids_are_all_read(tmp_path):
    write(tmp_path / "mrpc_dev.tsv", f"{MRPC_HEADER}\n1\t3\t4\tc\td")
    write(tmp_path / "MRPC/train.tsv", "sentence1\tsentence2\nc\td")
    assert list(read_texts("mrpc", data_dir=tmp_path, split="train")) == [("c", "d")]


MRPC_TRAINING = f"{MRPC_HEADER}\n1\t1\t2\ta\tb\n0\t3\t4\tc\td\n0\t1\t4\te\tf"


@pytest.mark.parametrize(
    ("training", "development"),
    [
        ("msr_paraphrase_train.txt", "mrpc_dev.tsv"),
        ("MRPC/msr_paraphrase_train.txt", "dev.tsv"),
        ("MRPC/train.tsv", "MRPC/dev.tsv"),
    ],
)
def test_labels_come_with_the_texts_that_are_left_in(tmp_path, training, development):
    write(tmp_path / training, f"\ufeff{MRPC_TRAINING}")
    every = [(("a", "b"), 1), (("c", "d"), 0), (("e", "f"), 0)]
    assert list(read_labelled("MRPC", data_dir=tmp_path, split="train")) == every
    write(tmp_path / development, f"{MRPC_HEADER}\n0\t3\t4\tc\td")
    assert list(read_labelled("mrpc", data_dir=tmp_path, split="train")) == [every[0], every[2]]
    assert list(read_texts("mrpc", data_dir=tmp_path, split="train")) == [("a", "b"), ("e", "f")]
    assert list(read_labelled("mrpc", data_dir=tmp_path)) == [every[1]]


def test_labels_of_cola_and_of_a_converted_mrpc(tmp_path):
    write(tmp_path / "cola_in_domain_train.tsv", COLA)
    write(tmp_path / "mrpc_dev.tsv", "sentence1\tsentence2\tlabel\na\tb\t1")
    assert list(read_labelled("cola", data_dir=tmp_path, split="train")) == [('The sailors "rode.', 1), ("Bad the.", 0)]
    assert list(read_labelled("mrpc", data_dir=tmp_path)) == [(("a", "b"), 1)]


def test_labels_that_are_not_there(tmp_path):
    for name in ("mnli", "sst"):
        with pytest.raises(InputError, match=f"'{name}' is not known. Use one of mrpc, cola"):
            read_labelled(name, data_dir=tmp_path)
    with pytest.raises(InputError, match=r"holds none of MRPC/msr_paraphrase_train\.txt"):
        read_labelled("mrpc", data_dir=tmp_path, split="train")
    write(tmp_path / "mrpc_dev.tsv", "sentence1\tsentence2\na\tb")
    with pytest.raises(InputError, match=r"no labels\. Expected a column 'Quality' or 'label'; it has 'sentence1'"):
        read_labelled("mrpc", data_dir=tmp_path)
    write(tmp_path / "CoLA/dev.tsv", "x\t1\t\tGood.\nx\tyes\t\tBad.")
    with pytest.raises(InputError, match="line 2: column 'label' holds 'yes', expected the label 0 or 1"):
        list(read_labelled("cola", data_dir=tmp_path))
    write(tmp_path / "CoLA/train.tsv", "")
    with pytest.raises(InputError, match="it holds no text"):
        list(read_labelled("cola", data_dir=tmp_path, split="train"))


def test_a_known_name_that_cannot_be_found(tmp_path):
    with pytest.raises(InputError, match=r"mrpc: say which folder.*data_dir=.*'datasets:nyu-mll/glue/mrpc'"):
        read_texts("mrpc")
    with pytest.raises(InputError, match=r"holds none of CoLA/dev.tsv, dev.tsv, cola_in_domain_dev.tsv \+ cola_out"):
        read_texts("cola", data_dir=tmp_path)
    with pytest.raises(InputError, match=r"no split 'validation'\. It has dev, train"):
        read_texts("mnli", data_dir=tmp_path, split="validation")
    write(tmp_path / "dev.tsv", "x\t1\t\tfrom another dataset")
    with pytest.raises(InputError, match="no column '#1 String'"):
        read_texts("mrpc", data_dir=tmp_path)


def fake_datasets(known):
    def load_dataset(name, configuration=None, *, split, streaming):
        assert streaming
        if (name, configuration) not in known:
            raise FileNotFoundError(f"no dataset {name}")
        if split != "train":
            raise ValueError("Bad split: x.\nAvailable splits: ['train']")
        return known[name, configuration]

    return SimpleNamespace(load_dataset=load_dataset)


def test_hub_datasets_by_name_and_configuration(monkeypatch):
    rows = [{"a": "one", "b": "two"}, {"a": "three", "b": None}]
    known = {
        ("owner/name", None): rows[:1],
        ("owner/name", "part"): rows[:1],
        ("short", "part"): rows,
        ("none", None): [],
    }
    monkeypatch.setitem(sys.modules, "datasets", fake_datasets(known))
    for name in ("owner/name", "owner/name/part"):
        assert list(read_texts(f"datasets:{name}", columns=("a", "b"), split="train")) == [("one", "two")]
    assert list(read_texts("datasets:short/part", columns="a", split="train")) == ["one", "three"]
    with pytest.raises(InputError, match="datasets:short/part, row 2: column 'b' holds nothing"):
        list(read_texts("datasets:short/part", columns="b", split="train"))
    with pytest.raises(InputError, match=r"no column 'c'\. It has 'a', 'b'"):
        read_texts("datasets:owner/name", columns="c", split="train")
    with pytest.raises(InputError, match=r"split 'x': datasets cannot load it \(Bad split: x. Available splits"):
        read_texts("datasets:owner/name", columns="a", split="x")
    with pytest.raises(InputError, match=r"cannot load it \(no dataset nowhere\)"):
        read_texts("datasets:nowhere", columns="a", split="train")
    with pytest.raises(InputError, match="split 'train' is empty"):
        read_texts("datasets:none", columns="a", split="train")


def test_hub_datasets_need_columns_a_split_and_the_package(monkeypatch):
    with pytest.raises(InputError, match="pass columns and split"):
        read_texts("datasets:glue/mrpc", split="train")
    with pytest.raises(InputError, match="pass columns and split"):
        read_texts("datasets:glue/mrpc", columns="sentence1")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=re.escape("pip install 'identikit[data]'")):
        read_texts("datasets:glue/mrpc", columns="sentence1", split="train")


def test_a_local_folder_through_datasets(tmp_path):
    pytest.importorskip("datasets", reason="datasets is not installed (extra [data])")
    write(tmp_path / "set/train.jsonl", '{"a": "one", "b": "x"}\n{"a": "two", "b": "y"}\n')
    source = f"datasets:{tmp_path}/set"
    assert list(read_texts(source, columns=("a", "b"), split="train")) == [("one", "x"), ("two", "y")]
    assert list(read_texts(f"{source}/default", columns="a", split="train")) == ["one", "two"]
    with pytest.raises(InputError, match=r"datasets cannot load it.*train"):
        read_texts(source, columns="a", split="dev")
    with pytest.raises(InputError, match="datasets cannot load it"):
        read_texts(f"datasets:{tmp_path}/nowhere", columns="a", split="train")


@pytest.fixture
def shared():
    if not (SHARED / "data").is_dir():
        pytest.skip("no datasets beside the repository (shared/data)")
    return SHARED / "data"


def piece_counts(texts, **options) -> list[int]:
    return [len(encoded) for encoded in encode(minilm(), list(texts), **options)]


def test_mrpc_has_the_papers_counts(shared):
    pairs = list(read_texts("mrpc", data_dir=shared))
    counts = piece_counts(pairs)
    assert len(pairs) == 408
    assert (sum(counts), min(counts), max(counts)) == (21_723, 26, 86)
    assert pairs[0] == (
        "He said the foodservice pie business doesn't fit the company's long-term growth strategy.",
        '"The foodservice pie business does not fit our long-term growth strategy.',
    )


def test_labels_of_mrpc_and_cola(shared):
    counted = {}
    for name in ("mrpc", "cola"):
        for split in ("train", "dev"):
            labels = [label for _, label in read_labelled(name, data_dir=shared, split=split)]
            counted[name, split] = (len(labels), sum(labels))
    assert counted == {
        ("mrpc", "train"): (3_668, 2_474),
        ("mrpc", "dev"): (408, 279),
        ("cola", "train"): (8_551, 6_023),
        ("cola", "dev"): (1_043, 719),
    }


def test_cola_has_the_papers_counts(shared):
    counts = piece_counts(read_texts("cola", data_dir=shared))
    assert (len(counts), min(counts), max(counts)) == (1_043, 5, 35)


def test_mnli_has_the_papers_count_of_its_first_500(shared):
    pairs = list(read_texts("mnli", data_dir=shared))
    assert len(pairs) == 9_815
    assert sum(piece_counts(pairs[:500], limit=128, truncate=True)) == 19_839


def test_wikitext_gives_paragraphs_without_headings(shared):
    paragraphs = list(read_texts("wikitext", data_dir=shared))
    assert len(paragraphs) == 2_185
    assert str(paragraphs[0]).startswith("Robert Boulter is an English film , television and theatre actor .")
    assert not any(re.fullmatch(r"= .* =", str(paragraph)) for paragraph in paragraphs)
