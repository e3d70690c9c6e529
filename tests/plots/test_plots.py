"""Plots of Results: what is drawn are the result's numbers, on given axes or new ones, and mistakes are told."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from pandas import DataFrame

import identikit as ik
from identikit import plots
from identikit.errors import InputError

LAYERS, HEADS = 3, 4
TOKENS = ["[CLS]", " the", " cat", "$", " sees", " the", " dog", "[SEP]"]
N = len(TOKENS)


@dataclass(frozen=True)
class Fake:
    """Stands for a Result: plots read nothing but its dataset."""

    data: xr.Dataset

    def to_xarray(self) -> xr.Dataset:
        return self.data

    def sel(self, **chosen: Any) -> "Fake":
        return Fake(self.data.sel(**chosen))


def along(*dims: str, tokens: list[str] = TOKENS) -> dict[str, Any]:
    places = {dim: range(len(tokens)) for dim in dims}
    return places | {f"{dim}_token": (dim, tokens) for dim in dims}


def attention(causal: bool = False) -> Fake:
    random = np.random.default_rng(0)
    visible = np.broadcast_to(np.tri(N, dtype=bool) if causal else np.ones((N, N), bool), (LAYERS, N, N))
    raw = random.random((LAYERS, HEADS, N, N)) * visible[:, None]
    raw = raw / raw.sum(-1, keepdims=True)
    effective = raw * random.uniform(-0.3, 1.0, raw.shape)
    edges = ("layer", "head", "query", "key")
    return Fake(
        xr.Dataset(
            {
                **{
                    name: (edges, cells)
                    for name, cells in {"raw": raw, "effective": effective, "null": raw - effective}.items()
                },
                "visible": (("layer", "query", "key"), visible),
                "null_dim": (edges[:3], random.integers(0, 9, raw.shape[:3])),
                "pearson": (edges[:2], random.random(raw.shape[:2])),
            },
            coords={"layer": range(LAYERS), "head": range(HEADS), **along("query", "key")},
            attrs={"kind": "effective attention", "model": "made up"},
        )
    )


def intervals() -> Fake:
    data = attention().data
    random = np.random.default_rng(1)
    lower, upper = data["raw"] * random.random(data["raw"].shape), data["raw"] * (1 + random.random(data["raw"].shape))
    bounds = data[["raw"]].assign(lower=lower, upper=upper, certain_mass=lower.sum("key"))
    return Fake(bounds.assign_attrs(kind="attention intervals"))


def alternative() -> Fake:
    row = attention().data.sel(layer=1, head=2, query=4)
    return Fake(row[["raw"]].assign(attention=row["raw"][::-1].drop_vars(["key", "key_token"]), direction=row["null"]))


def attribution(stderr: bool = False) -> Fake:
    cells = np.random.default_rng(2).random((LAYERS, N, N)) + 4 * np.eye(N)
    cells = cells / cells.sum(1, keepdims=True)
    dims = ("layer", "input", "output")
    known = {"contribution": (dims, cells)} | ({"stderr": (dims, 0.3 * cells.mean() + 0 * cells)} if stderr else {})
    return Fake(xr.Dataset(known, coords={"layer": range(LAYERS), **along("input", "output")}))


def identity() -> Fake:
    margin = np.random.default_rng(3).uniform(-0.4, 0.8, (LAYERS, N))
    dims = ("layer", "token")
    winner = np.where(margin > 0, np.arange(N), (np.arange(N) + 1) % N)
    found = {"recovered": (dims, margin > 0), "margin": (dims, margin), "winner": (dims, winner)}
    return Fake(xr.Dataset(found, coords={"layer": range(LAYERS), **along("token")}))


def identifiability(**more: list[Any]) -> Fake:
    axes: dict[str, list[Any]] = {"map": ["naive", "linear"], "distance": ["cosine"], "layer": [0, 1, 2]}
    axes |= {"test_layer": [0, 1, 2], "target": ["input"], "offset": [0], "data_share": [1.0]}
    axes |= {"split": ["train", "test"], "fold": [0, 1, 2]} | more
    random = np.random.default_rng(4)
    shape = [len(values) for values in axes.values()]
    names = ("rate", "unique_rate", "duplicates")
    known = {name: ([*axes], random.uniform(0.5, 0.9, shape)) for name in names} | {
        "n_tokens": ([*axes], np.full(shape, 90.0))
    }
    data = xr.Dataset(known, coords=axes)
    return Fake(data.where(data["layer"] == data["test_layer"]))


LENGTHS = DataFrame({"tokens": [10, 20, 40], "pearson": [1.0, 1.0, 0.6]})
PLOTS: dict[str, Callable[..., Any]] = {
    "head_grid": lambda **options: plots.head_grid(attention(), **options),
    "interval_bars": lambda **options: plots.interval_bars(intervals().sel(layer=1, head=2, query=4), **options),
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
def test_a_new_figure_is_as_wide_as_a_column_and_nothing_is_cut_off(name: str):
    figure = first(PLOTS[name]()).get_figure(root=True)
    assert figure.get_figwidth() in (3.3, 6.9)
    check_layout(figure)
    assert figure.get_supxlabel() == ""


@pytest.mark.parametrize("name", PLOTS)
def test_given_axes_are_drawn_into_and_pyplot_is_left_alone(name: str):
    before, numbers = dict(matplotlib.rcParams), plt.get_fignums()
    mine = Figure(layout="constrained").subplots(1, 2)
    drawn = first(PLOTS[name](ax=mine[1]))
    assert drawn is mine[1]
    assert mine[1].has_data() and not mine[0].has_data()
    PLOTS[name]()
    assert plt.get_fignums() == numbers
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("name", PLOTS)
def test_a_footer_is_written_only_when_asked_for(name: str):
    figure = first(PLOTS[name](footer="made up · n = 1")).get_figure(root=True)
    assert figure.get_supxlabel() == "made up · n = 1"


def images(drawn: Any) -> list[np.ndarray]:
    return [np.ma.filled(axes.get_images()[0].get_array(), np.nan) for axes in drawn]


def test_head_maps_share_one_scale_and_one_colour_bar():
    one = attention().sel(layer=1, head=2)
    drawn = plots.head_maps(one)
    assert [axes.get_title("left") for axes in drawn] == ["L1H2 raw", "L1H2 effective", "L1H2 null"]
    for cells, name in zip(images(drawn), ("raw", "effective", "null"), strict=True):
        np.testing.assert_array_equal(cells, one.data[name])
    norms = {(axes.get_images()[0].norm.vmin, axes.get_images()[0].norm.vmax) for axes in drawn}
    ((least, most),) = norms
    assert least == -most < 0
    assert len(drawn[0].figure.axes) == 4
    assert [label.get_text() for label in drawn[0].get_yticklabels()] == [token.strip() for token in TOKENS]
    check_layout(drawn[0].figure)


def test_keys_that_cannot_be_seen_are_blank():
    drawn = plots.head_maps(attention(causal=True).sel(layer=1, head=2))
    for cells in images(drawn):
        assert (np.isnan(cells) == ~np.tri(N, dtype=bool)).all()
    assert all(axes.patch.get_hatch() for axes in drawn)


def test_intervals_stand_beside_the_maps_where_they_are_known():
    bounds = intervals().sel(layer=1, head=2, query=slice(2, 3))
    drawn = plots.head_maps(attention().sel(layer=1, head=2), bounds)
    assert [axes.get_title("left") for axes in drawn[3:]] == ["L1H2 lower", "L1H2 upper", "L1H2 width"]
    lower, upper, width = images(drawn)[3:]
    np.testing.assert_array_equal(lower[2:4], bounds.data["lower"])
    np.testing.assert_array_equal(width[2:4], upper[2:4] - lower[2:4])
    assert np.isnan(np.delete(upper, [2, 3], axis=0)).all()
    one = plots.head_maps(attention().sel(layer=1, head=2), bounds.sel(query=2), maps=["upper"])
    np.testing.assert_array_equal(images(one)[0][2], bounds.data["upper"].sel(query=2))


def test_the_attention_of_least_norm_is_a_fourth_map():
    result = ik.effective_attention(ik.load(), "It was a dark night, and the rain fell. " * 5, layers=[3])
    one = result.sel(layer=3, head=2)
    maps = ("raw", "effective", "null", "simplex")
    drawn = one.plot(maps=maps)
    assert [axes.get_title("left") for axes in drawn] == [f"L3H2 {name}" for name in maps]
    np.testing.assert_array_equal(images(drawn)[3], one.simplex)
    check_layout(drawn[0].figure)
    row = one.sel(query=5).plot(maps=["simplex"])
    np.testing.assert_allclose(images(row)[0], one.simplex[5:6], atol=1e-9)
    assert len(one.plot()) == 3


def test_head_maps_draw_into_given_axes():
    mine = Figure().subplots(1, 2)
    drawn = plots.head_maps(attention().sel(layer=0, head=0), maps=["raw", "null"], axes=mine)
    assert [*drawn] == [*mine]
    with pytest.raises(InputError, match=r"has 2 axes for 3 maps"):
        plots.head_maps(attention().sel(layer=0, head=0), axes=mine)


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda: plots.head_maps(attention()), r"axes layer and head\. .* result\.sel\(layer=1, head=2\)\."),
        (lambda: plots.interval_bars(intervals().sel(layer=0, head=0)), r"axis query\. .* result\.sel\(query=4\)\."),
        (lambda: plots.sources(attribution()), r"axis output\."),
        (lambda: plots.attribution_map(attribution()), r"axis layer\."),
        (lambda: plots.head_maps(attribution().sel(layer=0)), "Cannot draw head_maps: it needs 'raw'"),
        (
            lambda: plots.head_grid(attention(), by="certain_mass"),
            "needs 'certain_mass', and effective attention has only raw",
        ),
        (
            lambda: plots.head_grid(attention(), by="rank"),
            "by='rank' is not known: use 'pearson', 'null_dim'",
        ),
        (lambda: plots.head_maps(attention().sel(layer=0, head=0), maps=["width"]), "need intervals="),
        (lambda: plots.head_maps(attention().sel(layer=0, head=0), maps=["simplex"]), "'simplex' needs what effective"),
        (lambda: plots.interval_bars(intervals().sel(layer=0, head=0, query=1), order="raw"), "order='raw'"),
        (lambda: plots.head_maps(attention().sel(layer=0, head=0), intervals().sel(layer=0, head=1)), "L0H0 .* L0H1"),
        (
            lambda: plots.interval_bars(intervals().sel(layer=0, head=0, query=1), attention().sel(layer=1)),
            "L0H0, query 1 “the” and effective= is of L1H0",
        ),
        (lambda: plots.rates(attention()), "Cannot draw rates: it needs 'rate'"),
        (lambda: plots.rates(identifiability(offset=[-1, 1])), r"several values of offset .* result\.sel\(offset=-1\)"),
    ],
)
def test_what_cannot_be_drawn_is_told(draw: Callable[[], Any], words: str):
    with pytest.raises(InputError, match=words):
        draw()


@pytest.mark.parametrize("by", ["pearson", "null_dim"])
def test_head_grid_holds_one_number_per_head(by: str):
    one = attention()
    axes = plots.head_grid(one, by)
    expected = one.data[by].mean("query") if by == "null_dim" else one.data[by]
    np.testing.assert_allclose(images([axes])[0], expected)
    texts = [text.get_text() for text in axes.texts]
    assert len(texts) == LAYERS * HEADS
    assert float(texts[0]) == pytest.approx(float(expected[0, 0]), abs=0.5 if by == "null_dim" else 0.005)
    assert axes.get_ylim()[0] < axes.get_ylim()[1]


def test_a_correlation_below_zero_gets_a_diverging_scale():
    one = attention().data
    negative = Fake(one.assign(pearson=one["pearson"] - 0.5))
    for fake, least in ((Fake(one), 0.0), (negative, -1.0)):
        norm = plots.head_grid(fake).get_images()[0].norm
        assert (norm.vmin, norm.vmax) == (least, 1.0)


def test_certain_mass_is_a_mean_in_per_cent():
    axes = plots.head_grid(intervals(), "certain_mass")
    mass = intervals().data["certain_mass"].mean("query")
    assert axes.texts[0].get_text() == f"{100 * float(mass[0, 0]):.0f}"


def test_interval_bars_hold_bounds_raw_and_effective():
    row = intervals().sel(layer=1, head=2, query=4)
    axes = plots.interval_bars(row, attention(), most=5)
    order = np.argsort(-row.data["upper"].to_numpy())[:5]
    assert [label.get_text() for label in axes.get_yticklabels()] == [NAMED[place] for place in order]
    bars = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches]
    np.testing.assert_allclose(bars, np.stack([row.data["lower"][order], row.data["upper"][order]], axis=1))
    lines = {line.get_label(): line.get_xdata() for line in axes.get_lines()}
    np.testing.assert_array_equal(lines["raw"], row.data["raw"][order])
    effective = attention().data["effective"].sel(layer=1, head=2, query=4)
    np.testing.assert_array_equal(lines["effective"], effective[order])
    assert axes.get_ylabel() == "key (5 of 8 shown)"
    assert "L1H2, query 4 “sees”" in axes.get_legend().get_title().get_text()


NAMED = ["[CLS]", "the@1", "cat", "$", "sees", "the@5", "dog", "[SEP]"]


def test_intervals_by_width_and_only_those_that_are_known():
    row = intervals().sel(layer=1, head=2, query=4).data
    width = (row["upper"] - row["lower"]).to_numpy()
    axes = plots.interval_bars(Fake(row), order="width", most=3)
    assert [bar.get_width() for bar in axes.patches] == pytest.approx(sorted(width, reverse=True)[:3])
    known = Fake(row.assign(upper=row["upper"].where(row["key"] < 3)))
    assert len(plots.interval_bars(known).patches) == 3


def test_alternative_bars_stand_side_by_side():
    data = alternative().data
    axes = plots.alternative_bars(alternative(), most=4)
    raw, other = ([bar.get_width() for bar in bars] for bars in axes.containers)
    order = np.argsort(-np.fmax(data["raw"], data["attention"]).to_numpy(), kind="stable")[:4]
    np.testing.assert_array_equal(raw, data["raw"][order])
    np.testing.assert_array_equal(other, data["attention"][order])


def test_correlation_by_length_has_a_line_at_the_value_size():
    axes = plots.correlation_by_length(LENGTHS, 32)
    np.testing.assert_array_equal(axes.collections[0].get_offsets(), LENGTHS)
    assert list(axes.get_lines()[0].get_xdata()) == [32, 32]


def test_attribution_map_has_a_row_per_output_and_is_scaled_to_the_context():
    one = attribution().sel(layer=1)
    axes = plots.attribution_map(one)
    cells = one.data["contribution"].transpose("output", "input").to_numpy()
    np.testing.assert_array_equal(images([axes])[0], cells)
    assert axes.get_images()[0].norm.vmax == cells[~np.eye(N, dtype=bool)].max()
    assert axes.get_title("left") == "L1"


def test_sources_show_the_context_and_its_own_beside():
    one = attribution().sel(output=2)
    cells, side = plots.sources(one)
    np.testing.assert_array_equal(images([cells])[0], one.data["contribution"])
    own = one.data["contribution"].sel(input=2)
    np.testing.assert_array_equal([bar.get_width() for bar in side.patches], own)
    assert cells.get_images()[0].norm.vmax == one.data["contribution"].drop_sel(input=2).max()
    assert "“cat”, position 2" in cells.get_title("left")
    assert not [line for line in cells.get_lines() if line.get_label() == "_unsure"]


def test_sources_with_standard_errors_mark_what_is_unsure():
    one = attribution(stderr=True).sel(output=2)
    cells, side = plots.sources(one)
    (dots,) = [line for line in cells.get_lines() if line.get_label() == "_unsure"]
    unsure = one.data["contribution"] < 2 * one.data["stderr"]
    assert 0 < len(dots.get_xdata()) == int(unsure.sum()) < unsure.size
    assert side.collections


def test_sources_without_the_token_itself_have_no_bars():
    _, side = plots.sources(attribution().sel(output=2, input=[0, 1, 4]))
    assert not side.patches


def test_identity_map_tells_what_won():
    data = identity().data
    axes = plots.identity_map(identity())
    recovered = data["recovered"].to_numpy()
    np.testing.assert_array_equal(np.sign(images([axes])[0]), np.where(recovered, 1, -1))
    np.testing.assert_allclose(images([axes])[0], data["margin"], atol=1e-5)
    written = {tuple(map(round, text.get_position()))[::-1]: text.get_text() for text in axes.texts}
    words = [token.strip() for token in TOKENS]
    assert written == {
        (row, column): words[int(data["winner"][row, column])] for row, column in np.argwhere(~recovered)
    }
    assert axes.get_title("left").startswith(f"{recovered.sum()} of {recovered.size} recovered")


def test_a_lost_cell_without_room_has_a_cross_and_a_tie_keeps_its_side():
    long = identity().data
    long = long.assign_coords(token_token=("token", ["a" * 40] * N))
    axes = plots.identity_map(Fake(long.assign(margin=identity().data["margin"] * 0)))
    assert {text.get_text() for text in axes.texts} == {"×"}
    assert (np.sign(images([axes])[0]) == np.where(long["recovered"], 1, -1)).all()


def test_rates_are_means_over_folds_with_confidence():
    data = identifiability().data
    axes = plots.rates(identifiability())
    lines = {line.get_label(): line for line in axes.get_lines() if not str(line.get_label()).startswith("_")}
    assert lines.keys() == {"naive, cosine", "linear, cosine"}
    own = [data["rate"].sel(map="naive", split="test", layer=layer, test_layer=layer).mean() for layer in range(3)]
    np.testing.assert_allclose(lines["naive, cosine"].get_ydata(), own)
    assert len(axes.collections) == 2
    assert axes.get_xticks().tolist() == [0, 1, 2]
    low, high = np.array([np.asarray(part)[:, 1] for part in axes.collections[0].get_segments()]).T
    assert (low < own).all() and (high > own).all() and (low >= 0).all() and (high <= 1).all()


def test_many_tokens_are_thinned_not_squeezed():
    count = 200
    cells = np.random.default_rng(0).random((1, count, count))
    names = [f"token{place}" for place in range(count)]
    coords = along("input", "output", tokens=names)
    data = xr.Dataset({"contribution": (("layer", "input", "output"), cells)}, coords={"layer": [0], **coords})
    axes = plots.attribution_map(Fake(data.sel(layer=0)))
    check_layout(axes.get_figure(root=True))
    assert 20 < len(axes.get_xticks()) < 100
