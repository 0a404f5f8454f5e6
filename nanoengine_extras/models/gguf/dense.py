"""Dense models besides Gemma: GPT-2, Phi, Granite, OLMo, Command R and others."""

import math
from functools import partial
from typing import Any

import numpy as np

from nanoengine_extras.models.gguf.family import (
    AFTER, EPS, PART, SECTIONS, WINDOW, Family, rotated_in_part, windows)


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
        # the factor of cos and sin; transformers computes the same one
        if scale := header.find("phi3.rope.scaling.attn_factor"):
            rope["attention_factor"] = scale
            accepted["attn_factor"] = [scale]
    for name, values in accepted.items():
        given = header.find(f"phi3.rope.scaling.{name}", values[0])
        header.accept(f"rope.scaling.{name}", given, values)
    # Phi 4 has 0
    window = header.find("phi3.attention.sliding_window") or None
    return {"rope_parameters": rope, "sliding_window": window,
            "original_max_position_embeddings": original}


def olmo2(header: Any) -> dict[str, Any]:
    """OLMo 3 has windows; only the angles of the other layers are scaled."""
    # YaRN's factor of cos and sin; transformers computes the same one
    name = "rope.scaling.yarn_attn_factor"
    usual = 0.1 * math.log(header.of_model("rope.scaling.factor", 1.0)) + 1
    header.accept(name, header.find(f"olmo2.{name}", 1.0), [1.0, float(np.float32(usual))])
    if "olmo2.attention.sliding_window" not in header.fields:
        return {}
    theta = header.of_model("rope.freq_base", 10000.0)
    local = {"rope_type": "default", "rope_theta": header.of_model("rope.freq_base_swa", theta)}
    return windows(header, period=4) | {
        "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3",
        "rope_parameters": {"full_attention": header.rope(), "sliding_attention": local}}


def granite(header: Any) -> dict[str, Any]:
    """A file can say that positions do not count."""
    name = "rope.scaling.finetuned"
    header.accept(name, header.find(f"{header.architecture}.{name}", True), [True])
    return {}


def command_r(header: Any) -> dict[str, Any]:
    """Command R+ has a norm for each head."""
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors}


def starcoder2(header: Any) -> dict[str, Any]:
    """All of its models have this window, which files leave out."""
    return {"sliding_window": 4096}


def stablelm(header: Any) -> dict[str, Any]:
    """The MLP of some models has the same input as the attention. The largest one also has a norm
    for each head."""
    name = "blk.0.attn_q_norm.weight"
    header.accept(name, name in header.tensors, [False])
    is_parallel = "blk.0.ffn_norm.weight" not in header.tensors
    return rotated_in_part(header) | {"use_parallel_residual": is_parallel}


def mistral3(header: Any) -> dict[str, Any]:
    """Ministral 3 scales queries that are far from the beginning; Mistral Small 3 does not."""
    beta = header.find("mistral3.attention.temperature_scale")
    if beta is None:
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral",
                "sliding_window": None}
    scale = header.find("mistral3.rope.scaling.yarn_log_multiplier", 0.0)
    return {"rope_parameters": header.rope() | {
        "llama_4_scaling_beta": beta, "mscale": 1.0, "mscale_all_dim": scale}}


def exaone4(header: Any) -> dict[str, Any]:
    """Only the largest model has windows."""
    if "exaone4.attention.sliding_window" in header.fields:
        return windows(header, period=4)
    count = header.of_model("block_count")
    return {"sliding_window": None, "layer_types": ["full_attention"] * count}


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
OF_PHI = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
OF_GLM = {"post_attention_norm": "post_self_attn_layernorm",
          "post_ffw_norm": "post_mlp_layernorm", "ffn_up": "mlp.gate_up_proj"}
OF_HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
OF_APERTUS = {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
OF_GPT_2 = {
    "blk": "h", "token_embd": "wte", "position_embd": "wpe", "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj", "output_norm": "ln_f"}
OF_PHI_2 = {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
            "output_norm": "final_layernorm"}
SCALES = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}
# by `general.architecture`
FAMILIES = {
    "gpt2": Family("GPT2", "gpt2", OF_GPT_2, {
        EPS: "layer_norm_epsilon", "feed_forward_length": "n_inner"}, lambda header: {
        "architectures": ["GPT2LMHeadModel"]}),
    "phi2": Family("Phi", "phi", OF_PHI_2, PART | {EPS: "layer_norm_eps"}, rotated_in_part),
    "phi3": Family("Phi3", "phi3", OF_PHI, WINDOW | PART | {
        "rope.scaling.attn_factor": ""}, phi3),
    "smollm3": Family("SmolLM3", "smollm3", is_permuted=True),
    "apertus": Family("Apertus", "apertus", OF_APERTUS, changes=of_activations),
    "arcee": Family("Arcee", "arcee", is_permuted=True),
    "mistral3": Family("Ministral3", "ministral3", {}, {
        "rope.scaling.yarn_log_multiplier": ""}, mistral3, is_permuted=True),
    "granite": Family("Granite", "granite", {}, SCALES, granite, is_permuted=True),
    "olmo": Family("Olmo", "olmo", {}, {}, lambda header: {
        "clip_qkv": header.find("olmo.attention.clamp_kqv")}, is_permuted=True),
    "olmo2": Family("Olmo2", "olmo2", AFTER, WINDOW | {
        "rope.freq_base_swa": "", "rope.scaling.yarn_attn_factor": ""}, olmo2),
    "exaone": Family("Llama", "llama"),
    "exaone4": Family("Exaone4", "exaone4", AFTER, WINDOW, exaone4),
    "glm4": Family("Glm4", "glm4", OF_GLM, PART, rotated_in_part),
    "command-r": Family("Cohere", "cohere", {}, {
        EPS: "layer_norm_eps", "logit_scale": "logit_scale"}, command_r),
    "cohere2": Family("Cohere2", "cohere2", {}, WINDOW | {
        EPS: "layer_norm_eps", "logit_scale": "logit_scale"}, partial(windows, period=4)),
    "starcoder2": Family("Starcoder2", "starcoder2", {
        "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}, {EPS: "norm_epsilon"}, starcoder2,
        bias="use_bias"),
    "stablelm": Family("StableLm", "stablelm", {}, PART | {EPS: "layer_norm_eps"}, stablelm,
                       bias="use_qkv_bias"),
    "nemotron": Family("Nemotron", "nemotron", {}, PART | {EPS: "norm_eps"}, rotated_in_part,
                       norms=1.0),
    "qwen2vl": Family("Qwen2", "qwen2", {}, SECTIONS),
    "qwen3vl": Family("Qwen3", "qwen3", {}, SECTIONS),
    "ernie4_5": Family("Ernie4_5", "ernie4_5", bias="use_bias"),
    "seed_oss": Family("SeedOss", "seed_oss", AFTER),
    "hunyuan-dense": Family("HunYuanDenseV1", "hunyuan_v1_dense", OF_HUNYUAN)}
