"""Images and sounds as features: tokens by patch and time, files of every kind, and each mistake with its message."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import (
    PreTrainedConfig,
    ViTImageProcessorPil,
    Wav2Vec2Config,
    Wav2Vec2FeatureExtractor,
    WhisperConfig,
    WhisperFeatureExtractor,
)

import identikit as ik
from identikit.errors import InputError
from identikit.models.families import FAMILIES
from identikit.texts.encoding import TokenLimit
from identikit.texts.features import FeatureReader, Images, encode_features
from identikit.texts.text import EncodedText, batches, collate, single_text
from tests.models import tiny

CONFIG = PreTrainedConfig(num_channels=3, image_size=8, patch_size=(4, 2))
WAVE = np.random.default_rng(0).standard_normal(400).astype(np.float32) / 10


def images(given: object, kind: Images | None = None, *, size: int = 8, keep: bool = True) -> list[EncodedText]:
    """Encode images for a model of 8 × 8 pixels, through a processor that makes `size` × `size` of them."""
    processor = ViTImageProcessorPil(size={"height": size, "width": size})
    source = FeatureReader(kind or Images(), processor, "pixel_values", CONFIG)
    return encode_features(source, given, TokenLimit(None, "no limit", truncate=False), keep=keep)


def test_images_become_patches(tmp_path: Path):
    path = tmp_path / "grey.png"
    Image.new("L", (12, 20), 255).save(path)
    encoded = images([path, Image.new("RGBA", (8, 8))])
    assert encoded[0].tokens == ("[CLS]", "r0c0", "r0c1", "r0c2", "r0c3", "r1c0", "r1c1", "r1c2", "r1c3")
    assert encoded[0].special == (True, *[False] * 8)
    batch = collate(encoded, pad_id=0)
    assert batch.ids is None and batch.segments is None and batch.features is not None
    assert batch.features.shape == (2, 3, 8, 8) and batch.keep.all()
    torch.testing.assert_close(batch.features[0], torch.ones(3, 8, 8))
    alone = single_text(batch, 1).features
    assert alone is not None and torch.equal(alone[0], batch.features[1])
    texts = [one.text for one in (*images(path), *encoded)]
    assert texts[0] == texts[1] != texts[2] and str(texts[0]).startswith("image ")  # told apart by their pixels


def test_one_image_and_no_prefix(tmp_path: Path):
    path = tmp_path / "one.png"
    Image.new("RGB", (8, 8)).save(path)
    (encoded,) = images(str(path), FAMILIES["siglip_vision_model"].features)
    assert encoded.tokens[0] == "r0c0" and not any(encoded.special)
    (dropped,) = images(str(path), keep=False)
    assert dropped.features is None and len(dropped) == 9


def test_a_photo_is_turned_as_its_camera_says(tmp_path: Path):
    photo = Image.new("RGB", (8, 8))
    photo.paste((255, 255, 255), (0, 0, 4, 8))  # left half white
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by 180 degrees
    photo.save(tmp_path / "photo.png", exif=exif)
    with Image.open(tmp_path / "photo.png") as opened:
        for one in images([tmp_path / "photo.png", opened]):
            assert one.features is not None
            assert one.features[0, 0].tolist() == [-1] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "list is empty"),
        (["nowhere.png"], r"images\[0\]: there is no file 'nowhere.png'. The model reads images"),
        ([None], r"images\[0\]: got NoneType"),
        (("a text", "a pair"), "the image: got tuple, expected a PIL image or the path of one"),
        (__file__, "cannot be read as an image"),
    ],
)
def test_images_that_cannot_be_read_are_named(given: Any, message: str):
    with pytest.raises(InputError, match=message):
        images(given)


def test_an_image_processor_of_another_size_is_refused():
    with pytest.raises(InputError, match="makes pixel_values of 3 × 16 × 16, and the model reads 3 × 8 × 8"):
        images(Image.new("RGB", (8, 8)), size=16)
    (encoded,) = images(Image.new("RGB", (8, 8)), Images(any_size=True), size=16)
    assert encoded.tokens[-1] == "r3c7"


def test_models_that_fit_their_positions_read_images_of_any_size():
    processor = ViTImageProcessorPil(size={"height": 24, "width": 16})
    model = ik.load(tiny.build("dinov2-registers"), processor)
    result = ik.effective_attention(model, Image.new("RGB", (30, 30), "red"))
    assert result.tokens[:4] == ("[CLS]", "reg0", "reg1", "r0c0") and result.tokens[-1] == "r5c3"
    assert result.about["special"] == [True] * 3 + [False] * 24


@pytest.mark.parametrize(("extra", "module"), [("vision", "PIL"), ("audio", "soundfile")])
def test_without_the_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch, extra: str, module: str):
    monkeypatch.setitem(sys.modules, module, None)
    model = tiny.loaded("vit" if extra == "vision" else "wav2vec2")
    with pytest.raises(InputError, match=re.escape(f"pip install 'identikit[{extra}]'")):
        model.encode("file")


# Sounds


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=4), st.integers(1, 300))
def test_tokens_of_a_sound_are_what_its_convolutions_make(layers: list[tuple[int, int]], samples: int):
    kernels, strides = zip(*layers, strict=True)
    first, step, _ = FAMILIES["wav2vec2"].features.window(PreTrainedConfig(conv_kernel=kernels, conv_stride=strides))  # pyright: ignore
    wave = torch.zeros(1, 1, samples)
    for kernel, stride in layers:
        if wave.shape[-1] < kernel:
            assert samples < first
            return
        wave = torch.nn.functional.conv1d(wave, torch.ones(1, 1, kernel), stride=stride)
    assert wave.shape[-1] == 1 + (samples - first) // step


def test_the_published_sizes():
    assert FAMILIES["wav2vec2"].features.window(Wav2Vec2Config()) == (400, 320, None)  # pyright: ignore
    assert FAMILIES["whisper"].features.window(WhisperConfig()) == (1, 320, 1500)  # pyright: ignore
    extractor = WhisperFeatureExtractor()
    made = extractor(np.zeros(16000, np.float32), sampling_rate=16000, return_tensors="pt")["input_features"][0]
    assert made.shape == FAMILIES["whisper"].features.shape(WhisperConfig())  # pyright: ignore


def test_tokens_are_named_by_time():
    (encoded,) = tiny.loaded("wav2vec2").encode(WAVE)
    assert encoded.tokens[:3] == ("0.0000s", "0.0005s", "0.0010s")  # 8 samples at 16,000 Hz
    assert len(encoded) == 48 and not any(encoded.special)
    (encoded,) = tiny.loaded("whisper").encode(np.tile(WAVE, 20))  # half a second
    assert encoded.tokens[:2] == ("0.00s", "0.02s") and encoded.tokens[-1] == "0.98s"
    assert encoded.special == (False,) * 25 + (True,) * 25  # the other half is silence that the extractor adds


def test_a_token_of_a_sound_rests_on_its_stretch_of_time():
    """Change the last samples: the convolutions' output changes at the last tokens and nowhere before."""
    model = tiny.loaded("wav2vec2-stable")
    normal = WAVE - WAVE.mean()
    moved = normal.copy()
    moved[-16:] += 1  # from sample 384 on; token 46 takes samples 368 to 387
    model.tokenizer = Wav2Vec2FeatureExtractor(do_normalize=False)
    seen: list[torch.Tensor] = []
    hook = model.hf.feature_extractor.register_forward_hook(lambda module, args, output: seen.append(output))
    for wave in (normal, moved):
        model.trace(collate(model.encode(wave), pad_id=0))
    hook.remove()
    changed = (seen[0] - seen[1]).abs().amax((0, 1)) > 0
    assert changed.shape == (48,) and changed.nonzero()[:, 0].tolist() == [46, 47]


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor, list, lambda wave: wave.astype(np.float64)])
def test_arrays_of_any_library_are_sounds(kind: Any):
    model = tiny.loaded("wav2vec2")
    (encoded,), (expected,) = model.encode(kind(WAVE)), model.encode(WAVE)
    assert torch.equal(encoded.features, expected.features) and encoded.text == expected.text  # pyright: ignore
    assert str(encoded.text).startswith("sound ")


