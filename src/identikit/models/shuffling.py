"""A copy of a model whose last layers have forgotten what they learned; the model itself stays as it is."""

import zlib
from collections.abc import Iterator, Sequence
from copy import copy, deepcopy

import torch

from identikit.errors import ModelError
from identikit.models import families
from identikit.models.load.weights import is_packed
from identikit.models.model import Model


def shuffled_copies(model: Model, depths: Sequence[int], *, seed: int) -> Iterator[Model]:
    """Yield a copy of the model for each of the rising `depths`: that many of its last layers are shuffled.

    Each weight of a layer keeps its numbers, and so their distribution, in an order drawn from the seed. Embeddings and
    what follows the last layer stay. Layers that share their weights forget together. Every yield is the same object,
    shuffled further, under the fingerprint of the model itself: do not keep what is read from it as a result.
    """
    if any(weight.is_meta for weight in model.hf.parameters()) or any(map(is_packed, model.hf.modules())):
        raise ModelError(
            f"Shuffling the weights of {model.name}: they are offloaded or packed, and a plain copy of them is needed "
            "in memory. Load the model without device_map=, from plain weights, or leave out the test 'randomised'."
        )
    with model.exclusive():
        shuffled = copy(model)
        shuffled.hf = deepcopy(model.hf)
    shuffled.lock_module = families.find_all(shuffled.hf.base_model, model.family.blocks)[0]
    with shuffled.exclusive():
        shuffled._measure()  # its blocks are the copy's own from here on
    layer = model.n_layers
    for depth in depths:
        while layer > model.n_layers - depth:
            layer -= 1
            _shuffle(shuffled, layer, seed)
        yield shuffled


@torch.no_grad()
def _shuffle(model: Model, layer: int, seed: int) -> None:
    """Put the numbers of each of a layer's weights into another order."""
    for index, weight in enumerate(model.blocks[layer].parameters()):
        generator = torch.Generator().manual_seed(zlib.crc32(repr((seed, layer, index)).encode()))
        order = torch.randperm(weight.numel(), generator=generator).to(weight.device)
        weight.copy_(weight.flatten()[order].view_as(weight))
