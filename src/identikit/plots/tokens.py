"""Plots of token identity: which tokens of a text are recovered, and how often over a dataset."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray
from pandas import DataFrame

from identikit.errors import InputError
from identikit.plots.forms import Cells, Scale, Styles, colour_bar, heat_map, lines
from identikit.plots.reading import drawing, places_of, read, table, tokens_of
from identikit.plots.style import (
    BLACK,
    BLUE,
    DOUBLE,
    GREEN,
    RED,
    SINGLE,
    SMALL,
    Style,
    layer_axis,
    legend,
    percent,
    sheet_of,
    token_axis,
    two_sided,
)
from identikit.results.result import Result
from identikit.texts.text import shown
from identikit.tokens.experiments import mean_rates
from identikit.tokens.result import TokenInversion

_MAPS = {"naive": (BLACK, "o"), "linear": (BLUE, "s"), "mlp": (RED, "^"), "ridge": (GREEN, "D")}
_WORDS = {"mlp": "MLP", "l2": "L2"}
_AXES = ("map", "distance", "layer", "test_layer", "target", "offset", "data_share", "split", "fold")
_MEASURED = ("rate", "unique_rate", "duplicates", "n_tokens")
RATE = "token identifiability rate (%)"

RATES: Styles = {
    (name, distance): Style(f"{_WORDS.get(name, name)}, {_WORDS.get(distance, distance)}", *look, line, filled)
    for distance, line, filled in (("cosine", "-", True), ("l2", "--", False))
    for name, look in _MAPS.items()
}
"""How the rates of each map and distance look."""


def rates(identifiability: Result, ax: Axes | None = None, *, footer: str = "") -> Axes:
    """Draw the rate of recovered tokens by layer, a line per map and distance, with 95 % confidence over folds.

    Rates are those on test data, of maps tested on the layer they were fitted to. Where targets, offsets or shares of
    the data differ, select one first.
    """
    data = read("rates", identifiability, _MEASURED, axes=_AXES)
    data = data.expand_dims([name for name in _AXES if name not in data.dims])
    frame = data.to_dataframe().reset_index().dropna(subset=["rate"])
    frame = frame.query("layer == test_layer and split == 'test'")
    for name in ("target", "offset", "data_share"):
        values = list(dict.fromkeys(frame[name]))
        if len(values) > 1:
            raise InputError(
                f"Cannot draw rates: the result has several values of {name} ({', '.join(map(str, values))}). "
                f"Select one first: result.sel({name}={values[0]!r})."
            )
    per_layer = mean_rates(frame, ["map", "distance", "layer"])
    layers = sorted(int(layer) for layer in per_layer["layer"].unique())
    with drawing(ax, SINGLE, 2.8, footer) as axes:
        rate_lines(axes, per_layer, RATES, by=["map", "distance"])
        if layers:
            layer_axis(axes.xaxis, range(layers[0], layers[-1] + 1))
    return axes


def rate_lines(
    axes: Axes, frame: DataFrame, series: Styles, *, by: list[str], x: str = "layer", title: str = ""
) -> None:
    """Draw rates with their confidence; the legend has about three series in a column, or one row under a title."""
    lines(axes, frame, series, by=by, x=x, y="rate")
    percent(axes.yaxis)
    axes.set_ylabel(RATE)
    count = len(axes.get_legend_handles_labels()[0])
    legend(axes, columns=4 if title else max(1, -(-count // 3)), title=title)


def identity_map(identity: Result, ax: Axes | None = None, *, footer: str = "") -> Axes:
    """Draw which tokens are recovered from their hidden vectors: layers from below, blue if so, orange if not.

    The shade is the margin to the best other token. Where it fits, a lost cell says which token won instead; elsewhere
    it has a cross.
    """
    names = ("recovered", "margin", "winner")
    data = read("identity_map", identity, names, axes=("layer", "token"), optional=["invertible"])
    words = dict(zip(places_of(data, "token"), tokens_of(data, "token"), strict=True))
    winner = np.vectorize(lambda place: words.get(int(place), f"@{int(place)}"))(
        table(data, "winner", "layer", "token")
    )
    recovered = table(data, "recovered", "layer", "token")
    title = f"{int(recovered.sum())} of {recovered.size} recovered; orange: lost"
    invertible = np.ones(recovered.shape, dtype=bool)
    if "invertible" in data:
        invertible = table(data, "invertible", "layer", "token")
        title += f"; {int(invertible.sum())} invertible (ring: not)"
    recovery = Recovery(
        margin=table(data, "margin", "layer", "token"),
        recovered=recovered,
        winner=winner,
        layers=places_of(data, "layer"),
        tokens=tokens_of(data, "token"),
    )
    axes = _draw_recovery(recovery, title, ax=ax, footer=footer)
    rows, columns = np.nonzero(~invertible)
    if len(rows):
        axes.scatter(columns, rows, s=40, facecolors="none", edgecolors=BLACK)
    return axes


def inversion_map(inversion: Result, ax: Axes | None = None, *, footer: str = "") -> Axes:
    """Draw which tokens are found by trying the whole vocabulary: layers from below, blue if found, orange if not.

    The shade is the margin to the best other token, relative to the norm of the hidden vector. Where it fits, a lost
    cell says which token won instead; elsewhere it has a cross.
    """
    data = read("inversion_map", inversion, ("margin",), axes=("layer", "position"), optional=["recovered"])
    margin = table(data, "margin", "layer", "position").astype(float)
    recovered = np.ones(margin.shape, dtype=bool)
    title = "recovered tokens"
    if "recovered" in data:
        recovered = table(data, "recovered", "layer", "position")
        title = f"{int(recovered.sum())} of {recovered.size} recovered; orange: lost"
    winner = np.full(margin.shape, "×")
    if "winner" in inversion.arrays and isinstance(inversion, TokenInversion):
        winner = np.array([[shown(token).strip() or "␣" for token in row] for row in inversion.winners])
    recovery = Recovery(margin, recovered, winner, places_of(data, "layer"), tokens_of(data, "position"))
    return _draw_recovery(recovery, title, ax=ax, footer=footer)


@dataclass(frozen=True)
class Recovery:
    """Margins, whether each token was recovered, and what won, (layer, token) each; the layers and the tokens."""

    margin: NDArray[np.float64]
    recovered: NDArray[np.bool_]
    winner: Cells
    layers: Sequence[int]
    tokens: Sequence[str]


def _draw_recovery(recovery: Recovery, title: str, *, ax: Axes | None, footer: str) -> Axes:
    margin = recovery.margin
    reach = float(np.nanmax(np.abs(margin), initial=0.0)) or 1.0
    least = float(np.nanmin(margin, initial=0.0))
    most = float(np.nanmax(margin, initial=0.0))
    scale = Scale(two_sided(), -reach, reach, least, most if most > least else reach)
    height = 1.1 + min(0.28 * len(recovery.layers), 5.0)
    with drawing(ax, SINGLE if len(recovery.tokens) <= 10 else DOUBLE, height, footer) as axes:
        image = heat_map(axes, _sided(margin, recovery.recovered, reach), scale)
        axes.set_ylim(-0.5, len(recovery.layers) - 0.5)
        token_axis(axes.xaxis, recovery.tokens)
        token_axis(axes.yaxis, [str(layer) for layer in recovery.layers])
        axes.set(xlabel="token", ylabel="layer")
        axes.set_title(title, loc="left")
        colour_bar(image, [axes], scale, "margin", shares=False)
        _losses(axes, ~recovery.recovered, recovery.winner)
    return axes


def _sided(margin: NDArray[np.float64], recovered: NDArray[np.bool_], reach: float) -> NDArray[np.float64]:
    """Return margins that lie on their side of zero by a hair at least, so that a tie has its case's colour."""
    hair = 1e-6 * reach
    return np.where(recovered, np.maximum(margin, hair), np.minimum(margin, -hair))


def _losses(axes: Axes, lost: NDArray[np.bool_], winners: Cells) -> None:
    """Write what won into lost cells, level or upright as it fits, or a cross where it does not."""
    points = 72 / sheet_of(axes).dpi
    wide = axes.bbox.width * points / lost.shape[1]
    high = axes.bbox.height * points / lost.shape[0]
    for row, column in np.argwhere(lost):
        word = str(winners[row, column])
        length = (len(word) + 0.5) * SMALL * 0.62
        turn = 0
        if length > wide or high < SMALL:
            turn = 90
            if length > high or wide < SMALL:
                turn = 0
                word = "×"
        axes.text(column, row, word, rotation=turn, ha="center", va="center", fontsize=SMALL, clip_on=True)
