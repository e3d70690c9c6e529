"""The forms of figures: numbers arrive unchanged, nothing is cut off, and the same figure gives the same bytes."""

import io
from itertools import pairwise

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pandas import DataFrame

from identikit.plots import forms as form
from identikit.plots.style import (
    BLUE,
    RED,
    Style,
    diverging,
    layer_axis,
    layer_ticks,
    sequential,
    styles,
    token_axis,
    two_sided,
)

QUARTILES = ["low", "lower", "median", "upper", "high"]


def drawn(panel: form.Panel, **options: object) -> Axes:
    return form.sheet(panel, **options).axes[0]


def series(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    return {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_lines_hold_the_numbers_in_order_of_x():
    frame = DataFrame({"kind": list("abab"), "layer": [2, 2, 1, 1], "rate": [0.2, 0.4, 0.1, float("nan")]})
    looks = styles([("a", "first"), ("b", "second"), ("c", "absent")])
    axes = drawn(lambda axes: form.lines(axes, frame, looks, by=["kind"], x="layer", y="rate"))
    found = series(axes)
    assert found.keys() == {"first", "second"} and found["first"] == ([1, 2], [0.1, 0.2])
    np.testing.assert_array_equal(found["second"][1], [np.nan, 0.4])
    several = styles((number, str(number)) for number in range(6)).values()
    assert len({look.colour for look in several}) == len({look.marker for look in several}) == 6


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
    nothing = drawn(lambda axes: form.boxes(axes, DataFrame(columns=QUARTILES), []))
    assert [text.get_text() for text in nothing.texts] == ["nothing to show"]


def test_error_bars_end_at_low_and_high_and_series_stand_apart():
    frame = DataFrame({"kind": list("aabb"), "layer": [1, 2, 1, 2], "rate": [0.5, 0.6, 0.5, 0.7]})
    frame = frame.assign(low=[0.4, 0.5, 0.3, float("nan")], high=[0.7, 0.9, 0.6, float("nan")])
    looks = styles([("a", "first"), ("b", "second")])
    axes = drawn(lambda axes: form.lines(axes, frame, looks, by=["kind"], x="layer", y="rate"))
    ends = [np.asarray(segment)[:, 1] for bars in axes.collections for segment in bars.get_segments() if len(segment)]
    np.testing.assert_allclose(ends, [[0.4, 0.7], [0.5, 0.9], [0.3, 0.6]])
    found = series(axes)
    assert found["first"][0][0] < 1 < found["second"][0][0]
    assert np.round(found["first"][0]).tolist() == [1, 2]
    unknown = frame.assign(low=float("nan"), high=float("nan"))
    axes = drawn(lambda axes: form.lines(axes, unknown, looks, by=["kind"], x="layer", y="rate"))
    assert [x for x, _ in series(axes).values()] == [[1, 2], [1, 2]] and not axes.collections


def test_peaks_and_ends_of_gaps_have_markers():
    share = np.full(61, 0.1)
    share[[28, 29, 31]] = 0.5, 0.9, 0.8
    share[30] = float("nan")
    frame = DataFrame({"layer": 1, "offset": range(-30, 31), "share": share})
    axes = drawn(lambda axes: form.lines(axes, frame, styles([(1, "1")]), by=["layer"], x="offset", y="share"))
    marked = axes.get_lines()[0].get_markevery()
    assert {29, 31} <= set(marked) and len(marked) < 20


def test_one_scale_serves_all_maps_and_zero_is_white():
    raw, null = np.array([[0.5, 0.0]]), np.array([[-0.8, 0.1]])
    scale = form.around_zero(raw, null)
    assert (scale.least, scale.most, scale.low, scale.high) == (-0.8, 0.8, -0.8, 0.5)
    image = form.heat_map(form.new_axes()[0], raw, scale)
    np.testing.assert_array_equal(image.get_array(), raw)
    np.testing.assert_allclose(image.to_rgba(np.array([[0.0]]))[0, 0, :3], 1, atol=0.02)


def test_a_scale_from_zero_says_when_larger_numbers_occur():
    cells = np.array([[0.5, 0.1]])
    assert form.from_zero(cells, most=0.2).beyond
    assert not form.from_zero(cells).beyond
    assert form.from_zero(np.zeros((1, 1))).most == 1.0


# Machado, Oliveira and Fernandes (2009), full severity, on linear RGB.
BLINDNESS = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def lab(colours: np.ndarray, seen: str) -> np.ndarray:
    """Colours as an eye sees them, in CIELAB."""
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    linear = np.clip(linear @ np.array(BLINDNESS[seen]).T, 0, 1)
    xyz = linear @ np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]).T
    scaled = xyz / [0.9505, 1.0, 1.089]
    root = np.where(scaled > 0.008856, np.cbrt(scaled), 7.787 * scaled + 16 / 116)
    x, y, z = root.T
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)


