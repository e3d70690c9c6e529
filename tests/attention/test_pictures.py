"""Attention to images inside a text: regions, intervals against a plain linear program, words, and the overlay."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.collections import PatchCollection

import identikit as ik
from identikit import plots
from identikit.attention.result import EffectiveAttention
from identikit.results.pictures import pictures
from tests.attention.literal import assert_plain_programs, literal_row
from tests.models import pictured, tiny

ROW = {"layer": 1, "head": 2, "query": -1}


@pytest.fixture(scope="module")
def attention() -> EffectiveAttention:
    """Of a picture in two rows and three columns of patches."""
    return ik.effective_attention(pictured.shared("qwen2_vl"), (pictured.picture(24, 16), pictured.QUESTION))  # pyright: ignore


@pytest.fixture(scope="module")
def tiled() -> EffectiveAttention:
    """Of a picture in four rows and six columns of patches, and an overview."""
    return ik.effective_attention(pictured.shared("idefics3"), (pictured.picture(48, 32), pictured.QUESTION))  # pyright: ignore


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_the_ends_are_those_of_a_linear_program(name: str):
    found = ik.effective_attention(pictured.shared(name), (pictured.picture(), pictured.QUESTION))
    assert_plain_programs(found.intervals(), found, (1, 2, -1))
    row = literal_row(found, 1, 2, -1)
    ends = found.intervals(**ROW)
    of_image = np.array([found.tokens[key].startswith("<image ") for key in row.keys.tolist()], dtype=float)
    least, most = row.ends(of_image)
    together = found.intervals(**ROW, groups="images")
    for made in ((ends.image_lower, ends.image_upper), (together.lower[0], together.upper[0])):
        assert abs(float(made[0]) - least) < 1e-7 and abs(float(made[1]) - most) < 1e-7
    assert abs(float(ends.image_raw) - of_image @ row.attention.numpy()) < 1e-12


def test_certified_ends_of_the_image_contain_the_exact_ones(attention: EffectiveAttention):
    exact, certified = attention.intervals(layer=1), attention.intervals(layer=1, method="certified")
    assert (certified.image_lower <= exact.image_lower + 1e-9).all()
    assert (certified.image_upper >= exact.image_upper - 1e-9).all()
    assert (certified.image_upper - certified.image_lower < 1).any()
    assert torch.allclose(exact.image_raw, exact.raw[..., 2:8].sum(-1))


def test_what_is_fixed_of_the_attention_to_the_image_is_said(attention: EffectiveAttention, tmp_path: Path):
    ends = attention.intervals(**ROW)
    raw, lower, upper = (float(ends.array(f"image_{name}")) for name in ("raw", "lower", "upper"))
    alone = float(ends.lower[2:8].sum())
    said = (
        f"The image gets {raw:.0%} of the attention, and between {lower:.0%} and {upper:.0%} in every alternative. "
        f"Patch by patch, {alone / raw:.0%} of that is determined."
    )
    assert said in str(ends)
    ends.save(tmp_path / "row")
    assert said in str(ik.open_result(tmp_path / "row"))
    assert "the attention, on average, and between" in str(attention.intervals(layer=1))
    assert "image" not in attention.intervals(**ROW, groups="first").describe()
    assert "The image" not in str(ends.sel(key=[0, 3])) and "The image" not in str(ends.words())


def test_selection_by_patch(attention: EffectiveAttention):
    edge = attention.sel(layer=1, head=2, query="w52", key="<image 0:1,2>")
    assert float(edge.raw) == float(attention.raw[1, 2, -1, 7])
    assert set(attention.to_frame()["key_token"]) >= {"<image 0:0,0>", "<image 0:1,2>"}


def test_regions(attention: EffectiveAttention, tiled: EffectiveAttention):
    assert ik.image_regions(attention) == {"image 0": [2, 3, 4, 5, 6, 7]}
    halves = ik.image_regions(attention, grid=(1, 2))  # the middle of the second column belongs to the right half
    assert halves == {"image 0 region 0,0": [2, 5], "image 0 region 0,1": [3, 4, 6, 7]}
    assert ik.image_regions(attention, grid=(2, 1))["image 0 region 1,0"] == [5, 6, 7]
    box = ik.image_regions(attention, box=(0, 0, 16, 8))
    assert box == {"image 0 in the box": [2, 3], "image 0 around it": [4, 5, 6, 7]}
    (picture,) = pictures(tiled)
    quarter = ik.image_regions(tiled, grid=(2, 2), overview=False)["image 0 region 0,1"]
    assert {tiled.tokens[place] for place in quarter} == {f"<image 0:{r},{c}>" for r in (0, 1) for c in (3, 4, 5)}
    overview = ik.image_regions(tiled, grid=(2, 2), overview=True)
    assert [tiled.tokens[place] for place in overview["image 0 region 1,0"]] == ["<image 0 overview:1,0>"]
    for patch in picture.patches:
        kind = " overview" if patch.overview else ""
        assert tiled.tokens[patch.position] == f"<image 0{kind}:{patch.row},{patch.column}>"
    groups = tiled.intervals(**ROW, groups=ik.image_regions(tiled, grid=(2, 2)))
    assert len(groups.axis("group")) == 4 and (groups.lower <= groups.raw + 1e-12).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": (2,)}, r"grid=\(2,\) cannot be used: expected \(rows, columns\)"),
        ({"grid": (0, 2)}, "grid=0 cannot be used: expected a whole number of at least 1"),
        ({"box": (1, 2, 3)}, r"expected \(left, top, right, bottom\)"),
        ({"box": (9, 0, 3, 4)}, "expected left < right and top < bottom"),
        ({"box": (-9, -9, -3, -4), "overview": True}, "no token of the image is there"),
        ({"grid": (1, 1), "box": (0, 0, 1, 1)}, "takes one of grid= and box="),
        ({"image": 3}, "image=3 cannot be used: expected a whole number from 0 to 0"),
        ({"overview": 1.5}, "overview=1.5 cannot be used: expected True or False"),
    ],
)
def test_regions_that_are_not_there(attention: EffectiveAttention, options: dict[str, Any], message: str):
    with pytest.raises(ik.InputError, match=message):
        ik.image_regions(attention, **options)


def test_a_text_without_images_has_no_regions_and_no_overlay(attention: EffectiveAttention):
    plain = ik.effective_attention(tiny.shared("llama"), "w5 w6")
    for call in (lambda: ik.image_regions(plain), lambda: plain.sel(**ROW).plot("image")):
        with pytest.raises(ik.InputError, match=r"its text has none. Pass a Result of \(image, question\)"):
            call()
    with pytest.raises(ik.InputError, match="its text has none"):
        plain.intervals(**ROW, groups="images")
    with pytest.raises(ik.InputError, match="gathered into words"):
        ik.image_regions(attention.words())


# The overlay


def cells(axes: Any) -> dict[tuple[float, ...], float]:
    """Return the numbers that are drawn, by the box of their patch: left, top, right, bottom."""
    (drawn,) = (each for each in axes.collections if isinstance(each, PatchCollection))
    numbers = drawn.get_array()
    found = {}
    for path, number in zip(drawn.get_paths(), numbers, strict=True):
        (left, top), (right, bottom) = path.vertices.min(0), path.vertices.max(0)
        found[left, top, right, bottom] = float(number)
    return found


def test_the_overlay_draws_each_weight_on_its_patch(attention: EffectiveAttention, tmp_path: Path):
    ends = attention.intervals(**ROW)
    panels = ends.plot("image")
    assert [axes.get_title(loc="left").split(" (")[0] for axes in panels] == ["raw", "at least", "at most"]
    for axes, name in zip(panels, ("raw", "lower", "upper"), strict=True):
        drawn = cells(axes)
        assert len(drawn) == 6
        for row in range(2):
            for column in range(3):
                box = (8.0 * column, 8.0 * row, 8.0 * column + 8, 8.0 * row + 8)
                wanted = float(ends.array(name)[ends.tokens.index(f"<image 0:{row},{column}>")])
                assert abs(drawn[box] - wanted) < 1e-12
    ends.save(tmp_path / "row")
    assert cells(ik.open_result(tmp_path / "row").plot("image")[0]) == cells(panels[0])
    assert len(attention.sel(**ROW).plot("image")) == 2


def test_sinks_are_marked():
    picture = pictured.picture(24, 16)
    attention = ik.effective_attention(pictured.shared("qwen2_vl"), (picture, pictured.QUESTION))
    for head in range(4):
        row = attention.sel(layer=0, head=head, query=-1)
        weights = row.raw[2:8]
        (axes,) = plots.image_overlay(row, "effective")
        marked = [tuple(point) for line in axes.lines for point in line.get_xydata()]
        expected = [
            (8.0 * (place % 3) + 4, 8.0 * (place // 3) + 4)
            for place in range(6)
            if weights[place] > 0.3 * weights.sum()
        ]
        assert marked == expected


def test_tiles_or_the_overview_are_drawn(tiled: EffectiveAttention, attention: EffectiveAttention):
    row = tiled.sel(**ROW)
    assert len(cells(plots.image_overlay(row, "raw")[0])) == 24
    assert len(cells(plots.image_overlay(row, "raw", overview=True)[0])) == 4
    with pytest.raises(ik.InputError, match="the image is not cut into tiles"):
        plots.image_overlay(attention.sel(**ROW), overview=True)
    with pytest.raises(ik.InputError, match="still has the axes layer and head and query"):
        plots.image_overlay(tiled)
    with pytest.raises(ik.InputError, match="some of the image's tokens are not selected"):
        plots.image_overlay(row.sel(key=[0, 1]))
    with pytest.raises(ik.InputError, match="image=1 cannot be used"):
        plots.image_overlay(row, image=1)


# What else is asked of a text with images


def test_measures_scores_and_explanations_go_through():
    model = pictured.shared("gemma3")
    text = (pictured.picture(), pictured.QUESTION)
    rollout = ik.attention_measure(model, text, "rollout")
    assert (rollout.lower <= rollout.raw + 1e-9).all() and (rollout.raw <= rollout.upper + 1e-9).all()
    scores = ik.head_scores(model, text)
    assert scores.array("raw").shape[1:] == (3, 4)
    told = ik.explain(model, text, seconds=2)
    assert "<image 0:" in " ".join(told.tokens) and "bidirectional" in str(told)


def test_an_explanation_says_what_the_image_gets(attention: EffectiveAttention, tmp_path: Path):
    text = (pictured.picture(24, 16), pictured.QUESTION)
    told = ik.explain(pictured.shared("qwen2_vl"), text, seconds=None)
    together = attention.intervals(groups="images")
    raw, lower, upper = (float(together.array(name).mean()) for name in ("raw", "lower", "upper"))
    said = f"Image 0 gets {raw:.2f} of a row's weight on average, and {lower:.2f} to {upper:.2f} in its alternatives."
    assert said in " ".join(str(told).split())
    told.save(tmp_path / "told")
    assert said in " ".join(str(ik.open_result(tmp_path / "told")).split())


def test_patches_are_not_repeated_tokens():
    """Their ids are all the same, and no head is an induction head for going from patch to patch."""
    scores = ik.head_scores(pictured.shared("llava"), (pictured.picture(), pictured.QUESTION), scores="same token")
    assert bool(scores.array("raw").isnan().all())


def test_what_cannot_be_asked_of_images_is_refused_in_words():
    model = pictured.shared("llava")
    text = (pictured.picture(), pictured.QUESTION)
    with pytest.raises(ik.InputError, match="images have no vocabulary to search"):
        ik.invert(model, text, layer=0)
    with pytest.raises(ik.InputError, match="those of images cannot be"):
        ik.evaluate(model, [text], measures="leave one out", tests="leave one out")