@pytest.mark.parametrize(
    ("name", "rate", "channels"),
    [("sound.wav", 8000, 2), ("sound.flac", 44100, 1), ("sound.ogg", 44100, 2)],
)
def test_files_are_mixed_to_one_channel_and_resampled(tmp_path: Path, name: str, rate: int, channels: int):
    def tone(of: int) -> np.ndarray:
        return 0.4 * np.sin(2 * np.pi * 440 * np.arange(of) / of).astype(np.float32)  # one second

    both = np.stack([tone(rate) * 1.5, tone(rate) * 0.5])[:channels].T if channels == 2 else tone(rate)
    soundfile.write(tmp_path / name, both, rate)
    model = tiny.loaded("wav2vec2")
    model.tokenizer = Wav2Vec2FeatureExtractor(do_normalize=False)
    (encoded,), (expected,) = model.encode(tmp_path / name), model.encode(tone(16000))
    assert encoded.features is not None and expected.features is not None
    assert encoded.tokens == expected.tokens
    middle = slice(2000, 14000)  # resampling rings at both ends
    assert (encoded.features - expected.features)[middle].abs().max() < (0.02 if name.endswith("ogg") else 1e-3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("a text", "the sound: there is no file 'a text'. The model reads sounds"),
        (__file__, "cannot be read as sound. Pass a WAV"),
        (("a", "pair"), "got tuple, expected the path of a sound file, or a 1-D array"),
        (np.ones((2, 400)), r"an array of 2 dimensions, .* Mix channels to one first"),
        (np.full(400, np.nan, np.float32), "holds NaN or infinity"),
        (np.zeros(0, np.float32), "it is empty"),
        ([], "the list is empty"),
        (np.ones(400, np.int16), "its samples are int16, .* Divide 16-bit ones by 32768"),
        (torch.ones(400, dtype=torch.int16), "its samples are int16"),
        (WAVE[:19], r"it has 19 samples, and one token of the model takes 20 \(0.00125 s at 16,000 Hz\)"),
    ],
)
def test_sounds_that_cannot_be_read_are_named(given: Any, message: str):
    with pytest.raises(InputError, match=message):
        tiny.loaded("wav2vec2").encode(given)


