"""Batches with their texts, and what a replaced head output changes, in words."""

import pytest
import torch
from PIL import Image

from identikit.errors import InputError
from identikit.models.text_run import Change, run_texts
from tests.models import tiny


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Change(0.0, None), "left the final hidden states bit-identical"),
        (Change(0.0, 0.0), "left the final hidden states and the logits bit-identical"),
        (Change(3.2e-7, None), "changed the final hidden states by 3e-7 (relative to the largest entry)"),
        (
            Change(0.31, 2e-12),
            "changed the final hidden states by 0.3 and the logits by 2e-12 (relative to the largest entry)",
        ),
        (
            Change(1e-3, 0.0),
            "changed the final hidden states by 0.001 (relative to the largest entry) and left the logits "
            "bit-identical",
        ),
    ],
)
def test_a_change_in_words(change: Change, words: str):
    assert change.words() == words


def test_a_change_is_measured():
    model = tiny.loaded("llama")
    (reading,) = run_texts(model, "w5 w6 w7", layers=())
    assert reading.changed_by(lambda call: None).words().startswith("left the final hidden states and the")
    found = reading.changed_by(lambda call: call.output * 1.5)
    assert found.logits is not None and min(found) > 1e-3
    assert found.words().startswith("changed the final hidden states by ")


def test_readings_come_in_the_order_of_their_texts():
    model = tiny.loaded("llama")
    texts = ["w5 w6", ("w7", "w8 w9"), [5, 6, 7], "w5 w6 w7 w8 w9 w10"]
    found = run_texts(model, texts, layers=(1,))
    assert [reading.text for reading in found] == ["w5 w6", ("w7", "w8 w9"), (5, 6, 7), texts[3]]
    assert [reading.batch.lengths for reading in found] == [(4,), (6,), (3,), (8,)]
    for reading in found:
        (alone,) = run_texts(model, reading.text, layers=(1,))
        torch.testing.assert_close(reading.calls[1].output, alone.calls[1].output)
    cut = run_texts(model, texts, layers=(), truncate=True, max_tokens=5)
    assert [len(reading.tokens) for reading in cut] == [4, 5, 3, 5]
    with pytest.raises(InputError, match=r"texts\[1\]: it has 6 tokens and max_tokens allows at most 5"):
        run_texts(model, texts[:3], layers=(), max_tokens=5)


def test_images_cannot_be_cut():
    model = tiny.loaded("vit")
    image = Image.new("RGB", (20, 20))
    (encoded,) = model.encode(image, truncate=True, max_tokens=17)
    assert len(encoded) == 17 and str(encoded.text).startswith("image ")
    with pytest.raises(InputError, match=r"makes 17 tokens of it, and max_tokens allows 16\. An image cannot be cut"):
        model.encode(image, truncate=True, max_tokens=16)
