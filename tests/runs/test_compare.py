"""Two runs compared: rows are matched by what they are about, and every difference beyond the tolerance is found."""

import json
from itertools import product
from pathlib import Path

import pandas as pd
import pytest

from identikit import effective_attention
from identikit.errors import InputError
from identikit.results.table import DataTable, number
from identikit.runs.compare import Comparison, compare
from identikit.runs.store import Store, write_tables
from tests.models import tiny

FRAME = pd.DataFrame(
    {
        "layer": [0, 0, 1],
        "split": ["a", "b", "a"],
        "rate": [0.5, float("nan"), 200.0],
        "n": [1, 2, 3],
        "word": list("xyz"),
    }
)


def compared(folder: Path, frame: pd.DataFrame, tolerance: float = 1e-6, name: str = "rates") -> Comparison:
    for place, table in (("one", FRAME), ("other", frame)):
        store = Store(folder / place, {"seed": 1}, {"versions": {"torch": place}, "date": place})
        if not (folder / place / "rates.parquet").exists() or place == "other":
            write_tables(store, {"rates" if place == "one" else name: table})
    return compare(str(folder / "one"), str(folder / "other"), tolerance)


def test_order_and_missing_values_are_no_difference(tmp_path: Path):
    found = compared(tmp_path, FRAME.iloc[::-1].reset_index(drop=True), 0.0)
    assert found.equal and found.largest == 0 and found.compared == 3 and found.settings == {}
    assert found.recorded == {"versions.torch": ("one", "other")}


def test_the_largest_difference_is_found_and_placed(tmp_path: Path):
    found = compared(tmp_path, FRAME.assign(rate=[0.5 + 1e-3, float("nan"), 200.4], n=[1, 2, 4], word=list("xyx")))
    rate, n, word = found.differences
    assert (rate.column, rate.rows, rate.where, rate.one, rate.other) == ("rate", 2, "layer 1, split a", 200.0, 200.4)
    assert rate.by == pytest.approx(0.4 / 200.4)
    assert (n.rows, n.by, n.one, n.other) == (1, None, 3, 4) and (word.one, word.other) == ("z", "x")
    json.dumps(found.to_dict(), allow_nan=False)
    assert "rates, rate: 2 rows differ, at most by 0.002; layer 1, split a: 200.0 and 200.4." in found.words()


def test_columns_of_another_type_are_compared_or_differ(tmp_path: Path):
    for column, kind in product(FRAME, (str, float, bool)):
        other = FRAME.assign(**{column: [kind(value) for value in range(3)]})
        found = compared(tmp_path, other)
        assert not found.equal or other[column].tolist() == FRAME[column].tolist()
        assert json.dumps(found.to_dict(), allow_nan=False) and found.words()


def test_the_tolerance_is_relative_to_the_largest_of_1_and_the_numbers(tmp_path: Path):
    assert compared(tmp_path, FRAME.assign(rate=[0.5, float("nan"), 200.1]), 1e-3).equal
    assert not compared(tmp_path, FRAME.assign(rate=[0.5, float("nan"), 200.1]), 4e-4).equal
    assert not compared(tmp_path, FRAME.assign(rate=[0.502, float("nan"), 200]), 1e-3).equal


@pytest.mark.parametrize("rates", [[0.5, 0.0, 200.0], [float("inf"), float("nan"), 200.0]])
def test_a_missing_or_infinite_number_differs_at_any_tolerance(tmp_path: Path, rates: list[float]):
    (difference,) = compared(tmp_path, FRAME.assign(rate=rates), 1e9).differences
    assert difference.rows == 1 and difference.by is None
    assert compared(tmp_path, FRAME, 1e9).equal


def test_rows_columns_and_tables_of_one_run_alone(tmp_path: Path):
    found = compared(tmp_path, FRAME.iloc[:2].rename(columns={"word": "name "}))
    assert "rates: 1 row is only in one of the two, such as layer 1, split a" in found.other
    assert sum("only one of the two has the column" in line for line in found.other) == 2 and not found.equal
    compared(tmp_path, FRAME)
    found = compared(tmp_path, FRAME, name="more")
    assert found.other == [f"more is only in {tmp_path / 'other'}"]


NOISES = {"noise": [0.5, 1.0], "layer": [0, 0], "x": [1.0, 2.0]}
LAYERS = {"layer": [0, 0], "noise": [0.5, 1.0], "x": [1.0, 2.0]}
WORDS = {"layer": [0, 0], "word": ["a", "b"], "x": [1.0, 2.0]}
DESCRIBED = {"t": DataTable("A table.", "one row per noise", {"noise": number("noise", "any", key=True)})}


@pytest.mark.parametrize(
    ("columns", "dictionary", "where"),
    [
        (NOISES, DESCRIBED, "noise 1.0"),  # marked in columns.json, though it holds real numbers
        (WORDS, None, "layer 0, word b"),  # the first columns identify the rows
        (NOISES, None, "row 1"),
        (LAYERS, None, "row 1"),
        (LAYERS | {"noise": [1.0, 1.0]}, DESCRIBED, "row 1"),  # marked, but not true
    ],
)
def test_rows_are_matched_by_what_identifies_them_or_in_order(
    tmp_path: Path, columns: dict[str, list[float]], dictionary: dict[str, DataTable] | None, where: str
):
    for name, last in (("one", 2.0), ("other", 3.0)):
        frame = pd.DataFrame(columns | {"x": [1.0, last]})
        if where == "noise 1.0" and name == "other":
            frame = frame.iloc[::-1].reset_index(drop=True)
        write_tables(Store(tmp_path / name, {}), {"t": frame}, dictionary)
    (difference,) = compare(str(tmp_path / "one"), str(tmp_path / "other"), 0.0).differences
    assert difference.where == where and difference.column == "x"


def test_what_cannot_be_compared_is_refused(tmp_path: Path):
    compared(tmp_path, FRAME)
    one = str(tmp_path / "one")
    for tolerance in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="expected a number, 0 or more"):
            compare(one, one, tolerance)
    Store(tmp_path / "bare", {}).write("x", b"")
    with pytest.raises(InputError, match="it has no tables"):
        compare(one, str(tmp_path / "bare"), 0.0)
    (tmp_path / "other" / "rates.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"Cannot read .*rates.parquet"):
        compare(one, str(tmp_path / "other"), 0.0)


def test_saved_results_are_compared_too(tmp_path: Path):
    for name, text in (("one", "w3 w4 w5"), ("other", "w3 w4 w6"), ("long", "w3 w4 w5 w6")):
        effective_attention(tiny.shared("bert"), text).save(tmp_path / name)
    one = str(tmp_path / "one")
    assert compare(one, one, 0.0).equal and compare(one, one, 0.0).compared > 3
    found = compare(one, str(tmp_path / "other"), 1e-6)
    assert "text" in found.settings and {"raw"} <= {difference.column for difference in found.differences}
    assert any("has the shape" in line for line in compare(one, str(tmp_path / "long"), 0.0).other)
    effective_attention(tiny.shared("bert"), "w3 w4 w5").sel(layer=1, head=0).save(tmp_path / "head")
    assert compare(str(tmp_path / "head"), str(tmp_path / "head"), 0.0).equal
    Store(tmp_path / "run", {}).write("x", b"")
    with pytest.raises(InputError, match=r"it has no run.json"):
        compare(one, str(tmp_path / "run"), 0.0)
