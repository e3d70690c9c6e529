"""The verdict, the edges of a row, the tokens and their provenance, looked at in a browser and held against the API."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import identikit
from identikit import attention_intervals, effective_attention
from identikit.explanation.explain import explain
from identikit.results.words import percent
from identikit.web import header, rows
from identikit.web.report import save_html
from tests.models import tiny
from tests.web.browser import frames, opened, python, rows_of, run, state
from tests.web.conftest import TEXT

VIEWS = ("verdict", "edge", "tokens", "provenance")
ROWS = [(0, 1, 4), (1, 3, 12), (2, 0, 30)]


def movable(page: Any) -> tuple[int, int, int]:
    """Return a row that can be dragged."""
    first = "[...site.rows.rows.values()].find((row) => row.vertices.size)"
    return tuple(run(page, f"const row = {first}; return [row.layer, row.head, row.query];"))


def handle(page: Any, end: str) -> dict[str, Any]:
    """Return where a bar's handle is on the page, and where its raw tick is."""
    page.locator(".edge canvas").scroll_into_view_if_needed()
    frames(page)
    code = """const edge = views.edge, state = store.get(), row = edge.row(state), end = given;
      const look = edge.look(state, row, edge.canvas.clientWidth), box = edge.canvas.getBoundingClientRect();
      const far = (key) => row.found.hasVertex(key, end) && Math.abs(row[end][key] - row.raw[key]) > 0.01;
      const at = look.shown.findIndex(far), key = look.shown[at], place = (weight) => box.left + look.scale.x(weight);
      const x = place(row[end][key]) + (end === "lower" ? -5 : 5);
      return { key, x, raw: place(row.raw[key]), y: box.top + 30 + 26 * at + 13 };"""
    return run(page, code, end)


