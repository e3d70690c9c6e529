"""Plots of Results: what is drawn are the result's numbers, on given axes or new ones, and mistakes are told."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from pandas import DataFrame

import identikit as ik
from identikit import plots
from identikit.errors import InputError
from tests.models import tiny
from tests.plots.made_up import (
    HEADS,
    LAYERS,
    TOKENS,
    N,
    alternative,
    attention,
    attribution,
    identifiability,
    identity,
    intervals,
)

ROW = {"layer": 1, "head": 2, "query": 4}
HEAD = {"layer": 1, "head": 2}
LENGTHS = DataFrame({"tokens": [10, 20, 40], "pearson": [1.0, 1.0, 0.6]})
PLOTS: dict[str, Callable[..., Any]] = {
    "head_grid": lambda **options: plots.head_grid(attention(), **options),
    "thumbnails": lambda **options: plots.thumbnails(attention(), **options),
    "interval_bars": lambda **options: plots.interval_bars(intervals().sel(**ROW), **options),
    "alternative_bars": lambda **options: plots.alternative_bars(alternative(), **options),
    "correlation_by_length": lambda **options: plots.correlation_by_length(LENGTHS, 32, **options),
    "attribution_map": lambda **options: plots.attribution_map(attribution().sel(layer=1), **options),
    "sources": lambda **options: plots.sources(attribution().sel(output=2), **options),
    "identity_map": lambda **options: plots.identity_map(identity(), **options),
    "rates": lambda **options: plots.rates(identifiability(), **options),
}


def first(drawn: Any) -> Axes:
    return drawn.flat[0] if isinstance(drawn, np.ndarray) else drawn


def check_layout(figure: Figure) -> None:
    """Everything written is large enough and within the sheet; labels along an axis do not overlap."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            least, most = sorted(axis.get_view_interval())
            ticks = [tick for tick in axis.get_major_ticks() if least <= tick.get_loc() <= most]
            labels = [label for tick in ticks for label in (tick.label1, tick.label2) if label.get_visible()]
            boxes = [label.get_window_extent(renderer) for label in labels if label.get_text()]
            pairs = [*pairwise(sorted(boxes, key=lambda box: (box.x0, box.y0)))]
            assert not any(left.shrunk(0.95, 0.8).overlaps(right.shrunk(0.95, 0.8)) for left, right in pairs)
    for text in figure.findobj(Text):
        box = text.get_window_extent(renderer)
        if text.get_visible() and text.get_text().strip() and np.isfinite(box.extents).all() and box.width:
            assert text.get_fontsize() >= 6
    frame = figure.get_tightbbox(renderer)
    assert frame.x0 >= -0.02 and frame.y0 >= -0.02
    assert frame.x1 <= figure.get_figwidth() + 0.02 and frame.y1 <= figure.get_figheight() + 0.02


@pytest.mark.parametrize("name", PLOTS)
def test_new_figures_fit_a_column_and_given_axes_are_drawn_into(name: str):
    settings = dict(matplotlib.rcParams)
    numbers = plt.get_fignums()
    figure = first(PLOTS[name]()).get_figure(root=True)
    assert figure.get_figwidth() in (3.3, 6.9)
    check_layout(figure)
    mine = Figure(layout="constrained").subplots(1, 2)
    assert first(PLOTS[name](ax=mine[1])) is mine[1]
    assert mine[1].has_data() and not mine[0].has_data()
    assert plt.get_fignums() == numbers and dict(matplotlib.rcParams) == settings


def images(drawn: Any) -> list[np.ndarray]:
    return [np.ma.filled(axes.get_images()[0].get_array(), np.nan) for axes in drawn]


def titles(drawn: Any) -> list[str]:
    return [axes.get_title("left") for axes in drawn]


def test_head_maps_share_one_scale_and_what_cannot_be_seen_is_blank():
    head = attention().sel(**HEAD)
    drawn = plots.head_maps(head)
    assert titles(drawn) == ["L1H2 raw", "L1H2 effective", "L1H2 null"]
    for cells, name in zip(images(drawn), ("raw", "effective", "null"), strict=True):
        np.testing.assert_array_equal(cells, head.array(name))
    ((least, most),) = {(axes.get_images()[0].norm.vmin, axes.get_images()[0].norm.vmax) for axes in drawn}
    assert least == -most < 0
    assert len(drawn[0].figure.axes) == 4
    assert [label.get_text() for label in drawn[0].get_yticklabels()] == [token.strip() for token in TOKENS]
    check_layout(drawn[0].figure)
    seen = plots.head_maps(attention(causal=True).sel(**HEAD))
    assert all((np.isnan(cells) == ~np.tri(N, dtype=bool)).all() for cells in images(seen))
    assert all(axes.patch.get_hatch() for axes in seen)


