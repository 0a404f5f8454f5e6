"""Gemma 1 to 4, and 3n."""

from statistics import NormalDist
from typing import Any

import numpy as np

from nanoengine_extras.models.gguf.family import (
    CAP, EXPERTS, WINDOW, Family, by_layer, windows)


def gemma2(header: Any) -> dict[str, Any]:
    """Every second layer sees all keys."""
    return gemma(header, period=2, largest=46) | {
        "attn_logit_softcapping": header.of_model("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": header.of_model("final_logit_softcapping", 30.0)}


def gemma3(header: Any) -> dict[str, Any]:
    """Every sixth layer sees all keys. The others have their own angles, which are not scaled.
    """
    local = header.of_model("rope.freq_base_swa", 10000.0)
    return gemma(header, period=6, largest=62) | {
        "final_logit_softcapping": header.find(f"{header.architecture}.final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": header.rope(),
            "sliding_attention": {"rope_type": "default", "rope_theta": local}}}


def gemma(header: Any, period: int, largest: int) -> dict[str, Any]:
    """Returns the entries that Gemma 2 and Gemma 3 share.

    largest: how many layers the largest model has, which scales its scores differently.
    """
    scale = header.head_dim()
    if header.of_model("block_count") == largest:
        scale = header.of_model("embedding_length") // header.of_model("attention.head_count")
    return {"query_pre_attn_scalar": scale} | windows(header, period)


def gemma3n(header: Any) -> dict[str, Any]:
    """Layers have several inputs, of which attention sees the first (AltUp). In some, a gate passes
    only what is far above the mean: the file says how many standard deviations."""
    header.accept("altup.active_idx", header.find("gemma3n.altup.active_idx"), [0])
    above = by_layer(header, "activation_sparsity_scale")
    embeddings = header.tensor("per_layer_token_embd.weight")
    return gemma3(header) | windows(header, period=5) | {
        # files of 2025 do not say it
        "final_logit_softcapping": header.find("gemma3n.final_logit_softcapping", 30.0),
        "activation_sparsity_pattern": [round(NormalDist().cdf(each), 6) for each in above],
        "vocab_size_per_layer_input": int(embeddings.shape[1]),
        "laurel_rank": int(header.tensor("blk.0.laurel_l.weight").shape[1])}


def gemma4(header: Any) -> dict[str, Any]:
    """Layers that see all keys have larger heads, of which only the first numbers are rotated.

    E2B and E4B have more embeddings, for each layer, and their last layers have no keys of their
    own; in the other models, values can be keys. 26B-A4B also has experts.
    """
    count, size = header.of_model("block_count"), header.of_model("attention.key_length_swa")
    shared = header.find("gemma4.attention.shared_kv_layers", 0)
    found = windows(header, period=6)
    is_full = [kind == "full_attention" for kind in found["layer_types"]]
    # transformers lets the last layer see all keys
    header.accept("attention.sliding_window_pattern[-1]", not is_full[-1], [False])
    first = next((place for place in range(count) if not is_full[place]), 0)
    first_full = is_full.index(True)
    heads = by_layer(header, "attention.head_count_kv")
    sizes = by_layer(header, "feed_forward_length")
    is_wide = sizes[0] != sizes[-1]
    others = {
        "attention.head_count_kv": (heads, [
            heads[first_full if each else first] for each in is_full]),
        "feed_forward_length": (sizes, [
            sizes[0] * (1 + (is_wide and place >= count - shared)) for place in range(count)]),
        "attention.value_length_swa": (header.of_model("attention.value_length_swa"), size),
        "rope.dimension_count_swa": (header.of_model("rope.dimension_count_swa", size), size),
        "rope.scaling.type": (header.find("gemma4.rope.scaling.type", "none"), "none"),
        "rope.scaling.factor": (header.find("gemma4.rope.scaling.factor", 1.0), 1.0),
        "expert_weights_scale": (header.find("gemma4.expert_weights_scale", 0.0) or 1.0, 1.0)}
    for name, (given, usual) in others.items():
        header.accept(name, given, [usual])
    num_experts = header.find("gemma4.expert_count", 0)
    embeddings = header.tensors.get("per_layer_token_embd.weight")
    found |= {
        "head_dim": size, "global_head_dim": header.head_dim(),
        "num_key_value_heads": heads[first], "num_global_key_value_heads": heads[first_full],
        "attention_k_eq_v": f"blk.{first_full}.attn_v.weight" not in header.tensors,
        "num_kv_shared_layers": shared, "use_double_wide_mlp": is_wide,
        "hidden_size_per_layer_input": header.find("gemma4.embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": int(embeddings.shape[1]) if embeddings else 1,
        "final_logit_softcapping": header.find("gemma4.final_logit_softcapping"),
        "enable_moe_block": bool(num_experts), "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional", "partial_rotary_factor": rotated(header),
                "rope_theta": header.of_model("rope.freq_base")},
            "sliding_attention": {
                "rope_type": "default", "rope_theta": header.of_model("rope.freq_base_swa")}}}
    if num_experts:
        found |= {"num_experts": num_experts, "top_k_experts": header.of_model("expert_used_count"),
                  "moe_intermediate_size": header.of_model("expert_feed_forward_length")}
    return found


