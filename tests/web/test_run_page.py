"""The page about a run: what it draws is in the tables, and everything from outside is only text."""

import csv
import math
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest

from identikit.results.table import DataColumn
from identikit.web.run_page import Cell, Chart
from tests.cli.made import run
from tests.runs.made import save_model

TEXTS = ["w5 w6 w7 w8 w9", "w9 w5 w9", "w6 w6 w6 w6 w6 w6 w6", "w4 w5", "w7 w8 w9 w10 w11 w12", "w8", "w9 w8 w7 w6"]
HOSTILE = "<script>alert('w5')</script>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over eight texts, one of them HTML, and the page about it."""
    place = tmp_path_factory.mktemp("page")
    texts = place / "texts.txt"
    texts.write_text("\n".join([*TEXTS, HOSTILE]))
    out = place / "run"
    model = save_model(place / "model")
    done = run("attention", "--data", texts, "--model", model, "--out", out, "--intervals", "3")
    assert done.status == 0, done.stderr
    assert run("report", out).status == 0
    return out


def test_every_head_is_drawn_with_its_mean_and_error(folder: Path):
    page = re.sub(r"\s+", " ", (folder / "report.html").read_text())
    with (folder / "heads.csv").open() as rows:
        heads = [row for row in csv.DictReader(rows) if row["entropy"]]
    places = {(row["layer"], row["head"]) for row in heads}
    assert len(places) == 12
    for layer, head in places:
        values = [float(row["entropy"]) for row in heads if (row["layer"], row["head"]) == (layer, head)]
        error = statistics.stdev(values) / math.sqrt(len(values))
        title = f"<title>L{layer}H{head}: {statistics.mean(values):.3g} ± {error:.3g} ({len(values)} texts)</title>"
        assert title in page


def test_what_is_the_same_everywhere_is_one_number_and_pictures_of_one_column_have_names(folder: Path):
    page = (folder / "report.html").read_text()
    figures = page.split("<figure>")[1:]
    pictures = {name: figure for figure in figures for name in re.findall('aria-label="(.*?)"', figure)}
    assert len(pictures) == page.count('role="img"') - 1  # "pearson by layer and head" is in two tables
    flat = pictures["null_dim by layer and head"]
    assert re.search(r'class="scale">[\d.]+ in every head', flat) and "<i></i>" not in flat
    assert "<i></i>" in pictures["entropy by layer and head"]
    assert {f"raw, group {name} by layer and head" for name in ("special", "first")} <= pictures.keys()


def test_pictures_stand_under_headings_and_all_but_the_most_telling_are_folded(folder: Path):
    page = (folder / "report.html").read_text()
    body = page[page.index("<body>") : page.index("Texts that stand out")]
    sections = re.split(r"<h2>(.*?)</h2>", body)
    headings = sections[1::2]
    assert sorted(headings) == ["Correlation", "Groups", "Heads", "Intervals", "Null dimension"]
    for heading, section in zip(headings, sections[2::2], strict=True):
        opened, _, folded = section.partition("<details>")
        assert 1 <= opened.count("<figure>") <= 3
        listed = re.findall(r"<summary>(\d+) more: (.*?)</summary>", folded)
        assert [int(count) for count, _ in listed] == ([folded.count("<figure>")] if folded else [])
        if heading == "Heads":
            assert "null_dim by layer and head" in folded and "null_dim" in listed[0][1]  # one number in every head


@pytest.mark.parametrize(
    ("kind", "cells", "spread"),
    [
        ("heads", [(0, 2.0, 0.0), (1, 4.0, 0.0)], 1 / 4),
        ("heads", [(0, 2.0, 0.6), (1, 4.0, 0.6)], 0.8 / 4),
        ("heads", [(0, 2.0, 3.0), (1, 4.0, 3.0)], 0.0),
        ("layers", [(0, 0.1, None), (1, 0.3, None)], 0.1),
        ("lengths", [(10, 0.0, None), (20, 1.0, None), (10, 1.0, None), (20, 2.0, None)], 0.5 / 2),
        ("lengths", [(10, 0.0, None), (10, 1.0, None)], 0.0),
    ],
)
def test_the_spread_of_a_picture_is_that_beyond_chance(kind: str, cells: list[Any], spread: float):
    drawn = tuple(Cell(float(x), 0.0, value, error) for x, value, error in cells)
    chart = Chart(kind, "table", "column", DataColumn("double", "", ""), "", drawn, 0.0, 1.0)
    assert chart.spread == pytest.approx(spread)


def test_the_texts_at_both_ends_are_named(folder: Path):
    page = (folder / "report.html").read_text()
    with (folder / "correlation.csv").open() as rows:
        values = {int(row["text"]): float(row["pearson"]) for row in csv.DictReader(rows) if row["pearson"]}
    table = page[page.index("Texts that stand out") :]
    row = table[table.index("<b>pearson</b>") :]
    numbers = [int(number) for number in re.findall(r'class="number">(\d+)</td>', row)[:2]]
    assert numbers == [min(values, key=values.__getitem__), max(values, key=values.__getitem__)]


def test_texts_are_only_text_and_nothing_is_fetched(folder: Path):
    page = (folder / "report.html").read_text()
    assert "<script" not in page
    assert not re.search(r"(src|href)=", page)


def test_what_cannot_be_drawn_is_refused_in_a_line(folder: Path, tmp_path: Path):
    for arguments, why in (
        ((folder, "--html", tmp_path / "page.txt"), "ends in .html"),
        ((folder, "--html", tmp_path / "nowhere" / "page.html"), "does not exist"),
        ((tmp_path,), "run.json"),
    ):
        assert run("report", *arguments).refused(why)


@pytest.mark.parametrize("file", ["columns.json", "texts.parquet"])
def test_a_run_that_has_changed_is_not_drawn(file: str, folder: Path, tmp_path: Path):
    damaged = tmp_path / "run"
    shutil.copytree(folder, damaged)
    (damaged / file).write_text('{"x":')
    page = tmp_path / "page.html"
    assert run("report", damaged, "--html", page).refused(f"{file} is not as it was written")
    assert not page.exists()
