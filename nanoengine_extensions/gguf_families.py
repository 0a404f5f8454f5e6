"""GGUF files of families that transformers computes, such as Gemma, Phi, Granite and Mixtral.

A file leaves out numbers that llama.cpp has in its code, and stores some tensors in another form.
The numbers here are from llama.cpp (src/models), and the forms from its converter
(conversion/gemma.py, phi.py and others).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np


class Family(NamedTuple):
    """What differs from a Llama.

    kind, model_type: of the model, in transformers.
    names: the names of tensors.
    reads: the entries of the file that are taken into account, besides those of all models, and
        what config.json calls them; "": `own` reads them.
    own: turns a `Header` (quantized/gguf_header.py) into further entries of config.json.
    norms: what the converter has added to the weights of norms.
    is_permuted: whether it has reordered the rows of q and k, as those of a Llama.
    bias: what config.json calls whether q, k and v have biases.
    """

    kind: str
    model_type: str
    names: dict[str, str] = {}
    reads: dict[str, str] = {}
    own: Callable[[Any], dict[str, Any]] = lambda header: {}
    norms: float = 0.0
    is_permuted: bool = False
    bias: str = "attention_bias"

    def config(self, header: Any) -> dict[str, Any]:
        """Returns the entries of config.json that a Llama does not have."""
        found = {"architectures": [f"{self.kind}ForCausalLM"], "model_type": self.model_type,
                 "pad_token_id": header.find("tokenizer.ggml.padding_token_id"),
                 self.bias: "blk.0.attn_q.bias" in header.tensors}
        found |= {given: header.of_model(name) for name, given in self.reads.items() if given}
        found |= self.own(header)
        return found if "rope_parameters" in found else found | {"rope_parameters": header.rope()}


def windows(header: Any, period: int) -> dict[str, Any]:
    """Returns which layers see all keys. If the file does not say it, these are the layers whose
    number, counted from 1, is a multiple of the period."""
    name = "attention.sliding_window_pattern"
    of_layers = header.find(f"{header.architecture}.{name}")
    if not isinstance(of_layers, list):
        period = header.of_model(name, period)
        of_layers = [(index + 1) % period != 0 for index in range(header.of_model("block_count"))]
    return {"sliding_window": header.of_model("attention.sliding_window"), "layer_types": [
        "sliding_attention" if is_local else "full_attention" for is_local in of_layers]}


def rotated_in_part(header: Any) -> dict[str, Any]:
    """Only the first numbers of each head are rotated."""
    head_dim = header.head_dim()
    rotated = header.of_model("rope.dimension_count", head_dim)
    return {"rope_parameters": header.rope() | {"partial_rotary_factor": rotated / head_dim}}


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
        "final_logit_softcapping": header.find("gemma3.final_logit_softcapping"),
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
    return {"rope_parameters": rope, "sliding_window": window,
            "original_max_position_embeddings": original}


def with_experts(header: Any) -> dict[str, Any]:
    """Returns the entries of models with experts."""
    accepted: dict[str, list] = {
        "expert_weights_scale": [1.0, 0.0], "expert_gating_func": [1, 0],
        "expert_shared_count": [0], "attention.clamp_kqv": [0.0], "expert_group_count": [0, 1]}
    for name, values in accepted.items():
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
    """One more expert computes all tokens."""
    shared = header.of_model(
        "expert_shared_feed_forward_length", header.of_model("feed_forward_length"))
    return with_experts(header) | {"shared_expert_intermediate_size": shared}


def gpt_oss(header: Any) -> dict[str, Any]:
    """Every second layer sees all keys. The limits between which YaRN mixes are not rounded."""
    return with_experts(header) | windows(header, period=2) | {
        "rope_parameters": header.rope() | {"truncate": False}}


def olmo2(header: Any) -> dict[str, Any]:
    """OLMo 3 has windows; only the angles of the other layers are scaled."""
    # what YaRN multiplies cos and sin by: transformers works out the same number
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
    header.accept(name, header.find(f"granite.{name}", True), [True])
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

AFTER = {"post_attention_norm": "post_attention_layernorm",
         "post_ffw_norm": "post_feedforward_layernorm"}
OF_GPT_OSS = OF_EXPERTS | AFTER | {
    "ffn_gate_inp": "mlp.router", "attn_sinks": "self_attn.sinks"}
OF_GLM = {"post_attention_norm": "post_self_attn_layernorm",
          "post_ffw_norm": "post_mlp_layernorm", "ffn_up": "mlp.gate_up_proj"}
OF_HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
OF_PHI_2 = {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
            "output_norm": "final_layernorm"}
SCALES = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}
EPS = "attention.layer_norm_epsilon"
WINDOW = {"attention.sliding_window": ""}
CAP = {"final_logit_softcapping": ""}
EXPERTS = {"expert_count": ""}
PART = {"rope.dimension_count": ""}

# by `general.architecture`; "mixtral" is a "llama" with experts
FAMILIES = {
    "gemma": Family("Gemma", "gemma", norms=1.0),
    "gemma2": Family("Gemma2", "gemma2", OF_GEMMA, WINDOW | CAP | {
        "attn_logit_softcapping": ""}, gemma2, norms=1.0),
    "gemma3": Family("Gemma3", "gemma3_text", OF_GEMMA, WINDOW | CAP | {
        "rope.freq_base_swa": ""}, gemma3, norms=1.0),
    "phi2": Family("Phi", "phi", OF_PHI_2, PART | {EPS: "layer_norm_eps"}, rotated_in_part),
    "phi3": Family("Phi3", "phi3", OF_PHI, WINDOW | PART | {
        "rope.scaling.attn_factor": ""}, phi3),
    "smollm3": Family("SmolLM3", "smollm3", is_permuted=True),
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
    "ernie4_5": Family("Ernie4_5", "ernie4_5", bias="use_bias"),
    "seed_oss": Family("SeedOss", "seed_oss", AFTER),
    "hunyuan-dense": Family("HunYuanDenseV1", "hunyuan_v1_dense", OF_HUNYUAN),
    "qwen3moe": Family("Qwen3Moe", "qwen3_moe", OF_EXPERTS, EXPERTS, with_scaled_experts),
    "qwen2moe": Family("Qwen2Moe", "qwen2_moe", OF_EXPERTS, EXPERTS, qwen2moe, bias="qkv_bias"),
    "gpt-oss": Family("GptOss", "gpt_oss", OF_GPT_OSS, EXPERTS | WINDOW, gpt_oss),
    "olmoe": Family("Olmoe", "olmoe", OF_EXPERTS, EXPERTS, with_experts),
    "mixtral": Family("Mixtral", "mixtral", OF_MIXTRAL, EXPERTS, with_scaled_experts,
                      is_permuted=True)}