def test_intervals_stand_beside_the_maps_where_they_are_known():
    bounds = intervals().sel(**HEAD, query=slice(2, 4))
    drawn = plots.head_maps(attention().sel(**HEAD), bounds)
    assert titles(drawn[3:]) == ["L1H2 lower", "L1H2 upper", "L1H2 width"]
    lower, upper, width = images(drawn)[3:]
    np.testing.assert_array_equal(lower[2:4], bounds.lower)
    np.testing.assert_array_equal(width[2:4], upper[2:4] - lower[2:4])
    assert np.isnan(np.delete(upper, [2, 3], axis=0)).all()
    row = plots.head_maps(attention().sel(**HEAD), bounds.sel(query=2), maps=["upper"])
    np.testing.assert_array_equal(images(row)[0][2], bounds.upper[0])


def test_interval_maps_leave_out_what_cannot_be():
    upper = intervals().upper.numpy().copy()
    upper[..., 3] = 0.0
    made = intervals(upper).sel(**HEAD)
    drawn = plots.interval_maps(made)
    assert titles(drawn) == ["L1H2 raw", "L1H2 lower", "L1H2 upper"]
    for cells, name in zip(images(drawn), ("raw", "lower", "upper"), strict=True):
        assert np.isnan(cells[:, 3]).all()
        np.testing.assert_array_equal(np.delete(cells, 3, 1), np.delete(made.array(name).numpy(), 3, 1))


def test_the_attention_of_least_norm_is_a_fourth_map():
    head = ik.effective_attention(tiny.loaded("bert"), " ".join(f"w{n % 23 + 3}" for n in range(30))).sel(**HEAD)
    maps = ("raw", "effective", "null", "simplex")
    drawn = head.plot(maps=maps)
    assert titles(drawn) == [f"L1H2 {name}" for name in maps]
    np.testing.assert_array_equal(images(drawn)[3], head.simplex)
    check_layout(drawn[0].figure)
    row = head.sel(query=5).plot(maps=["simplex"])
    np.testing.assert_allclose(images(row)[0], head.simplex[5:6], atol=1e-9)
    assert len(head.plot()) == 3


@pytest.mark.parametrize("causal", [False, True])
def test_thumbnails_hold_every_head_with_the_last_layer_on_top(causal: bool):
    made = attention(causal=causal)
    drawn = made.plot("effective")
    (cells,) = images([drawn])
    assert cells.shape == (LAYERS * (N + 2), HEADS * (N + 2))
    for layer in range(LAYERS):
        for head in range(HEADS):
            top = (LAYERS - 1 - layer) * (N + 2) + 1
            left = head * (N + 2) + 1
            weights = made.sel(layer=layer, head=head).effective.numpy()
            seen = np.where(np.tri(N, dtype=bool), weights, np.nan) if causal else weights
            np.testing.assert_array_equal(cells[top : top + N, left : left + N], seen)
    assert [label.get_text() for label in drawn.get_yticklabels()] == ["2", "1", "0"]
    with pytest.raises(InputError, match="name='effectiv'"):
        plots.thumbnails(made, "effectiv")


