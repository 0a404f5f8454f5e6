"""How families of models differ from a Llama: a row for each, by `general.architecture`.

The numbers are from llama.cpp (src/models), and the forms of tensors from its converter
(conversion/gemma.py, phi.py and others).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from nanoengine_extras.models.gguf import dense, experts
from nanoengine_extras.models.gguf.layers import rope
from nanoengine_extras.models.gguf.names import of_parts


class Family(NamedTuple):
    """The differences from a Llama.

    model_type: of the model, in transformers; "": the name of the architecture.
    names: other names of tensors than those of `names.NAMES`.
    own: turns a `Header` into more entries of config.json.
    reads: other entries of the file, a number above 0 each, by their names in config.json.
    period: how many layers have one that sees all keys, if the others have a window.
    is_permuted: whether the converter has reordered the rows of q and k.
    is_partial: whether only the first numbers of each head are rotated, as many as the file says.
    norms: the number that the converter adds to the weights of norms.
    accepts: the accepted values of more entries, first that of a missing one; None: all values,
        since they change nothing or are read elsewhere.
    lists: the entries that can have a number for each layer; `own` reads all of the numbers.
    changes: returns entries for `Header.table`: numbers of the header that are tensors in
        transformers; None: tensors that are left out.
    """

    model_type: str = ""
    names: dict[str, str] = {}
    own: Callable[[Any], dict[str, Any]] = lambda header: {}
    reads: dict[str, str] = {}
    period: int = 0
    is_permuted: bool = False
    is_partial: bool = False
    norms: float = 0.0
    accepts: Mapping[str, list | None] = {}
    lists: tuple[str, ...] = ()
    changes: Callable[[Any], dict[str, list | None]] = lambda header: {}


OF_GEMMA = {"ffn_norm": "pre_feedforward_layernorm"}
OF_GEMMA_4 = OF_GEMMA | of_parts("_exps", "experts") | {
    "ffn_gate_up_exps": "experts.gate_up_proj", "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2"}
OF_APERTUS = {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
OF_GPT_2 = {
    "blk": "h", "token_embd": "wte", "position_embd": "wpe", "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj", "output_norm": "ln_f"}
OF_PHI_2 = {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
            "output_norm": "final_layernorm"}
OF_PHI = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
OF_GLM = {"post_attention_norm": "post_self_attn_layernorm",
          "post_ffw_norm": "post_mlp_layernorm", "ffn_up": "mlp.gate_up_proj"}
OF_HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
OF_HUNYUAN_MOE = OF_HUNYUAN | of_parts("_shexp", "mlp.shared_mlp") | {
    "ffn_gate_inp": "mlp.gate.wg"}
OF_GRANITE = of_parts("_exps", "block_sparse_moe.experts") | {
    "ffn_gate_inp": "block_sparse_moe.router", "ffn_gate_shexp": "shared_mlp.input_linear.gate",
    "ffn_up_shexp": "shared_mlp.input_linear.up", "ffn_down_shexp": "shared_mlp.output_linear"}
SCALES = {
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"}
LOGITS = {"logit_scale": "logit_scale"}
SHARED = {"n_shared_experts": "expert_shared_count"}
WINDOW = {"sliding_window": "attention.sliding_window"}
# for images: a token of text has the same position in all sections
IMAGES = {"rope.dimension_sections": None}
# further layers guess tokens, and are left out
GUESSES = {"nextn_predict_layers": None}
# whether positions count
COUNTED = {"rope.scaling.finetuned": [True]}
# the weights of experts are sigmoids of logits
SIGMOIDS: dict[str, Any] = {"expert_gating_func": [experts.SIGMOID, 0]}
OTHERS = {
    "llama": Family(is_permuted=True),
    **dict.fromkeys(("qwen2", "qwen3", "ernie4_5", "seed_oss"), Family()),
    **dict.fromkeys(("smollm3", "arcee"), Family(is_permuted=True)),
    "gpt2": Family(names=OF_GPT_2, reads={"n_inner": "feed_forward_length"}),
    "phi2": Family("phi", OF_PHI_2, is_partial=True),
    "phi3": Family("phi3", OF_PHI, dense.phi3, accepts={
        "rope.scaling.type": ["none", "longrope"], "rope.scaling.factor": [1.0]}),
    "apertus": Family(names=OF_APERTUS, changes=dense.of_activations),
    "mistral3": Family("ministral3", own=dense.mistral3, is_permuted=True),
    "granite": Family(reads=SCALES, is_permuted=True, accepts=COUNTED),
    "olmo": Family(own=lambda header: {"clip_qkv": header.entry("attention.clamp_kqv")},
                   is_permuted=True),
    "olmo2": Family(own=dense.olmo2, period=4),
    "exaone": Family("llama"),
    "exaone4": Family(period=4),
    "glm4": Family(names=OF_GLM, is_partial=True),
    "command-r": Family("cohere", reads=LOGITS),
    "cohere2": Family(reads=LOGITS | WINDOW, period=4),
    # all of its models have this window, which files leave out
    "starcoder2": Family(names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
                         own=lambda header: {"sliding_window": 4096}),
    "stablelm": Family(own=dense.stablelm, is_partial=True),
    "nemotron": Family(is_partial=True, norms=1.0),
    "qwen2vl": Family("qwen2", accepts=IMAGES),
    "qwen3vl": Family("qwen3", accepts=IMAGES),
    "hunyuan-dense": Family("hunyuan_v1_dense", OF_HUNYUAN),
    "gemma": Family(norms=1.0),
    "gemma2": Family("gemma2", OF_GEMMA, dense.gemma2, WINDOW, period=2, norms=1.0),
    "gemma3": Family("gemma3_text", OF_GEMMA, dense.gemma3, WINDOW, period=6, norms=1.0),
    "gemma3n": Family("gemma3n_text", OF_GEMMA, dense.gemma3n, WINDOW | {
        "altup_num_inputs": "altup.num_inputs",
        "num_kv_shared_layers": "attention.shared_kv_layers",
        "hidden_size_per_layer_input": "embedding_length_per_layer_input"}, period=5,
        accepts={"altup.active_idx": [0]}, changes=dense.without_keys),
    "gemma4": Family("gemma4_text", OF_GEMMA_4, dense.gemma4, WINDOW, changes=dense.without_keys,
                     lists=("attention.head_count_kv", "feed_forward_length"), accepts={
                         "rope.scaling.type": ["none"], "rope.scaling.factor": [1.0]})}
# "mixtral" is a "llama" with experts
WITH_EXPERTS = {
    "qwen3moe": Family("qwen3_moe"),
    "qwen2moe": Family("qwen2_moe", of_parts("_shexp", "mlp.shared_expert")),
    "qwen3vlmoe": Family("qwen3_moe", accepts=IMAGES),
    "granitemoe": Family("granitemoe", OF_GRANITE, experts.granitemoe, SCALES, is_permuted=True,
                         accepts=COUNTED),
    "ernie4_5-moe": Family("ernie4_5_moe", {
        "exp_probs_b.bias": "mlp.gate.moe_statics.e_score_correction_bias"}, accepts={
        "expert_shared_count": None}),
    "hunyuan-moe": Family("hunyuan_v1_moe", OF_HUNYUAN_MOE, experts.hunyuan, accepts={
        "expert_shared_count": [1]}),
    # the limits between which YaRN mixes are not rounded
    "gpt-oss": Family("gpt_oss", {"ffn_gate_inp": "mlp.router"}, lambda header: {
        "rope_parameters": rope(header) | {"truncate": False}}, WINDOW, period=2),
    "olmoe": Family(),
    "mixtral": Family("mixtral", is_permuted=True),
    "deepseek2": Family("deepseek_v3", own=experts.deepseek2, reads=SHARED, accepts=GUESSES),
    "glm4moe": Family("glm4_moe", own=experts.routed, reads=SHARED, is_partial=True,
                      accepts=SIGMOIDS | GUESSES),
    "dots1": Family(own=experts.routed, reads=SHARED, period=1, accepts=SIGMOIDS | {
        "attention.sliding_window": [0]}),
    "exaone-moe": Family("exaone_moe", own=experts.routed, reads=SHARED | WINDOW, period=4,
                         accepts=SIGMOIDS | GUESSES),
    "minimax-m2": Family("minimax_m2", {"exp_probs_b.bias": "mlp.e_score_correction_bias"},
                         is_partial=True, accepts=SIGMOIDS)}
FAMILIES = OTHERS | WITH_EXPERTS
