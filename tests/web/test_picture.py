"""The image of a text on its page: where its patches are, what they are coloured by, and what is said of them."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import identikit as ik
from identikit.attention.result import EffectiveAttention
from identikit.results.pictures import pictures
from identikit.web.payload import packed
from tests.models import pictured, tiny
from tests.web.browser import MOUNTED, exported, frames, opened, python, run, state, table, until, words_of
from tests.web.test_payload import opened as unpacked

QUERY = 12  # of a question of three words, after six patches


def scene(width: int, height: int) -> Image.Image:
    """A picture of which no part is like another: red grows to the right, green downwards."""
    red, green = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([red, green, np.full_like(red, 90)], -1).astype(np.uint8))


@pytest.fixture(scope="module")
def found() -> Any:
    """Of a picture in two rows and three columns of patches, and a question."""
    return ik.explain(pictured.shared("qwen2_vl"), (scene(24, 16), pictured.QUESTION), seconds=None)


@pytest.fixture(scope="module")
def file(found: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found.save_html(path := tmp_path_factory.mktemp("picture") / "page.html")
    return path


def shown(page: Any, file: Path, address: str) -> None:
    """Open a page, and wait for its picture."""
    opened(page, file, address)
    until(page, f"{MOUNTED}.views.picture.images.every((image) => image.pixels)")
    frames(page)


def middle(page: Any, across: float, down: float) -> tuple[float, float]:
    """Return where a share of the picture's width and height is on the page."""
    code = """const { boxes } = views.picture.places(views.picture.canvas.clientWidth);
      const at = views.picture.canvas.getBoundingClientRect(), box = boxes[0];
      return [at.x + box.x + given[0] * box.width, at.y + box.y + given[1] * box.height];"""
    page.locator("#panel-picture canvas").scroll_into_view_if_needed()
    return tuple(run(page, code, [across, down]))


def orange(page: Any, across: float, down: float) -> float:
    """Return how orange the figure is at a share of the picture's width and height."""
    code = """const { boxes: [box] } = views.picture.places(views.picture.canvas.clientWidth);
      const scale = devicePixelRatio, context = views.picture.canvas.getContext("2d");
      const at = [box.x + given[0] * box.width, box.y + given[1] * box.height].map((one) => Math.round(one * scale));
      const [red, , blue] = context.getImageData(...at, 1, 1).data;
      return red - blue;"""
    return run(page, code, [across, down])


