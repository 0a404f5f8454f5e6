"""What files of dense models leave out: Gemma 2 to 4 and 3n, Phi 3, OLMo, StableLM, Mistral and
Apertus."""

import math
from statistics import NormalDist
from typing import Any

import numpy as np

from nanoengine_extras.models.gguf.experts import experts
from nanoengine_extras.models.gguf.layers import by_layer, local_and_global, rope, rotated, windows

CAP = "final_logit_softcapping"


def scores(header: Any, largest: int) -> dict[str, Any]:
    """Returns how scores are scaled.

    largest: how many layers the largest model has, which scales its scores differently
    """
    scale = header.head_dim()
    if header.number("block_count") == largest:
        scale = header.number("embedding_length") // header.number("attention.head_count")
    return {"query_pre_attn_scalar": scale}


def gemma2(header: Any) -> dict[str, Any]:
    return scores(header, largest=46) | {
        "attn_logit_softcapping": header.number("attn_logit_softcapping", 50.0),
        CAP: header.number(CAP, 30.0)}


def gemma3(header: Any) -> dict[str, Any]:
    return scores(header, largest=62) | local_and_global(header, 10000.0) | {
        CAP: header.entry(CAP)}


def gemma3n(header: Any) -> dict[str, Any]:
    """Layers have several inputs, of which attention sees the first (AltUp). In some, a gate passes
    only what is far above the mean: the file says how many standard deviations."""
    above = by_layer(header, "activation_sparsity_scale")
    embeddings = header.tensor("per_layer_token_embd.weight")
    return gemma3(header) | {
        # files of 2025 do not say it
        CAP: header.entry(CAP, 30.0),
        "activation_sparsity_pattern": [round(NormalDist().cdf(each), 6) for each in above],
        "vocab_size_per_layer_input": int(embeddings.shape[1]),
        "laurel_rank": int(header.tensor("blk.0.laurel_l.weight").shape[1])}


def gemma4(header: Any) -> dict[str, Any]:
    """Layers that see all keys have larger heads, of which only the first numbers are rotated.

    E2B and E4B have more embeddings, for each layer, and their last layers have no keys of their
    own; in the other models, values can be keys. 26B-A4B also has experts.
    """
    count, size = header.number("block_count"), header.number("attention.key_length_swa")
    shared = header.entry("attention.shared_kv_layers", 0)
    found = windows(header, period=6)
    is_full = [kind == "full_attention" for kind in found["layer_types"]]
    # transformers lets the last layer see all keys
    header.accept("attention.sliding_window_pattern[-1]", not is_full[-1], [False])
    first = next((place for place in range(count) if not is_full[place]), 0)
    first_full = is_full.index(True)
    heads = by_layer(header, "attention.head_count_kv")
    sizes = by_layer(header, "feed_forward_length")
    is_wide = sizes[0] != sizes[-1]
    header.accept("attention.head_count_kv", heads, [
        [heads[first_full if each else first] for each in is_full]])
    header.accept("feed_forward_length", sizes, [
        [sizes[0] * (1 + (is_wide and place >= count - shared)) for place in range(count)]])
    header.accept("attention.value_length_swa", header.number("attention.value_length_swa"), [size])
    header.expect("rope.dimension_count_swa", size)
    num_experts = header.entry("expert_count", 0)
    embeddings = header.tensors.get("per_layer_token_embd.weight")
    found |= {
        "head_dim": size, "global_head_dim": header.head_dim(),
        "num_key_value_heads": heads[first], "num_global_key_value_heads": heads[first_full],
        "attention_k_eq_v": f"blk.{first_full}.attn_v.weight" not in header.tensors,
        "num_kv_shared_layers": shared, "use_double_wide_mlp": is_wide,
        "hidden_size_per_layer_input": header.entry("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": int(embeddings.shape[1]) if embeddings else 1,
        CAP: header.entry(CAP), "enable_moe_block": bool(num_experts), "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional", "partial_rotary_factor": proportion(header),
                "rope_theta": header.number("rope.freq_base")},
            "sliding_attention": {
                "rope_type": "default", "rope_theta": header.number("rope.freq_base_swa")}}}
    return found | (experts(header) if num_experts else {})