def test_head_maps_draw_into_given_axes():
    mine = Figure().subplots(1, 2)
    drawn = plots.head_maps(attention().sel(layer=0, head=0), maps=["raw", "null"], axes=mine)
    assert [*drawn] == [*mine]
    with pytest.raises(InputError, match="has 2 axes, and 3 are needed"):
        plots.head_maps(attention().sel(layer=0, head=0), axes=mine)


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda: plots.head_maps(attention()), r"axes layer and head\. .* result\.sel\(layer=1, head=2\)\."),
        (lambda: plots.interval_bars(intervals().sel(layer=0, head=0)), r"axis query\. .* result\.sel\(query=4\)\."),
        (lambda: plots.head_maps(attribution().sel(layer=0)), "Cannot draw head_maps: it needs 'raw', and token attr"),
        (lambda: plots.head_grid(attribution()), "Cannot draw head_grid: it needs 'pearson'"),
        (lambda: plots.head_grid(attention(), by="raw"), "by='raw' is not known: use 'null_dim', 'pearson'"),
        (lambda: plots.head_maps(attention().sel(layer=0, head=0), maps=["width"]), "need intervals="),
        (lambda: plots.interval_bars(intervals().sel(**ROW), order="raw"), "order='raw'"),
        (lambda: plots.head_maps(attention().sel(layer=0, head=0), intervals().sel(layer=0, head=1)), "L0H0 .* L0H1"),
        (
            lambda: plots.interval_bars(intervals().sel(layer=0, head=0, query=1), attention().sel(layer=1)),
            "L0H0, query 1 “the”, and effective= to L1H0",
        ),
        (lambda: plots.rates(identifiability(offset=[-1, 1])), r"several values of offset .* result\.sel\(offset=-1\)"),
    ],
)
def test_what_cannot_be_drawn_is_told(draw: Callable[[], Any], words: str):
    with pytest.raises(InputError, match=words):
        draw()


MIXED = np.linspace(-0.002, 0.9, LAYERS * HEADS).reshape(LAYERS, HEADS)
SURE = np.random.default_rng(5).random((LAYERS, HEADS, N)) > 0.3


@pytest.mark.parametrize(
    ("by", "values", "title", "written", "ends"),
    [
        ("pearson", None, "Pearson, raw with effective", lambda value: f"{value:.2f}".lstrip("0"), (0, 1)),
        ("pearson", MIXED, "Pearson, raw with effective", lambda value: f"{abs(value):.2f}"[1:], (-1, 1)),
        ("null_dim", None, "mean null dimension", lambda value: f"{value:.0f}", None),
        ("certain_mass", SURE / 2, "mean determined share (%)", lambda value: f"{100 * value:.0f}", (0, 1)),
        ("rank_is_sure", SURE, "mean rank is sure (%)", lambda value: f"{100 * value:.0f}", (0, 1)),
        ("norm_ratio", -0.9 * SURE, "mean norm ratio", lambda value: f"{value:.2f}".replace("0.", "."), None),
        ("residual", np.full((LAYERS, HEADS), 3e-7), "residual", lambda _: "3e-07", None),
    ],
)
def test_head_grid_holds_one_number_per_head(by: str, values: Any, title: str, written: Any, ends: Any):
    result = attention(**({} if values is None else {by: values}))
    axes = result.plot(by=by)
    expected = result.array(by).double().numpy()
    expected = expected.mean(-1) if expected.ndim == 3 else expected
    np.testing.assert_allclose(images([axes])[0], expected)
    assert axes.get_title("left") == title
    texts = [text.get_text() for text in axes.texts]
    assert texts == [written(value) for value in expected.flat]
    norm = axes.get_images()[0].norm
    assert ends is None or (norm.vmin, norm.vmax) == ends
    assert norm.vmin <= expected.min() and norm.vmax >= expected.max()
    assert axes.get_ylim()[0] < axes.get_ylim()[1]


NAMED = ["[CLS]", "the@1", "cat", "$", "sees", "the@5", "dog", "[SEP]"]


def test_interval_bars_hold_bounds_raw_and_effective():
    row = intervals().sel(**ROW)
    axes = plots.interval_bars(row, attention(), most=5)
    order = np.argsort(-row.upper.numpy())[:5]
    assert [label.get_text() for label in axes.get_yticklabels()] == [NAMED[place] for place in order]
    bars = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches]
    np.testing.assert_allclose(bars, np.stack([row.lower[order], row.upper[order]], axis=1))
    lines = {line.get_label(): line.get_xdata() for line in axes.get_lines()}
    np.testing.assert_array_equal(lines["raw"], row.raw[order])
    np.testing.assert_array_equal(lines["effective"], attention().sel(**ROW).effective[order])
    assert axes.get_ylabel() == "key (5 of 8 shown)"
    assert "L1H2, query 4 “sees”" in axes.get_legend().get_title().get_text()


