"""What files of models with experts leave out."""

from typing import Any

from nanoengine_extras.models.gguf.layers import rope

# how many groups of experts DeepSeek V2 and V3 have, and how many of them a token can use, by the
# number of experts: files from before October 2025 do not say it
GROUPS = {160: (8, 3), 256: (8, 4)}
# the functions that turn logits into weights
SOFTMAX, SIGMOID = 1, 2


def experts(header: Any) -> dict[str, Any]:
    """Returns what a file says of experts, by the names that this has in different models.

    Some layers, such as the first, have none. Shared experts compute all tokens.
    """
    size, used = header.number("feed_forward_length"), header.number("expert_used_count")
    shared = header.find(f"{header.architecture}.expert_shared_count", 0)
    dense = header.entry("leading_dense_block_count", 0)
    named = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    named_used = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
    named_shared = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    named_size = ("shared_expert_intermediate_size", "shared_intermediate_size")
    return {
        **dict.fromkeys(named, header.number("expert_count")),
        **dict.fromkeys(named_used, used),
        **dict.fromkeys(named_shared, shared),
        **dict.fromkeys(named_size, header.number("expert_shared_feed_forward_length", size)),
        **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index"), dense),
        "moe_intermediate_size": header.number("expert_feed_forward_length", size // used),
        "moe_layer_interval": header.number("interleave_moe_layer_step", 1),
        # whether the weights of a token's experts are scaled to add up to 1
        "norm_topk_prob": header.family.model_type == "qwen3_moe"}


def granitemoe(header: Any) -> dict[str, Any]:
    """With a shared expert, it is another model."""
    has_shared = header.entry("expert_shared_feed_forward_length", 0) > 0
    return {"model_type": "granitemoeshared"} if has_shared else {}


def hunyuan(header: Any) -> dict[str, Any]:
    """Each layer has one more expert, of the same size, for all tokens."""
    size = header.number("feed_forward_length")
    for kind in ("expert", "expert_shared"):
        header.expect(f"{kind}_feed_forward_length", size)
    return {}


def routed(header: Any, groups: tuple[int, int] = (1, 1)) -> dict[str, Any]:
    """Returns the entries of models that choose experts as DeepSeek does.

    groups: for files that do not name them
    """
    return {
        "n_group": header.number("expert_group_count", groups[0]),
        "topk_group": header.number("expert_group_used_count", groups[1]),
        "norm_topk_prob": header.entry("expert_weights_norm", False),
        # 0: they are not scaled
        "routed_scaling_factor": header.entry("expert_weights_scale", 0.0) or 1.0}


def deepseek2(header: Any) -> dict[str, Any]:
    """Keys and values are made of one small vector (MLA). The converter splits this matrix in two,
    and stores the lengths of keys and values as `key_length_mla` and `value_length_mla`. Old files
    have the whole matrix, and no such entries.

    GLM-4.7-Flash and Moonlight are DeepSeek V3 in another size.
    """
    found = routed(header, GROUPS.get(header.number("expert_count"), (1, 1)))
    is_flash = len(header.find("tokenizer.ggml.tokens", [])) == 154880
    gating = header.entry("expert_gating_func", 0) or (SIGMOID if is_flash else SOFTMAX)
    header.accept("expert_gating_func", gating, [SOFTMAX, SIGMOID])
    if gating == SOFTMAX:
        header.accept("expert_weights_norm", found["norm_topk_prob"], [False])
        is_grouped = found["n_group"] > 1
        found |= {"model_type": "deepseek_v2",
                  "topk_method": "group_limited_greedy" if is_grouped else "greedy"}
    turned = rope(header)
    # in float32, and divided by 10
    scale = round(10 * header.entry("rope.scaling.yarn_log_multiplier", 0.0), 5)
    if turned["rope_type"] == "yarn" and scale:
        turned |= {"mscale": scale, "mscale_all_dim": scale}
    rotated = header.number("rope.dimension_count")
    size, of_values = (header.number(f"attention.{part}_length_mla", header.number(
        f"attention.{part}_length")) for part in ("key", "value"))
    return found | {
        "num_key_value_heads": header.number("attention.head_count"), "head_dim": rotated,
        "rope_parameters": turned, "rope_interleave": True,
        "q_lora_rank": header.entry("attention.q_lora_rank"),
        "kv_lora_rank": header.number("attention.kv_lora_rank"), "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": size - rotated, "v_head_dim": of_values}
