"""The pictures of a text in a Result: where each token of an image is, and tokens of an image by region."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from identikit.checks import as_float, flag, is_collection, shortened, whole_number
from identikit.errors import InputError
from identikit.results.result import Result

Box = tuple[float, float, float, float]
SINK = 0.3  # of an image's attention: a patch that takes more is marked as a sink


@dataclass(frozen=True)
class Patch:
    """A token of an image: its position in the text, and what it shows of the picture, in pixels.

    - `row`, `column`: as in its name
    - `overview`: it is of the whole picture, made smaller, beside tiles of it
    - `box`: left, top, right, bottom
    """

    position: int
    row: int
    column: int
    overview: bool
    box: Box

    def is_inside(self, box: Box) -> bool:
        """Whether its middle is in a box."""
        across = (self.box[0] + self.box[2]) / 2
        down = (self.box[1] + self.box[3]) / 2
        return box[0] <= across < box[2] and box[1] <= down < box[3]


@dataclass(frozen=True)
class ShownImage:
    """An image of a text: its `number`, its size in pixels, a small copy of it as a JPEG, and its tokens."""

    number: int
    width: int
    height: int
    jpeg: bytes
    patches: tuple[Patch, ...]


def pictures(result: Result) -> list[ShownImage]:
    """Return the images of a Result's text; refuse one that has none."""
    listed = result.about.get("images") if isinstance(result, Result) else None
    if not listed:
        what = result.a_kind if isinstance(result, Result) else shortened(result)
        raise InputError(f"Reading the images of {what}: its text has none. Pass a Result of (image, question).")
    if result.about.get("words", ()) is None:
        raise InputError("Reading the images of a text: this result was gathered into words. Use it before words().")
    found = []
    for number, entry in enumerate(listed):
        width, height = entry["size"]
        patches = tuple(patch for view in entry["views"] for patch in _patches(view))
        found.append(ShownImage(number, width, height, base64.b64decode(entry["picture"]), patches))
    return found


def _patches(view: Mapping[str, Any]) -> Iterator[Patch]:
    left, top, right, bottom = view["box"]
    wide = (right - left) / view["columns"]
    high = (bottom - top) / view["rows"]
    down, across = view["from"]
    for order, position in enumerate(view["tokens"]):
        row, column = divmod(order, view["columns"])
        box = (left + column * wide, top + row * high, left + (column + 1) * wide, top + (row + 1) * high)
        yield Patch(position, down + row, across + column, view["overview"], box)


def image_regions(
    result: Result,
    *,
    grid: Sequence[int] | None = None,
    box: Sequence[float] | None = None,
    image: int | None = None,
    overview: bool | None = None,
) -> dict[str, list[int]]:
    """Return tokens of images by region, as `groups=` of `attention_intervals` takes them.

    Without `grid` and `box`, each image is a group. A token belongs to the region that has the middle of its patch;
    regions without a token are left out.

    - `grid`: (rows, columns) of even regions, named by row and column
    - `box`: (left, top, right, bottom) in pixels of the picture: its tokens, and those around it
    - `image`: only this image, counted from 0
    - `overview`: of an image that is cut into tiles, only the tokens of the whole picture made smaller, or, if False,
      only those of the tiles; None: all of them
    """
    found = pictures(result)
    if grid is not None and box is not None:
        raise InputError("image_regions takes one of grid= and box=.")
    if image is not None:
        found = [found[whole_number("image", image, most=len(found) - 1)]]
    if overview is not None:
        overview = flag("overview", overview)
    regions: dict[str, list[int]] = {}
    for picture in found:
        patches = [patch for patch in picture.patches if overview is None or patch.overview == overview]
        for name, wanted in _boxes(picture, grid, box).items():
            inside = [patch.position for patch in patches if wanted is None or patch.is_inside(wanted)]
            regions[f"image {picture.number}{name}"] = inside
            if box is not None:
                around = [patch.position for patch in patches if patch.position not in inside]
                regions[f"image {picture.number} around it"] = around
    kept = {name: positions for name, positions in regions.items() if positions}
    if not kept:
        raise InputError("image_regions: no token of the image is there. Ask for a larger region.")
    return kept


def _boxes(picture: ShownImage, grid: Any, box: Any) -> dict[str, Box | None]:
    """Return the regions of a picture that are asked for; None: all of it."""
    if box is not None:
        left, top, right, bottom = map(float, _listed("box", box, ("left", "top", "right", "bottom")))
        if not (left < right and top < bottom):
            raise InputError(f"box={shortened(box)} cannot be used: expected left < right and top < bottom.")
        return {" in the box": (left, top, right, bottom)}
    if grid is None:
        return {"": None}
    rows, columns = (whole_number("grid", count, least=1) for count in _listed("grid", grid, ("rows", "columns")))
    high = picture.height / rows
    wide = picture.width / columns
    return {
        f" region {row},{column}": (column * wide, row * high, (column + 1) * wide, (row + 1) * high)
        for row in range(rows)
        for column in range(columns)
    }


def _listed(name: str, given: object, what: Sequence[str]) -> list[Any]:
    """Return several numbers; refuse anything else."""
    listed = list(given) if is_collection(given) else []
    if len(listed) != len(what) or any(as_float(value) is None for value in listed):
        raise InputError(f"{name}={shortened(given)} cannot be used: expected ({', '.join(what)}).")
    return listed
