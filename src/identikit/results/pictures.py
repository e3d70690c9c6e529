"""The images of a text in a Result: where each of their tokens is, and their tokens by region."""

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
    - `overview`: it shows the whole picture, made smaller, beside tiles of it
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
        name = result.a_kind if isinstance(result, Result) else shortened(result)
        raise InputError(f"Reading the images of {name}: its text has none. Pass a Result of (image, question).")
    if result.about.get("words", ()) is None:
        raise InputError("Reading the images of a text: this result was gathered into words. Use it before words().")
    images = []
    for number, entry in enumerate(listed):
        width, height = entry["size"]
        patches = tuple(patch for view in entry["views"] for patch in _patches(view))
        images.append(ShownImage(number, width, height, base64.b64decode(entry["picture"]), patches))
    return images


def _patches(view: Mapping[str, Any]) -> Iterator[Patch]:
    x, y, x_end, y_end = view["box"]
    width = (x_end - x) / view["columns"]
    height = (y_end - y) / view["rows"]
    first_row, first_column = view["from"]
    for index, position in enumerate(view["tokens"]):
        row, column = divmod(index, view["columns"])
        box = (x + column * width, y + row * height, x + (column + 1) * width, y + (row + 1) * height)
        yield Patch(position, first_row + row, first_column + column, view["overview"], box)


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
    images = pictures(result)
    if grid is not None and box is not None:
        raise InputError("image_regions takes one of grid= and box=.")
    if image is not None:
        images = [images[whole_number("image", image, most=len(images) - 1)]]
    if overview is not None:
        overview = flag("overview", overview)
    regions: dict[str, list[int]] = {}
    for picture in images:
        patches = [patch for patch in picture.patches if overview is None or patch.overview == overview]
        for name, region in _boxes(picture, grid, box).items():
            inside = [patch.position for patch in patches if region is None or patch.is_inside(region)]
            regions[f"image {picture.number}{name}"] = inside
            if box is not None:
                around = [patch.position for patch in patches if patch.position not in inside]
                regions[f"image {picture.number} around it"] = around
    regions = {name: positions for name, positions in regions.items() if positions}
    if not regions:
        raise InputError("image_regions: no token of the image is there. Ask for a larger region.")
    return regions


def _boxes(picture: ShownImage, grid: Any, box: Any) -> dict[str, Box | None]:
    """Return the selected regions of a picture by the end of their names; None: all of it."""
    if box is not None:
        x, y, x_end, y_end = map(float, _checked_numbers("box", box, ("left", "top", "right", "bottom")))
        if not (x < x_end and y < y_end):
            raise InputError(f"box={shortened(box)} cannot be used: expected left < right and top < bottom.")
        return {" in the box": (x, y, x_end, y_end)}
    if grid is None:
        return {"": None}
    counts = _checked_numbers("grid", grid, ("rows", "columns"))
    rows, columns = (whole_number("grid", count, least=1) for count in counts)
    height = picture.height / rows
    width = picture.width / columns
    return {
        f" region {row},{column}": (column * width, row * height, (column + 1) * width, (row + 1) * height)
        for row in range(rows)
        for column in range(columns)
    }


def _checked_numbers(option: str, value: object, expected: Sequence[str]) -> list[Any]:
    numbers = list(value) if is_collection(value) else []
    if len(numbers) != len(expected) or any(as_float(number) is None for number in numbers):
        raise InputError(f"{option}={shortened(value)} cannot be used: expected ({', '.join(expected)}).")
    return numbers
