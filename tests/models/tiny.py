"""Tiny random models of every supported family, built from their configuration classes: no network, no weights on disk.

Every parameter is redrawn, gains and biases included: the defaults (gain 1, bias 0) would hide errors.
"""

from collections.abc import Callable

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from identikit.models.model import Model

VOCABULARY = 60
_COMMON = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SMALL = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40}
_GROUPED = _COMMON | _SMALL | {"num_key_value_heads": 2, "max_position_embeddings": 64}
_PATCHES = _SMALL | {"image_size": 16, "patch_size": 4, "num_channels": 3}
_WAVES = (
    _COMMON
    | _SMALL
    | {
        "conv_dim": [16, 16],
        "conv_kernel": [8, 4],
        "conv_stride": [4, 2],
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 6,
        "num_conv_pos_embedding_groups": 4,
    }
)
_WHISPER = _COMMON | {
    "d_model": 24,
    "encoder_layers": 3,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_layers": 1,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 40,
    "num_mel_bins": 8,
    "max_source_positions": 50,
    "decoder_start_token_id": 1,
}
_ENCODER = _COMMON | _SMALL | {"max_position_embeddings": 64}

BUILDERS: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "bert": lambda: hf.BertModel(hf.BertConfig(**_ENCODER)),
    "bert-mlm": lambda: hf.BertForMaskedLM(hf.BertConfig(**_ENCODER)),
    "roberta": lambda: hf.RobertaModel(hf.RobertaConfig(**_ENCODER)),
    "camembert": lambda: hf.CamembertModel(hf.CamembertConfig(**_ENCODER)),
    "xlm-roberta": lambda: hf.XLMRobertaModel(hf.XLMRobertaConfig(**_ENCODER)),
    "albert": lambda: hf.AlbertModel(hf.AlbertConfig(**_ENCODER, embedding_size=16, num_hidden_groups=1)),
    "albert-groups": lambda: hf.AlbertModel(
        hf.AlbertConfig(
            **_ENCODER | {"num_hidden_layers": 2}, embedding_size=16, num_hidden_groups=2, inner_group_num=2
        )
    ),
    "distilbert": lambda: hf.DistilBertModel(
        hf.DistilBertConfig(**_COMMON, dim=24, n_layers=3, n_heads=4, hidden_dim=40, max_position_embeddings=64)
    ),
    "electra": lambda: hf.ElectraModel(hf.ElectraConfig(**_ENCODER, embedding_size=16)),
    "modernbert": lambda: hf.ModernBertModel(
        hf.ModernBertConfig(
            **_ENCODER,
            local_attention=6,
            global_attn_every_n_layers=2,
            cls_token_id=1,
            sep_token_id=2,
            attention_bias=True,
        )
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**_COMMON, n_embd=24, n_layer=3, n_head=4, n_positions=64)),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_ENCODER)),
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **_GROUPED,
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=6,
            experts_implementation="eager",  # the only one that runs in float64
        )
    ),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(
            **_COMMON,
            hidden_size=24,
            num_hidden_layers=3,
            num_attention_heads=4,
            ffn_dim=40,
            word_embed_proj_dim=24,
            max_position_embeddings=64,
        )
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_GROUPED, attention_bias=True)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_GROUPED, sliding_window=6)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(**_GROUPED, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    ),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_GROUPED, head_dim=8)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**_GROUPED, head_dim=8, sliding_window=6, attn_logit_softcapping=2.0, query_pre_attn_scalar=8)
    ),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**_GROUPED, head_dim=8, sliding_window=6, sliding_window_pattern=2, query_pre_attn_scalar=8)
    ),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**_GROUPED, sliding_window=6)),
    "t5": lambda: hf.T5EncoderModel(
        hf.T5Config(**_COMMON, d_model=24, d_kv=8, d_ff=40, num_layers=3, num_heads=4, decoder_start_token_id=0)
    ),
    "vit": lambda: hf.ViTModel(hf.ViTConfig(**_SMALL, image_size=16, patch_size=4, num_channels=3)),
    "xlnet": lambda: hf.XLNetLMHeadModel(
        hf.XLNetConfig(**_COMMON, d_model=24, n_layer=3, n_head=4, d_inner=40, mem_len=None)
    ),
    # Images and sounds, and models of two towers
    "beit": lambda: hf.BeitModel(
        hf.BeitConfig(**_PATCHES, use_relative_position_bias=True, use_absolute_position_embeddings=True)
    ),
    "beit-shared": lambda: hf.BeitModel(hf.BeitConfig(**_PATCHES, use_shared_relative_position_bias=True)),
    "clip-text": lambda: hf.CLIPTextModel(hf.CLIPTextConfig(**_ENCODER, projection_dim=16)),
    "clip-vision": lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**_PATCHES, projection_dim=16)),
    "deit": lambda: hf.DeiTModel(hf.DeiTConfig(**_PATCHES)),
    "dinov2": lambda: hf.Dinov2Model(hf.Dinov2Config(**_PATCHES)),
    "dinov2-registers": lambda: hf.Dinov2WithRegistersModel(
        hf.Dinov2WithRegistersConfig(**_PATCHES, num_register_tokens=2)
    ),
    "dinov3": lambda: hf.DINOv3ViTModel(
        hf.DINOv3ViTConfig(**_PATCHES | {"hidden_size": 32}, num_register_tokens=2, use_gated_mlp=True)
    ),
    "siglip-text": lambda: hf.SiglipTextModel(hf.SiglipTextConfig(**_ENCODER)),
    "siglip2-text": lambda: hf.Siglip2TextModel(hf.Siglip2TextConfig(**_ENCODER)),
    "siglip-vision": lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**_PATCHES)),
    "hubert": lambda: hf.HubertModel(hf.HubertConfig(**_WAVES)),
    "wav2vec2": lambda: hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**_WAVES, ctc_zero_infinity=True)),
    "wav2vec2-stable": lambda: hf.Wav2Vec2Model(
        hf.Wav2Vec2Config(**_WAVES, feat_extract_norm="layer", do_stable_layer_norm=True)
    ),
    "whisper": lambda: hf.WhisperModel(hf.WhisperConfig(**_WHISPER)).encoder,
}

IMAGES = frozenset(["vit", "beit", "beit-shared", "clip-vision", "deit", "dinov2", "dinov2-registers", "dinov3",
                    "siglip-vision"])  # fmt: skip
SOUNDS = frozenset(["hubert", "wav2vec2", "wav2vec2-stable", "whisper"])


def build(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> hf.PreTrainedModel:
    """Return the tiny model called `name`, in evaluation mode, every parameter drawn anew."""
    torch.manual_seed(seed)
    model = BUILDERS[name]().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
            centre = 1.0 if key.endswith("weight") and "norm" in key.lower() else 0.0
            parameter.copy_(drawn + centre)
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


def reader(name: str) -> object:
    """Return what makes the tiny model's inputs: a tokenizer, an image processor or a feature extractor."""
    if name == "whisper":
        return hf.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    if name in SOUNDS:
        return hf.Wav2Vec2FeatureExtractor()
    return hf.ViTImageProcessorPil(size={"height": 16, "width": 16}) if name in IMAGES else tokenizer()


def loaded(name: str, *, dtype: torch.dtype = torch.float32) -> Model:
    """Return the tiny model called `name` under the tap."""
    return Model(build(name, dtype=dtype), reader(name), name=f"tiny {name}")
