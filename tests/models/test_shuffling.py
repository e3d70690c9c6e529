"""A copy of a model forgets layer by layer, and the model stays as it came."""

import pytest
import torch

from identikit.models.shuffling import shuffled_copies
from tests.models import tiny
from tests.models.state import state_of


@pytest.mark.parametrize("name", ["bert", "llama", "albert", "gpt2", "t5"])
def test_only_the_last_layers_of_a_copy_are_shuffled(name: str):
    model = tiny.shared(name)
    before = state_of(model.hf)
    batch = model.sample((7,))
    trace = model.trace(batch)
    depths = [1, model.n_layers]
    for depth, copy in zip(depths, shuffled_copies(model, depths, seed=3), strict=True):
        assert copy.hf is not model.hf and copy.n_layers == model.n_layers
        forgotten = copy.trace(batch)
        kept = 0 if name == "albert" else model.n_layers - depth  # its layers are one
        for layer in range(model.n_layers):
            assert torch.equal(forgotten.hidden[layer], trace.hidden[layer]) == (layer < kept)
        for old, new in zip(model.blocks[-1].parameters(), copy.blocks[-1].parameters(), strict=True):
            assert torch.equal(old.flatten().sort().values, new.flatten().sort().values)
    assert state_of(model.hf) == before
    again = [copy.trace(batch).hidden[-1] for copy in shuffled_copies(model, depths, seed=3)]
    assert torch.equal(again[-1], forgotten.hidden[-1])
    assert torch.equal(model.trace(batch).hidden[-1], trace.hidden[-1])