def test_long_sounds_are_refused_or_cut():
    model, second = tiny.loaded("whisper"), np.tile(WAVE, 40)
    assert len(model.encode(second)[0]) == 50
    with pytest.raises(InputError, match="the sound: it has 51 tokens and the model reads at most 50"):
        model.encode(np.append(second, 0))
    (cut,), (whole,) = model.encode(np.append(second, 0), truncate=True), model.encode(second)
    assert torch.equal(cut.features, whole.features)  # pyright: ignore
    with pytest.raises(InputError, match="makes 50 tokens of every sound, and max_tokens allows 9"):
        model.encode(second, truncate=True, max_tokens=9)
    model = tiny.loaded("hubert")
    with pytest.raises(InputError, match="it has 48 tokens and max_tokens allows at most 9"):
        model.encode(WAVE, max_tokens=9)
    (cut,) = model.encode(WAVE, truncate=True, max_tokens=9)
    assert len(cut) == 9 and cut.features is not None and len(cut.features) == 84  # 20 samples, then 8 at a time


def test_a_feature_extractor_of_another_length_is_refused():
    model = tiny.loaded("whisper")
    model.tokenizer = WhisperFeatureExtractor(feature_size=8, chunk_length=2)
    with pytest.raises(InputError, match="makes input_features of 8 × 200, and the model reads 8 × 100"):
        model.encode(WAVE)


def test_sounds_are_never_padded():
    """Only sounds of one length share a batch: what a group norm makes of a sound depends on its padding."""
    model = tiny.loaded("wav2vec2")
    encoded = model.encode([WAVE[:100], WAVE, WAVE[:100] * 2, WAVE[:101]])
    made = list(batches(encoded, pad_id=0))
    assert [batch.order for batch in made] == [(1,), (0, 2), (3,)]
    results = ik.effective_attention(model, [WAVE[:100], WAVE, WAVE[:100] * 2])
    for wave, result in zip([WAVE[:100], WAVE], results, strict=False):
        alone = ik.effective_attention(model, wave)
        assert torch.allclose(result.raw, alone.raw, atol=1e-6)
        assert result.provenance.text == alone.provenance.text


# What every question makes of them


@pytest.fixture(scope="module", params=["clip-vision", "hubert"])
def read(request: pytest.FixtureRequest) -> tuple[Any, list[Any]]:
    """A model, and twenty images or sounds that it reads."""
    draw = np.random.default_rng(1)
    if request.param == "hubert":
        return tiny.loaded("hubert"), [draw.standard_normal(150 + 8 * n).astype(np.float32) for n in range(20)]
    pixels = (draw.integers(0, 256, (16, 16, 3), dtype=np.uint8) for _ in range(20))
    return tiny.loaded("clip-vision"), [Image.fromarray(one) for one in pixels]


def test_attention_intervals_and_alternatives(read: tuple[Any, list[Any]]):
    model, (first, *_) = read
    attention = ik.effective_attention(model, first)
    assert attention.null_dim.min() == len(attention.tokens) - model.d_value
    assert attention.verify().hidden < 1e-5
    edges = attention.intervals(layer=0, head=1, query=2)
    assert ((edges.lower <= edges.raw + 1e-6) & (edges.raw <= edges.upper + 1e-6)).all()
    assert ik.attention_intervals(model, first, layer=0, head=1, query=2).tokens == edges.tokens
    assert ik.alternative_attention(model, first, layer=0, head=1, query=2).output_change.hidden < 1e-4


def test_attribution(read: tuple[Any, list[Any]]):
    model, (first, second, *_) = read
    found = ik.token_attribution(model, [first, second], probes=4)
    assert [one.tokens for one in found] == [one.tokens for one in ik.effective_attention(model, [first, second])]
    exact = ik.token_attribution(model, first)
    assert torch.allclose(exact.contribution.sum(1), torch.ones(3, len(exact.tokens)), atol=1e-5)
    assert found[0].provenance.text == exact.provenance.text != found[1].provenance.text


def test_tokens_can_be_recovered(read: tuple[Any, list[Any]]):
    model, several = read
    fit = ik.token_identifiability(model, several, maps=["naive", "ridge"], distances="cosine")
    tokens = ik.effective_attention(model, several[0]).tokens
    assert fit.identity_map(several[0]).tokens == tokens
    explained = ik.explain(model, several[0], maps=fit, seconds=0.1)
    assert explained.identity.tokens == tokens


def test_explain_says_what_cannot_be_answered(read: tuple[Any, list[Any]]):
    model, (first, *_) = read
    told = str(ik.explain(model, first, seconds=0.1))
    assert f"The sample texts do not fit a model that reads {model.modality}s." in " ".join(told.split())
    with pytest.raises(InputError, match=f"reads {model.modality}s. Pass one"):
        ik.explain(model)