def proportion(header: Any) -> float:
    """Returns the fraction of a head that is rotated. The file divides frequencies by 1 or by
    1e30."""
    factors = header.tensor("rope_freqs.weight").data
    count = int((factors == 1).sum())
    known = [1.0] * count + [float(np.float32(1e30))] * (len(factors) - count)
    header.accept("rope_freqs.weight", factors.tolist(), [known])
    return count / len(factors)


def without_keys(header: Any) -> dict[str, list | None]:
    """The last layers use the keys and values of others, but a file can have their matrices."""
    shared = header.entry("attention.shared_kv_layers", 0)
    return {f"layers.{header.num_layers - 1 - place}.self_attn.{part}.weight": None
            for place in range(shared) for part in ("k_proj", "v_proj", "k_norm")}


def phi3(header: Any) -> dict[str, Any]:
    """Part of each head can be rotated, with factors for long and for short texts."""
    found: dict[str, Any] = {
        "rope_type": "default", "rope_theta": header.number("rope.freq_base", 10000.0),
        "partial_rotary_factor": rotated(header)}
    longest = header.number("context_length")
    original = header.number("rope.scaling.original_context_length", longest)
    names = {f"{kind}_factor": f"rope_factors_{kind}.weight" for kind in ("long", "short")}
    if any(name in header.tensors for name in names.values()):
        factors = {key: header.tensor(name).data.tolist() for key, name in names.items()}
        found |= {"rope_type": "longrope", "factor": longest / original,
                  "original_max_position_embeddings": original} | factors
        # the factor of cos and sin; transformers computes the same one
        if scale := header.entry("rope.scaling.attn_factor"):
            found["attention_factor"] = scale
    # Phi 4 has 0
    window = header.entry("attention.sliding_window") or None
    return {"rope_parameters": found, "sliding_window": window,
            "original_max_position_embeddings": original}


def olmo2(header: Any) -> dict[str, Any]:
    """OLMo 3 has windows; only the angles of the other layers are scaled."""
    # YaRN's factor of cos and sin; transformers computes the same one
    usual = 0.1 * math.log(header.number("rope.scaling.factor", 1.0)) + 1
    header.expect("rope.scaling.yarn_attn_factor", 1.0, float(np.float32(usual)))
    if header.entry("attention.sliding_window") is None:
        return {}
    theta = header.number("rope.freq_base", 10000.0)
    return {"model_type": "olmo3"} | local_and_global(header, theta)


def stablelm(header: Any) -> dict[str, Any]:
    """The MLP of some models has the same input as the attention. The largest one also has a norm
    for each head."""
    name = "blk.0.attn_q_norm.weight"
    header.accept(name, name in header.tensors, [False])
    return {"use_parallel_residual": "blk.0.ffn_norm.weight" not in header.tensors}


def mistral3(header: Any) -> dict[str, Any]:
    """Ministral 3 scales queries that are far from the beginning; Mistral Small 3 does not."""
    beta = header.entry("attention.temperature_scale")
    scale = header.entry("rope.scaling.yarn_log_multiplier", 0.0)
    if beta is None:
        return {"model_type": "mistral", "sliding_window": None}
    return {"rope_parameters": rope(header) | {
        "llama_4_scaling_beta": beta, "mscale": 1.0, "mscale_all_dim": scale}}


def of_activations(header: Any) -> dict[str, list | None]:
    """Each layer of Apertus has an activation of its own (xIELU), of four numbers."""
    found: dict[str, list | None] = {}
    for name, shape in XIELU.items():
        field = header.fields.get(f"xielu.{name}")
        count = field.parts[-1].size if field else 0
        header.accept(f"xielu.{name}", f"{count} numbers", [f"{header.num_layers} numbers"])
        # after the name and its length, the type, and the type and the length of the array
        start = field.offset + sum(each.nbytes for each in field.parts[:-1]) + 12
        for layer in range(count):
            found[f"layers.{layer}.mlp.act_fn.{name}"] = ["F32", shape, start + 4 * layer, 4]
    return found


# the shapes of numbers in transformers
XIELU: dict[str, list[int]] = {"alpha_p": [1], "alpha_n": [1], "beta": [], "eps": []}
