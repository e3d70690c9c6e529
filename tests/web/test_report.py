"""The page of a result, opened from disk in a browser that has no network."""

import csv
import io
import json
import os
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import identikit
from identikit.__main__ import main
from identikit.errors import InputError
from tests.models import tiny
from tests.web.browser import exported, frames, opened, ready, state, table

SVG_TEXT = "{http://www.w3.org/2000/svg}text"
VIEWS = ("verdict", "heads", "attention", "edge", "tokens", "provenance", "numbers")


def shown(page: Any, file: Path, address: str = "") -> None:
    """Open a file without a network, and fail when it asks for anything."""
    asked: list[str] = []
    page.context.set_offline(True)
    page.on("request", lambda request: asked.append(request.url))
    opened(page, file, address)
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:", "about:"))] == []


def test_every_view_is_drawn_without_a_network(page: Any, report_file: Path):
    shown(page, report_file)
    for view in VIEWS:
        if view in ("tokens", "provenance", "numbers"):
            page.click(f"#tab-{view}")
        panel = page.locator(f"#panel-{view}")
        panel.wait_for(state="visible")
        assert panel.locator(".note").is_hidden(), panel.locator(".note").inner_text()
        canvas = panel.locator("canvas").first
        if canvas.count():
            drawn = canvas.evaluate("""c => {
                const { data } = c.getContext("2d").getImageData(0, 0, c.width, c.height);
                return new Set(new Uint32Array(data.buffer)).size;
            }""")
            assert drawn > 3, view
            assert len(canvas.get_attribute("aria-label") or "") > 20, view
    for view, column in (("tokens", "winner"), ("provenance", "contribution")):
        page.locator("#panel-numbers select").select_option(view)
        frames(page)
        assert column in page.locator("#panel-numbers th").all_inner_texts()
        assert page.locator("#panel-numbers tbody tr").count() > 5


def test_the_address_holds_the_state(page: Any, report_file: Path):
    shown(page, report_file, "layer=1&head=2&query=7&tab=provenance&theme=dark&shape=lines&sort=width")
    found = state(page)
    assert (found["layer"], found["head"], found["query"]) == (1, 2, 7)
    assert (found["tab"], found["sort"]) == ("provenance", "width")
    assert page.get_attribute("#identikit", "data-theme") == "dark"
    state(page, head=3, query=9)
    page.reload()
    ready(page)
    again = state(page)
    assert (again["head"], again["query"], again["shape"]) == (3, 9, "lines")
    shown(page, report_file, "layer=99&head=-4&query=oops&tab=<script>&epsilon=1e9&from=7e99")
    page.reload()
    ready(page)
    found = state(page)
    assert (found["layer"], found["head"], found["tab"]) == (2, 0, "tokens")
    assert page.locator(".top").is_visible()
    state(page, embed=True)
    assert page.locator(".top").is_hidden()
    assert page.locator("#panel-edge").is_visible()


def test_exports_can_be_opened(page: Any, report_file: Path, explanation: Any, monkeypatch: pytest.MonkeyPatch):
    shown(page, report_file)
    for view in ("verdict", "heads", "attention", "edge", "tokens", "provenance"):
        assert exported(page, view, "PNG").startswith(b"\x89PNG"), view
        drawing = ElementTree.fromstring(exported(page, view, "SVG"))
        words = " ".join(text.text or "" for text in drawing.iter(SVG_TEXT))
        assert len(words) > 10 and (view == "heads" or "w5" in words), view
        columns, *rows = csv.reader(io.StringIO(exported(page, view, "CSV").decode()))
        assert columns == table(page, view)[0]
        assert len(rows) == len(table(page, view)[1])
    tree = json.loads(exported(page, "heads", "HeadVis JSON"))
    assert set(tree) >= {"data/config.json", "data/scatter_data.json", "data/heads/L2H3.json"}
    row = tree["data/heads/L2H3.json"]["sequences"][0]["rows"][5]
    raw = explanation.attention.sel(layer=2, head=3, query=5).raw
    assert [one["key"] for one in row["top"]] == raw.topk(8).indices.tolist()
    assert abs(row["top"][0]["raw"] - float(raw.max())) < 1e-5
    model = tiny.loaded("bert")
    monkeypatch.setattr(identikit, "load", lambda *_: model)  # the page knows a name, and the tests have the model
    script = exported(page, "edge", "Python").decode()  # test_rows and test_maps run what each view adds
    assert script.startswith("import identikit as ik\n")
    names: dict[str, Any] = {}
    exec(compile(script, "edge", "exec"), names)
    assert names["model"] is model


def test_the_menu_says_what_it_did_and_the_tour_has_five_steps(page: Any, report_file: Path):
    shown(page, report_file)
    page.click("summary:text-is('Export')")
    page.select_option(".menu select", "numbers")
    page.click(".menu button:text-is('PNG')")
    told = page.locator(".live.told")
    assert told.inner_text() == "Numbers has no figure. Export it as CSV."
    assert told.bounding_box()["height"] > 20
    page.click("#panel-verdict h2")
    assert page.locator(".menu").get_attribute("open") is None
    page.click("button:text-is('Tour')")  # five steps, by keyboard
    said = set()
    for step in range(5):
        assert page.locator(".tour .count").inner_text() == f"{step + 1} of 5"
        said.add(page.locator(".tour p").inner_text())
        page.keyboard.press("Enter")
    assert page.locator(".tour").is_hidden()
    assert len(said) == 5


def test_a_page_is_written_whole_or_not_at_all(explanation: Any, tmp_path: Path):
    (tmp_path / "folder.html").mkdir()
    wrong = dict.fromkeys(("page\0.html", "\ud800.html", "", "x" * 300 + ".html", "/proc/page.html"), "Writing a page")
    wrong |= {"page.txt": r"ends in \.html", "nowhere/page.html": "does not exist", "folder.html": "it is a folder"}
    for name, words in wrong.items():
        with pytest.raises(InputError, match=words):
            explanation.identity.save_html(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.html"]
    longest = f"{'x' * 250}.html"
    explanation.identity.save_html(tmp_path / longest)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.html", longest]


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_an_interrupt_while_a_page_is_written_leaves_the_old_one(
    explanation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
):
    (tmp_path / "page.html").write_text("old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os if moment == "fsync" else Path, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        explanation.identity.save_html(tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert (tmp_path / "page.html").read_text() == "old"


def test_a_file_names_no_address_and_says_when_it_was_cut_off(page: Any, report_file: Path, tmp_path: Path):
    whole = report_file.read_text()
    assert "default-src 'none'" in whole and "https://" not in whole
    assert "http://" not in whole.replace("http://www.w3.org/2000/svg", "")
    start = whole.index('id="identikit-data">') + 20
    stop = whole.index("</script>", start)
    cut = tmp_path / "cut.html"
    cut.write_text(whole[: start + 4000] + whole[stop:])
    page.goto(cut.as_uri())
    page.wait_for_timeout(300)
    assert "could not be shown" in page.inner_text("#identikit")


def test_the_command_says_where_the_page_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(identikit, "load", lambda *_, **__: tiny.loaded("bert"))
    page = tmp_path / "page.html"
    monkeypatch.setattr(sys, "argv", ["identikit", "explain", "w4 w5 w6", "--html", str(page), "--seconds", "1"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert f"Views to explore are in {page}" in capsys.readouterr().out
    assert page.stat().st_size > 50_000
