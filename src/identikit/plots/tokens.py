"""Plots of token identity: which tokens of a text are recovered, and how often over a dataset."""

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray
from pandas import DataFrame

from identikit.errors import InputError
from identikit.plots import style
from identikit.plots.forms import Cells, Scale, Styles, colour_bar, heat_map, lines
from identikit.plots.reading import check_drawable, drawing, read_table, tokens_of
from identikit.plots.style import Style, layer_axis, legend, percent, sheet_of, token_axis, two_sided
from identikit.results.result import Result
from identikit.texts.text import readable_token
from identikit.tokens.experiments import mean_rates
from identikit.tokens.result import AXES, MEASURED, TokenInversion

_MAPS = {"naive": (style.BLACK, "o"), "linear": (style.BLUE, "s"), "mlp": (style.RED, "^"), "ridge": (style.GREEN, "D")}
_WORDS = {"mlp": "MLP", "l2": "L2"}
RATE = "token identifiability rate (%)"

RATES: Styles = {
    (name, distance): Style(f"{_WORDS.get(name, name)}, {_WORDS.get(distance, distance)}", *look, line, filled)
    for distance, line, filled in (("cosine", "-", True), ("l2", "--", False))
    for name, look in _MAPS.items()
}
"""How the rates of each map and distance look."""


def rates(identifiability: Result, ax: Axes | None = None) -> Axes:
    """Draw the rate of recovered tokens by layer, a line per map and distance, with 95 % confidence over folds.

    Rates are those on test data, of maps tested on the layer they were fitted to. Where targets, offsets or shares of
    the data differ, select one first.
    """
    check_drawable("rates", identifiability, MEASURED, axes=AXES)
    frame = identifiability.to_frame(*MEASURED).dropna(subset=["rate"])
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
    with drawing(ax, style.SINGLE, 2.8) as axes:
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


def identity_map(identity: Result, ax: Axes | None = None) -> Axes:
    """Draw which tokens are recovered from their hidden vectors: layers from below, blue if so, orange if not.

    The shade is the margin to the best other token. Where it fits, a lost cell says which token won instead; elsewhere
    it has a cross.
    """
    names = ("recovered", "margin", "winner")
    check_drawable("identity_map", identity, names, axes=("layer", "token"))
    axis = identity.axis("token")
    words = dict(zip(axis.values, tokens_of(axis), strict=True))
    name_of = np.vectorize(lambda position: words.get(int(position), f"@{int(position)}"))
    recovered = read_table(identity, "recovered", "layer", "token")
    title = f"{int(recovered.sum())} of {recovered.size} recovered; orange: lost"
    invertible = np.ones(recovered.shape, dtype=bool)
    if "invertible" in identity.arrays:
        invertible = read_table(identity, "invertible", "layer", "token")
        title += f"; {int(invertible.sum())} invertible (ring: not)"
    axes = _recovery(identity, "token", recovered, name_of(read_table(identity, "winner", "layer", "token")), title, ax)
    rows, columns = np.nonzero(~invertible)
    if len(rows):
        axes.scatter(columns, rows, s=40, facecolors="none", edgecolors=style.BLACK)
    return axes


def inversion_map(inversion: Result, ax: Axes | None = None) -> Axes:
    """Draw which tokens are found by trying the whole vocabulary: layers from below, blue if found, orange if not.

    The shade is the margin to the best other token, relative to the norm of the hidden vector. Where it fits, a lost
    cell says which token won instead; elsewhere it has a cross.
    """
    check_drawable("inversion_map", inversion, ("margin",), axes=("layer", "position"))
    recovered = np.ones((len(inversion.axis("layer")), len(inversion.axis("position"))), dtype=bool)
    title = "recovered tokens"
    if "recovered" in inversion.arrays:
        recovered = read_table(inversion, "recovered", "layer", "position")
        title = f"{int(recovered.sum())} of {recovered.size} recovered; orange: lost"
    winner = np.full(recovered.shape, "×")
    if "winner" in inversion.arrays and isinstance(inversion, TokenInversion):
        winner = np.array([[readable_token(token).strip() or "␣" for token in row] for row in inversion.winners])
    return _recovery(inversion, "position", recovered, winner, title, ax)


def _recovery(
    result: Result, dim: str, recovered: NDArray[np.bool_], winner: Cells, title: str, ax: Axes | None
) -> Axes:
    """Draw margins by layer and token, coloured by whether a token was recovered, with what won instead."""
    margin = read_table(result, "margin", "layer", dim).astype(float)
    layers = result.axis("layer").values
    tokens = tokens_of(result.axis(dim))
    least = float(np.nanmin(margin, initial=0.0))
    greatest = float(np.nanmax(margin, initial=0.0))
    reach = max(-least, greatest) or 1.0
    scale = Scale(two_sided(), -reach, reach, least, greatest if greatest > least else reach)
    hair = 1e-6 * reach  # by which a tie lies on its side of zero, so that it has its case's colour
    sided = np.where(recovered, np.maximum(margin, hair), np.minimum(margin, -hair))
    with drawing(ax, style.SINGLE if len(tokens) <= 10 else style.DOUBLE, 1.1 + min(0.28 * len(layers), 5.0)) as axes:
        image = heat_map(axes, sided, scale)
        axes.set_ylim(-0.5, len(layers) - 0.5)
        token_axis(axes.xaxis, tokens)
        token_axis(axes.yaxis, [str(layer) for layer in layers])
        axes.set(xlabel="token", ylabel="layer")
        axes.set_title(title, loc="left")
        colour_bar(image, [axes], scale, "margin", shares=False)
        _losses(axes, ~recovered, winner)
    return axes


def _losses(axes: Axes, lost: NDArray[np.bool_], winners: Cells) -> None:
    """Write the winning token into lost cells, level or upright as it fits, or a cross where it does not."""
    points = 72 / sheet_of(axes).dpi
    wide = axes.bbox.width * points / lost.shape[1]
    high = axes.bbox.height * points / lost.shape[0]
    for row, column in np.argwhere(lost):
        word = str(winners[row, column])
        length = (len(word) + 0.5) * style.SMALL * 0.62
        turn = 0
        if length > wide or high < style.SMALL:
            turn = 90
            if length > high or wide < style.SMALL:
                turn = 0
                word = "×"
        axes.text(column, row, word, rotation=turn, ha="center", va="center", fontsize=style.SMALL, clip_on=True)
