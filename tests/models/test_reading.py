"""Batches with their texts, and what a replaced head output changes, in words."""

import pytest
import transformers as hf

from identikit.errors import InputError
from identikit.models.load.load import load
from identikit.models.reading import Change, encoded_batches, readings
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
    (reading,) = readings(model, "w5 w6 w7", layers=())
    assert reading.changed_by(lambda call: None).words().startswith("left the final hidden states and the")
    found = reading.changed_by(lambda call: call.output * 1.5)
    assert found.logits is not None and min(found) > 1e-3
    assert found.words().startswith("changed the final hidden states by ")


def test_batches_come_with_their_texts():
    model = tiny.loaded("llama")
    texts = ["w5 w6", ("w7", "w8 w9"), [5, 6, 7], "w5 w6 w7 w8 w9 w10"]
    ((batch, found),) = encoded_batches(model, texts, truncate=False)
    assert found == [texts[3], texts[1], "w5 w6", (5, 6, 7)]
    assert batch.order == (3, 1, 0, 2) and batch.lengths == (8, 6, 4, 3)
    ((cut, _),) = encoded_batches(model, texts, truncate=True, max_tokens=5)
    assert cut.lengths == (5, 5, 4, 3)
    with pytest.raises(InputError, match=r"texts\[1\]: it has 6 tokens and max_tokens allows at most 5"):
        list(encoded_batches(model, texts[:3], truncate=False, max_tokens=5))


def test_images_cannot_be_cut():
    from PIL import Image

    model = load(tiny.build("vit"), hf.ViTImageProcessorPil(size={"height": 16, "width": 16}))
    image = Image.new("RGB", (20, 20))
    ((batch, found),) = encoded_batches(model, image, truncate=True, max_tokens=17)
    assert batch.lengths == (17,) and str(found[0]).startswith("image ")
    with pytest.raises(InputError, match=r"makes 17 tokens of it, and max_tokens allows 16\. An image cannot be cut"):
        list(encoded_batches(model, image, truncate=True, max_tokens=16))
