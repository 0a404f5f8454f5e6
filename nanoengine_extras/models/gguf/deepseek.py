"""Models that choose experts as DeepSeek does: DeepSeek V2 and V3, GLM-4.5 and 4.7, dots.llm1,
K-EXAONE, MiniMax M2."""

from typing import Any

from nanoengine.errors import rejected
from nanoengine_extras.models.gguf.experts import OF_EXPERTS, OF_MIXTRAL, with_experts
from nanoengine_extras.models.gguf.family import (
    EXPERTS, PART, WINDOW, Family, rotated_in_part, windows)

# how many groups of experts DeepSeek V2 and V3 have, and how many of them a token can use, by the
# number of experts: files from before October 2025 do not say it
GROUPS = {160: (8, 3), 256: (8, 4)}
SOFTMAX, SIGMOID = 1, 2


def routed(header: Any, gating: int, usual: tuple[int, int] = (1, 1)) -> dict[str, Any]:
    """Returns the entries about experts.

    gating, usual: the function that turns logits into weights, and the numbers of groups, for files
        that do not give them
    """
    arch = header.architecture
    groups, used = [header.of_model(f"expert_group_{part}count", number)
                    for part, number in zip(("", "used_"), usual)]
    return {
        "n_routed_experts": header.of_model("expert_count"),
        "num_experts_per_tok": header.of_model("expert_used_count"),
        "n_shared_experts": header.of_model("expert_shared_count"),
        "moe_intermediate_size": header.of_model("expert_feed_forward_length"),
        "first_k_dense_replace": header.find(f"{arch}.leading_dense_block_count", 0),
        "n_group": groups, "topk_group": used,
        # 0: they are not scaled
        "routed_scaling_factor": header.find(f"{arch}.expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": header.find(f"{arch}.expert_weights_norm", False),
        "gating": header.find(f"{arch}.expert_gating_func", 0) or gating}


def by_sigmoid(header: Any) -> dict[str, Any]:
    """Weights are sigmoids of logits, and a bias takes part in the choice."""
    found = routed(header, SIGMOID)
    header.accept("expert_gating_func", found.pop("gating"), [SIGMOID])
    return found


def dots1(header: Any) -> dict[str, Any]:
    """Its layers see all keys."""
    return by_sigmoid(header) | {
        "sliding_window": None, "layer_types": ["full_attention"] * header.of_model("block_count")}


def glm4moe(header: Any) -> dict[str, Any]:
    """GLM-4.5 norms the heads of queries and keys; GLM-4.5-Air does not."""
    has_norms = "blk.0.attn_q_norm.weight" in header.tensors
    return by_sigmoid(header) | rotated_in_part(header) | {"use_qk_norm": has_norms}


def exaone_moe(header: Any) -> dict[str, Any]:
    """Some layers, such as the first, have no experts."""
    found = by_sigmoid(header) | windows(header, period=4)
    return found | {"num_experts": found["n_routed_experts"],
                    "num_shared_experts": found["n_shared_experts"]}


def minimax(header: Any) -> dict[str, Any]:
    """Like Mixtral, but weights are sigmoids."""
    return with_experts(header, expert_gating_func=[SIGMOID]) | rotated_in_part(header)


def deepseek2(header: Any) -> dict[str, Any]:
    """Keys and values are made of one small vector (MLA). The converter splits this matrix in two,
    and stores the lengths of keys and values as `key_length_mla` and `value_length_mla`. Old files
    have the whole matrix, and no such entries.

    GLM-4.7-Flash and Moonlight are DeepSeek V3 in another size.
    """
    count = header.find("deepseek2.expert_count", 0)
    if not count:
        raise rejected("the file's expert_count", count, "at least 1, as in a model with experts")
    name = "attention.temperature_scale"
    header.accept(name, header.find(f"deepseek2.{name}", 0.0), [0.0])
    is_flash = len(header.find("tokenizer.ggml.tokens", [])) == 154880
    found = routed(header, SIGMOID if is_flash else SOFTMAX, GROUPS.get(count, (1, 1)))
    gating = found.pop("gating")
    header.accept("expert_gating_func", gating, [SOFTMAX, SIGMOID])
    rotated, rope = header.of_model("rope.dimension_count"), header.rope()
    size, of_values = (header.of_model(f"attention.{part}_length_mla", header.of_model(
        f"attention.{part}_length")) for part in ("key", "value"))
    if gating == SOFTMAX:
        header.accept("expert_weights_norm", found["norm_topk_prob"], [False])
        is_grouped = found["n_group"] > 1
        found |= {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
                  "topk_method": "group_limited_greedy" if is_grouped else "greedy"}
    # in float32, and divided by 10
    scale = round(10 * header.find("deepseek2.rope.scaling.yarn_log_multiplier", 0.0), 5)
    if rope["rope_type"] == "yarn" and scale:
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    heads = header.of_model("attention.head_count")
    return found | {
        "num_key_value_heads": heads, "head_dim": rotated, "rope_parameters": rope,
        "q_lora_rank": header.find("deepseek2.attention.q_lora_rank"),
        "kv_lora_rank": header.of_model("attention.kv_lora_rank"), "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": size - rotated, "v_head_dim": of_values, "rope_interleave": True}


OF_DEEPSEEK = OF_EXPERTS | {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj"}
OF_LATENT = OF_DEEPSEEK | {
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj", "attn_v_b": "self_attn.v_b_proj"}
FAMILIES = {
    "deepseek2": Family("DeepseekV3", "deepseek_v3", OF_LATENT, EXPERTS | PART | {
        "attention.value_length": "", "rope.scaling.yarn_log_multiplier": "",
        "nextn_predict_layers": ""}, deepseek2),
    "glm4moe": Family("Glm4Moe", "glm4_moe", OF_DEEPSEEK | {
        "post_attention_norm": "post_attention_layernorm"}, EXPERTS | PART | {
        "nextn_predict_layers": ""}, glm4moe),
    "dots1": Family("Dots1", "dots1", OF_DEEPSEEK, EXPERTS, dots1),
    "exaone-moe": Family("ExaoneMoe", "exaone_moe", OF_DEEPSEEK, EXPERTS | WINDOW | {
        "nextn_predict_layers": ""}, exaone_moe),
    "minimax-m2": Family("MiniMaxM2", "minimax_m2", OF_MIXTRAL | {
        "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"}, EXPERTS | PART, minimax)}
