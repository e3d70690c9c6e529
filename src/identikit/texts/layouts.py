"""How families of models turn an image into tokens inside a text: grids, where they are on the picture, and spelling.

Each function follows the family's image processor and processor in transformers; the tests hold it against both.
"""

import math
from collections.abc import Sequence

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from identikit.texts.pictures import ImagesInText, ImageView, ProcessedImage


def _in_a_row(
    token: str, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, views: Sequence[ImageView]
) -> str:
    return token * sum(view.tokens for view in views)


# LLaVA: resized, perhaps padded to a square before, and cut to the middle


def _cropped(image: ProcessedImage) -> tuple[ImageView, ...]:
    """Return the middle of the picture that is left after resizing and cropping."""
    processor = image.processor
    cropped = image.outputs["pixel_values"][image.number].shape[-2:]
    original = (image.height, image.width)
    padding = (0.0, 0.0)  # above and at the left, in pixels of the picture
    if getattr(processor, "do_pad", False):
        side = max(original)
        padding = ((side - image.height) // 2, (side - image.width) // 2)
        original = (side, side)
    shortest = dict(processor.size).get("shortest_edge")
    resized = cropped
    if not processor.do_resize:
        resized = original
    elif shortest:
        resized = tuple(int(shortest * length / min(original)) for length in original)
    edges = []
    for axis in range(2):
        start = (resized[axis] - cropped[axis]) // 2
        stop = start + cropped[axis]
        edges.append([edge * original[axis] / resized[axis] - padding[axis] for edge in (start, stop)])
    (top, bottom), (left, right) = edges
    patch = image.config.vision_config.patch_size
    return (ImageView(cropped[0] // patch, cropped[1] // patch, (left, top, right, bottom)),)


LLAVA = ImagesInText(_cropped, _in_a_row)


# Idefics3 and SmolVLM: tiles of one size, row by row, and then the whole picture


def _tiles_and_overview(image: ProcessedImage) -> tuple[ImageView, ...]:
    vision = image.config.vision_config
    side = vision.image_size // vision.patch_size // image.config.scale_factor
    rows = [count for text in image.outputs["rows"] for count in text][image.number]
    columns = [count for text in image.outputs["cols"] for count in text][image.number]
    return (*_tiles(image, int(rows), int(columns), side), ImageView(side, side, image.box))


def _tiles(image: ProcessedImage, rows: int, columns: int, side: int) -> list[ImageView]:
    """Return the tiles of a picture that is cut evenly, each of `side` × `side` tokens."""
    views = []
    for row in range(rows):
        for column in range(columns):
            width = image.width / columns
            height = image.height / rows
            box = (column * width, row * height, (column + 1) * width, (row + 1) * height)
            views.append(ImageView(side, side, box, (row, column)))
    return views


def _tagged(
    token: str, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, views: Sequence[ImageView]
) -> str:
    """Return each tile after its row and column, a line for each row of tiles, and the whole picture after its tag."""
    around = "<fake_token_around_image>"
    spelled = ""
    for view, following in zip(views, [*views[1:], None], strict=True):
        if view.tile is None:
            spelled += f"{around}<global-img>{token * view.tokens}{around}"
            continue
        spelled += f"{around}<row_{view.tile[0] + 1}_col_{view.tile[1] + 1}>{token * view.tokens}"
        if following is None or following.tile is None:
            spelled += "\n\n"
        elif following.tile[0] > view.tile[0]:
            spelled += "\n"
    return spelled


IDEFICS3 = ImagesInText(
    _tiles_and_overview,
    _tagged,
    arguments=("pixel_values", "pixel_attention_mask"),
    options={"return_row_col_info": True},
)


# Qwen: resized to whole patches, of which neighbours are merged


def _merged(image: ProcessedImage) -> tuple[ImageView, ...]:
    _, height, width = (int(count) for count in image.outputs["image_grid_thw"][image.number])
    merge = image.config.vision_config.spatial_merge_size
    return (ImageView(height // merge, width // merge, image.box),)


QWEN = ImagesInText(_merged, _in_a_row, arguments=("pixel_values", "image_grid_thw"), type_argument="mm_token_type_ids")


# Gemma 3: resized to a square, whose patches are averaged; the tokens of an image see one another


def _averaged(image: ProcessedImage) -> tuple[ImageView, ...]:
    side = math.isqrt(image.config.mm_tokens_per_image)
    return (ImageView(side, side, image.box),)


def _between_lines(
    token: str, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, views: Sequence[ImageView]
) -> str:
    begin, end = (tokenizer.convert_ids_to_tokens(index) for index in (config.boi_token_index, config.eoi_token_index))
    return f"\n\n{begin}{_in_a_row(token, tokenizer, config, views)}{end}\n\n"


GEMMA3 = ImagesInText(
    _averaged,
    _between_lines,
    type_argument="token_type_ids",
    options={"do_pan_and_scan": False},
    placeholder="boi_token_index",
    bidirectional=True,
)


# InternVL: tiles of one size, row by row, and then, if there are several, the whole picture


def _tiles_and_thumbnail(image: ProcessedImage) -> tuple[ImageView, ...]:
    vision = image.config.vision_config
    side = round(vision.image_size[0] / vision.patch_size[0] * image.config.downsample_ratio)
    thumbnail = ImageView(side, side, image.box)
    tiles = int(image.outputs["num_patches"][image.number]) - 1
    if tiles == 0:
        return (thumbnail,)
    shape = image.width / image.height
    divisors = [columns for columns in range(1, tiles + 1) if tiles % columns == 0]
    columns = min(divisors, key=lambda columns: abs(shape - columns * columns / tiles))
    return (*_tiles(image, tiles // columns, columns, side), thumbnail)


def _between_tags(
    token: str, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, views: Sequence[ImageView]
) -> str:
    begin = getattr(tokenizer, "start_image_token", None) or "<img>"
    end = getattr(tokenizer, "end_image_token", None) or "</img>"
    return f"{begin}{_in_a_row(token, tokenizer, config, views)}{end}"


INTERNVL = ImagesInText(_tiles_and_thumbnail, _between_tags, options={"crop_to_patches": True})