def without_keys(header: Any) -> dict[str, list | None]:
    """The last layers use the keys and values of others, but a file can have their matrices."""
    shared = header.find(f"{header.architecture}.attention.shared_kv_layers", 0)
    return {f"layers.{header.num_layers - 1 - place}.self_attn.{part}.weight": None
            for place in range(shared) for part in ("k_proj", "v_proj", "k_norm")}


def rotated(header: Any) -> float:
    """Returns the fraction of a head that is rotated. The file divides frequencies by 1 or by
    1e30."""
    factors = header.tensor("rope_freqs.weight").data
    count = int((factors == 1).sum())
    known = [1.0] * count + [float(np.float32(1e30))] * (len(factors) - count)
    header.accept("rope_freqs.weight", factors.tolist(), [known])
    return count / len(factors)


OF_GEMMA = {"post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
OF_INPUTS = OF_GEMMA | {
    "per_layer_token_embd": "embed_tokens_per_layer",
    "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm", "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm"}
# a name that ends with a dot is that of a list of matrices
OF_GEMMA_3N = OF_INPUTS | {
    "altup_proj": "altup_projections.", "altup_unembd_proj": "altup_unembed_projections.",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_correct_coef": "altup.correction_coefs", "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router", "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left", "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm"}
OF_GEMMA_4 = OF_INPUTS | {
    "layer_output_scale.weight": "layer_scalar", "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps": "experts.gate_up_proj", "ffn_gate_exps": "experts.gate_proj",
    "ffn_up_exps": "experts.up_proj", "ffn_down_exps": "experts.down_proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2"}
FAMILIES = {
    "gemma": Family("Gemma", "gemma", norms=1.0),
    "gemma2": Family("Gemma2", "gemma2", OF_GEMMA, WINDOW | CAP | {
        "attn_logit_softcapping": ""}, gemma2, norms=1.0),
    "gemma3": Family("Gemma3", "gemma3_text", OF_GEMMA, WINDOW | CAP | {
        "rope.freq_base_swa": ""}, gemma3, norms=1.0),
    "gemma3n": Family("Gemma3n", "gemma3n_text", OF_GEMMA_3N, WINDOW | CAP | {
        "rope.freq_base_swa": "", "altup.num_inputs": "altup_num_inputs",
        "attention.shared_kv_layers": "num_kv_shared_layers",
        "embedding_length_per_layer_input": "hidden_size_per_layer_input"}, gemma3n,
        changes=without_keys),
    "gemma4": Family("Gemma4", "gemma4_text", OF_GEMMA_4, WINDOW | CAP | EXPERTS | dict.fromkeys((
        "rope.freq_base_swa", "attention.key_length_swa", "attention.value_length_swa",
        "rope.dimension_count_swa", "attention.shared_kv_layers",
        "embedding_length_per_layer_input"), ""), gemma4, lists=(
            "attention.head_count_kv", "feed_forward_length"), changes=without_keys)}
