"""Tiny random models that read images inside a text, with what reads for them: no network, no weights on disk."""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers as hf
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from identikit.models.model import Model
from identikit.texts.pictures import ImageReader, PictureSource
from tests.models import tiny

_TILES = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
SPECIAL = [
    "<image>", "<|image_pad|>", "<start_of_image>", "<image_soft_token>", "<end_of_image>", "<IMG_CONTEXT>", "<img>",
    "</img>", "<video>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *_TILES,
]  # fmt: skip
IDS = {token: tiny.VOCABULARY + place for place, token in enumerate(SPECIAL)}
VOCABULARY = tiny.VOCABULARY + len(SPECIAL) + 1  # odd, so that no shape fits by chance
QUESTION = "w5 w6 w7"
# As people's templates write them: a word for the role, the images where they stand, and the words.
TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %} w50 {% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "PLACEHOLDER{% else %} {{ part['text'] }}{% endif %}{% endfor %} w51{% endfor %}"
    "{% if add_generation_prompt %} w52{% endif %}"
)
_TEXT = {
    "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 24,
    "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40, "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}  # fmt: skip
_ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]}}
_SEES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
_CLIP = _SEES | {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8}
_QWEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 24}
_TILED = _SEES | {"image_size": 16, "patch_size": 4}


class Pictured(NamedTuple):
    """A tiny model by its class, its configuration, its placeholder, and its image processor."""

    name: str
    config: dict[str, Any]
    placeholder: str
    processor: hf.BaseImageProcessor

    def build(self, dtype: torch.dtype) -> hf.PreTrainedModel:
        torch.manual_seed(0)
        made = getattr(hf, self.name)
        return tiny.drawn(made(made.config_class(**self.config)).eval(), dtype=dtype)


def _qwen(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    ids = {"image_token_id": IDS["<|image_pad|>"], "video_token_id": IDS["<video>"]}
    return {"text_config": _TEXT | _ROTARY | text, "vision_config": vision, **ids}


def _idefics3(model_type: str) -> dict[str, Any]:
    return {
        "text_config": _TEXT | {"model_type": "llama"},
        "vision_config": _TILED | {"model_type": f"{model_type}_vision"},
        "scale_factor": 2,
        "image_token_id": IDS["<image>"],
    }


_MERGING = hf.Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 512})
_CUTTING = hf.Idefics3ImageProcessorPil(size={"longest_edge": 48}, max_image_size={"longest_edge": 16})
BUILDERS = {
    "llava": Pictured(
        "LlavaForConditionalGeneration",
        {
            "text_config": _TEXT | {"model_type": "llama"},
            "vision_config": _CLIP,
            "image_token_index": IDS["<image>"],
        },
        "<image>",
        hf.LlavaImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
    ),
    "idefics3": Pictured("Idefics3ForConditionalGeneration", _idefics3("idefics3"), "<image>", _CUTTING),
    "smolvlm": Pictured("SmolVLMForConditionalGeneration", _idefics3("smolvlm"), "<image>", _CUTTING),
    "qwen2_vl": Pictured(
        "Qwen2VLForConditionalGeneration",
        _qwen({}, {"depth": 1, "embed_dim": 16, "hidden_size": 24, "num_heads": 2, "patch_size": 4}),
        "<|image_pad|>",
        _MERGING,
    ),
    "qwen2_5_vl": Pictured(
        "Qwen2_5_VLForConditionalGeneration",
        _qwen({}, _QWEN | {"window_size": 16, "fullatt_block_indexes": []}),
        "<|image_pad|>",
        _MERGING,
    ),
    "qwen3_vl": Pictured(
        "Qwen3VLForConditionalGeneration",
        _qwen({"head_dim": 6}, _QWEN | {"deepstack_visual_indexes": [0]}),
        "<|image_pad|>",
        _MERGING,
    ),
    "gemma3": Pictured(
        "Gemma3ForConditionalGeneration",
        {
            "text_config": _TEXT | {"head_dim": 8, "sliding_window": 12, "sliding_window_pattern": 2},
            "vision_config": _TILED | {"image_size": 32},
            "mm_tokens_per_image": 16,
            "boi_token_index": IDS["<start_of_image>"],
            "eoi_token_index": IDS["<end_of_image>"],
            "image_token_index": IDS["<image_soft_token>"],
        },
        "<start_of_image>",
        hf.Gemma3ImageProcessorPil(size={"height": 32, "width": 32}),
    ),
    "internvl": Pictured(
        "InternVLForConditionalGeneration",
        {
            "text_config": _TEXT | {"model_type": "qwen2"},
            "vision_config": _SEES | {"image_size": [16, 16], "patch_size": [4, 4]},
            "image_token_id": IDS["<IMG_CONTEXT>"],
            "downsample_ratio": 0.5,
        },
        "<IMG_CONTEXT>",
        hf.GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, max_patches=6),
    ),
}
NAMES = list(BUILDERS)


def tokenizer(name: str) -> hf.PreTrainedTokenizerFast:
    """Return a word tokenizer with the special tokens of all these families, named as this one's processor asks."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, tiny.VOCABULARY)} | IDS
    backend = Tokenizer(models.WordLevel(words, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
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
    reader = ImageReader(made.processor, written)
    model.images = PictureSource(model.family.images, model.hf.config, model.tokenizer, reader)
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
