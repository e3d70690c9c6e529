"""The table of families: what differs between architectures, one row each.

A row says where an architecture keeps its blocks and projections, and how it is tapped. `check.py` proves every row
against the module's own output. To support another architecture, add its row (CONTRIBUTING.md, 'Add a family').
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from operator import attrgetter

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from identikit.models.taps import own
from identikit.models.taps.switch import use_attention
from identikit.shapes import Tensor
from identikit.texts import layouts
from identikit.texts.features import Images, Sounds
from identikit.texts.pictures import ImagesInText

Limit = Callable[[PreTrainedConfig], int | None]
Refusal = Callable[[PreTrainedConfig], str | None]
Watcher = Callable[[nn.Module, Callable[[Tensor], None]], list[RemovableHandle]]
"""Called with a block and what to pass its output to; returns the hooks, which the caller removes at the end."""


def table_size(config: PreTrainedConfig) -> int:
    """Return the size of the table of positions."""
    return config.get_text_config().max_position_embeddings


def nothing(config: PreTrainedConfig) -> None:
    """Return None: there is no limit, or no reason to refuse."""
    return


@dataclass(frozen=True)
class Family:
    """One architecture: what it calls its parts, and what it does differently.

    - `blocks`: its blocks, from the base model; `*` stands for every entry of a list
    - `output`: the output projection, from the block: a linear layer, or a bare (d, head, d_v) parameter
    - `value`: the layer that makes the values, alone or last of query, key, value; None: bare parameters, no bias
    - `interleaved`: that layer holds, for each key-value head in turn, its queries, its key and its value
    - `instead`: what some blocks have in the place of softmax attention, from the block; None: every block attends
    - `embedding`: the module whose input is the embedding sum x; None: the first block
    - `positions`: takes `position_ids`, so that texts may be padded on the left
    - `limit`: how many tokens it has positions for
    - `causal`: a token sees only those before it
    - `by_place`: what a token does depends on its position in the batch, so that it cannot be run alone
    - `splits`: a block is post(x, mix(pre(x))) where mix is only the tap's softmax attention
    - `sequence_first`: its blocks put the sequence before the batch
    - `tap`: switches the tap in, and the model's own attention back at the end
    - `watch_output`: observes what a bare output projection makes; None: `output` is a module and can be watched
    - `stack`: the part that is read, from the base model, such as the encoder of two stacks; None: the whole model
    - `decoder`: the rows by which the other stack is read, by its attention to the target ("decoder") and to the first
      stack ("cross"); None: there is none
    - `reads`: where blocks attend twice, which of the two is read; None: they attend once
    - `features`: how it reads images or sounds; None: it reads texts
    - `images`: how it reads images inside a text; None: it reads none there
    - `refusal`: why a model with this configuration cannot be read; None: it can
    - `name`, `checkpoints`: what people call it, and hub ids that people know
    """

    blocks: str
    output: str
    value: str | None
    interleaved: bool = False
    instead: str | None = None
    embedding: str | None = None
    positions: bool = False
    limit: Limit = table_size
    causal: bool = False
    by_place: bool = False
    splits: bool = True
    sequence_first: bool = False
    tap: Callable[[PreTrainedModel], AbstractContextManager[None]] = use_attention
    watch_output: Watcher | None = None
    stack: str | None = None
    decoder: Mapping[str, "Family"] | None = None
    reads: int | None = None
    features: Images | Sounds | None = None
    images: ImagesInText | None = None
    refusal: Refusal = nothing
    name: str = ""
    checkpoints: tuple[str, ...] = ()

    def called(self, name: str, *checkpoints: str) -> "Family":
        """Return this row for the architecture that people call `name`, of which they know these hub ids."""
        return replace(self, name=name, checkpoints=checkpoints)


def _decoder(
    blocks: str,
    self_paths: tuple[str, str],
    cross_paths: tuple[str, str],
    *,
    embedding: str | None = None,
    limit: Limit = table_size,
) -> Mapping[str, Family]:
    """Return the rows of a decoder whose blocks attend to the target, and then to the source.

    `self_paths` and `cross_paths` lead to the output projection and the value layer of each of the two.
    """
    to_target = Family(blocks, *self_paths, embedding=embedding, limit=limit, causal=True, splits=False, reads=0)
    to_source = Family(blocks, *cross_paths, embedding=embedding, limit=limit, splits=False, reads=1)
    return {"decoder": to_target, "cross": to_source}


def _after_padding(config: PreTrainedConfig) -> int:
    return config.max_position_embeddings - config.pad_token_id - 1  # positions count up from the padding index


def _bigcode_refusal(config: PreTrainedConfig) -> str | None:
    if config.multi_query:
        return None
    return "its config says multi_query=False; only multi_query=True is supported, as in StarCoder and SantaCoder."


def _spectrogram(config: PreTrainedConfig) -> tuple[int, int, int]:
    return 1, 320, config.max_source_positions  # frames of 160 samples, and a convolution that takes every other


def _mel_bins(config: PreTrainedConfig) -> tuple[int, int]:
    return config.num_mel_bins, 2 * config.max_source_positions


def _convolutions(config: PreTrainedConfig) -> tuple[int, int, None]:
    """Return the samples under the first token, and from one to the next, of a stack of convolutions over samples."""
    first = 1
    step = 1
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        first += (kernel - 1) * step
        step *= stride
    return first, step, None


def _samples(config: PreTrainedConfig) -> tuple[int]:
    first, step, _ = _convolutions(config)
    return (first + 6 * step,)  # seven tokens


_BERT = Family("encoder.layer.*", "attention.output.dense", "attention.self.value", embedding="embeddings.LayerNorm")
_ROBERTA = replace(_BERT, limit=_after_padding)
_LLAMA = Family("layers.*", "self_attn.o_proj", "self_attn.v_proj", positions=True, causal=True)
_INSIDE = replace(_LLAMA, blocks="language_model.layers.*")  # the text model of a model that also reads images
_WITH_IMAGES = replace(_INSIDE, tap=own.text_model_only)  # the part that reads the images is not tapped
_QWEN_VL = replace(_WITH_IMAGES, images=layouts.QWEN)
_IDEFICS3 = replace(_WITH_IMAGES, blocks="text_model.layers.*", images=layouts.IDEFICS3)
_GPT2 = Family("h.*", "attn.c_proj", "attn.c_attn", positions=True, causal=True)
_HYBRID = replace(_LLAMA, instead="linear_attn", splits=False, tap=own.gated)
_MAMBA = replace(_LLAMA, instead="mamba", splits=False)
_T5 = Family(
    "block.*",
    "layer.0.SelfAttention.o",
    "layer.0.SelfAttention.v",
    limit=nothing,
    stack="encoder",
    decoder=_decoder(
        "decoder.block.*",
        ("layer.0.SelfAttention.o", "layer.0.SelfAttention.v"),
        ("layer.1.EncDecAttention.o", "layer.1.EncDecAttention.v"),
        limit=nothing,
    ),
)
_SUBLAYERS = (
    "decoder.layers.*",
    ("self_attn.out_proj", "self_attn.v_proj"),
    ("encoder_attn.out_proj", "encoder_attn.v_proj"),
)
_MARIAN = Family("layers.*", "self_attn.out_proj", "self_attn.v_proj", stack="encoder", decoder=_decoder(*_SUBLAYERS))
_BART = replace(
    _MARIAN,
    embedding="layernorm_embedding",
    decoder=_decoder(*_SUBLAYERS, embedding="decoder.layernorm_embedding"),
)
_VIT = Family("layers.*", "attention.o_proj", "attention.v_proj", limit=nothing, features=Images())
_DINO = replace(
    _VIT,
    blocks="encoder.layer.*",
    output="attention.o_proj|attention.output.dense",  # since transformers gave vision models one form, and before
    value="attention.v_proj|attention.attention.value",
    features=Images(any_size=True),
)
_CLIP = Family("encoder.layers.*", "self_attn.out_proj", "self_attn.v_proj")
_WAVES = Sounds(_convolutions, _samples)
_WAV2VEC2 = Family("encoder.layers.*", "attention.out_proj", "attention.v_proj", limit=nothing, features=_WAVES)

FAMILIES: dict[str, Family] = {
    "albert": Family(
        "encoder.albert_layer_groups.*.albert_layers.*",
        "attention.dense",
        "attention.value",
        embedding="embeddings.LayerNorm",
    ).called("ALBERT", "albert/albert-base-v2"),
    "apertus": _LLAMA.called("Apertus", "swiss-ai/Apertus-8B-Instruct-2509"),
    "arcee": _LLAMA.called("Arcee", "arcee-ai/AFM-4.5B"),
    "bart": _BART.called("BART", "facebook/bart-base", "facebook/bart-large-cnn"),
    "bert": _BERT.called("BERT", "google-bert/bert-base-uncased", "sentence-transformers/all-MiniLM-L6-v2"),
    "biogpt": replace(_LLAMA, output="self_attn.out_proj").called("BioGPT", "microsoft/biogpt"),
    "camembert": _ROBERTA.called("CamemBERT", "almanach/camembert-base"),
    "cohere": _LLAMA.called("Command R, Aya 23, Aya Expanse", "CohereLabs/c4ai-command-r-v01"),
    "cohere2": _LLAMA.called("Command R7B, Command A", "CohereLabs/c4ai-command-r7b-12-2024"),
    "data2vec-text": _ROBERTA.called("Data2Vec text", "facebook/data2vec-text-base"),
    "deepseek_v2": replace(_LLAMA, value=None).called("DeepSeek V2", "deepseek-ai/DeepSeek-V2-Lite"),
    "deepseek_v3": replace(_LLAMA, value=None).called(
        "DeepSeek V3, R1", "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-R1"
    ),
    "distilbert": Family(
        "transformer.layer.*", "attention.out_lin", "attention.v_lin", embedding="embeddings.LayerNorm"
    ).called("DistilBERT", "distilbert/distilbert-base-uncased"),
    "electra": _BERT.called("ELECTRA", "google/electra-base-discriminator"),
    "ernie": _BERT.called("ERNIE", "nghuyong/ernie-3.0-base-zh"),
    "ernie4_5": _LLAMA.called("ERNIE 4.5", "baidu/ERNIE-4.5-0.3B-PT"),
    "ernie4_5_moe": _LLAMA.called("ERNIE 4.5 MoE", "baidu/ERNIE-4.5-21B-A3B-PT"),
    "esm": replace(_BERT, embedding=None, limit=_after_padding).called(
        "ESM (proteins)", "facebook/esm2_t33_650M_UR50D"
    ),
    "eurobert": replace(_LLAMA, causal=False).called("EuroBERT", "EuroBERT/EuroBERT-210m"),
    "exaone4": _LLAMA.called("EXAONE 4", "LGAI-EXAONE/EXAONE-4.0-32B"),
    "falcon_h1": replace(_LLAMA, splits=False).called("Falcon-H1", "tiiuae/Falcon-H1-0.5B-Base"),
    "gemma": _LLAMA.called("Gemma", "google/gemma-2b", "google/gemma-7b"),
    "gemma2": _LLAMA.called("Gemma 2", "google/gemma-2-2b", "google/gemma-2-9b-it"),
    "gemma3": replace(_WITH_IMAGES, images=layouts.GEMMA3).called("Gemma 3, multimodal", "google/gemma-3-4b-it"),
    "gemma3_text": _LLAMA.called("Gemma 3, text", "google/gemma-3-270m", "google/gemma-3-1b-it"),
    "glm": _LLAMA.called("GLM-4 (2024)", "zai-org/glm-4-9b-chat-hf"),
    "glm4": _LLAMA.called("GLM-4 (2025)", "zai-org/GLM-4-9B-0414"),
    "glm4_moe": _LLAMA.called("GLM-4.5", "zai-org/GLM-4.5", "zai-org/GLM-4.5-Air"),
    "gpt2": _GPT2.called("GPT-2", "openai-community/gpt2", "distilbert/distilgpt2"),
    "gpt_bigcode": replace(_GPT2, refusal=_bigcode_refusal).called(
        "StarCoder, SantaCoder", "bigcode/starcoder", "bigcode/gpt_bigcode-santacoder"
    ),
    "gpt_neox": Family(
        "layers.*", "attention.dense", "attention.query_key_value", interleaved=True, positions=True, causal=True
    ).called("Pythia, GPT-NeoX", "EleutherAI/pythia-160m", "EleutherAI/gpt-neox-20b"),
    "gpt_oss": _LLAMA.called("gpt-oss", "openai/gpt-oss-20b", "openai/gpt-oss-120b"),
    "granite": _LLAMA.called("Granite", "ibm-granite/granite-3.0-8b-base"),
    "granite_swa": _LLAMA.called("Granite, sliding window"),
    "granitemoe": _LLAMA.called("Granite MoE", "ibm-granite/granite-3.0-1b-a400m-base"),
    "granitemoehybrid": _MAMBA.called("Granite 4", "ibm-granite/granite-4.0-h-tiny", "ibm-granite/granite-4.0-micro"),
    "granitemoeshared": _LLAMA.called("Granite MoE, shared expert", "ibm-research/moe-7b-1b-active-shared-experts"),
    "helium": _LLAMA.called("Helium", "kyutai/helium-1-preview-2b"),
    "hunyuan_v1_dense": _LLAMA.called("Hunyuan", "tencent/Hunyuan-7B-Instruct"),
    "idefics3": _IDEFICS3.called("Idefics3", "HuggingFaceM4/Idefics3-8B-Llama3"),
    "internvl": replace(_WITH_IMAGES, images=layouts.INTERNVL).called("InternVL 3", "OpenGVLab/InternVL3-1B-hf"),
    "jamba": replace(_MAMBA, positions=False, limit=nothing).called("Jamba", "ai21labs/Jamba-v0.1"),
    "lfm2": replace(_MAMBA, output="self_attn.out_proj", instead="conv").called(
        "LFM2", "LiquidAI/LFM2-350M", "LiquidAI/LFM2-1.2B"
    ),
    "llama": _LLAMA.called(
        "Llama, SmolLM2, TinyLlama, Yi, Vicuna", "meta-llama/Llama-3.1-8B", "HuggingFaceTB/SmolLM2-135M"
    ),
    # These two scale queries by their position in the batch, padding included.
    "llama4": replace(_LLAMA, blocks="language_model.model.layers.*", positions=False, by_place=True).called(
        "Llama 4 (its text model)", "meta-llama/Llama-4-Scout-17B-16E"
    ),
    "llama4_text": replace(_LLAMA, blocks="model.layers.*", positions=False, by_place=True).called("Llama 4, text"),
    "llava": replace(_WITH_IMAGES, images=layouts.LLAVA).called("LLaVA", "llava-hf/llava-1.5-7b-hf"),
    "m2m_100": _MARIAN.called("NLLB, M2M100", "facebook/nllb-200-distilled-600M"),
    "marian": _MARIAN.called("Marian", "Helsinki-NLP/opus-mt-en-de"),
    "mbart": _BART.called("mBART", "facebook/mbart-large-50-many-to-many-mmt"),
    "minimax_m2": _LLAMA.called("MiniMax-M2", "MiniMaxAI/MiniMax-M2"),
    "ministral": _LLAMA.called("Ministral", "mistralai/Ministral-8B-Instruct-2410"),
    "ministral3": _LLAMA.called("Ministral 3, text"),
    "mistral": _LLAMA.called("Mistral", "mistralai/Mistral-7B-v0.1"),
    "mistral3": _INSIDE.called(
        "Mistral Small 3, Ministral 3 (their text model)", "mistralai/Mistral-Small-3.1-24B-Instruct-2503"
    ),
    "mixtral": _LLAMA.called("Mixtral", "mistralai/Mixtral-8x7B-v0.1"),
    "modernbert": Family("layers.*", "attn.Wo", "attn.Wqkv", embedding="embeddings.norm").called(
        "ModernBERT", "answerdotai/ModernBERT-base"
    ),
    "mt5": _T5.called("mT5", "google/mt5-small"),
    "nemotron": _LLAMA.called("Minitron (Nemotron-4)", "nvidia/Minitron-8B-Base"),
    "nomic_bert": Family("layers.*", "self_attn.o_proj", "self_attn.v_proj", embedding="embeddings.LayerNorm").called(
        "NomicBERT", "nomic-ai/nomic-embed-text-v1.5"
    ),
    "olmo": _LLAMA.called("OLMo", "allenai/OLMo-1B-hf", "allenai/OLMo-7B-hf"),
    "olmo2": _LLAMA.called("OLMo 2", "allenai/OLMo-2-0425-1B", "allenai/OLMo-2-1124-7B"),
    "olmo3": _LLAMA.called("OLMo 3", "allenai/Olmo-3-7B-Instruct"),
    "olmoe": _LLAMA.called("OLMoE", "allenai/OLMoE-1B-7B-0924"),
    "opt": replace(_LLAMA, blocks="decoder.layers.*", output="self_attn.out_proj").called(
        "OPT", "facebook/opt-125m", "facebook/opt-1.3b"
    ),
    "pegasus": _MARIAN.called("Pegasus", "google/pegasus-xsum"),
    "phi": replace(_LLAMA, output="self_attn.dense").called("Phi-1, Phi-2", "microsoft/phi-1_5", "microsoft/phi-2"),
    "phi3": replace(_LLAMA, value="self_attn.qkv_proj").called(
        "Phi-3, Phi-4", "microsoft/Phi-3-mini-4k-instruct", "microsoft/phi-4"
    ),
    "phimoe": _LLAMA.called("Phi-3.5 MoE", "microsoft/Phi-3.5-MoE-instruct"),
    "qwen2": _LLAMA.called("Qwen 2, Qwen 2.5", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B-Instruct"),
    "qwen2_5_vl": _QWEN_VL.called("Qwen 2.5 VL", "Qwen/Qwen2.5-VL-7B-Instruct"),
    "qwen2_moe": _LLAMA.called("Qwen 1.5 MoE, Qwen 2 MoE", "Qwen/Qwen1.5-MoE-A2.7B"),
    "qwen2_vl": _QWEN_VL.called("Qwen 2 VL", "Qwen/Qwen2-VL-7B-Instruct"),
    "qwen3": _LLAMA.called("Qwen 3", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B"),
    "qwen3_5": replace(_HYBRID, blocks=_INSIDE.blocks).called("Qwen 3.5 (its text model)", "Qwen/Qwen3.5-27B"),
    "qwen3_5_moe": replace(_HYBRID, blocks=_INSIDE.blocks).called(
        "Qwen 3.5 MoE (its text model)", "Qwen/Qwen3.5-35B-A3B"
    ),
    "qwen3_5_moe_text": _HYBRID.called("Qwen 3.5 MoE, text"),
    "qwen3_5_text": _HYBRID.called("Qwen 3.5, text"),
    "qwen3_moe": _LLAMA.called("Qwen 3 MoE", "Qwen/Qwen3-30B-A3B"),
    "qwen3_next": _HYBRID.called("Qwen3-Next", "Qwen/Qwen3-Next-80B-A3B-Instruct"),
    "qwen3_vl": _QWEN_VL.called("Qwen 3 VL", "Qwen/Qwen3-VL-4B-Instruct"),
    "roberta": _ROBERTA.called("RoBERTa", "FacebookAI/roberta-base", "cardiffnlp/twitter-roberta-base"),
    "roberta-prelayernorm": _ROBERTA.called("RoBERTa-PreLN", "andreasmadsen/efficient_mlm_m0.40"),
    "seed_oss": _LLAMA.called("Seed-OSS", "ByteDance-Seed/Seed-OSS-36B-Instruct"),
    "smolvlm": _IDEFICS3.called("SmolVLM", "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"),
    "smollm3": _LLAMA.called("SmolLM3", "HuggingFaceTB/SmolLM3-3B"),
    "stablelm": _LLAMA.called("StableLM", "stabilityai/stablelm-2-1_6b", "stabilityai/stablelm-3b-4e1t"),
    "starcoder2": _LLAMA.called("StarCoder2", "bigcode/starcoder2-3b"),
    "t5": _T5.called("T5, Flan-T5", "google-t5/t5-small", "google/flan-t5-base"),
    "umt5": _T5.called("uMT5", "google/umt5-small"),
    "vaultgemma": _LLAMA.called("VaultGemma", "google/vaultgemma-1b"),
    "vit": _VIT.called("ViT", "google/vit-base-patch16-224"),
    "xlm-roberta": _ROBERTA.called("XLM-RoBERTa", "FacebookAI/xlm-roberta-base", "BAAI/bge-m3"),
    "xlm-roberta-xl": replace(_ROBERTA, embedding=None).called("XLM-RoBERTa XL", "facebook/xlm-roberta-xl"),
    "xlnet": Family(
        "layer.*",
        "rel_attn.o",
        None,
        limit=nothing,
        splits=False,
        sequence_first=True,
        tap=own.xlnet,
        watch_output=own.xlnet_output,
        refusal=own.xlnet_refusal,
    ).called("XLNet", "xlnet/xlnet-base-cased"),
    "bloom": Family(
        "h.*",
        "self_attention.dense",
        "self_attention.query_key_value",
        interleaved=True,
        embedding="word_embeddings_layernorm",
        limit=nothing,
        causal=True,
        tap=own.bloom,
        refusal=own.bloom_refusal,
    ).called("BLOOM", "bigscience/bloom-560m", "bigscience/bloomz-560m"),
    "deberta-v2": replace(
        _BERT, value="attention.self.value_proj", limit=own.deberta_limit, splits=False, tap=own.deberta
    ).called("DeBERTa v2, v3", "microsoft/deberta-v3-base", "microsoft/mdeberta-v3-base"),
    "falcon": Family(
        "h.*",
        "self_attention.dense",
        "self_attention.query_key_value",
        interleaved=True,
        positions=True,
        limit=own.falcon_limit,
        causal=True,
        tap=own.falcon,
        refusal=own.falcon_refusal,
    ).called("Falcon", "tiiuae/falcon-7b", "tiiuae/falcon-rw-1b"),
    "gptj": replace(_LLAMA, blocks="h.*", output="attn.out_proj", value="attn.v_proj", tap=own.gptj).called(
        "GPT-J", "EleutherAI/gpt-j-6b"
    ),
    "mpnet": replace(
        _BERT, output="attention.attn.o", value="attention.attn.v", limit=own.mpnet_limit, tap=own.mpnet
    ).called("MPNet", "sentence-transformers/all-mpnet-base-v2", "microsoft/mpnet-base"),
    "beit": replace(_VIT, tap=own.beit, features=Images(any_size=True)).called(
        "BEiT", "microsoft/beit-base-patch16-224"
    ),
    "clip_text_model": replace(_CLIP, positions=True, causal=True).called(
        "CLIP (text tower)", "openai/clip-vit-base-patch32"
    ),
    "clip_vision_model": replace(_CLIP, embedding="pre_layrnorm", limit=nothing, features=Images()).called(
        "CLIP (vision tower)", "openai/clip-vit-base-patch32"
    ),
    "deit": replace(_VIT, features=Images(("[CLS]", "[DIST]"))).called(
        "DeiT", "facebook/deit-base-distilled-patch16-224"
    ),
    "dinov2": _DINO.called("DINOv2", "facebook/dinov2-base"),
    "dinov2_with_registers": _DINO.called("DINOv2 with registers", "facebook/dinov2-with-registers-base"),
    "dinov3_vit": replace(_VIT, blocks="layer.*", features=Images(any_size=True)).called(
        "DINOv3", "facebook/dinov3-vitb16-pretrain-lvd1689m"
    ),
    "hubert": _WAV2VEC2.called("HuBERT", "facebook/hubert-base-ls960"),
    "siglip_text_model": _CLIP.called("SigLIP (text tower)", "google/siglip-base-patch16-224"),
    "siglip2_text_model": _CLIP.called("SigLIP 2 NaFlex (text tower)"),
    "siglip_vision_model": replace(_CLIP, limit=nothing, features=Images(())).called(
        "SigLIP (vision tower)", "google/siglip-base-patch16-224"
    ),
    "wav2vec2": _WAV2VEC2.called("wav2vec 2.0", "facebook/wav2vec2-base-960h"),
    "whisper": Family(
        "layers.*",
        "self_attn.out_proj",
        "self_attn.v_proj",
        limit=attrgetter("max_source_positions"),
        features=Sounds(_spectrogram, _mel_bins),
        stack="encoder",
        decoder=_decoder(*_SUBLAYERS, limit=attrgetter("max_target_positions")),
    ).called("Whisper", "openai/whisper-tiny", "openai/whisper-large-v3"),
}