def test_intervals_by_width_and_only_those_that_are_known():
    row = intervals().sel(**ROW)
    width = (row.upper - row.lower).tolist()
    axes = plots.interval_bars(row, order="width", most=3)
    assert [bar.get_width() for bar in axes.patches] == pytest.approx(sorted(width, reverse=True)[:3])
    upper = intervals().upper.numpy().copy()
    upper[..., 3:] = np.nan
    assert len(plots.interval_bars(intervals(upper).sel(**ROW)).patches) == 3


def test_alternative_bars_stand_side_by_side():
    made = alternative()
    axes = plots.alternative_bars(made, most=4)
    raw, other = ([bar.get_width() for bar in bars] for bars in axes.containers)
    order = np.argsort(-np.fmax(made.raw.numpy(), made.attention.numpy()), kind="stable")[:4]
    np.testing.assert_array_equal(raw, made.raw[order])
    np.testing.assert_array_equal(other, made.attention[order])


def test_attribution_map_has_a_row_per_output_and_is_scaled_to_the_context():
    axes = plots.attribution_map(attribution().sel(layer=1))
    cells = attribution().contribution[1].T.numpy()
    np.testing.assert_array_equal(images([axes])[0], cells)
    assert axes.get_images()[0].norm.vmax == cells[~np.eye(N, dtype=bool)].max()
    assert axes.get_title("left") == "L1" and axes.get_xlabel() == "input token"


def test_sources_show_the_context_and_its_own_beside():
    token = attribution().sel(output=2)
    cells, side = plots.sources(token)
    np.testing.assert_array_equal(images([cells])[0], token.contribution)
    np.testing.assert_array_equal([bar.get_width() for bar in side.patches], token.contribution[:, 2])
    assert cells.get_images()[0].norm.vmax == np.delete(token.contribution.numpy(), 2, 1).max()
    assert "“cat”, position 2" in cells.get_title("left")
    assert not [line for line in cells.get_lines() if line.get_label() == "_unsure"]
    assert not plots.sources(attribution().sel(output=2, input=[0, 1, 4]))[1].patches  # it is not among the inputs
    token = attribution(stderr=True).sel(output=2)
    cells, side = plots.sources(token)
    (dots,) = [line for line in cells.get_lines() if line.get_label() == "_unsure"]
    unsure = token.contribution < 2 * token.array("stderr")
    assert 0 < len(dots.get_xdata()) == int(unsure.sum()) < unsure.numel()
    assert side.collections


def test_identity_map_tells_what_won():
    made = identity()
    axes = plots.identity_map(made)
    recovered = made.recovered.numpy()
    np.testing.assert_array_equal(np.sign(images([axes])[0]), np.where(recovered, 1, -1))
    np.testing.assert_allclose(images([axes])[0], made.margin, atol=1e-5)
    written = {tuple(map(round, text.get_position()))[::-1]: text.get_text() for text in axes.texts}
    lost = [tuple(place) for place in np.argwhere(~recovered)]
    assert written == {place: TOKENS[int(made.winner[place])].strip() for place in lost}
    assert axes.get_title("left").startswith(f"{recovered.sum()} of {recovered.size} recovered")
    made = identity(["a" * 40] * N, scale=0.0)  # no room for words, and ties
    axes = plots.identity_map(made)
    assert {text.get_text() for text in axes.texts} == {"×"}
    assert (np.sign(images([axes])[0]) == np.where(made.recovered, 1, -1)).all()


def test_rates_are_means_over_folds_with_confidence():
    made = identifiability()
    axes = plots.rates(made)
    lines = {line.get_label(): line for line in axes.get_lines() if not str(line.get_label()).startswith("_")}
    assert lines.keys() == {"naive, cosine", "linear, cosine"}
    naive = made.sel(map="naive", distance="cosine", target="input", offset=0, data_share=1.0, split="test").rate
    own = [float(naive[layer, layer].mean()) for layer in range(3)]
    np.testing.assert_allclose(lines["naive, cosine"].get_ydata(), own)
    assert len(axes.collections) == 2 and axes.get_xticks().tolist() == [0, 1, 2]
    low, high = np.array([np.asarray(part)[:, 1] for part in axes.collections[0].get_segments()]).T
    assert (low < own).all() and (high > own).all() and (low >= 0).all() and (high <= 1).all()
