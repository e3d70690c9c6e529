"""Models of several parts from memory and from folders, and the readers that fit them."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image

import identikit as ik
from identikit.__main__ import main
from tests.models import tiny
from tests.models.state import state_of

_SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
_TEXT = _SMALL | {"vocab_size": 60, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2}
_VISION = _SMALL | {"image_size": 16, "patch_size": 4}


def build(name: str) -> Any:
    """Return a tiny model of two towers."""
    torch.manual_seed(0)
    config = getattr(hf, f"{name}Config")(text_config=_TEXT, vision_config=_VISION)
    return getattr(hf, f"{name}Model")(config).eval()


def processor() -> Any:
    return hf.ViTImageProcessorPil(size={"height": 16, "width": 16})


PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8))


@pytest.mark.parametrize("name", ["CLIP", "Siglip"])
def test_each_tower_of_a_model_in_memory(name: str):
    whole = build(name)
    before = state_of(whole)
    text = ik.load(whole, tiny.tokenizer(), tower="text")
    assert text.name == f"{name}Model (text tower)" and text.causal == (name == "CLIP")
    attention = ik.effective_attention(text, "w5 w6 w7 w8 w9 w10 w11 w12")
    assert attention.tokens[1] == "w5" and attention.verify().hidden < 1e-5
    vision = ik.load((whole, processor()), tower="vision")
    attention = ik.effective_attention(vision, PHOTO)
    assert attention.tokens[0] == ("[CLS]" if name == "CLIP" else "r0c0")
    assert vision.fingerprint != text.fingerprint
    assert vision.hf is whole.vision_model
    assert state_of(whole) == before
    own = whole.vision_model(vision.encode(PHOTO)[0].features[None], output_hidden_states=True).hidden_states[-1]
    trace = vision.trace(next(vision.batches(vision.encode(PHOTO))))
    assert torch.allclose(trace.hidden[-1], own, atol=1e-5)


def test_a_tower_has_to_be_chosen_where_there_are_two():
    both = r"CLIPModel: it has a text tower and a vision tower"
    with pytest.raises(ik.InputError, match=rf"{both}\. Choose one with tower='text' or tower='vision'"):
        ik.load(build("CLIP"), tiny.tokenizer())
    with pytest.raises(ik.InputError, match=rf"{both}, and tower='image' is neither\. Choose one"):
        ik.load(build("CLIP"), tiny.tokenizer(), tower="image")
    with pytest.raises(ik.InputError, match=r"BertModel: tower='text', but it has no towers to choose from\. Leave"):
        ik.load(tiny.build("bert"), tiny.tokenizer(), tower="text")


def test_a_folder_gives_each_tower_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    """Through the command line as well: an image's path in the place of a text, and files of paths as datasets."""
    build("CLIP").save_pretrained(tmp_path / "clip")
    tiny.tokenizer().save_pretrained(tmp_path / "clip")
    text = ik.load(tmp_path / "clip", tower="text")
    assert text.name == "clip (text tower)" and text.encode("w5 w6")[0].tokens == ("<s>", "w5", "w6", "</s>")
    size = {"height": 16, "width": 16}
    hf.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=size).save_pretrained(tmp_path / "clip")
    PHOTO.save(tmp_path / "photo.png")
    PHOTO.rotate(90).save(tmp_path / "turned.png")
    (tmp_path / "paths.txt").write_text(f"{tmp_path / 'photo.png'}\n{tmp_path / 'turned.png'}\n")
    model = "--model", str(tmp_path / "clip"), "--tower", "vision"
    commands = [
        ("explain", str(tmp_path / "photo.png"), *model, "--seconds", "0.2"),
        ("attention", "--data", str(tmp_path / "paths.txt"), "--out", str(tmp_path / "attention"), *model),
        ("explain", str(tmp_path / "photo.png"), *model[:2]),
    ]

    def run(command: tuple[str, ...]) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["identikit", *command])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.err if ended.value.code else printed.out

    ends = [run(command) for command in commands]
    assert [status for status, _ in ends] == [0, 0, 1], ends
    explained, attention, refused = (words for _, words in ends)
    assert "clip (vision tower)" in explained and "In 2 texts" in attention
    assert "identikit: Loading CLIPModel: it has a text tower and a vision tower. Choose one" in refused
    PHOTO.rotate(180).save(tmp_path / "photo.png")
    status, words = run(commands[1])
    assert status == 1 and "another run, whose data.sha256 is" in words  # the paths are the same, the images are not


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_reader_that_needs_another_package_says_which(tmp_path: Path):
    """DINOv3 is the one family whose image processor transformers writes only for torchvision."""
    tiny.build("dinov3").save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "DINOv3ViTImageProcessorFast"}')
    with pytest.raises(ik.ModelError, match=r"requires the Torchvision library [^.]*\. Install it\.$"):
        ik.load(tmp_path)


def test_a_classifier_on_one_tower_is_read_through_it():
    config = hf.CLIPConfig(text_config=_TEXT, vision_config=_VISION, num_labels=3)
    model = ik.load(hf.CLIPForImageClassification(config).eval(), processor())
    assert model.modality == "image" and model.n_layers == 2


def test_an_encoder_and_decoder_of_sounds_is_read_by_its_encoder(tmp_path: Path):
    whole = tiny.build("whisper")
    extractor = tiny.reader("whisper")
    before = state_of(whole)
    model = ik.load(whole, extractor)
    assert model.hf is whole.model.encoder and model.modality == "sound" and state_of(whole) == before
    whole.save_pretrained(tmp_path)
    extractor.save_pretrained(tmp_path)  # pyright: ignore
    loaded = ik.load(tmp_path)
    sound = np.sin(np.arange(6000) / 9).astype(np.float32)
    attention = ik.effective_attention(model, sound)
    assert torch.allclose(attention.raw, ik.effective_attention(loaded, sound).raw, atol=1e-6)
    assert attention.verify().hidden < 1e-5


def test_a_processor_of_several_gives_the_one_that_fits():
    both = hf.CLIPProcessor(processor(), tiny.tokenizer())
    for tower, reader in (("text", both.tokenizer), ("vision", both.image_processor)):  # pyright: ignore
        assert ik.load(build("CLIP"), both, tower=tower).tokenizer is reader


@pytest.mark.parametrize(
    ("name", "reader", "message"),
    [
        ("vit", "bert", r"ViTModel from memory: it needs an image processor, and \w+ is not one"),
        ("bert", "vit", r"BertModel from memory: it needs a tokenizer, and ViTImageProcessorPil is not one"),
        ("whisper", "bert", r"it needs a feature extractor, and \w+ is not one\. Use load\(model, feature_extractor\)"),
    ],
)
def test_a_reader_of_another_kind_is_refused(name: str, reader: str, message: str):
    with pytest.raises(ik.InputError, match=message):
        ik.load(tiny.build(name), tiny.reader(reader))
