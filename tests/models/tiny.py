"""Tiny random models of every supported family, built from their configuration classes: no network, no weights on disk.

Every parameter is redrawn, gains and biases included: the defaults (gain 1, bias 0) would hide errors.
"""

import warnings
from functools import cache
from typing import Any, NamedTuple

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from identikit.models.families import FAMILIES, Family
from identikit.models.load.load import load
from identikit.models.model import Model

VOCABULARY = 60
_COMMON = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SMALL = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40}
_GROUPED = _COMMON | _SMALL | {"num_key_value_heads": 2, "max_position_embeddings": 64}
_PATCHES = _SMALL | {"image_size": 16, "patch_size": 4, "num_channels": 3}
_WAVES = _COMMON | _SMALL | {
    "conv_dim": [16, 16], "conv_kernel": [8, 4], "conv_stride": [4, 2], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 6, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
_ENCODER = _COMMON | _SMALL | {"max_position_embeddings": 64}
_WIDE = _GROUPED | {"head_dim": 8}  # heads together wider than the model
_WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
# Of the ways to run experts, the eager one is the only one that runs in float64.
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "experts_implementation": "eager"}
_LOCAL = _EXPERTS | {"num_local_experts": 4}
_GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0}
_T5 = _COMMON | {"d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0}
_TWO_STACKS = _COMMON | {
    "d_model": 24, "max_position_embeddings": 64, "encoder_layers": 3, "encoder_attention_heads": 4,
    "encoder_ffn_dim": 40, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 40,
    "decoder_start_token_id": 0, "scale_embedding": True,
}  # fmt: skip
_WHISPER = _TWO_STACKS | {"num_mel_bins": 8, "max_source_positions": 50, "decoder_start_token_id": 1}
_LATENT = _COMMON | _SMALL | _EXPERTS | {
    "num_key_value_heads": 4, "max_position_embeddings": 64, "kv_lora_rank": 12, "q_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10, "n_routed_experts": 4, "n_shared_experts": 1,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "attention_bias": True,
}  # fmt: skip
_DELTA = _WIDE | {
    "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "attention_bias": True,
}  # fmt: skip
_SHARED = _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 12}
_MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 12, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4,
}  # fmt: skip
_VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
_TILED = _VISION | {"image_size": 16, "patch_size": 4}
_QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 24}
# Families that read images inside a text: their special tokens have the ids behind those of words.
_TILE_TOKENS = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
_IMAGE_TOKENS = [
    "<image>", "<|image_pad|>", "<start_of_image>", "<image_soft_token>", "<end_of_image>", "<IMG_CONTEXT>", "<img>",
    "</img>", "<video>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *_TILE_TOKENS,
]  # fmt: skip
IMAGE_IDS = {token: VOCABULARY + place for place, token in enumerate(_IMAGE_TOKENS)}
_PICTURED = _GROUPED | {"vocab_size": VOCABULARY + len(IMAGE_IDS) + 1, "max_position_embeddings": 256}  # odd on purpose
_LLAMA4 = _WIDE | _LOCAL | {
    "intermediate_size_mlp": 40, "interleave_moe_layer_step": 2, "attention_chunk_size": 6, "no_rope_layers": [1, 0, 1],
    "attn_temperature_tuning": True, "floor_scale": 4,
}  # fmt: skip


class TinyModel(NamedTuple):
    """A class of transformers and the sizes of its configuration; calling it builds the model."""

    name: str
    sizes: dict[str, Any]

    @property
    def model_class(self) -> type[hf.PreTrainedModel]:
        with warnings.catch_warnings():  # some modules compile a function on import, in a way that torch deprecates
            warnings.filterwarnings("ignore", message=".*torch.jit.script")
            return getattr(hf, self.name)

    def config(self) -> hf.PreTrainedConfig:
        return self.model_class.config_class(**self.sizes)

    def __call__(self) -> hf.PreTrainedModel:
        return self.model_class(self.config())


def _made(name: str, sizes: dict[str, Any], **options: Any) -> TinyModel:
    return TinyModel(name, sizes | options)


def _lm(name: str, sizes: dict[str, Any] = _GROUPED, **options: Any) -> TinyModel:
    return _made(f"{name}ForCausalLM", sizes, **options)


def _falcon(**options: Any) -> TinyModel:
    return _lm("Falcon", _COMMON | _SMALL, max_position_embeddings=64, **options)


