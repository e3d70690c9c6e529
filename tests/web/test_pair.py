"""Two results on one page: one choice of head for both, and the difference of its maps where their tokens agree."""

from pathlib import Path
from typing import Any

import pytest
import torch

import identikit as ik
from identikit.errors import InputError
from tests.models import tiny
from tests.web.browser import frames, opened, until, words_of
from tests.web.test_report import VIEWS

TEXT = "w5 w6 w7 w8 w9 w10 w11 w12"
CHANGED = "w5 w6 w7 w20 w9 w10 w11 w12"
CHANGED_AT = 4  # after the special token in front
SIDES = "Array.from(document.querySelectorAll('.pair > .identikit:not(.difference)'))"


def both(page: Any, file: Path, address: str = "") -> None:
    page.goto("about:blank")
    page.goto(f"{file.as_uri()}#{address}")
    until(page, "document.querySelector('.pair .difference')?.identikit !== undefined")
    frames(page)


def states(page: Any, change: dict[str, Any] | None = None, side: int = 0) -> list[dict[str, Any]]:
    """Return the states of both sides; a change is made first in one of them."""
    if change:
        page.evaluate(f"(change) => {SIDES}[{side}].identikit.store.set(change)", change)
        frames(page)
    names = "layer, head, query, key, hoverKey, shape, theme"
    return page.evaluate(
        f"{SIDES}.map((side) => {{ const {{ {names} }} = side.identikit.store.get(); return {{ {names} }}; }})"
    )


def difference(page: Any) -> dict[str, torch.Tensor]:
    """Return the maps of the difference that is shown, NaN where it is left out."""
    script = """() => {
      const sheet = document.querySelector(".difference").identikit.view.last.sheet;
      sheet.work();
      const maps = sheet.maps.map((map) => [map, Array.from(sheet.weights[map])]);
      return [sheet.size, sheet.across, Object.fromEntries(maps)];
    }"""
    rows, columns, maps = page.evaluate(script)
    return {
        name: torch.tensor([float("nan") if x is None else x for x in map_]).reshape(rows, columns)
        for name, map_ in maps.items()
    }


@pytest.fixture(scope="module")
def texts() -> list[Any]:
    return ik.effective_attention(tiny.loaded("bert"), [TEXT, CHANGED])


