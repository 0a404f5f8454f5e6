"""GGUF files of families that transformers computes: Gemma 2 and 3, Phi 3 and 4.

A file leaves out numbers that llama.cpp has in its code, and stores some tensors in another form.
The numbers here are from llama.cpp (src/models), and the forms from its converter
(conversion/gemma.py and phi.py).
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
    """Returns the entries that both have.

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
    """Heads can be rotated in part, with factors for long and for short texts."""
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
        # what cos and sin are multiplied by; transformers works out the same
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


OF_GEMMA = {"post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
OF_PHI = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}

# by `general.architecture`
FAMILIES = {
    "gemma2": Family(gemma2, (
        "attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
        OF_GEMMA, norms=1.0),
    "gemma3": Family(gemma3, (
        "attention.sliding_window", "final_logit_softcapping", "rope.freq_base_swa"),
        OF_GEMMA, norms=1.0),
    "phi3": Family(phi3, (
        "attention.sliding_window", "rope.dimension_count", "rope.scaling.attn_factor"), OF_PHI)}
