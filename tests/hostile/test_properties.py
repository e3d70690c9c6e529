"""Any text, any file and any changed byte: refused in a clear line, or right."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import identikit as ik
from tests.hostile.judging import REFUSALS, unclear
from tests.hostile.made import stock_attention
from tests.hostile.test_results import kept_result, made
from tests.hostile.test_stores import finished, started, tables
from tests.models import tiny

FIXTURE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
WORDS = st.sampled_from([f"w{i}" for i in range(4, 60) if i // 10 != 3])  # w3 is what unknown words become
STRANGE = st.text(st.characters(), max_size=20)


def attempted(call: Any) -> Any:
    """Return what a call returns, or None if it refuses in a clear line; anything else fails."""
    try:
        return call()
    except REFUSALS as refusal:
        assert unclear(str(refusal)) == "", refusal
        return None


def prove(found: Any, model: Any, ids: list[int]) -> None:
    expected = stock_attention(model.hf, ids)
    assert found.raw.shape == expected.shape
    assert torch.allclose(found.raw.double(), expected, atol=1e-5)
    assert torch.allclose(found.raw, found.effective + found.null, atol=1e-6)


@settings(FIXTURE, max_examples=60)
@given(text=st.one_of(STRANGE, st.tuples(STRANGE, STRANGE), st.lists(WORDS, max_size=70).map(" ".join)))
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_any_text_is_read_as_its_tokenizer_reads_it(name: str, text: Any):
    model = tiny.shared(name)
    found = attempted(lambda: ik.effective_attention(model, text))
    if found is not None:
        prove(found, model, tiny.tokenizer()(*([text] if isinstance(text, str) else text))["input_ids"])


IDS = st.lists(st.one_of(st.integers(0, 59), st.integers(), st.floats(), st.none(), st.booleans()), max_size=8)


@settings(FIXTURE, max_examples=60)
@given(ids=st.one_of(st.lists(st.integers(0, 59), min_size=1, max_size=70), IDS))
def test_any_ids_are_read_as_they_are(ids: list[Any]):
    model = tiny.shared("bert")
    found = attempted(lambda: ik.effective_attention(model, ids))
    plain = bool(ids) and all(type(index) is int and 0 <= index < 60 for index in ids) and len(ids) <= 64
    assert (found is not None) == plain
    if found is not None:
        prove(found, model, ids)


@settings(FIXTURE, max_examples=100)
@given(content=st.binary(max_size=300), form=st.sampled_from(["txt", "tsv", "csv", "jsonl", "parquet"]))
def test_any_bytes_are_a_file_or_none(content: bytes, form: str, tmp_path: Path):
    path = tmp_path / f"texts.{form}"
    path.write_bytes(content)
    found = attempted(lambda: list(ik.read_texts(path)))
    if found is not None:
        whole = content.decode("utf-8-sig")
        assert found and all(text.strip() for text in found)
        if form in ("txt", "tsv"):  # what was read stands in the file
            assert all(text in whole for text in found)
    assert path.read_bytes() == content


CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\t\n\r"), max_size=12)
VALUES = st.one_of(CELLS, st.none(), st.integers(), st.floats(), st.booleans(), st.lists(CELLS, max_size=2))


@settings(FIXTURE, max_examples=100)
@given(rows=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=5), names=st.tuples(CELLS, CELLS))
def test_any_cells_of_a_table_come_back(rows: list[tuple[str, str]], names: tuple[str, str], tmp_path: Path):
    path = tmp_path / "texts.tsv"
    path.write_bytes("".join(f"{first}\t{second}\n" for first, second in (names, *rows)).encode())
    found = attempted(lambda: list(ik.read_texts(path, columns=list(names))))
    if found is not None:
        assert len(set(names)) == 2
        assert found == [tuple(row) for row in rows] or names[0].startswith("\ufeff")


@settings(FIXTURE, max_examples=100)
@given(rows=st.lists(VALUES, min_size=1, max_size=5))
def test_any_values_of_json_lines_are_texts_or_refused(rows: list[Any], tmp_path: Path):
    path, lines = tmp_path / "texts.jsonl", io.StringIO()
    for value in rows:
        lines.write(json.dumps({"text": value, "other": 1}) + "\n")
    path.write_text(lines.getvalue())
    found = attempted(lambda: list(ik.read_texts(path, columns="text")))
    texts = all(isinstance(value, str) and value.strip() for value in rows)
    assert found == (rows if texts else None)


CHANGES = st.tuples(st.sampled_from(["flip", "cut", "add"]), st.floats(0, 1, exclude_max=True), st.integers(1, 255))


def changed(path: Path, change: tuple[str, float, int]) -> None:
    """Flip bits of one byte, cut the file there, or add bytes at its end."""
    how, share, number = change
    content = bytearray(path.read_bytes())
    place = int(share * len(content))
    if how == "flip":
        content[place] ^= number
    path.write_bytes(content[:place] if how == "cut" else content + bytes([number]) * (how == "add"))


@settings(FIXTURE, max_examples=60)
@given(change=CHANGES, which=st.integers(0, 1), name=st.sampled_from(["attention", "attribution", "inversion"]))
def test_any_changed_byte_of_a_saved_result_is_noticed(change: Any, which: int, name: str, tmp_path: Path):
    folder = tmp_path / "result"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(kept_result(name), folder)
    changed(sorted(folder.iterdir())[which], change)
    found = attempted(lambda: ik.open_result(folder))
    if found is not None:
        assert found.provenance == made(name).provenance and found.tokens == made(name).tokens
        assert all(torch.equal(found.array(one), made(name).array(one)) for one in found.arrays)


@settings(FIXTURE, max_examples=25)
@given(change=CHANGES, pick=st.integers(0, 10**6))
@pytest.mark.slow
def test_any_changed_byte_of_a_run_is_noticed(change: Any, pick: int, tmp_path: Path):
    """Of a shard, a table or the manifest: the run ends with the tables of an undisturbed one, or is refused."""
    out = tmp_path / "out"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(finished("attention"), out)
    files = sorted(path for path in out.iterdir() if path.stat().st_size)
    file = files[pick % len(files)]
    changed(file, change)
    done = attempted(lambda: started("attention", out))
    assert done is not None or not file.name.startswith("shard-"), "a damaged shard is computed again, never refused"
    if done is not None:
        assert tables(out) == tables(finished("attention"))
