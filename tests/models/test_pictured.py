"""Images inside a text: each family's own attention, its processor's tokens, and their places on the picture."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from PIL import Image
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

import identikit as ik
from identikit.attention.captured import capture
from identikit.attention.effective import attention_of
from identikit.models.model import Model
from identikit.models.partial_run import run_from
from identikit.models.text_run import run_texts
from identikit.results.pictures import pictures
from identikit.texts.text import collate
from tests.models import pictured
from tests.models.state import state_of

FLOAT = torch.float64
_SIZES = {"llava": (96, 64), "gemma3": (96, 64)} | dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), (24, 16))


def size_of(name: str) -> tuple[int, int]:
    """Return the size of a picture that a tiny model reads without cutting through pixels, and that is not square."""
    return _SIZES.get(name, (48, 32))


def of_vision(name: str) -> bool:
    return any(part in name for part in ("vision_tower", "vision_model", "visual"))


@pytest.mark.parametrize("name", pictured.NAMES)
def test_attention_is_the_stock_models_own(name: str, monkeypatch: pytest.MonkeyPatch):
    """The model as transformers runs it, eager, given what its own processor gives, and every map that it returns."""
    model = pictured.shared(name)
    attention = ik.effective_attention(model, (pictured.picture(*size_of(name)), pictured.QUESTION))
    stock = pictured.BUILDERS[name].build(FLOAT)
    stock.set_attn_implementation("eager")
    softmax = torch.nn.functional.softmax  # which eager attention casts to float32
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda scores, dim=-1, dtype=None: softmax(scores, dim=dim))
    images = [pictured.picture(*size_of(name))]
    made = dict(own_processor(name)(images=images, text=prompt(name), return_tensors="pt"))
    made = {key: value.to(FLOAT) if value.is_floating_point() else value for key, value in made.items()}
    with torch.no_grad():
        output = stock(**made, output_attentions=True)
    assert len(output.attentions) == 3
    own = torch.cat(output.attentions)
    assert own.shape == attention.raw.shape
    assert (own - attention.raw).abs().max() < 1e-12
    change = attention.verify()
    assert change.hidden < 1e-10 and change.logits is not None and change.logits < 1e-10
    assert (attention.raw.sum(-1) - 1).abs().max() < 1e-6


def prompt(name: str) -> str:
    placeholder = pictured.BUILDERS[name].placeholder
    return f"<s> w50 {placeholder} {pictured.QUESTION} w51 w52"


def own_processor(name: str) -> Any:
    """Return the family's processor of transformers; those that also want videos, and torchvision, do without here."""
    tokenizer = pictured.tokenizer(name)
    tokenizer.backend_tokenizer.post_processor = None  # the prompt has its <s> already
    processor = pictured.BUILDERS[name].processor
    if name == "llava":
        return hf.LlavaProcessor(
            processor, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1
        )
    if name in ("idefics3", "smolvlm"):  # SmolVLM's says the same, and wants a package for numbers in words
        return hf.Idefics3Processor(processor, tokenizer, image_seq_len=4)
    if name == "gemma3":
        return hf.Gemma3Processor(processor, tokenizer, image_seq_length=16)
    bases = {"internvl": hf.InternVLProcessor, "qwen3_vl": Qwen3VLProcessor}

    class WithoutVideos(bases.get(name, hf.Qwen2VLProcessor)):  # pyright: ignore
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
            pass

    more = {"image_seq_length": 4} if name == "internvl" else {}
    made = WithoutVideos(processor, tokenizer, None, **more)
    made.__class__.__name__ = bases.get(name, hf.Qwen2VLProcessor).__name__
    return made


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", pictured.NAMES)
def test_ids_and_pixels_are_those_of_the_familys_processor(name: str, count: int):
    model = pictured.shared(name)
    width, height = size_of(name)
    images = [pictured.picture(width, height, seed=1), pictured.picture(height, width, seed=2)][:count]
    string = prompt(name) if count == 1 else prompt(name).replace("w6", f"w8 {pictured.BUILDERS[name].placeholder} w6")
    (encoded,) = model.encode((images, string.removeprefix("<s> ")))
    made = own_processor(name)(images=images, text=string, return_tensors="pt")
    assert list(encoded.ids) == made["input_ids"][0].tolist()
    assert encoded.images is not None
    for key, tensor in encoded.images.arguments.items():
        assert torch.equal(tensor, torch.as_tensor(made[key])), key
    assert {*made} - {*encoded.images.arguments} <= {"input_ids", "attention_mask", "rows", "cols", "num_patches"}
    assert len(encoded.images.about) == count


