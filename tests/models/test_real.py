"""The contract of every family, on real pretrained weights: MiniLM, and a small causal model where there is one."""

from functools import partial

import pytest
import torch
from torch.func import jvp

import identikit as ik
from identikit.attribution.sweep import forward_mode
from identikit.models.model import Model
from identikit.texts.text import collate, text_alone
from tests.models.real import STORIES, needs_stories

TEXTS = ["Once upon a time, there was a little girl named Lily.", "The dog ran.", "A cat sat on the mat, and it slept."]


@pytest.fixture(scope="module", params=["minilm", pytest.param("stories", marks=needs_stories)])
def model(request: pytest.FixtureRequest) -> Model:
    return ik.load(None if request.param == "minilm" else STORIES)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_batch_is_one_by_one(model: Model, side: str):
    if side == "left" and not model.causal:
        pytest.skip("encoders have absolute positions and pad on the right")
    batch = collate(model.encode(TEXTS), pad_id=model.pad_id, side=side)
    together = model.trace(batch)
    for row, kept in enumerate(batch.keep):
        alone = model.trace(text_alone(batch, row))
        for layer in range(model.n_layers):
            assert relative(together.hidden[layer][row, kept], alone.hidden[layer][0]) < 1e-5


def test_blocks_come_apart(model: Model):
    """The derivative along a random tangent: through the two halves and attention, and through the whole block."""
    batch = collate(model.encode(TEXTS[0]), pad_id=model.pad_id)
    generator = torch.Generator().manual_seed(0)
    with model.split(batch) as split, forward_mode():
        for block in split.blocks:
            call = block.call
            x = block.input
            tangent = torch.randn(x.shape, generator=generator)

            def mix(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call=call) -> torch.Tensor:
                scores = query @ key.transpose(-1, -2) * call.scaling
                return torch.softmax(scores.masked_fill(~call.visible(), -torch.inf), -1) @ value

            parts, moved = jvp(block.pre, (x,), (tangent,))
            output, moved_output = jvp(mix, parts, moved)
            _, halves = jvp(block.post, (x, output), (tangent, moved_output))
            _, whole = jvp(partial(block.run, visitor=lambda call: None), (x,), (tangent,))
            assert relative(halves, whole) < 1e-4
