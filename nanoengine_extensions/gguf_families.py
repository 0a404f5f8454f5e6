"""GGUF files of families that transformers computes: Gemma 2 and 3, Phi 3 and 4, and
models with experts: Qwen 2 and 3, Mixtral and OLMoE.

A file leaves out numbers that llama.cpp has in its code, and stores some tensors in another form.
The numbers here are from llama.cpp (src/models), and the forms from its converter
(conversion/gemma.py, phi.py and others).
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Family(NamedTuple):
    """What differs from a Llama.

    config: turns a `Header` (quantized/gguf_files.py) into further entries of config.json.
    reads: the names of the file's entries that `config` takes into account.
    names: the names of a layer's tensors.
    norms: what the converter has added to the weights of norms.
    """

    config: Callable[[Any], dict[str, Any]]
    reads: tuple[str, ...]
    names: dict[str, str]
    norms: float = 0.0


def gemma2(header: Any) -> dict[str, Any]:
    """Every second layer sees all keys."""
    return gemma(header, period=2, largest=46) | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attn_logit_softcapping": header.of_model("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": header.of_model("final_logit_softcapping", 30.0)}


def gemma3(header: Any) -> dict[str, Any]:
    """Every sixth layer sees all keys. The others have their own angles, which are not scaled.
    """
    local = header.of_model("rope.freq_base_swa", 10000.0)
    return gemma(header, period=6, largest=62) | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "final_logit_softcapping": header.find("gemma3.final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": header.rope(),
            "sliding_attention": {"rope_type": "default", "rope_theta": local}}}


def gemma(header: Any, period: int, largest: int) -> dict[str, Any]:
    """Returns the entries that Gemma 2 and Gemma 3 share.

    period: a layer sees all keys if its number, counted from 1, is a multiple of this.
    largest: how many layers the largest model has, which scales its scores differently.
    """
    name = "attention.sliding_window_pattern"
    header.accept(name, header.find(f"{header.architecture}.{name}", period), [period])
    num_layers = header.of_model("block_count")
    scale = header.head_dim()
    if num_layers == largest:
        scale = header.of_model("embedding_length") // header.of_model("attention.head_count")
    kinds = ["full_attention" if (index + 1) % period == 0 else "sliding_attention"
             for index in range(num_layers)]
    return {"query_pre_attn_scalar": scale, "layer_types": kinds, "rope_parameters": header.rope(),
            "sliding_window": header.of_model("attention.sliding_window"),
            "pad_token_id": header.find("tokenizer.ggml.padding_token_id", 0)}


def phi3(header: Any) -> dict[str, Any]:
    """Part of each head can be rotated, with factors for long and for short texts."""
    head_dim = header.head_dim()
    rotated = header.of_model("rope.dimension_count", head_dim)
    rope: dict[str, Any] = {
        "rope_type": "default", "rope_theta": header.of_model("rope.freq_base", 10000.0),
        "partial_rotary_factor": rotated / head_dim}
    longest = header.of_model("context_length")
    original = header.of_model("rope.scaling.original_context_length", longest)
    accepted: dict[str, list] = {
        "type": ["none", "longrope"], "factor": [1.0], "attn_factor": [1.0]}
    names = {f"{kind}_factor": f"rope_factors_{kind}.weight" for kind in ("long", "short")}
    if any(name in header.tensors for name in names.values()):
        factors = {key: header.tensor(name).data.tolist() for key, name in names.items()}
        rope |= {"rope_type": "longrope", "factor": longest / original,
                 "original_max_position_embeddings": original} | factors
        # what cos and sin are multiplied by; transformers works out the same number
        if scale := header.find("phi3.rope.scaling.attn_factor"):
            rope["attention_factor"] = scale
            accepted["attn_factor"] = [scale]
    for name, values in accepted.items():
        given = header.find(f"phi3.rope.scaling.{name}", values[0])
        header.accept(f"rope.scaling.{name}", given, values)
    # Phi 4 has 0
    window = header.find("phi3.attention.sliding_window") or None
    return {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "rope_parameters": rope,
            "sliding_window": window, "original_max_position_embeddings": original,
            "pad_token_id": header.find("tokenizer.ggml.padding_token_id")}


def with_experts(header: Any, kind: str, model_type: str, is_normed: bool) -> dict[str, Any]:
    """Returns the entries of a model with experts.

    is_normed: whether the weights of a token's experts are scaled to add up to 1
    """
    accepted: dict[str, list] = {
        "expert_weights_scale": [1.0, 0.0], "expert_gating_func": [1, 0],
        "expert_shared_count": [0], "attention.clamp_kqv": [0.0], "expert_group_count": [0, 1]}
    for name, values in accepted.items():
        header.accept(name, header.find(f"{header.architecture}.{name}", values[0]), values)
    used = header.of_model("expert_used_count")
    size = header.of_model("feed_forward_length")
    count = header.of_model("expert_count")
    return {"architectures": [f"{kind}ForCausalLM"], "model_type": model_type,
            "num_experts": count, "num_local_experts": count, "num_experts_per_tok": used,
            "moe_intermediate_size": header.of_model("expert_feed_forward_length", size // used),
            "norm_topk_prob": is_normed, "rope_parameters": header.rope()}


def qwen3moe(header: Any) -> dict[str, Any]:
    return with_experts(header, "Qwen3Moe", "qwen3_moe", is_normed=True)


def qwen2moe(header: Any) -> dict[str, Any]:
    """One more expert computes all tokens."""
    shared = header.of_model(
        "expert_shared_feed_forward_length", header.of_model("feed_forward_length"))
    return with_experts(header, "Qwen2Moe", "qwen2_moe", is_normed=False) | {
        "qkv_bias": "blk.0.attn_q.bias" in header.tensors,
        "shared_expert_intermediate_size": shared}


def olmoe(header: Any) -> dict[str, Any]:
    return with_experts(header, "Olmoe", "olmoe", is_normed=False)


def mixtral(header: Any) -> dict[str, Any]:
    return with_experts(header, "Mixtral", "mixtral", is_normed=True)


OF_GEMMA = {"post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
OF_PHI = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
OF_EXPERTS = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj", "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj"}
OF_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3", "ffn_down_exps": "block_sparse_moe.experts.w2"}

# by `general.architecture`; the last one is a "llama" with experts
FAMILIES = {
    "gemma2": Family(gemma2, (
        "attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
        OF_GEMMA, norms=1.0),
    "gemma3": Family(gemma3, (
        "attention.sliding_window", "final_logit_softcapping", "rope.freq_base_swa"),
        OF_GEMMA, norms=1.0),
    "phi3": Family(phi3, (
        "attention.sliding_window", "rope.dimension_count", "rope.scaling.attn_factor"), OF_PHI),
    "qwen3moe": Family(qwen3moe, ("expert_count",), OF_EXPERTS),
    "qwen2moe": Family(qwen2moe, ("expert_count",), OF_EXPERTS),
    "olmoe": Family(olmoe, ("expert_count",), OF_EXPERTS),
    "mixtral": Family(mixtral, ("expert_count",), OF_MIXTRAL)}