@pytest.mark.parametrize("name", pictured.NAMES)
def test_a_change_of_the_picture_moves_the_tokens_that_are_said_to_be_there(name: str):
    """Where the vision tower cannot attend, pixels in the middle of a token's box move its vector, and no other.

    The picture is not square and boxes are not either, so that rows and columns that are swapped show.
    """
    check_places(pictured.loaded(name), size_of(name))


@pytest.mark.parametrize(
    ("width", "height", "options"),
    [
        (64, 96, {}),
        (64, 48, {"do_pad": True}),
        (48, 64, {"do_pad": True, "size": {"height": 32, "width": 32}, "do_center_crop": False}),
        (96, 64, {"size": {"height": 32, "width": 32}, "do_center_crop": False}),
        (48, 40, {"do_resize": False}),
    ],
)
def test_pictures_that_are_cropped_padded_or_pressed_are_placed(width: int, height: int, options: dict[str, Any]):
    model = pictured.loaded("llava")
    usual = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    assert model.images is not None
    processor = hf.LlavaImageProcessorPil(**usual | options)
    model.images = replace(model.images, processor=processor)
    check_places(model, (width, height))


def check_places(model: Model, size: tuple[int, int]) -> None:
    with torch.no_grad():
        for key, weight in model.hf.named_parameters():
            if of_vision(key) and key.endswith(("out_proj.weight", "attn.proj.weight", "projection_layer.weight")):
                weight.zero_()
    picture = Image.new("RGB", size, (90, 120, 150))

    def entering(image: Image.Image) -> torch.Tensor:
        (encoded,) = model.encode((image, pictured.QUESTION))
        return model.trace(collate([encoded], pad_id=0)).inputs[0]

    (found,) = pictures(ik.effective_attention(model, (picture, pictured.QUESTION)))
    before = entering(picture)
    fine = [patch for patch in found.patches if not patch.overview] or list(found.patches)
    assert len({(patch.row, patch.column) for patch in fine}) == len(fine) >= 6
    for patch in fine:
        left, top, right, bottom = patch.box
        third = ((right - left) / 3, (bottom - top) / 3)
        if left < 0 or top < 0 or right > size[0] or bottom > size[1]:
            continue  # padding
        middle = (round(left + third[0]), round(top + third[1]), round(right - third[0]), round(bottom - third[1]))
        changed = picture.copy()
        changed.paste((250, 20, 60), middle)
        moved = (entering(changed) - before).abs().amax(-1)
        places = [each.position for each in fine]
        assert [place for place in places if moved[place]] == [patch.position], patch
        small = [each for each in found.patches if each.overview]  # where filters of resizing reach the neighbours
        if small:
            at = (middle[0] + middle[2]) / 2, (middle[1] + middle[3]) / 2
            most = max(small, key=lambda each: float(moved[each.position]))
            assert most.box[0] <= at[0] < most.box[2] and most.box[1] <= at[1] < most.box[3], patch


def test_the_tiny_models_cut_pictures_into_more_columns_than_rows():
    """So that the tests here would see rows and columns that are swapped."""
    for name in ("idefics3", "smolvlm", "internvl"):
        (found,) = pictures(ik.effective_attention(pictured.shared(name), (pictured.picture(48, 32), "w5")))
        fine = [patch for patch in found.patches if not patch.overview]
        assert max(patch.row for patch in fine) == 3 and max(patch.column for patch in fine) == 5


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "gemma3"])
def test_who_sees_whom_is_the_models_own(name: str):
    """Causal, but for Gemma 3's image tokens, which see one another: also in the layers with a window."""
    attention = ik.effective_attention(pictured.shared(name), (pictured.picture(*size_of(name)), pictured.QUESTION))
    n = len(attention.tokens)
    image = torch.tensor([token.startswith("<image ") for token in attention.tokens])
    together = (image[:, None] & image) if name == "gemma3" else torch.zeros(n, n, dtype=torch.bool)
    for layer in range(3):
        near = torch.ones(n, n, dtype=torch.bool)
        if name == "gemma3" and layer != 1:
            offset = torch.arange(n)[:, None] - torch.arange(n)
            near = offset < 6
        expected = (torch.ones(n, n, dtype=torch.bool).tril() | together) & near
        assert torch.equal(attention.sel(layer=layer).visible, expected)
    assert attention.about["causal"] is (name != "gemma3")


