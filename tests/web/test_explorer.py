"""The explorer as a reader uses it: a text typed into a real server's page, in a real browser."""

from pathlib import Path
from typing import Any

import pytest

import identikit as ik
from tests.web.browser import MOUNTED, downloaded, frames, ready, run, state, table, until
from tests.web.served import LONG, SHORT, Served

TEXT = " ".join(f"w{3 + place * 5 % 50}" for place in range(24))


@pytest.fixture(scope="module")
def explanation(folders: list[Path]) -> Any:
    return ik.explain(ik.load(folders[0]), TEXT, seconds=None)


def submitted(page: Any, server: Served, text: str, model: str = "tiny-bert", pair: str = "") -> None:
    """Type a text into the page's form, and press the button."""
    page.goto(server.address)
    page.fill("textarea >> nth=0", text)
    page.fill("textarea >> nth=1", pair)
    page.select_option(".start select", model)
    page.click("button:text-is('Run')")


def explained(page: Any, server: Served, text: str = TEXT, pair: str = "") -> None:
    """Type a text, and wait until its result is drawn."""
    submitted(page, server, text, pair=pair)
    page.wait_for_url("**/r/*", timeout=90_000)
    ready(page)


def test_from_a_text_to_a_head_and_its_numbers(page: Any, server: Served, explanation: Any):
    explained(page, server)
    assert f"{len(explanation.tokens)} tokens" in page.inner_text(".title")
    state(page, layer=1, head=2, query=5)
    head = explanation.attention.sel(layer=1, head=2)
    for name in ("raw", "effective", "simplex", "null"):
        found = run(page, "return Array.from(site.heads(1, 2).row(given, 5));", name)
        assert found == pytest.approx(getattr(head, name)[5].tolist(), abs=1e-5), name
    assert len(table(page, "tokens")[1]) == 3 * len(explanation.tokens)
    page.click("#tab-provenance")
    frames(page)
    assert len(table(page, "provenance")[1]) > 3
    assert b'ik.load("path/to/tiny-bert")' in downloaded(page, "edge", "Python")
    address = page.url
    page.reload()
    ready(page)
    again = state(page)
    assert page.url == address
    assert (again["layer"], again["head"], again["query"], again["tab"]) == (1, 2, 5, "provenance")
    assert page.locator("textarea >> nth=0").input_value() == TEXT


def test_any_row_can_be_moved_and_neither_output_nor_logits_change(page: Any, server: Served, explanation: Any):
    explained(page, server)
    fixed = "[...site.rows.rows.values()].filter((row) => !row.vertices.size)"
    movable = run(page, f"return {fixed}.map((row) => [row.layer, row.head, row.query]);")
    width = explanation.attention.intervals()
    free = (width.upper - width.lower).amax(-1)
    layer, head, query = max(movable or [[1, 2, 5]], key=lambda place: float(free[tuple(place)]))
    state(page, layer=layer, head=head, query=query)  # a row without vertices in the file: the server is asked
    until(page, f"{MOUNTED}.site.rows.find({layer}, {head}, {query})?.movable")
    page.locator("#panel-edge canvas").focus()
    with page.expect_response("**/move") as answered:
        page.keyboard.press("ArrowDown")
        page.keyboard.press("u")
    told = answered.value.json()
    assert answered.value.status == 200
    change = told["output_change"]
    assert change["hidden"] < 1e-5
    assert change["logits"] is not None and change["logits"] < 1e-5
    frames(page)
    assert state(page)["moved"]["query"] == query
    measured = f"return site.heads({layer}, {head}).outputChange({query}, store.get().moved.row);"
    assert run(page, measured) < 1e-5
    assert "which is rounding" in page.inner_text("#panel-edge")
    page.keyboard.press("Escape")
    frames(page)
    assert state(page)["moved"] is None


def said(page: Any) -> str:
    page.wait_for_selector(".start .note.failed", timeout=30_000)
    return page.inner_text(".start .note")


def test_a_text_that_is_too_long_and_an_unknown_result_get_their_message(page: Any, server: Served):
    page.goto(server.address)
    page.fill("textarea >> nth=1", "")
    page.focus("textarea >> nth=0")
    page.keyboard.press("Control+A")
    page.keyboard.insert_text("w4 " * 3000)  # as a paste does, which `maxlength` would cut
    assert page.input_value("textarea >> nth=0") == "w4 " * 3000
    assert "9,000 characters, and this server reads at most 4,000" in said(page)  # before it is sent, and after
    page.click("button:text-is('Run')")
    until(page, "document.querySelector('.start .note').textContent.includes('4,000')")
    submitted(page, server, "w5 " * 200)
    assert "tokens" in said(page)
    page.goto(f"{server.address}/r/{'0' * 32}")
    assert "Type a text above" in said(page)