def output_moves(explanation: Any, moved: dict[str, Any], layer: int, head: int) -> float:
    """Return by how much other weights move the head's output, relative to its length, from the model's own values."""
    captured = explanation.attention.captured().layers[layer]
    values = captured.call.value[0, head // captured.call.groups].double() @ captured.projection[head].double()
    raw = captured.rows([(head, moved["query"])]).attention[0]
    weights = torch.tensor(moved["row"], dtype=torch.float64)
    assert weights.min() > -1e-7
    assert abs(float(weights.sum()) - 1) < 1e-5
    return float(((weights - raw) @ values).norm() / (raw @ values).norm())


def test_every_view_has_the_numbers_of_the_api(page: Any, report_file: Path, explanation: Any):
    opened(page, report_file)
    every = explanation.attention.intervals()
    for place in ROWS:
        shown = rows_of(page, "edge", **dict(zip(("layer", "head", "query"), place, strict=True)))
        for name in ("raw", "lower", "upper"):
            assert [one[name] for one in shown] == pytest.approx(getattr(every, name)[place].tolist(), abs=1e-5)
        effective = explanation.attention.effective[place].tolist()
        assert [one["effective"] for one in shown] == pytest.approx(effective, abs=1e-5)
    identity = explanation.identity
    shown = rows_of(page, "tokens")
    places = [(row, token) for row in range(len(identity.axis("layer"))) for token in range(len(identity.tokens))]
    for one, (row, token) in zip(shown, places, strict=True):
        assert (one["layer"], one["position"]) == (identity.axis("layer").values[row], token)
        assert one["recovered"] == bool(identity.recovered[row, token])
        assert one["margin"] == pytest.approx(float(identity.margin[row, token]), abs=1e-5)
        assert one["winner"] == identity.axis("token").name_of(int(identity.winner[row, token]))
    found = explanation.attribution
    for output in (0, 7, 31):
        shown = rows_of(page, "provenance", query=output)
        assert len(shown) == int((found.contribution[:, :, output] > 0).sum())
        for one in shown:
            at = found.layers.index(one["layer"]), one["position"], output
            assert one["contribution"] == pytest.approx(float(found.contribution[at]), abs=1e-5)
            assert found.stderr is None or one["stderr"] == pytest.approx(float(found.stderr[at]), abs=1e-5)
    for query, one in enumerate(rows_of(page, "verdict")):
        assert one["determined share at least"] == pytest.approx(
            float(every.certain_mass[:, :, query].mean()), abs=1e-5
        )
        assert one["at most"] == pytest.approx(one["determined share at least"]) and one["in words"].endswith("%")
    for query, one in enumerate(rows_of(page, "verdict", strip="head", layer=1, head=2)):
        assert one["determined share at least"] == pytest.approx(float(every.certain_mass[1, 2, query]), abs=1e-5)


def test_a_row_follows_the_mouse_and_the_output_stays(page: Any, report_file: Path, explanation: Any):
    opened(page, report_file)
    layer, head, query = movable(page)
    state(page, layer=layer, head=head, query=query)
    grip = handle(page, "upper")
    page.mouse.move(grip["x"], grip["y"])
    page.mouse.down()
    page.mouse.move((grip["x"] + grip["raw"]) / 2, grip["y"], steps=4)
    frames(page)
    moved = state(page)["moved"]
    assert (moved["query"], moved["key"], moved["end"]) == (query, grip["key"], "upper")
    assert 0.3 < moved["share"] < 0.7
    page.mouse.move(grip["x"] + 400, grip["y"], steps=4)
    page.mouse.up()
    frames(page)
    moved = state(page)["moved"]
    assert moved["share"] == 1
    upper = rows_of(page, "edge")[grip["key"]]
    assert upper["moved"] == pytest.approx(upper["upper"], abs=1e-5)
    assert output_moves(explanation, moved, layer, head) < 1e-5
    assert run(page, f"return site.heads({layer}, {head}).outputChange({query}, given);", moved["row"]) < 1e-5
    assert "of its length, which is rounding." in page.locator(".edge-change").inner_text()
    page.get_by_role("button", name="Reset").click()
    assert state(page)["moved"] is None
    other = "site.heads(layer, head).row('raw', query).map((weight, key, all) => all[(key + 1) % all.length])"
    run(
        page,
        f"""const {{ layer, head, query }} = store.get();
      store.set({{ key: 1, moved: {{ row: {other}, query, key: 1, end: "upper", share: 1 }} }});""",
    )
    frames(page)
    words = page.locator(".edge-change").inner_text()  # weights that change the output
    assert "The head's output moved by 0." in words and "rounding" not in words


def test_a_row_follows_the_keyboard(page: Any, report_file: Path, explanation: Any):
    opened(page, report_file)
    layer, head, query = movable(page)
    state(page, layer=layer, head=head, query=query, sort="width")
    canvas = page.locator(".edge canvas")
    canvas.press("ArrowDown")
    for key, end in (("l", "lower"), ("u", "upper")):
        canvas.press(key)
        moved = state(page)["moved"]
        if moved is not None and moved["end"] == end:
            assert output_moves(explanation, moved, layer, head) < 1e-5
            assert moved["share"] == 1
    assert moved is not None
    canvas.press("Escape")
    assert state(page)["moved"] is None
    frames(page)
    toward = "ArrowRight" if moved["end"] == "upper" else "ArrowLeft"
    canvas.press(toward)
    frames(page)
    canvas.press(toward)
    assert state(page)["moved"]["share"] == pytest.approx(0.2)
    names = {"ik": identikit, "model": tiny.loaded("bert"), "text": TEXT, "print": lambda *_: None}
    exec(python(page, "edge"), names)  # part of the way
    shown = [one["moved"] for one in rows_of(page, "edge")]
    assert shown == pytest.approx(names["moved"].tolist(), abs=1e-5)
    frames(page)
    page.get_by_role("button", name="Lower end" if moved["end"] == "lower" else "Upper end").click()
    assert state(page)["moved"]["share"] == 1


def test_what_the_output_may_move_by_widens_the_bars(page: Any, report_file: Path):
    opened(page, report_file)  # with the opening row, which always has a grid
    opening = state(page)
    layer, head, query = (opening[name] for name in ("layer", "head", "query"))
    exact = rows_of(page, "edge")
    slider = page.get_by_label("ε", exact=True)
    before = slider.bounding_box()
    for _ in range(2):
        slider.press("ArrowRight")
    frames(page)
    assert slider.bounding_box() == before  # it stays under the hand
    assert state(page)["epsilon"] == 2
    assert "the output may move by 1%" in page.locator("#panel-edge").inner_text()
    expected = attention_intervals(tiny.loaded("bert"), TEXT, layer=layer, head=head, query=query, epsilon=0.01)
    for key, (one, wide) in enumerate(zip(exact, rows_of(page, "edge"), strict=True)):
        assert wide["lower"] <= one["lower"] + 1e-6
        assert wide["upper"] >= one["upper"] - 1e-6
        gap = float(expected.gap[key]) + 1e-5
        assert wide["upper"] == pytest.approx(float(expected.upper[key]), abs=gap)
    assert page.locator(".edge-pulls button:enabled").count() == 0
    clear = "for (const [place, row] of site.rows.rows) if (place !== given) row.grid.clear();"
    run(page, clear, f"{layer},{head},{query}")
    state(page, query=(query + 1) % len(exact))
    assert slider.bounding_box() == before
    assert "no intervals for this ε in this row" in page.locator("#panel-edge").inner_text()
    page.locator(".edge-listed button").click()  # the one row that has some
    assert state(page)["query"] == query


def test_bars_are_sorted_by_weight_width_and_text(page: Any, report_file: Path):
    opened(page, report_file)
    layer, head, query = movable(page)
    state(page, layer=layer, head=head, query=query)
    rows = rows_of(page, "edge")
    look = "views.edge.look(store.get(), views.edge.row(store.get()), 400)"
    sizes = {"by weight": lambda one: -one["raw"], "by width": lambda one: one["lower"] - one["upper"]}
    for words, size in sizes.items():
        page.get_by_role("button", name=words).click()
        shown = run(page, f"return {look}.shown;")
        assert len(shown) == 24
        assert [size(rows[key]) for key in shown] == sorted(map(size, rows))[:24]
    page.get_by_role("button", name="in the text").click()
    shown = run(page, f"return {look}.shown;")
    assert shown == sorted(shown)
    page.get_by_role("button", name="8 more").click()
    frames(page)
    assert len(run(page, f"return {look}.shown;")) == len(rows)


def test_a_token_that_is_clicked_in_one_view_is_marked_in_the_others(page: Any, report_file: Path):
    opened(page, report_file)
    canvas = page.locator("#panel-tokens canvas")
    canvas.scroll_into_view_if_needed()
    code = """const view = views.tokens, box = view.canvas.getBoundingClientRect();
      const { from, cell } = view.window(view.canvas.clientWidth);
      return [box.left + 64 + (9 - from + 0.5) * cell, box.top + view.labels + 45];"""
    place = run(page, code)
    page.mouse.move(*place)
    frames(page)
    assert state(page)["hoverQuery"] == 9
    assert page.locator("#panel-tokens .figure-readout").inner_text().startswith("After layer 1, “w11")
    page.mouse.down()
    page.mouse.up()
    page.mouse.move(0, 0)
    frames(page)
    found = state(page)
    assert (found["query"], found["hoverQuery"]) == (9, -1)
    for view in ("verdict", "edge", "tokens"):
        assert "“w11" in page.locator(f"#panel-{view} canvas").get_attribute("aria-label")
    code = """const { canvas } = views.verdict;
      const { boxes } = views.verdict.places(canvas.clientWidth), scale = canvas.width / canvas.clientWidth;
      const pixel = (x, y) => [...canvas.getContext("2d").getImageData(x * scale, y * scale, 1, 1).data];
      return [8, 9].map((token) => pixel(boxes[token].x + boxes[token].across / 2, boxes[token].y + 2));"""
    marked = run(page, code)
    assert marked[1][:3] == [0x7A, 0x3E, 0xA3]
    assert marked[0][:3] != marked[1][:3]


def test_keys_move_through_the_strip_the_tokens_and_the_sources(page: Any, report_file: Path):
    opened(page, report_file, "query=3")
    page.locator("#panel-verdict canvas").press("ArrowRight")
    page.locator("#panel-tokens canvas").press("ArrowRight")
    assert state(page)["query"] == 5
    page.locator("#panel-tokens canvas").press("ArrowDown")
    frames(page)
    assert page.locator("#panel-tokens .figure-readout").inner_text().startswith("After layer 0, ")
    page.get_by_role("tab", name="Provenance").click()
    frames(page)
    canvas = page.locator("#panel-provenance canvas")
    canvas.press("ArrowDown")
    canvas.press("ArrowRight")
    frames(page)
    key = state(page)["key"]
    assert key not in (-1, 5)
    share = next(
        one["contribution"] for one in rows_of(page, "provenance") if (one["layer"], one["position"]) == (0, key)
    )
    assert percent(share) in page.locator("#panel-provenance .figure-readout").inner_text()
    for threshold in (0, 0.05, 1):  # small sources are gathered
        for row in run(page, "return views.provenance.stacks({ ...store.get(), threshold: given }).stacks;", threshold):
            assert math.isclose(sum(part["share"] for part in row["parts"]) + row["others"], 1, abs_tol=1e-5)
            assert all(part["share"] >= threshold for part in row["parts"][1:])
            assert row["parts"][0]["input"] == 5


def test_the_python_of_a_view_gives_its_numbers(page: Any, report_file: Path):
    opened(page, report_file)
    layer, head, query = movable(page)
    state(page, layer=layer, head=head, query=query, strip="head", epsilon=0)
    page.locator(".edge canvas").press("ArrowDown")
    for key in ("u", "l"):
        page.locator(".edge canvas").press(key)
    names: dict[str, Any] = {"ik": identikit, "model": tiny.loaded("bert"), "text": TEXT, "print": lambda *_: None}
    code = {name: python(page, name) for name in VIEWS}
    exec(code["edge"], names)
    given = {"lower": names["row"].lower, "moved": names["other"].attention, "effective": names["effective"]}
    for name, expected in given.items():
        assert [one[name] for one in rows_of(page, "edge")] == pytest.approx(expected.tolist(), abs=1e-5)
    exec(code["verdict"], names)
    shown = [one["determined share at least"] for one in rows_of(page, "verdict")]
    assert shown == pytest.approx(names["row"].certain_mass.tolist(), abs=1e-5)
    exec(code["provenance"], names)
    for one in rows_of(page, "provenance"):
        found = float(names["found"].contribution[one["layer"], one["position"], query])
        assert one["contribution"] == pytest.approx(found, abs=1e-5)
    exec(code["tokens"], names)
    for one in rows_of(page, "tokens"):
        margin = float(names["found"].identity.margin[one["layer"], one["position"]])
        assert one["margin"] == pytest.approx(margin, abs=1e-5)


def test_the_python_of_a_sampled_page_gives_its_estimates_and_says_what_is_not_sampled(
    page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Other options than the defaults, and some rows: as many directions, the same verdict, and all rows by token."""
    monkeypatch.setattr("identikit.explanation.explain._VERIFYING", 0.0)  # on a busy machine, one might have no time
    model = tiny.loaded("bert")
    found = explain(model, TEXT, probes=4, seconds=1e-9)
    opened(page, save_html(found, tmp_path / "sampled.html"), "tab=provenance&query=4")
    names: dict[str, Any] = {"ik": identikit, "model": model, "text": TEXT, "print": lambda *_: None}
    code = {name: python(page, name) for name in VIEWS}
    exec(code["provenance"], names)
    for one in rows_of(page, "provenance"):
        share = float(names["found"].contribution[one["layer"], one["position"], 4])
        assert one["contribution"] == pytest.approx(share, abs=1e-6)
    free = int((found.attention.null_dim > 0).sum())  # pyright: ignore[reportAttributeAccessIssue]
    assert "ik.explain(model, text, probes=4, seconds=1e-09)" in code["verdict"]
    assert f"# The page bounded 0 of {free} free rows; this bounds all of them." in code["verdict"]
    exec(code["verdict"], names)
    assert str(names["found"]) == str(found)
    for one in rows_of(page, "verdict"):
        share = float(names["share"][one["position"]])
        assert one["determined share at least"] - 1e-6 <= share <= one["at most"] + 1e-6


def test_the_python_of_a_page_names_the_options_that_gave_it(page: Any, tmp_path: Path):
    model = tiny.loaded("bert")
    found = effective_attention(model, "w5 w6 w7 " * 40, truncate=True, bias=False, layers=[1, 2])
    opened(page, save_html(found, tmp_path / "options.html"))
    names: dict[str, Any] = {"ik": identikit, "model": model, "text": "w5 w6 w7 " * 40}
    exec(python(page, "attention"), names)
    assert torch.equal(names["attention"].effective, found.effective)


def test_a_script_that_is_a_token_is_shown_as_text(page: Any, explanation: Any, tmp_path: Path, monkeypatch: Any):
    hostile = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"
    monkeypatch.setattr(rows, "_add_grid", lambda *_: None)  # takes seconds, and is not looked at here
    monkeypatch.setattr(header, "readable_token", lambda token: hostile if token == "w5" else token)
    opened(page, save_html(explanation, tmp_path / "hostile.html"), "query=3&tab=provenance")
    assert hostile in page.locator("#panel-verdict canvas").get_attribute("aria-label")
    assert hostile in page.locator("#panel-edge .figure-says").inner_text()
    assert hostile in page.locator("#panel-provenance .figure-says").inner_text()
    assert page.title() != "run"
    assert page.locator("#identikit script, #identikit img").count() == 0


def test_a_causal_row_has_only_what_it_sees(page: Any, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(rows, "_add_grid", lambda *_: None)  # takes seconds, and is not looked at here
    model = tiny.loaded("llama")
    opened(page, save_html(explain(model, TEXT, seconds=None), tmp_path / "causal.html"), "tab=provenance")
    assert [one["position"] for one in rows_of(page, "edge", query=5)] == list(range(6))
    assert {one["position"] for one in rows_of(page, "provenance", query=5)} <= set(range(6))
    state(page, query=0)
    assert page.locator("#panel-edge .figure-says").inner_text().endswith("it has no alternative.")


def test_a_causal_page_without_a_verdict_opens_on_a_token_that_sees_others(page: Any, tmp_path: Path):
    found = effective_attention(tiny.loaded("llama"), "w4 w5 w6")
    opened(page, save_html(found, tmp_path / "causal.html"))
    assert state(page)["query"] == len(found.tokens) - 1 > 0


def test_pages_of_one_question_say_what_is_not_there(page: Any, explanation: Any, tmp_path: Path):
    model = tiny.loaded("bert")
    opened(page, save_html(effective_attention(model, TEXT), tmp_path / "attention.html"))
    assert "the page of an explanation has it" in page.locator("#panel-tokens .note").inner_text()
    assert "no intervals for this row" in page.locator("#panel-edge").inner_text()
    found = attention_intervals(model, TEXT, layer=1, head=2, query=7)
    opened(page, save_html(found, tmp_path / "intervals.html"), "query=7")
    for one in rows_of(page, "edge"):
        assert one["upper"] == pytest.approx(float(found.upper[one["position"]]), abs=1e-5)
    state(page, query=8)
    assert "this row was not computed" in page.locator("#panel-edge .figure-says").inner_text()
    opened(page, save_html(explanation.attribution, tmp_path / "attribution.html"), "tab=provenance")
    assert page.locator("#panel-provenance .note").is_hidden()
    words = page.locator("#panel-verdict").inner_text()
    assert words.startswith("Text") and "Only the page of an explanation has answers in words" in words
    assert page.locator("#panel-verdict canvas").is_visible()  # tokens are chosen there
    for view in ("heads", "attention", "edge"):
        assert page.locator(f"#panel-{view} .note").inner_text().endswith("."), view
