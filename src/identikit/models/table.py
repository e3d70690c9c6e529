"""The table of families: what differs between architectures, one row each.

A row says where an architecture keeps its blocks and projections, and how it is tapped. `check.py` proves every row
against the module's own output. To support another architecture, add its row (CONTRIBUTING.md, 'Add a family').
"""

from dataclasses import replace as _like

from transformers import PreTrainedConfig

from identikit.models.row import Family, nothing
from identikit.models.taps import beit, deberta, gated, methods, xlnet
from identikit.texts.features import Images, Sounds


def _after_padding(config: PreTrainedConfig) -> int:
    return config.max_position_embeddings - config.pad_token_id - 1  # positions count up from the padding index


def _own_keys(config: PreTrainedConfig) -> str | None:
    if config.multi_query:
        return None
    return "its config says multi_query=False; only multi_query=True is supported, as in StarCoder and SantaCoder."


def _no_prefix(config: PreTrainedConfig) -> tuple[str, ...]:
    return ()


def _distilled(config: PreTrainedConfig) -> tuple[str, ...]:
    return "[CLS]", "[DIST]"


def _registers(config: PreTrainedConfig) -> tuple[str, ...]:
    return "[CLS]", *(f"reg{index}" for index in range(config.num_register_tokens))


def _source_positions(config: PreTrainedConfig) -> int:
    return config.max_source_positions


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
_ROBERTA = _like(_BERT, limit=_after_padding)
_LLAMA = Family("layers.*", "self_attn.o_proj", "self_attn.v_proj", positions=True, causal=True)
_INSIDE = _like(_LLAMA, blocks="language_model.layers.*")  # the text model of a model that also reads images
_GPT2 = Family("h.*", "attn.c_proj", "attn.c_attn", positions=True, causal=True)
_HYBRID = _like(_LLAMA, instead="linear_attn", splits=False, tap=gated.switched)
_MAMBA = _like(_LLAMA, instead="mamba", splits=False)
_T5 = Family("block.*", "layer.0.SelfAttention.o", "layer.0.SelfAttention.v", limit=nothing, stack="encoder")
_BART = Family("layers.*", "self_attn.out_proj", "self_attn.v_proj", embedding="layernorm_embedding", stack="encoder")
_VIT = Family("layers.*", "attention.o_proj", "attention.v_proj", limit=nothing, features=Images())
_DINO = _like(
    _VIT,
    blocks="encoder.layer.*",
    output="attention.o_proj|attention.output.dense",  # before and after transformers gave vision models one form
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
        name="ALBERT",
        checkpoints="albert/albert-base-v2",
    ),
    "apertus": _like(_LLAMA, name="Apertus", checkpoints="swiss-ai/Apertus-8B-Instruct-2509"),
    "arcee": _like(_LLAMA, name="Arcee", checkpoints="arcee-ai/AFM-4.5B"),
    "bart": _like(_BART, name="BART (encoder)", checkpoints="facebook/bart-base, facebook/bart-large-cnn"),
    "bert": _like(
        _BERT, name="BERT", checkpoints="google-bert/bert-base-uncased, sentence-transformers/all-MiniLM-L6-v2"
    ),
    "biogpt": _like(_LLAMA, output="self_attn.out_proj", name="BioGPT", checkpoints="microsoft/biogpt"),
    "camembert": _like(_ROBERTA, name="CamemBERT", checkpoints="almanach/camembert-base"),
    "cohere": _like(_LLAMA, name="Command R, Aya 23, Aya Expanse", checkpoints="CohereLabs/c4ai-command-r-v01"),
    "cohere2": _like(_LLAMA, name="Command R7B, Command A", checkpoints="CohereLabs/c4ai-command-r7b-12-2024"),
    "data2vec-text": _like(_ROBERTA, name="Data2Vec text", checkpoints="facebook/data2vec-text-base"),
    "deepseek_v2": _like(_LLAMA, value=None, name="DeepSeek V2", checkpoints="deepseek-ai/DeepSeek-V2-Lite"),
    "deepseek_v3": _like(
        _LLAMA, value=None, name="DeepSeek V3, R1", checkpoints="deepseek-ai/DeepSeek-V3, deepseek-ai/DeepSeek-R1"
    ),
    "distilbert": Family(
        "transformer.layer.*",
        "attention.out_lin",
        "attention.v_lin",
        embedding="embeddings.LayerNorm",
        name="DistilBERT",
        checkpoints="distilbert/distilbert-base-uncased",
    ),
    "electra": _like(_BERT, name="ELECTRA", checkpoints="google/electra-base-discriminator"),
    "ernie": _like(_BERT, name="ERNIE", checkpoints="nghuyong/ernie-3.0-base-zh"),
    "ernie4_5": _like(_LLAMA, name="ERNIE 4.5", checkpoints="baidu/ERNIE-4.5-0.3B-PT"),
    "ernie4_5_moe": _like(_LLAMA, name="ERNIE 4.5 MoE", checkpoints="baidu/ERNIE-4.5-21B-A3B-PT"),
    "esm": _like(
        _BERT, embedding=None, limit=_after_padding, name="ESM (proteins)", checkpoints="facebook/esm2_t33_650M_UR50D"
    ),
    "eurobert": _like(_LLAMA, causal=False, name="EuroBERT", checkpoints="EuroBERT/EuroBERT-210m"),
    "exaone4": _like(_LLAMA, name="EXAONE 4", checkpoints="LGAI-EXAONE/EXAONE-4.0-32B"),
    "falcon_h1": _like(_LLAMA, splits=False, name="Falcon-H1", checkpoints="tiiuae/Falcon-H1-0.5B-Base"),
    "gemma": _like(_LLAMA, name="Gemma", checkpoints="google/gemma-2b, google/gemma-7b"),
    "gemma2": _like(_LLAMA, name="Gemma 2", checkpoints="google/gemma-2-2b, google/gemma-2-9b-it"),
    "gemma3": _like(_INSIDE, name="Gemma 3, multimodal (its text model)", checkpoints="google/gemma-3-4b-it"),
    "gemma3_text": _like(_LLAMA, name="Gemma 3, text", checkpoints="google/gemma-3-270m, google/gemma-3-1b-it"),
    "glm": _like(_LLAMA, name="GLM-4 (2024)", checkpoints="zai-org/glm-4-9b-chat-hf"),
    "glm4": _like(_LLAMA, name="GLM-4 (2025)", checkpoints="zai-org/GLM-4-9B-0414"),
    "glm4_moe": _like(_LLAMA, name="GLM-4.5", checkpoints="zai-org/GLM-4.5, zai-org/GLM-4.5-Air"),
    "gpt2": _like(_GPT2, name="GPT-2", checkpoints="openai-community/gpt2, distilbert/distilgpt2"),
    "gpt_bigcode": _like(
        _GPT2,
        refusal=_own_keys,
        name="StarCoder, SantaCoder",
        checkpoints="bigcode/starcoder, bigcode/gpt_bigcode-santacoder",
    ),
    "gpt_neox": Family(
        "layers.*",
        "attention.dense",
        "attention.query_key_value",
        interleaved=True,
        positions=True,
        causal=True,
        name="Pythia, GPT-NeoX",
        checkpoints="EleutherAI/pythia-160m, EleutherAI/gpt-neox-20b",
    ),
    "gpt_oss": _like(_LLAMA, name="gpt-oss", checkpoints="openai/gpt-oss-20b, openai/gpt-oss-120b"),
    "granite": _like(_LLAMA, name="Granite", checkpoints="ibm-granite/granite-3.0-8b-base"),
    "granite_swa": _like(_LLAMA, name="Granite, sliding window"),
    "granitemoe": _like(_LLAMA, name="Granite MoE", checkpoints="ibm-granite/granite-3.0-1b-a400m-base"),
    "granitemoehybrid": _like(
        _MAMBA, name="Granite 4", checkpoints="ibm-granite/granite-4.0-h-tiny, ibm-granite/granite-4.0-micro"
    ),
    "granitemoeshared": _like(
        _LLAMA, name="Granite MoE, shared expert", checkpoints="ibm-research/moe-7b-1b-active-shared-experts"
    ),
    "helium": _like(_LLAMA, name="Helium", checkpoints="kyutai/helium-1-preview-2b"),
    "hunyuan_v1_dense": _like(_LLAMA, name="Hunyuan", checkpoints="tencent/Hunyuan-7B-Instruct"),
    "jamba": _like(_MAMBA, positions=False, limit=nothing, name="Jamba", checkpoints="ai21labs/Jamba-v0.1"),
    "lfm2": _like(
        _MAMBA,
        output="self_attn.out_proj",
        instead="conv",
        name="LFM2",
        checkpoints="LiquidAI/LFM2-350M, LiquidAI/LFM2-1.2B",
    ),
    "llama": _like(
        _LLAMA,
        name="Llama, SmolLM2, TinyLlama, Yi, Vicuna",
        checkpoints="meta-llama/Llama-3.1-8B, HuggingFaceTB/SmolLM2-135M",
    ),
    "llama4": _like(
        _LLAMA,
        blocks="language_model.model.layers.*",
        positions=False,
        by_place=True,  # it scales queries by their place in the batch, padding included
        name="Llama 4 (its text model)",
        checkpoints="meta-llama/Llama-4-Scout-17B-16E",
    ),
    "llama4_text": _like(_LLAMA, blocks="model.layers.*", positions=False, by_place=True, name="Llama 4, text"),
    "llava": _like(_INSIDE, name="LLaVA (its text model)", checkpoints="llava-hf/llava-1.5-7b-hf"),
    "m2m_100": _like(
        _BART, embedding=None, name="NLLB, M2M100 (encoder)", checkpoints="facebook/nllb-200-distilled-600M"
    ),
    "marian": _like(_BART, embedding=None, name="Marian (encoder)", checkpoints="Helsinki-NLP/opus-mt-en-de"),
    "mbart": _like(_BART, name="mBART (encoder)", checkpoints="facebook/mbart-large-50-many-to-many-mmt"),
    "minimax_m2": _like(_LLAMA, name="MiniMax-M2", checkpoints="MiniMaxAI/MiniMax-M2"),
    "ministral": _like(_LLAMA, name="Ministral", checkpoints="mistralai/Ministral-8B-Instruct-2410"),
    "ministral3": _like(_LLAMA, name="Ministral 3, text"),
    "mistral": _like(_LLAMA, name="Mistral", checkpoints="mistralai/Mistral-7B-v0.1"),
    "mistral3": _like(
        _INSIDE,
        name="Mistral Small 3, Ministral 3 (their text model)",
        checkpoints="mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    ),
    "mixtral": _like(_LLAMA, name="Mixtral", checkpoints="mistralai/Mixtral-8x7B-v0.1"),
    "modernbert": Family(
        "layers.*",
        "attn.Wo",
        "attn.Wqkv",
        embedding="embeddings.norm",
        name="ModernBERT",
        checkpoints="answerdotai/ModernBERT-base",
    ),
    "mt5": _like(_T5, model_class="MT5EncoderModel", name="mT5 (encoder)", checkpoints="google/mt5-small"),
    "nemotron": _like(_LLAMA, name="Minitron (Nemotron-4)", checkpoints="nvidia/Minitron-8B-Base"),
    "nomic_bert": Family(
        "layers.*",
        "self_attn.o_proj",
        "self_attn.v_proj",
        embedding="embeddings.LayerNorm",
        name="NomicBERT",
        checkpoints="nomic-ai/nomic-embed-text-v1.5",
    ),
    "olmo": _like(_LLAMA, name="OLMo", checkpoints="allenai/OLMo-1B-hf, allenai/OLMo-7B-hf"),
    "olmo2": _like(_LLAMA, name="OLMo 2", checkpoints="allenai/OLMo-2-0425-1B, allenai/OLMo-2-1124-7B"),
    "olmo3": _like(_LLAMA, name="OLMo 3", checkpoints="allenai/Olmo-3-7B-Instruct"),
    "olmoe": _like(_LLAMA, name="OLMoE", checkpoints="allenai/OLMoE-1B-7B-0924"),
    "opt": _like(
        _LLAMA,
        blocks="decoder.layers.*",
        output="self_attn.out_proj",
        name="OPT",
        checkpoints="facebook/opt-125m, facebook/opt-1.3b",
    ),
    "pegasus": _like(_BART, embedding=None, name="Pegasus (encoder)", checkpoints="google/pegasus-xsum"),
    "phi": _like(
        _LLAMA, output="self_attn.dense", name="Phi-1, Phi-2", checkpoints="microsoft/phi-1_5, microsoft/phi-2"
    ),
    "phi3": _like(
        _LLAMA,
        value="self_attn.qkv_proj",
        name="Phi-3, Phi-4",
        checkpoints="microsoft/Phi-3-mini-4k-instruct, microsoft/phi-4",
    ),
    "phimoe": _like(_LLAMA, name="Phi-3.5 MoE", checkpoints="microsoft/Phi-3.5-MoE-instruct"),
    "qwen2": _like(_LLAMA, name="Qwen 2, Qwen 2.5", checkpoints="Qwen/Qwen2.5-0.5B, Qwen/Qwen2.5-7B-Instruct"),
    "qwen2_5_vl": _like(_INSIDE, name="Qwen 2.5 VL (its text model)", checkpoints="Qwen/Qwen2.5-VL-7B-Instruct"),
    "qwen2_moe": _like(_LLAMA, name="Qwen 1.5 MoE, Qwen 2 MoE", checkpoints="Qwen/Qwen1.5-MoE-A2.7B"),
    "qwen2_vl": _like(_INSIDE, name="Qwen 2 VL (its text model)", checkpoints="Qwen/Qwen2-VL-7B-Instruct"),
    "qwen3": _like(_LLAMA, name="Qwen 3", checkpoints="Qwen/Qwen3-0.6B, Qwen/Qwen3-8B"),
    "qwen3_5": _like(_HYBRID, blocks=_INSIDE.blocks, name="Qwen 3.5 (its text model)", checkpoints="Qwen/Qwen3.5-27B"),
    "qwen3_5_moe": _like(
        _HYBRID, blocks=_INSIDE.blocks, name="Qwen 3.5 MoE (its text model)", checkpoints="Qwen/Qwen3.5-35B-A3B"
    ),
    "qwen3_5_moe_text": _like(_HYBRID, name="Qwen 3.5 MoE, text"),
    "qwen3_5_text": _like(_HYBRID, name="Qwen 3.5, text"),
    "qwen3_moe": _like(_LLAMA, name="Qwen 3 MoE", checkpoints="Qwen/Qwen3-30B-A3B"),
    "qwen3_next": _like(_HYBRID, name="Qwen3-Next", checkpoints="Qwen/Qwen3-Next-80B-A3B-Instruct"),
    "qwen3_vl": _like(_INSIDE, name="Qwen 3 VL (its text model)", checkpoints="Qwen/Qwen3-VL-4B-Instruct"),
    "roberta": _like(_ROBERTA, name="RoBERTa", checkpoints="FacebookAI/roberta-base, cardiffnlp/twitter-roberta-base"),
    "roberta-prelayernorm": _like(_ROBERTA, name="RoBERTa-PreLN", checkpoints="andreasmadsen/efficient_mlm_m0.40"),
    "seed_oss": _like(_LLAMA, name="Seed-OSS", checkpoints="ByteDance-Seed/Seed-OSS-36B-Instruct"),
    "smollm3": _like(_LLAMA, name="SmolLM3", checkpoints="HuggingFaceTB/SmolLM3-3B"),
    "stablelm": _like(_LLAMA, name="StableLM", checkpoints="stabilityai/stablelm-2-1_6b, stabilityai/stablelm-3b-4e1t"),
    "starcoder2": _like(_LLAMA, name="StarCoder2", checkpoints="bigcode/starcoder2-3b"),
    "t5": _like(
        _T5,
        model_class="T5EncoderModel",
        name="T5, Flan-T5 (encoder)",
        checkpoints="google-t5/t5-small, google/flan-t5-base",
    ),
    "umt5": _like(_T5, model_class="UMT5EncoderModel", name="uMT5 (encoder)", checkpoints="google/umt5-small"),
    "vaultgemma": _like(_LLAMA, name="VaultGemma", checkpoints="google/vaultgemma-1b"),
    "vit": _like(_VIT, name="ViT", checkpoints="google/vit-base-patch16-224"),
    "xlm-roberta": _like(_ROBERTA, name="XLM-RoBERTa", checkpoints="FacebookAI/xlm-roberta-base, BAAI/bge-m3"),
    "xlm-roberta-xl": _like(_ROBERTA, embedding=None, name="XLM-RoBERTa XL", checkpoints="facebook/xlm-roberta-xl"),
    "xlnet": Family(
        "layer.*",
        "rel_attn.o",
        None,
        limit=nothing,
        splits=False,
        sequence_first=True,
        tap=xlnet.switched,
        watch_output=xlnet.watch_output,
        refusal=xlnet.refusal,
        name="XLNet",
        checkpoints="xlnet/xlnet-base-cased",
    ),
    "bloom": Family(
        "h.*",
        "self_attention.dense",
        "self_attention.query_key_value",
        interleaved=True,
        embedding="word_embeddings_layernorm",
        limit=nothing,
        causal=True,
        tap=methods.bloom,
        refusal=methods.bloom_refusal,
        name="BLOOM",
        checkpoints="bigscience/bloom-560m, bigscience/bloomz-560m",
    ),
    "deberta-v2": _like(
        _BERT,
        value="attention.self.value_proj",
        limit=deberta.limit,
        splits=False,
        tap=deberta.switched,
        name="DeBERTa v2, v3",
        checkpoints="microsoft/deberta-v3-base, microsoft/mdeberta-v3-base",
    ),
    "falcon": Family(
        "h.*",
        "self_attention.dense",
        "self_attention.query_key_value",
        interleaved=True,
        positions=True,
        limit=methods.falcon_limit,
        causal=True,
        tap=methods.falcon,
        refusal=methods.falcon_refusal,
        name="Falcon",
        checkpoints="tiiuae/falcon-7b, tiiuae/falcon-rw-1b",
    ),
    "gptj": _like(
        _LLAMA,
        blocks="h.*",
        output="attn.out_proj",
        value="attn.v_proj",
        tap=methods.gptj,
        name="GPT-J",
        checkpoints="EleutherAI/gpt-j-6b",
    ),
    "mpnet": _like(
        _BERT,
        output="attention.attn.o",
        value="attention.attn.v",
        limit=methods.after_two,
        tap=methods.mpnet,
        name="MPNet",
        checkpoints="sentence-transformers/all-mpnet-base-v2, microsoft/mpnet-base",
    ),
    "beit": _like(
        _VIT,
        tap=beit.switched,
        features=Images(any_size=True),
        name="BEiT",
        checkpoints="microsoft/beit-base-patch16-224",
    ),
    "clip_text_model": _like(
        _CLIP, positions=True, causal=True, name="CLIP (text tower)", checkpoints="openai/clip-vit-base-patch32"
    ),
    "clip_vision_model": _like(
        _CLIP,
        embedding="pre_layrnorm",
        limit=nothing,
        features=Images(),
        name="CLIP (vision tower)",
        checkpoints="openai/clip-vit-base-patch32",
    ),
    "deit": _like(
        _VIT, features=Images(_distilled), name="DeiT", checkpoints="facebook/deit-base-distilled-patch16-224"
    ),
    "dinov2": _like(_DINO, name="DINOv2", checkpoints="facebook/dinov2-base"),
    "dinov2_with_registers": _like(
        _DINO,
        features=Images(_registers, any_size=True),
        name="DINOv2 with registers",
        checkpoints="facebook/dinov2-with-registers-base",
    ),
    "dinov3_vit": _like(
        _VIT,
        blocks="layer.*",
        features=Images(_registers, any_size=True),
        name="DINOv3",
        checkpoints="facebook/dinov3-vitb16-pretrain-lvd1689m",
    ),
    "hubert": _like(_WAV2VEC2, name="HuBERT", checkpoints="facebook/hubert-base-ls960"),
    "siglip_text_model": _like(_CLIP, name="SigLIP (text tower)", checkpoints="google/siglip-base-patch16-224"),
    "siglip2_text_model": _like(_CLIP, name="SigLIP 2 NaFlex (text tower)"),
    "siglip_vision_model": _like(
        _CLIP,
        limit=nothing,
        features=Images(_no_prefix),
        name="SigLIP (vision tower)",
        checkpoints="google/siglip-base-patch16-224",
    ),
    "wav2vec2": _like(_WAV2VEC2, name="wav2vec 2.0", checkpoints="facebook/wav2vec2-base-960h"),
    "whisper": Family(
        "layers.*",
        "self_attn.out_proj",
        "self_attn.v_proj",
        limit=_source_positions,
        features=Sounds(_spectrogram, _mel_bins),
        stack="encoder",
        name="Whisper (encoder)",
        checkpoints="openai/whisper-tiny, openai/whisper-large-v3",
    ),
}