def test_a_cancelled_job_and_a_full_queue_say_so(page: Any, browser: Any, server: Served):
    submitted(page, server, LONG, model="tiny-llama")
    page.wait_for_selector("button:text-is('Cancel'):visible", timeout=30_000)
    other = browser.new_context()
    waiting, refused = other.new_page(), other.new_page()
    submitted(waiting, server, f"{LONG} w5", model="tiny-llama")
    until(waiting, "document.querySelector('.start .note').textContent.startsWith('Waiting')")
    third = server.submit(f"{LONG} w6", model="tiny-llama")["id"]
    submitted(refused, server, f"{LONG} w7", model="tiny-llama")
    assert "2 analyses are waiting" in said(refused)
    server.client.delete(f"/api/jobs/{third}")
    for one in (waiting, page):
        one.click("button:text-is('Cancel')")
        until(one, "document.querySelector('.start .note').textContent.includes('cancelled')")
    other.close()


def test_a_new_text_is_not_paired_with_the_sample(page: Any, server: Served):
    sample = server.client.get("/api").json()["sample"]
    page.goto(server.address)
    page.fill("textarea >> nth=0", SHORT)
    assert page.input_value("textarea >> nth=1") == ""
    assert "second text was removed" in page.inner_text(".start .note")
    page.click("button:text-is('Run')")
    page.wait_for_url("**/r/*", timeout=90_000)
    ready(page)
    assert server.client.get(f"/api/results/{page.url.split('/r/')[1].split('#')[0]}").json()["pair"] is None
    page.fill("textarea >> nth=1", "w20 w21")
    page.fill("textarea >> nth=0", f"{SHORT} w9")
    assert page.input_value("textarea >> nth=1") == "w20 w21"  # the visitor's own stays
    page.fill("textarea >> nth=0", sample["text"])
    page.fill("textarea >> nth=1", sample["pair"])
    assert page.input_value("textarea >> nth=1") == sample["pair"]


def test_measures_are_ticked_by_the_names_that_the_server_gives(page: Any, server: Served):
    facts = server.client.get("/api").json()
    page.goto(server.address)
    page.fill("textarea >> nth=0", SHORT)
    page.select_option("select", "tiny-llama")
    page.click(".start-measures summary")
    labels = page.locator(".start-measures label")
    assert [words.strip() for words in labels.all_inner_texts()] == [measure["name"] for measure in facts["measures"]]
    assert labels.first.get_attribute("title") == facts["measures"][0]["meaning"]
    target = page.locator(".start-measures input[type=text]")
    assert not target.is_visible()
    for name in ("mean", "rollout", "gradient", "roles"):
        page.check(f".start-measures input[value='{name}']")
    assert page.locator(".start-measures input[value='norm']").is_disabled() and target.is_visible()
    page.uncheck(".start-measures input[value='mean']")
    target.fill("w9")
    page.click("button:text-is('Run')")
    page.wait_for_url("**/r/*", timeout=90_000)
    ready(page)
    found = server.client.get(f"/api/results/{page.url.split('/r/')[1].split('#')[0]}").json()
    assert (found["measures"], found["target"]) == (["rollout", "gradient", "roles"], "w9")
    assert page.is_checked(".start-measures input[value='gradient']") and target.input_value() == "w9"
    assert run(page, "return site.measures.map(({ name }) => name);") == ["rollout", "gradient"]


def test_a_text_and_its_pair_are_shown_again(page: Any, server: Served):
    explained(page, server, SHORT, pair="w20 w21 w22")
    assert run(page, "return site.view.about.tokens;")[-4:-1] == ["w20", "w21", "w22"]
    assert page.input_value("textarea >> nth=1") == "w20 w21 w22"
    explained(page, server, SHORT)
    assert page.input_value("textarea >> nth=0") == SHORT
    assert page.input_value("textarea >> nth=1") == ""  # not that of the sample


def test_the_first_page_says_what_to_do_and_its_boxes_fit_a_phone(page: Any, server: Served):
    page.set_viewport_size({"width": 400, "height": 900})
    page.goto(server.address)
    page.wait_for_selector("textarea")
    assert "press Run" in page.inner_text(".help")
    first, second = (page.locator("textarea").nth(at).bounding_box() for at in (0, 1))
    assert first["width"] == second["width"] > 300 and second["y"] > first["y"]
