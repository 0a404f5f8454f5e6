"""Tiny models with random weights of every architecture of transformers that writes text.

`make(name, folder)` saves one. The sizes are small, but what makes an architecture special is on:
windows, soft caps, experts, layers of several kinds, shared keys and values, norms that are not 1.
"""

import inspect
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ARCHITECTURES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB_SIZE = 512
MOST_PARAMETERS = 30e6
# what a config gets, if it knows the name
SMALL: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    initializer_range=0.02,
    # widths
    hidden_size=64, d_model=64, n_embd=64, word_embed_proj_dim=64, embedding_size=64,
    kv_channels=16,
    intermediate_size=96, ffn_dim=96, n_inner=96, dim_ff=96, d_ff=96, intermediate_size_mlp=96,
    decoder_ffn_dim=96, encoder_ffn_dim=96, head_dim=16, dim_head=16, d_kv=16, sk_head_dim=16,
    hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB_SIZE, rotary_dim=8,
    # depths
    num_hidden_layers=3, n_layer=3, n_layers=3, num_layers=3, decoder_layers=3, encoder_layers=2,
    num_kv_shared_layers=1, num_nextn_predict_layers=0, first_k_dense_replace=1,
    # heads
    num_attention_heads=4, n_head=4, n_heads=4, decoder_attention_heads=4,
    encoder_attention_heads=4,
    num_key_value_heads=2, num_global_key_value_heads=1, global_head_dim=32, num_attention_groups=2,
    # positions
    max_position_embeddings=512, n_positions=512, n_ctx=512, max_sequence_length=512,
    max_seq_len=512, sliding_window=8, sliding_window_pattern=2, attention_chunk_size=8,
    # scales
    query_pre_attn_scalar=32, attn_logit_softcapping=5.0, final_logit_softcapping=3.0,
    # latent attention
    q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, qk_head_dim=24,
    v_head_dim=12, index_n_heads=2, index_head_dim=16, index_topk=512,
    # experts
    moe_intermediate_size=32, num_experts=4, num_local_experts=4, n_routed_experts=4,
    num_experts_per_tok=2, moe_num_experts=4, moe_k=2, moe_topk=2, top_k_experts=2, n_group=1,
    topk_group=1, n_shared_experts=1, num_shared_experts=1, layernorm_num_groups=1,
    shared_expert_intermediate_size=32, moe_shared_expert_intermediate_size=32,
    shared_intermediate_size=32,
    # states that are no keys and values
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
    linear_value_head_dim=16, n_mamba_heads=4, mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1,
    mamba_d_state=8, mamba_d_conv=4, state_size=8, altup_num_inputs=2, laurel_rank=8)
DECODER_OF_THREE: dict[str, Any] = dict(num_hidden_layers=3, encoder_layers=3, decoder_layers=3)
ALTERNATING: dict[str, Any] = dict(
    num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)
LATENT: dict[str, Any] = dict(head_dim=8, num_key_value_heads=4)
# what some need besides
OWN: dict[str, dict[str, Any]] = {
    "cohere": dict(logit_scale=0.25), "cohere2": ALTERNATING,
    "dbrx": dict(attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=10000.0),
                 ffn_config=dict(ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2)),
    "dots3_note_text": dict(num_key_value_heads=4),
    "falcon": dict(new_decoder_architecture=True, num_kv_heads=2, alibi=False),
    "gemma2": dict(num_hidden_layers=4), "gemma3_text": ALTERNATING,
    "gemma3n_text": ALTERNATING | dict(intermediate_size=[96] * 4, num_kv_shared_layers=2,
                                       activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0]),
    "gemma4_text": ALTERNATING | dict(num_kv_shared_layers=2, global_head_dim=32),
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]], num_layers=4, window_size=8),
    "gpt_oss": dict(num_hidden_layers=4),
    "granite": dict(embedding_multiplier=3.0, attention_multiplier=0.1, residual_multiplier=0.5,
                    logits_scaling=2.0),
    "granitemoehybrid": dict(layer_types=["attention"] * 3, position_embedding_type="rope"),
    "llama4_text": dict(num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0], moe_layers=[1, 3],
                        attn_scale=0.1, floor_scale=8),
    "minimax": dict(num_hidden_layers=4, layer_types=["full_attention", "linear_attention"] * 2),
    "olmo3": ALTERNATING, "persimmon": dict(partial_rotary_factor=0.5),
    "qwen2": ALTERNATING | dict(use_sliding_window=True),
    "qwen3": ALTERNATING | dict(use_sliding_window=True),
    "smollm3": dict(num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0], use_sliding_window=False,
                    layer_types=["full_attention"] * 4),
    "stablelm": dict(partial_rotary_factor=0.5),
    **dict.fromkeys(["axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32",
                     "glm4_moe_lite", "glm_moe_dsa", "kimi_linear", "longcat_flash", "minicpm3",
                     "sarvam_mla", "youtu"], LATENT),
    **dict.fromkeys(["bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart",
                     "mvp", "pegasus", "plbart", "trocr", "whisper"], DECODER_OF_THREE)}