def _qwen(name: str, vision: dict[str, Any], **text: Any) -> TinyModel:
    rotary = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]}}
    return _made(
        f"{name}ForConditionalGeneration",
        {},
        text_config=_PICTURED | rotary | text,
        vision_config=vision | {"patch_size": 4},
        image_token_id=IMAGE_IDS["<|image_pad|>"],
        video_token_id=IMAGE_IDS["<video>"],
    )


def _idefics3(name: str, vision: str) -> TinyModel:
    return _made(
        f"{name}ForConditionalGeneration",
        {},
        text_config=_PICTURED | {"model_type": "llama"},
        vision_config=_TILED | {"model_type": vision},
        scale_factor=2,
        image_token_id=IMAGE_IDS["<image>"],
    )


def deberta(**options: Any) -> TinyModel:
    """Return a DeBERTa with both terms by position, unless options say otherwise."""
    terms = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
    return _made("DebertaV2ForMaskedLM", _ENCODER | terms | {"type_vocab_size": 2} | options)


BUILDERS = {
    "bert": _made("BertModel", _ENCODER),
    "bert-mlm": _made("BertForMaskedLM", _ENCODER),
    "roberta": _made("RobertaModel", _ENCODER),
    "camembert": _made("CamembertModel", _ENCODER),
    "xlm-roberta": _made("XLMRobertaModel", _ENCODER),
    "xlm-roberta-xl": _made("XLMRobertaXLModel", _ENCODER),
    "roberta-prelayernorm": _made("RobertaPreLayerNormModel", _ENCODER),
    "data2vec-text": _made("Data2VecTextModel", _ENCODER),
    "ernie": _made("ErnieModel", _ENCODER, use_task_id=True),
    "esm": _made("EsmModel", _ENCODER, position_embedding_type="rotary", token_dropout=True, mask_token_id=3),
    "esm-absolute": _made("EsmForMaskedLM", _ENCODER, position_embedding_type="absolute", mask_token_id=3),
    "albert": _made("AlbertModel", _ENCODER, embedding_size=16, num_hidden_groups=1),
    "albert-groups": _made(
        "AlbertModel", _ENCODER, num_hidden_layers=2, embedding_size=16, num_hidden_groups=2, inner_group_num=2
    ),
    "distilbert": _made(
        "DistilBertModel", _COMMON, dim=24, n_layers=3, n_heads=4, hidden_dim=40, max_position_embeddings=64
    ),
    "electra": _made("ElectraModel", _ENCODER, embedding_size=16),
    "modernbert": _made(
        "ModernBertModel",
        _ENCODER,
        local_attention=6,
        global_attn_every_n_layers=2,
        cls_token_id=1,
        sep_token_id=2,
        attention_bias=True,
    ),
    "eurobert": _made("EuroBertModel", _GROUPED, attention_bias=True, mask_token_id=3),
    "nomic_bert": _made("NomicBertModel", _ENCODER, attention_bias=True),
    "gpt2": _made("GPT2LMHeadModel", _COMMON, n_embd=24, n_layer=3, n_head=4, n_positions=64),
    "gpt_bigcode": _lm("GPTBigCode", _COMMON, n_embd=24, n_layer=3, n_head=4, n_positions=64, multi_query=True),
    "gpt_neox": _lm("GPTNeoX", _ENCODER),
    "gpt_oss": _lm("GptOss", _WIDE, **_LOCAL, sliding_window=6),
    "opt": _lm(
        "OPT",
        _COMMON,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        ffn_dim=40,
        word_embed_proj_dim=24,
        max_position_embeddings=64,
    ),
    "biogpt": _lm("BioGpt", _ENCODER),
    "phi": _lm("Phi", partial_rotary_factor=2 / 3),
    "phi3": _lm("Phi3", sliding_window=6),
    "llama": _lm("Llama", attention_bias=True),
    "mistral": _lm("Mistral", sliding_window=6),
    "ministral": _lm("Ministral", _WIDE, **_WINDOW),
    "qwen2": _lm("Qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen3": _lm("Qwen3", _WIDE),
    "gemma": _lm("Gemma", _WIDE),
    "gemma2": _lm("Gemma2", _WIDE, sliding_window=6, attn_logit_softcapping=2.0, query_pre_attn_scalar=8),
    "gemma3": _lm("Gemma3", _WIDE, sliding_window=6, sliding_window_pattern=2, query_pre_attn_scalar=8),
    "gemma3-images": _made(
        "Gemma3ForConditionalGeneration",
        {},
        text_config=_PICTURED
        | {"head_dim": 8, "sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
        vision_config=_TILED | {"image_size": 32},
        mm_tokens_per_image=16,
        boi_token_index=IMAGE_IDS["<start_of_image>"],
        eoi_token_index=IMAGE_IDS["<end_of_image>"],
        image_token_index=IMAGE_IDS["<image_soft_token>"],
    ),
    "apertus": _lm("Apertus", attention_bias=True),
    "arcee": _lm("Arcee"),
    "cohere": _lm("Cohere", use_qk_norm=True, logit_scale=0.5),
    "cohere2": _lm("Cohere2", **_WINDOW),
    "ernie4_5": _lm("Ernie4_5", use_bias=True, head_dim=8),
    "exaone4": _lm("Exaone4", **_WINDOW),
    "glm": _lm("Glm", head_dim=8, partial_rotary_factor=0.5, attention_bias=True),
    "glm4": _lm("Glm4", head_dim=8, partial_rotary_factor=0.5, attention_bias=True),
    "granite": _lm("Granite", **_GRANITE),
    "helium": _lm("Helium", head_dim=6),
    "nemotron": _lm("Nemotron", partial_rotary_factor=2 / 3),
    "olmo": _lm("Olmo", clip_qkv=2.0),
    "olmo2": _lm("Olmo2"),
    "olmo3": _lm("Olmo3", **_WINDOW),
    "seed_oss": _lm("SeedOss", head_dim=8, attention_bias=True),
    "smollm3": _lm("SmolLM3", no_rope_layers=[1, 0, 1]),
    "stablelm": _lm("StableLm", use_qkv_bias=True, use_parallel_residual=True, qk_layernorm=True),
    "starcoder2": _lm("Starcoder2", use_bias=True, sliding_window=6),
    "mixtral": _lm("Mixtral", **_LOCAL),
    "qwen2_moe": _lm("Qwen2Moe", **_SHARED, qkv_bias=True),
    "qwen3_moe": _lm("Qwen3Moe", _WIDE, **_EXPERTS, num_experts=4, decoder_sparse_step=2),
    "olmoe": _lm("Olmoe", **_EXPERTS, num_experts=4),
    "granitemoe": _lm("GraniteMoe", **_GRANITE, **_LOCAL),
    "granitemoeshared": _lm("GraniteMoeShared", **_GRANITE, **_LOCAL, shared_intermediate_size=12),
    "glm4_moe": _lm("Glm4Moe", **_EXPERTS, head_dim=8, n_routed_experts=4, first_k_dense_replace=1, use_qk_norm=True),
    "deepseek_v2": _lm("DeepseekV2", _LATENT, topk_method="group_limited_greedy"),
    "deepseek_v3": _lm("DeepseekV3", _LATENT),
    "llama4": _made(
        "Llama4ForConditionalGeneration",
        {},
        text_config=_LLAMA4,
        vision_config=_TILED | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    ),
    "llama4-text": _lm("Llama4", _LLAMA4),
    "qwen3_next": _lm("Qwen3Next", _DELTA, **_SHARED),
    "qwen3_5": _made("Qwen3_5ForConditionalGeneration", {}, text_config=_DELTA, vision_config=_QWEN_VISION),
    "qwen3_5-text": _lm("Qwen3_5", _DELTA),
    "qwen3_5_moe": _made(
        "Qwen3_5MoeForConditionalGeneration", {}, text_config=_DELTA | _SHARED, vision_config=_QWEN_VISION
    ),
    "qwen3_5_moe-text": _lm("Qwen3_5Moe", _DELTA, **_SHARED),
    "lfm2": _lm("Lfm2", num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2),
    "jamba": _lm(
        "Jamba",
        **_LOCAL,
        num_hidden_layers=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        use_mamba_kernels=False,
        mamba_d_state=4,
        mamba_dt_rank=4,
    ),
    "granitemoehybrid": _lm(
        "GraniteMoeHybrid",
        **_GRANITE,
        **_LOCAL,
        **_MAMBA,
        layer_types=["mamba", "attention", "mamba"],
        shared_intermediate_size=12,
        mamba_expand=2,
    ),
    "falcon_h1": _lm("FalconH1", **_MAMBA, mamba_d_ssm=48, head_dim=6),
    "llava": _made(
        "LlavaForConditionalGeneration",
        {},
        text_config=_PICTURED | {"model_type": "llama"},
        vision_config=_VISION | {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8},
        image_token_index=IMAGE_IDS["<image>"],
    ),
    "idefics3": _idefics3("Idefics3", "idefics3_vision"),
    "smolvlm": _idefics3("SmolVLM", "smolvlm_vision"),
    "internvl": _made(
        "InternVLForConditionalGeneration",
        {},
        text_config=_PICTURED | {"model_type": "qwen2"},
        vision_config=_VISION | {"image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=IMAGE_IDS["<IMG_CONTEXT>"],
        downsample_ratio=0.5,
    ),
    "mistral3": _made(
        "Mistral3ForConditionalGeneration",
        {},
        text_config=_WIDE | {"model_type": "mistral"},
        vision_config=_TILED | {"model_type": "pixtral", "head_dim": 8},
    ),
    "qwen2_vl": _qwen("Qwen2VL", {"depth": 1, "embed_dim": 16, "hidden_size": 24, "num_heads": 2}),
    "qwen2_5_vl": _qwen("Qwen2_5_VL", _QWEN_VISION | {"window_size": 16, "fullatt_block_indexes": []}),
    "qwen3_vl": _qwen("Qwen3VL", _QWEN_VISION | {"deepstack_visual_indexes": [0]}, head_dim=6),
    "granite_swa": _lm("GraniteSWA", **_GRANITE, **_WINDOW),
    "ministral3": _lm("Ministral3", _WIDE),
    "phimoe": _lm("Phimoe", **_LOCAL),
    "minimax_m2": _lm("MiniMaxM2", _WIDE, **_LOCAL),
    "hunyuan_v1_dense": _lm("HunYuanDenseV1", _WIDE),
    "ernie4_5_moe": _lm("Ernie4_5_Moe", **_EXPERTS, moe_num_experts=4, moe_k=2, moe_num_shared_experts=1),
    "vaultgemma": _lm("VaultGemma", _WIDE, sliding_window=6),
    "t5": _made("T5EncoderModel", _T5),
    "t5-both": _made("T5ForConditionalGeneration", _T5),
    "mt5": _made("MT5EncoderModel", _T5),
    "umt5": _made("UMT5EncoderModel", _T5),
    "bart": _made("BartForConditionalGeneration", _TWO_STACKS),
    "mbart": _made("MBartForConditionalGeneration", _TWO_STACKS),
    "marian": _made("MarianMTModel", _TWO_STACKS),
    "pegasus": _made("PegasusForConditionalGeneration", _TWO_STACKS),
    "m2m_100": _made("M2M100ForConditionalGeneration", _TWO_STACKS),
    "vit": _made("ViTModel", _SMALL, image_size=16, patch_size=4, num_channels=3),
    "xlnet": _made("XLNetLMHeadModel", _COMMON, d_model=24, n_layer=3, n_head=4, d_inner=40, mem_len=None),
    # Attention of their own
    "mpnet": _made("MPNetForMaskedLM", _ENCODER),
    "deberta-v2": deberta(position_buckets=4, norm_rel_ebd="layer_norm", share_att_key=True),
    "deberta-v2-conv": deberta(max_relative_positions=5, conv_kernel_size=3, position_biased_input=True),
    "bloom": _lm("Bloom", _COMMON, hidden_size=24, n_layer=3, n_head=4),
    "falcon": _falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon-7b": _falcon(new_decoder_architecture=False, multi_query=True, parallel_attn=True),
    "falcon-rw": _falcon(new_decoder_architecture=False, multi_query=False, parallel_attn=False, alibi=True, bias=True),
    "gptj": _lm("GPTJ", _COMMON, n_embd=24, n_layer=3, n_head=4, n_positions=64, rotary_dim=4),
    # Images and sounds, and models of two towers
    "beit": _made("BeitModel", _PATCHES, use_relative_position_bias=True, use_absolute_position_embeddings=True),
    "beit-shared": _made("BeitModel", _PATCHES, use_shared_relative_position_bias=True),
    "clip-text": _made("CLIPTextModel", _ENCODER, projection_dim=16),
    "clip-vision": _made("CLIPVisionModel", _PATCHES, projection_dim=16),
    "deit": _made("DeiTModel", _PATCHES),
    "dinov2": _made("Dinov2Model", _PATCHES),
    "dinov2-registers": _made("Dinov2WithRegistersModel", _PATCHES, num_register_tokens=2),
    "dinov3": _made("DINOv3ViTModel", _PATCHES, hidden_size=32, num_register_tokens=2, use_gated_mlp=True),
    "siglip-text": _made("SiglipTextModel", _ENCODER),
    "siglip2-text": _made("Siglip2TextModel", _ENCODER),
    "siglip-vision": _made("SiglipVisionModel", _PATCHES),
    "hubert": _made("HubertModel", _WAVES),
    "wav2vec2": _made("Wav2Vec2ForCTC", _WAVES, ctc_zero_infinity=True),
    "wav2vec2-stable": _made("Wav2Vec2Model", _WAVES, feat_extract_norm="layer", do_stable_layer_norm=True),
    "whisper": _made("WhisperForConditionalGeneration", _WHISPER),
}

IMAGES = frozenset(["vit", "beit", "beit-shared", "clip-vision", "deit", "dinov2", "dinov2-registers", "dinov3",
                    "siglip-vision"])  # fmt: skip
SOUNDS = frozenset(["hubert", "wav2vec2", "wav2vec2-stable", "whisper"])


def build(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> hf.PreTrainedModel:
    """Return the tiny model called `name`, in evaluation mode, every parameter drawn anew."""
    torch.manual_seed(seed)
    return drawn(BUILDERS[name]().eval(), dtype=dtype, seed=seed)


def drawn(model: hf.PreTrainedModel, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> hf.PreTrainedModel:
    """Draw every parameter of a model anew, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
            centre = 1.0 if key.endswith("weight") and "norm" in key.lower() else 0.0
            parameter.copy_(drawn + centre)
        for key, buffer in model.named_buffers():
            if key.endswith("correction_bias"):  # what learned routers keep beside their parameters
                buffer.copy_(torch.randn(buffer.shape, generator=generator, dtype=torch.float64) * 0.2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Casting complex values")  # the rotary table of a part not run here
        return model.to(dtype)


def tokenizer() -> hf.PreTrainedTokenizerFast:
    """Return a word tokenizer over the tiny vocabulary: w3 to w59, with <s> before and </s> behind a text."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="w3"
    )


@cache
def family(name: str) -> Family:
    """Return the row of the tiny model called `name`."""
    return FAMILIES[BUILDERS[name].config().model_type]


def reader(name: str) -> Any:
    """Return what makes the tiny model's inputs: a tokenizer, an image processor or a feature extractor."""
    if name == "whisper":
        return hf.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    if name in SOUNDS:
        return hf.Wav2Vec2FeatureExtractor()
    if name in IMAGES:
        return hf.ViTImageProcessorPil(size={"height": 16, "width": 16})
    return tokenizer()


def speech_processor() -> hf.WhisperProcessor:
    """Return a processor of the tiny Whisper: its feature extractor, and a tokenizer of single letters."""
    vocabulary = {chr(65 + place): place for place in range(57)}
    vocabulary |= {"<|endoftext|>": 57, "<|startoftranscript|>": 58, "<|notimestamps|>": 59}
    return hf.WhisperProcessor(reader("whisper"), hf.WhisperTokenizer(vocabulary, merges=[]))


def two_stacks(name: str, *, dtype: torch.dtype = torch.float64) -> Model:
    """Return a tiny model of an encoder and a decoder, proved as `ik.load` proves it."""
    whole = build(name, dtype=dtype)
    if name == "whisper":
        whole.config.decoder_start_token_id = 58
        whole.generation_config.decoder_start_token_id = 58  # pyright: ignore[reportOptionalMemberAccess]
        whole.generation_config.eos_token_id = 57  # pyright: ignore[reportOptionalMemberAccess]
    return load(whole, speech_processor() if name == "whisper" else tokenizer())


def loaded(name: str, *, dtype: torch.dtype = torch.float32) -> Model:
    """Return the tiny model called `name` under the tap."""
    return Model(build(name, dtype=dtype), reader(name), name=f"tiny {name}")


@cache
def shared(name: str, *, dtype: torch.dtype = torch.float32) -> Model:
    """Return the tiny model called `name`, built once for all tests that only read it."""
    return loaded(name, dtype=dtype)
