"""Images inside a text as tokens: names, marks, chats and prompts, and each mistake with its message."""

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

import identikit as ik
from identikit.texts.text import batches, repeat_batch, single_text
from tests.models import pictured, tiny

PHOTO = pictured.picture()


def encode(text: Any, name: str = "llava") -> Any:
    return pictured.shared(name).encode(text)[0]


def test_image_tokens_are_named_by_row_and_column_and_the_rest_is_the_chat():
    encoded = encode((pictured.picture(24, 16), "w5 w6"), "qwen2_vl")
    grid = [f"<image 0:{row},{column}>" for row in range(2) for column in range(3)]
    assert encoded.tokens == ("<s>", "w50", *grid, "w5", "w6", "w51", "w52")
    assert encoded.special == (True, True, *[False] * 6, False, False, True, True)  # the template's words are special
    assert [encoded.tokens[first:last] for first, last in encoded.words] == [("w5",), ("w6",)]
    assert [encoded.parts[0][start:stop] for _, start, stop in encoded.characters] == ["w5", "w6"]


def test_tiles_make_one_grid_and_the_whole_picture_is_an_overview():
    for name in ("idefics3", "internvl"):
        encoded = encode((pictured.picture(48, 32), "w5"), name)
        tiles = {f"<image 0:{row},{column}>" for row in range(4) for column in range(6)}
        whole = {f"<image 0 overview:{row},{column}>" for row in range(2) for column in range(2)}
        assert {token for token in encoded.tokens if token.startswith("<image 0")} == tiles | whole
        second = encoded.tokens.index("<image 0:0,2>")  # the tile beside the first follows it as a whole
        assert encoded.tokens.index("<image 0:1,1>") < second < encoded.tokens.index("<image 0:2,0>")


def test_a_picture_of_one_tile_has_no_overview():
    encoded = encode((pictured.picture(8, 8), "w5"), "internvl")
    assert [token for token in encoded.tokens if "image" in token][:2] == ["<image 0:0,0>", "<image 0:0,1>"]


def test_the_ways_to_write_one_question_agree(tmp_path: Path):
    path = tmp_path / "photo.png"
    PHOTO.save(path)
    asked = [
        (PHOTO, "w5 w6"),
        (str(path), "w5 w6"),
        (path, "w5 w6"),
        ([PHOTO], "w5 w6"),
        [{"role": "user", "content": [{"type": "image", "image": PHOTO}, {"type": "text", "text": "w5 w6"}]}],
        [{"role": "user", "content": [{"type": "image", "path": str(path)}, {"type": "text", "text": "w5 w6"}]}],
        (PHOTO, "w50 <image> w5 w6 w51 w52"),
    ]
    found = [encode(text) for text in asked]
    for each in found:
        assert each.tokens == found[0].tokens and str(each.text) == str(found[0].text)
    assert [each.special == found[0].special for each in found] == [True] * 6 + [False]  # a prompt's words are its own
    assert str(encode((PHOTO.rotate(90), "w5 w6")).text) != str(found[0].text)
    assert encode(found[0].text).tokens == found[0].tokens  # a result's text can be read again


def test_several_images_stand_where_they_were_put():
    content = [
        {"type": "text", "text": "w5"},
        {"type": "image", "image": pictured.picture(24, 16)},
        {"type": "text", "text": "w6 w5"},
        {"type": "image", "image": pictured.picture(16, 24)},
        {"type": "text", "text": "w7"},
    ]
    answer = {"role": "assistant", "content": "w8"}
    encoded = encode([{"role": "user", "content": content}, answer, {"role": "user", "content": "w9"}], "qwen2_vl")
    first = [f"<image 0:{row},{column}>" for row in range(2) for column in range(3)]
    second = [f"<image 1:{row},{column}>" for row in range(3) for column in range(2)]
    words = ["w51", "w50", "w8", "w51", "w50", "w9", "w51", "w52"]
    assert encoded.tokens == ("<s>", "w50", "w5", *first, "w6", "w5", *second, "w7", *words)
    own = [token for token, special in zip(encoded.tokens, encoded.special, strict=True) if not special]
    assert own == ["w5", *first, "w6", "w5", *second, "w7", "w8", "w9"]