def test_a_model_with_pictures_leaves_as_it_came():
    for name in pictured.NAMES:
        model = pictured.loaded(name)
        before = state_of(model.hf), model.fingerprint
        attention = ik.effective_attention(model, (pictured.picture(*size_of(name)), pictured.QUESTION))
        attention.verify()
        assert state_of(model.hf) == before[0], name
        assert not any(torch.is_tensor(getattr(module, "rope_deltas", None)) for module in model.hf.modules()), name
        model.check_unchanged(before[1])


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_attribution_to_image_tokens_is_what_autograd_says(name: str):
    """Norms of the Jacobian of the last token's vectors by each token's input vector, image tokens included."""
    model = pictured.shared(name)
    text = (pictured.picture(*size_of(name)), pictured.QUESTION)
    found = ik.token_attribution(model, text)
    (reading,) = run_texts(model, text, layers=())
    assert reading.trace is not None
    x = reading.trace.inputs

    def last(vectors: torch.Tensor) -> torch.Tensor:
        return run_from(model, reading.batch, vectors).hidden[0, -1]

    jacobian = torch.autograd.functional.jacobian(last, x)[:, 0]
    norms = jacobian.square().sum((0, 2)).sqrt()
    expected = norms / norms.sum()
    assert (found.contribution[-1, :, -1] - expected).abs().max() < 1e-5  # norms in float32 inside the model
    named = [place for place, token in enumerate(found.tokens) if token.startswith("<image ")]
    assert expected[named].sum() > 0.05


def test_a_target_is_attributed_to_image_tokens():
    model = pictured.shared("llava")
    text = (pictured.picture(96, 64), pictured.QUESTION)
    found = ik.token_attribution(model, text, target="prediction")
    assert found.tokens == ik.effective_attention(model, text).tokens


# Loading


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "smolvlm", "internvl"])
def test_a_folder_brings_what_reads_its_images(name: str, tmp_path: Path):
    model = ik.load(pictured.saved(name, tmp_path))
    text = (pictured.picture(*size_of(name)), pictured.QUESTION)
    again = ik.effective_attention(pictured.loaded(name, dtype=torch.float32), text)
    attention = ik.effective_attention(model, text)
    assert attention.tokens == again.tokens and (attention.raw - again.raw).abs().max() < 1e-6
    assert attention.provenance.text == again.provenance.text
    assert model.encode("w5 w6")[0].tokens == ("<s>", "w5", "w6")
    assert model.recipe is not None and model.recipe.load().images is not None


def test_a_model_in_memory_takes_its_processor():
    processor = own_processor("llava")
    model = ik.load((pictured.BUILDERS["llava"].build(torch.float32), processor))
    assert model.tokenizer is processor.tokenizer
    picture = pictured.picture(96, 64)
    attention = ik.effective_attention(model, (picture, f"w50 <image> {pictured.QUESTION}"))
    assert sum(token.startswith("<image 0:") for token in attention.tokens) == 16


def test_without_a_processor_only_texts_are_read(tmp_path: Path):
    alone = ik.load(pictured.BUILDERS["llava"].build(torch.float32), pictured.tokenizer("llava"))
    assert ik.effective_attention(alone, "w5 w6").tokens == ("<s>", "w5", "w6")
    with pytest.raises(ik.InputError, match=r"loaded without an image processor\. Load the model with its processor"):
        ik.effective_attention(alone, (pictured.picture(), "w5"))
    pictured.saved("llava", tmp_path)
    (tmp_path / "preprocessor_config.json").unlink(missing_ok=True)
    (tmp_path / "processor_config.json").unlink(missing_ok=True)
    model = ik.load(tmp_path)
    assert ik.effective_attention(model, "w5 w6").tokens == ("<s>", "w5", "w6")
    with pytest.raises(ik.InputError, match="its image processor cannot be read"):
        ik.effective_attention(model, (pictured.picture(), "w5"))


def test_a_model_that_reads_images_wrong_is_refused():
    """The proof on the first text with images compares the tap with the model's own run."""
    model = pictured.loaded("llava")
    (text_run,) = run_texts(model, (pictured.picture(), "w5"), layers=(0,))
    read = attention_of(capture(text_run, layers=(0,), heads=(0,)))
    assert read.raw.shape[-1] == len(read.tokens) and model.proof_with_images is model.proof
    broken = pictured.loaded("llava")
    tower = broken.hf.get_submodule("model.multi_modal_projector")
    own = tower.forward
    calls = []

    def drifting(features: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return own(features) * len(calls)

    tower.forward = drifting
    with pytest.raises(ik.ModelError, match="output with the tap, padded, is the model's own, alone"):
        ik.effective_attention(broken, (pictured.picture(), "w5"))
