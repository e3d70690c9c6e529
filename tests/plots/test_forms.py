"""The forms of figures: numbers arrive unchanged, nothing is cut off, and the same figure gives the same bytes."""

from functools import partial

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from identikit.plots import forms as form
from identikit.plots.style import BLUE, RED, Style, footer, heat_colours, layer_axis, layer_ticks, styles, token_axis

QUARTILES = ["low", "lower", "median", "upper", "high"]


def drawn(panel: form.Panel, **options: object) -> Axes:
    return form.sheet("made up · n = 1", panel, **options).axes[0]


def series(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    return {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_lines_hold_the_numbers_in_order_of_x():
    frame = DataFrame({"kind": list("abab"), "layer": [2, 2, 1, 1], "rate": [0.2, 0.4, 0.1, float("nan")]})
    looks = styles([("a", "first"), ("b", "second"), ("c", "absent")])
    axes = drawn(lambda axes: form.lines(axes, frame, looks, by=["kind"], x="layer", y="rate"))
    found = series(axes)
    assert found.keys() == {"first", "second"}
    assert found["first"] == ([1, 2], [0.1, 0.2])
    assert np.isnan(found["second"][1][0])
    assert found["second"][1][1] == 0.4


def test_series_differ_in_colour_and_in_marker():
    looks = styles((number, str(number)) for number in range(6)).values()
    assert len({look.colour for look in looks}) == len({look.marker for look in looks}) == 6


def test_clouds_stand_side_by_side():
    frame = DataFrame({"kind": list("aabb"), "layer": [1, 2, 1, 2], "weight": [0.1, 0.2, 0.3, 0.4]})
    looks = {("a",): Style("a", BLUE), ("b",): Style("b", RED)}
    axes = drawn(lambda axes: form.clouds(axes, frame, looks, by="kind", x="layer", y="weight"))
    left, right = (cloud.get_offsets() for cloud in axes.collections)
    np.testing.assert_array_equal(left, [[0.8, 0.1], [1.8, 0.2]])
    np.testing.assert_array_equal(right, [[1.2, 0.3], [2.2, 0.4]])


def test_boxes_hold_the_quartiles_and_leave_out_what_is_unknown():
    frame = DataFrame([[0.1, 0.2, 0.3, 0.4, 0.5], [np.nan] * 5, [0.0, 0.1, 0.1, 0.2, 0.9]], columns=QUARTILES)
    axes = drawn(lambda axes: form.boxes(axes, frame, [1, 2, 3]))
    parts: dict[str, list[list[float]]] = {}
    for line in axes.get_lines():
        parts.setdefault(str(line.get_label()), []).append(list(line.get_ydata()))
    assert parts["_medians"] == [[0.3, 0.3], [0.1, 0.1]]
    assert [sorted(set(box)) for box in parts["_boxes"]] == [[0.2, 0.4], [0.1, 0.2]]
    assert parts["_whiskers"] == [[0.2, 0.1], [0.4, 0.5], [0.1, 0.0], [0.2, 0.9]]


def test_nothing_to_show_says_so():
    axes = drawn(lambda axes: form.boxes(axes, DataFrame(columns=QUARTILES), []))
    assert [text.get_text() for text in axes.texts] == ["nothing to show"]


@pytest.mark.parametrize("greatest", [None, 0.25])
def test_heat_map_holds_the_cells_and_zero_is_black(greatest: float | None):
    table = DataFrame([[0.5, -0.1], [0.0, 0.25]])
    axes = drawn(partial(form.heat_map, table=table, label="weight (%)", greatest=greatest))
    image = axes.get_images()[0]
    np.testing.assert_array_equal(image.get_array(), table)
    assert image.norm(0.0) == 0.5
    assert image.norm.vmax == (greatest or 0.5)
    np.testing.assert_allclose(heat_colours()(0.5)[:3], 0, atol=0.02)


@pytest.mark.parametrize("layers", [1, 2, 6, 12, 13, 24, 36, 48])
def test_layers_are_whole_few_and_start_at_one(layers: int):
    ticks = layer_ticks(layers)
    assert ticks[0] == 1
    assert ticks[-1] <= layers
    assert len(ticks) <= 13
    if layers <= 12:
        assert ticks == list(range(1, layers + 1))
    axes = drawn(lambda axes: layer_axis(axes, layers))
    assert axes.get_xticks().tolist() == ticks


@pytest.mark.parametrize("count", [10, 45, 130])
def test_every_token_gets_a_label_as_it_is_written(count: int):
    tokens = [f"$to_{place}$" for place in range(count)]
    axes = drawn(lambda axes: token_axis(axes, tokens), width=6.9)
    labels = {
        float(place): label.get_text()
        for minor in (False, True)
        for place, label in zip(axes.get_xticks(minor=minor), axes.get_xticklabels(minor=minor), strict=True)
    }
    assert [labels[place] for place in sorted(labels)] == tokens
    assert not any(label.get_parse_math() for label in axes.get_xticklabels())


def test_a_long_label_is_broken_to_fit():
    label = "an-organisation/a-model-with-a-very-long-name · mrpc · n = 408 texts, 21,723 tokens · seed 0"
    lines = footer(label, 3.3).splitlines()
    assert len(lines) == 2
    assert " ".join(lines) == label
    assert footer(label, 6.9) == label
    assert footer("a model · mrpc · " + "n" * 30, 2.0) == "a model · mrpc\n" + "n" * 30


def line_figure() -> Figure:
    frame = DataFrame({"kind": "a", "layer": [1, 2, 3], "rate": [0.2, 0.4, 0.3]})
    return form.sheet(
        "made up", lambda axes: form.lines(axes, frame, styles([("a", "a")]), by=["kind"], x="layer", y="rate")
    )


def test_saving_gives_the_same_bytes_whatever_the_readers_settings():
    figure = line_figure()
    png, svg = form.save(figure)
    assert png.startswith(b"\x89PNG")
    assert b"<svg" in svg
    assert form.save(figure) == (png, svg)
    with matplotlib.rc_context({"font.size": 20, "axes.grid": False, "svg.hashsalt": "mine"}):
        assert form.save(line_figure()) == (png, svg)


def test_drawing_leaves_the_readers_settings_alone():
    before = dict(matplotlib.rcParams)
    form.save(line_figure())
    assert dict(matplotlib.rcParams) == before
