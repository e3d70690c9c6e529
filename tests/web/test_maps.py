"""The heads and attention views in a browser: their numbers are the API's, and mouse and keys do what they say."""

import re
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
from PIL import Image

import identikit as ik
from identikit.models.model import Model
from tests.models import pictured, tiny
from tests.web.browser import exported, frames, opened, python, run, state, table, words_of
from tests.web.conftest import TEXT
from tests.web.served import save_models, served

MAPS = ("raw", "effective", "simplex", "null")
PAIR = ("The goalkeeper saved penalties.", "Unbelievably, Northfield reached its final.")


@pytest.fixture(scope="module")
def minilm_attention() -> Any:
    """One layer of a short pair with words of several pieces."""
    return ik.effective_attention(ik.load(), PAIR, layers=[4])


@pytest.fixture(scope="module")
def minilm_file(minilm_attention: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    minilm_attention.save_html(path := tmp_path_factory.mktemp("minilm") / "page.html")
    return path


@pytest.fixture(scope="module")
def long_attention() -> Any:
    """A text of more tokens than are drawn at a time."""
    model = tiny.build("llama")
    model.config.max_position_embeddings = 1024
    text = " ".join(f"w{place % 53 + 3}" for place in range(700))
    return ik.effective_attention(Model(model, tiny.tokenizer(), name="tiny llama"), text, layers=[1])


@pytest.fixture(scope="module")
def long_file(long_attention: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    long_attention.save_html(path := tmp_path_factory.mktemp("long") / "page.html")
    return path


def test_readings_stand_in_for_the_maps_and_beside_provenance(page: Any, measured: Any, tmp_path: Path):
    measured.save_html(file := tmp_path / "page.html")
    opened(page, file, "measure=value norm&layer=1&head=2&query=7&tab=provenance&x=layer&y=role_self")
    columns, rows = table(page, "attention")
    assert columns == ["query", "key", "raw", "effective", "lower", "upper"]
    reading = measured.readings["value norm"].sel(layer=1, head=2)
    for at, name in enumerate(columns[2:], 2):
        found = torch.tensor([row[at] for row in rows]).reshape(reading.raw.shape)
        assert (found - reading.array(name)).abs().max() < 1e-5
    assert reading.meaning in page.locator("#panel-attention .maps-notes").inner_text()
    assert 'measure = ik.attention_measure(model, text, "value norm")' in python(page, "attention")
    state(page, measure="")
    assert table(page, "attention")[0] == ["query", "key", *MAPS]
    said = page.locator("#panel-provenance .source-bars .figure-says")
    rollout = measured.readings["rollout"].sel(layer=-1)
    strongest = float(rollout.raw[7].max())
    assert f"({strongest:.3f})" in said.inner_text() and "after layer 2" in said.inner_text()
    columns, rows = table(page, "provenance")
    numbers = [dict(zip(columns, row, strict=True)) for row in rows]
    for one in (row for row in numbers if row["layer"] == 2):
        assert one["rollout upper"] == pytest.approx(float(rollout.upper[7, one["position"]]), abs=1e-6)
    assert {row["rollout raw"] for row in numbers if row["layer"] < 2} == {None}
    page.locator(".source-bars select").select_option("norm")
    frames(page)
    assert said.inner_text().startswith("By norm,") and "in layer 1" in said.inner_text()
    scores = measured.readings["roles"].sel(score="self", layer=1, head=2)
    words = f"role: self {float(scores.raw):.2f} ({float(scores.lower):.2f} to {float(scores.upper):.2f})"
    assert words in page.locator("#panel-heads .maps-read").inner_text()


def shown_maps(page: Any) -> dict[str, np.ndarray]:
    """Return the maps that the view's table holds, for a head whose queries see all keys."""
    columns, rows = table(page, "attention")
    size = round(len(rows) ** 0.5)
    assert columns == ["query", "key", *MAPS]
    return {
        name: np.array([row[at] for row in rows], dtype=float).reshape(size, size) for at, name in enumerate(MAPS, 2)
    }


def check_maps(found: dict[str, np.ndarray], attention: Any, *names: str) -> None:
    """Check that maps, all or some, are those of the API."""
    for name in names or MAPS:
        assert np.abs(found[name] - getattr(attention, name).double().numpy()).max() < 1e-5, name


def hover(page: Any, wanted: str) -> dict[str, Any]:
    """Move the mouse over the attention canvas until the state fulfils a condition."""
    canvas = page.locator(".maps canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    for down in np.linspace(0.03, 0.97, 25):
        for across in (0.05, 0.1, 0.3, 0.45, 0.6, 0.8, 0.9):
            page.mouse.move(box["x"] + across * box["width"], box["y"] + down * box["height"])
            found = state(page)
            if eval(wanted, {}, {"query": found["hoverQuery"], "key": found["hoverKey"]}):
                frames(page)
                return found
    raise AssertionError(f"Nothing under the mouse fulfils {wanted}.")


def test_a_causal_table_holds_what_queries_see(page: Any, tmp_path: Path):
    attention = ik.effective_attention(tiny.shared("gemma2"), TEXT)  # grouped, soft-capped, some layers windowed
    attention.save_html(tmp_path / "page.html")
    opened(page, tmp_path / "page.html", "layer=0&head=3")
    _, rows = table(page, "attention")
    seen = attention.source.read("visible", {"layer": [0], "head": [3], "query": range(32), "key": range(32)})[0]
    assert len(rows) == int(seen.sum()) < 32 * 33 / 2
    own = attention.sel(layer=0, head=3)
    for at, name in enumerate(MAPS, 2):
        expected = getattr(own, name)[seen.reshape(32, 32)].double().numpy()
        assert np.abs(np.array([row[at] for row in rows]) - expected).max() < 1e-5, name
    state(page, query=3, key=30)
    assert "does not see" in words_of(page, ".maps .maps-read")


def test_minilm_in_words_and_without_special_tokens(page: Any, minilm_file: Path, minilm_attention: Any):
    opened(page, minilm_file, "head=5")
    head = minilm_attention.sel(layer=4, head=5)
    check_maps(shown_maps(page), head)
    page.get_by_role("checkbox", name="Words").check()
    gathered = shown_maps(page)
    assert len(gathered["raw"]) < len(minilm_attention.tokens)
    check_maps(gathered, head.words(), "raw", "effective", "null")
    assert "unbelievably" in {row[0] for row in table(page, "attention")[1]}
    page.get_by_role("checkbox", name="Words").uncheck()
    page.get_by_role("checkbox", name="Special tokens").uncheck()
    kept = [at for at, special in enumerate(minilm_attention.about["special"]) if not special]
    assert np.abs(shown_maps(page)["raw"] - head.raw[kept][:, kept].double().numpy()).max() < 1e-5
    frames(page, 12)
    rows = head.raw.double()[kept]
    outside = float(rows.sum(-1).mean() - rows[:, kept].sum(-1).mean())
    notes = words_of(page, ".maps-notes")
    assert "Special tokens are left out of the drawing and of the scale." in notes
    assert f"On average, {outside:.2f} of a row's raw weight" in notes
    model = ik.load()
    for words, special in product((False, True), repeat=2):  # and the Python of the maps gives them
        state(page, words=words, special=special)
        scope = {"ik": ik, "model": model, "text": PAIR}
        exec(python(page, "attention"), scope)
        found = shown_maps(page)
        names = [name for name in MAPS if not (words and name == "simplex")]
        for name, expected in zip(names, scope["maps"], strict=True):
            assert np.abs(found[name] - expected.double().numpy()).max() < 1e-5, (name, words, special)


def test_two_way_hover_shows_what_a_token_looks_at_and_who_looks_at_it(page: Any, report_file: Path, explanation: Any):
    page.set_viewport_size({"width": 1440, "height": 2400})  # nothing scrolls
    opened(page, report_file, "layer=1&head=2")
    found = hover(page, "query > 2 and key > 2 and query != key")
    query = found["hoverQuery"]
    key = found["hoverKey"]
    own = explanation.attention.sel(layer=1, head=2)
    names = explanation.attention.axis("key").name_of
    said = words_of(page, ".maps .maps-read").replace("−", "-")
    assert said.startswith(f"{names(query)} → {names(key)} in L1H2:")
    numbers = [float(one) for one in re.findall(r"(?:raw|effective|simplex|null) (-?\d+(?:\.\d+)?(?:e-?\d+)?)", said)]
    for name, number in zip(MAPS, numbers, strict=True):
        weight = float(getattr(own, name)[query, key])
        assert abs(number - weight) < max(6e-4, 0.5 * abs(weight)), name
    titles = page.locator(".strips h3")
    assert titles.nth(0).inner_text() == f"{names(query)} looks at (raw)"
    assert titles.nth(1).inner_text() == f"{names(key)} is looked at by (raw)"
    strips = page.locator(".strips .strip")
    for strip, weights in ((strips.nth(0), own.raw[query]), (strips.nth(1), own.raw[:, key])):
        shades = [float(one.get_attribute("title").replace("−", "-")) for one in strip.locator("span").all()]
        assert np.abs(np.array(shades) - weights.double().numpy()).max() < 6e-4
    strips.nth(0).locator("span").nth(5).hover()
    frames(page)
    assert state(page)["hoverKey"] == 5
    page.mouse.move(2, 2)
    assert (state(page)["hoverQuery"], state(page)["hoverKey"]) == (-1, -1)
    assert hover(page, "query > 1 and key < 0")["hoverKey"] == -1  # beside the map only one of them is meant
    key = hover(page, "query < 0 and key > 1")["hoverKey"]
    page.mouse.down()
    page.mouse.up()
    assert state(page)["key"] == key


def test_lines_show_one_token_from_either_side(page: Any, report_file: Path, explanation: Any):
    opened(page, report_file, "layer=2&head=1")
    page.get_by_role("button", name="Lines").click()
    frames(page)
    assert state(page)["shape"] == "lines"
    left = hover(page, "query > 3 and key < 0")
    before = page.locator(".maps canvas").screenshot()
    assert "looks most at" in words_of(page, ".maps .maps-read")
    right = hover(page, "query < 0 and key > 3")
    assert left["hoverQuery"] > 3 and right["hoverKey"] > 3
    assert page.locator(".maps canvas").screenshot() != before
    assert "lines=" not in page.url and "shape=lines" in page.url
    page.get_by_label("Lines and text show").select_option("effective")
    frames(page)
    assert "(effective)" in page.locator(".strips h3").first.inner_text()


def test_keys_move_the_query_and_the_key_and_a_moved_row_is_marked(page: Any, report_file: Path):
    opened(page, report_file, "query=4")
    page.locator(".maps canvas").focus()
    for pressed, expected in [
        ("ArrowDown", (5, -1)), ("ArrowUp", (4, -1)), ("ArrowRight", (4, 4)), ("ArrowRight", (4, 5)),
        ("ArrowLeft", (4, 4)), ("ArrowLeft", (4, 3)), ("Enter", (3, -1)), ("ArrowLeft", (3, 3)), ("Escape", (3, -1)),
    ]:  # fmt: skip
        page.keyboard.press(pressed)
        assert (state(page)["query"], state(page)["key"]) == expected, pressed
    frames(page)
    assert "looks most at" in page.locator(".maps canvas").get_attribute("aria-label")
    state(page, layer=1, head=1, query=7, key=3)
    frames(page, 12)
    before = page.locator(".maps canvas").screenshot()
    run(page, "store.set({moved: {query: 7, key: 3, end: 'upper', row: new Float64Array(32).fill(1 / 32)}});")
    frames(page)
    assert "moved to 0.031" in words_of(page, ".maps .maps-read")
    assert "was moved in the edge view" in words_of(page, ".maps-notes")
    assert page.locator(".maps canvas").screenshot() != before


def test_a_long_text_is_windowed_and_keys_go_on(page: Any, long_file: Path, long_attention: Any):
    opened(page, long_file)
    frames(page, 5)
    size = len(long_attention.tokens)
    assert f"Tokens 0 to 511 of {size} are drawn." in words_of(page, ".maps-notes")
    state(page, query=600)
    frames(page)
    assert state(page)["from"] == size - 512
    state(page, **{"from": 0, "query": 511})
    page.locator(".maps canvas").focus()
    page.keyboard.press("ArrowDown")
    found = state(page)
    assert found["query"] == 512 and found["from"] > 0
    page.locator(".maps input[type=range]").fill("100")
    assert state(page)["from"] == 100
    code = "const { rows } = views.attention.table(store.get()); return [rows[0][4], rows.map((row) => row[2])];"
    simplex, found = run(page, code)
    raw = long_attention.sel(layer=1, head=0).raw[100:612, 100:612].double()
    assert np.abs(np.array(found) - raw[torch.ones_like(raw).tril() > 0].numpy()).max() < 1e-5
    assert simplex is None  # a long file holds no simplex maps
    state(page, query=300, key=200)
    assert "simplex" not in words_of(page, ".maps .maps-read")


@pytest.mark.slow
def test_a_server_brings_the_simplex_map_that_a_file_lacks(page: Any, tmp_path: Path):
    folder = save_models(tmp_path)[1]
    text = " ".join(f"w{place % 53 + 3}" for place in range(140))  # too long for a file to hold simplex maps
    with served("--model", str(folder), "--seconds", "2") as server:
        page.goto(f"{server.address}/r/{server.result(text)}#layer=1&head=2&query=120&key=4")
        page.locator(".maps .maps-read", has_text="simplex").wait_for()
        frames(page, 12)
        _, rows = table(page, "attention")
    own = ik.effective_attention(ik.load(folder), text).sel(layer=1, head=2).simplex.double()
    expected = own[torch.ones_like(own).tril() > 0].numpy()
    assert np.abs(np.array([row[4] for row in rows]) - expected).max() < 1e-5


def test_heads_are_the_apis_and_open_by_mouse_and_keys(page: Any, report_file: Path, explanation: Any):
    opened(page, report_file, "layer=0&head=0")
    columns, rows = table(page, "heads")
    attention = explanation.attention
    special = [at for at, is_special in enumerate(attention.about["special"]) if is_special]
    expected = {
        "correlation": attention.pearson("head"),
        "null dimension": attention.null_dim.double().mean(-1),
        "determined share": attention.intervals().certain_mass.mean(-1),
        "sink mass": attention.raw.double()[..., special].sum(-1).mean(-1),
        "residual": attention.residual,
    }
    for name, values in expected.items():
        found = np.array([row[columns.index(name)] for row in rows])
        assert np.abs(found - values.double().numpy().reshape(-1)).max() < 1e-5, name
    for x, y in [("correlation", "null dimension"), ("sink mass", "determined share")]:
        for place, name in enumerate((x, y)):
            page.locator(".heads select").nth(place).select_option(name)
        scope = {"ik": ik, "model": tiny.loaded("bert"), "text": TEXT}
        exec(python(page, "heads"), scope)
        for name in (x, y):
            own = {"correlation": "pearson", "determined share": "certain_mass"}
            given = scope[own.get(name, name.replace(" dimension", "_dim").replace(" ", "_"))]
            assert np.abs(given.double().numpy() - expected[name].double().numpy()).max() < 1e-5, name
    canvas = page.locator(".heads canvas")
    canvas.focus()
    for pressed, expected_head in [
        ("ArrowRight", (0, 1)),
        ("ArrowDown", (1, 1)),
        ("ArrowUp", (0, 1)),
        ("ArrowUp", (0, 1)),
    ]:
        page.keyboard.press(pressed)
        assert (state(page)["layer"], state(page)["head"]) == expected_head
    for shape in ("Scatter", "Grid"):
        page.get_by_role("button", name=shape).click()
        frames(page)
        assert len(clicked_heads(page)) == 12, shape
    page.get_by_label("coloured by").select_option("sink_mass")
    frames(page)
    assert "y=sink_mass" in page.url and "heads=grid" in page.url
    assert "Sink mass: The raw weight that goes to special tokens" in words_of(page, ".heads-meaning")


def clicked_heads(page: Any) -> set[str]:
    """Click all over the canvas of the heads; return the heads that were opened."""
    code = """const canvas = document.querySelector(".heads canvas");
      const { left, top, width, height } = canvas.getBoundingClientRect();
      const found = [];
      for (let x = 2; x < width; x += 6) {
        for (let y = 2; y < height; y += 6) {
          canvas.dispatchEvent(new MouseEvent("click", { clientX: left + x, clientY: top + y }));
          found.push(`${store.get().layer},${store.get().head}`);
        }
      }
      return found;"""
    return set(run(page, code))


def test_opening_a_head_pins_a_row_that_can_be_moved(page: Any, report_file: Path):
    opened(page, report_file)
    code = """const { rows } = site.rows;
      for (const [name, row] of rows) if (!row.vertices.size) rows.delete(name); // as if time had been short
      const listed = site.rows.movable(0, 1).map((row) => row.query);
      const other = Array.from({ length: 32 }, (_, at) => at).find((at) => !listed.includes(at));
      store.set({ layer: 0, head: 0, query: other });
      return listed;"""
    listed = run(page, code)
    before = state(page)["query"]
    page.locator(".heads canvas").focus()
    page.keyboard.press("ArrowRight")
    assert state(page)["head"] == 1
    assert state(page)["query"] == min(listed, key=lambda query: abs(query - before))


def test_the_figures_are_drawn(page: Any, report_file: Path):
    opened(page, report_file, "layer=1&head=2&key=3")
    for theme, shape in product(("light", "dark"), ("matrix", "lines")):
        state(page, theme=theme, shape=shape)
        frames(page, 12)
        for selector in (".maps canvas", ".heads canvas"):
            picture = matplotlib.image.imread(BytesIO(page.locator(selector).screenshot()), format="png")[..., :3]
            colours = np.unique((picture * 255).astype(int) @ [65536, 256, 1])
            assert len(colours) > 60, (selector, theme, shape)
            assert (picture.mean() > 0.5) == (theme == "light")


def test_the_axis_of_a_share_that_is_1_everywhere_ends_there(page: Any, tmp_path: Path):
    found = ik.explain(tiny.loaded("bert"), "w4 w5 w6", seconds=None)
    found.save_html(path := tmp_path / "page.html")
    opened(page, path)
    numbers = re.findall(r">(\d\.\d+)</text>", exported(page, "heads", "SVG").decode())
    assert max(map(float, numbers)) == 1.0


def test_patches_of_an_image_keep_their_places_where_labels_are_cut(page: Any, tmp_path: Path):
    picture = Image.new("RGB", (24, 16), "teal")
    ik.effective_attention(pictured.shared("qwen2_vl"), (picture, pictured.QUESTION)).save_html(
        path := tmp_path / "page.html"
    )
    opened(page, path)
    drawn = exported(page, "attention", "SVG").decode()
    assert ">0:0,0</text>" in drawn and ">0:1,2</text>" in drawn
