"""Attention on the picture: one row over the patches of an image in the text, raw and as far as it is determined."""

import io
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.image import imread
from matplotlib.patches import Rectangle

from identikit.checks import flag, known_names, whole_number
from identikit.errors import InputError
from identikit.plots.forms import Cells, Panels, around_zero, colour_bar, from_zero, new_axes
from identikit.plots.maps import WEIGHT
from identikit.plots.reading import check_drawable, panels_of, read_table
from identikit.plots.style import BLUE, DOUBLE, SINGLE, house_style
from identikit.results.pictures import SINK, Box, Patch, ShownImage, pictures
from identikit.results.result import Result
from identikit.results.words import percent

_WORDS = {"lower": "at least", "upper": "at most"}
_FADED = 0.45  # how much of the picture's own darkness is left under the patches


def image_overlay(
    result: Result,
    maps: Sequence[str] | str | None = None,
    *,
    image: int = 0,
    overview: bool | None = None,
    axes: Iterable[Axes] | None = None,
) -> Panels:
    """Draw one row of attention over the patches of an image in its text, on the picture, one panel for each map.

    `maps` are arrays of the result; by default raw weights with their lower and upper ends, of intervals, or raw and
    effective weights. The lower ends are what every attention with the same output gives. A title says what the
    patches get together, and a cross marks those that take more than 30 % of the image's raw attention: sinks. Patches
    that the query cannot see stay bare.

    `image` counts from 0. Of an image that is cut into tiles, tiles are drawn; `overview=True` draws the whole picture
    made smaller, which the model reads beside them.
    """
    stored = [name for name in ("raw", "lower", "upper", "effective", "null") if name in getattr(result, "arrays", ())]
    check_drawable("image_overlay", result, ["raw", *stored], axes=("key",))
    names = known_names("maps", _default_maps(stored) if maps is None else maps, stored)
    picture, patches = _picture_and_patches(result, image, overview)
    positions = result.axis("key").values
    if not all(patch.position in positions for patch in patches):
        raise InputError("Cannot draw image_overlay: some of the image's tokens are not selected. Select no keys.")
    columns = [positions.index(patch.position) for patch in patches]
    visible = read_table(result, "visible", "key")[columns] if "visible" in result.arrays else True
    weights = {}
    for name in names:
        weights[name] = np.where(visible, read_table(result, name, "key")[columns].astype(float), np.nan)
    raw = read_table(result, "raw", "key")[columns]
    sinks = [patch.box for patch, weight in zip(patches, raw, strict=True) if weight > SINK * raw.sum()]
    panels = _panels("image_overlay", axes, len(names), picture)
    with house_style():
        _draw(panels, picture, [patch.box for patch in patches], weights)
        for panel in panels:
            for x, y, x_end, y_end in sinks:
                panel.plot((x + x_end) / 2, (y + y_end) / 2, "x", color=BLUE, markersize=5, markeredgewidth=1.2)
    return panels


def _picture_and_patches(result: Result, image: int, overview: bool | None) -> tuple[ShownImage, list[Patch]]:
    """Return the image that is drawn, and its patches: those of its tiles, if it has any, or those of all of it."""
    images = pictures(result)
    picture = images[whole_number("image", image, most=len(images) - 1)]
    tiles = any(not patch.overview for patch in picture.patches)
    small = not tiles if overview is None else flag("overview", overview)
    patches = [patch for patch in picture.patches if patch.overview == small]
    if not patches:
        raise InputError("Cannot draw image_overlay: the image is not cut into tiles. Leave overview= out.")
    return picture, patches


def _default_maps(stored: Sequence[str]) -> list[str]:
    ends = [name for name in ("raw", "lower", "upper") if name in stored]
    return ends if len(ends) == 3 else [name for name in ("raw", "effective") if name in stored]


def _panels(plot: str, axes: Iterable[Axes] | None, count: int, picture: ShownImage) -> Panels:
    if axes is not None:
        return panels_of(plot, axes, count)
    width = SINGLE if count == 1 else DOUBLE
    return new_axes(width, 0.5 + 0.9 * width / count * min(picture.height / picture.width, 2.0), columns=count)


def _draw(panels: Panels, picture: ShownImage, boxes: Sequence[Box], weights: Mapping[str, Cells]) -> None:
    pixels = imread(io.BytesIO(picture.jpeg), format="jpeg")
    grey = 255 - _FADED * (255 - pixels.mean(-1))
    numbers = np.concatenate(list(weights.values()))
    scale = around_zero(numbers) if np.nanmin(numbers, initial=0.0) < 0 else from_zero(numbers)
    rectangles = [Rectangle(box[:2], box[2] - box[0], box[3] - box[1]) for box in boxes]
    drawn = None
    for axes, (name, cells) in zip(panels, weights.items(), strict=True):
        axes.imshow(grey, cmap="gray", vmin=0, vmax=255, extent=(0, picture.width, picture.height, 0))
        drawn = PatchCollection(rectangles, cmap=scale.colours, alpha=0.62, linewidths=0)
        drawn.set_array(np.ma.masked_invalid(cells))
        drawn.set_clim(scale.least, scale.most)
        axes.add_collection(drawn)
        total = float(np.nansum(cells))
        together = "" if name == "upper" else f" ({percent(total)} in all)"  # upper ends do not add up
        axes.set_title(f"{_WORDS.get(name, name)}{together}", loc="left")
        axes.set(xlim=(0, picture.width), ylim=(picture.height, 0), xticks=[], yticks=[])
        axes.set_aspect("equal")
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
    assert drawn is not None, "an overlay without a map"
    colour_bar(drawn, panels, scale, WEIGHT)  # pyright: ignore[reportArgumentType]