def test_a_chat_without_images_goes_through_the_same_template():
    parts = encode([{"role": "user", "content": [{"type": "text", "text": "w5 w6"}]}])
    plain = encode([{"role": "user", "content": "w5 w6"}])
    assert plain.tokens == parts.tokens == ("<s>", "w50", "w5", "w6", "w51", "w52")
    assert plain.images is None and plain.text == ({"role": "user", "content": "w5 w6"},)
    assert ik.effective_attention(pictured.shared("gemma3"), list(plain.text)).about["causal"]


def test_marks_end_where_the_callers_words_end():
    """Beside tokens of the template without a space between, so that a character more or less would show."""
    model = pictured.loaded("llava")
    assert model.images is not None
    tight = (
        "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
        "{% else %}<img>{{ part['text'] }}</img>{% endif %}{% endfor %}{% endfor %}"
    )
    model.images = replace(model.images, chat_template=tight)
    image = {"type": "image", "image": PHOTO}
    words = [{"type": "text", "text": "w5 w6"}, {"type": "text", "text": "w7"}]
    (encoded,) = model.encode([{"role": "user", "content": [words[0], image, words[1], image, words[0]]}])
    own = [token for token, special in zip(encoded.tokens, encoded.special, strict=True) if not special]
    assert [token for token in own if "image" not in token] == ["w5", "w6", "w7", "w5", "w6"]
    assert encoded.tokens.count("<img>") == encoded.tokens.count("</img>") == 3