TEXT: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0,
    bos_token_id=1, eos_token_id=2)
VISION: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=28,
    patch_size=14)
WITH_HEADS = TEXT | dict(head_dim=16)
GEMMA = WITH_HEADS | ALTERNATING | dict(sliding_window=8)
ROPES: dict[str, dict[str, Any]] = {
    "longrope": dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[4.0] * 8),
    "yarn": dict(rope_type="yarn", factor=4.0, mscale=0.7, mscale_all_dim=0.7,
                 original_max_position_embeddings=128)}
# further models, by a name of our own: the class without "ForCausalLM", and its config. The last
# word of a name says what it is about
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral top-1": ("Mixtral", WITH_HEADS | dict(num_local_experts=4, num_experts_per_tok=1)),
    "gpt_oss top-1": ("GptOss", WITH_HEADS | dict(num_local_experts=4, num_experts_per_tok=1,
                                                  sliding_window=8)),
    "qwen2_moe top-1": ("Qwen2Moe", TEXT | dict(
        num_experts=4, num_experts_per_tok=1, moe_intermediate_size=32,
        shared_expert_intermediate_size=32)),
    "phi3 longrope": ("Phi3", TEXT | dict(original_max_position_embeddings=40,
                                          rope_scaling=ROPES["longrope"])),
    "phi3 gelu": ("Phi3", TEXT | dict(hidden_act="gelu")),
    "llama dynamic": ("Llama", WITH_HEADS | dict(rope_scaling=dict(rope_type="dynamic",
                                                                   factor=4.0))),
    "llama gelu": ("Llama", WITH_HEADS | dict(hidden_act="gelu", mlp_bias=True)),
    "llama partial": ("Llama", WITH_HEADS | dict(rope_parameters=dict(
        rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5))),
    "gpt2 upcast": ("GPT2", dict(vocab_size=VOCAB_SIZE, n_embd=64, n_layer=3, n_head=4,
                                 n_positions=128, scale_attn_by_inverse_layer_idx=True,
                                 reorder_and_upcast_attn=True)),
    "deepseek_v2 yarn": ("DeepseekV2", TEXT | LATENT | dict(
        moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
        n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=16,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, rope_scaling=ROPES["yarn"])),
    "llama4 chunks": ("Llama4", WITH_HEADS | dict(
        intermediate_size_mlp=96, num_local_experts=2, num_experts_per_tok=1,
        attention_chunk_size=8, attn_temperature_tuning=False)),
    "lfm2 conv": ("Lfm2", WITH_HEADS | dict(
        layer_types=["conv", "full_attention"] * 2, block_ff_dim=96,
        block_auto_adjust_ff_dim=False)),
    "moshi wide": ("Moshi", WITH_HEADS | dict(ffn_dim=192, sliding_window=512)),
    "gemma3 images": ("Gemma3ForConditionalGeneration", dict(
        text_config=GEMMA, vision_config=VISION, mm_tokens_per_image=4, image_token_index=500,
        boi_token_index=501, eoi_token_index=502)),
    "gemma4_unified images": ("Gemma4UnifiedForConditionalGeneration", dict(
        text_config=GEMMA | dict(num_kv_shared_layers=0, global_head_dim=32,
                                 use_bidirectional_attention="vision"),
        image_token_id=500, video_token_id=501, boi_token_id=502, eoi_token_id=503,
        audio_token_id=504, boa_token_id=505)),
    "mistral3 images": ("Mistral3ForConditionalGeneration", dict(
        text_config=WITH_HEADS | dict(model_type="mistral"), image_token_index=500,
        vision_config=VISION | dict(model_type="pixtral", head_dim=16))),
    "qwen3_vl images": ("Qwen3VLForConditionalGeneration", dict(
        text_config=WITH_HEADS | dict(rope_scaling=dict(
            rope_type="default", mrope_section=[4, 2, 2], mrope_interleaved=True)),
        vision_config=dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=2,
                           out_hidden_size=64, deepstack_visual_indexes=[0]),
        image_token_id=500, video_token_id=501, vision_start_token_id=502,
        vision_end_token_id=503))}


