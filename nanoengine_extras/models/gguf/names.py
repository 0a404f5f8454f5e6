"""llama.cpp's names of tensors, and those of transformers."""


def of_parts(kind: str, module: str) -> dict[str, str]:
    """Returns the names of the three matrices of experts or of an MLP."""
    return {f"ffn_{part}{kind}": f"{module}.{part}_proj" for part in ("gate", "up", "down")}


# with or without an ending such as ".weight"; a name that ends with a dot is that of a list of
# matrices. A family can have others
NAMES = of_parts("", "mlp") | of_parts("_exps", "mlp.experts") | of_parts(
    "_shexp", "mlp.shared_experts") | {
    "token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    # also those for keys and values made of one small vector
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in (
        "q", "k", "v", "q_a", "q_b", "kv_b", "k_b", "v_b")},
    "attn_output": "self_attn.o_proj", "attn_sinks.weight": "self_attn.sinks",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    # Gemma 3n and 4: embeddings for each layer, and several inputs of a layer
    "per_layer_token_embd": "embed_tokens_per_layer", "proj": "per_layer_projection",
    "per_layer_model_proj": "per_layer_model_projection", "inp_gate": "per_layer_input_gate",
    "per_layer_proj_norm": "per_layer_projection_norm", "post_norm": "post_per_layer_input_norm",
    "layer_output_scale.weight": "layer_scalar", "laurel_post_norm": "laurel.post_laurel_norm",
    "laurel_l": "laurel.linear_left", "laurel_r": "laurel.linear_right",
    "altup_proj": "altup_projections.", "altup_unembd_proj": "altup_unembed_projections.",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_correct_coef": "altup.correction_coefs", "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router", "altup_router_norm": "altup.router_norm"}


def plain_name(name: str, names: dict[str, str]) -> str:
    """Returns the name that transformers gives a tensor; an unknown one stays as it is.

    names: by llama.cpp's, with or without an ending such as ".weight"
    """
    # a name has none to two of these dots
    layer, own, end = f"..{name}".rsplit(".", 2)
    found = names.get(f"{own}.{end}") or f"{names.get(own, own)}.{end}"
    return f"{layer}.{found}"[2:].replace("blk.", f"{names.get('blk', 'layers')}.", 1)


def layer_of(name: str) -> int:
    """Returns the number of a tensor's layer; -1 if it has none."""
    kind, number = f"{name}.".split(".")[:2]
    return int(number) if kind == "blk" else -1
