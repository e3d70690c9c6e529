"""The images of a text for the views: a small copy of each, where its tokens are on it, and what they get together."""

import torch

from identikit.attention.interval_result import AttentionIntervals
from identikit.explanation.result import Explanation
from identikit.results.pictures import SINK, ShownImage, pictures
from identikit.results.result import Result
from identikit.shapes import Float, Tensor
from identikit.web.file import File


def shown_images(result: Result) -> list[ShownImage]:
    """Return the images of a Result's text; none where it has none, or is by words."""
    if not result.about.get("images") or result.about.get("words", ()) is None:
        return []
    return pictures(result)


def add_images(file: File, result: Result) -> None:
    """Add the images of a text, and above which share of an image's attention a patch is a sink."""
    images = shown_images(result)
    if not images:
        return
    for number, image in enumerate(images):
        patches = image.patches
        arrays = {
            "jpeg": torch.frombuffer(bytearray(image.jpeg), dtype=torch.uint8),
            "position": torch.tensor([patch.position for patch in patches], dtype=torch.int32),
            "box": torch.tensor([patch.box for patch in patches], dtype=torch.float32).reshape(-1, 4),
            "overview": torch.tensor([patch.overview for patch in patches], dtype=torch.uint8),
        }
        file.arrays |= {f"image{number}.{name}": array for name, array in arrays.items()}
    file.about["images"] = [{"width": image.width, "height": image.height} for image in images]
    file.about["sink"] = SINK


def add_explained_totals(file: File, result: Explanation, lower: Float[Tensor, "row key"]) -> None:
    """Add what each image gets of every row that an explanation bounded."""
    images = shown_images(result)
    if images and result.bounded is not None:  # the groups of images are the last that were bounded
        _add_totals(file, images, result.bounded.bounded.groups[:, :, -len(images) :], lower)


def add_totals(file: File, result: AttentionIntervals, lower: Float[Tensor, "row key"]) -> None:
    """Add what the images get together of every row of intervals."""
    images = shown_images(result)
    if images and "image_raw" in result.source.dims:
        ends = [result.read(f"image_{name}").flatten() for name in result.main]
        together = ShownImage(0, 0, 0, b"", tuple(patch for image in images for patch in image.patches))
        _add_totals(file, [together], torch.stack(ends, 1)[..., None], lower)


def _add_totals(
    file: File, images: list[ShownImage], groups: Float[Tensor, "row 3 image"], lower: Float[Tensor, "row key"]
) -> None:
    """Add raw, lower and upper of some images, and what their patches get at least, added up."""
    positions_by_image = [[patch.position for patch in image.patches] for image in images]
    alone = torch.stack([lower[:, positions].sum(1) for positions in positions_by_image], -1)
    file.arrays["rows.images"] = torch.cat([groups.cpu(), alone.cpu()[:, None]], 1).float()