class NotMade(Exception):
    """Why there is no tiny model of an architecture."""


def config_of(kind: str) -> PretrainedConfig:
    """Returns a small config of an architecture."""
    config_class: Any = CONFIG_MAPPING[kind]
    default = config_class()
    if all(getattr(default, name, None) is not None for name in ("text_config", "vision_config")):
        raise NotMade("multimodal")
    known = {*default.to_dict(), *inspect.signature(config_class.__init__).parameters}
    synonyms = getattr(config_class, "attribute_map", {})
    for each in config_class.__mro__:
        known |= {*getattr(each, "__annotations__", {})}
    known |= {*synonyms}
    # of two names of one number, a config wants one
    options = {name: value for name, value in SMALL.items()
               if name in known and synonyms.get(name) not in SMALL.keys() & known}
    kinds = [*dict.fromkeys(getattr(default, "layer_types", None) or ())]
    if kinds and "layer_types" in known:
        count = 3 if len(kinds) < 2 else 4
        options["layer_types"] = [kinds[i % len(kinds)] for i in range(count)]
        for name in {"num_hidden_layers", "n_layer", "num_layers"} & options.keys():
            options[name] = count
        if of_mlps := getattr(default, "mlp_layer_types", None):
            options["mlp_layer_types"] = (of_mlps[:2] + [of_mlps[-1]] * 2)[:count]
    config = config_class(**options | OWN.get(kind, {}))
    config.is_decoder = True
    config.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", False))
    return config


def fill(model: Any) -> None:
    """Fills a model with numbers that make attention sharp and norms differ from 1."""
    generator = torch.Generator().manual_seed(1)
    for name, weights in model.named_parameters():
        if not weights.is_floating_point() or "A_log" in name or "dt_bias" in name:
            continue
        drawn = torch.randn(weights.shape, generator=generator)
        if weights.ndim < 2 or "conv" in name:
            weights.add_(drawn * 0.2)
        elif "embed" in name or "wte" in name:
            weights.copy_(drawn * 0.6)
        else:
            weights.copy_(drawn * 1.3 / math.sqrt(weights.shape[-1]))


@torch.inference_mode()
def make(name: str, folder: Path) -> None:
    """Saves a tiny model in a folder. name: in ARCHITECTURES or VARIANTS. Raises an error of any
    kind if transformers cannot make it."""
    model_class: Any = AutoModelForCausalLM
    if name in VARIANTS:
        class_name, options = VARIANTS[name]
        if not class_name.endswith("Generation"):
            class_name += "LMHeadModel" if class_name == "GPT2" else "ForCausalLM"
        model_class = getattr(transformers, class_name)
        config = model_class.config_class(**options)
        build = model_class._from_config
    else:
        config = config_of(name)
        build = model_class.from_config
    with torch.device("meta"):
        size = sum(each.numel() for each in build(config, dtype=torch.float32).parameters())
    if size > MOST_PARAMETERS:
        raise NotMade(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = build(config, dtype=torch.float32).eval()
    fill(model)
    if not model(torch.arange(3, 24)[None]).logits.isfinite().all():
        raise NotMade("its logits are not finite")
    model.save_pretrained(folder)
