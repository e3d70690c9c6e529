"""Tiny random models that read images inside a text, with what reads for them: no network, no weights on disk."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers as hf
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from identikit.models.model import Model
from identikit.texts.pictures import ImageTextEncoder
from tests.models import tiny

QUESTION = "w5 w6 w7"
# As people's templates write them: a word for the role, the images where they stand, and the words.
TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %} w50 {% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "PLACEHOLDER{% else %} {{ part['text'] }}{% endif %}{% endfor %} w51{% endfor %}"
    "{% if add_generation_prompt %} w52{% endif %}"
)
_MERGING = hf.Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 512})
_CUTTING = hf.Idefics3ImageProcessorPil(size={"longest_edge": 48}, max_image_size={"longest_edge": 16})


class Pictured(NamedTuple):
    """A tiny model by its name in `tiny`, its placeholder, and its image processor."""

    name: str
    placeholder: str
    processor: hf.BaseImageProcessor

    def build(self, dtype: torch.dtype) -> hf.PreTrainedModel:
        return tiny.build(self.name, dtype=dtype)


BUILDERS = {
    "llava": Pictured(
        "llava",
        "<image>",
        hf.LlavaImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
    ),
    "idefics3": Pictured("idefics3", "<image>", _CUTTING),
    "smolvlm": Pictured("smolvlm", "<image>", _CUTTING),
    "qwen2_vl": Pictured("qwen2_vl", "<|image_pad|>", _MERGING),
    "qwen2_5_vl": Pictured("qwen2_5_vl", "<|image_pad|>", _MERGING),
    "qwen3_vl": Pictured("qwen3_vl", "<|image_pad|>", _MERGING),
    "gemma3": Pictured(
        "gemma3-images", "<start_of_image>", hf.Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    ),
    "internvl": Pictured(
        "internvl", "<IMG_CONTEXT>", hf.GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, max_patches=6)
    ),
}
NAMES = list(BUILDERS)


def tokenizer(name: str) -> hf.PreTrainedTokenizerFast:
    """Return a word tokenizer with the special tokens of all these families, named as this one's processor asks."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, tiny.VOCABULARY)} | tiny.IMAGE_IDS
    backend = Tokenizer(models.WordLevel(words, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tiny.IMAGE_IDS])
    image_token = "<image_soft_token>" if name == "gemma3" else BUILDERS[name].placeholder
    named = {
        "image_token": image_token, "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
        "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }  # fmt: skip
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="w3",
        extra_special_tokens=named,
    )  # fmt: skip


def loaded(name: str, *, dtype: torch.dtype = torch.float64, template: bool = True) -> Model:
    """Return a tiny model under the tap, with its image processor."""
    made = BUILDERS[name]
    written = TEMPLATE.replace("PLACEHOLDER", made.placeholder) if template else None
    model = Model(made.build(dtype), tokenizer(name), name=f"tiny {name}")
    assert model.family.images is not None
    model.images = ImageTextEncoder(model.family.images, model.hf.config, model.tokenizer, made.processor, written)
    return model


@cache
def shared(name: str) -> Model:
    """Return a tiny model, built once for all tests that only read it."""
    return loaded(name)


def picture(width: int = 90, height: int = 60, seed: int = 0) -> Image.Image:
    """Return a random picture that is not square."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def saved(name: str, folder: Path) -> Path:
    """Write a tiny model to a folder as its checkpoint would be, and return the folder."""
    made = BUILDERS[name]
    made.build(torch.float32).save_pretrained(folder)
    reads = tokenizer(name)
    reads.chat_template = TEMPLATE.replace("PLACEHOLDER", made.placeholder)
    reads.save_pretrained(folder)
    made.processor.save_pretrained(folder)
    return folder