@pytest.fixture(scope="module")
def file(texts: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ik.save_html(texts, tmp_path_factory.mktemp("pair") / "page.html")


def test_heads_and_tokens_are_chosen_for_both(page: Any, file: Path):
    both(page, file, "layer=1&head=2&query=3")
    assert [(one["layer"], one["head"], one["query"]) for one in states(page)] == [(1, 2, 3)] * 2
    for side in (0, 1):
        found = states(
            page, {"layer": side, "head": 3 - side, "query": 5, "key": 2, "hoverKey": 6, "shape": "lines"}, side
        )
        assert found[0] == found[1] and found[0]["head"] == 3 - side and found[0]["hoverKey"] == 6
    assert len(set(page.evaluate("Array.from(document.querySelectorAll('[id]'), ({ id }) => id)"))) == len(
        page.evaluate("Array.from(document.querySelectorAll('[id]'), ({ id }) => id)")
    )
    for view in VIEWS:
        assert page.locator(f"#panel-{view}-2").count() == page.locator(f"#panel-{view}").count() == 1


def test_the_page_opens_with_the_head_and_the_row_that_differ_most(page: Any, file: Path, texts: list[Any]):
    both(page, file)
    moved = (texts[0].raw - texts[1].raw).abs()
    moved[..., CHANGED_AT] = 0
    moved[:, :, CHANGED_AT] = 0
    rows = moved.sum(-1)
    layer, head = divmod(int(rows.mean(-1).argmax()), rows.shape[1])
    assert (layer, head) != (0, 0)
    for side in states(page):
        assert (side["layer"], side["head"], side["query"]) == (layer, head, int(rows[layer, head].argmax()))
    states(page, {"layer": 0, "head": 0, "query": 0})
    address = page.evaluate("location.hash").removeprefix("#")
    both(page, file, address)
    assert [(side["layer"], side["head"], side["query"]) for side in states(page)] == [(0, 0, 0)] * 2


def test_the_difference_is_that_of_the_maps_where_tokens_agree(page: Any, file: Path, texts: list[Any]):
    both(page, file, "layer=1&head=2&query=3")
    one, other = (text.sel(layer=1, head=2) for text in texts)
    for name, made in difference(page).items():
        wanted = getattr(one, name) - getattr(other, name)
        wanted[CHANGED_AT] = wanted[:, CHANGED_AT] = torch.nan
        torch.testing.assert_close(made.double(), wanted.double(), atol=2e-5, rtol=0, equal_nan=True)
    assert page.locator("h1").all_inner_texts() == ["identikit", "First", "Second"]
    assert "left out" in words_of(page, ".difference .help")
    said = words_of(page, ".difference .maps-read")
    assert "looks more at" in said and "in the second" in said
    states(page, {"key": CHANGED_AT})
    assert "is left out" in words_of(page, ".difference .maps-read")
    states(page, {"query": CHANGED_AT, "key": -1})
    assert words_of(page, ".difference .maps-read").startswith("The row of “w8” is left out.")


def test_a_row_that_is_the_same_in_both_is_said_to_be(page: Any, tmp_path: Path, texts: list[Any]):
    both(page, ik.save_html([texts[0], texts[0]], tmp_path / "page.html"), "layer=1&head=2&query=3")
    assert "looks the same way in both results" in words_of(page, ".difference .maps-read")


def test_two_models_are_compared_by_the_numbers_of_their_layers(page: Any, tmp_path: Path):
    first = ik.effective_attention(tiny.loaded("bert"), TEXT)
    second = ik.effective_attention(tiny.loaded("roberta"), TEXT, layers=[1, 2])
    assert first.tokens == second.tokens
    both(page, ik.save_html([first, second], tmp_path / "page.html"), "layer=2&head=1")
    assert [one["layer"] for one in states(page)] == [2, 1]  # the second of two layers is layer 2
    assert [one["layer"] for one in states(page, {"layer": 0}, side=1)] == [1, 0]
    wanted = first.sel(layer=1, head=1).raw - second.sel(layer=1, head=1).raw
    torch.testing.assert_close(difference(page)["raw"].double(), wanted.double(), atol=2e-5, rtol=0)
    assert [one["layer"] for one in states(page, {"layer": 0})] == [0, 0]
    assert "The second result has no L0H1" in words_of(page, ".difference .note")


def test_texts_of_other_lengths_have_no_difference_but_one_choice_of_head(page: Any, tmp_path: Path):
    results = [ik.explain(tiny.loaded("bert"), text, seconds=None) for text in (TEXT, "w5 w6 w7")]
    both(page, ik.save_html(results, tmp_path / "page.html"))
    assert "different numbers of tokens" in words_of(page, ".difference .note")
    found = states(page, {"layer": 2, "head": 1, "query": 8})
    assert found[1]["layer"] == 2 and found[1]["head"] == 1 and found[1]["query"] != 8
    assert page.locator(".difference canvas").is_hidden()


@pytest.mark.parametrize("width", [1600, 400])
def test_two_results_fit_their_page(page: Any, file: Path, width: int):
    page.set_viewport_size({"width": width, "height": 900})
    both(page, file, "theme=dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    first, second = (page.locator(f".pair > .identikit >> nth={at}").bounding_box() for at in (1, 2))
    beside = first["y"] == second["y"] and first["x"] < second["x"]
    assert beside == (width == 1600)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"


def test_one_result_is_written_as_by_itself_and_others_are_refused(page: Any, texts: list[Any], tmp_path: Path):
    texts[0].save_html(tmp_path / "own.html")
    assert ik.save_html([texts[0]], tmp_path / "one.html").read_bytes() == (tmp_path / "own.html").read_bytes()
    assert ik.save_html(texts[0], tmp_path / "one.html").read_bytes() == (tmp_path / "own.html").read_bytes()
    opened(page, tmp_path / "one.html")
    for wrong in ([], [*texts, texts[0]], "page", [texts[0], 3], None):
        with pytest.raises(InputError, match="save_html takes a result, or a list of two"):
            ik.save_html(wrong, tmp_path / "page.html")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"ends in \.html"):
        ik.save_html(texts, tmp_path / "page")
    assert not (tmp_path / "page.html").exists()
