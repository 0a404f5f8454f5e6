"""Models with experts: Mixtral, gpt-oss, OLMoE, those of Qwen, Granite, ERNIE and Hunyuan."""

from typing import Any

from nanoengine_extras.models.gguf.dense import OF_HUNYUAN, SCALES, granite
from nanoengine_extras.models.gguf.family import (
    AFTER, EXPERTS, SECTIONS, WINDOW, Family, windows)


def with_experts(header: Any, **others: list) -> dict[str, Any]:
    """Returns the entries of models with experts.

    others: the accepted values of some entries
    """
    accepted: dict[str, list] = {
        "expert_weights_scale": [1.0, 0.0], "expert_gating_func": [1, 0],
        "expert_shared_count": [0], "attention.clamp_kqv": [0.0], "expert_group_count": [0, 1]}
    for name, values in (accepted | others).items():
        header.accept(name, header.find(f"{header.architecture}.{name}", values[0]), values)
    used = header.of_model("expert_used_count")
    size = header.of_model("feed_forward_length")
    count = header.of_model("expert_count")
    return {"num_experts": count, "num_local_experts": count, "num_experts_per_tok": used,
            "moe_intermediate_size": header.of_model("expert_feed_forward_length", size // used),
            "norm_topk_prob": False}


def with_scaled_experts(header: Any) -> dict[str, Any]:
    """The weights of a token's experts are scaled to add up to 1."""
    return with_experts(header) | {"norm_topk_prob": True}


def qwen2moe(header: Any) -> dict[str, Any]:
    """A shared expert computes all tokens."""
    shared = header.of_model(
        "expert_shared_feed_forward_length", header.of_model("feed_forward_length"))
    return with_experts(header) | {"shared_expert_intermediate_size": shared}


def granitemoe(header: Any) -> dict[str, Any]:
    """With a shared expert, it is another model."""
    found = with_experts(header) | granite(header)
    shared = header.find("granitemoe.expert_shared_feed_forward_length", 0)
    return found if not shared else found | {
        "architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared",
        "shared_intermediate_size": shared}


def ernie(header: Any) -> dict[str, Any]:
    """Some layers, such as the first, have no experts."""
    shared = header.find("ernie4_5-moe.expert_shared_count", 0)
    found = with_experts(header, expert_shared_count=[shared])
    return {"moe_num_experts": found["num_experts"], "moe_k": found["num_experts_per_tok"],
            "moe_intermediate_size": found["moe_intermediate_size"],
            "moe_num_shared_experts": shared,
            "moe_layer_start_index": header.find("ernie4_5-moe.leading_dense_block_count", 0),
            "moe_layer_interval": header.of_model("interleave_moe_layer_step", 1)}


def hunyuan(header: Any) -> dict[str, Any]:
    """Each layer has one more expert, of the same size, for all tokens."""
    size = header.of_model("feed_forward_length")
    for kind in ("expert", "expert_shared"):
        name = f"{kind}_feed_forward_length"
        header.accept(name, header.of_model(name, size), [size])
    found = with_experts(header, expert_shared_count=[1])
    return {"num_experts": found["num_experts"], "moe_topk": found["num_experts_per_tok"]}


def gpt_oss(header: Any) -> dict[str, Any]:
    """Every second layer sees all keys. The limits between which YaRN mixes are not rounded."""
    return with_experts(header) | windows(header, period=2) | {
        "rope_parameters": header.rope() | {"truncate": False}}


OF_EXPERTS = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj", "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj"}
OF_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3", "ffn_down_exps": "block_sparse_moe.experts.w2"}
OF_GRANITE = {
    "ffn_gate_inp": "block_sparse_moe.router",
    "ffn_gate_exps": "block_sparse_moe.experts.gate_proj",
    "ffn_up_exps": "block_sparse_moe.experts.up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.down_proj",
    "ffn_gate_shexp": "shared_mlp.input_linear.gate", "ffn_up_shexp": "shared_mlp.input_linear.up",
    "ffn_down_shexp": "shared_mlp.output_linear"}
OF_ERNIE = OF_EXPERTS | {
    "exp_probs_b.bias": "mlp.gate.moe_statics.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj"}
OF_HUNYUAN_MOE = OF_EXPERTS | OF_HUNYUAN | {
    "ffn_gate_inp": "mlp.gate.wg", "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
    "ffn_up_shexp": "mlp.shared_mlp.up_proj", "ffn_down_shexp": "mlp.shared_mlp.down_proj"}
OF_GPT_OSS = OF_EXPERTS | AFTER | {
    "ffn_gate_inp": "mlp.router", "attn_sinks.weight": "self_attn.sinks"}
FAMILIES = {
    "qwen3moe": Family("Qwen3Moe", "qwen3_moe", OF_EXPERTS, EXPERTS, with_scaled_experts),
    "qwen2moe": Family("Qwen2Moe", "qwen2_moe", OF_EXPERTS, EXPERTS, qwen2moe, bias="qkv_bias"),
    "qwen3vlmoe": Family("Qwen3Moe", "qwen3_moe", OF_EXPERTS, EXPERTS | SECTIONS,
                         with_scaled_experts),
    "granitemoe": Family("GraniteMoe", "granitemoe", OF_GRANITE, EXPERTS | SCALES, granitemoe,
                         is_permuted=True),
    "ernie4_5-moe": Family("Ernie4_5_Moe", "ernie4_5_moe", OF_ERNIE, EXPERTS, ernie,
                           bias="use_bias"),
    "hunyuan-moe": Family("HunYuanMoEV1", "hunyuan_v1_moe", OF_HUNYUAN_MOE, EXPERTS, hunyuan),
    "gpt-oss": Family("GptOss", "gpt_oss", OF_GPT_OSS, EXPERTS | WINDOW, gpt_oss),
    "olmoe": Family("Olmoe", "olmoe", OF_EXPERTS, EXPERTS, with_experts),
    "mixtral": Family("Mixtral", "mixtral", OF_MIXTRAL, EXPERTS, with_scaled_experts,
                      is_permuted=True)}
