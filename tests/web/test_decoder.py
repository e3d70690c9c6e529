"""Pages of a decoder: rows are tokens of the target, columns those of the source; none is taken for the other."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import identikit as ik
from identikit.attention.result import EffectiveAttention
from identikit.errors import InputError
from identikit.web.payload import packed
from tests.models import tiny
from tests.web.browser import exported, frames, opened, python, run, state, table, words_of
from tests.web.test_payload import maps_of
from tests.web.test_payload import opened as unpacked

MAPS = ("raw", "effective", "simplex", "null")
SHORT, LONG = "w5 w6 w7", " ".join(f"w{8 + place % 9}" for place in range(12))
TEXTS = {"wide": (LONG, "w20 w21 w22"), "tall": (SHORT, "w20 w21 w22 w23 w24 w25 w26 w27 w28")}


def cross(shape: str, family: str = "marian") -> EffectiveAttention:
    source, target = TEXTS[shape]
    return ik.effective_attention(tiny.two_stacks(family), source, target=target, attention="cross")  # pyright: ignore


@pytest.mark.parametrize("family", ["t5-both", "marian", "m2m_100"])
def test_maps_of_a_decoder_are_built_from_factors(family: str):
    found = cross("wide", family)
    arrays, about = unpacked(packed(found))
    assert about["keys"]["tokens"] == list(found.keys) != about["tokens"] == list(found.tokens)
    if about["attention"]["layers"][1]["form"] == "factors":
        arrays |= {"visible": torch.full((8, len(found.tokens), (len(found.keys) + 7) // 8), 255, dtype=torch.uint8)}
        about["attention"]["layers"][1]["mask"] = 0
        about["tokens"] = about["keys"]["tokens"]  # where `maps_of` counts keys
    maps = maps_of(arrays, about, 1, 2)
    for name in ("raw", "effective"):
        torch.testing.assert_close(maps[name].double(), getattr(found, name)[1, 2].double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", list(TEXTS))
def test_the_page_of_a_rectangle(page: Any, tmp_path: Path, shape: str):
    found = cross(shape)
    found.save_html(file := tmp_path / "page.html")
    opened(page, file, "layer=1&head=2&query=2")
    head = found.sel(layer=1, head=2)
    columns, rows = table(page, "attention")
    assert columns == ["query", "key", *MAPS]
    for at, name in enumerate(MAPS, 2):
        made = torch.tensor([row[at] for row in rows], dtype=torch.float64).reshape(head.raw.shape)
        assert (made - getattr(head, name)).abs().max() < 1e-5
    assert [row[1] for row in rows[: len(found.keys)]] == [
        found.axis("key").name_of(at) for at in range(len(found.keys))
    ]
    last = {"hoverQuery": len(found.tokens) - 1, "hoverKey": len(found.keys) - 1}
    for lines in (False, True):
        state(page, shape="lines" if lines else "matrix", hoverQuery=-1, hoverKey=-1)
        canvas = page.locator("#panel-attention canvas").bounding_box()
        if lines:
            page.mouse.move(canvas["x"] + canvas["width"] - 20, canvas["y"] + canvas["height"] - 16)
            frames(page)
            assert state(page)["hoverKey"] == last["hoverKey"] and state(page)["hoverQuery"] == -1
            page.mouse.move(canvas["x"] + 20, canvas["y"] + canvas["height"] - 16)
            frames(page)
            assert state(page)["hoverQuery"] == last["hoverQuery"]
    residual = "Effective attention reproduces this head's output"
    assert residual in words_of(page, "#panel-attention .maps-notes")


@pytest.mark.parametrize("shape", list(TEXTS))
def test_a_cell_under_the_mouse_is_its_target_and_its_source(page: Any, tmp_path: Path, shape: str):
    found = cross(shape)
    found.save_html(file := tmp_path / "page.html")
    opened(page, file, "layer=1&head=2&query=2&key=1")
    canvas = page.locator("#panel-attention canvas").bounding_box()
    seen: dict[tuple[int, int], tuple[float, float]] = {}
    for step in range(600):  # all over the first map, wherever it stands
        at = (step % 30 + 0.5) / 30 * 0.56 * canvas["width"], (step // 30 + 0.5) / 20 * 0.5 * canvas["height"]
        page.mouse.move(canvas["x"] + at[0], canvas["y"] + at[1])
        query, key = run(page, "const { hoverQuery, hoverKey } = store.get(); return [hoverQuery, hoverKey];")
        seen.setdefault((query, key), at)
    many = len(found.tokens), len(found.keys)
    inside = set(product(*map(range, many)))
    assert inside <= set(seen) <= set(product(range(-1, many[0]), range(-1, many[1])))
    assert sorted(range(many[0]), key=lambda query: seen[query, 1][1]) == list(range(many[0]))
    assert sorted(range(many[1]), key=lambda key: seen[1, key][0]) == list(range(many[1]))
    query, key = max(inside)
    state(page, query=query, key=key, hoverQuery=-1, hoverKey=-1)
    raw = float(found.sel(layer=1, head=2).raw[query, key])
    names = found.axis("query").name_of(query), found.axis("key").name_of(key)
    assert f"{names[0]} → {names[1]} in L1H2: raw {raw:.3f}" in words_of(page, "#panel-attention .maps-read")
    strips = page.locator("#panel-attention .strip")
    maps = found.sel(layer=1, head=2).raw
    for strip, weights in ((strips.nth(0), maps[query]), (strips.nth(1), maps[:, key])):
        told = [float(span.get_attribute("title")) for span in strip.locator("span").all()]
        assert told == pytest.approx(weights.tolist(), abs=1e-3)


def test_what_a_page_of_a_decoder_says_and_leaves_out(page: Any, tmp_path: Path):
    found = cross("wide")
    found.save_html(file := tmp_path / "page.html")
    opened(page, file, "layer=1&head=2&query=3&key=6")
    assert "5 tokens that look at 14 of a source" in words_of(page, ".title")
    assert "shows it alone" in words_of(page, "#panel-tokens .note")
    assert "Rows are tokens of the target" in words_of(page, ".verdict-words")
    columns, rows = table(page, "edge")
    assert columns[:3] == ["position", "key", "raw"] and len(rows) == len(found.keys)
    page.locator("#panel-attention canvas").focus()
    page.keyboard.press("Enter")  # a key of the source is no query
    assert state(page)["query"] == 3
    page.keyboard.press("ArrowRight")
    assert state(page)["key"] == 7
    assert b"<svg" in exported(page, "attention", "SVG")
    words = run(page, "return views.attention.table({ ...store.get(), words: true });")
    assert len(words["rows"]) == found.words().raw[0, 0].numel()


def test_the_python_of_a_decoder_gives_what_is_shown(page: Any, tmp_path: Path):
    model = tiny.two_stacks("marian")
    source, target = TEXTS["wide"]
    for side in ("cross", "decoder"):
        found = ik.effective_attention(model, source, target=target, attention=side)
        found.save_html(file := tmp_path / f"{side}.html")
        opened(page, file, "layer=1&head=2&query=3&key=2")
        names: dict[str, Any] = {"ik": ik, "model": model, "text": source}
        assert f'attention="{side}"' in python(page, "edge")
        exec(python(page, "edge"), names)
        assert torch.allclose(names["row"].raw, found.sel(layer=1, head=2, query=3).raw, atol=1e-12)
        exec(python(page, "attention").replace("head.plot()", ""), names)
        assert torch.allclose(names["maps"][0], found.sel(layer=1, head=2).raw, atol=1e-12)
        assert f'text = "{source}"'.encode() in exported(page, "edge", "Python")


def test_intervals_of_a_decoder_have_a_page(page: Any, tmp_path: Path):
    found = cross("wide").intervals(layer=1, query=[2, 4])
    found.save_html(file := tmp_path / "page.html")
    opened(page, file, "head=2&key=6")
    assert state(page)["query"] == 2
    _, rows = table(page, "edge")
    for at, name in enumerate(("raw", "lower", "upper"), 2):
        wanted = getattr(found.sel(head=2, query=2), name).tolist()
        assert [row[at] for row in rows] == pytest.approx(wanted, abs=1e-6)
    assert 'target=..., attention="cross"' in python(page, "edge")


def test_what_is_not_attention_of_two_texts_has_no_page(tmp_path: Path):
    found = ik.token_attribution(tiny.two_stacks("marian"), SHORT, target_text="w20 w21", probes=4)
    with pytest.raises(InputError, match="a page shows attention and its intervals"):
        found.save_html(tmp_path / "page.html")
    with pytest.raises(InputError, match="select layers and heads"):
        cross("wide").sel(key=[1, 2]).save_html(tmp_path / "page.html")


def test_given_tensors_of_two_texts_have_a_page_also_when_opened_again(page: Any, tmp_path: Path):
    torch.manual_seed(0)
    values = torch.randn(1, 2, 7, 3, dtype=torch.float64)
    weights = torch.randn(1, 2, 4, 7, dtype=torch.float64).softmax(-1)
    found = ik.attention_from(values=values, weights=weights, tokens=list("abcd"), source=list("tuvwxyz"))
    found.save(tmp_path / "result")
    for at, result in enumerate((found, ik.open_result(tmp_path / "result"))):
        result.save_html(file := tmp_path / f"{at}.html")
        opened(page, file, "head=1&query=2&special=0")  # the first token of the source, where a sink would be
        _, rows = table(page, "attention")
        assert [row[:2] for row in rows] == [[query, key] for query in "abcd" for key in "uvwxyz"]
        assert [row[2] for row in rows] == pytest.approx(weights[0, 1, :, 1:].flatten().tolist(), abs=1e-6)