@pytest.mark.parametrize("size", [(48, 32), (90, 20), (20, 90), (16, 16), (33, 31), (64, 16), (17, 40)])
def test_tiles_stand_as_the_image_processor_cuts_them(size: tuple[int, int]):
    for name in ("internvl", "idefics3"):
        (kept,) = encode((pictured.picture(*size), "w5"), name).images.about
        rows = 1 + max(view["from"][0] // view["rows"] for view in kept["views"])
        columns = 1 + max(view["from"][1] // view["columns"] for view in kept["views"])
        processor = pictured.BUILDERS[name].processor
        if name == "internvl":
            assert (columns, rows) == get_optimal_tiled_canvas((size[1], size[0]), (16, 16), 1, 6)
        else:
            made = processor([pictured.picture(*size)], return_row_col_info=True)  # pyright: ignore
            assert (rows, columns) == (max(1, made["rows"][0][0]), max(1, made["cols"][0][0]))
        boxes = [view["box"] for view in kept["views"] if not view["overview"]]
        area = sum((right - left) * (bottom - top) for left, top, right, bottom in boxes)
        assert abs(area - size[0] * size[1]) < 1e-6


def test_without_a_template_images_stand_before_the_question():
    model = pictured.loaded("qwen2_vl", template=False)
    (encoded,) = model.encode((pictured.picture(24, 16), "w5 w6"))
    assert encoded.tokens[:2] == ("<s>", "<image 0:0,0>") and encoded.tokens[-2:] == ("w5", "w6")
    assert encoded.special == (True, *[False] * 8)


def test_a_pair_of_texts_stays_a_pair():
    assert not pictured.shared("llava").images.accepts(("w5", "w6"))  # pyright: ignore
    (plain,) = pictured.shared("llava").encode("w5 w6")
    assert plain.images is None and plain.tokens == ("<s>", "w5", "w6")


def test_a_dataset_is_known_by_its_pictures_and_not_by_their_paths(tmp_path: Path):
    model = pictured.shared("llava")
    path = tmp_path / "photo.png"
    PHOTO.save(path)
    before = model.provenance_texts([(str(path), "w5"), "w5 w6"])
    PHOTO.rotate(180).save(path)
    after = model.provenance_texts([(str(path), "w5"), "w5 w6"])
    assert before[0] != after[0] and before[1] == after[1] == "w5 w6"


def test_texts_with_images_are_batches_of_their_own():
    model = pictured.shared("llava")
    encoded = model.encode(["w5 w6", (PHOTO, "w5"), (PHOTO, "w6"), "w7 w8"])
    made = list(batches(encoded, pad_id=0))
    assert sorted(batch.order for batch in made) == [(0, 3), (1,), (2,)]
    alone = next(batch for batch in made if batch.order == (1,))
    assert single_text(alone, 0).images is alone.images
    twice = repeat_batch(alone, 2)
    hidden = model.trace(twice).hidden[-1]
    assert torch.allclose(hidden[1], model.trace(alone).hidden[-1][0], atol=1e-9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (PHOTO, r"the text: it is an image without a question\. Pass \(image, question\), or messages="),
        ((PHOTO, ""), "the question is '', expected some words"),
        ((PHOTO, 3), "the question is 3, expected some words"),
        (("nowhere.png", "w5"), "there is no file 'nowhere.png'. The model reads images"),
        ((Path(__file__), "w5"), r"cannot be read as an image \(UnidentifiedImageError\). Pass a PNG or JPEG"),
        ((PHOTO, "<image> w5 <image>"), r"its prompt has 2 placeholders '<image>' for 1 image\. Write one for each"),
        (([PHOTO, PHOTO], "w5 <image>"), "its prompt has 1 placeholder '<image>' for 2 images"),
        ([{"role": "user", "content": [{"type": "video"}]}], "is no message: .* of the type 'text' or 'image'"),
        ([{"role": "user", "content": [{"type": "image", "image": PHOTO}]}], "the message of 'user' is blank"),
        (
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "w5"}]}],
            "got NoneType, expected a",
        ),
        (
            [{"role": "user", "content": [{"type": "image", "image": PHOTO}, {"type": "text", "text": "<image> w5"}]}],
            "its prompt has 2 placeholders '<image>' for 1 image",
        ),
        ([{"role": "user", "content": 7}], "the content of a message is 7, expected a string, or a list of"),
        ([{"role": "user", "content": ["w5"]}], "expected a string, or a list of"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(given: Any, message: str):
    with pytest.raises(ik.InputError, match=message) as caught:
        pictured.shared("llava").encode(given)
    assert "\n" not in str(caught.value)


def test_an_image_is_never_cut():
    model = pictured.shared("llava")
    with pytest.raises(ik.InputError, match="with its images it has 23 tokens and max_tokens allows at most 9"):
        model.encode((PHOTO, pictured.QUESTION), truncate=True, max_tokens=9)


@pytest.mark.parametrize("given", [PHOTO, (PHOTO, "w5")])
def test_a_model_of_texts_refuses_images(given: Any):
    with pytest.raises(ik.InputError, match="it is or holds an image, and this model reads only texts"):
        ik.effective_attention(tiny.shared("llama"), given)


def test_a_tokenizer_that_spells_other_images_is_refused():
    model = pictured.loaded("llava")
    assert model.images is not None
    longer = replace(model.images.kind, spell=lambda token, *others: token * 17)
    model.images = replace(model.images, kind=longer)
    with pytest.raises(ik.InputError, match="the tokenizer spells 17 tokens of images, and the images have 16"):
        model.encode((PHOTO, "w5"))


def test_what_a_result_keeps_of_an_image():
    attention = ik.effective_attention(pictured.shared("llava"), (PHOTO, "w5"))
    (kept,) = attention.about["images"]
    assert kept["size"] == [90, 60] and len(kept["views"]) == 1
    assert kept["views"][0]["box"] == [15.0, 0.0, 75.0, 60.0]  # the middle square of the picture
    assert kept["views"][0]["tokens"] == list(range(2, 18))
    with Image.open(io.BytesIO(base64.b64decode(kept["picture"]))) as small:
        assert small.size == (90, 60)