@pytest.mark.parametrize("seen", BLINDNESS)
def test_scales_can_be_read_by_colour_blind_readers(seen: str):
    """Each side darkens steadily from zero, and numbers of opposite sign never look alike."""
    above = lab(sequential()(np.linspace(0, 1, 64))[:, :3], seen)
    assert (np.diff(above[:, 0]) < 0).all()
    around = lab(diverging()(np.linspace(0, 1, 129))[:, :3], seen)
    assert (np.diff(around[:65, 0]) > 0).all() and (np.diff(around[64:, 0]) < 0).all()
    sides = lab(two_sided()(np.linspace(0, 1, 128))[:, :3], seen)
    for colours, middle in ((around, 64), (sides, 64)):
        far = len(colours) // 10
        below, over = colours[: middle - far][::-1], colours[-(middle - far) :]
        assert np.linalg.norm(below - over[: len(below)], axis=1).min() > 12
    lost, kept = lab(two_sided()([127, 128])[:, :3], seen)
    assert np.linalg.norm(lost - kept) > 20 or seen == "tritanopia"  # even beside zero


@pytest.mark.parametrize(("first", "count"), [(0, 1), (1, 12), (0, 13), (1, 48)])
def test_layers_are_whole_few_and_start_at_the_first(first: int, count: int):
    layers = range(first, first + count)
    ticks = layer_ticks(layers)
    assert ticks[0] == first and set(ticks) <= set(layers) and len(ticks) <= 13
    assert count > 12 or ticks == list(layers)
    assert drawn(lambda axes: layer_axis(axes.xaxis, layers)).get_xticks().tolist() == ticks


@pytest.mark.parametrize("count", [10, 130])
def test_tokens_are_written_as_they_are_as_many_as_fit(count: int):
    tokens = [f"$to_{place}$" for place in range(count)]

    def panel(axes: Axes) -> None:
        axes.imshow(np.zeros((2, count)), aspect="auto")
        token_axis(axes.xaxis, tokens, keep=[7])

    axes = drawn(panel, width=6.9)
    places = [round(place) for place in axes.get_xticks()]
    assert [label.get_text() for label in axes.get_xticklabels()] == [tokens[place] for place in places]
    assert not any(label.get_parse_math() for label in axes.get_xticklabels())
    assert 7 in places
    assert len(places) == count or count == 130
    renderer = FigureCanvasAgg(axes.figure).get_renderer()
    boxes = [label.get_window_extent(renderer) for label in axes.get_xticklabels()]
    assert all(left.x1 <= right.x0 for left, right in pairwise(boxes))


def line_figure() -> Figure:
    frame = DataFrame({"kind": "a", "layer": [1, 2, 3], "rate": [0.2, 0.4, 0.3]})
    return form.sheet(lambda axes: form.lines(axes, frame, styles([("a", "a")]), by=["kind"], x="layer", y="rate"))


def test_saving_gives_the_same_bytes_whatever_the_readers_settings():
    figure = line_figure()
    png, svg = form.save(figure)
    assert png.startswith(b"\x89PNG") and b"<svg" in svg and form.save(figure) == (png, svg)
    with matplotlib.rc_context({"font.size": 20, "axes.grid": False, "svg.hashsalt": "mine"}):
        assert form.save(line_figure()) == (png, svg)


def test_text_stays_text_in_svg_and_pdf():
    figure = line_figure()
    figure.axes[0].set_title("a title")
    svg, pdf = io.BytesIO(), io.BytesIO()
    figure.savefig(svg, format="svg")
    figure.savefig(pdf, format="pdf")
    assert b">a title</text>" in svg.getvalue()
    assert b"/Type0" in pdf.getvalue() and b"/Type3" not in pdf.getvalue()


def test_a_notebook_shows_axes_as_their_picture():
    panels = form.new_axes(columns=2)
    assert panels._repr_png_().startswith(b"\x89PNG")
    assert panels[0]._repr_png_() == panels._repr_png_()
