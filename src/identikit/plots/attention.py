"""Plots of attention: maps of a head, all heads at once, the intervals of a row, an alternative, correlation."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from pandas import DataFrame

from identikit.checks import known, known_names, whole_number
from identikit.errors import InputError
from identikit.plots.forms import (
    Panels,
    Scale,
    add_footer,
    around_zero,
    colour_bar,
    from_zero,
    heat_map,
    new_axes,
)
from identikit.plots.reading import Drawable, axes_for, head_of, named, places_of, read, table, tokens_of
from identikit.plots.style import (
    BLACK,
    BLUE,
    DOUBLE,
    ORANGE,
    RED,
    SINGLE,
    SKY,
    SMALL,
    house_style,
    legend,
    percent,
    sequential,
    sheet_of,
    token_axis,
)

if TYPE_CHECKING:
    from xarray import Dataset

_MAPS = ("raw", "effective", "null")
_BOUNDS = ("lower", "upper", "width")
_WEIGHT = "attention weight (%)"


def head_maps(
    attention: Drawable,
    intervals: Drawable | None = None,
    *,
    maps: Sequence[str] | None = None,
    axes: Iterable[Axes] | None = None,
    footer: str = "",
) -> Panels:
    """Draw maps of one head side by side, on one diverging scale with one colour bar; return their axes.

    `maps` are any of raw, effective and null, and with `intervals` of lower, upper and width (upper − lower); by
    default all of them. If asked for, "simplex" is the attention of least norm with the same output, which needs the
    model. Keys that a query cannot see, and intervals that were not computed, are hatched, not zero.
    """
    bounded = _BOUNDS if intervals is not None else ()
    if maps is None:
        maps = _MAPS + bounded
    chosen = known_names("maps", maps, (*_MAPS, "simplex", *_BOUNDS))
    if intervals is None and any(name in _BOUNDS for name in chosen):
        raise InputError("Cannot draw head_maps: lower, upper and width need intervals=.")
    data = read("head_maps", attention, _MAPS, axes=("query", "key"))
    seen = table(data, "visible", "query", "key") if "visible" in data else True
    found = {} if intervals is None else _bounds(intervals, data)
    if "simplex" in chosen:
        found["simplex"] = _simplex(attention, data)
    cells = {}
    for name in chosen:
        weights = found[name] if name in found else table(data, name, "query", "key")
        cells[f"{head_of(data)} {name}"] = np.where(seen, weights, np.nan)
    return _panels("head_maps", data, cells, axes, footer)


def interval_maps(intervals: Drawable, *, axes: Iterable[Axes] | None = None, footer: str = "") -> Panels:
    """Draw raw weight, lower and upper end of one head side by side, on one scale; return their axes.

    Edges that no attention with the same output can use, such as invisible keys, are hatched.
    """
    data = read("interval_maps", intervals, ("raw", "lower", "upper"), axes=("query", "key"))
    possible = table(data, "upper", "query", "key") > 0
    cells = {
        f"{head_of(data)} {name}": np.where(possible, table(data, name, "query", "key"), np.nan)
        for name in ("raw", "lower", "upper")
    }
    return _panels("interval_maps", data, cells, axes, footer)


def _panels(
    plot: str, data: "Dataset", cells: dict[str, NDArray[Any]], axes: Iterable[Axes] | None, footer: str
) -> Panels:
    """Draw titled maps on the axes that were given, or on new ones."""
    given = None if axes is None else np.array(axes if isinstance(axes, np.ndarray) else [*axes], dtype=object).ravel()
    if given is not None and len(given) != len(cells):
        wanted = f"{len(cells)} maps ({', '.join(cells)})"
        raise InputError(f"Cannot draw {plot}: axes= has {len(given)} axes for {wanted}. Give one for each map.")
    with house_style():
        panels = _map_axes(len(cells)) if given is None else given.view(Panels)
        map_panels(panels, cells, tokens_of(data, "query"), tokens_of(data, "key"))
        add_footer(sheet_of(panels[0]), footer)
    return panels


def map_panels(
    panels: Panels,
    maps: dict[str, NDArray[Any]],
    queries: Sequence[str],
    keys: Sequence[str],
    *,
    keep: Sequence[int] = (),
) -> None:
    """Draw titled maps, (query, key), on one diverging scale with one colour bar; `keep` are keys always labelled."""
    scale = around_zero(*maps.values())
    images = []
    for axes, (title, cells) in zip(panels, maps.items(), strict=True):
        images.append(heat_map(axes, cells, scale))
        axes.set_title(title, loc="left")
        axes.set_xlabel("key")
        token_axis(axes.xaxis, keys, keep=keep)
        axes.spines[:].set_visible(True)
        if axes.get_subplotspec() is None or axes.get_subplotspec().is_first_col():  # pyright: ignore
            axes.set_ylabel("query")
            token_axis(axes.yaxis, queries)
        else:
            axes.set_yticks([])
    colour_bar(images[-1], panels, scale, _WEIGHT)


def _map_axes(count: int) -> Panels:
    columns = 2 if count == 4 else min(count, 3)
    rows = -(-count // columns)
    width = SINGLE if count == 1 else DOUBLE
    grid = new_axes(width, rows * (0.8 + 0.82 * width / columns), rows=rows, columns=columns)
    for spare in grid[count:]:
        spare.remove()
    return grid[:count].view(Panels)


def _simplex(attention: Any, data: "Dataset") -> NDArray[Any]:
    """Return the attention of least norm on the queries and keys of a map."""
    least = getattr(attention, "simplex", None)
    if least is None:
        kind = data.attrs.get("kind", "this result")
        raise InputError(f"Cannot draw head_maps: maps='simplex' needs what effective_attention returned, not {kind}.")
    return least.cpu().numpy().reshape(table(data, "raw", "query", "key").shape)


def _bounds(intervals: Drawable, data: "Dataset") -> dict[str, NDArray[Any]]:
    """Return lower, upper and width on the queries and keys of a map, NaN where no interval was computed."""
    found = read("head_maps", intervals, ("lower", "upper"), axes=("query", "key"))
    if head_of(found) != head_of(data):
        raise InputError(
            f"Cannot draw head_maps: attention= is of {head_of(data)} and intervals= of {head_of(found)}. "
            "Give the same head of both."
        )
    gone = [dim for dim in ("query", "key") if dim not in found["lower"].dims]
    whole = found[["lower", "upper"]].expand_dims(gone)
    whole = whole.reindex(query=places_of(data, "query"), key=places_of(data, "key"))
    lower, upper = (table(whole, name, "query", "key") for name in ("lower", "upper"))
    return {"lower": lower, "upper": upper, "width": upper - lower}


def head_grid(result: Drawable, by: str = "pearson", ax: Axes | None = None, *, footer: str = "") -> Axes:
    """Draw all heads as a grid, layers from below, shaded by a number and, where there is room, with it written.

    `by` is "pearson" (correlation of raw with effective attention), "null_dim", "polytope_dim", "reachable_dim" or
    "certain_mass"; all but the first are means over queries. Heads that were not measured are hatched.
    """
    words = {
        "pearson": "Pearson, raw with effective",
        "null_dim": "mean null dimension",
        "polytope_dim": "mean dimension of the attention with the same output",
        "reachable_dim": "mean reachable dimension",
        "certain_mass": "mean certain mass (%)",
    }
    known("by", by, tuple(words))
    data = read("head_grid", result, [by], axes=("layer", "head", "query"))
    values = data[[by]].mean("query") if "query" in data[by].dims else data
    cells = table(values, by, "layer", "head").astype(float)
    layers, heads = places_of(data, "layer"), places_of(data, "head")
    whole = Scale(sequential(), 0.0, 1.0, 0.0, 1.0)
    scale = from_zero(cells) if by.endswith("_dim") else whole
    if by == "pearson" and np.nanmin(cells, initial=0.0) < 0:
        scale = around_zero(np.array([-1.0, 1.0]))
    with house_style():
        axes = axes_for(ax, SINGLE if len(heads) <= 16 else DOUBLE, 1.0 + min(0.22 * len(layers), 6.0))
        image = heat_map(axes, cells, scale)
        axes.set_ylim(-0.5, len(layers) - 0.5)
        axes.set(xlabel="head", ylabel="layer")
        token_axis(axes.xaxis, [str(head) for head in heads])
        token_axis(axes.yaxis, [str(layer) for layer in layers])
        axes.tick_params(axis="x", labelrotation=0)
        axes.set_title(words[by], loc="left")
        colour_bar(image, [axes], scale, "", shares=by == "certain_mass")
        _write(axes, cells, scale, share=by == "certain_mass")
        add_footer(sheet_of(axes), footer)
    return axes


def _write(axes: Axes, cells: NDArray[Any], scale: Scale, *, share: bool) -> None:
    """Write the numbers into the cells of a grid, if they fit."""
    room = axes.bbox.width / sheet_of(axes).dpi * 72 / cells.shape[1]
    words = {place: f"{100 * value:.0f}" if share else _short(value) for place, value in np.ndenumerate(cells)}
    if room < max(map(len, words.values())) * SMALL * 0.68:
        return
    for (row, column), word in words.items():
        if not np.isnan(cells[row, column]):
            shade = (cells[row, column] - scale.least) / (scale.most - scale.least)
            dark = np.dot(scale.colours(shade)[:3], (0.30, 0.59, 0.11)) < 0.5
            axes.text(column, row, word, ha="center", va="center", fontsize=SMALL, color="white" if dark else "black")


def _short(value: float) -> str:
    """Write a number in at most three characters: .97, 1, 26."""
    if abs(value) >= 1:
        return f"{value:.0f}"
    return f"{value:.2f}".replace("0.", ".", 1) if round(value, 2) < 1 else "1"


def interval_bars(
    intervals: Drawable,
    effective: Drawable | None = None,
    ax: Axes | None = None,
    *,
    most: int = 20,
    order: str = "upper",
    footer: str = "",
) -> Axes:
    """Draw the intervals of one row: for each key a bar from the least to the largest weight it can have.

    A tick is the raw weight; a dot, with `effective`, the effective one. The `most` keys with the largest "upper" or
    "width" (`order`) are shown.
    """
    data = read("interval_bars", intervals, ("raw", "lower", "upper"), axes=("key", "group"))
    last = "group" if "group" in data.coords else "key"
    names = named(data, "key") if last == "key" else list(map(str, np.atleast_1d(data["group"].to_numpy())))
    raw, lower, upper = (table(data, name, last) for name in ("raw", "lower", "upper"))
    known("order", order, ("upper", "width"))
    there = np.flatnonzero(~np.isnan(upper))
    rank = upper if order == "upper" else upper - lower
    chosen = there[np.argsort(-rank[there], kind="stable")][: whole_number("most", most, least=1)]
    with house_style():
        axes = axes_for(ax, SINGLE, 1.1 + 0.14 * len(chosen))
        rows = np.arange(len(chosen))
        span = upper[chosen] - lower[chosen]
        axes.barh(
            rows, span, left=lower[chosen], height=0.6, color=SKY, edgecolor=BLUE, linewidth=0.5, label="possible"
        )
        look: dict[str, Any] = {"linestyle": "", "markersize": 7, "markeredgewidth": 1.4}
        axes.plot(raw[chosen], rows, marker="|", color=BLACK, label="raw", **look)
        if effective is not None:
            weights = _effective_row(effective, data)
            axes.plot(weights[chosen], rows, linestyle="", marker="o", color=RED, label="effective")
        _key_rows(axes, [names[place] for place in chosen], len(there), last)
        legend(axes, columns=3, title=f"{_row_of(data)}, {last}s by {order}")
        add_footer(sheet_of(axes), footer)
    return axes


def _effective_row(effective: Drawable, data: "Dataset") -> NDArray[Any]:
    """Return the effective weights of the row and the keys that intervals are of."""
    query = int(data["query"])
    found = effective.to_xarray()
    if "query" in found["effective"].dims:
        found = found.sel(query=query)
    for dim in ("layer", "head"):
        if dim in found["effective"].dims:
            found = found.sel({dim: int(data[dim])})
    if (head_of(found), int(found["query"])) != (head_of(data), query):
        raise InputError(
            f"Cannot draw interval_bars: the intervals are of {_row_of(data)} and effective= is of {_row_of(found)}. "
            "Give the same row of both."
        )
    weights = dict(zip(places_of(found, "key"), table(found, "effective", "key"), strict=True))
    return np.array([weights.get(place, np.nan) for place in places_of(data, "key")])


def alternative_bars(alternative: Drawable, ax: Axes | None = None, *, most: int = 20, footer: str = "") -> Axes:
    """Draw the raw attention of one row and another with the same output, a pair of bars per key.

    The `most` keys with the largest weight in either are shown.
    """
    data = read("alternative_bars", alternative, ("raw", "attention"), axes=("key",))
    names, raw, other = named(data, "key"), table(data, "raw", "key"), table(data, "attention", "key")
    chosen = np.argsort(-np.fmax(raw, other), kind="stable")[: whole_number("most", most, least=1)]
    with house_style():
        axes = axes_for(ax, SINGLE, 1.1 + 0.16 * len(chosen))
        rows = np.arange(len(chosen))
        axes.barh(rows - 0.19, raw[chosen], height=0.36, color=BLUE, label="raw")
        axes.barh(rows + 0.19, other[chosen], height=0.36, color=ORANGE, label="same output")
        _key_rows(axes, [names[place] for place in chosen], len(names))
        legend(axes, columns=2, title=_row_of(data))
        add_footer(sheet_of(axes), footer)
    return axes


def _row_of(data: "Dataset") -> str:
    token = f" “{str(data['query_token'].item()).strip()}”" if "query_token" in data.coords else ""
    return f"{head_of(data)}, query {int(data['query'])}{token}"


def _key_rows(axes: Axes, names: list[str], count: int, what: str = "key") -> None:
    """Label rows with keys or groups, the first on top; say how many there are where some are not shown."""
    axes.set_ylim(len(names) - 0.4, -0.6)
    token_axis(axes.yaxis, names)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.set_ylabel(what if len(names) == count else f"{what} ({len(names)} of {count} shown)")
    axes.set_xlabel(_WEIGHT)
    axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    percent(axes.xaxis)


def correlation_by_length(frame: DataFrame, d_value: int, ax: Axes | None = None, *, footer: str = "") -> Axes:
    """Draw the correlation of raw with effective attention by the length of the text, a point per text.

    `frame` has columns `tokens` and `pearson`. Up to the line, at `d_value` tokens, a text has no more tokens than a
    value vector has numbers, and the two can be equal.
    """
    with house_style():
        axes = axes_for(ax, SINGLE, 2.6)
        axes.scatter(frame["tokens"], frame["pearson"], s=9, color=BLUE, marker="o", alpha=0.6, linewidths=0)
        axes.axvline(d_value, color=RED, linestyle="--", linewidth=0.9, label=f"size of a value vector: {d_value}")
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
        axes.set(xlabel="tokens in the text", ylabel="Pearson, raw with effective")
        legend(axes, columns=1)
        add_footer(sheet_of(axes), footer)
    return axes