def test_patches_are_where_their_names_say_and_the_map_follows(page: Any, file: Path, found: Any):
    shown(page, file, f"layer=1&head=2&query={QUERY}")
    for row in range(2):
        for column in range(3):
            page.mouse.move(*middle(page, (column + 0.5) / 3, (row + 0.5) / 2))
            frames(page)
            assert found.tokens[state(page)["hoverKey"]] == f"<image 0:{row},{column}>"
            assert f"→ <image 0:{row},{column}> in" in words_of(page, "#panel-attention .maps-read")
    page.mouse.click(*middle(page, 0.9, 0.1))
    state(page, hoverKey=-1)
    chosen = state(page)["key"]
    assert found.tokens[chosen] == "<image 0:0,2>"
    page.locator("#panel-picture canvas").focus()
    for key, name in (("ArrowDown", "<image 0:1,2>"), ("ArrowLeft", "<image 0:1,1>"), ("ArrowUp", "<image 0:0,1>")):
        page.keyboard.press(key)
        assert found.tokens[state(page)["key"]] == name
    page.keyboard.press("Enter")
    assert found.tokens[state(page)["query"]] == "<image 0:0,1>"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_patches_have_the_colours_of_their_weights(page: Any, file: Path, found: Any, theme: str):
    raw = found.attention.raw
    best = raw[..., QUERY, 2:8].argmax(-1)
    heads = {int(best[layer, head]): (layer, head) for layer in range(3) for head in range(4)}
    assert {1, 2, 3, 4} & set(heads)  # not only corners, which stay where rows and columns are swapped
    shown(page, file, f"query={QUERY}&theme={theme}")
    for patch, (layer, head) in heads.items():
        state(page, layer=layer, head=head)
        weights = raw[layer, head, QUERY, 2:8]
        seen = {at: orange(page, (at % 3 + 0.3) / 3, (at // 3 + 0.3) / 2) for at in range(6)}
        second = float(weights.topk(2).values[1])
        if float(weights[patch]) > 1.3 * second:
            assert max(seen, key=lambda at: seen[at]) == patch
    state(page, overlay="none")
    assert orange(page, 0.9, 0.1) > 100 > 0 > orange(page, 0.05, 0.1)  # the picture itself, which is red on the right


def gives(row: Any) -> str:
    """Return what is said of a row's attention to its image."""
    raw, lower, upper = (float(row.array(f"image_{name}")) for name in ("raw", "lower", "upper"))
    return (
        f"gives the image {raw:.0%} of its attention, and between {lower:.0%} and {upper:.0%} in every alternative. "
        f"Patch by patch, {float(row.lower[2:8].sum()) / raw:.0%} of that is determined by the output."
    )


def test_its_numbers_and_words_are_those_of_the_intervals(page: Any, file: Path, found: Any):
    shown(page, file, f"layer=1&head=2&query={QUERY}")
    row = found.attention.intervals(layer=1, head=2, query=QUERY)
    columns, rows = table(page, "picture")
    assert columns == [
        "image",
        "position",
        "token",
        "left",
        "top",
        "right",
        "bottom",
        "raw",
        "lower",
        "upper",
        "effective",
    ]
    assert [tuple(each[3:7]) for each in rows] == [patch.box for patch in pictures(found.attention)[0].patches]
    for each in rows:
        ends = [float(part[each[1]]) for part in (row.raw, row.lower, row.upper)]
        assert each[7:10] == pytest.approx(ends, abs=1e-6)
    assert gives(row) in words_of(page, "#panel-picture .figure-says")
    assert "Outside of the image it looks most at" in words_of(page, "#panel-picture .figure-readout")
    assert 'row.plot("image")' in python(page, "picture")
    svg = exported(page, "picture", "SVG")
    assert svg.count(b"<image ") == 1 and svg.count(b"<rect") > 6


def test_patches_that_are_not_seen_stay_bare_and_sinks_are_crossed(page: Any, file: Path, found: Any):
    shown(page, file, "layer=1&head=2&query=4")  # a causal model: of six patches, the third sees three
    assert "does not see" in run(
        page, "return views.picture.numbers({ ...store.get(), key: 7 }, views.picture.look(store.get()));"
    )
    weights = found.attention.raw[1, 2, 4, 2:8]
    sinks = run(page, "return views.picture.look(store.get()).sinks.map(({ position }) => position);")
    assert sinks == [2 + at for at in range(6) if weights[at] > 0.3 * weights.sum()]
    assert sinks and "30% of the image's raw attention" in words_of(page, "#panel-picture .figure-note")


def test_tiles_or_the_overview_and_several_images(page: Any, tmp_path: Path):
    given = ([scene(48, 32), scene(16, 16)], pictured.QUESTION)
    attention = ik.effective_attention(pictured.shared("idefics3"), given)
    attention.save_html(path := tmp_path / "page.html")
    shown(page, path, f"layer=1&head=2&query={len(attention.tokens) - 1}")
    images = pictures(attention)
    tiles = [patch.position for image in images for patch in image.patches if not patch.overview]
    assert [row[1] for row in table(page, "picture")[1]] == tiles
    page.click("#panel-picture .tick input")
    frames(page)
    small = [patch.position for image in images for patch in image.patches if patch.overview]
    assert [row[1] for row in table(page, "picture")[1]] == small
    assert "gives the images" in words_of(page, "#panel-picture .figure-says")
    state(page, overlay="upper")
    assert "no intervals for this row" in words_of(page, "#panel-picture .figure-note")


def test_each_of_several_images_has_its_sentence(page: Any, tmp_path: Path):
    found = ik.explain(pictured.shared("llava"), ([scene(32, 32), scene(16, 16)], pictured.QUESTION), seconds=None)
    found.save_html(path := tmp_path / "page.html")
    last = len(found.tokens) - 1
    shown(page, path, f"layer=1&head=2&query={last}")
    row = found.attention.intervals(layer=1, head=2, query=last, groups="images")
    said = words_of(page, "#panel-picture .figure-says")
    for at, begins in enumerate((f"“{found.tokens[last]}” gives", ". It gives")):
        raw, lower, upper = (float(part[at]) for part in (row.raw, row.lower, row.upper))
        assert f"{begins} image {at} {raw:.0%} of its attention, and between {lower:.0%} and {upper:.0%}" in said


def test_intervals_of_one_row_open_at_that_row(page: Any, found: Any, tmp_path: Path):
    row = found.attention.intervals(layer=1, head=2, query=QUERY)
    row.save_html(path := tmp_path / "page.html")
    shown(page, path, "")
    assert gives(row) in words_of(page, "#panel-picture .figure-says")


@pytest.mark.parametrize("width", [1440, 400])
def test_the_picture_fits_its_page(page: Any, file: Path, width: int):
    page.set_viewport_size({"width": width, "height": 900})
    shown(page, file, f"query={QUERY}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    box = page.locator("#panel-picture canvas").bounding_box()
    assert 200 < box["width"] <= width


def test_the_picture_of_an_image_model_is_what_it_reads():
    model = tiny.loaded("vit")
    given = scene(60, 60)
    attention = ik.effective_attention(model, given)
    (image,) = pictures(attention)
    assert [attention.tokens[patch.position] for patch in image.patches] == [
        f"r{patch.row}c{patch.column}" for patch in image.patches
    ]
    assert image.patches[1].box == (4.0, 0.0, 8.0, 4.0)  # the second is to the right of the first
    read = np.asarray(Image.open(io.BytesIO(image.jpeg)))
    wanted = np.asarray(given.resize((16, 16), Image.Resampling.BILINEAR))
    assert np.abs(read.astype(float) - wanted).mean() < 8
    arrays, about = unpacked(packed(attention))
    assert about["images"] == [{"width": 16, "height": 16}] and arrays["image0.box"].shape == (16, 4)
    assert bytes(arrays["image0.jpeg"].tolist()) == image.jpeg
    row = attention.intervals(layer=1, head=2, query=0)
    assert 0 <= float(row.image_lower) <= float(row.image_raw) <= float(row.image_upper) <= 1


def test_a_page_by_words_has_no_picture(found: EffectiveAttention):
    assert "images" not in unpacked(packed(found.attention.words()))[1]  # pyright: ignore


def test_a_large_picture_takes_little_of_a_page():
    noise = Image.fromarray(
        torch.randint(0, 255, (900, 1400, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8).numpy()
    )
    found = ik.effective_attention(pictured.shared("llava"), (noise, pictured.QUESTION))
    assert len(base64.b64decode(found.about["images"][0]["picture"])) < 200_000
